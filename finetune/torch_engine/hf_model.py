"""Any Hugging Face causal LM from a folder to a model ready to train: dtype, quantized base, adapters, proofs.

No list of model classes: layers are found by what they are, and what a model does is proved on the loaded model.
"""

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import conversion_mapping, core_model_loading, modeling_utils

import quantization_wrapper
from finetune import expansion, parts
from finetune.errors import OutOfMemoryError, PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.settings import CHANGES_BASE, Settings
from finetune.torch_engine import (
    adapters,
    attention,
    blocks,
    experts,
    loading,
    loss,
    memory_count,
    pipeline,
    tensor_parallel,
)

WEIGHT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_autocast": torch.float32,
    "fp16_autocast": torch.float32,
    "bf16_buffers_autocast": torch.float32,
}
SHARD_SIZE = "50GB"  # save_pretrained's own
AUTOCAST_DTYPES = {
    "bf16_autocast": torch.bfloat16,
    "fp16_autocast": torch.float16,
    "bf16_buffers_autocast": torch.bfloat16,
}


def load(folder, settings: Settings, device, batches=None, saved=None, say=print, share=None):
    """The model in evaluation mode on `device`: frozen weights in their type, base quantized, adapters on, the rest in fp32.

    `batches`: the first ones of the data, which --init_lora_weights eva starts from; `saved`: a checkpoint's tensors, which hold
    the start of one that changes the base; `say` is called with lines worth telling. Code in the model's folder is never run.
    `share`: what this rank keeps of it; the parameters then stay on meta, for parallelize.shard.
    Raises PlanError for weights that do not fit the config, OutOfMemoryError.
    """
    try:
        return _load(folder, settings, device, batches, saved, say, share)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"--model_name {folder}: loading it took more memory than there is. Use --train_type qlora "
            f"(now {settings.train_type}), --cache_dequantized false (now {settings.cache_dequantized}) or a smaller model."
        ) from error


def out_of_memory(error) -> bool:
    """Whether it is torch's or Python's word for memory that is not there; the CPU allocator raises a plain RuntimeError."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _load(folder, settings, device, batches, saved, say, share):
    dtype, config = WEIGHT_DTYPES[settings.precision], quantization(settings)
    if share is not None:  # what is read and let go leaves no holes between the rows that stay
        memory_count.map_blocks_from(2**20)
    model = loading.empty_model(folder, dtype)
    if settings.tp_degree > 1:  # what its class cannot do is said before weights are read
        tensor_parallel.plan_of(model, f"--tp_degree {settings.tp_degree}")
    if settings.pp_degree > 1:
        pipeline.stages_of(model, settings.pp_degree)
    new = new_blocks(model, folder, settings)
    linears = [n for n in adapters.linear_names(model) if not blocks.inside(n, new)]
    moe = [n for n in experts.reachable(model) if not blocks.inside(n, new)]
    targets = None
    if settings.train_type != "full" and not new:
        targets = adapters.target_names(model, settings.lora_target_modules, settings.use_dora)
    # These starts look at unquantized weights, or at what flows into them: such a base is quantized after it was whole.
    whole_first = bool(targets) and (
        settings.init_lora_weights == "eva" or settings.init_lora_weights in CHANGES_BASE
    )
    quantized = {}
    if config and not whole_first:
        quantized = {f"{n}.weight": config for n in linears}
        quantized |= {
            name: config for name in experts.parameter_names(model) if name.rpartition(".")[0] in moe
        }
    workers = 1 if settings.low_memory else settings.loading_workers
    for line in loading.fill(model, folder, dtype, device, quantized, workers, experts.hold, share):
        say(f"  note: {line}")
    if settings.train_type == "full":
        model.requires_grad_(True)
        return model
    starts = None
    if settings.init_lora_weights == "eva" and whole_first:
        linear = [n for n in targets if n in linears]
        starts = adapters.eva_start(model, linear, settings, [padded_inputs(b) for b in batches])
    elif whole_first:
        starts = adapters.change_base(model, targets, settings, config, saved, device)
    if config and whole_first:
        quantization_wrapper.quantize_model(model, config, linears, device=device)
        experts.quantize(model, config, moe, device)
    elif config:
        for name in moe:
            experts.wrapped(model, name)
    if share is None:
        model.to(device)
    if settings.cache_dequantized == "true":
        cache_dequantized(model, autocast_dtype(settings) or dtype)
    if new:
        blocks.unfreeze(model, new)
    else:
        adapters.add(model, targets, settings, starts, share)
    if settings.precision == "bf16_buffers_autocast":
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(torch.bfloat16))
    return model


def new_blocks(model, folder, settings) -> list[str]:
    """Names of the layers that expand.py added, where the run trains those; else none."""
    if not settings.llama_pro_path:
        return []
    said = f"--llama_pro_path {settings.llama_pro_path}"
    return blocks.new_blocks(model, expansion.read_record(Path(folder), said), said)


def cache_dequantized(model, dtype) -> None:
    """Keeps a dense copy of every quantized weight."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.cache(dtype)


def quantization(settings):
    """How a qlora run stores its base; None for the other train types."""
    if settings.train_type != "qlora":
        return None
    return quantization_wrapper.config_for(
        settings.quantization_backend,
        settings.n_bits,
        settings.quant_type,
        settings.group_size,
        settings.double_quant,
    )


def autocast_dtype(settings):
    """What products are cast to: with new layers in fp32 between frozen ones in 16 bits, the type of the frozen ones."""
    dtype = AUTOCAST_DTYPES.get(settings.precision)
    if settings.llama_pro_path and settings.precision in ("bf16", "fp16"):
        return WEIGHT_DTYPES[settings.precision]
    return dtype


def padded_inputs(batch) -> dict:
    """A padded microbatch as the keyword arguments of a transformers model."""
    return {
        "input_ids": torch.from_numpy(batch.input_ids_BS),
        "attention_mask": torch.from_numpy((batch.document_ids_BS >= 0).astype("int64")),
    }


def load_trained(checkpoint, files, device, dtype):
    """A model to use, not to train: a folder of weights, or `files` as the base with the adapter of `checkpoint` on it."""
    model = loading.load_dense(files.folder, dtype, device).requires_grad_(False)
    if (Path(checkpoint) / "adapter_config.json").is_file():
        adapters.attach(model, checkpoint)
    elif (Path(checkpoint) / "trained_blocks.json").is_file():
        blocks.attach(model, checkpoint)
    return model


@torch.no_grad()
def merge_to_folder(checkpoint, files, target: Path, dtype: str) -> float:
    """Writes base + adapter as one model; the largest difference of its logits on one row, relative to the largest logit.

    Merged in fp32 and rounded once to `dtype`, so the figure is the rounding of that type.
    """
    model = load_trained(checkpoint, files, torch.device("cpu"), torch.float32)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (1, 24), generator=torch.Generator().manual_seed(0))
    before = model(input_ids=ids).logits
    adapters.merge(model)
    own = loading.config_dtype(files.config)
    target.mkdir(parents=True, exist_ok=True)
    write_folder(model, target, own if dtype == "auto" else WEIGHT_DTYPES[dtype])
    after = loading.load_dense(target, torch.float32)(input_ids=ids).logits
    return ((after - before).abs().max() / before.abs().max()).item()


def write_folder(model, folder, dtype: torch.dtype) -> None:
    """config.json and model.safetensors (sharded when large) in `dtype`, each renamed when whole."""
    state = model.state_dict()
    saving = Saving.of(model, {n: tuple(t.shape) for n, t in state.items()}, dtype)
    saving.write(folder, lambda name: state[name].detach().cpu())


@dataclass(frozen=True)
class Saving:
    """What transformers' save_pretrained would write of a model, settled before any weight is read: tensors then come one at a time.

    `on_disk`: {name: tensor on meta}; `turns`: names of the model's state that one conversion makes tensors of, mostly each alone.
    """

    model: object
    dtype: torch.dtype
    on_disk: dict
    turns: list

    @classmethod
    def of(cls, model, shapes: dict, dtype: torch.dtype) -> "Saving":
        """`shapes`: of the model's whole state."""
        state = {}
        for name, shape in shapes.items():
            own = model.get_parameter_or_buffer(name).dtype
            state[name] = torch.empty(shape, dtype=dtype if own.is_floating_point else own, device="meta")
        for name in model._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = modeling_utils.remove_tied_weights_from_state_dict(state, model)
        mapping = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        converters = [
            m.reverse_transform()
            for m in reversed(mapping)
            if isinstance(m, core_model_loading.WeightConverter)
        ]
        turns = {}
        for name in state:
            made, pattern = core_model_loading.apply_converters(name, converters)
            turns.setdefault((made, True) if pattern else (name, False), []).append(name)
        on_disk = core_model_loading.revert_weight_conversion(model, state)
        return cls(model, dtype, dict(on_disk), list(turns.values()))

    def write(self, folder: Path, read) -> None:
        """Writes the folder's files beside their places, then puts them there. `read(name)`: a whole tensor of the model's state,
        asked for once each, in the order of `turns`.
        """
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as beside:
            beside = Path(beside)
            self._write_configs(beside)
            from huggingface_hub import split_torch_state_dict_into_shards

            split = split_torch_state_dict_into_shards(
                self.on_disk, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_SIZE
            )
            with contextlib.ExitStack() as open_files:
                places, files = {}, []
                for name, tensors in split.filename_to_tensors.items():
                    file = open_files.enter_context(open(beside / name, "wb"))
                    header, starts = parts.header_of([_as_part(n, self.on_disk[n]) for n in tensors])
                    file.write(header)
                    files.append(file)
                    places |= {n: (file, starts[n]) for n in tensors}
                for turn in self.turns:
                    self._write_turn({n: read(n) for n in turn}, places)
                assert not places, f"{len(places)} tensors were not written, such as {next(iter(places))}"
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            if split.is_sharded:
                metadata = {
                    "total_parameters": sum(t.numel() for t in self.on_disk.values()),
                    **split.metadata,
                }
                index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (beside / "model.safetensors.index.json").write_text(text)
            for file in sorted(beside.iterdir()):
                file.replace(folder / file.name)

    def _write_configs(self, folder: Path) -> None:
        config = self.model.config
        config.dtype, config.architectures = self.dtype, [type(self.model).__name__]
        config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)

    def _write_turn(self, state: dict, places: dict) -> None:
        state = {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in state.items()}
        made = core_model_loading.revert_weight_conversion(self.model, state)
        for name in list(made):
            tensor, expected = made.pop(name), self.on_disk[name]
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), (name, tensor.shape)
            file, start = places.pop(name)
            file.seek(start)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _as_part(name: str, tensor: torch.Tensor) -> parts.Part:
    word = str(tensor.dtype).removeprefix("torch.")
    return parts.Part(
        name, {"bfloat16": "BF16"}.get(word) or parts.FROM_NUMPY[word], tuple(tensor.shape), None
    )


@dataclass(frozen=True)
class Proof:
    """What was shown on the loaded model, and the sentence that says it."""

    holds: bool
    reason: str


@torch.no_grad()
def prove_causal(model, autocast) -> None:
    """Raises PlanError where the loaded model does not run as it is, or lets a token see those after it."""
    ids = torch.arange(3, 15)[None].to(model.device) % model.get_input_embeddings().weight.shape[0]
    other = ids.clone()
    other[0, -1] = 2
    name = type(model).__name__
    try:
        with autocast():
            one, two = (model(input_ids=i, use_cache=False).logits[0, :-1].float() for i in (ids, other))
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        first = str(error).splitlines()[0][:150]
        raise PlanError(f"--model_name: {name} does not run with these adapters and types ({first}). "
                        "Use --train_type full, or another model.") from error  # fmt: skip
    moved = (one - two).abs().max().item() / max(one.abs().max().item(), 1e-30)
    if not moved <= (1e-4 if one.dtype == torch.float32 and model.dtype == torch.float32 else 2e-2):
        raise PlanError(f"--model_name: {name} lets a token see those after it (logits move by {moved:.1e}), so it is no "
                        "causal language model. Give another.")  # fmt: skip


@torch.no_grad()
def prove_flat(model, autocast, context_length: int = 0) -> Proof:
    """Two short documents flat must equal the same two alone under the model's own attention, and the second must not
    change with the first.
    """
    attention.register()
    vocab = min(model.get_input_embeddings().weight.shape[0], 1000)
    generator = torch.Generator().manual_seed(0)
    # Longer than the attention window, where rows can be: a window that is only in the model's mask would not be seen.
    window = attention_window(model)
    first_length = window + 8 if window and window < context_length else 13
    lengths = (first_length, first_length, 9)
    one, other, two = (torch.randint(3, max(4, vocab), (n,), generator=generator) for n in lengths)
    try:
        with autocast():
            alone = torch.cat(
                [model(input_ids=d[None].to(model.device)).logits[0].float() for d in (one, two)]
            )
            model.set_attn_implementation(attention.NAME)
            flat, changed = (_flat_logits(model, [first, two]) for first in (one, other))
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        return Proof(False, f"this model does not take flat rows: {str(error).splitlines()[0][:120]}")
    size = alone.abs().max().item()
    leak = (flat[first_length:] - changed[first_length:]).abs().max().item() / size
    off = (flat - alone).abs().max().item() / size
    dtype = torch.get_autocast_dtype(flat.device.type) if autocast is not _no_autocast else model.dtype
    exact = dtype == torch.float32
    allowed = 1e-4 if exact else 5e-2
    if leak > (1e-5 if exact else 1e-2):
        return Proof(False, f"a document flat sees the one before it (logits move by {leak:.1e})")
    if not off <= allowed:
        return Proof(False, f"two documents flat are not the same two alone (logits off by {off:.1e})")
    return Proof(True, f"two documents flat equal the same two alone (logits within {off:.0e})")


def attention_window(model) -> int | None:
    """Tokens a token sees back in the layers that see least, where the config says."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((n for n in found if isinstance(n, int) and n > 0), default=None)


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
    if head is None or base_model(model) is model:
        return Proof(False, "the head is no plain linear behind one decoder")
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
    parts = (
        getattr(model, model.base_model_prefix, None),
        model.get_decoder(),
        getattr(model, "model", None),
    )
    return next((part for part in parts if part is not None and part is not model), model)
