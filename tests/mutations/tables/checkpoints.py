"""Mutations of plain checkpoints, migration and quantization_wrapper."""

from tests.mutations.mutation import Mutation

OLDER_STATE = "finetune/torch_engine/older_state.py"

TABLE = (
    Mutation(
        "CK_01",
        "a plain checkpoint has no optimizer_state_dict",
        OLDER_STATE,
        '        "optimizer_state_dict": optimizer.state_dict(),\n',
        "",
    ),
    Mutation(
        "CK_02",
        "bf16 stays bf16 for MPS",
        OLDER_STATE,
        'if backend == "mps" and in_bf16:',
        'if backend == "mps" and not tensors:',
    ),
    Mutation(
        "CK_03",
        "a folder of MLX does not say that it is quantized",
        "finetune/plan/words.py",
        "its weights are stored quantized ({stored['quantization_backend']} at {stored['n_bits']} bits)",
        "its weights are stored by {stored['quantization_backend']}",
    ),
    Mutation(
        "CK_04",
        "MLX computes an adapter without its scale",
        "finetune/mlx_engine/lora.py",
        "low = (dropped @ self.lora_A.astype(x.dtype).T) * self.scaling",
        "low = dropped @ self.lora_A.astype(x.dtype).T",
    ),
    Mutation(
        "Q_01",
        "the adapter of the older scripts does not quantize the layer it is given",
        "finetune/older/quantization.py",
        "return quantized_linear(linear.weight.detach(), linear.bias, self.config)",
        "return linear",
    ),
    Mutation(
        "Q_02",
        "HQQ_4BIT has 8 bits",
        "quantization_wrapper.py",
        "QuantizationMethod.HQQ_4BIT: ((4,), None)",
        "QuantizationMethod.HQQ_4BIT: ((8,), None)",
    ),
    Mutation(
        "Q_03",
        "bits that the method lacks are accepted",
        "quantization_wrapper.py",
        "    if config.bits not in widths:\n",
        "    if config.bits < 0:\n",
    ),
    Mutation(
        "Q_04",
        "scales of quantized weights are stored as floats",
        "finetune/quantizers/nf4.py",
        'return {"packed": packed, "absmax": absmax.view(torch.int32)}',
        'return {"packed": packed, "absmax": absmax}',
    ),
    Mutation(
        "Q_05",
        "a run on another quantizer does not say where it starts",
        "finetune/plan/resume.py",
        'lines.append("the base is quantized again from its own weights, so the loss may change slightly")',
        "pass",
    ),
)
