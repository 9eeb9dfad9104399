"""Tiny tokenizers, trained here and read back from a folder as a model's are."""

import pytest

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
        tokenizer_object=tokenizer,
        **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"} | settings,
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
