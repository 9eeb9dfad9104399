"""Files and flags as hands, other tools and other machines leave them: each is one line that names it, before anything loads."""

import json
import shutil

import pytest

import train
from finetune.checkpoint.output_dir import find_saved_run
from finetune.cli import parse_value
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.tokenizer import generation_ends


@pytest.fixture
def flags(tiny_model, rows_file, tmp_path):
    """Flags of a tiny run, as fine_tune takes them."""
    return {
        "model_name": str(tiny_model),
        "dataset": str(rows_file),
        "output_dir": str(tmp_path / "out"),
        "backend": "cpu",
        "train_type": "lora",
        "lora_rank": 4,
        "batch_size": 4,
        "context_length": 64,
    }


def refused(flags: dict, **changes) -> str:
    """The one line that the command line answers to these flags; the same with --dry_run, where nothing is loaded."""
    lines = set()
    for last in ([], ["--dry_run"]):
        argv = [part for k, v in (flags | changes).items() for part in (f"--{k}", str(v))]
        with pytest.raises(PlanError) as error:
            train.main(argv + last)
        lines.add(str(error.value))
    (line,) = lines
    assert "\n" not in line and error.value.exit_code == 2
    return line


# ---- a model's config.json


def with_config(tiny_model, tmp_path, **changes):
    """A copy of the tiny model with other values in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


QUANTIZED = {
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "hqq": {"quant_method": "hqq", "quant_config": {}},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "unknown": {"quant_method": "nope"},
    "no method": {"bits": 4},
    "no object": "gptq",
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantized_model_is_refused(flags, tiny_model, tmp_path, case):
    folder = with_config(tiny_model, tmp_path, quantization_config=QUANTIZED[case])
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: its weights are prequantized (config.json's quantiz")
    assert line.endswith("bitsandbytes are supported. Give the unquantized model it was made from.")


CONFIGS = {
    "text_config": ("text", 5, [1]),
    "num_hidden_layers": ("2", 0, -1, 1.5, True, {}),
    "hidden_size": ("64", 0),
    "vocab_size": ("many", -5),
    "num_attention_heads": ("4",),
    "rms_norm_eps": ("1e-5",),
    "dtype": ("float31", 5, ["float32"]),
    "torch_dtype": ("no",),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in CONFIGS.items() for v in values])
def test_a_malformed_config_names_its_key(flags, tiny_model, tmp_path, key, value):
    folder = with_config(tiny_model, tmp_path, **{key: value})
    line = refused(flags, model_name=folder)
    assert line.startswith(f"--model_name {folder}: config.json's {key} is {json.dumps(value)}, ")


def test_a_text_config_that_is_no_object_is_no_shape():
    assert ModelShape.from_config({"model_type": "x", "text_config": "y", "vocab_size": 5}).vocab_size == 5


# ---- a model's generation_config.json


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("{", "is not JSON ("),
        ("[2]", "contains list, must contain an object"),
        ("5", "contains int, must contain an object"),
        ('{"eos_token_id": "2"}', 'eos_token_id is "2", must be a token id'),
        ('{"eos_token_id": [2, "3"]}', 'eos_token_id is [2, "3"], must be a token id'),
        ('{"eos_token_id": {"a": 1}}', 'eos_token_id is {"a": 1}, must be a token id'),
    ],
)
def test_a_malformed_generation_config_is_said_before_the_model_loads(
    flags, tiny_model, tmp_path, content, fact, capsys
):
    folder = with_config(tiny_model, tmp_path)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(PlanError) as error:
        train.fine_tune(**flags | {"model_name": str(folder)})
    line = str(error.value)
    assert line.startswith(f"{folder / 'generation_config.json'}: {fact}") and "\n" not in line
    assert "trainable parameters" not in capsys.readouterr().out


def test_the_ends_that_a_generation_config_names_are_read(tmp_path):
    assert generation_ends(tmp_path) == set()
    for named, ids in ((None, set()), (2, {2}), ([2, 5], {2, 5})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert generation_ends(tmp_path) == ids


# ---- a run_plan.json edited by hand

PLAN = {
    "requested": {"lr": 0.001},
    "settled": {"batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": -1, "num_epochs": 1},
    "adjustments": [],
}


@pytest.mark.parametrize(
    ("plan", "fact"),
    [
        ([], ": contains list, must contain an object."),
        (5, ": contains int, must contain an object."),
        ({}, ": 'requested' is missing."),
        (PLAN | {"requested": []}, ": 'requested' is list, must be an object."),
        (PLAN | {"settled": "x"}, ": 'settled' is str, must be an object."),
        (PLAN | {"settled": PLAN["settled"] | {"batch_size": "x"}}, ": settled batch_size x: not an integer."),
        (PLAN | {"settled": PLAN["settled"] | {"precision": 5}}, ": settled precision: is int 5, must be a string."),
        (PLAN | {"settled": {}}, ": 'settled' has no batch_size."),
        (PLAN | {"requested": {"lora_rnk": 4}}, ": unknown key 'lora_rnk'. Nearest: lora_rank."),
        (PLAN | {"requested": {"lora_rank": "many"}}, ": lora_rank many: not an integer."),
        (PLAN | {"requested": {"lora_rank": [4]}}, ": lora_rank [4]: not an integer."),
        (PLAN | {"requested": {"dataset": 5}}, ": dataset: is int 5, must be a string."),
        (PLAN | {"requested": {"optimizer": "adamm"}}, ": optimizer adamm: not one of "),
    ],
)
def test_a_run_plan_edited_by_hand_is_one_line_with_file_and_key(tmp_path, plan, fact):
    file = tmp_path / "run_plan.json"
    file.write_text(json.dumps(plan))
    assert refused({"resume": tmp_path}).startswith(f"{file}{fact}")


def test_wishes_of_a_saved_plan_are_converted_as_those_of_a_config_file_are(tmp_path):
    saved = PLAN | {"requested": {"learning-rate": "1e-3", "lora_rank": 8.0, "use_dora": "yes"}}
    (tmp_path / "run_plan.json").write_text(json.dumps(saved))
    found = find_saved_run(str(tmp_path), None)
    assert found.saved_plan["requested"] == {"lr": 0.001, "lora_rank": 8, "use_dora": True}
    assert type(found.saved_plan["requested"]["lora_rank"]) is int


@pytest.mark.parametrize("name", ["step-by-step", "step-3"])
def test_only_a_step_folder_under_checkpoints_is_a_checkpoint(tmp_path, name, monkeypatch):
    root = tmp_path / "checkpoints" / name if name == "step-by-step" else tmp_path / name
    step = root / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    (root / "run_plan.json").write_text(json.dumps(PLAN))
    assert (find_saved_run(str(root), None).output_dir, find_saved_run(str(root), None).step_folder) == (root, None)
    assert (find_saved_run(str(step), None).output_dir, find_saved_run(str(step), None).step_folder) == (root, step)
    monkeypatch.chdir(step)
    assert find_saved_run(".", None).step_folder == step


def test_a_file_is_no_run(rows_file):
    assert refused({"resume": rows_file}).startswith(f"--resume {rows_file}: is a file.")


# ---- values of flags


@pytest.mark.parametrize(
    ("flag", "value", "fact"),
    [
        ("lr", "inf", " inf: not finite."),
        ("lr", "1e999", " 1e999: not finite."),
        ("seed", 2**63, f" {2**63}: must be below 2**63"),
        ("batch_size", 10**99, f" {10**79}...: must be below 2**63"),
        ("batch_size", "9" * 5000, f" {'9' * 80}...: not an integer."),
        ("dataset_samples", 0, " 0: leaves no rows. Use -1"),
        ("score_samples", 0, " 0: leaves no rows. Use -1"),
        ("world_size", 0, " 0: leaves no ranks. Use -1"),
        ("dp_shards", 0, " 0: leaves no ranks. Use -1"),
        ("model_name", "", " '': is empty. Give a name"),
        ("dataset", "", " '': is empty. Give a name"),
        ("output_dir", " ", " ' ': is empty. Give a name"),
        *(
            (flag, "a" * 300, f" {'a' * 80}...: a path component has 300 bytes, the maximum is 255.")
            for flag in (
                "model_name",
                "dataset",
                "output_dir",
                "resume",
                "validation_dataset",
                "score_dataset",
                "config",
            )
        ),
        ("dataset", "ä" * 150 + ".jsonl", f" {'ä' * 80}...: a path component has 306 bytes"),
    ],
)
def test_a_value_that_cannot_be_used_names_its_flag(flags, flag, value, fact):
    assert refused(flags, **{flag: value}).startswith(f"--{flag}{fact}")


def test_the_largest_seed_is_taken():
    assert parse_value("seed", str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize("flag", ["model_name", "dataset", "validation_dataset", "score_dataset", "resume"])
@pytest.mark.parametrize("name", ["~nosuchuser/x", "a/" * 2500])
def test_a_path_that_the_system_cannot_have_names_its_flag(flags, flag, name):
    assert refused(flags, **{flag: name}).startswith(f"--{flag} {name}: not a valid path (")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("batch_size: .inf", ": batch_size inf: not an integer."),
        ("batch_size: .nan", ": batch_size nan: not an integer."),
        ("batch_size: 1.0e+300", ": batch_size 1e+300: must be below 2**63"),
        ("lr: .inf", ": lr inf: not finite."),
        ("lr: 1" + "0" * 400, f": lr 1{'0' * 79}...: not a number."),
        ("dataset: ''", ": dataset '': is empty."),
        ("dataset: 2026-13-45", ": cannot be parsed as YAML (month must be in 1..12)."),
        ("dataset: " + "[" * 5000, ": cannot be parsed as YAML (nested too deeply)."),
    ],
)
def test_a_value_in_a_config_file_names_file_and_key(flags, tmp_path, text, fact):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert refused(flags, config=file).startswith(f"{file}{fact}")


def test_json_nested_too_deep_is_one_line(flags, tmp_path):
    file = tmp_path / "run.json"
    file.write_text("[" * 100_000)
    assert refused(flags, config=file) == f"{file}: cannot be parsed as JSON (nested too deeply). Fix the JSON."
