"""LLaMA-Pro expansion of any architecture by expand.py."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import expand
import generate
import score
from finetune.errors import PlanError
from finetune.model_files import llama_pro as llama_pro_files
from tests.support import tiny
from tests.support.cells import but_slow
from tests.support.commands import command, finish
from tests.support.model_folders import expand_model, logits

QUICK = ("llama_tied", "gpt2", "gemma3", "phi3", "falcon", "mixtral", "gpt_oss")


@pytest.mark.parametrize("architecture", but_slow(tiny.ARCHITECTURES, QUICK))
def test_an_expanded_model_starts_with_the_same_logits_bit_for_bit(architecture, tmp_path, capsys):
    model = tiny.build(architecture, num_hidden_layers=3)
    source, target = expand_model(model, tmp_path, "--num_new_blocks", 2)
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
def test_a_new_layer_is_the_copied_one_except_for_its_zeros(architecture, tmp_path):
    _, target = expand_model(tiny.build(architecture), tmp_path, "--num_new_blocks", 1)
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
        _, target = expand_model(tiny.build(architecture), tmp_path / architecture)
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
    source, target = expand_model(model, tmp_path)
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


def test_a_layer_that_depends_on_its_position_is_refused(tmp_path):
    """GPT-2 can scale attention by the layer's index: at another position a copy computes something else."""
    model = tiny.build("gpt2", scale_attn_by_inverse_layer_idx=True, num_hidden_layers=3)
    with pytest.raises(PlanError, match="depends on its position"):
        expand_model(model, tmp_path, "--num_new_blocks", 3)
    assert not (tmp_path / "expanded").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_new_blocks", 9], "--num_new_blocks 9: must be 1 to 2"),
        (["--expansion_rate", 0], "--expansion_rate 0.0: must be above 0"),
        (["--expansion_rate", 7], "--expansion_rate 7.0: must be above 0 and at most 1"),
    ],
)
def test_impossible_numbers_of_blocks_are_refused(flags, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        expand_model(tiny.build(), tmp_path, *flags)


@pytest.mark.slow
def test_from_the_shell_a_model_is_expanded_trained_asked_and_scored(tiny_model, rows_file, tmp_path, capsys):
    grown, out = tmp_path / "blk_exp-2-3", tmp_path / "out"
    argv = command("--expansion_rate 0.5", script="expand.py", model_name=tiny_model, output_dir=grown)
    made = finish(argv)
    assert made.returncode == 0, made.stderr
    assert "2 layers -> 3; new: 2; zeros in each: mlp.down_proj.weight, self_attn.o_proj.weight" in made.stdout
    flags = "--train_type qlora --max_steps 2 --batch_size 4 --context_length 64 --backend cpu"
    argv = command(flags, llama_pro_path=grown, model_name=tiny_model, dataset=rows_file, output_dir=out)
    trained = finish(argv)
    assert trained.returncode == 0, trained.stderr
    assert "added layers (qlora) of" in trained.stdout and "no adapter: the added layers train" in trained.stdout
    generate.main(["--checkpoint", str(out), "--prompt", "What is 2?", "--max_new_tokens", "3", "--device", "cpu"])
    score.main(["--checkpoint", str(out), "--dataset", str(rows_file), "--samples", "2", "--device", "cpu"])
    assert "exact match" in capsys.readouterr().out


def test_a_rate_and_a_number_contradict_each_other(tiny_model, tmp_path):
    from finetune.errors import PlanError

    flags = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "x"), "--num_new_blocks", "1"]
    with pytest.raises(PlanError, match="--expansion_rate 0.5: contradicts --num_new_blocks 1"):
        expand.main([*flags, "--expansion_rate", "0.5"])
