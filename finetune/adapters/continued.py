"""A run that continues from a trained adapter: what --adapter settles, and its tensors in this run's rank and scale.

The function is unchanged at step 0: more rank is more rows of A and columns of B as a new adapter has them, whose
product is zero; another scale is made up for in B.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.adapters.heads import HeadRecord
from finetune.adapters.patterns import LEAF, PREFIX, Uniform, padded, parameter_of, scaling_of
from finetune.adapters.saved import CONFIG, open_adapter
from finetune.errors import PlanError
from finetune.model_files.files import BASE_RECORD, base_path, started_in_of
from finetune.model_files.hub_adapter import fetched
from finetune.parts.engine_limits import TOWER
from finetune.system.json_files import read_json

LEAST_ALPHA = 1e-6  # of a scale that trains, as of --lora_alpha


@dataclass(frozen=True)
class SavedAdapter:
    """The adapter in `folder` that training continues from: PEFT's settings. `targets`: in the words of
    --lora_target_modules.
    """

    folder: Path
    rank: int
    alpha: float
    dora: bool
    rslora: bool
    targets: str
    base: str
    revision: str | None
    digest: str | None
    modules: str | None = None  # of --modules_to_save
    new_tokens: str | None = None  # that it adds to the base's, and the run after it
    of_towers: bool = False  # it trained a tower for images
    adapts_towers: bool = False  # by adapters on its linears

    @property
    def scaling(self) -> float:
        return scaling_of(self.rank, self.alpha, self.rslora)

    def says_it_holds(self, weight: str) -> bool:
        """True for a weight of a module that is named as one of `modules`."""
        parts = weight.split(".")[:-1]
        modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(module.endswith(word) for word in (self.modules or "").split(",") if word for module in modules)

    def alpha_at(self, rank: int) -> float:
        """The alpha that gives another rank the same scale."""
        return self.scaling * (math.sqrt(rank) if self.rslora else rank)


def read_saved(folder: str, fetch: bool = True) -> SavedAdapter:
    """Content of a folder, or of a Hub adapter, downloaded if `fetch`; no weight is read. Raises PlanError for one that
    cannot be continued.
    """
    path = Path(fetched(folder, "--adapter", fetch)).expanduser()
    if not path.is_dir():
        raise PlanError(f"--adapter {folder}: is not a folder. Give the --output_dir of a run with an adapter.")
    record = HeadRecord.read(path)
    if record is not None and record.facts.module:
        raise PlanError(
            f"--adapter {folder}: was trained with --task {record.task}, and a head is not continued. Merge it first "
            f"(export.py), and train the result with --task {record.task}."
        )
    config, tensors = open_adapter(path)
    modules = config.get("modules_to_save") or []
    if not (isinstance(modules, list) and all(isinstance(name, str) and "," not in name for name in modules)):
        raise PlanError(f"--adapter {folder}: modules_to_save is {str(modules)[:80]}, must be a list of names.")
    odd = next((name for name in tensors if not (name.startswith(PREFIX) and LEAF.search(name))), None)
    if modules:
        odd = next((name for name in tensors if not name.startswith(PREFIX)), None)
    if odd:
        raise PlanError(
            f"--adapter {folder}: holds {odd[:120]}, which is not of a LoRA layer. Merge it first: export.py."
        )
    if not config["lora_alpha"] >= LEAST_ALPHA:
        alpha = str(config["lora_alpha"])[:80]
        raise PlanError(f"--adapter {folder}: lora_alpha is {alpha}, must be above 0 to train on. Merge it: export.py.")
    base, revision, digest = (config.get(key) for key in ("base_model_name_or_path", "revision", "base_digest"))
    if digest is None and (path / BASE_RECORD).is_file():
        digest = read_json(path / BASE_RECORD, {}).get("digest")
    if not isinstance(base, str) or not isinstance(revision, str | None) or not isinstance(digest, str | None):
        raise PlanError(f"--adapter {folder}: its {CONFIG} names no base model. Give a complete adapter.")
    dora = bool(config.get("use_dora"))
    rslora = bool(config.get("use_rslora"))
    base = base_path(base, started_in_of(path, config))
    return SavedAdapter(
        path,
        config["r"],
        float(config["lora_alpha"]),
        dora,
        rslora,
        _targets(config, tensors),
        base,
        revision,
        digest,
        ",".join(modules) or None,
        of_towers=any(map(TOWER.search, tensors)),
        adapts_towers=any(TOWER.search(name) and LEAF.search(name) for name in tensors),
    )


def _targets(config: dict, tensors: Iterable[str]) -> str:
    """The adapted layers, named as shortly as the config does."""
    named = config.get("target_modules")
    # Linears are named so beside experts.
    parameters = [name.removesuffix(".weight") for name in config.get("target_parameters") or ()]
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        named = None  # fewer layers than these words say
    if isinstance(named, str) and not parameters:
        return "all" if named == "all-linear" else named
    if isinstance(named, list) and all(isinstance(name, str) for name in [*named, *parameters]):
        return ",".join([*named, *parameters])
    modules = {LEAF.sub("", name.removeprefix(PREFIX)) for name in tensors if LEAF.search(name)}
    return ",".join(sorted(parameter_of(module, parameters) for module in modules))


def continued(saved: SavedAdapter, own: dict[str, np.ndarray], rank: int, scaling: float) -> dict[str, np.ndarray]:
    """This run's adapter with what is saved in it; `own`: its initial tensors by PEFT's names, full. Layers that the
    saved adapter does not have start as new ones do. Raises PlanError.
    """
    _, tensors = open_adapter(saved.folder)
    odd = next((name for name in tensors if name not in own), None)
    if odd:
        raise PlanError(
            f"--adapter {saved.folder}: adapts {LEAF.sub('', odd.removeprefix(PREFIX))}, which this run does not. "
            "Omit --lora_target_modules, or name it there."
        )
    made = {}
    for name, start in own.items():
        if name not in tensors:
            if not LEAF.search(name) and saved.says_it_holds(name):
                raise PlanError(
                    f"--adapter {saved.folder}: modules_to_save is {str(saved.modules)[:80]}, and it holds no {name}. "
                    "Give a complete adapter."
                )
            made[name] = start
            continue
        array, own_rank = tensors.own(name) if isinstance(tensors, Uniform) else (tensors[name], saved.rank)
        if name.endswith(("lora_B.weight", "lora_embedding_B")):
            array = array * np.float32(saved.scaling / scaling)
        if LEAF.search(name):
            made[name] = padded(name, array, np.asarray(start), own_rank, rank)
        else:
            made[name] = _with_rows(array, np.asarray(start))
        if made[name].shape != start.shape:
            raise PlanError(
                f"--adapter {saved.folder}: {name} is {list(array.shape)}, this base needs {list(start.shape)}. Give "
                "the base it was trained on."
            )
    return made


def _with_rows(array: np.ndarray, start: np.ndarray) -> np.ndarray:
    """A module's own weight; of one that has rows for more tokens now, those from `start`."""
    if array.shape[1:] != start.shape[1:] or len(array) > len(start):
        return array
    return np.concatenate([array, start[len(array) :]])
