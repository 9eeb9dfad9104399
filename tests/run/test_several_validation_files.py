"""Several validation files: a loss of each, which is that of a run with it alone, and that of all rows."""

from pathlib import Path

import pytest

from finetune.errors import PlanError
from tests.support.rows import jsonl
from tests.support.runs import RUN, read_events
from train import fine_tune

ROWS = [{"prompt": f"{i} plus {i}? ", "completion": f"It is {2 * i}{'!' * (i % 5)}"} for i in range(12)]
FLAGS = RUN | dict(max_steps=2, eval_every=2, lora_dropout=0.0)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "other").mkdir()
    return [Path(jsonl(tmp_path / "short.jsonl", ROWS[:3])), Path(jsonl(tmp_path / "other" / "long.jsonl", ROWS[5:]))]


def evaluations(folder) -> list[dict]:
    return read_events(folder, "eval")


def run(tiny_model, tmp_path, name, **changes):
    dataset = str(jsonl(tmp_path / "rows.jsonl", ROWS))
    fine_tune(**FLAGS | dict(model_name=str(tiny_model), dataset=dataset, output_dir=str(tmp_path / name)) | changes)
    return evaluations(tmp_path / name)


def test_each_has_the_loss_of_a_run_with_it_alone(tiny_model, files, tmp_path, capsys):
    both = run(tiny_model, tmp_path, "both", validation_dataset=list(map(str, files)))
    assert "loss/short.jsonl" in capsys.readouterr().out
    each = [run(tiny_model, tmp_path, f"{i}", validation_dataset=str(file)) for i, file in enumerate(files)]
    for event, *alone in zip(both, *each, strict=True):
        assert [event[f"loss/{file.name}"] for file in files] == pytest.approx([e["loss"] for e in alone], rel=1e-6)
        total = sum(e["loss"] * e["num_targets"] for e in alone)
        assert event["num_targets"] == sum(e["num_targets"] for e in alone)
        assert event["loss"] == pytest.approx(total / event["num_targets"], rel=1e-6)
    page = (tmp_path / "both" / "report.html").read_text()
    assert "short.jsonl, held-out" in page and "long.jsonl, held-out" in page


def test_files_of_one_name_are_told_apart_by_their_folders(tiny_model, tmp_path):
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files.append(str(jsonl(tmp_path / name / "held.jsonl", ROWS[:2] if name == "one" else ROWS[2:4])))
    (first, *_) = run(tiny_model, tmp_path, "out", validation_dataset=files)
    assert {f"loss/{file}" for file in files} < set(first)


@pytest.mark.slow
def test_pairs_have_their_metrics_over_all_rows(tiny_model, tmp_path):
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "No."} for r in ROWS]
    files = [str(jsonl(tmp_path / f"{n}.jsonl", pairs[n : 2 * n])) for n in (2, 5)]
    changes = dict(preference="dpo", dataset=str(jsonl(tmp_path / "pairs.jsonl", pairs)))
    (*_, last) = run(tiny_model, tmp_path, "both", validation_dataset=files, **changes)
    assert last["num_rows"] == 7
    alone = [run(tiny_model, tmp_path, f"out{i}", validation_dataset=f, **changes)[-1] for i, f in enumerate(files)]
    mean = sum(e["rewards/margins"] * e["num_rows"] for e in alone) / 7
    assert last["rewards/margins"] == pytest.approx(mean, rel=1e-4)


def test_a_weight_is_of_training_data(tiny_model, files, tmp_path):
    with pytest.raises(PlanError, match="has a weight"):
        run(tiny_model, tmp_path, "out", validation_dataset=[f"{files[0]}:0.3", f"{files[1]}:0.7"])
