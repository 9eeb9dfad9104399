"""A made-up optimizer, quantizer, objective and start of adapters, each one row and what implements it.

`python -m tests.support.made_up_rows KIND MODEL ROWS FOLDER` prints as JSON what the program says of one. A process of
its own: flags and the tables of conflicts are made from the rows when they are imported.
"""

import json
import sys

from finetune.parts.inits import INITS, InitFacts
from finetune.parts.objectives import BETA, OBJECTIVES, ObjectiveFacts
from finetune.parts.optimizers import OPTIMIZERS, OptimizerFacts
from finetune.parts.rows import Limit
from quantization_wrapper import METHODS, Method

WORD = "made_up"
HERE = "tests.support.made_up_rows"
STORED_BYTES = 12345
FLAGS = {
    "optimizer": "optimizer",
    "method": "quantization_backend",
    "objective": "preference",
    "init": "init_lora_weights",
}


def rmsprop(groups, steps, device):
    """The optimizer."""
    import torch

    return torch.optim.RMSprop(groups, lr=steps.lr)


def quantize(weight_OI, fmt) -> dict:
    """The quantizer: codes of 8 bits with a scale per row."""
    from finetune.quantizers import packing

    scale = weight_OI.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return {"packed": (weight_OI / scale).round().char(), "scale": packing.as_bits(scale)}


def dequantize(tensors: dict, dtype, shape: tuple, fmt):
    import torch

    from finetune.quantizers import packing

    return (tensors["packed"].float() * packing.as_scales(tensors["scale"], torch.float32)).to(dtype)


def objective(beta: float):
    """The objective."""
    from finetune.torch_engine.preference import DPO

    return DPO(beta=2 * beta)


def zeros(weight_OI, start, quantized) -> tuple:
    """The start: A is a slice of the weight, B zero."""
    import torch

    return weight_OI[: start.rank].clone(), torch.zeros(len(weight_OI), start.rank)


def add_row(kind: str) -> None:
    """The made-up technique, as one row."""
    if kind == "optimizer":
        OPTIMIZERS[WORD] = OptimizerFacts(
            f"{HERE}.rmsprop",
            help="made_up is made up",
            aliases=("older_made_up",),
            reads=(),
            defaults={"warmup_ratio": (0.25, "made up")},
            rate=0.01,
            moments=frozenset({"square_avg"}),
            bytes_per_weight=4,
            limits=(Limit("adapters", "is made up", "Use --train_type full"),),
        )
    elif kind == "method":
        METHODS[WORD] = Method(
            HERE,
            {8: ("made_up_codes",)},
            (64,),
            summary="made up",
            stored_bytes=lambda stored: STORED_BYTES,
            offered={8: "made up"},
        )
    elif kind == "init":
        INITS[WORD] = InitFacts("{words}: starts at nothing", f"{HERE}.zeros", rate=0.01)
    else:
        OBJECTIVES[WORD] = ObjectiveFacts(
            f"{HERE}.objective",
            "made up",
            BETA,
            beta_help="what {words} makes up",
            pairs=True,
            needs_reference=True,
            rate=0.01,
        )


def said_of(kind: str, model: str, rows: str, folder: str) -> dict:
    """What the help, the conflicts page, the plan, the prediction and two runs of two steps make of the row."""
    from docs.make_conflicts import page
    from finetune.cli import parse_overrides
    from finetune.errors import PlanError
    from finetune.estimate.memory import base_bytes, optimizer_bytes
    from finetune.estimate.model_cost import ModelCost
    from finetune.help import text_of
    from finetune.plan.make import make_plan
    from train import build_parser, fine_tune

    train_type = {"optimizer": "full", "method": "qlora"}.get(kind, "lora")
    plain = dict(
        model_name=model, dataset=rows, train_type=train_type, backend="cpu", log_to="stdout", precision="fp32"
    )
    flags = plain | {FLAGS[kind]: WORD} | (dict(n_bits=8) if kind == "method" else {})

    def planned(**changes) -> dict:
        given = {**flags, "dry_run": True, **changes}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        try:
            plan = make_plan(parse_overrides(words, build_parser(), print))
        except PlanError as error:
            return {"error": str(error)}
        cost = ModelCost(plan.shape.known, plan)
        return {
            "settings": {name: getattr(plan.settings, name) for name in (FLAGS[kind], "lr", "warmup_ratio")},
            "optimizer_bytes": optimizer_bytes(cost),
            "base_bytes": base_bytes(cost),
            "linears": len(plan.shape.linears),
            "other_weights": plan.shape.num_weights - plan.shape.linear_weights,
        }

    usual = {"optimizer": "adamw", "method": "nf4", "objective": "dpo", "init": "default"}[kind]
    found = {
        "help": text_of(FLAGS[kind], build_parser()),
        "beta": text_of("preference_beta", build_parser()),
        "conflicts": page(),
        "plan": planned(),
        "usual": planned(**{FLAGS[kind]: usual}),
        "older": planned(optimizer="older_made_up"),
        "lora": planned(train_type="lora"),
        "adam_beta1": planned(adam_beta1=0.5),
        "bits": planned(n_bits=4),
        "full": planned(train_type="full"),
    }
    run = dict(flags, output_dir=folder, batch_size=2, context_length=64, lr=1e-3)
    states = [fine_tune(**run, max_steps=2), fine_tune(**run, max_steps=4, resume="auto")]
    return found | {"steps": [state.step for state in states], "status": [state.status for state in states]}


if __name__ == "__main__":
    add_row(sys.argv[1])
    said = said_of(*sys.argv[1:])
    print("\n" + json.dumps(said))
