"""Tokenizers of SentencePiece models, trained here: tokenizer.model, and the tokenizer.json made of it."""

import sentencepiece

TEXT = [f"the {i} capital of France is Paris, not {i * 7}; def add(a, b): return a + b" for i in range(300)]


def write_sentencepiece(folder, tokenizer_class, prefix: bool = True, **settings) -> int:
    """Writes them as models of `tokenizer_class` are published; the number of tokens. `prefix`: a space before a text,
    as Llama's has and Gemma's has not.
    """
    text = folder / "text.txt"
    text.write_text("\n".join(TEXT))
    how = dict(input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=400, hard_vocab_limit=False)
    how |= dict(model_type="bpe", byte_fallback=True, split_digits=True, normalization_rule_name="identity")
    sentencepiece.SentencePieceTrainer.train(
        **how, add_dummy_prefix=prefix, remove_extra_whitespaces=False, minloglevel=2
    )
    text.unlink()
    (folder / "tokenizer.vocab").unlink()
    tokenizer = tokenizer_class.from_pretrained(folder, **settings)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)
