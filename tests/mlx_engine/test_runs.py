"""train.py --backend mlx: runs, kills and resumes, and runs that move between the engines."""

import io
import json
import shutil
import signal
import subprocess
import zipfile

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm import convert
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file
from safetensors.torch import save_file

import export
import score
from finetune.checkpoint.store import newest_checkpoint
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.mlx_engine.model import left_in_files, load
from finetune.parts.parts import Parts
from tests.support import architectures, ranks, tiny
from tests.support.cells import but_slow
from tests.support.commands import command, finish, refused, wait_for_steps, words
from tests.support.held_saves import HeldSaves
from tests.support.model_folders import edit_config
from tests.support.runs import copy_up_to, losses, read_events, same_files, steps
from train import fine_tune

STATE = ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors")
# fp32 products of two libraries over 12 steps; 1e-6 here.
MOVED = 1e-4


@pytest.fixture(scope="module")
def mlx_run(tiny_model, rows_file, tmp_path_factory):
    """The output folder of 12 steps with dropout and accumulation, every step kept."""
    folder = tmp_path_factory.mktemp("mlx") / "out"
    flags = dict(save_every=1, async_save="false", keep_last=12)
    state = fine_tune(**flags_of(tiny_model, rows_file, folder), lora_dropout=0.1, **flags)
    assert state.status == "finished" and state.step == 12
    return folder


def flags_of(model, rows, folder, **changes):
    flags = dict(model_name=str(model), dataset=str(rows), output_dir=str(folder), backend="mlx", train_type="lora")
    flags |= dict(lora_rank=4, batch_size=2, gradient_accumulation_steps=2, num_epochs=2, lr=1e-3, precision="fp32")
    return flags | dict(context_length=64, log_to="stdout") | changes


def test_a_run_writes_what_every_run_writes(mlx_run):
    plan = json.loads((mlx_run / "run_plan.json").read_text())["settled"]
    assert (plan["backend"], plan["backend_type"], plan["engine"]) == ("mlx", "mlx", "mlx")
    found = losses(mlx_run)
    assert len(found) == 12 and np.mean(found[-3:]) < np.mean(found[:3])
    end = read_events(mlx_run, "end")[-1]
    assert end["status"] == "finished" and end["peak_memory_bytes"]["total"] > 0


def test_saves_beside_steps_are_those_of_a_run_that_waits(mlx_run, tiny_model, rows_file, tmp_path, monkeypatch):
    """Each is written after a later step."""
    held = HeldSaves(tmp_path / "out", monkeypatch)
    flags = flags_of(tiny_model, rows_file, tmp_path / "out", lora_dropout=0.1, save_every=3, keep_last=9)
    assert fine_tune(**flags, async_save="true").step == 12 and held.steps == [3, 6, 9]
    for step in (*held.steps, 12):
        same_files(tmp_path / f"out/checkpoints/step-{step}", mlx_run / f"checkpoints/step-{step}", STATE)


@pytest.mark.parametrize("step", [1, 7])
def test_a_run_resumed_at_a_step_is_bitwise_the_uninterrupted_one(mlx_run, tmp_path, step):
    folder = copy_up_to(mlx_run, step, tmp_path / "out")
    assert fine_tune(resume="auto", output_dir=str(folder)).step == 12
    assert steps(folder) == steps(mlx_run)
    same_files(folder / "checkpoints" / "step-12", mlx_run / "checkpoints" / "step-12", STATE)


def test_options_that_mlx_has_give_torch_s_run_and_move_with_it(tiny_model, rows_file, tmp_path):
    """Lion, a smoothed loss, the last layer and the schedule: six steps on each engine, and half of them on each."""
    more = dict(
        optimizer="lion", label_smoothing=0.1, num_layers=1, lr_scheduler="wsd", data_seed=5, max_steps=6, wd=0.1
    )
    flags = {b: flags_of(tiny_model, rows_file, tmp_path / b, **more, backend=b, save_every=3) for b in ("mlx", "cpu")}
    for of_backend in flags.values():
        assert fine_tune(**of_backend).step == 6
    assert losses(tmp_path / "mlx") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    folder = copy_up_to(tmp_path / "cpu", 3, tmp_path / "moved")
    assert fine_tune(resume="auto", output_dir=str(folder), backend="mlx").step == 6
    assert losses(folder) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    with pytest.raises(
        PlanError, match="--optimizer adafactor: the MLX engine has adamw, adam, sgd, adadelta, adamw_8bit and lion"
    ):
        fine_tune(**flags["mlx"] | {"output_dir": str(tmp_path / "refused"), "optimizer": "adafactor"})


@pytest.mark.slow
def test_a_run_with_a_word_of_torch_s_goes_on_by_the_same_words(tiny_model, rows_file, tmp_path):
    flags = flags_of(tiny_model, rows_file, tmp_path / "out", max_steps=1, reentrant_checkpointing=True)
    assert fine_tune(**flags).step == 1
    assert fine_tune(resume=str(tmp_path / "out"), max_steps=2, reentrant_checkpointing=True).step == 2


def test_the_command_line_resumes_the_run(mlx_run, tmp_path):
    folder = copy_up_to(mlx_run, 9, tmp_path / "out")
    code, out, err = finish(command(output_dir=folder, resume="auto"))
    assert code == 0, err
    assert "batch_layout: padded (rows of similar length: packing gains 10 % on a CPU" in out
    # Its products round otherwise than this process's, 1.5e-7 here; test_a_killed_run compares like with like, bitwise.
    assert losses(folder) == pytest.approx(losses(mlx_run), rel=MOVED)


@pytest.mark.slow
def test_a_killed_run_resumes_bitwise(tiny_model, rows_file, tmp_path):
    flags = flags_of(tiny_model, rows_file, tmp_path / "whole", lora_dropout=0.1, max_steps=150, save_every=5)
    assert finish(command(flags)).returncode == 0
    killed = flags | {"output_dir": str(tmp_path / "out")}
    process = ranks.start(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "out", 20, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        ranks.kill_session(process)
    assert finish(command(killed, "--resume auto")).returncode == 0
    assert steps(tmp_path / "out") == steps(tmp_path / "whole")
    one, two = (newest_checkpoint(tmp_path / name)[0].folder for name in ("whole", "out"))
    same_files(one, two, STATE)


QLORA = dict(train_type="qlora", quantization_backend="mlx", group_size=32)


@pytest.mark.promise("CK_04")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        QLORA,
        pytest.param({"use_dora": True}, marks=pytest.mark.slow),
        pytest.param({"train_type": "full", "lr": 1e-4}, marks=pytest.mark.slow),
    ],
    ids=["lora", "qlora", "dora", "full"],
)
def test_a_run_that_moves_twice_is_the_run_that_stays(tiny_model, rows_file, tmp_path, changes):
    """Four steps torch, four MLX, four torch, against twelve of torch: optimizer moments and cursor go with it."""
    whole = flags_of(tiny_model, rows_file, tmp_path / "whole", **{"backend": "cpu", **changes})
    if whole["train_type"] == "full":
        del whole["lora_rank"]
    assert fine_tune(**whole).step == 12
    moved = whole | {"output_dir": str(tmp_path / "out"), "save_every": 4, "keep_last": 12}
    fine_tune(**moved)
    for upto, backend in ((4, "mlx"), (8, "cpu")):
        folder = copy_up_to_any(tmp_path / f"out{'' if upto == 4 else '-4'}", upto, tmp_path / f"out-{upto}")
        assert fine_tune(resume=str(folder), backend=backend).step == 12
    assert losses(tmp_path / "out-8") == pytest.approx(losses(tmp_path / "whole"), rel=MOVED)
    name = "model.safetensors" if changes.get("train_type") == "full" else "adapter_model.safetensors"
    one, other = (load_file(tmp_path / folder / name) for folder in ("whole", "out-8"))
    assert one.keys() == other.keys()
    for key in one:  # AdamW moves each weight by about its rate per step
        np.testing.assert_allclose(one[key], other[key], atol=1e-2 * 12 * whole["lr"])


def copy_up_to_any(folder, step, target):
    """copy_up_to, for a run of any train type."""
    (folder / "adapter_model.safetensors").touch()
    return copy_up_to(folder, step, target)


def test_a_move_is_told_in_the_plan(mlx_run, tmp_path, capsys):
    folder = copy_up_to(mlx_run, 5, tmp_path / "out")
    assert fine_tune(resume=str(folder), backend="cpu", batch_size=4, gradient_accumulation_steps=1).step == 12
    out = capsys.readouterr().out
    assert "moved from mlx to cpu" in out and "as batch_size 4 x accumulation 1" in out
    assert "dropout cannot continue" in out and "saved by another engine" in out


@pytest.mark.promise("CK_04")
def test_the_adapter_gives_peft_the_logits_it_gives_mlx(mlx_run, tiny_model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from finetune.mlx_engine.load import open_trained
    from finetune.model_files.files import find_model

    plan = Parts(TrainConfig(train_type="lora", precision="fp32"))
    engine = open_trained(mlx_run, find_model(str(tiny_model)), plan, 0)
    ids = np.arange(3, 27)
    ours = np.array(engine.model(mx.array(ids[None]))[0])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), mlx_run).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids[None])).logits[0].numpy()
        base = model.unload()(torch.from_numpy(ids[None])).logits[0].numpy()
    # fp32 products of two libraries; the adapter itself moves logits by far more.
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert np.abs(base - theirs).max() > 1e-3 * np.abs(theirs).max()


def test_score_gives_the_same_loss_on_both_engines(mlx_run, rows_file, capsys):
    found = []
    for device in ("mlx", "cpu"):
        flags = dict(
            checkpoint=mlx_run, dataset=rows_file, samples=8, device=device, max_new_tokens=8, precision="fp32"
        )
        capsys.readouterr()
        assert score.main(words("--json", **flags)) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert found[0]["exact_match"] == found[1]["exact_match"]


MTP = {"mtp.layers.0.eh_proj.weight": torch.randn(8).bfloat16(), "mtp.layers.0.norm.weight": torch.randn(8)}
LEFT = {"exaone_moe": MTP, "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8)}}


def base_with_more(model_type, folder) -> dict:
    """Writes a base whose files have tensors that mlx-lm leaves out; the others, which it loads."""
    dense = dict(mlp_layer_types=["dense", "dense"]) if model_type == "exaone_moe" else {}
    tokenizer = tiny.train_tokenizer(folder, bos=False)
    architectures.build(model_type, vocab_size=len(tokenizer), **dense).bfloat16().save_pretrained(folder)
    edit_config(folder, head_dim=16, is_moe_layer=[False, False])  # as LG publishes it
    (folder / "preprocessor_config.json").write_text("{}")
    published = torch_file(folder / "model.safetensors")
    save_file(published | LEFT[model_type], folder / "model.safetensors", {"format": "pt"})
    return published


@pytest.mark.parametrize("model_type", but_slow(LEFT, ["llama"]))
def test_a_full_run_keeps_tensors_that_mlx_lm_leaves_out(rows_file, tmp_path, capsys, model_type):
    published, left = base_with_more(model_type, tmp_path / "base"), LEFT[model_type]
    changes = dict(train_type="full", lora_rank=None, max_steps=1, eval_samples=0)
    fine_tune(**flags_of(tmp_path / "base", rows_file, tmp_path / "out", **changes))
    found = torch_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == published.keys() | left.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in left.items())
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    assert f"such as {min(left)}: not trained" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LEFT)
def test_an_export_for_mlx_lm_says_that_mtp_layers_are_left_out(tmp_path, capsys, model_type):
    base_with_more(model_type, tmp_path / "base")
    argv = ["--checkpoint", str(tmp_path / "base"), "--output_dir", str(tmp_path / "mlx"), "--to", "mlx"]
    assert export.main(argv) == 0
    said = "2 tensors of MTP layers, such as mtp.layers.0.eh_proj.weight: mlx-lm's converter leaves them out"
    assert (said in capsys.readouterr().out) == (model_type == "exaone_moe")
    assert not torch_file(tmp_path / "mlx" / "model.safetensors").keys() & LEFT[model_type].keys()


def test_a_head_in_the_files_of_a_tied_model_is_not_kept_beside_the_trained_embedding(tmp_path):
    tiny.build("llama_tied").save_pretrained(tmp_path)
    published = torch_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": published["model.embed_tokens.weight"].clone()}
    save_file(published | head, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(tmp_path, json.loads((tmp_path / "config.json").read_text()), mx.float32, dequantizes=False)
    assert left_in_files(loaded) == {}


def stored(model, folder, bits, npz):
    """The tiny model as mlx-lm writes it, its weights in MLX's older .npz if asked for."""
    convert(str(model), mlx_path=str(folder), dtype="float32", quantize=bool(bits), q_bits=bits, q_group_size=32)
    if npz:
        mx.savez(str(folder / "weights.npz"), **mx.load(str(folder / "model.safetensors")))
        for file in folder.glob("model*"):
            file.unlink()
    return folder


@pytest.mark.promise("CK_03")
@pytest.mark.parametrize(("bits", "npz"), [(4, False), (4, True), (None, True)])
def test_folders_of_mlx_train_and_say_what_they_are(tiny_model, rows_file, tmp_path, capsys, bits, npz):
    folder = stored(tiny_model, tmp_path / "mlx", bits, npz)
    flags = flags_of(folder, rows_file, tmp_path / "out", max_steps=2, train_type="qlora" if bits else "lora")
    assert fine_tune(**flags).step == 2
    told = capsys.readouterr().out
    assert ("its weights are stored quantized (mlx at 4 bits)" in told) == bool(bits)
    assert (".npz" in told) == npz
    if npz:
        with pytest.raises(PlanError, match="Direct loading not supported, conversion required"):
            fine_tune(**flags | {"backend": "cpu", "output_dir": str(tmp_path / "cpu")})


def test_a_full_run_of_some_layers_keeps_the_others_of_an_npz(tiny_model, rows_file, tmp_path):
    folder = stored(tiny_model, tmp_path / "mlx", None, npz=True)
    before = mx.load(str(folder / "weights.npz"))
    changes = dict(train_type="full", lora_rank=None, num_layers=1, max_steps=1)
    fine_tune(**flags_of(folder, rows_file, tmp_path / "out", **changes))
    after = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert after.keys() == before.keys()
    changed = {name.split(".")[2] for name, array in after.items() if not mx.array_equal(array, before[name])}
    assert len(changed) == 1


def members_with(file, change):
    """Rewrites a .npz file whose members {name: bytes} `change` changes; several of a name as a list."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def flipped(file):
    content = bytearray(file.read_bytes())
    content[20000] ^= 1
    file.write_bytes(content)


def as_objects(members):
    content = io.BytesIO()
    np.save(content, np.array([{}], dtype=object), allow_pickle=True)
    members["lm_head.weight.npy"] = content.getvalue()


HEAD = "lm_head.weight.npy"
DAMAGED = {
    "cut": lambda file: members_with(file, lambda m: m.update({HEAD: m[HEAD][:-4]})),
    "longer": lambda file: members_with(file, lambda m: m.update({HEAD: m[HEAD] + b"0000"})),
    "pickled": lambda file: members_with(file, as_objects),
    "no zip": lambda file: file.write_bytes(b"x"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_npz_is_refused_in_a_dry_run_too(case, tiny_model, rows_file, tmp_path):
    folder = stored(tiny_model, tmp_path / "mlx", None, True)
    DAMAGED[case](folder / "weights.npz")
    line = refused(flags_of(folder, rows_file, tmp_path / "out", max_steps=2), backend="mlx")
    assert f"{folder}: weights.npz is {'missing' if case == 'a folder' else 'damaged ('}" in line


def test_a_flipped_bit_of_an_npz_is_one_line(tiny_model, rows_file, tmp_path):
    folder = stored(tiny_model, tmp_path / "mlx", None, True)
    flipped(folder / "weights.npz")
    with pytest.raises(PlanError, match=r"weights\.npz is damaged .the checksum of .* differs"):
        fine_tune(**flags_of(folder, rows_file, tmp_path / "out", max_steps=2))


def test_npz_of_mlx_is_refused_by_a_dry_run_with_torch_too(tiny_model, rows_file, tmp_path):
    folder = stored(tiny_model, tmp_path / "mlx", None, True)
    line = refused(flags_of(folder, rows_file, tmp_path / "out", max_steps=2) | {"backend": "cpu"})
    assert "Direct loading not supported, conversion required" in line


def test_both_engines_read_the_same_files_of_a_folder_that_has_more(tiny_model, rows_file, tmp_path):
    """MLX read every model*.safetensors, the last of a name counting: here an older one's."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    older = {name: 0.5 * array for name, array in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model_old.safetensors"), older, {"format": "pt"})
    assert fine_tune(**flags_of(folder, rows_file, tmp_path / "out", max_steps=2)).step == 2
    assert fine_tune(**flags_of(tiny_model, rows_file, tmp_path / "alone", max_steps=2)).step == 2
    assert losses(tmp_path / "out") == losses(tmp_path / "alone")


def test_a_base_of_another_quantizer_is_quantized_again_and_measured(tiny_model, rows_file, tmp_path, capsys):
    changes = dict(backend="cpu", train_type="qlora", quantization_backend="nf4", validation_split=0.25, max_steps=6)
    flags = flags_of(tiny_model, rows_file, tmp_path / "out", **changes)
    fine_tune(**flags, eval_every=4, save_every=4, keep_last=9)
    folder = copy_up_to(tmp_path / "out", 4, tmp_path / "moved")
    fine_tune(resume=str(folder), backend="mlx", group_size=32)
    out = capsys.readouterr().out
    assert "quantization_backend: nf4 -> mlx since the saved run" in out and "is quantized again" in out
    before, after = [e["loss"] for e in read_events(folder, "eval") if e["step"] == 4][-2:]
    assert before != after and before == pytest.approx(after, rel=0.05)  # 4 bits each, with other levels


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, QLORA], ids=["lora", "affine"])
def test_ten_steps_each_from_the_command_line_are_thirty_of_torch(tiny_model, rows_file, tmp_path, changes):
    flags = flags_of(tiny_model, rows_file, tmp_path / "0", backend="cpu", max_steps=30, save_every=10, keep_last=9)
    assert finish(command(flags, changes)).returncode == 0
    for number, (step, backend) in enumerate(((10, "mlx"), (20, "cpu")), 1):
        folder = copy_up_to(tmp_path / str(number - 1), step, tmp_path / str(number))
        code, out, err = finish(command(resume=folder, backend=backend))
        assert code == 0 and f"resumed from {folder}/checkpoints/step-{step} at step {step} of 30" in out, err
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "0"), rel=MOVED)
