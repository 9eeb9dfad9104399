"""Model folders changed by hand, and what is answered to them."""

import json
import shutil

import pytest
import torch
import transformers

import expand
from finetune.errors import PlanError
from finetune.model_files.files import find_model
from tests.support.adapters import IDS

# Nothing listens on the discard port.
CLOSED = "http://127.0.0.1:9"


def refusal(name, **options):
    with pytest.raises(PlanError) as caught:
        find_model(str(name), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def with_config(tiny_model, tmp_path, **changes):
    """A copy of the tiny model with other values in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def expand_model(model, folder, *flags):
    """(the model's folder, the folder that expand.py makes of it)."""
    source, target = folder / "source", folder / "expanded"
    model.save_pretrained(source)
    expand.main(["--model_name", str(source), "--output_dir", str(target), *map(str, flags)])
    return source, target


def logits(folder, **overrides):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **overrides).eval()(IDS).logits
