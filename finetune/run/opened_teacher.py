"""A model or a checkpoint as a teacher, opened as score.py opens it."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from backend_manager import CAPABILITIES, Backend, BackendManager
from finetune import open_checkpoint
from finetune.adapters.heads import HeadRecord
from finetune.adapters.saved import adapter_digest
from finetune.data.collate import microbatches
from finetune.data.run_data import Data
from finetune.data.taught_rows import key_of
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.distributed.env import RankEnv
from finetune.distributed.over_ranks import Ranks
from finetune.engine import Batch, TeachingEngine
from finetune.errors import PlanError
from finetune.estimate.inference import Work, predicted
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import ModelShape, planned_shape
from finetune.model_files.files import tokenizer_folder
from finetune.model_files.llama_pro import TRAINED
from finetune.model_files.tokenizer import FullTokenizer, load_tokenizer
from finetune.open_checkpoint import Found
from finetune.plan.run_plan import RunPlan
from finetune.safetensors_io import digest_of

FORMAT = 1
# Items of an opened model: what stands while it is open, and what the run's own process has anyway.
OF_WEIGHTS = ("base", "adapter", "dequantized")
OF_PROCESS = ("libraries", "kernels", "loading")
OF_OPENED = re.compile(r"--(checkpoint|model_name)( .*?)?: ")  # how errors of an opened checkpoint begin
OPENED_WITH = {"--base_offload": "--teacher_offload", "--n_bits": "--teacher_bits"}  # its flags, and those of a teacher


class OpenedTeacher:
    """A teacher that this process opens: a run.teacher.Reader. `tokens`: its ids of the student's tokens; None if they
    are the same.
    """

    def __init__(self, plan: RunPlan, data: Data, env: RankEnv):
        assert plan.teacher is not None, "a run without a teacher"
        self.name = plan.teacher.model
        self.args = arguments(plan)
        self.env = env
        self.microbatch_tokens = plan.steps.microbatch_tokens
        self.engine: TeachingEngine | None = None
        self.found = found_of(plan)
        check_context(self.found, plan)
        self.tokens = mapped_tokens(self.found, plan, data.tokenizer)
        vocabulary = max(_head_rows(self.found, plan))
        if self.tokens is not None:
            vocabulary = len(self.tokens)
        self.width = min(plan.teacher.top_k, vocabulary)
        self.is_full = self.width == vocabulary
        parts = self.found.base.plan
        quantization = parts.quantization and parts.quantization.config
        weights = [self.found.files.digest, *_digests_beside(Path(self.found.checkpoint))]
        opened = [repr(quantization), parts.precision.word]
        mapping = None if self.tokens is None else self.tokens.tobytes()
        self.key = key_of(FORMAT, weights, opened, self.width, mapping, data.train.digest())
        self.standing, self.reading = bytes_of(self.found, plan)
        shape = planned_shape(self.found.files, None).known
        self.cost = None
        if shape is not None:
            self.cost = ModelCost(shape, parts, plan.backend)

    def listen(self, stopped: Callable[[], bool]) -> None:
        """Does nothing: it waits for nobody."""

    def open(self, say: Callable[[str], object]) -> None:
        """Opens the engine, which no other rank shares."""
        with errors_of(self.name):
            opened = open_checkpoint.open_engine(self.args, Ranks.alone(self.env), self.found)
        base = opened[3]
        say(f"  opened in {base.plan.precision.word}, {base.said}")
        self.engine = cast(TeachingEngine, opened[0])  # torch's, beside MLX too

    def close(self) -> None:
        self.engine = None

    def in_its_tokens(self, dataset: TokenizedDataset) -> TokenizedDataset:
        if self.tokens is None:
            return dataset
        return replace(dataset, tokens=self.tokens[dataset.tokens])

    def top_log_probs(self, dataset: TokenizedDataset, rows: range) -> list[tuple[np.ndarray, np.ndarray]]:
        """The likeliest tokens of these rows, see Reader."""
        return self._read(lambda engine, batches: engine.top_log_probs(batches, self.width, self.tokens), dataset, rows)

    def target_log_probs(self, dataset: TokenizedDataset, rows: range) -> list[np.ndarray]:
        """Log-probabilities of the targets, see Reader."""
        found = self._read(lambda engine, batches: engine.target_log_probs(batches, False), dataset, rows)
        return [np.array(log_probs, np.float32)[:, None] for log_probs in found]

    def check_kept(self, dataset: TokenizedDataset, row: int, kept: tuple[np.ndarray, np.ndarray]) -> str | None:
        """None, as its weights are in the key."""
        return None

    def _read(
        self, forward: Callable[[TeachingEngine, list[Batch]], list], dataset: TokenizedDataset, rows: range
    ) -> list:
        """Applies `forward` to these rows; its results are in their order."""
        engine = self.engine
        assert engine is not None, "the teacher is open"
        batches = microbatches(dataset, rows, engine.layout, len(rows), self.microbatch_tokens, engine.pad_id)
        order = [row for batch in batches for row in batch.rows]
        of_row = dict(zip(order, forward(engine, batches), strict=True))
        return [of_row[row] for row in rows]


def _digests_beside(folder: Path) -> list[str]:
    """Digests of what a checkpoint has beside its base."""
    found = []
    if (folder / "adapter_config.json").is_file():
        found.append(adapter_digest(folder))
    if (folder / TRAINED).is_file():
        found.append(digest_of(folder / TRAINED))
    return found


def device_beside(plan: RunPlan) -> str:
    """The backend that a model beside the run computes on: the run's, or torch's first beside MLX, which would have
    neither heads nor a teacher's log-probabilities.
    """
    if CAPABILITIES[Backend(plan.backend)].engine == "torch":
        return plan.backend
    manager = BackendManager(plan.backend, verbose=False)
    return next(str(backend) for backend in manager.available if CAPABILITIES[backend].engine == "torch")


def arguments(plan: RunPlan) -> Namespace:
    """Arguments that open the teacher as score.py does, in the run's precision, and by its products."""
    assert plan.teacher is not None, "a run without a teacher"
    return Namespace(
        checkpoint=plan.teacher.model,
        device=device_beside(plan),
        precision=plan.precision.compute,
        n_bits=plan.teacher.bits,
        base_offload=plan.teacher.offload,
        cpu_matmul=plan.settings.cpu_matmul,
        quiet=True,
    )


def found_of(plan: RunPlan) -> Found:
    """The teacher's checkpoint. Raises PlanError for one that is not there, and for one that says nothing of tokens."""
    assert plan.teacher is not None, "a run without a teacher"
    name = plan.teacher.model
    with errors_of(name):
        found = open_checkpoint.find(arguments(plan))
    record = HeadRecord.read(Path(found.checkpoint))
    if record is not None:
        raise PlanError(
            f"--teacher {name}: was trained with --task {record.task}, and finds no next token. Use a model or a "
            "checkpoint that answers."
        )
    return found


def check(plan: RunPlan, tokenizer: FullTokenizer) -> tuple[str, int]:
    """(words on the opened teacher, its bytes with those of a forward). Raises PlanError for one that is not there,
    reads shorter rows, or lacks tokens of the model.
    """
    assert plan.teacher is not None, "a run without a teacher"
    found = found_of(plan)
    check_context(found, plan)
    mapped_tokens(found, plan, tokenizer)
    return found.base.said, sum(bytes_of(found, plan))


def bytes_beside(plan: RunPlan) -> int:
    """Bytes of the opened teacher beside a run, with those of a forward."""
    return sum(bytes_of(found_of(plan), plan))


def bytes_of(found: Found, plan: RunPlan) -> tuple[int, int]:
    """(bytes of a model opened beside a run, those of a forward beside them); zeros if its shape is not known."""
    shape = planned_shape(found.files, None).known
    if shape is None:
        return 0, 0
    tokens = plan.steps.microbatch_tokens or plan.data.row_length
    adapted = (Path(found.checkpoint) / "adapter_config.json").is_file()
    items = predicted(found.base.plan, shape, plan.backend, Work(scored=tokens, targets=tokens), adapted)["items"]
    standing = sum(items.get(name, 0) for name in OF_WEIGHTS)
    return standing, sum(n for name, n in items.items() if name not in (*OF_WEIGHTS, *OF_PROCESS))


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
    return {planned_shape(files, None).vocab_size or 0 for files in (found.files, plan.model)}


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
