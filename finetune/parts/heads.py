"""Heads of a model, a row each. The tokens' is the model's own; others stand beside it and train in full."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadFacts:
    """One head. `module`: its name in the model, as transformers' class of it has it; empty: the model's own, or none.

    `task_type`: PEFT's word of it. `width`: the number of its outputs, or the argument of the objective that it is.
    It reads the hidden state of each document's last token, see ModelForward.document_outputs.
    """

    task_type: str = "CAUSAL_LM"
    module: str = ""
    width: str | int = ""


TOKENS = "tokens"
COSINE_SCALE = 20.0  # of the cosines by which vectors learn and are scored, as sentence-transformers has it
HEADS = {
    TOKENS: HeadFacts(),
    "classes": HeadFacts("SEQ_CLS", "score", "num_labels"),
    "score": HeadFacts("SEQ_CLS", "score", 1),
    "vector": HeadFacts(),
}
