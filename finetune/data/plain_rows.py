"""Notices on rows that no chat template renders: how prompt and answer meet, and marks of a chat."""

import re
import unicodedata

from finetune.data.columns import Row
from finetune.data.formats import Document
from finetune.data.images.rows import PLACEHOLDER
from finetune.data.meanings import texts_in
from finetune.data.reading.prose import LINES, SEEN, columns_by_tabs, said_by_several

ENDS_A_WORD = ".,:;?!…)]}>\"'»”’"
WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")  # by a letter's name
SHOWN_LINE = 60
SHOWN = 12  # characters of a prompt's end and of its answer's beginning
CHAT_MARKS = re.compile(
    r"<\|(?:im_start|start_header_id|user|assistant|system|start_of_role|turn>user|start)\|?>|<(?:start_of_turn|turn)>"
    r"|\[INST\]|<<SYS>>|<｜User｜>|(?:^|\n)#{2,3} ?(?:Instruction|Response|User|Human|Assistant)\b:?"
    r"|(?:^|\n)(?:User|Human|Assistant|USER|ASSISTANT|Q|Question): ?.*\n+(?:Assistant|ASSISTANT|A|Answer):"
)


# Text that was read in another encoding than it was written in, as â€™ for a quotation mark; escapes of HTML.
MOJIBAKE = re.compile(
    r"â€[\u0080-\u00bf\u0152-\u2122]|[ÃÐÑ][\u0080-\u009f\u00a0-\u00bf]|Â[\u0080-\u009f\u00a0«»©®°£§]|ðŸ|ï¿½"
)
ESCAPES = re.compile(r"&(?:amp|lt|gt|quot|nbsp|apos|#\d{2,5}|#x[0-9a-fA-F]{2,5});")
OTHER_ENDS = re.compile(r"<\|(?:endoftext|end_of_text|eot_id|end|im_end)\|>|</s>|<end_of_turn>|<｜end▁of▁sentence｜>")
# What a chat program shows folded: Open WebUI's thoughts, calls and what code printed.
FOLDED = re.compile(r"<details\b[^<>]*\btype=[\"'](\w+)[\"']")
LOST = "\ufffd"  # what a decoder puts in the place of bytes that it cannot read
FRONT_MATTER = ("---", "+++")  # of YAML, of TOML
SETTING = re.compile(r"\s*[\w-]+\s*[:=]")


# What programs print of a value that is no text: Python's bytes, lists and objects, numpy's arrays, JavaScript's.
PRINTED = re.compile(
    r"""b(['"]).*\1|[\[(]+(b?'.*'|array\(.*\)),?[\])]+|\[?\{'.*\}\]?|array\(.*\)|<\S.* (object )?at 0x[0-9a-f]+>"""
    r"""|\[object \w+\]|(datetime\.\w+|Timestamp|Decimal|UUID)\(.*\)""",
    re.S,
)
# Escapes in a text that has no line breaks, such as backslash and n for one, as of JSON that was written twice.
TWICE_ESCAPED = re.compile(r'\\u[0-9a-fA-F]{4}|\\r\\n|\\n(?![a-z])|\\"')


def note_printed(row: Row) -> None:
    """Counts the texts of a row that hold a value as a program prints it, or escapes of a text within a text."""
    for text in texts_in(row.values):
        if row.options.images is None and PLACEHOLDER in text:
            row.note(f"a text has {PLACEHOLDER}, which stays text: this run reads no images")
        first = text[:1]
        if first and first in "b[({<aduTDU" and PRINTED.fullmatch(text.strip()):
            row.note("a text is what a program prints of a value, and is learned so", example=text.strip()[:SHOWN_LINE])
        elif "\\" in text and "\n" not in text and first not in "[{" and (found := TWICE_ESCAPED.search(text)):
            row.note(
                "a text without line breaks has escapes such as \\n, which are learned as two characters",
                example=around(text, found),
            )


def note_damaged(row: Row, document: Document) -> None:
    """Counts a document whose text was damaged on its way here."""
    text = "\n".join(span.text for span in document.spans)
    if LOST in text:
        row.note("a text has U+FFFD, which stands where a character was lost, and is learned")
    if found := MOJIBAKE.search(text):
        row.note(
            "a text seems to be UTF-8 that was read in another encoding, and is learned so", example=around(text, found)
        )
    if found := ESCAPES.search(text):
        row.note("a text has HTML's escapes, which are learned as they are", example=around(text, found))
    if found := FOLDED.search(text):
        row.note(f"a text has a block of {found[1]} that chat programs show folded, which is learned as text")


def around(text: str, found: re.Match) -> str:
    """The match with the word around it."""
    start = max(text.rfind(" ", 0, found.start()) + 1, found.start() - SHOWN)
    return text[start : found.end() + SHOWN].split("\n")[0]


def front_matter(text: str) -> str:
    """The first line of settings before a text, as of a page; empty without any."""
    first, *lines = text[:SEEN].split("\n")[:LINES]
    if first.rstrip() not in FRONT_MATTER or first.rstrip() not in lines:
        return ""
    return next((line for line in lines[: lines.index(first.rstrip())] if SETTING.match(line)), "")


def note_plain_row(row: Row, document: Document, has_template: bool, specials: re.Pattern | None) -> None:
    """Counts what is likely not meant. `has_template`: the tokenizer has one; `specials`: its control tokens."""
    if row.format == "text":
        if len(document.spans) == 1:
            note_text(row, document.spans[0].text, specials)
            if setting := front_matter(document.spans[0].text):
                row.note("a text begins with front matter, which is learned too", example=setting[:SHOWN_LINE])
        return
    prompt, answer = (span.text for span in document.spans)
    if row.format != "prompt_completion" or not prompt or not answer.strip():
        return
    if misses_space(prompt, answer):
        row.note(
            "prompt and answer are joined as given, without a space",
            example=f"{prompt[-SHOWN:].lstrip()}{answer[:SHOWN].rstrip()}",
        )
    mark = CHAT_MARKS.search(prompt)
    is_own = bool(specials and specials.search(prompt))
    if mark and not is_own and "<" in mark[0]:
        row.note(
            "a prompt has marks of another model's chat, which are plain text to this one", example=mark[0].strip()
        )
    if has_template and not is_own and not mark:
        row.note(f"the model's chat template is not used for prompt and answer as text. {template_choice(row)}")


def note_text(row: Row, text: str, specials: re.Pattern | None) -> None:
    """Counts a text that is learned as a whole and seems to hold questions and answers, or several texts."""
    if (end := OTHER_ENDS.search(text)) and not (specials and specials.search(end[0])):
        row.note("a text has a control token of another model, which is plain text to this one", example=end[0])
    if mark := CHAT_MARKS.search(text):
        row.note(
            "a text has the marks of a conversation, and all of it is learned, the questions too. To learn the "
            "answers alone, give columns messages, or prompt and completion",
            example=mark[0].strip(),
        )
    elif line := said_by_several(text):
        row.note(
            "lines of a text begin with who says them, or when, and all of it is learned. To learn the answers of one "
            "alone, write rows of messages",
            example=line[:SHOWN_LINE],
        )
    elif columns := columns_by_tabs(text):
        row.note(
            f"lines of a text have {columns} columns, separated by tabs, and all of it is learned. To learn one of "
            "them alone, put a line with their names first, as question and answer, and rename the file to .tsv"
        )


def misses_space(prompt: str, answer: str) -> bool:
    """True if a word of the prompt and one of its answer become one: between scripts that put spaces between words."""
    last = prompt[-1]
    first = answer[0]
    meets = (last.isalnum() or last in ENDS_A_WORD) and first.isalnum()
    return meets and not any(_is_without_spaces(letter) for letter in (last, first))


def _is_without_spaces(letter: str) -> bool:
    return unicodedata.name(letter, "").startswith(WITHOUT_SPACES)


def template_choice(row: Row) -> str:
    """Advice on having such rows rendered by the template."""
    prompt = row.columns["prompt"]
    answer = row.columns["completion"]
    if not (row.options.pairs or row.options.labels):
        return f"To use it: --columns question={prompt},answer={answer}"
    if row.options.pairs and prompt.strip().casefold() not in ("chosen", "rejected"):
        return f"To use it: --columns question={prompt}"
    return "To use it: give prompts and answers as lists of messages"
