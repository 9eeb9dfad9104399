"""A process that tokenizes rows; workers.py starts one per core.

Its first line of input holds the tokenizer and the settings. Each line after it is a batch, [rows, sources]; the answer
is a line of JSON, then the tokens (int32) and whether each is a target (one byte).
"""

import json
import os
import signal
import sys

from finetune.data.columns import RowOptions, RowReader
from finetune.data.encode import RowEncoder
from finetune.data.overlong import Cut
from finetune.data.tokenize import Limits, encode_batch
from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's
        signal.signal(number, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    tokenizer = PlainTokenizer.from_json(start["tokenizer"])
    options = start["options"]
    options = RowOptions(**options | {"ignored": tuple(options["ignored"])})
    reader = RowReader(options, tuple(start["columns"]), start["dataset"])
    limits = Limits(**start["limits"] | {"cut": Cut(**start["limits"]["cut"])})
    with RowEncoder(tokenizer, reader) as encoder:
        while line := sys.stdin.buffer.readline():
            rows, sources = json.loads(line)
            try:
                answer(encode_batch(encoder, rows, sources, limits), reader)
            except PlanError as error:
                write(json.dumps({"error": str(error)}).encode() + b"\n")


def answer(batch, reader: RowReader) -> None:
    """Writes what became of a batch, and forgets what was counted of it."""
    notices = {"formats": dict(reader.formats), "counts": dict(reader.notices.counts), "first": reader.notices.first}
    header = {"lengths": batch.lengths, "rows": batch.rows, "notices": notices}
    write(json.dumps(header).encode() + b"\n" + batch.tokens.tobytes() + batch.is_target.tobytes())
    reader.formats.clear()
    reader.notices.clear()


def write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    main()
