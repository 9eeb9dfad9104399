"""Ends of answers in a result's tokenizer."""

from collections import Counter

from finetune.model_files.ends import with_learned_end
from finetune.model_files.tokenizer import load_tokenizer
from tests.support.tiny import train_tokenizer


def test_a_tokenizer_without_an_end_stays_so_where_nothing_that_is_learned_has_one(tmp_path):
    train_tokenizer(tmp_path, bos=False).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_token = None
    assert with_learned_end(tokenizer, Counter(), tmp_path) is tokenizer
