"""Checkpoints of the recursive model: raw or averaged weights, published runs, and files of TinyRecursiveModels."""

import numpy as np
import pytest
import torch
import yaml

import generate
import pretrain
from finetune.checkpoint.store import PRETRAINED
from finetune.errors import PlanError
from recursive.config import ArchConfig
from recursive.torch_engine.model import RecursiveModel
from recursive.torch_engine.weights import FORK_NAMES, open_model, read_folder
from tests.support import pretraining
from tests.support.pretraining import TINY

ARCH = ArchConfig(hidden_size=20, num_heads=3, L_layers=2, L_cycles=2, expansion=2, forward_dtype="float32")
IDS = torch.arange(5)[None]


def as_the_fork_saves(model: RecursiveModel) -> dict:
    """The model's state dict under the fork's names: a compiled loss head around an ACT wrapper around the network."""
    back, found = {ours: theirs for theirs, ours in FORK_NAMES.items()}, {}
    for name, tensor in model.state_dict().items():
        if name.startswith("layers."):
            _, layer, inner = name.split(".", 2)
            name = f"L_level.layers.{layer}.{back[inner]}"
        elif name.startswith("q_head"):  # two outputs: halt and continue
            tensor = torch.cat([tensor, torch.full_like(tensor, 7.0)])
        else:
            name = back[name]
        found[f"_orig_mod.model.inner.{name}"] = tensor.to(torch.bfloat16 if name.endswith("_init") else tensor.dtype)
    return found


@pytest.fixture
def fork(tmp_path):
    """(the fork's step_1 file with its all_config.yaml, the model it holds). 3 heads of 6: not all of 20, as there."""
    torch.manual_seed(0)
    model = RecursiveModel(ARCH, 9, 512)
    with torch.no_grad():
        model.q_head.weight.normal_()
        for start in (model.y0_D, model.z0_D):
            start.copy_(start.to(torch.bfloat16))
    torch.save(as_the_fork_saves(model), tmp_path / "step_1")
    arch = {
        f"{k}": getattr(ARCH, k) for k in ("hidden_size", "num_heads", "L_layers", "L_cycles", "expansion", "causal")
    }
    arch |= {"name": "recursive_reasoning.trm:X", "loss": {"name": "losses:ACTLossHead", "loss_type": ARCH.loss_type}}
    (tmp_path / PRETRAINED).write_text(yaml.safe_dump({"arch": arch, "lr": "3e-4", "evaluators": []}))
    return tmp_path / "step_1", model


def logits_of(model):
    with torch.no_grad():
        return model.logits(model(IDS, *model.start(1, 5))[0])


def test_a_fork_s_file_gives_its_own_logits(fork):
    file, model = fork
    opened = open_model(file, False, "float32", "cpu")
    assert opened.arch.head_dim == 6 and torch.equal(logits_of(opened), logits_of(model))
    y, _ = model(IDS, *model.start(1, 5))
    assert torch.equal(opened.halt_logit(y), model.halt_logit(y))


def test_a_fork_s_file_is_read_without_running_code(fork, tmp_path):
    file, _ = fork

    class Evil:
        def __reduce__(self):
            return print, ("run!",)

    torch.save({"x": Evil()}, file)
    with pytest.raises(PlanError, match="without running code"):
        open_model(file, False, "float32", "cpu")
    torch.save({"x": torch.zeros(2)}, file)
    with pytest.raises(PlanError, match="not a state dict of TinyRecursiveModels"):
        open_model(file, False, "float32", "cpu")
    (tmp_path / PRETRAINED).unlink()
    with pytest.raises(PlanError, match="all_config.yaml"):
        open_model(file, False, "float32", "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with EMA; its folder."""
    folder = tmp_path_factory.mktemp("weights")
    data, out = pretraining.build_chat(folder), folder / "run"
    state = pretrain.pretrain(f"data_paths=[{data}]", *TINY, "max_steps=3", "lr=1e-2", f"checkpoint_path={out}")
    assert state.step == 3
    return out


@pytest.mark.promise("TR_12")
def test_a_step_holds_raw_and_averaged_weights_and_the_run_the_averaged(run):
    raw, averaged, published = (
        read_folder(run / "step_3", True),
        read_folder(run / "step_3", False),
        read_folder(run, False),
    )
    assert raw.keys() == averaged.keys() == published.keys()
    assert not np.array_equal(raw["head.weight"], averaged["head.weight"])
    assert all(np.array_equal(averaged[name], published[name]) for name in averaged)
    with pytest.raises(PlanError, match="holds the published weights only"):
        read_folder(run, True)


def test_a_new_run_starts_from_a_checkpoint_s_weights(run, tmp_path):
    (data,) = run.parent.glob("data/*")
    argv = [f"data_paths=[{data}]", *TINY, "max_steps=1", "lr=0", "ema=false", f"load_checkpoint={run / 'step_3'}"]
    pretrain.pretrain(*argv, f"checkpoint_path={tmp_path / 'next'}")
    assert np.array_equal(
        read_folder(tmp_path / "next/step_1", True)["head.weight"], read_folder(run, False)["head.weight"]
    )
    with pytest.raises(PlanError, match=r"load_checkpoint: \w+ is \(32,\) in the checkpoint"):
        pretrain.pretrain(*argv, "arch.hidden_size=16", f"checkpoint_path={tmp_path / 'other'}")
    with pytest.raises(PlanError, match="step_3: is of the run in .* overwrite=true removes .*another checkpoint_path"):
        pretrain.pretrain(*argv, f"checkpoint_path={run}", "overwrite=true", "dry_run=true")
    assert (run / "step_3").is_dir()


@pytest.mark.promise("TR_01", "TR_09")
def test_every_flag_of_generation_is_accepted_and_a_missing_checkpoint_is_one_line(run, capsys):
    flags = [
        "--tokenizer",
        run,
        "--temperature",
        0.7,
        "--top-k",
        5000,
        "--top-p",
        0.9,
        "--device",
        "cpu",
        "--raw-weights",
    ]
    argv = ["--checkpoint", run / "step_3", "--prompt", "What is 1 plus 1?", "--max-new-tokens", 4, *flags]
    assert generate.main(list(map(str, argv))) == 0
    assert capsys.readouterr().out.startswith("Using device: cpu\n")
    for argv in (["--checkpoint", "no/such/step_3"], ["--checkpoint", str(run / "step_99")]):
        with pytest.raises(PlanError):
            generate.main([*argv, "--prompt", "Hello"])
    with pytest.raises(PlanError, match="is for checkpoints of pretrain.py"):
        generate.main(["--checkpoint", str(run.parent), "--prompt", "Hello", "--raw-weights"])


@pytest.mark.promise("TR_09")
def test_each_flag_of_sampling_has_its_effect(run, capsys):
    def said(*flags) -> str:
        argv = ["--checkpoint", run / "step_3", "--prompt", "What is 1 plus 1?", "--device", "cpu", *flags]
        assert generate.main(list(map(str, argv))) == 0
        return capsys.readouterr().out

    greedy = said("--max-new-tokens", 8)
    hot = ["--max-new-tokens", 8, "--temperature", 50, "--top-k", 0]
    assert said(*hot, "--top-p", 0.0) == said(*hot[:-1], 1, "--top-p", 1.0) == greedy
    assert said(*hot, "--top-p", 1.0) != greedy
    assert len(said("--max-new-tokens", 2)) < len(greedy)


NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")


@pytest.mark.slow
def test_a_name_that_is_said_is_known_two_turns_later(tmp_path, monkeypatch, capsys):
    """--interactive, after training on such conversations; other turns in between than those trained on."""
    import io
    import json
    import sys

    from dataset.build_chat_dataset import main

    asked = [("What is hot?", "The sun."), ("What is cold?", "Ice."), ("What is wet?", "Rain.")]
    talks = [
        [f"My name is {name}.", f"Hello, {name}!", *asked[(i + k) % 3], "What is my name?", f"Your name is {name}."]
        for i, name in enumerate(NAMES)
        for k in range(2)
    ]
    rows = [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]}
        for talk in talks
    ]
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    argv = ["--input-file", tmp_path / "talks.json", "--output-dir", tmp_path / "data", "--format", "openassistant"]
    main([*map(str, argv), "--tokenizer", "bpe:400", "--max-length", "64", "--train-split", "1"])
    recipe = [
        "--config-name",
        "cfg_chat_recursive",
        "arch.hidden_size=64",
        "arch.num_heads=2",
        "arch.forward_dtype=float32",
    ]
    argv = [
        f"data_paths=[{tmp_path / 'data'}]",
        "global_batch_size=8",
        "lr=3e-3",
        "max_steps=250",
        "log_every_n_steps=50",
    ]
    pretrain.pretrain(*recipe, *argv, f"checkpoint_path={tmp_path / 'run'}")
    for i, name in enumerate(NAMES):
        question, _ = asked[(i + 2) % 3]
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"My name is {name}.\n{question}\nWhat is my name?\n"))
        capsys.readouterr()
        generate.main(["--checkpoint", str(tmp_path / "run/step_250"), "--interactive", "--max-new-tokens", "20"])
        answers = capsys.readouterr().out.splitlines()[1:]
        assert answers[0] == f"Hello, {name}!" and answers[2] == f"Your name is {name}.", answers
