"""--modules_to_save and --new_tokens: modules of the base that train in full beside adapters, under the names on disk.

A tied head is no module of mlx-lm's models: it is the embedding, and on disk a copy of it, as PEFT keeps one.
"""

from collections.abc import Collection

from finetune.adapters.modules import ending_in, inside, outermost, with_ends
from finetune.errors import PlanError
from finetune.mlx_engine.layers import leaves
from finetune.mlx_engine.model import MLXModel
from finetune.parts.trains import Adapter

TIED_HEAD = "lm_head"


def ends_of(loaded: MLXModel) -> list[str]:
    """Names of the modules with a row per token: input embeddings, and the head."""
    embedding = loaded.name_of(loaded.embedding)
    if loaded.head is None:
        return [embedding, TIED_HEAD]
    return [embedding, loaded.name_of(loaded.head)]


def modules_of(loaded: MLXModel) -> list[str]:
    """Names of all modules with weights, outer ones too."""
    found: dict[str, None] = {}
    for name in loaded.names.values():
        parts = name.split(".")[:-1]
        found |= {".".join(parts[:count]): None for count in range(1, len(parts) + 1)}
    return list(found)


def named(loaded: MLXModel, adapter: Adapter) -> list[str]:
    """Names of the modules that train in full, as the torch engine's. Raises PlanError for a word that no module's name
    ends with, and for a module that is not in the files as it trains.
    """
    ends = ends_of(loaded)
    found = ending_in(modules_of(loaded) + [end for end in ends if end == TIED_HEAD], adapter.modules)
    if adapter.grows:
        found += [name for name in ends if name not in found]
    if loaded.head is None and TIED_HEAD in found:
        found = [ends[0], *(name for name in found if name not in ends)]
    found = outermost(found)
    for name in found:
        _check_stored(loaded, name)
    return found


def words(loaded: MLXModel, adapter: Adapter) -> list[str]:
    """`modules_to_save` of adapter_config.json, see the torch engine's."""
    ends = ends_of(loaded)
    if adapter.grows or loaded.head is None and inside(ends[0], loaded.saved):
        return with_ends(adapter.modules, ends)
    return list(adapter.modules)


def paths_of(loaded: MLXModel, modules: Collection[str]) -> dict[str, str]:
    """{name on disk: path} of the weights in these modules."""
    return {name: path for path, name in loaded.names.items() if inside(name, modules)}


def tied_names(loaded: MLXModel, trained: Collection[str]) -> dict[str, str]:
    """{weight of the tied head on disk: the embedding's}, if that trains."""
    if loaded.head is not None:
        return {}
    name = f"{loaded.name_of(loaded.embedding)}.weight"
    return {f"{TIED_HEAD}.weight": name} if name in trained else {}


def _check_stored(loaded: MLXModel, module: str) -> None:
    """Raises PlanError if a weight of the module has no name of its own on disk, or is quantized there."""
    weights = paths_of(loaded, (module,))
    arrays = dict(leaves(loaded.model.parameters()))
    name, path = next(iter(weights.items()))
    owner = path.removesuffix(name.removeprefix(module))
    odd = [p for p in arrays if inside(p, (owner,)) and p not in loaded.names]
    if odd:
        raise PlanError(
            f"--modules_to_save {module}: mlx-lm rebuilds {odd[0]} while loading, so a checkpoint could not name it. "
            "Name other modules, or use --backend cpu."
        )
    if any(path.endswith(".scales") for path in weights.values()):
        raise PlanError(
            f"--modules_to_save {module}: is stored quantized, and codes do not train. Give the unquantized model it "
            "was made from."
        )
