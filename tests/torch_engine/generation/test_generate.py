"""Greedy generation against the argmax of plain forwards."""

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.torch_engine.attention import per_document
from tests.support.engines import ROWS, engine


def test_generation_is_the_argmax_token_by_token_for_prompts_of_any_length(device):
    built = engine(train_type="qlora", device=device)
    prompts = [ROWS.document(i)[0].tolist() for i in (0, 2, 5)]
    together = built.generate(prompts, 8, eos_ids={127})
    plain = engine(train_type="qlora", layout="padded", device=device)
    for prompt, new in zip(prompts, together, strict=True):
        ids = list(prompt)
        for token in new:
            logits = plain.model(input_ids=torch.tensor([ids], device=device)).logits[0, -1]
            assert logits.argmax() == token
            ids.append(token)
    assert built.layout == "padding_free" and built.model.config._attn_implementation == per_document.NAME
    stopped = built.generate(prompts, 8, eos_ids={127}, stop_row=lambda row, ids: row == 1 and len(ids) >= 2)
    assert stopped[0] == together[0] and stopped[1] == together[1][:2]


def test_the_heads_weights_are_not_copied_for_each_prompt(device):
    built = engine(device=device)
    vocabulary, found = built.model.config.vocab_size, []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if torch.is_tensor(result) and function.__name__.split(".")[0] in ("mm", "addmm", "bmm"):
                found.extend([function.__name__] * (result.shape[-1] == vocabulary))
            return result

    with Products():
        built.generate([[3, 4, 5, 6], [7, 8, 9, 10]], 2, set())
    assert found and "bmm.default" not in found


def test_a_folders_own_generation_settings_do_not_change_greedy(device):
    built = engine(device=device)
    plain = built.generate([[3, 4, 5]], 6, {127})
    own = transformers.GenerationConfig(suppress_tokens=[plain[0][0]], no_repeat_ngram_size=1)
    built.model.generation_config = own
    assert built.generate([[3, 4, 5]], 6, {127}) == plain and built.model.generation_config is own


def test_sampling_draws_what_transformers_draws_from_the_same_seed(device):
    built, ids = engine(device=device), torch.tensor([[3, 4, 5]], device=device)
    options = dict(temperature=0.8, top_k=20, top_p=0.9)
    torch.manual_seed(1)
    drawn = built.generate(ids.tolist(), 8, set(), **options)
    own = built.model.generation_config, built.model.config._attn_implementation
    built.model.generation_config = transformers.GenerationConfig()
    built.model.set_attn_implementation("eager")
    torch.manual_seed(1)
    expected = built.model.generate(input_ids=ids, max_new_tokens=8, do_sample=True, pad_token_id=0, **options)
    built.model.generation_config = own[0]
    built.model.set_attn_implementation(own[1])
    assert drawn == expected[:, 3:].tolist()
