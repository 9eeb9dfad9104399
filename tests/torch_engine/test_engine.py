import copy
import dataclasses

import numpy as np
import pytest
import torch

import quantization_wrapper
from finetune.config import OPTIMIZERS, TrainConfig
from finetune.data.collate import microbatches
from finetune.engine import IGNORE_INDEX
from finetune.errors import NonFiniteError, OutOfMemoryError, PlanError
from finetune.torch_engine import attention, loss
from finetune.torch_engine.checks import check_causal, no_autocast
from finetune.torch_engine.engine import TorchEngine, dense_weights
from finetune.torch_engine.load import WEIGHT_DTYPES
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.layers import layers
from finetune.torch_engine.lora.targets import linear_names, target_names
from tests.support import tiny

CPU = torch.device("cpu")
ROWS = tiny.dataset()


def engine(architecture="llama", layout="auto", train_type="lora", model=None, **changes):
    settings = dataclasses.replace(TrainConfig(), precision="fp32", lr=1e-2, train_type=train_type, **changes)
    model = model or tiny.build(architecture)
    if train_type == "full":
        model.requires_grad_(True)
    else:
        model.requires_grad_(False)
        if train_type == "qlora":
            config = quantization_wrapper.config_for("nf4")
            quantization_wrapper.quantize_model(model, config, linear_names(model))
        add_adapters(model, target_names(model, "all"), settings)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in layers(model).values():
                layer.lora_B.normal_(std=0.05, generator=generator)
    built = TorchEngine(model, settings, CPU)
    built.verify(layout)
    return built


def batches(layout="padding_free", batch_size=8, tokens=10**6, rows=range(8)):
    return microbatches(ROWS, rows, layout, batch_size, tokens, pad_id=0)


def gradients(built, parts):
    """{name: gradient} of one step's loss, by the engine's own loop but without the optimizer."""
    targets = sum(b.num_targets for b in parts)
    for batch in parts:
        (built.nll(batch) / targets).backward()
    found = {n: p.grad.clone() for n, p in built.named.items() if p.grad is not None}
    built.optimizer.zero_grad()
    return found


def assert_same(mine, theirs, tolerance=1e-6):
    assert mine.keys() == theirs.keys()
    for name in mine:
        size = theirs[name].abs().max()
        assert (mine[name] - theirs[name]).abs().max() <= tolerance * max(size, 1e-3), name


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_causal_model_passes_its_proof_in_every_type(architecture, dtype):
    check_causal(tiny.build(architecture).to(dtype), no_autocast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "qwen3_moe"])
def test_the_same_model_with_an_open_mask_fails_it_in_every_type(architecture, dtype):
    model = tiny.build(architecture).to(dtype)

    def open_mask(module, args, kwargs):
        length = kwargs["input_ids"].shape[1]
        return args, kwargs | {"attention_mask": torch.zeros(1, 1, length, length, dtype=dtype)}

    model.register_forward_pre_hook(open_mask, with_kwargs=True)
    with pytest.raises(PlanError, match="lets a token see those after it"):
        check_causal(model, no_autocast)


@pytest.mark.parametrize("architecture", [a for a in tiny.ARCHITECTURES if a not in tiny.PADDED])
def test_flat_is_padded_is_each_document_alone(architecture):
    flat = engine(architecture)
    assert flat.layout == "padding_free"
    padded = engine(architecture, layout="padded")
    results = {
        "padding_free": (flat, batches("padding_free")),
        "padded": (padded, batches("padded")),
        "alone": (padded, batches("padded", batch_size=1)),
    }
    losses = {k: e.evaluate(b) for k, (e, b) in results.items()}
    assert losses["padding_free"][1] == losses["padded"][1] == losses["alone"][1]
    for name in ("padded", "alone"):
        assert losses["padding_free"][0] == pytest.approx(losses[name][0], rel=1e-6)
    grads = {k: gradients(e, b) for k, (e, b) in results.items()}
    # 1e-5: the sum over a document's tokens is taken in another order in each layout.
    assert_same(grads["padding_free"], grads["alone"], 1e-5)
    assert_same(grads["padded"], grads["alone"], 1e-5)


@pytest.mark.parametrize("architecture", tiny.PADDED)
def test_a_model_whose_attention_cannot_be_bounded_gets_padded_rows_and_the_reason(architecture):
    built = engine(architecture)
    assert built.layout == "padded"
    result = built.train_step(batches("padded"), 1e-2)
    assert np.isfinite(result.nll)
    with pytest.raises(PlanError, match="--batch_layout flat: a document flat"):
        engine(architecture, layout="padding_free")


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_accumulated_is_one_batch_and_any_cut_in_tokens(train_type, layout):
    built = engine(train_type=train_type, layout=layout)
    whole = gradients(built, batches(layout))
    for batch_size, tokens in ((1, 10**6), (2, 10**6), (8, 60), (8, 1)):
        assert_same(gradients(built, batches(layout, batch_size, tokens)), whole)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
def test_checkpointing_on_is_off(train_type, reentrant):
    plain = engine(train_type=train_type)
    recomputing = engine(train_type=train_type, use_gradient_checkpointing="true", reentrant_checkpointing=reentrant)
    plain.model.train(), recomputing.model.train()
    saved = {}
    for built in (plain, recomputing):
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            built.nll(batches()[0])
        saved[built] = count
    assert saved[recomputing] < 0.5 * saved[plain]
    assert_same(gradients(recomputing, batches()), gradients(plain, batches()), 1e-6)


def test_a_layers_loss_with_softcap_scale_and_bias_is_cross_entropy():
    torch.manual_seed(0)
    hidden, labels = torch.randn(300, 16, requires_grad=True), torch.randint(0, 50, (300,))
    linear = torch.nn.Linear(16, 50)
    for scale, softcap in ((1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)):
        head = loss.Head(linear, scale, softcap)
        mine = head.nll(hidden, labels)
        theirs = torch.nn.functional.cross_entropy(head.logits(hidden), labels, reduction="sum")
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)
        wanted = (hidden, linear.weight, linear.bias)
        for a, b in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(theirs, wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of 300 rows in another order


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere"])
def test_soft_caps_and_scales_of_the_config_are_in_the_chunked_head(architecture):
    assert engine(architecture).head is not None


def test_a_head_that_does_more_than_its_config_says_is_left_to_the_model(monkeypatch):
    model = tiny.build()
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) * 1.5
    built = engine(model=model)
    assert built.head is None and built.layout == "padding_free"
    nll, count = built.evaluate(batches())
    assert (
        nll == pytest.approx(built.evaluate(batches("padding_free", 1))[0], rel=1e-6)
        and count == ROWS.counts["targets"]
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_every_optimizer_learns_and_takes_up_its_saved_state_bitwise(optimizer, train_type):
    lr = {"sgd": 0.5, "adadelta": 3.0 if train_type == "full" else 30.0}.get(optimizer, 5e-3)
    first = engine(train_type=train_type, optimizer=optimizer)
    losses = [first.train_step(batches(), lr).nll for _ in range(6)]
    assert losses[-1] < losses[0]
    second = engine(train_type=train_type, optimizer=optimizer)
    tensors, values = first.optimizer_state()
    second.load_state(first.trainable_state(), tensors, values, first.rng_state())
    for _ in range(2):
        assert first.train_step(batches(), lr).nll == second.train_step(batches(), lr).nll
    for name, array in first.trainable_state().items():
        np.testing.assert_array_equal(array, second.trainable_state()[name])


def test_dropout_is_taken_up_where_it_was_only_with_the_random_state():
    first = engine(lora_dropout=0.2)
    first.train_step(batches(), 1e-2)
    state = copy.deepcopy((first.trainable_state(), *first.optimizer_state(), first.rng_state()))
    wanted = first.train_step(batches(), 1e-2).nll
    for keep, same in ((True, True), (False, False)):
        second = engine(lora_dropout=0.2)
        rng = state[3] if keep else second.rng_state()
        second.load_state(*state[:3], rng)
        assert (second.train_step(batches(), 1e-2).nll == wanted) is same


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast", "bf16_buffers_autocast", "fp16", "fp16_autocast"])
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_every_precision_trains_with_fp32_adapters_near_the_fp32_loss(precision, train_type):
    exact = engine(train_type=train_type)
    model = tiny.build()
    model.to(WEIGHT_DTYPES[precision])
    built = engine(train_type=train_type, model=model)
    built = TorchEngine(built.model, dataclasses.replace(built.settings, precision=precision), CPU)
    built.verify("auto")
    assert built.layout == "padding_free"
    assert all(p.dtype == torch.float32 for p in built.named.values())
    frozen = {p.dtype for p in built.model.parameters() if not p.requires_grad and p.is_floating_point()}
    assert frozen == {WEIGHT_DTYPES[precision]}
    one, two = (e.train_step(batches(), 1e-2) for e in (exact, built))
    # bf16 keeps 8 bits of a number, fp16 11: a mean over some 70 targets is within 1 % of the exact one.
    assert two.nll == pytest.approx(one.nll, rel=1e-2) and not two.skipped
    assert all(p.grad is None for p in built.named.values())
    assert built.train_step(batches(), 1e-2).nll < two.nll


def test_fp16_lowers_its_scale_on_overflow_and_leaves_the_weights():
    model = tiny.build().to(torch.float16)
    built = engine(model=model)
    built = TorchEngine(built.model, dataclasses.replace(built.settings, precision="fp16"), CPU)
    built.verify("auto")
    built.scale = 2.0**40
    before = built.trainable_state()
    result = built.train_step(batches(), 1e-2)
    assert result.skipped and built.scale == 2.0**39
    for name, array in before.items():
        np.testing.assert_array_equal(array, built.trainable_state()[name])


def test_a_loss_that_is_not_finite_stops_before_the_weights_change():
    built = engine()
    with torch.no_grad():
        next(iter(built.named.values())).fill_(float("nan"))
    before = built.trainable_state()
    with pytest.raises(NonFiniteError, match="loss is nan"):
        built.train_step(batches(), 1e-2)
    for name, array in before.items():
        np.testing.assert_array_equal(array, built.trainable_state()[name])


def test_running_out_of_memory_names_what_to_lower():
    built = engine()
    built.model.model.register_forward_pre_hook(lambda *ignored: torch.empty(2**50) and None)  # 4 PiB: torch says no
    with pytest.raises(OutOfMemoryError, match="--microbatch_tokens .*--use_gradient_checkpointing .*--low_memory"):
        built.train_step(batches(), 1e-2)


def test_clipping_scales_the_whole_gradient_and_reports_its_norm_before():
    free, clipped = engine(apply_gradient_clipping=False), engine(grad_norm=1e-3)
    one, two = free.train_step(batches(), 1e-2), clipped.train_step(batches(), 1e-2)
    assert one.grad_norm == two.grad_norm > 1e-3


def test_loraplus_moves_b_faster():
    plain, plus = engine(optimizer="sgd"), engine(optimizer="sgd", loraplus_lr_ratio=16.0)
    start = {n: p.detach().clone() for n, p in plain.named.items()}
    for built in (plain, plus):
        built.train_step(batches(), 1e-3)
    for name, before in start.items():
        moved = [(e.named[name] - before).norm().item() for e in (plain, plus)]
        assert moved[1] == pytest.approx(moved[0] * (16 if name.endswith("lora_B") else 1), rel=1e-3)


def test_generation_is_the_argmax_token_by_token_for_prompts_of_any_length():
    built = engine(train_type="qlora")
    prompts = [ROWS.document(i)[0].tolist() for i in (0, 2, 5)]
    together = built.generate(prompts, 8, eos_ids={127})
    plain = engine(train_type="qlora", layout="padded")
    for prompt, new in zip(prompts, together, strict=True):
        ids = list(prompt)
        for token in new:
            logits = plain.model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert logits.argmax() == token
            ids.append(token)
    assert built.layout == "padding_free" and built.model.config._attn_implementation == attention.NAME
    stopped = built.generate(prompts, 8, eos_ids={127}, stop_row=lambda row, ids: row == 1 and len(ids) >= 2)
    assert stopped[0] == together[0] and stopped[1] == together[1][:2]


@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_frozen_weights_are_the_same_bits_after_training(train_type):
    built = engine(train_type=train_type)
    before = tiny.base_tensors_digest(built.model)
    for _ in range(3):
        built.train_step(batches(), 1e-1)
    built.generate([[3, 4, 5]], 4, {127})
    assert tiny.base_tensors_digest(built.model) == before


def test_dense_weights_are_kept_only_inside():
    built = engine(train_type="qlora")
    layer = next(iter(layers(built.model).values()))
    x = torch.randn(3, layer.in_features)
    apart = layer(x)
    with dense_weights(built.model):
        assert layer.merged is not None
        torch.testing.assert_close(layer(x), apart, rtol=1e-5, atol=1e-6)
    assert layer.merged is None and layer.base.cached is None
    built.model.to(torch.bfloat16)  # 16 bits would round the adapter away
    with dense_weights(built.model):
        assert layer.merged is None and layer.base.cached is not None
    assert layer.base.cached is None


def test_memory_is_counted_by_item():
    built = engine(train_type="full", optimizer="adamw")
    built.train_step(batches(), 1e-3)
    items = built.memory().items
    weights = sum(p.numel() for p in built.model.parameters()) * 4
    buffers = sum(b.nbytes for b in built.model.buffers())
    assert items["trainable"] == weights and items["base"] == buffers
    # AdamW holds two moments a weight and a step counter of 4 bytes a tensor.
    assert items["optimizer"] == 2 * weights + 4 * len(built.named)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(1, 1), (7,), (300, 5, 17), (16, 16, 16), (2, 300, 290)])
def test_document_attention_is_plain_attention_in_each_document(lengths, window):
    torch.manual_seed(0)
    total, heads, kv, size = sum(lengths), 4, 2, 8
    q, k, v = (torch.randn(1, h, total, size, requires_grad=True) for h in (heads, kv, kv))
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = attention.documents_of(positions, CPU)
    out, _ = attention.document_attention(None, q, k, v, None, sliding_window=window, documents=documents)
    again, _ = attention.document_attention(None, q, k, v, None, sliding_window=window, position_ids=positions[None])
    assert torch.equal(out, again)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (number[:, None] == number) & (positions[:, None] >= positions)
    if window:
        seen &= positions[:, None] - positions < window
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_labels_are_the_next_token_and_never_cross_a_document():
    batch = batches()[0]
    at = batch.labels_BS[0] != IGNORE_INDEX
    following = np.r_[batch.input_ids_BS[0, 1:], -1]
    np.testing.assert_array_equal(batch.labels_BS[0][at], following[at])
    assert (batch.document_ids_BS[0][:-1][at[:-1]] == batch.document_ids_BS[0][1:][at[:-1]]).all()
