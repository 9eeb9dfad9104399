"""Digests of weight files: hashed once, and again as soon as anything about the file has changed."""

import hashlib
import json
import os
import time

import pytest

from finetune.model_files import digest
from finetune.model_files.digest import SETTLED_S, file_digest


@pytest.fixture
def weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    return file


def entries(tmp_path):
    return list((tmp_path / "cache" / "finetune" / "digests").glob("*.json"))


def test_a_file_that_was_just_written_is_not_remembered(weights, tmp_path):
    """A later change in the same tick of the file system's clock would go unnoticed."""
    assert file_digest(weights) == hashlib.sha256(b"weights").hexdigest()
    assert not entries(tmp_path)


def test_a_file_is_remembered_until_anything_about_it_changes(weights, tmp_path, monkeypatch):
    now = time.time_ns()
    monkeypatch.setattr(digest.time, "time_ns", lambda: now + int(2 * SETTLED_S * 1e9))
    found = file_digest(weights)
    (entry,) = entries(tmp_path)
    content = json.loads(entry.read_text())
    assert content["sha256"] == found
    entry.write_text(json.dumps(content | {"sha256": "remembered"}))
    assert file_digest(weights) == "remembered"
    os.utime(weights)  # the same bytes, at another time
    assert file_digest(weights) == found
    entry.write_text("[")  # a damaged entry is written again
    assert file_digest(weights) == found and json.loads(entry.read_text())["sha256"] == found


def test_a_cache_that_cannot_be_written_only_costs_time(weights, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert file_digest(weights) == hashlib.sha256(b"weights").hexdigest()
