"""Files to rows, rows to tokens, tokens to batches."""

import json
import os
import resource
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from finetune.data import readers
from finetune.data.collate import microbatches
from finetune.data.sampler import Cursor, epoch_order, split_validation, step_rows, total_steps
from finetune.data.sources import read_rows
from finetune.data.tokenize import generation_examples, render_sample, tokenize, truncate
from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError

ROWS = [{"prompt": f"What is {i}? ", "completion": f"It is {'very ' * (i % 7)}{i}"} for i in range(40)]


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def raw(tmp_path):
    return read_rows(jsonl(tmp_path / "rows.jsonl", ROWS))


# ------ files


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as file:
        file.write_table(table)
    jsonl(tmp_path / "a.jsonl", ROWS)
    jsonl(tmp_path / "a.ndjson", ROWS)
    jsonl(tmp_path / "lines.json", ROWS)
    write(tmp_path / "a.json", json.dumps(ROWS))
    write(tmp_path / "pretty.json", json.dumps(ROWS, indent=2))
    write(tmp_path / "data.json", json.dumps({"version": "1", "data": ROWS}))
    write(tmp_path / "a.csv", "prompt,completion\n" + "".join(f'{r["prompt"]},"{r["completion"]}"\n' for r in ROWS))
    for path in sorted(tmp_path.iterdir()):
        raw = read_rows(str(path))
        assert raw.rows == ROWS, path
        assert raw.columns == ("prompt", "completion") and len(raw.sources) == 40 and len(raw.digest) == 64


def test_sources_name_file_and_line(tmp_path):
    assert read_rows(jsonl(tmp_path / "a.jsonl", ROWS)).sources[2] == f"{tmp_path}/a.jsonl:3"
    path = write(tmp_path / "p.json", json.dumps(ROWS, indent=1))
    assert read_rows(path).sources[:3] == [f"{path}:{line}" for line in (2, 6, 10)]
    path = write(tmp_path / "a.csv", 'text\n"two\nlines"\nlast\n')
    assert read_rows(path).sources == [f"{path}:2", f"{path}:4"]


def test_samples_takes_the_first_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b"}\nbroken\n')
    assert [row["text"] for row in read_rows(path, samples=2).rows] == ["a", "b"]
    with pytest.raises(PlanError, match="^--dataset_samples 0: leaves no rows"):
        read_rows(path, samples=0)


def test_crlf_bom_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    raw = read_rows(path)
    assert [row["text"] for row in raw.rows] == ["a", "b"]
    assert raw.sources == [f"{path}:1", f"{path}:4"]
    assert read_rows(write(tmp_path / "a.csv", b"\xef\xbb\xbftext,n\r\na,1\r\n")).rows == [{"text": "a", "n": "1"}]
    assert read_rows(write(tmp_path / "a.json", b'\xef\xbb\xbf[{"text": "a"}]\r\n')).rows == [{"text": "a"}]
    assert read_rows(write(tmp_path / "a.txt", b"one\r\n\r\ntwo")).rows == [{"text": "one"}, {"text": "two"}]


GOOD = b'{"text": "a"}\n'
BAD_LINES = {
    "broken": (
        b"{'text': 1}\n",
        "2: is not JSON (Expecting property name enclosed in double quotes at column 2). Fix or remove",
    ),
    "cut off": (
        b'{"text": "b',
        "2: is truncated: the last line is not JSON (Unterminated string starting at at column 10)",
    ),
    "two values": (b'{"text": "b"} {"text": "c"}\n', "2: is not JSON (something follows the value at column 14)"),
    "array": (b'["text"]\n', "2: is an array, must be an object"),
    "number": (b"3\n", "2: is a number, must be an object"),
    "null": (b"null\n", "2: is null, must be an object"),
    "key twice": (b'{"text": "b", "text": "c"}\n', "2: has duplicate key 'text'"),
    "inner key twice": (b'{"text": {"a": 1, "a": 2}}\n', "2: has duplicate key 'a'"),
    "NUL": (b'{"text": "b\0"}\n', "2:byte 12: is a NUL byte"),
    "latin-1": (b'{"text": "caf\xe9"}\n', "2:byte 14: is not UTF-8 (0xe9)"),
    "raw surrogate": (b'{"text": "\xed\xa0\x80"}\n', "2:byte 11: is not UTF-8 (0xed)"),
    "escaped surrogate": (b'{"text": "\\ud83d"}\n', "2: is not Unicode text (lone surrogate \\ud83d)"),
    "deep": (b"[" * 200_000 + b"\n", "2: is nested too deeply"),
    "huge number": (b'{"text": ' + b"9" * 5000 + b"}\n", "2: is not usable JSON (Exceeds the limit (4300 digits)"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path, name):
    line, message = BAD_LINES[name]
    path = write(tmp_path / "a.jsonl", GOOD + line)
    with pytest.raises(PlanError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:{message}"), str(error.value)
    assert str(error.value).endswith("Fix or remove the row, or skip it with --skip_bad_rows 1.")
    raw = read_rows(path, skip_bad_rows=1)
    assert raw.rows == [{"text": "a"}] and len(raw.skipped) == 1 and raw.skipped[0].startswith(f"{path}:{message[:12]}")


def test_more_bad_rows_than_allowed_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD + b"x\ny\nz\n")
    with pytest.raises(PlanError, match="a.jsonl:4: is not JSON .* It is bad row 3, and --skip_bad_rows allows 2.$"):
        read_rows(path, skip_bad_rows=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", ": has no rows. Give a file with at least one row."),
        ("a.jsonl", b"\n\r\n  \n", ": has no rows."),
        ("a.json", b"", ": has no rows."),
        ("a.json", b"[]", ": has no rows."),
        ("a.csv", b"", ": has no rows."),
        ("a.csv", b"text\n", ": has no rows."),
        ("a.txt", b"\n\n", ": has no rows."),
        ("a.jsonl", "\ufeff" + '{"text": "a"}\n', None),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), ":1:byte 1: is not UTF-8 but UTF-16. Convert it: iconv"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), ":1:byte 1: is not UTF-8 but UTF-16."),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": "b\xff"}]',
            ":2:byte 12: is not UTF-8 (0xff). Convert the file to UTF-8.",
        ),
        ("a.json", b'[{"text": "a"},\n{"text": }]', ":2: is not JSON (Expecting value at column 10). Fix the file."),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": "b"}\n',
            ":3: is not JSON (the file ends inside the array). Fix the file.",
        ),
        ("a.json", b'[{"text": "a"},]', ":1: is not JSON (']' where a row, ',' or ']' is expected). Fix the file."),
        ("a.json", b'[{"text": "a"}] x', ": is not JSON (something follows the array). Fix the file."),
        ("a.json", b'[{"text": "a"}, 3]', ":1: is a number, must be an object."),
        ("a.json", b'{"data": [1]}', ":row 1: is a number, must be an object."),
        (
            "a.json",
            b'{"data": [{"text": "a"}], "rows": []}',
            ": has several lists of rows, data, rows, none named 'train'.",
        ),
        ("a.json", b'"text"', ":1: is text, must be an object. Fix the file."),
        ("a.csv", b"a,a\n1,2\n", ":1: column 'a' appears twice in the header. Rename one."),
        ("a.csv", b"a,b\n1,2,3\n", ":2: has 3 fields, the header has 2. Fix or remove the row"),
        ("a.csv", b'a,b\n1,"2\n', ":2: is not CSV (unexpected end of data). Fix the file."),
        ("a.csv", b"a,b\n1,\xe9\n", ":2:byte 3: is not UTF-8 (0xe9). Fix the file: CSV lines cannot be skipped."),
        ("a.parquet", b"PAR1 nonsense", ": not a readable Parquet file ("),
        ("a.arrow", b"nonsense", ": not a readable Arrow file ("),
        ("a.zip", b"PK", None),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    if name == "a.zip":
        message, start = ": is .zip. Use one of .parquet,", f"--dataset {path}"
    elif message is None:
        assert read_rows(path).rows == [{"text": "a"}]
        return
    else:
        start = path
    with pytest.raises(PlanError) as error:
        read_rows(path)
    assert str(error.value).startswith(start + message), str(error.value)
    assert "\n" not in str(error.value)


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


def test_a_line_over_the_cap_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD)
        file.truncate(2**30)  # sparse: a line of 1 GiB of NUL
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PlanError) as error:
        read_rows(str(path))
    assert str(error.value).startswith(f"{path}:2: is longer than 16 MiB. ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10


def test_a_long_line_can_be_skipped_and_the_longest_allowed_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 2**21)
    long = b'{"text": "' + b"x" * 2**21 + b'"}\n'
    exact = b'{"text": "' + b"x" * (2**21 - 12) + b'"}\n'
    raw = read_rows(write(tmp_path / "a.jsonl", GOOD + long + exact + GOOD), skip_bad_rows=1)
    assert [len(row["text"]) for row in raw.rows] == [1, 2**21 - 12, 1]
    assert raw.sources[-1].endswith(":4")


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
        "import sys\nfrom finetune.data.sources import read_rows\nfrom finetune.errors import PlanError\n"
        "for name in sys.argv[1:]:\n  name, _, split = name.partition('@')\n"
        "  try:\n    raw = read_rows(name, split=split or 'train'); print(len(raw.rows), raw.sources[0], raw.description)\n"
        "  except PlanError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]

    def ask(*names, **environ):
        environ = os.environ | dict(HF_HOME=str(tmp_path), PYTHONPATH=str(root)) | environ
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
    unreachable = ask("org/plain", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable[0].startswith("--dataset org/plain: no such file, and the Hub is unreachable (")


# ------ tokens


def test_targets_are_the_answer_and_its_end(raw, plain_tokenizer):
    dataset = tokenize(raw, "auto", plain_tokenizer, 512)
    for i, row in enumerate(ROWS):
        ids, is_target = dataset.document(i)
        assert ids[0] == plain_tokenizer.bos_token_id and (ids == plain_tokenizer.bos_token_id).sum() == 1
        assert plain_tokenizer.decode(ids[1:]) == row["prompt"] + row["completion"] + "</s>"
        # The prompt ends in a space, which byte-level tokens carry at their front, together with the answer's first letter.
        assert plain_tokenizer.decode(ids[is_target]) == " " + row["completion"] + "</s>"
    assert dataset.counts["rows"] == 40 and dataset.counts["targets"] == dataset.is_target.sum()
    assert dataset.sources == tuple(raw.sources)


def test_padding_is_no_target_though_it_is_the_eos(raw, plain_tokenizer):
    assert plain_tokenizer.pad_token_id == plain_tokenizer.eos_token_id
    dataset = tokenize(raw, "auto", plain_tokenizer, 512)
    for batch in microbatches(dataset, range(40), "padded", 8, 400, plain_tokenizer.pad_token_id):
        padding = batch.document_ids_BS < 0
        assert (batch.labels_BS[padding] == IGNORE_INDEX).all() and (batch.position_ids_BS[padding] == 0).all()
        assert (batch.labels_BS == plain_tokenizer.eos_token_id).sum() == len(batch.rows)


def test_tokens_of_spaces_only_are_targets(tmp_path, plain_tokenizer):
    code = "def add(a, b):\n        return a"
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [{"prompt": "code:\n", "completion": code}]))
    ids, is_target = tokenize(raw, "auto", plain_tokenizer, 512).document(0)
    assert plain_tokenizer.decode(ids[is_target]) == code + "</s>"
    assert is_target[np.flatnonzero(is_target)[0] :].all()


def test_multibyte_characters_are_targets_whole(tmp_path, plain_tokenizer):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [{"prompt": "x: 日:", "completion": "語🙂é𝕏"}]))
    ids, is_target = tokenize(raw, "auto", plain_tokenizer, 512).document(0)
    assert plain_tokenizer.decode(ids[is_target]) == "語🙂é𝕏</s>"


def test_chat_has_one_bos_and_plain_text_is_all_target(tmp_path, make_tokenizer, plain_tokenizer):
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    raw = read_rows(jsonl(tmp_path / "c.jsonl", [{"messages": messages}]))
    dataset = tokenize(raw, "auto", tokenizer, 512)
    assert render_sample(dataset, 0, tokenizer, color=False) == "<s>[user]q[assistant]⟦a</s>⟧"
    raw = read_rows(write(tmp_path / "a.txt", "hello there\n"))
    assert (
        render_sample(tokenize(raw, "auto", plain_tokenizer, 512), 0, plain_tokenizer, False) == "<s>⟦hello there</s>⟧"
    )


def test_train_on_prompt_makes_every_token_a_target(raw, plain_tokenizer):
    dataset = tokenize(raw, "auto", plain_tokenizer, 512, train_on_prompt=True)
    assert dataset.counts["targets"] == dataset.counts["tokens"] - 40  # nothing predicts a document's first token


def test_a_long_prompt_loses_its_front_and_a_long_answer_its_tail(tmp_path, plain_tokenizer, chat_tokenizer):
    rows = [
        {"prompt": "p " * 50, "completion": "answer 5"},
        {"prompt": "short:", "completion": "word " * 50},
        {"prompt": "short:", "completion": "a"},
    ]
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    whole, cut = tokenize(raw, "auto", plain_tokenizer, 4096), tokenize(raw, "auto", plain_tokenizer, 20)
    assert [cut.counts[k] for k in ("prompt_truncated", "answer_truncated", "dropped_empty")] == [1, 1, 0]
    assert cut.lengths.max() == 20
    (ids, is_target), (cut_ids, cut_target) = whole.document(0), cut.document(0)
    assert (cut_ids == np.r_[ids[:1], ids[-19:]]).all() and (ids[is_target] == cut_ids[cut_target]).all()
    (ids, is_target), (cut_ids, cut_target) = whole.document(1), cut.document(1)
    assert (cut_ids == np.r_[ids[:1], ids[is_target][:19]]).all() and cut_target[1:].all()
    assert "1 truncated at the start of the prompt, 1 truncated at the end of the answer" in cut.describe()


@pytest.mark.parametrize("bos", [None, 7])
def test_fit_keeps_the_last_answer_of_any_row(bos):
    rng = np.random.default_rng(0)
    for _ in range(500):
        n, context = rng.integers(2, 30), rng.integers(2, 20)
        ids, is_target = np.arange(100, 100 + n), rng.random(n) < 0.5
        if bos is not None:
            ids[0], is_target[0] = bos, False
        if not is_target.any():
            continue
        cut, targets, name = truncate(ids, is_target, context, bos)
        assert len(cut) <= context and (name is None) == (np.flatnonzero(is_target)[-1] < context)
        assert bos is None or cut[0] == bos
        if name == "prompt_truncated" or name is None:
            assert cut[-1] == ids[np.flatnonzero(is_target)[-1]]
        else:
            assert targets[int(bos is not None) :].all() and len(cut) == context


def test_empty_answers_are_dropped_and_counted(tmp_path, plain_tokenizer):
    rows = [{"prompt": "a", "completion": ""}, {"prompt": "", "completion": ""}, {"prompt": "a", "completion": " \n"}]
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": "", "completion": "b"}]))
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    assert (len(dataset), dataset.counts["dropped_empty"]) == (1, 3)
    assert "3 dropped: no answer" in dataset.describe()
    raw = read_rows(jsonl(tmp_path / "b.jsonl", rows))
    for ask in (
        lambda: tokenize(raw, "auto", plain_tokenizer, 64),
        lambda: generation_examples(raw, "auto", plain_tokenizer),
    ):
        with pytest.raises(PlanError, match="b.jsonl: none of its 3 rows has an answer to "):
            ask()


def test_rows_that_fit_the_format_badly_count_among_the_skipped(tmp_path, plain_tokenizer):
    path = write(tmp_path / "a.jsonl", b'{"prompt": "a", "completion": "b"}\nx\n{"prompt": "a", "completion": 3}\n')
    with pytest.raises(PlanError, match="a.jsonl:3: field 'completion' is int"):
        tokenize(read_rows(path, skip_bad_rows=1), "auto", plain_tokenizer, 64)
    dataset = tokenize(read_rows(path, skip_bad_rows=2), "auto", plain_tokenizer, 64)
    assert dataset.counts["skipped"] == 2 and [s.split(":")[1] for s in dataset.skipped] == ["2", "3"]


def test_a_token_outside_the_embedding_is_refused(raw, plain_tokenizer):
    with pytest.raises(
        PlanError,
        match=r"rows.jsonl:1: token id \d+ is out of range for the model's 50 embedding rows. Use the model's own tokenizer",
    ):
        tokenize(raw, "auto", plain_tokenizer, 64, vocab_size=50)


def test_scoring_sees_the_prompt_that_training_saw(raw, plain_tokenizer, chat_tokenizer, tmp_path):
    dataset = tokenize(raw, "auto", plain_tokenizer, 512)
    for i, (prompt, answer, source) in enumerate(generation_examples(raw, "auto", plain_tokenizer)):
        ids, is_target = dataset.document(i)
        assert prompt == ids[~is_target].tolist() and source == raw.sources[i]
        assert answer == plain_tokenizer.decode(ids[is_target][:-1])
    roles = ["user", "assistant", "user", "assistant"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, "abcd", strict=True)]
    chat = read_rows(jsonl(tmp_path / "c.jsonl", [{"messages": messages}]))
    ((prompt, answer, _),) = generation_examples(chat, "auto", chat_tokenizer)
    assert prompt == chat_tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    assert answer == "d"


def test_a_sample_shows_targets_and_no_escape_sequence(tmp_path, plain_tokenizer):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [{"prompt": "a:\n", "completion": "b\x1b[2J"}]))
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    assert render_sample(dataset, 0, plain_tokenizer, color=False) == "<s>a:\n⟦b\\x1b[2J</s>⟧"
    assert render_sample(dataset, 0, plain_tokenizer, color=True) == "<s>a:\n\x1b[32mb\\x1b[2J</s>\x1b[0m"


def test_take_and_digest(raw, plain_tokenizer):
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    part = dataset.select([5, 2])
    assert (part.document(0)[0] == dataset.document(5)[0]).all() and part.sources == (raw.sources[5], raw.sources[2])
    assert (
        part.counts["rows"] == 2
        and part.counts["tokens"] == len(part.tokens)
        and part.counts["targets"] == part.is_target.sum()
    )
    assert dataset.select(range(40)).digest() == dataset.digest() != part.digest()
    assert len(dataset.select([])) == 0


def test_tokenizing_four_times_the_rows_takes_about_four_times_the_calls(tmp_path, plain_tokenizer):
    row = {"prompt": "What is the capital of France? " * 4, "completion": "The capital is Paris. " * 4}

    def calls(num_rows):
        """Calls of functions, C's included: unlike seconds, the same under any load."""
        raw, count = read_rows(jsonl(tmp_path / "a.jsonl", [row] * num_rows)), [0]

        def counted(frame, event, argument):
            count[0] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            tokenize(raw, "auto", plain_tokenizer, 512)
        finally:
            sys.setprofile(before)
        return count[0]

    calls(1)  # what is made once is made here
    # Linear is 4; quadratic would be 16.
    assert 3 * calls(1000) < calls(4000) < 5 * calls(1000)


# ------ order and batches


@pytest.mark.parametrize(("num_rows", "rows_per_step"), [(40, 8), (41, 8), (3, 8), (1, 1), (7, 7)])
def test_an_epoch_visits_each_row_once_and_a_resumed_cursor_goes_on_alike(num_rows, rows_per_step):
    steps_an_epoch = total_steps(num_rows, rows_per_step, 1, -1)
    cursor, seen, cursors = Cursor(), [], []
    for _ in range(3 * steps_an_epoch):
        cursors.append(cursor)
        rows, cursor = step_rows(num_rows, rows_per_step, 42, cursor)
        seen.append(rows.tolist())
    assert cursor == Cursor(3, 0)
    for epoch in range(3):
        part = seen[epoch * steps_an_epoch : (epoch + 1) * steps_an_epoch]
        assert sorted(sum(part, [])) == list(range(num_rows))
    for i, resumed in enumerate(cursors):
        assert step_rows(num_rows, rows_per_step, 42, Cursor(resumed.epoch, resumed.index))[0].tolist() == seen[i]


def test_order_depends_on_seed_and_epoch_only():
    # as any other process and day has it
    assert epoch_order(10, 1, 0).tolist() == [8, 4, 7, 0, 1, 2, 5, 9, 6, 3]
    orders = {tuple(epoch_order(100, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_total_steps():
    assert total_steps(41, 8, 2, -1) == 12
    assert total_steps(41, 8, 2, 5) == 5


def test_split_validation_parts_the_rows():
    for num_rows, fraction, expected in ((100, 0.1, 10), (10, 0.01, 1), (3, 0.99, 2)):
        train, validation = split_validation(num_rows, fraction, 7)
        assert len(validation) == expected and sorted([*train, *validation]) == list(range(num_rows))
        assert (split_validation(num_rows, fraction, 7)[1] == validation).all()
    with pytest.raises(PlanError, match="^--validation_split 0.5: needs at least 2 rows, the data has 1."):
        split_validation(1, 0.5, 7)


def pairs(batches):
    """Every (row, position, id, label) of a list of batches."""
    found = []
    for batch in batches:
        for b, s in zip(*np.nonzero(batch.document_ids_BS >= 0), strict=True):
            row = batch.rows[batch.document_ids_BS[b, s]]
            found.append(
                (row, int(batch.position_ids_BS[b, s]), int(batch.input_ids_BS[b, s]), int(batch.labels_BS[b, s]))
            )
    return sorted(found)


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 100, 10**6])
def test_flat_padded_and_alone_hold_the_same_pairs(raw, plain_tokenizer, microbatch_tokens):
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    rows = epoch_order(40, 1, 0)[:21]
    alone = [batch for row in rows for batch in microbatches(dataset, [row], "padding_free", 1, 10**6, 0)]
    expected = pairs(alone)
    assert sum(label != IGNORE_INDEX for *_, label in expected) == dataset.select(rows).counts["targets"]
    for layout in ("padding_free", "padded"):
        batches = microbatches(dataset, rows, layout, 8, microbatch_tokens, 2)
        assert pairs(batches) == expected
        assert sum(batch.num_targets for batch in batches) == dataset.select(rows).counts["targets"]
        assert sorted(row for batch in batches for row in batch.rows) == sorted(rows)
        for batch in batches:
            arrays = (batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS, batch.document_ids_BS)
            assert {a.dtype for a in arrays} == {np.dtype(np.int64)} and len({a.shape for a in arrays}) == 1
            assert batch.input_ids_BS.size <= microbatch_tokens or len(batch.rows) == 1
            assert len(batch.rows) <= 8 and (layout == "padded" or len(batch.input_ids_BS) == 1)


def test_labels_are_the_next_token_of_the_same_document(raw, plain_tokenizer):
    dataset = tokenize(raw, "auto", plain_tokenizer, 64)
    (batch,) = microbatches(dataset, [3, 4], "padding_free", 8, 10**6, 0)
    ids, labels, positions = batch.input_ids_BS[0], batch.labels_BS[0], batch.position_ids_BS[0]
    starts = np.flatnonzero(positions == 0)
    assert len(starts) == 2 and (labels[np.r_[starts[1:] - 1, -1]] == IGNORE_INDEX).all()
    at = np.flatnonzero(labels != IGNORE_INDEX)
    assert (labels[at] == ids[at + 1]).all()
