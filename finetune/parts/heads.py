"""Heads of a model, a row each. The tokens' is the model's own; others stand beside it and train in full."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadFacts:
    """One head. `module`: its name in the model, as transformers' class of it has it; empty: the model's own.

    `task_type`: PEFT's word of it. `width`: the argument of the objective that is the number of its outputs.
    It reads the hidden state of each document's last token, see ModelForward.document_outputs.
    """

    task_type: str = "CAUSAL_LM"
    module: str = ""
    width: str = ""


HEADS = {"tokens": HeadFacts()}
