"""What the seams of a step carry, made up: a source whose answers the model gives in the step itself, an array per
target and one per document, and an objective of log-probabilities per target with statistics over all ranks.
"""

from dataclasses import dataclass, replace

import numpy as np

from finetune.arrays import Named, Per
from finetune.data.run_data import Data, of_step
from finetune.data.sampler import step_rows
from finetune.data.tokens.tokenize import joined_parts
from finetune.objectives import LossOf, NextToken

WORD = "sampled"
NEW_TOKENS = 6


@dataclass(frozen=True)
class SampledAnswers(Data):
    """Each row's prompt with the model's answer to it, whose reward is its number of different tokens."""

    temperature: float = 0.0

    def step(self, plan, state, engine) -> tuple:
        rows, cursor = step_rows(self.train.order, plan.rows_per_step, plan.data.seed, state.cursor)
        prompts = [ids[: max(1, int(is_target.argmax()))] for ids, is_target in map(self.train.document, rows)]
        mine = engine.shard_list(list(range(len(rows))))
        asked = [prompts[i].tolist() for i in mine]
        answers = engine.generate(asked, NEW_TOKENS, set(), temperature=self.temperature)
        found = [list(pair) for pair in zip(mine, answers, strict=True)]
        by_row = {i: ids for part in engine.all_gather_object(found) for i, ids in part}
        documents = []
        for i, prompt in enumerate(prompts):
            is_answer = np.r_[np.zeros(len(prompt), bool), np.ones(len(by_row[i]), bool)]
            documents.append((np.r_[prompt, by_row[i]], is_answer))
        arrays = {
            "reward": Named(np.array([float(len(set(by_row[i]))) for i in range(len(rows))]), Per.DOCUMENT),
            "weight": Named(np.concatenate([1.0 + ids % 3 for ids, _ in documents]), Per.TARGET),
        }
        sources = tuple(self.train.row_source(row) for row in rows)
        answered = replace(self.train, **joined_parts(documents), sources=sources, parts=(), arrays=arrays)
        share = slice(engine.data_rank, None, plan.dims.data_ranks)
        parts = self.microbatches(answered, range(len(rows)), share, plan, engine.pad_id, plan.steps.batch_size)
        return of_step(parts, state.step + 1), rows, cursor


@dataclass(frozen=True)
class PolicyGradient(NextToken):
    """-advantage * log-probability of each target; the advantage is the reward in deviations of the step's rewards."""

    loss_of = LossOf.TARGETS

    def prepare(self, passes, microbatches: list) -> tuple[list, dict[str, float]]:
        mine = passes.share(microbatches)
        rewards = [batch.arrays["reward"].values for batch in mine if batch.rows]
        mean, deviation = passes.statistics(np.concatenate(rewards or [np.zeros(0)]))
        return mine, {"reward": mean, "deviation": deviation}

    def loss(self, forward, batch, totals) -> tuple:
        log_probs_T, targets = forward.target_log_probs(batch)
        if not batch.rows:
            return log_probs_T.sum(), None
        advantage_T = (targets.values("reward") - totals.statistics["reward"]) / (totals.statistics["deviation"] + 1e-4)
        return -(advantage_T * targets.values("weight") * log_probs_T).sum(), None

    def means(self, sums: dict[str, float], totals) -> dict[str, float]:
        return dict(totals.statistics)
