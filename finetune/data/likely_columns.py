"""Guesses at the content of columns, from their names and values: for suggestions, never for training."""

import re
from collections.abc import Iterator, Sequence

ROWS_READ = 50
DEEPEST = 8
# Words in the names of columns, in English and in the languages that most tables of others are in.
ANSWER_WORDS = re.compile(
    r"answer|output|response|completion|generation|reply|target|summary|solution|label|annotation|choices"
    r"|antwort|lösung|loesung|zusammenfassung|réponse|reponse|respuesta|risposta|resposta|antwoord|svar|vastaus"
    r"|odpowied|odpověď|válasz|cevap|ответ|відповідь|答|回复|回應|回答|답변|جواب|إجابة|उत्तर",
    re.I,
)
QUESTION_WORDS = re.compile(
    r"question|query|prompt|instruction|input|request|problem|source_text"
    r"|frage|aufgabe|pregunta|consulta|domanda|pergunta|vraag|spørgsmål|fråga|kysymys|pytanie|otázka|kérdés|soru"
    r"|вопрос|питання|问题|問題|质问|質問|提问|질문|سؤال|प्रश्न",
    re.I,
)
REJECTED_WORDS = re.compile(
    r"reject|(non|not|un|dis|less)[_-]?prefer|worse|worst|loser|losing|negative|bad(_|$)|disliked", re.I
)
WRONG_WORDS = re.compile(rf"incorrect|wrong|distractor|{REJECTED_WORDS.pattern}", re.I)
CHOSEN_WORDS = re.compile(r"chosen|prefer|better|best|winner|winning|accepted|positive|good(_|$)|liked", re.I)
# Words of two names that are alike but for them: of the better answer, and of the other.
OPPOSED = (
    *(("win", "lose"), ("accept", "reject"), ("pos", "neg"), ("yw", "yl"), ("y_w", "y_l"), ("right", "wrong")),
    *(("correct", "incorrect"), ("upvoted", "downvoted"), ("selected", "unselected"), ("safe", "unsafe")),
)
NUMBERED = re.compile(r"(.*?)[_ -]?(\d+|(?<=[_ -])[a-k])", re.I)
# What is beside the words of a user in a request, and what holds these.
SETTINGS = re.compile(r"system([_ ]?(prompt|instruction|message)s?)?|instructions|(prompt_)?template|preamble", re.I)
OF_USERS = {"messages", "contents", "input", "inputs", "vars", "variables"}
# Columns about a row, which are neither asked nor answered.
ABOUT_ROWS = re.compile(
    r"^(.*_)?(ids?|idx|index|uuid|guid|model|model_name|source|scores?|ratings?|date|time|datetime|timestamp|url|lang\w*"
    r"|nr|no|num|number|nummer|names?|types?|kinds?|status|user|user_agent|device|browser|platform|ts|at|author|autor|annotator|version|created\w*|updated\w*|datum"
    r"|fecha|tags?|split|origin|project|\w+_by|lead_time|role|object|method|reason|code|max_\w+|tokens|temperature)$",
    re.I,
)
ASSISTANTS = ("assistant", "gpt", "chatgpt", "model")
NOT_TEXT = re.compile(
    r"\W*|[-+]?[\d.,: /T-]+(Z|%|[-+]\d\d:\d\d)?|\w+://\S+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I
)


def likely_pair(columns: Sequence[str], rows: Sequence[dict] = ()) -> tuple[str, str] | None:
    """The two columns that most likely are a question and its answer; None if no two hold text. Columns of a column's
    objects are named as in data.text.
    """
    texts = {n: length for n, length in text_columns(columns, rows).items() if not _is_setting(n, columns, rows)}
    if len(texts) < 2:
        return None
    names = [name for name in texts if not WRONG_WORDS.search(name)]
    if len(names) < 2:
        names = list(texts)
    named = [name for name in names if ANSWER_WORDS.search(name) and not QUESTION_WORDS.search(_last(name))]
    asked = [name for name in names if QUESTION_WORDS.search(_last(name)) and name not in named]
    rest = [name for name in names if name not in asked] or names
    longest = max(reversed(rest), key=lambda name: texts[name])
    if named:
        answer = max(reversed(named), key=lambda name: texts[name])
    else:
        answer = longest
    others = [name for name in names if name != answer]
    question = next((name for name in others if name in asked), None)
    question = question or max(others, key=lambda name: texts[name])
    is_one_of_several = any(_are_alike(answer, name) for name in texts if name not in (question, answer))
    if is_one_of_several or (rows and not texts[question]):
        return None
    return question, answer


def _is_setting(name: str, columns: Sequence[str], rows: Sequence[dict]) -> bool:
    """True for a system prompt or a template beside which the words of users are."""
    beside: object = dict.fromkeys(columns)
    if rows:
        beside = rows[0]
    for key in name.split("."):
        if not isinstance(beside, dict):
            return False
        if SETTINGS.fullmatch(key) and OF_USERS & {str(other).casefold() for other in beside}:
            return True
        beside = beside.get(key)
    return False


def _are_alike(one: str, other: str) -> bool:
    """True for names of which each is one of several answers: answer_0 and answer_1, safe_answer and unsafe_answer."""
    stems = [found[1] for found in map(NUMBERED.fullmatch, (one, other)) if found]
    return (len(stems) == 2 and stems[0] == stems[1]) or _is_opposed(one, other) or _is_opposed(other, one)


def _is_opposed(better: str, worse: str) -> bool:
    """True for two names that differ in a word of OPPOSED alone."""
    one, other = (f"_{re.sub(r'[^a-z0-9]+', '_', name.casefold())}_" for name in (better, worse))
    return any(f"_{good}_" in one and one.replace(f"_{good}_", f"_{bad}_") == other for good, bad in OPPOSED)


def likely_preference(columns: Sequence[str], rows: Sequence[dict] = ()) -> dict[str, str] | None:
    """{field: column} of rows that seem to compare two answers, by the names of their columns; else None."""
    rejected = next((name for name in columns if REJECTED_WORDS.search(name)), None)
    chosen = next((name for name in columns if CHOSEN_WORDS.search(name) and name != rejected), None)
    opposed = next(((a, b) for a in columns for b in columns if _is_opposed(a, b)), None)
    if opposed:
        chosen, rejected = opposed
    if rejected is None or chosen is None or not _hold_answers((chosen, rejected), rows):
        return None
    prompt = next((n for n in columns if QUESTION_WORDS.search(n) and n not in (chosen, rejected)), None)
    return {"chosen": chosen, "rejected": rejected} | ({"prompt": prompt} if prompt else {})


def _hold_answers(names: tuple[str, ...], rows: Sequence[dict]) -> bool:
    return all(isinstance(row.get(name), str | list | dict) for row in rows[:1] for name in names)


def text_columns(columns: Sequence[str], rows: Sequence[dict]) -> dict[str, float]:
    """{column: mean length of its text} of columns that hold text in most of the rows, in order. Without rows and of
    columns whose names say so, length 0.
    """
    found: dict[str, list[str]] = {name: [] for name in columns}
    for row in rows[:ROWS_READ]:
        for name, value in _leaves(row):
            found.setdefault(name, []).append(value)
    named = [name for name in found if is_content(name)]
    if not rows:
        return dict.fromkeys(named if len(named) > 1 else columns, 0.0)
    most = min(len(rows), ROWS_READ) / 2
    texts = {n: [v for v in found[n] if not NOT_TEXT.fullmatch(v.strip())] for n in named}
    full = {n: sum(map(len, values)) / len(values) for n, values in texts.items() if len(values) >= most}
    if len(full) < 2:  # an answer may be a number
        full |= {n: 0.0 for n in named if len(found[n]) >= most and n not in full}
    return {n: full[n] for n in found if n in full}


def is_content(name: str) -> bool:
    """False for a name or path of a column about its row, such as an id, a date, a role or a finishReason."""
    return not ABOUT_ROWS.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _last(name)))


def _leaves(value: object, path: str = "", depth: int = 0):
    """(path, text) of every string and number in a row: of objects by their keys, of lists their only entry."""
    if isinstance(value, dict) and depth < DEEPEST and not _is_map(value):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list) and len(value) == 1 and depth < DEEPEST:
        yield from _leaves(value[0], f"{path}.0", depth + 1)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield path, str(value)


def _are_objects(value: object) -> bool:
    """True for a list of several objects: messages or rows, of which the first alone is no column."""
    return isinstance(value, list) and len(value) > 1 and all(isinstance(entry, dict) for entry in value)


def _is_map(value: dict) -> bool:
    """True for several objects with the same keys: a map from ids, of which no entry is a column."""
    parts = list(value.values())
    if len(parts) < 2 or not all(isinstance(part, dict) and part.keys() == parts[0].keys() for part in parts):
        return False
    are_rows = all(any(words.search(name) for name in parts[0]) for words in (QUESTION_WORDS, ANSWER_WORDS))
    return len(parts) > 2 or are_rows


def lists_of_objects(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, list[dict]]]:
    """(path, list) of every list of several objects in a row, the outermost of nested ones."""
    if isinstance(value, list) and _are_objects(value):
        yield path, value
    elif isinstance(value, dict) and depth < DEEPEST:
        for key, part in value.items():
            yield from lists_of_objects(part, f"{path}.{key}" if path else str(key), depth + 1)


def are_conversation(objects: list[dict]) -> bool:
    """True for messages of which one is an assistant's."""
    return any(str(entry.get("role", entry.get("from"))).casefold() in ASSISTANTS for entry in objects)


def _last(path: str) -> str:
    """The last name in a path."""
    return next((part for part in reversed(path.split(".")) if not part.isdigit()), path)
