"""Rows to tokens and targets."""

import sys

import numpy as np
import pytest

from finetune.data.reading.rows import RawDataset
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.overlong import truncate
from finetune.data.tokens.tokenize import generation_examples, render_sample, tokenize
from finetune.errors import PlanError
from tests.support.rows import ROWS, jsonl, write


def test_targets_are_the_answer_and_its_end(raw, plain_tokenizer):
    dataset = tokenize(raw, "auto", plain_tokenizer, 512)
    for i, row in enumerate(ROWS):
        ids, is_target = dataset.document(i)
        assert ids[0] == plain_tokenizer.bos_token_id and (ids == plain_tokenizer.bos_token_id).sum() == 1
        assert plain_tokenizer.decode(ids[1:]) == row["prompt"] + row["completion"] + "</s>"
        # The prompt ends in a space, which byte-level tokens carry at their front, with the answer's first letter.
        assert plain_tokenizer.decode(ids[is_target]) == " " + row["completion"] + "</s>"
    assert dataset.counts["rows"] == 40 and dataset.counts["targets"] == dataset.is_target.sum()
    assert dataset.sources == tuple(raw.sources)


def test_tokens_of_spaces_only_are_targets(tmp_path, plain_tokenizer):
    code = "def add(a, b):\n        return a"
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [{"prompt": "code:\n", "completion": code}]))
    ids, is_target = tokenize(raw, "auto", plain_tokenizer, 512).document(0)
    assert plain_tokenizer.decode(ids[is_target]) == code + "</s>"
    assert is_target[np.flatnonzero(is_target)[0] :].all()


def test_multibyte_characters_are_targets_in_full(tmp_path, plain_tokenizer):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [{"prompt": "x: 日:", "completion": "語🙂é𝕏"}]))
    ids, is_target = tokenize(raw, "auto", plain_tokenizer, 512).document(0)
    assert plain_tokenizer.decode(ids[is_target]) == "語🙂é𝕏</s>"


def test_chat_has_one_bos_and_plain_text_is_all_target(tmp_path, make_tokenizer, plain_tokenizer):
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
        "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    raw = read_rows(jsonl(tmp_path / "c.jsonl", [{"messages": messages}]))
    dataset = tokenize(raw, "auto", tokenizer, 512)
    assert render_sample(dataset, 0, tokenizer, color=False) == "<s>[user]q[assistant]⟦a</s>⟧"
    raw = read_rows(write(tmp_path / "a.txt", "hello there"))
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
def test_truncate_keeps_the_last_answer_of_any_row(bos):
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
    path = write(tmp_path / "a.jsonl", b'{"prompt": "a", "completion": "b"}\nx\n{"prompt": "a", "completion": 3.5}\n')
    with pytest.raises(PlanError, match="a.jsonl:3: field 'completion' is a number"):
        tokenize(read_rows(path, skip_bad_rows=1), "auto", plain_tokenizer, 64)
    dataset = tokenize(read_rows(path, skip_bad_rows=2), "auto", plain_tokenizer, 64)
    assert dataset.counts["skipped"] == 2 and [s.split(":")[1] for s in dataset.skipped] == ["2", "3"]


def test_a_token_outside_the_embedding_is_refused(raw, plain_tokenizer):
    with pytest.raises(
        PlanError,
        match=r"rows.jsonl:1: token id \d+ is out of range for the model's 50 embedding rows. "
        "Use the model's own tokenizer",
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


def test_select_and_digest(raw, plain_tokenizer):
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


@pytest.mark.slow
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


@pytest.mark.parametrize("answer", ["    return x", "  a", "   \r\nb", "\t\tx", "  \n  y", " x", "\n\n  z", "x  "])
@pytest.mark.parametrize("prompt", ["def f(x):\n", "f:", "f: ", "f:\n\n", "\t"])
def test_every_character_of_an_answer_is_in_a_target(plain_tokenizer, prompt, answer):
    """Byte-level tokenizers leave spaces out of a token's offsets, also those after a line break that it has."""
    assert any(token.startswith("\u010a") and token.endswith("\u0120") for token in plain_tokenizer.get_vocab())
    raw = RawDataset([{"prompt": prompt, "completion": answer}], ["0"], ("prompt", "completion"), (), "", "rows", 0)
    ids, is_target = tokenize(raw, "auto", plain_tokenizer, 512).document(0)
    learned = plain_tokenizer.decode(ids[is_target])
    assert learned.removesuffix(plain_tokenizer.eos_token).endswith(answer), learned
    assert prompt.startswith(plain_tokenizer.decode(ids[~is_target]).removeprefix(plain_tokenizer.bos_token or ""))
