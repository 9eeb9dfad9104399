"""Tiny tokenizers and models, made here and read back from a folder as real ones are."""

import json
import os

import pytest

# Tiny models gain nothing from threads, and threads that meet other load on the machine cost seconds a test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CORPUS = [
    "The capital of France is Paris. What is 2 plus 3? It is 5.",
    "def add(a, b):\n    return a + b\n\n    # spaces",
    "### Human: hello ### Assistant: hi there",
    "system user assistant \n\n user\nhello\nassistant\nhi",
    "naïve café 日本語 emoji 🙂",
] * 4
SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(folder, bos=True, vocab_size=400, **settings):
    """A byte-level BPE like GPT-2's and Llama 3's, with a BOS where asked."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if bos:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, template])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"} | settings
    )
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def make_tokenizer():
    """The maker itself, for a test that needs another template."""
    return train_tokenizer


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory):
    """No chat template; BOS added; pad is the eos."""
    return train_tokenizer(tmp_path_factory.mktemp("plain_tokenizer"))


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    """ChatML with <|im_end|> as a token of its own; eos is </s>."""
    return train_tokenizer(tmp_path_factory.mktemp("chat_tokenizer"), bos=False, chat_template=CHATML)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a tiny random Llama and a chat tokenizer, as a user would have it."""
    from tests.support import tiny

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_tokenizer(folder, bos=False, chat_template=CHATML)
    model = tiny.build("llama", vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=None, bos_token_id=1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    """24 prompt/completion rows of uneven length."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}" + "." * (i % 5)} for i in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
