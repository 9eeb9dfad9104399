"""The recipes for clusters: each is read by its own tool's validator, and its command by this program's parser."""

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import train
from backend_manager import CAPABILITIES, Backend
from finetune.distributed.env import RankEnv
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.support.commands import ROOT

FOLDER = ROOT / "examples/clusters"
JOBSET = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
SKY = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())


def settles(words: list[str], size: int, local_size: int) -> dict:
    """The flags of train.py in a command, which must give a plan for these ranks and resume the run."""
    flags = words[words.index("train.py") + 1 :]
    given = vars(train.build_parser().parse_args(flags))
    world = RankEnv(size=size, local_size=local_size, launcher="torchrun")
    resolve_plan(given, Facts(Backend.CPU, CAPABILITIES[Backend.CPU], env=world))
    assert given["resume"] == "auto" and given["save_every"] and given["output_dir"].startswith("/shared/")
    return given


def torchrun_knows(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args([re.sub(r"\$.*", "1", word) for word in words])


def test_every_recipe_is_in_the_table_of_its_page():
    page = (ROOT / "docs/clusters.md").read_text()
    assert all(f"(../examples/clusters/{file.name})" in page for file in FOLDER.glob("*.*"))


# ---- Kubernetes


def test_the_jobset_s_command_starts_as_many_ranks_as_it_has_gpus():
    (job,) = JOBSET["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    flags = dict(word.lstrip("-").split("=") for word in container["args"] if "=" in word)
    assert spec["parallelism"] == spec["completions"] == int(flags["nnodes"]) and spec["completionMode"] == "Indexed"
    assert int(flags["nproc_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert flags["master_addr"] == f"{JOBSET['metadata']['name']}-{job['name']}-0-0.{JOBSET['metadata']['name']}"
    assert int(flags["master_port"]) == container["ports"][0]["containerPort"]
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0 and spec["backoffLimit"] == 0
    torchrun_knows(words[1:])
    settles(words, 16, 8)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_the_job_in_the_jobset_is_valid_to_kubernetes_own_schema():
    """JobSet is a resource of its own, so its template is validated as the Job that it becomes."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ranks"}}
    template = JOBSET["spec"]["replicatedJobs"][0]["template"]
    validate(job | template, "1.30", strict=True)
    broken = json.loads(json.dumps(job | template))
    broken["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(Exception, match="resource"):
        validate(broken, "1.30", strict=True)


# ---- SkyPilot


def test_skypilot_s_command_is_one_of_ours():
    command = SKY["run"].replace("\\\n", " ").replace('$(echo "$SKYPILOT_NODE_IPS" | head -n1)', "10.0.0.1")
    words = [
        word.replace("$MODEL", SKY["envs"]["MODEL"]).replace("$DATA", "examples/chat.jsonl")
        for word in shlex.split(command)
    ]
    torchrun_knows(words[1:])
    ranks = int(SKY["resources"]["accelerators"].split(":")[1])
    settles(words, SKY["num_nodes"] * ranks, ranks)
    (mount,) = SKY["file_mounts"]
    assert mount == "/shared" and (ROOT / SKY["envs"]["DATA"]).is_file()
    assert SKY["setup"].split() == ["pip", "install", "-r", "requirements.txt"]


@pytest.mark.slow
def test_skypilot_reads_its_file():
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    jsonschema.validate(SKY, schemas.get_task_schema())
    jsonschema.validate(SKY["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(SKY | {"num_node": 2}, schemas.get_task_schema())


# ---- Modal


@pytest.mark.slow
def test_modal_s_app_is_built_and_its_command_is_ours():
    modal = pytest.importorskip("modal", reason="modal is not installed")
    spec = importlib.util.spec_from_file_location("modal_train", FOLDER / "modal_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.train, modal.Function) and module.app.name == "finetune"
    words = module.command(["--dataset", "examples/chat.jsonl"])
    torchrun_knows(words[1:])
    settles(words, 8, 8)


# ---- scripts


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_scripts_are_read_and_say_how_they_are_started(file: Path):
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert f"examples/clusters/{file.name}" in text and "resumes" in text
