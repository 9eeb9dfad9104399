"""The watchdog: a thread per rank that notices a rank that died or fell silent, and ends this one."""

import contextlib
import faulthandler
import json
import os
import selectors
import socket
import threading
import time
from pathlib import Path

from finetune.distributed.env import RankEnv
from finetune.distributed.launcher import GRACE_S, write_failure
from finetune.errors import RankLostError

BEAT_S = 0.5


# ---- watchdog


class Watchdog(threading.Thread):
    """Watchdog thread of each rank: exchanges a heartbeat with rank 0 and ends this process when a rank is lost.

    A closed connection means a dead rank; no heartbeat for `timeout_s` means a hung process or a lost host. This rank
    then dumps the stacks of its threads into `stacks` and exits with code 69, even from inside a blocked collective.
    `log_error(text)` logs the line that names the lost rank, on one rank only; `on_exit(code)` runs before each exit.
    `is_peer_failure(error)`: True for the exception of a collective that failed because its peer is gone.
    """

    def __init__(
        self, env: RankEnv, timeout_s: float, stacks: Path, log_error, is_peer_failure, listener=None, address=None
    ):
        super().__init__(daemon=True, name="watch")
        self.is_peer_failure = is_peer_failure
        self.env, self.timeout_s, self.stacks, self.log_error = env, timeout_s, stacks, log_error
        self.listener, self.closing = listener, threading.Event()
        self.lock, self.on_exit = threading.Lock(), lambda code: None
        self.peers, self.heard, self.buffers, self.done = {}, {}, {}, set()
        self.selector = selectors.DefaultSelector()
        if listener is not None:
            self.selector.register(listener, selectors.EVENT_READ)
        else:
            peer = socket.create_connection(address, timeout=timeout_s)
            peer.sendall(f"hello {env.rank}\n".encode())
            self._add(0, peer)

    @staticmethod
    def listen(host: str = "") -> socket.socket:
        """Opens the listening socket of rank 0 on a free port."""
        listener = socket.create_server((host, 0))
        listener.setblocking(False)
        return listener

    def _add(self, rank: int, peer) -> None:
        peer.settimeout(5.0)
        self.peers[rank], self.heard[rank], self.buffers[rank] = peer, time.monotonic(), b""
        self.selector.register(peer, selectors.EVENT_READ)

    def run(self):
        last, parent = 0.0, os.getppid()
        while not self.closing.is_set():
            if time.monotonic() - last >= BEAT_S:
                last = time.monotonic()
                for rank in list(self.peers):
                    self._tell(rank, "beat")
            for key, _ in self.selector.select(BEAT_S / 2):
                self._read(key.fileobj)
            now = time.monotonic()
            for rank, when in list(self.heard.items()):
                if now - when > self.timeout_s and rank not in self.done:
                    self._lost(
                        f"rank {rank} of {self.env.size} sent no heartbeat for {now - when:.0f} s "
                        f"(--rank_timeout {self.timeout_s:g}); the "
                        f"stacks of the others are in {self.stacks}. Rerun with --resume auto."
                    )
            if self.env.folder is not None and os.getppid() != parent:
                os._exit(RankLostError.exit_code)  # the launcher process is gone: nobody waits for this rank

    def _read(self, connection) -> None:
        if connection is self.listener:
            peer, _ = connection.accept()
            peer.settimeout(5.0)
            line = b""
            while not line.endswith(b"\n"):
                line += peer.recv(1) or b"\n"
            if line.startswith(b"hello "):
                self._add(int(line.split()[1]), peer)
            return
        rank = next(r for r, p in self.peers.items() if p is connection)
        try:
            new = connection.recv(65536)
        except OSError:
            new = b""
        if not new:
            self.selector.unregister(connection)
            if rank not in self.done and not self.closing.is_set():
                self._lost(f"rank {rank} of {self.env.size} died; the others were stopped. Rerun with --resume auto.")
            return
        self.heard[rank] = time.monotonic()
        *lines, self.buffers[rank] = (self.buffers[rank] + new).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "bye":
                self.done.add(rank)
            elif word == "end":  # a rank failed or was lost, and it is already reported
                code, _, text = rest.partition(" ")
                self._leave(int(code), text, logs=False)
            elif word == "failed":
                self._failed(rank, rest)

    def _failed(self, rank: int, rest: str) -> None:
        """Handles another rank's failure. If all ranks failed alike, rank 0 reports its own error within moments."""
        code, _, text = rest.partition(" ")
        self.done.add(rank)
        if not self.closing.wait(3.0):
            self._leave(int(code), f"rank {rank}: {json.loads(text)}", logs=True)

    def _lost(self, text: str) -> None:
        self._leave(
            RankLostError.exit_code, text, logs=self.env.rank == 0 or text.startswith("rank 0 ") and self.env.rank == 1
        )

    def _leave(self, code: int, text: str, logs: bool) -> None:
        """Exits immediately: the main thread may be blocked in a collective with a rank that will never answer."""
        with self.lock:
            if self.closing.is_set():
                return
            if code == RankLostError.exit_code:
                self._dump_stacks()
            if self.env.folder is not None:
                write_failure(self.env, code, text)
            elif logs:
                self.log_error(text)
            for rank in self.peers:
                self._tell(rank, f"end {code} {text}")
            try:
                self.on_exit(code)
            finally:
                os._exit(code)

    def _dump_stacks(self) -> None:
        with contextlib.suppress(OSError):
            self.stacks.mkdir(parents=True, exist_ok=True)
            with open(self.stacks / f"rank-{self.env.rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def _tell(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):
            self.peers[rank].sendall(f"{line}\n".encode())

    # ---- called by the main thread

    def caused_by_peer(self, error: BaseException) -> bool:
        """True if a collective failed because a peer is gone.

        Waits first: the watchdog ends this process within moments, naming the lost rank, unless all ranks are alive.
        """
        gone = self.is_peer_failure(error)
        self.closing.wait(GRACE_S / 2 if gone else 0)
        return gone

    def announce_failure(self, code: int, text: str) -> None:
        """Announces a failure of this rank, so that the other ranks exit too. Call it before exiting."""
        with self.lock:
            self.closing.set()
            word = f"end {code} {text}" if self.env.rank == 0 else f"failed {code} {json.dumps(text)}"
            for rank in self.peers:
                self._tell(rank, word)

    def close(self) -> None:
        """Says goodbye to the peers. Call it when all ranks have finished."""
        with self.lock:
            self.closing.set()
            for rank in self.peers:
                self._tell(rank, "bye")
