"""A teacher reads the rows that a run learns from, before the student is loaded: once, for every later run too. Or it
stays in memory, and judges answers of the student's own.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from finetune.checkpoint.store import storage
from finetune.data.run_data import Data
from finetune.data.taught_rows import TaughtRows
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.distributed.env import RankEnv
from finetune.engine import FineTuningEngine
from finetune.errors import PlanError, StorageError
from finetune.estimate.budget import gib
from finetune.estimate.model_cost import ModelCost
from finetune.model_files.hub import looks_like_hub_id
from finetune.model_files.tokenizer import FullTokenizer
from finetune.objectives import TEACHER_LOG_PROB, TEACHER_LOG_PROBS, TEACHER_TOKENS
from finetune.plan.run_plan import RunPlan
from finetune.rewards.own_answers import OwnAnswers
from finetune.run import opened_teacher, served_teacher
from finetune.run.opened_teacher import OpenedTeacher
from finetune.run.served_teacher import Interrupted, ServedTeacher
from finetune.system.files import cache_folder
from finetune.system.process import StopSignal
from finetune.system.progress import Progress


class Reader(Protocol):
    """Interface of what a teacher reads with. `width`: tokens that it gives at a target; `is_full`: all are; `key`:
    names it, and the rows that it reads; `standing`, `reading`: its bytes here, and those of a forward beside them;
    `cost`: its dimensions, for predicted times. `rows` are numbers of documents of a dataset in its tokens;
    that of check_kept is in the student's.
    """

    width: int
    is_full: bool
    key: str
    standing: int
    reading: int
    cost: ModelCost | None

    def listen(self, stopped: Callable[[], bool]) -> None:
        """Raises Interrupted from now on where it waits for another and `stopped()` is true."""

    def open(self, say: Callable[[str], object]) -> None:
        """Opens it, before it reads. Raises PlanError."""

    def close(self) -> None: ...

    def in_its_tokens(self, dataset: TokenizedDataset) -> TokenizedDataset: ...

    def top_log_probs(self, dataset: TokenizedDataset, rows: range) -> list[tuple[np.ndarray, np.ndarray]]:
        """(likeliest tokens [T, K], log-probabilities [T, K + 1] of theirs and of all others; [T, K] if it is full) at
        the targets of each of these rows.
        """

    def target_log_probs(self, dataset: TokenizedDataset, rows: range) -> list[np.ndarray]:
        """[T, 1] of each of these rows: log-probabilities of its targets."""

    def check_kept(self, dataset: TokenizedDataset, row: int, kept: tuple[np.ndarray, np.ndarray]) -> str | None:
        """A reason why kept (tokens, log-probabilities) of a row are not its own; None: they are."""


def reader_of(plan: RunPlan, data: Data, env: RankEnv) -> Reader:
    assert plan.teacher is not None, "a run without a teacher"
    if plan.teacher.is_served:
        return ServedTeacher(plan, data)
    return OpenedTeacher(plan, data, env)


class Judging:
    """A teacher that stays in memory, and reads the rows of each step: a rewards.own_answers.Judge."""

    def __init__(self, plan: RunPlan, data: Data, env: RankEnv):
        assert plan.teacher is not None, "a run without a teacher"
        self.name = plan.teacher.model
        self.reader = reader_of(plan, data, env)
        self.standing, self.reading, self.cost = self.reader.standing, self.reader.reading, self.reader.cost
        self.widths = {
            TEACHER_TOKENS: self.reader.width,
            TEACHER_LOG_PROBS: self.reader.width + (not self.reader.is_full),
        }
        if plan.objective.facts.of_samples:
            self.widths = {TEACHER_LOG_PROB: 1}
        self.room = plan.data.context_length

    def prepare(self, plan: RunPlan, stop: StopSignal, say: Callable[[str], object]) -> None:
        """Opens the teacher."""
        say(f"the teacher {self.name} judges answers of the model's own")
        self.reader.open(say)

    def judged(self, dataset: TokenizedDataset) -> dict[str, list[np.ndarray]]:
        """Reads documents, see Judge."""
        if not len(dataset):
            return {name: [] for name in self.widths}
        read = self.reader.in_its_tokens(replace(dataset, arrays={}))
        rows = range(len(read))
        if TEACHER_LOG_PROB in self.widths:
            return {TEACHER_LOG_PROB: self.reader.target_log_probs(read, rows)}
        given = self.reader.top_log_probs(read, rows)
        return {TEACHER_TOKENS: [tokens for tokens, _ in given], TEACHER_LOG_PROBS: [of for _, of in given]}

    def given(self, engine: FineTuningEngine, data: Data, stop: StopSignal, say: Callable[[str], object]) -> Data:
        """The data, whose steps it judges. Raises PlanError if no row can be answered."""
        read = {each.name: getattr(data, each.name) for each in fields(data)} | {"teacher_sha256": self.reader.key}
        found = OwnAnswers(**read, judge=self, room=self.room)
        for line in found.check():
            say(f"  note: {line}")
        return found


class Teaching:
    """A teacher that reads the training rows once, and what it gave of them."""

    def __init__(self, plan: RunPlan, data: Data, env: RankEnv):
        assert plan.teacher is not None, "a run without a teacher"
        self.name = plan.teacher.model
        self.env = env
        self.reader = reader_of(plan, data, env)
        root = plan.teacher.cache or cache_folder("teacher")
        self.rows = TaughtRows(root / self.reader.key, data.train, self.reader.width, self.reader.is_full)

    def prepare(self, plan: RunPlan, stop: StopSignal, say: Callable[[str], object]) -> None:
        """Lets the teacher read what is missing: of several ranks each a part of it. Raises PlanError, StorageError."""
        self.reader.listen(lambda: stop.received is not None)
        with self._cache():
            missing = self.rows.missing()
        try:
            self._check_kept(missing)
        except Interrupted:
            return
        size = f"{gib(self.rows.num_bytes)} in {self.rows.folder}"
        if not missing:
            say(f"what the teacher gives of {len(self.rows.dataset):,} rows: {size}")
            return
        say(
            f"the teacher {self.name} reads {len(self.rows.dataset):,} rows: its {self.rows.width} likeliest "
            f"tokens of {int(self.rows.dataset.is_target.sum()):,} targets take {size}"
        )
        mine = self.rows.share(self.env.rank, self.env.size)
        if mine:
            self._read_parts(mine, stop, say)
            self.reader.close()
            gc.collect()  # of the teacher

    def _check_kept(self, missing: list[int]) -> None:
        """Raises PlanError if what is kept is not what the teacher gives."""
        here = [part for part in range(self.rows.num_parts) if part not in set(missing)]
        if not here:
            return
        row = self.rows.rows_of(here[0])[0]
        dataset = self.rows.dataset
        tokens = slice(*dataset.offsets[row : row + 2])
        arrays = self.rows.arrays()
        kept = [arrays[name].values[tokens][dataset.is_target[tokens]] for name in (TEACHER_TOKENS, TEACHER_LOG_PROBS)]
        wrong = self.reader.check_kept(dataset, row, (kept[0], kept[1]))
        if wrong:
            raise PlanError(f"--teacher_cache {self.rows.folder}: {wrong}. Remove this folder.")

    def _read_parts(self, parts: list[int], stop: StopSignal, say: Callable[[str], object]) -> None:
        self.reader.open(say)
        dataset = self.reader.in_its_tokens(self.rows.dataset)
        with Progress("read by the teacher", sum(len(self.rows.rows_of(part)) for part in parts), "rows") as progress:
            for part in parts:
                if stop.received is not None:  # of several ranks each ends by itself, and they agree afterwards
                    return
                rows = self.rows.rows_of(part)
                try:
                    given = self.reader.top_log_probs(dataset, rows)
                except Interrupted:
                    return
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


def check_teacher(plan: RunPlan, tokenizer: Callable[[], FullTokenizer]) -> str:
    """The line of the plan on the teacher. Raises PlanError for one that is not there, reads shorter rows, or lacks
    tokens of the model. A dry run neither downloads one nor asks a server.
    """
    assert plan.teacher is not None, "a plan without a teacher"
    teacher = plan.teacher
    if teacher.cache and any(folder.is_file() for folder in (teacher.cache, *teacher.cache.parents)):
        raise PlanError(f"--teacher_cache {teacher.cache}: is a file, or is inside one. Give a folder.")
    served_teacher.check_address(teacher.model)
    if _is_elsewhere(plan):
        return f"teacher: {teacher.model}, which is not on this disk yet"
    if teacher.is_served:
        said, needed = served_teacher.check(plan), 0
    else:
        said, needed = opened_teacher.check(plan, tokenizer())
    line = f"teacher: {teacher.model}, {said}, reads the rows before the model is loaded"
    if teacher.stays:
        of_rows = f"{plan.settings.on_policy_fraction:.0%} of the rows"
        line = f"teacher: {teacher.model}, {said}, judges answers of the model's own to {of_rows}"
    if not needed:
        return line
    line += f": {gib(needed)} {'stay beside the run' if teacher.stays else 'meanwhile'}"
    budget = plan.memory_budget
    if budget is not None and needed > budget.usable:
        left = " of the device" if teacher.stays else ""
        line += f", and {gib(budget.usable)}{left} are usable: --teacher_bits 4 or --teacher_offload disk takes less"
    return line


def bytes_of_teacher(plan: RunPlan) -> int:
    """Bytes of a teacher that stays in memory beside the run; 0 of any other, and of one that is not on this disk."""
    if plan.teacher is None or not plan.teacher.stays or plan.teacher.is_served or _is_elsewhere(plan):
        return 0
    return opened_teacher.bytes_beside(plan)


def _is_elsewhere(plan: RunPlan) -> bool:
    """True for a teacher of the Hub that a dry run does not download."""
    assert plan.teacher is not None, "a plan without a teacher"
    name = plan.teacher.model
    return bool(plan.settings.dry_run) and not Path(name).exists() and looks_like_hub_id(name)
