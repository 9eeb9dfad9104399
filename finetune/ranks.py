"""The ranks of one job: who started them, starting them here, and noticing when one of them dies or falls silent.

Under a launcher (torchrun, accelerate, SLURM, RANK and WORLD_SIZE set by hand) a process is a rank already and starts nothing.
Otherwise the first process starts the ranks, hands each the settled plan in a folder of theirs, and waits. No framework here.
"""

import contextlib
import faulthandler
import json
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from finetune import errors
from finetune.errors import PlanError, RankLost

FOLDER = (
    "FINETUNE_RANKS_FOLDER"  # set for ranks that we started: plan.json, port, what each has to say at its end
)
GRACE_S = 10.0  # ranks end by themselves within this after one of them has; then they are ended
BEAT_S = 0.5
KINDS = {kind.exit_code: kind for kind in errors.EXPECTED}


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the job. `launcher` None: there is one rank, this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"
    port: int = 0
    launcher: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of ranks that the first process started; None under a launcher."""
        return Path(os.environ[FOLDER]) if self.launcher == "ours" else None


def world_of(environment, host: str = "localhost", port: int = 12355) -> World | None:
    """This process's place as a launcher's environment says; None where there is no launcher. Raises PlanError.

    `host`, `port`: where rank 0 listens, for environments without MASTER_ADDR and MASTER_PORT.
    """
    e = environment
    if "RANK" in e or int(e.get("WORLD_SIZE") or 1) > 1:
        world = _of_variables(e, host, port)
    elif int(e.get("SLURM_STEP_NUM_TASKS") or e.get("SLURM_NTASKS") or 1) > 1 and "SLURM_PROCID" in e:
        world = _of_slurm(e, host, port)
    else:
        return None
    if not 0 <= world.rank < world.size:
        raise PlanError(f"RANK={world.rank}: WORLD_SIZE is {world.size}. Number the ranks from 0.")
    return world


def _of_variables(e, host, port) -> World:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in e:
            raise PlanError(
                f"{other}={e[other]}: {name} is not set. Set both, or use torchrun or --world_size."
            )
    rank, size = _number(e, "RANK"), _number(e, "WORLD_SIZE")
    local_size = _number(e, "LOCAL_WORLD_SIZE", size)
    launcher = "ours" if FOLDER in e else "torchrun" if "TORCHELASTIC_RUN_ID" in e else "RANK and WORLD_SIZE"
    return World(
        rank, size, _number(e, "LOCAL_RANK", rank % local_size), local_size, e.get("MASTER_ADDR", host),
        _number(e, "MASTER_PORT", port), launcher,
    )  # fmt: skip


def _of_slurm(e, host, port) -> World:
    rank = _number(e, "SLURM_PROCID")
    size = _number(e, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in e else "SLURM_NTASKS")
    tasks = e.get("SLURM_STEP_TASKS_PER_NODE") or e.get("SLURM_TASKS_PER_NODE") or str(size)
    local_size = int(re.match(r"\d+", tasks)[0])
    nodes = e.get("SLURM_STEP_NODELIST") or e.get("SLURM_JOB_NODELIST") or host
    first = re.sub(
        r"\[(\d+)[^\]]*\]", r"\1", nodes.split(",")[0] if "[" not in nodes else nodes.split("]")[0] + "]"
    )
    first = "localhost" if local_size == size else first
    return World(
        rank, size, _number(e, "SLURM_LOCALID", rank % local_size), local_size, e.get("MASTER_ADDR", first),
        _number(e, "MASTER_PORT", port), "srun",
    )  # fmt: skip


def _number(e, name, default=None) -> int:
    try:
        return int(e[name]) if name in e else default
    except ValueError:
        raise PlanError(f"{name}={e[name]}: is no number.") from None


# ---- starting ranks


def run_ranks(program: Path, number: int, wire: str, listening) -> dict:
    """Starts `number` ranks of `program` here with the plan `wire` and waits; what rank 0 left as its result.

    Raises what a rank failed with; RankLost, naming it, where one was killed. Afterwards no rank is left. `listening`: a
    context in which signals call its function (launch.Stop's).
    """
    with tempfile.TemporaryDirectory(prefix="finetune-ranks-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(wire)
        children, codes = [], []
        try:
            with listening(lambda number: [_send(child, number) for child in children]):
                for rank in range(number):
                    children.append(_start(program, folder, rank, number))
                codes = _wait(children)
        finally:
            for child in children:
                _send(child, signal.SIGKILL, group=True)
                child.wait()
        failure = _failure(folder, codes)
        if failure:
            raise failure
        return json.loads((folder / "result.json").read_text())


def _start(program: Path, folder: Path, rank: int, number: int):
    environment = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", FOLDER: str(folder),
    }  # fmt: skip
    warnings = [f"-W{option}" for option in sys.warnoptions]
    # A session of its own: Ctrl-C reaches the first process alone, which passes it on once.
    return subprocess.Popen(
        [sys.executable, *warnings, str(program)], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )  # fmt: skip


def _wait(children) -> list:
    """The codes that all ended with; None for those that had not ended GRACE_S after the first that failed."""
    failed_at = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.poll() for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(0.02)
    return [child.poll() for child in children]


def _send(child, number: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(child.pid, number)
        elif child.poll() is None:
            child.send_signal(number)


def _failure(folder: Path, codes: list):
    """The exception that tells how the ranks failed, None where they did not. What all others fail of comes first."""
    told = [json.loads(file.read_text()) for file in folder.glob("failed-*.json")]
    told.sort(key=lambda t: (t["code"] == RankLost.exit_code, t["time"]))
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if told and told[0]["code"] != RankLost.exit_code:
        return KINDS[told[0]["code"]](told[0]["text"])
    broken = [rank for rank, code in enumerate(codes) if code is not None and code > 0 and code not in KINDS]
    if broken and not (folder / "result.json").exists():
        rank = broken[0]
        return RuntimeError(
            f"rank {rank} of {len(codes)} ended with code {codes[rank]}; what it wrote is above"
        )
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        return RankLost(
            f"rank {killed[0]} of {len(codes)} was killed by {name}; the others were ended. Start it again."
        )
    if told:
        return RankLost(told[0]["text"])
    assert (folder / "result.json").exists(), codes
    return None


def tell_failure(world: World, code: int, text: str) -> None:
    """Leaves a failure where the first process finds it."""
    content = {"rank": world.rank, "code": code, "text": text, "time": time.time()}
    _write(world.folder / f"failed-{world.rank}.json", json.dumps(content))


def tell_result(world: World, result: dict) -> None:
    _write(world.folder / "result.json", json.dumps(result))


def tell_port(world: World, port: int) -> None:
    _write(world.folder / "port", str(port))


def wait_for_port(world: World, timeout_s: float = 300.0) -> World:
    """The world with the port that rank 0 found free."""
    file, end = world.folder / "port", time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > end:
            raise RankLost(
                f"rank 0 of {world.size} did not open a port within {timeout_s:.0f} s. Start it again."
            )
        time.sleep(0.02)
    return replace(world, port=int(file.read_text()))


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.rename(path)


# ---- the network between hosts


def interface_between(world: World, store, timeout_s: float) -> str | None:
    """The network interface through which this rank and those of other hosts reach each other; None where none is found.

    `store`: has set, wait and get, as torch's. Collective. A host's own name may stand for an address that only itself can reach
    (Debian's 127.0.1.1), so the first host looks towards another rank.
    """
    mine = _address_towards(os.environ.get("MASTER_ADDR", world.host))
    store.set(f"address-{world.rank}", mine)
    if mine.startswith("127."):
        keys = [f"address-{rank}" for rank in range(world.size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        others = (store.get(key).decode() for key in keys)
        far = next((address for address in others if not address.startswith("127.")), None)
        mine = _address_towards(far) if far else mine
    return _interface_with(mine)


def _address_towards(host: str) -> str:
    """This host's address on the way to another, IPv4. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # no such name or no way there in IPv4
            return "127.0.0.1"
        return probe.getsockname()[0]


def _interface_with(address: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                found = fcntl.ioctl(asked, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


# ---- noticing that one is gone


class Watch(threading.Thread):
    """A thread of each rank that tells rank 0 twice a second that it lives, and hears of those that do not.

    A closed connection is a dead rank, `timeout_s` without a word a silent one: the process may be stopped or its host gone.
    Then this rank writes the stacks of its threads into `stacks` and leaves with code 69, whatever it was waiting in.
    `speak(text)` is called in one rank only, with the line that names the rank; `last_words(code)` before each ends.
    `peer_is_gone(error)`: whether an exception is a collective's that broke.
    """

    def __init__(
        self, world: World, timeout_s: float, stacks: Path, speak, peer_is_gone, listener=None, address=None
    ):
        super().__init__(daemon=True, name="watch")
        self.peer_is_gone = peer_is_gone
        self.world, self.timeout_s, self.stacks, self.speak = world, timeout_s, stacks, speak
        self.listener, self.closing = listener, threading.Event()
        self.lock, self.last_words = threading.Lock(), lambda code: None
        self.peers, self.heard, self.buffers, self.done = {}, {}, {}, set()
        self.selector = selectors.DefaultSelector()
        if listener is not None:
            self.selector.register(listener, selectors.EVENT_READ)
        else:
            peer = socket.create_connection(address, timeout=timeout_s)
            peer.sendall(f"hello {world.rank}\n".encode())
            self._add(0, peer)

    @staticmethod
    def listen(host: str = "") -> socket.socket:
        """Rank 0's end: a free port, on which the others call."""
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
                    self._lost(f"rank {rank} of {self.world.size} is silent since {now - when:.0f} s (--rank_timeout {self.timeout_s:g}); the "
                               f"stacks of the others are in {self.stacks}. Start it again.")  # fmt: skip
            if self.world.folder is not None and os.getppid() != parent:
                os._exit(RankLost.exit_code)  # the first process is gone: nobody waits for us

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
                self._lost(f"rank {rank} of {self.world.size} died; the others were ended. Start it again.")
            return
        self.heard[rank] = time.monotonic()
        *lines, self.buffers[rank] = (self.buffers[rank] + new).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "bye":
                self.done.add(rank)
            elif word == "end":  # one failed or was lost, and said so: it is told already
                code, _, text = rest.partition(" ")
                self._leave(int(code), text, speaks=False)
            elif word == "failed":
                self._failed(rank, rest)

    def _failed(self, rank: int, rest: str) -> None:
        """Another rank says what it failed with. Where all failed alike, rank 0's own line comes within a moment."""
        code, _, text = rest.partition(" ")
        self.done.add(rank)
        if not self.closing.wait(3.0):
            self._leave(int(code), f"rank {rank}: {json.loads(text)}", speaks=True)

    def _lost(self, text: str) -> None:
        self._leave(
            RankLost.exit_code,
            text,
            speaks=self.world.rank == 0 or text.startswith("rank 0 ") and self.world.rank == 1,
        )

    def _leave(self, code: int, text: str, speaks: bool) -> None:
        """Ends this process at once: the main thread may be waiting for a rank that will never answer."""
        with self.lock:
            if self.closing.is_set():
                return
            if code == RankLost.exit_code:
                self._dump_stacks()
            if self.world.folder is not None:
                tell_failure(self.world, code, text)
            elif speaks:
                self.speak(text)
            for rank in self.peers:
                self._tell(rank, f"end {code} {text}")
            try:
                self.last_words(code)
            finally:
                os._exit(code)

    def _dump_stacks(self) -> None:
        with contextlib.suppress(OSError):
            self.stacks.mkdir(parents=True, exist_ok=True)
            with open(self.stacks / f"rank-{self.world.rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def _tell(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):
            self.peers[rank].sendall(f"{line}\n".encode())

    # ---- for the main thread

    def explains(self, error: BaseException) -> bool:
        """Whether a collective broke because of another rank. Waits then: the watch ends this process within a moment, with the
        line that names the rank, unless it finds all of them well.
        """
        gone = self.peer_is_gone(error)
        self.closing.wait(GRACE_S / 2 if gone else 0)
        return gone

    def fail(self, code: int, text: str) -> None:
        """Call it before leaving with a failure of this rank, so that the others leave too."""
        with self.lock:
            self.closing.set()
            word = f"end {code} {text}" if self.world.rank == 0 else f"failed {code} {json.dumps(text)}"
            for rank in self.peers:
                self._tell(rank, word)

    def close(self) -> None:
        """Call it when all ranks are through."""
        with self.lock:
            self.closing.set()
            for rank in self.peers:
                self._tell(rank, "bye")
