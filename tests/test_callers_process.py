"""A call from Python leaves the process that made it as it was: settings, random states, forks, threads."""

import contextlib
import json
import locale
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import generate
import score
from finetune.callers_process import callers_process
from finetune.errors import PlanError
from finetune.system.mlx_of_caller import keep_mlx, mlx_of_caller
from finetune.torch_engine.callers_settings import callers_settings
from pretrain import pretrain
from tests.support.commands import ROOT
from tests.support.runs import losses, read_events


def settings() -> dict:
    """State of this process that a call might change."""
    return {
        "environment": dict(os.environ),
        "locale": locale.setlocale(locale.LC_ALL),
        "stdout": id(sys.stdout),
        "handlers": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "threads": {thread.name for thread in threading.enumerate()},
        "Python's random state": random.getstate(),
        "numpy's random state": str(np.random.get_state()),
        "torch's random state": torch.get_rng_state().tolist(),
        "seed": torch.initial_seed(),
        "dtype": torch.get_default_dtype(),
        "compute threads": torch.get_num_threads(),
        "products": torch.backends.mkldnn.matmul.fp32_precision,
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "attention": (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
        "verbosity": transformers.logging.get_verbosity(),
        "bars": transformers.logging.is_progress_bar_enabled(),
        "warnings": list(warnings.filters),
        "hook of exceptions": sys.excepthook,
        "limit of recursion": sys.getrecursionlimit(),
        "start of processes": multiprocessing.get_start_method(allow_none=True),
    }


@pytest.fixture
def callers_own(monkeypatch):
    """Settings that no run has."""
    threads = torch.get_num_threads()
    verbosity = transformers.logging.get_verbosity()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    transformers.logging.set_verbosity_info()
    torch.set_num_threads(3)
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


def changed(before: dict) -> dict:
    now = settings()
    return {name: (before[name], now[name]) for name in before if now[name] != before[name]}


def test_a_run_and_what_answers_leave_the_process_as_it_was(callers_own, plain_run, rows_file, tmp_path):
    before = settings()
    result = plain_run(max_steps=2, lora_dropout=0.1, train_type="qlora")
    assert changed(before) == {}
    result.generate("What is 2?", raw=True, max_new_tokens=2, temperature=1.0)
    assert result.tokenizer and changed(before) == {}
    result.score(str(rows_file), samples=2, max_new_tokens=2)
    assert changed(before) == {}
    common = ["--checkpoint", result.output_dir, "--device", "cpu"]
    generate.main([*common, "--prompt", "What is 2?", "--max_new_tokens", "2", "--temperature", "1"])
    assert changed(before) == {}
    score.main([*common, "--dataset", str(rows_file), "--samples", "2", "--max_new_tokens", "2"])
    assert changed(before) == {}
    with pytest.raises(PlanError):
        plain_run(lr=1.0, resume="auto")
    assert changed(before) == {}


def test_a_run_on_mlx_leaves_mlx_as_it_was(plain_run, tmp_path):
    mx = pytest.importorskip("mlx.core")

    def present() -> list:
        limits = mx.set_cache_limit(2**40), mx.set_wired_limit(0)
        mx.set_cache_limit(limits[0])
        mx.set_wired_limit(limits[1])
        return [*limits, *mx.random.state[0].tolist()]

    mx.random.seed(2**40 + 7)
    mx.random.uniform().item()
    before = present()
    drawn = []

    def draws(event):
        drawn.append(mx.random.uniform().item())

    config = tmp_path / "mlx.json"
    config.write_text(json.dumps({"cache_limit_gib": 0.25}))
    result = plain_run(max_steps=1, backend="mlx", mlx_config=str(config))
    result.generate("What is 2?", raw=True, max_new_tokens=2, temperature=1.0)
    assert present() == before
    plain_run(max_steps=2, backend="mlx", on_step=draws, output_dir=str(tmp_path / "drawing"))
    drawn.append(mx.random.uniform().item())
    mx.random.seed(before[2] << 32 | before[3])
    assert drawn == [mx.random.uniform().item() for _ in range(3)]


def test_a_call_within_a_call_leaves_mlx_to_the_outer_one():
    mx = pytest.importorskip("mlx.core")
    mx.random.seed(7)
    before = mx.random.state[0].tolist()
    with mlx_of_caller():
        with mlx_of_caller():
            pass
        keep_mlx()
        mx.random.seed(8)
    assert mx.random.state[0].tolist() == before


def test_a_child_that_is_forked_after_a_run_on_mlx_trains(plain_run, tmp_path):
    """MLX waits there for a thread of the parent: a run with torch asks nothing of it, one on it is refused."""
    pytest.importorskip("mlx.core")
    plain_run(max_steps=1, backend="mlx")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        with contextlib.suppress(BaseException):
            plain_run(max_steps=1, output_dir=str(tmp_path / "child"))
            with pytest.raises(PlanError, match="--backend mlx: this process was forked after MLX was imported"):
                plain_run(max_steps=1, backend="mlx", output_dir=str(tmp_path / "refused"))
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_opened_model_answers_alike_whatever_the_caller_sets_meanwhile(plain_run):
    result = plain_run(max_steps=1)
    how = dict(raw=True, max_new_tokens=8, temperature=1.0)
    first = result.generate("What is 2?", **how)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.manual_seed(5)
    assert result.generate("What is 2?", **how) == first and torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_a_process_group_within_a_call_leaves_no_hook_of_exceptions(callers_own, tmp_path):
    """Uncaught errors of the caller's began with [rank0] from then on."""
    before = settings()
    with callers_process():
        group = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=group, rank=0, world_size=1)
        torch.distributed.destroy_process_group()
        assert sys.excepthook is not before["hook of exceptions"]
    assert changed(before) == {}


@pytest.mark.slow
def test_a_compiled_run_leaves_the_limit_of_recursion(callers_own, plain_run):
    before = settings()["limit of recursion"]
    seen = []
    plain_run(max_steps=1, compile=True, on_step=lambda event: seen.append(sys.getrecursionlimit()))
    assert sys.getrecursionlimit() == before < seen[0]


def test_what_a_library_raises_within_a_call_is_as_before(callers_own):
    before = settings()
    with callers_process():
        # As torch's compiler does, for each graph and once.
        sys.setrecursionlimit(before["limit of recursion"] + 1000)
        other = next(way for way in multiprocessing.get_all_start_methods() if way != before["start of processes"])
        multiprocessing.set_start_method(other, force=True)
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = "1"
        # As torch's compiler and mlx-lm do when they are imported.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/tmp/cache"
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    assert changed(before) == {}


def test_a_variable_that_a_callback_sets_stays(callers_own, monkeypatch):
    monkeypatch.setenv("OF_A_CALLBACK", "0")
    with callers_process():
        os.environ["OF_A_CALLBACK"] = "1"
    assert os.environ["OF_A_CALLBACK"] == "1"


def test_a_folder_of_torch_s_compiler_that_cannot_be_made_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(PlanError, match="TORCHINDUCTOR_CACHE_DIR .*: Not a directory, and torch keeps"):
        with callers_process():
            pass


@pytest.mark.slow
def test_libraries_that_a_run_imports_have_their_own_defaults_after_it(flags):
    code = (
        "import json, os, sys; from train import fine_tune; before = dict(os.environ); "
        "fine_tune(**json.loads(sys.argv[1])); import torch, transformers; "
        "print({n for n in os.environ.keys() | before if os.environ.get(n) != before.get(n)}); "
        "print([transformers.logging.get_verbosity() == transformers.logging.WARNING, "
        "torch.backends.mkldnn.matmul.fp32_precision])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps(flags | {"max_steps": 1})],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *_, variables, found = done.stdout.splitlines()
    assert variables in ("set()", "{'TORCHINDUCTOR_CACHE_DIR'}")  # which torch sets where it is imported
    assert found == "[True, 'none']"


def test_a_device_s_random_state_is_the_caller_s_too(device):
    torch.manual_seed(5)
    expected = [torch.rand((), device=device).item() for _ in range(3)]
    torch.manual_seed(5)
    drawn = []
    with callers_settings() as beside:
        torch.manual_seed(8)
        of_run = torch.rand((), device=device)
        torch.manual_seed(8)
        for _ in range(2):
            with beside.swapped_in():
                drawn.append(torch.rand((), device=device).item())
        assert torch.rand((), device=device) == of_run
    assert [*drawn, torch.rand((), device=device).item()] == expected


@pytest.mark.parametrize(("how", "code"), [(lambda: sys.exit(3), 3), (lambda: sys.exit(), 0), (lambda: 1 / 0, 1)])
def test_a_child_that_a_callback_forks_and_that_raises_writes_nothing_to_the_run(plain_run, tmp_path, how, code):
    """It went up through the run, which noted its end and saved beside its parent."""
    children = []

    def forks(event):
        if event["step"] == 1:
            child = os.fork()
            if child == 0:
                how()
            children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    plain_run(max_steps=2, save_every=1, on_step=forks)
    assert children == [code]
    events = [json.loads(line).get("event") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert events.count("end") == 1 and events[-1] == "end", events


def test_a_child_that_a_callback_forks_ends_when_it_is_told_to(plain_run):
    """Handlers of the run would have it save at the next step, which never comes: a pool waited for ever."""
    codes = []

    def forks(event):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(7)
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    before = signal.getsignal(signal.SIGTERM)
    plain_run(max_steps=2, on_step=forks)
    assert codes == [-signal.SIGTERM] * 2 and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_from_a_packed_base_leaves_no_file_of_it_open(resumed, plain_run, tmp_path, monkeypatch):
    """Nor one whose saved plan alone says that it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain_run(max_steps=1, train_type="qlora", base_offload="disk", save_every=1)
    if resumed:
        plain_run(max_steps=2, resume="auto", train_type="qlora")
    open_files = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if name.isdigit() and os.path.lexists(f"/proc/self/fd/{name}")
    ]
    assert (tmp_path / "cache").is_dir() and not [
        name for name in open_files if name.startswith(str(tmp_path / "cache"))
    ]


INTERRUPTED_TWICE = """
import atexit, os, signal, sys, time
from train import fine_tune

atexit.register(lambda: print("at exit", flush=True))
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background of a shell has not

def interrupts(event):
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)

try:
    fine_tune(model_name=sys.argv[1], dataset=sys.argv[2], output_dir=sys.argv[3], max_steps=4, save_every=1,
              on_step=interrupts, train_type="lora", precision="fp32")
except KeyboardInterrupt:
    print("caught", flush=True)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_second_interrupt_is_the_caller_s(tiny_model, rows_file, tmp_path):
    """It ended the process by os._exit: a notebook lost all that it held."""
    argv = [sys.executable, "-c", INTERRUPTED_TWICE, str(tiny_model), str(rows_file), str(tmp_path / "out")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["caught", "True", "at exit"]
    assert "SIGINT: the run saves after this step, and returns; another ends it at once" in done.stdout
    assert read_events(tmp_path / "out")[-1]["event"] == "end"


# ---- forks


def ended(work, timeout_s: float = 60) -> int | None:
    """Exit code of a child that is forked to do `work`: 7 if it came to its end; None if it did not end in time."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(7)
        finally:
            os._exit(1)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_after_a_run_tokenizes_computes_and_trains(plain_run, tiny_model, tmp_path, monkeypatch):
    def multiply():
        matrix = torch.ones(1000, 1000)
        assert (matrix @ matrix).sum() == 1e9

    def tokenize():
        transformers.AutoTokenizer.from_pretrained(tiny_model)(["What is 2?"] * 5000)

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    plain_run(max_steps=2)
    multiply()
    tokenize()
    whole = losses(tmp_path / "out")
    assert ended(tokenize) == 7
    assert ended(multiply) == 7
    assert ended(lambda: plain_run(max_steps=2, output_dir=str(tmp_path / "child"))) == 7
    assert losses(tmp_path / "child") == pytest.approx(whole, rel=1e-5)  # sums of one thread
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_child_trains_that_was_forked_before_any_call_of_a_parent_that_computed(flags):
    """Its first product waited for threads that it did not have."""
    code = """
import json, os, signal, sys, torch
from train import fine_tune
torch.set_num_threads(2)
matrix = torch.randn(2000, 2000)
matrix @ matrix
child = os.fork()
if not child:
    signal.alarm(100)
    fine_tune(**json.loads(sys.argv[1]))
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    words = [sys.executable, "-c", code, json.dumps(flags | {"max_steps": 1})]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "7"


# ---- threads and callbacks


@pytest.mark.slow
@pytest.mark.parametrize("start", ["threading.Thread(target=late).start()", "atexit.register(late)"])
def test_a_run_that_begins_once_the_program_has_ended_trains(flags, start):
    """torch's import registers for the end of the interpreter, which was too late."""
    code = f"""
import atexit, json, sys, threading, time
from train import fine_tune
def late():
    while threading.main_thread().is_alive() and threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)
    print(fine_tune(**json.loads(sys.argv[1])).status)
{start}
"""
    words = [sys.executable, "-c", code, json.dumps(flags | {"max_steps": 1})]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "finished", done.stderr


def test_a_second_run_in_another_thread_is_refused_in_a_line_and_one_after_it_is_not(plain_run, tmp_path):
    refused = []

    def second(output_dir):
        try:
            plain_run(max_steps=1, output_dir=str(tmp_path / output_dir))
        except PlanError as error:
            refused.append(str(error))

    def start(event):
        thread = threading.Thread(target=second, args=["second"])
        thread.start()
        thread.join()

    with pytest.raises(PlanError):
        plain_run(max_steps=1, lr=-1.0)
    plain_run(max_steps=1, on_step=start)
    (line,) = refused
    assert line == (
        "fine_tune(): thread MainThread of this process is in a run, and both would draw from one random state. Wait "
        "for its end, or start each run in a process of its own."
    )
    assert not (tmp_path / "second").exists()
    thread = threading.Thread(target=second, args=["third"])
    thread.start()
    thread.join()
    assert len(refused) == 1 and len(losses(tmp_path / "third")) == 1
    with pytest.raises(PlanError):
        pretrain("no_such=1")


def test_callbacks_draw_from_the_caller_s_random_states_and_the_run_from_its_own(plain_run, tmp_path):
    drawn = []

    def draws(event):
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        if event["step"] == 2:
            plain_run(max_steps=1, lora_dropout=0.3, seed=3, output_dir=str(tmp_path / "within"))

    def seeded():
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)

    seeded()
    expected = [(torch.rand(()).item(), np.random.rand(), random.random()) for _ in range(5)]
    plain_run(max_steps=4, lora_dropout=0.3, output_dir=str(tmp_path / "alone"))
    seeded()
    plain_run(max_steps=4, lora_dropout=0.3, on_step=draws)
    assert losses(tmp_path / "out") == losses(tmp_path / "alone")
    assert [*drawn, (torch.rand(()).item(), np.random.rand(), random.random())] == expected


def test_a_callback_may_change_the_working_directory_of_a_run_with_relative_paths(plain_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    seen = []

    def moves(event):
        seen.append(os.getcwd())
        os.chdir(tmp_path / "elsewhere")
        time.sleep(0.1)  # while the last step is saved

    plain_run(max_steps=3, save_every=1, output_dir="out", on_step=moves)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file() and not os.listdir("../elsewhere")
    elsewhere = str(tmp_path / "elsewhere")
    assert seen == [str(tmp_path), elsewhere, elsewhere] and os.getcwd() == elsewhere  # as the caller left it


def test_a_callback_that_forks_and_returns_in_the_child_ends_there(plain_run, capfd):
    """The child went on with the run, beside it, and waited for threads that it did not have."""
    children = []

    def forks(event):
        if event["step"] == 1:
            children.append(os.fork())

    plain_run(max_steps=2, on_step=forks)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 2
    assert "fine_tune(on_step=...): forked, and returned in the child, which ends here" in capfd.readouterr().err


# ---- modes of the caller


def test_modes_that_a_callback_sets_are_the_callers_and_not_the_runs(plain_run, tmp_path):
    def sets(event):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")

    plain_run(max_steps=3, output_dir=str(tmp_path / "alone"))
    try:
        plain_run(max_steps=3, on_step=sets)
        found = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device().type)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert losses(tmp_path / "out") == losses(tmp_path / "alone")
    assert found == (False, torch.float64, "meta")  # as the caller left it


def test_kernels_and_precisions_that_a_callback_sets_are_the_callers_and_not_the_runs(plain_run, tmp_path):
    """The run had other losses without a word, or ended in "No viable backend"."""
    kernels = torch.backends.cuda

    def sets(event):
        torch.set_autocast_enabled("cpu", True)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        for kind in ("flash", "mem_efficient", "math"):
            getattr(kernels, f"enable_{kind}_sdp")(False)
        np.seterr(all="raise")

    plain_run(max_steps=3, output_dir=str(tmp_path / "alone"))
    errors = np.geterr()
    try:
        plain_run(max_steps=3, on_step=sets)
        found = (torch.is_autocast_enabled("cpu"), kernels.math_sdp_enabled(), np.geterr()["over"])
        precision = torch.backends.mkldnn.matmul.fp32_precision
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        for kind in ("flash", "mem_efficient", "math"):
            getattr(kernels, f"enable_{kind}_sdp")(True)
        np.seterr(**errors)
    assert losses(tmp_path / "out") == losses(tmp_path / "alone")
    assert found == (True, False, "raise") and precision == "bf16"  # as the caller left them


@contextlib.contextmanager
def double_precision():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def warnings_raised():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    "mode",
    [
        warnings_raised,
        torch.no_grad,
        torch.inference_mode,
        double_precision,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),  # which a CPU has not
    ],
    ids=["warnings", "no_grad", "inference_mode", "float64", "autocast", "meta", "attention"],
)
def test_a_run_computes_alike_in_any_mode_of_the_caller(mode, plain_run, tmp_path):
    plain_run(max_steps=3)
    with mode():
        before = settings()
        result = plain_run(max_steps=3, output_dir=str(tmp_path / "in_mode"))
        assert changed(before) == {} and torch.get_default_dtype() == before["dtype"]
        assert result.generate("What is 2?", raw=True, max_new_tokens=2) is not None
    assert losses(tmp_path / "in_mode") == losses(tmp_path / "out")


graph = torch.autograd.graph


@pytest.mark.parametrize(
    "context",
    [
        lambda: graph.disable_saved_tensors_hooks("none here"),
        graph.save_on_cpu,
        lambda: graph.saved_tensors_hooks(lambda t: t.to(torch.float16), lambda t: t.to(torch.float32)),
        FakeTensorMode,
    ],
    ids=["disabled", "save_on_cpu", "rounding", "fake"],
)
def test_a_run_in_a_context_that_would_change_its_gradients_is_refused(context, plain_run, tmp_path):
    """It ended in a traceback, or had other losses without a word."""
    with context(), pytest.raises(PlanError, match=r"^torch.*: the call is inside of .* Make it outside\.$"):
        plain_run(max_steps=1)
    assert not (tmp_path / "out").exists()


def test_warnings_that_the_caller_makes_errors_are_none_within_a_call():
    with warnings_raised():
        before = list(warnings.filters)
        with callers_process():
            warnings.warn("of a library", DeprecationWarning, stacklevel=1)
            warnings.filterwarnings("ignore", message="of an imported library")
        assert warnings.filters[1:] == before and warnings.filters[0][0] == "ignore"
        with pytest.raises(DeprecationWarning):
            warnings.warn("of the caller", DeprecationWarning, stacklevel=1)


def test_what_is_printed_goes_into_no_file_of_a_call_whose_caller_closed_its_stdout(tmp_path):
    code = """
import os, sys
from finetune.system.process import prepared
os.close(1)
with prepared(), open(sys.argv[1], "w") as file:
    print("of the caller", flush=True)
    assert file.fileno() > 2
try:
    os.fstat(1)
except OSError:
    os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], cwd=ROOT)
    assert done.returncode == 7 and (tmp_path / "file").read_text() == ""


def test_a_working_directory_that_was_removed_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(PlanError, match="^the working directory was removed"):
        generate.main(["--checkpoint", "x"])


@pytest.mark.slow
def test_libraries_are_imported_where_warnings_are_errors(flags):
    """torch's own modules warn as they are imported: a traceback."""
    code = "import json, sys; from train import fine_tune; fine_tune(**json.loads(sys.argv[1]))"
    words = [sys.executable, "-W", "error", "-c", code, json.dumps(flags | {"max_steps": 1, "train_type": "qlora"})]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
