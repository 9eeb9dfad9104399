"""Objectives: one row per word of --preference, --reward_loss, --distill_loss and --task, with its class, its flags,
its data and its learning rate.

The plan, the conflicts page, the readers of rows and --help read the rows. A new objective is a row here and a class,
see finetune.objectives.Objective.
"""

from dataclasses import dataclass, field
from typing import Any

from finetune.parts.heads import TOKENS
from finetune.parts.rows import in_prose, sharing, words_with


@dataclass(frozen=True)
class Rewarded:
    """Loss of rewarded answers, see rewards.advantages. `divides`: the tokens of an answer's loss
    are divided by its own length, by the most that an answer may have, or by the step's mean length. `leaves_one_out`:
    an answer is compared with the others of its group, not with all of it.
    """

    divides: str = "length"
    leaves_one_out: bool = False


@dataclass(frozen=True)
class ObjectiveFacts:
    """A row of OBJECTIVES. `implementation`: its class; `mlx`: that of the MLX engine, if it has one. `arguments`:
    {argument of the class: flag of its value, of a list its length}.

    `beta_help`: what --preference_beta is, of {words} that share it. `defaults`: {flag: its value where the user gave
    none}, if that is not the flag's own. `pairs`: a row is a chosen and a rejected answer. `labels`: a row is an answer
    with a label. `needs_reference`: it compares with the model before training. `mismatches`: prompts with other rows'
    answers are read before a step. `source`: where the microbatches of its steps come from, see parts.run_data. `head`:
    a row of HEADS, of words of --task another than the tokens'. `rate`: its learning rate divided by that of the next
    token, see plan.learning_rate. `distills`: it learns what a teacher gave; `of_samples`: only of answers of its own,
    by the sampled tokens. `below_zero`: its loss is no likelihood,
    and may be below zero. `rewarded`: answers are sampled, and it learns by their rewards. `captured`: from tensors
    alone, so that CUDA graphs replay it.
    """

    implementation: str
    summary: str
    arguments: dict[str, str] = field(default_factory=dict)
    beta_help: str = ""
    defaults: dict[str, float | str] = field(default_factory=dict)
    pairs: bool = False
    labels: bool = False
    needs_reference: bool = False
    mismatches: bool = False
    source: str = "finetune.data.run_data.Data"
    head: str = TOKENS
    rate: float = 1.0
    distills: bool = False
    of_samples: bool = False
    below_zero: bool = False
    rewarded: Rewarded | None = None
    captured: bool = False
    mlx: str = ""

    @property
    def is_preference(self) -> bool:
        """True if its loss is of whole answers that were preferred or rewarded, not of the next token."""
        return self.pairs or self.labels or self.rewarded is not None

    @property
    def has_head(self) -> bool:
        """True if it learns what a head beside the model's own gives of whole documents."""
        return self.head != TOKENS


PREFERENCE = "finetune.torch_engine.preference"
MLX = "finetune.mlx_engine.preference"
BETA = {"beta": "preference_beta"}
CLIPPED = {"clip_low": "clip_low", "clip_high": "clip_high"}
KL = {"kl_beta": "kl_beta"}


def of_rewards(name: str, summary: str, arguments: dict[str, str], how: Rewarded, **defaults: float | str):
    """The row of a loss of sampled answers, a class of both engines' policy. `defaults`: see ObjectiveFacts."""
    return ObjectiveFacts(
        f"finetune.torch_engine.policy.{name}",
        summary,
        arguments,
        defaults=defaults,
        source="finetune.rewards.rollouts.Rollouts",
        rate=0.2,
        below_zero=True,
        rewarded=how,
        mlx=f"finetune.mlx_engine.policy.{name}",
    )


def of_teacher(name: str, summary: str, of_samples: bool = False, **arguments: str):
    """The row of a loss beside a teacher, a class of both engines' distillation."""
    return ObjectiveFacts(
        f"finetune.torch_engine.distillation.{name}",
        summary,
        {"alpha": "distill_alpha"} | arguments,
        distills=True,
        of_samples=of_samples,
        below_zero=of_samples,
        mlx=f"finetune.mlx_engine.distillation.{name}",
    )


GENERATE = "generate"  # the word of --task for the model's own head
CLASSIFY = "classify"
EMBED = "embed"
REWARD_MODEL = "reward_model"
CLOSE = "how strongly {words} keep the model close to its state before training"
# The usual preference is the first.
OBJECTIVES = {
    "none": ObjectiveFacts(
        "finetune.objectives.NextToken",
        "the next token of every answer",
        captured=True,
        mlx="finetune.objectives.NextToken",
    ),
    "dpo": ObjectiveFacts(
        f"{PREFERENCE}.DPO",
        "pairs: the chosen answer gains on the rejected one, relative to the model before training",
        BETA,
        beta_help=CLOSE,
        pairs=True,
        needs_reference=True,
        rate=0.05,
        captured=True,
        mlx=f"{MLX}.DPO",
    ),
    "orpo": ObjectiveFacts(
        f"{PREFERENCE}.ORPO",
        "pairs: the chosen answer is learned, and its odds rise",
        BETA,
        beta_help="weight of {words}'s odds ratio",
        pairs=True,
        rate=0.1,
        below_zero=True,
        mlx=f"{MLX}.ORPO",
    ),
    "simpo": ObjectiveFacts(
        f"{PREFERENCE}.SimPO",
        "pairs: the chosen answer's mean log-probability leads the rejected one's by a margin",
        BETA | {"gamma": "simpo_gamma"},
        beta_help="scale of {words}'s log-probabilities (there 2.0 by default)",
        defaults={"preference_beta": 2.0},
        pairs=True,
        rate=0.1,
        below_zero=True,
        mlx=f"{MLX}.SimPO",
    ),
    "kto": ObjectiveFacts(
        f"{PREFERENCE}.KTO",
        "answers with a label, relative to the model before training",
        BETA | {"desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight"},
        beta_help=CLOSE,
        labels=True,
        needs_reference=True,
        mismatches=True,
        source="finetune.data.mismatched.DataWithMismatches",
        rate=0.05,
        mlx=f"{MLX}.KTO",
    ),
    "grpo": of_rewards(
        "PerToken",
        "advantages within a group of answers, a clipped ratio per token, each answer's mean over its tokens",
        CLIPPED | KL,
        Rewarded(),
    ),
    "dr_grpo": of_rewards(
        "PerToken",
        "the same, divided by the most tokens of an answer and not by its own, advantages not scaled",
        CLIPPED | KL,
        Rewarded("most"),
        scale_rewards="none",
    ),
    "dapo": of_rewards(
        "PerToken",
        "the same, every token of the step with one weight, clipped higher above than below",
        CLIPPED | KL,
        Rewarded("tokens"),
        clip_high=0.28,
    ),
    "gspo": of_rewards(
        "PerAnswer",
        "a clipped ratio per answer, the geometric mean over its tokens",
        CLIPPED | KL,
        Rewarded(),
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "rloo": of_rewards(
        "WholeAnswer",
        "an answer against the mean reward of the others, a clipped ratio of whole answers",
        CLIPPED,
        Rewarded(leaves_one_out=True),
        scale_rewards="none",
    ),
    "forward_kl": of_teacher(
        "ForwardKL", "the student covers all that the teacher finds likely: KL(teacher | student)"
    ),
    "reverse_kl": of_teacher("ReverseKL", "it keeps to what the teacher finds likeliest: KL(student | teacher)"),
    "jsd": of_teacher(
        "GeneralizedJSD",
        "between both by --distill_beta: the generalized Jensen-Shannon divergence",
        beta="distill_beta",
    ),
    "sampled_kl": of_teacher(
        "SampledKL", "reverse_kl by the sampled tokens alone: a policy gradient, on its own answers", of_samples=True
    ),
    CLASSIFY: ObjectiveFacts(
        "finetune.torch_engine.head_objectives.Classes",
        "one label of each row's text",
        {"num_labels": "class_names"},
        head="classes",
        source="finetune.data.head_data.HeadData",
    ),
    EMBED: ObjectiveFacts(
        "finetune.torch_engine.head_objectives.Vectors",
        "a vector of each text, from texts that belong together",
        {"hard_negatives": "hard_negatives"},
        head="vector",
        source="finetune.data.head_data.HeadData",
    ),
    REWARD_MODEL: ObjectiveFacts(
        "finetune.torch_engine.head_objectives.Scores",
        "a score of each answer, from pairs of a chosen and a rejected one",
        pairs=True,
        head="score",
        source="finetune.data.head_data.HeadData",
    ),
}


def objective_of(settings: Any) -> str:
    """The row of OBJECTIVES that settings choose."""
    if settings.task != GENERATE:
        return settings.task
    if settings.reward:
        return settings.reward_loss
    if settings.teacher:
        return settings.distill_loss
    return settings.preference


def tasks() -> tuple[str, ...]:
    """The words of --task that have a head of their own."""
    return words_with(OBJECTIVES, lambda facts: facts.has_head)


def preferences() -> tuple[str, ...]:
    """The words of --preference that learn from preferences in the rows."""
    return words_with(OBJECTIVES, lambda facts: (facts.pairs or facts.labels) and not facts.has_head)


def reward_losses() -> tuple[str, ...]:
    """The words of --reward_loss."""
    return words_with(OBJECTIVES, lambda facts: facts.rewarded)


def distillations() -> tuple[str, ...]:
    """The words of --distill_loss."""
    return words_with(OBJECTIVES, lambda facts: facts.distills)


def of_answers() -> tuple[str, ...]:
    """The objectives that learn which answers are better."""
    return words_with(OBJECTIVES, lambda facts: facts.is_preference)


def from_pairs() -> tuple[str, ...]:
    return words_with(OBJECTIVES, lambda facts: facts.pairs and not facts.has_head)


def from_labels() -> tuple[str, ...]:
    return words_with(OBJECTIVES, lambda facts: facts.labels)


def with_reference() -> tuple[str, ...]:
    return words_with(OBJECTIVES, lambda facts: facts.needs_reference)


def words_of(flag: str) -> tuple[str, ...]:
    """The words of --preference that have this flag."""
    if flag == "precompute_ref_log_probs":
        return with_reference()
    return words_with(OBJECTIVES, lambda facts: flag in facts.arguments.values())


def with_preference(flag: str) -> str:
    """The start of a flag's help: with which objectives it is."""
    return f"with --preference {in_prose(words_of(flag), 'or')}"


def beta_help() -> str:
    """Help of --preference_beta, by objective."""
    texts = sharing(OBJECTIVES, lambda facts: facts.beta_help)
    return "; ".join(text.format(words=in_prose(words)) for text, words in texts.items())
