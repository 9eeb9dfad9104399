"""--task classify: loss, gradients and results are those of transformers' classes for sequence classification."""

import json
import shlex
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers

import export
import generate
import score
from finetune.adapters.heads import HeadRecord
from finetune.data.columns import Row, RowOptions
from finetune.data.labels import in_order, label_of
from finetune.data.reading.rows import RawDataset
from finetune.data.settled_by_rows import settled_lines
from finetune.data.tokens.tokenize import tokenize
from finetune.errors import CheckpointDamagedError, PlanError
from finetune.model_files.classes import class_of, reads_last_token
from finetune.run.head_scores import Confusions, of_classes
from finetune.run.heads import options_for
from tests.support.cells import but_slow
from tests.support.rows import jsonl
from tests.support.runs import WHOLE_STATE, read_events
from tests.support.small_runs import (
    TWO_RANKS,
    head_flags,
    learns_the_same_in_all_layouts,
    model_in,
    one_and_two_ranks,
    resumes_bitwise,
    without_lora,
)
from train import fine_tune

WORDS = ("red", "green", "blue")
ROWS = [{"text": f"The {WORDS[i % 3]} one, {'so ' * (i % 5)}{i}", "label": WORDS[i % 3]} for i in range(18)]
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return head_flags(tmp_path_factory.mktemp("classes"), "classify", ROWS, num_held_out=7)


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    return fine_tune(**flags | dict(output_dir=str(tmp_path_factory.mktemp("trained") / "o")))


def opened(folder, **options):
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, **options
    ).eval()


def probabilities(model, folder) -> np.ndarray:
    """Probabilities of all texts, in one padded batch, as transformers' users have it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt").to(model.device)
    with torch.no_grad():
        return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.softmax(-1).numpy()


def own_probabilities(result, names) -> np.ndarray:
    return np.array([[by_label[name] for name in names] for by_label in result.classify(TEXTS)])


def test_loss_and_gradients_are_those_of_transformers(flags, tmp_path):
    """All weights train, at a rate so small that the saved ones are the first."""
    changes = dict(train_type="full", lr=1e-12, max_steps=1, batch_size=len(ROWS), output_dir=str(tmp_path / "o"))
    changes |= dict(warmup_steps=0, weight_decay=0.0, lora_dropout=None, lora_rank=None)
    fine_tune(**{name: value for name, value in (flags | changes).items() if value is not None})
    model = opened(tmp_path / "o")
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"} and model.config.pad_token_id is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "o", padding_side="right")
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row["label"]] for row in ROWS])
    loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    (step,) = read_events(tmp_path / "o", "step")
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)  # a sum of squares of all weights


def test_peft_and_transformers_open_the_adapter_and_what_is_merged(trained, flags, tmp_path, capsys):
    names = ("blue", "green", "red")
    own = own_probabilities(trained, names)
    config = json.loads((tmp_path.parent / trained.folder / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    head = json.loads(open(f"{trained.folder}/head.json").read())
    base = opened(flags["model_name"], num_labels=3, pad_token_id=head["pad_token_id"])
    with_adapter = peft.PeftModel.from_pretrained(base, trained.folder).eval()
    np.testing.assert_allclose(probabilities(with_adapter, trained.folder), own, atol=1e-5)
    args = ["--score_dataset", flags["validation_dataset"]]
    assert export.main(["--checkpoint", trained.folder, "--output_dir", str(tmp_path / "merged"), *args]) == 0
    last = read_events(trained.folder, "eval")[-1]
    assert f"accuracy {last['accuracy']:.1%} of 7" in capsys.readouterr().out
    merged = opened(tmp_path / "merged")
    assert [merged.config.id2label[i] for i in range(3)] == list(names)
    np.testing.assert_allclose(probabilities(merged, tmp_path / "merged"), own, atol=1e-5)


def test_score_and_generate_read_a_checkpoint_and_what_is_merged(trained, flags, tmp_path, capsys):
    last = read_events(trained.folder, "eval")[-1]
    export.main(["--checkpoint", trained.folder, "--output_dir", str(tmp_path / "merged")])
    for folder in (trained.folder, str(tmp_path / "merged")):
        capsys.readouterr()
        args = ["--checkpoint", folder, "--device", "cpu", "--precision", "fp32"]
        assert score.main([*args, "--dataset", flags["validation_dataset"], "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        for name in ("loss", "accuracy", "macro_f1"):
            assert found[name] == pytest.approx(last[name], rel=1e-5)
        assert generate.main([*args, "--prompt", TEXTS[0]]) == 0
        label, probability = capsys.readouterr().out.split(" | ")[0].split()
        best = trained.classify(TEXTS[0])
        assert label == next(iter(best)) and float(probability) == pytest.approx(best[label], abs=1e-4)
        args[-1] = "bf16"  # what a model without a run is opened in where a processor has such products
        assert generate.main([*args, "--prompt", TEXTS[0]]) == 0
        low_label, low = capsys.readouterr().out.split(" | ")[0].split()
        assert low_label == label and float(low) == pytest.approx(float(probability), abs=0.05)


def test_of_several_validation_files_each_has_the_loss_that_score_py_gives_it(flags, tmp_path):
    files = [str(jsonl(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("a", ROWS[:4]), ("b", ROWS[4:11]))]
    result = fine_tune(**flags | dict(validation_dataset=files, max_steps=1, output_dir=str(tmp_path / "o")))
    last = read_events(result.folder, "eval")[-1]
    a = last["loss/a.jsonl"]
    b = last["loss/b.jsonl"]
    assert [a, b] == pytest.approx([result.score(file)["loss"] for file in files], rel=1e-5)
    assert last["loss"] == pytest.approx((4 * a + 7 * b) / 11, rel=1e-6)


def test_texts_that_are_asked_are_all_read_whatever_became_of_long_rows(flags, tmp_path):
    changes = dict(overlong="drop", context_length=24, max_steps=1, output_dir=str(tmp_path / "o"))
    result = fine_tune(**flags | changes)
    asked = [TEXTS[0], "The blue one, " + "so " * 60, TEXTS[1]]
    found = result.classify(asked)
    for text, by_label in zip(asked, found, strict=True):
        assert by_label == pytest.approx(result.classify(text), abs=1e-6)


def test_what_does_not_hold_or_continue_a_head_is_refused_in_a_line(trained, flags, tmp_path):
    for words in (["--to", "gguf-lora"], ["--to", "mlx-lm"], ["--to", "ollama"]):
        with pytest.raises(PlanError, match="does not hold its head"):
            export.main(["--checkpoint", trained.folder, "--output_dir", str(tmp_path / "x"), *words])
    merged = str(tmp_path / "merged")
    assert export.main(["--checkpoint", trained.folder, "--output_dir", merged]) == 0
    rest = {name: value for name, value in flags.items() if name not in ("task", "model_name")}
    for changes, fact in (
        (dict(model_name=merged), "was trained with --task classify, and has its head"),
        (dict(adapter=trained.folder, dataset=[{"text": "a b c"}], validation_dataset=None), "a head is not continued"),
    ):
        with pytest.raises(PlanError, match=fact):
            fine_tune(**rest | dict(output_dir=str(tmp_path / "o"), dry_run=True) | changes)
    again = fine_tune(**flags | dict(model_name=merged, output_dir=str(tmp_path / "again"), max_steps=1))
    assert set(again.classify(TEXTS[0])) == set(WORDS)


def test_the_page_and_the_card_show_accuracy_f1_and_confusions(trained):
    page = open(f"{trained.folder}/report.html").read()
    last = read_events(trained.folder, "eval")[-1]
    assert f"{last['accuracy']:.1%} of 7 (" in page and f"{last['macro_f1']:.1%} of 7 (" in page
    low, high = last["macro_f1_interval"]
    assert f"{last['macro_f1']:.1%} of 7 ({low:.1%} to {high:.1%})" in page
    label, found, count, of = last["confusions"][0]
    assert f"{count / of:.1%} of {of} (" in page and "Confusions at the last evaluation" in page
    card = open(f"{trained.folder}/README.md").read()
    assert "text-classification" in card and "macro f1" in card


def test_packed_padded_small_and_accumulated_rows_learn_the_same(flags, tmp_path):
    learns_the_same_in_all_layouts(flags, tmp_path, "accuracy", small=40, rtol=1e-5)


@pytest.mark.parametrize("train_type", but_slow(["lora", "full"], ["lora"]))
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(flags, tmp_path, train_type):
    settings = flags | dict(lora_dropout=0.1, train_type=train_type)
    if train_type == "lora":
        resumes_bitwise(settings, tmp_path, WHOLE_STATE)
    else:
        resumes_bitwise(without_lora(settings), tmp_path, [n for n in WHOLE_STATE if "adapter" not in n])


def test_a_text_with_two_labels_is_said(flags, tmp_path, capsys):
    rows = [*ROWS, ROWS[0] | {"label": "blue"}]
    fine_tune(**flags | dict(dataset=rows, dry_run=True, output_dir=str(tmp_path / "o")))
    said = capsys.readouterr().out
    assert "another answer in an earlier row (1), first" in said and "repeat an earlier one" not in said


def test_what_is_learned_is_found_again(flags, tmp_path):
    rows = [{"text": f"The {WORDS[i % 3]} one {i}", "label": i % 3} for i in range(60)]
    changes = dict(dataset=rows[:48], validation_dataset=rows[48:], max_steps=40, batch_size=12)
    result = fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    last = read_events(tmp_path / "o", "eval")[-1]
    assert last["accuracy"] == last["macro_f1"] == 1.0 and last["confusions"] == []
    assert next(iter(result.classify(rows[50]["text"]))) == str(50 % 3)


@pytest.mark.parametrize(
    "values, names",
    [
        (("b", "a", "c"), ["a", "b", "c"]),
        ((2, 0, 1), ["0", "1", "2"]),
        ((10, 9, 1), ["1", "9", "10"]),
        ((True, False, True), ["false", "true"]),
    ],
)
def test_labels_are_numbered_in_their_order_which_a_dry_run_says(flags, tmp_path, capsys, values, names):
    rows = [{"text": f"Row {i}", "category": values[i % 3]} for i in range(6)]
    changes = dict(dataset=rows, validation_dataset=None, dry_run=True, output_dir=str(tmp_path / "o"))
    fine_tune(**flags | changes)
    out = capsys.readouterr().out
    assert (
        f"class_names: {', '.join(names)} (the {len(names)} labels" in out
        and f"\n{str(values[0]).lower()}: Row 0" in out
    )


@pytest.mark.parametrize(
    "values, line",
    [
        (["Pos", "pos"], "labels 'Pos' and 'pos' look alike and are 2"),
        (["caf\u00e9", "cafe\u0301"], "look alike and are 2"),
        (["a", "a\u200b"], "labels 'a' and 'a\\u200b' look alike"),
        ([True, "True"], "labels 'True' and 'true' look alike"),
        (["01", "1"], "labels '01' and '1' look alike"),
        (["a", "nan"], "label 'nan' is a label as any other"),
        ([-1, 0, 1], "label '-1' is a label as any other"),
        (["a", "b"], None),
        ([-2, -1, 0, 1, 2], None),
        ([-1, 1], None),
    ],
)
def test_labels_that_may_not_be_what_they_seem_are_said(values, line):
    rows = [{"text": f"a{i}", "label": values[i % len(values)]} for i in range(30)]
    names = in_order({label_of(Row("classify", row, {"label": "label"}, "f:1")) for row in rows})
    said = settled_lines({"class_names": (list(names), "why")})[1:]
    assert [line in text for text in said] == [True] * bool(line), said


@pytest.mark.parametrize("script", [generate, score])
def test_a_changed_head_json_is_damage(trained, flags, tmp_path, script):
    """It was in no manifest: names of labels in another order gave each text another label, without a word."""
    folder = tmp_path / "o"
    shutil.copytree(trained.folder, folder)
    text = (folder / "head.json").read_text()
    (folder / "head.json").write_text(text.replace("red", "RED").replace("blue", "red").replace("RED", "blue"))
    asked = ["--prompt", "x"] if script is generate else ["--dataset", flags["validation_dataset"]]
    with pytest.raises(CheckpointDamagedError, match="head.json: its content has changed"):
        script.main(["--checkpoint", str(folder), *asked])


def test_messages_are_rendered_by_the_template_and_names_may_be_given(flags, tmp_path):
    rows = [{"messages": [{"role": "user", "content": row["text"]}], "label": row["label"]} for row in ROWS]
    changes = dict(dataset=rows, validation_dataset=None, max_steps=1, class_names=["red", "blue", "green"])
    result = fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "o")
    lengths = [len(tokenizer.apply_chat_template(row["messages"]).input_ids) for row in rows]
    pads = sum(
        1 for row in rows if tokenizer.apply_chat_template(row["messages"]).input_ids[-1] == tokenizer.pad_token_id
    )
    (start,) = read_events(tmp_path / "o", "start")
    assert start["data"]["tokens"] == sum(lengths) - pads
    assert json.loads((tmp_path / "o" / "head.json").read_text())["labels"] == ["red", "blue", "green"]
    assert set(result.classify(rows[0]["messages"])) == set(WORDS)


def test_a_text_that_is_read_in_part_is_said(trained, flags, capsys):
    capsys.readouterr()
    long = "some words here " * 60
    trained.classify(["red", long])
    said = capsys.readouterr().err
    assert f"1 of the texts are over --context_length {flags['context_length']} of the run" in said
    generate.main(["--checkpoint", str(trained.output_dir), "--prompt", long, "--device", "cpu"])
    assert "1 of the texts are over --context_length" in capsys.readouterr().err
    trained.classify(["red"])
    assert "texts are over" not in capsys.readouterr().err


@pytest.mark.parametrize("task", ["classify", "embed"])
def test_a_conversation_is_read_to_its_last_message_as_its_template_renders_it(task, chat_tokenizer):
    said = (("user", "hi"), ("assistant", "What is it?"), ("user", "bye"), ("assistant", "Bye."))
    messages = [{"role": role, "content": text} for role, text in said]
    for number in range(1, 5):
        row = {"text": messages[:number], "label": "a"}
        if task == "embed":
            row = {"anchor": messages[:number], "positive": "hello"}
        raw = RawDataset([row], ["0"], tuple(row), (), "", "rows", 0)
        names = ("a", "b") if task == "classify" else ()
        rows = tokenize(raw, RowOptions(task=task, class_names=names), chat_tokenizer, 512)
        rendered = chat_tokenizer.apply_chat_template(messages[:number]).input_ids
        assert rows.document(0)[0].tolist() == rendered and rows.notices == ()


def test_a_head_of_an_earlier_version_is_asked_as_it_learned(chat_tokenizer):
    """Conversations to their last answer: its head.json does not say that they were read whole."""
    said = (("user", "hi"), ("assistant", "What is it?"), ("user", "bye"))
    row = {"text": [{"role": role, "content": text} for role, text in said], "label": "a"}
    raw = RawDataset([row], ["0"], tuple(row), (), "", "rows", 0)
    for whole in (True, False):
        options = options_for(HeadRecord("classify", ("a", "b"), 2, 0, True, whole), RowOptions())
        ids = tokenize(raw, options, chat_tokenizer, 512).document(0)[0]
        assert ("bye" in chat_tokenizer.decode(ids)) is whole


def test_a_text_is_asked_as_the_rows_were_learned(trained, flags, tmp_path, capsys):
    """What learned messages reads a text as one of the user's; what is scored in another form is said to be."""
    rows = [{"messages": [{"role": "user", "content": row["text"]}], "label": row["label"]} for row in ROWS]
    capsys.readouterr()
    changes = dict(dataset=rows, validation_dataset=None, max_steps=2)
    result = fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    text = ROWS[0]["text"]
    assert f"--prompt {shlex.quote(text)}" in capsys.readouterr().out.splitlines()[-1]
    expected = result.classify(rows[0]["messages"])
    assert result.classify(text) == expected
    assert generate.main(["--checkpoint", str(tmp_path / "o"), "--device", "cpu", "--prompt", text]) == 0
    label, probability = next(iter(expected.items()))
    assert capsys.readouterr().out.startswith(f"{label} {probability:.2f}")
    assert not any("another form" in line for line in result.score(rows).get("notes", []))
    for scored, given in ((result, ROWS), (trained, rows)):
        (line,) = [line for line in scored.score(given)["notes"] if "another form" in line]
        assert line.startswith(f"note: {len(ROWS)} of the {len(ROWS)} rows are ")
    file = tmp_path / "o" / "head.json"
    content = json.loads(file.read_text())
    assert content.pop("messages") is True
    file.write_text(json.dumps(content | {"of a later version": 1}))
    assert HeadRecord.read(tmp_path / "o").messages is None


def row(**values) -> list[dict]:
    return [*ROWS, {"text": "A row more", "label": "red"} | values]


@pytest.mark.parametrize(
    "changes, fact",
    [
        (dict(dataset=[{"text": f"a{i}", "label": "x"} for i in range(9)]), "all 9 rows have the label 'x'"),
        (dict(dataset=[{"text": f"a{i}", "label": i} for i in range(60)]), "60 rows have 60 different labels"),
        (dict(dataset=row(label=None)), r":19: field 'label' is missing"),
        (dict(dataset=row(label=["red", "blue"])), r":19: field 'label' is a list"),
        (dict(dataset=row(label=0.5)), r":19: field 'label' is 0.5"),
        (dict(dataset=row(text=" ")), r":19: field 'text' is empty"),
        (dict(dataset=row(text=[{"role": "user", "content": " "}])), r":19: field 'text' is empty"),
        (dict(dataset=[{"text": "a"}, {"text": "b"}]), "--task classify needs text and label"),
        (dict(validation_dataset=row(label="pink")), r":19: label 'pink' is in no training row"),
        (dict(class_names=["red", "blue"]), "label 'green'"),
        (dict(class_names="red"), "is one label"),
        (dict(class_names="red,blue", train_type="auto"), "--class_names red,blue: is one label"),
        (dict(class_names=["red,", "blue,", "green"]), ":1: label 'red' is in no training row or not in --class_names"),
        (
            dict(dataset=[{"text": f"a{i}", "label": f"{i % 3}.5"} for i in range(9)]),
            "its labels are numbers, such as 0.5",
        ),
        (dict(dataset=[{"text": f"a{i}", "label": f"{i % 2}" * 5000} for i in range(9)]), "its labels are numbers"),
        *(
            (dict(dataset=row(**{name: "More of it"})), rf":19: column '{name}' may be a part of what is learned")
            for name in ("sentence2", "text_pair", "completion", "answer", "context", "aspect", "response")
        ),
        (dict(task="generate", class_names=["a", "b"]), "labels of --task classify"),
    ],
)
def test_rows_that_are_no_classes_are_refused_in_a_line_before_anything_is_loaded(
    flags, tmp_path, monkeypatch, changes, fact
):
    monkeypatch.setattr("train.open_engine", None)
    for dry_run in (True, False):
        with pytest.raises(PlanError, match=fact) as error:
            fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), dry_run=dry_run) | changes)
        assert "\n" not in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    "changes, fact",
    [
        (dict(backend="mlx"), "MLX's engine has no head"),
        (dict(preference="dpo"), "contradicts --preference dpo"),
        (dict(reward="exact", validation_dataset=None), "contradicts --reward"),
        (dict(teacher="x"), "contradicts --teacher"),
        (dict(streaming=True), "contradicts --streaming"),
        (dict(overlong="split"), "contradicts --overlong"),
        (dict(world_size=2, tp_degree=2), "contradicts --tp_degree"),
        (dict(world_size=2, pp_degree=2), "contradicts --pp_degree"),
        (dict(world_size=2, cp_degree=2), "contradicts --cp_degree"),
        (dict(label_smoothing=0.1), "contradicts --label_smoothing"),
        (dict(dataset=None, validation_dataset=None), "Add --dataset"),
    ],
)
def test_what_no_head_is_built_for_is_refused_in_a_line(flags, tmp_path, changes, fact):
    with pytest.raises(PlanError, match=fact) as error:
        fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), dry_run=True) | changes)
    assert "\n" not in str(error.value)


def test_an_architecture_without_a_class_of_classes_is_refused(flags, tmp_path):
    assert (
        class_of("granite") is None and class_of("bert") and not reads_last_token("bert") and reads_last_token("llama")
    )
    other = model_in(tmp_path / "granite", 1, 2, architecture="granite")
    with pytest.raises(PlanError, match="transformers has no class of granite"):
        fine_tune(**flags | dict(model_name=str(other), output_dir=str(tmp_path / "o"), dry_run=True))


def test_macro_f1_is_the_mean_over_classes_that_are_seen():
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.8, 0.1, 0.1]]))
    found = of_classes(logits, np.array([0, 1, 1, 0]), ("a", "b", "c"))
    assert found["accuracy"] == 0.75 and found["confusions"] == [["b", "a", 1, 2]]
    assert found["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)  # of c there is no row
    assert found["loss"] == pytest.approx(-np.log([0.7, 0.3, 0.7, 0.8]).mean())
    low, high = Confusions(np.array([[50, 10], [10, 30]])).macro_f1_interval()
    assert low < Confusions(np.array([[50, 10], [10, 30]])).macro_f1 < high and 0.1 < high - low < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("changes", TWO_RANKS)
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_two_ranks_are_one(flags, tmp_path, changes, train_type):
    base = flags | dict(train_type=train_type)
    if train_type == "full":
        base = without_lora(base)
    first, second = one_and_two_ranks(base, tmp_path, changes)
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-4) and second["confusions"] == first["confusions"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [dict(train_type="qlora"), dict(use_dora=True), dict(use_rslora=True), dict(init_lora_weights="pissa")]
)
def test_adapters_of_every_kind_train_and_open(flags, tmp_path, changes):
    result = fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    last = read_events(tmp_path / "o", "eval")[-1]
    assert result.score(flags["validation_dataset"])["loss"] == pytest.approx(last["loss"], rel=1e-5)
