"""--modules_to_save: modules of the base that train in full beside the adapters, in fp32, and are saved with them.

PEFT keeps the module and a copy of it that trains; here the module itself trains, and there is no second copy. On disk
they are the same: its weights under its own name.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from finetune.adapters.modules import check_words, ending_in, inside, outermost, own_weights, with_ends
from finetune.adapters.patterns import LEAF, PREFIX
from finetune.adapters.saved import CONFIG, PEFT_FILE, SavedTensors
from finetune.model_files.vocabulary import Vocabulary
from finetune.parts.trains import Adapter
from finetune.torch_engine.lora.targets import tied
from finetune.torch_engine.weights.interfaces import GivenValues
from finetune.torch_engine.weights.modalities import vision_names
from finetune.torch_engine.weights.vocabulary import ends_of


def named(model: PreTrainedModel, adapter: Adapter) -> list[str]:
    """Names of the modules that train in full: those whose names end as asked, as PEFT reads it, and with new tokens
    embeddings and head. Raises PlanError for a word that no module's name ends with.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = ending_in(names, adapter.modules)
    if adapter.grows:
        found += [name for name in ends_of(model) if name not in found]
    found += [name for name in vision_names(model, adapter.vision) if name not in found]
    chosen = [name for name in found if any(True for _ in model.get_submodule(name).parameters())]
    return outermost(chosen)


def words(model: PreTrainedModel, adapter: Adapter) -> list[str]:
    """`modules_to_save` of adapter_config.json: the words asked for; with new tokens embeddings and head; and of tied
    ends both, since PEFT wraps each module alone.
    """
    ends = ends_of(model)
    found = [*adapter.modules, *vision_names(model, adapter.vision)]
    trained = adapter.grows or any(inside(end, named(model, adapter)) for end in ends) and tied(model)
    if trained:
        return with_ends(found, ends)
    return found


def unfreeze(
    model: PreTrainedModel, names: Collection[str], dtype: torch.dtype, local_shards: GivenValues | None = None
) -> None:
    """Makes the modules trainable, in fp32. `dtype`: of the frozen weights, in which hidden states stay."""
    for name in names:
        model.get_submodule(name).requires_grad_(True)
    keep_in_fp32(model, names, dtype, local_shards)


def keep_in_fp32(
    model: PreTrainedModel, names: Collection[str], dtype: torch.dtype, local_shards: GivenValues | None = None
) -> None:
    """The modules in fp32, as they train. What embeddings give stays in `dtype`: it is that of every layer's input. The
    weight of a tied head is theirs.
    """
    for name in names:
        module = model.get_submodule(name).to(torch.float32)
        if local_shards is not None:
            local_shards.cast(module.parameters(), torch.float32)
    embedding: Any = model.get_input_embeddings()
    trained = {id(weight) for name in names for weight in model.get_submodule(name).parameters()}
    if dtype != torch.float32 and id(embedding.weight) in trained:
        embedding.register_forward_hook(lambda module, args, out: out.to(dtype))


def in_file(folder: Path) -> dict[str, tuple]:
    """{name in the base: shape} of the modules' own weights that are saved with an adapter; none without one."""
    if not ((folder / CONFIG).is_file() and (folder / PEFT_FILE).is_file()):
        return {}
    return own_weights(SavedTensors(folder / PEFT_FILE).shapes)


def adapted_in_file(folder: Path) -> list[str]:
    """Names of the modules that a saved adapter adapts; none without one."""
    if not ((folder / CONFIG).is_file() and (folder / PEFT_FILE).is_file()):
        return []
    names = SavedTensors(folder / PEFT_FILE).shapes
    return list(dict.fromkeys(LEAF.sub("", name.removeprefix(PREFIX)) for name in names if LEAF.search(name)))


def check_saved(model: PreTrainedModel, words: object, own: Collection[str], file: Path) -> None:
    """Raises PlanError as check_words does, of the modules of this model."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    check_words(modules, words, own, file)


def vocabulary_of(model: PreTrainedModel, shapes: dict[str, tuple]) -> Vocabulary | None:
    """The rows of an adapter's own embeddings and head, if those are more than the base's."""
    sizes = [shapes[name][0] for end in ends_of(model) if (name := f"{end}.weight") in shapes]
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if sizes and max(sizes) > rows:
        return Vocabulary(rows, max(sizes))
    return None
