"""Reward models of --reward: checkpoints of --task reward_model, opened beside the run on rank 0, which rewards."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from finetune import open_checkpoint
from finetune.adapters.heads import HeadRecord
from finetune.data.asking import answered, asking
from finetune.data.prepare import DatasetSource, with_text_options
from finetune.data.reading.mixture import Source
from finetune.data.reading.rows import RawDataset
from finetune.data.run_data import Data
from finetune.data.tokens.overlong import Cut
from finetune.distributed.env import RankEnv
from finetune.distributed.over_ranks import Ranks
from finetune.errors import PlanError
from finetune.estimate.budget import gib
from finetune.open_checkpoint import Found
from finetune.parts.objectives import REWARD_MODEL
from finetune.parts.reward import RewardSource
from finetune.plan.run_plan import RunPlan
from finetune.rewards.functions import Asked
from finetune.rewards.rollouts import Rollouts
from finetune.run import heads
from finetune.run.opened_teacher import bytes_of, device_beside


class RewardModel:
    """A reward model that scores answers: each after its row's prompt, as its own training rendered rows. The first
    ones that it reads in part are said by `say`.
    """

    def __init__(
        self,
        source: RewardSource,
        found: Found,
        plan: RunPlan,
        datasets: list[DatasetSource],
        env: RankEnv,
        say: Callable[[str], object],
    ):
        self.say: Callable[[str], object] | None = say
        self.flag = flag_of(source)
        self.options = {of_row: read.options for read in datasets for of_row in read.raw.sources}
        opened = open_checkpoint.open_engine(arguments(source, plan), Ranks.alone(env), found)
        self.engine, self.tokenizer, _, self.base = opened

    def __call__(self, asked: list[Asked]) -> list[float]:
        """The score of each answer. Raises PlanError, which names the row."""
        found = [self._read(list(group)) for _, group in groupby(asked, lambda one: id(self.options[one.source]))]
        documents = heads.rows_in(self.engine, self.tokenizer, found, Cut(self.base.context_length))
        if len(documents) != len(asked):
            raise PlanError(
                f"{self.flag}: reads shorter rows than an answer after its prompt. Train it on longer ones."
            )
        if documents.num_cut and self.say:
            self.say(
                f"note: {self.flag}: {documents.num_cut:,} of {len(asked):,} answers after their prompts are over the "
                f"--context_length {self.base.context_length:,} that it was trained with, and are rewarded by what is "
                f"within (the longest: {documents.full_lengths.max():,} tokens)"
            )
            self.say = None
        return heads.outputs_of(self.engine, documents)[:, 0].tolist()

    def _read(self, asked: list[Asked]) -> DatasetSource:
        """Rows of one dataset with these answers in the place of their own."""
        options = self.options[asked[0].source]
        rows = []
        for one in asked:
            try:
                rows.append(answered(one.row, options.columns, one.answer))
            except PlanError as error:
                raise PlanError(f"{self.flag}: {one.source}: {error}") from None
        raw = RawDataset(rows, [one.source for one in asked], tuple(rows[0]), (), "", "the answers")
        raw = asking(raw, options.columns, only_known=True)
        options = with_text_options(replace(options, task=REWARD_MODEL), self.base.plan.data)
        if options.special_tokens == "error":  # of rows that are learned; an answer may say anything
            options = replace(options, special_tokens="escape")
        return DatasetSource.of(raw, options, Source(raw.description))


def flag_of(source: RewardSource) -> str:
    return f"--reward {source.name}"


def arguments(source: RewardSource, plan: RunPlan) -> Namespace:
    """Arguments that open a reward model as score.py does, in the run's precision, and by its products."""
    return Namespace(
        checkpoint=str(source.folder),
        device=device_beside(plan),
        precision=plan.precision.compute,
        n_bits=None,
        cpu_matmul=plan.settings.cpu_matmul,
        quiet=True,
    )


def found_of(source: RewardSource, plan: RunPlan) -> Found:
    """The checkpoint of a reward model. Raises PlanError for another checkpoint."""
    source.check_file()
    record = HeadRecord.read(source.folder)
    if record is None or record.task != REWARD_MODEL:
        what = "has no head" if record is None else f"was trained with --task {record.task}"
        raise PlanError(f"{flag_of(source)}: {what}. Give a checkpoint of --task {REWARD_MODEL}.")
    return open_checkpoint.find(arguments(source, plan))


def models_of(plan: RunPlan) -> list[RewardSource]:
    if plan.reward is None:
        return []
    return [source for source in plan.reward.sources if source.is_model]


def bytes_of_models(plan: RunPlan) -> int:
    """Bytes of the reward models beside a run, with those of a forward. Raises PlanError for what is none."""
    return sum(sum(bytes_of(found_of(source, plan), plan)) for source in models_of(plan))


def open_reward_models(
    plan: RunPlan, data: Data, datasets: list[DatasetSource], env: RankEnv, say: Callable[[str], object]
) -> None:
    """Opens the models that the data's rewards name, on rank 0. `datasets`: those that are trained on."""
    sources = models_of(plan)
    if not sources or env.rank:
        return
    assert isinstance(data, Rollouts), "rows that are rewarded"
    rewards = data.rewards
    for source in sources:
        found = found_of(source, plan)
        standing, reading = bytes_of(found, plan)
        rewards.standing += standing
        rewards.reading = max(rewards.reading, reading)
        rewards.models[source.label] = RewardModel(source, found, plan, datasets, env, say)
        say(f"{flag_of(source)}: a reward model, {found.base.said}: {gib(standing)} stay beside the run")
