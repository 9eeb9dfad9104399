"""LLaMA-Pro: expansion of any architecture, training of the new layers alone, and every command on the result."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import expand
import export
import generate
import score
from finetune.checkpoint.store import steps_of
from finetune.errors import PlanError
from finetune.metrics import read_events
from finetune.model_files import llama_pro as llama_pro_files
from tests.promises.test_exit_codes import finish
from tests.support import tiny
from train import fine_tune

IDS = torch.arange(3, 35).view(2, 16)
RUN = dict(
    batch_size=2,
    gradient_accumulation_steps=2,
    num_epochs=1,
    lr=5e-3,
    backend="cpu",
    log_to="stdout",
    context_length=64,
    precision="fp32",
)


def expanded(model, folder, *flags):
    """The model's folder and its expanded one, by the command."""
    source, target = folder / "source", folder / "expanded"
    model.save_pretrained(source)
    expand.main(["--model_name", str(source), "--output_dir", str(target), *map(str, flags)])
    return source, target


def logits(folder, **overrides):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **overrides).eval()(IDS).logits


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_an_expanded_model_starts_with_the_same_logits_bit_for_bit(architecture, tmp_path, capsys):
    model = tiny.build(architecture, num_hidden_layers=3)
    source, target = expanded(model, tmp_path, "--num_new_blocks", 2)
    assert "equal bit for bit" in capsys.readouterr().out
    assert torch.equal(logits(target), logits(source))
    record = json.loads((target / "llama_pro.json").read_text())
    assert record["new_layers"] == [1, 4] and record["layers_after"] == 5
    config = transformers.AutoConfig.from_pretrained(target)
    assert config.num_hidden_layers == 5
    kinds = getattr(transformers.AutoConfig.from_pretrained(source), "layer_types", None)
    if kinds:
        assert config.layer_types == [kinds[0], kinds[0], kinds[1], kinds[2], kinds[2]]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_new_layer_is_the_copied_one_but_for_its_zeros(architecture, tmp_path):
    _, target = expanded(tiny.build(architecture), tmp_path, "--num_new_blocks", 1)
    record, tensors = (json.loads((target / "llama_pro.json").read_text()), load_file(target / "model.safetensors"))
    prefix, zeros = record["layers"], set(record["zeros"])
    rests = [n.removeprefix(f"{prefix}.2.") for n in tensors if n.startswith(f"{prefix}.2.")]
    assert len(rests) >= 5 and zeros
    for rest in rests:
        copied, new = tensors[f"{prefix}.1.{rest}"], tensors[f"{prefix}.2.{rest}"]
        if llama_pro_files.pattern_of(rest) in zeros:
            assert not new.any()
        else:
            assert torch.equal(new, copied)


def test_zeros_are_the_projections_that_write_to_the_residual_stream_with_their_biases(tmp_path):
    found = {}
    for architecture in ("llama", "gpt2", "mixtral", "gpt_oss", "olmo2"):
        _, target = expanded(tiny.build(architecture), tmp_path / architecture)
        found[architecture] = json.loads((target / "llama_pro.json").read_text())["zeros"]
    assert found["llama"] == found["olmo2"] == ["mlp.down_proj.weight", "self_attn.o_proj.weight"]
    assert found["gpt2"] == [f"{part}.c_proj.{kind}" for part in ("attn", "mlp") for kind in ("bias", "weight")]
    assert found["mixtral"] == ["block_sparse_moe.experts.*.w2.weight", "self_attn.o_proj.weight"]
    assert "mlp.experts.down_proj_bias" in found["gpt_oss"] and "self_attn.o_proj.bias" in found["gpt_oss"]


def test_a_biased_writer_is_zeroed_with_its_bias(tmp_path):
    model = tiny.build("llama", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    source, target = expanded(model, tmp_path)
    assert torch.equal(logits(target), logits(source))


def test_sharded_in_and_out_is_the_same_model(tmp_path):
    source = tmp_path / "source"
    tiny.build().save_pretrained(source, max_shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    expand.main(["--model_name", str(source), "--output_dir", str(tmp_path / "x"), "--expansion_rate", "0.5"])
    assert torch.equal(logits(tmp_path / "x"), logits(source))
    shutil.copytree(tmp_path / "x", tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors").unlink()
    tensors = llama_pro_files.read_sources([tmp_path / "x" / "model.safetensors"])
    llama_pro_files.write(tensors, tmp_path / "shards", shard_bytes=60_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(logits(tmp_path / "shards"), logits(source))


def test_what_a_layer_does_by_its_place_is_refused(tmp_path):
    """GPT-2 can scale attention by the layer's number: a copy of it is no copy in another place."""
    model = tiny.build("gpt2", scale_attn_by_inverse_layer_idx=True, num_hidden_layers=3)
    with pytest.raises(PlanError, match="depends on its position"):
        expanded(model, tmp_path, "--num_new_blocks", 3)
    assert not (tmp_path / "expanded").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_new_blocks", 9], "--num_new_blocks 9: must be 1 to 2"),
        (["--expansion_rate", 0], "--expansion_rate 0.0: must be above 0"),
        (["--expansion_rate", 7], "--expansion_rate 7.0: must be above 0 and at most 1"),
    ],
)
def test_numbers_of_blocks_that_cannot_be(flags, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        expanded(tiny.build(), tmp_path, *flags)


def test_positions_are_the_ends_of_equal_groups():
    assert llama_pro_files.new_positions(32, 8) == [3, 7, 11, 15, 19, 23, 27, 31]
    assert llama_pro_files.new_positions(32, 3) == [9, 20, 31]
    assert llama_pro_files.order_of(4, [1, 3]) == ([0, 1, 1, 2, 3, 3], [2, 5])


def test_an_older_scripts_folder_is_read_by_its_name(tmp_path):
    folder = tmp_path / "blk_exp-32-36"
    folder.mkdir()
    assert llama_pro_files.read_record(folder, "x")["new_layers"] == [8, 17, 26, 35]
    with pytest.raises(PlanError, match="not an expanded model"):
        llama_pro_files.read_record(tmp_path, "--llama_pro_path x")


# ---- training the new layers


@pytest.fixture(scope="module")
def grown(tiny_model, tmp_path_factory):
    target = tmp_path_factory.mktemp("grown") / "expanded"
    expand.main(["--model_name", str(tiny_model), "--output_dir", str(target), "--num_new_blocks", "1"])
    return target


def run(grown, rows_file, folder, **flags):
    return fine_tune(
        **{**RUN, "llama_pro_path": str(grown), "dataset": str(rows_file), "output_dir": str(folder), **flags}
    )


@pytest.mark.parametrize("train_type", ["lora", "qlora", "bnb_llama_pro"])
def test_new_layers_train_in_fp32_resume_bitwise_and_all_else_stays(train_type, grown, rows_file, tmp_path):
    whole = tmp_path / "whole"
    if train_type == "bnb_llama_pro":
        pytest.importorskip("bitsandbytes")
    state = run(grown, rows_file, whole, train_type=train_type, save_every=2, keep_last=9)
    assert state.status == "finished"
    losses = [e["loss"] for e in read_events(whole, "step")]
    assert losses[-1] < losses[0]
    tensors = load_file(whole / "trained_blocks.safetensors")
    assert {n.split(".")[2] for n in tensors} == {"2"} and len(tensors) == 9  # every tensor of one layer
    assert all(t.dtype == torch.float32 for t in tensors.values())
    before = load_file(grown / "model.safetensors")
    assert all(not torch.equal(tensors[n], before[n]) for n in tensors if n.endswith("proj.weight"))
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for step in steps_of(cut):
        if int(step.name[5:]) > 2:
            shutil.rmtree(step)
    (cut / "train_state.json").unlink()
    fine_tune(resume=str(cut))
    assert (cut / "trained_blocks.safetensors").read_bytes() == (whole / "trained_blocks.safetensors").read_bytes()
    assert [e["loss"] for e in read_events(cut, "step")] == losses


def test_the_first_loss_is_the_unexpanded_models(grown, tiny_model, rows_file, tmp_path):
    run(grown, rows_file, tmp_path / "a", train_type="lora", max_steps=1)
    same = dict(RUN, model_name=str(tiny_model), dataset=str(rows_file), train_type="lora", max_steps=1)
    fine_tune(**same, output_dir=str(tmp_path / "b"))
    one, two = (read_events(tmp_path / n, "step")[0]["loss"] for n in "ab")
    assert one == two


def test_exported_trained_layers_are_a_plain_model(grown, rows_file, tmp_path, capsys):
    run(grown, rows_file, tmp_path / "out", train_type="lora", max_steps=3)
    export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    model = transformers.AutoModelForCausalLM.from_pretrained(grown)
    model.load_state_dict(load_file(tmp_path / "out" / "trained_blocks.safetensors"), strict=False)
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "merged"), model.eval()(IDS).logits)


def test_sixteen_bits_keep_the_new_layers_in_fp32(grown, rows_file, tmp_path):
    run(grown, rows_file, tmp_path / "out", train_type="qlora", precision="bf16", max_steps=4)
    losses = [e["loss"] for e in read_events(tmp_path / "out", "step")]
    assert losses[-1] < losses[0]
    assert all(t.dtype == torch.float32 for t in load_file(tmp_path / "out" / "trained_blocks.safetensors").values())


def test_a_mixture_of_experts_trains_its_new_layer(make_tokenizer, rows_file, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "source", bos=False)
    _, target = expanded(tiny.build("mixtral", vocab_size=len(tokenizer)), tmp_path)
    run(target, rows_file, tmp_path / "out", train_type="qlora", max_steps=3)
    names = load_file(tmp_path / "out" / "trained_blocks.safetensors")
    assert "model.layers.2.mlp.experts.gate_up_proj" in names and len(names) == 9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"train_type": "full"}, "--llama_pro_path .*: trains the new layers alone"),
        ({"train_type": "lora", "use_dora": True}, "--use_dora true: --llama_pro_path trains whole layers"),
        ({"train_type": "hqq_llama_pro", "llama_pro_path": None}, "needs --llama_pro_path"),
    ],
)
def test_what_contradicts_new_layers(flags, message, grown, rows_file, tmp_path):
    with pytest.raises(PlanError, match=message):
        run(grown, rows_file, tmp_path / "out", **flags)


def test_a_model_that_was_not_expanded_is_refused(tiny_model, rows_file, tmp_path):
    with pytest.raises(PlanError, match="not an expanded model: it has no llama_pro.json"):
        run(tiny_model, rows_file, tmp_path / "out", train_type="lora")


def test_from_the_shell_a_model_is_expanded_trained_asked_and_scored(tiny_model, rows_file, tmp_path, capsys):
    grown, out = tmp_path / "blk_exp-2-3", tmp_path / "out"
    made = finish("--model_name", tiny_model, "--output_dir", grown, "--expansion_rate", 0.5, script="expand.py")
    assert made.returncode == 0, made.stderr
    assert "2 layers -> 3; new: 2; zeros in each: mlp.down_proj.weight, self_attn.o_proj.weight" in made.stdout
    trained = finish(
        "--llama_pro_path",
        grown,
        "--model_name",
        tiny_model,
        "--dataset",
        rows_file,
        "--output_dir",
        out,
        "--train_type",
        "qlora",
        "--max_steps",
        2,
        "--batch_size",
        4,
        "--context_length",
        64,
        "--backend",
        "cpu",
    )
    assert trained.returncode == 0, trained.stderr
    assert "added layers (qlora) of" in trained.stdout and "no adapter: the new layers train" in trained.stdout
    generate.main(["--checkpoint", str(out), "--prompt", "What is 2?", "--max_new_tokens", "3", "--device", "cpu"])
    score.main(["--checkpoint", str(out), "--dataset", str(rows_file), "--samples", "2", "--device", "cpu"])
    assert "exact match" in capsys.readouterr().out


@pytest.mark.parametrize("new", ["[-1]", '"12"', "[true]", "[1, 1]", "[]", "[0, 1, 2]", "[7]"])
def test_a_record_that_is_not_of_this_model_is_refused(new, tiny_model, rows_file, tmp_path):
    import shutil

    from finetune.errors import PlanError
    from train import fine_tune

    folder = tmp_path / "expanded"
    expand.main(["--model_name", str(tiny_model), "--output_dir", str(folder), "--num_new_blocks", "1"])
    record = json.loads((folder / "llama_pro.json").read_text())
    (folder / "llama_pro.json").write_text(json.dumps(record | {"new_layers": json.loads(new)}))
    with pytest.raises(PlanError, match="--llama_pro_path .*Expand"):
        fine_tune(llama_pro_path=str(folder), dataset=str(rows_file), output_dir=str(tmp_path / "out"), max_steps=1)
    shutil.rmtree(folder)


def test_a_rate_and_a_number_contradict_each_other(tiny_model, tmp_path):
    from finetune.errors import PlanError

    flags = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "x"), "--num_new_blocks", "1"]
    with pytest.raises(PlanError, match="--expansion_rate 0.5: contradicts --num_new_blocks 1"):
        expand.main([*flags, "--expansion_rate", "0.5"])
