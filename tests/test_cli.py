"""Command lines and config files: parsed, or refused in one line."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.cli import Parser, parse_overrides, read_config
from finetune.config import FIELDS, TrainConfig, value_type
from finetune.errors import PlanError
from finetune.flag_values import nearest, parse_value
from tests.support.commands import ROOT, refused
from train import build_parser, fine_tune

PATHS = [name for name, field in FIELDS.items() if field.metadata["path"]]


def test_a_flag_that_is_none_is_an_error_in_python_too():
    with pytest.raises(PlanError, match="lora_rnk"):
        fine_tune(lora_rnk=3)
    with pytest.raises(PlanError, match="not an integer"):
        fine_tune(lora_rank="four")


def parse(*argv):
    return parse_overrides(list(argv), build_parser())


def test_only_what_the_user_set_is_requested():
    assert parse("--lr", "1e-3") == {"lr": 1e-3}


@pytest.mark.promise("CLI_08")
@pytest.mark.parametrize("flag", [n for n, f in FIELDS.items() if value_type(f) is bool])
def test_booleans_parse_bare_and_valued_with_dashes_and_underscores(flag):
    if flag == "dry_run":
        assert parse("--dry-run")["dry_run"] is True
    dashed = flag.replace("_", "-")
    assert parse(f"--{flag}")[flag] is True
    for word, value in (("true", True), ("1", True), ("yes", True), ("False", False), ("0", False), ("no", False)):
        assert parse(f"--{dashed}", word)[flag] is value
        assert parse(f"--{flag}={word}")[flag] is value


@pytest.mark.promise("CLI_08")
def test_checkpointing_is_bare_valued_or_auto():
    assert parse("--use_gradient_checkpointing")["use_gradient_checkpointing"] == "true"
    assert parse("--use-gradient-checkpointing", "no")["use_gradient_checkpointing"] == "false"
    assert parse("--use_gradient_checkpointing", "auto")["use_gradient_checkpointing"] == "auto"


def test_every_field_parses_its_default_and_all_its_choices():
    for name, field in FIELDS.items():
        values = list(field.metadata["choices"] or ()) or ([field.default] if field.default is not None else [])
        for value in values:
            assert parse(f"--{name}={value}")[name] == parse_value(name, str(value))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--lora_rnk", "4"], "--lora_rnk: unknown flag. Nearest: --lora_rank"),
        (["--datas"], "--datas: unknown flag"),
        (["--train_type", "qlra"], "--train_type qlra: not one of auto, full, lora, qlora"),
        (["--lr", "fast"], "--lr fast: not a number"),
        (["--batch_size", "0"], "--batch_size 0: must be >= 1"),
        (["--batch_size", "2.5"], "--batch_size 2.5: not an integer"),
        (["--lr", "nan"], "--lr nan: must be > 0"),
        (["--lr", "-1"], "--lr -1: must be > 0"),
        (["--use_dora", "maybe"], "--use_dora maybe: not a boolean"),
        (["extra"], "extra: not a flag"),
        (["--lr"], "Argument --lr"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_nearest(argv, text):
    with pytest.raises(PlanError) as error:
        parse(*argv)
    assert str(error.value).startswith(text) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["zero_stage", "wandb", "fsdp"])
def test_a_name_that_shares_no_word_with_a_flag_has_no_nearest_one(name):
    assert "Nearest" not in nearest(f"--{name}", [f"--{flag}" for flag in FIELDS])


@pytest.mark.promise("CLI_13")
def test_aliases_of_the_older_scripts_set_the_same_flag():
    assert parse("--hqq_group_size", "64", "--group_size", "64") == {"group_size": 64}
    assert parse("--world_size", "-1") == {"world_size": -1}


def test_a_yaml_file_holds_flags_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 2e-4\nuse-dora: yes\nbatch_size: 4\n")
    assert parse("--config", str(file), "--batch_size", "2") == {
        "lr": 2e-4,
        "use_dora": True,
        "batch_size": 2,
        "config": str(file),
    }


def test_a_number_in_yaml_is_the_one_of_the_command_line(tmp_path):
    """YAML 1.1 would read 010 as 8 and 1:30.5 as 90.5."""
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 010\nseed: 1_000\nlr: 1.5e-3\nwd: .5\nlora_alpha: +16\n")
    found = read_config(str(file))
    assert found == {"max_steps": 10, "seed": 1000, "lr": 1.5e-3, "wd": 0.5, "lora_alpha": 16}
    assert parse("--max_steps", "010")["max_steps"] == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_rnk: 4\n", "unknown key 'lora_rnk'. Nearest: lora_rank"),
        ("batch_size: many\n", "batch_size many: not an integer"),
        ("batch_size: [1]\n", "not an integer"),
        ("max_steps: 1:30\n", "max_steps 1:30: not an integer"),
        ("seed: 0x10\n", "seed 0x10: not an integer"),
        ("dataset: 5\n", "dataset: is int 5, must be a string"),
        ("lr: 1\nlr: 2\n", "key 'lr' is given twice"),
        ("- a\n", "contains list"),
        ("a: [\n", "Fix the YAML"),
        ("!!python/object/apply:os.system ['true']\n", "Fix the YAML"),
    ],
)
def test_a_wrong_yaml_file_is_one_line_that_names_file_and_key(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(PlanError) as error:
        read_config(str(file))
    assert str(file) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


def test_defaults_are_valid_values_of_their_own_flags():
    for name, field in FIELDS.items():
        if field.default is not None:
            assert parse_value(name, str(field.default)) == field.default
    assert TrainConfig().train_type == "qlora"


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
        ("num_layers", 0, " 0: leaves no layers. Use -1"),
        ("lora_alpha", 0, " 0: must be >= 1e-06."),
        ("lora_alpha", 5e-324, " 5e-324: must be >= 1e-06."),
        ("loraplus_lr_ratio", 1e300, " 1e+300: must be <= 1000000.0."),
        *(
            (flag, "", " '': is empty. Give a name")
            for flag in (*PATHS, "revision", "backend", "assume_memory", "parity")
        ),
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
                "adapter",
            )
        ),
        ("dataset", "ä" * 150 + ".jsonl", f" {'ä' * 80}...: a path component has 306 bytes"),
    ],
)
def test_a_value_that_cannot_be_used_names_its_flag(flags, flag, value, fact):
    assert refused(flags, **{flag: value}).startswith(f"--{flag}{fact}")


def test_a_dry_run_refuses_the_files_and_targets_that_the_run_would(flags, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("")
    assert "is a file, or is inside one. Give a folder." in refused(flags, output_dir=file)
    assert "is a file, or is inside one. Give a folder." in refused(flags, output_dir=file / "out")
    assert "not a valid regex" in refused(flags, lora_target_modules="[")
    assert refused(flags, modules_to_save=",").startswith("--modules_to_save ',': names nothing. Name modules")


def test_the_largest_seed_is_taken():
    assert parse_value("seed", str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize("flag", ["model_name", "dataset", "validation_dataset", "score_dataset", "resume"])
def test_a_home_that_does_not_exist_names_its_flag(flags, flag):
    assert refused(flags, **{flag: "~nosuchuser/x"}).startswith(f"--{flag} ~nosuchuser/x: not a valid path (")


@pytest.mark.parametrize(
    "flag", ["model_name", "dataset", "validation_dataset", "score_dataset", "resume", "output_dir", "adapter"]
)
@pytest.mark.parametrize(("name", "fact"), [("a/" * 1501, "has 3002 bytes"), ("a\udcff", "is not UTF-8")])
def test_a_path_that_the_system_cannot_have_names_its_flag(flags, flag, name, fact):
    line = refused(flags, **{flag: name})
    assert line.startswith(f"--{flag} ") and fact in line


def test_the_home_in_output_dir_is_expanded_and_must_exist():
    assert parse_value("output_dir", "~/runs/a") == str(Path("~/runs/a").expanduser())
    with pytest.raises(PlanError, match="--output_dir ~nosuchuser/x: no such user"):
        parse_value("output_dir", "~nosuchuser/x")


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
        ("dataset: !!timestamp soon", ": cannot be parsed as YAML (what is tagged as a date is none)."),
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


def test_help_is_answered_before_numpy_or_a_framework_is_imported():
    argv = [sys.executable, "-X", "importtime", "train.py", "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "finetune.config" in imported and "--model_name" in done.stdout
    assert not {"torch", "mlx", "transformers", "numpy"} & imported


def test_a_misspelled_required_flag_is_named_before_it_is_found_missing():
    parser = Parser(prog="x")
    parser.add_argument("--checkpoint", required=True)
    for word in ("--chekpoint", "--chekpoint=a"):
        with pytest.raises(PlanError, match="^--chekpoint: unknown flag. Nearest: --checkpoint. See --help.$"):
            parser.parse_args([word, "a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1, 1]\nb: &b [*a, *a]\nlr: [*b, *b]\n", ":2: aliases (*name) are not supported. Write the value out."),
        ("lr: &x 1\nseed: *x\n", ":2: aliases (*name) are not supported."),
        ("".join(f"key{i}: 1\n" for i in range(30_000)), ": has over 64 KiB, which no file of flags needs."),
        ("".join(f"key{i}: 1\n" for i in range(4000)), ": unknown key 'key0'"),
        (f"lora_target_modules: [{'1, ' * 9000}1]\n", ": lora_target_modules: is list [1, 1, "),
        (f"{'x' * 900}: 1\n", f": unknown key '{'x' * 80}...'"),
        (f"precision: {'x' * 9000}\n", f": precision {'x' * 80}...: not one of"),
        ("? [a, b]\n: 1\n", ""),
        ('output_dir: "\\ud83d"\n', ": output_dir: is not Unicode text (character 1). Change it."),
        ("precision: |\n  a\n  b\n", ": precision a\\nb\\n: not one of"),
        ("lr: \0\n", ": unacceptable character #x0000"),
        ("1: 1\n'1': 2\n", ":2: key '1' is given twice. Give it once."),
    ],
)
def test_a_config_file_costs_no_more_than_its_size(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    began = time.process_time()
    with pytest.raises(PlanError) as error:
        read_config(str(file))
    assert str(error.value).startswith(f"{file}{message}") and len(str(error.value)) < 1000 and "\n" not in str(error)
    assert time.process_time() - began < 5


def test_an_unreadable_number_is_answered_with_a_number():
    for name, example in (("lr", "1e-4"), ("max_steps", "-1"), ("lora_rank", "16")):
        with pytest.raises(PlanError, match=f"Give one, such as {example}"):
            parse_value(name, "abc")


def test_a_file_without_its_flag_is_named_with_it(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,answer\n")
    for path, advice in ((str(file), f"Use --dataset {file}."), (str(tmp_path / "none.csv"), "See --help.")):
        with pytest.raises(PlanError, match=re.escape(f"takes no positional arguments. {advice}")):
            parse_overrides([path], build_parser())


def test_a_python_without_the_requirements_is_one_line():
    """-S leaves out the packages of the environment; --help is answered even so."""
    bare = [sys.executable, "-S", str(ROOT / "train.py")]
    done = subprocess.run([*bare, "--dataset", "x.csv"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: numpy: is not installed for ") and not done.stdout
    assert done.stderr.count("\n") == 1 and "source .venv/bin/activate" in done.stderr
    assert subprocess.run([*bare, "--help"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "program",
    [
        *("score.py", "generate.py", "export.py", "expand.py", "pretrain.py", "report.py"),
        *("dataset/build_chat_dataset.py", "dataset/build_puzzle_dataset.py"),
    ],
)
def test_every_program_says_so_in_one_line(program):
    how = ["-m", program.removesuffix(".py").replace("/", ".")] if "/" in program else [str(ROOT / program)]
    done = subprocess.run([sys.executable, "-S", *how, "x"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("error: numpy: is not installed for ") and not done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["build_chat_dataset", "build_puzzle_dataset"])
def test_builders_are_found_by_their_path_too(program, tmp_path):
    argv = [sys.executable, str(ROOT / "dataset" / f"{program}.py"), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m dataset.{program}"), done.stderr


def test_a_model_object_is_answered_with_what_to_do(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name in ("model", "model_name"):
        with pytest.raises(PlanError) as refused:
            fine_tune(**{name: model}, dataset="x.jsonl")
        assert "is a LlamaForCausalLM, and each rank loads the model from its files." in str(refused.value)
        assert "save_pretrained(FOLDER)" in str(refused.value) and str(refused.value).startswith("fine_tune(model")
    with pytest.raises(PlanError, match="model_name=...\\): is int 3, must be a string"):
        fine_tune(model_name=3)


def test_a_message_for_no_stream_goes_to_stderr_as_argparse_says(capsys, monkeypatch):
    Parser()._print_message("usage\n", None)
    assert capsys.readouterr() == ("", "usage\n")
    monkeypatch.setattr(sys, "stderr", None)
    Parser()._print_message("usage\n", sys.stderr)
    assert capsys.readouterr().out == ""
