"""Attention by kernels that take documents' bounds: through a reference of their signature, on meta; their trial."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.collate import microbatches
from finetune.distributed.env import RankEnv
from finetune.errors import PlanError
from finetune.parts.attention import AttentionPlan
from finetune.parts.parallel_dims import ParallelDims
from finetune.torch_engine import checks
from finetune.torch_engine.attention import per_document, varlen
from finetune.torch_engine.attention.varlen import Attention, Kernel, trial
from finetune.torch_engine.device import prepare_attention
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from tests.support import cases, ranks, ring_cases, tiny, varlen_reference
from tests.support.cases import Case
from tests.support.engines import CPU, ROWS, assert_same, engine, gradients

META = torch.device("meta")
AUTO = AttentionPlan("auto", ("flash-attention 3", "flash-attention 4", "varlen", "flash-attention 2"))
# Every layer of these; of Gemma 2, with its softcap, and GPT-OSS, with its sinks, none.
TAKEN = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "gpt_neox", "mixtral", "qwen3_moe", "olmo2")
TAKEN += ("granite", "cohere")


@pytest.mark.parametrize("architecture", [*TAKEN, "gemma2", "gpt_oss"])
def test_a_kernel_that_takes_bounds_gives_the_losses_and_gradients_of_groups(architecture):
    """fp32 products in another order: as close as two ways to compute them are."""
    built = engine(architecture)
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)
    wanted = gradients(built, parts)
    built.forward.attention = varlen_reference.attention()
    found = gradients(built, parts)
    assert_same(found, wanted, 2e-6)
    losses = [sum(built.forward.nll(batch).item() for batch in parts)]
    used = built.forward.attention.used()
    built.forward.attention = Attention()
    losses.append(sum(built.forward.nll(batch).item() for batch in parts))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert used[0] == ("flash" if architecture in TAKEN else "groups"), used


@pytest.mark.parametrize("window", [None, 1, 4, 24])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_outputs_and_gradients_are_those_of_groups(window, kv):
    torch.manual_seed(0)
    lengths, size = (1, 30, 7, 30, 12), 8
    q, k, v = (torch.randn(1, heads, sum(lengths), size, requires_grad=True) for heads in (4, kv, kv))
    positions = torch.cat([torch.arange(n) for n in lengths])
    results = []
    for attention in (None, varlen_reference.attention(), varlen_reference.attention(varlen.in_products)):
        documents = per_document.documents_of(positions, CPU, attention)
        out, _ = per_document.document_attention(None, q, k, v, None, sliding_window=window, documents=documents)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    for found in results[1:]:
        for mine, right in zip(found, results[0], strict=True):
            assert (mine - right).abs().max() <= 1e-6 * max(1.0, right.abs().max())


def in_the_form_of_flash_attn_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
):
    """The reference under the arguments of flash-attn-4's function, in its order."""
    assert qv is None and causal and all(limit is None or limit >= 0 for limit in window_size)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = tuple(-1 if limit is None else limit for limit in window_size)
    options = {"scale": softmax_scale, "window_size": window, "enable_gqa": True}
    return varlen_reference.varlen_attn(q, k, v, *bounds, **options), torch.zeros(1)


@pytest.mark.parametrize("windowed", [False, True])
def test_arguments_of_flash_attention_4_pass_its_trial(windowed):
    kernel = partial(varlen._flash, in_the_form_of_flash_attn_4, whole=None)
    assert trial(lambda: kernel, CPU, torch.float32, 64, 2, windowed) is None


# ---- what a GPU's branch calls, on meta


class Calls(TorchDispatchMode):
    """How often each operation ran, and the windows of varlen calls."""

    def __init__(self):
        super().__init__()
        self.counts, self.windows = Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name] += 1
        if func.overloadpacket._qualified_op_name == "torch_attn::_varlen_attn":
            self.windows.add((tuple(args[9]), args[7]))
        return func(*args, **(kwargs or {}))


def on_meta(architecture: str, lengths, dtype=torch.bfloat16, attention=None, **sizes) -> Calls:
    """Forward and backward of a model with trainable weights on documents of these lengths."""
    model = tiny.build(architecture, **sizes).to(META, dtype).train()
    per_document.register()
    model.set_attn_implementation(per_document.NAME)
    inputs = checks.packed_inputs([torch.arange(n) for n in lengths], META, attention=attention or Attention(AUTO))
    with Calls() as calls:
        model(**inputs).logits.float().sum().backward()
    return calls


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "qwen3"])
def test_on_a_gpu_each_layer_is_one_kernel_forward_and_one_backward(architecture):
    calls = on_meta(architecture, (40, 3, 17, 40))
    assert calls.counts["torch_attn::_varlen_attn"] == calls.counts["torch_attn::_varlen_attn_backward"] == 2
    assert not any("scaled_dot_product" in name for name in calls.counts)
    wanted = {"mistral": {((7, 0), False)}, "gemma3": {((7, 0), False), ((-1, 0), True)}}
    assert calls.windows <= wanted.get(architecture, {((-1, 0), True)})


def test_no_operation_of_it_depends_on_how_many_documents_there_are():
    one, several = (on_meta("llama", lengths).counts for lengths in ((100,), (40, 3, 17, 40)))
    assert one == several
    groups = [on_meta("llama", lengths, torch.float32).counts for lengths in ((100,), (40, 3, 17, 40))]
    assert groups[0] != groups[1]  # a gather and a product per group, in fp32


class Fused(TorchFunctionMode):
    """Arguments of every call of SDPA."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((*(x.shape[1] for x in args[:3]), kwargs["attn_mask"] is not None, kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_groups_on_a_gpu_never_ask_sdpa_for_what_only_its_math_kernel_does(dtype):
    """Fewer key/value heads under a mask, or in fp32: the math kernel keeps every score."""
    with Fused() as fused:
        on_meta("gemma3", (40, 3, 17), dtype, Attention())
    assert len(fused.calls) == 2 * 3 and {masked for *_, masked, _ in fused.calls} == {True, False}
    for queries, keys, values, masked, grouped in fused.calls:
        assert keys == values == (2 if dtype == torch.bfloat16 and not masked else queries)
        assert grouped == (keys != queries)


def test_a_gpus_sdpa_makes_no_plan_per_shape():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        prepare_attention(META)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# ---- the trial


def off_by_one_window(*args, window_size, **options):
    left, right = window_size
    return varlen_reference.varlen_attn(*args, window_size=(left + 1 if left >= 0 else 30, right), **options)


def without_bounds(query, key, value, bounds, _, *longest, **options):
    row = torch.tensor([0, len(query)], dtype=torch.int32)
    return varlen_reference.varlen_attn(query, key, value, row, row, len(query), len(query), **options)


def without_scale(*args, scale, **options):
    return varlen_reference.varlen_attn(*args, **options, scale=1.1 * scale)


def without_a_gradient(query, key, value, *args, **options):
    return varlen_reference.varlen_attn(query, key.detach() + 0 * key, value, *args, **options)


def not_finite(*args, **options):
    return varlen_reference.varlen_attn(*args, **options) / 0


def not_here(*args, **options):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    "wrong", [off_by_one_window, without_bounds, without_scale, without_a_gradient, not_finite, not_here]
)
def test_a_kernel_that_is_wrong_is_not_used(wrong, windowed, dtype):
    right = trial(lambda: varlen_reference.varlen_attn, CPU, dtype, 64, 2, windowed)
    found = trial(lambda: wrong, CPU, dtype, 64, 2, windowed)
    assert right is None and ("off by" in found or "only supports" in found), found


def test_a_trial_within_a_recomputed_layer_leaves_its_saved_tensors_alone():
    """A layer's first forward tries the kernel, its recomputation does not: checkpointing counts what each saves."""
    x = torch.randn(3, requires_grad=True)

    def load():
        return varlen_reference.varlen_attn

    def layer(x):
        assert trial(load, CPU, torch.bfloat16, 16, 1, False) is None
        return x.sin()

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_groups_take_what_kernels_lack_and_a_word_that_names_one_ends_the_run():
    auto = Attention(AUTO)
    how = per_document.scoring_of(torch.empty(1, 4, 3, 16))
    q, k = torch.empty(1, 4, 3, 16), torch.empty(1, 2, 3, 16)
    assert auto.kernel(q, k, k, how) is None
    assert auto.used() == ("groups", auto.used()[1]) and "not in float32" in auto.used()[1]
    required = Attention(AttentionPlan("varlen", ("varlen",), required=True))
    half = [x.to(torch.bfloat16) for x in (q, k, k)]
    for inputs, changes, why in (
        ((q, k, k), {}, "16 bits"),
        (half, {"softcap": 30.0}, "softcap"),
        ((half[0], half[1], half[2][..., :8]), {}, "values 8"),
        ([torch.cat([x] * 17, -1) for x in half], {}, "heads of 272"),
        ([x[..., :12] for x in half], {}, "multiples of 8"),
    ):
        with pytest.raises(PlanError, match=f"--attention varlen.*{why}"):
            required.kernel(*inputs, how._replace(**changes))


def test_a_model_that_cannot_have_the_kernel_that_was_asked_for_ends_before_the_first_step():
    built = engine("gemma2")
    plan = AttentionPlan("varlen", ("reference",), required=True)
    built.forward.attention = Attention(plan, {"reference": Kernel(lambda: None, varlen_reference.DTYPES, True)})
    with pytest.raises(PlanError, match="--attention varlen: not for this model here .softcap"):
        built.verify("auto")


# ---- context parallelism


def context_losses(rank: int, size: int) -> list:
    """A step's loss and norm on `size` ranks of context parallelism, without and with a kernel."""
    found = []
    for attention in (Attention(), ring_cases.reference_attention()):
        groups = ProcessGroups.of(RankEnv(rank, size, rank, size), ParallelDims(cp=size), ranks.compute_device())
        built = cases.build(Case("lora"), groups, "mistral")
        built.forward.attention = attention
        result = built.train_step(cases.rank_batches(built, cases.rows_of_step(0)), 1e-3)
        found.append([result.loss, result.grad_norm, *([attention.used()[0]] if attention.found else [])])
    return found


@pytest.mark.slow
def test_context_parallel_ranks_attend_by_the_same_kernels(tmp_path):
    for plain, by_kernel in ranks.run(2, context_losses, tmp_path):
        assert by_kernel[:2] == pytest.approx(plain, rel=2e-6) and by_kernel[2] == "flash"
