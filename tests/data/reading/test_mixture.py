"""Several datasets in a run: how they are named, the order in which their rows are drawn, and what is counted."""

import json

import numpy as np
import pytest

from finetune.config import TrainConfig
from finetune.data.reading.mixture import Source, parse_source, sources_of
from finetune.data.sampler import Mix, epoch_order, rows_so_far, step_rows, total_steps
from finetune.errors import PlanError
from finetune.parts.train_state import Cursor
from tests.support.commands import command, finish
from tests.support.rows import ROWS, jsonl, write
from tests.support.runs import RUN, WHOLE_STATE, assert_same_run, copy_up_to, losses, same_files
from train import fine_tune


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("a.jsonl", Source("a.jsonl")),
        ("a.jsonl:2", Source("a.jsonl", 2.0)),
        ("a.jsonl:0.5@test", Source("a.jsonl", 0.5, "test")),
        ("data@validation", Source("data", None, "validation")),
        ("data@train[95%:]", Source("data", None, "train[95%:]")),
        ("org/name", Source("org/name")),
        ("org/name:main", Source("org/name:main")),
        ("org/name:main:3@train", Source("org/name:main", 3.0, "train")),
        ("alpaca:1e-1", Source("alpaca", 0.1)),
    ],
)
def test_a_dataset_is_named_with_its_weight_and_split(spec, source):
    assert parse_source(spec, "--dataset") == source


def test_a_file_of_exactly_this_name_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a:2@x.jsonl", b"")
    assert parse_source("a:2@x.jsonl", "--dataset") == Source("a:2@x.jsonl")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["a:2", "b"], "--dataset b: has no weight, others have. Give each one, or none."),
        (["a", "a"], "--dataset a: is given twice. Give it once, with a weight to have more of it."),
        (["a:0", "b:1"], "--dataset a:0: weight 0 must be above 0. Omit the dataset to have none of it."),
        ([{"name": "a", "size": 2}], "--dataset: an entry has unknown key 'size'. Use name, weight, split, format,"),
        ([{"name": "a", "split": "train[5]"}], "--dataset a: split train[5] is not NAME[START:STOP]."),
        ([{"weight": 2}], "--dataset: an entry has no name."),
        ([{"name": "a", "weight": "x"}], "--dataset a: weight 'x' is not a number."),
        ([{"name": "a", "columns": {"nose": "b"}}], "--dataset a nose=b: 'nose' is not a field of any format."),
    ],
)
def test_datasets_that_contradict_each_other_are_refused(given, line):
    with pytest.raises(PlanError) as error:
        sources_of(given)
    assert str(error.value).startswith(line)


def test_an_epoch_draws_by_weight_and_sees_every_row_equally_often():
    mix = Mix((30, 10, 5), (1.0, 1.0, 2.0))
    assert mix.draws() == [11, 11, 23]
    drawn = np.concatenate([epoch_order(mix, 7, epoch) for epoch in range(200)])
    counts = np.bincount(drawn, minlength=45)
    for part in (counts[:30], counts[30:40], counts[40:]):
        assert part.max() - part.min() <= 1 and part.min() > 0


def test_small_weights_still_draw_a_row_and_an_epoch_keeps_its_length():
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = tuple(int(n) for n in rng.integers(1, 50, rng.integers(1, 6)))
        mix = Mix(sizes, tuple(float(w) for w in rng.uniform(0.001, 10, len(sizes))))
        assert min(mix.draws()) >= 1 and sum(mix.draws()) == sum(sizes)
        order = epoch_order(mix, 1, 3)
        assert len(order) == sum(sizes) and (0 <= order).all() and (order < sum(sizes)).all()


def test_the_order_of_a_mixture_is_a_function_of_seed_and_step():
    mix = Mix((20, 7), (1.0, 3.0))
    cursor, seen = Cursor(), []
    for _ in range(3 * total_steps(mix, 4, 1, -1)):
        rows, following = step_rows(mix, 4, 42, cursor)
        epoch_order.cache_clear()
        assert step_rows(mix, 4, 42, Cursor(cursor.epoch, cursor.index))[0].tolist() == rows.tolist()
        seen += rows.tolist()
        cursor = following
    assert cursor == Cursor(3, 0)
    assert np.concatenate(list(rows_so_far(mix, 42, cursor))).tolist() == seen


STEPS = [s if s == 5 else pytest.param(s, marks=pytest.mark.slow) for s in range(1, 12)]


@pytest.fixture(scope="module")
def two_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    chats = [
        {"messages": [{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": f"Yo {i}"}]}
        for i in range(12)
    ]
    return jsonl(folder / "a.jsonl", ROWS[:12]), jsonl(folder / "b.jsonl", chats)


def test_two_datasets_are_each_read_in_their_format_and_counted(two_files, plain_run, tmp_path, capsys):
    one, two = two_files
    state = plain_run(dataset=[f"{one}:3", f"{two}:1"], num_epochs=1)
    out = capsys.readouterr().out
    assert state.step == 6
    assert "data: 24 rows" in out and "; 2 datasets mixed by weight" in out
    assert f"  {one}: 12 rows" in out and f"  {two}: 12 rows" in out
    by_dataset = next(line for line in out.splitlines() if line.startswith("tokens by dataset: "))
    counted = [int(part.split(" ")[-2].replace(",", "")) for part in by_dataset.replace("%)", "%").split("%") if part]
    assert sum(counted) == state.num_tokens


def test_the_same_in_yaml_with_a_split_and_columns_of_its_own(tmp_path, plain_run, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "test.jsonl", [{"q": f"What is {i}?", "a": f"{i}"} for i in range(4)])
    jsonl(folder / "train.jsonl", ROWS[:4])
    config = tmp_path / "run.yaml"
    entries = [{"name": str(folder), "split": "test", "columns": {"question": "q", "answer": "a"}}, f"{folder}@train"]
    config.write_text(json.dumps({"dataset": entries}))
    state = plain_run(config=str(config), dataset=None, num_epochs=1)
    assert state.step == 2 and f"{folder}@test: 4 rows" in capsys.readouterr().out


@pytest.fixture(scope="module")
def mixed(two_files, tiny_model, tmp_path_factory):
    """The output folder of a run of 12 steps of a mixture, every step kept."""
    folder = tmp_path_factory.mktemp("mixed") / "out"
    one, two = two_files
    where = dict(model_name=str(tiny_model), dataset=[f"{one}:2", f"{two}:1"], output_dir=str(folder))
    assert fine_tune(**RUN, **where, save_every=1, keep_last=12).step == 12
    return folder


@pytest.mark.parametrize("step", STEPS)
def test_a_mixture_resumes_bitwise(step, mixed, tmp_path):
    folder = copy_up_to(mixed, step, tmp_path / "out")
    assert fine_tune(resume="auto", output_dir=str(folder)).step == 12
    assert losses(folder) == losses(mixed)
    same_files(folder / "checkpoints" / "step-12", mixed / "checkpoints" / "step-12", WHOLE_STATE)


@pytest.mark.slow
def test_a_mixture_moves_from_one_rank_to_two(two_files, base, tmp_path):
    one, two = two_files
    flags = {name: value for name, value in base.items() if name != "dataset"}
    argv = [*command(flags, "--batch_size 4 --save_every 1 --keep_last 12", output_dir=tmp_path / "whole")]
    code, _, err = finish([*argv, "--dataset", f"{one}:2", "--dataset", f"{two}:1"])
    assert code == 0, err
    folder = copy_up_to(tmp_path / "whole", 5, tmp_path / "out")
    code, _, err = finish(command(f"--resume {folder} --world_size 2 --batch_size 2"))
    assert code == 0, err
    assert_same_run(folder, tmp_path / "whole")


def test_settings_hold_one_dataset_as_a_word_and_several_as_a_list(tmp_path):
    from finetune.cli import parse_overrides
    from train import build_parser

    parsed = lambda *argv: parse_overrides(list(argv), build_parser()).get("dataset")  # noqa: E731
    assert parsed("--dataset", "a") == "a"
    assert parsed("--dataset", "a", "--dataset", "b:2") == ["a", "b:2"]
    config = tmp_path / "a.yaml"
    config.write_text("dataset: [a]")
    assert parsed("--config", str(config)) == "a"
    with pytest.raises(PlanError, match="dataset: is an empty list"):
        config.write_text("dataset: []")
        parsed("--config", str(config))
    for text, place in (("[null]", 1), ("[a, ~]", 2)):  # the demo's rows were learned in place of the first
        config.write_text(f"dataset: {text}")
        with pytest.raises(PlanError, match=f"dataset: entry {place} of the list is empty"):
            parsed("--config", str(config))
    assert TrainConfig().dataset is None


def test_a_file_has_no_splits(run, rows_file):
    with pytest.raises(PlanError, match=r"--dataset .*@test: a file has no splits. Name it without @test."):
        run(dataset=f"{rows_file}@test", max_steps=1, num_epochs=None)


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        ("train[:95%]", range(0, 38)),
        ("train[95%:]", range(38, 40)),
        ("train[10:20]", range(10, 20)),
        ("train[-5:]", range(35, 40)),
        ("train[:1000]", range(0, 40)),
        ("train", range(0, 40)),
    ],
)
def test_a_part_of_a_split_is_the_rows_that_the_package_datasets_takes(part, rows):
    assert Source("a", split=part).rows(40) == rows
    assert Source("a", split=part).split_name == "train"


def test_a_part_without_rows_is_refused():
    with pytest.raises(PlanError, match=r"a@train\[:1%\]: is none of 20 rows. Name a larger part."):
        Source("a", split="train[:1%]").rows(20)
