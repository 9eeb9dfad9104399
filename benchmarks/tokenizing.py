"""Tokenizing chats against datasets' map on the same cores, and a second start against the first.

python benchmarks/tokenizing.py --model_name FOLDER --rows 50000
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by".split()


def write_chats(file: Path, rows: int) -> None:
    """Chats of 1 to 5 exchanges, about 1.2 KB each."""
    rng = random.Random(0)

    def text(low, high):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    with open(file, "w", encoding="utf-8") as out:
        for _ in range(rows):
            messages = [{"role": "system", "content": "Be brief."}]
            for _ in range(rng.randint(1, 5)):
                messages.append({"role": "user", "content": text(10, 50)})
                messages.append({"role": "assistant", "content": text(20, 80)})
            out.write(json.dumps({"messages": messages}) + "\n")


def cpu_s() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def ours(file: Path, tokenizer) -> dict:
    """Wall and CPU seconds of a start: rows read, rendered, tokenized, their targets marked; and the tokens."""
    from finetune.config import TrainConfig
    from finetune.data.prepare import read_source, tokenized_once
    from finetune.data.reading.mixture import Source
    from finetune.data.tokens.overlong import Cut
    from finetune.data.tokens.tokenize import Limits

    wall, cpu = time.perf_counter(), cpu_s()
    read = read_source(Source(str(file)), TrainConfig(), -1, "train", "--dataset")
    found = tokenized_once(read, tokenizer, Limits(Cut(4096)))
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu, "tokens": found.counts["tokens"]}


def theirs(file: Path, tokenizer, cores: int) -> dict:
    """The same through datasets: load, then map with apply_chat_template. It marks no targets."""
    import datasets

    datasets.disable_caching()
    wall, cpu = time.perf_counter(), cpu_s()
    rows = datasets.load_dataset(
        "json", data_files=str(file), split="train", cache_dir=tempfile.mkdtemp(dir=file.parent)
    )
    done = rows.map(
        lambda batch: {"input_ids": tokenizer.apply_chat_template(batch["messages"], return_dict=False)},
        batched=True,
        num_proc=cores,
        remove_columns=rows.column_names,
    )
    tokens = sum(map(len, done["input_ids"]))
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name", required=True)
    parser.add_argument("--rows", type=int, default=50_000)
    args = parser.parse_args()
    from finetune.data.tokens.workers import num_cores
    from finetune.model_files.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(args.model_name))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        file = Path(folder) / "chats.jsonl"
        write_chats(file, args.rows)
        time.sleep(2.5)  # a file's digest is remembered once its time of change is past
        first, second, third = (ours(file, tokenizer) for _ in range(3))
        peer = theirs(file, tokenizer, num_cores())
    figures = {
        "rows": args.rows,
        "cores": num_cores(),
        "first": first,
        "second": second,
        "third": third,
        "datasets_map": peer,
        "tokens_per_s_ratio": (first["tokens"] / first["wall_s"]) / (peer["tokens"] / peer["wall_s"]),
        "second_of_first": second["wall_s"] / first["wall_s"],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
