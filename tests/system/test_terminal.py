"""What reaches the terminal: no control character, no secret, and nothing that its encoding lacks."""

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from finetune.system.terminal import clean, columns_of, encodable, log_error, say, wrapped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b]0;title\x07b\x1b[2J", "a\\x1b]0;title\\x07b\\x1b[2J"),
        ("one\r\x9b2Ktwo\ttab\nline", "one\\x0d\\x9b2Ktwo\ttab\nline"),
        ("\u202egnp.exe \ud83d \udcff", "\\u202egnp.exe \\ud83d \\udcff"),
        ("naïve 日本語 🙂", "naïve 日本語 🙂"),
        ("http://user:pass@host:80/x and https://tok@hub, a@b.c", "http://***@host:80/x and https://***@hub, a@b.c"),
    ],
)
def test_control_characters_are_shown_and_user_names_in_urls_are_masked(text, shown):
    assert clean(text) == shown


def test_values_of_secret_variables_are_masked_wherever_they_occur(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:p%40ssw0rd@proxy:3128")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    text = "hf_abcdefgh; key 0123456789; login me p@ssw0rd or p%40ssw0rd: true"
    assert clean(text) == "***; key ***; login me *** or ***: true"


def test_tokens_are_masked_whoever_gave_them():
    hub, other = "hf_" + "aB3" * 11, "sk-proj-" + "aB3_" * 8
    text = f"error: --hub_token {hub}: no flag; key {other}."
    assert clean(text) == "error: --hub_token ***: no flag; key ***."
    assert clean("--hf_use_auth_token, hf_transfer, task-specific-adapters-of-everything") == (
        "--hf_use_auth_token, hf_transfer, task-specific-adapters-of-everything"
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_lacks_is_replaced(encoding):
    assert encodable("é ⟦x⟧ ━ 日", "utf-8") == "é ⟦x⟧ ━ 日"
    shown = {"ascii": "\\xe9 [[x]] = \\u65e5", "latin-1": "é [[x]] = \\u65e5"}
    assert encodable("é ⟦x⟧ ━ 日", encoding) == shown[encoding]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say("é ⟦x⟧ ━ 日", file=stream)
    assert stream.buffer.getvalue().decode(encoding) == shown[encoding] + "\n"


def test_an_error_is_one_line(capsys):
    log_error("a\x1b[31m\nb")
    log_error("error: c")
    assert capsys.readouterr().err == "error: a\\x1b[31m b\nerror: c\n"
    log_error("a" * 10**6 + ". Fix it.")
    assert len(line := capsys.readouterr().err) < 2100 and line.endswith("a. Fix it.\n")


def test_an_error_is_at_most_2000_characters_however_its_text_is_escaped(capsys):
    log_error("--model_name " + "\x1b" * 3000)
    line = capsys.readouterr().err
    assert line.startswith("error: --model_name \\x1b") and len(line) <= 2000 and line.count("\n") == 1


def test_lines_end_between_words_and_commands_are_left_whole():
    line = "  note: three words, then an" + " " + "unbreakable" * 3 + " one"
    assert wrapped(line, 20).split("\n") == [
        "  note: three words,",
        "    then an",
        "    " + "unbreakable" * 3,
        "    one",
    ]
    assert wrapped("    " + "unbreakable" * 3 + " one", 20) == "    " + "unbreakable" * 3 + "\n      one"
    assert wrapped("\x1b[1mbold\x1b[0m and so on", 12) == "\x1b[1mbold\x1b[0m and so\n  on"
    command = "try it: python generate.py --checkpoint out --prompt 'a b c'"
    assert wrapped(command, 20) == command and wrapped("short\n\n", 20) == "short\n\n"


def terminal(columns: int) -> io.TextIOWrapper:
    """A stream to a terminal of so many columns; 0: of an unknown number."""
    _, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return os.fdopen(end, "w")


def test_the_width_is_that_of_the_terminal_behind_the_stream(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert [columns_of(terminal(columns)) for columns in (40, 211, 0)] == [40, 211, 80]
    assert columns_of(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "33")
    assert columns_of(terminal(211)) == 33
