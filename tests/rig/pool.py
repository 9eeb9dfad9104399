"""Warm workers, one per core, and the cases handed out to them."""

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

from tests.rig import intercept

ROOT = Path(__file__).parents[2]
WORKERS = 2
BATCH = 100
LOST_S = 1500.0  # longer than any case or batch, hangs included


class Pool:
    """The workers of one rig run. `root`: the folder they share; `environment`: what the options tell the cases."""

    def __init__(self, root: Path, environment: dict[str, str]):
        self.root, self.environment, self.workers = root, environment, {}

    def run(self, kind, seeds: list) -> list[dict]:
        """The answer of every case of a kind, in order of completion."""
        size = BATCH if kind.batched else 1
        size = max(1, min(size, -(-len(seeds) // WORKERS)))
        waiting = [seeds[at : at + size] for at in range(0, len(seeds), size)]
        answers, busy = [], {}
        selector = selectors.DefaultSelector()
        for number in range(min(WORKERS, len(waiting))):
            selector.register(self.workers[number].stdout, selectors.EVENT_READ, number)
            self._ask(number, kind, waiting.pop(0), busy)
        while busy:
            ready = selector.select(LOST_S)
            assert ready, f"no answer from the workers for {LOST_S:.0f} s: {busy}"
            for key, _ in ready:
                number = key.data
                line = key.fileobj.readline()
                if not line:
                    raise RuntimeError(f"worker {number} ended with {self.workers[number].wait()} in {busy[number]}")
                answer = json.loads(line)
                if "done" not in answer:
                    answers.append(answer)
                elif waiting:
                    self._ask(number, kind, waiting.pop(0), busy)
                else:
                    del busy[number]
        return answers

    def _ask(self, number: int, kind, seeds: list, busy: dict) -> None:
        busy[number] = (kind.name, seeds[0])
        self.workers[number].stdin.write(json.dumps({"kind": kind.name, "seeds": seeds}).encode() + b"\n")
        self.workers[number].stdin.flush()

    def start(self) -> None:
        """Starts the workers, and waits until they have imported what a run imports."""
        library = intercept.build(self.root)
        environment = os.environ | self.environment | {"OMP_NUM_THREADS": "1"}
        environment |= {"LD_PRELOAD": str(library)} if library else {}
        for number in range(WORKERS):
            log = open(self.root / f"worker-{number}.log", "wb")  # noqa: SIM115  open as long as the worker
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0)
            argv = [sys.executable, "-W", "ignore", "-m", "tests.rig.worker", str(self.root), str(number)]
            options = dict(cwd=ROOT, env=environment, start_new_session=True)
            self.workers[number] = subprocess.Popen(argv, **options, **pipes)
        for number, worker in self.workers.items():
            ready = worker.stdout.readline()
            assert ready, (self.root / f"worker-{number}.log").read_text()[-3000:]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stdin.close()
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def timed(pool: Pool, kind, seeds: list) -> tuple[list[dict], float]:
    """(answers, seconds they took)."""
    began = time.monotonic()
    return pool.run(kind, seeds), time.monotonic() - began
