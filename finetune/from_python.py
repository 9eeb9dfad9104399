"""fine_tune as a Python function: typed keywords made from TrainConfig, rows, callbacks, and what it returns."""

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from fastcore.meta import delegates

from finetune.adapters.heads import HeadRecord
from finetune.callers_process import Beside, callers_process, only_run
from finetune.cli import check_amounts, parse_named
from finetune.config import FIELDS, NAMES
from finetune.data.images.references import ImageReference
from finetune.data.in_memory import as_file, given_images, is_rows
from finetune.errors import PlanError
from finetune.model_files.manifest import MANIFEST
from finetune.names import translate
from finetune.parts import answer_metrics
from finetune.parts.objectives import CLASSIFY, EMBED
from finetune.parts.train_state import TrainState
from finetune.rewards.functions import RewardFunction, given_functions
from finetune.system.process import end_child, warnings_not_raised
from finetune.system.untrusted import tokenizer_failures

Callback = Callable[[dict], object]
Rows = str | list[str] | list[dict] | Iterable[dict]
OF_ROWS = ("dataset", "validation_dataset", "score_dataset")


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called with an event of metrics.jsonl, {"event", "time", "step", ...}, once it is written."""

    on_step: Callback | None = None
    on_eval: Callback | None = None
    on_save: Callback | None = None

    def __post_init__(self):
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise PlanError(f"fine_tune({name}=...): is {type(value).__name__}, must be a function of an event.")

    def __call__(self, event: dict) -> None:
        function = {"step": self.on_step, "eval": self.on_eval, "save": self.on_save}.get(event["event"])
        if function:
            function(event)

    def drawing_beside(self, beside: Beside | None) -> "Callbacks":
        """The same functions, which draw random numbers from the caller's states."""
        if beside is None:
            return self
        return Callbacks(**{f.name: _beside(beside, f.name, function=getattr(self, f.name)) for f in fields(self)})

    def check(self, world_size: int) -> None:
        """Raises PlanError if the run would be in other processes than the functions."""
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if given and world_size > 1:
            raise PlanError(
                f"fine_tune({given[0]}=...): --world_size {world_size} trains in processes of its own. Start your "
                "program with torchrun instead, or read metrics.jsonl."
            )


def _beside(beside: Beside, name: str, function: Callback | None) -> Callback | None:
    if function is None:
        return None

    @wraps(function)
    def call(event: dict) -> object:
        process = os.getpid()
        try:
            with beside.swapped_in():
                return function(event)
        finally:
            if os.getpid() != process:  # whose threads, which the run waits for, are not in a child
                end_child(f"fine_tune({name}=...): forked, and returned in the child, which ends here. Use os._exit.")

    return call


NO_CALLBACKS = Callbacks()
CALLBACKS = tuple(f.name for f in fields(Callbacks))


def overrides_of(flags: dict, say: Callable[[str], object]) -> dict:
    """{flag: value} of keyword arguments: our names or other programs', values as in YAML, rows as files of them.

    Functions among them are those of the run that begins: an earlier call's are forgotten.
    """

    def where(name: str) -> str:
        return f"fine_tune({name}=...)"

    given_functions([])
    given = {}
    for name, value in flags.items():
        if name in NAMES:
            entry = name
        else:
            entry = translate.known(name)
        flag = None
        if isinstance(entry, str):
            flag = NAMES[entry]
        if isinstance(value, os.PathLike):
            given[name] = os.fspath(value)
        elif flag == "reward":
            given[name] = reward_words(value)
        elif flag in OF_ROWS and is_rows(value):
            given[name] = as_file(value, where(name), say)
        elif flag in OF_ROWS and isinstance(value, list | tuple) and any(map(is_rows, value)):
            given[name] = [as_file(one, where(name), say) if is_rows(one) else one for one in value]
        else:
            given[name] = value
    return parse_named(given, where, lambda name: f"{where(name)}: no such flag.", say)


def reward_words(value: object) -> object:
    """Functions among the values of `reward` as words that name them."""
    if callable(value):
        return given_functions([value])
    if isinstance(value, list | tuple):
        return given_functions(value)
    return value


def _type_of(name: str, flags: object) -> object:
    if name in OF_ROWS:
        return Rows | NoneType
    if name == "reward":
        return str | RewardFunction | list[str | RewardFunction] | NoneType
    return flags


# The keywords of fine_tune: each flag with the value that it has if it is not given.
Flags = make_dataclass(
    "Flags",
    [(name, _type_of(name, f.type), field(default=f.metadata["unset"] or f.default)) for name, f in FIELDS.items()],
)


def typed(function: Callable) -> Callable:
    """Gives `function(**kwargs)` a typed keyword for each flag and callback, so that help and completion show them."""
    return delegates(Callbacks, but=["return"])(delegates(Flags, keep=True, but=["return"])(function))


def weights_in(folder: str) -> str | None:
    """The manifest of a run's folder, which has the digest of each of its files; None without."""
    try:
        return Path(folder, MANIFEST).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


@dataclass
class Result(TrainState):
    """Final state of a run, and its trained model, which is opened from `output_dir` on first use.

    `folder`: output_dir as an absolute path; `weights`: what it held at the run's end. `generate` and `score` answer
    and score as generate.py and score.py do.
    """

    device: str | None = None
    folder: str | None = None
    weights: str | None = None

    @classmethod
    def of(cls, state: TrainState, device: str | None, started_in: str) -> "Result":
        """The result of a run that was `started_in` a folder, from which its output_dir may be relative."""
        result = cls(**{f.name: getattr(state, f.name) for f in fields(TrainState)}, device=device)
        if state.output_dir is not None:
            result.folder = os.path.join(started_in, state.output_dir)
            result.weights = weights_in(result.folder)
        return result

    def _args(self, **options: object) -> Namespace:
        return Namespace(
            checkpoint=self.folder, device=self.device, precision="auto", n_bits=None, quiet=True, **options
        )

    @cached_property
    def _open(self) -> tuple:
        from finetune import open_checkpoint

        self._check_weights()
        return open_checkpoint.open_engine(self._args())

    def _check_weights(self) -> None:
        """Raises PlanError if this run's weights are not what its folder holds."""
        if self.status != "finished" or self.output_dir is None:
            raise PlanError(f"{self.output_dir or 'this run'}: is {self.status}, and has no trained model to open.")
        if weights_in(str(self.folder)) not in (None, self.weights):
            raise PlanError(
                f"{self.output_dir}: has weights of a later run than this result's. Use the result of that one, or "
                "give each run an --output_dir of its own."
            )

    def _head(self) -> HeadRecord | None:
        """The record of the run's head beside the model's own; None without one."""
        return HeadRecord.read(Path(str(self.folder)))

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[tuple]:
        """A context with the opened model, in which torch computes as when it was opened."""
        from finetune import open_checkpoint

        with only_run("the result of fine_tune()"), callers_process(loads_torch=True), tokenizer_failures():
            opened = self._open
            open_checkpoint.prepare_again(opened[3])
            yield opened

    def _with_tower(self, opened: tuple, said: str) -> tuple:
        """The opened model, with its tower if it had none. Raises PlanError, beginning with `said`, if none exists."""
        from finetune import open_checkpoint

        if opened[3].plan.data.images:
            return opened
        self._check_weights()
        found = open_checkpoint.seeing_images(open_checkpoint.find(self._args()), said)
        self._open = with_tower = open_checkpoint.open_engine(self._args(), found=found)
        return with_tower

    def _showing(
        self, opened: tuple, references: tuple[ImageReference, ...], stack: contextlib.ExitStack
    ) -> tuple[tuple, Any]:
        """(the opened model with its tower, what the images are to it). What decodes them ends with `stack`. Raises
        PlanError.
        """
        from finetune import open_checkpoint
        from finetune.data.prepare import open_images
        from finetune.run.answers import shown_of

        opened = self._with_tower(opened, references[0].source)
        inputs = open_images(opened[3].plan.data, open_checkpoint.base_of(str(self.folder)), opened[1])
        stack.callback(inputs.close)
        return opened, shown_of(references, inputs)

    @property
    def model(self):
        """The trained model as it is opened: a torch module, or MLX's. Raises PlanError if its base is outside the
        device: each of its layers has the weights of the last one then.
        """
        with self._at_work() as opened:
            if opened[0].base_reads is not None:
                raise PlanError(
                    "result.model: the layers of its base pass through two buffers (--base_offload), so that a module "
                    f"has no weights of its own. Use result.generate and result.score, or open {self.output_dir} with "
                    "peft."
                )
            return opened[0].model

    @property
    def tokenizer(self):
        """The model's tokenizer, of transformers."""
        with self._at_work() as opened:
            return opened[1]

    def generate(
        self,
        prompt: str | list[str],
        *,
        system: str | None = None,
        raw: bool = False,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int | None = 50,
        top_p: float | None = 0.9,
        seed: int = 42,
        batch_size: int = 8,
        images: object = None,
    ) -> str | list[str]:
        """The answer to a prompt, or to each of several. Greedy unless `temperature` is above 0.

        `top_k`, `top_p`: None: all tokens. `system`: a system message for chat models. `raw`: continue the prompt as
        it is, without the chat template.
        `images`: one or a list, which each prompt shows: paths, bytes of files, or pictures of Pillow's.
        """
        from finetune.run.answers import answers_of, check_sampling

        record = self._head()
        if record is not None:
            raise PlanError(
                f"generate(prompt): the run had --task {record.task}, and answers nothing. {record.instead}"
            )
        if isinstance(prompt, str):
            prompts = [prompt]
        else:
            prompts = list(prompt)
        if not prompts or not all(isinstance(p, str) and p for p in prompts):
            raise PlanError("generate(prompt): is empty, or no text. Give a text or a list of them.")
        how = Namespace(
            system=system, raw=raw, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
            top_k=0 if top_k is None else top_k, top_p=1.0 if top_p is None else top_p, batch_size=batch_size,
        )  # fmt: skip
        check_sampling(how)
        references = given_images(images, "generate(images=...)")
        with self._at_work() as opened, contextlib.ExitStack() as stack:
            shown = None
            if references:
                opened, shown = self._showing(opened, references, stack)
            answers = answers_of(opened, prompts, how, shown)
        if isinstance(prompt, str):
            return answers[0]
        return answers

    def classify(self, text: Any) -> Any:
        """{label: probability}, the likeliest label first, of a text or of a list of messages; of a list of texts, or
        of lists of messages, one each. Of a run with --task classify.
        """
        from finetune.run.heads import classified

        is_one = isinstance(text, str) or (isinstance(text, list) and bool(text) and isinstance(text[0], dict))
        texts = [text] if is_one else list(text)
        self._check_weights()
        record = self._head()
        if record is None or not record.labels:
            raise PlanError(f"result.classify(text): this run had no --task {CLASSIFY}. Use result.generate.")
        if not texts:
            raise PlanError("result.classify(text): is empty. Give a text or a list of them.")
        with self._at_work() as opened:
            found = classified(opened[0], opened[1], base=opened[3], record=record, texts=texts)
        return found[0] if is_one else found

    def embed(self, texts: list[Any]) -> np.ndarray:
        """[texts, hidden size]: unit vectors of texts or lists of messages, by a run with --task embed."""
        from finetune.run.heads import embedded

        self._check_weights()
        record = self._head()
        if record is None or not record.gives_vectors:
            raise PlanError(f"result.embed(texts): this run had no --task {EMBED}. Use result.generate.")
        if isinstance(texts, str) or not texts:
            raise PlanError("result.embed(texts): is a text, or empty. Give a list of texts.")
        with self._at_work() as opened:
            return embedded(opened[0], opened[1], base=opened[3], record=record, texts=list(texts))

    def score(
        self,
        dataset: Rows,
        *,
        metric: str | None = None,
        pattern: str | None = None,
        columns: str | None = None,
        ignore_columns: str | None = None,
        samples: int = -1,
        split: str = "test",
        max_new_tokens: int = 128,
        context_length: int | None = None,
        batch_size: int = 32,
        image_root: str | None = None,
        allow_urls: bool = False,
    ) -> dict:
        """{"rows", "num_targets", "loss", "perplexity", "exact_match", "scores"} on rows, a file or a Hub dataset."""
        from finetune.data.columns import RowOptions, parse_columns, parse_names
        from finetune.data.images.references import ImageOptions, image_root_of
        from finetune.data.prepare import check_columns, rows_showing_images
        from finetune.data.reading.sources import read_rows
        from finetune.model_files.processor import sees_images
        from finetune.open_checkpoint import base_of
        from finetune.run.heads import options_for
        from finetune.run.scored_rows import score_rows
        from finetune.trained_base import text_unit_of

        amounts = Namespace(
            context_length=context_length, max_new_tokens=max_new_tokens, batch_size=batch_size, samples=samples
        )
        check_amounts(amounts)
        with warnings_not_raised():
            if is_rows(dataset):
                name = as_file(dataset, "score(dataset)")
            else:
                name = str(dataset)
            options = RowOptions("auto", parse_columns(columns), parse_names(ignore_columns))
            raw = read_rows(name, samples=samples, split=split, text_unit=text_unit_of(Path(str(self.folder))))
        record = self._head()
        if record is not None:
            options = options_for(record, options)
        self._check_weights()
        files = base_of(str(self.folder))
        if sees_images(files.folder, files.config):
            options = replace(options, images=ImageOptions(image_root_of(name, image_root), allow_urls))
        check_columns(raw, options, f"score({name})")
        shows_images = bool(options.images) and any(rows_showing_images(raw, options))
        how = self._args(
            dataset=name, raw=raw, options=options, metric=metric, pattern=pattern, predictions=None, show=0,
            metrics=answer_metrics.metrics_of(metric or "exact,perplexity", pattern), max_new_tokens=max_new_tokens,
            context_length=context_length, batch_size=batch_size,
        )  # fmt: skip
        with self._at_work() as opened:
            if shows_images:
                opened = self._with_tower(opened, f"score({name})")
            engine, tokenizer, ends, base = opened
            return score_rows(engine, tokenizer, ends, base, how)[0]
