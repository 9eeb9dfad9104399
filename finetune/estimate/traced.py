"""Bytes of models whose layers no formula describes: counted on tensors without values, in a child process.

The child, torch_engine/trace.py, imports torch and runs the model's own classes; this module asks it, and keeps its
answers on disk, so that a later plan of the same model imports nothing. Few sizes are tried: bytes are linear in the
number of rows, and beyond the longest row that is tried at most quadratic in its length.
"""

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune.backend.machine import versions
from finetune.config import DEFAULTS
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import KnownShape, ModelShape, planned_shape
from finetune.model_files.files import ModelFiles
from finetune.system.child import Child, ChildEnded
from finetune.system.files import cache_folder
from finetune.system.files import replace as replace_file
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.terminal import say
from quantization_wrapper import FIRST_METHOD

PROGRAM = "finetune.torch_engine.trace"
# Settings that what autograd saves depends on.
SETTINGS = (
    *("train_type", "llama_pro_path", "precision", "cpu_matmul", "lora_rank", "lora_dropout", "lora_target_modules"),
    *("num_layers", "layers_to_transform", "use_dora", "use_gradient_checkpointing", "reentrant_checkpointing"),
    *("attention", "label_smoothing"),
)
# tokens of rows that are tried where longer ones are not
SHORT = (64, 128, 192)
LONGEST = (2048, 3072, 4096)


@dataclass(frozen=True)
class Trace:
    """Bytes of one microbatch, see trace.Session.traced. `values`: {name: bytes}, of layers "<number> <name>"."""

    order: tuple[int, ...]
    values: dict[str, float]

    @classmethod
    def of(cls, content: dict) -> "Trace":
        plain = {name: content[name] for name in ("outside", "after", "head", "calls")}
        layers = {f"{n} {name}": size for n, sizes in content["layers"].items() for name, size in sizes.items()}
        return cls(tuple(content["order"]), plain | layers)

    def beside(self, logits: int) -> "Trace":
        """The same, of the head only what it needs beside these bytes."""
        return replace(self, values=self.values | {"head": self.values["head"] - logits})

    def layers(self, name: str, count: int | None = None) -> list[float]:
        """Traces of each layer; of `count` of them, a stage of a pipeline: the consecutive ones that keep most."""
        sizes = [self.values[f"{n} {name}"] for n in self.order]
        if count is None or count >= len(sizes):
            return sizes
        kept = [self.values[f"{n} kept"] for n in self.order]
        start = max(range(len(kept) - count + 1), key=lambda i: sum(kept[i : i + count]))
        return sizes[start : start + count]


def between(points: list[tuple[float, Trace]], x: float) -> Trace:
    """The polynomial through these points, at x (Lagrange); never below zero where no point is."""
    values = dict.fromkeys(points[0][1].values, 0.0)
    for i, (at, trace) in enumerate(points):
        weight = 1.0
        for j, (other, _) in enumerate(points):
            weight *= 1.0 if i == j else (x - other) / (at - other)
        for name in values:
            values[name] += weight * trace.values[name]
    least = {name: min(trace.values[name] for _, trace in points) for name in values}
    return Trace(points[0][1].order, {n: max(v, 0.0) if least[n] >= 0 else v for n, v in values.items()})


Logits = Callable[[MicrobatchShape], int]


def _all_targets(microbatch: MicrobatchShape) -> MicrobatchShape:
    return replace(microbatch, num_targets=sum(microbatch.lengths))


class Failed(Exception):
    """The model cannot be traced, and why."""


def _digest(answers: dict) -> str:
    """sha256 of kept answers, beside which it is written: nothing else finds one that a disk changed."""
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()


@dataclass
class Tracer:
    """Traces of one model folder. Its child starts with the first question that the disk does not answer."""

    folder: str
    error: str | None = None
    child: Child | None = None
    known: dict = field(default_factory=dict)
    made: KnownShape | None = None
    said: bool = False

    def __post_init__(self):
        source = Path(__file__).parents[1] / "torch_engine"
        files = [*sorted(source.rglob("*.py")), Path(self.folder) / "config.json"]
        digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
        for file in files:
            digest.update(file.read_bytes())
        self.file = cache_folder("traces") / f"{digest.hexdigest()[:24]}.json"
        with contextlib.suppress(JsonFileError, FileNotFoundError):
            kept = read_json(self.file, {"answers": {str: dict}, "sha256": str})
            if kept["sha256"] == _digest(kept["answers"]):
                self.known = kept["answers"]

    def ask(self, **question: object) -> dict:
        """The child's answer, or the one on disk. Raises Failed."""
        key = json.dumps(question, sort_keys=True)
        if key not in self.known:
            child = self.child or self._start_child()
            try:
                (text,) = child.request(json.dumps({"folder": self.folder, **question}).encode())
            except ChildEnded as ended:
                self.child = None
                raise Failed(f"their process ended: {ended}") from None
            self.known[key] = json.loads(text)
            self._keep()
        answer = self.known[key]
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _start_child(self) -> Child:
        if not self.said:
            say("memory: no formula describes this model's layers; tracing them (imports torch, takes seconds)")
        self.said = True
        self.child = Child(PROGRAM, stderr=subprocess.DEVNULL)
        return self.child

    def _keep(self) -> None:
        """Writes the answers to disk, but those for which memory was refused: it may be there the next time."""
        lasting = {key: answer for key, answer in self.known.items() if not answer.get("memory_refused")}
        with contextlib.suppress(OSError):  # a read-only home directory only costs time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self.file) as file:
                file.write(json.dumps({"answers": lasting, "sha256": _digest(lasting)}).encode())

    def close(self) -> None:
        """Ends the child; another question starts one again."""
        if self.child is not None:
            self.child.close()
            self.child = None

    def give_up(self, failed: Exception) -> None:
        """Nothing is predicted from now on."""
        self.error = str(failed)

    # ---- what the estimates ask

    def shape(self, shape: ModelShape) -> KnownShape | None:
        """`shape` with the sizes of the model's own tensors; None if it cannot be built and run, see `error`."""
        if self.made is None and self.error is None:
            try:
                self.made = self._sized(shape)
            except Failed as failed:
                self.give_up(failed)
        if self.error:
            return None
        return self.made

    def _sized(self, shape: ModelShape) -> KnownShape:
        answer = self.ask()
        sizes = {name: answer[name] for name in ("num_weights", "num_layers", "hidden_size", "vocab_size")}
        made = replace(
            shape,
            **sizes,
            linears=tuple((name, rows, columns) for name, rows, columns in answer["linears"]),
            others=tuple(map(tuple, answer["others"])),
            experts=tuple(map(tuple, answer["experts"])),
            expert_weights=sum(rows * columns for rows, columns in answer["experts"]),
            num_heads=shape.num_heads or 0,
            num_kv_heads=shape.num_kv_heads or 0,
            head_dim=shape.head_dim or 0,
        )
        return KnownShape(**{name: getattr(made, name) for name in ModelShape.__dataclass_fields__})

    def traced(
        self, m: ModelCost, microbatch: MicrobatchShape, recompute: bool | None = None, logits: Logits | None = None
    ) -> Trace:
        """Trace of one microbatch under the run's settings. `logits(microbatch)`: bytes of the loss that a formula
        gives, which are not proportional to the rows; "head" is what there is beside them. Raises Failed.
        """
        plan = m.plan
        lengths = microbatch.lengths
        settings = {n: getattr(plan.settings, n) for n in SETTINGS}
        if recompute is not None:
            settings["use_gradient_checkpointing"] = "true" if recompute else "false"
        settings = {n: v for n, v in settings.items() if v != DEFAULTS[n]}
        settings["quantization_backend"] = FIRST_METHOD if plan.quantization else "none"
        question = {"settings": settings, "device": "cpu" if m.device == "cpu" else "device"}
        known = plan.settings.batch_layout != "auto"
        question["layout"] = microbatch.layout if known else self.layout(microbatch, question, plan.data.images)
        if not microbatch.even:
            trace = Trace.of(self.ask(**question, lengths=list(lengths)))
            return trace.beside(logits(_all_targets(microbatch)) if logits else 0)
        rows = [n for n in (1, 2) if len(lengths) > 2 or n == len(lengths)]
        return between([(n, self._of_rows(question, n, lengths[0], logits)) for n in rows], len(lengths))

    def layout(self, microbatch: MicrobatchShape, question: dict, images: bool) -> str:
        """The microbatch's layout; padded where the model is expected to need it, or refuses packed documents.
        `images`: rows show some.
        """
        if microbatch.layout == "padded" or self.ask()["layout"] == "padded":
            return "padded"
        if images and self.ask()["masks_images"]:
            return "padded"
        try:
            self.ask(**question, layout="padding_free", lengths=[SHORT[0]] * 2)
        except Failed:
            return "padded"
        return "padding_free"

    def _of_rows(self, question: dict, rows: int, length: int, logits: Logits | None) -> Trace:
        def at(tokens: int) -> Trace:
            trace = Trace.of(self.ask(**question, lengths=[tokens] * rows))
            return trace.beside(logits(MicrobatchShape.full_rows(rows, tokens, question["layout"])) if logits else 0)

        tried = LONGEST
        if length > SHORT[-1]:
            one = at(SHORT[0])
            two = at(SHORT[1])
            if two.values["calls"] - one.values["calls"] > SHORT[1] - SHORT[0]:  # code loops over the positions
                tried = SHORT
        if length <= tried[-1]:
            return at(length)
        return between([(tokens, at(tokens)) for tokens in tried], length)


# ---- in the words of estimate.memory


def _of(m: ModelCost) -> Tracer:
    assert isinstance(m.shape.tracer, Tracer), m.shape.tracer
    return m.shape.tracer


def kept_bytes(m: ModelCost, microbatch: MicrobatchShape) -> int:
    """Bytes that autograd keeps from forward to backward."""
    trace = _of(m).traced(m, microbatch)
    outside = trace.values["outside"] + trace.values["after"]
    return int(sum(_per_slice(m, microbatch, trace.layers("kept", m.shape.num_layers))) + outside)


def layer_bytes(m: ModelCost, microbatch: MicrobatchShape) -> float:
    """The most bytes that a layer keeps without recomputation."""
    trace = _of(m).traced(m, microbatch, recompute=False)
    return max(_per_slice(m, microbatch, trace.layers("kept", m.shape.num_layers)))


def _per_slice(m: ModelCost, microbatch: MicrobatchShape, sizes: list[float]) -> list[float]:
    """Bytes of one tensor-parallel rank, which has all of a layer's input."""
    degree = m.plan.parallel.tp
    if degree == 1:
        return sizes
    hidden = microbatch.num_tokens * m.shape.hidden_size * m.weight
    return [min(size, hidden) + max(0.0, size - hidden) / degree for size in sizes]


@dataclass(frozen=True)
class Peaks:
    """Most bytes beside weights and moments: in the loss, and in the layers' forwards and backwards."""

    loss: float
    layers: float


def peaks(
    m: ModelCost, microbatch: MicrobatchShape, logits: Logits, standing: int, gradients: int, dequantized: int
) -> Peaks:
    """Peaks of one microbatch. `standing`: bytes of gradients that are there from its start; `gradients`: those that
    the layers add; `dequantized`: what dequantizing one weight takes beside its result.
    """
    trace = _of(m).traced(m, microbatch, logits=logits)
    count = m.shape.num_layers
    kept, forward, backward = (
        _per_slice(m, microbatch, trace.layers(name, count)) for name in ("kept", "forward", "backward")
    )
    live = standing + trace.values["outside"]
    most = 0.0
    for own, peak in zip(kept, forward, strict=True):
        most = max(most, live + peak + dequantized)
        live += own
    loss = live + trace.values["head"] + logits(microbatch)
    live += trace.values["after"]
    for own, peak in zip(reversed(kept), reversed(backward), strict=True):
        most = max(most, live + peak + dequantized)
        live += gradients / len(kept) - own
    return Peaks(loss, most)


def traceable_shape(files: ModelFiles, llama_pro_path: str | None, said: bool = False) -> ModelShape:
    """planned_shape, with a tracer if no formula gives what the model's layers keep. `said`: it need not say so."""
    shape = planned_shape(files, llama_pro_path)
    unnamed = shape.known is None and shape.hidden_size and shape.num_layers and shape.vocab_size  # RWKV has no heads
    if not (shape.unlike or unnamed) or not (Path(files.folder) / "config.json").is_file():
        return shape
    return replace(shape, tracer=Tracer(str(Path(files.folder).absolute()), said=said))
