"""--preference trains pairs and labels from the command line: steps, evaluation, resume, ranks, accumulation."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from finetune.data.prepare import load_data, read_datasets
from finetune.errors import PlanError
from finetune.model_files.tokenizer import load_tokenizer
from finetune.run.reference_log_probs import FILE
from tests.support.cells import but_slow
from tests.support.commands import command, finish
from tests.support.rows import jsonl
from tests.support.runs import PLAIN, WHOLE_STATE, copy_up_to, read_events, same_files
from train import fine_tune, make_plan

METHODS = ("dpo", "orpo", "simpo", "kto")
COMPARING = ("dpo", "kto")  # with the model before training
METRICS = {
    "dpo": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "orpo": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "simpo": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "kto": ("kl", "rewards/accuracies"),
}
STEP = ("step", "loss", "lr", "grad_norm", "num_tokens", "num_targets", "num_rows", *METRICS["dpo"], "kl")
PAIRS = [
    {"prompt": f"What is {i} plus {i}? ", "chosen": f"It is {2 * i}" + "." * (i % 5), "rejected": f"No {i % 3} idea"}
    for i in range(12)
]
LABELS = [
    {"prompt": row["prompt"], "completion": row["rejected" if i % 3 else "chosen"], "label": not i % 3}
    for i, row in enumerate(PAIRS)
]


@pytest.fixture(scope="module")
def flags(tiny_model, tmp_path_factory):
    """Flags by method: 12 rows in steps of 4 over two epochs are 6 steps."""
    folder = tmp_path_factory.mktemp("preferences")
    files = {method: jsonl(folder / f"{method}.jsonl", LABELS if method == "kto" else PAIRS) for method in METHODS}
    plain = {**PLAIN, "model_name": str(tiny_model), "num_epochs": 2, "lr": 5e-3}
    return {m: {**plain, "dataset": files[m], "validation_dataset": files[m], "preference": m} for m in METHODS}


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """Output folders of the methods' runs, with dropout, a checkpoint at every step, in batches of two."""
    found = {}

    def run(method: str):
        if method not in found:
            found[method] = tmp_path_factory.mktemp("whole") / "out"
            changes = dict(batch_size=2, gradient_accumulation_steps=2, save_every=1, keep_last=9, lora_dropout=0.1)
            state = fine_tune(**flags[method] | changes, output_dir=str(found[method]))
            assert state.exit_code == 0 and state.step == 6
        return found[method]

    return run


def test_a_prompt_that_a_pair_shares_counts_once_in_predicted_memory(flags, tmp_path):
    words = " ".join(["the capital of France"] * 12)
    ends = {"chosen": " is Paris", "rejected": " is unknown to everybody"}
    file = jsonl(tmp_path / "long.jsonl", [{"prompt": f"{words} {i}"} | ends for i in range(12)])
    settings = dict(dataset=file, validation_dataset=None, output_dir=str(tmp_path / "out"), context_length=128)
    assert fine_tune(**flags["dpo"] | settings | {"num_epochs": 1}).exit_code == 0
    start, *_, end = read_events(tmp_path / "out")
    predicted, measured = (
        e["items"]["activations"] for e in (start["predicted_memory_bytes"], end["peak_memory_bytes"])
    )
    assert predicted == pytest.approx(measured, rel=0.02)


def steps(folder) -> list[dict]:
    return [{k: e[k] for k in STEP if k in e} for e in read_events(folder, "step")]


def compared(event: dict) -> list[str]:
    """Names of an event's numbers. While the model is its reference, rounding alone says which reward is the higher."""
    is_reference = abs(event.get("rewards/chosen", 1)) + abs(event.get("rewards/rejected", 1)) < 1e-5
    return [name for name in STEP if name in event and not (is_reference and name == "rewards/accuracies")]


def assert_same(folder, other, tolerance=1e-5):
    """Losses and metrics of steps and evaluations, and the adapter, up to rounding in fp32."""
    for kind in ("step", "eval"):
        one, two = ([(k, e[k]) for e in read_events(f, kind) for k in compared(e)] for f in (folder, other))
        assert [name for name, _ in one] == [name for name, _ in two]
        np.testing.assert_allclose([v for _, v in one], [v for _, v in two], rtol=tolerance, atol=tolerance)
    one, two = (load_file(f / "adapter_model.safetensors") for f in (folder, other))
    for name in one:  # 6 steps of AdamW at 5e-3: rounding where second moments are tiny
        np.testing.assert_allclose(one[name], two[name], atol=2e-4)


@pytest.mark.parametrize("method", but_slow(METHODS, ("dpo", "kto")))
def test_a_run_learns_what_is_preferred_and_logs_it(method, flags, tmp_path, capsys):
    state = fine_tune(**flags[method] | {"lr": 2e-2}, output_dir=str(tmp_path / "out"))
    out = capsys.readouterr().out
    assert state.exit_code == 0 and state.scores["after"]["loss"] < state.scores["before"]["loss"]
    for event in read_events(tmp_path / "out", "step"):
        assert event["num_rows"] == 4 and set(METRICS[method]) <= event.keys() and event["num_targets"] > 4
    first, last = read_events(tmp_path / "out", "eval")
    assert last["num_rows"] == 12 and last["rewards/margins"] > first["rewards/margins"]
    assert f"{method} with lora of" in out and f"| {METRICS[method][0]} " in out
    assert ("pairs per step: 4" in out) == (method != "kto")
    assert ("chosen: " in out) == (method != "kto") and ("desirable: " in out) == (method == "kto")
    start, *_, end = read_events(tmp_path / "out")
    predicted, measured = (
        e["items"]["activations"] for e in (start["predicted_memory_bytes"], end["peak_memory_bytes"])
    )
    assert predicted == pytest.approx(measured, rel=0.05)  # of both documents of a pair
    if method == "dpo":
        assert first["loss"] == pytest.approx(np.log(2))
    assert last["rewards/accuracies"] > (0.8 if method == "kto" else 0.9)  # of 12 labels, 8 alike
    if method in COMPARING:
        assert (tmp_path / "out" / FILE).exists() and "once takes fewer forwards" in out


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 3, 5))])
@pytest.mark.parametrize(
    "method", ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "orpo", "simpo"))]
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(method, step, whole, tmp_path):
    folder = copy_up_to(whole(method), step, tmp_path / "out")
    state = fine_tune(resume="auto", output_dir=str(folder))
    assert state.step == 6 and state.status == "finished"
    assert steps(folder) == steps(whole(method))
    same_files(folder / "checkpoints" / "step-6", whole(method) / "checkpoints" / "step-6", WHOLE_STATE)


@pytest.mark.parametrize("method", but_slow(["dpo", "kto"], ["dpo"]))
def test_the_reference_kept_is_what_a_second_model_gives(method, whole, flags):
    model = AutoModelForCausalLM.from_pretrained(flags[method]["model_name"], dtype=torch.float32)
    plan = make_plan(flags[method])
    data = load_data(plan.data, read_datasets(plan.data), load_tokenizer(plan.files.folder), plan.files)
    kept = json.loads((whole(method) / FILE).read_text())["log_probs"]["train"]
    assert len(kept) == len(data.train) == (12 if method == "kto" else 24)
    for i, found in enumerate(kept):
        ids, is_target = (torch.from_numpy(a.copy()) for a in data.train.document(i))
        with torch.no_grad():
            log_probs = model(ids[None].long()).logits[0, :-1].log_softmax(-1)
        wanted = log_probs.gather(1, ids[1:, None].long())[is_target[1:]].sum().item()
        assert found == pytest.approx(wanted, rel=1e-5)  # fp32: sums in another order


@pytest.mark.slow
def test_a_reference_that_is_damaged_or_of_other_rows_is_computed_again(whole, flags, tmp_path, capsys):
    def forge(edit):
        def damage(content):
            edit(content["log_probs"])
            content["sha256"] = hashlib.sha256(json.dumps(content["log_probs"], sort_keys=True).encode()).hexdigest()

        return damage

    damages = (
        lambda content: content["log_probs"]["train"].reverse(),
        lambda content: content.update(key="0"),
        forge(lambda log_probs: log_probs["train"].pop()),
        forge(lambda log_probs: log_probs.update(other=log_probs.pop("train"))),
        forge(lambda log_probs: log_probs["train"].__setitem__(0, -(10**400))),
        forge(lambda log_probs: log_probs["train"].__setitem__(0, float("nan"))),
    )
    for i, damage in enumerate(damages):
        folder = copy_up_to(whole("dpo"), 4, tmp_path / f"{i}")
        content = json.loads((folder / FILE).read_text())
        damage(content)
        (folder / FILE).write_text(json.dumps(content))
        fine_tune(resume="auto", output_dir=str(folder))
        assert "computing what the model before training gives 48 answers" in capsys.readouterr().out
        same_files(folder, whole("dpo"), [FILE])
        assert steps(folder) == steps(whole("dpo"))
    shutil.copytree(whole("dpo"), tmp_path / "other")
    alone = {"max_steps": 1, "overwrite": True, "validation_dataset": None}
    fine_tune(**flags["dpo"] | alone, output_dir=str(tmp_path / "other"))
    assert not (tmp_path / "other" / FILE).exists()  # one step reads no row twice


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
@pytest.mark.parametrize("method", METHODS)
def test_accumulation_layouts_and_a_reference_of_every_step_give_the_same_run(method, train_type, flags, tmp_path):
    changes = {
        "whole": {},
        "accumulated": dict(batch_size=1, gradient_accumulation_steps=4),
        "padded": dict(batch_layout="padded", microbatch_tokens=64),
        "every step": {"precompute_ref_log_probs": "false"} if method in COMPARING else {"microbatch_tokens": 1},
    }
    for name, change in changes.items():
        options = flags[method] | dict(lr=1e-3, train_type=train_type) | change
        fine_tune(**options, output_dir=str(tmp_path / name))
        assert_same(tmp_path / name, tmp_path / "whole", 1e-4)  # an error of one step is the next one's weights


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_as_one(method, train_type, flags, tmp_path):
    options = flags[method] | dict(lr=1e-3, train_type=train_type)
    fine_tune(**options, output_dir=str(tmp_path / "one"))
    argv = command(options | dict(batch_size=2), "--world_size 2", output_dir=tmp_path / "two")
    code, out, err = finish(argv)
    assert code == 0 and "ranks: 2" in out, err
    assert_same(tmp_path / "two", tmp_path / "one", 1e-4)
    if method in COMPARING:
        one, two = (json.loads((tmp_path / name / FILE).read_text())["log_probs"] for name in ("one", "two"))
        np.testing.assert_allclose(two["train"], one["train"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["tp_degree", "cp_degree", "pp_degree"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_share_rows_train_evaluate_and_resume_as_one_process(method, degree, flags, tmp_path):
    options, shared = flags[method] | {"lr": 1e-3}, f"--world_size 2 --{degree} 2"
    fine_tune(**options, output_dir=str(tmp_path / "one"))
    runs = {"two": f"{shared} --save_every 1 --keep_last 9"}
    if method in COMPARING:
        runs["every step"] = f"{shared} --precompute_ref_log_probs false"
    for name, more in runs.items():
        code, _, err = finish(command(options, more, output_dir=tmp_path / name))
        assert code == 0, err
        assert_same(tmp_path / name, tmp_path / "one", 1e-4)
    resumed = copy_up_to(tmp_path / "two", 4, tmp_path / "resumed")
    code, _, err = finish(command("--resume auto", output_dir=resumed))
    assert code == 0, err
    assert steps(resumed) == steps(tmp_path / "two")
    same_files(resumed / "checkpoints" / "step-6", tmp_path / "two" / "checkpoints" / "step-6", WHOLE_STATE)
    if method in COMPARING:
        one, two = (json.loads((tmp_path / name / FILE).read_text())["log_probs"] for name in ("one", "two"))
        np.testing.assert_allclose(two["train"], one["train"], rtol=1e-5)


@pytest.mark.slow
def test_orpo_trains_all_weights_as_it_compares_with_nothing(flags, tmp_path):
    options = flags["orpo"] | {"train_type": "full", "lr": 1e-3}
    state = fine_tune(**{k: v for k, v in options.items() if k != "lora_rank"}, output_dir=str(tmp_path / "out"))
    assert state.scores["after"]["loss"] < state.scores["before"]["loss"]


def test_a_mixture_takes_a_pair_twice_in_a_step(flags, tmp_path, capsys):
    few = jsonl(tmp_path / "few.jsonl", PAIRS[:2])
    options = flags["dpo"] | {"dataset": [f"{flags['dpo']['dataset']}:1", f"{few}:3"], "num_epochs": 1}
    state = fine_tune(**options, output_dir=str(tmp_path / "out"))
    out = capsys.readouterr().out
    assert state.step == 4 and "2 datasets mixed by weight" in out
    total = sum(e["num_tokens"] for e in read_events(tmp_path / "out", "step"))
    of_each = re.search(r"tokens by dataset: \S+ ([\d,]+) .*?, \S+ ([\d,]+) ", out).groups()
    assert sum(int(n.replace(",", "")) for n in of_each) == total


@pytest.mark.slow
def test_kto_learns_from_both_halves_of_pairs(flags, tmp_path):
    pairs = {name: flags["dpo"][name] for name in ("dataset", "validation_dataset")}
    state = fine_tune(**flags["kto"] | pairs | {"lr": 2e-2}, output_dir=str(tmp_path / "out"))
    assert state.step == 12 and state.scores["after"]["rewards/margins"] > 0
    assert state.scores["after"]["num_rows"] == 24


@pytest.mark.parametrize("split", [0.0, 0.5])
def test_kto_of_one_row_is_refused_in_a_dry_run_too(split, flags, tmp_path):
    """Which a row held out for validation leaves of two."""
    rows = jsonl(tmp_path / "one.jsonl", LABELS[: 2 if split else 1])
    given = {k: v for k, v in flags["kto"].items() if k != "validation_dataset"}
    for dry_run in (False, True):
        with pytest.raises(PlanError, match="has one row to train on, and each prompt is also read with another"):
            fine_tune(
                **given | {"dataset": str(rows), "validation_split": split},
                output_dir=str(tmp_path / "out"),
                dry_run=dry_run,
            )


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("dpo", {"train_type": "full"}, "full fine-tuning does not keep"),
        ("kto", {"llama_pro_path": "expanded"}, "its trained layers replace"),
        ("dpo", {"init_lora_weights": "pissa"}, "changes the base at the start"),
        ("orpo", {"train_on_prompt": True}, "prompts are not targets"),
        ("orpo", {"overlong": "split"}, "counts as a whole"),
        ("dpo", {"streaming": True, "max_steps": 2}, "planned over all rows"),
        ("dpo", {"desirable_weight": 2.0}, "is for --preference kto"),
        ("dpo", {"simpo_gamma": 1.0}, "is for --preference simpo"),
        ("none", {"preference_beta": 0.2}, "is for --preference dpo, orpo, simpo and kto"),
        ("kto", {"desirable_weight": 0.0, "undesirable_weight": 0.0}, "nothing is learned"),
        ("kto", {"dataset": None}, "the demo's rows"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_what_it_cannot_be_combined_with_is_one_line(method, changes, said, flags, expanded_model, tmp_path):
    options = flags["kto" if method == "none" else method] | {"preference": method} | changes
    if "train_type" in changes or "llama_pro_path" in changes:
        del options["lora_rank"]
    if "llama_pro_path" in changes:
        options |= {"llama_pro_path": str(expanded_model), "model_name": None}
    with pytest.raises(PlanError, match=said) as raised:
        fine_tune(**options, output_dir=str(tmp_path / "out"))
    assert "\n" not in str(raised.value) and str(raised.value).count(". ") >= 1
