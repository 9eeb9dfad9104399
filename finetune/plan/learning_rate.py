"""--lr auto in the plan: a rate from what trains, the model's width, rows per step and number of steps; and
over how many steps Adam averages squared gradients.

Sources: "LoRA Without Regret" (Schulman et al., Thinking Machines 2025): the best rate of LoRA is about ten times that
of full fine-tuning, about fifteen times in runs of less than a hundred steps, and with a scale of alpha / rank it does
not depend on the rank; the formula of Tinker's cookbook, 5e-5 x 10 x (2000 / width) ** 0.781, which gives its exponent;
and sweeps of our own, which docs/defaults.md lists with what they do not show.
"""

import math

from finetune.config import TrainConfig
from finetune.parts.objective import ObjectivePlan
from finetune.parts.optimizers import OPTIMIZERS
from finetune.parts.trains import Adapter, AddedLayers, Trains
from finetune.plan.amount import Length
from finetune.plan.asked import Asked, Change, Said
from finetune.plan.facts import Facts

FULL_RATE = 5e-5
WIDTH = 2000
EXPONENT = 0.781
LORA_FACTOR = 10
# steps; between the two the factor falls with their logarithm
SHORT_RUN = 100
LONG_RUN = 1000
SHORT_FACTOR = 1.5
# Noise of few rows: between none and the square root of theory (Malladi et al. 2022); fitted on four tasks, and with
# Adam's long average on three.
FEW_ROWS = 8
ROWS_EXPONENT = 1 / 3
ROWS_EXPONENT_OF_LONG = 1 / 6
ALPHA = TrainConfig.lora_alpha
MOST = 5e-3  # no sweep was stable above it
UNKNOWN_WIDTH = 2048  # where config.json does not say
ADDED_LAYERS_RATE = 2e-4
# Adam's second moment averages squared gradients over about 1 / (1 - beta2) steps. With torch's 1,000 a short run's
# first gradients, its largest, count until its end: its last steps are then too small where the loss falls far, and the
# best rate depends on the task. With beta2 = beta1, which is about as good as any pair (Orvieto and Gower 2025), the
# best rate hardly depends on it.
AVERAGED_PART = 1 / 12
LEAST_AVERAGED = 10
MOST_AVERAGED = 1000
BETA2 = TrainConfig.adam_beta2


def adam_beta2(asked: Asked, trains: Trains, objective: ObjectivePlan, steps: int | None) -> Said:
    """--adam_beta2 of adapters that learn from examples by one of the Adams, if it is open."""
    if steps is None or not isinstance(trains, Adapter) or objective.facts.is_preference:
        return
    if not OPTIMIZERS[asked.optimizer].fits_beta2 or not asked.is_open("adam_beta2"):
        return
    averaged = min(max(steps * AVERAGED_PART, LEAST_AVERAGED), MOST_AVERAGED)
    why = ""
    if averaged < steps:
        why = f"averages squared gradients over {averaged:,.0f} of {steps:,} steps; {BETA2} over 1,000"
    yield Change("adam_beta2", round(1 - 1 / averaged, 4), why)


def learning_rate(
    asked: Asked, facts: Facts, trains: Trains, objective: ObjectivePlan, length: Length, steps: int | None
) -> Said:
    """--lr auto, and the middle of a search."""
    if asked.lr == "search" or asked.is_open("lr"):
        yield Change("lr", asked.requested.get("lr", "auto"))
        width = (facts.shape and facts.shape.hidden_size) or UNKNOWN_WIDTH
        rate, why = auto_rate(asked, trains, objective, width, length.rows_per_step, steps)
        yield Change("lr", rate, why)


def auto_rate(
    asked: Asked, trains: Trains, objective: ObjectivePlan, width: int, rows: int, steps: int | None
) -> tuple[float, str]:
    """(peak learning rate, why). `rows`: per step of all ranks. `steps`: of the run, None if they are not known."""
    optimizer = OPTIMIZERS[asked.optimizer]
    factor = objective.facts.rate * optimizer.rate
    by = ""
    if objective.facts.is_preference:
        by = f" by {objective.name}"
    if optimizer.rate != 1:
        by += f" with {asked.optimizer}"
    if isinstance(trains, AddedLayers):
        return rounded(ADDED_LAYERS_RATE * factor), f"added layers{by}"
    full = FULL_RATE * (WIDTH / width) ** EXPONENT
    if not isinstance(trains, Adapter):
        return rounded(full * factor), f"full fine-tuning{by} of a model of width {width}"
    rate = LORA_FACTOR * full * factor * _of_scale(trains) * trains.init.facts.rate
    is_long = not optimizer.fits_beta2 or asked.adam_beta2 >= BETA2  # no average is as if it were long
    exponent = ROWS_EXPONENT_OF_LONG if is_long else ROWS_EXPONENT
    rate *= min(1.0, rows / FEW_ROWS) ** exponent
    kind = "DoRA" if trains.dora else "LoRA"
    said = f"{kind}{by} on a model of width {width}"
    if steps is not None:
        if is_long:
            rate *= short_run_factor(steps)
        said += f", {steps:,} step{'s' * (steps > 1)} of {rows} row{'s' * (rows > 1)}"
    return rounded(min(MOST, rate)), said + _beside(trains)


def short_run_factor(steps: int) -> float:
    """SHORT_FACTOR up to SHORT_RUN steps, falling to 1 at LONG_RUN: of runs all of whose steps Adam averages over."""
    part = math.log(LONG_RUN / min(max(steps, SHORT_RUN), LONG_RUN)) / math.log(LONG_RUN / SHORT_RUN)
    return SHORT_FACTOR**part


def trial_factor(steps: int, run_steps: int, beta2: float) -> float:
    """Rate of a trial of a run's first steps, divided by that of the run itself."""

    def factor(count: int) -> float:
        if round(1 / (1 - beta2)) >= count:
            return short_run_factor(count)
        return 1.0

    return factor(steps) / factor(run_steps)


def _of_scale(adapter: Adapter) -> float:
    """Factor of the rate for alpha, rsLoRA and LoRA+: the change of a weight grows with rank x scale x rate of B."""
    gain = adapter.alpha / ALPHA
    if adapter.rslora:
        gain *= math.sqrt(adapter.rank)
    return 1 / (gain * math.sqrt(adapter.lr_ratio))


def _beside(adapter: Adapter) -> str:
    """The settings that changed the rate, in words."""
    said = []
    if adapter.alpha != ALPHA:
        said.append(f"alpha {adapter.alpha:g}")
    if adapter.rslora:
        said.append(f"rsLoRA at rank {adapter.rank}")
    if adapter.lr_ratio != 1:
        said.append(f"LoRA+ x {adapter.lr_ratio:g}")
    if adapter.init.facts.rate != 1:
        said.append(adapter.init.word)
    if adapter.vision in ("projector", "full"):
        said.append(f"of it {adapter.vision_ratio:g} for what sees images")
    return "".join(f", {word}" for word in said)


def rounded(rate: float) -> float:
    """The rate rounded to two digits."""
    return float(f"{rate:.1e}")
