"""Every train type over every quantizer: trained from the command line, saved, read by PEFT, and generating text."""

import warnings

import peft
import pytest
import torch
import transformers

import export
import generate
import train
from finetune.model_files.files import find_model
from finetune.torch_engine.weights.load import DENSE_FP32, load_trained
from finetune.torch_engine.weights.stream import load_dense
from quantization_wrapper import METHODS, pairs
from tests.support.cells import but_slow
from tests.support.commands import PYTHON, ROOT, finish, words

KINDS = {
    "lora": "",
    "dora": "--use_dora true",
    "rslora": "--use_rslora true",
    "lora+": "--loraplus_lr_ratio 4",
    "gaussian": "--init_lora_weights gaussian",
    "eva": "--init_lora_weights eva",
    "pissa": "--init_lora_weights pissa",
    "olora": "--init_lora_weights olora",
    "loftq": "--init_lora_weights loftq",
    "embeddings": "--lora_target_modules q_proj,embed_tokens,lm_head",
    "llama_pro": "",
}
STORED = ["lora", *(f"{name}/{bits}" for name, bits in pairs())]
COMBINATIONS = [(kind, stored) for kind in KINDS for stored in STORED if (kind, stored) != ("loftq", "lora")]
# In the default suite: each kind once, each method twice or more, in this process. tests/quantizers has each width.
METHOD_OF_KIND = dict(
    zip(
        KINDS,
        ["nf4/4", "hqq/4", "mlx/3", "quanto/4", "bnb/8", "mlx/4", "bnb/4", "hqq/2", "nf4/4", "quanto/8", "mlx/6"],
        strict=True,
    )
)
ONCE = [("lora", stored) for stored in STORED if stored not in METHOD_OF_KIND.values()]
FEW = [*METHOD_OF_KIND.items(), *but_slow(ONCE, [("lora", "lora")])]


def flags_of(kind, stored, model, expanded_model, rows_file, out) -> list[str]:
    shared = "--max_steps 2 --precision fp32 --backend cpu"
    base = {"llama_pro_path": expanded_model} if kind == "llama_pro" else {"model_name": model, "lora_rank": 4}
    if stored == "lora":
        how = "--train_type lora"
    else:
        name, bits = stored.split("/")
        how = f"--train_type qlora --quantization_backend {name} --n_bits {bits}"
        how += " --group_size 32" if METHODS[name].quant_types[int(bits)] else ""
    return words(shared, base, how, KINDS[kind], dataset=rows_file, output_dir=out)


def assert_opens(kind, model, expanded_model, out):
    """The saved weights give equal logits in our reader and in PEFT or plain transformers, and generate text."""
    base = expanded_model if kind == "llama_pro" else model
    files = find_model(str(base))
    ids = torch.arange(5, 25)[None]
    ours = load_trained(out, files, torch.device("cpu"), DENSE_FP32)(input_ids=ids).logits
    if kind == "llama_pro":
        merged = out.parent / "merged"
        export.main(["--checkpoint", str(out), "--output_dir", str(merged)])
        theirs = load_dense(merged, torch.float32)(input_ids=ids).logits
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
            theirs = peft.PeftModel.from_pretrained(plain, str(out)).eval()(input_ids=ids).logits
    # The sums are the same in another order; DoRA's norm is expanded on our side.
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    asked = "--prompt 'What is 2 plus 2? ' --max_new_tokens 4 --device cpu --precision bf16"
    assert generate.main(words(asked, checkpoint=out)) == 0


@pytest.mark.parametrize(("kind", "stored"), FEW)
def test_each_kind_and_each_method_trains_saves_reloads_and_answers(
    kind, stored, tiny_model, expanded_model, rows_file, tmp_path
):
    out = tmp_path / "out"
    assert train.main(flags_of(kind, stored, tiny_model, expanded_model, rows_file, out)) == 0
    assert_opens(kind, tiny_model, expanded_model, out)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stored"), COMBINATIONS, ids=[f"{k}-{s}" for k, s in COMBINATIONS])
def test_every_kind_over_every_method_from_the_command_line(
    kind, stored, tiny_model, expanded_model, rows_file, tmp_path
):
    out = tmp_path / "out"
    flags = flags_of(kind, stored, tiny_model, expanded_model, rows_file, out)
    done = finish([*PYTHON, ROOT / "train.py", *flags])
    assert done.returncode == 0, done.stderr[-2000:]
    assert_opens(kind, tiny_model, expanded_model, out)
