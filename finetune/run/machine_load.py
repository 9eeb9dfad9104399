"""Use of the machine by a run over time, for the `system` events of metrics.jsonl."""

import os
import time

from finetune.backend.machine import process_bytes, system_memory

EVERY_S = 10.0


class MachineLoad:
    """`read()` gives the numbers at most once in EVERY_S, over the time since it gave them last."""

    def __init__(self):
        self.wall = time.monotonic()
        self.computed = time.process_time()
        self.due = 0.0

    def read(self) -> dict | None:
        """cores_busy of this process, load_average of the machine over a minute, bytes that are available, and resident
        bytes where the system says them; None if it gave them a moment ago.
        """
        now = time.monotonic()
        computed = time.process_time()
        if now < self.due or now <= self.wall:
            return None
        found: dict = {"cores_busy": (computed - self.computed) / (now - self.wall), "load_average": os.getloadavg()[0]}
        resident = process_bytes("VmRSS")
        found |= {"available_bytes": system_memory()[1]} | ({"resident_bytes": resident} if resident else {})
        self.wall = now
        self.computed = computed
        self.due = now + EVERY_S
        return found
