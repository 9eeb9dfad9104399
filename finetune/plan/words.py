"""Words of the command line as the plan reads them: older spellings, and settings that others imply."""

from finetune.config import DEFAULTS, DEPRECATED_OPTIMIZERS, DEPRECATED_TARGETS, DEPRECATED_TRAIN_TYPES
from finetune.data.columns import parse_columns, parse_names
from finetune.data.reading.mixture import sources_of
from finetune.errors import PlanError
from finetune.estimate.budget import parse_size
from finetune.estimate.rates import assumed_memory, links_of
from finetune.parts.answer_metrics import judges, metrics_of
from finetune.parts.inits import INITS, drawn_inits
from finetune.parts.objectives import GENERATE, OBJECTIVES
from finetune.parts.plan_base import format_value
from finetune.parts.reward import parse_rewards
from finetune.parts.rows import in_prose
from finetune.plan.asked import Asked, Change, Notice, Said
from finetune.plan.facts import Facts


def older_words(asked: Asked) -> Said:
    """Older words for train_type, optimizer and target modules, translated."""
    word = asked.typed("train_type")
    for name, value in DEPRECATED_TRAIN_TYPES.get(word, {}).items():
        given = getattr(asked, name)
        if value == "required":
            if not given:
                raise PlanError(f"--train_type {word}: needs --{name}, the folder of the expanded model.")
        elif name != "train_type" and asked.given(name) and given != value:
            raise PlanError(
                f"--train_type {word}: means --{name} {format_value(value)}, but {format_value(given)} is given. "
                "Omit it."
            )
        else:
            yield Change(name, value, f"--train_type {word} means this")
    targets = asked.lora_target_modules.strip().lower()
    if targets in DEPRECATED_TARGETS:
        yield Change("lora_target_modules", DEPRECATED_TARGETS[targets], f"{targets} means this")
    optimizer = asked.typed("optimizer")
    if optimizer in DEPRECATED_OPTIMIZERS:
        reason = "torch's fused kernels are used on every device that has them"
        yield Change("optimizer", DEPRECATED_OPTIMIZERS[optimizer], reason)


def scored_rows(asked: Asked) -> Said:
    """--score_samples of a head, which scores rows without generating."""
    if asked.task != GENERATE and asked.is_open("score_samples") and asked.score_dataset:
        yield Change("score_samples", -1, f"--task {asked.task} generates nothing: all rows are scored")


def stored_quantized(asked: Asked, facts: Facts) -> Said:
    """A base stored quantized is trained as it is stored: qlora with the folder's own quantization settings."""
    stored = facts.prequantized
    if not stored:
        return
    name = asked.typed("model_name")
    fact = f"its weights are stored quantized ({stored['quantization_backend']} at {stored['n_bits']} bits)"
    if asked.train_type == "full":
        raise PlanError(
            f"--train_type full: {name}: {fact}, and only adapters train on those. Use --train_type qlora, or "
            "give the unquantized model it was made from."
        )
    yield Change("train_type", "qlora", fact)
    for setting, value in stored.items():
        given = getattr(asked, setting)
        if asked.given(setting) and given not in ("auto", value):
            raise PlanError(
                f"--{setting} {format_value(given)}: {name}: {fact}, and quantizing again would lose more. "
                "Omit it, or give the unquantized model it was made from."
            )
        yield Change(setting, value, fact)
    if not INITS[asked.init_lora_weights].is_drawn:
        raise PlanError(
            f"--init_lora_weights {asked.init_lora_weights}: needs unquantized weights, but {name}: {fact}. "
            f"Use {in_prose(drawn_inits(), 'or')}."
        )


def rewards(asked: Asked) -> Said:
    """--reward: the loss of its answers is the run's objective, and held-out rows are scored by what is rewarded."""
    for flag in ("num_generations", "max_completion_length"):
        if getattr(asked, flag) == "auto":
            yield Change(flag, DEFAULTS[flag])
    sources = parse_rewards(asked.reward)
    if not sources:
        return
    for source in sources:
        source.check_file()
    metrics = [source.name for source in sources if source.is_metric]
    judges(metrics, asked.score_pattern, "reward", "score_pattern")  # raises PlanError without a pattern
    if metrics and asked.is_open("score_metric"):
        yield Change("score_metric", ",".join(metrics), "held-out rows are scored by what is rewarded")
    for flag, value in OBJECTIVES[asked.reward_loss].defaults.items():
        if not asked.given(flag):
            yield Change(flag, value, f"the default of --reward_loss {asked.reward_loss}")


def assumed_device(asked: Asked) -> Said:
    """The memory of an assumed device; sizes and links that are well written."""
    if asked.assume_device:
        memory = assumed_memory(asked.assume_device)
        if asked.assume_memory is None:
            size = f"{memory / 2**30:.1f}GiB"
            yield Change("assume_memory", size, f"the memory of {asked.assume_device}")
    elif asked.assume_memory:
        parse_size(asked.assume_memory)
    if asked.assume_interconnect:
        links_of(asked.assume_interconnect, "a100")
    if asked.given("max_steps") and asked.max_steps > 0 and asked.given("num_epochs"):
        yield Notice(f"num_epochs {asked.typed('num_epochs')} is overridden by max_steps {asked.max_steps}")


def saved_adapter(asked: Asked, facts: Facts) -> Said:
    """--adapter: rank, scale and layers of the adapter that is continued.

    A resumed run inherits them (see resume.OF_ADAPTER) and reads no folder.
    """
    saved = facts.adapter
    if saved is None or not asked.continues_adapter:
        return
    why = f"as {asked.adapter} was trained"
    for name, own in (("use_dora", saved.dora), ("use_rslora", saved.rslora)):
        given = getattr(asked, name)
        if asked.given(name) and given != own:
            raise PlanError(f"--{name} {format_value(given)}: {asked.adapter} was trained otherwise. Omit it.")
        yield Change(name, own, why)
    if asked.given("lora_rank"):
        rank = asked.lora_rank
    else:
        rank = saved.rank
    if rank < saved.rank:
        raise PlanError(
            f"--lora_rank {rank}: is less than the {saved.rank} of --adapter {asked.adapter}. Use {saved.rank} or more."
        )
    yield Change("lora_rank", rank, why)
    if not asked.given("lora_alpha"):
        yield Change("lora_alpha", saved.alpha_at(rank), f"the scale {saved.scaling:g}, {why}")
    if not asked.given("lora_target_modules"):
        yield Change("lora_target_modules", saved.targets, why)
    if not asked.given("modules_to_save"):
        yield Change("modules_to_save", saved.modules, why)
    if saved.adapts_towers and not asked.given("train_vision"):
        yield Change("train_vision", "lora", why)
    yield Change("new_tokens", saved.new_tokens, why)
    if OBJECTIVES[asked.preference].needs_reference:
        yield Change("precompute_ref_log_probs", "true", "the reference is --adapter, which training changes")


def datasets(asked: Asked) -> None:
    """Raises PlanError for names of datasets that no source has."""
    if asked.dataset:
        sources_of(asked.dataset)


def columns(asked: Asked) -> None:
    """Raises PlanError for metrics and columns that contradict themselves."""
    pattern = asked.score_pattern
    if "regex" not in asked.score_metric and "regex" in [source.name for source in parse_rewards(asked.reward)]:
        pattern = None  # which the reward alone uses
    metrics_of(asked.score_metric, pattern, "score_metric", "score_pattern")
    ignored = parse_names(asked.ignore_columns)
    both = [column for column in parse_columns(asked.columns).values() if column.casefold() in ignored]
    if both:
        raise PlanError(f"--ignore_columns {both[0]}: --columns uses it. Give it to one of them.")


def model(asked: Asked, facts: Facts) -> Said:
    """The model's folder: with LLaMA-Pro that of expand.py. Notices of what trains beside an adapter."""
    if asked.new_tokens:
        beside = ", and train in full beside the adapter"
        if asked.trains_in_full:
            beside = ""
        named = asked.new_tokens.count(",") + 1
        count = named if facts.added_tokens is None else facts.added_tokens
        tokens = f"{count} new token{'s' * (count != 1)}"
        if count:
            yield Notice(
                f"{tokens}: embeddings and head have a row for each, which starts from the mean of the others{beside}"
            )
        if count < named:
            trains = ""
            if not count and beside:
                trains = "; embeddings and head train in full beside the adapter all the same"
            yield Notice(f"new_tokens: the tokenizer has {named - count} of {named} already, which get no row{trains}")
    folder = asked.llama_pro_path
    if folder:
        why = "the expanded folder is the model; it records what it was made from"
        yield Change("model_name", folder, why if asked.given("model_name") else "")
        yield Notice("no adapter: the added layers train in fp32; all others are frozen")
