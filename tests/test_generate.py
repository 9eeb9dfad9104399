"""generate.py: conversations that remember, commands, files of prompts, two models compared."""

import codecs
import io
import json
import re
import shutil

import pytest
import transformers

import generate
from finetune.errors import PlanError
from train import fine_tune

SHORT = ["--device", "cpu", "--max_new_tokens", "3"]


@pytest.fixture(scope="module")
def tiny_model(chat_model):
    return chat_model


@pytest.fixture
def chat(tiny_model, monkeypatch, capsys):
    """Sends lines to --interactive; the prompts that the model was asked, as text, and what was printed."""

    def run(*lines, flags=()):
        tokenizer, asked = transformers.AutoTokenizer.from_pretrained(tiny_model), []
        answer = generate.answer

        def heard(engine, tok, ends, ids, args):
            asked.append(tokenizer.decode(ids))
            return answer(engine, tok, ends, ids, args)

        monkeypatch.setattr(generate, "answer", heard)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert generate.main(["--checkpoint", str(tiny_model), "--interactive", *SHORT, *flags]) == 0
        return asked, capsys.readouterr().out

    return run


def test_the_second_turn_knows_the_first_and_its_answer(chat):
    asked, out = chat("My name is Bob.", "What is my name?", flags=["--system", "Be brief."])
    first, second = asked
    assert "Be brief." in first and "My name is Bob." in first and "What is my name?" not in first
    assert second.startswith(first) and second.index("My name is Bob.") < second.index("What is my name?")
    answer = second.removeprefix(first).partition("<|im_end|>")[0]
    assert answer.strip() and out.strip()


def test_reset_forgets_and_system_replaces(chat):
    asked, out = chat("one", "/reset", "two", "/system Be kind.", "three", "/nonsense", flags=["--system", "Be brief."])
    assert "one" not in asked[1] and "Be brief." in asked[1]
    assert "Be kind." in asked[2] and "Be brief." not in asked[2] and "two" not in asked[2]
    assert "/nonsense: is not a command" in out and len(asked) == 3


def test_a_saved_conversation_is_a_row_of_chat_data(chat, tiny_model, tmp_path):
    file = tmp_path / "chat.jsonl"
    _, out = chat("one", "two", f"/save {file}", f"/save {file}", "/save", flags=["--system", "Be brief."])
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert "File exists. Give another file." in out and "/save: needs the name" in out


def test_a_file_of_prompts_is_answered_as_each_alone(tiny_model, tmp_path, capsys):
    prompts = ["What is 2 plus 2?", "Hello", "One more question, and a longer one"]
    (tmp_path / "p.txt").write_text("\n\n".join(prompts) + "\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    argv = ["--checkpoint", str(tiny_model), *SHORT]
    alone = []
    for prompt in prompts:
        generate.main([*argv, "--prompt", prompt])
        alone += [f"> {prompt}", *capsys.readouterr().out.splitlines()]
    for file in ("p.txt", "p.jsonl"):
        generate.main([*argv, "--prompts", str(tmp_path / file), "--batch_size", "2"])
        assert capsys.readouterr().out.splitlines() == alone


def test_a_prompt_ends_at_a_line_feed_alone(tmp_path):
    prompts = ["one\u2028still one", "two\x0c\x85\x1cstill two", "three"]
    (tmp_path / "p.txt").write_text("\r\n".join(prompts), newline="")
    rows = "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts)
    (tmp_path / "p.jsonl").write_text(rows)
    assert generate.read_prompts(tmp_path / "p.txt") == prompts == generate.read_prompts(tmp_path / "p.jsonl")
    for name in ("p.txt", "p.jsonl"):  # as an editor of Windows saves them
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
        assert generate.read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("p.csv", "prompt\nHi\n", "is a table, whose lines are no prompts"),
        ("p.TSV", "id\tprompt\n1\tHi\n", "is a table, whose lines are no prompts"),
        ("p.txt", 'Hi\n{"prompt": "Hi"}\n', ":2: is a row of JSON in a file of texts. Name it .jsonl"),
        ("prompts", '{"prompt": "Hi"}\n', ":1: is a row of JSON"),
        ("p.ndjson", "Hi\n", ":1: is not an object with a prompt"),
        ("p.JSONL", "Hi\n", ":1: is not an object with a prompt"),
    ],
)
def test_rows_are_no_lines_of_text(tmp_path, name, text, fact):
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=re.escape(f"--prompts {tmp_path / name}") + f".*{re.escape(fact)}"):
        generate.read_prompts(tmp_path / name)


def test_a_system_message_that_nothing_can_say_is_refused(tiny_model, tmp_path, capsys, monkeypatch):
    argv = ["--checkpoint", str(tiny_model), *SHORT, "--prompt", "Hi", "--system", "Be brief."]
    with pytest.raises(PlanError, match="--system: is said by the chat template, which --raw leaves out"):
        generate.main([*argv, "--raw"])
    shutil.copytree(tiny_model, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(config))
    argv[1] = str(tmp_path / "plain")
    with pytest.raises(PlanError, match="has no chat template to say it with"):
        generate.main(argv)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert generate.main([*argv[:-4], "--interactive"]) == 0
    assert "each message is continued as it is" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/system Be kind.\n/system Be kind.\ntwo\n"))
    assert generate.main([*argv[:-4], "--interactive"]) == 0
    assert capsys.readouterr().out.count("/system: no chat template says it here.") == 2
    with pytest.raises(PlanError, match="system: .*plain has no chat template, which says it"):  # the other model's
        generate.main(["--checkpoint", str(tiny_model), *argv[2:], "--compare", argv[1]])


def test_an_adapter_is_compared_with_its_base(tiny_model, rows_file, tmp_path, capsys):
    out = tmp_path / "tuned"
    flags = dict(train_type="lora", precision="fp32", backend="cpu", log_to="stdout", batch_size=4, lr=0.05)
    fine_tune(**flags, model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(out), max_steps=2)
    argv = [*SHORT, "--prompt", "What is 2 plus 2? ", "--raw"]
    said = {}
    for name, folder in (("tuned", out), ("base", tiny_model)):
        capsys.readouterr()
        generate.main(["--checkpoint", str(folder), *argv])
        said[name] = capsys.readouterr().out.strip("\n")
    generate.main(["--checkpoint", str(out), *argv, "--compare", "base"])
    printed = capsys.readouterr().out
    assert said["tuned"] != said["base"]
    assert printed.strip("\n") == f"> What is 2 plus 2? \ntuned: {said['tuned']}\nbase: {said['base']}"


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        ("", "--prompt: none given"),
        ("--prompts a --prompt b", "is answered alone"),
        ("--prompts missing.txt", "--prompts missing.txt: cannot be read"),
        ("--interactive --compare base", "Omit --interactive"),
        ("--prompt a --compare base", "is a full model, which has none"),
    ],
)
def test_what_does_not_fit_together_is_one_line(tiny_model, flags, fact):
    with pytest.raises(PlanError) as error:
        generate.main(["--checkpoint", str(tiny_model), *SHORT, *flags.split()])
    assert fact in str(error.value)


@pytest.mark.parametrize("content", ["", "\n\n", '{"question": "a"}', '{"prompt": 5}', "[1]", "{"])
def test_a_file_without_prompts_is_one_line(tiny_model, tmp_path, content):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(PlanError, match=r"--prompts .*p.jsonl(:1)?: (has no prompt|is not an object with a prompt)"):
        generate.main(["--checkpoint", str(tiny_model), *SHORT, "--prompts", str(tmp_path / "p.jsonl")])


@pytest.mark.parametrize(
    "beside",
    [
        *({"image": "a.png"}, {"images": ["a.png"]}, {"System": "Be brief."}, {"systemPrompt": "Be brief."}),
        *({"passages": ["A lamp."]}, {"chat_history": [["Hi", "Ho"]]}, {"instruction": "Be brief."}),
    ],
)
def test_a_row_of_prompts_with_more_than_the_prompt_is_one_line(tmp_path, beside, capsys):
    row = json.dumps({"prompt": "Hi", "completion": "Hello"})
    (tmp_path / "p.jsonl").write_text(row + "\n")
    assert generate.read_prompts(tmp_path / "p.jsonl") == ["Hi"]
    assert capsys.readouterr().err == "note: columns not used, with their number of rows: 'completion' (1)\n"
    (tmp_path / "p.jsonl").write_text(row + "\n" + json.dumps({"prompt": "Hi"} | beside) + "\n")
    with pytest.raises(PlanError, match=f"p.jsonl:2: has '{next(iter(beside))}' beside its prompt"):
        generate.read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("flag", ["--prompt", "--system"])
def test_a_flag_with_a_byte_that_is_not_utf_8_is_one_line(tiny_model, flag):
    text = b"caf\xe9".decode(errors="surrogateescape")
    with pytest.raises(PlanError) as error:
        generate.main(["--checkpoint", str(tiny_model), "--prompt", "x", flag, text, *SHORT])
    assert str(error.value) == f"{flag}: has the byte 0xe9, which is not UTF-8. Write it in UTF-8."


def test_such_a_byte_in_a_conversation_is_said_and_the_next_line_is_answered(tiny_model, monkeypatch, capsys):
    said = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nand then?\n\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", said)
    asked = []
    answer = generate.answer

    def counted(engine, tokenizer, ends, ids, args):
        asked.append(ids)
        return answer(engine, tokenizer, ends, ids, args)

    monkeypatch.setattr(generate, "answer", counted)
    assert generate.main(["--checkpoint", str(tiny_model), "--interactive", *SHORT]) == 0
    assert "has the byte 0xe9, which is not UTF-8, and is not sent" in capsys.readouterr().out and len(asked) == 1


def test_a_prompt_of_a_file_or_of_python_with_half_a_character_is_one_line(tiny_model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x\\ud800"}\n')
    with pytest.raises(PlanError, match=r"^prompt: has half of a surrogate pair, \\ud800, which is not UTF-8"):
        generate.main(["--checkpoint", str(tiny_model), "--prompts", str(file), *SHORT])
