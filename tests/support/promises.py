"""Which tests show each promise of the source guides, read from their marks: `pytest -k BM_07` runs those of BM-07.

BM BackendManager, CLI flags, ENV launch and environment, MSG messages, TAB tables, Q quantization, FT parallelism, CK
checkpoints, FS mps_fsdp_wrapper, TR tiny recursive models; AT what is done after the training. A test, or one of its
parameters, is marked `@pytest.mark.promise("BM_07", ...)`.
"""

import ast
from collections import defaultdict

OTHER_SUITES = ("pytest.mark.slow", "pytest.mark.rig")


def ids_of(item) -> set[str]:
    """Ids of the promises that a collected test shows."""
    return {name for mark in item.iter_markers("promise") for name in mark.args}


def shown_by(sources: dict[str, str]) -> dict[str, list[str]]:
    """{id: the tests of the default suite that show it}, of test files given as {name: source}."""
    found = defaultdict(list)
    for file, source in sources.items():
        body = ast.parse(source).body
        if any(isinstance(node, ast.Assign) and _is_elsewhere(node) for node in body):  # pytestmark = pytest.mark.slow
            continue
        for test in (node for node in body if isinstance(node, ast.FunctionDef)):
            if not any(ast.unparse(mark) in OTHER_SUITES for mark in test.decorator_list):
                for name in (name for mark in test.decorator_list for name in _ids_in(mark)):
                    found[name].append(f"{file}::{test.name}")
    return found


def _ids_in(node) -> list[str]:
    """Ids that a decorator names, but for parameters of other suites."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
        return [argument.value for argument in node.args]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param" and _is_elsewhere(node):
        return []
    return [name for child in ast.iter_child_nodes(node) for name in _ids_in(child)]


def _is_elsewhere(node) -> bool:
    return any(mark in ast.unparse(node) for mark in OTHER_SUITES)
