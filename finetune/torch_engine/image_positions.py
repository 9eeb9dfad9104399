"""Positions of several dimensions of packed documents that show images.

Where an image's tokens have a row and a column, the model's class computes positions for padded rows. Packed documents
have those of each alone, end to end; whether the class means that is what checks.check_packed_images tries.
"""

import inspect

import numpy as np
import torch
from torch import nn

from finetune.arrays import Per
from finetune.engine import Batch

FUNCTION = "get_rope_index"  # of transformers' classes that have such positions


def packed_positions(model: nn.Module, batch: Batch) -> torch.Tensor | None:
    """[P, 1, S] on the host, of a flat batch; None if it shows no image, or the class has positions of one dimension.
    `model`: the one without its head.
    """
    find = getattr(model, FUNCTION, None)
    given = {name: torch.as_tensor(a.values) for name, a in batch.arrays.items() if a.is_input}
    if find is None or not any(a.per is Per.IMAGE and len(a.values) for a in batch.arrays.values() if a.is_input):
        return None
    taken = inspect.signature(find).parameters
    lengths_D = torch.from_numpy(np.bincount(batch.document_ids_BS[0]))
    real_DS = torch.arange(int(lengths_D.max())) < lengths_D[:, None]
    beside = {}
    for name, values in given.items():
        if name in taken:
            of_positions = batch.arrays[name].per is Per.POSITION
            beside[name] = _in_rows(values, real_DS) if of_positions else values
    ids_DS = _in_rows(torch.from_numpy(batch.input_ids_BS), real_DS)
    positions_PDS, _ = find(input_ids=ids_DS, attention_mask=real_DS.long(), **beside)
    return positions_PDS[:, real_DS].unsqueeze(1)


def _in_rows(flat_1S: torch.Tensor, real_DS: torch.Tensor) -> torch.Tensor:
    """A padded row of each document, zero where there is no token."""
    rows_DS = flat_1S.new_zeros(real_DS.shape)
    rows_DS[real_DS] = flat_1S[0]
    return rows_DS
