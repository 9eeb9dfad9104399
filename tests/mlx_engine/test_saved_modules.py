"""Modules and layers of the base that train in full on MLX: losses, files and states of the torch engine."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import score
from finetune.data.collate import microbatches
from finetune.errors import PlanError
from finetune.mlx_engine.load import open_trained
from finetune.model_files.files import find_model
from finetune.parts.parts import Parts
from tests.mlx_engine.test_runs import flags_of
from tests.support import tiny
from tests.support.cells import slow
from tests.support.commands import words
from tests.support.mlx_engines import mlx_engine, save, settings_of, torch_engine_of
from tests.support.runs import copy_up_to, losses, same_files, steps
from train import fine_tune

WORDS = "<|tool|>,<|call|>"
KINDS = {
    "new tokens": dict(new_tokens=WORDS, modules_to_save="norm"),
    "head": dict(modules_to_save="lm_head"),
    "mlp": dict(modules_to_save="layers.1.mlp,embed_tokens"),
    "qlora": dict(
        new_tokens=WORDS, modules_to_save="down_proj", train_type="qlora", quantization_backend="mlx", group_size=32
    ),
    "last layer": dict(train_type="full", num_layers=1, lora_rank=None),
    "one layer": dict(train_type="full", layers_to_transform="0", lora_rank=None, use_gradient_checkpointing="true"),
    "full": dict(train_type="full", new_tokens=WORDS, lora_rank=None),
}
STATE = ("optimizer.safetensors", "rng.safetensors")
# fp32 products of two libraries; 2e-7 in most steps.
LOSS = 1e-5


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{architecture: folder}: head and embeddings apart, or tied."""
    found = {}
    for name in ("llama", "llama_tied"):
        folder = tmp_path_factory.mktemp("bases") / name
        tokenizer = tiny.train_tokenizer(folder, bos=False)
        found[name] = save(folder, name, vocab_size=len(tokenizer), pad_token_id=None)
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    found = [{"prompt": f"What is {i}? <|tool|>", "completion": f"<|call|>{2 * i} or so"} for i in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(file)


def weights_of(folder) -> dict:
    name = "adapter_model.safetensors"
    return load_file(folder / (name if (folder / name).is_file() else "model.safetensors"))


def flags(base, rows, folder, kind, **changes):
    return {**flags_of(base, rows, folder, wd=0.1), **KINDS[kind], **changes}


ROWS = tiny.dataset()


def stepped(engine, count: int) -> list[float]:
    batches = [
        microbatches(ROWS, [(3 * n + i) % len(ROWS) for i in range(4)], "padded", 4, 64, 0) for n in range(count)
    ]
    return [engine.train_step(batch, 2e-3).nll for batch in batches]


@pytest.mark.parametrize(
    "changes",
    [
        dict(modules_to_save="lm_head,layers.1.mlp,norm", use_gradient_checkpointing="true"),
        dict(train_type="full", num_layers=1),
    ],
)
def test_five_steps_have_the_losses_of_torch(bases, changes):
    mine, theirs = (build(bases["llama_tied"], wd=0.1, **changes) for build in (mlx_engine, torch_engine_of))
    assert mine.trainable_state().keys() == theirs.trainable_state().keys()
    assert mine.parameter_counts() == theirs.parameter_counts()
    assert stepped(mine, 5) == pytest.approx(stepped(theirs, 5), rel=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["llama_tied", "llama"])
def test_losses_and_files_are_torch_s_and_a_run_moves_there_and_back(bases, rows, tmp_path, kind, base):
    count = 20
    how = {b: flags(bases[base], rows, tmp_path / b, kind, backend=b, max_steps=count) for b in ("mlx", "cpu")}
    for of_backend in how.values():
        assert fine_tune(**of_backend, save_every=2, keep_last=20).step == count
    assert losses(tmp_path / "mlx") == pytest.approx(losses(tmp_path / "cpu"), rel=LOSS)
    assert losses(tmp_path / "mlx")[-1] < 0.99 * losses(tmp_path / "mlx")[0]
    one, other = (weights_of(tmp_path / b) for b in ("mlx", "cpu"))
    assert {name: array.shape for name, array in one.items()} == {name: array.shape for name, array in other.items()}
    name, keys = ("config.json", ["vocab_size"])
    if (tmp_path / "cpu" / "adapter_config.json").is_file():
        name, keys = ("adapter_config.json", ["modules_to_save", "target_modules"])
    configs = [json.loads((tmp_path / b / name).read_text()) for b in ("mlx", "cpu")]
    assert [configs[0][key] for key in keys] == [configs[1][key] for key in keys]
    folder = tmp_path / "cpu"
    for step, backend in ((2, "mlx"), (4, "cpu")):
        (folder / "adapter_model.safetensors").touch()
        moved = copy_up_to(folder, step, tmp_path / f"moved-{step}")
        saved = moved / "checkpoints" / f"step-{step}"
        before = {file.name: file.read_bytes() for file in saved.glob("*.safetensors")}
        assert fine_tune(resume=str(moved), backend=backend, max_steps=count, save_every=2, keep_last=20).step == count
        assert before == {file.name: file.read_bytes() for file in saved.glob("*.safetensors")}
        folder = moved
    assert losses(folder) == pytest.approx(losses(tmp_path / "cpu"), rel=LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "new tokens", "last layer"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(bases, rows, tmp_path, kind):
    dropout = {} if KINDS[kind].get("train_type") == "full" else {"lora_dropout": 0.1}
    how = dict(max_steps=4, save_every=2, keep_last=9, **dropout)
    whole = tmp_path / "whole"
    fine_tune(**flags(bases["llama_tied"], rows, whole, kind, **how))
    (whole / "adapter_model.safetensors").touch()
    part = copy_up_to(whole, 2, tmp_path / "part")
    assert fine_tune(resume="auto", output_dir=str(part)).step == 4
    assert steps(part) == steps(whole)
    weights = "model.safetensors" if "train_type" in KINDS[kind] else "adapter_model.safetensors"
    same_files(part / "checkpoints" / "step-4", whole / "checkpoints" / "step-4", (weights, *STATE))


def test_state_that_is_loaded_is_saved_bitwise(bases):
    engine = mlx_engine(bases["llama_tied"], modules_to_save="lm_head,norm")
    stepped(engine, 2)
    state = engine.trainable_state(), *engine.optimizer_state()
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} <= state[0].keys()
    again = mlx_engine(bases["llama_tied"], modules_to_save="lm_head,norm")
    again.load_state(*state, engine.rng_state())
    assert stepped(again, 2) == stepped(engine, 2)
    again.load_state(*state, engine.rng_state())
    for before, after in zip(state[:2], (again.trainable_state(), again.optimizer_state()[0]), strict=True):
        assert before.keys() == after.keys() and all(np.array_equal(after[n], a) for n, a in before.items())


@pytest.mark.parametrize("base", ["llama_tied", *slow("llama")])
def test_a_checkpoint_answers_on_mlx_as_on_torch(bases, rows, tmp_path, base, capsys):
    fine_tune(**flags(bases[base], rows, tmp_path / "out", "new tokens", max_steps=3, lr=0.01))
    found = []
    for device in ("mlx", "cpu"):
        how = dict(checkpoint=tmp_path / "out", dataset=rows, samples=4, device=device, precision="fp32")
        capsys.readouterr()
        assert score.main(words("--json", **how, max_new_tokens=4)) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("base", ["llama", "llama_tied"])
def test_an_adapter_whose_saved_modules_mlx_has_not_is_one_line(bases, tmp_path, base):
    """Without the weights that its config names, and with a tied head that was trained apart from the embeddings."""
    engine = mlx_engine(bases[base], modules_to_save="lm_head")
    tensors = engine.trainable_state()
    config = engine.describe_weights(str(bases[base]), "")["adapter_config.json"]
    assert config["modules_to_save"] == ["lm_head", "model.embed_tokens"][: 1 + (base == "llama_tied")]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    files, plan = find_model(str(bases[base])), Parts(settings_of(modules_to_save="lm_head"))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    batch = microbatches(ROWS, range(4), "padded", 4, 10**6, 0)
    assert open_trained(tmp_path, files, plan, 0).next_token_loss(batch).nll == engine.evaluate(batch).nll
    head = "base_model.model.lm_head.weight"
    apart = tensors | {head: 2 * tensors[head]}
    if base == "llama":
        del apart[head]
    save_file(apart, tmp_path / "adapter_model.safetensors")
    said = "no weight of lm_head" if base == "llama" else "was trained with a head of its own"
    with pytest.raises(PlanError, match=said):
        open_trained(tmp_path, files, plan, 0)


def test_what_mlx_has_not_is_one_line(bases):
    with pytest.raises(PlanError, match="--modules_to_save nothing: no module of this model is named so"):
        mlx_engine(bases["llama"], modules_to_save="nothing")
    with pytest.raises(PlanError, match="--num_layers 0: no layer with"):
        mlx_engine(bases["llama"], train_type="full", num_layers=0)
