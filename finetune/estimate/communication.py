"""Communication volume: bytes that one rank passes to each collective per step, from the degrees and tensor sizes.

FSDP2 (Zhao et al. 2023, section 3.1): all-gathers a layer's weights in forward and again in backward, those outside the
layers once per step, and reduce-scatters gradients: 2 P / N gathered and T reduced per microbatch, P0 / N gathered per
step. DDP all-reduces T once per step. Tensor parallelism (Shoeybi et al. 2019, section 3) all-reduces hidden states
twice per layer in forward and twice in backward. Expert parallelism (Lepikhin et al. 2020, section 3.2) sends each
token's hidden state to its experts and back, and their gradients. Scalars such as losses are left out: a few hundred
bytes.
"""

from dataclasses import dataclass

from finetune.distributed.parallel_dims import ParallelDims
from finetune.estimate import activations, memory
from finetune.estimate.model_cost import MicrobatchShape, ModelCost, adapted_experts
from finetune.estimate.model_shape import WITHOUT_TP_PLAN, KnownShape
from finetune.plan.parts import Parts

ROUTER_WEIGHT = 4  # bytes of a token's weight for one expert, whose gradient is a sum over slices of the expert


@dataclass(frozen=True)
class StepTraffic:
    """Tensor sizes that determine one rank's communication in a step.

    Bytes of weights and gradients are per shard group.

    `layers`, `outside`: stored weights inside and outside the decoder layers; `trained`: gradients; `partial`:
    gradients that are partial sums on each tensor-parallel rank; `tied`: of trained tied embeddings on two pipeline
    stages. With expert parallelism, `experts` and `trained_experts`: weights and gradients of one rank's experts,
    beside `layers` and `trained`. `routed`: (token, expert) pairs of this rank's tokens, over all layers with
    experts; `arrived`: of this rank's experts; `shared_experts`: layers with experts for every token. `tokens`:
    positions of each microbatch over all context-parallel ranks; `element`: bytes per hidden state element;
    `key_value_width`: elements of keys and values per token and layer; `head`: bytes of the head's weight if it
    trains; `first_is_frozen`: the input of the first layer needs no gradient; `attention_is_sliced`: by tensor
    parallelism; `shared_head`: each tensor-parallel rank computes the logits of some of the positions.
    """

    layers: int
    outside: int
    trained: int
    tokens: tuple[int, ...]
    num_layers: int
    hidden_size: int
    key_value_width: int
    experts: int = 0
    trained_experts: int = 0
    routed: int = 0
    arrived: int = 0
    shared_experts: int = 0
    attention_is_sliced: bool = True
    head: int = 0
    partial: int = 0
    tied: int = 0
    element: int = 4
    no_sync: bool = False
    keeps_gathered: bool = False
    recomputed: bool = False
    first_is_frozen: bool = False
    shared_head: bool = True


def bytes_per_step(dims: ParallelDims, work: StepTraffic, stage: int = 0) -> dict[str, int]:
    """{collective: bytes} that a rank of pipeline stage `stage` passes to it per step, by torch.distributed names."""
    found = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"), 0)
    count, positions = len(work.tokens), sum(work.tokens) // dims.cp
    exchanges = 1 if work.no_sync else count
    if dims.shards > 1:
        gathers = 1 if work.keeps_gathered else 2
        found["all_gather"] += (count * gathers * work.layers + work.outside) // dims.shards
        found["reduce_scatter"] += exchanges * work.trained
        if dims.dp_replicate > 1:
            found["all_reduce"] += exchanges * work.trained // dims.shards
            found["all_reduce"] += (
                (1 if dims.expert_shards == 1 else exchanges) * work.trained_experts // dims.expert_shards
            )
        if dims.expert_shards > 1:
            found["all_gather"] += count * gathers * work.experts // dims.expert_shards
            found["reduce_scatter"] += exchanges * work.trained_experts
    elif dims.dp_replicate > 1:
        found["all_reduce"] += work.trained
    hidden = positions * work.hidden_size * work.element
    runs = 2 if work.recomputed else 1
    if dims.tp > 1:
        frozen = work.first_is_frozen and stage == 0
        # After attention and after the MLP; recomputation does not need the output of the layer's last matmul.
        found["all_reduce"] += hidden * work.num_layers
        found["all_reduce"] += hidden * work.num_layers  # gradients of the MLP's inputs
        if work.attention_is_sliced:
            found["all_reduce"] += hidden * (work.num_layers * (1 + runs) - frozen)
        found["all_reduce"] += hidden * work.shared_experts * runs + ROUTER_WEIGHT * work.routed
        if work.shared_head and stage == dims.pp - 1:
            found["all_reduce"] += hidden + count * work.head
        found["all_reduce"] += work.partial // dims.shards
    if dims.ep > 1:  # to the experts and back, and their gradients
        pairs = work.routed + work.arrived
        found["all_to_all"] += (1 + runs) * pairs * work.hidden_size * work.element
    if dims.cp > 1:
        key_value = positions * work.key_value_width * work.element * work.num_layers
        found["all_gather"] += key_value * runs
        found["reduce_scatter"] += key_value * dims.cp
    if dims.pp > 1:
        found["send"] += hidden * ((stage > 0) + (stage < dims.pp - 1))
        found["all_reduce"] += work.tied // dims.shards
    return {name: n for name, n in found.items() if n}


def traffic_of(plan: Parts, shape: KnownShape, dims: ParallelDims, microbatch: MicrobatchShape) -> StepTraffic:
    """Tensor sizes of a step of full rows, from the model's dimensions. `microbatch`: one of them."""
    m, steps = ModelCost(shape, plan), plan.steps
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2) * (4 if m.full else m.weight)
    trained = 4 * sum(memory.trainable_tensors(m))
    stored = memory.base_bytes(m) + trained
    rank, columns = m.adapter.rank, activations.READS
    halves = [width if name.rpartition(".")[2] in columns else height for name, height, width in m.adapted]
    first = next(iter(shape.expert_matrices()), None)  # of which each rank holds A, as of a column-parallel linear
    count = shape.num_experts
    halves += [count * width if (height, width) == first else height for height, width in adapted_experts(m)]
    partial = 0 if m.full else 4 * rank * sum(halves)
    in_experts, trained_experts = memory.expert_bytes(m) if dims.ep > 1 else (0, 0)
    layers_with_experts = len(shape.expert_matrices()) // 2
    positions = steps.batch_size * steps.accumulation * plan.data.context_length
    parts = dims.tp * dims.pp
    routed = positions // dims.cp * shape.experts_per_token * layers_with_experts // dims.pp
    return StepTraffic(
        layers=(stored - outside - in_experts) // parts,
        outside=outside // dims.pp,
        trained=(trained - trained_experts) // parts,
        experts=in_experts // dims.ep,
        trained_experts=trained_experts // dims.ep,
        routed=routed,
        arrived=routed,  # if the routers are balanced
        shared_experts=sum(".shared_expert" in n and n.endswith("down_proj") for n, _, _ in shape.linears) // dims.pp,
        attention_is_sliced=shape.kind not in WITHOUT_TP_PLAN,
        tokens=(microbatch.num_tokens,) * max(1, positions // microbatch.num_tokens),
        num_layers=shape.num_layers // dims.pp,
        hidden_size=shape.hidden_size,
        key_value_width=2 * m.k,
        head=shape.vocab_size * shape.hidden_size * 4 if m.full else 0,
        partial=partial // dims.pp,
        tied=shape.vocab_size * shape.hidden_size * 4 if m.full and shape.tied else 0,
        element=m.compute,
        no_sync=plan.parallel.no_sync,
        keeps_gathered=not plan.parallel.reshard_after_forward,
        recomputed=plan.memory.recompute,
        first_is_frozen=not m.full,
    )
