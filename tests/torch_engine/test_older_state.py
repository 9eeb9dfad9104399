"""State dicts of the older scripts become adapters or models; runs become plain checkpoints of five keys."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from finetune.errors import PlanError
from finetune.model_files.files import find_model
from finetune.torch_engine import older_state
from finetune.torch_engine.lora.adapters import attach_adapter
from finetune.torch_engine.weights.stream import load_dense

RANK, LEAVES = 4, ("q_proj", "v_proj", "down_proj")
IDS = torch.arange(3, 20)[None]


class OlderLora(torch.nn.Module):
    """y = base(x) + B A x * alpha / rank, as the older layer; with `dora` its direction is scaled by a magnitude."""

    def __init__(self, base, scale, dora):
        super().__init__()
        self.base, self.scale, self.dora = base, scale, dora
        self.a = torch.randn(RANK, base.in_features) / math.sqrt(RANK)
        self.b = torch.randn(base.out_features, RANK) * 0.1
        self.magnitude = base.weight.norm(dim=1) * 1.1

    def forward(self, x):
        delta = x @ self.a.T @ self.b.T * self.scale
        if not self.dora:
            return self.base(x) + delta
        norm = (self.base.weight + self.scale * self.b @ self.a).norm(dim=1)
        return (self.base(x) + delta) * self.magnitude / norm


def older_run(folder, names, scale, dora=False):
    """(state dict under the older names, logits of the model it is of)."""
    torch.manual_seed(0)
    model = load_dense(folder, torch.float32).requires_grad_(False)
    state = {}
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in LEAVES:
            layer = OlderLora(module, scale, dora)
            model.set_submodule(name, layer)
            state |= {key.format(name): value.clone() for key, value in zip(names, (layer.a, layer.b), strict=True)}
            if dora:
                state[f"{name}.magnitude_layer.magnitude"] = layer.magnitude
    with torch.no_grad():
        return state, model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("names", "scale", "dora"),
    [
        (("{}.lora_AB.0.weight", "{}.lora_AB.1.weight"), 16 / RANK, False),
        (("base_model.model.{}.lora_A.default.weight", "base_model.model.{}.lora_B.default.weight"), 16 / RANK, False),
        (("_fsdp_wrapped_module.{}.lora_A.weight", "_fsdp_wrapped_module.{}.lora_B.weight"), 16 / RANK, False),
        (("{}.dora_layer.lora_A.weight", "{}.dora_layer.lora_B.weight"), 1.0, True),
    ],
    ids=["lora_AB", "peft", "wrapped", "dora"],
)
def test_an_older_state_dict_becomes_an_adapter_with_its_logits(names, scale, dora, tiny_model, tmp_path, capsys):
    """In fp32; 1e-5 of the largest logit is the order of summation."""
    state, expected = older_run(tiny_model, names, scale, dora)
    save_file(state, tmp_path / "model_state_dict.safetensors")
    out = tmp_path / "adapter"
    argv = ["--from_older", str(tmp_path / "model_state_dict.safetensors"), "--model_name", str(tiny_model)]
    assert export.main([*argv, "--output_dir", str(out)]) == 0
    assert f"{'DoRA' if dora else 'LoRA'} adapter of rank 4" in capsys.readouterr().out
    model = load_dense(tiny_model, torch.float32).requires_grad_(False)
    attach_adapter(model, out)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(LEAVES) and config["base_model_name_or_path"] == str(tiny_model)
    from peft import PeftModel

    peft = PeftModel.from_pretrained(load_dense(tiny_model, torch.float32), str(out)).eval()
    with torch.no_grad():
        assert (peft(input_ids=IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_older_weights_of_a_model_replace_the_base_s(tiny_model, tmp_path):
    """As the older full runs saved all, and its LLaMA-Pro runs what they trained."""
    model = load_dense(tiny_model, torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    trained = {name: model.get_parameter(name).detach() * 2}
    torch.save(trained, tmp_path / "state.pt")
    argv = ["--from_older", str(tmp_path / "state.pt"), "--model_name", str(tiny_model)]
    assert export.main([*argv, "--output_dir", str(tmp_path / "model")]) == 0
    after = dict(load_dense(tmp_path / "model", torch.float32).named_parameters())
    for n, before in model.named_parameters():
        assert torch.equal(after[n], trained.get(n, before)), n


def test_what_does_not_fit_its_base_is_one_line(tiny_model, tmp_path):
    base = find_model(str(tiny_model))
    fitting, _ = older_run(tiny_model, ("{}.lora_AB.0.weight", "{}.lora_AB.1.weight"), 1.0)
    layer = "model.layers.0.self_attn.q_proj"

    def refused(tensors, file="x.safetensors"):
        save_file(tensors, tmp_path / file)
        with pytest.raises(PlanError) as error:
            state = older_state.read_state(tmp_path / file)
            writes = older_state.write_adapter if older_state.adapter_of(state)[0] else older_state.write_model
            writes(state, base, tmp_path, *(() if writes is older_state.write_adapter else ("auto",)))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert f"adapts other, which {base.name} does not have" in refused(
        {"other.lora_AB.0.weight": torch.zeros(4, 64), "other.lora_AB.1.weight": torch.zeros(64, 4)}
    )
    assert f"{layer} has factors [[4, 9], [64, 4]]" in refused(
        fitting | {f"{layer}.lora_AB.0.weight": torch.zeros(4, 9)}
    )
    assert f"{layer} has factors [[4, 64]]" in refused({f"{layer}.lora_AB.0.weight": torch.zeros(4, 64)})
    embedding = {"model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)}
    assert "is of an embedding, which this form does not hold" in refused(fitting | embedding)
    experts = {f"model.layers.0.self_attn.lora_AB.{i}.weight": torch.zeros(4, 4) for i in (0, 1)}
    assert "model.layers.0.self_attn are experts" in refused(experts)
    assert "contains strange [2], which in" in refused({"strange": torch.zeros(2)})
    (tmp_path / "evil.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(PlanError, match="cannot be read"):
        older_state.read_state(tmp_path / "evil.pt")
    with pytest.raises(PlanError, match="no such file"):
        older_state.read_state(tmp_path / "none.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(PlanError, match="is not a state dict"):
        older_state.read_state(tmp_path / "list.pt")
    with pytest.raises(PlanError, match="needs --model_name"):
        export.main(["--from_older", "x"])


@pytest.fixture(scope="module")
def plain_of(tiny_model, rows_file, tmp_path_factory):
    """(a finished bf16 qlora run, its plain checkpoint's path)."""
    from train import fine_tune

    folder = tmp_path_factory.mktemp("plain")
    fine_tune(
        model_name=str(tiny_model),
        dataset=str(rows_file),
        output_dir=str(folder / "out"),
        backend="cpu",
        train_type="qlora",
        quantization_backend="nf4",
        precision="bf16",
        use_dora=True,
        lora_rank=4,
        batch_size=4,
        context_length=64,
        max_steps=2,
        lr=1e-3,
    )
    assert export.main(["--checkpoint", str(folder / "out"), "--plain", str(folder / "checkpoint.pt")]) == 0
    return folder / "out", folder / "checkpoint.pt"


@pytest.mark.promise("CK_01")
def test_a_plain_checkpoint_has_the_five_keys_and_loads_safely_ck_01(plain_of):
    run, file = plain_of
    content = torch.load(file, map_location="cpu", weights_only=True)
    assert set(older_state.PLAIN_KEYS) <= set(content)
    facts = [content[name] for name in ("backend", "precision", "quantization")]
    assert facts == ["cpu", "bf16", "nf4-4bit"]
    saved = load_file(run / "checkpoints" / "step-2" / "adapter_model.safetensors")
    assert content["model_state_dict"].keys() == saved.keys()
    assert all(torch.equal(content["model_state_dict"][n], t) for n, t in saved.items())
    parameters = [torch.nn.Parameter(t.clone()) for t in saved.values()]
    optimizer = torch.optim.AdamW(parameters)
    moments = load_file(run / "checkpoints" / "step-2" / "optimizer.safetensors")
    stored = content["optimizer_state_dict"]
    assert len(stored["state"]) == len(saved) and sum(len(g["params"]) for g in stored["param_groups"]) == len(saved)
    found = sorted(s["exp_avg"].sum().item() for s in stored["state"].values())
    assert found == sorted(t.sum().item() for n, t in moments.items() if n.endswith(".exp_avg"))
    assert type(optimizer).__name__ == "AdamW"


@pytest.mark.promise("CK_02")
@pytest.mark.parametrize("backend", ["cuda", "mps", "mlx", "cpu"])
def test_a_plain_checkpoint_moves_between_backends_ck_02(backend, plain_of, tiny_model, tmp_path, capsys):
    run, file = plain_of
    argv = ["--checkpoint", str(run), "--plain", str(tmp_path / "bf16.pt"), "--dtype", "bf16"]
    assert export.main(argv) == 0
    argv = ["--from_older", str(tmp_path / "bf16.pt"), "--model_name", str(tiny_model), "--for_backend", backend]
    assert export.main([*argv, "--output_dir", str(tmp_path / "back")]) == 0
    said = capsys.readouterr().out
    assert ("Converting bf16 to fp16 for MPS" in said) is (backend == "mps")
    assert ("Direct loading not supported, conversion required" in said) is (backend == "mlx")
    tensors = load_file(tmp_path / "back" / "adapter_model.safetensors")
    expected = torch.float16 if backend == "mps" else torch.bfloat16
    assert {t.dtype for t in tensors.values()} == {expected}
    saved = load_file(run / "adapter_model.safetensors")
    assert all(torch.equal(tensors[n], t.bfloat16().to(expected)) for n, t in saved.items())
    ours, back = (json.loads((f / "adapter_config.json").read_text()) for f in (run, tmp_path / "back"))
    for key in ("r", "lora_alpha", "use_dora", "use_rslora"):
        assert ours[key] == back[key], key


def test_a_plain_checkpoint_needs_a_run_and_a_new_file(tmp_path, plain_of):
    with pytest.raises(PlanError, match="has no checkpoint with one file"):
        export.main(["--checkpoint", str(tmp_path), "--plain", str(tmp_path / "x.pt")])
    with pytest.raises(PlanError, match="exists. Give another"):
        export.main(["--checkpoint", str(plain_of[0]), "--plain", str(plain_of[1])])
    with pytest.raises(PlanError, match="needs --checkpoint"):
        export.main(["--plain", str(tmp_path / "x.pt")])


def test_what_is_no_complete_state_is_refused_in_one_line(tiny_model, tmp_path):
    def said(content, name="state.pt", backend=None):
        torch.save(content, tmp_path / name)
        with pytest.raises(PlanError) as error:
            state = older_state.read_state(tmp_path / name, backend)
            older_state.write_adapter(state, find_model(str(tiny_model)), tmp_path)
        return str(error.value)

    one = torch.ones(2, 2)
    assert "is not a state dict" in said({0: one})
    assert "one weight under two names" in said({"module.a": one, "a": one})
    assert "one shard of several" in said({"a": one}, "model-00001-of-00002.pt")
    assert "exceeds fp16" in said({"a": torch.full((2,), 1e5, dtype=torch.bfloat16)}, backend="mps")
    q_proj = find_model(str(tiny_model)).config["hidden_size"]
    layer = "model.layers.0.self_attn.q_proj"
    factors = {f"{layer}.dora_layer.lora_a.weight": torch.ones(2, q_proj)}
    factors[f"{layer}.dora_layer.lora_b.weight"] = torch.ones(q_proj, 2)
    text = said({name.replace("lora_a", "lora_A").replace("lora_b", "lora_B"): t for name, t in factors.items()})
    assert "DoRA magnitudes, found none" in text or "is not a" in text or "adapt" in text


def test_a_model_is_written_in_the_dtype_that_was_asked_for(bf16_folders, tmp_path):
    weight = torch.full((1,), 0.30001)
    base = find_model(bf16_folders["llama"])
    name, like = next((n, t) for n, t in load_dense(base.folder, torch.bfloat16).named_parameters() if t.dim() == 1)
    torch.save({name: weight.expand(like.shape).contiguous()}, tmp_path / "state.pt")
    state = older_state.read_state(tmp_path / "state.pt")
    (tmp_path / "out").mkdir()
    older_state.write_model(state, base, tmp_path / "out", "fp32")
    written = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert torch.equal(written[name], weight.expand(like.shape))
