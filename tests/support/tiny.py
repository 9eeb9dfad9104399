"""Tiny random models of many architectures, built from configs, and their tokenizers and datasets: no download."""

import torch
import transformers
from packaging.version import Version

COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
OLD = dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "mistral": ("MistralConfig", dict(sliding_window=8)),
    "gemma2": ("Gemma2Config", dict(head_dim=16, sliding_window=8)),
    "gemma3": ("Gemma3TextConfig", dict(head_dim=16, sliding_window=8)),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", OLD),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "gpt_oss": ("GptOssConfig", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", dict(logits_scaling=8.0)),
    "cohere": ("CohereConfig", dict(logit_scale=0.25)),
    "falcon": ("FalconConfig", dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)),
}
OTHERS = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    ),
    "stablelm": ("StableLmConfig", {}),
    "llama_uneven": ("LlamaConfig", dict(vocab_size=129)),  # which no number of ranks in the tests divides
    "llama_uneven_tied": ("LlamaConfig", dict(vocab_size=129, tie_word_embeddings=True)),
}  # built by name too, and not tested as an architecture of its own
# The architectures whose attention transformers does not let us register, before 5.24.
PADDED = ("falcon",) if Version(transformers.__version__) < Version("5.24") else ()


def build(architecture: str = "llama", seed: int = 0, **changes):
    """A tiny random model in fp32 on the CPU, in evaluation mode."""
    name, extra = (ARCHITECTURES | OTHERS)[architecture]
    base = {} if architecture in ("gpt2", "falcon") else COMMON
    config = getattr(transformers, name)(**{**base, **extra, **changes})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def dataset(lengths=(5, 17, 30, 9, 40, 3, 22, 11), vocab=128, seed=0):
    """Random documents of these lengths; about half of each is targets, never none."""
    import numpy as np

    from finetune.data.tokens.tokenize import TokenizedDataset

    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = rng.integers(3, vocab, offsets[-1]).astype(np.int32)
    is_target = np.concatenate([np.arange(n) >= max(1, int(n * rng.uniform(0, 0.9))) for n in lengths])
    counts = dict(
        rows=len(lengths),
        tokens=len(tokens),
        targets=int(is_target.sum()),
        skipped=0,
        dropped_empty=0,
        prompt_truncated=0,
        answer_truncated=0,
    )
    return TokenizedDataset(tokens, is_target, offsets, tuple(f"row {i}" for i in range(len(lengths))), counts)


def base_tensors_digest(model) -> str:
    """sha256 over every frozen tensor, names included: equal before and after training, or the base was touched."""
    import hashlib

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


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
    """A byte-level BPE like GPT-2's and Llama 3's, with a BOS if `bos`."""
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
