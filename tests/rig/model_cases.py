"""Mutants of a model folder and of an adapter: planned, loaded and trained for a step, or opened by generate.py."""

import json
import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import generate
import train
from tests.rig import mutate
from tests.rig.batch import CANARY, Finding, Mutant
from tests.rig.materials import LORA, RUN, Place

ONE_STEP = {k: v for k, v in RUN.items() if k != "resume"} | LORA
ONE_STEP |= dict(max_steps=1, save_every=0, save_model=False, overwrite=True)
WEIGHTS, ADAPTER, INDEX = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


@dataclass
class ModelBatch:
    """`make(rng, place)`: a mutant whose files replace those of the model folder, or of a finished run's adapter."""

    make: object
    variants: tuple = ("lora",)

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        return self.make(rng, place)

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        """argv: what opens the folder: generate, plan or train."""
        tool = mutant.argv[0]
        whole = place.whole("lora") / "run" if tool == "generate" else place.model()
        for file in whole.iterdir():
            if file.is_file() and not (folder / file.name).exists() and file.name != ".lock":
                shutil.copy(file, folder)
        if INDEX in mutant.files:
            (folder / WEIGHTS).rename(folder / "part.safetensors")
        if PICKLED in mutant.files:
            (folder / WEIGHTS).unlink()
        if tool == "generate":
            generate.main(
                ["--checkpoint", str(folder), "--prompt", "1 plus", "--max_new_tokens", "2", "--device", "cpu"]
            )
            return
        flags = ONE_STEP | dict(model_name=folder, dataset=place.rows() / "rows.jsonl", output_dir=folder / "out")
        if "chats.jsonl" in mutant.files:
            flags |= dict(dataset=folder / "chats.jsonl", batch_size=1)
        if tool == "plan":
            flags |= dict(dry_run=True)
        state = train.fine_tune(**{k: str(v) if isinstance(v, Path) else v for k, v in flags.items()})
        if state.exit_code not in (0, 2):
            raise Finding("wrong_code", f"exit code {state.exit_code}")
        if "escape" in mutant.argv:
            raise Finding("payload_or_escape", f"{INDEX} names a file outside the folder, and it was taken")


def make_config(rng: random.Random, place: Place) -> Mutant:
    tree = json.loads((place.model() / "config.json").read_text())
    if rng.random() < 0.15:
        canary = f"touch {place.own / CANARY}"
        tree |= rng.choice(
            (
                {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}},
                {"_attn_implementation_internal": "evil/kernel", "attn_implementation": "evil/kernel"},
                {"model_type": rng.choice(("evil", "gpt2", "mixtral", "bert", "", "llama4", "t5"))},
                {"architectures": [rng.choice(("Evil", "GPT2LMHeadModel", "T5ForConditionalGeneration", 5))]},
                {"quantization_config": {"quant_method": rng.choice(("gptq", "awq", "bitsandbytes", "evil", canary))}},
                {"rope_scaling": {"rope_type": rng.choice(("yarn", "dynamic", "evil", "llama3")), "factor": -1}},
            )
        )
    if rng.random() < 0.85:
        tree = mutate.mutated_json(rng, tree)
    evil = f"import os\nos.system('touch {place.own / CANARY}')\n".encode()
    return Mutant({"config.json": mutate.json_text(rng, tree), "evil.py": evil}, (rng.choice(("train", "plan")),))


TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 3000000000 }}",
    "{{ raise_exception('no') }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[9].content }}",
)


def make_tokenizer(rng: random.Random, place: Place) -> Mutant:
    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    name = rng.choice(files[:1] * 3 + files[1:2] * 2 + files[2:])
    tool = rng.choice(("train", "train", "train", "plan"))
    if name == "chat_template.jinja":
        text = rng.choice(TEMPLATES).replace("CANARY", str(place.own / CANARY)).encode()
        rows = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        return Mutant(
            {name: text if rng.random() < 0.7 else mutate.mutated_bytes(rng, text), "chats.jsonl": rows * 4}, (tool,)
        )
    tree = json.loads((place.model() / name).read_text())
    return Mutant({name: mutate.json_text(rng, mutate.mutated_json(rng, tree))}, (tool,))


def make_index(rng: random.Random, place: Place) -> Mutant:
    """An index of shards: odd, or one whose shards lie outside the folder."""
    names = json.loads(_header(place.model() / WEIGHTS))
    names.pop("__metadata__", None)
    tree = {"metadata": {"total_size": 1}, "weight_map": {name: "part.safetensors" for name in names}}
    if rng.random() < 0.4:
        outside = rng.choice((f"../../../model/{WEIGHTS}", str(place.model() / WEIGHTS), f"./../../../model/{WEIGHTS}"))
        tree["weight_map"] = dict.fromkeys(names, outside)
        return Mutant({INDEX: json.dumps(tree).encode()}, ("train", "escape"))
    return Mutant({INDEX: mutate.json_text(rng, mutate.mutated_json(rng, tree))}, (rng.choice(("train", "plan")),))


def _header(file: Path) -> bytes:
    data = file.read_bytes()
    return data[8 : 8 + struct.unpack("<Q", data[:8])[0]]


def make_safetensors(rng: random.Random, place: Place) -> Mutant:
    if rng.random() < 0.15:
        return make_index(rng, place)
    tool = rng.choice(("train", "train", "plan", "generate"))
    if tool == "generate" and rng.random() < 0.5:
        name = rng.choice(("adapter_config.json", "base_model.json"))
        tree = json.loads((place.whole("lora") / "run" / name).read_text())
        return Mutant({name: mutate.json_text(rng, mutate.mutated_json(rng, tree))}, (tool,))
    name = ADAPTER if tool == "generate" else WEIGHTS
    source = (place.whole("lora") / "run" if tool == "generate" else place.model()) / name
    data = source.read_bytes()
    header = _header(source)
    length, rest = len(header), data[8 + len(header) :]
    kind = rng.randrange(6)
    if kind == 0:
        return Mutant({name: mutate.mutated_bytes(rng, data)}, (tool,))
    if kind == 1:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(data)))
        return Mutant({name: struct.pack("<Q", length) + header + rest}, (tool,))
    if kind == 2:
        payload = b"\x80\x04cos\nsystem\n(S'touch " + str(place.own / CANARY).encode() + b"'\ntR."
        return Mutant({rng.choice((name, name if tool == "generate" else PICKLED)): payload}, (tool,))
    if kind == 3:
        header = mutate.mutated_bytes(rng, header)
    else:
        header = json.dumps(mutate.mutated_json(rng, json.loads(header))).encode()
    if kind == 4:
        rest = mutate.mutated_bytes(rng, rest)
    return Mutant({name: struct.pack("<Q", len(header)) + header + rest}, (tool,))


CONFIG = ModelBatch(make_config)
TOKENIZER = ModelBatch(make_tokenizer)
SAFETENSORS = ModelBatch(make_safetensors)
