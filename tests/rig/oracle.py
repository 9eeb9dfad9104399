"""What a case found, and whether a run that was disturbed is the uninterrupted one, bit by bit."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tests.rig.children import Ended
from tests.rig.materials import Place, tensor_digests

CLASSES = ("traceback", "hang", "wrong_code", "differing_bits", "payload_or_escape", "failed_restart", "rig")
STEP = ("step", "loss", "lr", "grad_norm", "num_tokens", "num_targets")
EVAL = ("step", "loss", "num_targets")


class Caught:
    """Ends an exception of any kind inside its context, as `error`: to be judged, since any of them is a finding."""

    error: BaseException | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, where):
        self.error = error
        return not isinstance(error, KeyboardInterrupt)


@dataclass
class Outcome:
    """What one case tried, and its failures as (class, first line of the error).
    `kept`: the damaged bytes or other recipe, for the corpus.
    """

    tried: int = 1
    failures: list = field(default_factory=list)
    kept: dict | None = None

    def fail(self, kind: str, text: str) -> None:
        assert kind in CLASSES, kind
        self.failures.append([kind, " ".join(str(text).split())[:400]])

    def judge(self, ended: Ended, allowed, what: str) -> bool:
        """Records a hang, a traceback or an exit code that is not allowed; True if there was none."""
        if ended.hung:
            self.fail("hang", f"{what}: no end after {ended.seconds:.0f} s")
        elif ended.traceback:
            self.fail("traceback", f"{what}: exit {ended.code}: {ended.first_line}")
        elif ended.code not in allowed:
            self.fail("wrong_code", f"{what}: exit {ended.code}: {ended.first_line}")
        else:
            return True
        return False


def differences(folder: Path, whole: Path) -> list[str]:
    """How a run's log and tensors differ from the uninterrupted run's; empty if they are the same bits."""
    found = []
    theirs, digests = whole / "run", json.loads((whole / "digests.json").read_text())
    for kind, keys in (("step", STEP), ("eval", EVAL)):
        mine, expected = (events(f, kind, keys) for f in (folder, theirs))
        if mine != expected:
            found.append(f"{kind} events: {first_difference(mine, expected)}")
    steps = sorted((folder / "checkpoints").glob("step-*"))
    last = max((name for name in digests if name.startswith("step-")), key=lambda name: int(name[5:]))
    if last not in [step.name for step in steps]:
        found.append(f"no checkpoint of the last step, but {[s.name for s in steps]}")
    for step in steps:
        if tensor_digests(step) != digests.get(step.name):
            found.append(f"{step.name}: {different_files(tensor_digests(step), digests.get(step.name, {}))}")
    if tensor_digests(folder) != digests["published"]:
        found.append(f"published: {different_files(tensor_digests(folder), digests['published'])}")
    return found


def events(folder: Path, kind: str, keys) -> list[dict]:
    """Events of a kind, with these keys. A torn line counts as an event of its own."""
    file, found = folder / "metrics.jsonl", []
    for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            found.append({"torn": line[:40].decode(errors="replace")})
            continue
        if event["event"] == kind:
            found.append({key: event.get(key) for key in keys})
    if file.exists() and not file.read_bytes().endswith(b"\n"):
        found.append({"torn": "last line"})
    return found


def first_difference(mine: list, expected: list) -> str:
    for one, other in zip(mine, expected, strict=False):
        if one != other:
            return f"{one} is not {other}"
    return f"{len(mine)} are not {len(expected)}"


def different_files(mine: dict, expected: dict) -> str:
    return ", ".join(sorted(n for n in mine.keys() | expected.keys() if mine.get(n) != expected.get(n)))


def check_finished(outcome: Outcome, place: Place, variant: str, run: Path) -> None:
    """The finished run equals the uninterrupted one, and nothing was written beside it or left half-made in it."""
    for text in differences(run, place.whole(variant)):
        outcome.fail("differing_bits", text)
    for pattern in (".tmp-*", ".trash-*", ".writing-*"):
        for left in run.rglob(pattern):
            outcome.fail("failed_restart", f"left behind: {left.relative_to(run)}")
    strangers = [p.name for p in run.parent.iterdir() if p != run and p.suffix not in (".out", ".err", ".log")]
    if strangers:
        outcome.fail("payload_or_escape", f"written beside output_dir: {strangers}")
