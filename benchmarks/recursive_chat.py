"""Is the first chat quick and right? The example script, training and answers, with exact matches and memory.

python benchmarks/recursive_chat.py [--folder DIR] [key=value ...]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from finetune.data.pretraining.chat_tokens import read_conversations  # noqa: E402
from finetune.run.metrics import read_events  # noqa: E402


def train(folder: Path, overrides: list[str]) -> float:
    """Seconds from nothing to a checkpoint."""
    began = time.perf_counter()
    subprocess.run([ROOT / "examples/prepare_example_chat_dataset.sh"], check=True)
    command = [sys.executable, "pretrain.py", "--config-name", "cfg_chat_recursive", "overwrite=true"]
    command += ["data_paths=[data/example-chat-dataset]", f"checkpoint_path={folder}", "log_every_n_steps=100"]
    subprocess.run([*command, *overrides], check=True, cwd=ROOT)
    return time.perf_counter() - began


def exact(checkpoint: Path, conversations: list) -> float:
    """The share of conversations whose last answer is generated exactly, greedily."""
    from finetune.data.pretraining.chat_tokens import ChatTokenizer
    from finetune.torch_engine.recursive.generate import RecursiveGenerator
    from finetune.torch_engine.recursive.weights import open_model

    tokenizer = ChatTokenizer.load(checkpoint.parent)
    generator = RecursiveGenerator(open_model(checkpoint, False, "float32", "cpu"), tokenizer.pad_id)
    right = 0
    for start in range(0, len(conversations), 64):
        batch = conversations[start : start + 64]
        new = generator.generate([tokenizer.prompt(turns[:-1]) for turns in batch], 40, tokenizer.stop_ids)
        right += sum(tokenizer.decode(ids) == turns[-1][1] for ids, turns in zip(new, batch, strict=True))
    return right / len(conversations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "checkpoints/first-chat")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    seconds = train(args.folder, args.overrides)
    conversations = read_conversations(ROOT / "examples/questions.json", "sharegpt")
    step = max(args.folder.glob("step_*"), key=lambda p: int(p.name[5:]))
    trained, held_out = exact(step, conversations[:-20]), exact(step, conversations[-20:])
    start, end = read_events(args.folder, "start")[-1], read_events(args.folder, "end")[-1]
    predicted, measured = start["predicted_memory_bytes"]["total"], end["peak_memory_bytes"]["total"]
    result = {
        "seconds": round(seconds, 1),
        "trained_exact": trained,
        "held_out_exact": held_out,
        "held_out_perplexity": read_events(args.folder, "eval")[-1]["perplexity"],
        "memory_mib": round(measured / 2**20, 1),
        "predicted_over_measured": round(predicted / measured, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
