"""Ends of generation, read from generation_config.json."""

import json

import pytest

import train
from finetune.errors import PlanError
from finetune.model_files.tokenizer import generation_ends
from tests.support.model_folders import with_config


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("{", "is not JSON ("),
        ("[2]", "contains list, must contain an object"),
        ("5", "contains int, must contain an object"),
        ('{"eos_token_id": "2"}', 'eos_token_id is "2", must be a token id'),
        ('{"eos_token_id": [2, "3"]}', 'eos_token_id is [2, "3"], must be a token id'),
        ('{"eos_token_id": {"a": 1}}', 'eos_token_id is {"a": 1}, must be a token id'),
    ],
)
def test_a_malformed_generation_config_is_refused_before_the_model_loads(
    flags, tiny_model, tmp_path, content, fact, capsys
):
    folder = with_config(tiny_model, tmp_path)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(PlanError) as error:
        train.fine_tune(**flags | {"model_name": str(folder)})
    line = str(error.value)
    assert line.startswith(f"{folder / 'generation_config.json'}: {fact}") and "\n" not in line
    assert "trainable parameters" not in capsys.readouterr().out


def test_the_ends_that_a_generation_config_names_are_read(tmp_path):
    assert generation_ends(tmp_path) == set()
    for named, ids in ((None, set()), (2, {2}), ([2, 5], {2, 5})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert generation_ends(tmp_path) == ids
