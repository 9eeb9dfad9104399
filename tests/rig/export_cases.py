"""Damaged and hostile folders in the hands of those who use what was trained: export, score, ask, continue, serve.

A case that ends without an error must have written, or computed, finite and consistent numbers; with a manifest it must
not end so at all if a file that it reads was changed.
"""

import io
import json
import os
import random
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save

import export
import generate
import score
from finetune.adapters.saved import read_adapter
from finetune.data import ollama
from finetune.errors import CheckpointDamagedError
from finetune.model_files.gguf_files import check_gguf
from finetune.model_files.manifest import MANIFEST
from finetune.model_files.tokenizer import load_tokenizer
from finetune.torch_engine.weights.stream import load_dense
from tests.model_files.test_ollama import parsed
from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import Place
from tests.rig.reader_cases import ADAPTER, CONFIG, ReaderBatch, copied
from tests.support.runs import read_events
from train import fine_tune

ACTIONS = ("hf", "mlx-lm", "score", "generate", "compare", "adapter", "adapter-merge")
READ_ALONE = {name: (ADAPTER, CONFIG) for name in ("mlx-lm", "adapter", "adapter-merge")}  # others read every file
TEXTS = (CONFIG, "base_model.json", "run_plan.json", "train_state.json", "tokenizer_config.json", "tokenizer.json")
LINKS = (ADAPTER, CONFIG, "run_plan.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEMPLATES = (
    '"""\nADAPTER /etc/passwd\nSYSTEM """',
    "{{ messages[0].content }}" + '"""',
    '{% for m in messages %}{{ \'"""\' }}{{ m.role }}\nFROM /x\n{{ m.content }}{% endfor %}',
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{% for m in messages %}{{ m.role }}{{ '{{ .System }}' }}{{ m.content }}\n{% endfor %}",
)


@dataclass
class ExportBatch(ReaderBatch):
    """argv: what is edited, who uses the folder, and whether its manifest is there."""

    variants: tuple = ("lora",)

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        run = place.whole("lora") / "run"
        kind = rng.choice(("weights", "weights", "text", "text", "bytes", "card", "link", "modelfile", "gguf"))
        action, signed = rng.choice(ACTIONS), rng.choice(("signed", "plain", "plain"))
        if kind == "weights":
            return Mutant({ADAPTER: edited_weights(rng, load_file(run / ADAPTER))}, (kind, action, signed))
        if kind == "text":
            name = rng.choice([name for name in TEXTS if (run / name).is_file()])
            tree = mutate.mutated_json(rng, json.loads((run / name).read_text()))
            return Mutant({name: mutate.json_text(rng, tree)}, (kind, action, signed))
        if kind == "bytes":
            name = rng.choice(
                (ADAPTER, *(n for n in (*TEXTS, "metrics.jsonl", "chat_template.jinja") if (run / n).is_file()))
            )
            return Mutant({name: mutate.mutated_bytes(rng, (run / name).read_bytes())}, (kind, action, signed))
        if kind == "card":
            edit = rng.choice(("metrics.jsonl", "train_state.json"))
            odd = {"event": "start", "data": mutate.odd_value(rng, {"rows": 3, "sha256": "x"})}
            odd |= {"scores": mutate.odd_value(rng, {"after": {"exact_match": 1.0}}), "step": mutate.odd_value(rng, 3)}
            return Mutant({edit: json.dumps(odd).encode(errors="replace") + b"\n"}, (kind, action, "plain"))
        if kind == "link":
            return Mutant({}, (kind, action, "plain", rng.choice([n for n in LINKS if (run / n).is_file()])))
        if kind == "modelfile":
            template = rng.choice(TEMPLATES) if rng.random() < 0.5 else _chat_template(rng, run)
            sampling = mutate.mutated_json(rng, {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
            return Mutant(
                {
                    "chat_template.jinja": template.encode(errors="replace"),
                    "generation_config.json": mutate.json_text(rng, sampling),
                },
                (kind, "", ""),
            )
        return Mutant({"model.gguf": mutate.mutated_bytes(rng, small_gguf())}, (kind, "", ""))

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        kind, action, signed, *more = mutant.argv
        if kind == "modelfile":
            return check_modelfile(folder, place)
        if kind == "gguf":
            return check_numbers(folder / "model.gguf")
        whole = place.whole("lora") / "run"
        copied(whole, folder, *(() if signed == "signed" else (MANIFEST,)), *more)
        if kind == "link":
            outside = place.root / "outside"
            outside.mkdir(exist_ok=True)
            shutil.copy(whole / more[0], outside / more[0])
            os.symlink(outside / more[0], folder / more[0])
        try:
            used(action, folder, place)
        except CheckpointDamagedError:
            return None
        if kind == "link" and more[0] in READ_ALONE.get(action, LINKS):
            raise Finding("payload_or_escape", f"{action} read {more[0]} through a link that leaves the folder")
        if signed == "signed":
            named = json.loads((whole / MANIFEST).read_text())["files"]
            for name, data in mutant.files.items():
                if name in named and name in READ_ALONE.get(action, named) and data != (whole / name).read_bytes():
                    raise Finding("differing_bits", f"{action} used {name} though its manifest names another")
        return None


def used(action: str, folder: Path, place: Place) -> None:
    """Does it, and raises Finding for a result that is not finite or not whole."""
    out, asked = folder / "out", ["--checkpoint", str(folder), "--device", "cpu"]
    if action in ("hf", "mlx-lm"):
        export.main([*asked[:2], "--output_dir", str(out), "--to", action])
        ModelCard.load(out / "README.md")
        found = load_dense(out, torch.float32).state_dict() if action == "hf" else read_adapter(out)[1]
        if not all(np.isfinite(np.asarray(tensor)).all() for tensor in found.values()):
            raise Finding("differing_bits", f"--to {action} wrote numbers that are not finite")
    elif action == "score":
        said = io.StringIO()
        with redirect_stdout(said):
            rows = str(place.rows() / "rows.jsonl")
            score.main([*asked, "--dataset", rows, "--samples", "2", "--max_new_tokens", "2", "--json"])
        if not np.isfinite(json.loads(said.getvalue().splitlines()[-1])["loss"]):
            raise Finding("differing_bits", "score printed a loss that is not finite")
    elif action in ("generate", "compare"):
        other = ["--compare", "base"] if action == "compare" else []
        generate.main([*asked, "--prompt", "1 plus", "--max_new_tokens", "2", *other])
    else:
        flags = dict(dataset=str(place.rows() / "rows.jsonl"), backend="cpu", log_to="stdout", train_type="lora")
        flags |= dict(adapter=str(folder), adapter_merge=action == "adapter-merge", output_dir=str(out), max_steps=1)
        fine_tune(**flags, precision="fp32", context_length=64, batch_size=2)
        if not all(np.isfinite(event["loss"]) for event in read_events(out, "step")):
            raise Finding("differing_bits", "a run that continues had a loss that is not finite")


def edited_weights(rng: random.Random, tensors: dict) -> bytes:
    """An adapter's file with a tensor that is not finite, of another shape, type or name, missing, or cut off."""
    name = rng.choice(sorted(tensors))
    tensor, kind = tensors.pop(name), rng.randrange(8)
    if kind == 0:
        tensor = tensor.copy()
        tensor.flat[rng.randrange(tensor.size)] = rng.choice((np.nan, np.inf, -np.inf, 3e38))
    elif kind == 1:
        tensor = np.ascontiguousarray(tensor.T)
    elif kind == 2:
        tensor = np.ascontiguousarray(tensor[: rng.randrange(len(tensor) + 1)])
    elif kind == 3:
        tensor = tensor.astype(rng.choice((np.float64, np.float16, np.int32, np.uint8)))
    elif kind == 4:
        name = rng.choice(
            (name.replace("lora_A", "lora_C"), name + ".x", "../" + name, name.replace("layers.0", "layers.9"), "")
        )
    elif kind == 5:
        return save(tensors)
    elif kind == 6:
        tensor = np.concatenate([tensor, tensor])
    else:
        data = save(tensors | {name: tensor})
        return data[: rng.randrange(len(data))]
    return save(tensors | {name: tensor})


def _chat_template(rng: random.Random, run: Path) -> str:
    text = (run / "chat_template.jinja").read_bytes()
    return mutate.mutated_bytes(rng, text).decode(errors="replace")


def check_modelfile(folder: Path, place: Place) -> None:
    """The Modelfile of any template is one by Ollama's grammar, with nothing but what is ours to say."""
    for file in (place.whole("lora") / "run").glob("tokenizer*"):
        shutil.copy(file, folder)
    text, _ = ollama.modelfile(folder, load_tokenizer(folder), ["</s>"], "model.gguf")
    try:
        found = parsed(text)
    except AssertionError as error:
        raise Finding("payload_or_escape", f"not a Modelfile: {str(error)[:100]}") from None
    if found["FROM"] != ["./model.gguf"] or set(found) - {"FROM", "TEMPLATE", "SYSTEM"} - set(_parameters(found)):
        raise Finding("payload_or_escape", f"a Modelfile with {sorted(found)}")


def _parameters(found: dict) -> list[str]:
    known = ("stop", "temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    return [name for name in found if name.removeprefix("PARAMETER ") in known]


def small_gguf() -> bytes:
    """A GGUF file with two tensors."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "x.gguf", "llama")
        for name in ("a.weight", "b.weight"):
            writer.add_tensor(name, np.arange(64, dtype=np.float32).reshape(8, 8))
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
        return (Path(folder) / "x.gguf").read_bytes()


def check_numbers(file: Path) -> None:
    """A file that is read again without an error holds finite numbers."""
    check_gguf(file)
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.tensor_type.name in ("F32", "F16") and not np.isfinite(tensor.data).all():
            raise Finding("differing_bits", f"{tensor.name} is not finite")


EXPORTS = ExportBatch()
