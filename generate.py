"""Generates text from a base model, an adapter, a merged or a recursive model; one prompt, or --interactive.

python generate.py --checkpoint outputs/my-run --prompt "Hello" --max-new-tokens 50
"""

import sys
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.cli import Parser, check_ranges
from finetune.errors import PlanError
from finetune.system import process
from finetune.system.terminal import say

GREEDY_BELOW = 1e-6  # a smaller temperature draws the likeliest token, or divides to infinity


def build_parser() -> Parser:
    from finetune import open_checkpoint

    parser = Parser(prog="generate.py", description=__doc__)
    open_checkpoint.add_flags(parser)
    parser.add_argument("--prompt", help="prompt to answer")
    parser.add_argument("--system", help="system message, for chat models")
    parser.add_argument("--raw", action="store_true", help="continue the prompt verbatim, without the chat template")
    parser.add_argument(
        "--interactive", action="store_true", help="read one prompt per line, until an empty line or end of input"
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
    return parser


def prompt_ids(tokenizer, prompt: str, system: str | None, raw: bool) -> list[int]:
    """Token ids of a prompt as in training: rendered by the chat template if the tokenizer has one."""
    if raw or not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    from finetune.data.chat_template import TemplateRenderer, request_of
    from finetune.data.messages import escaped, special_pattern

    specials = special_pattern(tokenizer)
    messages = [{"role": "system", "content": escaped(system, specials)}] if system else []
    messages.append({"role": "user", "content": escaped(prompt, specials)})
    with TemplateRenderer(tokenizer) as renderer:
        request = request_of(messages, None, [(len(messages), True)], "--prompt")
        (texts,) = renderer.render([request], ["--prompt"])
    if isinstance(texts, PlanError):
        raise texts
    return tokenizer(texts[0], add_special_tokens=False).input_ids


def answer(engine, tokenizer, ends: set[int], ids: list[int], args) -> str:
    """Generates one answer to prompt tokens; streams tokens if stdout is a terminal."""
    live, shown = sys.stdout.isatty(), [0]

    def on_token(new):
        text = tokenizer.decode(new, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # incomplete character: wait for the rest
            say(text[shown[0] :], end="")
            shown[0] = len(text)

    new = engine.generate(
        [ids],
        args.max_new_tokens,
        ends,
        on_token=on_token if live else None,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )[0]
    text = tokenizer.decode(new, skip_special_tokens=True)
    say(text[shown[0] :])
    return text


def check(args) -> None:
    if args.prompt == "":
        raise PlanError("--prompt: is empty. Give one, or --interactive.")
    if args.prompt is None and not args.interactive:
        raise PlanError("--prompt: none given. Give one, or --interactive.")
    check_ranges(args, {"max_new_tokens": (1, 10**6), "temperature": (0, 100), "top_k": (0, 10**6), "top_p": (0, 1)})
    if args.temperature < GREEDY_BELOW:
        args.temperature = 0.0


def main(argv=None) -> int:
    process.prepare_environment()
    args = build_parser().parse_args(argv)
    check(args)
    from finetune import open_checkpoint

    recursive = open_checkpoint.is_recursive(args.checkpoint)
    for flag, given in (("--tokenizer", args.tokenizer), ("--raw-weights", args.raw_weights)):
        if given and not recursive:
            raise PlanError(f"{flag}: is for checkpoints of pretrain.py, which {args.checkpoint} is not. Omit it.")
    engine, tokenizer, ends = (
        open_checkpoint.open_recursive(args) if recursive else open_checkpoint.open_engine(args)[:3]
    )
    engine.seed(args.seed)
    turns = [("system", args.system)] if args.system else []

    def reply(prompt: str) -> None:
        if not recursive:
            answer(engine, tokenizer, ends, prompt_ids(tokenizer, prompt, args.system, args.raw), args)
            return
        turns.append(("user", prompt))  # --interactive remembers what was said
        ids = tokenizer.encode(prompt) if args.raw else tokenizer.prompt(turns)
        turns.append(("assistant", answer(engine, tokenizer, ends, ids, args)))

    if args.prompt is not None:
        reply(args.prompt)
    if args.interactive:
        prompting = "> " if sys.stdin.isatty() else ""
        say(prompting, end="")
        for line in sys.stdin:
            if not line.strip():
                break
            reply(line.rstrip("\n"))
            say(prompting, end="")
    return 0


if __name__ == "__main__":
    process.exit_with(main)
