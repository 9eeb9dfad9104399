import os
import sys

from finetune.system.imports import lighten

# Before torch is imported. Tiny models gain nothing from threads, and threads that meet other load on the machine cost
# seconds per test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs that tests start find the project compiled, which costs each of them a second otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
lighten()
