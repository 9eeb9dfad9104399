"""Tiny models whose MLP is stored as fp8, mxfp4, GPTQ, AWQ or compressed-tensors, with what they decode to."""

import json

import torch
from safetensors.torch import load_file, save_file

from finetune.torch_engine.weights import decoded as D
from tests.support import architectures

METHODS = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "pack-quantized in groups", "int-quantized")
RNG = torch.Generator().manual_seed(0)


def codes(bits: int, *shape) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=RNG, dtype=torch.int32)


def words(values, bits: int, axis: int) -> torch.Tensor:
    """int32 words of codes along an axis, lowest bits first, as AutoGPTQ packs rows and columns."""
    per = 32 // bits
    moved = values.movedim(axis, 0).long()
    packed = sum(moved[i::per] << (bits * i) for i in range(per))
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32).movedim(0, axis)


def stored(folder, method: str) -> dict:
    """Writes a tiny model with its MLP stored by `method`; {name: weight} as it should be read."""
    architectures.write_model("gpt_oss" if method == "mxfp4" else "llama", folder)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    how = {"quant_method": method}
    for name in [n for n in tensors if "mlp" in n and ("proj" in n) and not n.endswith("bias")]:
        weight = tensors.pop(name)
        head = name.removesuffix(".weight")
        if method == "mxfp4":
            count, columns, rows = weight.shape
            blocks = codes(8, count, rows, columns // 32, 16).to(torch.uint8)
            scales = (codes(2, count, rows, columns // 32) + 120).to(torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = D.mxfp4(blocks, scales)
        elif method == "fp8":
            scale = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128), generator=RNG) + 0.5
            low = weight.to(torch.float8_e4m3fn)
            tensors |= {name: low, f"{name}_scale_inv": scale}
            expected[name] = D.scaled(low, scale)
        elif method == "gptq":
            rows, columns = weight.shape
            q, zeros = codes(4, columns, rows), codes(4, columns // 32, rows).clamp(1)
            scales = torch.rand(columns // 32, rows, generator=RNG) * 0.02
            tensors |= {f"{head}.qweight": words(q, 4, 0), f"{head}.qzeros": words(zeros - 1, 4, 1)}
            tensors |= {f"{head}.scales": scales, f"{head}.g_idx": torch.arange(columns, dtype=torch.int32) // 32}
            expected[name] = (scales.repeat_interleave(32, 0) * (q - zeros.repeat_interleave(32, 0))).t()
            how |= {"bits": 4, "group_size": 32}
        elif method == "pack-quantized in groups":
            rows, columns = weight.shape
            q, zero = codes(4, rows, columns) - 8, codes(4, rows, columns // 32) - 8
            scale = torch.rand(rows, columns // 32, generator=RNG) * 0.02
            order = (torch.randperm(columns, generator=RNG) % (columns // 32)).to(torch.int32)
            tensors |= {f"{head}.weight_packed": words(q + 8, 4, 1), f"{head}.weight_scale": scale}
            tensors |= {f"{head}.weight_zero_point": words(zero + 8, 4, 0), f"{head}.weight_g_idx": order}
            tensors[f"{head}.weight_shape"] = torch.tensor(weight.shape)
            expected[name] = (q - zero[:, order]) * scale[:, order]
            scheme = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"}
            how = packed(scheme)
        elif method == "int-quantized":
            q, scale = (codes(8, *weight.shape) - 128).to(torch.int8), torch.rand(weight.shape[0], 1, generator=RNG)
            zero = (codes(4, weight.shape[0], 1) - 8).to(torch.int8)
            tensors |= {name: q, f"{name}_scale": scale * 0.02, f"{name}_zero_point": zero}
            expected[name] = (q.float() - zero) * (scale * 0.02)
            how = packed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, "int-quantized")
        elif method == "awq":
            rows, columns = weight.shape
            zeros, scales = codes(4, columns // 32, rows), torch.rand(columns // 32, rows, generator=RNG) * 0.02
            q = codes(4, columns, rows)
            tensors |= {f"{head}.qweight": words(q, 4, 1), f"{head}.qzeros": words(zeros, 4, 1)}
            tensors[f"{head}.scales"] = scales.half()
            expected[name] = D.awq(words(q, 4, 1), words(zeros, 4, 1), scales.half())
            how |= {"bits": 4, "group_size": 32, "version": "gemm"}
        elif method == "compressed-tensors":
            q, scale = codes(4, *weight.shape) - 8, torch.rand(weight.shape[0], 1, generator=RNG) * 0.02
            tensors |= {f"{head}.weight_packed": words(q + 8, 4, 1), f"{head}.weight_scale": scale}
            tensors[f"{head}.weight_shape"] = torch.tensor(weight.shape)
            expected[name] = q * scale
            how |= {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def packed(scheme: dict, form: str = "pack-quantized") -> dict:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": scheme}}}
