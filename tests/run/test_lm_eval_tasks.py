"""score.py --lm_eval: tasks of lm-evaluation-harness on the model as it is opened, where the harness is installed."""

import importlib.util
import json

import pytest

import score
from finetune.errors import PlanError
from tests.support.rows import jsonl

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{target}
metric_list:
  - metric: {metric}
"""


def task(folder, name, kind, metric, target) -> str:
    rows = [
        {"question": f"What is {i} plus {i}?", "choices": [f" It is {2 * i}", f" It is {i + 5}", " No"], "label": 0}
        for i in range(12)
    ]
    file = jsonl(folder / f"{name}.jsonl", rows)
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file, kind=kind, metric=metric, target=target))
    return str(folder / f"{name}.yaml")


def test_without_the_harness_it_is_one_line_before_anything_is_loaded(tmp_path):
    if importlib.util.find_spec("lm_eval"):
        pytest.skip("lm-eval is installed")
    with pytest.raises(PlanError, match="lm-evaluation-harness is not installed. pip install lm-eval"):
        score.main(["--checkpoint", str(tmp_path / "none"), "--lm_eval", "hellaswag"])


def test_rows_or_tasks_are_needed(tmp_path):
    with pytest.raises(PlanError, match="--dataset: is required, or --lm_eval"):
        score.main(["--checkpoint", str(tmp_path)])


@pytest.mark.slow
def test_its_figures_are_those_of_the_harness_on_peft_s_model(run, tiny_model, tmp_path, capsys, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run(max_steps=6, lr=0.02)
    targets = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"'
    answer = 'doc_to_target: "{{choices[label]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 6, do_sample: false}'
    tasks = [
        task(tmp_path, "chosen", "multiple_choice", "acc", targets),
        task(tmp_path, "written", "generate_until", "exact_match", answer),
        task(tmp_path, "read", "loglikelihood_rolling", "bits_per_byte", 'doc_to_target: "{{question}}"'),
    ]
    capsys.readouterr()
    argv = ["--checkpoint", str(tmp_path / "out"), "--lm_eval", ",".join(tasks), "--device", "cpu", "--json"]
    assert score.main(argv) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["lm_eval"]
    theirs = HFLM(pretrained=str(tiny_model), peft=str(tmp_path / "out"), device="cpu", dtype="float32", batch_size=1)
    wanted = lm_eval.simple_evaluate(model=theirs, tasks=tasks, bootstrap_iters=0, log_samples=False)["results"]
    for name, metric in (("chosen", "acc"), ("written", "exact_match"), ("read", "bits_per_byte")):
        assert found[name][metric] == pytest.approx(wanted[name][f"{metric},none"], rel=1e-5), name
    with pytest.raises(PlanError, match="--lm_eval no_such_task: is not a task of the harness"):
        score.main(["--checkpoint", str(tmp_path / "out"), "--device", "cpu", "--lm_eval", "no_such_task"])
