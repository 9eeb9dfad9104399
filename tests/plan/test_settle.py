"""The plan as a fold: what its functions take, read and settle."""

import ast
import inspect
import random
import textwrap
from dataclasses import fields
from functools import cache

import pytest

from backend_manager import Backend
from finetune.config import FIELDS
from finetune.data.lengths import DataSample
from finetune.errors import PlanError
from finetune.plan import degrees, settle
from finetune.plan.asked import Asked, Change, Standing
from finetune.plan.facts import Facts
from finetune.plan.output import EVALUATES
from tests.support.planned import shape_of
from tests.support.plans import capabilities, plan_of

GIB = 2**30
MODELS = ("llama-3.1-8b", "mixtral-8x22b")
# Flags with several values each; the first is none.
ASKED = {
    "train_type": (None, "full", "lora", "qlora"),
    "preference": (None, "dpo", "orpo"),
    "assume_memory": (None, "8GiB", "80GiB"),
    "assume_world_size": (None, 8),
    "optimizer": (None, "lion", "paged_adamw_8bit", "schedule_free_adamw"),
    "precision": (None, "fp32", "bf16_autocast"),
    "lr": (None, "search"),
    "save_every": (None, 10),
    "max_steps": (None, 50),
    "attention": (None, "sdpa"),
    "router_aux_loss_coef": (None, 0.01),
    "tp_degree": (None, 2),
    "streaming": (None, True),
    "eval_every": (None, "auto"),
}


class Reading(Asked):
    """What is asked for, which keeps the names of the flags that were read of it."""

    def __getattr__(self, flag):
        if flag in FIELDS:
            self.settings.read.add(flag)
        return getattr(self.settings, flag)


class ReadingFold(settle.Fold):
    """A fold that keeps what each of its functions read and settled."""

    def __init__(self, requested):
        super().__init__(requested)
        self.reads: dict[str, set[str]] = {}
        self.writes: dict[str, set[str]] = {}

    def said_by(self, step, plan):
        name = name_of(step)
        reads = self.reads.setdefault(name, set())
        writes = self.writes.setdefault(name, set())
        asked = Reading(**{f.name: getattr(plan.asked, f.name) for f in fields(Asked)})
        vars(asked.settings)["read"] = reads
        found = list(super().said_by(step, Standing(asked, plan.facts, plan.ranks, plan.adjustments, plan.notices)))
        vars(asked.settings).pop("read")
        writes |= {said.setting for said in found if isinstance(said, Change)}
        return found


def name_of(step: settle.Step) -> str:
    return step.function.__name__


@cache
def matrix() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """(flags that each function read, flags that it settled), over 300 plans of random flags."""
    draw = random.Random(1)
    sample = DataSample(tuple(range(20, 400, 5)), 900)
    reads: dict[str, set[str]] = {}
    writes: dict[str, set[str]] = {}
    for _ in range(300):
        asked = {flag: draw.choice((None, *values)) for flag, values in ASKED.items()}
        asked |= {"dry_run": True, "dataset": "rows.jsonl", "model_name": "m"}
        facts = Facts(
            draw.choice((Backend.CPU, Backend.CUDA, Backend.MPS, Backend.MLX)),
            capabilities(memory_bytes=64 * GIB),
            shape_of(draw.choice(MODELS)),
            sample=lambda data: sample,
        )
        fold = ReadingFold(asked)
        try:
            degrees.with_degrees(fold, fold.settle(facts))
        except PlanError:
            pass
        for found, kept in ((fold.reads, reads), (fold.writes, writes)):
            for name, flags in found.items():
                kept.setdefault(name, set()).update(flags)
    return reads, writes


def in_source(function, seen: set[str]) -> tuple[set[str], set[str]]:
    """(flags read as `asked.FLAG`, flags named in Change) by a function and those of finetune.plan that it calls."""
    seen.add(function.__name__)
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    reads = {node.attr for node in attributes if node.value.id == "asked" and node.attr in FIELDS}
    changes = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Change"]
    writes = {call.args[0].value for call in changes if isinstance(call.args[0], ast.Constant)}
    for node in nodes:
        called = getattr(inspect.getmodule(function), getattr(node, "id", ""), None)
        ours = inspect.isfunction(called) and called.__module__.startswith("finetune.plan")
        if ours and called.__name__ not in seen:
            more_reads, more_writes = in_source(called, seen)
            reads |= more_reads
            writes |= more_writes
    return reads, writes


def test_no_function_reads_a_flag_that_a_later_one_settles():
    """By what the plans above read, and by what stands in the functions, run or not."""
    reads, writes = ({name: set(flags) for name, flags in found.items()} for found in matrix())
    order = [name_of(step) for step in settle.STEPS]
    assert set(reads) == set(order), set(order) - set(reads)
    for step in settle.STEPS:
        named, changed = in_source(step.function, set())
        reads[name_of(step)] |= named
        writes[name_of(step)] |= changed
    wrong = [
        f"{name} reads {flag}, which {later} settles"
        for place, name in enumerate(order)
        for later in order[place + 1 :]
        for flag in sorted(reads[name] & writes[later] - writes[name])
    ]
    assert wrong == []


def test_each_function_takes_only_what_was_settled_before_it():
    """A typed part is an argument only of functions after the one that settles it."""
    settled_by = {
        "precision": "precision",
        "trains": "train_type",
        "quantization": "quantization",
        "memory": "memory",
        "objective": "model",
        "ranks": "world",
        "room": "world",
        "quantizes": "train_type",
        "rows": "held_out",
        "length": "amount",
        "steps": "amount",
    }
    seen: set[str] = set()
    for step in settle.STEPS:
        for name in step.names:
            assert name in settle.PARTS or name in settle.ARGUMENTS
            assert name not in settled_by or settled_by[name] in seen, f"{name_of(step)} takes {name}"
        seen.add(name_of(step))


@pytest.mark.parametrize("step", settle.STEPS, ids=name_of)
def test_a_function_of_the_plan_takes_typed_arguments_and_no_dict_of_settings(step):
    for parameter in inspect.signature(step.function).parameters.values():
        assert parameter.annotation not in (dict, inspect.Parameter.empty), parameter


@pytest.mark.parametrize(
    ("flags", "beside", "other"),
    [
        (dict(score_samples=8, score_metric="contains"), "--score_dataset", dict(score_dataset="dummy")),
        (dict(shuffle_buffer=8), "--streaming", dict(streaming=True, max_steps=8)),
        (dict(image_root="/tmp", allow_urls=True), "rows that show images", None),
        (dict(wait_steps=3, repeat=2, export_trace=False), "--profile", dict(profile=True)),
        (dict(project_name="p", group="g"), "a tracker in --log_to", dict(log_to="csv")),
        (dict(eval_every=2, eval_samples=8, score_max_new_tokens=9), EVALUATES, dict(validation_split=0.5)),
    ],
)
def test_a_flag_that_nothing_reads_in_this_run_is_a_line(flags, beside, other):
    line = f"{', '.join(flags)}: not read without {beside}"
    dataset = dict(dataset="dummy")
    assert line in plan_of(**dataset, **flags).notices
    assert other is None or not any("not read" in notice for notice in plan_of(**dataset, **flags, **other).notices)
    assert not any("not read" in notice for notice in plan_of(**dataset).notices)


@pytest.mark.parametrize(
    ("flags", "unset", "beside"),
    [
        (dict(cosine_min_lr_ratio=0.5), dict(lr_scheduler="linear"), "--lr_scheduler cosine"),
        (dict(grad_norm=0.5), dict(apply_gradient_clipping=False), "--apply_gradient_clipping true"),
        (dict(keep_last=9), dict(save_model=False), "--save_model true"),
        (dict(async_save="true"), dict(save_model=False), "--save_model true"),
        (dict(pp_schedule="gpipe"), dict(), "--pp_degree"),
    ],
)
def test_a_flag_beside_which_another_is_off_is_a_line(flags, unset, beside):
    (name,) = flags
    said = f"{name}: not read without {beside}"
    assert said in plan_of(dataset="dummy", **flags, **unset).notices
    assert not any("not read" in notice for notice in plan_of(dataset="dummy", **unset).notices)
    if unset:
        assert said not in plan_of(dataset="dummy", **flags).notices


def test_warmup_of_no_steps_leaves_a_ratio_that_is_given():
    """Configurations of other programs have both, of which 0 steps say nothing."""
    for words, steps in ((dict(warmup_ratio=0.5, warmup_steps=0), 0.5), (dict(warmup_steps=0), 0.0)):
        assert plan_of(dataset="dummy", **words).steps.warmup_ratio == steps
