"""Settings of --mlx_config: a JSON file of settings that only MLX has."""

from dataclasses import dataclass, fields
from pathlib import Path

from finetune.errors import PlanError
from finetune.system.json_files import OPTIONAL_NUMBER, JsonFileError, read_json

SCHEMA = {
    "compile?": str,
    "length_multiple?": int,
    "cache_limit_gib?": OPTIONAL_NUMBER,
    "wired_limit_gib?": OPTIONAL_NUMBER,
    "fingerprint?": bool,
}


@dataclass(frozen=True)
class MLXOptions:
    """Settings of the MLX engine.

    `compile`: mx.compile the step: auto (on a GPU), true or false. `length_multiple`: rows are padded to multiples of
    it, so that few shapes are compiled. `cache_limit_gib`: memory that MLX keeps for reuse; `wired_limit_gib`: memory
    that macOS may not page out; null: MLX's own. `fingerprint`: compare logits with transformers at the start.
    """

    compile: str = "auto"
    length_multiple: int = 1
    cache_limit_gib: float | None = None
    wired_limit_gib: float | None = None
    fingerprint: bool = True

    @classmethod
    def read(cls, file: str | None) -> "MLXOptions":
        """The options in a file; the defaults for None. Raises PlanError."""
        if file is None:
            return cls()
        try:
            content = read_json(Path(file).expanduser(), SCHEMA)
        except FileNotFoundError:
            raise PlanError(f"--mlx_config {file}: no such file. Give a JSON file.") from None
        except JsonFileError as error:
            raise PlanError(f"--mlx_config {error}. Use a JSON object of settings.") from None
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(content) - set(known))
        if unknown:
            raise PlanError(f"--mlx_config {file}: has no setting {unknown[0]!r}. Use {', '.join(known)}.")
        found = cls(**content)
        if found.compile not in ("auto", "true", "false"):
            raise PlanError(f"--mlx_config {file}: compile is {found.compile!r}. Use auto, true or false.")
        if not 1 <= found.length_multiple <= 4096:
            raise PlanError(f"--mlx_config {file}: length_multiple is {found.length_multiple}. Use 1 to 4096.")
        for name in ("cache_limit_gib", "wired_limit_gib"):
            value = getattr(found, name)
            if value is not None and not 0 <= value < 2**20:
                raise PlanError(f"--mlx_config {file}: {name} is {value}. Use GiB from 0, or null.")
        return found
