"""Fixtures of all tests: tiny tokenizers and models in folders as a user has them, and runs on them."""

import json

import pytest
import torch

import expand
from finetune.torch_engine.device import set_onednn
from tests.rig import options
from tests.rig.options import pytest_terminal_summary  # noqa: F401  a hook of the rig
from tests.support import processor, tiny
from tests.support.commands import command, finish_start
from tests.support.promises import ids_of
from tests.support.runs import PLAIN, RUN
from tests.support.tiny import CHATML, train_tokenizer
from train import fine_tune

pytest_plugins = ["tests.support.tiers", "tests.support.devices"]


def pytest_addoption(parser):
    options.pytest_addoption(parser)
    processor.add_option(parser)


def pytest_configure(config):
    processor.believe_in(config.getoption("--processor"))


def pytest_itemcollected(item):
    """`-k BM_07` selects the tests that show this promise of the guides, see support/promises.py."""
    item.extra_keyword_matches.update(ids_of(item))


@pytest.fixture(autouse=True)
def torch_default_matmul():
    """Each test starts with torch's own choice for fp32 products, whatever a run in this process chose before."""
    set_onednn(False)


@pytest.fixture(scope="session")
def make_tokenizer():
    """train_tokenizer, for a tokenizer with another template."""
    return train_tokenizer


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory):
    """No chat template; BOS added; pad is the eos."""
    return train_tokenizer(tmp_path_factory.mktemp("plain_tokenizer"))


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    """ChatML with <|im_end|> as a token of its own; eos is </s>."""
    return train_tokenizer(tmp_path_factory.mktemp("chat_tokenizer"), bos=False, chat_template=CHATML)


def save_tiny_model(folder, **settings):
    """Saves a tiny random Llama and a tokenizer with these settings, as a user would have them; the folder."""
    tokenizer = train_tokenizer(folder, bos=False, **settings)
    model = tiny.build("llama", vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=None, bos_token_id=1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a tiny model without a chat template, which costs each run half a second of other processes."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The same with ChatML. A module whose tests converse gives it as its `tiny_model`."""
    return save_tiny_model(tmp_path_factory.mktemp("chat_models") / "tiny", chat_template=CHATML)


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    """24 prompt/completion rows of uneven length."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}" + "." * (i % 5)} for i in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def bf16_folders(tmp_path_factory):
    """{architecture: a folder of its tiny model, in bf16}."""
    found = {}
    for name in ("llama", "llama_tied", "qwen2", "gpt2", "gemma3", "mixtral", "gpt_oss", "phi3", "falcon"):
        found[name] = str(tmp_path_factory.mktemp("sharded") / name)
        tiny.build(name).to(torch.bfloat16).save_pretrained(found[name], max_shard_size="50KB")
    return found


@pytest.fixture(scope="session")
def expanded_model(tiny_model, tmp_path_factory):
    """The tiny model with one new layer, by expand.py."""
    folder = tmp_path_factory.mktemp("expanded") / "blk_exp-2-3"
    expand.main(["--model_name", str(tiny_model), "--output_dir", str(folder), "--num_new_blocks", "1"])
    return folder


@pytest.fixture
def flags(tiny_model, rows_file, tmp_path):
    """Flags of a tiny run into tmp_path / "out"."""
    return {
        "model_name": str(tiny_model),
        "dataset": str(rows_file),
        "output_dir": str(tmp_path / "out"),
        "backend": "cpu",
        "train_type": "lora",
        "lora_rank": 4,
        "batch_size": 4,
        "context_length": 64,
        "precision": "fp32",
    }


@pytest.fixture(scope="session")
def base(tiny_model, rows_file):
    """Flags of a run of 12 steps of 4 rows, without dropout, without rows per rank and output folder."""
    return {
        "model_name": tiny_model,
        "dataset": rows_file,
        "backend": "cpu",
        "train_type": "lora",
        "lora_rank": 4,
        "context_length": 64,
        "num_epochs": 2,
        "lr": "5e-3",
        "log_to": "stdout",
        "precision": "fp32",
    }


@pytest.fixture(scope="session")
def alone(base, tmp_path_factory):
    """The output folder of `base` in one process, started as a user starts it."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    code, _, err = finish_start(command(base, "--batch_size 4 --save_every 4 --keep_last 9", output_dir=folder))
    assert code == 0, err
    return folder


@pytest.fixture
def run(tiny_model, rows_file, tmp_path):
    """fine_tune with dropout and accumulation on the tiny model, into tmp_path / "out" unless given another folder."""

    def call(**overrides):
        base = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(tmp_path / "out"))
        return fine_tune(**{**RUN, **base, **overrides})

    return call


@pytest.fixture
def plain_run(tiny_model, rows_file, tmp_path):
    """fine_tune without dropout and accumulation, 4 rows per step, into tmp_path / "out"."""

    def call(**overrides):
        base = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(tmp_path / "out"))
        return fine_tune(**{**PLAIN, **base, **overrides})

    return call


@pytest.fixture(scope="session")
def uninterrupted(tiny_model, rows_file, tmp_path_factory):
    """The output folder of a run of 12 steps with dropout and accumulation, every step kept."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    base = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(folder))
    state = fine_tune(**RUN, **base, save_every=1, keep_last=12)
    assert state.status == "finished" and state.step == 12
    return folder
