"""Datasets by path, folder or Hub name."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from finetune.data.reading.sources import _other_parts, read_rows
from finetune.errors import PlanError
from tests.support.commands import ROOT
from tests.support.rows import GOOD, ROWS, jsonl


def test_a_missing_file_a_folder_without_data_and_a_device_are_named(tmp_path):
    for dataset, message in (
        (
            str(tmp_path / "none.jsonl"),
            ": no such file. Give a file, a folder, a Hub name (org/name), or one of alpaca,",
        ),
        ("data/none.jsonl", ": no such file."),
        ("nonsense", ": no such file."),
        (str(tmp_path), ": has no data files. Give a folder of .parquet,"),
        ("/dev/zero", ": not a regular file."),
    ):
        with pytest.raises(PlanError) as error:
            read_rows(dataset, flag="--validation_dataset")
        assert str(error.value).startswith(f"--validation_dataset {dataset}{message}")
    with pytest.raises(PlanError, match="^--dataset '': not a path."):
        read_rows("")


def test_folders_of_split_files_and_saved_data_sets(tmp_path):
    import datasets

    folder = tmp_path / "files"
    folder.mkdir()
    jsonl(folder / "train-00001-of-00002.jsonl", ROWS[20:])
    jsonl(folder / "train-00000-of-00002.jsonl", ROWS[:20])
    jsonl(folder / "my_validation.jsonl", ROWS[:3])
    assert read_rows(str(folder)).rows == ROWS
    assert read_rows(str(folder), split="validation").rows == ROWS[:3]
    with pytest.raises(PlanError, match="has no split 'test', it has train, validation"):
        read_rows(str(folder), split="test")

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=table, test=table.select(range(2))).save_to_disk(str(tmp_path / "many"))
    assert read_rows(str(tmp_path / "one")).rows == ROWS
    assert read_rows(str(tmp_path / "many"), split="test").rows == ROWS[:2]
    with pytest.raises(PlanError, match="has no split 'dev', it has train, test"):
        read_rows(str(tmp_path / "many"), split="dev")

    state = tmp_path / "one" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "../../secret.arrow"}]}))
    with pytest.raises(PlanError, match="refers to '../../secret.arrow' outside its folder"):
        read_rows(str(tmp_path / "one"))
    state.write_text("{")
    with pytest.raises(PlanError, match="state.json: has no readable '_indices_data_files'"):
        read_rows(str(tmp_path / "one"))


def test_dummy_is_made_here():
    assert len(read_rows("dummy").rows) == 256
    assert read_rows("dummy", samples=3).sources == ["dummy:1", "dummy:2", "dummy:3"]


def test_digest_changes_with_the_bytes(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", ROWS[::-1])
    assert read_rows(a).digest == read_rows(a).digest != read_rows(b).digest


class Hub(BaseHTTPRequestHandler):
    """A hub with a data set of two configurations, one without a card, and one that asks for terms."""

    files = {
        "org/cards": {"README.md": b"", "main/x-1.jsonl": GOOD, "main/y.jsonl": GOOD * 2, "socratic/x.jsonl": GOOD * 3},
        "org/plain": {"README.md": b"", "data/train-0.csv": b"text\na\n", "data/test-0.csv": b"text\nb\n"},
    }
    card = {
        "configs": [
            {
                "config_name": "main",
                "data_files": [{"split": "train", "path": "main/x-*"}, {"split": "test", "path": "main/y.jsonl"}],
            },
            {"config_name": "socratic", "data_files": [{"split": "train", "path": "socratic/*"}]},
        ]
    }
    commit = "c" * 40

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            name = "/".join(parts[2:4])
            if name not in self.files:
                return self.answer(
                    404 if name != "org/gated" else 403,
                    b"{}",
                    {"X-Error-Code": "GatedRepo" if name == "org/gated" else "RepoNotFound"},
                )
            info = {"id": name, "sha": self.commit, "siblings": [{"rfilename": f} for f in self.files[name]]}
            if name == "org/cards":
                info["cardData"] = self.card
            return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        if parts[0] != "datasets":
            return self.answer(404, b"", {})
        name, file = "/".join(parts[1:3]), "/".join(parts[5:])
        data = self.files[name][file]
        self.answer(200, data, {"ETag": f'"{hash(data):x}"', "X-Repo-Commit": self.commit})

    do_HEAD = do_GET

    def answer(self, code, data, headers):
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_hub_names_are_read_from_the_endpoint_and_then_offline(tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import sys\nfrom finetune.data.reading.sources import read_rows\nfrom finetune.errors import PlanError\n"
        "for name in sys.argv[1:]:\n  name, _, split = name.partition('@')\n"
        "  try:\n    raw = read_rows(name, split=split or 'train')\n"
        "    print(len(raw.rows), raw.sources[0], raw.description)\n"
        "  except PlanError as error: print(error)\n"
    )

    def ask(*names, **environ):
        own = dict(HF_HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))
        environ = os.environ | own | environ
        result = subprocess.run(
            [sys.executable, "-c", code, *names], env=environ, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    names = [
        "org/cards:main",
        "org/cards:main@test",
        "org/cards:socratic",
        "org/plain@test",
        "org/cards",
        "org/cards:main@dev",
        "org/gone",
        "org/gated",
    ]
    lines = ask(*names, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    assert lines[0] == "1 org/cards/main/x-1.jsonl:1 org/cards:main train at cccccccccccc (x-1.jsonl)"
    assert [line.split()[0] for line in lines[:4]] == ["1", "2", "3", "1"]
    assert lines[4] == "--dataset org/cards: has several configurations, main, socratic. Choose one: NAME:main."
    assert lines[5].startswith("--dataset org/cards:main: has no split 'dev', it has train, test.")
    assert lines[6].startswith("--dataset org/gone: neither a file nor a public Hub dataset.")
    assert lines[7].startswith("--dataset org/gated: is gated.")
    offline = ask("org/plain@test", "org/unseen", HF_HUB_OFFLINE="1")
    assert offline[0].startswith("1 org/plain/data/test-0.csv:2")
    assert offline[1].startswith("--dataset org/unseen: no such file, and the Hub is unreachable (")
    # The files that its card names, though the snapshot has only those that were asked for; all of them or none.
    offline = ask("org/cards:socratic", "org/cards:main", HF_HUB_OFFLINE="1")
    assert [line.split()[0] for line in offline] == ["3", "1"]
    (file,) = tmp_path.glob("hub/datasets--org--cards/snapshots/*/main/x-1.jsonl")
    file.unlink()
    (line,) = ask("org/cards:main", HF_HUB_OFFLINE="1")
    assert line.startswith("--dataset org/cards:main: its download was not completed: main/x-1.jsonl of its files")
    unreachable = ask("org/plain", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable[0].startswith("--dataset org/plain: no such file, and the Hub is unreachable (")


def test_a_snapshot_of_another_program_is_read_by_its_card_and_in_full(tmp_path, monkeypatch):
    """As `hf download` leaves it, without a list of its files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "datasets--org--rows" / "snapshots" / ("c" * 40)
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("c" * 40)
    for name in ("train_old", "train_new", *(f"test-{k:05d}-of-00003" for k in range(2))):
        jsonl(folder / f"{name}.jsonl", [{"prompt": name, "completion": "b"}])
    with pytest.raises(PlanError, match="was not completed: test-00002-of-00003.jsonl of its files are not in"):
        read_rows("org/rows", split="test")
    assert len(read_rows("org/rows").rows) == 2
    card = "---\nconfigs:\n- config_name: default\n  data_files: train_new.jsonl\n---\n"
    (folder / "README.md").write_text(card)
    assert [row["prompt"] for row in read_rows("org/rows").rows] == ["train_new"]
    # A card that names some of the parts alone.
    (folder / "data").mkdir()
    for name in ("data/x-00000-of-00009", "data/x-00001-of-00009"):
        jsonl(folder / f"{name}.jsonl", [{"prompt": name, "completion": "b"}])
    (folder / "README.md").write_text(card.replace("train_new.jsonl", "data/x-0000[01]-of-*.jsonl"))
    assert len(read_rows("org/rows").rows) == 2


def test_parts_of_a_large_dataset_are_counted_at_once():
    names = [f"data/train-{k:05d}-of-04000.parquet" for k in range(3999)]
    start = time.perf_counter()
    assert _other_parts(names) == ["data/train-03999-of-04000.parquet"]
    assert time.perf_counter() - start < 1  # each part's others, listed again, took minutes


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_hubs_cache_is_read_as_it_is_on_this_disk_or_another(elsewhere, tmp_path, monkeypatch):
    """Its files are links from folders of any depth, and its own folder may be one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "hub" / "datasets--org--rows"
    if elsewhere:
        (tmp_path / "hub").mkdir()
        (tmp_path / "disk").mkdir()
        root.symlink_to(tmp_path / "disk")
    folder = root / "snapshots" / ("c" * 40) / "data" / "en"
    for each in (folder, root / "refs", root / "blobs"):
        each.mkdir(parents=True)
    (root / "refs" / "main").write_text("c" * 40)
    jsonl(root / "blobs" / "an-etag", ROWS)
    (folder / "train.jsonl").symlink_to("../../../../blobs/an-etag")
    assert [row["prompt"] for row in read_rows("org/rows").rows] == [row["prompt"] for row in ROWS]
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(jsonl(tmp_path / "other.jsonl", ROWS))
    with pytest.raises(PlanError, match="train.jsonl: links to .*other.jsonl, outside the folder"):
        read_rows("org/rows")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", '{"_data_files": 5}'),
        ("state.json", '{"_data_files": [5]}'),
        ("state.json", '{"_data_files": [{"filename": 5}]}'),
        ("state.json", '{"_data_files": ' + "[" * 5000 + "]" * 5000 + "}"),
        ("state.json", "[]"),
        ("state.json", "{}"),
        ("dataset_dict.json", '{"splits": 5}'),
        ("dataset_dict.json", '{"splits": [5]}'),
        ("dataset_dict.json", "7"),
    ],
)
def test_a_damaged_record_of_a_saved_dataset_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(PlanError) as error:
        read_rows(str(tmp_path))
    assert name in str(error.value) or "has no split 'train'" in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_what_has_a_name_of_rows_and_holds_none_is_no_absent_file(tmp_path):
    jsonl(tmp_path / "a.jsonl", ROWS)
    other = tmp_path / "b.jsonl"
    other.touch()
    assert read_rows(str(tmp_path)).notices.counts == {"the file b.jsonl is empty": 1}
    other.unlink()
    other.symlink_to("gone")
    with pytest.raises(PlanError, match=r"b.jsonl: links to gone, which is not there"):
        read_rows(str(tmp_path))
    other.unlink()
    os.mkfifo(other)
    with pytest.raises(PlanError, match=r"b.jsonl: is not a regular file"):
        read_rows(str(tmp_path))
    other.unlink()
    (tmp_path / ".#a.jsonl").symlink_to("user@host.1234")  # of Emacs, while it has a file open
    (tmp_path / "README.md").symlink_to("gone")
    assert len(read_rows(str(tmp_path)).rows) == len(ROWS)


def test_a_folder_that_spark_wrote_is_read_alone(tmp_path):
    folder = tmp_path / "out.jsonl"
    folder.mkdir()
    jsonl(folder / "part-00000-3f1c-c000.jsonl", ROWS)
    for name in ("_SUCCESS", ".part-00000-3f1c-c000.jsonl.crc", "._SUCCESS.crc"):
        (folder / name).touch()
    assert len(read_rows(str(folder)).rows) == len(ROWS)
    with pytest.raises(PlanError, match=r"out.jsonl: is a folder with the name of a file of rows. Give it alone"):
        read_rows(str(tmp_path))


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    row = json.dumps({"prompt": "a", "completion": "b"}) + "\n"

    def described(*names) -> str:
        folder = tmp_path / "-".join(names).replace("/", "_")
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(row if "json" in name else "prompt,completion\na,b\n")
        return read_rows(str(folder)).description.removeprefix(str(folder)).strip()

    assert described("a.jsonl", "README.md") == "(a.jsonl)"
    assert described("train.jsonl", "extra.jsonl") == "(train.jsonl; not read: extra.jsonl)"
    assert described("a.jsonl", "sub/b.jsonl", "c.jsonl.bz2") == "(a.jsonl; not read: c.jsonl.bz2, sub/b.jsonl)"
    assert described("a.jsonl", "a.jsonl.gz") == "(a.jsonl; not read: a.jsonl.gz)"
    many = described("train.csv", *(f"{c}.csv" for c in "defgh"))
    assert many == "(train.csv; not read: d.csv, e.csv, f.csv and 2 more)"
    parts = [f"train-{k:05d}-of-00004.jsonl" for k in (0, 3)]
    missing = ", ".join(f"train-{k:05d}-of-00004.jsonl" for k in (1, 2))
    assert described(*parts) == f"(2 files; not there: {missing})"
    assert described("train/x.jsonl", "test/x.jsonl") == "(x.jsonl; not read: test/x.jsonl)"
