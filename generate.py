"""Generates text from a base model, an adapter, a merged or a recursive model: one prompt, a file of them, or a chat.

python generate.py --checkpoint outputs/my-run --prompt "Hello" --max-new-tokens 50
python generate.py --checkpoint outputs/my-run --interactive        /reset, /system TEXT and /save FILE are commands
python generate.py --checkpoint outputs/my-run --prompts questions.txt --compare base
torchrun --nproc_per_node=2 generate.py --checkpoint outputs/my-run --prompt "Hello"        weights sharded over 2 GPUs
"""

import argparse
import base64
import contextlib
import io
import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

from finetune.callers_process import callers_process
from finetune.cli import Parser
from finetune.data.images.rows import IMAGE_NAMES
from finetune.data.meanings import EARLIER, OF_CONVERSATIONS, PART_OF_PROMPT, is_nothing, meaning_of, plain_name
from finetune.data.reading.packed import row_suffix
from finetune.data.reading.readers import MAX_LINE_BYTES, PROSE, READERS
from finetune.distributed.over_ranks import Ranks
from finetune.engine import Generator
from finetune.errors import PlanError
from finetune.run.answers import answers_of, begun, check_sampling, content_of, not_utf8, prompt_ids, shown_images
from finetune.system.terminal import say

MOST_LABELS = 5  # of a prompt that are printed
OF_JSON = (".jsonl", ".ndjson", ".json")  # suffixes of files whose lines are rows
# Columns of a row that belong to what is asked.
BESIDE_A_PROMPT = {*IMAGE_NAMES, *OF_CONVERSATIONS, "history", "messages", "input", "question", "query"}


def build_parser() -> Parser:
    from finetune import open_checkpoint

    parser = Parser(prog="generate.py", description=__doc__)
    open_checkpoint.add_flags(parser)
    parser.add_argument("--prompt", help="prompt to answer")
    parser.add_argument(
        "--image", action="append", metavar="FILE", help="an image that the first question shows; repeatable"
    )
    parser.add_argument("--system", help="system message, for chat models")
    parser.add_argument("--raw", action="store_true", help="continue the prompt verbatim, without the chat template")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="a conversation: one message per line, until an empty line or end of input. /reset forgets what was said, "
        "/system TEXT sets the system message and forgets, /save FILE writes the conversation as a row of chat data",
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="answer each line of a text file, or each row's prompt of a .jsonl file"
    )
    parser.number("batch_size", 8, "prompts of --prompts answered at once")
    parser.add_argument(
        "--compare", metavar="base|DIR|ID", help="the answers of another model too: the adapter's base, or a checkpoint"
    )
    parser.number("max_new_tokens", 100, "maximum new tokens per answer")
    parser.number("temperature", 0.0, "0: greedy")
    parser.number("top_k", 50, "sample from the N most likely tokens")
    parser.number("top_p", 0.9, "nucleus sampling: cumulative probability")
    parser.add_argument(
        "--tokenizer", default=None, metavar="DIR", help="tokenizer folder, of pretrain.py's checkpoints"
    )
    parser.add_argument(
        "--raw_weights", action="store_true", help="the weights, not their EMA, of a checkpoint of pretrain.py"
    )
    parser.number("seed", 42, "sampling seed")
    parser.add_argument("--verbose", action="store_true", help="also say the memory that it took, and was predicted")
    return parser


def check_system(args: Namespace) -> None:
    """Raises PlanError for a system message that a model without a chat template would not see."""
    from finetune import open_checkpoint
    from finetune.model_files.tokenizer import load_tokenizer

    if (
        args.system
        and not load_tokenizer(open_checkpoint.tokenizer_folder(Path(args.checkpoint), args.found.files)).chat_template
    ):
        raise PlanError(f"--system: {args.checkpoint} has no chat template to say it with. Put it into the prompt.")


def is_beside_prompt(name: str) -> bool:
    """True for a row's column that may be a part of what is asked."""
    plain = plain_name(name)
    is_part = plain in BESIDE_A_PROMPT or PART_OF_PROMPT.fullmatch(plain)
    return bool(is_part or meaning_of(plain) == EARLIER)


def read_prompts(file: Path) -> list[str]:
    """The prompts of --prompts. Raises PlanError for a file without any, and for a row without one."""
    kind = row_suffix(file.name)
    if kind in READERS and kind not in (*OF_JSON, *PROSE):
        raise PlanError(
            f"--prompts {file}: is a table, whose lines are no prompts. Give a .jsonl with a prompt in each row, or a "
            ".txt with one per line."
        )
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines would split at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--prompts {file}: cannot be read ({error}). Give a text file in UTF-8.") from None
    found = []
    beside: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"]
        except (ValueError, RecursionError, TypeError, LookupError):
            prompt = None
        if kind not in OF_JSON:
            if prompt is not None:
                raise PlanError(f"--prompts {file}:{number}: is a row of JSON in a file of texts. Name it .jsonl.")
            found.append(line)
            continue
        if not isinstance(prompt, str) or not prompt:
            raise PlanError(f"--prompts {file}:{number}: is not an object with a prompt. Give one per line.")
        unseen = [name for name in row if row[name] and is_beside_prompt(name)]
        if unseen:
            raise PlanError(
                f"--prompts {file}:{number}: has {unseen[0]!r} beside its prompt, which is not shown. Remove it, or "
                "ask by --prompt with --system and --image."
            )
        beside.update(name for name in row if name != "prompt" and not is_nothing(row[name]))
        found.append(prompt)
    if not found:
        raise PlanError(f"--prompts {file}: has no prompt. Give one per line.")
    if beside:
        named = ", ".join(f"{name!r} ({count:,})" for name, count in beside.items())
        say(f"note: columns not used, with their number of rows: {named}", file=sys.stderr)
    return found


def print_answers(prompts: list[str], by_model: dict[str, list[str]]) -> None:
    """Each prompt with its answers, named if several models gave one."""
    for i, prompt in enumerate(prompts):
        say(f"> {prompt}")
        for name, answers in by_model.items():
            say(f"{name}: {answers[i]}" if len(by_model) > 1 else answers[i])


def lines_of(ranks: Ranks) -> Iterator[str]:
    """The lines of stdin, which rank 0 reads, on every rank."""
    while line := ranks.share(sys.stdin.readline):
        yield line


def converse(
    reply: Callable[[list[tuple[str, str]]], str], args: Namespace, ranks: Ranks, has_template: bool = True
) -> None:
    """--interactive. `reply(turns)` prints an answer and returns it; recursive models are answered in the same way.
    `has_template`: a system message is seen.
    """
    turns = begun(args.system)
    if args.prompt is not None:
        turns.append(("user", args.prompt))
        turns.append(("assistant", reply(turns)))
    if not args.interactive:
        return
    prompting = "> " if sys.stdin.isatty() else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a byte that is not UTF-8 is said, and ends nothing
    say(prompting, end="")
    for line in lines_of(ranks):
        text = line.strip()
        if not text:
            break
        if odd := not_utf8(text):
            say(f"{odd}, and is not sent. Write it in UTF-8.\n{prompting}", end="" if prompting else "\n")
            continue
        word, _, rest = text.partition(" ")
        if word == "/system" and not has_template:
            say("/system: no chat template says it here. Put it into the message.")
        elif word in ("/reset", "/system"):
            if word == "/system":
                system = rest.strip() or None
            else:
                system = next((t for r, t in turns if r == "system"), None)
            turns = begun(system)
            say("(a new conversation)")
        elif word == "/save":
            say(saved(turns, rest.strip(), args.image or []) if ranks.is_first else "")
        elif word.startswith("/") and word[1:].isalpha():
            say(f"{word}: is not a command. Use /reset, /system TEXT or /save FILE.")
        else:
            turns.append(("user", line.rstrip("\n")))
            turns.append(("assistant", reply(turns)))
        say(prompting, end="")


def saved(turns: list[tuple[str, str]], name: str, images: list[str]) -> str:
    """Writes the conversation to a new file as one row of chat data, with its images in the first question; what to say
    of it.
    """
    if not name:
        return "/save: needs the name of a file, such as /save chat.jsonl."
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    try:
        first = next((message for message in messages if message["role"] == "user"), None)
        if images and first is not None:
            parts = [{"type": "image", "base64": encoded(Path(file).expanduser())} for file in images]
            first["content"] = [*parts, {"type": "text", "text": first["content"]}]
        line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
        if len(line.encode()) > MAX_LINE_BYTES:
            return f"/save {name}: its images are over the {MAX_LINE_BYTES >> 20} MiB of a row. Show smaller ones."
        with open(Path(name).expanduser(), "x", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        return f"/save {name}: {error.filename}: {error.strerror}. Give another file."
    return f"(saved to {name})"


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def answer(engine: Generator, tokenizer: Any, ends: set[int], ids: list[int] | None, args: Namespace) -> str:
    """Generates one answer to prompt tokens; streams tokens if stdout is a terminal. Without any, as on the ranks after
    the first, takes part in what another answers.
    """
    live = sys.stdout.isatty()
    shown = [0]

    def on_token(new: list[int]):
        text = tokenizer.decode(new, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # incomplete character: wait for the rest
            say(text[shown[0] :], end="")
            shown[0] = len(text)

    new = engine.generate(
        [] if ids is None else [ids],
        args.max_new_tokens,
        ends,
        on_token=on_token if live else None,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )
    text = ""
    if new:
        text = content_of(tokenizer, new[0], args.raw or not hasattr(tokenizer, "chat_template"))
    say(tokenizer.decode(new[0], skip_special_tokens=True)[shown[0] :] if live and new else text)
    return text


def check(args: Namespace) -> None:
    if args.prompt == "":
        raise PlanError("--prompt: is empty. Give one, or --interactive.")
    if args.prompt is None and not args.interactive and args.prompts is None:
        raise PlanError("--prompt: none given. Give one, --prompts FILE, or --interactive.")
    if args.prompts is not None and (args.prompt is not None or args.interactive):
        raise PlanError(f"--prompts {args.prompts}: is answered alone, without --prompt and --interactive. Omit one.")
    if args.image and (args.prompts is not None or args.compare is not None):
        raise PlanError(f"--image {args.image[0]}: is shown by --prompt or --interactive alone. Omit the other.")
    if args.compare is not None and args.interactive:
        raise PlanError(f"--compare {args.compare}: compares answers to --prompt or --prompts. Omit --interactive.")
    for flag in ("prompt", "system"):
        if odd := not_utf8(getattr(args, flag) or ""):
            raise PlanError(f"--{flag}: {odd}. Write it in UTF-8.")
    if args.raw and args.system is not None:
        raise PlanError("--system: is said by the chat template, which --raw leaves out. Omit one of them.")
    check_sampling(args)


def compared(args: Namespace) -> tuple[str, str]:
    """(the other model's checkpoint, its name in the output). Raises PlanError."""
    from finetune.model_files.hub_adapter import fetched

    if args.compare != "base":
        return fetched(args.compare, "--compare"), Path(args.compare).name or args.compare
    name = args.found.files.name
    if name == args.checkpoint:
        raise PlanError(f"--compare base: {args.checkpoint} is a full model, which has none. Name another checkpoint.")
    return name, "base"


def split(opened: Any) -> tuple:
    """((engine, tokenizer, stop ids), the base as it is opened)."""
    return opened[:3], opened[3]


def parsed(argv: list[str] | None):
    args = build_parser().parse_args(argv)
    check(args)
    return args


def prepared(args: Namespace, ranks: int) -> str:
    """Finds what the arguments name, for that many ranks, and adds it to them; the backend. Raises PlanError."""
    from finetune import open_checkpoint
    from finetune.adapters.heads import HeadRecord
    from finetune.model_files.hub_adapter import fetched
    from finetune.run.heads import refuse_unread

    args.record = None
    if args.prompts:
        args.questions = read_prompts(Path(args.prompts))
    else:
        args.questions = [args.prompt]
    args.checkpoint = fetched(args.checkpoint)
    args.recursive = recursive = open_checkpoint.is_recursive(args.checkpoint)
    if recursive and ranks > 1:
        raise PlanError(f"--checkpoint {args.checkpoint}: is of pretrain.py, whose models answer in one process.")
    for flag, given in (("--tokenizer", args.tokenizer), ("--raw-weights", args.raw_weights)):
        if given and not recursive:
            raise PlanError(f"{flag}: is for checkpoints of pretrain.py, which {args.checkpoint} is not. Omit it.")
    for flag, given in (("--prompts", args.prompts), ("--compare", args.compare), ("--image", args.image)):
        if given and recursive:
            raise PlanError(f"{flag} {given}: is not for checkpoints of pretrain.py. Use --prompt or --interactive.")
    if recursive:
        return ""
    args.found = open_checkpoint.find(args, ranks)
    if args.image:
        args.found = open_checkpoint.seeing_images(args.found, f"--image {args.image[0]}")
    args.other = None
    args.record = HeadRecord.read(Path(args.checkpoint))
    if args.record is not None:
        refuse_unread(args.record, args, ("interactive", "compare", "image", "raw"))
        if not args.record.labels:
            raise PlanError(
                f"--checkpoint {args.checkpoint}: was trained with --task {args.record.task}, and answers nothing. Use "
                "score.py."
            )
    check_system(args)
    if args.compare:
        checkpoint, name = compared(args)
        other = argparse.Namespace(**{**vars(args), "checkpoint": checkpoint})
        args.other = name, open_checkpoint.find(other, ranks)
    return str(args.found.manager.backend)


def classify_all(args: Namespace, ranks: Ranks) -> int:
    """Prints each prompt's likeliest labels, of a checkpoint of --task classify."""
    from finetune import open_checkpoint
    from finetune.run.heads import classified

    engine, tokenizer, _, base = open_checkpoint.open_engine(args, ranks, args.found)
    texts = args.questions
    if args.system:
        texts = [[{"role": r, "content": t} for r, t in (*begun(args.system), ("user", text))] for text in texts]
    found = classified(engine, tokenizer, base=base, record=args.record, texts=texts)
    for prompt, by_label in zip(args.questions, found, strict=True):
        if args.prompts:
            say(f"> {prompt}")
        say(" | ".join(f"{label} {probability:.4f}" for label, probability in list(by_label.items())[:MOST_LABELS]))
    return 0


def answer_all(args: Namespace, ranks: Ranks) -> int:
    from finetune import open_checkpoint
    from finetune.estimate.inference import Work

    if args.record is not None:
        return classify_all(args, ranks)
    recursive = args.recursive
    prompts = args.questions
    opened, base = (
        (open_checkpoint.open_recursive(args), None)
        if recursive
        else split(open_checkpoint.open_engine(args, ranks, args.found))
    )
    if not recursive and (args.prompts or args.other):
        by_model = {Path(args.checkpoint).name or args.checkpoint: answers_of((*opened, base), prompts, args)}
        if args.other:
            del opened  # one model at a time is in memory
            name, found = args.other
            if name in by_model:
                name = f"{name} (compared)"
            by_model[name] = answers_of(open_checkpoint.open_engine(args, ranks, found), prompts, args)
        print_answers(prompts, by_model)
        return 0
    longest = [0]
    shown = None
    engine, tokenizer, ends = opened
    engine.seed(args.seed)
    has_template = recursive or not args.raw and bool(tokenizer.chat_template)
    if args.interactive and not (has_template or args.raw):
        say("note: this model has no chat template: each message is continued as it is, without what was said before")

    def reply(turns: list[tuple[str, str]]) -> str:
        if recursive:
            if args.raw:
                ids = tokenizer.encode(turns[-1][1])
            else:
                ids = tokenizer.prompt(turns)
        else:
            ids = None
            if ranks.is_first:
                ids = prompt_ids(tokenizer, turns, args.raw, shown, base)
        longest[0] = max(longest[0], len(ids or ()))
        return answer(engine, tokenizer, ends, ids, args)

    with contextlib.ExitStack() as stack:
        if args.image:
            shown = shown_images(args.image, args.found, tokenizer)
            stack.callback(shown.inputs.close)
        converse(reply, args, ranks, has_template)
    if args.verbose and base:
        work = Work(ranks.size, longest[0], args.max_new_tokens)  # each takes part with a row
        used = open_checkpoint.memory_of(engine, args.checkpoint, base, work)
        if used and ranks.is_first:
            say(open_checkpoint.said_memory(used), file=sys.stderr)
    return 0


@callers_process()
def main(argv: list[str] | None = None) -> int:
    from finetune import open_checkpoint

    return open_checkpoint.run_over_ranks(Path(__file__), argv, parsed, prepared, answer_all)


if __name__ == "__main__":
    process.exit_with(main)
