"""Nothing of others reaches the terminal as it is: no escape sequence, no password, in any line of a run."""

import json

import pytest

from tests.support.commands import command, finish
from tests.support.rows import json_lines

TITLE = "\x1b]0;owned\x07\x1b[2J"


def test_a_password_of_the_endpoint_is_never_printed(flags, own_endpoint):
    for change in ({"dataset": "org/absent"},):
        out = finish(command(flags, **change), HF_ENDPOINT=own_endpoint)
        assert out.returncode == 2 and "SECRET" not in out.stdout + out.stderr, out
        assert "no such folder" in out.stderr or "no such file" in out.stderr or "neither a file" in out.stderr


@pytest.fixture
def own_endpoint():
    return "http://user:SECRETSECRET@127.0.0.1:9"


@pytest.mark.slow
def test_escape_sequences_of_rows_columns_and_names_are_shown_as_escapes(flags, tmp_path):
    rows = [{"prompt": f"{TITLE} {i}", "completion": f"{TITLE}!"} for i in range(8)]
    (tmp_path / f"a{TITLE}.jsonl").write_bytes(json_lines(*rows))
    out = finish(command(flags, dataset=tmp_path / f"a{TITLE}.jsonl", max_steps="1", output_dir=tmp_path / f"o{TITLE}"))
    assert out.returncode == 0 and "\x1b" not in out.stdout + out.stderr, out
    assert "try it: " in out.stdout and "\\x1b]0;owned\\x07" in out.stdout.split("try it: ")[1]
    (tmp_path / "b.jsonl").write_text(json.dumps({TITLE: "x"}) + "\n")
    out = finish(command(flags, dataset=tmp_path / "b.jsonl"))
    assert out.returncode == 2 and "\x1b" not in out.stderr and "\\x1b]0;owned" in out.stderr
