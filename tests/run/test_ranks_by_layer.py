"""--lora_rank_pattern and --lora_alpha_pattern: layers of several ranks and scales, as PEFT trains them."""

import json

import peft
import pytest
import torch
import transformers

import export
from finetune.adapters.saved import read_adapter
from finetune.errors import PlanError
from finetune.parts.by_layer import ALPHAS, RANKS, ByLayer
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.lora.peft_format import disk_name
from tests.support import tiny
from tests.support.adapters import IDS, KINDS, adapted, write
from tests.support.cells import each_alone
from tests.support.mlx_engines import is_torch_s_moves_and_resumes
from tests.support.runs import PLAIN, read_events
from train import fine_tune

# The first that matches is a layer's; q_proj of layer 0 has the first's rank and the alpha of the other flag.
BY_LAYER = dict(
    lora_rank_pattern=r".*layers\.0\.self_attn\..*=2,q_proj=6,down_proj=1", lora_alpha_pattern="q_proj=1.5,v_proj=20"
)
OF_GPT2 = dict(lora_rank_pattern=r"h\.0\.attn\.c_attn=2,c_proj=6", lora_alpha_pattern="c_fc=3")
OF_EXPERTS = dict(lora_rank_pattern=r"experts\..*=2,q_proj=6", lora_alpha_pattern=r".*layers\.1\.mlp\.experts\..*=5")
# PEFT names shared experts by their .weight, which a name's end does not match.
OF_SHARED = dict(
    lora_target_modules="q_proj,shared_expert.down_proj,shared_expert.up_proj",
    lora_rank_pattern=r"shared_expert\.down_proj=2,q_proj=6",
    lora_alpha_pattern="down_proj=20",
)
PATTERNS = {"llama": BY_LAYER, "gpt2": OF_GPT2, "mixtral": OF_EXPERTS, "qwen2_moe": OF_SHARED}


def nll(model):
    logits = model(input_ids=IDS).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def peft_name(parameter: str) -> str:
    return parameter.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


@pytest.mark.parametrize(("architecture", "kind"), each_alone(PATTERNS, KINDS))
def test_peft_has_the_same_logits_and_gradients(architecture, kind, tmp_path):
    if architecture in ("mixtral", "qwen2_moe") and kind == "dora":
        pytest.skip("experts have no DoRA")
    flags = PATTERNS[architecture] | KINDS[kind]
    model, settings = adapted(architecture, flags.get("lora_target_modules", "all"), **flags)
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a", is_trainable=True).eval()
    loss = nll(model)
    loss.backward()
    other = nll(theirs)
    other.backward()
    assert loss.item() == pytest.approx(other.item(), rel=1e-6)
    assert abs(nll(tiny.build(architecture)).item() - loss.item()) > 1e-3
    gradients = {peft_name(name): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    mine = {disk_name(name): p for name, p in adapter_parameters(model).items()}
    assert len({p.shape[0] for name, p in mine.items() if "lora_A" in name}) > 2
    assert gradients.keys() == mine.keys()
    for name, parameter in mine.items():
        # 1e-5: PEFT adds the adapter's product in another order.
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("init", ["gaussian", pytest.param("pissa", marks=pytest.mark.slow)])
def test_a_run_starts_its_layers_as_peft_does(init, tiny_model, rows_file, tmp_path):
    """Normal with a deviation of one in the layer's rank; PiSSA's doubled adapter gives the base's logits at first."""
    flags = dict(model_name=str(tiny_model), dataset=str(rows_file), max_steps=1, lr=1e-12, output_dir=str(tmp_path))
    fine_tune(**PLAIN | flags | BY_LAYER | dict(init_lora_weights=init))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    factor = 2 if init == "pissa" else 1
    assert config["rank_pattern"] == {
        r".*layers\.0\.self_attn\..*": 2 * factor,
        "q_proj": 6 * factor,
        "down_proj": factor,
    }
    assert config["alpha_pattern"] == {"q_proj": 1.5 * factor, "v_proj": 20 * factor}
    if init == "gaussian":
        _, tensors = read_adapter(tmp_path)  # as one rank: further rows are zero
        name = "base_model.model.model.layers.{}.lora_A.weight"
        assert tensors[name.format("1.self_attn.q_proj")].std() == pytest.approx(1 / 6, rel=0.15)
        assert tensors[name.format("0.self_attn.q_proj")][:2].std() == pytest.approx(1 / 2, rel=0.15)
        assert not tensors[name.format("0.self_attn.q_proj")][2:].any()
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(input_ids=IDS).logits
        attach_adapter(base, tmp_path)
        torch.testing.assert_close(base(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_mlx_has_torch_s_losses_and_runs_move_both_ways(tiny_model, rows_file, tmp_path):
    flags = (
        PLAIN
        | BY_LAYER
        | dict(model_name=str(tiny_model), dataset=str(rows_file), save_every=5, keep_last=9, max_steps=20)
    )
    for backend in ("cpu", "mlx"):
        fine_tune(**flags | dict(backend=backend, output_dir=str(tmp_path / backend)))
    is_torch_s_moves_and_resumes(tmp_path, (("cpu", "mlx"), ("mlx", "cpu")))


def test_a_run_has_the_losses_of_the_largest_rank_whose_rows_are_zero(tiny_model, rows_file, tmp_path):
    """Continued, its layers are padded to one rank, and compute the same: the first losses after it are its last."""
    flags = PLAIN | dict(model_name=str(tiny_model), dataset=str(rows_file), num_epochs=1, validation_split=0.2)
    fine_tune(**flags | BY_LAYER | dict(lr=1e-2, output_dir=str(tmp_path / "first")))
    after = flags | dict(adapter=str(tmp_path / "first"), max_steps=1, output_dir=str(tmp_path / "more"))
    del after["lora_rank"]
    fine_tune(**after)
    export.main(["--checkpoint", str(tmp_path / "first"), "--output_dir", str(tmp_path / "one"), "--to", "peft"])
    config, written = (
        json.loads((tmp_path / "one" / "adapter_config.json").read_text()),
        read_adapter(tmp_path / "one"),
    )
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (6, {}, {})
    ours = read_adapter(tmp_path / "first")[1]
    assert all((written[1][name] == ours[name]).all() for name in ours)
    (last,) = [e["loss"] for e in read_events(tmp_path / "first", "eval")][-1:]
    assert read_events(tmp_path / "more", "eval")[0]["loss"] == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(lora_rank_pattern="q_proj"), "NAME=N, N a whole number from 1"),
        (dict(lora_rank_pattern="q_proj=1.5"), "whole number"),
        (dict(lora_rank_pattern="q_proj=0"), "whole number"),
        (dict(lora_alpha_pattern="q_proj=-1"), "a number above 0"),
        (dict(lora_rank_pattern="q_proj=4,q_proj=8"), "given twice"),
        (dict(lora_rank_pattern="(q_proj=4"), "not a regular expression"),
        (dict(lora_rank_pattern="q_prj=4"), "no layer with an adapter has a name that ends so"),
        (dict(lora_rank_pattern="down_proj=3", lora_target_modules="q_proj"), "no layer with an adapter has a name"),
        (dict(lora_alpha_pattern="layers=4"), "no layer with an adapter has a name that ends so"),
        (dict(lora_rank_pattern="q_proj=4", init_lora_weights="eva"), "finds as many directions"),
        (dict(lora_rank_pattern="q_proj=4", train_type="full", lora_rank=None), "full fine-tuning has no adapter"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes, said, tiny_model, rows_file, tmp_path):
    flags = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(tmp_path / "out"))
    with pytest.raises(PlanError, match=said):
        fine_tune(**PLAIN | flags | changes, dry_run=True)


def test_a_regex_may_have_commas_and_equals_signs_of_its_own():
    text = r"layers\.\d{1,2}\.mlp\..*=4, (?=.*q).*proj=8"
    assert ByLayer.read(text, RANKS).entries == ((r"layers\.\d{1,2}\.mlp\..*", 4), ("(?=.*q).*proj", 8))
    assert ByLayer.read(None, ALPHAS).entries == ()
