"""How far the command line reaches into the package: what a plan of typed parts should bring down.

python dev/count_settings.py [--show]

Counts, outside the plan and the scripts: comparisons of a name of a flag with words (`x.train_type == "full"`,
`settings.optimizer in ("adam", "adamw")`, also with a named tuple of words of finetune/config.py); functions with a
parameter `settings`; and functions that mention preference in rooms that plain fine-tuning walks through.
"""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from finetune import config  # noqa: E402

# Flags whose values are words; of others a name such as `group` says little.
FLAGS_OF_WORDS = {name for name, f in config.FIELDS.items() if f.metadata["choices"] or f.metadata["auto"]} - {
    "backend"
}
WORDS = {name for name in vars(config) if name.isupper()}
PLAN = ("finetune/plan/", "finetune/config.py", "finetune/cli.py")
# Rooms of which preference objectives are the content.
PREFERENCE_ROOMS = ("preference", "objectives", "reference_log_probs", "data/columns.py", "data/formats.py", "preview")


def modules() -> dict[str, ast.Module]:
    """{path: tree} of the package and the three modules beside it that it is built on."""
    files = [file for name in ("finetune", "recursive") for file in (ROOT / name).rglob("*.py")]
    files += [ROOT / f"{name}.py" for name in ("backend_manager", "quantization_wrapper", "mps_fsdp_wrapper")]
    return {str(f.relative_to(ROOT)): ast.parse(f.read_text(encoding="utf-8")) for f in sorted(files)}


def is_words(node) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(is_words(n.value if isinstance(n, ast.Starred) else n) for n in node.elts)
    return isinstance(node, ast.Name) and node.id in WORDS


def flag_of(node) -> str | None:
    """The flag whose value this reads, by its name."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = node.slice.value
    return name if name in FLAGS_OF_WORDS else None


def comparisons(tree) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            flags = [f for f in map(flag_of, sides) if f]
            if flags and any(map(is_words, sides)):
                found.append((node.lineno, ast.unparse(node)))
    return found


def takes_settings(tree) -> list[tuple[int, str]]:
    return [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if arg.arg == "settings"
    ]


def mentions_preference(path: str, tree) -> list[tuple[int, str]]:
    """Names and attributes; the flag's own help and errors are prose."""
    if any(word in path for word in (*PREFERENCE_ROOMS, *PLAN)):
        return []
    found = []
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
        if isinstance(name, str) and "preference" in name.lower() and not isinstance(node, ast.alias):
            found.append((node.lineno, name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="list every place")
    show = parser.parse_args().show
    trees = modules()
    outside = {path: tree for path, tree in trees.items() if not path.startswith(PLAN)}
    for title, found in (
        ("comparisons with flag values outside the plan", {p: comparisons(t) for p, t in outside.items()}),
        ("functions with a parameter settings", {p: takes_settings(t) for p, t in trees.items()}),
        (
            "mentions of preference in the rooms of plain fine-tuning",
            {p: mentions_preference(p, t) for p, t in trees.items()},
        ),
    ):
        print(f"{title}: {sum(map(len, found.values()))} in {sum(map(bool, found.values()))} files")
        for path, places in found.items():
            for line, what in places if show else ():
                print(f"  {path}:{line}: {what}")


if __name__ == "__main__":
    main()
