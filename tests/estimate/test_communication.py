"""The formula of bytes sent, against the collectives of real ranks."""

import pytest
import torch
import transformers

from finetune.config import TrainConfig
from finetune.estimate.communication import traffic_of
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from tests.support import cases, ranks

TRAFFIC = [
    ("FSDP2 2", "nf4"),
    ("CP 2", "nf4 recomputed"),
    pytest.param("TP 2", "lora recomputed", marks=pytest.mark.slow),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("FSDP2 2", "full"),
            ("FSDP2 2", "full kept"),
            ("FSDP2 2", "lora no_sync"),
            ("FSDP2 2", "nf4 recomputed"),
            ("FSDP2 3", "full"),
            ("FSDP2 3", "nf4"),
            ("DDP 2", "full"),
            ("DDP 2", "nf4"),
            ("HSDP 2x2", "nf4"),
            ("TP 2", "full"),
            ("TP 2", "nf4"),
            ("CP 2", "full"),
            ("CP 4", "lora"),
            ("PP 2", "full"),
            ("PP 2", "nf4"),
            ("PP 4", "lora"),
            ("PP 2", "full interleaved1f1b"),
            ("PP 4", "lora interleaved1f1b"),
            ("PP 2 x FSDP2 2", "full interleaved1f1b"),
            ("FSDP2 2 x TP 2", "full"),
            ("FSDP2 2 x TP 2", "nf4 recomputed"),
            ("FSDP2 2 x CP 2", "nf4"),
            ("CP 2 x TP 2", "lora recomputed"),
            ("CP 2 x PP 2", "lora"),
            ("PP 2 x TP 2", "lora"),
            ("FSDP2 2", "full rows"),
            ("FSDP2 3", "lora rows"),
            ("HSDP 2x2", "full rows"),
            ("FSDP2 2 x TP 2", "full rows"),
            ("PP 2 x FSDP2 2", "full rows"),
            ("TP 2", "full split"),
            ("TP 2", "nf4 recomputed split"),
            ("PP 2 x TP 2", "full split"),
            ("FSDP2 2 x TP 2", "full split"),
            ("FSDP2 2 x TP 2", "nf4 recomputed split"),
            ("TP 2", "full bf16"),
            ("TP 2", "full bf16 recomputed"),
            ("FSDP2 2", "full bf16 rows"),
            ("TP 2", "full bf16 split"),
            ("PP 2", "full bf16"),
            ("CP 2", "full bf16"),
            ("FSDP2 2", "lora kto"),
            ("TP 2", "lora kto"),
            ("TP 2", "full orpo"),
            ("TP 2", "lora dpo split"),
            ("CP 2", "lora dpo"),
            ("PP 2", "lora kto"),
            ("FSDP2 2 x CP 2", "lora kto"),
            ("PP 2 x TP 2", "nf4 dpo"),
        )
    ),
]
OF_EXPERTS = [
    ("EP 2", "nf4", "mixtral"),
    ("TP 2", "lora", "mixtral"),
    ("TP 2", "full", "gpt_oss"),
    ("TP 2", "nf4 recomputed", "qwen3_moe"),
    ("TP 2", "full", "qwen2_moe"),
    ("EP 2", "lora recomputed", "qwen3_moe"),
    ("EP 2", "full kept", "gpt_oss"),
    ("EP 2 x FSDP2 2", "full", "gpt_oss"),
    ("EP 2 x FSDP2 2", "lora no_sync", "mixtral"),
    ("EP 2 x FSDP2 2", "nf4", "qwen3_moe"),
    ("DDP 2 x EP 2", "lora", "mixtral"),
    ("EP 2 x PP 2", "lora", "mixtral"),
    ("EP 2 x CP 2", "full", "mixtral"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind", "architecture"), OF_EXPERTS)
def test_bytes_sent_by_experts_over_ranks_are_those_of_the_formula(layout, kind, architecture, tmp_path):
    """The formula is given the pairs of tokens and experts that the routers chose."""
    size, case = cases.LAYOUTS[layout].world_size, dict(layout=layout, kind=kind, architecture=architecture)
    for rank, (counted, formula) in enumerate(ranks.run(size, cases.traffic_of, tmp_path, **case)):
        assert counted == formula, (rank, case)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), TRAFFIC)
def test_bytes_sent_are_those_of_the_formula(layout, kind, tmp_path):
    size, case = cases.LAYOUTS[layout].world_size, dict(layout=layout, kind=kind, architecture="llama")
    for rank, (counted, formula) in enumerate(ranks.run(size, cases.traffic_of, tmp_path, **case)):
        assert counted == formula, (rank, case)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_what_is_replicated_is_sent_in_full_by_each_rank_of_tensor_parallelism(train_type):
    """Against a Llama on meta, of which a rank of tp 4 holds a quarter but for norms and a half of each adapter."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    sizes = {name: p.numel() // (1 if "norm" in name else 4) for name, p in model.named_parameters()}
    plan = Parts(TrainConfig(quantization_backend="none", train_type=train_type, precision="fp32", batch_size=1))
    shape, dims = ModelShape.from_config(config.to_dict()).known, ParallelDims(dp_shard=2, tp=4)
    sent = traffic_of(plan, shape, dims, MicrobatchShape((32,), 32))
    in_layers = 4 * sum(n for name, n in sizes.items() if ".layers." in name)
    if train_type == "full":
        assert sent.layers == in_layers and sent.trained == 4 * sum(sizes.values())
    else:
        rank, linears = plan.trains.rank, [(n, p) for n, p in model.named_parameters() if "_proj" in n]
        # Of a column-parallel linear each rank has A in full and a quarter of B, of a row-parallel one the other way.
        adapters = sum(
            rank * (out / 4 + inner if "o_proj" not in name and "down" not in name else out + inner / 4)
            for name, (out, inner) in ((name, p.shape) for name, p in linears)
        )
        assert sent.layers - sent.trained == in_layers and sent.trained == 4 * adapters
