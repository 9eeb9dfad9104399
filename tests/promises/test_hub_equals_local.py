"""A model and dataset of a hub train as the local ones do."""

import json
import shutil

import pytest

import train
from tests.support import hub
from tests.support.commands import words
from tests.support.runs import read_events


@pytest.mark.promise("CLI_02")
def test_a_hub_model_and_dataset_train_as_the_local_ones_do(flags, tiny_model, rows_file, tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    shutil.copy(rows_file, tmp_path / "rows" / "train.jsonl")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub.serve(models={"org/tiny": tiny_model}, datasets={"org/rows": tmp_path / "rows"}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert train.main(words(flags, model_name="org/tiny", dataset="org/rows", max_steps=3)) == 0
    assert train.main(words(flags, output_dir=tmp_path / "local", max_steps=3)) == 0
    one, two = ([(e["loss"], e["grad_norm"]) for e in read_events(tmp_path / n, "step")] for n in ("out", "local"))
    assert one == two
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
