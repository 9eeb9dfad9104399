import os

from finetune.system.imports import lighten

# Before torch is imported. Tiny models gain nothing from threads, and threads that meet other load on the machine cost
# seconds per test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
lighten()
