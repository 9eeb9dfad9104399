"""Every shape of data that users bring: the format found and what is learned of it, or the one line that refuses it.

Nothing in between: a shape is learned exactly as written here, or it is refused.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from finetune.config import TrainConfig
from finetune.data.prepare import check_columns, options_of, read_datasets
from finetune.data.reading.mixture import Source
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import tokenize
from finetune.errors import PlanError
from finetune.parts.parts import Parts
from tests.support.chats import with_template
from tests.support.templates import QWEN3, QWEN25, SMOLLM2

END = "<|im_end|>"
ASK = {"role": "user", "content": "Hi?"}
SAY = {"role": "assistant", "content": "Yo."}
NAY = {"role": "assistant", "content": "No."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}],
}
BROKEN_CALL = {"name": "w", "arguments": "{"}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "21 C"}
TOOLS = [{"type": "function", "function": {"name": "w", "description": "", "parameters": {}}}]
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yo."}]
ALPACA = {"instruction": "Add.", "input": "2 and 3", "output": "5"}


def lines(*rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(*rows, separator=",") -> bytes:
    return "".join(separator.join(row) + "\n" for row in rows).encode()


# name: (files, what of each row is learned, the format, flags)
LEARNED = {
    "alpaca jsonl": ({"a.jsonl": lines(ALPACA)}, [["5", END]], "alpaca", {}),
    "alpaca json": ({"a.json": json.dumps([ALPACA]).encode()}, [["5", END]], "alpaca", {}),
    "alpaca csv with extra columns": (
        {"a.csv": table(("id", "instruction", "input", "output"), ("7", "Add.", "2 and 3", "5"))},
        [["5", END]],
        "alpaca: as one turn",
        {},
    ),
    "ShareGPT": ({"a.json": json.dumps([{"conversations": SHAREGPT}])}, [["Yo.", END]], "chat", {}),
    "ShareGPT with role and content": ({"a.jsonl": lines({"conversations": [ASK, SAY]})}, [["Yo.", END]], "chat", {}),
    "chat of many turns": ({"a.jsonl": lines({"messages": [ASK, SAY, ASK, SAY]})}, [["Yo.", END] * 2], "chat", {}),
    "choices of MMLU": (
        {"a.jsonl": lines({"question": "Which?", "choices": ["a", "b"], "answer": 1})},
        [["B", END]],
        "qna",
        {},
    ),
    "choices of ARC": (
        {
            "a.jsonl": lines(
                {"question": "Which?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
            )
        },
        [["2", END]],
        "qna",
        {},
    ),
    "choices by text": (
        {"a.jsonl": lines({"question": "Which?", "options": ["lamp", "sun"], "answer": "lamp"})},
        [["A", END]],
        "qna",
        {},
    ),
    "a passage": (
        {"a.jsonl": lines({"question": "Who?", "passage": "Ann ran.", "answer": "Ann"})},
        [["Ann", END]],
        "qna",
        {},
    ),
    "messages as text in a table": (
        {"a.csv": table(("id", "messages"), ("1", '"' + json.dumps([ASK, SAY]).replace('"', '""') + '"'))},
        [["Yo.", END]],
        "chat",
        {},
    ),
    "Guanaco": ({"a.jsonl": lines({"text": "### Human: Hi?### Assistant: Yo."})}, [[" Yo.</s>"]], "text", {}),
    "a document that speaks of markers": (
        {"a.txt": b"Use ### Human: and ### Assistant: here."},
        [["se ### Human: and ### Assistant: here.</s>"]],
        "text",
        {},
    ),
    "conversation": ({"a.jsonl": lines({"conversation": [ASK, SAY]})}, [["Yo.", END]], "chat", {}),
    "dolly": (
        {"a.jsonl": lines({"instruction": "Add.", "context": "", "response": "5", "category": "open_qa"})},
        [["5", END]],
        "alpaca",
        {},
    ),
    "gsm8k": ({"a.jsonl": lines({"question": "2+3?", "answer": "5 #### 5"})}, [["5 #### 5", END]], "qna", {}),
    "BOM and CRLF": (
        {"a.jsonl": b"\xef\xbb\xbf" + lines({"prompt": "Hi:", "completion": "Yo."}).replace(b"\n", b"\r\n")},
        [["Yo.</s>"]],
        "prompt_completion",
        {},
    ),
    "rows under data": ({"a.json": json.dumps({"data": [ALPACA]}).encode()}, [["5", END]], "alpaca", {}),
    "Japanese, Arabic, emoji": (
        {"a.jsonl": lines({"question": "何?", "answer": "日本語 مرحبا 🙂"})},
        [["日本語 مرحبا 🙂", END]],
        "qna",
        {},
    ),
    "alpaca with system and history": (
        {"a.jsonl": lines({**ALPACA, "system": "Be brief.", "history": [["Hi?", "Yo."]]})},
        [["Yo.", END, "5", END]],
        "alpaca",
        {},
    ),
    "ShareGPT with a system column": (
        {"a.jsonl": lines({"conversations": [ASK, SAY], "system": "Be brief."})},
        [["Yo.", END]],
        "chat",
        {},
    ),
    "OpenAI tools": (
        {"a.jsonl": lines({"messages": [ASK, CALL, TOOL, SAY], "tools": TOOLS})},
        [['<tool_call>\n{"name": "w", "arguments": {"city": "Rome"}}\n</tool_call>', END, "Yo.", END]],
        "chat",
        {"template": QWEN25},
    ),
    "LLaMA-Factory's function_call and observation, tools as text": (
        {
            "a.jsonl": lines(
                {
                    "conversations": [
                        {"from": "human", "value": "Hi?"},
                        {"from": "function_call", "value": '{"name": "w", "arguments": {"city": "Rome"}}'},
                        {"from": "observation", "value": "21 C"},
                        {"from": "gpt", "value": "Yo."},
                    ],
                    "tools": json.dumps(TOOLS),
                }
            )
        },
        [['<tool_call>\n{"name": "w", "arguments": {"city": "Rome"}}\n</tool_call>', END, "Yo.", END]],
        "chat",
        {"template": QWEN25},
    ),
    "OpenAI's older function_call and functions": (
        {
            "a.jsonl": lines(
                {
                    "messages": [
                        ASK,
                        {"role": "assistant", "content": None, "function_call": {"name": "w", "arguments": "{}"}},
                        {"role": "function", "name": "w", "content": "21 C"},
                        SAY,
                    ],
                    "functions": [TOOLS[0]["function"]],
                }
            )
        },
        [['<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>', END, "Yo.", END]],
        "chat",
        {"template": QWEN25},
    ),
    "tools left out as asked": (
        {"a.jsonl": lines({"messages": [ASK, SAY], "tools": TOOLS})},
        [["Yo.", END]],
        "chat",
        {"ignore": "tools"},
    ),
    "OpenAI's weight 0": (
        {"a.jsonl": lines({"messages": [ASK, {**SAY, "weight": 0}, ASK, {**SAY, "weight": 1}]})},
        [["Yo.", END]],
        "chat",
        {},
    ),
    "Axolotl's train false": (
        {"a.jsonl": lines({"messages": [ASK, SAY, ASK, {"role": "assistant", "content": "No.", "train": False}]})},
        [["Yo.", END]],
        "chat",
        {},
    ),
    "reasoning_content": (
        {"a.jsonl": lines({"messages": [ASK, {**SAY, "reasoning_content": "Hm."}]})},
        [["<think>\nHm.\n</think>\n\nYo.", END]],
        "chat",
        {"template": QWEN3},
    ),
    "conversational prompt and completion": (
        {"a.jsonl": lines({"prompt": [ASK, SAY, ASK], "completion": [{"role": "assistant", "content": "No."}]})},
        [["No.", END]],
        "prompt_completion",
        {},
    ),
    "content as parts of text": (
        {"a.jsonl": lines({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}, SAY]})},
        [["Yo.", END]],
        "chat",
        {},
    ),
    "the chosen half alone": (
        {"a.jsonl": lines({"prompt": "Hi:", "chosen": "Yo.", "rejected": "No."})},
        [["Yo.</s>"]],
        "prompt_completion",
        {"columns": "completion=chosen"},
    ),
    "the chosen half of conversations": (
        {"a.jsonl": lines({"chosen": [ASK, SAY], "rejected": [ASK, CALL]})},
        [["Yo.", END]],
        "chat",
        {"columns": "completion=chosen"},
    ),
    "Question and Answer": ({"a.csv": table(("Question", "Answer"), ("Hi?", "Yo."))}, [["Yo.", END]], "qna", {}),
    "input and output": ({"a.jsonl": lines({"input": "Hi?", "output": "Yo."})}, [["Yo.", END]], "qna", {}),
    "query and response": ({"a.jsonl": lines({"query": "Hi?", "response": "Yo."})}, [["Yo.", END]], "qna", {}),
    "SQuAD": (
        {"a.jsonl": lines({"context": "c", "question": "Hi?", "answers": {"text": ["Yo."], "answer_start": [0]}})},
        [["Yo.", END]],
        "qna",
        {},
    ),
    "columns named": (
        {"a.csv": table(("q", "reply"), ("Hi:", "Yo."))},
        [["Yo.</s>"]],
        "prompt_completion",
        {"columns": "prompt=q,completion=reply"},
    ),
    "token ids with labels": (
        {"a.jsonl": lines({"input_ids": [60, 61, 62], "labels": [-100, -100, 62], "attention_mask": [1, 1, 1]})},
        [[62]],
        "tokens",
        {},
    ),
    "token ids alone": ({"a.jsonl": lines({"input_ids": [60, 61, 62]})}, [[61, 62]], "tokens", {}),
    "token ids with a mask": (
        {"a.jsonl": lines({"input_ids": [60, 61, 62], "completion_mask": [0, 1, 1]})},
        [[61, 62]],
        "tokens",
        {},
    ),
    "token ids of which some have a mask": (
        {
            "a.jsonl": lines(
                {"input_ids": [60, 61, 62], "completion_mask": [0, 1, 1]},
                {"input_ids": [60, 61, 62], "completion_mask": None},
            )
        },
        [[61, 62], [61, 62]],
        "tokens",
        {},
    ),
    "an integer as answer": ({"a.jsonl": lines({"question": "2+3?", "answer": 5})}, [["5", END]], "qna", {}),
    "a boolean as answer": ({"a.jsonl": lines({"question": "So?", "answer": True})}, [["true", END]], "qna", {}),
    "tsv": ({"a.tsv": table(("question", "answer"), ("Hi, you?", "Yo."), separator="\t")}, [["Yo.", END]], "qna", {}),
    "csv with semicolons and a comma in a name": (
        {"a.csv": b'"question";"answer";"date, place"\n"Hi, you?";"Yo.";"1"\n'},
        [["Yo.", END]],
        "qna",
        {},
    ),
    "csv with semicolons and a bare comma in a name": (
        {"a.csv": b"question;answer;date, place\nHi?;Yo.;1\n"},
        [["Yo.", END]],
        "qna",
        {},
    ),
    "csv with semicolons": (
        {"a.csv": table(("question", "answer"), ("Hi, you?", "Yo."), separator=";")},
        [["Yo.", END]],
        "qna",
        {},
    ),
    "txt": ({"a.txt": b"One.\n\nTwo.\n"}, [["ne.\n\nTwo.\n</s>"]], "text", {}),
    "md": ({"a.md": b"# One\n"}, [[" One\n</s>"]], "text", {}),
    "JSON as a document": ({"a.txt": b'{\n"a": 1}\n'}, [['\n"a": 1}\n</s>']], "text", {"text_unit": "document"}),
    "txt by line": ({"a.txt": b"One.\n\nTwo.\n"}, [["ne.</s>"], ["wo.</s>"]], "text", {"text_unit": "line"}),
    "a folder of documents": (
        {"a.md": b"One", "b.txt": b"Two", "README.md": b"x"},
        [["ne</s>"], ["wo</s>"]],
        "text",
        {},
    ),
    "a folder of two suffixes and formats": (
        {
            "alpaca.csv": table(("instruction", "output"), ("Add.", "5")),
            "qa.jsonl": lines({"question": "Hi?", "answer": "Yo."}),
        },
        [["5", END], ["Yo.", END]],
        "1 alpaca: as one turn of the tokenizer's chat template, 1 qna",
        {},
    ),
    "one file of two formats": (
        {"a.jsonl": lines({"messages": [ASK, SAY]}, {"prompt": "Hi:", "completion": "No."})},
        [["Yo.", END], ["No.</s>"]],
        "1 chat: rendered by the tokenizer's chat template, 1 prompt_completion",
        {},
    ),
    "guanaco": ({"a.jsonl": lines({"text": "### Human: Hi?### Assistant: Yo."})}, [[" Yo.</s>"]], "text", {}),
    "plain text rows": ({"a.jsonl": lines({"text": "One."})}, [["ne.</s>"]], "text", {}),
    "a weight of 1": (
        {"a.jsonl": lines({"prompt": "Hi:", "completion": "Yo.", "weight": 1})},
        [["Yo.</s>"]],
        "prompt_completion",
        {},
    ),
    "pairs of a prompt and two texts": (
        {"a.jsonl": lines({"prompt": "Hi:", "chosen": "Yo.", "rejected": "No.", "score_chosen": 9.0})},
        [["Yo.</s>"], ["No.</s>"]],
        "preference",
        {"preference": "dpo"},
    ),
    "pairs of texts that contain the prompt, as Anthropic's": (
        {
            "a.jsonl": lines(
                {name: f"\n\nHuman: Hi?\n\nAssistant: {s}" for name, s in (("chosen", "Yo."), ("rejected", "No."))}
            )
        },
        [["Yo.</s>"], ["No.</s>"]],
        "preference",
        {"preference": "orpo"},
    ),
    "pairs of conversations beside messages, as UltraFeedback's": (
        {"a.jsonl": lines({"prompt": "Hi?", "messages": [ASK, SAY], "chosen": [ASK, SAY], "rejected": [ASK, NAY]})},
        [["Yo.", END], ["No.", END]],
        "preference",
        {"preference": "dpo"},
    ),
    "pairs with a question and a system prompt, as Orca's": (
        {"a.jsonl": lines({"system": "Be brief.", "question": "Hi?", "chosen": "Yo.", "rejected": "No."})},
        [["Yo.", END], ["No.", END]],
        "preference",
        {"preference": "dpo"},
    ),
    "pairs with an instruction and its input": (
        {"a.jsonl": lines({"instruction": "Add.", "input": "2 and 3", "chosen": "5", "rejected": "6"})},
        [["5", END], ["6", END]],
        "preference",
        {"preference": "dpo"},
    ),
    "pairs of ShareGPT's messages": (
        {
            "a.jsonl": lines(
                {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {**SHAREGPT[1], "value": "No."}}
            )
        },
        [["Yo.", END], ["No.", END]],
        "preference",
        {"preference": "dpo"},
    ),
    "pairs under other names": (
        {"a.jsonl": lines({"prompt": "Hi:", "better": "Yo.", "worse": "No."})},
        [["Yo.</s>"], ["No.</s>"]],
        "preference",
        {"preference": "dpo", "columns": "chosen=better,rejected=worse"},
    ),
    "pairs as rows with a label": (
        {"a.jsonl": lines({"prompt": "Hi:", "chosen": "Yo.", "rejected": "No."})},
        [["Yo.</s>"], ["No.</s>"]],
        "preference",
        {"preference": "kto"},
    ),
    "KTO rows of conversations": (
        {"a.jsonl": lines({"prompt": [ASK], "completion": [SAY], "label": True})},
        [["Yo.", END]],
        "kto",
        {"preference": "kto"},
    ),
    "KTO rows of a table": (
        {"a.csv": table(("Prompt", "Completion", "Label"), ("Hi:", "Yo.", "True"), ("Hi:", "No.", "False"))},
        [["Yo.</s>"], ["No.</s>"]],
        "kto",
        {"preference": "kto"},
    ),
    "KTO rows with the label left out": (
        {"a.jsonl": lines({"prompt": "Hi:", "completion": "Yo.", "label": True})},
        [["Yo.</s>"]],
        "prompt_completion",
        {"ignore": "label"},
    ),
    "a class as answer": (
        {"a.jsonl": lines({"text": "Good:", "label": 1})},
        [["1</s>"]],
        "prompt_completion",
        {"columns": "prompt=text,completion=label"},
    ),
}

REFUSED = {  # name: (files, the line, flags)
    "OpenAI tools through a template without": (
        {"a.jsonl": lines({"messages": [ASK, CALL, TOOL, SAY], "tools": TOOLS})},
        "a.jsonl:1: the tokenizer's chat template does not render tools. Use a model whose template does, or add "
        "--ignore_columns tools to train without.",
        {},
    ),
    "tool calls alone through a template without": (
        {"a.jsonl": lines({"messages": [ASK, CALL]})},
        "a.jsonl:1: message 1: the tokenizer's chat template does not render tool calls.",
        {},
    ),
    "the role tool through a template without": (
        {"a.jsonl": lines({"messages": [ASK, TOOL, SAY]})},
        "a.jsonl:1: message 1: the tokenizer's chat template does not render the role tool.",
        {},
    ),
    "reasoning through a template without": (
        {"a.jsonl": lines({"messages": [ASK, {**SAY, "reasoning_content": "Hm."}]})},
        "a.jsonl:1: message 1: the tokenizer's chat template does not render reasoning_content.",
        {},
    ),
    "arguments that are not JSON": (
        {"a.jsonl": lines({"messages": [ASK, {"role": "assistant", "function_call": BROKEN_CALL}]})},
        "a.jsonl:1: field 'messages[1].tool_calls[0]': its arguments are not JSON",
        {"template": QWEN25},
    ),
    "a fractional weight": (
        {"a.jsonl": lines({"messages": [ASK, {**SAY, "weight": 0.5}]})},
        "a.jsonl:1: field 'messages[1].weight' is 0.5, must be 0 or 1",
        {},
    ),
    "a user's turn to train": (
        {"a.jsonl": lines({"messages": [{**ASK, "train": True}, SAY]})},
        "a.jsonl:1: field 'messages[0].train' is true on a turn of user",
        {},
    ),
    "a user's turn to train, in numbers": (
        {"a.jsonl": lines({"messages": [{**ASK, "loss_mask": 1}, SAY]})},
        "a.jsonl:1: field 'messages[0].loss_mask' is 1 on a turn of user",
        {},
    ),
    "KTO rows": (
        {"a.jsonl": lines({"prompt": "Hi:", "completion": "No.", "label": False})},
        "--dataset: columns prompt, completion and label are KTO rows, of which some are examples of what not to say. "
        "Add --preference kto to learn from both, or remove the rows whose label is false and add --ignore_columns",
        {},
    ),
    "preference pairs": (
        {"a.jsonl": lines({"prompt": "Hi:", "chosen": "Yo.", "rejected": "No."})},
        "--dataset: columns chosen and rejected are preference pairs. Add --preference dpo to learn what is preferred, "
        "or --columns completion=chosen to learn the chosen answers alone.",
        {},
    ),
    "no pairs for DPO": (
        {"a.jsonl": lines({"prompt": "Hi:", "completion": "No.", "label": False})},
        "--dataset: is of format kto, and --preference dpo, orpo and simpo need columns chosen and rejected. Name them "
        "with --columns chosen=A,rejected=B, or omit --preference.",
        {"preference": "dpo"},
    ),
    "no label for KTO": (
        {"a.jsonl": lines(ALPACA)},
        "is of format alpaca, and --preference kto needs columns prompt, completion and label, or chosen and rejected.",
        {"preference": "kto"},
    ),
    "a pair without a rejected answer": (
        {"a.jsonl": lines({"prompt": "Hi:", "chosen": "Yo.", "rejected": None})},
        "a.jsonl:1: field 'rejected' is missing, must be a string or a list of messages.",
        {"preference": "dpo"},
    ),
    "a pair with a rating": (
        {"a.jsonl": lines({"prompt": "Hi:", "chosen": "Yo.", "rejected": "No.", "score": 3})},
        "a.jsonl:1: column 'score' rates the answers, and format preference does not use it. Add --ignore_columns",
        {"preference": "dpo"},
    ),
    "preference pairs beside messages": (
        {"a.jsonl": lines({"messages": [ASK, SAY], "chosen": [SAY], "rejected": [SAY]})},
        "--dataset: columns chosen and rejected are preference pairs",
        {},
    ),
    "an image": (
        {"a.jsonl": lines({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, SAY]})},
        "a.jsonl:1: field 'messages[0].content[0]' is of type 'image_url': only text is learned here. Remove the row.",
        {},
    ),
    "a column of images": (
        {"a.jsonl": lines({"messages": [ASK, SAY], "images": ["a.png"]})},
        "a.jsonl:1: column 'images' is not text, which is all this learns, and format chat does not use it.",
        {},
    ),
    "a rating": (
        {"a.jsonl": lines({**ALPACA, "rating": 2})},
        "a.jsonl:1: column 'rating' rates the answers, and format alpaca does not use it. Add --ignore_columns rating",
        {},
    ),
    "choices of a prompt": (
        {"a.jsonl": lines({"prompt": "Which?", "choices": ["a", "b"], "completion": "b"})},
        "a.jsonl:1: column 'choices' lists the choices of a question, and format prompt_completion does not use it.",
        {},
    ),
    "an answer that is none of the choices": (
        {"a.jsonl": lines({"question": "Which?", "choices": ["a", "b"], "answer": 2})},
        "a.jsonl:1: field 'answer' is '2', none of the choices A, B. Give a letter, a choice's text, or its number",
        {},
    ),
    "choices that are no texts": (
        {"a.jsonl": lines({"question": "Which?", "choices": [1, 2], "answer": "A"})},
        "a.jsonl:1: field 'choices' must be a list of at most 26 texts, or an object with lists text and label.",
        {},
    ),
    "a passage of a prompt": (
        {"a.jsonl": lines({"prompt": "Who?", "passage": "Ann ran.", "completion": "Ann"})},
        "is what a question is about, and format prompt_completion does not use it. Add --ignore_columns passage",
        {},
    ),
    "messages of OASST's tree": (
        {"a.jsonl": lines({"text": "Hi", "role": "prompter", "parent_id": "7"})},
        "a.jsonl:1: column 'role' says who speaks, as if the row is one turn of a conversation, and format text does",
        {},
    ),
    "the folder of a model": (
        {"config.json": b"{}", "model.safetensors": b""},
        "is the folder of a model or a run, not of data. Give the file of its rows.",
        {},
    ),
    "an array over lines": ({"a.jsonl": b'[\n{"text": "a"}\n]\n'}, "a.jsonl: is one JSON array, must be an object", {}),
    "texts alone": ({"a.jsonl": b'"one"\n'}, 'a.jsonl:1: is text, must be an object such as {"text": "..."}.', {}),
    "Latin-1": ({"a.jsonl": b'{"text": "caf\xe9"}\n'}, "iconv -f CP1252 -t UTF-8 converts the file", {}),
    "a table without a header": (
        {"a.csv": table(("What is 2?", "It is two."), ("What is 3?", "It is three."))},
        "look like a row. The first line of a table names its columns: add one.",
        {},
    ),
    "columns about rows": (
        {"a.jsonl": lines({"request": "Add.", "generation": "5", "model_name": "x", "id": 3})},
        "--columns question=request,answer=generation. The formats:",
        {},
    ),
    "an answer that may be wrong": (
        {"a.jsonl": lines({"prompt": "Hi:", "completion": "No.", "is_correct": False})},
        "a.jsonl:1: column 'is_correct' may say which rows are wrong",
        {},
    ),
    "a reason": (
        {"a.jsonl": lines({"question": "1+1?", "rationale": "Count.", "answer": "2"})},
        "a.jsonl:1: column 'rationale' explains the answer",
        {},
    ),
    "rows of several splits": (
        {"a.jsonl": lines({**ALPACA, "split": "test"})},
        "a.jsonl:1: column 'split' may say which rows are for tests",
        {},
    ),
    "a row's weight": ({"a.jsonl": lines({**ALPACA, "weight": 0.1})}, "a.jsonl:1: column 'weight' weighs the rows", {}),
    "a label beside text": ({"a.jsonl": lines({"text": "Good.", "label": 1})}, "a.jsonl:1: column 'label' may", {}),
    "a system prompt for text that is joined": (
        {"a.jsonl": lines({"prompt": "Hi:", "completion": "Yo.", "system": "Be brief."})},
        "a.jsonl:1: field 'system' has no place in prompt and completion",
        {},
    ),
    "a fraction as answer": (
        {"a.jsonl": lines({"question": "Hi?", "answer": 1.5})},
        "a.jsonl:1: field 'answer' is a number, must be a string. Write numbers with a fraction as text.",
        {},
    ),
    "unknown columns": (
        {"a.jsonl": lines({"foo": "a", "bar": "b"})},
        "--dataset: columns foo, bar match no format. If foo is the question and bar the answer, use --columns",
        {},
    ),
    "pandas' numbers of columns": (
        {"a.csv": table(("0", "1"), ("What is 2?", "It is two."))},
        "columns 0, 1 are pandas' numbers of columns without names. Name them, as in --columns question=0,answer=1.",
        {},
    ),
    "an object as answer": (
        {"a.jsonl": lines({"question": "Hi?", "answer": {"text": "Yo."}})},
        "field 'answer' is an object, must be a string. Write text, or name its key: --columns answer=answer.text.",
        {},
    ),
    "a column that is not there": (
        {"a.jsonl": lines({"foo": "a", "bar": "b"})},
        "--dataset: has no column 'baz' that --columns names, it has foo, bar.",
        {"columns": "prompt=baz"},
    ),
    "xlsx": ({"a.xlsx": b"PK"}, "a.xlsx: is a spreadsheet. Save the sheet as .csv.", {}),
    "Latin-1 csv": (
        {"a.csv": b"question,answer\nHi?,caf\xe9\n"},
        "a.csv:2:byte 8: is not UTF-8 (0xe9): iconv -f CP1252 -t UTF-8 converts",
        {},
    ),
    "JSON lines called txt": (
        {"a.txt": lines({"prompt": "a", "completion": "b"})},
        "a.txt: its first line is a JSON object. Rename it to .jsonl",
        {},
    ),
    "JSON called txt": (
        {"a.txt": b'[\n {"prompt": "a", "completion": "b"}\n]\n'},
        "a.txt: is JSON. Rename it to .json,",
        {},
    ),
    "JSON lines below a title called txt": (
        {"a.txt": b"# mine\n" + lines({"text": "a"}, {"text": "b"})},
        "a.txt: most of its lines are JSON objects. Rename it to .jsonl",
        {},
    ),
    "a table called txt": (
        {"a.txt": b"Question;Answer\n1+1?;2\n"},
        "a.txt: its first line names columns (question, answer). Rename it to .csv",
        {},
    ),
    "a table of Markdown": (
        {"a.md": b"| question | answer |\n|---|---|\n| 1+1? | 2 |\n"},
        "a.md: its first line names columns (question, answer). Save it as .csv",
        {},
    ),
    "an export of Anki": (
        {"a.txt": b"#separator:tab\n#html:true\n1+1?\t2\n"},
        "a.txt: is an export of Anki. Put a line with the names of its columns",
        {},
    ),
    "HTML called txt": (
        {"a.txt": b"<!DOCTYPE html>\n<p>Hi</p>"},
        "a.txt: is HTML. Save its text, or add --text_unit",
        {},
    ),
    "subtitles called txt": ({"a.txt": b"1\n00:00:01,000 --> 00:00:04,000\nHi\n"}, "a.txt: is a file of subtitles", {}),
    "labels of other tokens": (
        {"a.jsonl": lines({"input_ids": [5, 6, 7], "labels": [6, 7, 8]})},
        "a.jsonl:1: labels[0] is 6, input_ids[0] is 5. A label must be the token itself",
        {},
    ),
    "token ids of several texts, numbered by the mask": (
        {"a.jsonl": lines({"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 2, 2]})},
        "a.jsonl:1: field 'attention_mask' has 2, must be 0 or 1: texts that a program packed into one row",
        {},
    ),
    "token ids with a mask of labels": (
        {"a.jsonl": lines({"input_ids": [5, 6, 7], "loss_mask": [-100, -100, 1]})},
        "a.jsonl:1: field 'loss_mask' has -100, must be 0 or 1 (learned).",
        {},
    ),
    "a missing field": (
        {"a.jsonl": lines({"prompt": "a", "completion": "b"}, {"prompt": "a"})},
        "a.jsonl:2: field 'completion' is missing, must be a string.",
        {},
    ),
    "two system prompts": (
        {"a.jsonl": lines({"messages": [{"role": "system", "content": "x"}, ASK, SAY], "system": "y"})},
        "a.jsonl:1: field 'system' and the first message are two system prompts. Keep one.",
        {},
    ),
}


def dataset_of(folder: Path, files: dict, tokenizer, flags: dict):
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    path = folder if len(files) > 1 else folder / next(iter(files))
    tokenizer = with_template(tokenizer, flags.get("template", SMOLLM2))
    settings = TrainConfig(
        columns=flags.get("columns"), ignore_columns=flags.get("ignore"), preference=flags.get("preference", "none")
    )
    options = options_of(Source("a"), Parts(settings).data)
    raw = read_rows(str(path), text_unit=flags.get("text_unit", "auto"))
    check_columns(raw, options, "--dataset")
    return tokenize(raw, options, tokenizer, 512), tokenizer


def learned(dataset, tokenizer, as_ids: bool) -> list:
    """Per document its targets: each run of them as text, an end-of-turn token apart; or as ids."""
    found = []
    for i in range(len(dataset)):
        ids, is_target = dataset.document(i)
        if as_ids:
            found.append(ids[is_target].tolist())
            continue
        runs = np.split(ids, np.flatnonzero(np.diff(is_target)) + 1)
        text = [tokenizer.decode(run) for run in runs[0 if is_target[0] else 1 :: 2]]
        found.append([part for run in text for part in split_end(run)])
    return found


def split_end(text: str) -> list[str]:
    return [text.removesuffix(END), END] if text.endswith(END) else [text]


@pytest.mark.parametrize("name", LEARNED)
def test_a_shape_is_learned_as_written(name, tmp_path, chat_tokenizer):
    files, targets, fmt, flags = LEARNED[name]
    dataset, tokenizer = dataset_of(tmp_path, files, chat_tokenizer, flags)
    as_ids = isinstance(targets[0][0], int)
    assert learned(dataset, tokenizer, as_ids) == targets
    assert f", {fmt}" in dataset.description


@pytest.mark.parametrize("name", REFUSED)
def test_a_shape_is_refused_in_one_line(name, tmp_path, chat_tokenizer):
    files, line, flags = REFUSED[name]
    with pytest.raises(PlanError) as error:
        dataset_of(tmp_path, files, chat_tokenizer, flags)
    assert line in str(error.value) and "\n" not in str(error.value)


def saved_to_disk(folder):
    import datasets

    datasets.Dataset.from_list([ALPACA, ALPACA]).shuffle(seed=0).select([0]).save_to_disk(str(folder))


def saved_parquet(folder):
    import datasets

    folder.mkdir()
    rows = [{"messages": [ASK, SAY], "id": 3}, {"messages": [ASK, {**SAY, "weight": 1}], "id": None}]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))


@pytest.mark.parametrize(("make", "targets"), [(saved_to_disk, [["5", END]]), (saved_parquet, [["Yo.", END]] * 2)])
def test_what_datasets_writes_is_learned_as_written(make, targets, tmp_path, chat_tokenizer):
    make(tmp_path / "saved")
    raw = read_rows(str(tmp_path / "saved"))
    dataset = tokenize(raw, "auto", chat_tokenizer, 512)
    assert learned(dataset, chat_tokenizer, False) == targets
    shutil.rmtree(tmp_path / "saved")


def test_columns_and_fields_that_nothing_uses_are_counted(tmp_path, chat_tokenizer):
    rows = [{"messages": [{**ASK, "mood": "good"}, SAY], "id": i, "source": "x" if i else None} for i in range(3)]
    dataset, _ = dataset_of(tmp_path, {"a.jsonl": lines(*rows, {"question": "2?", "answer": 2})}, chat_tokenizer, {})
    assert dataset.notices == (
        "columns not used, with their number of rows: 'id' (3), 'source' (2)",
        "field 'answer': int converted to text: 1 x",
        "message field 'mood' is not read by the chat template: 3 x",
    )


def test_a_message_that_the_template_leaves_out_is_counted(tmp_path, chat_tokenizer):
    template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    template = template.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")
    rows = {"messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]}
    dataset, _ = dataset_of(tmp_path, {"a.jsonl": lines(rows)}, chat_tokenizer, {"template": template})
    assert dataset.notices == ("a message of system is altered or left out by the chat template: 1 x",)


def test_a_column_that_is_named_and_missing_is_refused(tmp_path, chat_tokenizer):
    with pytest.raises(PlanError, match="has no column 'q' that --columns names, it has prompt, completion"):
        dataset_of(
            tmp_path, {"a.jsonl": lines({"prompt": "a", "completion": "b"})}, chat_tokenizer, {"columns": "prompt=q"}
        )


def test_a_column_that_some_of_the_datasets_lack_is_read_where_it_is(tmp_path):
    (tmp_path / "asked.jsonl").write_bytes(lines({"q": "a", "completion": "b"}))
    (tmp_path / "scored.jsonl").write_bytes(lines({"prompt": "c", "completion": "d"}))
    named = TrainConfig(dataset=str(tmp_path / "asked.jsonl"), score_dataset=str(tmp_path / "scored.jsonl"))
    found = read_datasets(Parts(replace(named, columns="prompt=q")).data)
    assert [read.row(read.raw.sources[0]).columns["prompt"] for (read,) in found.values()] == ["q", "prompt"]
    with pytest.raises(PlanError, match="asked.* and .*scored.* has no column 'reply' that .* it has q, completion,"):
        read_datasets(Parts(replace(named, columns="prompt=q,output=reply")).data)
    with pytest.raises(PlanError, match="scored.jsonl.*: has no column 'q'"):
        own = {"name": named.score_dataset, "columns": {"prompt": "q"}}
        read_datasets(Parts(replace(named, columns="prompt=q", score_dataset=own)).data)


def test_parts_of_a_split_share_no_row_and_leave_none(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(*({"question": f"q{i}", "answer": "a"} for i in range(40))))
    config = TrainConfig(dataset=f"{file}@train[:75%]", validation_dataset=f"{file}@train[75%:]")
    found = read_datasets(Parts(config).data)
    asked = {use: [row["question"] for row in read.raw.rows] for use, (read,) in found.items()}
    assert asked == {"train": [f"q{i}" for i in range(30)], "validation": [f"q{i}" for i in range(30, 40)]}
    few = read_datasets(Parts(replace(config, dataset=f"{file}@train[10:20]", dataset_samples=3)).data)
    assert [row["question"] for row in few["train"][0].raw.rows] == ["q10", "q11", "q12"]
    with pytest.raises(PlanError, match=r"@train\[:1%\]: is none of 40 rows"):
        read_datasets(Parts(replace(config, dataset=f"{file}@train[:1%]")).data)
    with pytest.raises(PlanError, match="a file has no splits"):
        read_datasets(Parts(replace(config, dataset=f"{file}@test[:10%]")).data)
