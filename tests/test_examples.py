import json
import subprocess
import sys

from tests.support.commands import ROOT

EXAMPLES = ROOT / "examples"
FIELDS = ["name", "place", "item", "count", "day", "gift"]


def local_rows(split):
    return [json.loads(line) for line in (EXAMPLES / f"orders_{split}.jsonl").read_text().splitlines()]


def write_orders(folder, *flags):
    command = [sys.executable, str(EXAMPLES / "make_orders.py"), "--output_dir", str(folder), *flags]
    subprocess.run(command, check=True, timeout=60)
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_the_script_writes_the_committed_files_byte_for_byte(tmp_path):
    written = write_orders(tmp_path)
    assert sorted(written) == ["orders_test.jsonl", "orders_train.jsonl", "orders_validation.jsonl"]
    for name, content in written.items():
        assert content == (EXAMPLES / name).read_bytes(), name


def test_rows_and_seed_are_obeyed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    few = write_orders(tmp_path / "a", "--rows", "20")
    other = write_orders(tmp_path / "b", "--rows", "20", "--seed", "7")
    assert few["orders_train.jsonl"].count(b"\n") == 20
    assert few["orders_test.jsonl"] == (EXAMPLES / "orders_test.jsonl").read_bytes()
    assert other["orders_train.jsonl"] != few["orders_train.jsonl"]


def test_no_order_is_in_two_rows():
    orders = [row["messages"][1]["content"] for split in ("train", "validation", "test") for row in local_rows(split)]
    assert len(set(orders)) == len(orders)


def test_every_answer_is_the_compact_record_of_its_order():
    for split in ("train", "validation", "test"):
        for row in local_rows(split):
            assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]
            order, answer = (m["content"] for m in row["messages"][1:])
            record = json.loads(answer)
            assert list(record) == FIELDS
            assert answer == json.dumps(record, separators=(",", ":"))
            assert all(record[k] in order for k in ("name", "place", "item", "day"))
            assert record["gift"] is ("gift" in order)


def test_test_rows_go_through_the_three_kinds_in_turn_and_the_new_is_new():
    test, train = local_rows("test"), local_rows("train")
    kinds = [row["kind"] for row in test]
    assert kinds == ["known", "new_words", "new_phrasing"] * 32
    trained = {json.loads(row["messages"][2]["content"])[k] for row in train for k in FIELDS[:3]}
    for row in test:
        record = json.loads(row["messages"][2]["content"])
        if row["kind"] == "new_words":
            assert not {record[k] for k in FIELDS[:3]} & trained
