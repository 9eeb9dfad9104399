"""Lines on rows that no chat template renders: words that run together, a template that is not used, marks of chats."""

import pytest

from finetune.data.columns import RowOptions
from finetune.data.plain_rows import misses_space
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.tokenize import Limits, tokenize
from finetune.data.tokens.workers import tokenize_on_cores
from tests.support.rows import jsonl

ROW = {"prompt": "What is the capital of France?", "completion": "Paris."}
PAIR = {"prompt": "What is the capital of France?", "chosen": "Paris.", "rejected": "Rome."}


def lines(tmp_path, tokenizer, row: dict, **options) -> str:
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [row] * 2))
    return "\n".join(tokenize(raw, RowOptions(**options), tokenizer, 512).notices)


@pytest.mark.parametrize(
    ("prompt", "answer", "misses"),
    [
        ("of France?", "Paris", True),
        ("answer:", "yes", True),
        ("The lamp", "is on", True),
        ("Сколько?", "Два", True),
        ("of France? ", "Paris", False),
        ("of France?", " Paris", False),
        ("of France?\n", "Paris", False),
        ("2 + 3 =", "5", False),
        ("<|assistant|>", "Paris", True),
        ("the name is `", "x`", False),
        ("The lamp", ", which", False),
        ("法国的首都是哪里?", "巴黎", False),
        ("ราคาเท่าไร", "สิบบาท", False),
    ],
)
def test_words_run_together_where_a_script_has_spaces(prompt, answer, misses):
    assert misses_space(prompt, answer) is misses


def test_what_is_joined_as_given_is_said_with_what_the_model_sees(tmp_path, plain_tokenizer, chat_tokenizer):
    said = lines(tmp_path, plain_tokenizer, ROW)
    assert 'without a space, as in "l of France?Paris.": 2 x' in said and "template" not in said
    said = lines(tmp_path, plain_tokenizer, PAIR, pairs=True)
    assert 'without a space, as in "l of France?Paris.": 4 x' in said
    assert not lines(tmp_path, plain_tokenizer, ROW | {"completion": " Paris."})
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [ROW] * 2))
    on_cores = tokenize_on_cores(raw, RowOptions(), chat_tokenizer, Limits(Cut(512)), cores=1)
    assert on_cores.notices == tokenize(raw, RowOptions(), chat_tokenizer, 512).notices


def test_a_space_that_is_in_the_answers_first_token_is_said(tmp_path, plain_tokenizer):
    """Other programs make a token of the space of its own, after which the model was never asked."""
    asked = ROW | {"prompt": "Say Paris: "}
    said = "a prompt ends in a space, which is in its answer's first token: ask other programs without it: 2 x"
    assert said in lines(tmp_path, plain_tokenizer, asked)
    assert "ends in a space" not in lines(tmp_path, plain_tokenizer, asked | {"completion": " Paris."})
    alone = plain_tokenizer(["Say Paris: "], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    together = plain_tokenizer(
        ["Say Paris: Paris."], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    (ids,), (joined,) = ([e.ids for e in found.encodings] for found in (alone, together))
    assert joined[: len(ids)] != ids  # as the line says


def test_an_answer_in_the_first_token_is_said(tmp_path, make_tokenizer):
    """Nothing comes before it that it could be learned from: a tokenizer without BOS, and no prompt."""
    tokenizer = make_tokenizer(tmp_path / "t", bos=False)
    said = "an answer is in the first token of its row: its end alone is learned: 2 x"
    assert said in lines(tmp_path, tokenizer, {"prompt": "", "completion": "b"})
    assert said not in lines(tmp_path, tokenizer, {"prompt": "", "completion": "b b"})
    assert said not in lines(tmp_path, tokenizer, {"prompt": "a", "completion": " b"})


def test_a_model_with_a_chat_template_gets_the_choice_of_it(tmp_path, chat_tokenizer):
    for row, kinds, columns in (
        (ROW, {}, {"question": "prompt", "answer": "completion"}),
        (PAIR, {"pairs": True}, {"question": "prompt"}),
    ):
        flag = ",".join(f"{name}={column}" for name, column in columns.items())
        assert f"To use it: --columns {flag}: " in lines(tmp_path, chat_tokenizer, row, **kinds)
        assert not lines(tmp_path, chat_tokenizer, row, columns=columns, **kinds)
    labelled = ROW | {"label": True}
    assert "give prompts and answers as lists of messages" in lines(tmp_path, chat_tokenizer, labelled, labels=True)
    own = ROW | {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}
    assert "template" not in lines(tmp_path, chat_tokenizer, own)


@pytest.mark.parametrize(
    "text",
    [
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
        "### Instruction:\nHi\n\n### Response:\nHello",
        "<s>[INST] Hi [/INST] Hello",
        "<start_of_turn>user\nHi<end_of_turn>",
        "User: Hi\nAssistant: Hello",
    ],
)
def test_a_text_that_is_a_conversation_is_said_to_be_learned_as_a_whole(text, tmp_path, plain_tokenizer):
    assert "marks of a conversation" in lines(tmp_path, plain_tokenizer, {"text": text})
    assert not lines(tmp_path, plain_tokenizer, {"text": "A list of instructions: ### is a heading in Markdown."})


@pytest.mark.parametrize(
    "text, said",
    [
        ("12/31/20, 10:15 PM - Ann: Hi\n12/31/20, 10:16 PM - Bo: Yo\n" * 2, "begin with who says them, or when"),
        ("[31.12.20, 22:15:03] Ann: Hi\n[31.12.20, 22:16:01] Bo: Yo\nand more\n" * 2, "begin with who says them"),
        ("Ann, [31.12.20 22:15]\nHi\n\nBo, [31.12.20 22:16]\nYo\n\n" * 2, "begin with who says them"),
        ("user: Hi\nassistant: Yo\n" * 2, "begin with who says them"),
        ("1+1?\t2\n2+2?\t4\n3+3?\t6\n", "have 2 columns, separated by tabs"),
    ],
)
def test_a_text_of_a_messenger_or_in_columns_is_said_to_be_learned_as_a_whole(text, said, tmp_path, plain_tokenizer):
    assert said in lines(tmp_path, plain_tokenizer, {"text": text})


@pytest.mark.parametrize(
    "text",
    [
        "Title: A day\nAuthor: Ann\n\nIt was 10:15 when she came.\nNobody spoke.\n",
        "At 10:15 she came.\n\n10:20 was late.\nNobody spoke, and nobody left.\nThe end.\n" * 3,
        "def f():\n\treturn 1\n\n\nprint(f())\n" * 3,
    ],
)
def test_prose_and_programs_are_no_conversations(text, tmp_path, plain_tokenizer):
    assert not lines(tmp_path, plain_tokenizer, {"text": text})
