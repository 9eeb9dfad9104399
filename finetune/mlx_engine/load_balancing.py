"""The load-balancing loss of a mixture's routers on MLX: the formula of torch_engine/experts/load_balancing.py.

T positions of a microbatch with padding, E experts, K experts per token.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from finetune.adapters.targets import ROUTERS
from finetune.engine import Batch
from finetune.errors import PlanError
from finetune.mlx_engine.model import MLXModel

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class LoadBalancing:
    """Router logits of a forward, and their loss. `logits`: of the present forward, while it is `recording`."""

    def __init__(self, loaded: MLXModel, coefficient: float):
        self.coefficient = coefficient
        self.said = f"--router_aux_loss_coef {coefficient:g}"
        self.recording = False
        self.logits: list[mx.array] = []
        config = loaded.config.get("text_config") or loaded.config
        self.num_experts = next((config[name] for name in NUM_EXPERTS if config.get(name)), 0)
        self.top_k = config.get("num_experts_per_tok") or 0
        routers = [m for path, m in loaded.model.named_modules() if self._is_router(path, m)]
        if not routers or not self.top_k:
            raise PlanError(
                f"{self.said}: mlx-lm's {loaded.model.model_type} has no router that is a linear layer. Omit it, or "
                "use --backend cpu."
            )
        for router in routers:
            self._hear(router)
        for layer in loaded.layers:
            layer._recorder = self

    def _is_router(self, path: str, module: nn.Module) -> bool:
        is_linear = isinstance(module, nn.Linear | nn.QuantizedLinear)
        return is_linear and path.rpartition(".")[2] in ROUTERS and len(module.weight) == self.num_experts

    def _hear(self, router: Any) -> None:
        kind = type(router)
        balance = self

        def forward(self, x: mx.array) -> mx.array:
            out = kind.__call__(self, x)
            if balance.recording:
                balance.logits.append(out)
            return out

        router.__class__ = type(f"Heard{kind.__name__}", (kind,), {"__call__": forward})

    def begin(self) -> None:
        """Records the forward that follows."""
        self.logits = []
        self.recording = True

    @contextlib.contextmanager
    def apart(self) -> Iterator[list[mx.array]]:
        """Context that yields a list of its own for the logits of a recomputed block, in backward too."""
        before = self.recording, self.logits
        self.recording = True
        self.logits = []
        try:
            yield self.logits
        finally:
            self.recording, self.logits = before

    def probs(self, num_positions: int) -> list[mx.array]:
        """The recorded router probabilities [T, E] of each layer, in the logits' dtype, as transformers'."""
        logits = [each.reshape(-1, each.shape[-1]) for each in self.logits]
        self.logits = []
        self.recording = False
        if not logits or any(len(each) != num_positions for each in logits):
            raise PlanError(f"{self.said}: a router of this model does not give one row of logits per token. Omit it.")
        return [mx.softmax(each, axis=-1) for each in logits]

    def counts(self, probs: list[mx.array], real_T: mx.array) -> mx.array:
        """Assignments per expert, and at the end the tokens [E + 1], over all layers. `real_T`: 1, 0 at padding."""
        counts_E = mx.zeros(self.num_experts)
        for probs_TE in probs:
            chosen_TK = mx.argpartition(-probs_TE, kth=self.top_k - 1, axis=-1)[:, : self.top_k]
            weights_TK = mx.broadcast_to(real_T[:, None], chosen_TK.shape)
            counts_E = counts_E.at[chosen_TK.reshape(-1)].add(weights_TK.reshape(-1))
        return mx.stop_gradient(mx.concatenate([counts_E, (real_T.sum() * len(probs))[None]]))

    def loss(self, probs: list[mx.array], real_T: mx.array, counts: mx.array) -> mx.array:
        """The forward's part of the loss, fp32. `counts`: of the whole step."""
        summed: Any = sum((each.astype(mx.float32) * real_T[:, None]).sum(0) for each in probs)
        return (summed * counts[:-1]).sum() * (self.num_experts / mx.square(counts[-1]))


def real_positions(batch: Batch, width: int) -> mx.array:
    """1 at each position of a token, 0 at padding, of rows that are padded to `width` [T]."""
    real = (batch.document_ids_BS >= 0).astype(np.float32)
    return mx.array(np.pad(real, ((0, 0), (0, width - real.shape[1]))).reshape(-1))
