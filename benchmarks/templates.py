"""Which chats each chat template takes and what is learned of them: a table over the templates of real models.

    python benchmarks/templates.py templates.json
    python benchmarks/templates.py .venv/lib/python3.11/site-packages/trl/chat_templates --show

Takes a JSON file of {name: template} or a folder of NAME.jinja. A template NAME_training is the oracle of NAME: it has
between {% generation %} tags what its own program learns.
"""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from finetune.data.columns import RowOptions, RowReader
from finetune.data.fit_template import fit_template
from finetune.data.reading.rows import RawDataset
from finetune.data.render_process import parts_of, with_reasoning
from finetune.data.tokens.tokenize import render_sample, tokenize
from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def said(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


ASK = said("user", "Name a fruit.")
PEAR = said("assistant", "A pear.")
THOUGHT = said("assistant", "A pear.", reasoning_content="Pears are fruit.")
TOOL_CALL = said("assistant", "", tool_calls=[CALL])
RESULT = said("tool", "sunny", tool_call_id="call00001", name="weather")
# {kind of chat: a row}
CHATS = {
    "plain": {"messages": [ASK, PEAR]},
    "system": {"messages": [said("system", "Be short."), ASK, PEAR]},
    "turns": {"messages": [ASK, PEAR, said("user", "Another?"), said("assistant", "A plum.")]},
    "reasoning": {"messages": [ASK, THOUGHT]},
    "tools": {
        "messages": [said("user", "Rome?"), TOOL_CALL, RESULT, said("assistant", "It is sunny.")],
        "tools": [{"type": "function", "function": WEATHER}],
    },
}
MARKS = re.compile(r"<\|[^|<>\s]{1,40}\|?>|<｜[^｜]{1,40}｜>|<[a-z_]+\|>|</?s>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]")


def tokenizer_for(template: str) -> PlainTokenizer:
    """A tokenizer of bytes and of the control tokens that stand in the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    found = sorted({"<|endoftext|>", "<|begin|>", *MARKS.findall(template)})
    backend.add_special_tokens([AddedToken(text, special=True) for text in found])
    return PlainTokenizer(backend, {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>"}, template, "benchmark")


def learned(template: str, row: dict) -> list[str] | PlanError:
    """The texts that are learned of a row, in order; or why it is refused."""
    tokenizer = tokenizer_for(template)
    raw = RawDataset([row], ["row 1"], tuple(row), (), "", "rows", 0)
    notice = fit_template(tokenizer, lambda: [RowReader().read(row, "row 1")])
    try:
        dataset = tokenize(raw, RowOptions(), tokenizer, 4096)
    except PlanError as error:
        return error
    shown = [render_sample(dataset, i, tokenizer, color=False) for i in range(len(dataset))]
    pieces = [piece for text in shown for piece in re.findall("⟦(.*?)⟧", text, re.S)]
    return pieces, shown, [*dataset.notices, notice]


def of_oracle(template: str, row: dict) -> list[str] | str:
    """The texts that the oracle marks; or why it does not render the row."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>"}
    messages = [with_reasoning(message) for message in row["messages"]]
    as_parts = [{**message, "content": parts_of(message["content"])} for message in messages]
    found: list[str] | str = "not rendered"
    for form in (messages, as_parts):  # some read contents as parts only, and leave strings out
        try:
            texts, spans = render_jinja_template(
                conversations=[form],
                tools=row.get("tools"),
                chat_template=template,
                return_assistant_tokens_mask=True,
                **names,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            found = str(error)
            continue
        found = [texts[0][start:end] for start, end in spans[0]]
        if messages[-1]["content"] in texts[0]:
            break
    return found


def squeezed(texts: list[str]) -> str:
    return "".join("".join(texts).split())


def differences(ours: list[str], oracle: list[str]) -> tuple[str, ...]:
    """What only one of both learns: +text ours, -text the oracle."""
    one, other = squeezed(oracle), squeezed(ours)
    found = []
    for kind, start, end, at, to in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind != "equal":
            found += [f"-{one[start:end]}"] * (end > start) + [f"+{other[at:to]}"] * (to > at)
    return tuple(dict.fromkeys(found))


def templates_in(path: Path) -> dict[str, str]:
    if path.is_dir():
        return {file.stem: file.read_text(encoding="utf-8") for file in sorted(path.glob("*.jinja"))}
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", type=Path)
    parser.add_argument("--only", default="", help="templates whose name contains this")
    parser.add_argument("--show", action="store_true", help="print what is learned of each chat")
    args = parser.parse_args()
    templates = templates_in(args.templates)
    counts = dict.fromkeys(("taken", "refused", "equal", "different"), 0)
    for name, template in templates.items():
        if name.endswith("_training") or args.only not in name:
            continue
        cells, more = [], []
        for kind, row in CHATS.items():
            got, oracle = learned(template, row), templates.get(f"{name}_training")
            cell = "refused" if isinstance(got, PlanError) else "taken"
            counts[cell] += 1
            more.append(f"    {kind}: {got if isinstance(got, PlanError) else got[0]}")
            if not isinstance(got, PlanError):
                more += [f"      text: {text!r}" for text in got[1]] + [f"      {notice}" for notice in got[2]]
            if oracle and cell == "taken":
                expected = of_oracle(oracle, row)
                cell = ("different " + " ".join(differences(got[0], expected))).removesuffix("different ") or "equal"
                counts[cell.partition(" ")[0]] += 1
                more += [f"      oracle: {expected}"] if cell != "equal" else []
            cells.append(f"{kind} {cell}")
        print(f"{name:32}", " | ".join(cells))
        if args.show:
            print(*more, sep="\n")
    print(", ".join(f"{count} {word}" for word, count in counts.items()))


if __name__ == "__main__":
    main()
