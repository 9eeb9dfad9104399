"""The process that ends another one from outside."""

import os
import signal
import subprocess
import sys
import time

from tests.support.commands import ROOT

HOLDS_THE_LOCK = """
import re, sys
from finetune.system.outside import ended_after
with ended_after(1.0, "error: took too long"):
    print("begins", flush=True)
    re.match(r"(a|aa)+$", "a" * 60 + "b")
"""


def started(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_code_that_lets_no_other_thread_run_is_ended_in_a_line():
    process = started(HOLDS_THE_LOCK)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGKILL, "error: took too long\n")


def test_a_process_that_is_stopped_meanwhile_is_not_ended():
    process = started(HOLDS_THE_LOCK.replace('re.match(r"(a|aa)+$", "a" * 60 + "b")', "import time; time.sleep(0.5)"))
    assert process.stdout.readline() == "begins\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_nothing_is_left_of_a_context_that_ended():
    code = "import os; from finetune.system.outside import ended_after\nwith ended_after(60.0, 'x'): pass\n"
    process = started(code + "try: print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError: print('none')")
    assert process.communicate(timeout=30) == ("none\n", "")
