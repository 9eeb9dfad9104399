"""Everything that is imported from transformers' undocumented modules, so that an upgrade is checked in one place.

Most map the tensors of a weight file to a model's parameters and back (merged experts, renamed layers). The public
from_pretrained and save_pretrained do the same, but hold the full model in memory. OutputRecorder says which module
gives the router logits.
"""

from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN, get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils.output_capturing import OutputRecorder

__all__ = [
    "Chunk",
    "Concatenate",
    "MergeModulelist",
    "SplitModulelist",
    "OutputRecorder",
    "converts_experts",
    "WeightConverter",
    "WeightRenaming",
    "apply_converters",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "remove_tied_weights_from_state_dict",
    "rename_source_key",
    "revert_weight_conversion",
]


def converts_experts(model_type: str) -> bool:
    """True if files of this model type hold experts one by one, as in transformers 4: Mixtral's or Qwen2-MoE's way."""
    return _MODEL_TO_CONVERSION_PATTERN.get(model_type, model_type) in ("mixtral", "qwen2_moe")
