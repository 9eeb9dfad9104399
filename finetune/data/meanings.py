"""The meanings of names that no format reads: of columns, and of fields of messages, parts and calls.

One judgement for every level. A field without a reader is a line, as bookkeeping is; if it says what is learned or
whether at all, its row is refused. Names are judged by their words, however a program joins them.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from finetune.data.images.references import is_encoded_image, looks_like_image
from finetune.data.likely_columns import is_content
from finetune.parts.objectives import CLASSIFY

SYSTEM = (
    *("system", "system_prompt", "systemprompt", "system_message"),
    *("systeminstruction", "system_instruction", "system_instructions"),
)
ANOTHER_ANSWER = "is another answer"
EXPLAINS = "explains the answer"
THINKS = "may say whether the answer thinks"
CALLS = "holds what the assistant calls"
EARLIER = "holds earlier turns"
LISTS_TOOLS = "lists the tools of a conversation"
NOT_TEXT = "is not text, which is all this learns"
OF_TURNS = "may say which turns are learned"
WEIGHS = "weighs the rows"
IN_CONVERSATION = "makes a conversation of several rows"
# Columns that no row may have unused: what they say about it.
MEANS = {
    "label": f"may say which rows are wrong, be the answer (--columns completion=label) or a class (--task {CLASSIFY})",
    **dict.fromkeys(("weight", "weights"), WEIGHS),
    **dict.fromkeys(("rating", "ratings", "score", "scores", "reward", "rewards"), "rates the answers"),
    **dict.fromkeys(("vote", "votes", "stars", "quality", "csat", "nps"), "rates the answers"),
    **dict.fromkeys(("tools", "functions"), LISTS_TOOLS),
    **dict.fromkeys(("tool_calls", "function_call"), CALLS),
    **dict.fromkeys((*SYSTEM, "preamble"), "is the system prompt"),
    "history": EARLIER,
    **dict.fromkeys(("is_correct", "correct", "is_accepted", "accepted"), "may say which rows are wrong"),
    **dict.fromkeys(("choices", "options"), "lists the choices of a question"),
    **dict.fromkeys(("passage", "article"), "is what a question is about"),
    **dict.fromkeys(("ground_truth", "ground_truths", "reference", "references"), ANOTHER_ANSWER),
    **dict.fromkeys(("gold", "expected", "target", "targets", "corrected", "correction"), ANOTHER_ANSWER),
    **dict.fromkeys(("alternative", "alternatives"), ANOTHER_ANSWER),
    **dict.fromkeys(("winner", "preferred", "preference"), "may say which answer is better"),
    **dict.fromkeys(("mask", "masked"), OF_TURNS),  # NeMo's names the roles that are not
    **dict.fromkeys(("rationale", "explanation"), EXPLAINS),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking", "chain_of_thought", "cot"), EXPLAINS),
    **dict.fromkeys(("thought", "thoughts", "think", "reasoning_details", "tool_plan"), EXPLAINS),
    **dict.fromkeys(("split", "fold"), "may say which rows are for tests"),
    "message_tree_id": IN_CONVERSATION,
    "kto_tag": "says which answers are wanted",
    "chat_template_kwargs": "changes how the template renders the row",
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), NOT_TEXT),
}
MEANS_LIKE = (
    (
        re.compile(
            r"(human|expert|gold|true|judge|llm|annotator|reviewer|user|feedback|quality|overall)"
            r"_(label|rating|score|verdict|grade|feedback)"
            r"|grades?|verdict|judge?ment|feedback|(.*_)?(in)?correct(ness)?(_.*)?|is_(wrong|good|bad|valid|invalid)|thumbs?(_?(up|down))?"
            r"|(up|down)_?votes?|.+\.responses"  # .responses: of Argilla's annotators
        ),
        "may say which answers are wrong",
    ),
    (re.compile(r"(.*_)?(reasoning|thinking)(_(trace|steps?|text|process|blocks?|parts?))?"), EXPLAINS),
    (re.compile(r"parent(_(message|turn|comment|post))?_(id|uuid)|(in_)?reply_to(_id)?"), IN_CONVERSATION),
    (
        re.compile(
            r"(better|best|preferred|winning)_((response|answer|output|completion|choice)_)?(id|idx|index|response|answer)"
            r"|(overall|human|pairwise|annotator)_preference"
        ),
        "may say which answer is better",
    ),
    (
        re.compile(
            r"(available|given|agent|api)_(tools|functions)|(tool|function|api)_(definition|schema|spec|list)s?|apis"
        ),
        LISTS_TOOLS,
    ),
    (re.compile(r"(.*_)?(tool|function)_calls?"), CALLS),
    (re.compile(r"(tool|function)_(result|output|response)s?|observations?"), "holds what tools gave"),
    (re.compile(r"(turn|assistant|loss|response|label|train)_masks?|(loss|train|mask)_(span|range|turn)s?"), OF_TURNS),
    (re.compile(r"(image|audio|video)_(url|path|file|data|bytes|base64)s?|(inline|file)_data"), NOT_TEXT),
    (re.compile(r"(loss|sample|row|example|instance|importance)_weights?"), WEIGHS),
    (re.compile(r"(loss|completion|assistant|answer|response|target)_masks?"), "may say which tokens are learned"),
    (
        re.compile(
            r"(chat|conversation|dialog|dialogue|message|previous|past|prior|earlier)_(history|turns?|messages|context)"
        ),
        EARLIER,
    ),
    (re.compile(r"(.*_)?attachments?|files|file_ids"), "holds what was attached"),
    (
        re.compile(
            r"(superseded|replaced|retracted|withdrawn|rejected|deleted|discarded)_(by|at|on|date|reason|because)"
        ),
        "may say which rows are not wanted",
    ),
    (re.compile(r"rejected_(response|message|answer|output|completion|text)s?"), "holds an answer that was rejected"),
)
LOW = ("low", "very low", "poor", "bad", "very bad", "terrible", "f", "0")
# Columns of which some values say that a row is not wanted.
UNWANTED = {
    re.compile(r"(is_)?(flagged|deleted|discarded|hidden|toxic|harmful|unsafe|nsfw|spam|tie)"): ("true", "yes", "1"),
    re.compile(r"(is_|was_)?(cancell?ed|skipped|rejected|ignored|excluded|removed)"): ("true", "yes", "1"),
    re.compile(r"(is_)?(approved|verified|validated|usable|keep|include|train(ing|able)?|learn(able)?|loss|used?)"): (
        *("false", "no", "0"),
    ),
    re.compile(
        r"((is|was)_)?((response|answer|completion|output|prompt|content|text)(_?\d+)?_)?"
        r"(safe|harmless|acceptable|appropriate|allowed|compliant|factual|faithful|grounded)"
    ): ("false", "no", "0", "unsafe"),
    re.compile(r"(is_|was_)?(resolved|success(ful)?|succeeded|passed|solved)|(test_)?pass_rate"): (
        *("false", "no", "0", "0.0", "fail", "failed"),
    ),
    re.compile(r"(is_|has_)?(error|failure)"): ("true", "yes", "1"),
    re.compile(r"(log_)?level"): ("error", "critical", "fatal"),
    re.compile(r"(review_|annotation_|exit_)?(status|state|decision|outcome)"): (
        *("rejected", "declined", "discarded", "deleted", "flagged", "failed", "wrong", "incorrect", "bad", "spam"),
        *("fail", "failure", "error", "unresolved", "timeout", "timed_out", "cancelled", "canceled", "aborted"),
        *("draft", "pending", "skipped", "todo", "incomplete", "in_progress"),
    ),
    # an answer that was cut, as programs name the reason of its end
    re.compile(r"finish|(finish|stop|end|done)_?reasons?"): (
        *("length", "max_tokens", "max_output_tokens", "max_new_tokens", "model_context_window_exceeded"),
        *("content_filter", "safety", "recitation", "error", "abort", "cancelled", "timeout", "refusal", "pause_turn"),
        *("blocklist", "prohibited_content", "spii", "malformed_function_call", "unexpected_tool_call", "language"),
        *("model_length", "maxpredictedtokensreached", "userstopped", "failed", "load"),
    ),
    re.compile(r"(is_|has_)?label_(issue|error)s?"): ("true", "yes", "1"),
    re.compile(r"(is_|was_)?(truncated|incomplete|interrupted|aborted|cut_off|timed_out)"): ("true", "yes", "1"),
    re.compile(r"(has_|is_)?hallucinat(ion|ions|ed)"): ("true", "yes", "1"),
    re.compile(r"(data(set)?_)?(partition|subset|set|stage|purpose|phase|part)|usage|used?_for|tvt"): (
        *("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation", "heldout", "held_out"),
        *("holdout", "hold_out", "held-out", "hold-out"),
    ),
    re.compile(r"(.*_)?quality_(flag|label|level|tier|class|grade)"): LOW,
    re.compile(r"(is_)?(test|val|validation|eval|held_?out)"): ("true", "yes", "1"),
    re.compile(r"acc(uracy)?|f1|exact_match|em"): ("0", "0.0"),
}
# Ratings within an object, where many data sets keep some of each row, that say the same.
RATED_LOW = {re.compile(r"(.*_)?(quality|rating|grade)"): LOW, re.compile(r"score|reward"): ("0", "0.0")}
TRUNCATED_CELLS = "truncated_cells"  # the fields of a row that the Hub's viewer has cut
# Columns beside a question or a conversation that may be a part of it, by whatever name.
PART_OF_PROMPT = re.compile(
    r"((retrieved|context|source|reference|supporting|input)_)?(documents?|docs|passages?|chunks?|contexts?|texts?)"
    r"|background|knowledge|evidence|excerpt|((db|sql|table|database)_)?(schema|context)|create_(statement|table)"
    r"|code(_before)?|error_message|hints?|constraints?|persona|few_?shot(_examples)?|instructions?|developer(_message)?"
    r"|prefix|suffix|retrieved|task_definition"
)
# A turn's fields by which programs say that it is learned, or how much, and those by which they say that it is not.
LEARNED_BY = {"loss_scale", "loss_weight", "with_loss", "output_with_loss", "compute_loss", "in_loss", "do_train"}
LEARNED_BY |= {"trained", "train_on", "train_on_turn", "need_train", "need_train_in_this_round", "supervised"}
LEFT_OUT_BY = {"is_masked", "loss_masked", "mask_loss", "no_loss", "ignore_loss", "skip_loss", "disable_loss"}
LEFT_OUT_BY |= {"exclude_from_loss", "ignore_in_training", "not_trained", "is_not_trained", "not_trainable"}
# Columns of a row that say it of its turns.
OF_WEIGHTS = re.compile(r"(turn|message)_(loss(es)?|weights?)")
TURNS_LEFT_OUT = re.compile(
    r"(train(able|ed)?|learn(able|ed)?|masked|skip(ped)?|ignored?|excluded?|bad|good)_(turn|message)s"
    r"|(last|final)_turn_only|only_(last|final)_turn"
)
OF_ORIGIN = {"original", "raw", "seed", "source", "initial"}  # words of names of what a text was made from
# Words of names whose text is an answer's thoughts.
OF_THOUGHTS = {"reasoning", "thinking", "thought", "thoughts", "rationale", "cot", "scratchpad", "monologue"}
# Last words of names that say of a row that it is not wanted where they are true, or where they are false.
BAD = {
    *("flagged", "deleted", "discarded", "hidden", "toxic", "harmful", "unsafe", "nsfw", "spam", "blocked", "failed"),
    *("exclude", "excluded", "quarantined", "banned", "revoked", "corrupted", "broken", "contaminated", "superseded"),
    *("invalid", "truncated", "incomplete", "aborted", "cancelled", "swapped", "hallucinated"),
    *("wrong", "bad", "mistake", "mistaken", "negative", "skip", "ignore", "reject", "rejected", "unhelpful"),
    *("disliked", "withdrawn", "retracted", "outdated", "deprecated", "obsolete", "downvoted", "dislike", "hate"),
    *("draft", "disabled"),
    *("leaked", "unusable", "undesired", "unwanted"),
}
GOOD = {
    *("approved", "usable", "safe", "resolved", "success", "successful", "passed", "solved", "complete", "completed"),
    *("valid", "ok", "consent", "wins", "finished", "done", "reliable", "trusted", "accurate", "learn"),
    *("pass", "helpful", "useful", "liked", "good", "right", "accept", "accepted", "chosen", "wanted", "desired"),
    *("training", "enabled", "active", "published"),
}
NOT_TO_LEARN = re.compile(r"(do_not|dont|never)_.*|no_(train|training|learn)|opt(ed)?_out")
# Words of names that say what a text is or has, who wrote it and where, and nothing of whether it is wanted.
OF_CONTENT = {"has", "have", "had", "contains", "includes", "uses", "requires", "multi", "multiturn", "redacted"}
OF_CONTENT |= {"synthetic", "generated", "autogenerated", "translated", "translation", "paraphrase", "anonymized"}
OF_CONTENT |= {"stream", "streaming", "streamed", "cached", "formatting", "code", "math", "tool", "tools", "image"}
OF_CONTENT |= {"system", "public", "private", "human", "machine", "language", "english", "long", "short", "first"}
OF_CONTENT |= {"last", "new", "search", "web", "reasoning", "thinking", "parallel", "duplicate", "original"}
OF_CONTENT |= {"augmented", "custom", "classification", "question", "answerable", "impossible", "adversarial"}
OF_CONTENT |= {"natured", "jailbreak", "roleplay", "creative", "fiction", "dialogue", "followup", "numeric", "negated"}
OF_CONTENT |= {"easy", "hard", "difficult", "complex", "voice", "video", "quote", "reply", "retweet", "self", "fork"}
OF_CONTENT |= {"vendor", "vendored", "purchase", "anony", "anonymous", "over", "locked", "pinned", "stickied"}
OF_CONTENT |= {"spoiler", "mobile", "weekend", "male", "female"}
VERDICTS = (
    *("incorrect", "rejected", "failed", "fail", "wrong", "discarded", "disapproved", "invalid", "declined"),
    *("reject", "delete", "remove", "exclude", "retracted", "withdrawn", "unusable"),
)
# Shares and scores from 0 to 1 of what no row should have.
OF_HARM = re.compile(
    r"(severe_)?(toxic(ity)?|hate|nsfw|spam|harm(ful)?|unsafe|profanity|violence)(_(score|prob(ability)?))?"
)
OF_TOPICS = {"category", "topic", "class", "intent", "tag", "name", "title", "subject", "type", "kind", "label"}
OF_TOPICS |= {"sentiment", "language", "source", "model"}
# Those from 400 to 599 are of errors.
STATUS_CODE = re.compile(r"((http|response|api|error)_)?(status_code|status|code)")
SWITCHES = ("on", "off", "true", "false", "yes", "no")
NO_FAILURE = ("", "none", "null", "false", "no", "0", "nan", "n/a", "ok", "success")
OF_CONVERSATIONS = (*SYSTEM, "preamble", "tools", "functions")
WHAT_FAILED = re.compile(r"(error|exception|failure|traceback)s?")  # which are no numbers
# Names under which a turn, a part or a call holds what is said, beside the one that is read.
SAID = (
    *("text", "value", "content", "contents", "parts", "blocks", "message", "body", "transcript", "refusal"),
    *("output", "result", "results", "response", "answer", "completion", "translation", "code", "action"),
    *("actions", "steps", "intermediate_steps"),
)
# Words of names of columns and fields that hold an image, where their value is one.
OF_IMAGES = re.compile(r"(image|img|picture|photo|screenshot)s?\d*")
# A letter of a script that puts spaces between words.
SPACED = re.compile(r"(?![\u0e00-\u0fff\u3000-\U0010ffff])[^\W_]")
OF_NUMBER = re.compile(r"\d[.,]\d")
WORDS = 4  # of a text that is no name, title or date
DEEPEST = 4


def texts_in(value: Any, leaves: bool = False) -> Iterator[str]:
    """The texts in a value, of lists and objects too. `leaves`: without those that are about it, such as its name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part, leaves)
    elif isinstance(value, dict):
        for key, part in value.items():
            if not leaves or is_content(plain_name(key)):
                yield from texts_in(part, leaves)


@lru_cache(4096)
def plain_name(name: str) -> str:
    """The words of a name in small letters, joined by _: of isCorrect, is-correct and Is Correct alike."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", str(name).strip())
    return re.sub(r"[\s_-]+", "_", words).strip("_").casefold()


def is_nothing(value: Any) -> bool:
    """True for a value that says nothing. False and 0 may."""
    return value is None or (isinstance(value, str | list | dict) and not value)


@lru_cache(4096)
def meaning_of(name: str) -> str | None:
    """The meaning of a column for its row, by its plain name, if that may not be left out."""
    return MEANS.get(name) or next((meaning for like, meaning in MEANS_LIKE if like.fullmatch(name)), None)


def is_of_all_rows(name: str, value: Any) -> bool:
    """True for what a file says beside its rows that may be a part of each: a system prompt, tools or a context."""
    plain = plain_name(name)
    is_part = plain in OF_CONVERSATIONS
    if isinstance(value, str | list):  # an object is one about them, as pandas' schema
        is_part = is_part or PART_OF_PROMPT.fullmatch(plain) is not None
    return is_part and any(texts_in(value))


def holds_image(name: str, value: Any) -> bool:
    """True for what holds an image, by its plain name: bytes, base64 or a data: URI under any, and under a name with a
    word for images a path too.
    """
    parts = value if isinstance(value, list) else [value]
    inner = [part.get("bytes") for part in parts if isinstance(part, dict)]
    if any(map(is_encoded_image, [*parts, *inner])):
        return True
    return any(map(OF_IMAGES.fullmatch, name.split("_"))) and looks_like_image(value)


def meaning_in(name: str, value: Any, what: str, said: Callable[[], str] = str) -> str | None:
    """The meaning of a field for its row, turn or part (`what`) by its name and value, if that may not be left out.
    `said`: gives what is read of it, which may have the same thoughts.
    """
    if is_nothing(value):
        return None
    plain = plain_name(name)
    if is_unwanted(plain, value):
        return f"is {json.dumps(value, default=str)[:40]}, which may say that the {what} is not wanted"
    meaning = meaning_of(plain)
    if plain == "labels" and isinstance(value, bool | int):  # of one answer, or of the better one
        meaning = MEANS["label"]
    words = {*plain.split("_"), *re.split(r"[\s_-]+", name.casefold())}  # CoT is one word too
    if what == "row" and _leaves_turns_out(plain, value):
        meaning = OF_TURNS
    if meaning is None and holds_image(plain, value):
        meaning = NOT_TEXT
    if meaning is None and OF_THOUGHTS & words and is_content(plain) and any(" " in text for text in texts_in(value)):
        meaning = EXPLAINS
    if (meaning == WEIGHS and value in (1, "1", "1.0")) or (meaning == CALLS and isinstance(value, bool | int | float)):
        meaning = None  # whether there may be several, or how many there are
    if meaning == EXPLAINS:
        meaning = _meaning_of_thoughts(value, said)
    return meaning or _meaning_within(value, what)


def is_left_out(name: str, value: Any) -> bool:
    """True for a field of an assistant's turn, by its plain name, whose value says that the turn is not learned, or how
    much of it.
    """
    word = str(value).strip().casefold()
    if name in LEFT_OUT_BY:
        return word in ("true", "yes", "1", "1.0")
    if name not in LEARNED_BY:
        return False
    says_so = word in ("true", "yes", "1", "1.0", "none", "")
    return not says_so if name.endswith(("scale", "weight")) else word in ("false", "no", "0", "0.0")


def _leaves_turns_out(name: str, value: Any) -> bool:
    """True for a row's column, by its plain name, that says which of its turns are learned; numbers may be counts."""
    if OF_WEIGHTS.fullmatch(name):
        return isinstance(value, list) and any(part != 1 for part in value)
    if not TURNS_LEFT_OUT.fullmatch(name):
        return False
    return value is True or isinstance(value, list) or str(value).strip().casefold() == "true"


def _meaning_of_thoughts(value: Any, said: Callable[[], str]) -> str | None:
    """The meaning of thoughts, unless they are said too; of a switch, and of none, such as their number."""
    if str(value).strip().casefold() in SWITCHES:
        return THINKS
    texts = list(texts_in(value))
    if not texts or are_said(texts, said()):
        return None
    return EXPLAINS


def _meaning_within(value: Any, what: str, depth: int = 0) -> str | None:
    """The meaning of a key within objects and lists: that the row is not wanted, or a call."""
    if not isinstance(value, dict | list) or depth == DEEPEST:
        return None
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        plain = plain_name(key) if isinstance(key, str) else ""
        is_low = any(like.fullmatch(plain) and str(part).casefold() in low for like, low in RATED_LOW.items())
        if plain and not is_nothing(part) and (is_low or is_unwanted(plain, part)):
            return f"says that {key} is {json.dumps(part, default=str)[:40]}: the {what} may be not wanted"
        if plain == "label" and part is False:  # of segments, as Axolotl has them
            return f"has {key} false, which {OF_TURNS}"
        if MEANS.get(plain) == CALLS and isinstance(part, dict | list) and part:
            return f"has {key}, which {CALLS}"
        if found := _meaning_within(part, what, depth + 1):
            return found
    return None


def text_beside(name: str, value: Any, said: str) -> str | None:
    """The meaning of a field that holds a text which `said` does not have: under a name of SAID any, under another one
    that is longer than a name.
    """
    plain = plain_name(name)
    if plain in SAID or PART_OF_PROMPT.fullmatch(plain):
        texts = list(texts_in(value, leaves=True))
    elif not is_content(plain) or OF_ORIGIN & set(plain.split("_")):
        return None
    else:
        listed = value if isinstance(value, list) else [value]
        texts = [text for text in listed if isinstance(text, str) and len(text.split()) >= WORDS]
    if are_said(texts, said):
        return None
    return "holds a text that its content does not have"


def are_said(texts: Iterable[str], said: str) -> bool:
    """True if `said` has each of the texts as whole words, whatever the spaces in them are."""
    return all(has_words(said, text) for text in texts)


def has_words(said: str, text: str) -> bool:
    """True if a text is in `said`, and does not begin or end within a word or a number: 14 has no 4."""
    words = text.split()
    if len(words) >= WORDS:
        return "".join(words) in "".join(said.split())
    if not words:
        return True
    wanted = " ".join(words)
    whole = " ".join(said.split())
    at = whole.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if not (_is_within_word(whole, at) or _is_within_word(whole, end)):
            return True
        at = whole.find(wanted, at + 1)
    return False


def _is_within_word(text: str, at: int) -> bool:
    """True if a place in a text has a word's letters on both sides, or the digits of one number around it."""
    around = text[max(0, at - 1) : at + 1]
    if len(around) == 2 and at and all(map(SPACED.match, around)):
        return True
    return any(OF_NUMBER.fullmatch(text[max(0, start) : start + 3]) for start in (at - 2, at - 1) if start >= 0)


@lru_cache(4096)
def _bad_values(name: str) -> frozenset[str]:
    return frozenset(word for like, bad in UNWANTED.items() if like.fullmatch(name) for word in bad)


def switch_of(name: str, value: Any) -> bool | None:
    """The value of a column that says yes or no, by its plain name; None for any other, and for what a text has."""
    if OF_CONTENT & set(name.split("_")):
        return None
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().casefold())
    if isinstance(value, bool) or (value in (0, 1) and name.startswith(("is_", "was_")) and isinstance(value, int)):
        return bool(value)
    return None


def is_unwanted(name: str, value: Any) -> bool:
    """True for a column, by its plain name, whose value says that its row is not wanted."""
    if name == TRUNCATED_CELLS:
        return value not in (None, [], "", "[]")
    if WHAT_FAILED.fullmatch(name) and not isinstance(value, bool | int | float):
        words = str(value).strip().casefold()
        return not is_nothing(value) and words not in NO_FAILURE and any(map(str.isalpha, words))
    if isinstance(value, list):
        return any(isinstance(part, str) and is_unwanted(name, part) for part in value)
    if type(value) is int and 400 <= value < 600 and STATUS_CODE.fullmatch(name):
        return True
    if isinstance(value, float) and 0.5 < value <= 1 and OF_HARM.fullmatch(name):
        return True
    said = str(value).strip().casefold()
    last = name.rpartition("_")[2]
    if said in ("true", "yes") and name.startswith(("is_", "was_")) and BAD & set(name.split("_")):
        return True
    if isinstance(value, str) and said in VERDICTS and last not in OF_TOPICS:
        return True
    if said in ("true", "yes") and (last in BAD or NOT_TO_LEARN.fullmatch(name)):
        return True
    if said in ("1", "x") and (name in BAD or NOT_TO_LEARN.fullmatch(name)):  # others may be numbers of what they name
        return True
    return said in _bad_values(name) or (said in ("false", "no") and last in GOOD) or (said == "0" and name in GOOD)
