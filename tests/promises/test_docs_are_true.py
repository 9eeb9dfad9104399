"""The pages are true: commands parse, snippets run, links and paths exist, tables match the code."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import expand
import export
import generate
import report
import score
import train
from backend_manager import CAPABILITIES, Backend
from dataset import build_chat_dataset, build_puzzle_dataset
from finetune import errors
from finetune.cli import read_config
from finetune.commands import COMMANDS, SHELLS
from finetune.config import DEFAULTS, FIELDS, NAMES, TrainConfig
from finetune.data.columns import RowReader
from finetune.data.reading.mixture import sources_of
from finetune.distributed.env import RankEnv
from finetune.names import translate
from finetune.parts.train_state import TrainState
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.run.diagnostics import KINDS
from recursive.recipe import of_flat, read_arguments, read_recipe
from tests.support.commands import ROOT

AT_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "dev/LOG.md")
PAGES = [*(ROOT / name for name in AT_TOP), *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "runs").glob("*.sh"))
SCRIPTS = {"train.py": train, "generate.py": generate, "score.py": score, "export.py": export, "expand.py": expand}
SCRIPTS["report.py"] = report
BUILDERS = [build_chat_dataset.build_parser(), build_puzzle_dataset.build_parser()]
PARSERS = {name: script.build_parser() for name, script in SCRIPTS.items()}
KNOWN_FLAGS = {option for parser in (*PARSERS.values(), *BUILDERS) for option in parser._option_string_actions}
# Of other programs, which pages name in running text; --config-name is Hydra's word, for pretrain.py; pytest has ours.
FOREIGN_FLAGS = {"--ntasks-per-node", "--index-url", "--cpu", "--num_processes", "--config-name", "--processor"}
FOREIGN_FLAGS |= {"--requeue", "--num_workers", "--max_failures"}  # SLURM's and examples/clusters/ray_train.py's
FOREIGN_FLAGS |= {"--adapter-path", "--lora", "--max-lora-rank", "--logdir", "--from", "--nproc_per_node"}
FOREIGN_FLAGS |= {"--signals-to-handle", "--signal", "--out", "--quick"}  # the last two: benchmarks/first_contact.py
FOREIGN_FLAGS |= {"--nnodes", "--max-restarts", "--rdzv_endpoint"}  # torchrun's
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(info string, content) of a page's fenced blocks in these languages."""
    return [(info, text) for info, text in FENCE.findall(page.read_text()) if info.split(" ")[0] in languages]


def files_of(page: Path) -> set[str]:
    """The files that a page's blocks are: the word after the language, as in ```python rows.py."""
    return {name for info, _ in FENCE.findall(page.read_text()) for name in info.split(" ")[1:] if "." in name}


def commands(text: str) -> list[list[str]]:
    """The commands of a shell text as words: continued lines joined, comments and leading assignments taken away."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [
        words[next(i for i, w in enumerate(words) if not re.match(r"\w+=", w)) :]
        for words in found
        if any(not re.match(r"\w+=", w) for w in words)
    ]


SHELL = [(named(p), words) for p in PAGES for _, text in blocks(p, "bash", "sh", "shell") for words in commands(text)]
SHELL += [(named(p), words) for p in RECIPES for words in commands(p.read_text())]
# The blocks of mps_fsdp.md need each other and a device: tests/test_mps_fsdp_guide.py runs them.
PYTHON = [(named(p), i, text) for p in PAGES if p.name != "mps_fsdp.md" for i, text in blocks(p, "python")]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# ---- commands


@pytest.mark.promise("CK_04")
@pytest.mark.parametrize(("where", "words"), SHELL, ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60])
def test_every_command_parses_and_its_plan_settles(where, words):
    match words:
        case ["python", script, *rest] if script in PARSERS:
            given = vars(PARSERS[script].parse_args(rest))
            if script == "train.py":
                for source in sources_of(given["dataset"]) if given.get("dataset") else ():
                    assert "$" in source.name or path_or_name(source.name)
                backend = Backend(given.get("backend") or "cpu") if given.get("backend") != "auto" else Backend.CPU
                resolve_plan(given, Facts(backend, CAPABILITIES[backend]))
            if script == "generate.py":
                generate.check(PARSERS[script].parse_args(rest))
        case ["python", "pretrain.py", *rest]:
            recipe_of(rest)
        case ["finetune", "completion", shell, *_]:
            assert shell in SHELLS
        case ["finetune", word, *rest]:
            module = importlib.import_module(COMMANDS[word].module)
            module.build_parser().parse_args([*COMMANDS[word].flags, *rest])
        case ["python", "-m", module, *rest] if module.startswith("dataset."):
            importlib.import_module(module).build_parser().parse_args(rest)
        case ["torchrun", *options] if "pretrain.py" in options:
            recipe_of(options[options.index("pretrain.py") + 1 :])
        case ["torchrun", *options] if "generate.py" in options:
            generate.check(PARSERS["generate.py"].parse_args(options[options.index("generate.py") + 1 :]))
        case ["torchrun", *options]:
            at = options.index("train.py")
            number = dict(o.lstrip("-").split("=") for o in options[:at] if "=" in o)
            size = int(number["nproc_per_node"]) * int(number.get("nnodes", 1))
            world = RankEnv(size=size, local_size=int(number["nproc_per_node"]), launcher="torchrun")
            given = vars(PARSERS["train.py"].parse_args(options[at + 1 :]))
            resolve_plan(given, Facts(Backend.CPU, CAPABILITIES[Backend.CPU], env=world))
        case ["srun", "python", "train.py", *rest]:
            given = vars(PARSERS["train.py"].parse_args(rest[: rest.index("||")]))
            world = RankEnv(size=16, local_size=8, launcher="srun")
            resolve_plan(given, Facts(Backend.CPU, CAPABILITIES[Backend.CPU], env=world))
        case ["examples/prepare_example_chat_dataset.sh" as script]:
            assert os.access(ROOT / script, os.X_OK)
        case ["sbatch", script, *_] | [("tests/support/two_hosts.sh" | "tests/support/slurm.sh") as script, *_]:
            assert os.access(ROOT / script, os.X_OK)
        case ["accelerate", "launch", "--config_file", file, "train.py", *rest]:
            size = yaml.safe_load((ROOT / file).read_text())["num_processes"]
            given = vars(PARSERS["train.py"].parse_args(rest))
            world = RankEnv(size=size, local_size=size, launcher="torchrun")
            resolve_plan(given, Facts(Backend.CPU, CAPABILITIES[Backend.CPU], env=world))
        case ["python", "-m", "pytest", *_]:
            assert importlib.util.find_spec("pytest")
        case ["python", script, *_]:
            assert (ROOT / script).is_file() or script in files_of(ROOT / where)
        case ["docker", "build", *rest]:
            assert rest[0] == "--build-arg" and rest[1].partition("=")[0] in (ROOT / "Dockerfile").read_text()
        case ["docker", "run", *rest]:
            ours = rest[rest.index("finetune") :]
            importlib.import_module(COMMANDS[ours[1]].module).build_parser().parse_args(ours[2:])
        case ["python", "examples/clusters/ray_train.py" as script, *rest]:
            assert (ROOT / script).is_file()
            PARSERS["train.py"].parse_args(rest[rest.index("--") + 1 :])
        case ["kubectl", "apply", "-f", file] | ["sky", "jobs", "launch", "-n", _, file, *_]:
            assert (ROOT / file).is_file()
        case ["modal", "run", "--detach", file, "--flags", flags]:
            assert (ROOT / file).is_file()
            PARSERS["train.py"].parse_args(shlex.split(flags))
        case ["python3", "-m", "venv", ".venv"] | ["source", ".venv/bin/activate"]:
            pass
        case ["make", *targets]:
            assert all(re.search(rf"^{t}:", (ROOT / "Makefile").read_text(), re.M) for t in targets)
        case ["pip", "install", "-r", file]:
            assert (ROOT / file).is_file()
        case ["pip", "install", *_]:
            pass
        case ["set" | "cd" | "if" | "export" | "exit", *_] if where.startswith("runs/"):
            pass
        case _:
            raise AssertionError(f"{where}: a command nobody checks: {words}")


def recipe_of(argv: list[str]) -> None:
    name, overrides = read_arguments(argv)
    of_flat(read_recipe(name or "cfg_chat") | overrides)


@pytest.mark.parametrize(
    ("backend", "flags", "what"),
    [
        ("mps", "--precision bf16", "bf16 -> fp16 (MPS backend doesn't support bfloat16"),
        ("mps", "--train_type qlora --quantization_backend bnb", "dequantized by plain torch operations"),
        ("mlx", "--train_type qlora --quantization_backend bnb", "on MLX there is mlx only. Use mlx, or auto."),
        ("mlx", "--train_type qlora --quantization_backend hqq", "on MLX there is mlx only. Use mlx, or auto."),
        ("mlx", "--train_type qlora --quantization_backend quanto", "on MLX there is mlx only. Use mlx, or auto."),
        ("cuda", "--precision fp16", "precision fp16"),
        ("cpu", "--precision fp32 --batch_size 1 --gradient_accumulation_steps 4", "precision fp32"),
    ],
)
def test_flags_of_one_backend_do_on_the_next_what_the_migration_page_says(backend, flags, what):
    given = vars(PARSERS["train.py"].parse_args(["--backend", backend, *flags.split()]))
    try:
        plan = resolve_plan(given, Facts(Backend(backend), CAPABILITIES[Backend(backend)]))
    except errors.PlanError as error:
        assert what in str(error)
    else:
        assert what in "\n".join([*map(str, plan.adjustments), *plan.notices, f"precision {plan.settings.precision}"])


def test_the_migration_page_has_a_command_for_every_backend_and_quantizer_of_the_guide():
    page = [" ".join(words) for where, words in SHELL if where == "docs/migration.md"]
    for flag in [*(f"backend {b}" for b in ("cpu", "cuda", "mps", "mlx")), "to mlx-lm", "to peft", "plain", "resume"]:
        assert any(f"--{flag} " in command for command in page), flag
    for name in ("bnb", "hqq", "quanto", "mlx"):
        assert any(f"--quantization_backend {name} " in command for command in page), name


def path_or_name(dataset: str) -> bool:
    return (
        (ROOT / dataset).exists()
        or dataset in FIELDS["dataset"].metadata["help"]
        or re.fullmatch(r"[\w.-]+/[\w.-]+", dataset)
    )


def test_pages_have_commands_and_snippets_at_all():
    assert len(SHELL) > 25 and len(PYTHON) >= 3


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_is_of_a_language_that_a_test_reads(page):
    """What a program prints is `text` or has no language. Rows of data.md are files of its own test."""
    read = {"bash", "python", "yaml", "json", "text", ""}
    for info, _ in FENCE.findall(page.read_text()):
        language = info.split(" ")[0]
        assert language in read or (page.name == "data.md" and " " in info), f"{named(page)}: {info}"


@pytest.mark.promise("CLI_17")
def test_no_comment_follows_a_continued_line():
    for page in [*PAGES, *RECIPES]:
        assert not re.search(r"\\[ \t]+#", page.read_text()), named(page)
        assert not re.search(r"\\[ \t]+$", page.read_text(), re.M), named(page)


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_recipes_stop_at_the_first_failure_and_are_valid_shell(recipe):
    lines = recipe.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines
    assert os.access(recipe, os.X_OK)
    subprocess.run(["bash", "-n", str(recipe)], check=True)


@pytest.mark.parametrize(("page", "text"), [(named(p), t) for p in PAGES for _, t in blocks(p, "yaml")])
def test_yaml_of_the_pages_is_read(page, text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    assert read_config(str(tmp_path / "run.yaml"))


# ---- snippets


@pytest.mark.parametrize(("page", "info", "text"), PYTHON)
def test_snippets_import_what_exists_and_run_if_they_are_cheap(page, info, text, monkeypatch, tmp_path, capsys):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), f"{page}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "fine_tune":
            ours = {*NAMES, "on_step", "on_eval", "on_save", "datset"}
            assert all(k.arg in ours or isinstance(translate.known(k.arg), str) for k in node.keywords), page
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "state":
            assert node.attr in TrainState.__dataclass_fields__, page
    if "no-run" not in info:
        monkeypatch.chdir(tmp_path)
        exec(compile(tree, page, "exec"), {"__name__": "snippet"})
        assert capsys.readouterr().out


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "json")], ids=named)
def test_json_of_the_pages_is_json_and_its_rows_fit_a_format(page):
    for _, text in blocks(page, "json"):
        for line in text.splitlines():
            row = json.loads(line)
            if "event" not in row:
                assert RowReader(columns=tuple(row)).main


@pytest.mark.parametrize("name", ["chat", "completion"])
def test_the_example_rows_fit_their_format(name):
    rows = [json.loads(line) for line in (ROOT / f"examples/{name}.jsonl").read_text().splitlines()]
    assert 8 <= len(rows) <= 16
    formats = {RowReader(columns=tuple(row)).main.format for row in rows}
    assert formats == {{"chat": "chat", "completion": "prompt_completion"}[name]}


# ---- links and names


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{named(page)}: {target}"
        assert not anchor or anchor in anchors(found), f"{named(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_of_ours_that_a_page_names_exists(page):
    rooted = re.compile(r"(finetune|tests|docs|examples|runs|dev|benchmarks|\.ci)/[\w./]*")
    script = re.compile(r"(train|generate|score|export|expand|backend_manager|quantization_wrapper)\.py")
    for span in code_spans(prose(page)):
        for word in span.split():
            if rooted.fullmatch(word) or script.fullmatch(word):
                assert (ROOT / word).exists(), f"{named(page)}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_flag_a_page_names_is_one_of_ours(page):
    for line in prose(page).splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if page.name == "migration.md" and line.startswith("|"):
            line = cells[2]  # the first column is the other program's
        for span in code_spans(line):
            for flag in re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", span):
                ours = "--" + flag[2:].replace("-", "_")
                assert ours in KNOWN_FLAGS or flag in FOREIGN_FLAGS, f"{named(page)}: {flag}"


# ---- tables


def script_of(name):
    """docs/make_NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"make_{name}", ROOT / f"docs/make_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["flags", "conflicts", "migration", "trouble", "choosing"])
def test_the_generated_page_is_up_to_date(name):
    assert (ROOT / f"docs/{name}.md").read_text() == script_of(name).page(), f"run python docs/make_{name}.py"


def test_the_picture_of_the_results_is_drawn_from_their_table():
    script = script_of("results")
    assert script.PICTURE.read_text() == script.picture(), "run python docs/make_results.py"
    assert len(script.rows()) == 4 and script.picture().count("<rect") == 1 + 4 * 3


def test_flags_are_fields_are_rows_of_the_page():
    on_page = set(re.findall(r"`--(\w+)`", (ROOT / "docs/flags.md").read_text()))
    on_parser = {o[2:] for o in PARSERS["train.py"]._option_string_actions if o.startswith("--")} - {"help", "version"}
    assert on_page == on_parser == set(NAMES)
    assert set(FIELDS) == set(TrainConfig.__dataclass_fields__) == set(NAMES.values())


def test_every_exit_code_is_documented():
    codes = {c.exit_code for c in vars(errors).values() if isinstance(c, type) and hasattr(c, "exit_code")}
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs/trouble.md").read_text(), re.M)
    assert (
        {int(row) for row in rows} == codes | {0, 1, 129, 130, 131, 138, 140, 142, 143, 152} == set(errors.EXIT_CODES)
    )


def test_every_kind_of_finding_is_in_the_table_that_the_page_is_made_of():
    tree = ast.parse((ROOT / "finetune/run/diagnostics.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"]
    assert {call.args[0].value for call in calls} == set(KINDS)


def test_defaults_on_the_migration_page_are_the_defaults():
    text = (ROOT / "docs/migration.md").read_text()
    table = text[text.index("Defaults that differ:") : text.index("From Python")]
    rows = re.findall(r"^\| `--(\w+)` \| [^|]* \| ([^|]+) \|", table, re.M)
    assert len(rows) > 15
    for name, on_page in rows:
        default = FIELDS[name].metadata["unset"] or DEFAULTS[name]
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert on_page.startswith("unset") if default is None else on_page == f"`{shown}`", f"{name}: {on_page}"


def test_every_module_has_its_place_on_the_architecture_page():
    names = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/architecture.md").read_text())
    for file in [
        *ROOT.glob("*.py"),
        *(p for name in ("finetune", "recursive", "dataset") for p in (ROOT / name).rglob("*.py")),
    ]:
        if file.name != "__init__.py":
            assert any(f"/{named(file)}".endswith(f"/{name}") for name in names), named(file)


def test_the_job_on_an_apple_gpu_names_files_and_flags_that_exist():
    import yaml

    from train import build_parser

    job = yaml.safe_load((ROOT / ".github/workflows/apple.yml").read_text())["jobs"]["macos-arm64"]
    commands = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    assert job["runs-on"].startswith("macos-") and len(commands) > 5
    for command in commands:
        for word in command.split():
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
        if "train.py" in command:
            build_parser().parse_args(command.split("train.py")[1].split())
    ast.parse("\n".join(line for line in commands[commands.index(".venv/bin/python - <<'PY'") + 1 :]).split("\nPY")[0])
