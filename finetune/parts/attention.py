"""Attention of packed documents: one row per word of --attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionPlan:
    """Attention over packed documents. `kernels`: names of attention.varlen.KERNELS, tried in this order.

    `required`: the run ends if none of them works. `own_products`: a CPU may use matmuls where SDPA is slower.
    """

    word: str = "auto"
    kernels: tuple[str, ...] = ()
    required: bool = False
    own_products: bool = True


# What `kernels` fetches from the Hub is used only where it is asked for.
ATTENTIONS = {
    plan.word: plan
    for plan in (
        AttentionPlan("auto", ("flash-attention 3", "flash-attention 4", "varlen", "flash-attention 2")),
        AttentionPlan("varlen", ("varlen",), required=True),
        AttentionPlan(
            "flash",
            ("flash-attention 3", "flash-attention 3 of kernels", "flash-attention 4", "flash-attention 2"),
            required=True,
        ),
        AttentionPlan("sdpa", own_products=False),
        AttentionPlan("groups"),
    )
}
REQUIRED = tuple(word for word, plan in ATTENTIONS.items() if plan.required)
