"""fine_tune as a function: typed keywords, rows of any kind, callbacks, and a result that answers."""

import datetime
import inspect
import io
import itertools
import json
import pydoc
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import generate
import score
from finetune.config import FIELDS
from finetune.data import in_memory
from finetune.data.in_memory import as_file, is_rows
from finetune.data.reading.sources import read_rows
from finetune.errors import PlanError
from finetune.from_python import OF_ROWS, Callback, Callbacks, Result
from tests.promises.test_docs_are_true import blocks
from tests.support.commands import PYTHON, ROOT
from tests.support.rows import jsonl
from tests.support.runs import read_events
from train import fine_tune

ROWS = [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}"} for i in range(8)]
SMALL = dict(backend="cpu", batch_size=4, max_steps=2, train_type="lora", precision="fp32", context_length=64)


@pytest.fixture(scope="module")
def tiny_model(chat_model):
    return chat_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Rows go to a cache of the test; probes stay where they are known."""
    cache = Path.home() / ".cache" / "finetune" / "probes"
    (tmp_path / "cache" / "finetune").mkdir(parents=True)
    if cache.is_dir():
        (tmp_path / "cache" / "finetune" / "probes").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_signature_has_every_flag_with_type_and_default():
    parameters = inspect.signature(fine_tune).parameters
    assert list(parameters) == [*FIELDS, "on_step", "on_eval", "on_save"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    for name, f in FIELDS.items():
        assert parameters[name].default == (f.metadata["unset"] or f.default)
        assert name in (*OF_ROWS, "reward") or parameters[name].annotation == f.type
    assert fine_tune.__annotations__["group_size"] is int and "group_size: int = 64" in str(
        inspect.signature(fine_tune)
    )


def test_help_shows_every_keyword_and_what_is_returned():
    shown = pydoc.plain(pydoc.render_doc(fine_tune))
    line = shown.splitlines()[2]
    assert line.startswith("fine_tune(*, ") and line.endswith(") -> finetune.from_python.Result") and "**" not in line
    assert "group_size: int = 64" in line and "dataset: str | list[str] | list[dict]" in line and "on_save: " in line
    assert fine_tune.__annotations__["return"] is Result and fine_tune.__annotations__["on_step"] == Callback | None
    assert fine_tune.__delwrap__ is Callbacks.__init__  # as fastcore's tools see it


# ---- rows


def test_rows_that_the_disk_has_no_room_for_are_a_line_and_leave_no_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(PlanError, match=r"dataset: rows cannot be written to .* Set XDG_CACHE_HOME"):
            as_file([{"text": "word " * 100} for _ in range(100)], "dataset")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "cache" / "finetune" / "rows").iterdir()) == []


def test_a_folder_in_the_place_of_the_rows_file_is_a_line():
    file = Path(as_file(ROWS, "dataset"))
    file.unlink()
    file.mkdir()
    with pytest.raises(PlanError, match=r"dataset: rows cannot be written to .* Set XDG_CACHE_HOME"):
        as_file(ROWS, "dataset")
    file.rmdir()


def frames() -> dict:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    return {
        "DataFrame": pandas.DataFrame(ROWS),
        "Dataset": table,
        "Table": table.data.table,
        "iterator": iter(ROWS),
        "generator": (row for row in ROWS),
        "tuple": tuple(ROWS),
    }


def test_rows_without_an_end_are_counted_aloud_and_end_before_the_disk_is_full(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(in_memory.time, "monotonic", partial(next, itertools.count()))
    monkeypatch.setattr(in_memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(PlanError, match=r"^dataset: \d\d rows fill 80% of the free disk, and there are more\. End"):
        as_file(({"text": str(number)} for number in itertools.count()), "dataset")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dataset: 6 rows so far. An iterator without an end needs itertools.islice(rows, N)."
    assert [int(line.split()[1]) for line in lines] == [6, 11, 21, 41]
    assert list((tmp_path / "finetune" / "rows").iterdir()) == []


def test_what_a_killed_writer_of_rows_left_goes_with_the_next_and_that_of_a_living_one_stays(tmp_path):
    text = "import sys; from finetune.data.in_memory import as_file\n"
    text += "def rows():\n    yield {'text': 'x'}\n    print(flush=True)\n    sys.stdin.read()\nas_file(rows(), 'x')"
    folder = tmp_path / "cache" / "finetune" / "rows"
    writers = [subprocess.Popen([*PYTHON, "-c", text], cwd=ROOT, stdin=-1, stdout=-1) for _ in range(2)]
    try:
        for writer in writers:
            writer.stdout.readline()
        writers[0].kill()
        writers[0].wait()
        path = Path(as_file(ROWS, "x"))
        assert len(list(folder.iterdir())) == 2 and path.stat().st_mode & 0o777 == 0o600
        writers[1].communicate(b"")
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert writers[1].returncode == 0 and len(list(folder.glob("*.jsonl"))) == len(list(folder.iterdir())) == 2


def test_rows_of_every_kind_are_the_same_file():
    path = as_file(ROWS, "x")
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == ROWS
    for kind, value in frames().items():
        assert is_rows(value) and as_file(value, "x") == path, kind
    assert len(list(Path(path).parent.iterdir())) == 1
    names = ["a.jsonl", ["a.jsonl", "b"], [{"name": "a", "weight": 2}], None, [], {"name": "a"}]
    assert not any(is_rows(value) for value in names)
    assert is_rows([{"name": "Ann", "text": "x"}])


def test_two_columns_of_one_name_are_refused_in_every_table_and_row(tmp_path):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    names = ["question", "answer", "answer"]
    cells = ["q", "x", "z"]
    tables = [
        pandas.DataFrame([cells], columns=names),
        pyarrow.Table.from_arrays([pyarrow.array([cell]) for cell in cells], names=names),
        pandas.DataFrame([["q", "x", "z"]], columns=["question", 1, "1"]),
        [{"question": "q", 1: "x", "1": "z"}],
        [{"question": "q", "answer": {1: "x", "1": "z"}}],
    ]
    for table in tables:
        with pytest.raises(PlanError, match=r"^dataset.*: has two columns '(answer|1)'\. Rename one\.$"):
            as_file(table, "dataset")
    (tmp_path / "split.json").write_text(json.dumps({"columns": names, "data": [cells]}))
    with pytest.raises(PlanError, match=r"split.json: has two columns 'answer'"):
        read_rows(str(tmp_path / "split.json"))


def test_the_arguments_of_trl_s_trainers_are_understood(tiny_model, tmp_path, capsys):
    """SFTTrainer(model, train_dataset, eval_dataset) with the fields of its configs; what is not taken is named."""
    given = dict(model=str(tiny_model), train_dataset=ROWS, eval_dataset=ROWS[:2], learning_rate=2e-4, lora_r=4)
    planned = fine_tune(**given, num_train_epochs=2, backend="cpu", dry_run=True, output_dir=str(tmp_path / "o"))
    shown = capsys.readouterr().out
    assert planned.status == "planned" and "data, validation" in shown and "each of 8 rows is read 2 times" in shown
    for name in ("args", "peft_config", "processing_class", "callbacks"):
        with pytest.raises(PlanError, match=rf"fine_tune\({name}=...\)"):
            fine_tune(**given, **{name: {"r": 8}})


ITS_OWN: dict = {"a": []}
ITS_OWN["a"].append(ITS_OWN)


def test_paths_are_taken_where_names_are(tiny_model, rows_file, tmp_path):
    flags = dict(dataset=Path(rows_file), output_dir=tmp_path / "out", backend="cpu", dry_run=True)
    assert fine_tune(model_name=Path(tiny_model), **flags).status == "planned"
    assert fine_tune(model_name=Path(tiny_model), **flags | {"dataset": [Path(rows_file)]}).status == "planned"


@pytest.mark.parametrize(
    "flags, said",
    [
        (dict(dataset=[None]), r"fine_tune\(dataset=...\): entry 1 of the list is empty"),
        (dict(dataset=[ROWS[0], None]), r"fine_tune\(dataset=...\), row 2: is NoneType, not a dict"),
        (dict(on_eval="print"), r"fine_tune\(on_eval=...\): is str, must be a function"),
    ],
)
def test_what_is_no_row_and_no_function_is_refused(flags, said, tiny_model, tmp_path):
    how = dict(model_name=str(tiny_model), output_dir=str(tmp_path / "out"), backend="cpu", dry_run=True)
    with pytest.raises(PlanError, match=said):
        fine_tune(**how | {"dataset": ROWS} | flags)


def test_a_program_without_standard_streams_trains(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    result = fine_tune(model_name=str(tiny_model), dataset=ROWS, output_dir=str(tmp_path / "out"), **SMALL)
    assert result.status == "finished" and sys.stdout is None and sys.stderr is None


def test_several_data_sets_may_each_be_rows(tiny_model, tmp_path):
    """They ended in a TypeError."""
    held_out = str(jsonl(tmp_path / "held.jsonl", ROWS[:2]))
    how = dict(model_name=str(tiny_model), dataset=[ROWS[:3], ROWS[3:]], output_dir=str(tmp_path / "out"), max_steps=1)
    result = fine_tune(**SMALL | how | dict(validation_dataset=[held_out, ROWS[2:]]))
    (*_, last) = read_events(result.output_dir, "eval")
    assert "loss/held.jsonl" in last and sum(name.startswith("loss/") for name in last) == 2
    with pytest.raises(PlanError, match="is int 1, must be a string"):
        fine_tune(**SMALL | how | dict(dataset=[ROWS, [1]]))


def test_a_callback_may_close_the_stdout_of_its_program(tiny_model, tmp_path, monkeypatch):
    """The run ended in "I/O operation on closed file"."""
    own = io.StringIO()
    monkeypatch.setattr("sys.stdout", own)
    how = dict(model_name=str(tiny_model), dataset=ROWS, output_dir=str(tmp_path / "out"), max_steps=2)
    result = fine_tune(**SMALL | how, on_step=lambda event: own.close())
    assert (result.status, result.step) == ("finished", 2) and sys.stdout is own


def test_a_program_that_has_closed_its_stdout_trains(tiny_model, tmp_path, monkeypatch):
    """It ended in "I/O operation on closed file"."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    monkeypatch.setattr("sys.stderr", closed)
    result = fine_tune(model_name=str(tiny_model), dataset=ROWS, output_dir=str(tmp_path / "out"), **SMALL)
    assert result.status == "finished" and sys.stdout is closed and sys.stderr is closed


def test_a_program_whose_stdout_can_only_write_and_that_has_no_name_trains(tiny_model, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    monkeypatch.setattr(sys, "argv", [])
    fine_tune(**SMALL | {"model_name": str(tiny_model), "output_dir": str(tmp_path / "out")}, dataset=ROWS)
    assert "trainable parameters" in "".join(written)


def test_values_that_json_lacks_become_its_or_are_named():
    row = {
        "a": np.float32(0.5),
        "b": np.array([1, 2]),
        "c": float("nan"),
        "d": datetime.date(2026, 1, 2),
        "e": "\ud83d" + "\ude00",
    }
    written = json.loads(Path(as_file([row], "x")).read_bytes())
    assert written == {"a": 0.5, "b": [1, 2], "c": None, "d": "2026-01-02", "e": "\U0001f600"}
    half = as_file([{"text": "a"}, {"text": "z\ud83d"}], "x")  # which a run may pass over
    assert "2: is not Unicode text (lone surrogate \\ud83d)" in read_rows(half, skip_bad_rows=1).skipped[0]
    for rows, text in (
        ([{"a": 1}, {"a": b"x"}], "x, row 2: column a is bytes, which is no text, number or list. Convert it."),
        ([{"a": 1}, 5], "x, row 2: is int, not a dict. Give rows as dicts."),
        ([{"a": 1}, ITS_OWN], "x, row 2: contains itself, or is nested too deeply. Give plain values."),
        (iter([]), "x: has no rows. Give some."),
    ):
        with pytest.raises(PlanError) as error:
            as_file(rows, "x")
        assert str(error.value) == text
    assert {path.suffix for path in Path(as_file(ROWS, "x")).parent.iterdir()} == {".jsonl"}


def test_a_run_on_rows_is_the_run_on_their_file(tiny_model, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    losses: dict[str, list] = {"rows": [], "file": []}
    for name, dataset in (("rows", ROWS), ("file", str(file))):
        fine_tune(
            model_name=str(tiny_model),
            dataset=dataset,
            output_dir=str(tmp_path / name),
            on_step=lambda event, name=name: losses[name].append(event["loss"]),
            **SMALL,
        )
    assert losses["rows"] == losses["file"] and len(losses["rows"]) == 2
    resumed = fine_tune(resume=str(tmp_path / "rows"), dataset=ROWS, max_steps=3)
    assert (resumed.status, resumed.step) == ("finished", 3)


# ---- callbacks and the result


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """(the result, the events that its callbacks were given)."""
    folder, events = tmp_path_factory.mktemp("python"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        hooks = dict.fromkeys(("on_step", "on_eval", "on_save"), events.append)
        out = str(folder / "out")
        result = fine_tune(
            model_name=str(tiny_model),
            dataset=ROWS,
            validation_split=0.25,
            save_every=1,
            output_dir=out,
            **SMALL,
            **hooks,
        )
    return result, events


def test_callbacks_are_given_the_events_of_metrics_jsonl(trained):
    result, events = trained
    written = [json.loads(line) for line in (Path(result.output_dir) / "metrics.jsonl").read_text().splitlines()]
    assert events == [event for event in written if event["event"] in ("step", "eval", "save")]
    assert [e["event"] for e in events if e["event"] != "save"] == ["eval", "step", "step", "eval"]
    for number in (1, 2):  # the first is written beside the second step, and said when it is committed
        assert [e["event"] for e in events if e["step"] == number and e["event"] != "eval"] == ["step", "save"]


def test_the_result_answers_and_scores_as_the_scripts_do(trained, tmp_path, capsys):
    result, _ = trained
    answers = result.generate(["What is 1 plus 1? ", "Hello"], raw=True, max_new_tokens=5)
    assert result.generate("Hello", raw=True, max_new_tokens=5) == answers[1]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    figures = result.score(ROWS, max_new_tokens=4)
    assert figures == result.score(str(file), max_new_tokens=4) and figures["rows"] == len(ROWS)
    capsys.readouterr()
    common = ["--checkpoint", result.output_dir, "--device", "cpu"]
    generate.main([*common, "--prompt", "Hello", "--raw", "--max_new_tokens", "5"])
    assert capsys.readouterr().out.rstrip("\n") == answers[1].rstrip("\n")
    score.main([*common, "--dataset", str(file), "--max_new_tokens", "4", "--json"])
    by_script = json.loads(capsys.readouterr().out)
    assert {name: by_script[name] for name in figures} == figures
    assert sum(p.numel() for p in result.model.parameters()) > 0 and result.tokenizer.chat_template


def test_what_is_asked_out_of_its_range_or_not_said_is_refused(trained):
    result, _ = trained
    with pytest.raises(PlanError, match="system: raw leaves the chat template out, which says it"):
        result.generate("Hello", raw=True, system="Be brief.")
    wrong = dict(max_new_tokens=0, temperature=-1.0, top_p=-3, top_k=-4, batch_size=0)
    for name, value in wrong.items():
        with pytest.raises(PlanError, match=f"--{name} {value}: must be "):
            result.generate("Hello", **{name: value})
    for name, value in dict(max_new_tokens=0, samples=-7, context_length=0, batch_size=0).items():
        with pytest.raises(PlanError, match=f"--{name} {value}: must be "):
            result.score(ROWS, **{name: value})
    with pytest.raises(PlanError, match="--batch_size 1.5: must be a whole number"):
        result.generate("Hello", batch_size=1.5)
    numbers = dict(max_new_tokens=np.int64(3), top_k=None, top_p=None, temperature=np.float32(0))
    how = dict(raw=True, max_new_tokens=3)
    assert result.generate("Hello", raw=True, **numbers) == result.generate("Hello", **how)
    assert result.score(ROWS, samples=np.int64(2), max_new_tokens=np.int64(3))["rows"] == 2
    assert result.generate("Hello", temperature=1e-300, **how) == result.generate("Hello", **how)


def test_what_has_no_model_says_so(tiny_model, tmp_path):
    planned = fine_tune(model_name=str(tiny_model), dataset=ROWS, dry_run=True, output_dir=str(tmp_path / "o"), **SMALL)
    assert planned.status == "planned"
    with pytest.raises(PlanError, match="is planned, and has no trained model to open"):
        planned.generate("Hello")
    with pytest.raises(PlanError, match=r"fine_tune\(on_step=...\): --world_size 2 trains in processes of its own"):
        fine_tune(
            model_name=str(tiny_model),
            dataset=ROWS,
            world_size=2,
            on_step=print,
            output_dir=str(tmp_path / "p"),
            **SMALL,
        )


def test_an_exception_in_a_callback_ends_the_run_as_a_failure(tiny_model, tmp_path):
    def fails(event):
        raise KeyError("mine")

    out = tmp_path / "out"
    with pytest.raises(KeyError, match="mine"):
        fine_tune(model_name=str(tiny_model), dataset=ROWS, output_dir=str(out), on_step=fails, **SMALL)
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"], last["exit_code"]) == ("end", "failed", 1)


def test_the_page_is_executed(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FSDP_BACKEND", "cpu")
    text = "\n".join(text for _, text in blocks(ROOT / "docs/python.md", "python"))
    assert text.count("fine_tune(") >= 4
    exec(compile(text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny_model)), "python.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "finished 4 " in printed and "no such flag. Nearest: dataset." in printed


def test_a_result_opens_its_own_weights_from_any_working_directory(plain_run, tmp_path, monkeypatch):
    """It looked for a relative folder from the present one, asked the Hub for it, and answered with a later run's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    how = dict(raw=True, max_new_tokens=4)
    first, second, complete = (plain_run(output_dir="out", max_steps=2, **more) for more in FOLLOWING)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert second.generate("What is 2?", **how) == complete.generate("What is 2?", **how)
    with pytest.raises(PlanError, match=r"^out: has weights of a later run than this result's\."):
        first.generate("What is 2?", **how)


FOLLOWING = ({}, {"overwrite": True, "seed": 7}, {"resume": "auto", "seed": 7})
