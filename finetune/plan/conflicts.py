"""Settings that exclude each other: tables of rows, one loop that refuses them, one form of error.

plan.settle names the table that is checked before or after each function of the plan, when the values that it reads are
settled. docs/conflicts.md is written from these tables by docs/make_conflicts.py. Conflicts that need more than a
comparison of values are refused by the functions themselves.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from backend_manager import Backend
from finetune.adapters.formats import EXPERTS
from finetune.config import DEFAULTS, FIELDS
from finetune.distributed.accelerate_config import NAMES
from finetune.errors import PlanError
from finetune.parts.degrees import DEGREES, Excluded
from finetune.parts.inits import INITS, drawn_inits
from finetune.parts.objectives import (
    EMBED,
    GENERATE,
    OBJECTIVES,
    distillations,
    from_labels,
    objective_of,
    of_answers,
    preferences,
    reward_losses,
    tasks,
    with_reference,
    words_of,
)
from finetune.parts.optimizers import BETAS, DEFAULT_OPTIMIZER, OPTIMIZERS
from finetune.parts.plan_base import format_value
from finetune.parts.rope_scaling import NONE
from finetune.parts.rows import Limit, in_prose, words_with
from finetune.parts.teacher import is_address
from finetune.plan.asked import Standing


@dataclass(frozen=True)
class Values:
    """Values of a flag, in words and as a predicate on (value, default). `if_given`: only if the user set it."""

    text: str
    match: Callable[[Any, Any], bool]
    if_given: bool = False

    def hold(self, plan: Standing, flag: str) -> bool:
        return (plan.asked.given(flag) or not self.if_given) and self.match(getattr(plan.asked, flag), DEFAULTS[flag])


@dataclass(frozen=True)
class Condition:
    """A property of the plan beside the refused values, in words and as a predicate on the plan."""

    text: str
    holds: Callable[[Standing], bool]


@dataclass(frozen=True)
class Conflict:
    """`flag` with the values `when` is refused beside `other`: `why` and `remedy` may name {settings} and `shown`."""

    flag: str
    when: Values
    other: Condition
    why: str
    remedy: str


def check(plan: Standing, conflicts: Iterable[Conflict]) -> None:
    """Raises PlanError for the first conflict of these that the plan has."""
    for conflict in conflicts:
        if conflict.when.hold(plan, conflict.flag) and conflict.other.holds(plan):
            values = shown(plan)
            why = conflict.why.format(**values)
            remedy = conflict.remedy.format(**values)
            raise PlanError(f"--{conflict.flag} {values[conflict.flag]}: {why}. {remedy}.".removesuffix(" ."))


def shown(plan: Standing) -> dict[str, object]:
    """Values that a row's text may name: every setting, and facts under names in capitals."""
    values: dict[str, object] = {name: _shown_value(getattr(plan.asked, name)) for name in FIELDS}
    values["DISTRIBUTION"] = NAMES.get(plan.ranks.distribution, plan.ranks.distribution)
    values["STORED"] = _stored_by(plan)
    values["LEARNED"] = f"--preference {plan.asked.preference}"
    if plan.asked.reward:
        values["LEARNED"] = "--reward"
    if plan.asked.task != GENERATE:
        values["LEARNED"] = f"--task {plan.asked.task}"
    values["EXPERTS"] = plan.facts.num_experts
    values["backend"] = str(plan.facts.backend)
    return values


def _shown_value(value: object) -> str:
    """The value of a setting; in quotes where it is blank."""
    if isinstance(value, str) and not value.strip(" ,"):
        return repr(value)
    return format_value(value)


def _stored_by(plan: Standing) -> str | None:
    return (plan.facts.prequantized or {}).get("quantization_backend")


def _adapts_experts(plan: Standing) -> bool:
    """True if MLX would quantize experts, or give adapters to those whose place in mlx-lm is not known."""
    shape = plan.facts.shape
    if plan.facts.backend is not Backend.MLX or not plan.facts.num_experts or plan.asked.train_type == "full":
        return False
    if plan.asked.train_type == "qlora":
        return True
    return plan.asked.lora_target_modules == "all" and (shape is None or shape.kind not in EXPERTS)


# ---- values

SET = Values("set", lambda value, default: bool(value))
UNSET = Values("not set", lambda value, default: not value)
GIVEN = Values("given", lambda value, default: True, if_given=True)
SET_AND_GIVEN = Values("given", lambda value, default: bool(value), if_given=True)
OFF_AND_GIVEN = Values("`false`", lambda value, default: value == "false", if_given=True)  # not what a run settled
CHANGED = Values("changed", lambda value, default: value != default, if_given=True)
NOT_DEFAULT = Values("changed", lambda value, default: value != default)
NO_NUMBERS = Values(
    "other than whole numbers",
    lambda value, default: value is not None and not all(part.strip().isdecimal() for part in value.split(",")),
)
EMPTY = Values("empty", lambda value, default: value is not None and not any(part.strip() for part in value.split(",")))


def is_one_of(*words: object) -> Values:
    return Values(" or ".join(f"`{format_value(w)}`" for w in words), lambda value, default: value in words)


def is_none_of(*words: object, if_given: bool = False) -> Values:
    text = "other than " + " and ".join(f"`{format_value(w)}`" for w in words)
    return Values(text, lambda value, default: value not in words, if_given)


def over(limit: float) -> Values:
    return Values(f"over {limit:g}", lambda value, default: value != "auto" and value > limit)


def at_least(limit: float) -> Values:
    return Values(f"{limit:g} or more", lambda value, default: value != "auto" and value >= limit)


# ---- conditions

ALWAYS = Condition("", lambda plan: True)
ON_MLX = Condition("`--backend mlx`", lambda plan: plan.facts.backend is Backend.MLX)


def beside(flag: str, values: Values) -> Condition:
    return Condition(f"`--{flag}` {values.text}", lambda plan: values.hold(plan, flag))


def both(one: Condition, other: Condition) -> Condition:
    text = " and ".join(filter(None, (one.text, other.text)))
    return Condition(text, lambda plan: one.holds(plan) and other.holds(plan))


PREFERENCE_FLAGS = (
    *dict.fromkeys(f for word in preferences() for f in OBJECTIVES[word].arguments.values()),
    "precompute_ref_log_probs",
)
PREFERRING = Condition("`--preference` or `--reward`", lambda plan: objective_of(plan.asked) in of_answers())
WITH_LABELS = beside("preference", is_one_of(*from_labels()))
COMPARING = beside("preference", is_one_of(*with_reference()))

EIGHT_BIT = words_with(OPTIMIZERS, lambda facts: facts.eight_bit)
WITH_MATRICES = words_with(OPTIMIZERS, lambda facts: facts.takes_matrices)
RESIDUAL_INITS = words_with(INITS, lambda facts: facts.factors)
AVERAGING = words_with(OPTIMIZERS, lambda facts: facts.averages_weights)


def optimizer_limits(name: str) -> dict[Limit, tuple[str, ...]]:
    """{limit with the setting of this name: the optimizers that have it}."""
    words: dict[Limit, tuple[str, ...]] = {}
    for word, facts in OPTIMIZERS.items():
        words |= {limit: (*words.get(limit, ()), word) for limit in facts.limits if limit.beside == name}
    return words


def refused_optimizers(name: str, other: Condition) -> tuple[Conflict, ...]:
    """The conflicts of optimizers whose rows have a limit of this name."""
    limits = optimizer_limits(name).items()
    return tuple(Conflict("optimizer", is_one_of(*words), other, o.why, o.remedy) for o, words in limits)


def degrees_limited(name: str) -> list[tuple[str, str]]:
    """(degree, why) of the degrees whose rows have a limit of this name."""
    return [(degree, limit.why) for degree, row in DEGREES.items() for limit in row.limits if limit.beside == name]


def excluded_by(degree: str) -> Iterator[Excluded]:
    """Values of other settings that contradict a degree above 1, by its row and by those of optimizers."""
    row = DEGREES[degree]
    yield from row.excluded
    if row.slices_matrices:
        for word in WITH_MATRICES:
            yield Excluded("optimizer", word, "splits matrices that its update takes whole")
    for limit, words in optimizer_limits(degree).items():
        for word in words:
            yield Excluded("optimizer", word, limit.why)


# ---- the tables, in the order in which plan.settle checks them

OMIT_ONE = "Omit one of them"


def contradicts(flag: str, when: Values, other: str, values: Values, because: str = "") -> Conflict:
    """Two settings that do not go together, whichever of them was meant."""
    why = f"contradicts --{other} {{{other}}}{because}"
    return Conflict(flag, when, beside(other, values), why, OMIT_ONE)


SETTINGS = (
    contradicts("warmup_steps", SET_AND_GIVEN, "warmup_ratio", SET_AND_GIVEN),
    contradicts("validation_dataset", SET_AND_GIVEN, "validation_split", SET_AND_GIVEN),
    contradicts("resume", SET_AND_GIVEN, "overwrite", SET_AND_GIVEN),
    *(
        Conflict(name, at_least(1), ALWAYS, "must be below 1", "")
        for name in ("validation_split", "warmup_ratio", "lora_dropout")
    ),
    Conflict("cosine_min_lr_ratio", over(1), ALWAYS, "must be at most 1", ""),
    Conflict("label_smoothing", at_least(1), ALWAYS, "must be below 1", ""),
    contradicts("reentrant_checkpointing", is_one_of(True), "use_gradient_checkpointing", OFF_AND_GIVEN),
    *(
        Conflict(name, SET, beside("dry_run", UNSET), "plans for another machine", "Add --dry_run")
        for name in ("assume_memory", "assume_world_size", "assume_device", "assume_interconnect")
    ),
    Conflict("loading_workers", is_one_of(0), ALWAYS, "must be at least 1, or -1: chosen for this machine", ""),
    Conflict("lora_target_modules", EMPTY, ALWAYS, "names nothing", "Name layers, or use all"),
    Conflict("modules_to_save", EMPTY, ALWAYS, "names nothing", "Name modules, or omit it"),
    Conflict("layers_to_transform", NO_NUMBERS, ALWAYS, "must be numbers of layers", "Write them as 0,1,30"),
    contradicts("num_layers", over(0), "layers_to_transform", SET),
    *(
        Conflict(
            name,
            GIVEN,
            beside("optimizer", is_one_of(*(word for word, facts in OPTIMIZERS.items() if name not in facts.reads))),
            "applies to Adam only",
            f"Use {DEFAULT_OPTIMIZER}, or omit it",
        )
        for name in (*BETAS, "adam_epsilon")
    ),
    *(
        Conflict(
            "lr_scheduler",
            is_none_of(value, if_given=True),
            beside("optimizer", is_one_of(word)),
            why,
            f"Use {value}, or omit it",
        )
        for word, facts in OPTIMIZERS.items()
        for flag, (value, why) in facts.defaults.items()
        if flag == "lr_scheduler"
    ),
    *(
        Conflict(name, CHANGED, beside("lr_scheduler", is_none_of("wsd")), "is of --lr_scheduler wsd", OMIT_ONE)
        for name in ("wsd_decay_ratio", "wsd_decay_type")
    ),
    Conflict("max_steps", is_one_of(0), ALWAYS, "trains nothing", "Give a number of steps, or -1"),
)

BETWEEN = words_with(OBJECTIVES, lambda facts: facts.distills and "beta" in facts.arguments)
OF_SERVERS = Values("the address of a server", lambda value, default: is_address(value))
OF_SAMPLES = words_with(OBJECTIVES, lambda facts: facts.of_samples)
TEACHER = (
    *(
        Conflict(name, GIVEN, beside("teacher", UNSET), "there is no teacher", "Add --teacher, or omit it")
        for name in FIELDS
        if FIELDS[name].metadata["group"] == "teacher" and name != "teacher"
    ),
    contradicts("on_policy_fraction", SET, "train_on_prompt", is_one_of(True), ": prompts are answered"),
    contradicts("on_policy_fraction", SET, "teacher_cache", GIVEN, ": what it gives of sampled answers is not kept"),
    Conflict(
        "distill_loss",
        is_one_of(*OF_SAMPLES),
        both(beside("teacher", SET), beside("on_policy_fraction", is_one_of(0))),
        "is of answers that the model samples",
        f"Add --on_policy_fraction 1, or use {distillations()[0]}",
    ),
    *(
        contradicts("distill_loss", is_one_of(*OF_SAMPLES), name, CHANGED, because)
        for name, because in (
            ("temperature", ": its gradient is that of tokens sampled as the model finds them"),
            ("top_p", ": its gradient is that of tokens sampled as the model finds them"),
            ("teacher_top_k", ": it has the teacher's log-probability of the sampled token alone"),
        )
    ),
    *(
        contradicts(name, GIVEN, "teacher", OF_SERVERS, ": a server opens its model itself")
        for name in ("teacher_bits", "teacher_offload")
    ),
    Conflict("distill_beta", at_least(1), ALWAYS, "must be below 1", ""),
    Conflict(
        "distill_beta",
        GIVEN,
        beside("distill_loss", is_none_of(*BETWEEN)),
        f"is of --distill_loss {in_prose(BETWEEN, 'or')}",
        OMIT_ONE,
    ),
    *(
        contradicts("teacher", SET, name, when)
        for name, when in (
            ("preference", is_none_of("none")),
            ("reward", SET),
            ("label_smoothing", NOT_DEFAULT),
            ("images", is_one_of("true")),
            ("vocab_parallel", is_one_of("true")),
        )
    ),
    Conflict("teacher", SET, beside("streaming", is_one_of(True)), "reads all rows before the first step", OMIT_ONE),
    *(
        Conflict("teacher", SET, beside(name, over(1)), "its loss needs each position's logits on one rank", OMIT_ONE)
        for name in ("tp_degree", "pp_degree", "cp_degree")
    ),
)

TASKED = is_one_of(*tasks())
WITH_CLASSES = words_with(OBJECTIVES, lambda facts: facts.head == "classes")
TASK = (
    Conflict(
        "class_names",
        SET,
        beside("task", is_none_of(*WITH_CLASSES)),
        f"are the labels of --task {in_prose(WITH_CLASSES)}",
        "Add it, or omit them",
    ),
    Conflict(
        "class_names",
        Values("one name", lambda value, default: isinstance(value, str)),
        ALWAYS,
        "is one label, and there is nothing to tell apart",
        "Give it several times",
    ),
    Conflict(
        "hard_negatives", CHANGED, beside("task", is_none_of(EMBED)), f"is of --task {EMBED}", "Add it, or omit this"
    ),
    Conflict(
        "lora_dropout",
        over(0),
        beside("task", is_one_of(EMBED)),
        f"--task {EMBED} learns by vectors of two forwards, which dropout would make differ",
        "Omit it",
    ),
    Conflict("task", TASKED, ON_MLX, "MLX's engine has no head beside a model's own", "Use --backend mps or cpu"),
    *(
        contradicts("task", TASKED, name, when, because)
        for name, when, because in (
            ("preference", is_none_of("none"), ": it learns by a loss of its own"),
            ("reward", SET, ": nothing is generated"),
            ("teacher", SET, ": its loss is not of tokens"),
            ("images", is_one_of("true"), ", and heads read text alone"),
            ("streaming", is_one_of(True), ", and all rows are read before the first step"),
            ("adapter", SET, ": the head of an adapter is not continued"),
            ("llama_pro_path", SET, ", beside whose layers no head trains"),
            ("label_smoothing", NOT_DEFAULT, ", which smooths the next token's loss"),
            ("router_aux_loss_coef", NOT_DEFAULT, ", which weighs a loss of the next token's forward"),
            ("vocab_parallel", is_one_of("true"), ": nothing is computed of the vocabulary"),
            ("train_on_prompt", is_one_of(True), ": no token is learned"),
            ("train_on_last_turn", is_one_of(True), ": no token is learned"),
            ("mask_reasoning", is_one_of(True), ": no token is learned"),
            ("overlong", is_one_of("split"), ": a row counts as a whole"),
            ("parallel_backend", is_none_of("ptd"), ": heads are untested there"),
        )
    ),
    *(
        contradicts("task", TASKED, name, over(1), ": a head needs whole hidden states on one rank")
        for name in ("tp_degree", "pp_degree", "cp_degree", "ep_degree")
    ),
    Conflict(
        "task",
        TASKED,
        Condition("the demo's data", lambda plan: bool(plan.asked.demo)),
        "the demo's rows are questions and answers",
        "Add --dataset",
    ),
)

STREAMING = beside("streaming", is_one_of(True))
WITHOUT_IMAGES = "Add --images false to train on rows of text alone, or omit the other"
IMAGES = (
    Conflict("images", is_one_of("true"), ON_MLX, "are seen by torch's engine only", "Use --backend cpu or cuda"),
    *(
        Conflict("images", is_one_of("true"), beside(name, values), why, WITHOUT_IMAGES)
        for name, values, why in (
            ("streaming", is_one_of(True), "are decoded from rows that are held, and --streaming holds none"),
            ("reward", SET, "are not shown while answers are sampled for --reward"),
            (
                "init_lora_weights",
                is_one_of(*words_with(INITS, lambda facts: facts.needs_data)),
                "are not shown to the activations that it reads",
            ),
            ("base_offload", is_one_of("host", "disk"), "are seen by a tower that stays on its device"),
            ("llama_pro_path", SET, "are not shown to an expanded model"),
            *((degree, over(1), "are seen by whole models only") for degree in ("pp_degree", "tp_degree", "cp_degree")),
        )
    ),
)
DATA = (
    Conflict("data_report", SET, beside("dry_run", UNSET), "is written by a dry run", "Add --dry_run"),
    Conflict(
        "streaming",
        SET,
        beside("max_steps", Values("0 or less", lambda value, default: value <= 0)),
        "the number of rows is not known before they are read",
        "Add --max_steps",
    ),
    *(
        Conflict(name, when, STREAMING, "needs all rows, which --streaming never holds", OMIT_ONE)
        for name, when in (
            ("validation_split", over(0)),
            ("dataset_samples", over(0)),
            ("init_lora_weights", is_one_of(*words_with(INITS, lambda facts: facts.needs_data))),
        )
    ),
    Conflict(
        "window_overlap",
        SET,
        beside("overlong", is_none_of("auto", "split")),
        "--overlong {overlong} makes no windows",
        OMIT_ONE,
    ),
)

REWARD_FLAGS = tuple(name for name, f in FIELDS.items() if f.metadata["group"] == "rewards" and name != "reward")
SAMPLING_FLAGS = ("max_completion_length", "temperature", "top_p")
WITHOUT_KL = words_with(OBJECTIVES, lambda facts: facts.rewarded and "kl_beta" not in facts.arguments.values())
REWARDS = (
    *(
        Conflict(name, CHANGED, beside("reward", UNSET), "is for --reward", "Add --reward, or omit it")
        for name in REWARD_FLAGS
        if name not in SAMPLING_FLAGS
    ),
    *(
        Conflict(
            name,
            CHANGED,
            both(beside("reward", UNSET), beside("on_policy_fraction", is_one_of(0))),
            "is for answers that are sampled",
            "Add --reward, or --teacher with --on_policy_fraction, or omit it",
        )
        for name in SAMPLING_FLAGS
    ),
    Conflict(
        "reward",
        SET,
        beside("preference", is_one_of(*preferences())),
        "learns from answers that are sampled, and --preference {preference} from those in the rows",
        OMIT_ONE,
    ),
    *(
        Conflict(
            name,
            SET,
            beside("reward", SET),
            "there is no loss on held-out rows: their answers are scored",
            "Use --score_dataset",
        )
        for name in ("validation_dataset", "validation_split", "early_stopping")
    ),
    Conflict(
        "lr",
        is_one_of("search"),
        beside("reward", SET),
        "trials of a few steps say nothing about rewards",
        "Use auto, or a number",
    ),
    Conflict(
        "kl_beta",
        SET,
        beside("reward_loss", is_one_of(*WITHOUT_KL)),
        "{reward_loss} has no divergence in its loss",
        f"Use --reward_loss {reward_losses()[0]}, or omit it",
    ),
    *(
        Conflict(
            "kl_beta",
            SET,
            other,
            "the model before training is the base with its adapters off, which would not be it",
            "Omit one of them",
        )
        for other in (
            *(beside(name, SET) for name in ("modules_to_save", "new_tokens", "llama_pro_path")),
            beside("init_lora_weights", is_one_of(*RESIDUAL_INITS)),
        )
    ),
    Conflict(
        "kl_beta",
        SET,
        beside("train_type", is_one_of("full")),
        "the model before training is the base with its adapters off, and all weights change",
        "Use --train_type lora, or omit it",
    ),
    Conflict(
        "kl_beta",
        SET,
        Condition("`--adapter` without `--adapter_merge`", lambda plan: plan.asked.continues_adapter),
        "the model before training would be the base without --adapter",
        "Add --adapter_merge, or omit it",
    ),
)

WHY_REFERENCE = "--preference {preference} compares with the model before training"
COMPARING_WITH_NOTHING = [word for word in preferences() if word not in with_reference()]
NO_REFERENCE = f"or --preference {COMPARING_WITH_NOTHING[0]}, which compares with nothing"
PREFERENCE = (
    *(
        Conflict(
            name,
            CHANGED,
            beside("preference", is_one_of(*(word for word in OBJECTIVES if word not in words_of(name)))),
            f"is for --preference {in_prose(words_of(name))}, and this run has --preference {{preference}}",
            OMIT_ONE,
        )
        for name in PREFERENCE_FLAGS
    ),
    Conflict(
        "preference",
        is_one_of(*preferences()),
        Condition("the demo's data", lambda plan: bool(plan.asked.demo)),
        "the demo's rows have no preferences",
        "Add --dataset",
    ),
    Conflict(
        "label_smoothing",
        SET,
        PREFERRING,
        "smooths the next token's loss; {LEARNED} has the loss of its paper",
        "Omit one of them",
    ),
    Conflict(
        "neftune_noise_alpha",
        SET,
        PREFERRING,
        "would change the log-probabilities that {LEARNED} compares",
        "Omit one of them",
    ),
    *(
        Conflict(name, is_one_of(value), PREFERRING, f"with {{LEARNED}}, {why}", "Omit it")
        for name, value, why in (
            ("train_on_prompt", True, "what is learned are answers, so prompts are not targets"),
            ("streaming", True, "steps are planned over all rows"),
            ("overlong", "split", "an answer counts as a whole, not a window of it"),
        )
    ),
    *(
        Conflict(
            name, is_one_of(True), beside("train_on_prompt", is_one_of(True)), "all tokens are learned", "Omit one"
        )
        for name in ("train_on_last_turn", "mask_reasoning")
    ),
    Conflict(
        "desirable_weight",
        is_one_of(0),
        both(WITH_LABELS, beside("undesirable_weight", is_one_of(0))),
        "nothing is learned, as --undesirable_weight is 0 too",
        "Raise one of them",
    ),
    Conflict(
        "train_type",
        is_one_of("full"),
        COMPARING,
        f"{WHY_REFERENCE}, which full fine-tuning does not keep",
        f"Use --train_type lora or qlora, {NO_REFERENCE}",
    ),
    Conflict(
        "llama_pro_path",
        SET,
        COMPARING,
        f"{WHY_REFERENCE}, which its trained layers replace",
        f"Omit it to train an adapter, {NO_REFERENCE}",
    ),
    *(
        Conflict(
            name,
            SET,
            COMPARING,
            f"{WHY_REFERENCE}, which modules that train in full replace",
            f"Omit it, {NO_REFERENCE}",
        )
        for name in ("modules_to_save", "new_tokens")
    ),
    Conflict(
        "init_lora_weights",
        is_one_of(*RESIDUAL_INITS),
        COMPARING,
        f"{WHY_REFERENCE}, and this changes the base at the start",
        f"Use {in_prose([word for word in INITS if word not in RESIDUAL_INITS], 'or')}, {NO_REFERENCE}",
    ),
)

OPTIMIZER = (
    *refused_optimizers(
        "adapters",
        Condition(
            "other than `--train_type full`",
            lambda plan: plan.asked.train_type != "full" or bool(plan.asked.llama_pro_path),
        ),
    ),
    *refused_optimizers("accelerate", beside("parallel_backend", is_one_of("accelerate"))),
)

CONTINUING = Condition(
    "`--adapter` without `--adapter_merge`", lambda plan: bool(plan.asked.adapter) and not plan.asked.adapter_merge
)
MISMATCHING = words_with(OBJECTIVES, lambda facts: facts.mismatches)
NOT_MISMATCHING = [word for word in with_reference() if word not in MISMATCHING]
SAVED_ADAPTER = (
    Conflict("adapter_merge", SET, beside("adapter", UNSET), "there is no adapter to merge", "Add --adapter"),
    Conflict(
        "init_lora_weights",
        is_none_of(*drawn_inits(), if_given=True),
        CONTINUING,
        "is how new adapters start, and this one is trained",
        OMIT_ONE,
    ),
    *(
        Conflict(name, SET, CONTINUING, "is of new adapters, and this one has its own", OMIT_ONE)
        for name in ("lora_rank_pattern", "lora_alpha_pattern")
    ),
    contradicts("rope_scaling", NOT_DEFAULT, "adapter", SET, ", whose base is what it was trained on"),
    contradicts("rope_scaling", NOT_DEFAULT, "llama_pro_path", SET, ", whose base has other layers"),
    Conflict(
        "rope_factor", SET, beside("rope_scaling", is_one_of(NONE)), "there is no scaling", "Add --rope_scaling yarn"
    ),
    Conflict("llama_pro_path", SET, CONTINUING, "trains layers, not an adapter", OMIT_ONE),
    Conflict(
        "preference",
        is_one_of(*MISMATCHING),
        CONTINUING,
        "its reference with mismatched answers is the base without adapters",
        f"Use --preference {NOT_MISMATCHING[0]}, or add --adapter_merge",
    ),
    Conflict(
        "precompute_ref_log_probs",
        is_one_of("false"),
        both(CONTINUING, beside("preference", is_one_of(*NOT_MISMATCHING))),
        "the reference is that adapter, which training changes",
        "Omit it",
    ),
)

FULL = beside("train_type", is_one_of("full"))
QLORA = beside("train_type", is_one_of("qlora"))
UNQUANTIZED = beside("train_type", is_none_of("qlora"))
ADAPTER_FLAGS = tuple(name for name, field in FIELDS.items() if field.metadata["adapter_only"])
LIMITS = ("num_layers", "layers_to_transform")
FROM_DATA = beside("init_lora_weights", is_one_of(*words_with(INITS, lambda facts: facts.needs_data)))
QUANTIZATION_SETTINGS = ("n_bits", "group_size", "quant_type", "double_quant")
TRAIN_TYPE = (
    *(
        Conflict(name, CHANGED, FULL, "full fine-tuning has no adapter", "Use --train_type lora")
        for name in ADAPTER_FLAGS
    ),
    contradicts("new_tokens", SET, "llama_pro_path", SET, ", whose embeddings are frozen"),
    Conflict(
        "lora_rank_pattern",
        SET,
        FROM_DATA,
        "finds as many directions for every layer",
        "Use --init_lora_weights default",
    ),
    *(
        Conflict(name, CHANGED, beside("llama_pro_path", SET), "--llama_pro_path says which layers train", "Omit it")
        for name in LIMITS
    ),
    *(
        Conflict(
            "new_tokens",
            SET,
            both(FULL, beside(name, NOT_DEFAULT)),
            "embeddings and head train for it, and --{other} freezes them".replace("{other}", name),
            OMIT_ONE,
        )
        for name in LIMITS
    ),
    Conflict(
        "llama_pro_path",
        SET,
        FULL,
        "trains only the added layers, and --train_type full trains all",
        "Use --train_type lora, or --model_name {llama_pro_path} with full",
    ),
    *(
        Conflict(
            name,
            CHANGED,
            beside("llama_pro_path", SET),
            "--llama_pro_path trains full layers and has no adapter",
            "Omit it",
        )
        for name in ADAPTER_FLAGS
    ),
    Conflict("quantization_backend", is_one_of("none"), QLORA, "qlora quantizes its base", "Use --train_type lora"),
    *(
        Conflict(
            name, GIVEN, UNQUANTIZED, "nothing is quantized with --train_type {train_type}", "Use --train_type qlora"
        )
        for name in QUANTIZATION_SETTINGS
    ),
    Conflict(
        "quantization_backend",
        is_none_of("auto", "none", if_given=True),
        UNQUANTIZED,
        "--train_type {train_type} keeps its weights unquantized",
        "Use --train_type qlora",
    ),
    Conflict(
        "init_lora_weights",
        is_one_of(*words_with(INITS, lambda facts: facts.needs_quantized)),
        UNQUANTIZED,
        "starts from what quantization loses, and --train_type {train_type} quantizes nothing",
        f"Use --train_type qlora, or {RESIDUAL_INITS[0]}",
    ),
)

NO_VALIDATION = Condition(
    "no `--validation_dataset` and no `--validation_split`",
    lambda plan: not (plan.asked.validation_dataset or plan.asked.validation_split),
)
VALIDATION = (
    *(
        Conflict(
            name, when, NO_VALIDATION, "needs validation rows", "Add --validation_dataset or --validation_split 0.1"
        )
        for name, when in (("early_stopping", over(0)), ("load_best", is_one_of("true")))
    ),
    Conflict(
        "load_best",
        is_one_of("true"),
        beside("save_model", is_one_of(False)),
        "reads best/ again, and --save_model false writes nothing",
        "Omit one of them",
    ),
    *(
        Conflict(
            "load_best",
            is_one_of("true"),
            other,
            "only adapters are put back; best/ is a model folder of its own",
            "Omit it, and use best/",
        )
        for other in (FULL, beside("llama_pro_path", SET))
    ),
)

SEARCH = is_one_of("search")
LR_SEARCH = (
    Conflict("lr", SEARCH, NO_VALIDATION, "compares rates by validation rows", "Add --validation_dataset, or use auto"),
    Conflict("lr", SEARCH, FULL, "undoes trials of adapters only", "Use auto, or --train_type lora"),
    *(
        Conflict("lr", SEARCH, other, "tries rates before a single process's first step", "Use auto")
        for other in (
            Condition("with several ranks", lambda plan: plan.ranks.dims.world_size > 1),
            *(beside(name, SET) for name in ("llama_pro_path", "adapter")),
            STREAMING,
            beside("preference", is_none_of("none")),
            beside("init_lora_weights", is_none_of(*drawn_inits())),
        )
    ),
)

NOT_ON_MLX = words_with(OPTIMIZERS, lambda facts: not (facts.mlx or facts.unpaged))
MLX = (
    *(
        Conflict(name, NOT_DEFAULT, ON_MLX, why, "Use --backend cpu")
        for name, why in (
            ("llama_pro_path", "the MLX engine trains adapters or all weights, not added layers"),
            *degrees_limited("mlx"),
            ("double_quant", "MLX's formats do not quantize their scales again"),
        )
    ),
    Conflict(
        "init_lora_weights",
        is_none_of(*drawn_inits()),
        ON_MLX,
        f"the MLX engine has {in_prose(drawn_inits())}",
        "Use one of them, or --backend cpu",
    ),
    Conflict(
        "optimizer",
        is_one_of(*NOT_ON_MLX),
        ON_MLX,
        f"the MLX engine has {in_prose(words_with(OPTIMIZERS, lambda facts: facts.mlx))}",
        "Use one of them, or --backend cpu",
    ),
    Conflict("parallel_backend", is_none_of("ptd"), ON_MLX, "is for torch", "Omit it"),
    Conflict(
        "batch_layout",
        is_one_of("padding_free"),
        ON_MLX,
        "mlx-lm's models do not support document boundaries",
        "Use auto or padded",
    ),
    Conflict(
        "model_name",
        Values("stored quantized, not by MLX", lambda value, default: True),
        both(ON_MLX, Condition("", lambda plan: _stored_by(plan) not in (None, "mlx"))),
        "is stored quantized by {STORED}, which MLX cannot read",
        "Give the unquantized model it was made from",
    ),
    Conflict(
        "backend",
        Values("`mlx`", lambda value, default: True),
        Condition(
            "a mixture of experts, quantized, or with adapters on all layers of another than "
            + ", ".join(f"`{kind}`" for kind in EXPERTS),
            _adapts_experts,
        ),
        "this model has {EXPERTS} experts per layer, which the MLX engine does not quantize, and adapts in "
        f"{in_prose(tuple(EXPERTS))}",
        "Use --train_type lora --lora_target_modules q_proj,k_proj,v_proj,o_proj, or --backend cpu",
    ),
)

REMEDY = "Use --dp_shards or --dp_degree"
INTERLEAVED = both(beside("pp_degree", over(1)), beside("pp_schedule", is_one_of("interleaved1f1b")))
PARALLELISM = (
    Conflict(
        "sequence_parallel",
        is_one_of(True),
        INTERLEAVED,
        "gathers positions at the ends of one run of layers per stage, and interleaved stages have two",
        "Use --pp_schedule 1f1b",
    ),
    *(
        contradicts(excluded.setting, is_one_of(excluded.value), degree, over(1), f", which {excluded.why}")
        for degree in DEGREES
        for excluded in excluded_by(degree)
    ),
    *(
        Conflict(name, SET, beside(degree, over(1)), why, REMEDY)
        for name in ("new_tokens", "modules_to_save")
        for degree, why in degrees_limited("full modules")
    ),
)


def _replicates(plan: Standing) -> bool:
    return plan.ranks.dims.shards == 1 and not plan.ranks.distribution.startswith("zero")


REPLICATED = (
    Conflict(
        "use_cpu_offload",
        is_one_of(True),
        Condition("several ranks with a replica each", _replicates),
        "keeps sharded weights in host memory, and nothing is sharded here",
        "Use --dp_shards, or omit it",
    ),
)

SHARDING = Condition("weights sharded over ranks", lambda plan: plan.ranks.dims.shards > 1)
SHARDED = (
    Conflict(
        "vocab_parallel",
        is_one_of("true"),
        both(SHARDING, PREFERRING),
        "{LEARNED} needs the log-probabilities of whole documents, from a head that is gathered",
        "Use false",
    ),
    Conflict(
        "no_sync",
        is_one_of(True),
        both(SHARDING, INTERLEAVED),
        "gradients of the two runs of layers of an interleaved stage are not complete at the same time",
        "Use --pp_schedule 1f1b",
    ),
    Conflict(
        "optimizer",
        is_one_of(*WITH_MATRICES),
        SHARDING,
        "its update takes whole matrices, and each rank holds rows of them",
        f"Use {DEFAULT_OPTIMIZER}, or --sharding_strategy ddp",
    ),
    Conflict(
        "optimizer",
        is_one_of(*AVERAGING),
        both(SHARDING, FULL),
        "the averaged weights of a sharded model are not written",
        f"Use {DEFAULT_OPTIMIZER}, --train_type lora, or --sharding_strategy ddp",
    ),
    Conflict(
        "cache_dequantized",
        Values("`true`", lambda value, default: value == "true", if_given=True),
        SHARDING,
        "keeps every weight dense and unsharded on every rank, which sharding avoids",
        "Omit it, or use --sharding_strategy ddp",
    ),
)

BY_ACCELERATE = Condition("`--parallel_backend accelerate`", lambda plan: plan.ranks.distribution != "ptd")
UNTESTED = "is untested under {DISTRIBUTION}"
PTD = "Use --parallel_backend ptd"
UNDER_ZERO = words_with(OPTIMIZERS, lambda facts: facts.under_zero)
BY_DEEPSPEED = Condition("DeepSpeed's ZeRO through accelerate", lambda plan: plan.ranks.distribution.startswith("zero"))
ACCELERATE = (
    Conflict(
        "reentrant_checkpointing",
        is_one_of(True),
        BY_ACCELERATE,
        "accelerate's {DISTRIBUTION} waits for each gradient once",
        "Use false",
    ),
    *(
        Conflict(name, when, BY_DEEPSPEED, f"{{DISTRIBUTION}} {why}", f"{remedy}, or use --parallel_backend ptd")
        for name, when, why, remedy in (
            ("precision", is_one_of("fp16", "fp16_autocast"), "scales its loss itself", "Use bf16 or fp32"),
            ("optimizer", is_one_of(*EIGHT_BIT), "splits 8-bit blocks", f"Use {DEFAULT_OPTIMIZER}"),
            (
                "optimizer",
                is_none_of(*UNDER_ZERO, *EIGHT_BIT),
                "steps a flat part of all weights",
                f"Use {DEFAULT_OPTIMIZER}",
            ),
            ("no_sync", is_one_of(True), "reduces gradients in each microbatch", "Omit it"),
        )
    ),
    Conflict("vocab_parallel", is_one_of("true"), BY_ACCELERATE, UNTESTED, PTD),
    Conflict("optimizer", is_one_of(*EIGHT_BIT), both(SHARDING, BY_ACCELERATE), UNTESTED, PTD),
    *(Conflict(name, SET, BY_ACCELERATE, UNTESTED, PTD) for name in ("new_tokens", "modules_to_save")),
    *(Conflict(name, NOT_DEFAULT, both(FULL, BY_DEEPSPEED), UNTESTED, PTD) for name in LIMITS),
)

PREFERENCE_PARALLELISM = (
    Conflict(
        "reward",
        SET,
        Condition(
            "a model that is split over ranks by tensor, sequence, stage or expert",
            lambda plan: max(plan.ranks.dims.tp, plan.ranks.dims.cp, plan.ranks.dims.pp, plan.ranks.dims.ep) > 1,
        ),
        "each rank samples answers of its own, and needs all layers",
        "Use --dp_shards, or --sharding_strategy ddp",
    ),
    Conflict(
        "parallel_backend",
        is_one_of("accelerate"),
        both(PREFERRING, BY_DEEPSPEED),
        "{LEARNED} is untested under {DISTRIBUTION}",
        "Use --parallel_backend ptd",
    ),
)

MODEL = (
    Conflict(
        "router_aux_loss_coef",
        SET,
        Condition("a model without experts", lambda plan: plan.facts.shape is not None and not plan.facts.num_experts),
        "weighs the load-balancing loss of routers, and this model has none",
        "Omit it",
    ),
    *(
        contradicts("router_aux_loss_coef", SET, other, values, f": {why}")
        for other, values, why in (
            ("pp_degree", over(1), "the routers of other stages are not in the last one's loss"),
            ("reentrant_checkpointing", is_one_of(True), "router logits of its forward have no gradient"),
            ("preference", is_none_of("none"), "it runs forward passes on pairs and on a reference"),
            ("reward", SET, "it compares log-probabilities under several weights"),
            ("parallel_backend", is_none_of("ptd"), "it is computed by the built-in distribution only"),
        )
    ),
)

SAVING = tuple(
    contradicts("save_model", is_one_of(False), other, SET, f", which {why}")
    for other, why in (
        ("save_every", "writes checkpoints"),
        ("resume", "writes checkpoints"),
        ("push_to_hub", "uploads what is saved"),
    )
)

# The tables under the headings of the page of the docs.
TABLES = {
    "Settings": SETTINGS,
    "Data": DATA,
    "Images": IMAGES,
    "Rewards": REWARDS,
    "Teacher": TEACHER,
    "Tasks": TASK,
    "Preferences and rewards": (*PREFERENCE, *PREFERENCE_PARALLELISM),
    "Training type": (*SAVED_ADAPTER, *TRAIN_TYPE),
    "Validation": VALIDATION,
    "Optimizers": OPTIMIZER,
    "Several ranks": (*PARALLELISM, *REPLICATED, *SHARDED),
    "accelerate and DeepSpeed": ACCELERATE,
    "MLX": MLX,
    "Mixtures of experts": MODEL,
    "Saving": SAVING,
}
