"""The watchdog: a thread per rank that notices a rank that died or fell silent, and ends this one.

Rank 0 listens. Anybody who reaches its port may connect, so nothing is believed before a peer has proved the token
that it read from the job's store, buffers are bounded, and no call waits for a stranger.
"""

import contextlib
import faulthandler
import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.distributed import collectives
from finetune.distributed.env import RankEnv
from finetune.distributed.launcher import ERRORS_BY_CODE, GRACE_S, write_failure
from finetune.errors import RankLostError
from finetune.system.files import open_file
from finetune.system.owned_files import read_list
from finetune.system.threads import in_background

BEAT_S = 0.5
PAUSE_S = 2.0  # a wait that took so much longer than it may is this process's own pause
HELLO_S = 5.0  # a stranger that has not proved the token by then is disconnected
MAX_HELLO_BYTES = 256
MAX_LINE_BYTES = 16384
MAX_TEXT_CHARS = 2000
MAX_STRANGERS = 64  # connections without a proved token, beside one per rank
WELCOME = b"welcome\n"


@dataclass(eq=False)
class Connection:
    """A connection to this rank. `rank` is None until it has proved the token; `buffer`: its incomplete line."""

    socket: socket.socket
    rank: int | None = None
    buffer: bytes = b""
    heard: float = 0.0

    def fileno(self) -> int:
        return self.socket.fileno()


class Watchdog:
    """Watchdog thread of each rank: exchanges a heartbeat with rank 0 and ends this process when a rank is lost.

    A closed connection means a dead rank; no heartbeat for `timeout_s` means a hung process or a lost host. This rank
    then dumps the stacks of its threads into `stacks`, known with the plan, and exits with code 69, even from inside a
    blocked collective.
    `log_error(text)` logs the line that names the lost rank, on one rank only; `on_exit(code)` runs before each exit.
    `is_peer_failure(error)`: True for the exception of a collective that failed because its peer is gone.
    `token`: the job's secret. Rank 0 passes its `listener`, the others the `address` of it; RankLostError if rank 0
    does not answer there within `timeout_s`.
    """

    def __init__(
        self,
        env: RankEnv,
        timeout_s: float,
        stacks: Path | None,
        log_error: Callable[[str], None],
        is_peer_failure: Callable[[BaseException], bool],
        token: str,
        listener: socket.socket | None = None,
        address: tuple[str, int] | None = None,
    ):
        self.is_peer_failure = is_peer_failure
        self.token = token
        self.env = env
        self.timeout_s = timeout_s
        self.stacks = stacks
        self.log_error = log_error
        self.listener = listener
        self.closing = threading.Event()
        self.doing: str | None = None  # the collective that failed; else the main thread is in it
        self.callers: tuple[str, float] | None = (
            None  # the caller's function that the main thread is in, and since when
        )
        self.lock = threading.Lock()
        self.on_exit = lambda code: None
        self.peers: dict[int, Connection] = {}
        self.strangers: list[Connection] = []
        self.done: set[int] = set()
        self.excused_s = dict.fromkeys(range(env.size), 0.0)  # of each rank's silence, since it was last heard
        self.selector = selectors.DefaultSelector()
        if listener is not None:
            self.selector.register(listener, selectors.EVENT_READ)
            self.awaited = dict.fromkeys(range(1, env.size), time.monotonic())  # heard from, or waited for since
        else:
            assert address is not None, "a rank other than 0 is given the address of rank 0"
            peer = self._join(address)
            self.awaited = {0: time.monotonic()}
            self._add(0, Connection(peer))

    @staticmethod
    def listen(host: str) -> socket.socket:
        """Opens the listening socket of rank 0 on a free port of the interface with the address `host`."""
        listener = socket.create_server((host, 0), backlog=MAX_STRANGERS)
        listener.setblocking(False)
        return listener

    def _join(self, address: tuple) -> socket.socket:
        """A connection to rank 0 that it has accepted as this rank's."""
        end = time.monotonic() + self.timeout_s
        while True:
            with contextlib.suppress(OSError):
                peer = socket.create_connection(address, timeout=max(1.0, min(HELLO_S, self.timeout_s)))
                peer.sendall(f"hello {self.env.rank} {self.token}\n".encode())
                answer = b""
                while len(answer) < len(WELCOME) and (byte := peer.recv(1)):
                    answer += byte
                if answer == WELCOME:
                    return peer
                peer.close()
            if time.monotonic() > end:
                raise RankLostError(
                    f"rank 0 of {self.env.size} does not answer at {address[0]}:{address[1]}. Rerun with --resume auto."
                )
            time.sleep(0.1)

    def _add(self, rank: int, connection: Connection) -> None:
        connection.socket.settimeout(5.0)
        connection.rank = rank
        connection.buffer = b""
        self.peers[rank] = connection
        self._heard(rank)
        if connection.fileno() not in self.selector.get_map():
            self.selector.register(connection, selectors.EVENT_READ)

    def _heard(self, rank: int) -> None:
        self.awaited[rank] = time.monotonic()
        self.excused_s[rank] = 0.0

    def start(self) -> None:
        in_background(self._run, wait_at_exit=False)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            if not self.closing.is_set():  # without this thread nobody would notice a lost rank
                fault = sys.exc_info()[1]
                self._leave(
                    RankLostError.exit_code,
                    f"the watchdog of rank {self.env.rank} of {self.env.size} failed ({type(fault).__name__}: "
                    f"{fault}). Rerun with --resume auto.",
                    logs=True,
                )

    def _watch(self) -> None:
        last = 0.0
        parent = os.getppid()
        while not self.closing.is_set():
            if time.monotonic() - last >= BEAT_S:
                last = time.monotonic()
                for rank in list(self.peers):
                    self._tell(rank, "beat")
            for key, _ in self._ready():
                if not isinstance(key.fileobj, Connection):  # the listener
                    self._accept()
                elif key.fileobj.rank is None:
                    self._read_hello(key.fileobj)
                else:
                    self._read(key.fileobj, key.fileobj.rank)
            now = time.monotonic()
            for connection in [c for c in self.strangers if now - c.heard > HELLO_S]:
                self._drop(connection)
            for rank, when in list(self.awaited.items()):
                if now - when > self.timeout_s and rank not in self.done:
                    self._lost(
                        f"rank {rank} of {self.env.size} sent no heartbeat for {now - when:.0f} s "
                        f"(--rank_timeout {self.timeout_s:g})"
                        f"{f'; the stacks of the others are in {self.stacks}' if self._stack_file() else ''}. "
                        "Rerun with --resume auto."
                    )
            if self.env.folder is not None and os.getppid() != parent:
                os._exit(RankLostError.exit_code)  # the launcher process is gone: nobody waits for this rank

    def _ready(self) -> list:
        """Connections to read from. A pause of this process (SIGSTOP, a suspended machine) is not counted as silence of
        the others, which may have been stopped with it. Until they are heard the first pause is excused at any length,
        and all together up to `timeout_s`: a process that is starved again and again would excuse a lost rank for good.
        """
        began = time.monotonic()
        found = self.selector.select(BEAT_S / 2)
        paused_s = time.monotonic() - began - BEAT_S / 2
        if paused_s > PAUSE_S:
            for rank in self.awaited:
                more_s = paused_s
                if self.excused_s[rank]:
                    more_s = min(paused_s, max(0.0, self.timeout_s - self.excused_s[rank]))
                self.excused_s[rank] += more_s
                self.awaited[rank] += more_s
        return found

    # ---- connections to rank 0

    def _accept(self) -> None:
        """Takes one waiting connection; beyond MAX_STRANGERS, at the cost of the one that has waited longest."""
        try:
            assert self.listener is not None, "only rank 0 listens"
            peer, _ = self.listener.accept()
        except BlockingIOError:
            return  # it went away again
        except OSError:  # no descriptor left: those of strangers time out
            self.closing.wait(0.05)
            return
        peer.setblocking(False)
        if len(self.strangers) >= MAX_STRANGERS + self.env.size:
            self._drop(self.strangers[0])
        connection = Connection(peer, heard=time.monotonic())
        self.strangers.append(connection)
        self.selector.register(connection, selectors.EVENT_READ)

    def _read_hello(self, connection: Connection) -> None:
        try:
            new = connection.socket.recv(MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            new = b""
        connection.buffer += new
        line, newline, _ = connection.buffer.partition(b"\n")
        if newline:
            rank = self._proved_rank(line)
            if rank is not None:
                self.strangers.remove(connection)
                self._add(rank, connection)
                with contextlib.suppress(OSError):
                    connection.socket.sendall(WELCOME)
                return
        if newline or not new or len(connection.buffer) >= MAX_HELLO_BYTES:
            self._drop(connection)

    def _proved_rank(self, line: bytes) -> int | None:
        """The rank of a hello with the job's token; None for any other line, and for a rank that is connected."""
        word, _, rest = line.partition(b" ")
        rank, _, token = rest.partition(b" ")
        if word != b"hello" or not hmac.compare_digest(token, self.token.encode()):
            return None
        number = 0
        if rank.isdigit():
            number = int(rank)
        return number if 0 < number < self.env.size and number not in self.peers else None

    def _drop(self, connection: Connection) -> None:
        self.strangers.remove(connection)
        self.selector.unregister(connection)
        connection.socket.close()

    # ---- what the ranks say

    def _read(self, connection: Connection, rank: int) -> None:
        try:
            new = connection.socket.recv(65536)
        except OSError:
            new = b""
        *lines, connection.buffer = (connection.buffer + new).split(b"\n")
        if not new or len(connection.buffer) > MAX_LINE_BYTES:
            self.selector.unregister(connection)
            if rank not in self.done and not self.closing.is_set():
                self._lost(f"rank {rank} of {self.env.size} died; the others were stopped. Rerun with --resume auto.")
            return
        self._heard(rank)
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "bye":
                self.done.add(rank)
            elif word in ("end", "failed"):
                code, text = json.loads(rest)
                assert code in ERRORS_BY_CODE, (rank, line)
                if word == "end":  # a rank failed or was lost, and it is already reported
                    self._leave(code, text, logs=False)
                else:
                    self._failed(rank, code, text)

    def _failed(self, rank: int, code: int, text: str) -> None:
        """Handles another rank's failure. If all ranks failed alike, rank 0 reports its own error within moments."""
        self.done.add(rank)
        if not self.closing.wait(3.0):
            self._leave(code, f"rank {rank}: {text}", logs=True)

    def _lost(self, text: str) -> None:
        self._leave(
            RankLostError.exit_code, text, logs=self.env.rank == 0 or text.startswith("rank 0 ") and self.env.rank == 1
        )

    def _leave(self, code: int, text: str, logs: bool) -> None:
        """Exits immediately: the main thread may be blocked in a collective with a rank that will never answer."""
        callers = self.callers
        if callers is not None:
            name, since = callers
            text = f"{name} has not returned for {time.monotonic() - since:.0f} s on rank {self.env.rank}; {text}"
        with self.lock:
            if self.closing.is_set():
                return
            try:
                if code == RankLostError.exit_code:
                    self._dump_stacks()
                if self.env.folder is not None:
                    write_failure(self.env, code, text, self.doing or collectives.current())
                elif logs:
                    self.log_error(text)
                for rank in self.peers:
                    self._tell(rank, _message("end", code, text))
                self.on_exit(code)
            finally:
                os._exit(code)

    def _stack_file(self) -> Path | None:
        """File for this rank's stacks; None before the run has claimed its folder, where nobody would own them."""
        if self.stacks is None:
            return None
        file = self.stacks / f"rank-{self.env.rank}.txt"
        listed = read_list(self.stacks.parent)
        return file if listed and str(file.relative_to(self.stacks.parent)) in listed[1] else None

    def _dump_stacks(self) -> None:
        file = self._stack_file()
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            with open_file(file, "w") as opened:
                faulthandler.dump_traceback(opened, all_threads=True)

    def _tell(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):
            self.peers[rank].socket.sendall(f"{line}\n".encode())

    # ---- called by the main thread

    @contextlib.contextmanager
    def in_callers(self, name: str) -> Iterator[None]:
        """A context in which a function of the caller's runs, which the others may be left waiting for."""
        self.callers = (name, time.monotonic())
        try:
            yield
        finally:
            self.callers = None

    def caused_by_peer(self, error: BaseException) -> bool:
        """True if a collective failed because a peer is gone.

        Waits first: the watchdog ends this process within moments, naming the lost rank, unless all ranks are alive.
        """
        gone = self.is_peer_failure(error)
        self.doing = collectives.of_error(error)
        self.closing.wait(GRACE_S / 2 if gone else 0)
        return gone

    def announce_failure(self, code: int, text: str) -> None:
        """Announces a failure of this rank, so that the other ranks exit too. Call it before exiting."""
        with self.lock:
            self.closing.set()
            message = _message("failed" if self.env.rank else "end", code, text)
            for rank in self.peers:
                self._tell(rank, message)

    def close(self) -> None:
        """Says goodbye to the peers. Call it when all ranks have finished."""
        with self.lock:
            self.closing.set()
            for rank in self.peers:
                self._tell(rank, "bye")


def _message(word: str, code: int, text: str) -> str:
    """A failure as one line, shorter than MAX_LINE_BYTES."""
    return f"{word} {json.dumps([code, text[:MAX_TEXT_CHARS]])}"
