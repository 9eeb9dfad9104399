"""Peak memory of a streamed run on a large file against the same run on a small one.

python benchmarks/streaming_memory.py --model_name FOLDER --size_gib 5
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.tokenizing import write_chats  # noqa: E402

ROWS = 50_000


def write_jsonl(file: Path, part: bytes, num_bytes: int) -> None:
    with open(file, "wb") as out:
        while out.tell() < num_bytes:
            out.write(part)


def write_parquet(file: Path, part: bytes, num_bytes: int) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([json.loads(line) for line in part.splitlines()])
    with pyarrow.parquet.ParquetWriter(file, table.schema, compression="none", use_dictionary=False) as writer:
        while not file.exists() or file.stat().st_size < num_bytes:
            writer.write_table(table, row_group_size=len(table))


def peak_mib(dataset: Path, model: str, steps: int) -> tuple[float, float]:
    """(peak resident memory of a run's process in MiB, its wall seconds)."""
    flags = f"--train_type lora --streaming --max_steps {steps} --batch_size 8 --context_length 512 --log_to stdout"
    argv = [sys.executable, "train.py", "--model_name", model, "--dataset", str(dataset), *flags.split()]
    argv += ["--output_dir", str(dataset.parent / f"out-{dataset.name}"), "--save_model", "false", "--backend", "cpu"]
    began = time.perf_counter()
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, out[-2000:]
    return usage.ru_maxrss / 1024, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--size_gib", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_chats(Path(folder, "part.jsonl"), ROWS)
        part = Path(folder, "part.jsonl").read_bytes()
        small = Path(folder, "small.jsonl")
        small.write_bytes(b"\n".join(part.splitlines()[:1500]) + b"\n")
        found["small jsonl"] = peak_mib(small, args.model_name, args.steps)
        for name, write in (("jsonl", write_jsonl), ("parquet", write_parquet)):
            file = Path(folder, f"large.{name}")
            write(file, part, int(args.size_gib * 2**30))
            size = file.stat().st_size / 2**30
            found[f"{name} of {size:.2f} GiB"] = peak_mib(file, args.model_name, args.steps)
            file.unlink()
    base = found["small jsonl"][0]
    for name, (peak, seconds) in found.items():
        print(f"{name}: peak {peak:,.0f} MiB, {peak - base:+,.0f} MiB against the small file, {seconds:.0f} s")


if __name__ == "__main__":
    main()
