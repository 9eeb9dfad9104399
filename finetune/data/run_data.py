"""Data of a run: the loop asks it for each step and each evaluation."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from finetune.data.collate import largest_microbatch, microbatches, showing_images
from finetune.data.columns import Row
from finetune.data.head_rows import reads_messages
from finetune.data.held_out import prompts_of
from finetune.data.sampler import first_steps, rows_so_far, step_rows, total_steps
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.engine import Batch, Engine, ShowingImages, StepResult
from finetune.model_files.tokenizer import FullTokenizer
from finetune.parts.data import DataPlan
from finetune.parts.objectives import GENERATE
from finetune.parts.parts import Parts
from finetune.parts.run_data import PROCESSOR
from finetune.parts.train_state import Cursor, TrainState


def of_step(parts: list[Batch], step: int) -> list[Batch]:
    """The microbatches as those of optimizer step `step`."""
    return [replace(batch, step=step) for batch in parts]


def short_names(names: list[str]) -> list[str]:
    """Last parts of paths and IDs, where they tell them apart."""
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    return last if len(set(last)) == len(last) else names


def sum_of(results: list[StepResult]) -> StepResult:
    """The result over the rows of several, whose metrics are means over theirs."""
    if len(results) == 1:
        return results[0]
    counts = [result.num_targets if result.num_rows is None else result.num_rows for result in results]
    metrics = {
        name: sum(result.metrics[name] * count for result, count in zip(results, counts, strict=True)) / sum(counts)
        for name in results[0].metrics
    }
    rows = None if results[0].num_rows is None else sum(counts)
    targets, tokens = (sum(getattr(result, name) for result in results) for name in ("num_targets", "num_tokens"))
    return StepResult(sum(result.nll for result in results), targets, tokens, 0.0, num_rows=rows, metrics=metrics)


@dataclass(frozen=True)
class Data:
    """Everything a run reads: training rows, validation rows, and examples scored by exact match.

    `score_examples`: (prompt ids, expected answer, source) each; `score_rows`: their rows' tokens, where a score is
    computed from them; `scored_sha256`: of the rows as they were read, under any tokenizer; `teacher_sha256`: of what a
    teacher gave. `example`: one row as it was read. `stop_ids`: tokens that end an answer, among them the
    `learned_ends` of the rows.
    """

    tokenizer: FullTokenizer
    stop_ids: set[int]

    train: TokenizedDataset
    validation: TokenizedDataset | None
    score_examples: list
    example: Row | None
    score_rows: TokenizedDataset | None
    learned_ends: frozenset[int] = field(default=frozenset(), kw_only=True)
    scored_sha256: str = field(default="", kw_only=True)
    teacher_sha256: str = field(default="", kw_only=True)

    @classmethod
    def of(cls, plan: DataPlan, rows: dict[str, dict], **read: Any) -> "Data":
        """The data of a run, from what was read for it. `rows`: {source: training row}, for rewards."""
        return cls(**read)

    @classmethod
    def check_rows(cls, plan: DataPlan, train: TokenizedDataset, tokenizer: Any, stop_ids: set[int]) -> list[str]:
        """Notices on training rows, for a dry run. Raises PlanError for those that a run would refuse: here none."""
        return []

    def digests(self) -> dict[str, str]:
        """{name of a data set's flag: sha256 of what was read of it}, and that of how images become numbers."""
        found = {"dataset": self.train.digest()}
        if self.teacher_sha256:
            found["teacher"] = self.teacher_sha256
        if self.train.images is not None:
            found[PROCESSOR] = hashlib.sha256(self.train.images.processor.settings.encode()).hexdigest()
        if self.scored_sha256:
            found["score_dataset"] = self.scored_sha256
        if self.validation is not None and self.validation is not self.score_rows:
            found["validation_dataset"] = self.validation.digest()
        return found

    def step(self, plan: Parts, state: TrainState, engine: Engine) -> tuple[list[Batch], np.ndarray, Cursor]:
        """Microbatches of the next step, see StepSource."""
        rows, cursor = step_rows(self.train.order, plan.rows_per_step, plan.data.seed, state.cursor)
        mine = slice(engine.data_rank, None, plan.dims.data_ranks)  # sampler.rank_rows
        parts = self.microbatches(self.train, rows, mine, plan, engine.pad_id, plan.steps.batch_size)
        return of_step(parts, state.step + 1), rows, cursor

    def microbatches(
        self,
        dataset: TokenizedDataset,
        rows: Sequence[int] | np.ndarray,
        mine: slice,
        plan: Parts,
        pad_id: int,
        batch_size: int,
    ) -> list[Batch]:
        """The microbatches of `rows[mine]`."""
        return microbatches(dataset, rows[mine], plan.data.layout, batch_size, plan.steps.microbatch_tokens, pad_id)

    def validation_parts(self, plan: Parts) -> dict[str, range]:
        """{name: its rows} of each part of the validation rows that has a loss of its own: of several datasets each by
        its name, else all of them.
        """
        assert self.validation is not None, "there are no validation rows to evaluate"
        sizes = {"": self.validation.num_rows}
        if isinstance(plan.data.validation_dataset, list) and self.validation.parts:
            names = short_names([part.name for part in self.validation.parts])
            sizes = dict(zip(names, (part.num_rows for part in self.validation.parts), strict=True))
        found = {}
        start = 0
        for name, rows in sizes.items():
            found[name] = range(start, start + rows)
            start += rows
        return found

    def evaluation_batches(self, plan: Parts, pad_id: int) -> dict[str, list[Batch]]:
        """{name: microbatches} of each of `validation_parts`."""
        assert self.validation is not None, "there are no validation rows to evaluate"
        return {
            name: self.microbatches(self.validation, rows, slice(None), plan, pad_id, len(rows))
            for name, rows in self.validation_parts(plan).items()
        }

    def evaluation_values(self, results: dict[str, StepResult]) -> dict:
        """Values of the eval event of metrics.jsonl, `loss` of all rows among them."""
        result = sum_of(list(results.values()))
        values = {"loss": result.loss, "num_targets": result.num_targets}
        if len(results) > 1:
            values |= {f"loss/{name}": of_part.loss for name, of_part in results.items()}
        return values | ({} if result.num_rows is None else {"num_rows": result.num_rows, **result.metrics})

    def sample_prompts(self, number: int) -> list[tuple]:
        """(prompt ids, expected answer, source) of the first held-out rows: of validation, else the scored ones."""
        if self.validation is None or self.validation is self.score_rows:
            return self.score_examples[:number]
        return prompts_of(self.validation, self.tokenizer, self.stop_ids, number)

    def sources_of(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Sources of these rows of a step."""
        return [self.train.row_source(row) for row in rows]

    def count_step(self, state: TrainState) -> None:
        """Called once for each step that was taken, before the state advances; here tokens follow from the cursor."""

    def resume(self, state: TrainState) -> list[str]:
        """Notices on data that are read while training. Raises PlanError if they are not those of the state."""
        return []

    @property
    def reads_messages(self) -> bool:
        """True for rows of a head whose texts are messages."""
        if self.example is None or self.train.task == GENERATE:
            return False
        return reads_messages(self.example, bool(self.tokenizer.chat_template))

    @property
    def only_asks(self) -> bool:
        """True if no training row has an answer, or none that counts: all are sampled."""
        return False

    def metrics(self) -> dict[str, Any]:
        """Facts of the step's rows, for its event; here none."""
        return {}

    def close(self) -> None:
        """Ends what reads rows while training: here what decodes images."""
        if self.train.images is not None:
            self.train.images.close()

    def total_steps(self, plan: Parts) -> int:
        return total_steps(self.train.order, plan.rows_per_step, plan.steps.num_epochs, plan.steps.max_steps)

    def noted_while_training(self) -> list[str]:
        """Lines on rows that were read after the first step; here none are."""
        return []

    def tokens_by_dataset(self, plan: Parts, state: TrainState) -> dict[str, int]:
        """Tokens trained on so far of each dataset; empty if there is one."""
        train = self.train
        found = np.zeros(len(self.train.parts), np.int64)
        if not train.parts:
            return {}
        numbers = train.part_numbers()
        lengths = train.row_lengths
        for rows in rows_so_far(train.order, plan.data.seed, state.cursor):
            found += np.bincount(numbers[rows], lengths[rows], len(found)).astype(np.int64)
        return {part.name: int(n) for part, n in zip(train.parts, found, strict=True)}

    def largest_microbatch(self, plan: Parts, engine: Engine) -> Batch:
        """The largest microbatch of the run's first epochs, as the loop will make it."""
        steps = first_steps(self.train.order, plan.rows_per_step, plan.data.seed, self.total_steps(plan))
        return largest_microbatch(
            self.train, steps, plan.data.layout, plan.steps.batch_size, plan.steps.microbatch_tokens, engine.pad_id
        )

    def showing_images(self, pad_id: int) -> ShowingImages | None:
        """Two training documents that show images; None if no row does."""
        return showing_images(self.train, pad_id)

    def rollouts(self, plan: Parts) -> Iterator[list[int]]:
        """Lengths of the prompts that each rank samples answers to, for each of the first steps; here for none."""
        return iter(())
