"""Random command lines and YAML configs: a plan, or one line that says what is wrong."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import train
from finetune.config import FIELDS, NAMES, value_type
from tests.rig import mutate
from tests.rig.batch import CANARY, Finding, Mutant
from tests.rig.materials import Place

NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "7",
    "1e-3",
    "1e30",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "1_000",
    "٣",
    "9" * 400,
    "2**3",
)
WORDS = (
    "",
    " ",
    "auto",
    "none",
    "null",
    "true",
    "no",
    "TRUE",
    "é",
    "\x1b[31m",
    "a" * 300,
    "../..",
    "/",
    "/dev/null",
    "~",
)
NOT_TRIED = ("doctor", "recommend")  # they probe the machine for seconds, and read no other flag
COMMON = ("--backend", "cpu")


@dataclass
class Plans:
    """Plans made from `make(rng, place)`: a mutant with argv and files; $DIR in argv is the case's folder."""

    make: object
    variants: tuple = ()

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        return self.make(rng, place)

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        words = [w.replace("$DIR", str(folder)).replace("$MODEL", str(place.model())) for w in mutant.argv]
        words = [w.replace("$ROWS", str(place.rows() / "rows.jsonl")) for w in words]
        code = train.main([*words, "--dry_run"])
        if code not in (0, 2):
            raise Finding("wrong_code", f"exit code {code}")


def odd_word(rng: random.Random, name: str) -> str:
    """A value for a flag: often one that it takes."""
    field = FIELDS[name]
    choices = [*NUMBERS, *WORDS, *mutate.ODD_TEXT, str(field.default), "$DIR", "$DIR/x", "$ROWS", "$MODEL"]
    choices += list(field.metadata["choices"] or ()) * 4
    if value_type(field) in (int, float):
        choices += ["1", "2", "3", "4", "8", "16", "0.5", "100"] * 3
    return rng.choice(choices).replace("\0", "" if rng.random() < 0.7 else "\0")


def make_flags(rng: random.Random, place: Place) -> Mutant:
    words = ["--model_name", "$MODEL", "--dataset", "$ROWS", "--output_dir", "$DIR/out", *COMMON]
    words = words[: 2 * rng.choice((0, 2, 4, 4, 4, 4))]
    names = [n for n in NAMES if NAMES[n] not in NOT_TRIED]
    for _ in range(rng.choice((1, 1, 2, 3, 5, 9))):
        name = rng.choice(names)
        spelled = rng.choice((name, name, name, name.replace("_", "-"), name[:-1], name.upper()))
        word = odd_word(rng, NAMES[name])
        words += rng.choice(([f"--{spelled}", word], [f"--{spelled}={word}"], [f"--{spelled}"]))
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), rng.choice(("x", "--", "-", "-h5", "--=", "@file", "---")))
    # As the interpreter passes on bytes that are not UTF-8.
    return Mutant({}, tuple(os.fsdecode(word.encode(errors="surrogatepass")) for word in words))


# ---- YAML

PAYLOADS = (
    "dataset: !!python/object/apply:os.system ['touch {canary}']",
    "name: !!python/object/new:subprocess.check_output [['touch', '{canary}']]",
    "seed: !!python/name:os.system",
    "lr: !!binary aGk=",
    "name: &a [*a]",
    "seed: !!timestamp 2026-13-45",
    "a: &a [x,x,x,x,x,x,x,x]\nname: &b [*a,*a,*a,*a,*a,*a,*a,*a]\ngroup: [*b,*b,*b,*b,*b,*b,*b,*b]",
    "? {a: b}\n: c",
    "<<: {seed: 5}\nseed: 6",
    "<<: 5",
    "%YAML 9.9\n---\nseed: 1",
    "seed: 1\n---\nseed: 2",
)


def make_yaml(rng: random.Random, place: Place) -> Mutant:
    lines = ["backend: cpu", "model_name: $MODEL", "dataset: $ROWS", "output_dir: $DIR/out"]
    lines = [line.replace("$MODEL", str(place.model())) for line in lines]
    lines = [line.replace("$ROWS", str(place.rows() / "rows.jsonl")) for line in lines]
    lines = lines[: rng.choice((1, 4, 4, 4))]
    for _ in range(rng.randint(1, 6)):
        name = rng.choice([n for n in NAMES if NAMES[n] not in NOT_TRIED])
        word = odd_word(rng, NAMES[name])
        lines.append(f"{name}: " + rng.choice((word, repr(word), f"[{word}]", f"{{a: {word}}}", f"|\n  {word}", "")))
    if rng.random() < 0.15:
        lines.append(rng.choice(PAYLOADS).replace("{canary}", str(place.own / CANARY)))
    rng.shuffle(lines)
    data = "\n".join(lines).encode(errors="surrogatepass")
    if rng.random() < 0.4:
        data = mutate.mutated_bytes(rng, data)
    return Mutant({"run.yaml": data}, ("--config", "$DIR/run.yaml", *(COMMON if rng.random() < 0.5 else ())))


FLAGS = Plans(make_flags)
YAML = Plans(make_yaml)
