"""The number that a run prints is the one that score.py and generate.py have: they open the base as it was trained."""

import json
import re
import shutil

import pytest

import export
import generate
import score
from backend_manager import BackendManager
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.trained_base import trained_base
from tests.support.rows import ROWS, jsonl
from tests.support.runs import PLAIN, RUN, read_events
from train import fine_tune

QLORA = dict(train_type="qlora")
KINDS = {
    "lora": {},
    "dora": dict(use_dora=True),
    "nf4": dict(QLORA, quantization_backend="nf4"),
    "nf4, dense copies": dict(QLORA, quantization_backend="nf4", cache_dequantized="true"),
    "bnb 8": dict(QLORA, quantization_backend="bnb", n_bits=8),
    "hqq 3": dict(QLORA, quantization_backend="hqq", n_bits=3, group_size=32),
    "quanto 4": dict(QLORA, quantization_backend="quanto", n_bits=4, group_size=32),
    "mlx 4": dict(QLORA, quantization_backend="mlx", n_bits=4, group_size=32),
    "double": dict(QLORA, quantization_backend="nf4", double_quant=True, use_dora=True),
    "bf16": dict(QLORA, quantization_backend="nf4", precision="bf16"),
    "autocast": dict(precision="bf16_autocast"),
    "full": dict(train_type="full", lora_rank=None, lora_dropout=None),
    "engine of MLX": dict(QLORA, backend="mlx", quantization_backend="mlx", lora_dropout=0.0, group_size=32),
}

# Those that share code with another one.
SLOW = ("dora", "nf4, dense copies", "bnb 8", "hqq 3", "quanto 4", "mlx 4", "double", "autocast", "bf16")


def scored(folder, rows, capsys, *more) -> tuple[dict, str]:
    capsys.readouterr()
    limit = ["--max_new_tokens", "6"]
    assert score.main(["--checkpoint", str(folder), "--dataset", rows, "--json", *limit, *more]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.fixture
def rows(tmp_path):
    return jsonl(tmp_path / "scored.jsonl", ROWS[:6])


@pytest.mark.promise("AT_02")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS])
def test_score_gives_the_run_s_own_numbers(kind, rows, tmp_path, run, capsys):
    run(**KINDS[kind], score_dataset=rows, score_max_new_tokens=6, num_epochs=4)
    own = [event for event in read_events(tmp_path / "out") if event["event"] == "eval"][-1]
    device = "mlx" if kind == "engine of MLX" else "cpu"
    found, err = scored(tmp_path / "out", rows, capsys, "--device", device)
    # The same products, cut into microbatches otherwise; in 16 bits each cut rounds otherwise.
    limit = 2e-3 if "bf16" in str(KINDS[kind]) else 1e-6
    assert found["loss"] == pytest.approx(own["loss"], rel=limit)
    assert found["exact_match"] == own["exact_match"]
    quantized = KINDS[kind].get("train_type") == "qlora"
    assert (found["base"] == "dense") is not quantized
    assert ("as trained" in err) is quantized


TURNS = [
    {"role": "user", "content": "Say <|im_end|> twice."},
    {"role": "assistant", "content": "<think>Why not?</think>It is 4."},
    {"role": "user", "content": "And 3 plus 3?"},
    {"role": "assistant", "content": "<think>Six.</think>It is 6."},
]


@pytest.mark.parametrize(
    "how",
    [
        dict(special_tokens_in_text="keep", train_on_last_turn=True, mask_reasoning=True),
        dict(overlong="split", context_length=24, window_overlap=4),
        dict(text_unit="line"),
    ],
    ids=lambda how: next(iter(how)),
)
def test_rows_are_read_as_the_run_read_them(how, chat_model, tmp_path, capsys):
    file = jsonl(tmp_path / "rows.jsonl", [{"messages": TURNS}, {"messages": TURNS[2:]}])
    if "text_unit" in how:
        file = str(tmp_path / "rows.txt")
        (tmp_path / "rows.txt").write_text("It is 4.\nIt is 6, said he.\n")
    flags = PLAIN | dict(model_name=str(chat_model), dataset=file, validation_dataset=file, max_steps=1)
    flags |= dict(context_length=256) | how
    result = fine_tune(**flags, output_dir=str(tmp_path / "out"))
    own = read_events(tmp_path / "out", "eval")[-1]
    found, _ = scored(tmp_path / "out", file, capsys, "--metric", "perplexity", "--device", "cpu")
    for score_of in (found, result.score(file, metric="perplexity")):
        assert score_of["num_targets"] == own["num_targets"]
        assert score_of["loss"] == pytest.approx(own["loss"], rel=1e-6)
    if "window_overlap" in how:  # fits in a shorter window too
        assert result.score(file, metric="perplexity", context_length=4)["num_targets"] > 0


@pytest.fixture(scope="module")
def trained_once(tiny_model, rows_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "out"
    base = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(folder))
    fine_tune(**RUN | base | KINDS["nf4"] | dict(save_every=6, num_epochs=1))
    return folder


@pytest.fixture
def trained(trained_once, tmp_path):
    """A copy of a run on nf4 that a test may change."""
    return shutil.copytree(trained_once, tmp_path / "out")


def test_another_base_is_told_and_gives_another_loss(trained, rows, capsys):
    own, _ = scored(trained, rows, capsys)
    dense, err = scored(trained, rows, capsys, "--n_bits", "16")
    assert dense["base"] == "dense" and dense["loss"] != own["loss"]
    assert "base: dense, asked for; it was trained on nf4 4 bits" in err
    eight, err = scored(trained, rows, capsys, "--n_bits", "8")
    assert eight["base"] == "bnb 8 bits" and "asked for; it was trained on nf4 4 bits" in err


def test_a_step_is_opened_as_its_run_was(trained, rows, capsys):
    found, _ = scored(trained / "checkpoints" / "step-6", rows, capsys)
    assert found["base"] == "nf4 4 bits"


def test_bits_that_are_asked_for_are_had_on_mlx_too(trained, rows, capsys):
    found, err = scored(trained, rows, capsys, "--device", "mlx", "--n_bits", "4")
    assert found["base"] == "mlx 4 bits" and "asked for; it was trained on nf4 4 bits" in err


def test_a_quant_type_that_torch_lacks_is_opened_dense(rows, run, tmp_path, capsys):
    run(**KINDS["engine of MLX"] | dict(quant_type="mxfp4"), num_epochs=1)
    found, err = scored(tmp_path / "out", rows, capsys, "--device", "cpu")
    assert found["base"] == "dense" and "as it was trained on mlx 4 bits (mxfp4), which is MLX's own" in err


def test_new_layers_are_not_quantized(trained, rows):
    (trained / "trained_blocks.json").write_text("{}")
    with pytest.raises(PlanError, match="--n_bits 8: new layers .trained_blocks.json. are opened on a dense base only"):
        trained_base(trained, ModelShape.from_config({}), BackendManager("cpu", verbose=False), n_bits=8)


def test_what_cannot_be_opened_as_trained_says_why(trained, rows, run, tmp_path, capsys):
    found, err = scored(trained, rows, capsys, "--device", "mlx")
    assert found["base"] == "dense" and "base: dense, as it was trained on nf4 4 bits, which MLX lacks" in err
    run(**KINDS["nf4"], init_lora_weights="pissa", output_dir=str(tmp_path / "pissa"))
    found, err = scored(tmp_path / "pissa", rows, capsys)
    assert found["base"] == "dense" and "less the adapter's start (pissa)" in err


def test_an_adapter_without_a_plan_is_opened_dense(trained, rows, tmp_path, capsys):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        shutil.copy(trained / name, tmp_path / "bare" / name)
    found, err = scored(tmp_path / "bare", rows, capsys)
    assert found["base"] == "dense" and "base:" not in err


def test_a_damaged_plan_is_one_line(trained, rows):
    (trained / "run_plan.json").write_text("{")
    with pytest.raises(PlanError, match="run_plan.json.* or remove it to open the adapter on a dense base"):
        score.main(["--checkpoint", str(trained), "--dataset", rows])


def test_a_changed_plan_is_one_line(trained, rows):
    plan = json.loads((trained / "run_plan.json").read_text())
    plan["settled"]["group_size"] = 32
    (trained / "run_plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="run_plan.json: is not as it was written .sha256 differs"):
        score.main(["--checkpoint", str(trained), "--dataset", rows])


def test_generate_says_so_beside_its_answer(trained, capsys):
    capsys.readouterr()
    assert generate.main(["--checkpoint", str(trained), "--prompt", "What is 1?", "--max_new_tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert "base: nf4 4 bits, as trained" in err and "base:" not in out


def test_export_says_that_its_base_is_another_one(trained, tmp_path, capsys):
    assert export.main(["--checkpoint", str(trained), "--output_dir", str(tmp_path / "merged")]) == 0
    assert "note: trained on a base in nf4 4 bits, merged into the dense one" in capsys.readouterr().out


# Half of these are learned in a few steps, so that a score says something of each row.
SAID = [{"prompt": f"Say {word} {i}: ", "completion": word} for i in range(24) for word in ("red", "blue", "grey")]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "No."} for row in SAID]
# Those that learn faster or slower than the others.
STEPS = {
    "full": dict(lr=2e-3, num_epochs=1),
    "hqq 3": dict(lr=5e-3, num_epochs=12),
    "engine of MLX": dict(num_epochs=9),
}


def right_rows(predictions: list[dict], name: str) -> list[int]:
    """Numbers of the rows, from 0, that a metric of score.py --predictions finds right; `source` ends with the line."""
    return sorted(int(p["source"].rpartition(":")[2]) - 1 for p in predictions if p["right"][name])


@pytest.mark.promise("AT_02")
@pytest.mark.parametrize(
    "kind", ["nf4", *(pytest.param(k, marks=pytest.mark.slow) for k in (*KINDS, "dpo", "dpo, nf4") if k != "nf4")]
)
def test_of_32_rows_each_is_answered_as_in_the_run_and_the_export_s_score_stands_beside(kind, tmp_path, run, capsys):
    """Row by row: what the run found right is what score.py finds right; the merged model's score is printed too."""
    rows = jsonl(tmp_path / "32.jsonl", SAID[:32])
    flags = dict(dataset=jsonl(tmp_path / "said.jsonl", SAID), lr=1e-2, num_epochs=6) | STEPS.get(kind, {})
    flags |= KINDS.get(kind, KINDS["nf4"] if "nf4" in kind else {})
    if kind.startswith("dpo"):
        flags |= dict(preference="dpo", dataset=jsonl(tmp_path / "pairs.jsonl", PAIRS))
    names = "exact,contains"
    run(**flags, score_dataset=rows, score_max_new_tokens=6, score_metric=names)
    own = [event for event in read_events(tmp_path / "out") if event["event"] == "eval"][-1]
    device = "mlx" if kind == "engine of MLX" else "cpu"
    found, _ = scored(
        tmp_path / "out", rows, capsys, "--device", device, "--metric", names, "--predictions", str(tmp_path / "p")
    )
    predictions = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    assert len(predictions) == 32
    for name, key in (("exact", "exact_match"), ("contains", "contains")):
        assert own["right"][key] == right_rows(predictions, name)
        assert own[key] == found["scores"][name] == len(own["right"][key]) / 32
    if not kind.startswith("dpo"):
        assert 0 < own["exact_match"] < 1  # else the rows would agree whatever they answer
    if kind in ("full", "engine of MLX"):  # not merged; merged by torch, see tests/mlx_engine
        return
    argv = ["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]
    assert export.main(argv) == 0
    said = capsys.readouterr().out
    assert f"score of {tmp_path / 'merged'}: exact match" in said and "; the run's own, on " in said


@pytest.mark.parametrize("kind", [pytest.param("lora", marks=pytest.mark.slow), "nf4"])
def test_an_export_says_its_own_score_beside_the_run_s(kind, rows, tmp_path, run, capsys):
    run(**KINDS[kind], score_dataset=rows, score_max_new_tokens=6, num_epochs=4)
    own = [event for event in read_events(tmp_path / "out") if event["event"] == "eval"][-1]
    capsys.readouterr()
    argv = ["--checkpoint", str(tmp_path / "out"), "--dtype", "fp32", "--output_dir"]
    assert export.main([*argv, str(tmp_path / "merged")]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    how = ("--device", "cpu", "--context_length", "64", "--precision", "fp32")  # as the run
    found, _ = scored(tmp_path / "merged", rows, capsys, *how)
    words = f"exact match {found['exact_match']:.1%} of 6, loss {found['loss']:.4f}; the run's own, on "
    assert said.startswith(f"score of {tmp_path / 'merged'}: {words}")
    assert f"{'nf4 4 bits' if kind == 'nf4' else 'the same base'}: {own['exact_match']:.1%}" in said
    if kind == "lora":
        assert found["exact_match"] == own["exact_match"]
    more = ["--score_dataset", "none"]
    assert export.main([*argv, str(tmp_path / "again"), *more]) == 0
    assert "exact match" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_export_reads_the_scored_rows_as_the_run_did(tmp_path, run, capsys):
    rows = [{"question": r["prompt"], "first": "no", "second": r["completion"], "split": "x"} for r in ROWS[:6]]
    named = dict(columns="prompt=question,completion=second", ignore_columns="first,split")
    file = jsonl(tmp_path / "two.jsonl", rows)
    run(dataset=file, **named, score_dataset=file, score_metric="perplexity", num_epochs=2)
    own = [event for event in read_events(tmp_path / "out") if event["event"] == "eval"][-1]
    capsys.readouterr()
    argv = ["--checkpoint", str(tmp_path / "out"), "--dtype", "fp32", "--output_dir", str(tmp_path / "merged")]
    assert export.main(argv) == 0
    said = re.search(
        r"merged: perplexity (.*) of 6, .* the run's own, on the same base: perplexity (.*)", capsys.readouterr().out
    )
    assert float(said[1]) == pytest.approx(own["perplexity"], rel=1e-5) and float(said[2]) == pytest.approx(
        float(said[1]), rel=1e-5
    )
