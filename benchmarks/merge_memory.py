"""Peak memory of export.py --to hf, on a generated checkpoint of a real model's shape with a random adapter.

python benchmarks/merge_memory.py --shape 8b
python benchmarks/merge_memory.py --shape 1b --code . --code OTHER_CHECKOUT     the same export by two versions, in turn
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES = {  # Llama-3.2-1B, Llama-3-8B, and a Qwen3-30B-A3B of fewer layers
    "1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, model_type="llama",
        architectures=["LlamaForCausalLM"],
    ),
    "8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False, model_type="llama", architectures=["LlamaForCausalLM"],
    ),
    "moe": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"],
    ),
}  # fmt: skip
# Runs in each version's folder: resets the peak after its imports, then exports.
MEASURE = """
import json, sys, time
sys.path.insert(0, ".")
import export, torch, transformers
from finetune.torch_engine.weights import save, load
from finetune.torch_engine.memory_stats import peak_resident_bytes, reset_peak
from finetune.system import process
process.prepare_environment()
reset_peak()
before, began = peak_resident_bytes(), time.perf_counter()
export.main(sys.argv[1:])
print(json.dumps({"peak": peak_resident_bytes() - before, "wall_s": time.perf_counter() - began}))
"""


def write_base(folder: Path, shape: dict) -> None:
    """A folder of random bf16 weights, one file per layer as large checkpoints have them."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from finetune.torch_engine.weights.save import StreamedSave
    from finetune.torch_engine.weights.stream import empty_model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape | {"dtype": "bfloat16"}))
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    model = empty_model(folder, torch.bfloat16)
    if shape["tie_word_embeddings"]:
        model.tie_weights()
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    on_disk = StreamedSave.of(model, shapes, torch.bfloat16).on_disk
    groups: dict[str, dict] = {}
    for name, tensor in on_disk.items():
        layer = name.partition("layers.")[2].partition(".")[0]
        groups.setdefault(f"model-{layer.zfill(5) or name}.safetensors", {})[name] = tensor
    for file, tensors in groups.items():
        made = {n: torch.empty(t.shape, dtype=torch.bfloat16).normal_(std=0.02) for n, t in tensors.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in groups.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapter(folder: Path, base: Path, rank: int, dora: bool) -> int:
    """A random adapter on every linear and expert; the bytes of the base's largest tensor as transformers holds it."""
    import torch
    from safetensors.torch import save_file

    from finetune.parts.trains import Adapter
    from finetune.torch_engine.lora.adapters import add_adapters
    from finetune.torch_engine.lora.layers import adapter_parameters
    from finetune.torch_engine.lora.peft_format import disk_name, peft_config
    from finetune.torch_engine.lora.targets import target_names
    from finetune.torch_engine.weights.stream import empty_model

    model = empty_model(base, torch.bfloat16)
    largest = max(t.numel() * 2 for t in model.state_dict().values())
    adapter = Adapter(rank, 2.0 * rank, dora=dora)
    add_adapters(model, target_names(model, "all", dora), adapter)
    made = {disk_name(n): torch.empty(p.shape).normal_(std=0.02).abs_() for n, p in adapter_parameters(model).items()}
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(model, adapter, str(base))))
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--use_dora", action="store_true")
    parser.add_argument("--code", action="append", type=Path, help="a checkout to measure (default: this one)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as beside:
        base, adapter, out = (Path(beside) / name for name in ("base", "adapter", "out"))
        write_base(base, SHAPES[args.shape])
        largest = write_adapter(adapter, base, args.rank, args.use_dora)
        bound = 2 * largest + 300 * 2**20
        size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
        print(f"{args.shape}: {size / 2**30:.2f} GiB, largest tensor {largest / 2**20:.0f} MiB", flush=True)
        for code in args.code or [ROOT]:
            argv = ["--checkpoint", adapter, "--output_dir", out]
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, *map(str, argv)], cwd=code, capture_output=True, text=True
            )
            shutil.rmtree(out, ignore_errors=True)
            if done.returncode:
                print(f"{code}: exit {done.returncode}: {done.stderr.strip()[-300:]}", flush=True)
                continue
            *said, last = done.stdout.strip().splitlines()
            figures = json.loads(last)
            print(
                f"{code}: peak {figures['peak'] / 2**20:.0f} MiB above imports (two largest tensors + 300 MiB: "
                f"{bound / 2**20:.0f}), {figures['wall_s']:.0f} s\n  {said[-1]}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
