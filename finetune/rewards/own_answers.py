"""The source of steps that learn what a teacher finds of the model's own answers: on-policy distillation.

Of a step's rows a fraction is drawn, whose last answer the model samples anew before the step. The teacher, which stays
in memory, reads these rows and the others (Agarwal et al. 2024, algorithm 1, by row instead of by batch). What is
random in an answer follows from the seed, the step and the row, so that it is the same on any number of ranks and
after a restart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from finetune.arrays import Named, Per
from finetune.data.collate import largest_group, microbatches
from finetune.data.run_data import Data, of_step
from finetune.data.sampler import GROUPS_SEARCHED, first_steps, step_rows
from finetune.data.taught_rows import Kept, KeptTargets
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.engine import Batch, Engine, SamplingEngine
from finetune.errors import PlanError
from finetune.estimate.model_cost import ModelCost
from finetune.generation import Sampled, Sampling
from finetune.objectives import ROW_TARGET, TEACHER_TOKENS
from finetune.parts.parts import Parts
from finetune.parts.sampled import sampled_of
from finetune.parts.train_state import Cursor, TrainState
from finetune.rewards.rollouts import LEAST_ROOM

OWN_ANSWERS = "own_answers"  # of a step, in the log


class Judge(Protocol):
    """Interface of a teacher that stays in memory. `standing`, `reading`: its bytes, and those of a forward beside
    them; `cost`: its dimensions, for predicted times; `widths`: of the arrays that it gives.
    """

    standing: int
    reading: int
    cost: ModelCost | None
    widths: dict[str, int]

    def judged(self, dataset: TokenizedDataset) -> dict[str, list[np.ndarray]]:
        """{name in `widths`: [T, width] of the targets of each document, in order}."""


def within(answer: Sampled, num_tokens: int, end: int | None) -> Sampled:
    """The answer up to the first id that is no token, and `end` in its place if there is one: a head may have more
    rows than there are tokens, and a teacher another number of them.
    """
    at = next((i for i, id in enumerate(answer.ids) if id >= num_tokens), None)
    if at is None:
        return answer
    left = Sampled(answer.ids[:at], answer.log_probs[:at], ended=False)
    if end is None:
        return left
    return Sampled([*left.ids, end], [*left.log_probs, answer.log_probs[at]], ended=True)


@dataclass(frozen=True)
class OwnAnswers(Data):
    """Data whose steps learn from answers of the model's own too. `room`: tokens of a prompt and its answer."""

    judge: Judge = field(kw_only=True)
    room: int = field(kw_only=True)
    facts: dict[str, Any] = field(default_factory=dict, kw_only=True)  # of the last step

    @cached_property
    def asked(self) -> np.ndarray:
        """[N]: tokens of each row's prompt; 0 of a row that asks nothing, or whose prompt leaves an answer no room."""
        found = np.zeros(self.train.num_rows, np.int64)
        for row in range(self.train.num_rows):
            start = self.train.answer_start(row)
            if start > 1 and start + LEAST_ROOM <= self.room:
                found[row] = start
        return found

    @cached_property
    def num_tokens(self) -> int:
        """One more than the largest id of a token."""
        return 1 + max(self.tokenizer.get_vocab().values())

    def check(self) -> list[str]:
        """Notices on rows that are learned as they are. Raises PlanError if all are."""
        left = int((self.asked == 0).sum())
        if left == len(self.asked):
            raise PlanError(
                f"--on_policy_fraction: no row has a prompt that leaves an answer {LEAST_ROOM} of --context_length "
                f"{self.room} tokens ({self.train.description or 'the data'}). Omit it, or give rows with prompts."
            )
        if not left:
            return []
        return [f"{left:,} rows without a prompt, or room for an answer after it, are learned as they are"]

    # ---- the step

    def step(self, plan: Parts, state: TrainState, engine: Engine) -> tuple[list[Batch], np.ndarray, Cursor]:
        """Microbatches of the next step, see StepSource."""
        engine = cast(SamplingEngine, engine)  # the plan lets no other sample
        rows, cursor = step_rows(self.train.order, plan.rows_per_step, plan.data.seed, state.cursor)
        mine = rows[engine.data_rank :: plan.dims.data_ranks]  # sampler.rank_rows
        answered = self._answered(mine, state.step, plan, engine)
        dataset = self._judged(self._dataset(mine, answered))
        return of_step(self._batches(dataset, mine, plan, engine.pad_id), state.step + 1), rows, cursor

    def _answered(self, rows: np.ndarray, step: int, plan: Parts, engine: SamplingEngine) -> dict[int, Sampled]:
        """{place among this rank's rows: the model's own answer}. Collective."""
        how = sampled_of(plan)
        places = [i for i, row in enumerate(rows) if self._is_drawn(int(row), step, plan)]
        prompts = [self._prompt(int(rows[i])) for i in places]
        rooms = [min(how.most, self.room - len(ids)) for ids in prompts]
        seeds: list[list[tuple[int, ...]]] = [[(plan.steps.seed, step, int(rows[i]))] for i in places]
        drawn = engine.sample(prompts, seeds, rooms, self.stop_ids, Sampling(how.temperature, 0, how.top_p))
        end = min((id for id in self.stop_ids if id < self.num_tokens), default=None)
        found = {i: within(answers[0], self.num_tokens, end) for i, answers in zip(places, drawn, strict=True)}
        here = [[len(one.ids), one.ended] for one in found.values()]
        every = [pair for part in engine.all_gather_object(here) for pair in part]
        self.facts.clear()
        self.facts[OWN_ANSWERS] = len(every)
        if every:
            lengths, ended = zip(*every, strict=True)
            self.facts["completions/mean_length"] = float(np.mean(lengths))
            self.facts["completions/clipped_ratio"] = 1 - float(np.mean(ended))
        return found

    def _is_drawn(self, row: int, step: int, plan: Parts) -> bool:
        """True if the model answers this row of this step itself."""
        fraction = sampled_of(plan).fraction
        drawn = np.random.default_rng([plan.steps.seed, step, row]).random()
        return bool(self.asked[row]) and drawn < fraction

    def _prompt(self, row: int) -> list[int]:
        return self.train.document(row)[0][: self.asked[row]].tolist()

    def _dataset(self, rows: Sequence[int] | np.ndarray, answers: dict[int, Sampled]) -> TokenizedDataset:
        """These rows one after the other, with the model's answers in the place of their last ones."""
        parts = []
        of_rows = []
        for place, row in enumerate(rows):
            ids, is_target = self.train.document(int(row))
            own = answers.get(place)
            if own is not None:
                prompt = self._prompt(int(row))
                ids = np.array([*prompt, *own.ids])
                is_target = np.arange(len(ids)) >= len(prompt)
            parts.append((ids, is_target))
            of_rows.append(np.full(len(ids), own is None, np.float32))
        arrays = {ROW_TARGET: Named(np.concatenate(of_rows or [np.zeros(0, np.float32)]), Per.TARGET)}
        sources = tuple(self.train.row_source(int(row)) for row in rows)
        return replace(self.train, **joined_parts(parts), sources=sources, parts=(), arrays=arrays)

    def _judged(self, dataset: TokenizedDataset) -> TokenizedDataset:
        """The rows with what the teacher gives at their targets."""
        given = self.judge.judged(dataset)
        arrays = {
            name: Named(KeptTargets(dataset, [Kept(each, None) for each in parts]), Per.TARGET)
            for name, parts in given.items()
        }
        return replace(dataset, arrays={**dataset.arrays, **arrays})

    def _batches(self, dataset: TokenizedDataset, rows: np.ndarray, plan: Parts, pad_id: int) -> list[Batch]:
        """Microbatches of the step's documents, whose rows are the training rows' numbers."""
        steps = plan.steps
        found = microbatches(
            dataset, range(len(rows)), plan.data.layout, steps.batch_size, steps.microbatch_tokens, pad_id
        )
        return [replace(batch, rows=tuple(int(rows[place]) for place in batch.rows)) for batch in found]

    def metrics(self) -> dict[str, Any]:
        return dict(self.facts)

    # ---- what is predicted

    def rollouts(self, plan: Parts) -> Iterator[list[int]]:
        """Tokens of the prompts that each rank answers in each of the run's first steps."""
        searched = 0
        for step, rows in enumerate(self._first_steps(plan)):
            for rank in range(plan.dims.data_ranks):
                mine = rows[rank :: plan.dims.data_ranks]
                yield [int(self.asked[row]) for row in mine if self._is_drawn(int(row), step, plan)]
            searched += len(rows)
            if searched >= GROUPS_SEARCHED:
                break

    def _first_steps(self, plan: Parts) -> Iterator[np.ndarray]:
        return first_steps(self.train.order, plan.rows_per_step, plan.data.seed, self.total_steps(plan))

    def largest_microbatch(self, plan: Parts, engine: Engine) -> Batch:
        """The largest microbatch of the run's first epochs, if every answer of the model's own is of full length."""
        most = np.minimum(self.asked + sampled_of(plan).most, self.room)
        lengths = np.where(self.asked > 0, np.maximum(self.train.lengths, most), self.train.lengths)
        steps = plan.steps
        rows, size = largest_group(
            lengths, self._first_steps(plan), plan.data.layout, steps.batch_size, steps.microbatch_tokens
        )
        answers = {}
        for place, row in enumerate(rows):
            if lengths[row] > self.train.lengths[row]:
                room = int(lengths[row] - self.asked[row])
                answers[place] = Sampled([engine.pad_id] * room, [0.0] * room, True)
        dataset = self._dataset(rows, answers)
        arrays = {
            name: Named(
                np.zeros((len(dataset.tokens), width), np.int32 if name == TEACHER_TOKENS else np.float32), Per.TARGET
            )
            for name, width in self.judge.widths.items()
        }
        dataset = replace(dataset, arrays={**dataset.arrays, **arrays})
        tokens = max(steps.microbatch_tokens, size)
        return microbatches(dataset, range(len(rows)), plan.data.layout, len(rows), tokens, engine.pad_id)[0]
