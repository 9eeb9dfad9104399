"""The formula of bytes sent, against the collectives of real ranks."""

import pytest

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
