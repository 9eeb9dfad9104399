"""Who may import whom: the arrows of docs/architecture.md, read from the source. A module's rule is its room's."""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.commands import ROOT
from tests.support.sources import nodes_of, tree_of

SCRIPTS = (
    *("train", "pretrain", "generate", "score", "export", "expand", "report"),
    *("dataset.build_chat_dataset", "dataset.build_puzzle_dataset"),
)
FRAMEWORKS = {"torch", "transformers", "mlx", "mlx_lm", "peft", "bitsandbytes", "hqq", "datasets", "accelerate"}
PACKAGES = ("finetune", "recursive", "dataset")
FOLDERS = (
    "backend",
    "adapters",
    "run",
    "system",
    "names",
    "older",
    "parts",
    "torch_engine",
    "mlx_engine",
    "quantizers",
    "plan",
    "estimate",
    "data",
    "rewards",
    "model_files",
    "checkpoint",
    "distributed",
)
# Folders without a framework, and the single files of finetune/, which are "file".
SHARED = {
    "file",
    "backend",
    "adapters",
    "run",
    "system",
    "names",
    "older",
    "parts",
    "plan",
    "estimate",
    "data",
    "rewards",
    "model_files",
    "checkpoint",
    "distributed",
}
BOTTOM = {"quantization_wrapper", "backend_manager"}
BELOW = {"backend", "system", "finetune.errors"}
# Room -> (rooms it may import at module level, packages it may import at module level).
ARROWS = {
    "script": (SHARED | BOTTOM | {"recursive"}, set()),
    "recursive": (SHARED | BOTTOM | {"recursive"}, {"numpy"}),
    "mps_fsdp_wrapper": (SHARED | BOTTOM | {"torch_engine"}, {"torch"}),
    **dict.fromkeys(SHARED, (SHARED | BOTTOM, {"numpy"})),
    "file": (SHARED | BOTTOM, {"numpy", "fastcore"}),
    "torch_engine": (
        SHARED | BOTTOM | {"torch_engine", "quantizers"},
        {"numpy", "torch", "transformers", "safetensors", "gguf", "tqdm", "triton"},
    ),
    "recursive torch_engine": (
        SHARED | BOTTOM | {"recursive", "recursive torch_engine", "torch_engine"},
        {"numpy", "torch"},
    ),
    "mlx_engine": (SHARED | BOTTOM | {"mlx_engine", "finetune.quantizers.affine"}, {"numpy", "mlx", "mlx_lm"}),
    "quantizers": ({"quantizers"}, {"numpy", "torch", "triton"}),
    "backend_manager": (BELOW | {"quantization_wrapper", "finetune.older.backend"}, set()),
    "quantization_wrapper": (BELOW, set()),
    "backend": (BELOW, set()),
    "system": ({"system", "finetune.errors"}, set()),
}
# Modules whose functions may import torch or transformers too, and which of them.
INSIDE_FUNCTIONS = {
    "backend_manager": {"torch", "mlx"},
    "finetune.backend.machine": {"torch", "mlx"},
    "finetune.older.backend": {"torch"},
    "finetune.older.mps_fsdp": {"torch"},
    "finetune.backend.probes": {"torch"},
    "quantization_wrapper": {"torch"},
    "finetune.model_files.tokenizer": {"transformers"},
    "finetune.model_files.processor": {"transformers"},
    "finetune.model_files.files": {"transformers"},
    "finetune.model_files.rope_scaling": {"transformers"},
    "finetune.system.imports": {"transformers"},
}
# Modules whose functions may import from a room above, and what.
UPWARDS_INSIDE_FUNCTIONS = {
    "quantization_wrapper": {
        *("finetune.quantizers.nf4", "finetune.quantizers.bnb", "finetune.quantizers.linear"),
        "finetune.older.quantization",
    }
}
READS_STATE_DICTS = {
    "finetune.torch_engine.older_state",
    "finetune.torch_engine.parallel.wrapper_checkpoint",
    "recursive.torch_engine.weights",
}
# Everything goes through terminal.say, which cleans it.
MAY_PRINT = {"finetune.system.terminal"}


def shipped() -> dict[str, Path]:
    """{module name: file} of everything except tests, benchmarks, examples, pages and what builds the wheel."""
    files = [*ROOT.glob("*.py"), *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))]
    names = {
        p: ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in files
        if p.name != "setup.py"
    }
    return {name: p for p, name in names.items()}


SHIPPED = shipped()
MODULES = sorted(name for name, path in SHIPPED.items() if path.name != "__init__.py")


@cache
def trees() -> dict[str, ast.Module]:
    """{module: its syntax tree} of what is shipped; not at import, as each worker imports this file."""
    return {name: tree_of(p) for name, p in SHIPPED.items()}


def nodes(module: str) -> tuple[ast.AST, ...]:
    return nodes_of(SHIPPED[module])


def nodes_of_tests() -> dict[str, tuple[ast.AST, ...]]:
    return {str(p.relative_to(ROOT)): nodes_of(p) for p in sorted((ROOT / "tests").rglob("*.py"))}


def room(module: str) -> str:
    if module in SCRIPTS:
        return "script"
    parts = module.split(".")
    if parts[0] == "recursive":
        return "recursive torch_engine" if parts[1:2] == ["torch_engine"] else "recursive"
    if parts[0] != "finetune":
        return module
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "file"


def name_of_room(module: str) -> str:
    """The folder of finetune/ that a module is in, or the file itself."""
    parts = module.split(".")
    if parts[0] == "recursive":
        return room(module)
    return parts[1] if parts[0] == "finetune" and len(parts) > 1 else parts[0]


def imported(nodes) -> set[str]:
    """Modules that these statements import: ours in full, others by their first word, without the standard library."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {w if w in SHIPPED else node.module for w in whole}
    ours = {name for name in found if name in SHIPPED}
    return ours | {name.split(".")[0] for name in found - ours} - set(sys.stdlib_module_names)


@cache
def at_module_level(module: str) -> set[str]:
    """Imports that run when the module is imported: those in no function."""
    return imported(outside_of_functions(trees()[module]))


def outside_of_functions(node: ast.AST):
    """The nodes below one, without those of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from outside_of_functions(child)


@cache
def everywhere(module: str) -> set[str]:
    return imported(nodes(module))


def test_each_module_imports_only_what_its_room_may():
    for module in MODULES:
        ours, packages = ARROWS[room(module)]
        for name in at_module_level(module):
            if name in SHIPPED:
                assert name in ours or room(name) in ours, f"{module} imports {name}"
            else:
                assert name in packages, f"{module} imports {name} at module level"


ROOMS_OF_TORCH = ("torch_engine", "recursive torch_engine", "quantizers", "mps_fsdp_wrapper")
ENGINES = (*ROOMS_OF_TORCH, "mlx_engine")


def test_frameworks_are_imported_inside_functions_of_few_modules_only():
    for module in MODULES:
        if room(module) not in ENGINES:
            found = everywhere(module) & {"torch", "transformers", "mlx", "mlx_lm"}
            assert found <= INSIDE_FUNCTIONS.get(module, set()), module


def test_the_lowest_rooms_reach_upwards_inside_functions_and_to_named_modules_only():
    for module, allowed in UPWARDS_INSIDE_FUNCTIONS.items():
        inside = everywhere(module) - at_module_level(module)
        assert {n for n in inside if n in MODULES} <= allowed, module


def test_shared_modules_import_an_engine_only_to_open_one():
    """The loop and shared rooms use an engine; only scripts, `inference` and the quantizers' table build one, and the
    caller's settings of torch are kept where torch is.
    """
    may = {*SCRIPTS, "finetune.open_checkpoint", "finetune.callers_process", "quantization_wrapper"}
    for module in MODULES:
        if room(module) in ENGINES or module in may:
            continue
        reached = {n for n in everywhere(module) if room(n) in ENGINES}
        assert not reached, f"{module} imports {reached}"


def test_torch_and_mlx_never_meet_in_a_module_of_an_engine():
    for module in MODULES:
        if room(module) in ROOMS_OF_TORCH:
            assert not everywhere(module) & {"mlx", "mlx_lm"}, module
        if room(module) == "mlx_engine":
            assert not everywhere(module) & {"torch", "transformers"}, module


ROOMS_OF_THE_HOUSE = sorted({name_of_room(m) for m in MODULES} - {"setup"})
# Rooms that import upwards, and what they need there.
UPWARDS = {("checkpoint", "plan"): "a checkpoint holds the plan of its run, and resumes it"}
MOST_FLOORS = 12


def test_rooms_stand_on_twelve_floors_and_import_downwards():
    """A folder of finetune/, or a file beside them, is a room; it stands above all rooms that it imports."""
    below: dict[str, set[str]] = {name: set() for name in ROOMS_OF_THE_HOUSE}
    for module in MODULES:
        for name in at_module_level(module) & set(MODULES):
            below[name_of_room(module)].add(name_of_room(name))
    for room_above, rooms in below.items():
        rooms -= {room_above, *(other for here, other in UPWARDS if here == room_above)}
    floors: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():  # CycleError names rooms that import each other
        floors[name] = 1 + max((floors[other] for other in below[name]), default=0)
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda item: -item[1])


def test_imports_at_module_level_have_no_cycle():
    graph = {m: {n for n in at_module_level(m) if n in SHIPPED} for m in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_the_bottom_has_no_cycle_by_imports_inside_functions_either():
    bottom = {m for m in MODULES if m in BOTTOM or room(m) in ("backend", "system")}
    graph = {m: {n for n in everywhere(m) if n in bottom} for m in bottom}
    assert graph["backend_manager"] >= {"quantization_wrapper", "finetune.backend.detect"}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_every_module_is_reached_from_a_script():
    """By an import anywhere, or as a program of its own that another module starts by its name."""
    seen, left = set(), [*SCRIPTS, "finetune.__main__"]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        words = {n.value for n in nodes(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        words |= {word.rpartition(".")[0] for word in words}  # rows name what implements them
        left += [n for n in everywhere(module) | words if n in SHIPPED]
    assert set(MODULES) - seen == set()


def test_importing_scripts_and_shared_modules_loads_no_framework():
    modules = [m for m in MODULES if room(m) not in ENGINES]
    code = (
        f"import sys, {', '.join(modules)}\nloaded = sorted({FRAMEWORKS} & set(sys.modules))\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_nothing_is_caught_that_was_not_expected():
    """No bare except, no except Exception, no BaseException."""
    caught = []
    for name, found in ({module: nodes(module) for module in SHIPPED} | nodes_of_tests()).items():
        for node in found:
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                words = [k.id if isinstance(k, ast.Name) else "bare" if k is None else "" for k in kinds]
                caught += [f"{name}: {w}" for w in words if w in ("bare", "Exception", "BaseException")]
    assert caught == []


def calls(node, name: str) -> bool:
    return any(is_call(n, name) for n in ast.walk(node))


def is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def test_only_the_terminal_module_prints():
    assert {m for m in MODULES if any(is_call(n, "print") for n in nodes(m))} <= MAY_PRINT
    passed = {
        module
        for module in MODULES
        for n in nodes(module)
        if isinstance(n, ast.Name) and n.id == "print" and module not in MAY_PRINT
    }
    assert passed == set()


def test_a_script_checks_what_is_installed_before_it_imports_its_rooms():
    """Flags and the check itself need nothing."""
    for name in SCRIPTS:
        body = trees()[name].body
        check = next(i for i, n in enumerate(body) if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test))
        found = {node.module for node in body[:check] if isinstance(node, ast.ImportFrom)}
        assert {module for module in found if module.startswith(PACKAGES)} <= {"finetune.system", "finetune.cli"}, name


def test_only_metrics_says_something_while_a_run_lasts():
    loop = {"finetune.run.loop": ("train", "evaluate", "run_steps"), "train": ("run",), "pretrain": ("run",)}
    found = [n for m in loop for n in trees()[m].body if isinstance(n, ast.FunctionDef) and n.name in loop[m]]
    assert len(found) == 5 and not any(calls(f, "say") or calls(f, "print") for f in found)


def test_threads_start_by_the_module_of_threads_only():
    """threading's own start has no end where memory is refused, and neither do pools that use it."""
    names = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread", "to_thread"}
    for module in sorted({*MODULES} - {"finetune.system.threads"}):
        used = {n.attr for n in nodes(module) if isinstance(n, ast.Attribute)}
        used |= {a.name for n in nodes(module) if isinstance(n, ast.ImportFrom) for a in n.names}
        assert not used & names, module


def test_no_pickle_is_read_and_no_code_of_a_model_is_run():
    for module in MODULES:
        assert "pickle" not in {a.name for n in nodes(module) if isinstance(n, ast.Import) for a in n.names}
        for call in (n for n in nodes(module) if isinstance(n, ast.Call)):
            if ast.unparse(call.func) == "torch.load":  # asked for by name, and then without code
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
                assert safe and module in READS_STATE_DICTS, f"{module}:{call.lineno}"
            for keyword in call.keywords:
                if keyword.arg == "trust_remote_code":
                    assert ast.unparse(keyword.value) == "False", f"{module}:{call.lineno}"


def test_tests_mock_nothing():
    for name, found in nodes_of_tests().items():
        words = {a.name for n in found if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
        words |= {n.module for n in found if isinstance(n, ast.ImportFrom)}
        words |= {a.arg for n in found if isinstance(n, ast.FunctionDef) for a in n.args.args}
        assert not words & {"mock", "unittest.mock", "MagicMock", "pytest_mock", "mocker"}, name


# Files below the plan that may name a GPU's backend, and why. The plan, the estimate and finetune/backend/ speak of
# backends by their names; the rest asks finetune/torch_engine/device.py what a device can do.
NAMES_A_GPU = {
    "finetune/torch_engine/device.py": "what differs between devices",
    "finetune/torch_engine/parallel/process_groups.py": "which collectives a device has",
    "finetune/torch_engine/parallel/accelerate.py": "which collectives DeepSpeed is told to use",
    "finetune/quantizers/hqq.py": "the library's own rule",
    "recursive/config.py": "choices",
    "export.py": "choices",
}
BACKENDS_ROOMS = (
    "finetune/backend/",
    "finetune/plan/",
    "recursive/plan.py",
    "finetune/estimate/",
    "finetune/older/",
    "backend_manager.py",
)
OF_A_GPU = ("cuda", "nccl")


def test_a_gpus_name_is_in_backends_rooms_only():
    """What runs on a device asks what it can do: a condition on its name would leave out the next one."""
    found = set()
    for module in {*SHIPPED} - {"quantization_wrapper"}:
        name = SHIPPED[module].relative_to(ROOT).as_posix()
        for node in nodes(module):
            attribute = isinstance(node, ast.Attribute) and node.attr in OF_A_GPU
            literal = isinstance(node, ast.Constant) and node.value in OF_A_GPU
            if (attribute or literal) and not name.startswith(BACKENDS_ROOMS):
                found.add(name)
    assert found == set(NAMES_A_GPU), found ^ set(NAMES_A_GPU)


def test_a_script_beside_the_package_finds_it_from_any_folder():
    ours = {path.stem for path in ROOT.glob("*.py")} | {"finetune", "recursive", "dataset", "tests", "benchmarks"}
    late = []
    for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("dev/*.py"), *ROOT.glob("docs/*.py")]:
        before = path.read_text().partition("sys.path.insert(")[0]
        imports = [s for s in ast.walk(ast.parse(before)) if isinstance(s, (ast.Import, ast.ImportFrom))]
        names = {(getattr(s, "module", None) or s.names[0].name).partition(".")[0] for s in imports}
        if "__main__" in path.read_text() and names & ours and "cells" not in names:  # cells.py does it
            late.append(path.name)
    assert late == []
