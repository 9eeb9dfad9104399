"""What a model's folder and the Hub's cache hold under the names that are opened is there, and is what it should be."""

import hashlib
import os
import shutil

import pytest

from finetune.adapters.saved import read_adapter
from finetune.errors import PlanError
from finetune.model_files.files import find_model
from finetune.model_files.tokenizer import load_tokenizer

COMMIT = "a" * 40


@pytest.fixture
def snapshot(tiny_model, tmp_path, monkeypatch):
    """The folder of org/m in a Hub cache that holds it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = tmp_path / "hub" / "models--org--m"
    folder = root / "snapshots" / COMMIT
    for each in (folder, root / "refs", root / "blobs"):
        each.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        digest = hashlib.sha256(content)
        if file.suffix != ".safetensors":
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content)
        (root / "blobs" / digest.hexdigest()).write_bytes(content)
        (folder / file.name).symlink_to(f"../../blobs/{digest.hexdigest()}")
    return folder


def refused(name="org/m", revision=None) -> str:
    with pytest.raises(PlanError) as error:
        find_model(str(name), revision)
    return str(error.value)


def test_a_whole_snapshot_is_opened(snapshot):
    found = find_model("org/m")
    assert found.folder == snapshot and found.revision == COMMIT


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "config.json"])
def test_a_file_whose_blob_is_gone_is_not_absent(snapshot, name):
    file = snapshot / name
    os.remove(file.resolve())
    assert refused().startswith(f"{file}: links to ../../blobs/")


def test_a_template_that_links_to_nothing_or_is_a_pipe_is_refused_in_a_local_folder_too(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.symlink_to("gone")
    said = f"{template}: links to gone, which is not there. Download it again, or remove the link."
    assert refused(folder) == said
    with pytest.raises(PlanError, match="links to gone"):
        load_tokenizer(folder)
    os.mkfifo(tmp_path / "gone")
    template.unlink()
    template.symlink_to(tmp_path / "gone")
    assert refused(folder) == f"{template}: is not a regular file. Remove it, or put the file in its place."


def test_an_adapter_whose_manifest_is_gone_is_not_one_without(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "manifest.json").symlink_to("gone")
    with pytest.raises(PlanError, match="manifest.json: links to gone, which is not there"):
        read_adapter(tmp_path)
    with pytest.raises(PlanError, match=r"none: has no adapter_config.json"):
        read_adapter(tmp_path / "none")


def test_a_link_to_nothing_under_another_name_is_the_users(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "latest").symlink_to("gone")
    (folder / "consolidated.safetensors").symlink_to("gone")
    assert find_model(str(folder)).folder == folder


def test_a_text_of_the_cache_that_was_changed_is_refused(snapshot):
    blob = (snapshot / "tokenizer.json").resolve()
    blob.write_bytes(blob.read_bytes().replace(b"a", b"b", 1))
    assert "tokenizer.json: is not the file that the Hub has (its sha1 differs)" in refused()


@pytest.mark.parametrize("content", [b"../../evil", b"/etc", b"\xff\xfe\0", b"", b"a" * 100, COMMIT.encode() + b"\n"])
def test_a_branch_names_a_commit(snapshot, content):
    file = snapshot.parent.parent / "refs" / "main"
    file.write_bytes(content)
    assert refused() == f"{file}: names no commit. Remove it."


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_branch_is_a_file(snapshot, tmp_path, kind):
    file = snapshot.parent.parent / "refs" / "main"
    file.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_text(COMMIT)
        file.symlink_to(tmp_path / "elsewhere")
    else:
        {"pipe": os.mkfifo, "folder": os.mkdir}[kind](file)
    assert refused().startswith(f"{file}: ")


def test_a_snapshot_is_a_folder_and_a_revision_no_path(snapshot):
    shutil.rmtree(snapshot)
    snapshot.write_text("x")
    assert refused() == f"{snapshot}: is a file, not a folder. Remove it."
    assert refused(revision="../../evil") == "--revision ../../evil: is not a branch, tag or commit. Correct it."
    assert refused(revision="/etc/hostname").startswith("--revision /etc/hostname: is not a branch")
