"""The data of pretrain.py: arrays of every path, mixed for training and evaluated path by path."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from finetune.data.held_out import split_at_answer
from finetune.engine import IGNORE_INDEX, Engine, StepResult
from finetune.errors import PlanError
from finetune.parts.plan_base import PlanBase
from finetune.parts.train_state import Cursor, TrainState
from recursive.config import PretrainConfig
from recursive.data import puzzles
from recursive.data.arrays import Rows, joined, read_split, tokenizer_folder
from recursive.data.carry import Carry, SlotBatch, earliest_halt
from recursive.data.chat_tokens import ChatTokenizer

ROWS_PER_EVALUATION = 32
WIDTHS = 16  # widths are multiples of it: oneDNN compiles and keeps kernels for each shape it meets


class NoTokenizer:
    """A tokenizer's place for puzzles."""

    def save_pretrained(self, folder: Path) -> None:
        pass


@dataclass(frozen=True)
class PretrainData:
    """`tests`: {path: its test rows}. `notices`: what a reader of the run should know of the rows.

    `carry`: the slots of the run, shared with the engine, which carries their y and z.
    """

    settings: PretrainConfig
    train: Rows
    tests: dict[str, Rows]
    tokenizer: NoTokenizer | ChatTokenizer
    carry: Carry
    notices: tuple[str, ...] = ()
    score_examples: list = field(default_factory=list)  # answers are not generated in evaluation

    @property
    def validation(self) -> dict | None:
        return self.tests or None

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.train.lengths

    def step(self, plan: PlanBase, state: TrainState, engine: Engine) -> tuple[list[SlotBatch], np.ndarray, Cursor]:
        """Microbatches of the occupied slots, see StepSource; fills empty ones first."""
        carry = self.carry
        data_rank = engine.data_rank
        s = self.settings
        after = carry.refill(len(self.train), s.seed, state.cursor)
        slots = carry.occupied(data_rank, plan.data_ranks)
        if self.trims:  # rows of similar length together
            slots = slots[np.argsort(self.lengths[carry.rows[slots]], kind="stable")]
        size = s.global_batch_size // plan.data_ranks
        groups = [slots[i : i + size] for i in range(0, len(slots), size)]
        rows = carry.rows[carry.rows >= 0]
        return [self._of_slots(group, data_rank, plan.data_ranks) for group in groups], rows, after

    def _of_slots(self, slots: np.ndarray, data_rank: int, data_ranks: int) -> SlotBatch:
        carry = self.carry
        s = self.settings
        rows = carry.rows[slots]
        epochs = carry.epochs[slots]
        arch = s.arch
        earliest = [
            earliest_halt(s.seed, int(e), int(r), arch.halt_exploration_prob, arch.supervision_steps)
            for e, r in zip(epochs, rows, strict=True)
        ]
        return batch_of(
            self.train,
            rows,
            trim=self.trims,
            epochs=epochs if s.symmetries else None,
            seed=s.seed,
            slots=(slots - data_rank) // data_ranks,
            fresh=carry.steps[slots] == 0,
            earliest=np.array(earliest),
        )

    @property
    def trims(self) -> bool:
        """True if columns of padding may go: a causal model never looks at what is behind a row."""
        return self.settings.arch.causal and not self.settings.arch.mlp_t

    def total_steps(self, plan: PlanBase) -> int:
        """Optimizer steps: each row is supervised N_sup times per epoch. Rows that halt make room for more."""
        s = self.settings
        if s.max_steps:
            return s.max_steps
        return s.epochs * self.steps_per_epoch(plan)

    def steps_per_epoch(self, plan: PlanBase) -> int:
        return -(-len(self.train) // plan.rows_per_step) * self.settings.arch.supervision_steps

    def largest_microbatch(self, size: int) -> tuple[int, int, int]:
        """(rows, positions, targets) of the `size` longest rows."""
        longest = np.argsort(self.lengths, kind="stable")[-size:]
        targets = np.sort((self.train.labels_NS != IGNORE_INDEX).sum(1))[-size:]
        width = -(-int(self.lengths[longest].max()) // WIDTHS) * WIDTHS
        return size, min(width, self.train.seq_len) if self.trims else self.train.seq_len, int(targets.sum())

    def count_step(self, state: TrainState) -> None:
        """Counts nothing by dataset."""

    def metrics(self) -> dict[str, float]:
        """No facts beside the step's."""
        return {}

    def resume(self, state: TrainState) -> list[str]:
        """Checks nothing: the arrays are verified whole when they are opened."""
        return []

    def sources_of(self, rows: np.ndarray) -> list[str]:
        """Sources of these rows of a step."""
        return [self.train.sources[row] for row in rows]

    def evaluation_batches(self, plan: PlanBase, pad_id: int) -> dict[str, list[SlotBatch]]:
        """{path: microbatches of its test rows}."""
        return {path: self.test_batches(rows, ROWS_PER_EVALUATION) for path, rows in self.tests.items()}

    def evaluation_values(self, results: dict[str, StepResult]) -> dict:
        """Loss, perplexity, right targets and exact rows of all test rows, then of each path if there are several."""
        values = _scores(results.values(), sum(map(len, self.tests.values())))
        if len(results) > 1:
            for path, result in results.items():
                each = _scores([result], len(self.tests[path]))
                values |= {f"{path} {name}": value for name, value in each.items() if name != "num_targets"}
        return values

    def test_batches(self, rows: Rows, size: int) -> list[SlotBatch]:
        return [batch_of(rows, np.arange(i, min(i + size, len(rows))), self.trims) for i in range(0, len(rows), size)]

    @property
    def stop_ids(self) -> set[int]:
        assert isinstance(self.tokenizer, ChatTokenizer), "puzzles have no answers that end"
        return self.tokenizer.stop_ids

    def sample_prompts(self, number: int) -> list[tuple]:
        """(prompt ids, expected answer, source) of the first test rows of every path in turn; none of puzzles, whose
        answers are no text.
        """
        if isinstance(self.tokenizer, NoTokenizer):
            return []
        places = [(rows, i) for i in range(number) for rows in self.tests.values() if i < len(rows)][:number]
        return [(*self._split(rows, i), rows.sources[i]) for rows, i in places]

    def _split(self, rows: Rows, row: int) -> tuple[list[int], str]:
        """A row's tokens before its last answer, and its text. A label is the token after its position."""
        assert isinstance(self.tokenizer, ChatTokenizer), "puzzles have no answers that end"
        labels = rows.labels_NS[row]
        inputs = rows.inputs_NS[row]
        length = int(rows.lengths[row])
        last = np.where(labels[length - 1] == IGNORE_INDEX, [], labels[length - 1 : length]).astype(np.int64)
        ids = np.concatenate([inputs[:length].astype(np.int64), last])
        is_target = np.concatenate([[False], labels[: length - 1] != IGNORE_INDEX, np.ones(len(last), bool)])
        return split_at_answer(ids, is_target, self.tokenizer, self.stop_ids)

    @property
    def example(self):
        """(first question in words, its answer), if there is a tokenizer."""
        rows = self.train
        tokenizer = self.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            return None
        text = tokenizer.decode(rows.inputs_NS[0][: rows.lengths[0]], skip_special_tokens=False)
        question = text.partition("<|user|>")[2].partition("<|enduser|>")[0]
        return question, text.partition("<|assistant|>")[2].partition("<|endassistant|>")[0]


def batch_of(
    rows: Rows,
    indices: np.ndarray,
    trim: bool,
    epochs: np.ndarray | None = None,
    seed: int = 0,
    slots: np.ndarray | None = None,
    fresh: np.ndarray | None = None,
    earliest: np.ndarray | None = None,
) -> SlotBatch:
    """Rows as a microbatch. `epochs`: of each row, if it is varied by its symmetry of that epoch."""
    ids = rows.inputs_NS[indices].astype(np.int64)
    labels = rows.labels_NS[indices]
    if rows.symmetries and epochs is not None:
        for b, (row, epoch) in enumerate(zip(indices, epochs, strict=True)):
            cells, values = puzzles.symmetry(rows.symmetries, rows.seq_len, seed, int(epoch), int(row))
            moved = labels[b][cells]
            ids[b], labels[b] = values[ids[b][cells]], np.where(moved == IGNORE_INDEX, moved, values[moved])
    used = (ids != rows.pad_id) | (labels != IGNORE_INDEX)
    length = ids.shape[1]
    if trim:
        length = min(length, -(-(int(np.flatnonzero(used.any(0))[-1]) + 1) // WIDTHS) * WIDTHS)
    ids = ids[:, :length]
    labels = labels[:, :length]
    used = used[:, :length]
    count = len(indices)
    return SlotBatch(
        input_ids_BS=ids,
        labels_BS=labels,
        position_ids_BS=np.broadcast_to(np.arange(length), ids.shape),
        document_ids_BS=np.where(used, np.arange(count)[:, None], -1),
        rows=tuple(int(i) for i in indices),
        slots=np.arange(count) if slots is None else slots,
        fresh_B=np.ones(count, bool) if fresh is None else fresh,
        puzzle_ids_B=rows.puzzle_ids_N[indices].astype(np.int64),
        earliest_B=np.ones(count, np.int64) if earliest is None else earliest,
    )


def load_pretrain_data(settings: PretrainConfig, num_slots: int) -> PretrainData:
    """Reads and joins every path. Raises PlanError before any framework is loaded."""
    s = settings
    if not s.data_paths:
        raise PlanError("data_paths []: names no data set. Write data_paths=[data/my-chat-dataset].")
    splits = [read_split(path, "train") for path in s.data_paths]
    if s.dataset_type == "chat" and splits[0].symmetries:
        raise PlanError(f"dataset_type=chat: {s.data_paths[0]} holds puzzles. Use --config-name cfg_puzzle.")
    found = {path: read_split(path, "test") for path in (*s.data_paths, *s.data_paths_test)}
    tests = {path: rows for path, rows in found.items() if rows is not None}
    sizes = sorted({rows.seq_len for rows in splits})
    if splits[0].symmetries and s.symmetries and len(sizes) > 1:
        raise PlanError(f"data_paths: puzzles of {sizes} cells do not share symmetries. Use one, or symmetries=false.")
    train = joined(splits)
    notices = []
    joined([train, *tests.values()])  # what does not belong together is refused here
    seq_len = _seq_len(s, train)
    train, left = train.cut(seq_len)
    tests = {path: rows.cut(seq_len)[0] for path, rows in tests.items()}
    if not len(train):
        raise PlanError(f"arch.seq_len={seq_len}: no row has a target in its first positions. Use a larger one.")
    if seq_len < splits[0].seq_len:
        notices.append(f"rows of {splits[0].seq_len} positions are cut to arch.seq_len {seq_len}")
    if left:
        notices.append(f"{left} rows without a target are left out")
    if s.dataset_type == "puzzle" and s.arch.causal:
        notices.append("arch.causal is true: each cell of a puzzle sees the cells before it only")
    carry = Carry(num_slots, s.arch.supervision_steps, s.arch.halting)
    tests = {path: rows for path, rows in tests.items() if len(rows)}
    return PretrainData(s, train, tests, _tokenizer(s, train), carry, tuple(notices))


def _seq_len(s: PretrainConfig, train: Rows) -> int:
    """Positions of each row. A longer arch.seq_len is the room that generation has; mixed positions have none."""
    if s.arch.seq_len > train.seq_len and s.arch.mlp_t:
        raise PlanError(
            f"arch.seq_len={s.arch.seq_len}: the rows have {train.seq_len} positions, and with arch.mlp_t=true the "
            "model has exactly theirs. Omit it."
        )
    if s.arch.seq_len and s.arch.seq_len < train.seq_len and train.symmetries and s.symmetries:
        raise PlanError(
            f"arch.seq_len={s.arch.seq_len}: the puzzles have {train.seq_len} cells, and a part has no symmetry. "
            "Omit it, or use symmetries=false."
        )
    return min(s.arch.seq_len or train.seq_len, train.seq_len)


def _tokenizer(s: PretrainConfig, train: Rows):
    folder = tokenizer_folder(s.data_paths)
    if folder is None and s.dataset_type == "chat":
        raise PlanError(
            f"data_paths {s.data_paths[0]}: has no tokenizer/tokenizer.json. Build it with dataset.build_chat_dataset, "
            "or use dataset_type=puzzle."
        )
    if folder is not None and s.dataset_type == "puzzle":
        raise PlanError(f"dataset_type=puzzle: {s.data_paths[0]} holds conversations. Use --config-name cfg_chat.")
    if folder is None:
        return NoTokenizer()
    tokenizer = ChatTokenizer.load(folder)
    if tokenizer.vocab_size > train.vocab_size:
        counts = f"{tokenizer.vocab_size} tokens, dataset.json {train.vocab_size}"
        raise PlanError(f"{folder}: has {counts}. Build it again.")
    return tokenizer


def _scores(results: Iterable[StepResult], num_rows: int) -> dict:
    nll = sum(r.nll for r in results)
    num_targets = sum(r.num_targets for r in results)
    loss = nll / num_targets
    return {
        "loss": loss,
        "num_targets": num_targets,
        "perplexity": math.exp(min(loss, 700.0)),
        "targets_right": sum(r.metrics["targets_right"] for r in results) / num_targets,
        "rows_right": sum(r.metrics["rows_right"] for r in results) / num_rows,
    }
