"""Detection of a row's format from its column names, and the fate of each column: used, counted, or refused.

FORMATS is the table. Names are compared without case; --columns renames, --ignore_columns leaves out. Nothing is
dropped silently: an unused column is counted, and one that changes the meaning of a row is refused.
"""

import contextlib
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from finetune.data.blocks import ROLES, is_assistant
from finetune.data.images.references import ImageOptions, ImageReference
from finetune.data.images.rows import IMAGE_FIELD, IMAGE_NAMES, PAIRS_OF_TURNS, Reading, image_columns, with_marks
from finetune.data.likely_columns import (
    are_conversation,
    is_content,
    likely_pair,
    likely_preference,
    lists_of_objects,
    text_columns,
)
from finetune.data.meanings import (
    ANOTHER_ANSWER,
    MEANS,
    OF_ORIGIN,
    PART_OF_PROMPT,
    SYSTEM,
    WORDS,
    has_words,
    holds_image,
    is_nothing,
    meaning_in,
    meaning_of,
    plain_name,
    switch_of,
    text_beside,
    texts_in,
)
from finetune.errors import PlanError
from finetune.parts.objectives import EMBED, GENERATE, from_labels, from_pairs
from finetune.parts.rows import in_prose
from finetune.system.json_files import json_in_cell, json_kind

VARIABLES = {"chat_template_kwargs": ("chat_template_kwargs",)}  # the template's own switches


@dataclass(frozen=True)
class Format:
    """A format's fields, each with the column names it is found under. `optional` ones may be missing or empty."""

    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        names = ["|".join(n) for n in self.required.values()] + [f"[{'|'.join(n)}]" for n in self.optional.values()]
        return " + ".join(names)

    def columns(self, known: dict[str, str]) -> dict[str, tuple[str, ...]]:
        """{field: its columns, the preferred one first} of the fields that `known` {name: column} has."""
        fields = {**self.required, **self.optional}
        found = {name: [known[s] for s in dict.fromkeys((name, *fields[name])) if s in known] for name in fields}
        return {name: tuple(columns) for name, columns in found.items() if columns}


# In order of detection: a dataset with both messages and text is a chat dataset.
FORMATS = {
    "chat": Format(
        {"messages": ("messages", "conversations", "conversation", "contents")},
        {"system": SYSTEM, "tools": ("tools", "functions"), **VARIABLES},
    ),
    "preference": Format(
        {"chosen": ("chosen",), "rejected": ("rejected",)},
        {
            "prompt": ("prompt", "conversations", "conversation"),
            "question": ("question", "query", "instruction"),
            "context": ("input", "context"),
            "messages": ("messages", "contents"),
            "system": SYSTEM,
            **VARIABLES,
        },
    ),
    "alpaca": Format(
        {"instruction": ("instruction",), "output": ("output", "response")},
        {"input": ("input", "context"), "system": SYSTEM, "history": ("history",), **VARIABLES},
    ),
    "kto": Format(
        {"prompt": ("prompt",), "completion": ("completion", "response"), "label": ("label",)},
        {"messages": ("messages", "contents")},
    ),
    "prompt_completion": Format(
        {"prompt": ("prompt",), "completion": ("completion", "response")},
        {"system": SYSTEM, "tools": ("tools",), **VARIABLES},
    ),
    "qna": Format(
        {
            "question": ("question", "query", "input"),
            "answer": ("answer", "answers", "response", "output", "answerkey", "answer_key"),
        },
        {
            "context": ("context", "passage", "article", "contexts", "retrieved_contexts"),
            "choices": ("choices", "options"),
            "system": SYSTEM,
            "history": ("history",),
            **VARIABLES,
        },
    ),
    "tokens": Format(
        {"input_ids": ("input_ids",)},
        {
            "labels": ("labels", "completion_mask", "assistant_masks", "assistant_mask", "loss_mask"),
            "attention_mask": ("attention_mask",),
        },
    ),
    "text": Format({"text": ("text",)}),
    "classify": Format(
        {
            "text": ("text", "sentence", "messages", "conversations", "conversation", "prompt", "question", "query"),
            "label": ("label", "labels", "category"),
        },
        {"system": SYSTEM, **VARIABLES},
    ),
    "embed": Format(
        {
            "anchor": ("anchor", "query", "question", "sentence1", "premise"),
            "positive": ("positive", "document", "passage", "answer", "sentence2", "hypothesis"),
        },
        {"negative": ("negative", "hard_negative")},
    ),
}
PREFERENCES = ("preference", "kto")
OF_TASKS = ("classify", "embed")  # formats of rows that a head beside the model's own learns from
LEARNED = ("weight", "train", "training", "trainable", "loss", "loss_mask")  # whether a turn is, as programs name it
FIELDS = (*dict.fromkeys(name for fmt in FORMATS.values() for name in (*fmt.required, *fmt.optional)), IMAGE_FIELD)
# Columns beside a question that may be a part of it.
ASKED_TOO = ("instruction", "instructions", "prompt", "question", "task", "input")
# Those beside a conversation or a text, which is itself the task of some.
ASKED_BESIDE = ("instruction", "prompt", "question", "query", "input", "message", "user_message", "user_input")
PROMPT_OF_PAIR = re.compile(
    r"((user|human)_)?(problem|post|message|task|prompt|question|query|instruction|request|input|utterance)s?(_text)?"
)
ASKS_OF_PAIRS = {"prompt", "question", "context", "messages"}  # fields
# Columns beside a question that hold one of its choices, two of them at least.
CHOICE = re.compile(r"(options?|choices?|opt|op|ending|candidate|alternative|distractor)_?([a-h]|\d)|[a-h]")
# The place of a row in its conversation.
PLACE_OF_TURN = re.compile(r"turn|(turn|message|msg|utterance)_?(id|index|idx|number|no|num)")
# Columns of token ids that say which are learned, or where a packed row's documents end.
OF_TOKENS = re.compile(
    r"(prompt|response|answer|target|labels?|train|output)_?masks?|weights|position_?ids|(segment|document|sequence|seq)_?ids"
    r"|cu_?seq_?lens|seq(uence)?_?(lens?|lengths?)|packed.*"
)
# A column beside the answer of such a row that holds one more.
MESSAGES = re.compile(r'\s*(\[\s*)?\{\s*"(role|from|content|value|parts|messages|id|type)"')  # in JSON
IN_CELLS = ("messages", "tools", "history", "chat_template_kwargs")  # fields that a text may hold as JSON
ANSWERED = {"qna": "answer", "alpaca": "output", "prompt_completion": "completion"}
HOLDS_ALL = {"chat": "messages", "text": "text"}  # formats whose one field holds both questions and answers
ASKED = {"qna": "question", "alpaca": "instruction", "prompt_completion": "prompt"}
ASKED |= dict.fromkeys(PREFERENCES, "prompt")
# Columns beside the texts of a head that may hold one more, or a part of one.
ONE_MORE_TEXT = re.compile(
    r"(completion|response|answer|output|solution|reply|context|passage|document|body|aspect|term|premise|hypothesis|input|instruction|prompt)s?"
    r"|(text|sentence|question|query)s?(_?\d+|_[a-d]|_pair)|pair|second_(text|sentence)"
    r"|(hard_)?negatives?(_?\d+)?|(positive|query|anchor)s?(_?\d+)?"
)
# Columns beside texts that belong together that may say that they do not.
BELONG = re.compile(
    r"(is_)?(duplicate|equivalent|paraphrase|similar|relevant|related|match|positive)|(.*_)?(similarity|relevance|relatedness)"
    r"(_score)?|entailment(_judgment)?"
)
ONE_MORE = re.compile(
    r"(?!inputs?_outputs?$)(.*_)?(answer|response|completion|output|solution)s?(_?\d+|_[a-d])?"
    r"|ideal|golden|truth|oracle|answer_key|revised|rewritten|improved|(human|expert|post)_edit"
)
# Words in the names of columns that hold an answer or a part of a question, if they hold a text.
OF_ANSWERS = {"answer", "response", "completion", "output", "correction", "edit", "edited", "revised", "rewritten"}
OF_ANSWERS |= {"revision", "fixed", "override", "suggestion", "replacement", "solution", "step"}
OF_QUESTIONS = {"question", "prompt", "instruction", "query", "context", "passage", "document", "body", "input"}
OF_QUESTIONS |= {"story", "paragraph", "dialogue", "dialog", "transcript", "scenario", "article", "premise", "abstract"}
OF_QUESTIONS |= {"table", "ocr", "fact", "rule", "guideline", "policy", "profile", "evidence", "support"}
OF_QUESTIONS |= {"email", "poem", "snippet", "trace", "starter", "ddl", "demonstration"}
OF_TEXT = re.compile(r"(.*_)?(summary|translation|highlights?|reply)|code")  # beside a text
CODE = re.compile(r"[\w.:-]{1,24}")  # of a product, a diagnosis or a version: no program
WORDS_OF_TEMPLATE = 40  # around a question and its answer, at most: Alpaca's has 30
# Columns that say who says a text, and what they say.
WHO = ("role", "from", "speaker", "author", "sender", "author_role")
SPEAKERS = {*ROLES, "bot", "ai", "chatbot", "prompter", "agent", "customer"}
PAIRS = (
    "{where}: columns chosen and rejected are preference pairs. Add "
    f"--preference {from_pairs()[0]} to learn what is preferred, or --columns completion=chosen to learn the chosen "
    "answers alone."
)
LABELLED = (
    "{where}: columns prompt, completion and label are KTO rows, of which some are examples of what not to say. Add "
    f"--preference {from_labels()[0]} to learn from both, or remove the rows whose label is false and add "
    "--ignore_columns label."
)
SCORED_PAIRS = (
    "{where}: columns chosen and rejected are preference pairs, and what is scored are answers. Name the answer in a "
    "--config file, score_dataset: {{name: FILE, columns: completion=chosen}}, or score other rows."
)
NO_PAIRS = (
    "{where}: is of format {fmt}, and "
    f"--preference {in_prose(from_pairs())} need columns chosen and rejected. Name them with "
    "--columns chosen=A,rejected=B, or omit --preference."
)
NO_LABELS = (
    "{where}: is of format {fmt}, and "
    f"--preference {in_prose(from_labels())} needs columns prompt, completion and label, or chosen and rejected. "
    "Name them with --columns completion=A,label=B, or omit --preference."
)


@dataclass(frozen=True)
class RowOptions:
    """Options for reading columns: a format or auto, {field: column}, and the columns and message fields to leave out.

    `pairs`: chosen and rejected answers are both read, each as a document. `labels`: a row is an answer that is
    desirable or not, and a pair is two of them. `special_tokens`: --special_tokens_in_text. `last_turn`: only a
    conversation's last answer is learned. `mask_reasoning`: an answer's thoughts are not. `images`: rows with images
    are read; None: they are refused. `task`: --task; `class_names`: of its labels, once they are known;
    `negatives`: each row has a negative text. `whole`: a head reads conversations to their last message; False: to
    their last answer, as heads of earlier versions learned.
    """

    format: str = "auto"
    columns: dict = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    pairs: bool = False
    labels: bool = False
    special_tokens: str = "escape"
    last_turn: bool = False
    mask_reasoning: bool = False
    images: ImageOptions | None = None
    task: str = GENERATE
    class_names: tuple[str, ...] = ()
    negatives: bool = False
    whole: bool = True

    @property
    def documents(self) -> int:
        """The documents that each row is; 1 where it may be one or several."""
        if self.task == EMBED:
            return 2 + self.negatives
        return 2 if self.pairs else 1

    @property
    def has_head(self) -> bool:
        """True if rows are read for a head beside the model's own."""
        return self.task != GENERATE

    @property
    def reads_texts(self) -> bool:
        """True if rows have texts that a head reads, and no answers."""
        return self.task in OF_TASKS

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that rows may have."""
        if self.reads_texts:
            return (self.task,)
        if self.pairs or self.labels:
            if self.labels:
                return PREFERENCES
            return PREFERENCES[:1]
        return tuple(name for name in FORMATS if name not in OF_TASKS)

    @classmethod
    def of(cls, given: "RowOptions | str") -> "RowOptions":
        """`given` itself, or the options of a format's name."""
        if isinstance(given, RowOptions):
            return given
        return cls(given)


def parse_columns(text: str | None, flag: str = "--columns") -> dict[str, str]:
    """{field: column} of `field=column,field=column`. Raises PlanError."""
    found = {}
    for part in (text or "").split(",") if text else ():
        name, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not name or not column:
            raise PlanError(f"{flag} {text}: {part.strip()!r} is not FIELD=COLUMN. Use prompt=A,completion=B.")
        if name not in FIELDS:
            raise PlanError(f"{flag} {text}: {name!r} is not a field of any format. Use {', '.join(FIELDS)}.")
        if name in found:
            raise PlanError(f"{flag} {text}: {name!r} is given twice. Give it one column.")
        found[name] = column
    return found


def parse_names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated list, without case."""
    return tuple(word.strip().casefold() for word in (text or "").split(",") if word.strip())


class Notices:
    """Notices on a dataset's rows: each text with its number, its first place and an example."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.examples: dict[str, str] = {}

    def add(self, text: str, source: str, count: int = 1, example: str = "") -> None:
        self.counts[text] += count
        self.first.setdefault(text, source)
        if example:
            self.examples.setdefault(text, example)

    def update(self, counts: dict[str, int], first: dict[str, str], examples: dict[str, str]) -> None:
        """Adds what others counted."""
        for text, count in counts.items():
            self.add(text, first[text], count, examples.get(text, ""))

    def clear(self) -> None:
        self.counts.clear()
        self.first.clear()
        self.examples.clear()


@dataclass(frozen=True)
class Row:
    """One row by the fields of its format. `columns`: {field: the column it came from}, for messages about it.

    `notices` counts what a user should know of all rows. `images`: what the numbered marks in its texts represent, in
    the order of their first ones.
    """

    format: str
    values: dict
    columns: dict
    source: str
    options: RowOptions = RowOptions()  # noqa: RUF009  frozen
    notices: Notices = field(default_factory=Notices)
    images: list[ImageReference] = field(default_factory=list)

    def get(self, name: str):
        return self.values.get(name)

    def note(self, text: str, count: int = 1, example: str = "") -> None:
        """Counts something a user should know."""
        self.notices.add(text, self.source, count, example)

    def leave(self, part: dict, read: Container[str], what: str, where: str, said: str = "") -> None:
        """Counts the fields of a part of the row beside those that are `read`. `what`: it is; `said`: what is read of
        it. Raises PlanError for one that may not be left out.
        """
        for name, value in part.items():
            if name in read or is_nothing(value) or name.strip().casefold() in self.options.ignored:
                continue
            meaning = meaning_in(name, value, "turn", lambda: said) or text_beside(name, value, said)
            if plain_name(name) in LEARNED and value != 1:
                meaning = "may say which parts are learned, and a turn is learned as a whole or not"
            if meaning:
                raise PlanError(
                    f"{where}: field {name!r} of {what} {meaning}, and it is not read. Add --ignore_columns {name} to "
                    "train without it."
                )
            self.note(f"field {name!r} of {what} is not read")

    def text(self, name: str, required: bool = True) -> str:
        """A field's text. Raises PlanError if it is missing or not text; a number or boolean is converted, counted."""
        value = self.values.get(name)
        column = self.columns.get(name, name)
        if value is None:
            if not required:
                return ""
            fact = "null" if name in self.values else "missing"
            raise PlanError(f"{self.source}: field {column!r} is {fact}, must be a string.")
        if isinstance(value, bool | int):
            self.note(f"field {column!r}: {type(value).__name__} converted to text")
            if isinstance(value, bool):
                return str(value).lower()
            return str(value)
        if not isinstance(value, str):
            hint = ""
            if isinstance(value, float):
                hint = " Write numbers with a fraction as text."
            elif isinstance(value, dict):
                texts = [key for key, part in value.items() if isinstance(part, str)]
                key = next((key for key in texts if is_content(key)), "KEY")
                hint = f" Write text, or name its key: --columns {name}={column}.{key}."
            raise PlanError(f"{self.source}: field {column!r} is {json_kind(value)}, must be a string.{hint}")
        return value


@dataclass(frozen=True)
class Schema:
    """The format of rows with the same columns. `unused`: columns that no field of it reads. `images`: {column that may
    hold images: whether its name says so}, where they are read.
    """

    format: str
    columns: dict[str, tuple[str, ...]]
    unused: tuple[str, ...]
    images: dict[str, bool] = field(default_factory=dict)


class RowReader:
    """Rows to `Row`s by their columns. `formats` counts rows per format, `notices` everything else worth a line.

    A row whose columns match no format is read by the dataset's (`columns`: all of its columns, if known), so that its
    missing field is named. Raises PlanError for columns that match no format, or whose meaning is not learned.
    """

    def __init__(
        self,
        options: RowOptions = RowOptions(),  # noqa: B008
        columns: Sequence[str] = (),
        dataset: str = "--dataset",
        examples: Sequence[dict] = (),
    ):
        self.options = options
        self.dataset = dataset
        self.notices = Notices()
        self.examples = examples
        self.nested = [column for column in options.columns.values() if "." in column]
        self.formats: Counter[str] = Counter()
        self.schemas: dict[tuple, Schema] = {}
        self.switches: dict[str, bool] | None = None  # of columns, while rows are only checked: a stream is not to end
        self.main: Schema | None = None
        self.renamed = {column.casefold(): name for name, column in options.columns.items()}
        if columns:
            self.main = self._schema((*columns, *(name for name in self.nested if name not in columns)), dataset)

    def read(self, row: dict, source: str) -> Row:
        """The row by its format's fields."""
        schema, row, values, columns = self._fields(row, source)
        values, images = self._marked(schema, row, values, columns, source=source)
        self.formats[schema.format] += 1
        return Row(schema.format, values, columns, source, self.options, self.notices, images)

    def shows_image(self, row: dict, source: str) -> bool:
        """True if the row has an image, or what is refused as one: a path that leads nowhere says what is meant too.
        Raises PlanError for its columns.
        """
        schema, row, values, columns = self._fields(row, source)
        try:
            return bool(self._marked(schema, row, values, columns, source=source)[1])
        except PlanError:
            return True

    def _marked(
        self, schema: Schema, row: dict, values: dict, columns: dict[str, str], *, source: str
    ) -> tuple[dict, list[ImageReference]]:
        """(the values with marks, the row's images), see `with_marks`."""
        images: list[ImageReference] = []
        if self.options.images is not None:
            given = [(column, row.get(column), is_named) for column, is_named in schema.images.items()]
            note = partial(self.notices.add, source=source)
            reading = Reading(
                format=schema.format,
                columns=columns,
                source=source,
                options=self.options.images,
                ignored=self.options.ignored,
                is_named=IMAGE_FIELD in self.options.columns,
                note=note,
            )
            values, images = with_marks(values, given, reading)
        return values, images

    def check(self, row: dict, source: str) -> None:
        """Raises PlanError for columns that match no format, or say what is not learned. Its images are not read."""
        if self.switches is None:
            self.switches = {}
        self._fields(row, source)

    def _fields(self, row: dict, source: str) -> tuple[Schema, dict, dict, dict[str, str]]:
        """(the row's schema, the row, its values by field, the column of each field)."""
        if self.nested:
            row = self._with_nested(row, source)
        schema = self._schema(tuple(row), source)
        if all(row.get(c) is None for n in FORMATS[schema.format].required for c in schema.columns.get(n, ())):
            filled = tuple(name for name, value in row.items() if value is not None)
            if self._detected(self._known(filled)[0]):  # a table of several formats holds nulls in the others' columns
                schema = self._schema(filled, source)
        self.main = self.main or schema
        values = {}
        columns = {}
        for name, names in schema.columns.items():
            column = next((c for c in names if row.get(c) is not None), names[0])
            if column in row:
                values[name], columns[name] = row[column], column
                if name not in IN_CELLS and are_messages(row[column]):
                    raise PlanError(
                        f"{source}: field {column!r} is JSON of messages, written as a text. Write the messages "
                        f"themselves, in a .jsonl; if they are the whole conversation, add --columns messages={column}."
                    )
            for other in names:
                if other != column and row.get(other) is not None:
                    self._check_second(name, column, other, row, source)
        for name in FORMATS[schema.format].required:
            columns.setdefault(name, self._asked_column(name))
        self._check_unused(row, schema, source)
        return schema, row, values, columns

    def _with_nested(self, row: dict, source: str) -> dict:
        """The row with what --columns names inside its columns, as in data.text, in the place of these."""
        found = dict(row)
        for path in self.nested:
            outer = next((name for name in row if path.casefold().startswith(f"{str(name).casefold()}.")), None)
            if outer is None or path in row:
                continue
            found[path] = part_at(row[outer], path[len(str(outer)) + 1 :].split("."), f"{source}: {outer!r}")
            if found.pop(outer, None) is not None:
                self.notices.add(f"of column {outer!r} only what --columns names is used", source)
                self._check_beside(row[outer], str(outer), source)
        return found

    def _check_beside(self, value: Any, path: str, source: str) -> None:
        """Counts entries of lists beside those that --columns names. Raises PlanError for what is beside them in
        objects and may not be left out.
        """
        if isinstance(value, str):
            value = json_in_cell(value, f"{source}: {path!r}")
        if isinstance(value, list) and len(value) > 1:
            used = {name[len(path) + 1 :].split(".")[0] for name in self.nested if _is_within(name, path)}
            if any(isinstance(part, dict) and {"role", "from"} & part.keys() for part in value):
                raise PlanError(
                    f"{source}: {path!r} has {len(value)} messages, of which --columns names entry "
                    f"{', '.join(sorted(used))} alone. Write the whole conversation as messages."
                )
            self.notices.add(
                f"of a list {path!r} only entry {', '.join(sorted(used))} is used, and it has more", source
            )
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            name = f"{path}.{key}"
            if any(_is_within(named, name) for named in self.nested):
                self._check_beside(part, name, source)
            elif isinstance(key, str) and not any(named.casefold() == name.casefold() for named in self.nested):
                ignored = {key.strip().casefold(), name.strip().casefold()} & set(self.options.ignored)
                meaning = None if ignored else meaning_in(key, part, "row")
                if meaning:
                    raise PlanError(
                        f"{source}: {name!r} {meaning}, and --columns does not name it. Add --ignore_columns {name} to "
                        "train without it."
                    )

    def _used(self, schema: Schema) -> dict[str, tuple[str, str]]:
        """{name without case: (field, column)} of the columns that the fields of a format are read from."""
        return {str(found[0]).strip().casefold(): (name, found[0]) for name, found in schema.columns.items() if found}

    def _asked_column(self, name: str) -> str:
        return self.options.columns.get(name, name)

    def _schema(self, names: tuple, where: str) -> Schema:
        if names not in self.schemas:
            self.schemas[names] = self._resolved(names, where)
        return self.schemas[names]

    def _resolved(self, names: tuple, where: str) -> Schema:
        known, left_out = self._known(names)
        fmt: str | None = self.options.format
        if fmt == "auto":
            fmt = self._detected(known)
        fmt = fmt or (self.main.format if self.main else None)
        if fmt is None:
            raise PlanError(no_format(self.dataset, names, self.options, self.examples))
        if fmt not in self.options.formats:
            raise PlanError(self._not_this(where, fmt))
        if fmt in PREFERENCES and not (self.options.pairs or self.options.labels):
            raise PlanError((self._pairs if fmt == "preference" else LABELLED).format(where=self.dataset))
        columns = FORMATS[fmt].columns(self._with_conversation(known))
        used = {c for cs in columns.values() for c in cs}
        images = {}
        if self.options.images is not None:
            likely = image_columns(known)
            images = {column: is_named for column, is_named in likely.items() if column not in used}
            if IMAGE_FIELD in self.options.columns:
                images = {column: column == known.get(IMAGE_FIELD) for column in images}
        used |= images.keys()
        return Schema(fmt, columns, tuple(c for c in names if c not in used and c not in left_out), images)

    def _not_this(self, where: str, fmt: str) -> str:
        """The line for rows of a format that what is learned does not read."""
        task = self.options.task
        if task in OF_TASKS:
            return (
                f"{where}: is of format {fmt}, and --task {task} needs {in_prose(list(FORMATS[task].required))}. Name "
                f"their columns with --columns {_as_columns(FORMATS[task])}, or omit --task."
            )
        if self.options.has_head:
            return (
                f"{where}: is of format {fmt}, and --task {task} needs columns chosen and rejected. Name them with "
                "--columns chosen=A,rejected=B, or omit --task."
            )
        return (NO_LABELS if self.options.labels else NO_PAIRS).format(where=where, fmt=fmt)

    @property
    def _pairs(self) -> str:
        return SCORED_PAIRS if self.dataset.startswith("--score_dataset") else PAIRS

    def _known(self, names: tuple) -> tuple[dict[str, str], set[str]]:
        """({name without case, renamed: column}, the columns left out as asked)."""
        known: dict[str, str] = {}
        left_out: set[str] = set()
        for column in sorted(names, key=lambda c: str(c) != str(c).casefold()):  # of text and Text, text
            name = str(column).strip().casefold()
            if name in self.options.ignored:
                left_out.add(column)
            else:
                known.setdefault(self.renamed.get(name, name), column)
        for name, column in self.options.columns.items():  # a renamed column is its new name's, whatever else has it
            exact = next((c for c in names if str(c).strip().casefold() == column.casefold()), None)
            if exact is not None and exact not in left_out:
                known[name] = exact
        if self.options.images is not None and PAIRS_OF_TURNS in known and self._detected(known) is None:
            known["messages"] = known[PAIRS_OF_TURNS]
        return known, left_out

    def _with_conversation(self, known: dict[str, str]) -> dict[str, str]:
        """A column renamed to completion without a prompt is a conversation, such as chosen often is."""
        if "completion" in self.options.columns and "completion" in known and "prompt" not in known:
            return {**known, "messages": known["completion"]}
        return known

    def _detected(self, known: dict[str, str]) -> str | None:
        known = self._with_conversation(known)
        others = () if self.options.reads_texts else OF_TASKS
        read = {name: fmt for name, fmt in FORMATS.items() if name not in others}
        matching = [name for name, fmt in read.items() if fmt.required.keys() <= fmt.columns(known).keys()]
        return next((name for name in matching if name in self.options.formats), next(iter(matching), None))

    def _check_second(self, name: str, column: str, other: str, row: dict, source: str) -> None:
        """Raises PlanError for two columns that hold one field and differ, unless --columns names one of them."""
        if name not in self.options.columns and row[other] != row.get(column) and row[other] not in ("", [], {}):
            raise PlanError(
                f"{source}: columns {column!r} and {other!r} both hold the {name}. Add --columns {name}={column} to "
                f"use that one, or --ignore_columns {column}."
            )
        self.notices.add(f"column {other!r} is not used, {column!r} is", source)

    def _check_unused(self, row: dict, schema: Schema, source: str) -> None:
        for column in schema.unused:
            value = row.get(column)
            name = str(column).strip().casefold()
            if is_nothing(value):
                continue
            if name in self._used(schema):  # Question beside question
                self._check_second(*self._used(schema)[name], column, row, source)
                continue
            if name in ("chosen", "rejected"):
                if "chosen" not in (c.casefold() for c in self.options.columns.values()):
                    raise PlanError(self._pairs.format(where=self.dataset))
            elif meaning := self._meaning_of_unused(str(column), value, row, schema):
                unused = {str(c): row.get(c) for c in schema.unused}
                like = CHOICE if CHOICE.fullmatch(plain_name(name)) else None
                others = [
                    n.strip().casefold()
                    for n, given in unused.items()
                    if (meaning_of(plain_name(n)) or like and like.fullmatch(plain_name(n))) and given is not None
                ]
                raise PlanError(
                    f"{source}: column {column!r} {meaning}, and format {schema.format} does not use it. "
                    f"{_remedy(name, schema.format, others)}"
                )
            self.notices.add(f"column {str(column)!r} is not used", source)

        for column in schema.unused if schema.format == "preference" else ():
            strength = number_of(row.get(column))
            if strength is not None and strength < 0 and BETTER_BY.fullmatch(plain_name(str(column))):
                self.notices.add(f"column {column!r} is below 0, as of a pair the wrong way round", source)
        for chosen, rejected in ratings(schema):
            better, worse = number_of(row.get(chosen)), number_of(row.get(rejected))
            if better is not None and worse is not None:
                sign = -1 if BEST_IS_LOW.search(str(chosen).casefold()) else 1
                if sign * better < sign * worse:
                    word = "below" if sign == 1 else "above"
                    line = f"column {chosen!r} is {word} {rejected!r}, as of a pair the wrong way round"
                    self.notices.add(line, source)
                elif better == worse:
                    self.notices.add(f"column {chosen!r} equals {rejected!r}: neither answer is the better one", source)

    def _meaning_of_unused(self, column: str, value: Any, row: dict, schema: Schema) -> str | None:
        """Meaning of an unused column for its row, if that may not be left out."""
        name = plain_name(column)
        return (
            self._meaning(column, value, row, schema)
            or _meaning_of_named(column, row, schema)
            or self._one_more(name, value, row, schema)
            or self._asked_too(name, value, row, schema)
            or self._one_more_text(name, value, row, schema)
            or _part_of_row(name, value, row, schema)
            or self._switched(name, value)
        )

    def _switched(self, name: str, value: Any) -> str | None:
        """The meaning of a column that says yes of some rows and no of others, by whatever name."""
        switch = switch_of(name, value)
        if switch is None or self.switches is None or self.switches.setdefault(name, switch) == switch:
            return None
        return f"is {str(switch).lower()}, and the other in rows above, which may say which rows are wanted"

    def _meaning(self, column: str, value: Any, row: dict, schema: Schema) -> str | None:
        """The meaning that a column's name and value have in rows of all formats."""
        meaning = meaning_in(column, value, "row", partial(_said, row, schema))
        name = column.strip().casefold()
        if plain_name(column) == "mask" and str(value).casefold() in ("user", "human"):  # not learned here either
            meaning = None
        is_image = meaning in (None, MEANS[IMAGE_FIELD]) and holds_image(plain_name(column), value)
        if self.options.images is None:
            if self.renamed.get(name) == IMAGE_FIELD:
                return MEANS[IMAGE_FIELD]
            if is_image and name not in IMAGE_NAMES:
                return f"holds an image (a model that sees images reads it with --columns {IMAGE_FIELD}={name})"
            return meaning
        if is_image:
            return f"holds an image (--columns {IMAGE_FIELD}={name} reads those of one column)"
        if meaning == MEANS[IMAGE_FIELD]:
            return "is neither text nor an image"
        return meaning

    def _one_more(self, name: str, value: Any, row: dict, schema: Schema) -> str | None:
        """ANOTHER_ANSWER for a column that seems to hold one, which the row's answer does not contain."""
        answer = ANSWERED.get(schema.format)
        is_answer = bool(ONE_MORE.fullmatch(name) or (schema.format == "text" and OF_TEXT.fullmatch(name)))
        if not is_answer and schema.format in ANSWERED and _has_text(name, OF_ANSWERS, value):
            is_answer = not _is_said(value, _said(row, schema))
        if not is_answer or (answer in self.options.columns):
            return None
        if schema.format in (*HOLDS_ALL, *PREFERENCES):
            hint = " (--columns question=text learns it as the text's)" if schema.format == "text" else ""
            return None if _is_said(value, _said_in_answer(row, schema)) else ANOTHER_ANSWER + hint
        used = schema.columns.get(answer or "", ())
        if not used or not isinstance(value, str):
            return None
        said = " ".join(str(row.get(column)) for column in used)
        return None if has_words(said, value) else ANOTHER_ANSWER

    def _one_more_text(self, name: str, value: Any, row: dict, schema: Schema) -> str | None:
        """The meaning of a column beside the texts of a head that none of them contains, or that says how they belong
        together.
        """
        if schema.format == EMBED and isinstance(value, int | float) and BELONG.fullmatch(name):
            return "may say which texts do not belong together"
        if schema.format not in OF_TASKS or not isinstance(value, str | list) or not ONE_MORE_TEXT.fullmatch(name):
            return None
        said = " ".join(str(row.get(column)) for columns in schema.columns.values() for column in columns)
        return None if str(value).strip() in said else "may be a part of what is learned"

    def _asked_too(self, name: str, value: Any, row: dict, schema: Schema) -> str | None:
        """The meaning of a column that may be a part of the question, unless one of the two contains the other."""
        if schema.format in HOLDS_ALL and name in ASKED_BESIDE:
            hint = f" (--columns question={name},answer=text asks it)" if schema.format == "text" else ""
            return None if _is_said(value, _said(row, schema)) else "may be a part of the prompt" + hint
        if schema.format == "preference" and not ASKS_OF_PAIRS & schema.columns.keys():
            if PROMPT_OF_PAIR.fullmatch(name) and isinstance(value, str) and len(value.split()) >= WORDS:
                pair = [row.get(column) for n in ("chosen", "rejected") for column in schema.columns[n]]
                if not _begin_alike(pair) and not _is_said(value, _said(row, schema)):
                    return f"may be the prompt (--columns prompt={name} asks it)"
            return None
        asked = ASKED.get(schema.format)
        used = schema.columns.get(asked, ()) if asked else ()
        if not used or name not in ASKED_TOO or not isinstance(value, str) or asked in self.options.columns:
            return None
        said = " ".join(str(row.get(column)) for columns in schema.columns.values() for column in columns)
        question = str(row.get(used[0])).strip()
        return None if has_words(said, value) or question in value else "may be a part of the question"


def _begin_alike(pair: list) -> bool:
    """True for texts that begin with the same words, which are their prompt then; and for what is no text."""
    if not all(isinstance(text, str) for text in pair):
        return True
    return len({tuple(text.split()[:WORDS]) for text in pair}) == 1


def _meaning_of_named(column: str, row: dict, schema: Schema) -> str | None:
    """The meaning of a column beside a pair whose chosen and rejected answers are names of columns with texts."""
    if schema.format != "preference":
        return None
    answers = [row.get(c) for name in ("chosen", "rejected") for c in schema.columns[name]]
    are_names = all(isinstance(name, str) and isinstance(row.get(name), str) for name in answers)
    return "holds an answer that the pair only names" if are_names and column in answers else None


def _part_of_row(name: str, value: Any, row: dict, schema: Schema) -> str | None:
    """The meaning of a column that may be a part of a prompt, say which token ids are learned, or place the row in a
    conversation. A text that the row's other columns contain is none.
    """
    if schema.format == "tokens" and OF_TOKENS.fullmatch(name):
        return "may say which tokens are learned, or where documents end"
    if schema.format in ("tokens", "chat") and _is_of_each(value, row, schema):
        return "has a number for each token or turn, and may say which are learned"
    if schema.format == "text" and name in WHO and str(value).strip().casefold() in SPEAKERS:
        return "says who speaks, as if the row is one turn of a conversation"
    if schema.format not in (*ASKED, "chat"):
        return None
    if PLACE_OF_TURN.fullmatch(name) and str(value).isdigit() and int(value) > 1 and schema.format != "chat":
        return "makes a conversation of several rows"
    if CHOICE.fullmatch(name) and schema.format in ANSWERED:
        choices = [column for column in schema.unused if CHOICE.fullmatch(plain_name(str(column)))]
        fields = schema.columns.items()
        asked = " ".join(str(row.get(c)) for n, columns in fields if n != ANSWERED[schema.format] for c in columns)
        if len(choices) > 1 and str(value).strip() not in asked:
            return "may be a choice of the question (a list in a column choices is read)"
    if not PART_OF_PROMPT.fullmatch(name):
        question = next((row.get(c) for c in schema.columns.get(ASKED.get(schema.format, ""), ())), None)
        if not _has_text(name, OF_QUESTIONS, value) or (isinstance(question, str) and question in str(value)):
            return None
    elif _is_row(value, row, schema) or (name in ("code", "schema") and CODE.fullmatch(str(value))):
        return None
    return None if _is_said(value, _said(row, schema)) else "may be a part of the prompt"


def _is_row(value: Any, row: dict, schema: Schema) -> bool:
    """True for a text that is the whole row as a template writes it: its questions and answers, and few words more."""
    if not isinstance(value, str):
        return False
    left = value
    for name in FORMATS[schema.format].required:
        texts = [text for c in schema.columns.get(name, ()) for text in texts_in(row.get(c), leaves=True)]
        for text in [text.strip() for text in texts if text.casefold() not in SPEAKERS]:
            if text not in value:
                return False
            left = left.replace(text, " ", 1)
    return len(left.split()) <= WORDS_OF_TEMPLATE


def _is_of_each(value: Any, row: dict, schema: Schema) -> bool:
    """True for numbers that differ, one for each token of a row; of turns, for zeros and ones."""
    field = "input_ids" if schema.format == "tokens" else "messages"
    of = next((row.get(column) for column in schema.columns.get(field, ())), None)
    if not isinstance(value, list) or not isinstance(of, list) or len(value) != len(of):
        return False
    if schema.format == "chat" and not all(part in (0, 1) for part in value):
        return False
    return all(isinstance(part, bool | int | float) for part in value) and len(set(value)) > 1


def _has_text(name: str, words: set[str], value: Any) -> bool:
    """True for a text longer than a name in a column whose name has one of these words and is not about the row; of
    texts in a list or an object, its last word.
    """
    of_name = [word.removesuffix("s") for word in name.split("_")]
    if not isinstance(value, str):
        of_name = of_name[-1:]
    if not words & set(of_name) or OF_ORIGIN & set(of_name) or not is_content(name):
        return False
    if {"input", "output"} <= set(of_name):  # tests of a program
        return False
    if of_name[-1] == "title" and not {"question", "query", "prompt"} & set(of_name):
        return False
    return sum(len(text.split()) for text in texts_in(value)) >= WORDS


def _said(row: dict, schema: Schema) -> str:
    """The texts of all columns of a row that are used."""
    return "\n".join(text for columns in schema.columns.values() for c in columns for text in texts_in(row.get(c)))


def _said_in_answer(row: dict, schema: Schema) -> str:
    """The texts of a row's last answer: of messages the assistant's last, of a pair the chosen one."""
    field = {"chat": "messages", "preference": "chosen", "kto": "completion"}.get(schema.format, "text")
    value = next((row.get(c) for c in schema.columns.get(field, ()) if row.get(c) is not None), None)
    if isinstance(value, str) and MESSAGES.match(value):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = value["messages"]
    if isinstance(value, list):
        spoken = [part for part in value if isinstance(part, dict) and is_assistant(part)]
        value = spoken[-1:] or value[-1:]
    return "\n".join(texts_in(value))


def _is_said(value: Any, said: str) -> bool:
    """True if `said` has the longest text of a value, or the value has none."""
    texts = list(texts_in(value, leaves=True)) or list(texts_in(value))
    text = max(texts, key=len, default="").strip()
    return has_words(said, text) or has_words(said, json.dumps(text, ensure_ascii=False)[1:-1])


def are_messages(value: Any) -> bool:
    """True for a text that is JSON of messages, of one or of an object that holds them."""
    if not isinstance(value, str) or not MESSAGES.match(value):
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    if isinstance(found, dict):
        found = found.get("messages", [found])
    of_message = ({"role", "from"}, {"content", "value", "parts"})
    is_list = isinstance(found, list) and bool(found) and all(isinstance(message, dict) for message in found)
    return is_list and all(message.keys() & names for message in found for names in of_message)


def _is_within(name: str, path: str) -> bool:
    """True if a dotted name is of a part of what is at `path`."""
    return name.casefold().startswith(f"{path.casefold()}.")


def _as_columns(fmt: Format) -> str:
    """Columns of a format's fields, as --columns names them."""
    return ",".join(f"{name}={letter}" for name, letter in zip(fmt.required, "ABC", strict=False))


def ratings(schema: Schema) -> list[tuple[str, str]]:
    """Columns of pairs that rate the two answers, such as (chosen_rating, rejected_rating)."""
    if schema.format != "preference":
        return []
    by_name = {str(column).strip().casefold(): column for column in schema.unused}
    named = ((column, by_name.get(name.replace("chosen", "rejected"))) for name, column in by_name.items())
    return [(column, other) for column, other in named if other not in (None, column)]


# Columns of pairs that say by how much the chosen answer is better.
BETTER_BY = re.compile(r"(.*_)?(margin|delta|diff(erence)?|gap)|(.*_)?preference(_(strength|score|margin))?")
BEST_IS_LOW = re.compile(r"(^|_)(rank(ing)?|place|position|loss|perplexity|ppl|errors?|penalty|toxicity)(_|$)")


def number_of(value: Any) -> float | None:
    """A finite number, as it is or as a table's cell has it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        # It may be too large for a float.
        return value
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(number := float(value)):
            return number
    return None


def _remedy(name: str, fmt: str, others: list[str]) -> str:
    """`others`: all columns of the row that may not be left out unsaid."""
    names = ",".join(dict.fromkeys([name, *others]))
    leave = f"--ignore_columns {shlex.quote(names)}"
    if name in (*SYSTEM, "history") and fmt == "prompt_completion":
        return f"Add --columns question=prompt,answer=completion to render a chat turn with it, or {leave} to drop it."
    return f"Add {leave} to train without it."


def check_named_columns(columns: Sequence[str], options: RowOptions, dataset: str) -> None:
    """Raises PlanError if --columns names one that is not among these."""
    if missing_column(columns, options) is not None:
        raise PlanError(no_format(dataset, columns, options))


def part_at(value: Any, keys: list[str], where: str):
    """The value at keys and indices in objects and lists, some of them JSON in text; None if there is none. Raises
    PlanError for JSON with a key twice.
    """
    for key in keys:
        if isinstance(value, str):
            value = json_in_cell(value, where)
        if isinstance(value, list):
            if key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                value = None
        else:
            if isinstance(value, dict):
                value = value.get(key)
            else:
                value = None
    return value


def missing_column(columns: Sequence[str], options: RowOptions) -> str | None:
    """A column that --columns names and these rows have not; of one inside a column, that column."""
    have = {str(name).strip().casefold() for name in columns}
    named = [column.casefold() for column in options.columns.values()]
    lacks = [not {name, name.partition(".")[0]} & have for name in named]
    return next(
        (column for column, is_missing in zip(options.columns.values(), lacks, strict=True) if is_missing), None
    )


def no_format(dataset: str, columns: Sequence[str], options: RowOptions, rows: Sequence[dict] = ()) -> str:
    """The line for columns that match no format. `rows`: some of them, which say what the columns hold."""
    found = ", ".join(str(column)[:80] for column in columns[:16]) or "(none)"
    found += f" and {len(columns) - 16} more" if len(columns) > 16 else ""
    named = {name: fmt for name, fmt in FORMATS.items() if name not in (*PREFERENCES, *OF_TASKS)}
    known = "; ".join(f"{name} ({', '.join(fmt.required)})" for name, fmt in named.items())
    known += ". docs/data.md has all of their columns"
    missing = missing_column(columns, options)
    if missing is not None:
        return f"{dataset}: has no column {missing!r} that --columns names, it has {found}. Name one of these."
    if columns and [str(column) for column in columns] == [str(number) for number in range(len(columns))]:
        fact = "are pandas' numbers of columns without names"
        return f"{dataset}: columns {found} {fact}. Name them, as in --columns question=0,answer=1."
    if any(re.search(r"[.?!]$|^-?[\d.]+$", str(column).strip()) for column in columns):
        return f"{dataset}: columns {found} look like a row. The first line of a table names its columns: add one."
    if options.reads_texts:
        fields = in_prose(list(FORMATS[options.task].required))
        given = _as_columns(FORMATS[options.task])
        return (
            f"{dataset}: columns {found} have no {fields} that --task {options.task} needs. Name them with --columns "
            f"{given}."
        )
    separated = next((mark for mark in (";", "\t", "|") if len(columns) == 1 and mark in str(columns[0])), None)
    hint = ""
    if separated:
        hint = f" They are separated by {separated!r}: save the file with commas."
    if len(columns) < 2:
        return (
            f"{dataset}: columns {found} match no format.{hint} There is no second column that could be the answer. "
            f"Use the columns of a format: {known}."
        )
    names = [str(column) for column in columns]
    pictured = {}
    if options.images is not None:
        pictured = image_columns({name.strip().casefold(): name for name in names})
        names = [name for name in names if name not in pictured]
        rows = [{name: value for name, value in row.items() if name not in pictured} for row in rows]
    described = [name for name, length in text_columns(names, rows).items() if length]  # numbers have none
    if pictured and len(described) == 1:
        (text,) = described
        return (
            f"{dataset}: columns {found} match no format. If {text} is what is learned of each image, use --columns "
            f"text={text}; a question beside it makes it an answer, --columns question=NAME,answer={text}."
        )
    compared = likely_preference(names, rows)
    if compared:
        if options.pairs or options.labels:
            flag = ""
        else:
            flag = f"--preference {from_pairs()[0]} "
        given = ",".join(f"{name}={column}" for name, column in compared.items())
        fact = "match no format and seem to compare two answers"
        return f"{dataset}: columns {found} {fact}. Use {flag}--columns {given}."
    lists = [entry for row in rows[:1] for entry in lists_of_objects(row)]
    chats = [path for path, objects in lists if are_conversation(objects)]
    if len(chats) == 1 and not (options.pairs or options.labels):
        given = f"--columns messages={chats[0]}"
        return f"{dataset}: columns {found} match no format. If {chats[0]} is the conversation, use {given}."
    if lists and len(rows) == 1:
        path, objects = lists[0]
        return (
            f"{dataset}: columns {found} match no format, and {path} has {len(objects)} objects. If they are the rows, "
            "write that list into a file of its own."
        )
    pair = likely_pair(names, rows)
    if pair is None and len(text_columns(names, rows)) > 1:
        return (
            f"{dataset}: columns {found} match no format, and none of them is plainly the one answer to a question. "
            f"Name two with --columns question=A,answer=B, or use the columns of a format: {known}."
        )
    if pair is None:
        return (
            f"{dataset}: columns {found} match no format, and no two of them hold text. Write a question and its "
            f"answer in columns of their own, or use the columns of a format: {known}."
        )
    return (
        f"{dataset}: columns {found} match no format.{hint} If {pair[0]} is the question and {pair[1]} the answer, "
        f"use --columns question={pair[0]},answer={pair[1]}. The formats: {known}."
    )
