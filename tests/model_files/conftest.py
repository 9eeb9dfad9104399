"""Tiny model folders, and caches of the test's own."""

import shutil
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.model_folders import CLOSED
from tests.support.tiny import train_tokenizer


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """A tiny Llama with a tokenizer, as save_pretrained writes it, in one file."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    tiny.build("llama", vocab_size=400).save_pretrained(folder)
    train_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def sharded_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "tiny-llama"
    tiny.build("llama").save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def model(saved_model, tmp_path):
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


@pytest.fixture
def sharded(sharded_model, tmp_path):
    return Path(shutil.copytree(sharded_model, tmp_path / "model"))


@pytest.fixture
def own_caches(monkeypatch, tmp_path):
    """No test reads or fills the user's caches, sees the user's token, or reaches the outside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
