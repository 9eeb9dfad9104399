"""Every class of transformers' causal-LM mapping, made tiny from its own config class's defaults."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import generate
from finetune.checkpoint.store import steps_of
from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.attention.per_document import own_implementation
from finetune.torch_engine.experts.fused import Experts, QuantizedExperts, weight_names
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.lora.peft_format import disk_name
from finetune.torch_engine.weights.modalities import auto_class
from tests.support import tiny
from tests.support.adapters import write
from tests.support.build import load_model, torch_engine
from tests.support.runs import losses
from train import fine_tune

# What the sizes of a default configuration become, by the names that config classes give them.
SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    sliding_window=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    qk_head_dim=16,
    v_head_dim=16,
    n_positions=256,
    n_ctx=256,
    max_seq_len=256,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_inner=96,
    d_model=64,
    d_ff=96,
    n_layers=2,
    n_heads=4,
    num_layers=2,
    num_heads=4,
    embedding_size=64,
    word_embed_proj_dim=64,
    ffn_dim=96,
    ffn_hidden_size=96,
    depth=2,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    max_source_positions=64,
    max_target_positions=256,
)
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size")
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
NOT_SIZES = ("rope_parameters", "rope_scaling", "id2label", "label2id", "task_specific_params")
UNSET = ("transformers_version", "model_type", "architectures", "_name_or_path", "dtype", "torch_dtype")

_MLA = dict(head_dim=8, num_key_value_heads=4)  # the part of a head that is rotated, under multi-head latent attention
_MAMBA2_HYBRID = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16)
_GEMMA4 = dict(per_layer_config={}, hidden_size_per_layer_input=8, vocab_size_per_layer_input=128)
_INDEXED = dict(index_topk=64, index_head_dim=16, index_n_heads=4)
_DECODER = dict(is_decoder=True)
_MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]))
_TWO_KINDS = ("full_attention", "sliding_attention")
_ROPE = dict(rope_type="default", rope_theta=10000.0)
# Where the sizes above do not fit together, or a default is larger than a test should be. `text_config.x` is nested.
OVERRIDES = dict(
    axk1=_MLA,
    axk2=_MLA | _INDEXED,
    bailing_hybrid=_MLA
    | dict(num_expert_group=1, num_experts_per_token=2, linear_head_dim=16, linear_num_heads=4)
    | dict(layer_group_size=2, num_key_value_heads=4),
    bamba=_MAMBA2_HYBRID | dict(num_hidden_layers=2, attn_layer_indices=[1]),
    codegen=dict(rotary_dim=8),
    cohere_compass_text=dict(
        logit_scale=0.25, rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    ),
    dbrx={
        "attn_config.kv_n_heads": 2,
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
        "ffn_config.hidden_size": 64,
        "ffn_config.moe_top_k": 2,
    },
    deepseek_v2=_MLA | dict(num_experts_per_tok=2),
    deepseek_v3=_MLA,
    deepseek_v32=_MLA | _INDEXED,
    dots1=dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, head_dim=16),
    dots3_note={"vision_config.adapter_in_dim": 64, "vision_config.adapter_out_dim": 64}
    | {"audio_config.adapter_input_size": 64, "audio_config.adapter_out_dim": 64},
    dots3_note_text=_MLA | _INDEXED | dict(head_dim=16, per_layer_config={}, shared_experts_intermediate_size=32),
    emu3=dict(vocabulary_map={f"<|visual token {i:06}|>": i for i in range(4)} | {"<image>": 5}),
    falcon_h1=_MAMBA2_HYBRID | dict(mamba_d_ssm=128),
    gemma3n_text=dict(intermediate_size=[96, 96], activation_sparsity_pattern=[0.95, 0.0], num_kv_shared_layers=0)
    | dict(vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, laurel_rank=8),
    gemma4_text=_GEMMA4,
    gemma4_unified_text=dict(per_layer_config={}),
    glm_moe_dsa=_MLA | _INDEXED,
    gpt_neo=dict(attention_types=[[["global", "local"], 1]], attention_layers=["global", "local"], window_size=8),
    gptj=dict(rotary_dim=8),
    granitemoehybrid=_MAMBA2_HYBRID,
    hunyuan_v1_dense=dict(head_dim=16),
    hunyuan_v1_moe=dict(head_dim=16, moe_topk=2),
    kimi_linear=dict(
        linear_head_dim=16, linear_num_heads=4, num_key_value_heads=4, num_experts_per_token=2, num_expert_group=1
    ),
    laguna=dict(num_attention_heads_per_layer=[4, 4]),
    lfm2_moe=dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    mamba2=dict(num_heads=8, head_dim=16, n_groups=1, state_size=16, chunk_size=16),
    ministral=dict(head_dim=16),
    nemotron=dict(num_key_value_heads=2),
    nemotron_h=dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, chunk_size=16),
    reformer=_DECODER
    | dict(axial_pos_embds=False, attention_head_size=16, feed_forward_size=96, local_attn_chunk_length=8)
    | dict(attn_layers=["local", "local"], hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0),
    roc_bert=_DECODER
    | dict(pronunciation_embed_dim=8, pronunciation_vocab_size=16, shape_embed_dim=8, shape_vocab_size=16),
    xlm=dict(emb_dim=64, causal=True),
    xlnet=dict(d_inner=96, d_head=16),
    blt={"encoder_config.hidden_size_global": 64, "decoder_config.hidden_size_global": 64}
    | dict(encoder_hash_byte_group_vocab=32, encoder_hash_byte_group_size=[3, 4]),
    cpmant=dict(dim_ff=96, dim_head=16),
    longcat_flash=_MLA | dict(expert_ffn_hidden_size=32, zero_expert_num=2, moe_topk=2),
    marian=dict(decoder_vocab_size=128),
    qwen2_5_vl_text=_MROPE,
    qwen2_vl_text=_MROPE,
    qwen4_exp_text=dict(hc_count=2, hc_lowrank=8, ngram_vocab_size_base=32, ple_embed_dim=16, linear_key_head_dim=16)
    | dict(linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, indexer_n_heads=4)
    | dict(indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4),
    rwkv=dict(attention_hidden_size=64),
    recurrent_gemma=dict(lru_width=64),
    zamba=dict(attention_hidden_size=128, attention_head_dim=32, num_key_value_heads=4, mamba_dt_rank=4)
    | dict(layers_block_type=["linear_attention", "hybrid", "hybrid"], num_hidden_layers=3),
    xlstm=dict(embedding_dim=64, num_blocks=2, num_heads=4, chunk_size=16),
    xmod=_DECODER | dict(default_language="en_XX"),
    youtu=_MLA,
    zaya=dict(num_experts_per_tok=1, router_hidden_size=16),
    zamba2=dict(adapter_rank=8, mamba_d_state=16, chunk_size=16, attention_hidden_size=128, attention_head_dim=32)
    | dict(mamba_headdim=16, kv_channels=16, num_query_groups=4, hybrid_layer_ids=[1], num_key_value_heads=4),
)


def tiny_config(model_type: str, **changes):
    """The configuration of a model type at the sizes above; `changes` as in OVERRIDES."""
    cls = transformers.CONFIG_MAPPING[model_type]
    changes = {**OVERRIDES.get(model_type, {}), **changes}
    made = _shrunk(cls().to_dict())
    for name, value in changes.items():
        at, (*path, leaf) = made, name.split(".")
        for step in path:
            at = at.setdefault(step, {})
        at[leaf] = value
    return cls(**made)


# Limits of classes, below the length of a document of `compare`; of positions, below that of its packed row.
SHORT = dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size"), 8)
SHORT |= dict.fromkeys(("index_topk", "indexer_budget", "window_size", "chunk_size", "mamba_chunk_size"), 8)
SHORT |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx"), 64)


def short_limits(model_type: str) -> dict:
    """{path: value} of the limits in a class's configuration, as `changes` of tiny_config."""

    def visit(values: dict, path: str):
        for name, value in values.items():
            if isinstance(value, dict) and name not in NOT_SIZES:
                yield from visit(value, f"{path}{name}.")
            elif name in SHORT and type(value) is int and "vision" not in path and "audio" not in path:
                yield f"{path}{name}", SHORT[name]

    return dict(visit(tiny_config(model_type).to_dict(), ""))


def _shrunk(values: dict) -> dict:
    """The defaults with sizes made tiny, at every depth; a list with one item per layer is cut to the layers left."""
    layers = values.get("num_hidden_layers")
    return {n: _tiny(n, v, layers) for n, v in values.items() if n not in UNSET and n != "per_layer_config"}


def _tiny(name: str, value, layers: int | None):
    if isinstance(value, dict) and name not in NOT_SIZES:  # a part of a model: what is said of its own type holds
        model_type = value.get("model_type")
        return {**_shrunk(value), **OVERRIDES.get(model_type, {}), **({"model_type": model_type} if model_type else {})}
    if name in LAYER_LISTS and isinstance(value, list):
        return (list(dict.fromkeys(value)) * 2)[:2]
    if isinstance(value, list) and layers and len(value) == layers:
        return value[:2]
    if name == "is_decoder":
        return True
    if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
        return SIZES[name]
    if ("drop" in name or "jitter" in name) and isinstance(value, float):  # the same numbers in training mode
        return 0.0
    return value


def build(model_type: str, seed: int = 0, **changes):
    """The model class of a type, tiny, with random fp32 weights, on the CPU, in evaluation mode."""
    config = tiny_config(model_type, **changes)
    torch.manual_seed(seed)
    return auto_class(config).from_config(config).eval()


def model_types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_of(model_type: str) -> str:
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


# ---- against transformers and PEFT

LENGTHS = (5, 17, 30, 9, 26, 3)


@dataclass
class Compared:
    """One architecture under one train type: our engine beside transformers + PEFT, fp32.

    Differences are relative: of the mean loss, and per tensor of the gradient's largest number.
    """

    layout: str
    reason: str
    loss: float
    gradient: float
    worst: str  # the tensor whose gradient differs most
    generates: bool  # six greedy tokens are those of a forward over the whole text for each
    peer: float = 0.0  # what `gradient` is of transformers + PEFT in fp32 against theirs in fp64, if that is asked for


def compare(
    model_type: str,
    train_type: str,
    folder: Path,
    use_dora: bool = False,
    lengths=LENGTHS,
    vocab=128,
    exact: bool = False,
    **changes,
) -> Compared:
    """Trains nothing: one step's loss and gradients of both, on the same documents. Raises what the engine raises.

    `lengths`: of the documents, whose tokens are below `vocab`. `exact`: theirs computes in fp64.
    """
    model = build(model_type, **changes)
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
        tiny_config(model_type, **changes).save_pretrained(folder)  # a multimodal model's class keeps its text part
    settings = dataclasses.replace(
        TrainConfig(), precision="fp32", lr=1e-3, train_type=train_type, use_dora=use_dora, lora_rank=4, lora_alpha=8.0
    )
    settings = dataclasses.replace(settings, lora_dropout=0.0, lora_target_modules="all", microbatch_tokens=128)
    settings = dataclasses.replace(settings, context_length=max(64, *lengths))  # index_topk, see check_sparse_attention
    if train_type == "qlora":
        settings = dataclasses.replace(settings, quantization_backend="nf4")
    ours = load_model(folder, settings, torch.device("cpu"), say=lambda line: None)
    disturb(ours)
    engine = torch_engine(ours, settings, torch.device("cpu"))
    layout, reason = engine.verify("auto")["batch_layout"]
    rows = tiny.dataset(lengths, vocab)
    batches = microbatches(rows, range(len(lengths)), layout, len(lengths), 10**6, pad_id=0)
    targets = sum(batch.num_targets for batch in batches)
    mine = 0.0
    ours.train()
    for batch in batches:
        nll = engine.forward.nll(batch) / targets
        nll.backward()
        mine += nll.item()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.requires_grad}
    theirs, names = reference(ours, settings, folder, train_type)
    expected, of_fp32 = reference_loss(theirs, rows, targets), 0.0
    if exact:
        in_fp32 = {name: names[name].grad for name in gradients}
        theirs.double().zero_grad()
        expected = reference_loss(theirs, rows, targets)
        _, of_fp32 = furthest(in_fp32, names)
    worst, largest = furthest(gradients, names)
    ours.eval()
    generated = engine.generate([[5, 6, 7, 8]], 6, ())[0]
    loss = abs(mine - expected) / abs(expected)
    return Compared(layout, reason, loss, largest, worst, are_greedy(ours, [5, 6, 7, 8], generated), of_fp32)


def furthest(gradients: dict, parameters: dict) -> tuple[str, float]:
    """(name, difference) of the gradient that is furthest from its parameter's, relative to the largest of that one."""
    worst, largest = "", 0.0
    for name, gradient in gradients.items():
        other = parameters[name].grad
        if gradient is None and other is None:
            continue
        zero = torch.zeros_like(parameters[name])
        one, two = (zero if g is None else g for g in (gradient, other))
        off = ((one - two).abs().max() / two.abs().max().clamp_min(1e-3)).item()
        if off > largest:
            worst, largest = name, off
    return worst, largest


@torch.no_grad()
def are_greedy(model, prompt: list[int], generated: list[int]) -> bool:
    """Whether a forward over the whole text gives each token as its most likely one, up to a tie by rounding."""
    model.set_attn_implementation(own_implementation(model))
    for i, token in enumerate(generated):
        logits = model(input_ids=torch.tensor([prompt + generated[:i]]), use_cache=False).logits[0, -1]
        if logits.max() - logits[token] > 1e-4 * logits.abs().max():
            return False
    return True


@torch.no_grad()
def disturb(model) -> None:
    """Adapters that matter: PEFT's zero half becomes random, so that gradients of both halves are not zero."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith(("lora_B", "lora_embedding_A")):
            parameter.normal_(std=0.05, generator=generator)


def reference(ours, settings, folder: Path, train_type: str):
    """(transformers' model with PEFT's adapters of the same values, {our name: its parameter})."""
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = auto_class(config).from_pretrained(folder, dtype=torch.float32)
    if train_type == "full":
        theirs.requires_grad_(True).train()
        named = dict(theirs.named_parameters())
        return theirs, {n: named[n] for n, p in ours.named_parameters()}
    if train_type == "qlora":
        dequantized(ours, theirs)
    saved = folder.parent / f"adapter_{train_type}_{settings.use_dora}"
    write(ours, settings, saved)
    config = peft.PeftConfig.from_pretrained(saved)
    config.inference_mode = False
    theirs = peft.get_peft_model(theirs, config).train()
    named = {
        n.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): p
        for n, p in theirs.named_parameters()
    }
    pairs = {n: named[disk_name(n)] for n in adapter_parameters(ours)}
    with torch.no_grad():
        for name, parameter in adapter_parameters(ours).items():
            pairs[name].copy_(parameter)
    return theirs, pairs


@torch.no_grad()
def dequantized(ours, theirs) -> None:
    """Gives their model the base weights that ours computes with."""
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear) and not name.rpartition(".")[2].isdigit():
            weight = module.weight_of(module.stored(), torch.float32)
            target = theirs.get_submodule(name.removesuffix(".base"))
            target.weight.copy_(weight if isinstance(target, torch.nn.Linear) else weight.t())
        if isinstance(module, Experts):
            for leaf in weight_names(module.base):
                held = getattr(module.base, leaf)
                if isinstance(held, QuantizedExperts):
                    for expert in range(module.num_experts):
                        stored, weight_of = held.of(expert)
                        weight = weight_of(stored, torch.float32)
                        target = getattr(theirs.get_submodule(name), leaf)[expert]
                        target.copy_(weight.t() if module.base.is_transposed else weight)


def reference_loss(theirs, rows, targets: int) -> float:
    """Mean nll of the targets, each document alone through their model's own forward; gradients are left in it."""
    total = 0.0
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.tokens[start:end].astype("int64"))[None]
        wanted = torch.from_numpy(rows.is_target[start:end])
        labels = ids[0, 1:][wanted[1:]]
        if not len(labels):
            continue
        logits = theirs(input_ids=ids, use_cache=False).logits[0, :-1][wanted[1:]]
        nll = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / targets
        nll.backward()
        total += nll.item()
    return total


# ---- through train.py and generate.py

QUESTIONS = [{"prompt": f"question {i} {'x ' * (i % 7)}", "completion": f"answer {i * i}"} for i in range(12)]


def write_model(model_type: str, folder: Path, vocab: int = 512) -> None:
    """A folder as published: the class's configuration, its weights, a tokenizer."""
    changes, sizes = {}, tiny_config(model_type).to_dict()
    for name, value in sizes.items():
        part = value if isinstance(value, dict) and name not in NOT_SIZES else {}
        names = [f"{name}.{n}" for n in part if n in VOCABULARIES] + [name] * (name in VOCABULARIES)
        changes |= dict.fromkeys(names, vocab)
    build(model_type, **changes).save_pretrained(folder)
    tiny_config(model_type, **changes).save_pretrained(folder)
    tiny.train_tokenizer(folder)


def trains_resumes_and_answers(model_type: str, train_type: str, folder: Path) -> dict:
    """{"layout", "reason", "resumed": whether the resumed losses are equal to the bit, "answered"} of a run of 4 steps.
    Raises what the command line prints.
    """
    if not (folder / "model").exists():
        write_model(model_type, folder / "model")
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    flags = dict(model_name=str(folder / "model"), dataset=str(folder / "rows.jsonl"), train_type=train_type)
    flags |= dict(backend="cpu", batch_size=4, context_length=64, precision="fp32", lr=1e-3, log_to="stdout")
    flags |= dict(lora_target_modules="all", lora_rank=4) if train_type != "full" else {}
    flags |= dict(max_steps=4, save_every=2, keep_last=5)
    whole, cut = folder / train_type, folder / f"{train_type}_cut"
    fine_tune(**flags, output_dir=str(whole))
    fine_tune(**flags, output_dir=str(cut))
    shutil.rmtree(steps_of(cut)[0])
    fine_tune(output_dir=str(cut), resume="auto", model_name=flags["model_name"], dataset=flags["dataset"])
    settled = json.loads((whole / "run_plan.json").read_text())["settled"]
    asked = ["--checkpoint", str(whole), "--prompt", "question 3", "--max_new_tokens", "4", "--precision", "fp32"]
    code = generate.main(asked)
    resumed = losses(cut)[-4:] == losses(whole)
    return {"layout": settled["batch_layout"], "resumed": resumed, "answered": code == 0}
