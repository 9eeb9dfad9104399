"""Strangers on every listening port of a job of two local ranks: it goes on, and no loss differs."""

import contextlib
import ipaddress
import os
import random
import socket
import time
from pathlib import Path

from tests.rig.children import HANG_S, start_ranks
from tests.rig.kill_cases import wait_for_first_write
from tests.rig.materials import LORA, RANKS, RUN, Place
from tests.rig.oracle import STEP, Outcome, events, first_difference

FLOOD_BYTES = int(os.environ["RIG_FLOOD_BYTES"])
FLOOD_S = 2.0
HELD_S = 0.5
JOB = RUN | LORA | RANKS | dict(num_epochs=400, max_steps=80, save_every=0, rank_timeout=8)
LISTENING = "0A"


def say(text: bytes, close: bool = False, times: int = 1):
    """A stranger that sends these bytes to every address, and holds its connections open unless it is to close them."""

    def call(addresses: list) -> None:
        with contextlib.ExitStack() as held:
            for address in addresses * times:
                with contextlib.suppress(OSError):
                    stranger = held.enter_context(socket.create_connection(address, 0.5))
                    stranger.sendall(text)
            time.sleep(0.0 if close else HELD_S)

    return call


def flood(addresses: list) -> None:
    """Many bytes without a newline, for as long as they are taken."""
    for address in addresses:
        end = time.monotonic() + FLOOD_S
        with contextlib.suppress(OSError), socket.create_connection(address, 0.5) as stranger:
            stranger.sendall(b"hello 7\n")
            for _ in range(FLOOD_BYTES // 2**16):
                stranger.sendall(b"x" * 2**16)
                if time.monotonic() > end:
                    break


STRANGERS = {
    "nothing": say(b""),
    "nothing, closed": say(b"", close=True),
    "garbage": say(bytes(range(256)) * 4),
    "garbage without newline": say(b"\xff" * 4096, close=True),
    "hello x": say(b"hello x\n"),
    "hello 1, closed": say(b"hello 1\n", close=True),
    "hello 0": say(b"hello 0\n"),
    "hello 7, end 0": say(b"hello 7\nend 0 \n"),
    "hello 1, end 0": say(b"hello 1\nend 0 \n"),
    "hello 1, failed": say(b'hello 1\nfailed 2 "x"\n'),
    "hello -1, bye": say(b"hello -1\nbye\n"),
    "HTTP": say(b"GET / HTTP/1.0\r\n\r\n"),
    "TLS": say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
    "flood": flood,
    "crowd": say(b"", times=30),
}


def job(place: Place, folder: Path) -> dict:
    return JOB | dict(model_name=place.model(), dataset=place.rows() / "rows.jsonl", output_dir=folder / "run")


def _make_whole(place: Place, folder: Path) -> None:
    ended = [child.end(120) for child in start_ranks(job(place, folder), folder, place.port())]
    assert all(e.code == 0 for e in ended), ended[0].err


def stranger(seed: int, place: Place) -> Outcome:
    """One kind of stranger, at every port at once."""
    rng = random.Random(f"strangers {seed}")
    name = list(STRANGERS)[seed % len(STRANGERS)]
    whole = place.once("whole-job", lambda folder: _make_whole(place, folder))
    folder, outcome = place.empty(), Outcome(tried=0)
    children = start_ranks(job(place, folder), folder, place.port())
    wait_for_first_write(children[0], folder / "run")
    ports = listeners_of([child.pid for child in children])
    rng.shuffle(ports)
    outcome.tried = len(ports)
    STRANGERS[name]([("::1" if ":" in address else "127.0.0.1", port) for address, port in ports])
    for rank, child in enumerate(children):
        outcome.judge(child.end(HANG_S + 15), (0,), f"{name!r} to {len(ports)} ports, rank {rank}")
    if not outcome.failures:
        mine, theirs = (events(f / "run", "step", STEP) for f in (folder, whole))
        if mine != theirs:
            outcome.fail("differing_bits", f"{name!r}: {first_difference(mine, theirs)}")
    return outcome


def listeners(seed: int, place: Place) -> Outcome:
    """Local ranks listen on loopback only."""
    folder, outcome = place.empty(), Outcome()
    children = start_ranks(job(place, folder), folder, place.port())
    wait_for_first_write(children[0], folder / "run")
    found = listeners_of([child.pid for child in children])
    for child in children:
        child.send(9)
        child.end()
    outcome.tried = len(found)
    for address, port in found:
        if not ipaddress.ip_address(address).is_loopback:
            outcome.fail("payload_or_escape", f"listens beyond loopback: {address} port {port}")
    return outcome


def listeners_of(pids: list[int]) -> list[tuple[str, int]]:
    """(address, port) of every socket on which one of these processes listens."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return sorted(set(found))


def _address(text: str) -> str:
    """An address of /proc/net/tcp: words of 4 bytes, each in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
