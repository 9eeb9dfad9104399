"""Answers over pipeline stages and over ranks that hold different experts are those of one process, token by token."""

import json

import pytest

from tests.support import cases, generation_cases, ranks
from tests.support.commands import command, finish
from tests.support.runs import read_events


def check(wanted: list, folder) -> None:
    found = ranks.run(
        cases.LAYOUTS[wanted[0][0]].world_size, generation_cases.over_ranks, folder, timeout_s=300, wanted=wanted
    )
    for i, cell in enumerate(found[0]):
        alone = cell["alone"]
        assert len(set(alone["longer"])) > 1, "a model that says the same to every prompt shows little"
        loss = alone.pop("loss")
        for rank in found:
            many = rank[i]["found"]
            assert many.pop("loss") == pytest.approx(loss, rel=cases.LOSS), cell["cell"]
            assert many == alone, cell["cell"]


def test_stages_answer_as_one_process_does(tmp_path):
    check([("PP 2", "full", "llama", False)], tmp_path)


@pytest.mark.slow
def test_ranks_with_different_experts_answer_as_one_process_does(tmp_path):
    """The last of three prompts, and the only one of one, leave ranks without a row, which take part."""
    check([("EP 2", "full", "mixtral", False), ("EP 2", "nf4", "mixtral", True)], tmp_path)


TWO_STAGES = [("nf4", "llama", False), ("lora", "gemma3", False), ("full", "mixtral", False)]
TWO_STAGES += [("full interleaved1f1b", "llama", False), ("lora interleaved1f1b", "gemma3", False)]
PRODUCTS = ["PP 4", "PP 2 x TP 2", "PP 2 x FSDP2 2", "CP 2 x PP 2"]


@pytest.mark.slow
def test_stages_of_other_models_answer_as_one_process_does(tmp_path):
    """Gemma 3 has layers of two kinds, whose masks are made from the length of another stage's layer."""
    check([("PP 2", *cell) for cell in TWO_STAGES], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PRODUCTS)
def test_products_of_stages_answer_as_one_process_does(layout, tmp_path):
    cells = [(layout, "lora", "llama", False)]
    cells += [(layout, "nf4", "llama", True)] if "FSDP2" in layout else []
    check(cells, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["EP 2 x FSDP2 2", "EP 2 x PP 2", "EP 2 x CP 2"])
def test_products_of_experts_answer_as_one_process_does(layout, tmp_path):
    check([(layout, "lora", "mixtral", False)], tmp_path)


@pytest.mark.slow
def test_a_run_over_stages_has_the_scores_and_samples_of_one_process(base, rows_file, tmp_path):
    scored = f"--score_dataset {rows_file} --score_samples 3 --validation_dataset {rows_file} --eval_samples 3"
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, more in ((one, ""), (two, "--world_size 2 --pp_degree 2")):
        flags = f"--max_steps 2 --batch_size 4 --score_max_new_tokens 6 {scored} {more}"
        code, _, err = finish(command(base, flags, output_dir=folder))
        assert code == 0, err
    samples = [[json.loads(line) for line in (f / "samples.jsonl").read_text().splitlines()] for f in (one, two)]
    assert samples[0] == samples[1] and len(samples[0]) == 2 * 3
    scores = [[e["exact_match"] for e in read_events(f) if e["event"] == "eval"] for f in (one, two)]
    assert scores[0] == scores[1] and len(scores[0]) == 2
