"""The interface between the training loop and a framework's engine. Numpy arrays, strings and numbers only.

Shapes: B rows of the microbatch, S positions. A flat (padding-free) microbatch has B == 1, its documents packed end
to end.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from finetune.arrays import Arrays, Named
from finetune.generation import Sampled, Sampling
from finetune.safetensors_io import TensorShard

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """One microbatch. `labels_BS[b, s]`: the token to predict at position s (already shifted), or IGNORE_INDEX.

    `position_ids_BS` restarts at 0 in each document; `document_ids_BS` numbers the documents, -1 is padding.
    `rows`: dataset row numbers; of pairs the documents', see data.tokenize. `step`: the optimizer step that it is of,
    from 1; 0: of none. What is random in a row follows from both.

    `arrays`: what documents have beside their tokens, by name, see finetune.arrays: of preference rows "desirable", if
    they have labels, and "reference", each document's log-probability under the reference, if that is known.
    `mismatched`: prompts with other rows' answers, which nothing is learned from.
    """

    input_ids_BS: np.ndarray
    labels_BS: np.ndarray
    position_ids_BS: np.ndarray
    document_ids_BS: np.ndarray
    rows: tuple[int, ...]
    _: KW_ONLY
    arrays: Arrays = field(default_factory=dict)
    mismatched: bool = False
    step: int = 0

    @property
    def size(self) -> str:
        """Rows x positions, as messages show it."""
        return "x".join(map(str, self.input_ids_BS.shape))

    def with_array(self, name: str, array: Named) -> "Batch":
        """The same with an array more, or another one of this name."""
        return replace(self, arrays={**self.arrays, name: array})

    @property
    def num_targets(self) -> int:
        return int((self.labels_BS != IGNORE_INDEX).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.document_ids_BS >= 0).sum())


@dataclass(frozen=True)
class ShowingImages:
    """Two documents with images, by which an engine checks that such rows can be packed.

    `packed`: both in one row; `alone`: each in one of its own. `image_token`: the position of the first document's last
    token of an image.
    """

    packed: Batch
    alone: tuple[Batch, Batch]
    image_token: int


def document_targets(batch: Batch) -> np.ndarray:
    """Targets per document of the batch."""
    return np.bincount(batch.document_ids_BS[batch.labels_BS != IGNORE_INDEX], minlength=num_documents(batch))


def num_documents(batch: Batch) -> int:
    """1 of an empty batch, whose tokens are a document without a target."""
    return int(batch.document_ids_BS.max()) + 1


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step over all ranks: summed NLL, number of targets, gradient norm before clipping.

    Of preference rows: the loss summed over rows, their number in `num_rows`, and means in `metrics`.
    """

    nll: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    # The routers' load-balancing loss, before its coefficient; None without --router_aux_loss_coef.
    aux_loss: float | None = None
    # fp16 only: the scaled gradient overflowed; the loss scale was lowered, weights are unchanged.
    skipped: bool = False
    num_rows: int | None = None
    metrics: dict = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean over targets, or over preference rows."""
        return self.nll / (self.num_targets if self.num_rows is None else self.num_rows)


@dataclass(frozen=True)
class MemoryStats:
    """Peak bytes since the last call, above the process after its imports; per item if the engine can tell."""

    total: int
    items: dict = field(default_factory=dict)


@dataclass
class BaseReads:
    """Reads of a base that is not on the device, so far. `waited_s`: of `read_s`, what computing did not hide."""

    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    waited_s: float = 0.0


class Generator(Protocol):
    """A model that answers prompts."""

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos_ids: set[int],
        stop_row: Callable[[int, list[int]], bool] | None = None,
        on_token: Callable[[list[int]], None] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """New token ids per prompt, without the stop token; greedy unless sampling says otherwise. Every rank calls it
        as often as the others, with prompts of its own or none.

        `stop_row(row, ids)` ends a row early; `on_token(ids)` is called with the first row's. `sampling`: temperature,
        top_k, top_p.
        """

    def seed(self, seed: int) -> None:
        """Seeds dropout and sampling."""


class ShardWriter(Protocol):
    """The state of an engine whose ranks each save their own shards."""

    def state_shards(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """(weight shards, optimizer state shards) that this rank writes."""

    def gather_beside_steps(self, value: Any) -> list:
        """Every rank's JSON value, in rank order, from a thread while the main one takes steps."""


BatchT = TypeVar("BatchT", bound=Batch)


class Engine(Generator, Protocol[BatchT]):
    """Everything that the loop, evaluation, checkpoints and the scripts use of a framework.

    No caller reaches past it. `BatchT`: the microbatches that it takes.

    Arrays are numpy; tensor names are PEFT's or transformers'. With several ranks, every method that touches weights
    and every collective is called by all of them at the same point; state and files come from rank 0.
    """

    # ---- what it is

    @property
    def rank(self) -> int: ...

    @property
    def data_rank(self) -> int:
        """Index of the share of a step's rows that this rank takes."""

    @property
    def pad_id(self) -> int: ...

    @property
    def layout(self) -> str:
        """padding_free or padded, once `verify` has decided."""

    def vocab_size(self) -> int:
        """Rows of the embedding."""

    def context_limit(self) -> int | None:
        """Maximum positions, if the model's config gives them."""

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters of the full model; a packed weight counts as the parameters it represents."""

    def notices(self) -> list[str]:
        """Notices on the loaded model."""

    # ---- before the first step

    def verify(self, batch_layout: str) -> dict:
        """{"batch_layout": (used, reason)} by checks on the loaded model. Raises PlanError.
        Call it once, before anything else.
        """

    # ---- step

    def train_step(self, microbatches: list[BatchT], lr: float) -> StepResult:
        """One optimizer step over the targets of all microbatches.
        NonFiniteError leaves weights and moments unchanged.
        """

    def evaluate(self, microbatches: list[BatchT], stop: Callable[[], bool] | None = None) -> StepResult:
        """Loss and metrics without a step, gradients and dropout; each rank takes its share of the microbatches.

        Returns early once `stop()` is true.
        """

    def full_weights(self) -> AbstractContextManager:
        """Context around several calls of `generate`: weights are gathered once, if they fit."""

    # ---- collectives

    def all_reduce_max(self, number: int) -> int:
        """Maximum over ranks."""

    def all_gather_object(self, value: Any) -> list:
        """Every rank's JSON value, in rank order."""

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's JSON value."""

    def shard_list(self, items: list) -> list:
        """This rank's share of the items."""

    def call_before_exit(self, call: Callable[[int], object]) -> None:
        """Has `call(exit code)` called before the engine itself ends this process, because a rank is lost."""

    # ---- state

    @property
    def reseeded(self) -> bool:
        """True if a checkpoint of another world size was loaded, so that dropout differs."""

    @property
    def shard_writer(self) -> ShardWriter | None:
        """Writer with which each rank saves its own shards: its `state_shards` replaces the two methods below."""

    @property
    def keeps_shards(self) -> bool:
        """True if a rank keeps its shard of the weights while it answers: one layer at a time is gathered."""

    def prepare_snapshot(self) -> None:
        """Makes room for snapshots while steps go on. Called after a run's first step, if it takes any."""

    def snapshot(self) -> AbstractContextManager:
        """Context in which the three methods below return copies in host memory, which later steps leave as they are.
        The next snapshot uses their memory again.
        """

    def trainable_state(self) -> dict[str, np.ndarray]:
        """Trainable weights by checkpoint name. Arrays may alias the engine's memory: use them before the next step."""

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        """Optimizer state: (tensors named '<parameter>.<moment>', JSON values such as the loss scale)."""

    def optimizer_values(self) -> dict:
        """The JSON values of optimizer_state."""

    def rng_state(self) -> dict[str, np.ndarray]:
        """Random state of every rank."""

    def load_state(self, trainable: Mapping, optimizer: Mapping, values: dict, rng: Mapping) -> None:
        """Loads what the methods above return. Raises PlanError if it does not match what trains here."""

    def load_trainable(self, trainable: dict) -> None:
        """Loads what `trainable_state` returns, and nothing else: the moments are those of the last step."""

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        """{file: JSON} beside the weights, so that others can load them."""

    def write_model(self, folder: Path) -> None:
        """A full model folder, as transformers loads it."""

    # ---- memory and profiling

    def begin_memory(self, baseline: int) -> int:
        """Peak bytes of loading above `baseline`; counts training from now on."""

    def memory(self) -> MemoryStats:
        """Peak since the last call, by item."""

    @property
    def base_reads(self) -> BaseReads | None:
        """Reads of its base; None if that is on the device."""

    def reset_memory(self) -> int:
        """Peak bytes since the last call, which then starts again: evaluation's are not training's."""

    def profiler(self, written: list) -> AbstractContextManager[Callable[[], object]]:
        """A context that yields a function to call after each step; appends the files it writes to `written`."""


class FineTuningEngine(Engine[BatchT], Protocol[BatchT]):
    """Everything that a run of train.py asks of its engine beside: trials before the first step, and losses by which
    rows are scored and preferences compared.
    """

    @property
    def shares_prompts(self) -> bool:
        """True if documents of a flat microbatch that follow one another and ask the same are computed with their
        prompt once.
        """

    def verify(self, batch_layout: str, showing: ShowingImages | None = None) -> dict:
        """The same; `showing`: documents of a run that sees images, by which packing is checked too."""

    def trainable_state_of_all_ranks(self) -> dict[str, np.ndarray]:
        """`trainable_state` on every rank. Collective."""

    def try_step(self, batch: BatchT, several: bool) -> None:
        """One step on `batch`, undone afterwards. `several`: with gradients kept from another microbatch.
        Raises OutOfMemoryError.
        """

    def undone(self) -> AbstractContextManager:
        """Context before the first step: steps taken in it are undone at its end, to the bit. One process only."""

    def prove_fp8(self, batch: BatchT, before: str | None) -> tuple[str, str]:
        """(fp8 or exact, why): whether frozen weights are multiplied in fp8 from here on. Loss and gradients of `batch`
        are compared with those of exact products, and nothing is learned. `before`: the answer at the start of a run
        that goes on, which stays where the device has fp8: adapters have moved since. Collective.
        """

    def compile_if_it_pays(self, batch: BatchT, microbatches: int) -> tuple[str, str]:
        """(true or false, why), as a timed pair of them says, in a run of so many; nothing is learned from it.
        Asked only where the plan left it open.
        """

    def capture_if_it_pays(self, batch: BatchT, asked: bool, microbatches: int) -> tuple[str, str]:
        """(true or false, why): whether microbatches are replayed as CUDA graphs from here on, in a run of so many.
        Replays of `batch` are tried, and nothing is learned. `asked`: also where it does not pay. Collective.
        """

    def next_token_loss(self, microbatches: list[BatchT], stop: Callable[[], bool] | None = None) -> StepResult:
        """`evaluate` by the nll of the targets, whatever the run learns by."""

    def log_probs_before_training(
        self, microbatches: list[BatchT], stop: Callable[[], bool] | None = None
    ) -> dict[int, float]:
        """{document: its log-probability under the base without adapters}; each rank computes its share.

        Asked only of an engine that learns preferences, by the plan.
        """


class HeadEngine(FineTuningEngine[BatchT], Protocol[BatchT]):
    """Interface of an engine with a head that reads whole documents."""

    def document_outputs(
        self, microbatches: list[BatchT], stop: Callable[[], bool] | None = None
    ) -> dict[int, np.ndarray]:
        """{document: what the head gives of it} of microbatches that every rank has; each computes its share, and all
        have all. Fewer if `stop` ended it.
        """


class TeachingEngine(FineTuningEngine[BatchT], Protocol[BatchT]):
    """Interface of an engine by which a teacher reads rows."""

    def top_log_probs(
        self, microbatches: list[BatchT], count: int, tokens: np.ndarray | None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(the likeliest tokens [T, K], log-probabilities [T, K + 1] of theirs and of all others) at each target of
        each
        document, in the microbatches' order; [T, K] with all tokens. `tokens`: the ids to choose from, by whose places
        they are numbered. One process only.
        """

    def target_log_probs(self, microbatches: list[BatchT], before_training: bool) -> list[list[float]]:
        """Log-probabilities of each document's targets, see SamplingEngine."""


class SamplingEngine(FineTuningEngine[BatchT], Protocol[BatchT]):
    """Everything that a run asks beside of an engine that learns from answers of its own."""

    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[list[tuple[int, ...]]],
        max_new_tokens: list[int],
        eos_ids: set[int],
        how: Sampling,
    ) -> list[list[Sampled]]:
        """Answers to each prompt, one per seed, with at most so many tokens. Every rank calls it, some without a
        prompt.
        """

    def drawing_apart(self, seed: int) -> AbstractContextManager[None]:
        """A context for a user's code, whose random numbers follow from `seed`; the run's states stay as they are."""

    def target_log_probs(self, microbatches: list[BatchT], before_training: bool) -> list[list[float]]:
        """Log-probabilities of each document's targets, under the present weights, or under the base without adapters;
        without dropout. Every rank has microbatches of its own, or none.
        """


class EngineRank(Protocol):
    """One rank of an engine, joined to the others."""

    baseline: int  # bytes of the process after its imports

    @property
    def loads_own_shards(self) -> bool: ...

    def load(self, batches: list[Batch] | None = None, initial_adapter: dict | None = None) -> Any:
        """The model. `batches`: for adapters that start from the data; `initial_adapter`: a checkpoint's."""

    def build(self, model: Any, pad_id: int) -> FineTuningEngine:
        """The engine around the model that `load` returned."""
