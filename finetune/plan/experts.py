"""Mixtures of experts in the plan: the routers' loss, and what becomes of experts that do not train in full."""

from finetune.parts.memory import MemoryPlan
from finetune.parts.quantization import Quantization
from finetune.parts.trains import Adapter, Trains
from finetune.plan.asked import Asked, Notice, Said
from finetune.plan.facts import Facts


def load_balancing(asked: Asked, facts: Facts) -> Said:
    """A notice of what --router_aux_loss_coef trains where the routers are frozen."""
    coefficient = asked.router_aux_loss_coef
    if coefficient and facts.shape and not asked.trains_in_full:
        yield Notice(
            f"router_aux_loss_coef {coefficient:g}: the routers are frozen; the loss trains the adapters that feed them"
        )


def experts(facts: Facts, trains: Trains, quantization: Quantization | None, memory: MemoryPlan) -> Said:
    """A notice of what becomes of a model's experts beside an adapter."""
    if not facts.num_experts or not isinstance(trains, Adapter):
        return
    said = []
    if quantization is not None and memory.cache_dequantized:
        said.append("are quantized, with dense copies")
    elif quantization is not None:
        said.append("are quantized, and dequantized one at a time")
    if trains.dora:
        said.append("get no adapter: PEFT has no DoRA for expert weights held as one parameter")
    elif trains.targets == "all":
        said.append("get adapters of their own" + (" without dropout, as PEFT's" if trains.dropout else ""))
    yield Notice(f"{facts.num_experts} experts per layer " + "; ".join(said or ["stay frozen"]))
