"""A process that tokenizes rows; workers.py starts one per core.

Its first message holds the tokenizer and the settings. Each after it is a batch, [rows, sources]; the answer is a
header in JSON, the tokens (int32) and whether each is a target (one byte).
"""

import json
from collections.abc import Iterator
from typing import Any

from finetune.data.columns import RowOptions, RowReader
from finetune.data.tokens.encode import RowEncoder
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.tokenize import Limits, encode_batch
from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.system.child import serve


def answers(messages: Iterator[list[bytes]]) -> Iterator[tuple[bytes, ...]]:
    start = json.loads(next(messages)[0])
    tokenizer = PlainTokenizer.from_json(start["tokenizer"])
    options = start["options"]
    options = RowOptions(**options | {"ignored": tuple(options["ignored"])})
    reader = RowReader(options, tuple(start["columns"]), start["dataset"])
    limits = Limits(**start["limits"] | {"cut": Cut(**start["limits"]["cut"])})
    with RowEncoder(tokenizer, reader) as encoder:
        for (line,) in messages:
            rows, sources = json.loads(line)
            try:
                yield answer(encode_batch(encoder, rows, sources, limits), reader)
            except PlanError as error:
                yield (json.dumps({"error": str(error)}).encode(),)


def answer(batch: Any, reader: RowReader) -> tuple[bytes, ...]:
    """A batch encoded; its counts are forgotten."""
    said = reader.notices
    notices = {
        "formats": dict(reader.formats),
        "counts": dict(said.counts),
        "first": said.first,
        "examples": said.examples,
    }
    header = json.dumps({"lengths": batch.lengths, "rows": batch.rows, "notices": notices})
    reader.formats.clear()
    reader.notices.clear()
    return header.encode(), batch.tokens.tobytes(), batch.is_target.tobytes()


if __name__ == "__main__":
    serve(answers)
