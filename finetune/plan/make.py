"""The plan of a command line: the run it resumes, this machine, the model's files, then the fold of plan.settle."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from finetune.adapters.continued import SavedAdapter, read_saved
from finetune.adapters.heads import HeadRecord
from finetune.adapters.patterns import LEAF, PREFIX, Uniform
from finetune.adapters.saved import open_adapter
from finetune.adapters.targets import layer_of, named_targets, regex_of
from finetune.checkpoint.saved_run import find_saved_run
from finetune.checkpoint.store import check_not_removed
from finetune.data.chat_template import day_of
from finetune.data.lengths import data_sample
from finetune.data.prepare import named_sources
from finetune.data.reading.sources import check_local
from finetune.distributed.env import RankEnv
from finetune.errors import PlanError
from finetune.estimate.model_cost import adapted_of
from finetune.estimate.model_shape import ModelShape, read_headers
from finetune.estimate.traced import traceable_shape
from finetune.model_files.classes import class_of, reads_last_token
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.model_files.files import ModelFiles, find_model_of, lacks_tokenizer, tokenizer_folder, with_new_tokens
from finetune.model_files.hub_ranges import model_on_paper
from finetune.model_files.hub_upload import check_upload
from finetune.model_files.processor import sees_images
from finetune.model_files.published import check_is_latest
from finetune.model_files.vocabulary import added_beyond, tokens_of, words_of
from finetune.parts.engine_limits import TOWER
from finetune.parts.heads import HEADS
from finetune.parts.plan_base import SavedRun
from finetune.parts.reward import parse_rewards
from finetune.parts.trains import Adapter
from finetune.plan.backend import check_environment, select_backend, selection
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import check_resumed, inherited_from_checkpoint, resumed_overrides, without_repeated_rows
from finetune.plan.rope import with_rope_scaling
from finetune.plan.run_plan import RunPlan
from finetune.safetensors_io import FloatTensors
from finetune.system.files import check_writable


def make_plan(
    overrides: dict, env: RankEnv | None = None, beside: Callable[[RunPlan], int] = lambda plan: 0
) -> RunPlan:
    """The settled plan, before anything is loaded. A dry run neither probes nor downloads. Raises PlanError.

    `env`: this process's rank if a launcher started it. `beside`: bytes of what stays in memory beside a plan's run.
    """
    check_environment(overrides)
    if overrides.get("new_tokens"):
        overrides = {**overrides, "new_tokens": words_of(overrides["new_tokens"])}
    prepare = not overrides.get("dry_run")
    given = overrides
    saved = find_saved_run(overrides.get("resume"), overrides.get("output_dir"))
    if saved:
        saved = with_own_base(saved)
        given = without_repeated_rows(overrides, saved, env.launcher if env else None)
        overrides = resumed_overrides(overrides, saved, launched=env is not None)
    adapter = None
    if overrides.get("adapter") and not saved:
        adapter = read_saved(overrides["adapter"], prepare)
        check_is_latest(adapter.folder, f"--adapter {overrides['adapter']}")
    if saved and has_own_base(saved.saved_plan["settled"]):
        overrides = {**overrides, "model_name": saved.saved_plan["settled"]["model_name"], "revision": None}
    if adapter and not overrides.get("model_name"):
        overrides = {**overrides, "model_name": adapter.base, "revision": overrides.get("revision", adapter.revision)}
    manager, skipped = select_backend(overrides.get("backend"))
    files = find_model_of(overrides, fetch=prepare)
    on_paper = ""
    if files is None and not overrides.get("llama_pro_path") and overrides.get("model_name") not in (None, DEMO_MODEL):
        files, on_paper = model_on_paper(overrides["model_name"], overrides.get("revision"))
        if files and (files.tokenizer_folder / "tokenizer.json").is_file():
            files = with_new_tokens(files, overrides.get("new_tokens"))
    if adapter and files and not on_paper:
        check_base(adapter, files)
        adapter = with_its_tokens(adapter, files, overrides)
    if files and (adapter or saved):
        words = None
        if adapter:
            words = adapter.new_tokens
        elif saved:
            words = saved.saved_plan["settled"].get("new_tokens")
        files = with_new_tokens(files, words)
        if words and saved and set(tokens_of(overrides.get("new_tokens"))) <= set(tokens_of(words)):
            overrides = {**overrides, "new_tokens": words}  # with those of the adapter that the run continues
    factor = None
    if files and not saved:
        files, factor = with_rope_scaling(files, overrides)
    sample = None
    if files:
        own = tokenizer_folder(adapter.folder, files) if adapter else files.tokenizer_folder
        sample = partial(data_sample, tokenizer_folder=own, fetch=prepare, files=files)
    facts = Facts(
        manager.backend,
        manager.capabilities if prepare else manager.documented_or_cached(),
        traceable_shape(files, overrides.get("llama_pro_path")) if files else None,
        inherited=inherited_from_checkpoint(saved.saved_plan, str(manager.backend), given) if saved else None,
        probe=manager.probe_quantization if prepare else manager.known_quantization,
        prequantized=files.stored if files else None,
        env=env,
        num_devices=manager.num_devices,
        environment=dict(os.environ),
        sample=sample,
        adapter=adapter,
        sees_images=files is not None and sees_images(files.folder, files.config),
        weight_files=files.weight_files if files else (),
        rope_factor=factor,
        added_tokens=files.vocabulary.added if files and files.vocabulary else None,
    )
    day = day_of(saved.saved_plan["settled"] if saved else {})
    plan = resolve_plan(overrides, facts)
    held = beside(plan)
    if held:
        plan = resolve_plan(overrides, replace(facts, beside=held))
    plan = replace(plan, files=files, resume_from=saved, day=day)
    if plan.shape and plan.shape.tracer:
        plan.shape.tracer.close()
    if adapter:
        _, tensors = open_adapter(adapter.folder)
        check_fit(adapter, tensors, plan.shape)
        if not plan.settings.adapter_merge:
            check_ends(adapter, tensors, plan.shape)
        if files and (line := lacks_tokenizer(adapter.folder, files)):
            plan = replace(plan, notices=(*plan.notices, line))
    if plan.output.overwrite and not (saved and saved.continues):
        check_not_removed(plan.output.folder, read_by(plan), "--output_dir", "--overwrite")
    plan = with_files_checked(plan, on_paper)
    selected = None
    if not plan.settings.assume_memory:  # this machine's devices do not matter then
        selected = selection(overrides.get("backend"), manager, skipped)
    if selected:
        plan = replace(plan, adjustments=(selected, *plan.adjustments))
    for flag in ("dataset", "validation_dataset", "score_dataset"):
        for source in named_sources(plan.data, flag) if getattr(plan.data, flag) else ():
            check_local(source.name, f"--{flag}")
            place = Path(source.name)
            if place.is_dir() and place.resolve() == plan.output.folder.resolve():
                raise PlanError(
                    f"--output_dir {plan.output.output_dir}: is the folder of --{flag}, whose files would be the run's "
                    "from then on. Give another, or the file of the rows."
                )
    if plan.output.push_to_hub and prepare:
        check_upload(plan.output.push_to_hub)
    if plan.settings.verbose:
        manager.print_summary()
    if saved:
        return check_resumed(plan, saved.saved_plan)
    return plan


def has_own_base(settled: dict) -> bool:
    """True for the settings of a run whose base was made for it, in its output_dir."""
    return bool(settled.get("adapter_merge")) or settled.get("rope_factor") is not None


def with_own_base(saved: SavedRun) -> SavedRun:
    """The run with its own base, if it has one, in its output_dir where the run was moved or named from elsewhere."""
    settled = saved.saved_plan["settled"]
    if not has_own_base(settled) or Path(settled["model_name"]).is_dir():
        return saved
    here = saved.output_dir / Path(settled["model_name"]).name
    if not here.is_dir():
        return saved
    return replace(saved, saved_plan=saved.saved_plan | {"settled": settled | {"model_name": str(here)}})


def _with_adapters(shape: ModelShape, trains: Adapter, names: list[str]) -> list[str]:
    """Names of the layers that get an adapter; all `names` of the files where the model's formula has no names."""
    known = shape.known
    adapted = [name for name, _, _ in adapted_of(known, trains)] if known else []
    leaves = {name.rpartition(".")[2] for name in names}
    if not adapted or any(name.rpartition(".")[2] not in leaves for name in adapted):
        return names
    return adapted


def check_targets(plan: RunPlan, files: ModelFiles) -> None:
    """Raises PlanError for names in --lora_target_modules, --modules_to_save and --lora_rank_pattern that no weight of
    the model's files has, and for a regex that is none. Experts, which are fused when they are loaded, full names and
    regexes are matched on the loaded model.
    """
    trains = plan.trains
    shape = plan.shape
    if not isinstance(trains, Adapter) or plan.settings.adapter or shape is None or shape.num_experts:
        return
    if not files.weight_files or any(path.suffix != ".safetensors" for path in files.weight_files):
        return
    headers = read_headers(files.weight_files)
    for word in trains.modules:
        check_module(word, headers)
    matrices = {name.rpartition(".")[0] for name, of in headers.items() if len(of) >= 2 and name.endswith("weight")}
    packed = {name.rpartition(".")[0] for name in headers if name.endswith((".qweight", ".scales", ".weight_packed"))}
    names = sorted(matrices | packed | ({"lm_head"} if shape and shape.tied else set()))
    reached = names
    if trains.vision != "lora":
        reached = [name for name in names if not TOWER.search(name)]
    trains.check_names(_with_adapters(shape, trains, reached), words_only=True)
    if trains.targets in ("all", "default"):
        return
    if not re.fullmatch(r"[\w,\s]+", trains.targets):
        regex_of(trains.targets)
        return
    named_targets(names, trains.targets, "no weight of this model has that name")


def check_head(plan: RunPlan, files: ModelFiles) -> None:
    """Raises PlanError for an architecture whose head of --task no class of transformers would open."""
    record = HeadRecord.read(files.folder)
    if record is not None and record.task != plan.data.task:
        raise PlanError(
            f"--task {plan.data.task}: {files.name} was trained with --task {record.task}, and has its head. Give "
            f"--task {record.task}, or the base."
        )
    if not HEADS[plan.objective.facts.head].module:
        return
    kind = files.config.get("model_type")
    said = f"--task {plan.data.task}"
    if "text_config" in files.config and "vision_config" in files.config:
        raise PlanError(
            f"{said}: {files.name} is a model of images and text, whose head is not built here. Give a model of text."
        )
    name = class_of(kind)
    if name is None:
        raise PlanError(
            f"{said}: transformers has no class of {kind} for sequence classification, which would open the result. "
            "Give another model."
        )
    projected = files.config.get("word_embed_proj_dim")  # OPT of 350M parameters
    if not reads_last_token(kind) or projected not in (None, files.config.get("hidden_size")):
        raise PlanError(
            f"{said}: transformers' {name} has another head than a linear layer on a row's last token. Give another "
            "model."
        )


def check_module(word: str, tensors: Iterable[str]) -> None:
    """Raises PlanError if the name of no module in a model's files ends so; a tied head is in none."""
    modules = {".".join(name.split(".")[:i]) for name in tensors for i in range(1, name.count(".") + 1)} | {"lm_head"}
    if not any(module.endswith(word) for module in modules):
        leaves = sorted({leaf for name in modules if not (leaf := name.rpartition(".")[2]).isdecimal()})
        raise PlanError(
            f"--modules_to_save {word}: no module of this model is named so. Choose from {', '.join(leaves)}."
        )


def with_its_tokens(adapter: SavedAdapter, files: ModelFiles, overrides: dict) -> SavedAdapter:
    """The adapter with its saved new tokens, followed by the newly requested ones."""
    if overrides.get("adapter_merge"):
        return replace(adapter, new_tokens=overrides.get("new_tokens"))
    grown = adapter.modules and (adapter.folder / "tokenizer.json").is_file()
    own = None
    if grown:
        own = added_beyond(adapter.folder, files.tokenizer_folder)
    asked = [word for word in tokens_of(overrides.get("new_tokens")) if word not in tokens_of(own)]
    return replace(adapter, new_tokens=",".join([*tokens_of(own), *asked]) or None)


def check_base(adapter: SavedAdapter, files: ModelFiles) -> None:
    """Raises PlanError if the base is known to be another than the adapter was trained on."""
    if adapter.digest and files.weight_files and not files.matches(adapter.digest):
        raise PlanError(
            f"--adapter {adapter.folder}: was trained on another base than {files.name} (sha256 differs). Give "
            f"--model_name {adapter.base} as it was then."
        )


def check_fit(adapter: SavedAdapter, tensors: FloatTensors | Uniform, shape: ModelShape | None) -> None:
    """Raises PlanError for a matrix of the adapter that its layer in the base's files has no place for, and for numbers
    that are not finite.
    """
    for _ in tensors.values():  # each is read, and so checked
        pass
    if shape is None or not shape.exact:
        return
    sizes = {name: (rows, columns) for name, rows, columns in shape.linears}
    for name, found in tensors.shapes.items():
        rows, columns = sizes.get(LEAF.sub("", name.removeprefix(PREFIX)), (None, None))
        needed = list(found)
        if name.endswith("lora_A.weight") and columns is not None:
            needed[-1] = columns
        elif name.endswith("lora_B.weight") and rows is not None:
            needed[0] = rows
        if needed != list(found):
            raise PlanError(
                f"--adapter {adapter.folder}: {name} is {list(found)}, this base needs {needed}. Give the base it was "
                "trained on."
            )


def check_ends(adapter: SavedAdapter, tensors: FloatTensors | Uniform, shape: ModelShape | None) -> None:
    """Raises PlanError for other embeddings than the head, as PEFT trains them, of a base that has one weight."""
    if shape is None or not shape.tied:
        return
    outer = {
        name: found for name, found in tensors.shapes.items() if not (LEAF.search(name)) and layer_of(name) is None
    }
    ends = [name for name, found in outer.items() if shape.is_of_vocabulary(found)]
    if ends and not (len(ends) > 1 and np.array_equal(tensors[ends[0]], tensors[ends[1]])):
        names = " and ".join(end.removeprefix(PREFIX) for end in ends)
        raise PlanError(
            f"--adapter {adapter.folder}: its {names} trained apart, and this base has one weight for embeddings and "
            "head. Add --adapter_merge."
        )


def read_by(plan: RunPlan) -> Iterator[tuple[str, Path]]:
    """(flag and value, path) of the models and rows that a run reads."""
    s = plan.settings
    for flag in ("model_name", "adapter", "teacher", "llama_pro_path"):
        value = getattr(s, flag)
        if value:
            yield f"--{flag} {value}", Path(value)
    for judge in parse_rewards(s.reward):
        if judge.is_model:
            yield f"--reward {judge.name}", judge.folder
    for flag in ("dataset", "validation_dataset", "score_dataset"):
        for source in named_sources(plan.data, flag) if getattr(plan.data, flag) else ():
            yield f"--{flag} {source.name}", Path(source.name)


def with_files_checked(plan: RunPlan, on_paper: str = "") -> RunPlan:
    """The plan, with a notice if its model is not here. Raises PlanError for files that it cannot train or write to.
    `on_paper`: what of a Hub model was read, or why it was not.
    """
    files = plan.files
    name = plan.settings.model_name
    if files is None:
        why = ""
        if on_paper:
            why = f" ({on_paper})"
        notice = f"{name} is not on this disk yet{why}: limits that depend on it are not checked"
        return replace(plan, notices=(*plan.notices, notice))
    if on_paper:
        plan = replace(plan, notices=(*plan.notices, on_paper))
    check_targets(plan, files)
    check_head(plan, files)
    if plan.output.folder.resolve() == files.folder.resolve():
        raise PlanError(f"--output_dir {plan.output.output_dir}: is the model's own folder. Give another.")
    check_writable(plan.output.folder, "--output_dir")
    if plan.engine != "mlx" and any(path.suffix == ".npz" for path in files.weight_files):
        raise PlanError(
            f"--model_name {name}: holds MLX's .npz. Direct loading not supported, conversion required: "
            "use --backend mlx, or write model.safetensors with mlx.core.save_safetensors."
        )
    return plan
