"""--task embed: the loss is MultipleNegativesRankingLoss, over all rows of a step however these are cut and shared."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import export
import score
from finetune.errors import PlanError
from finetune.model_files.sentence_files import MODULES, POOLING
from finetune.run.head_scores import of_vectors
from tests.support.rows import jsonl
from tests.support.runs import WHOLE_STATE, read_events
from tests.support.small_runs import (
    TWO_RANKS,
    head_flags,
    learns_the_same_in_all_layouts,
    one_and_two_ranks,
    resumes_bitwise,
    without_lora,
)
from train import fine_tune

PAIRS = [{"anchor": f"What is {i}?", "positive": f"The number {i}, {'so ' * (i % 4)}it is"} for i in range(14)]
TRIPLES = [row | {"negative": f"Nothing about {i + 50} {'at all ' * (i % 3)}"} for i, row in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return head_flags(tmp_path_factory.mktemp("vectors"), "embed", PAIRS, num_held_out=6)


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    return fine_tune(**flags | dict(output_dir=str(tmp_path_factory.mktemp("trained") / "o")))


def vectors(model, tokenizer, texts: list[str]) -> torch.Tensor:
    """The last hidden state of each text, alone."""
    ids = [torch.tensor([tokenizer(text).input_ids]) for text in texts]
    return torch.cat([model(input_ids=each).last_hidden_state[:, -1] for each in ids])


def ranking(model, tokenizer, rows: list[dict]) -> torch.Tensor:
    """MultipleNegativesRankingLoss, written out."""
    names = [name for name in ("anchor", "positive", "negative") if name in rows[0]]
    anchors, *others = (F.normalize(vectors(model, tokenizer, [row[n] for row in rows]), dim=-1) for n in names)
    return F.cross_entropy(20.0 * anchors @ torch.cat(others).T, torch.arange(len(rows)))


@pytest.mark.parametrize("rows", [PAIRS, TRIPLES])
def test_loss_and_gradients_are_those_of_the_formula(flags, tmp_path, rows):
    """All weights train, at a rate so small that the saved ones are the first."""
    changes = dict(train_type="full", lr=1e-12, max_steps=1, batch_size=len(rows), output_dir=str(tmp_path / "o"))
    changes |= dict(dataset=str(jsonl(tmp_path / "rows.jsonl", rows)), validation_dataset=None, microbatch_tokens=80)
    fine_tune(**without_lora(flags) | changes)
    model = transformers.AutoModel.from_pretrained(tmp_path / "o", dtype=torch.float32)
    loss = ranking(model, transformers.AutoTokenizer.from_pretrained(tmp_path / "o"), rows)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    (step,) = read_events(tmp_path / "o", "step")
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_packed_padded_small_and_accumulated_rows_learn_the_same(flags, tmp_path):
    unseen = flags | dict(validation_dataset=None)
    learns_the_same_in_all_layouts(unseen, tmp_path, "recall_at_1", small=60, rtol=1e-5)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(flags, tmp_path):
    resumes_bitwise(flags, tmp_path, WHOLE_STATE)


def test_what_is_merged_gives_the_vectors_of_the_result_and_has_the_files_of_sentence_transformers(
    trained, flags, tmp_path, capsys
):
    texts = [row["anchor"] for row in PAIRS]
    own = trained.embed(texts)
    np.testing.assert_allclose(trained.embed(texts[:3]), own[:3], atol=1e-5)
    export.main(["--checkpoint", trained.folder, "--output_dir", str(tmp_path / "merged")])
    model = transformers.AutoModel.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        found = F.normalize(vectors(model, tokenizer, texts), dim=-1).numpy()
    np.testing.assert_allclose(found, own, atol=1e-5)
    modules = json.loads((tmp_path / "merged" / MODULES).read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    pooling = json.loads((tmp_path / "merged" / POOLING / "config.json").read_text())
    assert pooling["pooling_mode_lasttoken"] and pooling["word_embedding_dimension"] == own.shape[1]
    last = read_events(trained.folder, "eval")[-1]
    args = ["--device", "cpu", "--precision", "fp32", "--dataset", flags["validation_dataset"], "--json"]
    for folder in (trained.folder, str(tmp_path / "merged")):
        capsys.readouterr()
        assert score.main(["--checkpoint", folder, *args]) == 0
        scored = json.loads(capsys.readouterr().out)
        assert scored["loss"] == pytest.approx(last["loss"], rel=1e-5)
        assert scored["recall_at_1"] == last["recall_at_1"]
    assert f"{last['recall_at_1']:.1%} of 6 (" in open(f"{trained.folder}/report.html").read()


@pytest.mark.slow
def test_texts_that_belong_together_are_found_afterwards(flags, tmp_path):
    rows = [{"query": f"topic {i} {'?' * (i % 3)}", "document": f"about topic {i}"} for i in range(14)]
    changes = dict(max_steps=40, batch_size=14, dataset=rows, validation_dataset=rows)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    first, last = (read_events(tmp_path / "o", "eval")[i] for i in (0, -1))
    assert last["recall_at_1"] >= 0.9 and last["loss"] < 0.5 * first["loss"]


def test_an_evaluation_is_the_formula_whatever_is_compared_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    vectors_REH = rng.normal(size=(7, 3, 5))
    whole = of_vectors(vectors_REH)
    monkeypatch.setattr("finetune.run.head_scores.AT_ONCE", 2)
    assert of_vectors(vectors_REH) == pytest.approx(whole)
    unit = F.normalize(torch.from_numpy(vectors_REH), dim=-1)
    scores = 20.0 * unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2]]).T
    assert whole["loss"] == pytest.approx(F.cross_entropy(scores, torch.arange(7)).item())
    assert whole["recall_at_1"] == pytest.approx((scores.argmax(-1) == torch.arange(7)).double().mean().item())


@pytest.mark.parametrize(
    "changes, fact",
    [
        (dict(dataset=[*PAIRS, TRIPLES[0]]), "1 of 15 rows have a negative"),
        (dict(hard_negatives="true"), ":1: field 'negative' is missing"),
        (
            dict(dataset=[*PAIRS, {"anchor": "a", "positive": ["b"]}]),
            ":15: field 'positive' is a list of texts, must be one",
        ),
        (dict(dataset=[*PAIRS, {"anchor": "a", "positive": " "}]), ":15: field 'positive' is empty"),
        (dict(dataset=[{"text": "a"}]), "--task embed needs anchor and positive"),
        (dict(lora_dropout=0.1), "which dropout would make differ"),
        (dict(task="generate", hard_negatives="true"), "is of --task embed"),
        (dict(batch_size=1), "a step of 1 row has no other row"),
        (dict(validation_dataset=PAIRS[:1]), "^--validation_dataset: is 1 pair, whose positive is told from no other"),
        (
            dict(validation_dataset=[PAIRS[0], PAIRS[1] | {"positive": PAIRS[0]["positive"]}]),
            "2 pairs have one positive",
        ),
        (dict(validation_dataset=None, validation_split=0.1), "^--validation_split 0.1: is 1 pair, whose"),
        (dict(dataset=PAIRS[:1]), "a step of 1 row has no other row"),
        (dict(dataset=[row | {"similarity": 0.1} for row in PAIRS]), "'similarity' may say which texts do not belong"),
        (dict(dataset=[row | {"is_duplicate": 0} for row in PAIRS]), "'is_duplicate' may say which texts do not"),
        (dict(dataset=[row | {"negative_1": "No."} for row in PAIRS]), "'negative_1' may be a part of what is learned"),
        (dict(dataset=[row | {"negative": row["positive"]} for row in PAIRS]), ":1: positive and negative are equal"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(flags, tmp_path, changes, fact):
    with pytest.raises(PlanError, match=fact) as error:
        fine_tune(**flags | dict(output_dir=str(tmp_path / "o")) | changes)
    assert "\n" not in str(error.value)


def test_texts_that_are_not_told_apart_are_said(flags, tmp_path, capsys):
    rows = [row | {"positive": "The same."} for row in PAIRS[:4]] + [{"anchor": "a", "positive": "a"}, *PAIRS[4:]]
    result = fine_tune(**flags | dict(dataset=rows, max_steps=1, output_dir=str(tmp_path / "o")))
    (note,) = [line for line in result.score(rows)["notes"] if "recall@1" in line]
    assert note.startswith("note: 4 of the 15 rows have a positive that another has too")
    said = capsys.readouterr().out
    assert "4 of the 15 training rows have a positive that another has too" in said
    assert "anchor and positive are equal, and nothing is learned of them" in said


@pytest.mark.slow
@pytest.mark.parametrize("changes", TWO_RANKS)
@pytest.mark.parametrize("rows", [PAIRS, TRIPLES])
def test_two_ranks_are_one(flags, tmp_path, changes, rows):
    base = flags | dict(dataset=str(jsonl(tmp_path / "rows.jsonl", rows)), microbatch_tokens=60)
    base["validation_dataset"] = str(jsonl(tmp_path / "held_out.jsonl", rows[:6]))
    first, second = one_and_two_ranks(base, tmp_path, changes)
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-4) and second["recall_at_1"] == first["recall_at_1"]
    one, two = ([e["grad_norm"] for e in read_events(tmp_path / name, "step")] for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-4)
