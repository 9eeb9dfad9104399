"""How long a dataset's rows are, from some of them: what `--context_length auto` is decided by."""

from pathlib import Path

import numpy as np

from finetune.data.chat_template import ensure_chat_template
from finetune.data.columns import RowReader
from finetune.data.prepare import options_of
from finetune.data.reading.mixture import sources_of
from finetune.data.reading.sources import DATASET_ALIASES, read_rows
from finetune.data.tokens.encode import RowEncoder
from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.plan.parts import DataPlan

READ_ROWS, SAMPLE_ROWS = 20_000, 1000  # of each dataset, and evenly spaced ones of these: about a second


def sampled_lengths(plan: DataPlan, model_folder: Path, fetch: bool) -> tuple[int, ...] | None:
    """Tokens of the documents of SAMPLE_ROWS rows of each dataset, uncut. None if it is not on this disk.

    `fetch`: datasets may be downloaded. Raises PlanError for files that cannot be read; a bad row counts for nothing
    here, as it is reported where all rows are read.
    """
    sources = sources_of(plan.dataset)
    if not fetch and not all(is_local(s.name) for s in sources):
        return None
    tokenizer = PlainTokenizer.from_folder(model_folder)
    if tokenizer is None:
        return None
    ensure_chat_template(tokenizer)
    found = []
    for source in sources:
        most = 2 * SAMPLE_ROWS if plan.streaming else READ_ROWS  # a stream is not to be held in memory
        rows = most if plan.dataset_samples < 0 else min(most, plan.dataset_samples)
        raw = read_rows(source.name, rows, 10**9, source.split or "train", "--dataset", plan.text_unit)
        reader = RowReader(options_of(source, plan), raw.columns, f"--dataset {source}")
        with RowEncoder(tokenizer, reader) as encoder:
            every = slice(None, None, max(1, len(raw.rows) // SAMPLE_ROWS))
            for documents in encoder.encode(raw.rows[every], raw.sources[every]):
                if not isinstance(documents, PlanError):
                    found += [int(np.flatnonzero(d.is_target)[-1]) + 1 for d in documents if d.is_target.any()]
    return tuple(found)


def is_local(name: str) -> bool:
    """True for a dataset that is read without a network."""
    return name == "dummy" or name not in DATASET_ALIASES and Path(name).expanduser().exists()
