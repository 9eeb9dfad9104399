"""The size of the code: tokens and statements per folder, without docstrings and comments.

python dev/count_tokens.py [--style]

With --style also what makes a line dense, per 1,000 statements: parallel assignments (of a written tuple), conditional
expressions; and calls that unpack a tuple which the same function wrote.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where the docstrings of a module begin: (line, column)."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found


def is_parallel(node: ast.AST) -> bool:
    """True for `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def unpacked(tree: ast.Module) -> int:
    """Calls `f(*name)` where the function wrote the tuple of that name."""
    count = 0
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        written = {
            node.targets[0].id
            for node in nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Name)
        }
        stars = [arg.value for call in nodes if isinstance(call, ast.Call) for arg in call.args if is_star(arg)]
        count += sum(isinstance(value, ast.Name) and value.id in written for value in stars)
    return count


def is_star(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred)


def density(tree: ast.Module) -> Counter:
    """Statements of a file, and what --style counts."""
    nodes = list(ast.walk(tree))
    return Counter(
        statements=sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings(tree)),
        parallel=sum(map(is_parallel, nodes)),
        conditional=sum(isinstance(node, ast.IfExp) for node in nodes),
        unpacked=unpacked(tree),
    )


def num_tokens(text: str, tree: ast.Module) -> int:
    """Tokens of a file without docstrings, comments and layout."""
    docs = docstrings(tree)
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start not in docs for token in found)


def folder_of(file: Path) -> str:
    """The folder that a file is counted in; scripts and faces are `scripts`."""
    if len(file.parts) == 1:
        return "scripts"
    return "/".join(file.parts[:2]) if file.parts[0] == "finetune" and len(file.parts) > 2 else file.parts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", action="store_true", help="also what makes lines dense")
    style = parser.parse_args().style
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Counter] = {}
    for name in listed.stdout.split():
        text = (ROOT / name).read_text(encoding="utf-8")
        tree = ast.parse(text)
        one = density(tree) + Counter(tokens=num_tokens(text, tree))
        for folder in {folder_of(Path(name)), Path(name).parts[0]} - {name}:
            found.setdefault(folder, Counter()).update(one)
    found["package"] = found["finetune"] + found["scripts"]
    for folder, count in sorted(found.items()):
        line = f"{folder:28s} {count['tokens']:8,} tokens {count['statements']:7,} statements"
        if style:
            thousands = count["statements"] / 1000
            line += (
                f"  parallel {count['parallel'] / thousands:5.1f}  conditional {count['conditional'] / thousands:5.1f}"
            )
            line += f"  unpacked {count['unpacked']}"
        print(line)


if __name__ == "__main__":
    main()
