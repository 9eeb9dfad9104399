"""Rows to numpy microbatches: padding-free (documents packed into one row) or padded; labels are already shifted."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from finetune.arrays import Named, of_documents
from finetune.data.images.inputs import IMAGES
from finetune.data.sampler import GROUPS_SEARCHED
from finetune.data.tokens.tokenize import ASKED, TokenizedDataset
from finetune.engine import IGNORE_INDEX, Batch, ShowingImages

SHOWING_SEARCHED = 64  # of the shortest documents, for two by which packing is checked

# ------ batches


def microbatches(
    dataset: TokenizedDataset,
    rows: Sequence[int] | np.ndarray,
    layout: str,
    batch_size: int,
    microbatch_tokens: int,
    pad_id: int,
) -> list[Batch]:
    """Microbatches of a step: `rows` in groups of batch_size, each group split at `microbatch_tokens` tokens per batch.

    padding_free: documents packed end to end in one row, padding-free. padded: one document per row, grouped by length.
    A row longer than microbatch_tokens gets a microbatch of its own. A pair's documents stay together; a batch's `rows`
    are then numbers of documents.
    """
    cut = CUTS[layout]
    flat = layout == "padding_free"
    make: Callable[[TokenizedDataset, list[int]], Batch] = _flat if flat else functools.partial(_padded, pad_id=pad_id)
    each = dataset.documents_per_row
    lengths = _row_sizes(dataset, layout)
    rows = [int(row) for row in rows]
    groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    parts = [part for group in groups for part in cut(group, lengths, microbatch_tokens)]
    return [make(dataset, [row * each + k for row in part for k in range(each)]) for part in parts]


def shared_microbatches(
    dataset: TokenizedDataset, groups: Sequence[Sequence[int]], asked: Sequence[int], microbatch_tokens: int
) -> list[Batch]:
    """Flat microbatches of groups of documents that ask the same, each with its prompt once, see share_prompts.

    `asked`: tokens of each group's prompt. A group that has more than `microbatch_tokens` is split, each part with the
    prompt.
    """
    lengths = dataset.lengths
    parts: list[tuple[int, list[int]]] = []
    for group, num_asked in zip(groups, asked, strict=True):
        size = 0
        members: list[int] = []
        for row in group:
            own = int(lengths[row]) - num_asked + 1
            if members and size + own > microbatch_tokens:
                parts.append((size, members))
                members = []
            if not members:
                size = num_asked - 1
            members.append(row)
            size += own
        parts.append((size, members))
    sizes = np.array([size for size, _ in parts])
    packed = _pack(list(range(len(parts))), sizes, microbatch_tokens)
    return [_flat(dataset, [row for part in found for row in parts[part][1]]) for found in packed]


def _row_sizes(dataset: TokenizedDataset, layout: str) -> np.ndarray:
    """Positions that each row takes, alone; of a padded pair twice its longer document."""
    if dataset.documents_per_row == 1 or layout == "padding_free":
        return dataset.row_lengths
    of_rows = dataset.lengths.reshape(-1, dataset.documents_per_row)
    return of_rows.shape[1] * of_rows.max(1)


def largest_microbatch(
    dataset: TokenizedDataset, steps: Iterable, layout: str, batch_size: int, microbatch_tokens: int, pad_id: int
) -> Batch:
    """The microbatch with the most positions, padding included, within the first GROUPS_SEARCHED groups of the run.

    `steps`: the rows of each step.
    """
    found, most = largest_group(_row_sizes(dataset, layout), steps, layout, batch_size, microbatch_tokens)
    return microbatches(dataset, found, layout, len(found), max(microbatch_tokens, most), pad_id)[0]


def largest_group(
    lengths: np.ndarray, steps: Iterable, layout: str, batch_size: int, microbatch_tokens: int
) -> tuple[list[int], int]:
    """(the rows of the largest microbatch, its positions), see largest_microbatch. `lengths`: positions of each row."""
    cut = CUTS[layout]
    most = 0
    found: list[int] = []
    searched = 0
    for rows in steps:
        for start in range(0, len(rows), batch_size):
            group = [int(row) for row in rows[start : start + batch_size]]
            searched += 1
            if layout == "padding_free" and lengths[group].sum() <= most:
                continue
            for part in cut(group, lengths, microbatch_tokens):
                if layout == "padding_free":
                    size = sum(lengths[part])
                else:
                    size = len(part) * max(lengths[part])
                if size > most:
                    most = size
                    found = part
        if searched >= GROUPS_SEARCHED:
            break
    return found, int(most)


def showing_images(dataset: TokenizedDataset, pad_id: int) -> ShowingImages | None:
    """The shortest document with images, and of the next ones that with the most others; None if there is none."""
    if dataset.images is None:
        return None
    counts_D = dataset.arrays[IMAGES].counts_D
    assert counts_D is not None, "images need the number of each document's"
    shows = np.flatnonzero(counts_D)
    if not len(shows):
        return None
    first, *others = shows[np.argsort(dataset.lengths[shows], kind="stable")][:SHOWING_SEARCHED].tolist()
    shown = dataset.images_of(first).tolist()
    others = [i for i in others if dataset.images_of(i).tolist() != shown] or others
    second = max(others, key=lambda i: counts_D[i], default=first)
    is_part = np.isin(dataset.document(first)[0], list(dataset.images.processor.image_ids))
    return ShowingImages(
        packed=_flat(dataset, [first, second]),
        alone=(_padded(dataset, [first], pad_id), _padded(dataset, [second], pad_id)),
        image_token=int(np.flatnonzero(is_part)[-1]),
    )


def _pack(rows: list[int], lengths: np.ndarray, microbatch_tokens: int) -> list[list[int]]:
    """Packs documents by first-fit decreasing, into fewer and fuller microbatches than in the given order."""
    parts: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: -lengths[r]):
        k = next((k for k, left in enumerate(room) if lengths[row] <= left), None)
        if k is None:
            k = len(parts)
            parts.append([])
            room.append(microbatch_tokens)
        parts[k].append(row)
        room[k] -= lengths[row]
    return parts


def _group_by_length(rows: list[int], lengths: np.ndarray, microbatch_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda r: -lengths[r]):
        # Longest first, so the first row of a microbatch is its width.
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= microbatch_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


CUTS = {"padding_free": _pack, "padded": _group_by_length}  # how a group of rows is cut into microbatches


def _labels(ids: np.ndarray, is_target: np.ndarray) -> np.ndarray:
    """Shifted labels: the next token if it is a target, else IGNORE_INDEX; IGNORE_INDEX at the end of the document."""
    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    labels[:-1][is_target[1:]] = ids[1:][is_target[1:]]
    return labels


def _flat(dataset: TokenizedDataset, rows: list[int]) -> Batch:
    documents = [dataset.document(row) for row in rows]
    return Batch(
        rows=tuple(rows),
        arrays=_arrays(dataset, rows, None),
        input_ids_BS=np.concatenate([ids for ids, _ in documents]).astype(np.int64)[None],
        labels_BS=np.concatenate([_labels(*document) for document in documents])[None],
        position_ids_BS=np.concatenate([np.arange(len(ids)) for ids, _ in documents])[None],
        document_ids_BS=np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in documents])[None],
    )


LEAST_SHARED = 0.15


def share_prompts(batch: Batch) -> Batch:
    """A flat batch in which documents that follow one another and ask the same have their prompt once.

    The first has all its tokens; the others begin at the last token of the prompt, at its position, which is the last
    that has no target. The batch itself if less than LEAST_SHARED of its tokens would go: rows of other shapes cost
    attention more.
    """
    documents = batch.document_ids_BS[0]
    starts = np.flatnonzero(np.r_[True, documents[1:] != documents[:-1]])
    ends = np.r_[starts[1:], len(documents)]
    is_target = batch.labels_BS[0] != IGNORE_INDEX
    kept = np.ones(len(documents), bool)
    before: np.ndarray | None = None
    for start, end in zip(starts, ends, strict=True):
        found = np.flatnonzero(is_target[start:end])
        asked = 0
        if len(found):
            asked = int(found[0])  # tokens before the one that predicts the first target
        prompt = batch.input_ids_BS[0, start : start + asked + 1]
        if before is not None and asked and np.array_equal(prompt, before):
            kept[start : start + asked] = False
        before = prompt if asked else None
    dropped = len(kept) - int(kept.sum())
    if not dropped or dropped < LEAST_SHARED * len(kept):
        return batch
    arrays = {name: array.at_positions(np.flatnonzero(kept), 0) for name, array in batch.arrays.items()}
    return replace(
        batch,
        input_ids_BS=batch.input_ids_BS[:, kept],
        labels_BS=batch.labels_BS[:, kept],
        position_ids_BS=batch.position_ids_BS[:, kept],
        document_ids_BS=batch.document_ids_BS[:, kept],
        arrays=arrays,
    )


def _padded(dataset: TokenizedDataset, rows: list[int], pad_id: int) -> Batch:
    documents = [dataset.document(row) for row in rows]
    shape = len(rows), max(len(ids) for ids, _ in documents)
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    position_ids = np.zeros(shape, np.int64)
    document_ids = np.full(shape, -1, np.int64)
    for b, (ids, is_target) in enumerate(documents):
        input_ids[b, : len(ids)] = ids
        labels[b, : len(ids)] = _labels(ids, is_target)
        position_ids[b, : len(ids)] = np.arange(len(ids))
        document_ids[b, : len(ids)] = b
    arrays = _arrays(dataset, rows, shape[1])
    return Batch(input_ids, labels, position_ids, document_ids, rows=tuple(rows), arrays=arrays)


def _arrays(dataset: TokenizedDataset, rows: list[int], width: int | None) -> dict[str, Named]:
    """Arrays of a batch's documents beside their tokens. `width`: of padded rows; None: they are packed."""
    if not dataset.arrays:
        return {}
    lengths = dataset.lengths[rows].tolist()
    found = of_documents(dataset.arrays, rows, dataset.offsets, dataset.documents_per_row)
    if dataset.images is not None:
        found |= dataset.images.inputs(found[IMAGES])
    found.pop(ASKED, None)
    return {name: array.in_rows(lengths, width) for name, array in found.items()}
