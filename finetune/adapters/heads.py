"""head.json of a checkpoint: what its head beside the model's own is."""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from finetune.errors import PlanError
from finetune.parts.heads import HEADS, HeadFacts
from finetune.parts.objectives import EMBED, OBJECTIVES
from finetune.system.json_files import JsonFileError, read_json

FILE = "head.json"
SCHEMA = {"task": str, "labels": [str], "outputs": int, "pad_token_id": int}
SCHEMA |= {"messages?": (bool, type(None)), "whole?": bool}


@dataclass(frozen=True)
class HeadRecord:
    """The head of a checkpoint. `task`: a word of --task; `labels`: names of classes, by number; `outputs`: of the
    head; `pad_token_id`: the token after a row's last; `messages`: its rows were messages, which the chat template
    renders; None where an earlier version wrote it. `whole`: conversations were read to their last message; earlier
    versions read them to the last answer.
    """

    task: str
    labels: tuple[str, ...]
    outputs: int
    pad_token_id: int
    messages: bool | None = None
    whole: bool = False

    @property
    def facts(self) -> HeadFacts:
        return HEADS[OBJECTIVES[self.task].head]

    @property
    def instead(self) -> str:
        """The alternative to an answer."""
        if self.labels:
            return "Use result.classify, or generate.py."
        if self.task == EMBED:
            return "Use result.embed."
        return "Use score.py."

    @property
    def gives_vectors(self) -> bool:
        return self.facts == HEADS["vector"]

    @property
    def reads_pairs(self) -> bool:
        return OBJECTIVES[self.task].pairs

    @property
    def names(self) -> tuple[str, ...]:
        """The labels as transformers has them, which numbers those without names."""
        return self.labels or tuple(f"LABEL_{number}" for number in range(self.outputs))

    @classmethod
    def read(cls, folder: Path) -> "HeadRecord | None":
        """The record of a checkpoint or of a model folder; None without one. Raises PlanError for a damaged file."""
        file = Path(folder) / FILE
        try:
            found = read_json(file, SCHEMA)
        except FileNotFoundError:
            return None
        except JsonFileError as error:
            raise PlanError(f"{file}: {error}. Give a complete checkpoint.") from None
        if found["task"] not in OBJECTIVES or not OBJECTIVES[found["task"]].has_head:
            raise PlanError(f"{file}: names the task {found['task']!r}, which this version does not have.")
        known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        return replace(cls(**known), labels=tuple(found["labels"]))

    def to_json(self) -> dict:
        return asdict(self) | {"labels": list(self.labels)}

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
