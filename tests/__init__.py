import os
import signal

from finetune.system.imports import lighten

# Before torch is imported. Tiny models gain nothing from threads, and threads that meet other load on the machine cost
# seconds per test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a run does at a hangup is tested under `nohup` too, which ignores it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
lighten()
