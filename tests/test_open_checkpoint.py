"""Checkpoints opened by generate.py and score.py."""

import json
import shutil

import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import expand
import export
import generate
import score
from finetune.errors import CheckpointDamagedError, PlanError
from finetune.model_files.published import is_as_published
from tests.support import tiny
from tests.support.cells import but_slow
from tests.support.rows import ROWS, jsonl
from tests.support.runs import PLAIN
from train import fine_tune


def test_prompts_and_answers_stay_inside_the_models_positions(make_tokenizer, tmp_path, rows_file, capsys):
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build("gpt2", vocab_size=len(tokenizer), n_positions=24).save_pretrained(folder)
    prompt = "What is 1 plus 1? " * 9
    assert (
        generate.main(["--checkpoint", str(folder), "--prompt", prompt, "--device", "cpu", "--max-new-tokens", "90"])
        == 0
    )
    assert (
        score.main(["--checkpoint", str(folder), "--dataset", str(rows_file), "--device", "cpu", "--samples", "3"]) == 0
    )


def test_text_has_a_loss_and_nothing_to_match(tiny_model, tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text("Once upon a time there was a lamp.")
    assert score.main(["--checkpoint", str(tiny_model), "--dataset", str(file), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "| perplexity " in out and "exact match" not in out


def test_step_folders_and_unfinished_runs_are_opened_or_pointed_to(plain_run, tmp_path, capsys):
    plain_run(max_steps=2, save_every=1, train_type="full", lora_rank=None)
    step = tmp_path / "out" / "checkpoints" / "step-2"
    argv = ["--prompt", "What is 2? ", "--device", "cpu", "--max-new-tokens", "3"]
    assert generate.main(["--checkpoint", str(step), *argv]) == 0
    plain_run(max_steps=1, model_name=str(step), output_dir=str(tmp_path / "on"))  # with its run's tokenizer
    for name in ("model.safetensors", "config.json", "manifest.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(PlanError, match="did not finish. Give .*step-2"):
        generate.main(["--checkpoint", str(tmp_path / "out"), *argv])


def test_an_adapter_of_a_relative_base_is_opened_from_any_folder_until_the_base_is_gone(
    tiny_model, plain_run, rows_file, tmp_path, monkeypatch
):
    shutil.copytree(tiny_model, tmp_path / "base")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path)
    plain_run(max_steps=1, model_name="./base", output_dir="run")
    monkeypatch.chdir(tmp_path / "away")
    checkpoint = ["--checkpoint", str(tmp_path / "run")]
    calls = [
        lambda: generate.main([*checkpoint, "--prompt", "What is 2? ", "--device", "cpu", "--max_new_tokens", "2"]),
        lambda: score.main([*checkpoint, "--dataset", str(rows_file), "--samples", "2", "--device", "cpu"]),
        *(
            lambda to=to: export.main([*checkpoint, "--output_dir", str(tmp_path / f"to-{to}"), "--to", to])
            for to in ("hf", "mlx-lm")
        ),
    ]
    assert [call() for call in calls] == [0] * len(calls)
    plain_run(max_steps=1, model_name=None, adapter=str(tmp_path / "run"), output_dir="on", lora_rank=None)
    shutil.rmtree(tmp_path / "to-hf")
    shutil.rmtree(tmp_path / "to-mlx-lm")
    (tmp_path / "base").rename(tmp_path / "moved")
    for call in calls:
        with pytest.raises(PlanError, match=f"no such folder here, nor in {tmp_path}, where its run was started"):
            call()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_results_of_a_bf16_base_whose_config_names_no_dtype_are_bf16(
    tiny_model, plain_run, tmp_path, train_type, backend
):
    """As docs/export.md says: the dtype of the base, which its files have."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    weights = load_torch(base / "model.safetensors")
    save_torch({name: t.bfloat16() for name, t in weights.items()}, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    assert config.pop("dtype") == "float32"
    (base / "config.json").write_text(json.dumps(config))
    rank = None if train_type == "full" else 4
    plain_run(max_steps=1, model_name=str(base), train_type=train_type, lora_rank=rank, backend=backend)
    result = tmp_path / "out"
    if train_type == "lora":
        result = tmp_path / "merged"
        assert export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(result)]) == 0
    assert {t.dtype for t in load_torch(result / "model.safetensors").values()} == {torch.bfloat16}


def test_an_adapter_answers_on_the_base_that_it_was_trained_on_alone(tiny_model, plain_run, tmp_path, capsys):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    plain_run(max_steps=1, model_name=str(base))
    weights = load_file(base / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, base / "model.safetensors", {"format": "pt"})
    out, rows = str(tmp_path / "out"), jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    commands = (
        (generate, ["--prompt", "a", "--device", "cpu"]),
        (score, ["--dataset", str(rows), "--device", "cpu"]),
        (export, ["--output_dir", str(tmp_path / "merged")]),
        (export, ["--output_dir", str(tmp_path / "merged"), "--to", "mlx-lm"]),
    )
    for program, argv in commands:
        with pytest.raises(PlanError, match="its base .* is not the one it was trained on .sha256 differs.") as error:
            program.main(["--checkpoint", out, *argv])
        assert "\n" not in str(error.value) and "base_model.json" in str(error.value)
    assert not (tmp_path / "merged").exists()
    (tmp_path / "out" / "base_model.json").unlink()
    (tmp_path / "out" / "manifest.json").unlink()
    assert generate.main(["--checkpoint", out, *commands[0][1], "--max_new_tokens", "2"]) == 0


NAN, INF = bytes.fromhex("0000c07f"), bytes.fromhex("0000807f")
DAMAGED = {
    "weights cut": ("adapter_model.safetensors", lambda data: data[:-9], "model.safetensors: is damaged ("),
    "weights are text": (
        "adapter_model.safetensors",
        lambda data: b"x" * 99,
        "adapter_model.safetensors: is damaged (",
    ),
    "weights have a NaN": ("adapter_model.safetensors", lambda data: data[:-4] + NAN, "numbers that are not finite"),
    "weights are infinite": ("adapter_model.safetensors", lambda data: data[:-4] + INF, "numbers that are not finite"),
    "r is text": ("adapter_config.json", {"r": "x"}, "r is str, must be an integer"),
    "r is null": ("adapter_config.json", {"r": None}, "r is NoneType, must be an integer"),
    "r is 0": ("adapter_config.json", {"r": 0}, "r is 0, which its weights do not have"),
    "r is negative": ("adapter_config.json", {"r": -1}, "r is -1, which its weights do not have"),
    "r is huge": ("adapter_config.json", {"r": 10**12}, "r is 1000000000000, which its weights do not have"),
    "r is another": ("adapter_config.json", {"r": 5}, "r is 5, which its weights do not have"),
    "r divides it": ("adapter_config.json", {"r": 2}, "r is 2, which its weights do not have"),
    "alpha is text": ("adapter_config.json", {"lora_alpha": "x"}, "lora_alpha is str, must be an integer or a number"),
    "alpha is null": ("adapter_config.json", {"lora_alpha": None}, "lora_alpha is NoneType, must be"),
    "alpha is an object": ("adapter_config.json", {"lora_alpha": {}}, "lora_alpha is dict, must be"),
    "alpha is NaN": ("adapter_config.json", {"lora_alpha": float("nan")}, "lora_alpha is nan, must be a number up to"),
    "alpha is infinite": ("adapter_config.json", {"lora_alpha": float("-inf")}, "lora_alpha is -inf, must be"),
    "alpha is huge": ("adapter_config.json", {"lora_alpha": 1e308}, "lora_alpha is 1e+308, must be"),
    "alpha has 401 digits": ("adapter_config.json", {"lora_alpha": 10**400}, "lora_alpha is 1000"),
    "DoRA is text": ("adapter_config.json", {"use_dora": "yes"}, "use_dora is str, must be a boolean or null"),
    "kind": ("adapter_config.json", {"peft_type": 5}, "peft_type 5 is not supported"),
    "base is a number": ("adapter_config.json", {"base_model_name_or_path": 5}, "has no base_model_name_or_path (it"),
    "revision": ("adapter_config.json", {"revision": 5}, "has no base_model_name_or_path (it is "),
    "config is a list": ("adapter_config.json", b"[]", "has no base_model_name_or_path ("),
    "config is deep": ("adapter_config.json", b"[" * 10**5, "has no base_model_name_or_path ("),
    "digest is a list": ("base_model.json", b"[5]", "base_model.json: cannot be read ("),
    "digest is deep": ("base_model.json", b"[" * 10**5, "base_model.json: cannot be read ("),
}


@pytest.fixture(scope="module")
def trained(flags_of_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "out"
    fine_tune(**flags_of_run, output_dir=str(folder), max_steps=1)
    return folder


@pytest.fixture(scope="module")
def flags_of_run(tiny_model, rows_file):
    return PLAIN | {"model_name": str(tiny_model), "dataset": str(rows_file)}


def without_manifest(folder):
    """As an older version or PEFT writes it: what is damaged there, the checks of its content must notice."""
    (folder / "manifest.json").unlink()
    return folder


PROGRAMS = ("generate", "generate --device mlx", "score", "export", "export --to mlx-lm", "export --to peft")


def open_with(program, folder, rows_file, tmp_path):
    """Opens a checkpoint with a program, named with its flags."""
    name, *flags = program.split()
    argv = {"generate": ["--prompt", "a", "--max-new-tokens", "1"], "score": ["--dataset", str(rows_file)]}.get(name)
    argv = argv + ([] if "--device" in flags else ["--device", "cpu"]) if argv else ["--output_dir", tmp_path / "made"]
    main = {"generate": generate, "score": score, "export": export}[name].main
    return main(["--checkpoint", str(folder), *map(str, argv), *flags])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_trained_adapter_is_opened(trained, program, rows_file, tmp_path):
    assert open_with(program, trained, rows_file, tmp_path) == 0


@pytest.mark.parametrize("program", ["generate", "score", "export"])
def test_an_adapter_without_a_tokenizer_is_said_to_be_asked_with_that_of_its_base(
    trained, program, rows_file, tmp_path, capsys
):
    """A step's folder that was copied out of its run is one, and its template may be another."""
    open_with(program, trained, rows_file, tmp_path)
    said = "tokenizer: that of "
    captured = capsys.readouterr()
    assert said not in captured.out + captured.err
    alone = tmp_path / "alone"
    shutil.copytree(trained, alone, ignore=shutil.ignore_patterns("tokenizer*", "manifest.json", "chat_template*"))
    open_with(program, alone, rows_file, tmp_path / "again")
    captured = capsys.readouterr()
    assert f"with its chat template, as {alone} has none" in captured.out + captured.err


OF_BASE = [case for case in DAMAGED if case.startswith(("base is", "revision", "config is", "digest"))]  # not by --to
OPENED = [(p, case) for p in PROGRAMS for case in DAMAGED if "--to" not in p or case not in OF_BASE]
# A case of each kind of damage by each program, and the others by one.
EACH_KIND = ("weights cut", "weights have a NaN", "r is another", "alpha is NaN", "digest is a list")
QUICK = [(p, case) for p, case in OPENED if p == "generate" or case in EACH_KIND]


@pytest.mark.parametrize(("program", "case"), but_slow(OPENED, QUICK))
def test_a_damaged_adapter_is_one_line(trained, tmp_path, program, case, rows_file):
    name, change, fact = DAMAGED[case]
    folder = without_manifest(shutil.copytree(trained, tmp_path / "out"))
    file = folder / name
    if isinstance(change, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    else:
        file.write_bytes(change if isinstance(change, bytes) else change(file.read_bytes()))
    with pytest.raises(PlanError) as error:
        open_with(program, folder, rows_file, tmp_path)
    assert fact in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()


MLX_LM = {
    "rank": ({"rank": 3}, "rank is 3, which its weights do not have"),
    "rank 0": ({"rank": 0}, "rank is 0, which its weights do not have"),
    "rank null": ({"rank": None}, "lora_parameters.rank is NoneType, must be an integer"),
    "scale NaN": ({"scale": float("nan")}, "scale is nan, must be a number up to 1e+06"),
    "scale infinite": ({"scale": float("inf")}, "scale is inf, must be a number up to 1e+06"),
    "scale is text": ({"scale": "x"}, "lora_parameters.scale is str, must be"),
}


@pytest.mark.parametrize("case", MLX_LM)
def test_an_adapter_of_mlx_lm_is_checked_before_it_is_converted(trained, tmp_path, case):
    change, fact = MLX_LM[case]
    export.main(["--checkpoint", str(trained), "--output_dir", str(tmp_path / "mlx"), "--to", "mlx-lm"])
    file = tmp_path / "mlx" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_parameters": config["lora_parameters"] | change}))
    with pytest.raises(PlanError) as error:
        export.main(["--checkpoint", str(tmp_path / "mlx"), "--output_dir", str(tmp_path / "made"), "--to", "peft"])
    assert fact in str(error.value) and not (tmp_path / "made").exists()


@pytest.mark.parametrize("program", PROGRAMS)
def test_adapter_weights_that_link_out_of_their_folder_are_refused(trained, tmp_path, program, rows_file):
    folder = shutil.copytree(trained, tmp_path / "out")
    file = folder / "adapter_model.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(PlanError, match="links to .*elsewhere.safetensors, outside the folder"):
        open_with(program, folder, rows_file, tmp_path)


@pytest.mark.parametrize("program", ["generate", "score", "export"])
def test_a_chat_template_that_links_out_of_its_folder_is_refused(trained, tmp_path, program, rows_file):
    folder = without_manifest(shutil.copytree(trained, tmp_path / "out"))
    (tmp_path / "secret").write_text("a secret")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(PlanError, match="chat_template.jinja: links to .*secret, outside the folder"):
        open_with(program, folder, rows_file, tmp_path)
    assert not (tmp_path / "made").exists()


def test_what_latest_links_to_is_neither_read_nor_printed(trained, tmp_path, rows_file):
    folder = without_manifest(shutil.copytree(trained, tmp_path / "out"))
    (tmp_path / "secret").write_text("a secret")
    (folder / "adapter_config.json").unlink()
    latest = folder / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to(tmp_path / "secret")
    with pytest.raises(PlanError, match="did not finish. Give .*step-1") as error:
        open_with("generate", folder, rows_file, tmp_path)
    assert "a secret" not in str(error.value)


def flip(file):
    """Flips the exponent bit of a weight, or a bit of a text."""
    data, is_weights = bytearray(file.read_bytes()), file.suffix == ".safetensors"
    data[-6 if is_weights else len(data) // 2] ^= 64 if is_weights else 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def trained_in_full(flags_of_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("full") / "out"
    flags = {k: v for k, v in flags_of_run.items() if k != "lora_rank"}
    fine_tune(**flags | {"train_type": "full"}, output_dir=str(folder), max_steps=1)
    return folder


PUBLISHED = [(p, f) for p in PROGRAMS for f in ("adapter_model.safetensors", "adapter_config.json")]
PUBLISHED += [("generate", f) for f in ("base_model.json", "tokenizer.json", "tokenizer_config.json")]
IN_FULL = [(p, f) for p in PROGRAMS[:3] for f in ("model.safetensors", "config.json")]


CHANGED = [(*cell, change) for change in ("a flipped bit", "deleted") for cell in PUBLISHED + IN_FULL]


@pytest.mark.parametrize(
    ("program", "name", "change"), but_slow(CHANGED, [c for c in CHANGED if c[0] == "generate" or c[2] != "deleted"])
)
def test_published_files_that_differ_from_the_manifest_are_refused_with_what_to_do(
    trained, trained_in_full, rows_file, tmp_path, program, name, change
):
    folder = shutil.copytree(trained_in_full if (program, name) in IN_FULL else trained, tmp_path / "out")
    if change == "deleted":
        (folder / name).unlink()
    else:
        flip(folder / name)
    with pytest.raises((CheckpointDamagedError, PlanError)) as error:
        open_with(program, folder, rows_file, tmp_path)
    text = str(error.value)
    assert name in text and "\n" not in text and not (tmp_path / "made").exists()
    if "export" not in program or change != "deleted":
        assert f"delete {folder / 'manifest.json'} to use the files as they are" in text


def test_a_published_file_edited_on_purpose_is_used_once_the_manifest_is_deleted(trained, rows_file, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "out")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 1.0}))
    with pytest.raises(CheckpointDamagedError):
        open_with("generate", folder, rows_file, tmp_path)
    assert open_with("generate", without_manifest(folder), rows_file, tmp_path) == 0


def test_weights_put_beside_the_published_ones_are_not_taken_for_them(trained_in_full, rows_file, tmp_path):
    folder = shutil.copytree(trained_in_full, tmp_path / "out")
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointDamagedError, match="manifest.json: does not name model-00001-of-00002.safetensors"):
        open_with("generate", folder, rows_file, tmp_path)


def test_a_published_model_is_verified_where_it_is_a_base_too(trained_in_full, tmp_path, flags_of_run):
    folder = shutil.copytree(trained_in_full, tmp_path / "out")
    flip(folder / "model.safetensors")
    argv = ["--model_name", str(folder), "--output_dir", str(tmp_path / "made"), "--num_new_blocks", "1"]
    with pytest.raises(CheckpointDamagedError, match="model.safetensors: its content has changed"):
        expand.main(argv)
    for backend in ("cpu", "mlx"):
        flags = flags_of_run | {"model_name": str(folder), "backend": backend}
        with pytest.raises(CheckpointDamagedError, match="model.safetensors: its content has changed"):
            fine_tune(**flags, output_dir=str(tmp_path / "made"), max_steps=1)


def test_what_only_a_resumed_run_reads_is_not_verified_by_the_others(trained, rows_file, tmp_path):
    step = next((trained / "checkpoints").glob("step-*"))
    step = shutil.copytree(step, tmp_path / step.name)
    flip(step / "optimizer.safetensors")
    assert open_with("generate", step, rows_file, tmp_path) == 0


def test_a_finished_run_whose_published_files_are_damaged_publishes_them_again(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "out")
    before = (folder / "adapter_model.safetensors").read_bytes()
    flip(folder / "adapter_model.safetensors")
    assert fine_tune(resume=str(folder)).status == "finished"
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    assert is_as_published(folder) and (folder / "manifest.json").is_file()


@pytest.mark.parametrize("program", ["generate", "score", "export", "export --to mlx-lm"])
def test_a_flipped_bit_of_a_checkpoint_is_noticed_by_every_program_that_opens_it(trained, rows_file, tmp_path, program):
    step = shutil.copytree(next((trained / "checkpoints").glob("step-*")), tmp_path / "checkpoints" / "step-2")
    step = step.rename(step.with_name(f"step-{json.loads((step / 'manifest.json').read_text())['step']}"))
    weights = step / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-6] ^= 64  # an exponent bit
    weights.write_bytes(data)
    name, _, more = program.partition(" ")
    argv = {"generate": ["--prompt", "a"], "score": ["--dataset", str(rows_file)]}.get(name, more.split())
    argv += ["--output_dir", str(tmp_path / "out")] if name == "export" else ["--device", "cpu"]
    with pytest.raises(CheckpointDamagedError, match="its content has changed"):
        {"generate": generate, "score": score, "export": export}[name].main(["--checkpoint", str(step), *argv])
    assert not (tmp_path / "out").exists()


def test_a_merge_that_is_not_finite_is_refused_and_leaves_nothing(trained, tmp_path):
    damaged = without_manifest(shutil.copytree(trained, tmp_path / "damaged"))
    config = json.loads((damaged / "adapter_config.json").read_text())
    (damaged / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": float("nan")}))
    with pytest.raises(PlanError, match="lora_alpha is nan"):
        export.main(["--checkpoint", str(damaged), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
