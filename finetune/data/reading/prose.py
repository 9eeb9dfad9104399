"""Kinds of text in files whose names call it prose: rows of another program, markup, messages of a chat."""

import json
import re
from collections import Counter

from finetune.data.columns import FORMATS

SEEN = 2**16  # characters that are looked at, of a file
LINES = 60  # of a text
FEWEST = 3  # lines that make a table or a conversation
MOST = 0.8  # of the lines
MARKUP = {
    re.compile(r"\{\\rtf"): "RTF. Save its text",
    re.compile(r"<(!doctype html|html)\b", re.I): "HTML. Save its text",
    re.compile(r"<\?xml"): "XML. Write its rows as .jsonl, or save its text",
    re.compile(
        r"WEBVTT|(\d+\s+)?\d\d:\d\d:\d\d[,.]\d{3} --> "
    ): "a file of subtitles. Save what is said, without times",
    re.compile(r"From \S+@\S+ .*\d{4}\n"): "a mailbox. Write the text of each mail as a row of a .jsonl",
}
SEPARATORS = {"\t": "Rename it to .tsv", ",": "Rename it to .csv", ";": "Rename it to .csv", "|": "Save it as .csv"}
NAMES = {s for fmt in FORMATS.values() for of in (fmt.required, fmt.optional) for each in of.values() for s in each}
WHEN = re.compile(
    r"\W{0,3}(\d{1,4}[./-]\w{1,3}[./-]\d{2,4},?\s)?\d{1,2}:\d{2}\b"
    r"|[^,\n]{1,60}, \[\d|\W?\[\d{1,2}-\w{3}-\d{2}\b"
)
WHO = re.compile(r"([^\W\d][\w .'-]{0,30}):\s\S")


def rather(text: str) -> str | None:
    """Fact and remedy of a file of text that is no prose, as a sentence begins them; None for prose."""
    head = text.lstrip()[:SEEN]
    lines = [line for line in head.split("\n")[:LINES] if line.strip()]
    if head.startswith(("{", "[")) and _is_json(text):
        return "is JSON. Rename it to .json"
    if len(lines) > 1 and sum(map(_is_object, lines)) > len(lines) / 2:
        return "most of its lines are JSON objects. Rename it to .jsonl, without the others"
    if head.startswith("#separator:"):
        return (
            "is an export of Anki. Put a line with the names of its columns, as question and answer, in the place of "
            "those that begin with #, and rename it to .tsv"
        )
    for sign, remedy in MARKUP.items():
        if sign.match(head):
            return f"is {remedy}"
    for mark, remedy in SEPARATORS.items():
        cells = [cell.strip().strip('"').casefold() for cell in (lines or [""])[0].strip().strip("|").split(mark)]
        known = [cell for cell in cells if cell in NAMES]
        if len(known) > 1 and len(lines) > 1 and mark in lines[1]:
            return f"its first line names columns ({', '.join(known)}). {remedy}"
    return None


def _is_json(text: str) -> bool:
    """True for an object, or a list of objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_object(line: str) -> bool:
    return line.lstrip().startswith("{") and line.rstrip().endswith("}") and _is_json(line)


def said_by_several(text: str) -> str | None:
    """The first line of a text whose lines begin with who says them, or when; None for any other."""
    lines = [line for line in text[:SEEN].split("\n")[:LINES] if line.strip()]
    timed = [line for line in lines if WHEN.match(line)]
    if len(timed) >= FEWEST and len(timed) > len(lines) / 3:
        return timed[0]
    names = Counter(found[1] for line in lines if (found := WHO.match(line)))
    again = [name for name, count in names.items() if count > 1]
    if len(again) > 1 and sum(names[name] for name in again) >= MOST * len(lines):
        return lines[0]
    return None


def columns_by_tabs(text: str) -> int:
    """Number of columns of a text whose lines are those of a table, separated by tabs; 0 for any other."""
    lines = [line for line in text[:SEEN].split("\n")[:LINES] if line.strip()]
    counts = {line.count("\t") for line in lines}
    if len(lines) < FEWEST or len(counts) > 1 or 0 in counts:
        return 0
    return counts.pop() + 1
