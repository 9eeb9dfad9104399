"""NEFTune: uniform noise on the input embeddings while a model trains (Jain et al. 2023, arXiv:2310.05914).

Of a document of L tokens and hidden size H the noise is in +-alpha / sqrt(L H). It is drawn from a generator of its own
that seed, step and row give: a document has the same noise packed or padded, on any rank, and in a resumed run.
B rows of the microbatch, S positions, H hidden size.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.engine import Batch
from finetune.neftune import lengths_of, limit_of, number_of


class Noise:
    """A hook on the model's input embeddings, which adds noise to the batch that `begin` announced."""

    def __init__(self, model: PreTrainedModel, alpha: float, seed: int):
        self.alpha = alpha
        self.seed = seed
        self.documents: list[tuple] = []
        model.get_input_embeddings().register_forward_hook(self._add)

    def begin(self, batch: Batch, mine: Batch) -> None:
        """The next forward is of `mine`: this rank's shard of `batch`, or the same."""
        self.documents = []
        if not batch.step:  # a check or a trial, not a step
            return
        lengths = lengths_of(batch)
        for document, row in enumerate(batch.rows):
            at_BS = mine.document_ids_BS == document
            rows, columns = np.nonzero(at_BS)
            if len(rows):
                places = rows * at_BS.shape[1] + columns, mine.position_ids_BS[at_BS]
                self.documents.append((number_of(self.seed, batch.step, row), int(lengths[document]), *places))

    def _add(self, module: nn.Module, inputs: Any, output_BSH: torch.Tensor):
        documents = self.documents
        self.documents = []
        if not module.training or not documents or output_BSH.is_meta:  # on meta: of another stage of a pipeline
            return output_BSH
        hidden = output_BSH.shape[-1]
        noise = torch.zeros_like(output_BSH).detach().view(-1, hidden)
        for number, length, at, positions in documents:
            generator = torch.Generator(output_BSH.device).manual_seed(number)
            limit = limit_of(self.alpha, length, hidden)
            drawn = torch.empty(length, hidden, dtype=noise.dtype, device=noise.device)
            drawn.uniform_(-limit, limit, generator=generator)
            if len(positions) != length:  # a shard of the sequence
                drawn = drawn[torch.from_numpy(positions).to(noise.device)]
            first = int(at[0])
            if int(at[-1]) - first == len(at) - 1:
                noise[first : first + len(at)] = drawn
            else:
                noise[torch.from_numpy(at).to(noise.device)] = drawn
        return output_BSH + noise.view_as(output_BSH)
