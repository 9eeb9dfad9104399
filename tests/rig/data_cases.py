"""Mutants of data files of every format, read and tokenized as a run does it."""

import csv
import io
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.config import TrainConfig
from finetune.data.prepare import load_data, read_datasets
from finetune.model_files.files import find_model
from finetune.model_files.tokenizer import load_tokenizer
from finetune.parts.parts import Parts
from tests.rig import mutate
from tests.rig.batch import CANARY, Mutant
from tests.rig.materials import Place

ROWS = [{"prompt": f"{i} plus {i}? ", "completion": f"{2 * i}" + "." * (i % 5)} for i in range(6)]
CHATS = [
    {"messages": [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "yes"}], "id": i}
    for i in range(4)
]
ALPACAS = [{"instruction": f"add {i}", "input": "", "output": str(i)} for i in range(4)]
TEXTS = [{"text": f"the number {i}"} for i in range(5)]


@dataclass
class DataBatch:
    """`make(rng, rows)`: a file of this suffix from rows that are already odd."""

    suffix: str
    make: object
    bytes_too: float = 0.5
    variants: tuple = ()

    def prepare(self, place: Place):
        files = find_model(str(place.model()), None)
        return files, load_tokenizer(files.folder), place.own / CANARY

    def mutant(self, rng: random.Random, context) -> Mutant:
        rows = [dict(row) for row in rng.choice((ROWS, CHATS, ALPACAS, TEXTS))]
        if rng.random() < 0.6:
            rows = mutate.mutated_json(rng, rows, most=2)
        data = self.make(rng, rows)
        if rng.random() < self.bytes_too:
            data = mutate.mutated_bytes(rng, data)
        argv = rng.choice(((), ("skip",), ("samples",), ("split",)))
        return Mutant({f"rows{self.suffix}": data}, argv)

    def check(self, mutant: Mutant, folder: Path, context) -> None:
        files, tokenizer, _ = context
        (name,) = mutant.files
        more = {"skip": dict(skip_bad_rows=3), "samples": dict(dataset_samples=2), "split": dict(validation_split=0.3)}
        more = more[mutant.argv[0]] if mutant.argv else {}
        settings = replace(TrainConfig(), dataset=str(folder / name), context_length=64, model_name="m", **more)
        load_data(Parts(settings).data, read_datasets(Parts(settings).data), tokenizer, files)


# ---- text formats


def make_jsonl(rng, rows) -> bytes:
    rows = rows if isinstance(rows, list) else [rows]
    lines = [mutate.json_text(rng, row) if rng.random() < 0.3 else json.dumps(row).encode() for row in rows]
    return rng.choice((b"\n", b"\r\n", b"\n\n")).join(lines) + b"\n" * rng.randrange(2)


def make_json(rng, rows) -> bytes:
    return mutate.json_text(rng, rng.choice((rows, {"data": rows}, {"train": rows, "test": rows}, [rows])))


def make_csv(rng, rows) -> bytes:
    text = io.StringIO()
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    writer = csv.writer(text, quoting=rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)), lineterminator="\n")
    writer.writerow([str(k) for k in rows[0]] if rows else [])
    writer.writerows([str(v)[:5000] for v in row.values()] for row in rows)
    return text.getvalue().encode(errors="surrogatepass")


def make_txt(rng, rows) -> bytes:
    rows = rows if isinstance(rows, list) else [rows]
    return "\n".join(str(row)[:5000] for row in rows).encode(errors="surrogatepass")


# ---- columns of Arrow


def odd_array(rng, length: int):
    """An Arrow array of a type that no row format has, or of text with nulls."""
    import pyarrow as pa

    texts = [rng.choice(("a", "", None, "é")) for _ in range(length)]
    numbers = [rng.choice((0, 1, -5, None, 2**40)) for _ in range(length)]
    makers = (
        lambda: pa.array(texts),
        lambda: pa.array(texts).dictionary_encode(),
        lambda: pa.array(texts, pa.large_string()),
        lambda: pa.array([t and t.encode() for t in texts], pa.binary()),
        lambda: pa.array(numbers, pa.int64()),
        lambda: pa.array([n and n % 2**20 * 10**12 for n in numbers], pa.int64()).cast(pa.timestamp("s")),
        lambda: pa.array([n and n % 2**20 * 10**12 for n in numbers], pa.int64()).cast(pa.duration("s")),
        lambda: pa.array([n and n % 2**31 for n in numbers], pa.int32()).cast(pa.date32()),
        lambda: pa.array([n and n % 2**20 * 10**12 for n in numbers], pa.int64()).cast(pa.timestamp("ms", "Mars/Base")),
        lambda: pa.array([[t] for t in texts], pa.list_(pa.string())),
        lambda: pa.array([{"role": t, "content": t} for t in texts]),
        lambda: pa.array([[{"role": t, "content": t}] * 2 for t in texts]),
        lambda: pa.array([[("a", t)] for t in texts], pa.map_(pa.string(), pa.string())),
        lambda: pa.nulls(length),
        lambda: pa.array([1.5, float("nan")] * length)[:length],
        lambda: pa.array([True, None] * length)[:length],
        lambda: pa.array([None if n is None else str(n) for n in numbers], pa.string()).cast(pa.large_binary()),
    )
    return rng.choice(makers)()


def table(rng, rows):
    """The rows as an Arrow table, some of its columns replaced, renamed, doubled or given odd metadata."""
    import pyarrow as pa

    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    try:
        found = pa.Table.from_pylist(rows or ROWS)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, RecursionError):
        found = pa.Table.from_pylist(ROWS)
    for at in range(found.num_columns):
        if rng.random() < 0.4:
            name = rng.choice(
                (found.column_names[at], found.column_names[at], rng.choice(("", "text", "a.b", "é" * 90)))
            )
            found = found.set_column(at, name, odd_array(rng, found.num_rows))
    if rng.random() < 0.2 and found.num_columns:
        found = found.append_column(rng.choice(("text", "prompt", "x")), odd_array(rng, found.num_rows))
    if rng.random() < 0.2:
        odd = {b"huggingface": rng.choice((b"{", b"[]", b'{"info": 5}')), b"pandas": b"{", b"\xff": b"\xff"}
        found = found.replace_schema_metadata(odd)
    return found


def make_parquet(rng, rows) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    text, found = io.BytesIO(), table(rng, rows)
    options = dict(compression=rng.choice(("NONE", "SNAPPY", "ZSTD")), row_group_size=rng.choice((1, 3, 100)))
    try:
        pyarrow.parquet.write_table(found, text, use_dictionary=rng.random() < 0.5, **options)
    except (pa.ArrowException, OSError, ValueError):
        text = io.BytesIO()
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), text)
    return text.getvalue()


def make_arrow(rng, rows) -> bytes:
    import pyarrow as pa

    text, found = io.BytesIO(), table(rng, rows)
    opened, rows_per_chunk = rng.choice((pa.ipc.new_file, pa.ipc.new_stream)), rng.choice((1, 2, 100))
    try:
        with opened(text, found.schema) as writer:
            writer.write_table(found, max_chunksize=rows_per_chunk)
    except pa.ArrowException:  # what this format cannot hold
        text, found = io.BytesIO(), pa.Table.from_pylist(ROWS)
        with opened(text, found.schema) as writer:
            writer.write_table(found)
    return text.getvalue()


JSONL = DataBatch(".jsonl", make_jsonl)
JSON = DataBatch(".json", make_json)
CSV = DataBatch(".csv", make_csv, 0.8)
TXT = DataBatch(".txt", make_txt, 0.9)
PARQUET = DataBatch(".parquet", make_parquet)
ARROW = DataBatch(".arrow", make_arrow)
