"""The quantizer in the plan: the one asked for if it passes its probe here, or the first that does."""

import quantization_wrapper
from backend_manager import Backend
from finetune.errors import PlanError
from finetune.parts.memory import MemoryPlan
from finetune.parts.precision import Precision
from finetune.parts.quantization import Quantization
from finetune.plan.asked import Asked, Change, Notice, Said
from finetune.plan.facts import Facts
from finetune.plan.mlx import MLX_MODES, mlx_quantization


def quantization(asked: Asked, facts: Facts, precision: Precision, quantizes: bool) -> Said:
    """The method, its bits and groups; none where the base is not quantized."""
    if not quantizes:
        yield Change("quantization_backend", "none")
        return
    if facts.backend is Backend.MLX:
        yield from mlx_quantization(asked)
        if asked.quant_type in MLX_MODES:
            return
        asked = asked.changed(quantization_backend="mlx", quant_type="affine")
    method = asked.quantization_backend
    if method == "auto":
        method, reason = auto_quantizer(asked, facts, precision)
        yield Change("quantization_backend", method, reason)
    problem = quantization_wrapper.unsupported(method, *_words(asked))
    if problem:
        raise PlanError(problem)
    check_group_size(asked, facts, method)
    error = None
    if facts.backend is not Backend.MLX:
        error = probe_error(facts, precision, method, asked.n_bits)
    if error:
        raise PlanError(
            f"--quantization_backend {method}: {error}. These pass their probes on {facts.backend}: "
            f"{passing_quantizers(facts, precision)}."
        )
    if asked.quant_type is None:
        quant_types = quantization_wrapper.METHODS[method].quant_types[asked.n_bits]
        yield Change("quant_type", quant_types[0] if quant_types else None)
    if facts.backend is Backend.MPS and not asked.assumes_accelerator:
        yield Notice("4-bit weights on MPS are dequantized by plain torch operations: slower than 16-bit ones")


def probe_error(facts: Facts, precision: Precision, name: str, bits: int) -> str | None:
    """Reason that a quantizer cannot be used here in the run's precision, from its probe; None if it passed or was not
    probed.
    """
    found = facts.probe_quantizer(name, bits)
    if found is None:
        return None
    why = found.get("failed", {}).get(precision.compute)
    wrong = f"is wrong in {precision.compute} on {facts.backend}: {why}"
    return found["error"] or (wrong if why else None)


def on_cpu_costs(asked: Asked, facts: Facts, quantization: Quantization | None, memory: MemoryPlan) -> Said:
    """A notice of what quantization costs on a CPU, unless dense copies are kept."""
    if not asked.on_cpu or quantization is None or memory.cache_dequantized:
        return
    found = facts.probe_quantizer(quantization.method, quantization.bits)
    by = ""
    if found and found.get("kernel"):
        by = f", by {found['kernel']}"
    yield Notice(f"quantization on a CPU saves memory, not time: weights are dequantized at each use{by}")


def _words(asked: Asked) -> tuple:
    return asked.n_bits, asked.quant_type, asked.group_size, asked.double_quant


def check_group_size(asked: Asked, facts: Facts, name: str) -> None:
    """Raises PlanError for a group size that does not divide some layer's columns, if the method needs that."""
    linears: list[tuple[str, int, int]] = []
    if facts.shape and not facts.prequantized:
        experts = [("an expert", rows, columns) for rows, columns in facts.shape.expert_matrices()]
        linears = [*facts.shape.linears, *experts]
    for layer, _, columns in linears:
        if quantization_wrapper.group_mismatch(name, asked.n_bits, asked.group_size, columns):
            sizes = quantization_wrapper.METHODS[name].group_sizes
            dividing = [size for size in sizes if not any(c % size for _, _, c in linears)]
            remedy = f"--quantization_backend {quantization_wrapper.FIRST_METHOD}, which takes any width"
            if dividing:
                remedy = f"--group_size {dividing[-1]}"
            raise PlanError(
                f"--group_size {asked.group_size}: does not divide the {columns} columns of {layer}, as {name} "
                f"needs. Use {remedy}."
            )


def auto_quantizer(asked: Asked, facts: Facts, precision: Precision) -> tuple[str, str]:
    """(method, reason): the first of AUTO_ORDER that has what is asked for and passes its probe here."""
    bits = asked.n_bits
    failed: list[str] = []
    able = [n for n in quantization_wrapper.AUTO_ORDER if not quantization_wrapper.unsupported(n, *_words(asked))]
    if not able:
        raise PlanError(_no_quantizer(asked))
    for name in able:
        if facts.probe_quantizer(name, bits) is None:
            return name, "the first documented, not probed: run --doctor"
        error = probe_error(facts, precision, name, bits)
        if error is None:
            return name, "; ".join(["the first that passed its probe here", *failed])
        failed.append(f"{name} {error}")
    raise PlanError(
        f"--n_bits {bits}: no quantizer passed its probe on {facts.backend} ({'; '.join(failed)}). These pass: "
        f"{passing_quantizers(facts, precision)}. Use one of them, or --train_type lora."
    )


def _no_quantizer(asked: Asked) -> str:
    """The line for a combination that no method has."""
    methods = quantization_wrapper.METHODS
    known = {word for method in methods.values() for words in method.quant_types.values() for word in words}
    if asked.quant_type is not None and asked.quant_type not in known:
        return f"--quant_type {asked.quant_type}: only --backend mlx has it. Use one of {', '.join(sorted(known))}."
    with_bits = [name for name in quantization_wrapper.AUTO_ORDER if asked.n_bits in methods[name].bits]
    why = quantization_wrapper.unsupported((with_bits or [quantization_wrapper.FIRST_METHOD])[0], *_words(asked))
    assert why is not None, _words(asked)
    return why


def passing_quantizers(facts: Facts, precision: Precision) -> str:
    """The (method, bits) pairs that pass their probes here, in words."""
    tried = [pair for pair in quantization_wrapper.pairs() if facts.probe_quantizer(*pair)]
    passed = [f"{name} at {bits} bits" for name, bits in tried if probe_error(facts, precision, name, bits) is None]
    return ", ".join(passed) or "none"
