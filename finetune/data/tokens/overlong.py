"""Documents longer than --context_length: kept at the end or the start, split into windows, dropped, or an error.
Functions of arrays alone; encode.py cuts conversations at message bounds, which needs their template.
"""

from dataclasses import dataclass, replace

import numpy as np

from finetune.errors import PlanError

# What became of long rows: the counts of a TokenizedDataset, in words.
CUTS = {
    "split": "split into windows",
    "messages_cut": "cut at a message, the oldest left out",
    "prompt_truncated": "truncated at the start of the prompt",
    "answer_truncated": "truncated at the end of the answer",
    "end_truncated": "truncated at their end",
    "dropped_long": "dropped: too long",
    "alike": "with the same tokens in both answers, so that neither is preferred",
}

TOO_LONG = "{source}: has {tokens:,} tokens, --context_length is {length:,}. Raise it, or remove the row."


@dataclass(frozen=True)
class Cut:
    """Treatment of documents over `context_length` tokens. `overlap`: repeated tokens of a window, not learned."""

    context_length: int
    overlong: str = "auto"
    overlap: int = 0

    @classmethod
    def of(cls, given: "Cut | int") -> "Cut":
        """`given` itself, or the default treatment at a context length."""
        if isinstance(given, Cut):
            return given
        return cls(given)

    def of_length(self, context_length: int) -> "Cut":
        """The same treatment at another context length, of which a window repeats at most half."""
        return replace(self, context_length=context_length, overlap=min(self.overlap, context_length // 2))

    def within(self, limit: int | None) -> "Cut":
        """The same treatment, of at most as many tokens as a model takes; None: any number."""
        if limit is None or limit >= self.context_length:
            return self
        return self.of_length(limit)

    def policy(self, is_target: np.ndarray) -> str:
        """auto resolved for a document: text is split, everything else keeps its end."""
        if self.overlong != "auto":
            return self.overlong
        return "split" if is_target[1:].all() else "keep_end"


def cut_document(
    ids: np.ndarray, is_target: np.ndarray, cut: Cut, bos_id: int | None, source: str
) -> tuple[list[tuple], str | None]:
    """([(input ids, is_target)] of at most context_length tokens, name of what became of it or None)."""
    targets = np.flatnonzero(is_target)
    if len(targets):
        end = targets[-1] + 1
    else:
        end = len(ids)
    if end <= cut.context_length or not len(targets):
        return [(ids[:end], is_target[:end])], None
    policy = cut.policy(is_target)
    if policy == "error":
        raise PlanError(TOO_LONG.format(source=source, tokens=end, length=cut.context_length))
    if policy == "drop":
        return [], "dropped_long"
    if policy == "keep_start":
        ids = ids[: cut.context_length]
        is_target = is_target[: cut.context_length]
        if is_target[1:].any():
            return ([(ids, is_target)], "end_truncated")
        return ([], "dropped_long")
    if policy == "split":
        parts = windows(ids[:end], is_target[:end], cut.context_length, cut.overlap, bos_id)
        return [part for part in parts if part[1][1:].any()], "split"
    ids, is_target, name = truncate(ids, is_target, cut.context_length, bos_id)
    return [(ids, is_target)], name


def cut_for_head(ids: np.ndarray, cut: Cut, source: str) -> tuple[np.ndarray, str | None]:
    """(the tokens of a document that a head reads, at most context_length, what became of it or None): its beginning,
    unless --overlong says otherwise; none of one that is left out.
    """
    if len(ids) <= cut.context_length:
        return ids, None
    if cut.overlong == "error":
        raise PlanError(TOO_LONG.format(source=source, tokens=len(ids), length=cut.context_length))
    if cut.overlong == "drop":
        return ids[:0], "dropped_long"
    if cut.overlong == "keep_end":
        return ids[len(ids) - cut.context_length :], "prompt_truncated"
    return ids[: cut.context_length], "end_truncated"


def windows(ids: np.ndarray, is_target: np.ndarray, length: int, overlap: int, bos_id: int | None) -> list[tuple]:
    """[(input ids, is_target)] of at most `length` tokens: every target of the document in exactly one of them.

    Each begins with BOS, if the document does, and `overlap` tokens of the one before that are not learned again. One
    is repeated in any case if there is no BOS to predict the first from.
    """
    head = int(bos_id is not None and ids[0] == bos_id)
    again = max(overlap, 1 - head)
    assert length - head - again >= 1, (length, overlap)
    found = []
    done = head
    while done < len(ids):
        if done > head:
            start = max(head, done - again)
        else:
            start = head
        end = min(start + length - head, len(ids))
        learned = is_target[start:end].copy()
        learned[: done - start] = False
        found.append((np.r_[ids[:head], ids[start:end]], np.r_[is_target[:head], learned]))
        done = end
    return found


def truncate(ids: np.ndarray, is_target: np.ndarray, context_length: int, bos_id: int | None):
    """(input ids, is_target, name of its truncation count or None), truncated to context_length.

    A row that is too long keeps BOS and its last answer and is truncated at the start of the prompt; an answer too long
    by itself is truncated at its end. Tokens after the last target are dropped.
    """
    targets = np.flatnonzero(is_target)
    if len(targets):
        end = targets[-1] + 1
    else:
        end = len(ids)
    ids = ids[:end]
    is_target = is_target[:end]
    if len(ids) <= context_length or not len(targets):
        return ids, is_target, None
    head = 0
    if bos_id is not None:
        head = int(ids[0] == bos_id)
    start = max(last_answer_start(is_target), head)
    room = context_length - head
    if end - start <= room:
        first = end - room
    else:
        first = start
    keep = np.r_[:head, first : first + room]
    return ids[keep], is_target[keep], "prompt_truncated" if end - start <= room else "answer_truncated"


def last_answer_start(is_target: np.ndarray) -> int:
    """Index at which the last contiguous run of targets starts."""
    targets = np.flatnonzero(is_target)
    gaps = np.flatnonzero(np.diff(targets) > 1)
    return int(targets[gaps[-1] + 1] if len(gaps) else targets[0])
