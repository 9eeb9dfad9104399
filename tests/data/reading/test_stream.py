"""Rows read while the run trains: their order, resuming to the sample, and bounded memory."""

import itertools
import json
import os

import numpy as np
import pytest

from finetune.data.reading.arrow import stream_parquet
from finetune.data.reading.readers import read_jsonl
from finetune.data.reading.sources import find_files
from finetune.data.reading.stream import PATTERN, SourceStream, Stream, StreamedFile, pattern_counts
from finetune.errors import PlanError
from tests.support.commands import command, finish
from tests.support.rows import ROWS, jsonl
from tests.support.runs import RUN, WHOLE_STATE, assert_same_run, copy_up_to, losses, same_files
from train import fine_tune


def stream_of(*paths, weights=None, buffer=7, seed=1):
    sources = []
    for number, path in enumerate(paths):
        files = [StreamedFile(*file) for file in find_files(str(path), "train", "--dataset")[0]]
        sources.append(SourceStream(files, seed, number, buffer))
    return Stream(sources, weights, seed)


def number_of(found) -> int:
    return int(found[2]["prompt"].split()[2].rstrip("?"))


def epoch_of(stream, epoch) -> list[int]:
    positions = itertools.count()
    return [number_of(row) for row in iter(lambda: stream.row(epoch, next(positions)), None)]


def test_an_epoch_visits_every_row_once_and_each_in_another_order(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    stream = stream_of(file)
    epochs = [epoch_of(stream, epoch) for epoch in range(3)]
    assert all(sorted(rows) == list(range(40)) for rows in epochs) and len(set(map(tuple, epochs))) == 3
    for block in range(5):  # shuffled within the buffer
        assert sorted(epochs[0][7 * block : 7 * block + 7]) == list(range(7 * block, 7 * block + 7))
    assert [epoch_of(stream_of(file), epoch) for epoch in range(3)] == epochs
    assert epoch_of(stream_of(file, seed=2), 0) != epochs[0]


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
def test_a_row_depends_on_its_position_only(weights, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(3):
        jsonl(folder / f"{i}.jsonl", ROWS[10 * i : 10 * i + 10])
    paths = folder, jsonl(tmp_path / "b.jsonl", ROWS[30:])
    positions = [(e, i) for e in range(2 if weights is None else 1) for i in range(40 if weights is None else 120)]
    whole = stream_of(*paths, weights=weights)
    rows = {position: whole.row(*position) for position in positions}
    rng = np.random.default_rng(0)
    for k in rng.permutation(len(positions))[:40]:  # each as the first of a resumed run
        again = stream_of(*paths, weights=weights)
        assert again.row(*positions[k]) == rows[positions[k]]
    jumping = stream_of(*paths, weights=weights)
    for k in rng.permutation(len(positions)):
        assert jumping.row(*positions[k]) == rows[positions[k]]
    if weights is None:
        assert whole.row(0, 40) is None and whole.row(1, 40) is None


def test_datasets_are_drawn_by_weight_and_begin_again_at_their_end(tmp_path):
    stream = stream_of(
        jsonl(tmp_path / "a.jsonl", ROWS[:30]), jsonl(tmp_path / "b.jsonl", ROWS[30:]), weights=[1.0, 3.0]
    )
    rows = [stream.row(0, i) for i in range(2 * PATTERN)]
    assert [sum(row[0] == k for row in rows) for k in (0, 1)] == [500, 1500]
    counts = np.bincount([number_of(row) for row in rows], minlength=40)
    assert np.ptp(counts[:30]) <= 1 and np.ptp(counts[30:]) <= 1
    assert pattern_counts([1.0, 1.0, 1.0]) == [334, 333, 333] and pattern_counts([1e-9, 1.0]) == [1, 999]


def test_lines_and_row_groups_are_skipped_without_losing_one(tmp_path):
    import pyarrow
    import pyarrow.parquet

    lines = "\n".join(json.dumps(row) + ("\n" if i % 5 == 0 else "") for i, row in enumerate(ROWS))
    (tmp_path / "a.jsonl").write_text(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=9)
    whole = list(StreamedFile(read_jsonl, tmp_path / "a.jsonl", "a").rows(0))
    assert [row for _, row in whole] == ROWS
    for skip in range(42):
        assert list(StreamedFile(read_jsonl, tmp_path / "a.jsonl", "a").rows(skip)) == whole[skip:]
        found = list(stream_parquet(tmp_path / "a.parquet", "a", skip, print))
        assert [row for _, row in found] == ROWS[skip:]
        assert not found or found[0][0] == f"a:row {skip + 1}"


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000 ", "\u2028", "\x1c\x1f", "\u0085\t"])
def test_a_line_that_is_blank_to_unicode_is_no_row(blank, tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in ROWS[:12]]
    for at in (9, 5, 5, 0):
        lines.insert(at, blank)
    file.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    streamed = StreamedFile(*find_files(str(file), "train", "--dataset")[0][0])
    whole = list(streamed.rows(0))
    assert len(whole) == 12
    for skip in range(13):
        assert list(streamed.rows(skip)) == whole[skip:]


def test_an_empty_file_is_refused(tmp_path, run):
    with pytest.raises(PlanError, match="has no rows"):
        run(dataset=jsonl(tmp_path / "a.jsonl", []), streaming=True, max_steps=2)


STEPS = [s if s == 5 else pytest.param(s, marks=pytest.mark.slow) for s in range(1, 12)]


@pytest.fixture(scope="module")
def streamed(tiny_model, tmp_path_factory):
    """The output folder of 12 streamed steps over some of which the data begins again, every step kept."""
    folder = tmp_path_factory.mktemp("streamed")
    file = jsonl(folder / "rows.jsonl", [*ROWS[:20], {"prompt": "none", "completion": " "}])
    where = dict(model_name=str(tiny_model), dataset=file, output_dir=str(folder / "out"))
    stream = dict(streaming=True, shuffle_buffer=6, max_steps=12, save_every=1, keep_last=12)
    assert fine_tune(**{**RUN, **where, **stream, "num_epochs": None}).step == 12
    return folder / "out"


@pytest.mark.parametrize("step", STEPS)
def test_a_streamed_run_resumes_bitwise(step, streamed, tmp_path):
    folder = copy_up_to(streamed, step, tmp_path / "out")
    assert fine_tune(resume="auto", output_dir=str(folder)).step == 12
    assert losses(folder) == losses(streamed)
    same_files(folder / "checkpoints" / "step-12", streamed / "checkpoints" / "step-12", WHOLE_STATE)


def test_a_stream_that_has_grown_is_other_data(tmp_path, run):
    file = tmp_path / "rows.jsonl"
    streaming = dict(streaming=True, shuffle_buffer=6, num_epochs=None)
    run(dataset=jsonl(file, ROWS[:20]), max_steps=2, **streaming)
    jsonl(file, ROWS)
    with pytest.raises(PlanError, match="the dataset .* differs from the one"):
        fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4)


def as_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=6, compression="none", use_dictionary=False
    )
    return str(path)


@pytest.mark.parametrize("write", [jsonl, as_parquet])
def test_rows_that_were_read_may_not_change_and_later_ones_only_with_a_note(write, tmp_path, run, capsys):
    """Files of the same size. The run reads two blocks of six rows in two steps, and one ahead."""
    rows = [{"prompt": f"row {i:02d}?", "completion": str(10 + i)} for i in range(40)]
    name = tmp_path / ("rows.jsonl" if write is jsonl else "rows.parquet")
    run(dataset=write(name, rows), max_steps=2, streaming=True, shuffle_buffer=6, num_epochs=None)
    before, out = name.stat(), str(tmp_path / "out")
    capsys.readouterr()
    write(name, rows[:24] + rows[24:][::-1])
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert name.stat().st_size == before.st_size
    assert fine_tune(resume="auto", output_dir=out, max_steps=4).step == 4
    assert f"{name.name} was written, moved or copied since" in capsys.readouterr().out
    write(name, rows[:6] + rows[6:24][::-1] + rows[24:][::-1])
    assert name.stat().st_size == before.st_size
    with pytest.raises(PlanError, match="bytes, which the run has read, are others now. Give the file of that run"):
        fine_tune(resume="auto", output_dir=out, max_steps=6)


def test_a_second_pass_compares_the_whole_file(tmp_path, run):
    """The last row is another one, of the same size."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"row {i:02d}?", "completion": str(10 + i)} for i in range(12)]
    run(dataset=jsonl(file, rows), max_steps=5, streaming=True, shuffle_buffer=6, num_epochs=None)
    jsonl(file, [*rows[:-1], {"prompt": "row 11?", "completion": "99"}])
    with pytest.raises(PlanError, match="are others now"):
        fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=7)


@pytest.mark.slow
def test_tokens_of_each_streamed_dataset_are_counted_over_a_resume(tiny_model, tmp_path, capsys):
    """What is trained on without a stream of the same rows, all of them once."""
    files = [jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("one", ROWS[:20]), ("two", ROWS[20:32]))]
    flags = {
        **RUN,
        "model_name": str(tiny_model),
        "dataset": files,
        "num_epochs": None,
        "max_steps": 8,
        "save_every": 1,
    }
    lines = []
    for name, more in (("rows", {}), ("stream", dict(streaming=True, shuffle_buffer=6, keep_last=8))):
        fine_tune(**flags | more, output_dir=str(tmp_path / name))
        lines += [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens by dataset: ")]
    folder = copy_up_to(tmp_path / "stream", 3, tmp_path / "out")
    fine_tune(resume="auto", output_dir=str(folder))
    lines += [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens by dataset: ")]
    assert len(lines) == 3 and len(set(lines)) == 1 and "two.jsonl" in lines[0]


@pytest.mark.slow
def test_a_streamed_run_moves_from_one_rank_to_two(base, rows_file, tmp_path):
    flags = {name: value for name, value in base.items() if name != "num_epochs"}
    more = "--streaming --max_steps 12 --shuffle_buffer 10 --batch_size 4 --save_every 1 --keep_last 12"
    code, _, err = finish(command(flags, more, output_dir=tmp_path / "whole"))
    assert code == 0, err
    folder = copy_up_to(tmp_path / "whole", 5, tmp_path / "out")
    code, _, err = finish(command(f"--resume {folder} --world_size 2 --batch_size 2"))
    assert code == 0, err
    assert_same_run(folder, tmp_path / "whole")


def test_a_bad_row_in_the_middle_ends_the_run_with_its_place(tmp_path, run):
    rows = [*ROWS[:12], {"prompt": "a"}, *ROWS[12:]]
    file = jsonl(tmp_path / "a.jsonl", rows)
    streaming = dict(dataset=file, streaming=True, shuffle_buffer=6, max_steps=8, num_epochs=None)
    with pytest.raises(PlanError, match="a.jsonl:13: field 'completion' is missing"):
        run(**streaming)
    assert run(**streaming, skip_bad_rows=1, overwrite=True).step == 8


def test_a_bad_row_saves_what_was_trained_and_the_run_goes_on_without_it(tmp_path, run):
    """As the same run that skipped it from the beginning, bitwise."""
    file = jsonl(tmp_path / "a.jsonl", [*ROWS[:12], {"prompt": "a"}, *ROWS[12:]])
    streaming = dict(dataset=file, streaming=True, shuffle_buffer=6, max_steps=8, num_epochs=None, keep_last=9)
    with pytest.raises(PlanError, match="Resume with --skip_bad_rows 1"):
        run(**streaming, save_every=1000)
    (saved,) = (tmp_path / "out" / "checkpoints").glob("step-*")
    assert saved.name == "step-4"
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), skip_bad_rows=1).step == 8
    assert run(**streaming, skip_bad_rows=1, output_dir=str(tmp_path / "whole")).step == 8
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_later_row_that_needs_a_chat_template_is_a_bad_row(tmp_path, run):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = [{"question": f"{i}?", "answer": "x"} for i in range(8)]
    file = jsonl(tmp_path / "a.jsonl", [*rows, chat])
    how = dict(dataset=file, streaming=True, shuffle_buffer=4, max_steps=8, num_epochs=None)
    with pytest.raises(PlanError, match=r"a.jsonl:9: needs a chat template, .* Resume with --skip_bad_rows 1"):
        run(**how)
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), skip_bad_rows=1).step == 8


def test_a_bad_row_counts_once_over_passes_and_resumes(tmp_path, run):
    file = jsonl(tmp_path / "a.jsonl", [*ROWS[:8], {"prompt": "a"}, *ROWS[8:12]])
    streaming = dict(dataset=file, streaming=True, shuffle_buffer=6, num_epochs=None, skip_bad_rows=1)
    assert run(**streaming, max_steps=9).step == 9
    assert fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=16).step == 16


def test_what_later_rows_have_is_said_at_the_end(tmp_path, run, capsys):
    later = [row | {"note": "hm", "odd": 1} for row in ROWS[12:]]
    file = jsonl(
        tmp_path / "a.jsonl", [*(row | {"note": "hm"} for row in ROWS[:12]), {"prompt": "a", "completion": " "}, *later]
    )
    run(dataset=file, streaming=True, shuffle_buffer=6, max_steps=8, num_epochs=None)
    said = [line for line in capsys.readouterr().out.splitlines() if "while training" in line]
    assert ["'odd'" in line and "'note'" not in line for line in said] == [True, False]
    assert "an answer is empty and not learned: 1 x" in said[1]


@pytest.mark.parametrize(("overlong", "fate"), [("auto", "truncated at the start"), ("drop", "dropped: too long")])
def test_what_later_rows_lose_to_the_context_length_is_said_at_the_end(overlong, fate, tmp_path, run, capsys):
    later = [row | {"prompt": "long " * 40 + row["prompt"]} for row in ROWS[6:12]]
    file = jsonl(tmp_path / "a.jsonl", [*ROWS[:6], *later])
    how = dict(streaming=True, shuffle_buffer=6, max_steps=3, num_epochs=None, context_length=64, overlong=overlong)
    run(dataset=file, **how)
    said = [line for line in capsys.readouterr().out.splitlines() if "while training" in line]
    assert any(f"a row over --context_length is {fate}" in line and line.endswith(": 6 x") for line in said)
    assert any("tokens of such rows are not learned" in line for line in said)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "--streaming true: the number of rows is not known before they are read. Add --max_steps."),
        ({"max_steps": 3, "validation_split": 0.1}, "--validation_split 0.1: needs all rows"),
        ({"max_steps": 3, "dataset_samples": 5}, "--dataset_samples 5: needs all rows"),
    ],
)
def test_what_needs_all_rows_is_refused(flags, line, run):
    with pytest.raises(PlanError) as error:
        run(**{"streaming": True, "num_epochs": None, **flags})
    assert str(error.value).startswith(line)
