"""The optimizer's part of a checkpoint, as every engine writes and reads it: names, their checks, the loss scale."""

from collections.abc import Iterable, Mapping

from finetune.errors import CheckpointDamagedError, PlanError
from finetune.parts.optimizers import OPTIMIZERS

MAX_COUNT = 2**53  # more steps than a float can count
INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 2000  # torch.amp.GradScaler's; growth 2, backoff 1/2


def check_trainable(own: dict[str, tuple], saved: Mapping) -> None:
    """Raises PlanError if the checkpoint's weights are not those that train here. `own`: {name: shape}."""
    if own.keys() != saved.keys():
        odd = sorted(own.keys() ^ saved.keys())[0]
        raise PlanError(
            f"--resume: the checkpoint and this run train different tensors, such as {odd}. Omit what changes them."
        )
    for name, shape in own.items():
        if shape != tuple(saved[name].shape):
            raise PlanError(
                f"--resume: {name} is {tuple(saved[name].shape)} on disk, {shape} here. Resume with the saved settings."
            )


def check_known(keys: Iterable[str], named: Iterable[str]) -> None:
    """Raises PlanError if a '<name>.<moment>' key names a parameter that is not in `named`."""
    unknown = sorted({key.rpartition(".")[0] for key in keys} - set(named))
    if unknown:
        raise PlanError(f"--resume: the checkpoint has optimizer state for {unknown[0]}, which is not trainable here.")


def check_moments(tensors: Mapping, counts: dict, shapes: dict, optimizer: str, may_be_empty: bool) -> None:
    """Raises CheckpointDamagedError if saved moments do not fit the weights.

    `tensors`: {'<name>.<moment>': array, or anything with a shape}; `counts`: {'<name>.step': number}; `shapes`: {name:
    shape of the weight}.
    `may_be_empty`: no step may have been applied yet.
    """
    facts = OPTIMIZERS[optimizer]
    expected = facts.moments
    found: dict[str, set[str]] = {}
    if expected is None:
        return
    for key, value in tensors.items():
        name, _, moment = key.rpartition(".")
        found.setdefault(name, set()).add(moment)
        if name in shapes and tuple(value.shape) != shapes[name]:
            raise CheckpointDamagedError(
                f"optimizer.safetensors: {key} is {tuple(value.shape)}, its weight {shapes[name]}"
            )
        if str(value.dtype) not in ("float32", "F32"):
            raise CheckpointDamagedError(f"optimizer.safetensors: {key} is {value.dtype}, must be float32")
    for name, moments in found.items():
        if moments != expected:
            raise CheckpointDamagedError(
                f"optimizer.safetensors: {name} has {', '.join(sorted(moments))}; {optimizer} has "
                f"{', '.join(sorted(expected))}"
            )
        if facts.count and not 0 < counts.get(f"{name}.{facts.count}", 0) < MAX_COUNT:
            raise CheckpointDamagedError(f"train_state.json: engine.counts has no {facts.count} of {name}")
    if not found and not may_be_empty:
        raise CheckpointDamagedError("optimizer.safetensors: has no moments")


class LossScaler:
    """Loss scale of fp16 as torch.amp.GradScaler moves it: doubled after GROWTH_INTERVAL clean steps, halved on
    overflow.
    `scale` None: the loss is not scaled.
    """

    def __init__(self, scales_loss: bool):
        self.scale = INITIAL_SCALE if scales_loss else None
        self.clean_steps = 0

    @property
    def factor(self) -> float:
        return self.scale or 1.0

    def values(self) -> dict:
        """The values that a checkpoint keeps."""
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load(self, values: dict) -> None:
        """Continues with the saved scale; one that was saved without scaling, or is loaded into it, stays as it is."""
        if self.scale is not None and values["scale"] is not None:
            if not 0 < values["scale"] < MAX_COUNT:
                raise CheckpointDamagedError(f"train_state.json: engine.scale is {str(values['scale'])[:80]}")
            self.scale = values["scale"]
            self.clean_steps = values["clean_steps"]

    def lower(self) -> bool:
        """Halves the scale after an overflow; False if it cannot be lowered, so the overflow is the model's own."""
        if not self.scale or self.scale <= 1:
            return False
        self.scale = self.scale / 2
        self.clean_steps = 0
        return True

    def step(self) -> None:
        """A step without overflow."""
        if self.scale:
            self.clean_steps += 1
            if self.clean_steps % GROWTH_INTERVAL == 0:
                self.scale *= 2
