"""What is trained and exported here reaches the Hub, and opens from there as it does from its folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from finetune.adapters.heads import HeadRecord
from finetune.errors import PlanError
from finetune.model_files.hub_adapter import fetched
from finetune.model_files.hub_upload import check_upload, upload
from finetune.model_files.manifest import read_manifest
from tests.support import hub
from tests.support.commands import ROOT, words

TOKEN = "secret-of-a-test"


@pytest.fixture
def served(tmp_path):
    """(the environment of programs that use the server, the folder of what is uploaded)."""
    import os

    (tmp_path / "hub").mkdir()
    with hub.serve(uploads=tmp_path / "hub", token=TOKEN) as endpoint:
        own = {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        # Large files by HTTP: the Hub's other protocol has a server of its own.
        own |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        yield {**os.environ, **own}, tmp_path / "hub"


def cli(env, script, *argv):
    command = [sys.executable, str(ROOT / script), *map(str, argv)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_is_uploaded_and_opens_from_the_hub_as_from_its_folder(served, flags, rows_file, tmp_path):
    env, uploads = served
    own = flags | {"train_type": "qlora", "quantization_backend": "nf4", "log_to": "stdout"}
    code, said, err = cli(env, "train.py", *words(own, max_steps=2, push_to_hub="org/shop"))
    assert code == 0, err
    assert said.splitlines()[-1].startswith("uploaded to http://127.0.0.1")
    names = {str(p.relative_to(uploads / "org/shop")) for p in (uploads / "org/shop").rglob("*") if p.is_file()}
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json", "run_plan.json"} <= names
    assert not any("step-" in name or "metrics" in name for name in names)
    assert "library_name: peft" in (uploads / "org/shop" / "README.md").read_text()
    score = ["--dataset", rows_file, "--samples", 4, "--max_new_tokens", 4, "--json"]
    figures = []
    for checkpoint in ("org/shop", tmp_path / "out"):
        code, said, err = cli(env, "score.py", "--checkpoint", checkpoint, *score)
        assert code == 0 and "base: nf4 4 bits, as trained" in err, err
        figures.append({k: v for k, v in json.loads(said).items() if k not in ("wall_s", "memory_bytes")})
    assert figures[0] == figures[1]
    code, _, err = cli(
        env, "export.py", "--checkpoint", "org/shop", "--output_dir", tmp_path / "m", "--push_to_hub", "org/m"
    )
    assert code == 0, err
    card = ModelCard.load(uploads / "org/m" / "README.md")
    assert card.data.library_name == "transformers" and (uploads / "org/m/model.safetensors").is_file()
    code, said, err = cli(env, "train.py", *words(own, resume="auto", push_to_hub="org/again"))
    assert code == 0 and "already complete" in said and (uploads / "org/again/README.md").is_file(), err
    continued = {k: v for k, v in flags.items() if k not in ("model_name", "lora_rank", "output_dir")}
    code, said, err = cli(
        env, "train.py", *words(continued, adapter="org/shop", max_steps=1, output_dir=tmp_path / "2")
    )
    assert code == 0 and "continues from the adapter in" in said, err


@pytest.mark.promise("AT_04")
def test_what_the_hub_would_refuse_is_one_line_before_anything_is_loaded(served, monkeypatch, tmp_path):
    env, uploads = served
    for name in ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, env[name])
    for name, fact in (("shop", "is not the id"), ("a/b/c", "is not the id"), ("org/a--b", "is not the id")):
        with pytest.raises(PlanError, match=fact):
            check_upload(name)
    monkeypatch.setenv("HF_TOKEN", "wrong-token")
    with pytest.raises(PlanError, match="--push_to_hub org/shop: .* answers 401, so HF_TOKEN may not do that") as error:
        check_upload("org/shop")
    assert "wrong-token" not in str(error.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError, match="HF_HUB_OFFLINE is set"):
        check_upload("org/shop")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_upload("org/shop")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PlanError, match="Everything is in .*hf upload org/shop") as error:
        upload(tmp_path / "run", "org/shop", "x")
    assert "\n" not in str(error.value)
    assert not list(uploads.iterdir())


READS = {"auth": {"accessToken": {"role": "read"}}}
TEAM = {"name": "me", "orgs": [{"name": "Team", "roleInOrg": "write"}, {"name": "other", "roleInOrg": "read"}]}


@pytest.mark.parametrize(
    ("me", "repo_id", "fact"),
    [
        (READS, "org/shop", "--push_to_hub org/shop: HF_TOKEN may only read. Make one that may write"),
        (TEAM, "org/shop", "HF_TOKEN is of me, who is no member of org. Give me/..., or"),
        (TEAM, "other/shop", "me may only read in other. Give one of me"),
        ({"orgs": [5]}, "org/shop", "does not say whose HF_TOKEN is"),
        (TEAM, "team/shop", ""),
        (TEAM, "me/shop", ""),
        ({"auth": {"accessToken": {"role": "fineGrained"}}, "orgs": []}, "team/shop", ""),
    ],
)
def test_a_token_that_may_not_write_is_refused_before_the_run(monkeypatch, tmp_path, me, repo_id, fact):
    with hub.serve(uploads=tmp_path, token=TOKEN, me=me) as endpoint:
        for name, value in dict(HF_ENDPOINT=endpoint, HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0").items():
            monkeypatch.setenv(name, value)
        if not fact:
            return check_upload(repo_id)
        with pytest.raises(PlanError, match=re.escape(fact)) as error:
            check_upload(repo_id)
    assert "\n" not in str(error.value)


def uploading(monkeypatch, env):
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_XET"):
        monkeypatch.setenv(name, env[name])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # read when it was imported


@pytest.mark.promise("AT_04")
def test_weights_configs_and_the_card_are_uploaded_and_nothing_else(served, monkeypatch, tmp_path):
    env, uploads = served
    uploading(monkeypatch, env)
    there = {"README.md", "adapter_model.safetensors", "adapter_config.json", "run_plan.json", "tokenizer.json"}
    there |= {"head.json", "preprocessor_config.json", "processor_config.json"}
    there |= {"modules.json", "1_Pooling/config.json", "2_Normalize/config.json", "sentence_bert_config.json"}
    for name in (*there, "metrics.jsonl", "train_state.json", ".lock", "checkpoints/step-1/adapter_config.json"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    upload(tmp_path / "run", "org/shop", "x")
    found = {str(p.relative_to(uploads / "org/shop")) for p in (uploads / "org/shop").rglob("*") if p.is_file()}
    assert found - {".gitattributes"} == there


def test_a_head_opens_from_the_hub_and_the_model_after_it_has_none(served, monkeypatch, tmp_path, run):
    """A classifier's folder is not read without its head.json, and a language model's is not a classifier."""
    env, _ = served
    uploading(monkeypatch, env)
    rows = [{"text": word, "label": word} for word in ("good", "bad") * 2]
    run(dataset=rows, task="classify", train_type="lora", num_epochs=1, output_dir=str(tmp_path / "head"))
    said = upload(tmp_path / "head", "org/shop", "a classifier")
    assert ". Its base is the folder " in said and "\n" not in said
    opened = Path(fetched("org/shop"))
    assert HeadRecord.read(opened).labels == ("bad", "good")
    assert set(read_manifest(opened)["files"]) <= {file.name for file in opened.iterdir()}
    run(train_type="lora", num_epochs=1, output_dir=str(tmp_path / "model"))
    upload(tmp_path / "model", "org/shop", "a language model")
    assert not (Path(fetched("org/shop")) / "head.json").exists()


def test_what_opened_before_an_upload_does_not_open_after_it(served, monkeypatch, tmp_path, run, capsys):
    """A full model over an adapter: without the adapter's files, which would be opened in its place."""
    env, uploads = served
    uploading(monkeypatch, env)
    run(train_type="lora", num_epochs=1, output_dir=str(tmp_path / "a"))
    run(train_type="full", lora_rank=None, lora_dropout=None, num_epochs=1, output_dir=str(tmp_path / "b"))
    upload(tmp_path / "a", "org/shop", "an adapter")
    there = uploads / "org/shop"
    (there / "notes.txt").write_text("mine")
    (there / "model.gguf").write_text("another form")
    (there / "chat_template.jinja").write_text("of the adapter")
    manifest = json.loads((there / "manifest.json").read_text())
    manifest["files"]["chat_template.jinja"] = {"size": 14, "sha256": ""}
    (there / "manifest.json").write_text(json.dumps(manifest))
    upload(tmp_path / "b", "org/shop", "a model")
    names = {p.name for p in there.iterdir()}
    assert "model.safetensors" in names and not {"adapter_config.json", "adapter_model.safetensors"} & names
    assert "chat_template.jinja" not in names
    assert {"notes.txt", "model.gguf", "README.md"} <= names
    (there / "other.safetensors").write_text("of someone else")
    before = {p.name: p.read_bytes() for p in there.iterdir()}
    with pytest.raises(PlanError, match="--push_to_hub org/shop: holds other.safetensors, which no run wrote") as error:
        upload(tmp_path / "a", "org/shop", "an adapter again")
    assert "\n" not in str(error.value)
    assert {p.name: p.read_bytes() for p in there.iterdir()} == before
