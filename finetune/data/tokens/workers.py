"""Tokenizing on all cores: batches of rows go to processes that hold a copy of the tokenizer, and come back in order.

The processes import no framework (tokenize_process.py); each renders chat templates in a limited child of its own.
"""

import json
import os
import queue
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from finetune.data.columns import RowOptions
from finetune.data.reading.rows import RawDataset
from finetune.data.tokens.tokenize import Builder, EncodedBatch, Limits, TokenizedDataset, reader_of
from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.model_files.tokenizer import Tokenizer
from finetune.system.child import Child, ChildEnded
from finetune.system.threads import Pool

BATCH_ROWS = 256
SAY_EVERY_S = 5.0
MODULE = "finetune.data.tokens.tokenize_process"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode(child: Child, rows: list[dict], sources: list[str]) -> tuple[EncodedBatch, dict]:
    """(tokenized rows, notices about them), from a child that tokenizes. Raises PlanError."""
    line = json.dumps([rows, sources], default=lambda value: {"type": type(value).__name__})
    try:
        header, *arrays = child.request(line.encode())
    except ChildEnded as ended:
        raise PlanError(
            f"{sources[0]}: the process that tokenizes this row and those after it ended ({ended}). Free memory, or "
            "use a tokenizer you trust."
        ) from None
    header = json.loads(header)
    if "error" in header:
        raise PlanError(header["error"])
    tokens = np.frombuffer(arrays[0], np.int32)
    is_target = np.frombuffer(arrays[1], bool)
    return EncodedBatch(tokens, is_target, header["lengths"], header["rows"]), header["notices"]


def tokenize_on_cores(
    raw: RawDataset,
    options: RowOptions,
    tokenizer: Tokenizer,
    limits: Limits,
    say: Callable[[str], object] = lambda line: None,
    cores: int | None = None,
) -> TokenizedDataset:
    """The result of tokenize(), with a process per core. `say` is called with a line of progress every few seconds."""
    reader = reader_of(raw, options, tokenizer)
    builder = Builder(raw.description, raw.skipped, raw.skip_bad_rows)
    start = start_message(raw, RowOptions.of(options), tokenizer, limits)
    workers = [Child(MODULE, start, environment=ENVIRONMENT) for _ in range(cores or num_cores())]
    idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def encoded(first: int):
        worker = idle.get()
        try:
            return encode(worker, raw.rows[first : first + BATCH_ROWS], raw.sources[first : first + BATCH_ROWS])
        finally:
            idle.put(worker)

    began = said = time.monotonic()
    try:
        with Pool(len(workers)) as pool:
            firsts = range(0, len(raw.rows), BATCH_ROWS)
            for first, (batch, notices) in zip(firsts, pool.map(encoded, firsts), strict=True):
                builder.add(batch, raw.sources[first : first + BATCH_ROWS])
                reader.formats.update(notices["formats"])
                reader.notices.update(notices["counts"], notices["first"], notices["examples"])
                if time.monotonic() - said > SAY_EVERY_S:
                    said = time.monotonic()
                    done = min(first + BATCH_ROWS, len(raw.rows))
                    say(progress_line(done, len(raw.rows), said - began))
    finally:
        for worker in workers:
            worker.close()
    return builder.finished(reader, tokenizer, len(raw.rows))


def start_message(raw: RawDataset, options: RowOptions, tokenizer: Tokenizer, limits: Limits) -> bytes:
    """The first message to a worker."""
    return json.dumps(
        {
            "tokenizer": PlainTokenizer.described(tokenizer),
            "options": asdict(options),
            "columns": list(raw.columns),
            "dataset": raw.description,
            "limits": asdict(limits),
        }
    ).encode()


def progress_line(done: int, total: int, seconds: float) -> str:
    rate = done / max(seconds, 1e-9)
    return f"tokenizing: {done:,} of {total:,} rows, {rate:,.0f} rows/s, {(total - done) / rate:,.0f} s left"
