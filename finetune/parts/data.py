"""Rows that are read, and how they become microbatches."""

from dataclasses import dataclass

from finetune.parts.fields import Settings, part_of
from finetune.parts.objectives import EMBED, GENERATE, OBJECTIVES, objective_of
from finetune.parts.reward import RewardPlan


@dataclass(frozen=True)
class DataPlan:
    """Rows that are read, and how they become microbatches. `row_length`: the most tokens of a row. `first_rows`: of a
    dataset on the Hub those only, as a dry run does. `reward`: of rows that are prompts, whose answers are
    sampled and rewarded. `images`: rows show images, which the model sees. `task`: what is learned of the rows;
    `class_names`: of its labels, once they are known.
    """

    dataset: str | list | None
    validation_dataset: str | list[str] | None
    score_dataset: str | None
    dataset_samples: int
    score_samples: int
    score_max_new_tokens: int
    score_metric: str
    score_pattern: str | None
    validation_split: float
    format: str
    columns: str | None
    ignore_columns: str | None
    text_unit: str
    special_tokens_in_text: str
    skip_bad_rows: int
    context_length: int
    overlong: str
    window_overlap: int
    train_on_prompt: bool
    train_on_last_turn: bool
    mask_reasoning: bool
    chat_template: str | None
    eos_token: str | None
    streaming: bool
    shuffle_buffer: int
    layout: str
    seed: int
    pairs: bool
    labels: bool
    mismatches: bool
    source: str
    reward: RewardPlan | None
    first_rows: bool
    new_tokens: str | None
    images: bool
    image_max_pixels: int | None
    image_root: str | None
    allow_urls: bool
    task: str
    class_names: str | list[str] | None
    hard_negatives: str

    @property
    def documents_per_row(self) -> int:
        """2 if a row is a pair of a chosen and a rejected answer; the texts of a row that belong together, and the
        negative.
        """
        if self.task == EMBED:
            return 3 if self.hard_negatives == "true" else 2
        return 2 if self.pairs else 1

    @property
    def documents_per_step_row(self) -> int:
        """Documents that a row is in a step: its answers, of a prompt whose answers are sampled."""
        if self.reward is None:
            return self.documents_per_row
        return self.reward.num_generations

    @property
    def has_head(self) -> bool:
        """True if rows are read for a head beside the model's own."""
        return self.task != GENERATE

    @property
    def answer_room(self) -> int:
        """The most tokens of an answer that is sampled; 0: none is."""
        if self.reward is None:
            return 0
        return self.reward.max_completion_length

    @property
    def unit(self) -> str:
        """Noun that batch_size counts."""
        if self.reward:
            return "prompts"
        return "pairs" if self.pairs or self.task == EMBED else "rows"

    @property
    def row_length(self) -> int:
        return self.documents_per_row * self.context_length

    @classmethod
    def of(cls, settings: Settings) -> "DataPlan":
        s = settings
        facts = OBJECTIVES[objective_of(settings)]
        if s.data_seed is None:
            seed = s.seed
        else:
            seed = s.data_seed
        renamed = dict(format=s.dataset_format, layout=s.batch_layout, seed=seed, first_rows=s.dry_run)
        renamed |= {name: getattr(facts, name) for name in ("pairs", "labels", "mismatches", "source")}
        renamed |= {"reward": None, "images": s.images == "true"}
        if facts.rewarded:
            renamed["reward"] = RewardPlan.of(s)
        return part_of(cls, s, **renamed)
