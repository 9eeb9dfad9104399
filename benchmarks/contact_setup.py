"""Parts that the questions of first_contact.py share: a device and its dimensions, engines, rows, clocks."""

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEP_ROWS, WINDOW, STEP_TOKENS = 8, 256, 2048


@dataclasses.dataclass(frozen=True)
class Setup:
    """A device that is asked, and dimensions that it can hold. `folder`: for files that the questions share."""

    device: str
    quick: bool
    sites: tuple[str, ...] = ()
    tiny: bool = False
    folder: str | None = None

    @property
    def small(self) -> bool:
        return self.device == "cpu" or self.tiny

    def has_site(self, name: str) -> bool:
        return any(site.startswith(f"{name}=") for site in self.sites)

    def site(self, name: str) -> dict[str, str]:
        """Variables of a child that imports another program from a folder of its own (`--site name=DIR`)."""
        folders = [value for key, _, value in (site.partition("=") for site in self.sites) if key == name]
        return environment(*folders)

    @property
    def llama_1b(self) -> dict:
        from tests.support import large

        return large.LLAMA_1B if not self.small else TINY

    @property
    def llama_8b(self) -> dict:
        from tests.support import large

        return large.LLAMA_8B if not self.small else TINY

    @property
    def long_row(self) -> int:
        return 64 if self.small else 4096

    @property
    def few(self) -> int:
        """Steps of a comparison."""
        return 4 if self.small else 20

    @property
    def many(self) -> int:
        """Steps of a run that replays: about four of five of the last eighth have sizes that were captured before."""
        return 4 if self.small else 200

    @property
    def short_s(self) -> int:
        """Seconds that a question may take, if it has no limit of its own."""
        return 25 if self.quick else 60

    @property
    def few_large(self) -> int:
        return 3 if self.small or self.quick else 6

    @property
    def llama(self) -> dict:
        """One layer's dimensions of an 8B, a few of them."""
        from tests.support import large

        return large.LLAMA_8B | dict(num_hidden_layers=2) if not self.small else TINY

    @property
    def mistral(self) -> dict:
        more = dict(model_type="mistral", sliding_window=WINDOW)
        return self.llama | more | (dict(vocab_size=32000) if not self.small else dict(sliding_window=16))

    @property
    def tokens(self) -> int:
        return 96 if self.small else STEP_TOKENS

    @property
    def steps(self) -> int:
        return 4 if self.small else 40 if self.quick else 200

    @property
    def precision(self) -> str:
        return "fp32" if self.small else "bf16"


TINY = dict(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)


def settings_of(setup: Setup, kind: str = "lora", **changes):
    from finetune.config import TrainConfig

    values = dict(
        quantization_backend="nf4" if kind == "qlora" else "none", quant_type="nf4", cache_dequantized="false"
    )
    values |= dict(use_gradient_checkpointing="false", train_type=kind, precision=setup.precision, lr=1e-4)
    return dataclasses.replace(TrainConfig(), **(values | changes))


def engine_of(setup: Setup, config: dict, settings):
    """An engine of a model with random weights, packed rows, kernels as a run on this device chooses them."""
    import torch

    from finetune.torch_engine.device import prepare_attention
    from tests.support import large
    from tests.support.build import torch_engine

    device = torch.device(setup.device)
    prepare_attention(device)
    engine = torch_engine(large.model(config, settings, device), settings, device)
    engine.verify("padding_free")
    return engine


def batches_of(config: dict, lengths, tokens: int = 10**9, all_targets: bool = False):
    """Microbatches of one step of random documents; about half of their tokens are targets, or all but the first."""
    import numpy as np

    from finetune.data.collate import microbatches
    from tests.support import tiny

    rows = tiny.dataset(lengths, vocab=config["vocab_size"])
    if all_targets:
        rows = dataclasses.replace(rows, is_target=np.concatenate([np.arange(n) > 0 for n in lengths]))
    return microbatches(rows, range(len(lengths)), "padding_free", len(lengths), tokens, 0)


def log_normal_lengths(setup: Setup, step: int) -> list[int]:
    """Documents of one step, as fine-tuning data has them: median 129 tokens (a tenth of that in small)."""
    import numpy as np

    rng = np.random.default_rng(step)
    lengths = np.clip(np.exp(rng.normal(np.log(129), 0.75, STEP_ROWS)), 30, 1000).astype(int)
    return [max(4, n // (10 if setup.small else 1)) for n in lengths.tolist()]


def synchronize(device) -> None:
    import torch

    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()


def seconds(setup: Setup, work: Callable) -> float:
    synchronize(setup.device)
    start = time.perf_counter()
    work()
    synchronize(setup.device)
    return time.perf_counter() - start


def peak_of(setup: Setup, work: Callable) -> int | None:
    """Peak bytes of torch's allocator during `work`; None on a CPU, which has no such counter."""
    import torch

    from finetune.torch_engine.device import counts_peaks

    device = torch.device(setup.device)
    if not counts_peaks(device):
        work()
        return None
    module = torch.get_device_module(device)
    synchronize(device)
    module.reset_peak_memory_stats()
    work()
    synchronize(device)
    return module.max_memory_allocated()


def spread(times: list[float]) -> dict:
    return {"median_s": round(statistics.median(times), 6), "worst_s": round(max(times), 6), "n": len(times)}


def random_model(setup: Setup, config: dict):
    """transformers' model of these dimensions on the device, with random weights."""
    import torch
    import transformers

    values = {k: v for k, v in config.items() if k != "model_type"}
    of_type = transformers.AutoConfig.for_model(config["model_type"], **values)
    dtype = torch.float32 if setup.small else torch.bfloat16
    with torch.device(setup.device):
        return transformers.AutoModelForCausalLM.from_config(of_type, dtype=dtype)


def write_folder(setup: Setup, config: dict, folder: Path) -> None:
    """Random weights and a tokenizer in files, as every competitor reads them."""
    from tests.support import tiny

    random_model(setup, config).save_pretrained(folder)
    tiny.train_tokenizer(folder, bos=False)


def emptied(setup: Setup) -> None:
    """Gives the memory of engines that are gone back to the device: other processes need it."""
    import torch

    gc.collect()
    if setup.device != "cpu":
        torch.get_device_module(setup.device).empty_cache()


def fastest() -> str | None:
    """Memory as a disk, if there is enough of it for a model and what runs leave; None: where temporary files are."""
    disk = "/dev/shm"
    if os.access(disk, os.W_OK) and shutil.disk_usage(disk).free > 40 * 2**30:
        return disk
    return None


# ---- children


def command(setup: Setup, *more) -> list[str]:
    script = str(Path(__file__).parent / "first_contact.py")
    argv = [sys.executable, "-W", "ignore", script, "--device", setup.device, *["--quick"] * setup.quick]
    sites = [word for site in setup.sites for word in ("--site", site)]
    return [*argv, *sites, *map(str, more)]


def environment(*first: str) -> dict:
    """A child's variables: it imports from `first`, from this project, then from what its caller named."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [*first, str(ROOT), os.environ.get("PYTHONPATH")])),
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }


def child_of(setup: Setup, question: str, limit_s: float, env=None) -> dict:
    """Findings of a child of this question's process, in its process group."""
    done = run_limited(command(setup, "--ask", question), limit_s, env or environment())
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"asked"')]
    return json.loads(lines[-1])["found"] if lines else {"failed": last_line(done.stderr)}


def run_limited(argv: list[str], limit_s: float, env=None) -> subprocess.CompletedProcess:
    """Output of a command. One that takes longer is ended: exit code 124, as `timeout` says it."""
    try:
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return not_finished(argv, limit_s)


def not_finished(argv: list[str], limit_s: float, said: str = "") -> subprocess.CompletedProcess:
    return subprocess.CompletedProcess(argv, 124, said, f"not finished in {limit_s:.0f} s")


@contextlib.contextmanager
def in_group(argv: list[str], **options) -> Iterator[subprocess.Popen]:
    """A child that leads a process group, which is ended at the context's end: what the child started with it."""
    child = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, text=True, **options)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_in_group(argv: list[str], limit_s: float, env=None) -> subprocess.CompletedProcess:
    """Output as of run_limited, which ends all that the command started too."""
    with in_group(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            said, complained = child.communicate(timeout=limit_s)
            return subprocess.CompletedProcess(argv, child.returncode, said, complained)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
            return not_finished(argv, limit_s, said)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]
