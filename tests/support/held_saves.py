"""Saves of threads that wait for later steps before they write."""

import os
import threading
import time
from pathlib import Path

from tests.support.runs import count_steps

PATIENCE_S = 30.0


class HeldSaves:
    """Saves of threads, each held back until the step after its own is logged; `steps`: theirs, `most`: at a time."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.steps, self.now, self.most = folder, [], 0, 0
        self.at_last = lambda step: None  # called with each one's step then
        self.real = os.mkdir
        monkeypatch.setattr(os, "mkdir", self.mkdir)

    def mkdir(self, path, *args, **options):
        """A save begins with its folder."""
        in_thread = threading.current_thread() is not threading.main_thread()
        step = int(str(path).rpartition("-")[2]) if in_thread and ".tmp-" in str(path) else None
        if step and step not in self.steps:  # the first one makes the folder above it too
            self.steps.append(step)
            self.now += 1
            self.most = max(self.most, self.now)
            end = time.monotonic() + PATIENCE_S
            while count_steps(self.folder) <= step and time.monotonic() < end:
                time.sleep(0.001)
            self.at_last(step)
            self.now -= 1
        return self.real(path, *args, **options)
