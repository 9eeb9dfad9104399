"""Runs of random valid flags: each ends well and did what its plan says; some are killed and resumed, run on two ranks,
or packed and padded.

Seeds ending in 0 are killed twice, in 1 run on two ranks by torchrun, in 2 in both layouts. Every fourth is a command,
the others are forks of the warm process.
"""

import json
import math
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import generate
from finetune.config import DEFAULTS, FIELDS
from finetune.parts.plan_base import format_value
from finetune.safetensors_io import read_header
from tests.rig.children import Child, Ended, argv_of, start_run
from tests.rig.combinations import RANDOM, drawn, made
from tests.rig.materials import Place, tensor_digests
from tests.rig.oracle import EVAL, STEP, Outcome, different_files, events, first_difference
from tests.support import ranks
from tests.support.commands import ROOT, TORCHRUN, command, free_port

LIMIT_S = 60.0
COMPILED_S = 300.0
COLD_S = 90.0  # a process that imports everything, on two cores that others use
ATTEMPTS = 40
REFUSED = 2
RELATIVE = 1e-5
ENDS_EARLY = ("early_stopping", "stop_on_divergence")
# Settings that checks of the loaded model and of the data settle, after what a dry run prints.
FINAL = ("batch_layout", "batch_size", "gradient_accumulation_steps", "precompute_ref_log_probs", "compile", "lr")
FINAL += ("frozen_products",)
BY_DATA = {
    "none": {},
    "fsdp": {"parallel": "fsdp"},
    "ddp": {"dp_degree": "2"},
    "shard_grad_op": {"sharding_strategy": "shard_grad_op"},
    "no_sync": {"dp_degree": "2", "no_sync": "true"},
    "vocab": {"parallel": "fsdp", "vocab_parallel": "true"},
}
BY_MODEL = {
    "tp": {"tp_degree": "2"},
    "sequence": {"tp_degree": "2", "sequence_parallel": "true"},
    "cp": {"cp_degree": "2"},
    "pp": {"pp_degree": "2"},
    "gpipe": {"pp_degree": "2", "pp_schedule": "gpipe"},
}


def combination(seed: int, place: Place) -> Outcome:
    rng = random.Random(f"combinations {seed}")
    folder = place.empty()
    outcome = Outcome()
    kind = {0: resumed, 1: on_two_ranks, 2: in_two_layouts}.get(seed % 10, alone)
    outcome.kept = {"refused": [], "how": kind.__name__}
    kind(outcome, rng, folder, made(place), is_command=seed % 4 == 3)
    return outcome


def alone(outcome: Outcome, rng: random.Random, folder: Path, materials: Path, is_command: bool) -> None:
    flags = ran(outcome, rng, folder, materials, {}, is_command=is_command)
    if not flags or rng.random() < 0.6 or flags.get("save_model") == "false" or "preference" in flags:
        return
    argv = ["--checkpoint", str(folder / "run"), "--prompt", "1 plus 1?", "--max_new_tokens", "4"]
    ended = Child(folder, name="generate").start(lambda: generate.main(argv)).end(LIMIT_S)
    outcome.judge(ended, (0,), "generate.py")


def resumed(outcome: Outcome, rng: random.Random, folder: Path, materials: Path, is_command: bool) -> None:
    """Killed twice after steps of its own, and started again: bit by bit the uninterrupted run."""
    saves = {"save_every": rng.choice(("1", "1", "2")), "save_model": "true"}
    flags = ran(outcome, rng, folder, materials, saves)
    if not flags:
        return
    whole = folder / "run"
    steps = len(events(whole, "step", STEP))
    again = flags | {"output_dir": str(folder / "again"), "resume": "auto"}
    for number in range(2):
        child = start_run(again, folder, name=f"kill{number}")
        wait_for_steps(child, folder / "again", rng.randint(1, max(1, steps - 1)), limit_of(flags))
        child.send(9)
        if not outcome.judge(child.end(limit_of(flags)), (-9, 0), f"kill {number}"):
            return
    if not outcome.judge(start_run(again, folder, name="last").end(limit_of(flags)), (0,), "restart"):
        return
    for name, keys in (("step", STEP), ("eval", EVAL)):
        mine = events(folder / "again", name, keys)
        expected = events(whole, name, keys)
        if mine != expected:
            outcome.fail("differing_bits", f"{name} events: {first_difference(mine, expected)}")
    one = tensor_digests(folder / "again")
    other = tensor_digests(whole)
    if one != other:
        outcome.fail("differing_bits", f"published: {different_files(one, other)}")


def on_two_ranks(outcome: Outcome, rng: random.Random, folder: Path, materials: Path, is_command: bool) -> None:
    """The losses of two ranks started by torchrun are those of one."""
    name = rng.choice([*BY_DATA, *BY_MODEL])
    degrees = (BY_DATA | BY_MODEL)[name]
    rows = rng.choice((1, 2))
    most = 2 * rows
    if name in BY_DATA:
        most = rows
    always = dict(precision="fp32", batch_size=str(2 * rows), num_epochs="2", log_every_n_steps="1")
    for flags in attempts(outcome, rng, folder, materials, always, without=RANDOM):
        ended = start_run(flags, folder).end(LIMIT_S)
        if not judged(outcome, ended, flags, "one rank"):
            return
        if ended.code:
            drop_named(outcome, flags, ended)
            continue
        many = flags | degrees | {"batch_size": str(most), "output_dir": str(folder / "ranks")}
        ended = launched([*TORCHRUN, str(ROOT / "train.py"), *argv_of(many)], folder, COLD_S)
        if not judged(outcome, ended, many, f"two ranks, {name}"):
            return
        if ended.code:
            drop_named(outcome, flags, ended)
            continue
        outcome.kept["degrees"] = degrees
        same_losses(outcome, folder / "ranks", folder / "run", f"two ranks, {name}")
        return
    outcome.fail("rig", "nothing that two ranks accept was drawn")


def in_two_layouts(outcome: Outcome, rng: random.Random, folder: Path, materials: Path, is_command: bool) -> None:
    """The losses of packed rows are those of padded ones."""
    always = dict(precision="fp32", batch_size="2", batch_layout="padding_free", num_epochs="2", log_every_n_steps="1")
    for flags in attempts(outcome, rng, folder, materials, always, without=RANDOM):
        ended = start_run(flags, folder).end(LIMIT_S)
        if not judged(outcome, ended, flags, "packed"):
            return
        if ended.code:
            drop_named(outcome, flags, ended)
            continue
        padded = flags | {"batch_layout": "padded", "output_dir": str(folder / "padded")}
        ended = start_run(padded, folder).end(LIMIT_S)
        if not judged(outcome, ended, padded, "padded"):
            return
        if ended.code:
            drop_named(outcome, flags, ended)
            continue
        same_losses(outcome, folder / "padded", folder / "run", "padded")
        return
    outcome.fail("rig", "nothing that packs was drawn")


def ran(
    outcome: Outcome, rng: random.Random, folder: Path, materials: Path, always: dict, is_command: bool = False
) -> dict:
    """Flags of a run into folder/run that ended well and as planned; {} after a failure."""
    for flags in attempts(outcome, rng, folder, materials, always):
        if is_command:
            ended = launched(command(flags), folder, max(COLD_S, limit_of(flags)))
        else:
            ended = start_run(flags, folder).end(limit_of(flags))
        if not judged(outcome, ended, flags, "run"):
            return {}
        if ended.code:
            drop_named(outcome, flags, ended)
            continue
        check_as_planned(outcome, folder / "run", flags, planned_text(folder), ended.out)
        return flags
    outcome.fail("rig", "no valid flags were drawn")
    return {}


def limit_of(flags: dict) -> float:
    """Seconds that a run of these flags may take."""
    if flags.get("compile") == "true":
        return COMPILED_S
    return LIMIT_S


def attempts(outcome: Outcome, rng: random.Random, folder: Path, materials: Path, always: dict, without: tuple = ()):
    """Yields flags that a dry run accepts, at most ATTEMPTS times; what their lines name is left out.

    The caller ends it, or drops more of the flags that it was given.
    """
    flags: dict = {}
    for number in range(ATTEMPTS):
        if not flags or number % 12 == 11:
            flags.clear()
            flags |= {name: value for name, value in drawn(rng, materials).items() if name not in without} | always
            flags["output_dir"] = str(folder / "run")
        outcome.kept["argv"] = argv_of(flags)
        ended = dry(flags, folder)
        if not judged(outcome, ended, flags, "dry run"):
            return
        if ended.code:
            drop_named(outcome, flags, ended)
            continue
        for name in ("run", "ranks", "padded"):
            shutil.rmtree(folder / name, ignore_errors=True)
        yield flags


def dry(flags: dict, folder: Path) -> Ended:
    import train

    argv = [*argv_of(flags), "--dry_run"]
    return Child(folder, name="dry").start(lambda: train.main(argv)).end(LIMIT_S)


def planned_text(folder: Path) -> str:
    return (folder / "dry.out").read_text(errors="replace")


def judged(outcome: Outcome, ended: Ended, flags: dict, what: str) -> bool:
    """Records whatever is neither a good end nor one line of a refusal."""
    outcome.kept["argv"] = argv_of(flags)
    if not outcome.judge(ended, (0, REFUSED), what):
        return False
    lines = [line for line in ended.err.splitlines() if line.startswith("error")]
    if ended.code == REFUSED and len(lines) != 1:
        outcome.fail("wrong_code", f"{what}: exit 2 with {len(lines)} lines: {ended.err[-200:]}")
        return False
    return True


def drop_named(outcome: Outcome, flags: dict, ended: Ended) -> None:
    """Leaves out the first flag that a refusal names; all but the model and rows where it names none."""
    line = next(line for line in ended.err.splitlines() if line.startswith("error"))
    outcome.kept["refused"].append(line[:300])
    named = [name for name in re.findall(r"--(\w+)", line) if name in flags and name not in ("model_name", "dataset")]
    if named:
        del flags[named[0]]
    else:
        flags.clear()


def launched(argv: list, folder: Path, limit_s: float) -> Ended:
    """A command of its own."""
    began = time.monotonic()
    environment = {"LD_PRELOAD": "", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    with open(folder / "command.out", "w+") as out, open(folder / "command.err", "w+") as err:
        process = ranks.start(argv, environment, stdout=out, stderr=err, cwd=ROOT)
        hung = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            ranks.kill_session(process)
    texts = [(folder / f"command.{end}").read_text(errors="replace") for end in ("out", "err")]
    code = process.returncode
    if "--standalone" in argv and code == 1 and re.search(r"exitcode\s*: 2 ", texts[1]):
        code = REFUSED  # torchrun's own code is 1
        texts[1] = "\n".join(line for line in texts[1].splitlines() if line.startswith("error"))[:2000]
        texts[1] = texts[1].splitlines()[0] if texts[1] else ""
    return Ended(code, *texts, time.monotonic() - began, hung)


def wait_for_steps(child: Child, run: Path, number: int, timeout_s: float) -> None:
    """Returns when the run has logged this many steps, or has ended."""
    end = time.monotonic() + timeout_s
    while child.running() and time.monotonic() < end and len(events(run, "step", STEP)) < number:
        time.sleep(0.002)


def same_losses(outcome: Outcome, run: Path, alone: Path, what: str) -> None:
    for name in ("step", "eval"):
        keys = ("step", "loss", "num_targets")
        mine = events(run, name, keys)
        expected = events(alone, name, keys)
        if len(mine) != len(expected):
            outcome.fail("differing_bits", f"{what}: {len(mine)} {name} events, not {len(expected)}")
        for one, other in zip(mine, expected, strict=False):
            near = math.isclose(one["loss"] or 0, other["loss"] or 0, rel_tol=RELATIVE, abs_tol=RELATIVE)
            if not near or one["num_targets"] != other["num_targets"] or one["step"] != other["step"]:
                outcome.fail("differing_bits", f"{what}: {name} {one} is not {other}")
                return


def check_as_planned(outcome: Outcome, run: Path, flags: dict, dry_text: str, text: str) -> None:
    """Records where a run is not what its plan says."""
    plan = json.loads((run / "run_plan.json").read_text())
    settled = plan["settled"]
    changed = {one["setting"] for one in plan["adjustments"]}
    for name, asked in plan["requested"].items():
        is_default = asked == "auto" and settled.get(name) == DEFAULTS.get(name, asked)
        if name in settled and settled[name] != asked and name not in changed and not is_default:
            outcome.fail("wrong_code", f"--{name} {asked} became {settled[name]} without a word")
    for name, asked in flags.items():
        if name in FIELDS and name not in plan["requested"] and FIELDS[name].metadata["saved"]:
            if name not in changed and format_value(settled.get(name)) != asked:
                outcome.fail("wrong_code", f"--{name} {asked} is not in the plan")
    for line in plan_lines(dry_text):
        if line not in plan_lines(text):
            outcome.fail("wrong_code", f"the dry run says, and the run does not: {line}")
    steps = events(run, "step", ("step", "loss", "lr"))
    (end,) = events(run, "end", ("step", "status"))
    if end["status"] != "finished":
        outcome.fail("wrong_code", f"ended as {end}")
    if any(not math.isfinite(one["loss"]) for one in steps):
        outcome.fail("wrong_code", f"losses {steps}")
    every = settled["log_every_n_steps"]
    expected = [n for n in range(1, end["step"] + 1) if n % every == 0 or n in (1, end["step"])]
    if [one["step"] for one in steps] != expected and every == 1:
        outcome.fail("wrong_code", f"steps {[one['step'] for one in steps]}, not {expected}")
    ends_early = any(settled[name] for name in ENDS_EARLY)
    if settled["max_steps"] > 0 and not ends_early and end["step"] != settled["max_steps"]:
        outcome.fail("wrong_code", f"{end['step']} steps of {settled['max_steps']}")
    if isinstance(settled["lr"], float) and any(one["lr"] > settled["lr"] * (1 + 1e-6) for one in steps):
        outcome.fail("wrong_code", f"rates over {settled['lr']}: {[one['lr'] for one in steps]}")
    check_saves(outcome, run, settled, end["step"])
    if settled["save_model"]:
        check_published(outcome, run, settled)


def plan_lines(text: str) -> list[str]:
    """What is printed of the plan, but for what is measured or settled later."""
    found = []
    for line in text.splitlines():
        if line.startswith("output:"):
            break
        name = line.strip().partition(":")[0]
        if line.startswith("  ") and not line.strip().startswith("note") and name not in FINAL:
            found.append(line.partition(" (")[0])  # a reason may be a probe, which a dry run leaves out
    return found


def check_saves(outcome: Outcome, run: Path, settled: dict, last: int) -> None:
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    if not settled["save_every"]:
        expected = []
    else:
        expected = [n for n in range(1, last + 1) if n % settled["save_every"] == 0 or n == last]
    expected = expected[-settled["keep_last"] :]
    if settled["save_every"] and steps != expected:
        outcome.fail("wrong_code", f"checkpoints {steps}, not {expected}")


def check_published(outcome: Outcome, run: Path, settled: dict) -> None:
    """The published tensors are those that the plan trains."""
    if settled["train_type"] == "full" or settled["llama_pro_path"]:
        if not list(run.glob("model*.safetensors")):
            outcome.fail("wrong_code", "no model was published")
        return
    header = read_header(run / "adapter_model.safetensors")
    names = list(header)
    config = json.loads((run / "adapter_config.json").read_text())
    if bool(config["use_dora"]) != settled["use_dora"] or bool(config["use_rslora"]) != settled["use_rslora"]:
        outcome.fail("wrong_code", f"adapter_config.json: {config['use_dora']}, {config['use_rslora']}")
    if settled["use_dora"] != any("magnitude" in name for name in names):
        outcome.fail("wrong_code", f"use_dora {settled['use_dora']}, {names[:3]}")
    layers = {int(found.group(1)) for name in names if (found := re.search(r"\.(?:layers|h)\.(\d+)\.", name))}
    if settled["layers_to_transform"] and layers - {int(n) for n in settled["layers_to_transform"].split(",")}:
        outcome.fail("wrong_code", f"layers {layers}")
    if settled["num_layers"] > 0 and len(layers) > settled["num_layers"]:
        outcome.fail("wrong_code", f"layers {layers}")
