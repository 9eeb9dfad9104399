"""Overrides and facts in, one frozen plan out, with a reason for every difference. No framework is imported here.

`resolve_plan` runs before anything is loaded; plan.finalize runs once after loading. Nothing changes after that.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import quantization_wrapper
from backend_manager import Backend, auto_precision, package_version
from finetune.config import DEPRECATED_OPTIMIZERS, DEPRECATED_TARGETS, DEPRECATED_TRAIN_TYPES, TrainConfig
from finetune.distributed.parallel_dims import check_model
from finetune.distributed.pipeline_schedule import CHUNKS
from finetune.errors import PlanError
from finetune.estimate.budget import parse_size
from finetune.estimate.model_shape import WITHOUT_TP_PLAN
from finetune.estimate.rates import assumed_memory, links_of
from finetune.estimate.traced import Failed
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.parts import Parts
from finetune.plan import conflicts, degrees
from finetune.plan.adapter import saved_adapter
from finetune.plan.amount import amount, amount_said, training_rows
from finetune.plan.backend import choose_cpu_matmul
from finetune.plan.conflicts import check
from finetune.plan.data import context_length, data_flags
from finetune.plan.draft import Draft, Facts
from finetune.plan.learning_rate import auto_rate, choose_adam_beta2, steps_of
from finetune.plan.machine import machine_of
from finetune.plan.memory import Tried, resolve_async_save, resolve_memory
from finetune.plan.mlx import MLX_MODES, mlx_limits, mlx_quantization
from finetune.plan.mlx import on_cpu as mlx_on_cpu
from finetune.plan.parallelism import accelerate_limits, recompute_on_apple_gpus, resolve_parallelism
from finetune.plan.plan_base import format_value
from finetune.plan.preference import preference_limits, preference_parallelism
from finetune.plan.run_plan import RunPlan
from finetune.plan.train_type import train_type, train_type_asked, train_type_is_open


def resolve_plan(requested: dict, facts: Facts, now: datetime | None = None) -> RunPlan:
    """Resolves what the user asked for against what the machine can do and the model's config. Raises PlanError.
    `now` names the default output_dir.
    """
    try:
        draft, layouts = with_degrees(settled(requested, facts))
    except Failed as failed:  # from here on nothing is predicted, and it is said why
        assert facts.shape and facts.shape.tracer
        facts.shape.tracer.give_up(failed)
        draft, layouts = with_degrees(settled(requested, facts))
    default_output_dir(draft, now or datetime.now())
    return RunPlan(
        settings=TrainConfig(**draft.values),
        requested=draft.requested,
        adjustments=tuple(draft.adjustments),
        notices=tuple(draft.notices),
        backend=str(draft.backend),
        engine=draft.capabilities.engine,
        dims=draft.dims,
        distribution=draft.distribution,
        shape=draft.shape,
        memory_budget=draft.memory_budget(),
        machine=machine_of(draft),
        layouts=layouts,
    )


def settled(requested: dict, facts: Facts) -> Draft:
    """The draft after all rules."""
    draft = Draft(requested, facts)
    for rule in RULES:
        rule(draft)
    return draft


def with_degrees(draft: Draft) -> tuple[Draft, tuple[str, ...]]:
    """The draft with the layout of its ranks that is predicted the fastest, if that is open, and what to say of it.

    Where --train_type auto may quantize the base or not, layouts are compared without, and only if the fastest of them
    lacks the room for it also with.
    """
    machine, room = machine_of(draft), draft.memory_budget()
    shape = draft.shape.known if draft.shape else None
    if not (degrees.is_open(draft) and machine and room and shape):
        return draft, ()
    chosen: list[tuple[float, Draft, tuple[str, ...]]] = []
    lines: tuple[str, ...] = ()
    for plan in bases(draft):
        fitting, others = degrees.choices(draft, plan, shape, machine)
        composing, one = with_fastest(draft, fitting)
        lines = tuple(degrees.lines_of(composing or fitting, others, room))
        if composing:
            chosen.append((degrees.cost(draft, composing[0]), one, lines))
        if composing and composing[0] is fitting[0]:
            break
    return min(chosen, key=lambda one: one[0])[1:] if chosen else (draft, lines)


BASE_SETTINGS = ("train_type", "quantization_backend", "n_bits", "group_size", "cache_dequantized")


def bases(draft: Draft) -> Iterator[Parts]:
    """The draft's plan, or where --train_type is open, that with the base in 16 bits and that with a quantized one."""
    own = draft.values["train_type"]
    for word in ("lora", "qlora") if train_type_is_open(draft) else (own,):
        values = draft.values
        if word != own:
            try:
                values = settled(draft.requested | {"train_type": word}, draft.facts).values
            except PlanError:
                continue
        yield draft.parts(**{name: values[name] for name in BASE_SETTINGS})


def with_fastest(draft: Draft, fitting: list[Tried]) -> tuple[list[Tried], Draft]:
    """These layouts from the first on that composes with what else is asked for, and whose base is as it was compared,
    with the draft that has it; none, and the draft as it was.
    """
    for number, tried in enumerate(fitting):
        found = draft
        if tried.plan.dims != draft.dims:
            try:
                found = settled(draft.requested, replace(draft.facts, degrees=degrees.flags(tried.plan.dims)))
            except PlanError:
                continue
        if all(found.values[name] == getattr(tried.plan.settings, name) for name in BASE_SETTINGS):
            if found is not draft:
                degrees.say(found, tried, fitting[number:])
            return fitting[number:], found
    return [], draft


def deprecated_aliases(draft: Draft) -> None:
    """Older words for train_type, optimizer and target modules, translated."""
    values, word = draft.values, draft.values["train_type"]
    for name, value in DEPRECATED_TRAIN_TYPES.get(word, {}).items():
        if value == "required":
            if not values[name]:
                raise PlanError(f"--train_type {word}: needs --{name}, the folder of the expanded model.")
        elif name != "train_type" and draft.given(name) and values[name] != value:
            given = format_value(values[name])
            raise PlanError(
                f"--train_type {word}: means --{name} {format_value(value)}, but {given} is given. Omit it."
            )
        else:
            draft.adjust(name, value, f"--train_type {word} means this")
    targets = values["lora_target_modules"].strip().lower()
    if targets in DEPRECATED_TARGETS:
        draft.adjust("lora_target_modules", DEPRECATED_TARGETS[targets], f"{targets} means this")
    optimizer = values["optimizer"]
    if optimizer in DEPRECATED_OPTIMIZERS:
        reason = "torch's fused kernels are used on every device that has them"
        draft.adjust("optimizer", DEPRECATED_OPTIMIZERS[optimizer], reason)


def prequantized_base(draft: Draft) -> None:
    """A base stored quantized is trained as it is stored: qlora with the folder's own quantization settings."""
    stored, values = draft.facts.prequantized, draft.values
    if not stored:
        return
    name = values["model_name"]
    fact = f"its weights are stored quantized ({stored['quantization_backend']} at {stored['n_bits']} bits)"
    if values["train_type"] == "full":
        raise PlanError(
            f"--train_type full: {name}: {fact}, and only adapters train on those. Use --train_type qlora, or "
            "give the unquantized model it was made from."
        )
    draft.adjust("train_type", "qlora", fact)
    for setting, value in stored.items():
        if draft.given(setting) and values[setting] not in ("auto", value):
            raise PlanError(
                f"--{setting} {format_value(values[setting])}: {name}: {fact}, and quantizing again would lose more. "
                "Omit it, or give the unquantized model it was made from."
            )
        draft.adjust(setting, value, fact)
    if values["init_lora_weights"] not in ("default", "gaussian"):
        raise PlanError(
            f"--init_lora_weights {values['init_lora_weights']}: needs unquantized weights, but {name}: {fact}. "
            "Use default or gaussian."
        )


def contradictions(draft: Draft) -> None:
    """Settings that contradict each other, and values outside their range."""
    values = draft.values
    check(draft, conflicts.SETTINGS)
    if values["assume_device"]:
        memory = assumed_memory(values["assume_device"])
        if values["assume_memory"] is None:
            draft.adjust("assume_memory", f"{memory / 2**30:.1f}GiB", f"the memory of {values['assume_device']}")
    elif values["assume_memory"]:
        parse_size(values["assume_memory"])
    if values["assume_interconnect"]:
        links_of(values["assume_interconnect"], "a100")
    if draft.given("max_steps") and values["max_steps"] > 0 and draft.given("num_epochs"):
        draft.notices.append(f"num_epochs {values['num_epochs']} is overridden by max_steps {values['max_steps']}")


def train_type_limits(draft: Draft) -> None:
    """Settings that the train type has no use for. LLaMA-Pro trains the layers that expand.py added, and no adapter."""
    values, folder = draft.values, draft.values["llama_pro_path"]
    check(draft, conflicts.TRAIN_TYPE)
    if values["new_tokens"]:
        beside = "" if values["train_type"] == "full" else ", and train in full beside the adapter"
        words = values["new_tokens"].count(",") + 1
        draft.notices.append(
            f"{words} new tokens: embeddings and head have a row for each, which starts from the mean of the others"
            f"{beside}"
        )
    if folder:
        if draft.given("model_name") and values["model_name"] != folder:
            draft.adjust("model_name", folder, "the expanded folder is the model; it records what it was made from")
        values["model_name"] = folder
        draft.notices.append("no adapter: the added layers train in fp32; all others are frozen")


def machine(draft: Draft) -> None:
    """The backend, and what probing found that a user should know."""
    draft.values["backend"] = str(draft.backend)
    reasons = draft.capabilities.reasons
    draft.notices += [f"{name}: {why}" for name, why in reasons.items() if name in ("probes", "capability")]
    if draft.on_cpu:
        by_name = draft.requested.get("backend", "auto") != "auto"
        hint = "; --backend auto uses a GPU where there is one" if by_name else ""
        draft.notices.append(f"training on a CPU is slow{hint}")


def precision(draft: Draft) -> None:
    """auto, and precisions this device does not support."""
    values, word, capabilities = draft.values, draft.values["precision"], draft.capabilities
    why = capabilities.reasons.get("bf16", "")
    if word == "auto":
        draft.adjust("precision", *_auto_precision(draft, why))
    elif word.startswith("bf16") and not (capabilities.supports_bfloat16 or draft.assumes_accelerator):
        if draft.backend is Backend.CPU:
            fact = why or "this processor may lack bf16 matmuls"
            draft.notices.append(f"precision {word}: {fact}; fp32 is faster")
        else:
            label = "MPS" if draft.backend is Backend.MPS else str(draft.backend)
            used = "fp16" if word == "bf16" else "fp16_autocast"
            draft.adjust("precision", used, f"{label} backend doesn't support bfloat16: {why or 'documented'}")
    forced = draft.facts.environment.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"
    if forced and draft.backend is Backend.CUDA and draft.parts().precision.compute == "fp32":
        draft.notices.append(
            f"precision {values['precision']}: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 rounds products to TF32, 10 bits; "
            "unset it for fp32"
        )
    if values["train_type"] == "full" and values["precision"] in ("bf16", "fp16"):
        reason = "full fine-tuning trains every weight, and trainable weights are kept in fp32"
        draft.adjust("precision", values["precision"] + "_autocast", reason)


def _auto_precision(draft: Draft, why: str) -> tuple[str, str]:
    if draft.backend is Backend.MLX and mlx_on_cpu() and not draft.values["assume_memory"]:
        return "fp32", "MLX has no BLAS for 16 bits on a CPU"
    speed = draft.capabilities.bfloat16_speed
    if draft.assumes_accelerator:
        return "bf16", "--assume_memory: a device with bf16 matmuls is assumed"
    reasons = {
        "bf16": f"bf16 matmuls: {f'{speed:.2f} x the speed of fp32, measured' if speed else 'documented'}",
        "fp32": why or "the documented choice for a CPU",
        "fp16": why or "no bf16 here",
    }
    word = auto_precision(draft.backend, draft.capabilities.supports_bfloat16)
    return word, reasons[word]


def cpu_matmul(draft: Draft) -> None:
    """oneDNN or torch's BLAS for fp32 products on this CPU, by the probe."""
    word = draft.values["cpu_matmul"]
    if not draft.on_cpu:
        where = "an assumed accelerator" if draft.assumes_accelerator else draft.backend
        draft.adjust("cpu_matmul", "auto", f"it is for --backend cpu, and this run is on {where}")
        return
    used, why = choose_cpu_matmul(word, draft.capabilities)
    if word == "onednn" != used and draft.given("cpu_matmul"):
        raise PlanError(f"--cpu_matmul onednn: {why}. Use auto or blas.")
    draft.adjust("cpu_matmul", used, why)


def quantization(draft: Draft) -> None:
    """The quantizer: the one asked for if it passes its probe here, or the first that does."""
    values = draft.values
    if values["train_type"] != "qlora":
        values["quantization_backend"] = "none"
        return
    if draft.backend is Backend.MLX:
        mlx_quantization(draft)
    elif values["quantization_backend"] == "auto":
        auto_quantizer(draft)
    name, bits = values["quantization_backend"], values["n_bits"]
    if values["quant_type"] in MLX_MODES and draft.backend is Backend.MLX:
        return
    problem = quantization_wrapper.unsupported(name, *_asked(values))
    if problem:
        raise PlanError(problem)
    check_group_size(draft, name)
    error = None if draft.backend is Backend.MLX else probe_error(draft, name, bits)
    if error:
        passing = passing_quantizers(draft)
        raise PlanError(
            f"--quantization_backend {name}: {error}. These pass their probes on {draft.backend}: {passing}."
        )
    if values["quant_type"] is None:
        quant_types = quantization_wrapper.METHODS[name].quant_types[bits]
        values["quant_type"] = quant_types[0] if quant_types else None
    if draft.backend is Backend.MPS and not draft.assumes_accelerator:
        draft.notices.append("4-bit weights on MPS are dequantized by plain torch operations: slower than 16-bit ones")


def probe_error(draft: Draft, name: str, bits: int) -> str | None:
    """Why a quantizer cannot be used here in the run's precision, by its probe; None if it passed or was not probed."""
    found, compute = draft.facts.probe_quantizer(name, bits), draft.parts().precision.compute
    if found is None:
        return None
    why = found.get("failed", {}).get(compute)
    return found["error"] or (f"is wrong in {compute} on {draft.backend}: {why}" if why else None)


def quantized_on_cpu(draft: Draft) -> None:
    """A notice of what quantization costs on a CPU, unless dense copies are kept."""
    values = draft.values
    if not draft.on_cpu or values["train_type"] != "qlora" or values["cache_dequantized"] == "true":
        return
    found = draft.facts.probe_quantizer(values["quantization_backend"], values["n_bits"])
    by = f", by {found['kernel']}" if found and found.get("kernel") else ""
    draft.notices.append(f"quantization on a CPU saves memory, not time: weights are dequantized at each use{by}")


def _asked(values: dict) -> tuple:
    return values["n_bits"], values["quant_type"], values["group_size"], values["double_quant"]


def check_group_size(draft: Draft, name: str) -> None:
    """Refuses a group size that does not divide some layer's columns, if the method needs that."""
    values, linears = draft.values, []
    if draft.shape and not draft.facts.prequantized:
        experts = [("an expert", rows, columns) for rows, columns in draft.shape.expert_matrices()]
        linears = [*draft.shape.linears, *experts]
    for layer, _, columns in linears:
        if quantization_wrapper.group_mismatch(name, values["n_bits"], values["group_size"], columns):
            sizes = quantization_wrapper.METHODS[name].group_sizes
            dividing = [g for g in sizes if not any(c % g for _, _, c in linears)]
            remedy = f"--group_size {dividing[-1]}" if dividing else "--quantization_backend nf4, which takes any width"
            raise PlanError(
                f"--group_size {values['group_size']}: does not divide the {columns} columns of {layer}, as {name} "
                f"needs. Use {remedy}."
            )


def auto_quantizer(draft: Draft) -> None:
    """auto: the first of AUTO_ORDER that has what is asked for and passes its probe here."""
    values, bits = draft.values, draft.values["n_bits"]
    failed: list[str] = []
    order = quantization_wrapper.AUTO_ORDER
    able = [name for name in order if not quantization_wrapper.unsupported(name, *_asked(values))]
    if not able:
        raise PlanError(_no_quantizer(values))
    for name in able:
        found = draft.facts.probe_quantizer(name, bits)
        if found is None:
            draft.adjust("quantization_backend", name, "the first documented, not probed: run --doctor")
            return
        error = probe_error(draft, name, bits)
        if error is None:
            reason = f"the first that passed its probe here{''.join(f'; {line}' for line in failed)}"
            draft.adjust("quantization_backend", name, reason)
            return
        failed.append(f"{name} {error}")
    raise PlanError(
        f"--n_bits {bits}: no quantizer passed its probe on {draft.backend} ({'; '.join(failed)}). These pass: "
        f"{passing_quantizers(draft)}. Use one of them, or --train_type lora."
    )


def _no_quantizer(values: dict) -> str:
    """The line for a combination that no method has."""
    methods, quant_type = quantization_wrapper.METHODS, values["quant_type"]
    known = {word for method in methods.values() for words in method.quant_types.values() for word in words}
    if quant_type is not None and quant_type not in known:
        return f"--quant_type {quant_type}: only --backend mlx has it. Use one of {', '.join(sorted(known))}."
    with_bits = [name for name in quantization_wrapper.AUTO_ORDER if values["n_bits"] in methods[name].bits]
    why = quantization_wrapper.unsupported((with_bits or ["nf4"])[0], *_asked(values))
    assert why is not None, _asked(values)
    return why


def passing_quantizers(draft: Draft) -> str:
    """The (method, bits) pairs that pass their probes here, in words."""
    tried = [pair for pair in quantization_wrapper.pairs() if draft.facts.probe_quantizer(*pair)]
    passed = [f"{name} at {bits} bits" for name, bits in tried if probe_error(draft, name, bits) is None]
    return ", ".join(passed) or "none"


def steps(draft: Draft) -> None:
    """Warmup given in steps, no warmup that was not asked for before a constant rate, an objective's own defaults."""
    values = draft.values
    optimizer_of_device(draft)
    if values["lr_scheduler"] == "constant" and not (
        draft.given("warmup_ratio") or "warmup_ratio" in (draft.facts.inherited or {})
    ):
        draft.adjust("warmup_ratio", 0.0, "--lr_scheduler constant warms up only if asked to")
    for flag, value in OBJECTIVES[values["preference"]].defaults.items():
        if not draft.given(flag):
            draft.adjust(flag, value, f"the default of --preference {values['preference']}")
    if draft.given("warmup_steps"):
        values["warmup_ratio"] = 0.0
    for flag, (default, why) in OPTIMIZERS[values["optimizer"]].defaults.items():
        if not draft.given(flag):
            draft.adjust(flag, default, why)
    if values["label_smoothing"]:
        draft.notices.append(
            f"label_smoothing {values['label_smoothing']:g}: the training loss is smoothed, the validation loss is not"
        )


def optimizer_of_device(draft: Draft) -> None:
    """Paged optimizers page on CUDA only; Muon's matrices; packages that are not there."""
    values = draft.values
    check(draft, conflicts.OPTIMIZER)
    word = values["optimizer"]
    unpaged = OPTIMIZERS[word].unpaged
    if unpaged and draft.backend is not Backend.CUDA and not draft.assumes_accelerator:
        draft.adjust("optimizer", unpaged, "moments are paged from a CUDA device's memory only")
    package = OPTIMIZERS[values["optimizer"]].package
    if package and draft.backend is not Backend.MLX and package_version(package) is None:
        missing = f"{package} is not installed. pip install {package}."
        if not values["dry_run"]:
            raise PlanError(f"--optimizer {word}: {missing}")
        draft.notices.append(f"optimizer {word}: {missing}")


def learning_rate(draft: Draft) -> None:
    """--lr auto, the middle of a search and --adam_beta2, once rows per step and the number of steps are known."""
    rows = training_rows(draft)
    steps = steps_of(draft, rows or 1) if rows or draft.values["max_steps"] > 0 else None
    if steps is not None:
        choose_adam_beta2(draft, steps)
    searches = draft.values["lr"] == "search"
    if searches:
        check(draft, conflicts.LR_SEARCH)
    if searches or draft.is_open("lr"):
        draft.values["lr"] = draft.requested.get("lr", "auto")
        draft.adjust("lr", *auto_rate(draft, steps))


def model_limits(draft: Draft) -> None:
    """What the model's config allows: degrees that divide it, experts."""
    values, shape = draft.values, draft.shape
    if values["model_name"] is None:
        values["model_name"] = DEMO_MODEL
    if shape is None:
        return
    check_model(draft.dims, shape, CHUNKS[values["pp_schedule"]])
    if shape.num_layers is not None:
        limited_layers(draft, shape.num_layers)
    load_balancing(draft)
    if draft.dims.tp * draft.dims.pp > 1:
        draft.notices.append(
            "transformers' tensor and pipeline plans of this model are checked when it loads, before its weights are "
            "read"
        )
    if draft.dims.tp > 1 and shape.kind in WITHOUT_TP_PLAN:
        draft.notices.append(
            f"tp_degree {draft.dims.tp}: transformers has no tensor-parallel plan for {shape.kind}: its experts "
            "are sliced, all else is replicated"
        )
    if shape.num_experts and values["train_type"] != "full" and not values["llama_pro_path"]:
        draft.notices.append(_experts_notice(values, shape.num_experts))


def limited_layers(draft: Draft, count: int) -> None:
    """--num_layers and --layers_to_transform name layers that the model has."""
    last, named = draft.values["num_layers"], draft.values["layers_to_transform"]
    if last > count:
        raise PlanError(f"--num_layers {last}: the model has {count} layers. Use {count} or fewer, or -1 for all.")
    if named is not None and any(int(n) >= count for n in named.split(",")):
        raise PlanError(f"--layers_to_transform {named}: the model has layers 0 to {count - 1}. Name some of them.")


def load_balancing(draft: Draft) -> None:
    """--router_aux_loss_coef: what has no router, or computes its loss elsewhere."""
    values, coefficient = draft.values, draft.values["router_aux_loss_coef"]
    if not coefficient:
        return
    check(draft, conflicts.MODEL)
    if values["train_type"] != "full":
        draft.notices.append(
            f"router_aux_loss_coef {coefficient:g}: the routers are frozen; the loss trains the adapters that feed them"
        )


def _experts_notice(values: dict, num_experts: int) -> str:
    facts = []
    if values["train_type"] == "qlora":
        how = "with dense copies" if values["cache_dequantized"] == "true" else "and dequantized one at a time"
        facts.append(f"are quantized, {how}")
    if values["use_dora"]:
        facts.append("get no adapter: PEFT has no DoRA for expert weights held as one parameter")
    elif values["lora_target_modules"] == "all":
        facts.append("get adapters of their own" + (" without dropout, as PEFT's" if values["lora_dropout"] else ""))
    return f"{num_experts} experts per layer " + "; ".join(facts or ["stay frozen"])


def saving(draft: Draft) -> None:
    """--save_model false writes nothing, which some settings need."""
    check(draft, conflicts.SAVING)


def profiling(draft: Draft) -> None:
    """What the profiler will not write as asked."""
    values = draft.values
    if not values["profile"]:
        given = [n for n in ("export_memory_timeline", "profile_memory", "with_stack", "with_shapes") if values[n]]
        if given:
            draft.notices.append(f"{', '.join(given)}: nothing is recorded without --profile")
    elif values["export_memory_timeline"] and package_version("matplotlib") is None:
        draft.notices.append(
            "export_memory_timeline: matplotlib is not installed, so each timeline is written as numbers "
            "(memory-step-N.json.gz) and not drawn (pip install matplotlib)"
        )


def default_output_dir(draft: Draft, now: datetime) -> None:
    if draft.values["output_dir"] is None:
        draft.values["output_dir"] = f"outputs/{now:%Y%m%d-%H%M%S}-{Path(draft.values['model_name']).name}"


# The order matters: each rule reads what those above it settled.
RULES = (
    deprecated_aliases,
    prequantized_base,
    train_type_asked,
    contradictions,
    saved_adapter,
    data_flags,
    preference_limits,
    train_type_limits,
    mlx_limits,
    resolve_parallelism,  # world size, degrees, who distributes
    machine,
    precision,
    cpu_matmul,
    accelerate_limits,
    preference_parallelism,
    train_type,
    quantization,
    recompute_on_apple_gpus,
    steps,
    model_limits,
    context_length,
    amount,  # rows per step, epochs, rank
    resolve_memory,  # dense copies, offload, flash attention, checkpointing, batch size
    learning_rate,
    amount_said,
    quantized_on_cpu,
    saving,
    resolve_async_save,
    profiling,
)
