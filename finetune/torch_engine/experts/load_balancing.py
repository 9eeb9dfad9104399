"""The load-balancing loss of a mixture's routers (Fedus et al. 2021, Switch Transformer), over all tokens of a step.

transformers' load_balancing_loss_func, E / N^2 sum_e F_e P_e: F_e the assignments to expert e of E, P_e the sum of its
router probabilities, N the tokens, all summed over the layers. transformers takes one forward, this engine the step
(the global-batch loss of Qiu et al. 2025). Only P has a gradient and it is a sum over tokens, so a microbatch adds
E / N^2 sum_e F_e P_e with its own P and the step's F and N, whatever the split.

T tokens, E experts, K experts per token.
"""

import sys
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.torch_engine.device import fp64_or_fp32, to_device
from finetune.torch_engine.experts.grouped import count_choices
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.transformers_internals import OutputRecorder

PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class LoadBalancing:
    """Router logits of the forwards of one step, and their loss.

    Nothing waits for the device: which tokens of the present microbatch are real, `rows_T`, comes from whoever builds
    the model's inputs, and counts stay where they are counted.
    """

    def __init__(self, model: Any, coefficient: float, groups: ProcessGroups):
        self.coefficient = coefficient
        self.groups = groups
        self.rows_T = torch.zeros(0, dtype=torch.int64)
        self.num_tokens = 0
        self.top_k = model.num_experts_per_tok  # transformers' classes with such a loss have it
        self.recording = False
        self.logits: list[torch.Tensor] = []
        self.begin()
        self.said = f"--router_aux_loss_coef {coefficient:g}"
        for router, index in routers_of(model, self.said):
            router.register_forward_hook(lambda _, __, out, index=index: self._record(out[index]))

    def _record(self, logits_TE: torch.Tensor) -> None:
        if self.recording:  # not when activations are recomputed
            self.logits.append(logits_TE)

    def use_rows(self, rows_T: np.ndarray, num_tokens: int, device: torch.device) -> None:
        """The real tokens of the present microbatch, among all `num_tokens` of it."""
        self.rows_T = to_device(rows_T, device)
        self.num_tokens = num_tokens

    def begin(self) -> None:
        """Resets the counts before a step. `losses`: fp32 scalars on the device, one per microbatch."""
        self.counts_E = torch.zeros((), dtype=torch.int64)
        self.rows = 0.0
        self.step_is_counted = False
        self.losses: list[torch.Tensor] = []

    def count(self) -> None:
        """Adds the recorded forward to the step's F and N."""
        self._add(self._take())

    def _add(self, probs: list) -> None:
        for probs_TE in probs:
            chosen_TK = torch.topk(probs_TE.index_select(0, self.rows_T), self.top_k, dim=-1).indices
            self.counts_E = self.counts_E + count_choices(chosen_TK, probs_TE.shape[-1])
            self.rows += len(chosen_TK)

    def finish_counting(self) -> None:
        """Sums F and N over all ranks that have different tokens. Collective."""
        if "data" in self.groups.process_groups:
            both = torch.cat([self.counts_E.cpu().double(), torch.tensor([self.rows], dtype=torch.float64)])
            *counts, self.rows = self.groups.all_reduce(both, "data").tolist()
            self.counts_E = torch.tensor(counts, dtype=torch.float64)
        self.step_is_counted = True

    def loss(self) -> torch.Tensor:
        """The recorded forward's part of the loss, fp32, differentiable.
        Counts the step first, if it is this forward only; collective then.
        """
        probs = self._take()
        if not self.step_is_counted:
            self._add([p.detach() for p in probs])
            self.finish_counting()
        sums_E = sum(p.index_select(0, self.rows_T).float().sum(0) for p in probs)
        exact = self.counts_E.to(fp64_or_fp32(self.counts_E.device))
        factor_E = (exact * (len(exact) / self.rows**2)).to(torch.float32)
        loss = (sums_E * to_device(factor_E, sums_E.device)).sum()
        self.losses.append(loss.detach())
        return loss

    def _take(self) -> list:
        """The recorded router probabilities, in the logits' dtype as transformers computes them."""
        logits = self.logits
        self.logits = []
        self.recording = False
        rows = [t.reshape(-1, t.shape[-1]) for t in logits]
        if not rows or any(len(t) != self.num_tokens for t in rows):
            raise PlanError(f"{self.said}: a router of this model does not give one row of logits per token. Omit it.")
        return [torch.softmax(t, -1) for t in rows]


def routers_of(model: PreTrainedModel, said: str) -> list[tuple]:
    """[(router, index of the logits in its output)]; PlanError if transformers has no such loss for this class."""
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    fits = function is not None and list(signature(function).parameters) == PARAMETERS
    if not fits or not hasattr(model, "num_experts_per_tok"):
        raise PlanError(
            f"{said}: transformers has no load-balancing loss for {type(model).__name__}. Omit --router_aux_loss_coef."
        )
    found = []
    for owner in model.modules():
        record: Any = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        for name, module in owner.named_modules() if isinstance(record, OutputRecorder) else ():
            if isinstance(module, record.target_class) and (record.layer_name or "") in name:
                found.append((module, record.index))
    found = list(dict(found).items())
    if not found:
        raise PlanError(f"{said}: no router of {type(model).__name__} gives its logits. Omit --router_aux_loss_coef.")
    return found
