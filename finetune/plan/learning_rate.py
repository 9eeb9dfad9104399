"""The plan's rules for --lr auto: a rate from what trains, the model's width, rows per step and number of steps; and
over how many steps Adam averages squared gradients.

Sources: "LoRA Without Regret" (Schulman et al., Thinking Machines 2025): the best rate of LoRA is about ten times that
of full fine-tuning, about fifteen times in runs of less than a hundred steps, and with a scale of alpha / rank it does
not depend on the rank; the formula of Tinker's cookbook, 5e-5 x 10 x (2000 / width) ** 0.781, which gives its exponent;
and sweeps of our own, which docs/defaults.md lists with what they do not show.
"""

import math

from finetune.config import FIELDS
from finetune.data.sampler import total_steps
from finetune.parts.inits import INITS
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.optimizers import OPTIMIZERS
from finetune.plan.draft import Draft

FULL_RATE, WIDTH, EXPONENT = 5e-5, 2000, 0.781
LORA_FACTOR = 10
SHORT_RUN, LONG_RUN, SHORT_FACTOR = 100, 1000, 1.5  # steps; between the two the factor falls with their logarithm
# Noise of few rows: between none and the square root of theory (Malladi et al. 2022); fitted on four tasks, and with
# Adam's long average on three.
FEW_ROWS, ROWS_EXPONENT, ROWS_EXPONENT_OF_LONG = 8, 1 / 3, 1 / 6
ALPHA = FIELDS["lora_alpha"].default
MOST = 5e-3  # no sweep was stable above it
UNKNOWN_WIDTH = 2048  # where config.json does not say
ADDED_LAYERS_RATE = 2e-4
# Adam's second moment averages squared gradients over about 1 / (1 - beta2) steps. With torch's 1,000 a short run's
# first gradients, its largest, count until its end: its last steps are then too small where the loss falls far, and the
# best rate depends on the task. With beta2 = beta1, which is about as good as any pair (Orvieto and Gower 2025), the
# best rate hardly depends on it.
AVERAGED_PART, LEAST_AVERAGED, MOST_AVERAGED = 1 / 12, 10, 1000
BETA2 = FIELDS["adam_beta2"].default


def rows_per_step(draft: Draft) -> int:
    """Of all ranks together, once batch_size is settled."""
    return draft.values["batch_size"] * draft.values["gradient_accumulation_steps"] * draft.dims.data_ranks


def steps_of_pass(draft: Draft, rows: int) -> int:
    """Optimizer steps of one pass over so many rows."""
    return total_steps(rows, rows_per_step(draft), num_epochs=1, max_steps=-1)


def steps_of(draft: Draft, rows: int) -> int:
    """Optimizer steps of the run, with so many rows a pass."""
    return total_steps(rows, rows_per_step(draft), draft.values["num_epochs"], draft.values["max_steps"])


def auto_rate(draft: Draft, steps: int | None) -> tuple[float, str]:
    """(peak learning rate, why)."""
    values = draft.values
    width = (draft.shape and draft.shape.hidden_size) or UNKNOWN_WIDTH
    objective = OBJECTIVES[values["preference"]]
    factor = objective.rate * OPTIMIZERS[values["optimizer"]].rate
    of = f" by {values['preference']}" if objective.is_preference else ""
    of += f" with {values['optimizer']}" if OPTIMIZERS[values["optimizer"]].rate != 1 else ""
    if values["llama_pro_path"]:
        return rounded(ADDED_LAYERS_RATE * factor), f"added layers{of}"
    full = FULL_RATE * (WIDTH / width) ** EXPONENT
    if values["train_type"] == "full":
        return rounded(full * factor), f"full fine-tuning{of} of a model of width {width}"
    rate = LORA_FACTOR * full * factor * _of_scale(values) * INITS[values["init_lora_weights"]].rate
    rows = rows_per_step(draft)
    # No average is as if it were long.
    is_long = not OPTIMIZERS[values["optimizer"]].fits_beta2 or values["adam_beta2"] >= BETA2
    rate *= min(1.0, rows / FEW_ROWS) ** (ROWS_EXPONENT_OF_LONG if is_long else ROWS_EXPONENT)
    what = "DoRA" if values["use_dora"] else "LoRA"
    said = f"{what}{of} on a model of width {width}"
    if steps is not None:
        rate *= short_run_factor(steps) if is_long else 1.0
        said += f", {steps:,} step{'s' * (steps > 1)} of {rows} row{'s' * (rows > 1)}"
    return rounded(min(MOST, rate)), said + _beside(values)


def choose_adam_beta2(draft: Draft, steps: int) -> None:
    """--adam_beta2 of adapters that learn from examples by one of the Adams, if it is open."""
    values = draft.values
    is_adapter = values["train_type"] != "full" and not values["llama_pro_path"]
    if not is_adapter or OBJECTIVES[values["preference"]].is_preference:
        return
    if not OPTIMIZERS[values["optimizer"]].fits_beta2 or not draft.is_open("adam_beta2"):
        return
    averaged = min(max(steps * AVERAGED_PART, LEAST_AVERAGED), MOST_AVERAGED)
    why = f"averages squared gradients over {averaged:,.0f} of {steps:,} step{'s' * (steps > 1)}; {BETA2} over 1,000"
    draft.adjust("adam_beta2", round(1 - 1 / averaged, 4), why)


def short_run_factor(steps: int) -> float:
    """SHORT_FACTOR up to SHORT_RUN steps, falling to 1 at LONG_RUN: of runs all of whose steps Adam averages over."""
    part = math.log(LONG_RUN / min(max(steps, SHORT_RUN), LONG_RUN)) / math.log(LONG_RUN / SHORT_RUN)
    return SHORT_FACTOR**part


def trial_factor(steps: int, run_steps: int, beta2: float) -> float:
    """How much higher the rate of a trial of a run's first steps is than that of the run itself."""

    def factor(count: int) -> float:
        return short_run_factor(count) if round(1 / (1 - beta2)) >= count else 1.0

    return factor(steps) / factor(run_steps)


def _of_scale(values: dict) -> float:
    """What alpha, rsLoRA and LoRA+ divide the rate by: the change of a weight grows with rank x scale x rate of B."""
    rank, alpha = values["lora_rank"], values["lora_alpha"]
    gain = alpha / ALPHA * (math.sqrt(rank) if values["use_rslora"] else 1)
    return 1 / (gain * math.sqrt(values["loraplus_lr_ratio"]))


def _beside(values: dict) -> str:
    """The settings that changed the rate, in words."""
    said = [f"alpha {values['lora_alpha']:g}"] if values["lora_alpha"] != ALPHA else []
    said += [f"rsLoRA at rank {values['lora_rank']}"] if values["use_rslora"] else []
    said += [f"LoRA+ x {values['loraplus_lr_ratio']:g}"] if values["loraplus_lr_ratio"] != 1 else []
    said += [values["init_lora_weights"]] if INITS[values["init_lora_weights"]].rate != 1 else []
    return "".join(f", {word}" for word in said)


def rounded(rate: float) -> float:
    """To two digits."""
    return float(f"{rate:.1e}")
