"""What the cases stand on, built once per rig run: a tiny model, rows, and the uninterrupted run of each variant."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.rig.children import Child, start_ranks, start_run
from tests.support import tiny

NUM_STEPS = 6
RUN = dict(
    backend="cpu",
    batch_size=2,
    gradient_accumulation_steps=2,
    num_epochs=3,
    lr=1e-3,
    context_length=64,
    precision="fp32",
    log_to="stdout",
    save_every=1,
    resume="auto",
)
LORA = dict(train_type="lora", lora_rank=4, lora_dropout=0.1)
ONE = dict(keep_last=1)
EVALUATED = dict(keep_last=3, eval_every=2, validation_dataset="validation.jsonl")
RANKS = dict(batch_size=1)
QLORA = dict(train_type="qlora", quantization_backend="nf4")
# {variant: (world size, flags)}
VARIANTS = {
    "lora": (1, RUN | LORA | ONE),
    "lora-evaluated": (1, RUN | LORA | EVALUATED),
    "full": (1, RUN | dict(train_type="full") | EVALUATED | ONE),
    "short": (1, RUN | LORA | EVALUATED | ONE | dict(eval_every=1, max_steps=3)),
    "lora-2": (2, RUN | LORA | EVALUATED | RANKS),
    "full-2": (2, RUN | dict(train_type="full") | ONE | RANKS),
    "dpo": (1, RUN | LORA | ONE | dict(preference="dpo", dataset="pairs.jsonl", precompute_ref_log_probs="true")),
    "kto": (1, RUN | LORA | ONE | dict(preference="kto", dataset="labels.jsonl")),
    "continued": (1, RUN | LORA | ONE | dict(adapter="lora")),
    "continued-wider": (1, RUN | LORA | EVALUATED | dict(adapter="lora", lora_rank=6)),
    "continued-nf4": (1, RUN | LORA | ONE | QLORA | dict(adapter="lora")),
    "continued-dpo": (1, RUN | LORA | ONE | dict(adapter="lora", preference="dpo", dataset="pairs.jsonl")),
    "merged": (1, RUN | LORA | ONE | dict(adapter="lora", adapter_merge=True)),
    "nf4": (1, RUN | LORA | ONE | QLORA | dict(packed_cache="none")),
    "offloaded": (1, RUN | LORA | ONE | QLORA | dict(base_offload="disk")),
    "streaming": (1, RUN | LORA | ONE | dict(streaming=True, max_steps=6, shuffle_buffer=4)),
}
ONE_RANK = ("lora", "lora-evaluated", "full")
TWO_RANKS = ("lora-2", "full-2")
PREFERENCES = ("dpo", "kto")
DEEP = ("nf4", "offloaded")
CONTINUED = ("continued", "continued-wider", "continued-nf4", "continued-dpo", "merged")


@dataclass(frozen=True)
class Place:
    """Where a worker's cases happen. `root`: shared by all workers; `own`: this worker's, emptied by each case."""

    root: Path
    own: Path
    worker: int

    def empty(self) -> Path:
        """A new empty folder for one case."""
        shutil.rmtree(self.own, ignore_errors=True)
        self.own.mkdir(parents=True)
        return self.own

    def once(self, name: str, make) -> Path:
        """The folder root/name, filled by make(folder) in the first worker that asks for it."""
        folder, done = self.root / name, self.root / f"{name}.done"
        if not done.exists():
            with open(self.root / f"{name}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not done.exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
                    make(folder)
                    done.touch()
        return folder

    def model(self) -> Path:
        return self.once("model", lambda folder: _in_child(lambda: _make_model(folder), folder.parent))

    def deep_model(self) -> Path:
        """A model of more layers than pass at a time, where the base is in a file."""
        return self.once("deep", lambda folder: _in_child(lambda: _make_model(folder, 5), folder.parent))

    def rows(self) -> Path:
        return self.once("rows", _make_rows)

    def flags(self, variant: str, output_dir: Path) -> dict:
        """Flags of the variant's run into `output_dir`."""
        flags = dict(dataset="rows.jsonl") | VARIANTS[variant][1]
        flags["model_name"] = self.deep_model() if variant in DEEP else self.model()
        flags["dataset"] = self.rows() / flags["dataset"]
        if "validation_dataset" in flags:
            flags["validation_dataset"] = self.rows() / flags["validation_dataset"]
        if "adapter" in flags:
            flags["adapter"] = self.whole(flags["adapter"]) / "run"
        return flags | dict(output_dir=output_dir)

    def whole(self, variant: str) -> Path:
        """The uninterrupted run of a variant: run/ with every step kept, digests.json with the SHA-256 of each."""
        return self.once(f"whole-{variant}", lambda folder: self._make_whole(variant, folder))

    def finished(self, variant: str) -> Path:
        """The uninterrupted run as its own flags leave it, with keep_last."""
        return self.once(f"finished-{variant}", lambda folder: self._make_finished(variant, folder)) / "run"

    def port(self) -> int:
        """A free port in this worker's range."""
        for port in range(21000 + 2000 * self.worker + os.getpid() % 500, 23000 + 2000 * self.worker):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                if probe.connect_ex(("127.0.0.1", port)) and _binds(port):
                    return port
        raise OSError("no free port")

    def _make_whole(self, variant: str, folder: Path) -> None:
        self._run(variant, folder, keep_last=NUM_STEPS)
        digests = {}
        for step in sorted((folder / "run/checkpoints").glob("step-*")):
            digests[step.name] = tensor_digests(step)
        assert len(digests) == len(list((folder / "run/checkpoints").glob("step-*"))) > 0, digests
        digests["published"] = tensor_digests(folder / "run")
        (folder / "digests.json").write_text(json.dumps(digests))

    def _make_finished(self, variant: str, folder: Path) -> None:
        self._run(variant, folder)

    def _run(self, variant: str, folder: Path, **more) -> None:
        size, flags = VARIANTS[variant][0], self.flags(variant, folder / "run") | more
        started = start_run(flags, folder) if size == 1 else start_ranks(flags, folder, self.port())
        ended = [child.end(120) for child in ([started] if size == 1 else started)]
        assert all(e.code == 0 for e in ended), "\n".join(e.err for e in ended)


def tensor_digests(folder: Path) -> dict[str, str]:
    """{file: SHA-256} of the weights, moments and random state in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _binds(port: int) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::", port))
        except OSError:
            return False
    return True


def _in_child(make, folder: Path) -> None:
    """Runs make() in a child: the worker itself must start no thread."""

    def call() -> int:
        make()
        return 0

    ended = Child(folder, name="make").start(call).end(120)
    assert ended.code == 0, ended.err


def _make_model(folder: Path, num_layers: int = 2) -> None:
    tokenizer = tiny.train_tokenizer(folder, bos=False, chat_template=tiny.CHATML)
    sizes = dict(hidden_size=32, intermediate_size=48, vocab_size=len(tokenizer), num_hidden_layers=num_layers)
    tiny.build("llama", eos_token_id=2, pad_token_id=None, bos_token_id=1, **sizes).save_pretrained(folder)


def _make_rows(folder: Path) -> None:
    for name, numbers in (("rows", range(8)), ("validation", range(8, 11))):
        rows = [{"prompt": f"{i} plus {i}? ", "completion": f"{2 * i}" + "." * (i % 5)} for i in numbers]
        _write_rows(folder / f"{name}.jsonl", rows)
    answers = [(f"{i} plus {i}? ", f"{2 * i}", "no " * (1 + i % 3)) for i in range(8)]
    _write_rows(folder / "pairs.jsonl", [dict(zip(("prompt", "chosen", "rejected"), a, strict=True)) for a in answers])
    labels = [{"prompt": p, "completion": (a, b)[i % 2], "label": not i % 2} for i, (p, a, b) in enumerate(answers)]
    _write_rows(folder / "labels.jsonl", labels)


def _write_rows(file: Path, rows: list) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
