"""How a program ends: one line and a code for each expected failure, and for memory that there is not."""

import os
import subprocess
import sys

import pytest

from finetune.system import process
from tests.support.commands import ROOT

FAILURES = {
    "raise MemoryError": "out of memory (no detail)",
    "raise MemoryError('bad allocation')": "out of memory (bad allocation)",
    "raise SystemError('deque returned NULL without setting an exception')": "out of memory (deque returned NULL",
    'raise RuntimeError("can\'t start new thread")': "out of memory (can't start new thread)",
    "raise RuntimeError('could not create a primitive')": "out of memory (could not create a primitive)",
    "raise OSError(12, 'Cannot allocate memory')": "out of memory ([Errno 12] Cannot allocate memory)",
    "raise ImportError('libx.so: failed to map segment from shared object')": "out of memory (libx.so: failed to map",
}


def end_of(statement: str):
    code = f"from finetune.system import process\ndef main():\n    {statement}\nprocess.exit_with(main)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("statement", FAILURES)
def test_a_failure_to_allocate_is_one_line_and_code_71(statement):
    done = end_of(statement)
    assert done.returncode == 71 and done.stderr.startswith(f"error: {FAILURES[statement]}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_kernel_that_got_no_memory_ends_the_run_before_another_rounds_otherwise():
    said = "mkldnn_matmul failed, switching to baddbmm:could not create a primitive"
    warn = (
        "    import warnings\n    with process.prepared():\n        warnings.warn({said!r}, stacklevel=1)\n    return 0"
    )
    lacking = f"{said} descriptor for a matmul primitive"  # the kernel that there is has the bits of every run here
    ends = [end_of(warn.lstrip().format(said=each)) for each in (said, lacking)]
    assert [end.returncode for end in ends] == [71, 0]
    assert ends[0].stderr.startswith("error: out of memory (mkldnn_matmul failed"), ends[0].stderr


@pytest.mark.parametrize(("number", "remedy"), [(28, "Free some space."), (27, "Raise the limit of a file's size")])
def test_a_write_that_has_no_room_is_one_line_that_says_what_to_change(number, remedy):
    done = end_of(f"raise OSError({number}, 'no room', 'out.bin')")
    assert done.returncode == 74 and done.stderr.startswith(f"error: out.bin: no room. {remedy}"), done.stderr


def test_a_bug_keeps_its_traceback_and_code_1():
    lacking = "raise RuntimeError('could not create a primitive descriptor for a matmul primitive')"
    for statement in (lacking, "raise RuntimeError('x')", "raise OSError(2, 'x')", "raise ImportError('x')"):
        done = end_of(statement)
        assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.parametrize(("variables", "mark"), [({"PYTHONIOENCODING": "ascii"}, "[["), ({"LC_ALL": "C"}, "⟦")])
def test_a_line_is_printed_in_any_encoding(variables, mark, monkeypatch):
    code = "from finetune.system.terminal import say; say('⟦x⟧')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=variables)
    assert done.returncode == 0 and done.stdout.decode().startswith(mark), done.stderr


def test_files_are_read_as_utf_8_in_a_locale_that_is_not(tmp_path):
    (tmp_path / "x").write_text("日本語", encoding="utf-8")
    code = "from finetune.system import process; process.prepare_environment(); "
    code += f"assert len(open({str(tmp_path / 'x')!r}).read()) == 3"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (ASCII, "is not UTF-8. Python reads names of files as ascii here: set PYTHONUTF8=1."),
        ({"PYTHONOPTIMIZE": "2"}, "removes docstrings, which transformers reads. Use 1 at most."),
    ],
)
def test_what_python_was_told_is_named_where_it_is_the_reason(tmp_path, variables, line):
    (tmp_path / "naïve.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    argv = [sys.executable, "train.py", "--dry_run", "--dataset", tmp_path / "naïve.jsonl"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 2 and done.stderr.endswith(f"{line}\n"), done.stderr


@pytest.mark.parametrize("own", ["", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_gpu_allocators_segments_grow_unless_the_user_says_otherwise(own):
    code = "import os; from finetune.system import process; process.prepare_environment(); "
    code += "print({v for n, v in os.environ.items() if n.endswith('ALLOC_CONF')})"
    environment = {own: "max_split_size_mb:64"} if own else {}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == repr({"max_split_size_mb:64" if own else "expandable_segments:True"}), done.stderr


def test_beside_a_result_all_is_printed_to_stderr_and_what_is_muted_nowhere(capsys, monkeypatch):
    with process.result_on_stdout(True):
        print("beside it")
    with process.result_on_stdout(False):
        print("no result")
    with open(os.devnull, "w") as nowhere, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", nowhere)
        with process.result_on_stdout(True):
            print("of another rank")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("no result\n", "beside it\n")
