"""Conversations to the arrays that pretrain.py reads, with a tokenizer that has the markers of turns.

python -m dataset.build_chat_dataset --input-file data/conversations.json --output-dir data/chat --tokenizer gpt2
python -m dataset.build_chat_dataset --input-file examples/questions.json --output-dir data/mine --tokenizer bpe:512
"""

import json
import random
import re
import sys
from argparse import Namespace
from pathlib import Path

if str(Path(__file__).resolve().parents[1]) not in sys.path:  # python dataset/NAME.py puts this folder there instead
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

from finetune.cli import Parser, check_ranges
from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError
from finetune.model_files.hub import hub_folder, hub_problem, looks_like_hub_id
from finetune.system.terminal import say
from recursive.data.arrays import check_output, new_dataset, write_rows
from recursive.data.chat_tokens import FORMATS, MARKERS, TRAIN_ON, ChatTokenizer, read_conversations, rows_of

SMALLEST_BPE = 256 + len(MARKERS)  # every byte and every marker
OFFLINE_BPE = 2048


def build_parser() -> Parser:
    parser = Parser(prog="python -m dataset.build_chat_dataset", description=__doc__)
    parser.add_argument("--input_file", required=True, metavar="FILE", help="a JSON list of conversations, or .jsonl")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder to write; its data set is replaced")
    parser.add_argument("--format", choices=FORMATS, default="sharegpt", help="(default: sharegpt)")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        metavar="NAME|DIR|bpe:N",
        help="Hub name, a folder with tokenizer.json, or bpe:N to train N tokens on the input (default: gpt2)",
    )
    parser.add_argument("--max_length", type=int, default=2048, metavar="N", help="tokens per row (default: 2048)")
    parser.add_argument("--train_split", type=float, default=0.95, metavar="F", help="(default: 0.95)")
    parser.add_argument("--subsample_size", type=int, default=0, metavar="N", help="conversations used; 0: all")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of the subsample (default: 42)")
    parser.add_argument(
        "--train_on", choices=TRAIN_ON, default="assistant", help="targets: the answers, or all (default: assistant)"
    )
    return parser


def find_tokenizer(name: str, texts: list[str]) -> tuple[ChatTokenizer, list[str]]:
    """(the tokenizer with its markers, notices). A name that no Hub serves is replaced by a BPE of the input."""
    sized = re.fullmatch(r"bpe:(\d+)", name)
    if sized:
        if int(sized[1]) < SMALLEST_BPE:
            raise PlanError(f"--tokenizer {name}: bytes and markers take {SMALLEST_BPE} tokens. Use bpe:{OFFLINE_BPE}.")
        return ChatTokenizer.train(texts, int(sized[1])), []
    folder = Path(name).expanduser()
    if folder.is_dir():
        return ChatTokenizer.load(folder).with_markers(), []
    if not looks_like_hub_id(name) or folder.exists():
        raise PlanError(f"--tokenizer {name}: no such folder. Give one with a tokenizer.json, a Hub name, or bpe:N.")
    found = hub_folder(name, None, f"--tokenizer {name}", cached_only=True)
    reason = None
    if found is None:
        reason = hub_problem(name)
        found = None
        if reason is None:
            found = hub_folder(name, None, f"--tokenizer {name}")
    if found is not None and (found / "tokenizer.json").is_file():
        return ChatTokenizer.load(found).with_markers(), []
    trained = ChatTokenizer.train(texts, OFFLINE_BPE)
    reason = reason or "it has no tokenizer.json"
    return trained, [f"--tokenizer {name} is not reachable ({reason}): a BPE is trained on the input instead"]


def write_dataset(conversations: list, tokenizer: ChatTokenizer, args: Namespace, folder: Path) -> list[str]:
    """Writes both splits; what each holds, in words."""
    count = round(len(conversations) * args.train_split)
    lines = []
    for split, turns in (("train", conversations[:count]), ("test", conversations[count:])):
        inputs, labels, longer = rows_of(turns, tokenizer, args.max_length, args.train_on)
        write_rows(folder / split, inputs, labels, tokenizer.pad_id, tokenizer.vocab_size)
        targets = int((labels != IGNORE_INDEX).sum())
        lines.append(f"{split}: {len(turns)} conversations, {targets:,} target tokens, {longer} truncated")
    return lines


def check(args: Namespace) -> None:
    check_ranges(args, {"max_length": (4, 2**20), "subsample_size": (0, 2**40), "seed": (0, 2**31)})
    if not 0 < args.train_split <= 1:
        raise PlanError(f"--train_split {args.train_split}: must be above 0 and at most 1.")


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check(args)
    check_output(Path(args.output_dir), args.input_file)
    conversations = read_conversations(Path(args.input_file), args.format)
    said = [f"{len(conversations)} conversations in {args.input_file}"]
    if args.subsample_size and args.subsample_size < len(conversations):
        chosen = random.Random(args.seed).sample(range(len(conversations)), args.subsample_size)
        conversations = [conversations[i] for i in sorted(chosen)]
        said.append(f"{len(conversations)} of them drawn at random")
    if round(len(conversations) * args.train_split) < 1:
        raise PlanError(f"--train_split {args.train_split}: leaves no row to train on. Use a larger one.")
    texts = [content for turns in conversations for _, content in turns]
    tokenizer, notices = find_tokenizer(args.tokenizer, texts)
    say("\n".join([*said, *(f"note: {notice}" for notice in notices)]))
    with new_dataset(Path(args.output_dir)) as beside:
        lines = write_dataset(conversations, tokenizer, args, beside)
        tokenizer.save_pretrained(beside / "tokenizer")
        (beside / "config.json").write_text(json.dumps(vars(args), indent=1) + "\n", encoding="utf-8")
    say("\n".join([*lines, f"vocabulary: {tokenizer.vocab_size:,} tokens", f"written: {args.output_dir}"]))
    return 0


if __name__ == "__main__":
    process.exit_with(main)
