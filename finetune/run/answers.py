"""Prompts as a trained model reads them, and what its answers say: shared by generate.py and fine_tune's result."""

from argparse import Namespace
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from finetune.cli import check_ranges
from finetune.data.formats import Document, Span
from finetune.data.images.inputs import ImageInputs
from finetune.data.images.marks import IMAGE_MARK
from finetune.data.images.references import ImageReference
from finetune.data.images.rows import PLACEHOLDER
from finetune.data.prepare import open_images
from finetune.engine import Engine
from finetune.errors import PlanError
from finetune.model_files.tokenizer import FullTokenizer
from finetune.open_checkpoint import Found
from finetune.trained_base import TrainedBase

GREEDY_BELOW = 1e-6  # a smaller temperature draws the likeliest token, or divides to infinity


def not_utf8(text: str) -> str | None:
    """The fact about a text that no tokenizer takes, as it came in bytes that are not UTF-8; None for any other."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # as Python reads such a byte
            return f"has the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
        return f"has half of a surrogate pair, \\u{code:04x}, which is not UTF-8"
    return None


def check_sampling(args: Namespace) -> None:
    """Takes temperatures that no logits are divided by as greedy. Raises PlanError for numbers out of their ranges."""
    counts = {"max_new_tokens": (1, 10**6), "top_k": (0, 10**6), "batch_size": (1, 10**4)}
    for name, (low, high) in counts.items():
        if not isinstance(getattr(args, name), Integral):
            raise PlanError(f"--{name} {getattr(args, name)}: must be a whole number, {low} to {high}.")
    check_ranges(args, counts | {"temperature": (0, 100), "top_p": (0, 1)})
    if args.temperature < GREEDY_BELOW:
        args.temperature = 0.0


@dataclass(frozen=True)
class Shown:
    """Images that the first question of a conversation shows, and what makes the model's arrays of them."""

    images: tuple[ImageReference, ...]
    inputs: ImageInputs

    def prompt(self, text: str, from_template: bool) -> list[int]:
        """The tokens of a text that shows the images at its marks. Raises PlanError."""
        document = Document((Span(text, False),), from_template, add_eos=False, images=self.images)
        document, ids = self.inputs.expanded(document, "--prompt")
        assert ids is not None, document
        return self.inputs.prompt(ids.tolist(), [image.digest.encode() for image in self.images])


def shown_images(files: list[str], found: Found, tokenizer: FullTokenizer) -> Shown:
    """The images in these files, decoded once to see that they can be. Raises PlanError."""
    images = tuple(ImageReference(f"--image {file}", path=Path(file).expanduser().absolute()) for file in files)
    return shown_of(images, open_images(found.base.plan.data, found.files, tokenizer))


def shown_of(images: tuple[ImageReference, ...], inputs: ImageInputs) -> Shown:
    """The images, decoded once to see that they can be. Raises PlanError."""
    for image in images:
        inputs.reader.read(image)
    return Shown(images, inputs)


def prompt_ids(
    tokenizer: FullTokenizer,
    turns: list[tuple[str, str]],
    raw: bool,
    shown: Shown | None = None,
    base: TrainedBase | None = None,
) -> list[int]:
    """Token ids of (role, text) turns as in training: rendered by the chat template if the tokenizer has one.
    Otherwise, or with `raw`, the last turn's text as it is. `shown`: images of the first question, in the places
    that it has for them or before it. Raises PlanError for a text that is not UTF-8, for other numbers of places, and
    for a system message without a template.
    """
    odd = next((odd for _, text in turns if (odd := not_utf8(text))), None)
    if odd:
        raise PlanError(f"prompt: {odd}. Give it in UTF-8.")
    if raw or not tokenizer.chat_template:
        if any(role == "system" for role, _ in turns):
            why = "raw leaves the chat template out" if raw else f"{tokenizer.name_or_path} has no chat template"
            raise PlanError(f"system: {why}, which says it. Put it into the prompt.")
        from finetune.model_files.tokenizer import opened_ids

        if shown is not None:
            return shown.prompt(_with_marks(turns[-1][1], shown), from_template=False)
        return opened_ids(tokenizer, turns[-1][1])
    from finetune.data.answer_marks import special_pattern, special_texts
    from finetune.data.chat_template import TemplateRenderer, request_of
    from finetune.data.messages import escaped

    specials = None  # are not escaped where a run learned them, see --special_tokens_in_text
    if base is None or base.plan.data.special_tokens_in_text != "keep":
        specials = special_pattern(special_texts(tokenizer))
    if shown is not None:
        first = next((i for i, (role, _) in enumerate(turns) if role == "user"), 0)
        asked = (turns[first][0], _with_marks(turns[first][1], shown))
        turns = [*turns[:first], asked, *turns[first + 1 :]]
    messages = [
        {"role": role, "content": text if role == "assistant" else escaped(text, specials)} for role, text in turns
    ]
    with TemplateRenderer(tokenizer) as renderer:
        request = request_of(messages, None, [(len(messages), True)], "--prompt", marks=shown is not None)
        (rendering,) = renderer.render([request], ["--prompt"])
    if isinstance(rendering, PlanError):
        raise rendering
    (text,) = rendering.texts
    if shown is not None:
        return shown.prompt(text, from_template=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def _with_marks(text: str, shown: Shown) -> str:
    """The question with a mark in each of its places, or before it. Raises PlanError."""
    places = text.count(PLACEHOLDER)
    number = len(shown.images)
    if places not in (0, number):
        raise PlanError(f"prompt: has {places} {PLACEHOLDER}, and images are {number}. Write one for each, or none.")
    if places:
        return text.replace(PLACEHOLDER, IMAGE_MARK)
    return IMAGE_MARK * number + text


def begun(system: str | None) -> list[tuple[str, str]]:
    """The turns of a new conversation."""
    if system:
        return [("system", system)]
    return []


def answers_of(
    opened: tuple[Engine, FullTokenizer, set[int], TrainedBase],
    prompts: list[str],
    args: Namespace,
    shown: Shown | None = None,
) -> list[str]:
    """The answers of an opened model to prompts that do not know of each other, in batches. Collective.

    `args`: generate.py's sampling flags, system, raw, batch_size and seed. `shown`: images that each prompt shows.
    """
    from finetune.run.evaluation import shared

    engine, tokenizer, ends, base = opened
    engine.seed(args.seed)
    sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)

    def answered(part: list[str]) -> list[list[int]]:
        ids = [prompt_ids(tokenizer, [*begun(args.system), ("user", prompt)], args.raw, shown, base) for prompt in part]
        return engine.generate(ids, args.max_new_tokens, ends, **sampling)

    new = shared(engine, prompts, args.batch_size, answered)
    return [content_of(tokenizer, row, args.raw) for row in new]


def content_of(tokenizer: FullTokenizer, ids: list[int], raw: bool) -> str:
    """Content of an answer, as a row of chat data has it: where a template writes special tokens before an answer, what
    follows the last of these.
    """
    text, plain = (tokenizer.decode(ids, skip_special_tokens=skipped) for skipped in (False, True))
    if raw or text == plain:
        return text
    from finetune.data.answer_marks import special_pattern
    from finetune.data.chat_template import marks_of

    marks = marks_of(tokenizer)
    pattern = special_pattern(marks.specials)
    if pattern and pattern.search(marks.prefix):  # a space or a line break is in answers too
        return text.rpartition(marks.prefix)[2]
    return text
