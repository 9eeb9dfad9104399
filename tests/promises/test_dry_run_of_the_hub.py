"""A dry run of a model and a dataset that are not here: kilobytes move, and the plan is the downloaded one's."""

import json
import re
from pathlib import Path

import pytest
import torch

import train
from finetune.estimate.model_shape import shape_of_files
from finetune.model_files.files import find_model
from finetune.model_files.hub_ranges import model_on_paper
from tests.support import hub, tiny
from tests.support.commands import command, finish, refused, words

CLOSED = "http://127.0.0.1:9"
PREDICTED = re.compile(r"^ *(base|trainable|gradients|optimizer|activations|total) .*$", re.MULTILINE)


@pytest.fixture(scope="module")
def large(tiny_model, tmp_path_factory):
    """A model of 29 MB in several files, with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("large") / "model"
    config = json.loads((tiny_model / "config.json").read_text())
    model = tiny.build("llama", vocab_size=config["vocab_size"], hidden_size=256, intermediate_size=2048, **HEADS)
    model.to(torch.float32).save_pretrained(folder, max_shard_size="8MB")
    for file in tiny_model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    for file in tiny_model.glob("*.jinja"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


HEADS = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def rows(folder: Path, number: int, suffix: str = "jsonl") -> Path:
    folder.mkdir(parents=True)
    entries = [{"prompt": f"What is {i}? ", "completion": f"It is {i}." + "." * (i % 9)} for i in range(number)]
    if suffix == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(entries), folder / "train.parquet", row_group_size=1000)
    elif suffix == "json":
        (folder / "train.json").write_text(json.dumps(entries))
    elif suffix == "csv":
        lines = [f'{e["prompt"]},"{e["completion"]}\nand more"' for e in entries]
        (folder / "train.csv").write_text("prompt,completion\n" + "\n".join(lines) + "\n")
    else:
        (folder / "train.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    return folder


def dry_run(endpoint, home, **flags):
    flags = {"backend": "cpu", "train_type": "lora", "output_dir": home / "out", **flags}
    argv = command(flags, "--dry_run", lora_rank=4, precision="fp32")
    return finish(argv, HF_ENDPOINT=endpoint, HF_HOME=str(home / "hf"), XDG_CACHE_HOME=str(home / "cache"))


def moved(server_log) -> int:
    return sum(size for *_, size in server_log)


def test_a_dry_run_moves_kilobytes_and_predicts_what_the_downloaded_model_gives(large, tmp_path):
    data = rows(tmp_path / "rows", 8_000)
    assert sum(f.stat().st_size for f in large.iterdir()) > 29_000_000 and (data / "train.jsonl").stat().st_size > 4e5
    log: list = []
    with hub.serve(models={"org/large": large}, datasets={"org/rows": data}, log=log) as endpoint:
        code, out, err = dry_run(endpoint, tmp_path, model_name="org/large", dataset="org/rows", max_steps=10)
        assert code == 0, err + out
        first = moved(log)
        again = dry_run(endpoint, tmp_path, model_name="org/large", dataset="org/rows", max_steps=10)
    assert first < 700_000, first  # of 30 MB: listings, tokenizer, 256 KiB of rows, 64 KiB of each weight file
    assert moved(log) - first < 100_000 and again.returncode == 0
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert "org/large is not on this disk: its config and the headers of its weights" in out
    assert re.search(r"org/rows train at \w{12} \(train.jsonl\): its first .* about [78],\d\d\d, 256 KiB", out), out
    assert "What is 0?⟦ It is 0." in out
    local = dry_run(CLOSED, tmp_path, model_name=large, dataset=data / "train.jsonl", max_steps=10)
    assert local.returncode == 0, local.stderr
    mine, theirs = (PREDICTED.findall(text) for text in (out, local.stdout))
    assert mine == theirs and mine
    lines = [[x for x in t.splitlines() if "trainable parameters" in x or "fits" in x] for t in (out, local.stdout)]
    assert lines[0] == lines[1]


def test_headers_give_the_shape_of_the_downloaded_files(large, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with hub.serve(models={"org/large": large}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        files, line = model_on_paper("org/large", None)
        pinned, _ = model_on_paper("org/large", hub.commit_of(large))
    local = find_model(str(large))
    assert shape_of_files(files) == shape_of_files(local) and files.revision == pinned.revision == hub.commit_of(large)
    assert [f.name for f in files.weight_files] == [f.name for f in local.weight_files]
    assert all(f.stat().st_blocks * 512 < 200_000 < f.stat().st_size for f in files.weight_files), line


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "json", "csv"])
def test_first_rows_of_every_kind_of_file(tiny_model, tmp_path, suffix):
    data, log = rows(tmp_path / "rows", 30_000, suffix), []
    size = (data / f"train.{suffix}").stat().st_size
    with hub.serve(datasets={"org/rows": data}, log=log) as endpoint:
        code, out, err = dry_run(endpoint, tmp_path, model_name=tiny_model, dataset="org/rows", max_steps=10)
    assert code == 0 and "What is 0?" in out and "its first rows of about" in out, err + out
    assert moved(log) < max(400_000, size / 2), (moved(log), size)
    if suffix == "parquet":
        assert "of about 30,000" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["objects over lines", "after a mark", "array over lines", "table with lines in cells"]
)
def test_first_rows_that_span_lines_are_read_and_counted(tiny_model, tmp_path, form):
    (tmp_path / "rows").mkdir()
    found = [{"prompt": f"What is {i}?\nSay it.", "completion": "It is\n" + "so " * 60} for i in range(3000)]
    text = "\n".join(json.dumps(row, indent=2) for row in found)
    name = "train.jsonl"
    if form == "after a mark":
        text = "\ufeff" + text
    elif form == "array over lines":
        text = json.dumps(found, indent=2)
        name = "train.json"
    elif form == "table with lines in cells":
        cells = "".join(f'"{row["prompt"]}","{row["completion"]}"\n' for row in found)
        text = "prompt,completion\n" + cells
        name = "train.csv"
    (tmp_path / "rows" / name).write_text(text)
    with hub.serve(datasets={"org/rows": tmp_path / "rows"}) as endpoint:
        code, out, err = dry_run(endpoint, tmp_path, model_name=tiny_model, dataset="org/rows", max_steps=10)
    assert code == 0, err + out
    assert 2900 < int(re.search(r"its first rows of about ([\d,]+)", out)[1].replace(",", "")) < 3100, out


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_one_line_and_without_a_hub_the_plan_is_as_before(tiny_model, tmp_path):
    with hub.serve(models={"org/tiny": tiny_model}) as endpoint:
        for flags, why in (
            (dict(model_name="org/absent"), "does not have it"),
            (dict(model_name="org/tiny", revision="v9"), "has no such branch, tag or commit"),
            (dict(model_name="org/tiny", dataset="org/absent"), "neither a file nor a public Hub dataset"),
            (dict(model_name="org/tiny", lora_target_modules="q_proj,qproj"), "--lora_target_modules qproj: no weight"),
        ):
            code, _, err = dry_run(endpoint, tmp_path, **{"dataset": "dummy", **flags})
            assert code == 2 and why in err and err.count("\n") == 1, err
        assert "Choose from down_proj, embed_tokens, gate_proj" in err
    code, out, _ = dry_run(CLOSED, tmp_path, model_name="org/tiny", dataset="org/name")
    assert code == 0 and "org/tiny is not on this disk yet (" in out and "limits that depend on it" in out


def test_names_of_layers_are_checked_before_anything_is_loaded(flags):
    line = refused(flags, lora_target_modules="wq,q_proj")
    assert line.startswith("--lora_target_modules wq: no weight of this model has that name. Choose from down_proj, ")
    assert train.main(words(flags, "--dry_run", lora_target_modules="q_proj,self_attn.v_proj,lm_head")) == 0
