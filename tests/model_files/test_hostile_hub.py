"""A Hub that drips, and one whose answers are no Hub's: an end, one line, and nothing of it is kept."""

import contextlib
import hashlib
import itertools
import json
import shutil
import threading
import time

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

import train
from finetune.callers_process import callers_process
from finetune.data.reading.sources import hub_files, read_rows
from finetune.errors import PlanError
from finetune.model_files import hub, hub_ranges, hub_upload
from finetune.model_files.files import find_model
from finetune.model_files.hub import hub_cache, hub_folder
from finetune.model_files.hub_adapter import fetched
from finetune.model_files.hub_ranges import looks_judged, model_on_paper
from finetune.model_files.hub_upload import check_upload, upload
from tests.support import hub as served
from tests.support.rows import json_lines

ANSWERS: dict = {}  # {a part of a path: what is answered there: bytes, a function of the true answer}
DRIPS: list[str] = []  # parts of paths whose answers come a byte at a time, from the first of their header on


class Hostile(served.Handler):
    def send(self, content, status=200, headers=None):
        for part, other in ANSWERS.items():
            if part in self.path and self.command != "HEAD":
                content = other(content) if callable(other) else other
        super().send(content, status, headers)

    def end_headers(self):
        if not any(part in self.path for part in DRIPS):
            return super().end_headers()
        text = b"".join(self._headers_buffer) + b"\r\n"
        self._headers_buffer = []
        for i in range(len(text)):
            self.wfile.write(text[i : i + 1])
            time.sleep(0.05)


@pytest.fixture
def endpoint(tiny_model, tmp_path, monkeypatch):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_bytes(json_lines(*({"prompt": f"{i}?", "completion": "x"} for i in range(30))))
    monkeypatch.setattr(served, "Handler", Hostile)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_TOKEN", "x")
    models = dict.fromkeys(("org/tiny", "org/other"), tiny_model)
    with served.serve(models=models, datasets={"org/rows": rows}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield url
    ANSWERS.clear()
    DRIPS.clear()


def dry_run(tmp_path, **flags) -> int:
    flags = {"model_name": "org/tiny", "backend": "cpu", "output_dir": str(tmp_path / "out")} | flags
    return train.main([f"--{name}={value}" for name, value in flags.items()] + ["--dry_run"])


def refused(ask) -> str:
    with pytest.raises(PlanError) as error:
        ask()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_of_another_size_than_was_announced_is_one_line(endpoint, tmp_path):
    """A proxy that packs what it passes on sends it."""
    ANSWERS["config.json"] = lambda content: content + b" " * 5000
    assert "Consistency check failed: file should be of size" in refused(lambda: hub_folder("org/tiny", None, "it"))


def test_an_answer_that_comes_a_byte_at_a_time_has_an_end(endpoint, monkeypatch, tiny_model):
    monkeypatch.setattr(hub, "ANSWER_S", 0.7)
    monkeypatch.setattr(hub_upload, "UPLOAD_TIMEOUT_S", 0.7)
    monkeypatch.setattr(hub_upload, "SLOWEST_RATE", 10**9)
    monkeypatch.setattr(hub, "DOWNLOAD_S", 0.7)
    monkeypatch.setattr(hub, "SLOWEST_RATE", 10**9)
    for part, ask in (
        ("/api/models/", lambda: hub_folder("org/other", None, "--model_name")),
        ("/config.json", lambda: hub_folder("org/tiny", None, "--model_name")),
        ("/train.jsonl", lambda: hub_files("org/rows", "train", "--dataset")),
        ("/api/models/", lambda: model_on_paper("org/tiny", None)),
        ("/model.safetensors", lambda: model_on_paper("org/tiny", None)),
        ("/api/datasets/", lambda: hub_files("org/rows", "train", "--dataset")),
        ("/whoami", lambda: check_upload("org/mine")),
        ("/repos/create", lambda: upload(tiny_model, "org/mine", "all")),
    ):
        DRIPS[:] = [part]
        began = time.monotonic()
        assert "timed out: no whole answer in" in refused(ask), part
        assert time.monotonic() - began < 10
        pools = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
        assert not pools, "the end of the process would wait for these"


def test_requests_of_the_caller_s_threads_go_on_where_an_answer_is_given_up(endpoint, monkeypatch):
    monkeypatch.setattr(hub, "DOWNLOAD_S", 1.5)
    monkeypatch.setattr(hub, "SLOWEST_RATE", 10**9)
    DRIPS[:] = ["/org/tiny/resolve"]
    failed: list[Exception] = []
    ended = threading.Event()

    def ask():
        while not ended.wait(0.02):
            try:
                HfApi(endpoint=endpoint).model_info("org/other")
            except HTTPError as error:
                failed.append(error)

    callers = threading.Thread(target=ask)
    callers.start()
    try:
        assert "timed out: no whole answer in" in refused(lambda: hub_folder("org/tiny", None, "--model_name"))
    finally:
        ended.set()
        callers.join()
    assert not failed


def test_a_download_that_stops_after_a_fast_beginning_has_the_same_end(monkeypatch):
    monkeypatch.setattr(hub, "SLOWEST_RATE", 1)
    began = time.monotonic()
    with pytest.raises(HTTPError, match="timed out: no whole answer in"):
        hub.in_time(threading.Event().wait, received=lambda: 10**9, limit_s=0.5)
    assert time.monotonic() - began < 30


def test_a_file_that_one_look_misses_takes_no_time_away():
    looks = iter([10**9, 0] + [10**9] * 10**6)
    assert hub.in_time(lambda: time.sleep(2.5) or 7, received=lambda: next(looks), limit_s=60) == 7


def test_a_look_at_another_file_than_the_hub_names_is_a_line_and_not_kept(endpoint):
    """Proxies send one, and mirrors that are behind."""
    ANSWERS["config.json"] = lambda content: content.replace(b"1e-06", b"1e-01")
    assert "config.json is not the file that" in refused(lambda: model_on_paper("org/tiny", None))
    ANSWERS.clear()
    files, _ = model_on_paper("org/tiny", None)
    assert files.config["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("answer", [b"null", b"[]", b"7", b'{"sha": 5, "siblings": [{"rfilename": null}]}', b"<html>"])
def test_an_answer_that_no_hub_gives_is_one_line(endpoint, answer):
    ANSWERS["/api/"] = answer
    for ask in (
        lambda: hub_folder("org/tiny", None, "--model_name"),
        lambda: model_on_paper("org/tiny", None),
        lambda: hub_files("org/rows", "train", "--dataset"),
        lambda: check_upload("org/mine"),
    ):
        try:
            ask()
        except PlanError as error:
            assert "\n" not in str(error) and endpoint in str(error)


def with_state(offsets):
    """The true header with a tensor of bitsandbytes' state at these offsets."""

    def change(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header["w.quant_state.bitsandbytes__nf4"] = {"dtype": "U8", "shape": [4], "data_offsets": offsets}
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return change


@pytest.mark.parametrize(
    "offsets", [[-9, 4], [0, -4], ["0", "4"], [0.5, 4.5], [[0], [4]], [None, 4], {}, [0, 10**25], [10**25, 10**26]]
)
def test_a_header_with_any_offsets_is_one_line(endpoint, offsets):
    ANSWERS["model.safetensors"] = with_state(offsets)
    assert "model.safetensors is damaged" in refused(lambda: model_on_paper("org/tiny", None))


def test_names_and_sizes_that_no_file_system_has_are_one_line(endpoint, monkeypatch):
    listing = {"id": "org/tiny", "sha": "a" * 40, "siblings": [{"rfilename": "x" * 300 + ".bin"}]}
    ANSWERS["/api/"] = json.dumps(listing).encode()
    assert "which no file system takes" in refused(lambda: model_on_paper("org/tiny", None))
    ANSWERS.clear()
    send_header = Hostile.send_header
    for size in (10**25, 10**17):

        def larger(self, name, value, size=size):
            send_header(self, name, f"bytes 0-9/{size}" if name == "Content-Range" else value)

        monkeypatch.setattr(Hostile, "send_header", larger)
        line = refused(looks_judged()(lambda: model_on_paper("org/tiny", None)))
    assert "model.safetensors is damaged (it would have 100,000,000,000,000,000 bytes)" in line


def test_a_commit_that_the_hub_names_and_does_not_have_is_no_revision_of_the_users(endpoint):
    listing = {"id": "org/tiny", "sha": "a" * 40, "siblings": [{"rfilename": "config.json"}]}
    ANSWERS["/api/"] = json.dumps(listing).encode()
    line = refused(lambda: find_model("org/tiny"))
    assert line == f"--model_name org/tiny: {endpoint} names a commit of it that it does not have. Try again."


def test_requests_of_the_caller_have_no_limits_of_a_run_s(endpoint, tmp_path):
    from huggingface_hub import close_session, get_session

    close_session()  # that of other tests
    before = {event: list(hooks) for event, hooks in get_session().event_hooks.items()}
    seen = []
    flags = dict(model_name="org/tiny", dataset="org/rows", backend="cpu", max_steps=1, dry_run=True)
    train.fine_tune(**flags, output_dir=str(tmp_path / "out"))
    assert get_session().event_hooks == before
    with callers_process():
        hub_folder("org/tiny", None, "--model_name")
        seen += get_session().event_hooks["request"]
    assert get_session().event_hooks == before and len(seen) > len(before["request"])


def test_rows_of_another_commit_than_the_hub_lists_are_refused_by_the_run_too(endpoint, tmp_path):
    listing = {"id": "org/rows", "sha": "a" * 40, "siblings": [{"rfilename": "train.jsonl"}]}
    ANSWERS["/api/datasets/"] = json.dumps(listing).encode()
    refused(lambda: hub_files("org/rows", "train", "--dataset", only_first=True))
    line = refused(lambda: hub_files("org/rows", "train", "--dataset"))
    assert f"--dataset org/rows: {endpoint} lists the files of commit aaaaaaaaaaaa and gives those of " in line


@pytest.mark.parametrize("header", [("Retry-After", "36000"), ("RateLimit", '"api";r=0;t=36000')])
def test_a_hub_that_asks_to_wait_for_hours_is_a_line(endpoint, monkeypatch, header, tmp_path):
    def limited(self, *args):
        self.send({"error": "slower"}, 429, dict([header]))

    monkeypatch.setattr(Hostile, "answer", limited)
    for ask in (
        lambda: hub_folder("org/tiny", None, "--model_name"),
        lambda: model_on_paper("org/tiny", None),
        lambda: hub_files("org/rows", "train", "--dataset"),
        lambda: fetched("org/tiny"),
        lambda: upload(tmp_path, "org/tiny", "all"),
    ):
        began = time.monotonic()
        assert "answers 429, and asks to wait for 10:00:00" in refused(ask)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("/config.json", b"<html>Log in</html>"),
        ("/tokenizer.json", b"<html>Log in</html>"),
        ("/model.safetensors", lambda content: content[: len(content) // 40]),
        ("/train.jsonl", b"<html>Log in</html>\n" * 9),
    ],
)
def test_a_bad_answer_does_not_outlive_itself(endpoint, tmp_path, part, answer, capsys):
    flags = {"dataset": "org/rows"}
    ANSWERS[part] = answer
    refused(lambda: dry_run(tmp_path, **flags))
    ANSWERS.clear()
    assert dry_run(tmp_path, **flags) == 0, capsys.readouterr()
    ANSWERS[part] = answer  # what was read rightly is not asked for again
    assert dry_run(tmp_path, **flags) == 0


def test_a_look_stays_where_flags_are_refused_that_have_nothing_to_do_with_it(endpoint, tmp_path, capsys):
    flags = {"dataset": "org/rows"}
    assert dry_run(tmp_path, **flags) == 0
    refused(lambda: dry_run(tmp_path, router_aux_loss_coef=0.01, **flags))
    capsys.readouterr()
    assert dry_run(tmp_path, **flags) == 0
    assert "read before" in capsys.readouterr().out


def test_weights_that_are_not_those_the_hub_names_are_refused_before_a_step(endpoint, tmp_path, monkeypatch):
    def changed(content):
        return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]

    monkeypatch.setattr(served, "blob_of", lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
    ANSWERS["model.safetensors"] = changed
    flags = dict(
        model_name="org/tiny", dataset="org/rows", backend="cpu", max_steps=1, output_dir=str(tmp_path / "out")
    )
    said = refused(lambda: train.fine_tune(**flags))
    assert "model.safetensors: is not the file that the Hub has" in said and not (tmp_path / "out").exists()
    (hub_folder("org/tiny", None, "x") / "model.safetensors").resolve().unlink()
    ANSWERS.clear()
    assert train.fine_tune(**flags).status == "finished"


def test_rows_that_are_not_those_the_hub_names_are_refused(endpoint, tmp_path, monkeypatch):
    """A whole line is gone: what is left is rows."""
    monkeypatch.setattr(served, "blob_of", lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
    file = read_rows("org/rows").sources[0]
    (blob,) = hub_cache().glob("datasets--org--rows/blobs/*")
    blob.write_bytes(b"".join(blob.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(
        PlanError, match=r"is not the file that the Hub has \(its sha256 differs\). Remove .*blobs"
    ) as said:
        read_rows("org/rows")
    assert file.partition(":")[0].rpartition("/")[2] in str(said.value)


def test_a_file_that_is_named_by_a_path_is_not_written_outside_of_the_cache(endpoint, monkeypatch, tmp_path):
    outside = tmp_path / "outside"

    def file(self, path, commit):
        self.send(path.read_bytes(), 200, {"ETag": f'"{"../" * 20}{str(outside)[1:]}"', "X-Repo-Commit": commit})

    monkeypatch.setattr(Hostile, "file", file)
    assert f"{endpoint} names a file '../../" in refused(lambda: hub_folder("org/tiny", None, "--model_name"))
    assert "names a file '../../" in refused(lambda: hub_files("org/rows", "train", "--dataset"))
    assert not outside.exists()


@pytest.mark.parametrize("part", ["/api/models", "/config.json"])
def test_an_answer_without_an_end_ends_in_a_line(endpoint, monkeypatch, part):
    monkeypatch.setattr(hub, "MOST_OF_ANSWER", 2**18)
    monkeypatch.setattr(hub, "MOST_OF_SETTINGS", 2**18)
    send = Hostile.send

    def endless(self, content, status=200, headers=None):
        if part not in self.path or self.command == "HEAD":
            return send(self, content, status, headers)
        self.send_response(200)
        for field, value in {**(headers or {}), "Transfer-Encoding": "chunked"}.items():
            self.send_header(field, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"1000\r\n" + b" " * 4096 + b"\r\n")

    monkeypatch.setattr(Hostile, "send", endless)
    assert "its answer is longer than" in refused(lambda: hub_folder("org/tiny", None, "--model_name"))


def test_a_cache_that_is_removed_while_a_look_is_written_is_a_line(endpoint, tmp_path):
    def removing(content):
        shutil.rmtree(tmp_path / "XDG_CACHE_HOME")
        return content

    ANSWERS["tokenizer.json"] = removing
    said = refused(lambda: model_on_paper("org/tiny", None))
    assert "it was removed while it was written. Start again." in said


def test_of_a_file_that_is_sent_whole_what_is_skipped_is_not_kept(endpoint, tiny_model, monkeypatch):
    """A mirror or a proxy that knows no ranges."""
    monkeypatch.setattr(Hostile, "file", lambda self, path, commit: self.send(path.read_bytes()))
    content = (tiny_model / "model.safetensors").read_bytes()
    file = hub_ranges.RemoteFile("org/tiny", "model.safetensors", "main")
    for first, length in ((0, 9), (70_000, 200), (len(content) - 5, 50)):
        assert file.read_range(first, length) == content[first : first + length]
    assert file.size == len(content)
    monkeypatch.setattr(hub_ranges, "MOST_SKIPPED", 1000)
    said = refused(lambda: file.read_range(2000, 8))
    assert said.startswith("model.safetensors: ") and "sends files whole" in said
    assert file.read_range(900, 8) == content[900:908]


def test_a_hub_that_names_another_commit_at_each_request_is_a_line(endpoint, monkeypatch):
    numbers = itertools.count()

    def file(self, path, commit):
        self.send(path.read_bytes(), 200, {"ETag": f'"{next(numbers)}"', "X-Repo-Commit": f"{next(numbers):040}"})

    monkeypatch.setattr(Hostile, "file", file)
    assert "names another commit of it at each request" in refused(lambda: hub_folder("org/tiny", None, "--model_name"))
