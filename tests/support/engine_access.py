"""The internals of TorchEngine that tests look at: the one file to change when they are renamed."""

import torch


def trainable_names(engine) -> list[str]:
    """Names of all trainable parameters of the model, those of other pipeline stages included."""
    return list(engine.parallel.placement.trainable)


def trainable_params(engine) -> dict[str, torch.nn.Parameter]:
    """{name: trainable parameter} of this rank; DTensors where sharded."""
    return engine.parallel.placement.of_stage


def local_params(engine) -> dict[str, torch.nn.Parameter]:
    """{name: what the optimizer steps on}: this rank's shard of each trainable parameter, None if it has no rows."""
    return engine.parallel.local_params


def gather_full(engine, name: str, shard):
    """The full tensor of this rank's shard, on the first rank; None on the others. Collective."""
    return engine.parallel.placement.gather(name, shard)


def is_partitioned(engine) -> bool:
    """Whether DeepSpeed's ZeRO partitions gradients and moments."""
    return not engine.parallel.holds_slices


def partitioned_moments(engine) -> dict:
    """{'<parameter>.<moment>': full array} under DeepSpeed's ZeRO."""
    return engine.parallel.moments()[0]


def tp_partial(engine):
    """Names of the parameters whose gradient a tensor-parallel rank has only a part of."""
    return engine.parallel.placement.partial


def microbatch_shape(engine, batch) -> tuple[int, int]:
    """(rows, positions) that a forward of this microbatch computes on this rank."""
    return engine.forward.shape(batch)


def num_targets(engine, batch) -> int:
    """Targets of this microbatch at the positions that this rank computes."""
    return len(engine.forward.inputs(batch)[1].labels_T)


def empty_batch(engine):
    """The microbatch of a rank that has fewer of them than others in a step."""
    return engine.forward.empty_batch()


def full_shape(engine, name: str) -> tuple[int, ...]:
    return engine.parallel.placement.full_shape(name)


def process_groups(engine):
    return engine.groups


def optimizer(engine) -> torch.optim.Optimizer:
    return engine.optimizer


def counted_weights(engine):
    """The memory counter's record of weights, made once."""
    return engine.counter.standing


def chunked_head(engine):
    """The head whose loss is computed in chunks; None if the model computes its own logits."""
    return engine.forward.head


def loss_scale(engine) -> float:
    return engine.scaler.scale


def set_loss_scale(engine, scale: float) -> None:
    engine.scaler.scale = scale
