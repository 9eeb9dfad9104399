"""A technique's word stands in its row and in what implements it; one row more is all that a new technique needs."""

import ast
import json
import re
import subprocess
from functools import cache

import pytest

import quantization_wrapper
from finetune.parts.inits import INITS
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.optimizers import OPTIMIZERS
from finetune.plan.conflicts import TABLES
from quantization_wrapper import METHODS
from tests.support import made_up_degree
from tests.support.commands import PYTHON, ROOT
from tests.support.made_up_rows import STORED_BYTES, WORD
from tests.support.rows import jsonl
from tests.support.sources import nodes_of
from tests.test_layering import SHIPPED

PAIRS = [{"prompt": f"{i} plus {i}? ", "chosen": f"It is {2 * i}.", "rejected": "No idea."} for i in range(12)]
# Words of a technique that are another thing too.
ALSO_OTHERS = {
    "none": "no preference, no quantizer, no tracker",
    "mlx": "a backend and an engine",
    "default": "a word of other flags",
    "embed": "a module of models",
}
ROWS = {
    "finetune.parts.optimizers": OPTIMIZERS,
    "quantization_wrapper": METHODS,
    "finetune.parts.objectives": OBJECTIVES,
    "finetune.parts.inits": INITS,
}
# Modules that may have the words without implementing the technique, and why.
MAY_NAME = {
    "finetune.older": "words of the older scripts",
    "finetune.names": "words of other programs",
    "finetune.config": "older words of --train_type",
    "recursive.config": "the recursive model has optimizers of its own",
    "finetune.backend.capabilities": "the documented table of quantizers per backend",
    "finetune.backend.machine": "names of packages",
    "finetune.model_files.files": "formats of stored weights",
    "finetune.torch_engine.weights.prequantized": "formats of stored weights",
    "finetune.adapters.saved": "PEFT's words",
    "finetune.torch_engine.lora.init": "eva, by peft",
    "finetune.data.columns": "the format of labelled rows is called kto",
    "finetune.data.formats": "the format of labelled rows is called kto",
    "finetune.plan.recommend": "advice for Apple GPUs",
}


def implementing(table: dict) -> set[str]:
    """The modules that the rows of a table name."""
    paths = {value for facts in table.values() for value in vars(facts).values() if isinstance(value, str)}
    return {path for path in paths | {path.rpartition(".")[0] for path in paths} if path in SHIPPED}


@cache
def literals(module: str) -> tuple[str, ...]:
    """String literals that are no docstrings."""
    nodes = nodes_of(SHIPPED[module])
    lone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = (n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in lone)
    return tuple(value for value in found if isinstance(value, str))


def naming(words, but: set[str]) -> dict[str, set[str]]:
    """{module: words in its string literals}, of shipped modules except those in `but`."""
    pattern = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, words))})(?![\w-])")
    found = {module: {w for text in literals(module) for w in pattern.findall(text)} for module in SHIPPED}
    return {module: words for module, words in found.items() if words and module not in but}


@pytest.mark.parametrize("home", ROWS)
def test_a_techniques_word_stands_in_its_row_and_in_what_implements_it_only(home):
    words = [word for word in ROWS[home] if word not in ALSO_OTHERS]
    found = naming(words, but={home} | implementing(ROWS[home]))
    elsewhere = {m: w for m, w in found.items() if not any(m == may or m.startswith(f"{may}.") for may in MAY_NAME)}
    assert elsewhere == {}


def test_no_module_may_name_techniques_that_does_not():
    found: set[str] = set()
    for home, table in ROWS.items():
        found |= naming(set(table) - set(ALSO_OTHERS), but={home} | implementing(table)).keys()
    assert {may for may in MAY_NAME if not any(f"{module}.".startswith(f"{may}.") for module in found)} == set()


def test_each_limit_of_an_optimizer_is_on_the_page_of_conflicts():
    shown = {conflict.why for conflicts in TABLES.values() for conflict in conflicts}
    for word, facts in OPTIMIZERS.items():
        for limit in facts.limits:
            assert any(limit.why in why for why in shown), (word, limit)


def test_what_rows_name_exists():
    for facts in OPTIMIZERS.values():
        assert facts.unpaged is None or facts.unpaged in OPTIMIZERS
        assert facts.state_bytes or facts.bytes_per_weight
    assert quantization_wrapper.FIRST_METHOD == "nf4" and METHODS["nf4"].package is None


@pytest.fixture(scope="module")
def said(tiny_model, tmp_path_factory):
    """What a process with one row more says and does, by kind of technique."""
    found = {}

    def of(kind: str) -> dict:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            rows = PAIRS if kind == "objective" else [{"prompt": r["prompt"], "completion": r["chosen"]} for r in PAIRS]
            file = jsonl(folder / "rows.jsonl", rows)
            how = [*PYTHON, "-m", "tests.support.made_up_rows", kind, str(tiny_model), file, str(folder / "out")]
            done = subprocess.run(how, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            found[kind] = json.loads(done.stdout.splitlines()[-1])
        return found[kind]

    return of


def test_an_optimizer_is_one_row_to_the_help_the_conflicts_the_plan_the_memory_and_a_run(said):
    of = said("optimizer")
    assert "made_up is made up." in of["help"] and f", {WORD}," in of["help"].replace("\n", " ")
    assert of["plan"]["settings"]["optimizer"] == of["older"]["settings"]["optimizer"] == WORD
    assert of["plan"]["settings"]["warmup_ratio"] == 0.25 and of["usual"]["settings"]["warmup_ratio"] != 0.25
    assert of["plan"]["settings"]["lr"] < of["usual"]["settings"]["lr"] / 10
    assert 2 * of["plan"]["optimizer_bytes"] == of["usual"]["optimizer_bytes"] > 0
    assert of["lora"]["error"] == f"--optimizer {WORD}: is made up. Use --train_type full."
    assert of["adam_beta1"]["error"] == "--adam_beta1 0.5: applies to Adam only. Use adamw, or omit it."
    page = of["conflicts"]
    assert f"| `--optimizer` | `{WORD}` | other than `--train_type full` | is made up |" in page
    assert f"`muon` or `{WORD}` | `--backend mlx`" in page
    assert of["steps"] == [2, 4]


@pytest.mark.slow
def test_a_quantizer_is_one_row_to_the_help_the_plan_the_memory_and_a_run(said):
    of = said("method")
    assert WORD in of["help"] and of["plan"]["settings"]["quantization_backend"] == WORD
    assert "made_up supports 8 bits. Available: " in of["bits"]["error"] and "made_up at 8 bits" in of["bits"]["error"]
    assert of["plan"]["base_bytes"] == STORED_BYTES * of["plan"]["linears"] + 4 * of["plan"]["other_weights"]
    assert of["steps"] == [2, 4]


@pytest.mark.slow
def test_an_objective_is_one_row_to_the_help_the_conflicts_the_plan_and_a_run(said):
    of = said("objective")
    assert f"orpo, simpo, {WORD}: from pairs" in of["help"].replace("\n", " ")
    assert f"what {WORD} makes up" in of["beta"].replace("\n", " ")
    assert of["plan"]["settings"]["lr"] < of["usual"]["settings"]["lr"]
    assert "compares with the model before training" in of["full"]["error"]
    assert f"`dpo` or `kto` or `{WORD}`" in of["conflicts"]
    assert of["steps"] == [2, 4]


@pytest.mark.slow
def test_a_start_of_adapters_is_one_row_to_the_help_the_conflicts_the_plan_and_a_run(said):
    of = said("init")
    assert f"{WORD}: starts at nothing." in of["help"].replace("\n", " ")
    assert f"`pissa` or `olora` or `loftq` or `{WORD}`" in of["conflicts"]
    assert of["plan"]["settings"]["lr"] < of["usual"]["settings"]["lr"] / 10
    assert "full fine-tuning has no adapter" in of["full"]["error"]
    assert of["steps"] == [2, 4]


def test_a_degree_is_one_row_with_its_field_and_flag_to_the_help_the_conflicts_the_plan_memory_and_time(tmp_path):
    of = made_up_degree.said_in(made_up_degree.copied_to(tmp_path))
    assert "Made up: ranks that make up each sequence." in of["help"]
    assert of["settled"] == {"dp_shards": 2, "made_up_degree": 2}
    assert of["dims"] == "dp_shards 2 x made_up_degree 2"
    whole, of_a_rank = of["tokens"]
    assert 2 * of_a_rank == whole > 0
    assert "making up" in of["seconds"]
    assert "the product of the degrees is 8, but the world size is 4" in of["product"]
    assert of["divides"].startswith("--made_up_degree 3: does not divide hidden_size 4096. Use one of 1, 2, 4")
    assert of["padded"].startswith("--batch_layout padded: contradicts --made_up_degree 2, which makes up rows")
    assert of["accelerate"].startswith("--made_up_degree 2: accelerate runs data parallelism only here")
    assert "| `--batch_layout` | `padded` | `--made_up_degree` over 1 | " in of["conflicts"]
    assert "`--made_up_degree`" in next(line for line in of["conflicts"].splitlines() if "MLX engine has data" in line)
