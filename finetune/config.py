"""Every flag of train.py, one dataclass field per flag: default, help, choices, deprecated spellings.

The parser, the YAML reader, `fine_tune(...)` and the table in docs/flags.md are all generated from these fields.
"""

from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from typing import Any, get_args

from finetune.parts.attention import ATTENTIONS
from finetune.parts.degrees import DEGREES
from finetune.parts.inits import DEFAULT_INIT, INITS, init_help
from finetune.parts.memory import OFFLOADS
from finetune.parts.objectives import (
    GENERATE,
    OBJECTIVES,
    beta_help,
    distillations,
    from_labels,
    from_pairs,
    preferences,
    reward_losses,
    tasks,
    with_preference,
)
from finetune.parts.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, optimizer_help
from finetune.parts.rope_scaling import MOST, NONE, SCALINGS
from quantization_wrapper import METHODS

TRAIN_TYPES = ("full", "lora", "qlora")
# Deprecated --train_type values of the older scripts, and the settings each is an alias for.
DEPRECATED_TRAIN_TYPES: dict[str, dict[str, str | bool]] = {
    "custom_lora": {"train_type": "lora"},
    "custom_qlora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "bnb_lora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "bnb_dora": {"train_type": "qlora", "quantization_backend": "bnb", "use_dora": True},
    "hqq_lora": {"train_type": "qlora", "quantization_backend": "hqq"},
    "hqq_dora": {"train_type": "qlora", "quantization_backend": "hqq", "use_dora": True},
    "bnb_llama_pro": {"train_type": "qlora", "quantization_backend": "bnb", "llama_pro_path": "required"},
    "hqq_llama_pro": {"train_type": "qlora", "quantization_backend": "hqq", "llama_pro_path": "required"},
}
PRECISIONS = ("fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_buffers_autocast")
DEPRECATED_OPTIMIZERS = {alias: word for word in sorted(OPTIMIZERS) for alias in OPTIMIZERS[word].aliases}
DEPRECATED_TARGETS = {"none": "default", "all-linear": "all"}
SCHEDULES = (
    *("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential"),
    *("inverse_sqrt", "wsd"),
)
WSD_DECAYS = ("cosine", "linear", "1-sqrt")
BATCH_LAYOUTS = ("auto", "padding_free", "padded")
QUANTIZERS = ("auto", *METHODS, "none")
QUANT_TYPES = (
    *dict.fromkeys(word for method in METHODS.values() for words in method.quant_types.values() for word in words),
    *("mxfp4", "nvfp4", "mxfp8"),
)
AUTO_BOOL = ("auto", "true", "false")
DATASET_FORMATS = ("auto", "chat", "alpaca", "prompt_completion", "qna", "tokens", "text")
OVERLONG = ("auto", "keep_end", "keep_start", "split", "drop", "error")
SPECIAL_TOKENS = ("escape", "keep", "error")
TEXT_UNITS = ("auto", "document", "line")
TRAIN_VISION = ("none", "projector", "lora", "full")
SCALED_REWARDS = ("group", "batch", "none")
SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op")
GROUPS = {
    "model": "Model and training type",
    "data": "Data",
    "images": "Images",
    "rewards": "Rewards",
    "teacher": "Teacher",
    "steps": "Steps and schedule",
    "adapter": "Adapter",
    "memory": "Precision, quantization and memory",
    "machine": "Machine and parallelism",
    "output": "Saving and resuming",
    "logging": "Logging",
    "profile": "Profiling",
    "ask": "Inspect instead of train",
}


# Facts of a flag beside its default, group and help, each with the value it has unless the field says otherwise.
FACTS: dict[str, object] = {
    "choices": None,  # the words it accepts
    "value_aliases": {},  # {older word: the choice it means}
    "aliases": (),  # other spellings of the flag
    "minimum": None,  # >=
    "maximum": None,  # <=
    "above": None,  # >
    "nonzero": False,  # rejects 0
    "auto": False,  # also accepts "auto"
    "words": (),  # and these
    "may_be_empty": False,  # takes an empty text, which says nothing, as trackers do
    "repeatable": False,  # may be given several times, or as a list: then its value is a list
    "comma_separated": False,  # takes several words, comma-separated, or as a list
    "metavar": None,  # how --help shows its value
    "unset": None,  # what it is if it is not given, where that is not the default of the field
    "adapter_only": False,  # has no meaning without an adapter
    "saved": True,  # part of run_plan.json; False for flags of one invocation, not of the training
    "resumable": False,  # a resumed run may change it
}


def flag(group: str, default: Any, text: str, **facts: Any) -> Any:
    """A field of TrainConfig with its FACTS as metadata."""
    unknown = set(facts) - set(FACTS)
    assert not unknown, unknown
    path = {"DIR", "FILE"} & set((facts.get("metavar") or "").split("|"))
    return field(default=default, metadata={"group": group, "help": text, "path": bool(path), **FACTS, **facts})


# A flag of each group, with the FACTS that most of the group share.
model_flag, data_flag, image_flag, reward_flag, teacher_flag, steps_flag, memory_flag = (
    partial(flag, group) for group in ("model", "data", "images", "rewards", "teacher", "steps", "memory")
)
adapter_flag = partial(flag, "adapter", adapter_only=True)
machine_flag, output_flag = (partial(flag, group, resumable=True) for group in ("machine", "output"))
logging_flag, profile_flag = (partial(flag, group, resumable=True) for group in ("logging", "profile"))
ask_flag = partial(flag, "ask", saved=False)


def degree_flag(name: str):
    """The flag of a parallel degree, from its row."""
    facts = DEGREES[name]
    return machine_flag(facts.default, facts.help, minimum=facts.minimum, nonzero=facts.minimum < 0)


@dataclass(frozen=True)
class TrainConfig:
    """Requested value of every flag; None leaves the choice to the plan, which records its reason."""

    model_name: str | None = model_flag(None, "Hub ID or folder; default: the demo model", metavar="ID|DIR")
    revision: str | None = model_flag(None, "branch, tag or commit of a Hub model")
    train_type: str = model_flag(
        "qlora",  # where nothing is planned
        "full: all weights; lora: adapters on a frozen base; qlora: adapters on a quantized base; auto: lora where the "
        "base fits with room, else qlora",
        choices=("auto",) + TRAIN_TYPES + tuple(DEPRECATED_TRAIN_TYPES),
        unset="auto",
    )
    llama_pro_path: str | None = model_flag(
        None, "folder written by expand.py; trains only its added layers", metavar="DIR"
    )
    rope_scaling: str = model_flag(
        NONE,
        "linear or yarn: train a base whose rotary positions are scaled, for rows longer than it was trained on; it is "
        "written to scaled_base in --output_dir, with the model's own weights",
        choices=(NONE, *SCALINGS),
    )
    rope_factor: float | None = model_flag(
        None,
        "with --rope_scaling: the longest row divided by that of the base; default: as --context_length asks for",
        above=1,
        maximum=MOST,
    )
    new_tokens: str | None = model_flag(
        None,
        "words that become one token each, such as <|tool|>, or a file of one per line: embeddings and head get a row "
        "for each, and train in full",
        metavar="WORD,...|FILE",
        comma_separated=True,
    )
    dataset: str | list[str] | None = data_flag(
        None,
        "file, folder, Hub name, or one of alpaca, alpaca_sample, guanaco, sql, orca_math, dummy; as "
        "NAME[:weight][@split], a part of a split as @train[:5%], and several times to train on all of them; default: "
        "the demo data",
        metavar="FILE|NAME",
        repeatable=True,
    )
    dataset_format: str = data_flag("auto", "row format; auto: detected from the columns", choices=DATASET_FORMATS)
    columns: str | None = data_flag(
        None,
        "which of your columns to use for each field of a format, such as prompt=query,completion=reply",
        metavar="FIELD=COLUMN,...",
        comma_separated=True,
    )
    ignore_columns: str | None = data_flag(
        None, "columns and message fields to leave out, comma-separated", metavar="NAME,...", comma_separated=True
    )
    text_unit: str = data_flag(
        "auto",
        "treat a .txt or .md file as one document or as one row per line; auto: a document if it is prose",
        choices=TEXT_UNITS,
    )
    special_tokens_in_text: str = data_flag(
        "escape",
        "control tokens of the model, such as <|im_end|>, inside messages. escape: what users, system prompts and "
        "tools say is written so that they stay text; keep: they become control tokens; error: the row is bad, of "
        "whatever format",
        choices=SPECIAL_TOKENS,
    )
    dataset_samples: int = data_flag(-1, "train on the first N rows; -1: all", minimum=-1, nonzero=True)
    context_length: int | str = data_flag(
        512,  # where nothing is planned, such as tests of an engine
        "maximum sequence length in tokens; --overlong decides what happens to longer rows. auto: long enough for 99 % "
        "of the rows, if the model and memory allow it",
        minimum=2,
        auto=True,
        metavar="N|auto",
        unset="auto",
    )
    streaming: bool = data_flag(
        False,
        "read rows while training, shuffled within blocks of --shuffle_buffer rows: memory stays bounded for files of "
        "any size; needs --max_steps",
    )
    shuffle_buffer: int = data_flag(1000, "rows per block in which --streaming shuffles", minimum=1)
    overlong: str = data_flag(
        "auto",
        "rows over --context_length. auto: text is split, a chat loses its oldest messages, other rows lose the "
        "start of their prompt; keep_end, keep_start: truncate; split: split into windows; drop: leave out; error: "
        "reject",
        choices=OVERLONG,
    )
    window_overlap: int = data_flag(
        0, "overlap between windows, in tokens; the repeated tokens are context only", minimum=0
    )
    task: str = data_flag(
        GENERATE,
        f"what is learned. {GENERATE}: the language model's own tokens; "
        + "; ".join(f"{word}: {OBJECTIVES[word].summary}" for word in tasks()),
        choices=(GENERATE, *tasks()),
    )
    class_names: str | list[str] | None = data_flag(
        None,
        "with --task classify: the labels, in the order of their numbers; default: those of the training rows, sorted",
        metavar="LABEL",
        repeatable=True,
    )
    hard_negatives: str = data_flag(
        "auto",
        "with --task embed: each row has a negative beside the other rows' positives; auto: if the rows have one",
        choices=AUTO_BOOL,
    )
    preference: str = data_flag(
        "none",
        f"learn which answers are preferred. {', '.join(from_pairs())}: from pairs, rows with chosen and rejected "
        f"(--batch_size then counts pairs); {', '.join(from_labels())}: from rows with a label, or from both halves of "
        "pairs",
        choices=(next(iter(OBJECTIVES)), *preferences()),
    )
    preference_beta: float = data_flag(0.1, f"with --preference: {beta_help()}", above=0.0)
    simpo_gamma: float = data_flag(
        0.5, f"{with_preference('simpo_gamma')}: the margin by which the chosen answer must lead", minimum=0.0
    )
    desirable_weight: float = data_flag(
        1.0, f"{with_preference('desirable_weight')}: weight of rows whose label is true", minimum=0.0
    )
    undesirable_weight: float = data_flag(
        1.0, f"{with_preference('undesirable_weight')}: weight of rows whose label is false", minimum=0.0
    )
    precompute_ref_log_probs: str = data_flag(
        "auto",
        f"{with_preference('precompute_ref_log_probs')}: compute the reference model's log-probabilities once, before "
        "training, instead of in every step, and keep them in --output_dir; auto: if rows are read more than once",
        choices=AUTO_BOOL,
    )
    train_on_prompt: bool = data_flag(False, "compute the loss on all tokens, not only on answers")
    train_on_last_turn: bool = data_flag(
        False, "compute the loss on the last answer of a chat only, not on every answer"
    )
    mask_reasoning: bool = data_flag(False, "compute no loss on reasoning: an answer's thoughts are context only")
    chat_template: str | None = data_flag(
        None,
        "chat template used instead of the tokenizer's and saved with the result: a Jinja file, or the name of a "
        "built-in one such as chatml",
        metavar="FILE|NAME",
    )
    eos_token: str | None = data_flag(
        None, "text of the token that ends an answer, such as <|im_end|>; default: the chat template's"
    )
    skip_bad_rows: int = data_flag(
        0, "skip and list up to N malformed rows; with more, the file is rejected", minimum=0, resumable=True
    )
    validation_dataset: str | list[str] | None = data_flag(
        None,
        "rows for the validation loss; for a folder or Hub name, its validation split; several times for a loss of "
        "each beside that of all",
        metavar="FILE|NAME",
        repeatable=True,
        resumable=True,
    )
    validation_split: float | str = data_flag(
        0.0,
        "fraction of the training rows held out for validation; auto: a tenth, of 160 rows and more",
        minimum=0.0,
        auto=True,
        metavar="F|auto",
    )
    score_dataset: str | None = data_flag(
        None,
        "rows scored by exact match before and after training; for a folder or Hub name, its test split",
        metavar="FILE|NAME",
        resumable=True,
    )
    score_samples: int = data_flag(
        32, "score the first N rows of --score_dataset; -1: all", minimum=-1, nonzero=True, resumable=True
    )
    score_metric: str = data_flag(
        "exact",
        "how --score_dataset is scored, several comma-separated: exact, contains (the expected text is in the answer), "
        "numeric (the last numbers are equal), json, regex (--score_pattern finds the same in both), choice (the "
        "likeliest of the answers that the rows have), perplexity",
        metavar="NAME,...",
        comma_separated=True,
        resumable=True,
    )
    score_pattern: str | None = data_flag(
        None, "of --score_metric regex: its first group, or its match", metavar="REGEX", resumable=True
    )
    score_max_new_tokens: int = data_flag(
        128, "maximum tokens generated per answer when scoring", minimum=1, resumable=True
    )
    images: str = image_flag(
        "false",  # where nothing is planned
        "rows that show images are learned, by a model with a tower for images; auto: if the rows show some and the "
        "model sees them",
        choices=AUTO_BOOL,
        unset="auto",
    )
    image_max_pixels: int | None = image_flag(
        None, "images with more pixels are shrunk to these; default: what the model's processor does", minimum=1
    )
    train_vision: str = image_flag(
        "none",
        "what of the part that sees images trains beside the language model. projector: what joins both, in full; "
        "lora: adapters on the tower; full: tower and projector in full",
        choices=TRAIN_VISION,
    )
    vision_lr_ratio: float | None = image_flag(
        None,
        "learning rate of what sees images and trains in full, divided by --lr; default: 0.1 beside adapters, whose "
        "rate is ten times that of full training, else 1",
        minimum=1e-6,
        maximum=1e6,
    )
    image_root: str | None = image_flag(
        None,
        "folder that paths of images in rows begin in, and may not leave; default: that of the dataset's file",
        metavar="DIR",
    )
    allow_urls: bool = image_flag(False, "read images in rows that are URLs over the network, of https only")
    reward: str | list[str] | None = reward_flag(
        None,
        "train on a reward: answers to the rows' prompts are sampled in each step, and those that are rewarded more "
        "than others become likelier. exact, contains, numeric, json, regex (--score_pattern): 1 for an answer that "
        "the metric of this name in --score_metric counts as right; choice: 1 if the first of the rows' answers in it "
        "is the expected one; FILE.py:FUNCTION: what your function returns; DIR: the score of a checkpoint of --task "
        "reward_model; several, each with a weight as exact:0.5, are added. --batch_size counts prompts",
        metavar="NAME|FILE.py:FUNCTION|DIR",
        repeatable=True,
    )
    reward_loss: str = reward_flag(
        "grpo", "; ".join(f"{word}: {OBJECTIVES[word].summary}" for word in reward_losses()), choices=reward_losses()
    )
    num_generations: int | str = reward_flag(
        8, "answers sampled to each prompt; auto: 8", minimum=2, auto=True, metavar="N|auto", unset="auto"
    )
    max_completion_length: int | str = reward_flag(
        256,
        "maximum tokens of a sampled answer; auto: 256, or the rest of --context_length. Time and memory are planned "
        "for answers of this length: a little more than the longest expected answer is enough",
        minimum=1,
        auto=True,
        metavar="N|auto",
        unset="auto",
    )
    temperature: float = reward_flag(
        1.0, "temperature of sampling, which divides the logits that are trained too", above=0.0
    )
    top_p: float = reward_flag(
        1.0, "sample from the likeliest tokens that together have this probability", above=0.0, maximum=1.0
    )
    scale_rewards: str = reward_flag(
        "group",
        "what divides an answer's advantage: the standard deviation of its group's rewards, that of the step's, or "
        "nothing",
        choices=SCALED_REWARDS,
    )
    kl_beta: float = reward_flag(
        0.0, "weight of the divergence from the model before training, per token; 0: none is computed", minimum=0.0
    )
    clip_low: float = reward_flag(
        0.2, "how far below 1 the ratio to the sampling policy may fall before it is clipped", minimum=0.0, maximum=1.0
    )
    clip_high: float = reward_flag(0.2, "how far above 1 the ratio may rise before it is clipped", minimum=0.0)
    updates_per_rollout: int = reward_flag(1, "optimizer steps on the same sampled answers", minimum=1)
    mask_truncated: bool = reward_flag(
        True, "learn nothing from answers that reached --max_completion_length without an end"
    )
    refill: bool = reward_flag(
        False,
        "sample further prompts in place of those whose answers all have the same reward, up to three times as many",
    )
    reward_timeout: float = reward_flag(
        60.0, "seconds that a reward function may take over the answers of a step", above=0.0, resumable=True
    )
    teacher: str | None = teacher_flag(
        None,
        "model, checkpoint of a run, or address of a server such as vLLM's, that the model learns from: it reads the "
        "rows once, before the training, and what it finds likely at each target is kept; both must have the same "
        "tokens",
        metavar="ID|DIR|URL",
    )
    teacher_top_k: int = teacher_flag(
        64, "tokens that are kept of the teacher at each target, and the probability of all others", minimum=1
    )
    teacher_bits: int | None = teacher_flag(
        None,
        "bits of the teacher's weights: 2 to 6, 8, or 16 for dense ones; default: dense, or as it was trained",
        minimum=2,
        maximum=16,
    )
    teacher_offload: str = teacher_flag(
        "auto",
        "where the teacher's layers are, as in --base_offload: none: on the device; host, disk: there, and two pass "
        "through the device for each forward; auto: as it was trained",
        choices=("auto", "none", *OFFLOADS),
        resumable=True,
    )
    on_policy_fraction: float = teacher_flag(
        0.0,
        "fraction of the rows whose last answer the model samples itself, before each step (--max_completion_length, "
        "--temperature, --top_p): the teacher then stays in memory and judges these answers, and the other rows. 0: it "
        "reads the rows alone, once",
        minimum=0.0,
        maximum=1.0,
    )
    teacher_cache: str = teacher_flag(
        "auto",
        "folder in which what teachers gave is kept, for every later run on the same rows; auto: in the user's cache",
        metavar="DIR|auto",
        resumable=True,
    )
    distill_loss: str = teacher_flag(
        "forward_kl",
        "; ".join(f"{word}: {OBJECTIVES[word].summary}" for word in distillations()),
        choices=distillations(),
    )
    distill_alpha: float = teacher_flag(
        0.5, "weight of the teacher; the rows' own targets have the rest", above=0.0, maximum=1.0
    )
    distill_beta: float = teacher_flag(
        0.5, "of --distill_loss jsd: near 0 it is as forward_kl, near 1 as reverse_kl", above=0.0
    )
    batch_size: int | str = steps_flag(
        8,
        "rows per data rank and accumulation step; auto: few enough that the rows give about 100 steps in three "
        "passes, at most 8, or 16 of many thousand rows",
        minimum=1,
        auto=True,
        metavar="N|auto",
        unset="auto",
    )
    gradient_accumulation_steps: int = steps_flag(1, "batches accumulated per optimizer step", minimum=1)
    microbatch_tokens: int | None = steps_flag(
        None, "maximum tokens per forward; affects speed and memory, not the result", minimum=1, resumable=True
    )
    batch_layout: str = steps_flag(
        "auto",
        "padding_free: documents packed end to end; padded: one per row",
        choices=BATCH_LAYOUTS,
        value_aliases={"flat": "padding_free"},
    )
    num_epochs: int | str = steps_flag(
        1,
        "epochs: passes over the training data; auto: as many as give about 100 steps, at most 3, or 5 with validation",
        minimum=1,
        auto=True,
        metavar="N|auto",
        resumable=True,
        unset="auto",
    )
    max_steps: int = steps_flag(
        -1, "total optimizer steps, overriding --num_epochs; -1: use --num_epochs", minimum=-1, resumable=True
    )
    early_stopping: int | str = steps_flag(
        0,
        "end the run after N evaluations in a row without a better validation loss; 0: never; auto: 2, where there is "
        "validation and --num_epochs is auto",
        minimum=0,
        auto=True,
        metavar="N|auto",
        resumable=True,
        unset="auto",
    )
    load_best: str = steps_flag(
        "auto",
        "publish an adapter's weights with the least validation loss instead of the last; auto: with --early_stopping. "
        "A full run publishes its last weights, and keeps the best in best/",
        choices=AUTO_BOOL,
        resumable=True,
    )
    optimizer: str = steps_flag(DEFAULT_OPTIMIZER, optimizer_help(), choices=(*OPTIMIZERS, *DEPRECATED_OPTIMIZERS))
    lr: float | str = steps_flag(
        2e-4,
        "peak learning rate; auto: by what trains, the model's width, alpha and the number of steps; search: the best "
        "of several, by short trials that are undone before the run",
        above=0.0,
        auto=True,
        words=("search",),
        metavar="X|auto|search",
        unset="auto",
        aliases=("learning_rate",),
    )
    search_budget: float = steps_flag(
        0.25, "with --lr search: what the trials may cost, as a fraction of the run", above=0.0, maximum=1.0
    )
    wd: float = steps_flag(0.0, "weight decay", minimum=0.0, aliases=("weight_decay",))
    lr_scheduler: str = steps_flag(
        "cosine",
        "learning rate schedule after warmup. wsd: warmup, stable, decay: constant, then down to 0 in the last steps",
        choices=SCHEDULES,
    )
    warmup_steps: int | None = steps_flag(None, "linear warmup, in optimizer steps", minimum=0)
    warmup_ratio: float = steps_flag(
        0.05,
        "linear warmup as a fraction of all steps, if --warmup_steps is unset; with constant, only if set",
        minimum=0.0,
    )
    cosine_min_lr_ratio: float = steps_flag(0.1, "final learning rate of cosine, as a fraction of --lr", minimum=0.0)
    wsd_decay_ratio: float = steps_flag(
        0.1, "with --lr_scheduler wsd: fraction of all steps in which it decays", above=0.0, maximum=1.0
    )
    wsd_decay_type: str = steps_flag("cosine", "with --lr_scheduler wsd: how it decays", choices=WSD_DECAYS)
    adam_beta1: float = steps_flag(0.9, "decay of Adam's first moment", minimum=0.0, maximum=0.999999)
    adam_beta2: float = steps_flag(
        0.999,
        "decay of Adam's second moment; unless it is given, the plan chooses 0.9 to 0.999 for adapters, by the steps",
        minimum=0.0,
        maximum=0.999999,
    )
    adam_epsilon: float = steps_flag(1e-8, "added to the root of Adam's second moment", above=0.0)
    apply_gradient_clipping: bool = steps_flag(True, "clip the global gradient norm to --grad_norm")
    grad_norm: float = steps_flag(1.0, "maximum global gradient norm", above=0.0, aliases=("max_grad_norm",))
    router_aux_loss_coef: float = steps_flag(
        0.0,
        "mixture-of-experts models: weight of the routers' load-balancing loss over the tokens of a step; 0: off",
        minimum=0.0,
    )
    label_smoothing: float = steps_flag(
        0.0,
        "label smoothing: weight of the target that is spread over the vocabulary, such as 0.1; the validation loss is "
        "not smoothed; 0: off",
        minimum=0.0,
    )
    neftune_noise_alpha: float = steps_flag(
        0.0,
        "NEFTune: uniform noise on the input embeddings in training, in +-alpha / sqrt(tokens of the row x hidden "
        "size), such as 5; 0: off",
        minimum=0.0,
    )
    stop_on_divergence: bool = steps_flag(
        False,
        "end with exit code 66 once the mean loss of five steps is half as much again as that of the first five, and "
        "more than 0.5 above it",
        resumable=True,
    )
    seed: int = steps_flag(42, "random seed for shuffling, dropout and adapter initialization", minimum=0)
    data_seed: int | None = steps_flag(
        None, "random seed for the order of rows and the rows held out; default: --seed", minimum=0
    )
    adapter: str | None = adapter_flag(
        None,
        "continue from this trained adapter, on other data; its base, rank, scale, DoRA and layers are taken unless "
        "they are given. A larger --lora_rank leaves what it computes unchanged",
        metavar="DIR|ID",
    )
    adapter_merge: bool = adapter_flag(
        False,
        "merge --adapter into its base first, which is written to merged_base in --output_dir, and train a new adapter "
        "on the result",
    )
    lora_rank: int | str = adapter_flag(
        16,
        "LoRA rank; auto: 16, or up to 64 where the tokens would fill it",
        minimum=1,
        auto=True,
        metavar="N|auto",
        aliases=("lora_r",),
        unset="auto",
    )
    lora_alpha: float = adapter_flag(
        32.0, "LoRA alpha; adapter outputs are scaled by alpha/rank", minimum=1e-6, maximum=1e6
    )
    lora_rank_pattern: str | None = adapter_flag(
        None,
        "ranks of layers that differ from --lora_rank, by a regex on the end of their names, as PEFT's rank_pattern: "
        "q_proj=32,down_proj=8",
        metavar="REGEX=N,...",
        comma_separated=True,
    )
    lora_alpha_pattern: str | None = adapter_flag(
        None,
        "alphas of layers that differ from --lora_alpha, as --lora_rank_pattern gives ranks",
        metavar="REGEX=X,...",
        comma_separated=True,
    )
    lora_dropout: float = adapter_flag(0.0, "dropout probability on adapter inputs", minimum=0.0)
    lora_target_modules: str = adapter_flag(
        "all",
        "all (every linear layer and expert except the head), default (q_proj and v_proj, or "
        "this model's equivalents), comma-separated names (may include embeddings and head), or a regex",
        comma_separated=True,
    )
    modules_to_save: str | None = adapter_flag(
        None,
        "modules that train in full beside the adapter and are saved with it, such as embed_tokens,lm_head: those "
        "whose names end so, as in PEFT",
        metavar="NAME,...",
        comma_separated=True,
    )
    num_layers: int = flag(
        "adapter",
        -1,
        "train the last N decoder layers only, by adapters, or with --train_type full their own weights; those before "
        "them need no backward pass; -1: all",
        minimum=-1,
        nonzero=True,
    )
    layers_to_transform: str | None = flag(
        "adapter",
        None,
        "train these decoder layers only, as --num_layers does, by number from 0: 0,1,30",
        metavar="N,...",
        comma_separated=True,
    )
    use_dora: bool = adapter_flag(False, "DoRA: learn the magnitude of each weight row separately from its direction")
    use_rslora: bool = adapter_flag(False, "rsLoRA: scale by alpha/sqrt(rank)")
    loraplus_lr_ratio: float = adapter_flag(
        1.0, "LoRA+: learning rate of B divided by that of A", minimum=1e-6, maximum=1e6
    )
    init_lora_weights: str = adapter_flag(DEFAULT_INIT, init_help(), choices=tuple(INITS))
    precision: str = memory_flag(
        "auto",
        "auto: bf16 if it makes matmuls faster on this machine, else fp32",
        choices=("auto",) + PRECISIONS,
        value_aliases={f"mp_{word}": word for word in PRECISIONS if word.endswith("autocast")},
    )
    cpu_matmul: str = memory_flag(
        "auto",
        "library for fp32 matrix products on a CPU; auto: torch's BLAS, or oneDNN where it is faster and equally exact",
        choices=("auto", "blas", "onednn"),
        resumable=True,
    )
    frozen_products: str = memory_flag(
        "exact",
        "products of frozen weights in training: exact, by the weights as they are, or fp8, at twice the rate on GPUs "
        "of CUDA capability 8.9 and more, each row and each weight's row rounded to three bits beside the first; what "
        "is evaluated, generated and saved is exact",
        choices=("exact", "fp8"),
        resumable=True,
    )
    quantization_backend: str = memory_flag("auto", "quantizer for the qlora base", choices=QUANTIZERS, resumable=True)
    n_bits: int = memory_flag(4, "bits per quantized weight", minimum=1)
    group_size: int = memory_flag(
        64, "weights per quantization group (per scale)", minimum=1, aliases=("hqq_group_size",)
    )
    quant_type: str | None = memory_flag(None, "4-bit data type (codebook)", choices=QUANT_TYPES)
    double_quant: bool = memory_flag(False, "also quantize the scales to 8 bits")
    cache_dequantized: str = memory_flag(
        "auto",
        "keep dequantized weights in memory: faster, but as large as the unquantized model",
        choices=AUTO_BOOL,
        resumable=True,
    )
    use_gradient_checkpointing: str = memory_flag(
        "auto",
        "activation checkpointing: recompute activations in the backward pass; less memory, slower",
        choices=AUTO_BOOL,
    )
    reentrant_checkpointing: bool = memory_flag(False, "use the reentrant variant of activation checkpointing")
    low_memory: bool = memory_flag(
        False, "return freed memory to the system immediately: least memory, slower", resumable=True
    )
    loading_workers: int = memory_flag(
        -1, "tensors read in parallel while loading; -1: chosen for this machine", minimum=-1, resumable=True
    )
    packed_cache: str = memory_flag(
        "auto",
        "where the quantized base is kept for later starts, which then read it instead of quantizing again: a folder; "
        "auto: finetune/packed in the user's cache; none: nowhere",
        metavar="DIR",
        resumable=True,
    )
    base_offload: str = memory_flag(
        "auto",
        "where the frozen layers are while an adapter trains. none: on the device; host: in the host's memory; disk: "
        "in the packed base's files; two layers at a time are on the device. auto: where the run fits",
        choices=("auto", "none", *OFFLOADS),
        resumable=True,
    )
    use_cpu_offload: bool = memory_flag(
        False,
        "keep sharded weights, gradients and optimizer state in host memory, and step the optimizer there",
        resumable=True,
    )
    use_activation_cpu_offload: bool = memory_flag(
        False, "offload activations saved for backward to host memory", resumable=True
    )
    attention: str = memory_flag(
        "auto",
        "attention of packed documents. varlen: torch's flash kernels, by the documents' bounds; flash: FlashAttention "
        "3, 4 or 2, installed beside; groups: documents of similar length together, by SDPA, on a CPU also by matrix "
        "products; sdpa: the same by SDPA alone; auto: the first kernel that passes its trial on the device, else "
        "groups",
        choices=tuple(ATTENTIONS),
        resumable=True,
    )
    compile: str = memory_flag(
        "auto",
        "torch.compile each decoder layer while it trains; auto: on a GPU, where a timed microbatch says that it pays "
        "in this run",
        choices=AUTO_BOOL,
        resumable=True,
    )
    cuda_graphs: str = memory_flag(
        "auto",
        "capture the microbatches of a step as CUDA graphs, one for each of few sizes that they are filled up to, and "
        "replay them: the host starts one graph in place of some thousand kernels; auto: on a GPU, where timed "
        "microbatches say that it pays",
        choices=AUTO_BOOL,
        resumable=True,
    )
    use_flash_attention: bool = memory_flag(False, "older spelling of --attention auto, where flash kernels are")
    backend: str | None = machine_flag(
        None, "auto, cuda, mps, mlx, cpu or xpu; default: environment variable FSDP_BACKEND, else auto", auto=True
    )
    world_size: int = machine_flag(
        -1, "number of ranks (processes); -1: as launched, else one per CUDA device, else 1", minimum=-1, nonzero=True
    )
    parallel_backend: str = machine_flag(
        "ptd",
        "distributed implementation. ptd: built-in FSDP2/DDP; accelerate: its DDP, "
        "or FSDP2/DeepSpeed per its config file",
        choices=("ptd", "accelerate"),
    )
    parallel: str = machine_flag(
        "auto",
        "degrees that are not given. auto: the fastest predicted that fits, of ranks that --assume_world_size counts, "
        "and fsdp of ranks that start now; fastest: of both; fsdp: all ranks shard",
        choices=("auto", "fastest", "fsdp"),
    )
    dp_degree: int = degree_flag("dp_degree")
    dp_shards: int = degree_flag("dp_shards")
    tp_degree: int = degree_flag("tp_degree")
    sequence_parallel: bool = machine_flag(
        False,
        "beside tensor parallelism: norms and residual sums of each layer compute 1/tp of the positions on each rank",
    )
    vocab_parallel: str = machine_flag(
        "auto",
        "under FSDP2 no rank gathers embedding and head: tokens and hidden states travel to the ranks that have their "
        "rows. auto: where gathered ones do not fit; tensor parallelism shards them in any case",
        choices=("auto", "true", "false"),
    )
    cp_degree: int = degree_flag("cp_degree")
    pp_degree: int = degree_flag("pp_degree")
    ep_degree: int = degree_flag("ep_degree")
    pp_schedule: str = machine_flag(
        "1f1b",
        "pipeline schedule; interleaved1f1b: two runs of layers per stage, which wait half as long for each other",
        choices=("1f1b", "gpipe", "interleaved1f1b"),
    )
    sharding_strategy: str | None = machine_flag(
        None, "older spelling of --dp_degree and --dp_shards", choices=SHARDING_STRATEGIES
    )
    no_sync: bool = machine_flag(False, "reduce gradients once per step instead of once per microbatch")
    rank_timeout: float = machine_flag(
        600.0, "seconds without a heartbeat before a rank counts as lost", above=0.0, maximum=2_592_000.0
    )
    master_addr: str = machine_flag("localhost", "host of rank 0 for the rendezvous")
    master_port: int = machine_flag(12355, "port of rank 0 for the rendezvous", minimum=1, maximum=65535)
    mlx_config: str | None = machine_flag(None, "JSON file of MLX engine settings", metavar="FILE", resumable=False)
    output_dir: str | None = output_flag(
        None, "folder for checkpoints, metrics and final weights; default: outputs/<date-time>-<model>", metavar="DIR"
    )
    save_model: bool = output_flag(True, "write the trained weights at the end")
    push_to_hub: str | None = output_flag(
        None,
        "after training, upload the weights, tokenizer, run_plan.json and model card to this Hub repository, which is "
        "created as a private one; needs HF_TOKEN",
        metavar="ID",
    )
    save_every: int = output_flag(0, "save a checkpoint every N steps; 0: only at the end", minimum=0)
    async_save: str = output_flag(
        "auto",
        "with --save_every: copy what is saved to host memory, and write it while steps go on; auto: if the copy fits",
        choices=AUTO_BOOL,
    )
    keep_last: int = output_flag(2, "number of checkpoints to keep", minimum=1)
    resume: str | None = output_flag(
        None,
        "auto: resume from the newest valid checkpoint, if any; or a run or checkpoint folder",
        metavar="auto|DIR",
        saved=False,
        resumable=False,
    )
    overwrite: bool = output_flag(False, "replace an existing run in --output_dir", saved=False, resumable=False)
    eval_every: int | str = output_flag(
        0,
        "evaluate every N steps; 0: only before and after training; auto: once a pass over the rows",
        minimum=0,
        auto=True,
        metavar="N|auto",
    )
    eval_samples: int = output_flag(
        4,
        "answer the first N validation or scored prompts at each evaluation, and keep the answers in samples.jsonl; 0: "
        "none",
        minimum=0,
    )
    run_page: bool = logging_flag(True, "write report.html, one page about the run, when it ends")
    log_to: str = logging_flag(
        "tqdm",
        "several, comma-separated. tqdm: live progress line; stdout: plain lines; tensorboard, wandb, mlflow, trackio: "
        "also to this tracker, whose package must be installed; csv: also metrics.csv in the output folder",
        metavar="NAME,...",
        comma_separated=True,
    )
    log_every_n_steps: int = logging_flag(1, "print every N steps", minimum=1)
    verbose: bool = logging_flag(False, "print the detected hardware, and memory item by item")
    project_name: str | None = logging_flag(None, "project, or MLflow experiment, of the trackers", may_be_empty=True)
    name: str | None = logging_flag(None, "run name of the trackers; default: the output folder's", may_be_empty=True)
    group: str | None = logging_flag(None, "run group of W&B and Trackio", may_be_empty=True)
    entity: str | None = logging_flag(None, "Weights & Biases entity (user or team)", may_be_empty=True)
    profile: bool = profile_flag(False, "run the torch profiler")
    profiling_output: str = profile_flag("profiles", "folder for profiler output", metavar="DIR")
    with_stack: bool = profile_flag(False, "record call stacks")
    with_shapes: bool = profile_flag(False, "record input shapes")
    export_trace: bool = profile_flag(True, "write Chrome traces")
    export_memory_timeline: bool = profile_flag(False, "write a memory timeline")
    profile_memory: bool = profile_flag(False, "record allocations")
    wait_steps: int = profile_flag(0, "idle steps before each cycle", minimum=0)
    profiler_warmup_steps: int = profile_flag(1, "warmup steps per cycle, traced and discarded", minimum=0)
    active_steps: int = profile_flag(2, "steps recorded per cycle", minimum=1)
    repeat: int = profile_flag(0, "number of cycles; 0: until training ends", minimum=0)
    profiling_frequency: int = profile_flag(10, "steps per cycle", minimum=1)
    config: str | None = ask_flag(
        None, "YAML file of flags, or a run_plan.json; command-line flags override it", metavar="FILE"
    )
    dry_run: bool = ask_flag(False, "print the plan with its reasons and a preview of the data; load nothing")
    data_report: str | None = ask_flag(None, "with --dry_run: write the preview of the data as JSON", metavar="FILE")
    doctor: str = ask_flag(
        "false",
        "probe the hardware and every quantizer and print a report; json: as JSON",
        choices=("false", "true", "json"),
    )
    parity: str | None = ask_flag(
        None,
        "take the same steps on two backends, such as torch,mlx, and compare losses, gradients and weights",
        metavar="NAME,NAME",
        comma_separated=True,
    )
    recommend: bool = ask_flag(False, "print recommended settings for this machine")
    assume_memory: str | None = ask_flag(None, "plan for a device with this much memory, such as 24GiB")
    assume_world_size: int | None = ask_flag(None, "plan for this many ranks", minimum=1)
    assume_device: str | None = ask_flag(
        None, "plan for this device, such as rtx4090, h100 or m4-max: its memory and its documented speed"
    )
    assume_interconnect: str | None = ask_flag(
        None,
        "links between assumed devices: nvlink or pcie within a host, ib or ethernet between hosts, or 25GB a second",
    )

    def changed(self, **changes: Any) -> "TrainConfig":
        """The same with other values."""
        return replace(self, **changes)


def value_type(field: Field) -> type:
    """str, int, float or bool: what a flag's value is if it is given and not a word such as auto."""
    return (get_args(field.type) or (field.type,))[0]


def is_left_open(name: str, value: object) -> bool:
    """True if the value is the word auto and means what the flag means if it is not given."""
    field = FIELDS[name]
    default = field.metadata["unset"] or field.default
    return value == "auto" and (default == "auto" or default is None and field.metadata["auto"])


def settings_asked(overrides: dict) -> dict:
    """The overrides that settle something: no None, and no "auto" that is the default."""
    return {n: value for n, value in overrides.items() if value is not None and not is_left_open(n, value)}


FIELDS = {f.name: f for f in fields(TrainConfig)}
DEFAULTS = {name: f.default for name, f in FIELDS.items()}
NAMES = {alias: name for name, f in FIELDS.items() for alias in (name, *f.metadata["aliases"])}
