"""A teacher reads the rows that a run learns from, before the student is loaded: once, for every later run too. Or it
stays in memory, and judges answers of the student's own.
"""

import contextlib
import gc
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import numpy as np

from finetune import open_checkpoint
from finetune.adapters.saved import adapter_digest
from finetune.checkpoint.store import storage
from finetune.data.collate import microbatches
from finetune.data.run_data import Data
from finetune.data.taught_rows import TaughtRows, key_of
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.distributed.env import RankEnv
from finetune.distributed.over_ranks import Ranks
from finetune.engine import Batch, FineTuningEngine, TeachingEngine
from finetune.errors import PlanError, StorageError
from finetune.estimate.budget import gib
from finetune.estimate.inference import Work, predicted
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import ModelShape, planned_shape
from finetune.model_files.files import tokenizer_folder
from finetune.model_files.hub import cache_root, looks_like_hub_id
from finetune.model_files.llama_pro import TRAINED
from finetune.model_files.tokenizer import FullTokenizer, load_tokenizer
from finetune.objectives import TEACHER_LOG_PROB, TEACHER_LOG_PROBS, TEACHER_TOKENS
from finetune.open_checkpoint import Found
from finetune.plan.run_plan import RunPlan
from finetune.rewards.own_answers import OwnAnswers
from finetune.safetensors_io import digest_of
from finetune.system.process import StopSignal
from finetune.system.progress import Progress

FORMAT = 1
# Items of an opened model: what stands while it is open, and what the run's own process has anyway.
OF_WEIGHTS = ("base", "adapter", "dequantized")
OF_PROCESS = ("libraries", "kernels", "loading")
OF_OPENED = re.compile(r"--(checkpoint|model_name)( [^:]*)?: ")  # how errors of an opened checkpoint begin
OPENED_WITH = {"--base_offload": "--teacher_offload", "--n_bits": "--teacher_bits"}  # its flags, and those of a teacher


class OpenedTeacher:
    """The teacher of a run. `tokens`: its ids of the student's tokens; None if they are the same. `width`: tokens that
    are kept of it at a target; `is_full`: all are; `key`: names it, and the rows that it reads.
    """

    def __init__(self, plan: RunPlan, data: Data, env: RankEnv):
        assert plan.teacher is not None, "a run without a teacher"
        self.plan = plan.teacher
        self.args = arguments(plan)
        self.env = env
        self.microbatch_tokens = plan.steps.microbatch_tokens
        with errors_of(self.plan.model):
            self.found = open_checkpoint.find(self.args)
        check_context(self.found, plan)
        self.tokens = mapped_tokens(self.found, plan, data.tokenizer)
        vocabulary = max(_head_rows(self.found, plan))
        if self.tokens is not None:
            vocabulary = len(self.tokens)
        self.width = min(self.plan.top_k, vocabulary)
        self.is_full = self.tokens is None and self.width == vocabulary
        parts = self.found.base.plan
        quantization = parts.quantization and parts.quantization.config
        weights = [self.found.files.digest, *_digests_beside(Path(self.found.checkpoint))]
        opened = [repr(quantization), parts.precision.word]
        mapping = None if self.tokens is None else self.tokens.tobytes()
        self.key = key_of(FORMAT, weights, opened, self.width, mapping, data.train.digest())

    def open(self, say: Callable[[str], object]) -> TeachingEngine:
        """Opens its engine, which no other rank shares."""
        alone = Ranks(RankEnv(local_rank=self.env.local_rank, local_size=self.env.local_size))
        with errors_of(self.plan.model):
            opened = open_checkpoint.open_engine(self.args, alone, self.found)
        base = opened[3]
        say(f"  opened in {base.plan.precision.word}, {base.said}")
        return cast(TeachingEngine, opened[0])  # torch's, as MLX is refused by the plan

    def in_its_tokens(self, dataset: TokenizedDataset) -> TokenizedDataset:
        if self.tokens is None:
            return dataset
        return replace(dataset, tokens=self.tokens[dataset.tokens])

    def read(
        self, engine: TeachingEngine, dataset: TokenizedDataset, rows: range
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(likeliest tokens, log-probabilities) of these rows of `dataset`, which is in its tokens, in their order."""
        return self.read_by(lambda found: engine.top_log_probs(found, self.width, self.tokens), engine, dataset, rows)

    def read_by(
        self, forward: Callable[[list[Batch]], list], engine: TeachingEngine, dataset: TokenizedDataset, rows: range
    ) -> list:
        """Applies `forward` to these rows; its results are in their order."""
        batches = microbatches(dataset, rows, engine.layout, len(rows), self.microbatch_tokens, engine.pad_id)
        order = [row for batch in batches for row in batch.rows]
        of_row = dict(zip(order, forward(batches), strict=True))
        return [of_row[row] for row in rows]


class Judging(OpenedTeacher):
    """A teacher that stays in memory, and reads the rows of each step: a rewards.own_answers.Judge."""

    def __init__(self, plan: RunPlan, data: Data, env: RankEnv):
        super().__init__(plan, data, env)
        self.standing, self.reading = bytes_of(self.found, plan)
        shape = planned_shape(self.found.files, None).known
        self.cost = None
        if shape is not None:
            self.cost = ModelCost(shape, self.found.base.plan, plan.backend)
        self.widths = {TEACHER_TOKENS: self.width, TEACHER_LOG_PROBS: self.width + (not self.is_full)}
        if plan.objective.facts.of_samples:
            self.widths = {TEACHER_LOG_PROB: 1}
        self.room = plan.data.context_length

    def prepare(self, plan: RunPlan, stop: StopSignal, say: Callable[[str], object]) -> None:
        """Opens the teacher."""
        say(f"the teacher {self.plan.model} judges answers of the model's own, and stays in memory")
        self.engine = self.open(say)

    def judged(self, dataset: TokenizedDataset) -> dict[str, list[np.ndarray]]:
        """Reads documents, see Judge."""
        if not len(dataset):
            return {name: [] for name in self.widths}
        read = self.in_its_tokens(replace(dataset, arrays={}))
        if TEACHER_LOG_PROB in self.widths:
            return {TEACHER_LOG_PROB: self.read_by(self._of_targets, self.engine, read, range(len(read)))}
        given = self.read(self.engine, read, range(len(read)))
        return {TEACHER_TOKENS: [tokens for tokens, _ in given], TEACHER_LOG_PROBS: [of for _, of in given]}

    def _of_targets(self, batches: list[Batch]) -> list[np.ndarray]:
        """[T, 1] for each document: log-probabilities of its targets."""
        found = self.engine.target_log_probs(batches, before_training=False)
        return [np.array(log_probs, np.float32)[:, None] for log_probs in found]

    def given(self, engine: FineTuningEngine, data: Data, stop: StopSignal, say: Callable[[str], object]) -> Data:
        """The data, whose steps it judges. Raises PlanError if no row can be answered."""
        read = {each.name: getattr(data, each.name) for each in fields(data)} | {"teacher_sha256": self.key}
        found = OwnAnswers(**read, judge=self, room=self.room)
        for line in found.check():
            say(f"  note: {line}")
        return found


class Teaching(OpenedTeacher):
    """A teacher that reads the training rows once, and what it gave of them."""

    def __init__(self, plan: RunPlan, data: Data, env: RankEnv):
        super().__init__(plan, data, env)
        root = self.plan.cache or cache_root() / "finetune" / "teacher"
        self.rows = TaughtRows(root / self.key, data.train, self.width, self.is_full)

    def prepare(self, plan: RunPlan, stop: StopSignal, say: Callable[[str], object]) -> None:
        """Lets the teacher read what is missing: of several ranks each a part of it. Raises PlanError, StorageError."""
        with self._cache():
            missing = self.rows.missing()
        size = f"{gib(self.rows.num_bytes)} in {self.rows.folder}"
        if not missing:
            say(f"what the teacher gives of {len(self.rows.dataset):,} rows: {size}")
            return
        say(
            f"the teacher {self.plan.model} reads {len(self.rows.dataset):,} rows: its {self.rows.width} likeliest "
            f"tokens of {int(self.rows.dataset.is_target.sum()):,} targets take {size}"
        )
        mine = self.rows.share(self.env.rank, self.env.size)
        if mine:
            self._read_parts(mine, plan, stop, say)
            gc.collect()  # of the teacher

    def _read_parts(self, parts: list[int], plan: RunPlan, stop: StopSignal, say: Callable[[str], object]) -> None:
        engine = self.open(say)
        dataset = self.in_its_tokens(self.rows.dataset)
        with Progress("read by the teacher", sum(len(self.rows.rows_of(part)) for part in parts), "rows") as progress:
            for part in parts:
                if stop.received is not None:  # of several ranks each ends by itself, and they agree afterwards
                    return
                rows = self.rows.rows_of(part)
                given = self.read(engine, dataset, rows)
                with self._cache():
                    self.rows.write(part, given)
                progress.update(len(rows))

    @contextlib.contextmanager
    def _cache(self) -> Iterator[None]:
        """A context whose failed reads and writes name the cache. Raises StorageError."""
        said = f"--teacher_cache {self.rows.folder.parent}"
        try:
            with storage(self.rows.folder):
                yield
        except StorageError as error:
            fact = str(error).removeprefix(f"{self.rows.folder}: ").removesuffix(" Earlier checkpoints are intact.")
            raise StorageError(f"{said}: {fact} Give a folder that can be written.") from None

    def given(self, engine: FineTuningEngine, data: Data, stop: StopSignal, say: Callable[[str], object]) -> Data:
        """The data with what the teacher gave; of a run that a signal ends with zeros in the place of what it did not.
        Collective. Raises PlanError if a rank does not see what another wrote.
        """
        stop.sync(engine.all_reduce_max)
        missing = engine.all_gather_object(len(self.rows.missing()))
        if any(missing) and not stop.requested():
            raise PlanError(
                f"--teacher_cache {self.rows.folder.parent}: rank {np.argmax(missing)} does not see what the other "
                "ranks wrote there. Give a folder that all hosts share."
            )
        train = replace(data.train, arrays={**data.train.arrays, **self.rows.arrays()})
        return replace(data, train=train, teacher_sha256=self.rows.folder.name)


def _digests_beside(folder: Path) -> list[str]:
    """Digests of what a checkpoint has beside its base."""
    found = []
    if (folder / "adapter_config.json").is_file():
        found.append(adapter_digest(folder))
    if (folder / TRAINED).is_file():
        found.append(digest_of(folder / TRAINED))
    return found


def arguments(plan: RunPlan) -> Namespace:
    """Arguments that open the teacher as score.py does, in the run's precision."""
    assert plan.teacher is not None, "a run without a teacher"
    return Namespace(
        checkpoint=plan.teacher.model,
        device=plan.backend,
        precision=plan.precision.compute,
        n_bits=plan.teacher.bits,
        base_offload=plan.teacher.offload,
        quiet=True,
    )


def check_teacher(plan: RunPlan, tokenizer: Callable[[], FullTokenizer]) -> str:
    """The line of the plan on the teacher. Raises PlanError for one that is not there, reads shorter rows, or lacks
    tokens of the model. One on the Hub is not downloaded for a dry run.
    """
    assert plan.teacher is not None, "a plan without a teacher"
    name = plan.teacher.model
    if plan.settings.dry_run and not Path(name).exists() and looks_like_hub_id(name):
        return f"teacher: {name}, which is not on this disk yet"
    with errors_of(name):
        found = open_checkpoint.find(arguments(plan))
    check_context(found, plan)
    cache = plan.teacher.cache
    if cache and any(folder.is_file() for folder in (cache, *cache.parents)):
        raise PlanError(f"--teacher_cache {cache}: is a file, or is inside one. Give a folder.")
    mapped_tokens(found, plan, tokenizer())
    line = f"teacher: {name}, {found.base.said}, reads the rows before the model is loaded"
    needed = sum(bytes_of(found, plan))
    if plan.teacher.stays:
        of_rows = f"{plan.settings.on_policy_fraction:.0%} of the rows"
        line = f"teacher: {name}, {found.base.said}, judges answers of the model's own to {of_rows}"
    if not needed:
        return line
    line += f": {gib(needed)} {'stay beside the run' if plan.teacher.stays else 'meanwhile'}"
    budget = plan.memory_budget
    if budget is not None and needed > budget.usable:
        left = " of the device" if plan.teacher.stays else ""
        line += f", and {gib(budget.usable)}{left} are usable: --teacher_bits 4 or --teacher_offload disk takes less"
    return line


def bytes_of(found: Found, plan: RunPlan) -> tuple[int, int]:
    """(bytes of the opened teacher, those of a forward beside them); zeros if its shape is not known."""
    shape = planned_shape(found.files, None).known
    if shape is None:
        return 0, 0
    tokens = plan.steps.microbatch_tokens or plan.data.row_length
    adapted = (Path(found.checkpoint) / "adapter_config.json").is_file()
    items = predicted(found.base.plan, shape, plan.backend, Work(scored=tokens, targets=tokens), adapted)["items"]
    standing = sum(items.get(name, 0) for name in OF_WEIGHTS)
    return standing, sum(n for name, n in items.items() if name not in (*OF_WEIGHTS, *OF_PROCESS))


def bytes_beside(plan: RunPlan) -> int:
    """Bytes of a teacher that stays in memory beside the run; 0 of any other, and of one that is not on this disk."""
    if plan.teacher is None or not plan.teacher.stays:
        return 0
    name = plan.teacher.model
    if plan.settings.dry_run and not Path(name).exists() and looks_like_hub_id(name):
        return 0
    with errors_of(name):
        return sum(bytes_of(open_checkpoint.find(arguments(plan)), plan))


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """A context whose PlanErrors on a checkpoint name it as the teacher that it is."""
    try:
        yield
    except PlanError as error:
        said = OF_OPENED.sub(f"--teacher {name}: ", str(error), count=1)
        for opened, flag in OPENED_WITH.items():
            said = said.replace(opened, flag)
        raise PlanError(said) from None


def check_context(found: Found, plan: RunPlan) -> None:
    """Raises PlanError for a teacher whose positions end before those of the run's rows."""
    limit = ModelShape.from_config(found.files.config).context_limit
    if limit is not None and limit < plan.data.context_length:
        raise PlanError(
            f"--teacher {found.checkpoint}: reads rows of at most {limit:,} tokens, and --context_length is "
            f"{plan.data.context_length:,}. Use --context_length {limit}, or another teacher."
        )


def _head_rows(found: Found, plan: RunPlan) -> set[int]:
    shapes = (planned_shape(found.files, None), plan.shape)
    return {(shape and shape.vocab_size) or 0 for shape in shapes}


def mapped_tokens(found: Found, plan: RunPlan, student: FullTokenizer) -> np.ndarray | None:
    """[V]: the teacher's id of each token of the student; None where ids and rows of the head are the same. Raises
    PlanError for a token that the teacher does not have.
    """
    teacher = load_tokenizer(tokenizer_folder(Path(found.checkpoint), found.files)).get_vocab()
    own = student.get_vocab()
    name = f"--teacher {found.checkpoint}"
    lacking = [token for token in own if token not in teacher]
    if lacking:
        raise PlanError(
            f"{name}: lacks {len(lacking):,} of the model's {len(own):,} tokens, such as {min(lacking)!r}. Use a "
            "teacher with the model's tokenizer."
        )
    tokens = np.arange(max(own.values()) + 1)
    moved = [(number, teacher[token]) for token, number in own.items() if teacher[token] != number]
    for number, of_teacher in moved:
        tokens[number] = of_teacher
    if moved and len(set(tokens.tolist())) < len(tokens):
        raise PlanError(f"{name}: numbers the model's tokens otherwise, with gaps. Use another teacher.")
    if not moved and len(_head_rows(found, plan)) == 1:
        return None
    return tokens
