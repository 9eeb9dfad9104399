"""The class of transformers with a head of classes, by the architecture, as its own source says."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

MAPPING = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
GENERIC = "GenericForSequenceClassification"
OWN = re.compile(r"self\.score = nn\.Linear\(.*bias=False\)")


@cache
def _classes() -> tuple[Path, dict[str, str]]:
    """(folder of transformers' models, {model type: name of its class with a head of classes}), as its own source lists
    them, unimported.
    """
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations, "transformers is installed"
    models = Path(spec.submodule_search_locations[0]) / "models"
    source = models / "auto" / "modeling_auto.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == MAPPING for t in node.targets):
            assert isinstance(node.value, ast.Call), MAPPING
            return models, dict(ast.literal_eval(node.value.args[0]))
    raise AssertionError(f"{source} has no {MAPPING}")


def class_of(model_type: str | None) -> str | None:
    """The name of transformers' class of this architecture with a head of classes; None if there is none."""
    return _classes()[1].get(str(model_type))


def reads_last_token(model_type: str | None) -> bool:
    """True if that class has our head: a linear without bias, named `score`, of each row's last token."""
    models, classes = _classes()
    name = classes.get(str(model_type))
    folder = models / str(model_type).replace("-", "_").removesuffix("_text")
    for file in folder.glob("modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        found = re.search(rf"^class {name}\((.*?)\):(.*?)(?=^\S|\Z)", source, re.M | re.S)
        if found and (GENERIC in found[1] or OWN.search(found[2])):
            return True
    return False
