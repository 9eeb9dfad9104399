"""Data sets of pretrain.py on disk: the arrays of TinyRecursiveModels, written by dataset/, read here.

DIR/{train,test}/all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy (int32) and dataset.json;
DIR/tokenizer/ for text. inputs and labels are [rows, seq_len]: labels[s] is what position s must answer.
"""

import contextlib
import glob
import hashlib
import json
import math
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError, first_line
from finetune.system.files import UNFINISHED, new_folder
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.owned_files import LIST, files_below, kind_of, read_list, write_list

NAMES = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
SCHEMA = {
    "pad_id": int,
    "ignore_label_id": (int, type(None)),
    "vocab_size": int,
    "seq_len": int,
    "num_puzzle_identifiers": int,
    "sets": [str],
    "symmetries?": (str, type(None)),
}
SYMMETRIES = (None, "sudoku", "maze")
CELLS = (16, 36, 81)  # of a Sudoku
NAMES_OF_OLDER = {  # all that a data set had before there were lists
    *(f"{split}/{name}" for split in ("train", "test") for name in ("dataset.json", *(f"all__{n}.npy" for n in NAMES))),
    *("config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
}


@dataclass(frozen=True)
class Rows:
    """Rows of one split of one or more data sets. `symmetries`: how a row may be varied in each epoch.
    `counts`: what the log says of them. `starts`: {path: its first row}.
    """

    inputs_NS: np.ndarray
    labels_NS: np.ndarray
    puzzle_ids_N: np.ndarray
    pad_id: int
    vocab_size: int
    num_puzzles: int
    symmetries: str | None
    starts: dict

    def __len__(self) -> int:
        return len(self.inputs_NS)

    @property
    def seq_len(self) -> int:
        return self.inputs_NS.shape[1]

    @property
    def lengths(self) -> np.ndarray:
        """Positions up to the last that is not padding, in each row."""
        used = (self.inputs_NS != self.pad_id) | (self.labels_NS != IGNORE_INDEX)
        return self.seq_len - np.argmax(used[:, ::-1], axis=1)

    @property
    def counts(self) -> dict:
        return {"rows": len(self), "targets": int((self.labels_NS != IGNORE_INDEX).sum())}

    @property
    def sources(self) -> "Sources":
        return Sources(self)

    def digest(self) -> str:
        found = hashlib.sha256()
        for array in (self.inputs_NS, self.labels_NS, self.puzzle_ids_N):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def cut(self, seq_len: int) -> tuple["Rows", int]:
        """(these rows in their first `seq_len` positions, the number of those left out: they had no target there)."""
        labels = self.labels_NS[:, :seq_len]
        kept = (labels != IGNORE_INDEX).any(1)
        cut = replace(
            self, inputs_NS=self.inputs_NS[kept, :seq_len], labels_NS=labels[kept], puzzle_ids_N=self.puzzle_ids_N[kept]
        )
        return cut, int((~kept).sum())


@dataclass(frozen=True)
class Sources:
    """The name of each row, for messages."""

    rows: Rows

    def __getitem__(self, row: int) -> str:
        path = max((start, path) for path, start in self.rows.starts.items() if start <= row)[1]
        return f"{path}:{row - self.rows.starts[path] + 1}"


@contextlib.contextmanager
def new_dataset(output: Path) -> Iterator[Path]:
    """A folder to write a data set to, which at the end takes the place of `output`, as `check_output` allows it.

    The data set that was there is renamed, then deleted: a kill between the two leaves it to the next start.
    """
    check_output(output)
    output = output.resolve()
    replaced = output.with_name(f".{output.name}.replaced-{secrets.token_hex(4)}")
    with new_folder(output) as beside:
        yield beside
        write_list(beside, set(files_below(beside)) - {UNFINISHED}, secrets.token_hex(4))
        check_output(output)  # again: it may have got files meanwhile
        if output.exists():
            output.rename(replaced)
    shutil.rmtree(replaced, ignore_errors=True)


def check_output(output: Path, *inputs: str | None) -> None:
    """Raises PlanError unless `output` is absent, empty, or a data set of a builder to which nobody added a file.

    `inputs`: files that are read, and must not be inside. Finishes what a killed builder began.
    """
    said = f"--output-dir {output}"
    if output.name in ("", "..") or output.resolve() == Path.cwd():
        raise PlanError(f"{said}: is no name for a data set. Give a folder of its own.")
    if any(folder.is_file() for folder in output.parents):
        raise PlanError(f"{said}: is inside a file. Give another folder.")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise PlanError(f"{said}: is a file or a link. Give another folder.")
    _finish_replacing(output.resolve())
    for path in inputs:
        if path and output.resolve() in Path(path).resolve().parents:
            raise PlanError(f"{said}: holds the input {path}. Give another folder.")
    extra = foreign_files(output)
    if extra:
        raise PlanError(f"{said}: holds {extra[0]}, which no builder wrote. Give another folder, or move it away.")


def foreign_files(folder: Path) -> list[str]:
    """Files in `folder` that its list does not name; of a data set made before there were lists, other names."""
    found = []
    if folder.is_dir():
        found = sorted(files_below(folder))
    listed = read_list(folder)
    names = set[str]()
    if listed:
        names = listed[1] | {LIST, UNFINISHED}
    else:
        with contextlib.suppress(JsonFileError, FileNotFoundError):
            read_json(folder / "config.json", {"output_dir": str, "input_file": (str, type(None)), "seed": int})
            names = NAMES_OF_OLDER
    return [name for name in found if name not in names or kind_of(folder / name) != "a file"]


def _finish_replacing(output: Path) -> None:
    """Removes the data set that a killed builder had replaced, or puts it back if the new one had not its place yet."""
    for replaced in output.parent.glob(f".{glob.escape(output.name)}.replaced-????????"):
        if (replaced / "train").is_dir() and not foreign_files(replaced):
            if output.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(output)


def write_array(path: Path, array: np.ndarray) -> None:
    """np.save with a clear error on a full disk."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        if array.size:
            file.write(array.data.cast("B"))


def write_rows(
    folder: Path, inputs: np.ndarray, labels: np.ndarray, pad_id: int, vocab_size: int, **facts: Any
) -> None:
    """Writes one split. `facts`: further keys of dataset.json."""
    folder.mkdir(parents=True, exist_ok=True)
    count = len(inputs)
    each = np.arange(count + 1, dtype=np.int32)
    puzzles = facts.pop("puzzle_identifiers", np.zeros(count, np.int32))
    arrays = dict(zip(NAMES, (inputs, labels, puzzles, each, each), strict=True))
    for name, array in arrays.items():
        write_array(folder / f"all__{name}.npy", np.ascontiguousarray(array, np.int32))
    content = {
        "pad_id": pad_id,
        "ignore_label_id": IGNORE_INDEX,
        "blank_identifier_id": 0,
        "vocab_size": vocab_size,
        "seq_len": int(np.shape(inputs)[1]),
        "num_puzzle_identifiers": int(np.max(puzzles, initial=0)) + 1,
        "total_groups": count,
        "mean_puzzle_examples": 1.0,
        "total_puzzles": count,
        "sets": ["all"],
        **facts,
    }
    (folder / "dataset.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@overload
def read_split(path: str, split: Literal["train"]) -> Rows: ...
@overload
def read_split(path: str, split: Literal["test"]) -> Rows | None: ...
def read_split(path: str, split: str) -> Rows | None:
    """A split of a data set; None for a split that the data set does not have. Raises PlanError."""
    folder = Path(path).expanduser() / split
    if not folder.parent.is_dir():
        raise PlanError(f"data_paths {path}: no such folder. Build it with python -m dataset.build_chat_dataset.")
    try:
        content = read_json(folder / "dataset.json", SCHEMA)
    except FileNotFoundError:
        if split == "test":
            return None
        raise PlanError(
            f"data_paths {path}: has no {split}/dataset.json. Build it with python -m dataset.build_chat_dataset."
        ) from None
    except JsonFileError as error:
        raise PlanError(f"{error}. Build the data set again.") from None
    _check_facts(folder, content)
    inputs, labels, puzzles = (_array_of_sets(folder, kind, content) for kind in NAMES[:3])
    if split == "test" and not len(inputs):
        return None
    _check(folder, content, inputs, labels, puzzles)
    labels = labels.astype(np.int64)
    if content["ignore_label_id"] is not None:
        labels[labels == content["ignore_label_id"]] = IGNORE_INDEX
    return Rows(
        inputs,
        labels,
        puzzles,
        content["pad_id"],
        content["vocab_size"],
        max(1, content["num_puzzle_identifiers"]),
        content.get("symmetries"),
        {path: 0},
    )


def _array_of_sets(folder: Path, kind: str, content: dict) -> np.ndarray:
    arrays = [_array(folder / f"{name}__{kind}.npy") for name in content["sets"]]
    if len({(array.ndim, array.shape[1:]) for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise PlanError(f"{folder}: {kind} of its sets have the shapes {shapes}. Build the data set again.")
    if not arrays[0].ndim:
        raise PlanError(f"{folder}: {kind} is a single number, must be an array. Build the data set again.")
    return np.concatenate(arrays)


def _array(file: Path) -> np.ndarray:
    """The array of a file, mapped: its header must fit the file's size. Raises PlanError."""
    if not file.is_file():
        fact = "is not a regular file" if file.exists() else "no such file"
        raise PlanError(f"{file}: {fact}. Build the data set again.")
    try:
        return np.lib.format.open_memmap(file, mode="r")
    except (ValueError, OSError, EOFError, OverflowError) as error:
        raise PlanError(f"{file}: is not an array of numbers ({first_line(error)}). Build it again.") from None


def _check_facts(folder: Path, content: dict) -> None:
    """Raises PlanError for what dataset.json cannot say."""
    file = folder / "dataset.json"
    sets = content["sets"]
    vocab = content["vocab_size"]
    size = content["seq_len"]
    if not sets or any(not name or name in (".", "..") or "/" in name or "\\" in name for name in sets):
        raise PlanError(f'{file}: sets is {sets}, must be names such as ["all"]. Build the data set again.')
    if not 0 <= content["pad_id"] < vocab:
        raise PlanError(f"{file}: pad_id is {content['pad_id']}; the vocabulary is 0 to {vocab - 1}. Build it again.")
    symmetries = content.get("symmetries")
    if symmetries not in SYMMETRIES:
        raise PlanError(f"{file}: symmetries is {symmetries!r}. Use sudoku, maze or null.")
    if symmetries and (size < 1 or math.isqrt(size) ** 2 != size or (symmetries == "sudoku" and size not in CELLS)):
        raise PlanError(f"{file}: symmetries is {symmetries!r}, and {size} cells are not its square. Build it again.")


def _check(folder: Path, content: dict, inputs: np.ndarray, labels: np.ndarray, puzzles: np.ndarray) -> None:
    rows = len(inputs)
    size = content["seq_len"]
    vocab = content["vocab_size"]
    if not rows:
        raise PlanError(f"{folder}: has no rows. Build the data set from more conversations.")
    for name, array, shape in (("inputs", inputs, (rows, size)), ("labels", labels, (rows, size))):
        if array.shape != shape or array.dtype.kind not in "iu":
            raise PlanError(f"{folder}/all__{name}.npy: is {array.dtype} {array.shape}, must be integers {shape}.")
    if puzzles.shape != (rows,) or puzzles.dtype.kind not in "iu":
        raise PlanError(f"{folder}: puzzle_identifiers are {puzzles.shape}, must be ({rows},). Build it again.")
    tokens = (inputs.min(), inputs.max(), max(0, labels.max()))
    if odd := [token for token in tokens if not 0 <= token < vocab]:
        raise PlanError(f"{folder}: has token {odd[0]}; the vocabulary is 0 to {vocab - 1}. Build it again.")
    negative = labels[(labels < 0) & (labels != IGNORE_INDEX)]
    negative = negative[negative != content["ignore_label_id"]]  # None: no label is equal to it
    if len(negative):
        ignored = content["ignore_label_id"]
        raise PlanError(f"{folder}: has label {negative[0]}; only {ignored} is ignored. Build the data set again.")
    known = max(1, content["num_puzzle_identifiers"])
    if puzzles.min() < 0 or puzzles.max() >= known:
        if puzzles.min() < 0:
            wrong = puzzles.min()
        else:
            wrong = puzzles.max()
        raise PlanError(f"{folder}: has puzzle identifier {wrong}; they are 0 to {known - 1}. Build it again.")


def joined(splits: list[Rows]) -> Rows:
    """The rows of several data sets as one, padded to the longest. Raises PlanError if they do not belong together."""
    first = splits[0]
    if len(splits) == 1:
        return first
    size = max(rows.seq_len for rows in splits)
    for rows in splits[1:]:
        for what in ("vocab_size", "pad_id", "symmetries"):
            if getattr(rows, what) != getattr(first, what):
                one = next(iter(first.starts))
                other = next(iter(rows.starts))
                raise PlanError(
                    f"data_paths: {one} has {what} {getattr(first, what)}, {other} {getattr(rows, what)}. "
                    "Build both with one tokenizer."
                )

    def wide(array: np.ndarray, fill: int):
        return np.pad(array, ((0, 0), (0, size - array.shape[1])), constant_values=fill)

    starts = {}
    at = 0
    for rows in splits:
        starts[next(iter(rows.starts))] = at
        at += len(rows)
    return replace(
        first,
        inputs_NS=np.concatenate([wide(rows.inputs_NS, rows.pad_id) for rows in splits]),
        labels_NS=np.concatenate([wide(rows.labels_NS, IGNORE_INDEX) for rows in splits]),
        puzzle_ids_N=np.concatenate([rows.puzzle_ids_N for rows in splits]),
        num_puzzles=max(rows.num_puzzles for rows in splits),
        starts=starts,
    )


def tokenizer_folder(paths: tuple[str, ...]) -> Path | None:
    """The tokenizer of these data sets; None for puzzles. Raises PlanError if they have different ones."""
    files = [Path(path).expanduser() / "tokenizer" / "tokenizer.json" for path in paths]
    found = [file for file in files if file.is_file()]
    digests = {hashlib.sha256(file.read_bytes()).hexdigest() for file in found}
    if len(digests) > 1 or (found and len(found) != len(files)):
        raise PlanError(f"data_paths {list(paths)}: their tokenizers differ. Build them with one --tokenizer.")
    if found:
        return found[0].parent
    return None
