"""The source of steps that learn by rewards: answers to the next prompts, sampled before the step, with their rewards.

A step takes `rows_per_step` prompts in the order of an epoch and G answers to each, N in all. A rank samples the
answers to its own prompts; all ranks then know all answers, rank 0 alone rewards them. What is random in an answer
follows from the seed, the rollout, the row and the answer's number, so that it is the same on any number of ranks and
after a restart.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np

from finetune.arrays import Named, Per
from finetune.data.asking import is_missing
from finetune.data.collate import microbatches, share_prompts, shared_microbatches
from finetune.data.held_out import split_document, too_long
from finetune.data.run_data import Data, of_step
from finetune.data.sampler import GROUPS_SEARCHED, first_steps, num_rows_of, step_rows
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.engine import Batch, Engine, SamplingEngine
from finetune.errors import PlanError
from finetune.generation import Sampling
from finetune.parts.answer_metrics import without_empty_thought
from finetune.parts.data import DataPlan
from finetune.parts.parts import Parts
from finetune.parts.reward import REWARDED, RewardPlan
from finetune.parts.train_state import Cursor, TrainState
from finetune.rewards.advantages import Lengths, advantages, differs, token_weights
from finetune.rewards.functions import Asked, Rewards

# arrays of a batch, see finetune.arrays
ADVANTAGE = "advantage"
WEIGHT = "weight"
SAMPLED_LOG_PROB = "sampled_log_prob"
REFERENCE_LOG_PROB = "reference_log_prob"
REFILLS = 2  # further rounds of prompts with --refill
MOST_LETTERS = 500  # of a text in the log
MOST_TRIED = 16  # steps whose microbatches are made to find the largest
LEAST_ROOM = 8  # tokens that an answer must have room for
# The mean difference between the sampler's and the trainer's log-probabilities that ends a run.
MOST_APART = 0.1


@dataclass
class Answer:
    """A sampled answer. `row`: of its prompt, in the dataset; `group`: number of the prompt within the rollout.

    `rewards`: of each source of --reward; `total`: with their weights. `log_probs`: of its tokens, under the policy
    that sampled; `reference`: under the model before training.
    """

    row: int
    group: int
    ids: list[int]
    log_probs: list[float]
    ended: bool
    rewards: list[float] = field(default_factory=list)
    total: float = 0.0
    advantage: float = 0.0
    weight: float = 0.0
    reference: list[float] = field(default_factory=list)


@dataclass
class SampledRollout:
    """Answers to a step's prompts, in groups of `group`. `used`: steps that learned from it; `facts`: for the log."""

    group: int
    answers: list[Answer]
    used: int = 0
    facts: dict = field(default_factory=dict)

    def kept(self, all_of_them: bool) -> list[Answer]:
        """The answers that a step learns from: without those whose loss is zero, unless `all_of_them`."""
        found = [a for a in self.answers if a.weight and (a.advantage or all_of_them)]
        return found or sorted(self.answers, key=lambda a: len(a.ids))[:1]


@dataclass(frozen=True)
class Prompt:
    """A prompt of the dataset, and what its row expects (None: nothing)."""

    ids: list[int]
    text: str
    expected: str | None
    row: dict
    source: str


@dataclass(frozen=True)
class Rollouts(Data):
    """Data whose steps learn from sampled answers. `rows`: {source: the row as it was read}."""

    rewards: Rewards = field(kw_only=True)
    rows: dict[str, dict] = field(kw_only=True)
    room: int = field(kw_only=True)  # tokens of prompt and answer
    updates: int = field(kw_only=True)  # steps that learn from a rollout
    compared: list[float] = field(default_factory=list, kw_only=True)  # sampler against trainer, once
    prompts: dict[int, Prompt] = field(default_factory=dict, kw_only=True)  # that were asked for, by row
    now: list[SampledRollout] = field(default_factory=list, kw_only=True)  # the one that steps learn from, if any

    @classmethod
    def of(cls, plan: DataPlan, rows: dict[str, dict], **read: Any) -> "Rollouts":
        """The source of a run's steps. `read`: Data's own fields. Raises PlanError for a row that has no use here."""
        how = plan.reward
        assert how is not None, "the plan has rewards"
        if plan.overlong == "drop":
            read["train"] = with_room(read["train"], plan.context_length)
        found = cls(**read, rewards=Rewards(how), rows=rows, room=plan.context_length, updates=how.updates_per_rollout)
        notices = found.check(how)
        if not notices:
            return found
        return replace(found, train=replace(found.train, notices=(*found.train.notices, *notices)))

    @classmethod
    def check_rows(cls, plan: DataPlan, train: TokenizedDataset, tokenizer: Any, stop_ids: set[int]) -> list[str]:
        """Notices on the rows. Raises PlanError for the first that cannot be asked or rewarded; no code of the user's
        is run.
        """
        how = plan.reward
        assert how is not None, "the plan has rewards"
        if plan.overlong == "drop":
            train = with_room(train, plan.context_length)
        rewards = Rewards(how, runs_code=False)
        found = cls(
            tokenizer, stop_ids, train=train, validation=None, score_examples=[], example=None, score_rows=None,
            rewards=rewards, rows={}, room=plan.context_length, updates=how.updates_per_rollout,
        )  # fmt: skip
        return found.check(how)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row. Raises PlanError if an answer has no room after it."""
        if row not in self.prompts:
            self.prompts[row] = self._prompt(row)
        return self.prompts[row]

    def _prompt(self, row: int) -> Prompt:
        source = self.train.row_source(row)
        if self.train.answer_start(row) < 2:
            raise PlanError(
                f"{source}: has no prompt of two tokens or more to answer. A text asks nothing: name the prompt with "
                "--columns, or remove the row."
            )
        ids, expected = split_document(self.train, row, self.tokenizer, self.stop_ids)
        if len(ids) + LEAST_ROOM > self.room:
            raise PlanError(
                f"{source}: its prompt takes {len(ids)} of --context_length {self.room}, which leaves no room for an "
                "answer. Raise it, or remove the row."
            )
        of_row = self.rows.get(source, {})
        known = None if is_missing(without_empty_thought(expected)) else expected
        return Prompt(ids, self.tokenizer.decode(ids), known, of_row, source)

    def check(self, how: RewardPlan) -> list[str]:
        """Notices on the rows. Raises PlanError for one that cannot be asked or rewarded."""
        metric = self.rewards.needs_answers
        prompts = [self.prompt(row) for row in range(self.train.num_rows)]
        known = [prompt.expected for prompt in prompts if prompt.expected is not None]
        self.rewards.choose_among([without_empty_thought(expected) for expected in known])
        for prompt in prompts:
            if metric and prompt.expected is None:
                raise PlanError(
                    f"--reward {metric}: {prompt.source} has no answer to compare with. Add it, or use a function."
                )
            if prompt.expected is not None:
                self.rewards.check_expected(prompt.expected, prompt.source)
        metrics = [source.name for source in how.sources if source.is_metric]
        questions = [(prompt.ids, prompt.expected, prompt.source) for prompt in prompts if prompt.expected]
        return too_long(questions, metrics, self.tokenizer, how.max_completion_length, "max_completion_length")

    def digests(self) -> dict[str, str]:
        hasher = hashlib.sha256()
        for source in dict.fromkeys(self.train.sources):
            hasher.update(json.dumps(self.rows.get(source), sort_keys=True, default=repr).encode())
        return super().digests() | {REWARDED: hasher.hexdigest()}

    @property
    def only_asks(self) -> bool:
        if self.rewards.needs_answers is None:
            return True
        return all(self.prompt(row).expected is None for row in range(self.train.num_rows))

    # ---- the step

    def step(self, plan: Parts, state: TrainState, engine: Engine) -> tuple[list[Batch], np.ndarray, Cursor]:
        """Microbatches of the next step, see StepSource: of a new rollout, or of one that is used again."""
        engine = cast(SamplingEngine, engine)  # the plan lets no other have rewards
        cursor = state.cursor
        if not self.now:
            rollout, cursor = self._sampled(plan, state, engine)
            self.now.append(rollout)
        rollout = self.now[0]
        mine = self._mine(rollout.kept(all_of_them=plan.reward.kl_beta > 0), plan, engine)
        batches = self._batches(mine, rollout, plan, engine)
        rows = np.array([answer.row for answer in rollout.answers[:: rollout.group]], np.int64)
        return of_step(batches, state.step + 1), rows, cursor

    def count_step(self, state: TrainState) -> None:
        """Notes in the state what a resumed run needs of a rollout that is used again."""
        rollout = self.now[0]
        rollout.used += 1
        if rollout.used >= self.updates:
            self.now.clear()
            state.stream = None
        else:
            state.stream = asdict(rollout)

    def resume(self, state: TrainState) -> list[str]:
        """Takes up the rollout that was in use."""
        if state.stream is not None:
            answers = [Answer(**answer) for answer in state.stream["answers"]]
            self.now[:] = [SampledRollout(**state.stream | {"answers": answers})]
        return []

    def metrics(self) -> dict[str, Any]:
        """Facts of the step's answers, for its event and its line."""
        rollout = self.now[0]
        if not rollout.used:
            return rollout.facts
        # Its answers were counted, and compared, with its first step.
        return {name: fact for name, fact in rollout.facts.items() if name != "sampler_difference"} | {"num_answers": 0}

    def total_steps(self, plan: Parts) -> int:
        steps = super().total_steps(plan)
        if plan.steps.max_steps > 0:
            return steps
        return steps * self.updates

    def _sampled(self, plan: Parts, state: TrainState, engine: SamplingEngine) -> tuple[SampledRollout, Cursor]:
        """(a rollout, where the next begins). With --refill prompts whose answers do not differ are replaced, up to
        REFILLS times as many.
        """
        how = plan.reward
        cursor = state.cursor
        wanted = min(plan.rows_per_step, num_rows_of(self.train.order))
        found: list[Answer] = []
        every: list[Answer] = []
        rounds = 1 + REFILLS * how.refill
        for number in range(rounds):
            rows, cursor = step_rows(
                self.train.order, wanted - len(found) // how.num_generations, plan.data.seed, cursor
            )
            answers = self._answers(rows, (state.step, number), plan, engine)
            self._reward(answers, (plan.steps.seed, state.step, number), engine)
            every += answers
            found += answers
            if number + 1 < rounds:
                found = _of_groups(found, differs(_totals(found), how.num_generations), how.num_generations)
                if len(found) == wanted * how.num_generations:
                    break
        if not found:
            found = answers
        for i, answer in enumerate(found):
            answer.group = i // how.num_generations
        self._weigh(found, plan)
        rollout = SampledRollout(how.num_generations, found, facts=self._facts(every, plan))
        self._compare(rollout, plan, engine)
        return rollout, cursor

    def _answers(self, rows: np.ndarray, rollout: tuple[int, int], plan: Parts, engine: SamplingEngine) -> list[Answer]:
        """Answers to these rows' prompts, sampled by all ranks. Collective."""
        how = plan.reward
        mine = list(range(len(rows)))[engine.data_rank :: plan.dims.data_ranks]
        prompts = [self.prompt(int(rows[i])).ids for i in mine]
        rooms = [min(how.max_completion_length, self.room - len(ids)) for ids in prompts]
        seeds: list[list[tuple[int, ...]]] = [
            [(plan.steps.seed, *rollout, int(rows[i]), sample) for sample in range(how.num_generations)] for i in mine
        ]
        sampled = engine.sample(prompts, seeds, rooms, self.stop_ids, Sampling(how.temperature, 0, how.top_p))
        here = [[i, one.ids, one.log_probs, one.ended] for i, group in zip(mine, sampled, strict=True) for one in group]
        every = [answer for part in engine.all_gather_object(here) for answer in part]
        every.sort(key=lambda answer: answer[0])  # stable: answers of a prompt keep their order
        return [Answer(int(rows[i]), i, *rest) for i, *rest in every]

    def _reward(self, answers: list[Answer], rollout: tuple[int, ...], engine: SamplingEngine) -> None:
        """Rewards the answers, on rank 0. What a function draws follows from `rollout`. Raises PlanError on every rank.
        Collective.
        """
        found: dict = {}
        if engine.rank == 0:
            seed = int(np.random.SeedSequence(rollout).generate_state(1)[0])
            try:
                with engine.drawing_apart(seed):
                    values_FN = self.rewards.of([self._asked(answer) for answer in answers])
                found = {"values": values_FN.T.tolist(), "totals": self.rewards.total(values_FN).tolist()}
            except PlanError as error:
                found = {"error": str(error)}
        found = engine.broadcast_object(found)
        if "error" in found:
            raise PlanError(found["error"])
        for answer, values, total in zip(answers, found["values"], found["totals"], strict=True):
            answer.rewards = values
            answer.total = total

    def _asked(self, answer: Answer) -> Asked:
        prompt = self.prompt(answer.row)
        return Asked(prompt.text, self.text_of(answer), prompt.expected, prompt.row, prompt.source)

    def text_of(self, answer: Answer) -> str:
        """The answer's text, without the token that ends it."""
        return self.tokenizer.decode(answer.ids[: len(answer.ids) - answer.ended])

    def _weigh(self, answers: list[Answer], plan: Parts) -> None:
        """Sets advantages, and weights that are 0 where an answer is masked."""
        how = plan.reward
        facts = plan.objective.facts.rewarded
        assert facts is not None, plan.objective.name
        found_N = advantages(_totals(answers), how.num_generations, how.scale_rewards, facts.leaves_one_out)
        learned_N = np.array([len(a.ids) * (a.ended or not how.mask_truncated) for a in answers])
        weights_N = token_weights(Lengths(learned_N, how.max_completion_length), facts) * (learned_N > 0)
        for answer, advantage, weight in zip(answers, found_N.tolist(), weights_N.tolist(), strict=True):
            answer.advantage = advantage
            answer.weight = weight

    # ---- log-probabilities under other weights

    def _compare(self, rollout: SampledRollout, plan: Parts, engine: SamplingEngine) -> None:
        """Adds what the loss compares with: log-probabilities of the trainer's own forward where a rollout is used more
        than once, and of the reference. At the start also compares the sampler with the trainer. Collective.
        """
        how = plan.reward
        kept = rollout.kept(all_of_them=how.kl_beta > 0)
        first = not self.compared
        if first or self.updates > 1:
            own = self._log_probs(kept, rollout, plan, engine, before_training=False)
            if first:
                rollout.facts["sampler_difference"] = self._check_sampler(kept, own)
            if self.updates > 1:
                for answer, log_probs in zip(kept, own, strict=True):
                    answer.log_probs = log_probs
        if how.kl_beta > 0:
            reference = self._log_probs(kept, rollout, plan, engine, before_training=True)
            for answer, log_probs in zip(kept, reference, strict=True):
                answer.reference = log_probs

    def _check_sampler(self, answers: list[Answer], own: list[list[float]]) -> float:
        """The largest difference of a token's log-probability between sampling and training. Raises PlanError if they
        are not the same policy.
        """
        apart = np.abs(np.array([x for a in answers for x in a.log_probs]) - np.array([x for one in own for x in one]))
        self.compared.append(float(apart.max()))
        if not apart.mean() <= MOST_APART:
            raise PlanError(
                f"--reward: log-probabilities of sampling and training differ by {apart.mean():.2g} in the mean: what "
                "is sampled is not what is trained. Use --precision fp32, or report the model."
            )
        return self.compared[0]

    def _log_probs(
        self, answers: list[Answer], rollout: SampledRollout, plan: Parts, engine: SamplingEngine, before_training: bool
    ) -> list[list[float]]:
        """The log-probability of each token of the answers, in their order. Collective."""
        mine = self._mine(answers, plan, engine)
        batches = self._batches(mine, rollout, plan, engine)
        numbers = [mine[row] for batch in batches for row in batch.rows]
        found = engine.target_log_probs(batches, before_training)
        place = {id(answer): i for i, answer in enumerate(answers)}
        here = [[place[id(a)], log_probs] for a, log_probs in zip(numbers, found, strict=True)]
        every = dict(pair for part in engine.all_gather_object(here) for pair in part)
        return [every[i] for i in range(len(answers))]

    # ---- batches

    def _mine(self, answers: list[Answer], plan: Parts, engine: SamplingEngine) -> list[Answer]:
        """This data rank's part of the answers: whole groups."""
        groups = list(dict.fromkeys(answer.group for answer in answers))
        own = set(groups[engine.data_rank :: plan.dims.data_ranks])
        return [answer for answer in answers if answer.group in own]

    def _batches(
        self, answers: list[Answer], rollout: SampledRollout, plan: Parts, engine: SamplingEngine
    ) -> list[Batch]:
        """Microbatches of these answers, each a document of its own; `rows` are their numbers in `answers`."""
        if not answers:
            return []
        dataset = self._dataset(answers, rollout, plan)
        tokens = plan.steps.microbatch_tokens
        if not engine.shares_prompts:
            return microbatches(dataset, range(len(answers)), plan.data.layout, len(answers), tokens, engine.pad_id)
        groups: dict[int, list[int]] = {}
        for number, answer in enumerate(answers):
            groups.setdefault(answer.group, []).append(number)
        asked = [int(dataset.lengths[g[0]]) - len(answers[g[0]].ids) for g in groups.values()]
        return shared_microbatches(dataset, list(groups.values()), asked, tokens)

    def _dataset(self, answers: list[Answer], rollout: SampledRollout, plan: Parts) -> TokenizedDataset:
        """The answers after their prompts, with what the loss needs of each."""
        kept = len(rollout.kept(all_of_them=plan.reward.kl_beta > 0))
        share = kept / len(rollout.answers)  # the loss is divided by those kept, and is the mean over all
        prompts = [self.prompt(answer.row).ids for answer in answers]
        parts = [
            (np.array([*ids, *a.ids]), np.arange(len(ids) + len(a.ids)) >= len(ids))
            for ids, a in zip(prompts, answers, strict=True)
        ]
        arrays = {
            ADVANTAGE: Named(np.array([a.advantage for a in answers], np.float32), Per.DOCUMENT),
            WEIGHT: Named(np.array([a.weight * share for a in answers], np.float32), Per.DOCUMENT),
        }
        if self.updates > 1:
            arrays[SAMPLED_LOG_PROB] = _of_tokens(prompts, [a.log_probs for a in answers])
        if plan.reward.kl_beta > 0 and all(a.reference for a in answers):
            arrays[REFERENCE_LOG_PROB] = _of_tokens(prompts, [a.reference for a in answers])
        sources = tuple(self.train.row_source(a.row) for a in answers)
        return replace(self.train, **joined_parts(parts), sources=sources, parts=(), arrays=arrays)

    def rollouts(self, plan: Parts) -> Iterator[list[int]]:
        """Tokens of the prompts that each rank has in each of the run's first steps."""
        for rows in self._rows_of_ranks(plan):
            yield [len(self.prompt(row).ids) for row in rows]

    def _rows_of_ranks(self, plan: Parts) -> Iterator[list[int]]:
        """The rows that each rank has in each of the run's first steps."""
        steps = -(-self.total_steps(plan) // self.updates)
        searched = 0
        for rows in first_steps(self.train.order, plan.rows_per_step, plan.data.seed, steps):
            for rank in range(plan.dims.data_ranks):
                yield [int(row) for row in rows[rank :: plan.dims.data_ranks]]
            searched += len(rows)
            if searched >= GROUPS_SEARCHED:
                break

    def largest_microbatch(self, plan: Parts, engine: Engine) -> Batch:
        """The largest microbatch of the run's first steps, if their answers are all of full length: of the first
        MOST_TRIED, of the step with the longest prompts, and of that with the longest one.
        """
        engine = cast(SamplingEngine, engine)
        by_length = [(sum(lengths), max(lengths), i) for i, lengths in enumerate(self.rollouts(plan)) if lengths]
        wanted = {max(by_length)[2], max(by_length, key=lambda of: of[1])[2], *range(MOST_TRIED)}
        found = []
        for i, rows in enumerate(self._rows_of_ranks(plan)):
            if i in wanted and rows:
                answers = self._full_answers(rows, plan, engine.pad_id)
                found += self._batches(answers, SampledRollout(plan.reward.num_generations, answers), plan, engine)
        if engine.shares_prompts:
            found = [share_prompts(batch) for batch in found]
        return max(found, key=lambda batch: batch.size)

    def _full_answers(self, rows: list[int], plan: Parts, pad_id: int) -> list[Answer]:
        """Answers of full length to these rows, which all learn."""
        answers = []
        for group, row in enumerate(rows):
            room = min(plan.reward.max_completion_length, self.room - len(self.prompt(row).ids))
            empty = [0.0] * room
            for _ in range(plan.reward.num_generations):
                one = Answer(row, group, [pad_id] * room, empty, True, advantage=1.0, weight=1.0, reference=empty)
                answers.append(one)
        return answers

    # ---- what a person watches

    def _facts(self, answers: list[Answer], plan: Parts) -> dict[str, Any]:
        """Numbers of a rollout, named as TRL names them, and its worst and its best answer."""
        group = plan.reward.num_generations
        totals_N = _totals(answers)
        log_probs = [x for a in answers for x in a.log_probs]
        facts: dict[str, Any] = {
            "reward": float(totals_N.mean()),
            "reward_best": float(totals_N.reshape(-1, group).max(1).mean()),
            "reward_std": float(totals_N.std()),
            "frac_reward_zero_std": 1 - float(differs(totals_N, group).mean()),
            "completions/mean_length": float(np.mean([len(a.ids) for a in answers])),
            "completions/clipped_ratio": float(np.mean([not a.ended for a in answers])),
            "entropy": -float(np.mean(log_probs)),
            "num_answers": len(answers),
        }
        if len(self.rewards.names) > 1:
            for i, name in enumerate(self.rewards.names):
                facts[f"rewards/{name}"] = float(np.mean([a.rewards[i] for a in answers]))
        ends = (min(answers, key=lambda a: a.total), max(answers, key=lambda a: a.total))
        facts["answers"] = [self._shown(answer) for answer in ends]
        return facts

    def _shown(self, answer: Answer) -> dict:
        prompt = self.prompt(answer.row)
        text = self.text_of(answer)[:MOST_LETTERS]
        return {"source": prompt.source, "prompt": prompt.text[-MOST_LETTERS:], "answer": text, "reward": answer.total}


def with_room(train: TokenizedDataset, room: int) -> TokenizedDataset:
    """The rows whose prompt leaves an answer room; the others are counted as dropped. Raises PlanError if all are."""
    asked = [train.answer_start(row) for row in range(train.num_rows)]
    kept = [row for row, tokens in enumerate(asked) if tokens + LEAST_ROOM <= room]
    if not kept:
        raise PlanError(
            f"--overlong drop: all {train.num_rows:,} prompts leave fewer than {LEAST_ROOM} of --context_length {room} "
            "tokens for an answer. Raise --context_length."
        )
    found = train.select(kept)
    return replace(found, counts=found.counts | {"dropped_long": train.num_rows - len(kept)})


def _totals(answers: list[Answer]) -> np.ndarray:
    return np.array([answer.total for answer in answers])


def _of_groups(answers: list[Answer], chosen: np.ndarray, group: int) -> list[Answer]:
    """The answers of the groups that are chosen: a bool per group of `group` answers."""
    return [answer for i, answer in enumerate(answers) if chosen[i // group]]


def _of_tokens(prompts: list[list[int]], values: Sequence[Sequence[float]]) -> Named:
    """Numbers of answers' tokens as an array of documents' tokens, 0 at those of prompts."""
    parts = [np.r_[np.zeros(len(ids)), np.array(of, np.float64)] for ids, of in zip(prompts, values, strict=True)]
    return Named(np.concatenate(parts), Per.TARGET)
