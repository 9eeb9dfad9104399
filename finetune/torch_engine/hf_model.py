"""Any Hugging Face causal LM from a folder to a model ready to train: dtype, quantized base, adapters, proofs.

No list of model classes: layers are found by what they are, and what a model does is proved on the loaded model.
"""

from dataclasses import dataclass

import torch
import transformers

import quantization_wrapper
from finetune.errors import PlanError
from finetune.settings import Settings
from finetune.torch_engine import adapters, attention, loss

WEIGHT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_autocast": torch.float32,
    "fp16_autocast": torch.float32,
    "bf16_buffers_autocast": torch.float32,
}
AUTOCAST_DTYPES = {
    "bf16_autocast": torch.bfloat16,
    "fp16_autocast": torch.float16,
    "bf16_buffers_autocast": torch.bfloat16,
}


def load(folder, settings: Settings, device):
    """The model in evaluation mode on `device`: frozen weights in their type, base quantized, adapters on, the rest in fp32.

    Code in the model's folder is never run. Raises PlanError for weights that do not fit the config.
    """
    attention.register()
    model = load_dense(folder, WEIGHT_DTYPES[settings.precision])
    if settings.train_type == "full":
        model.to(device).requires_grad_(True)
    else:
        model.requires_grad_(False)
        names = adapters.linear_names(model)
        targets = adapters.target_names(model, settings.lora_target_modules)
        if settings.train_type == "qlora":
            config = quantization_wrapper.config_for(
                settings.quantization_backend, settings.quant_type, settings.group_size, settings.double_quant
            )
            quantization_wrapper.quantize_model(model, config, names, device=device)
        model.to(device)
        adapters.add(model, targets, settings)
    if settings.precision == "bf16_buffers_autocast":
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(torch.bfloat16))
    return model


def load_dense(folder, dtype):
    """transformers' own load of a folder, checked: no missing weight is ever filled in at random."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False, output_loading_info=True,
            local_files_only=True,
        )  # fmt: skip
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error).lower():
            raise PlanError(f"--model_name {folder}: {str(error).splitlines()[0]}") from error
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, trust_remote_code=False, output_loading_info=True, local_files_only=True
        )
    except (RuntimeError, OSError) as error:
        raise PlanError(
            f"--model_name {folder}: its weights do not load: {str(error).splitlines()[0]}"
        ) from error
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        if info.get(kind):
            first = sorted(map(str, info[kind]))[0]
            raise PlanError(
                f"--model_name {folder}: {what} {len(info[kind])} weights of its config, such as {first}. "
                "Give a folder whose weights fit its config.json."
            )
    return model.eval()


def base_tensors_digest(model) -> str:
    """sha256 over every frozen tensor, names included: equal before and after training, or the base was touched."""
    import hashlib

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class Proof:
    """What was shown on the loaded model, and the sentence that says it."""

    holds: bool
    reason: str


@torch.no_grad()
def prove_flat(model, autocast) -> Proof:
    """Runs two short documents flat and alone, and the second one behind another first: equal, or flat is not for this model."""
    vocab = min(model.get_input_embeddings().weight.shape[0], 1000)
    generator = torch.Generator().manual_seed(0)
    one, other, two = (torch.randint(3, max(4, vocab), (n,), generator=generator) for n in (13, 13, 9))
    try:
        model.set_attn_implementation(attention.NAME)
        with autocast():
            flat, changed = (_flat_logits(model, [first, two]) for first in (one, other))
            alone = torch.cat([_flat_logits(model, [d]) for d in (one, two)])
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        return Proof(False, f"this model does not take flat rows: {str(error).splitlines()[0][:120]}")
    size = alone.abs().max().item()
    leak = (flat[13:] - changed[13:]).abs().max().item() / size
    off = (flat - alone).abs().max().item() / size
    dtype = torch.get_autocast_dtype(flat.device.type) if autocast is not _no_autocast else model.dtype
    allowed = 1e-4 if dtype == torch.float32 else 5e-2
    if leak > 1e-5 if dtype == torch.float32 else leak > 1e-2:
        return Proof(False, f"a document flat sees the one before it (logits move by {leak:.1e})")
    if not off <= allowed:
        return Proof(False, f"two documents flat are not the same two alone (logits off by {off:.1e})")
    return Proof(True, f"two documents flat equal the same two alone (logits within {off:.0e})")


def _no_autocast():
    import contextlib

    return contextlib.nullcontext()


def flat_inputs(documents, device):
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return {
        "input_ids": torch.cat(documents).unsqueeze(0).to(device),
        "position_ids": positions.unsqueeze(0).to(device),
        "documents": attention.documents_of(positions, device),
        "use_cache": False,
    }


def _flat_logits(model, documents):
    return model(**flat_inputs(documents, model.device)).logits[0].float()


@torch.no_grad()
def prove_head(model, layout, autocast) -> Proof:
    """Whether our chunked head gives the model's own logits; where not, the model makes them at target positions."""
    head = loss.Head.of(model)
    if head is None:
        return Proof(False, "the head is no plain linear")
    inputs = flat_inputs([torch.arange(3, 12)], model.device)
    if layout == "padded":
        inputs.pop("documents")
    with autocast():
        own = head.logits(base_model(model)(**inputs).last_hidden_state[0]).float()
        theirs = model(**inputs).logits[0].float()
    off = (own - theirs).abs().max().item() / theirs.abs().max().item()
    if not off <= (1e-4 if theirs.dtype == torch.float32 and model.dtype == torch.float32 else 2e-2):
        return Proof(False, f"the model does more to its logits than its config says (off by {off:.1e})")
    return Proof(True, "logits made in chunks equal the model's own")


def base_model(model):
    """The model without its head: what gives last_hidden_state."""
    return getattr(model, model.base_model_prefix)
