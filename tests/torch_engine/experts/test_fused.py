"""Experts held as one 3-D parameter: our computation, adapters and quantized weights against transformers and PEFT."""

import dataclasses
import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quantization_wrapper
from finetune.errors import PlanError
from finetune.parts.trains import Adapter
from finetune.torch_engine.experts import fused
from finetune.torch_engine.lora.adapters import add_adapters, attach_adapter
from finetune.torch_engine.lora.init import residual_init
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.lora.peft_format import disk_name
from finetune.torch_engine.lora.targets import target_names
from tests.support import tiny
from tests.support.adapters import IDS, SETTINGS, adapted, write
from tests.support.build import load_model, torch_engine
from tests.support.cells import each_alone
from tests.support.commands import command, finish
from tests.support.devices import tolerance
from tests.support.engines import CPU
from tests.support.planned import settings_of
from tests.support.runs import read_events

ARCHITECTURES = ("mixtral", "qwen3_moe", "gpt_oss")
MORE = {
    "no gate": (
        "NemotronHConfig",
        dict(
            hybrid_override_pattern="E*",
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            head_dim=16,
            n_group=1,
            topk_group=1,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
    "a first layer without": (
        "DeepseekV3Config",
        dict(
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
    ),
    "a shared one": (
        "Qwen2MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    ),
}
UNREACHED = dict(
    num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96, head_dim=16, interleave_moe_layer_step=1
)


def build(architecture):
    if architecture in tiny.ARCHITECTURES:
        return tiny.build(architecture)
    name, extra = MORE[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**tiny.COMMON, **extra)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def quantized(model, method="nf4", double_quant=False):
    config = quantization_wrapper.config_for(method, double_quant=double_quant)
    fused.quantize(model.requires_grad_(False), config, list(fused.reachable(model)))
    return model


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE])
def test_expert_by_expert_is_transformers_own_computation(architecture):
    model = build(architecture)
    with torch.no_grad():
        before = model(IDS).logits
        names = list(fused.reachable(model))
        for name in names:
            fused.wrapped(model, name)
        assert names and torch.equal(model(IDS).logits, before)  # the same products, summed in the same order


@pytest.mark.parametrize(
    ("architecture", "targets"), each_alone([*ARCHITECTURES, *MORE], ["all", "gate_up_proj,up_proj", "down_proj"])
)
def test_peft_reloads_experts_adapters_to_the_same_logits(architecture, targets, tmp_path):
    model = build(architecture)
    have = {n.rpartition(".")[2] for n in target_names(model, "all")}
    wish = targets if targets == "all" else ",".join(t for t in targets.split(",") if t in have)
    model, settings = adapted(model=model, targets=wish, use_rslora=targets == "down_proj", lora_dropout=0.1)
    write(model.eval(), settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(build(architecture), tmp_path / "a").eval()
    with torch.no_grad():
        mine = model(IDS).logits
        # 1e-5: PEFT adds the adapter into the weight, we add its product.
        torch.testing.assert_close(theirs(input_ids=IDS).logits, mine, rtol=1e-5, atol=1e-5)
        other = build(architecture)
        attach_adapter(other, tmp_path / "a")
        assert torch.equal(other(IDS).logits, mine)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_pefts(architecture, tmp_path, device):
    model, settings = adapted(architecture, device=device)
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(build(architecture), tmp_path / "a", is_trainable=True).to(device)
    for m in (model, theirs):
        m(input_ids=IDS.to(device), labels=IDS.to(device)).loss.backward()
    mine = {disk_name(n): p.grad for n, p in adapter_parameters(model).items()}
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(mine[name.replace(".default", "")], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", ["nf4", "nf4 twice", "bnb"])
def test_quantized_experts_are_their_dequantized_weights(architecture, method, device):
    if method == "bnb":
        pytest.importorskip("bitsandbytes")
    model = quantized(build(architecture).to(device), method.split()[0], "twice" in method)
    dense = build(architecture).to(device)
    with torch.no_grad():
        for name, module in fused.reachable(dense).items():
            for weight in fused.weight_names(module):
                held = getattr(model.get_submodule(name).base, weight)
                assert isinstance(held, fused.QuantizedExperts)
                for expert in range(held.num_experts):
                    stored, weight_of = held.of(expert)
                    value = weight_of(stored, torch.float32)
                    getattr(module, weight)[expert] = value.t() if module.is_transposed else value
        difference = (dense(IDS.to(device)).logits - build(architecture).to(device)(IDS.to(device)).logits).abs().max()
        assert 0 < difference < 0.5  # something was quantized
    for m in (model, dense):
        adapted(model=m, device=device)
        m(input_ids=IDS.to(device), labels=IDS.to(device)).loss.backward()
    of_packed, of_dense = model(IDS.to(device)).logits, dense(IDS.to(device)).logits
    # A CPU takes one order of sums for a weight and its transpose; a GPU has a kernel for each.
    torch.testing.assert_close(of_packed, of_dense, rtol=0, atol=0 if device.type == "cpu" else tolerance(device))
    pairs = zip(adapter_parameters(model).values(), adapter_parameters(dense).values(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


class LargestMade(TorchDispatchMode):
    """The number of values of the largest floating tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.is_floating_point() and not tensor._is_view():
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("method", ["nf4", "bnb"])
def test_never_more_than_one_expert_is_dense_and_none_is_saved(method):
    if method == "bnb":
        pytest.importorskip("bitsandbytes")
    model = tiny.build("mixtral", num_local_experts=16, intermediate_size=128)
    model, _ = adapted(model=quantized(model, method))
    one = 2 * 128 * 64
    kept, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in kept:
            saved.append(tensor.numel())
        return tensor

    ids = IDS[:1, :4]
    with LargestMade() as made, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(input_ids=ids, labels=ids).loss.backward()
    assert made.numel <= one and max(saved) <= ids.numel() * 2 * 256 < one


def test_the_weight_of_an_expert_without_tokens_gets_a_gradient_of_zero():
    model, _ = adapted("mixtral")
    module = model.model.layers[0].mlp.experts
    x = torch.randn(3, 64)
    module(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)).sum().backward()
    gradient = module.lora_A.grad.view(4, -1)
    assert gradient[0].any() and not gradient[1:].any()


def run_in(dtype, counts, monkeypatch, kernel_rows):
    """(output, gradient of the input, rows of each product) of Mixtral's experts."""
    monkeypatch.setattr(fused, "ROWS_OF_A_KERNEL", kernel_rows)
    model, _ = adapted("mixtral")
    experts = model.model.layers[0].mlp.experts.to(dtype)
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 64, dtype=dtype, requires_grad=True)
    seen = []
    of_experts = experts.product

    def product(factors, name, expert, rows, bias):
        seen.append(len(rows))
        return of_experts(factors, name, expert, rows, bias)

    monkeypatch.setattr(experts, "product", product)
    out = experts.run(x, counts)
    out.sum().backward()
    return out.detach(), x.grad, seen


def test_on_a_cpu_in_16_bits_an_experts_rows_are_filled_up_to_a_multiple_with_the_same_results(monkeypatch):
    counts = [5, 0, 33, 64]
    out, grad, rows = run_in(torch.bfloat16, counts, monkeypatch, 32)
    alone, of_alone, rows_alone = run_in(torch.bfloat16, counts, monkeypatch, 1)
    assert rows == [32, 32, 64, 64, 64, 64] and rows_alone == [5, 5, 33, 33, 64, 64]
    # Rounding to bf16 at most: another number of rows may divide a sum at another place.
    torch.testing.assert_close(out, alone, rtol=0.01, atol=0.01 * alone.abs().max().item())
    torch.testing.assert_close(grad, of_alone, rtol=0.01, atol=0.01 * of_alone.abs().max().item())


def test_in_fp32_an_experts_rows_are_its_tokens(monkeypatch):
    assert run_in(torch.float32, [5, 0, 33, 64], monkeypatch, 32)[2] == [5, 5, 33, 33, 64, 64]


def test_dora_on_experts_is_refused_if_named_and_left_out_of_all():
    model = tiny.build("mixtral")
    assert not any("experts" in n for n in target_names(model, "all", use_dora=True))
    with pytest.raises(PlanError, match="PEFT has no DoRA for fused experts"):
        target_names(model, "q_proj,down_proj", use_dora=True)


def test_experts_without_an_interface_stay_frozen_and_are_reported(tmp_path):
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**tiny.COMMON, **UNREACHED)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert not fused.reachable(model) and len(fused.unreached(model)) == 4
    model.save_pretrained(tmp_path)
    settings = settings_of("lora")
    built = torch_engine(load_model(tmp_path, settings, CPU), settings, CPU)
    assert not [name for name, p in built.model.named_parameters() if p.requires_grad and ".experts" in name]
    (said,) = built.notices()
    assert said.startswith("4 expert weights such as model.layers.0.feed_forward.experts.gate_up_proj stay frozen")


def test_a_start_that_changes_the_experts_leaves_the_logits_and_saves_plain_lora(tmp_path):
    settings = dataclasses.replace(SETTINGS, init_lora_weights="pissa")
    for architecture in ARCHITECTURES:
        model = build(architecture).requires_grad_(False)
        before = model(IDS).logits
        names = target_names(model, "all")
        starts = residual_init(model, names, Adapter.of(settings), None, None, torch.device("cpu"))
        add_adapters(model, names, Adapter.of(settings), starts)
        # 1e-5: the part that is taken out of a weight comes back through two other products.
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        write(model, settings, tmp_path / architecture)
        theirs = peft.PeftModel.from_pretrained(build(architecture), tmp_path / architecture).eval()
        with torch.no_grad():
            mine = model(IDS).logits
            assert (mine - before).abs().max() > 1e-2
            torch.testing.assert_close(theirs(input_ids=IDS).logits, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_from_the_shell_a_mixture_trains_on_quantized_experts_and_peft_reads_it(make_tokenizer, rows_file, tmp_path):
    folder, out = tmp_path / "model", tmp_path / "out"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder)
    flags = "--train_type qlora --max_steps 4 --batch_size 4 --context_length 64 --backend cpu --lr 5e-3"
    done = finish(command(flags, "--precision fp32", model_name=folder, dataset=rows_file, output_dir=out))
    assert done.returncode == 0, done.stderr
    assert "4 experts per layer are quantized, with dense copies" in done.stdout
    losses = [e["loss"] for e in read_events(out, "step")]
    assert losses[-1] < losses[0]
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_parameters"] == [
        f"model.layers.{i}.mlp.experts.{n}" for i in (0, 1) for n in ("gate_up_proj", "down_proj")
    ]
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    assert load_file(out / "adapter_model.safetensors")[key].any()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, out).eval()
    mine = transformers.AutoModelForCausalLM.from_pretrained(folder)
    attach_adapter(mine, out)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=IDS).logits, mine(IDS).logits, rtol=1e-5, atol=1e-5)
