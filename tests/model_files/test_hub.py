"""Models of a hub, served on loopback."""

import socket
import threading
import time

import pytest

from finetune.data.reading.sources import read_rows
from finetune.errors import PlanError
from finetune.model_files import hub
from finetune.model_files.files import find_model
from finetune.model_files.hub import HUB_PROBE_S, hub_problem
from finetune.model_files.hub_upload import check_upload
from tests.support.hub import commit_of, serve
from tests.support.model_folders import refusal

pytestmark = pytest.mark.usefixtures("own_caches")


def test_a_hub_model_is_the_local_folder_it_serves(model, monkeypatch):
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    (model / "modeling_own.py").write_text("raise SystemExit")
    local = find_model(str(model))
    with serve(models={"some/tiny": model}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert find_model("some/tiny", fetch=False) is None
        files = find_model("some/tiny")
        pinned = find_model("some/tiny", revision=commit_of(model))
    assert files.digest == local.digest
    assert files.revision == pinned.revision == commit_of(model)
    assert {p.name for p in files.tokenizer_files} == {p.name for p in local.tokenizer_files}
    assert not list(files.folder.glob("*.bin")) and not list(files.folder.glob("*.py"))


def test_a_cached_hub_model_needs_no_hub(sharded, monkeypatch):
    with serve(models={"some/tiny": sharded}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        digest = find_model("some/tiny").digest
    assert find_model("some/tiny").digest == digest
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model("some/tiny").digest == digest
    assert find_model("some/tiny", fetch=False).digest == digest


def test_a_missing_repo_and_a_missing_revision_are_told_apart(model, monkeypatch):
    with serve(models={"some/tiny": model}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        absent = refusal("some/other")
        assert absent.startswith("--model_name some/other: no such folder, and no Hub model of that name could be")
        assert f"({url} does not have it" in absent
        assert refusal("some/tiny", revision="v9").startswith("--revision v9: --model_name some/tiny has no such")


def test_a_gated_model_asks_for_a_token_which_no_message_shows(model, monkeypatch):
    with serve(models={"some/tiny": model}, token="hf_right") as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert "HF_TOKEN is not set" in refusal("some/tiny")
        monkeypatch.setenv("HF_TOKEN", "hf_secret_wrong")
        text = refusal("some/tiny")
        assert "HF_TOKEN has no access to it" in text and "hf_secret" not in text
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert find_model("some/tiny").revision == commit_of(model)


def test_without_a_hub_or_offline_the_reason_is_given(monkeypatch):
    text = refusal("some/tiny")
    assert text.startswith("--model_name some/tiny: no such folder, and no Hub model of that name could be reached (")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "(HF_HUB_OFFLINE is set)" in refusal("some/tiny")


@pytest.mark.parametrize("name", ["./x", "a/b/c", "~/nope", "-x", "", "a b", "../x", "a\nb"])
def test_what_cannot_be_a_hub_id_is_only_looked_for_on_disk(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ": no such folder. " in refusal(name)


def test_the_hub_probe_gives_up_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert hub_problem("some/tiny") in ("timed out", f"no answer in {HUB_PROBE_S:g} s")


def test_an_endpoint_that_does_not_speak_http_is_a_problem_in_words(monkeypatch):
    def answer():
        peer, _ = server.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(b"220 mail ready\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        threading.Thread(target=answer, daemon=True).start()
        assert "220 mail ready" in hub_problem("some/tiny")


def test_a_hub_that_never_answers_is_one_line(monkeypatch, tmp_path):
    """A socket that accepts and stays silent, as a captive portal may."""
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", "x")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        for ask in (
            lambda: find_model("org/absent"),
            lambda: read_rows("org/absent"),
            lambda: check_upload("org/absent"),
        ):
            began = time.monotonic()
            with pytest.raises(PlanError, match="timed out") as error:
                ask()
            assert "\n" not in str(error.value) and time.monotonic() - began < 20
