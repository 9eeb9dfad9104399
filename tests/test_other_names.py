"""Names of other programs: each does what its table says, on the command line, in YAML and in Python."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune.cli import parse_named, parse_overrides, read_config
from finetune.config import FIELDS, NAMES, value_type
from finetune.errors import PlanError
from finetune.flag_values import nearest, parse_value
from finetune.names import entries
from finetune.names.entries import ByValue, Computed, Instead, LeftOut
from finetune.names.tables import PROGRAMS, table
from finetune.names.translate import known, recognised, translated
from tests.support.commands import ROOT, command, finish
from train import build_parser, fine_tune

PARSER = build_parser()
# A value to try of names whose entries compute what becomes of them.
TRIED = {
    "rope_scaling": ({"rope_type": "yarn", "factor": 2}, {"rope_scaling": "yarn", "rope_factor": 2.0}),
    "warmup_steps": ("10", {"warmup_steps": 10}),
    "gradient_checkpointing_kwargs": ("{'use_reentrant': true}", {"reentrant_checkpointing": True}),
    "activation_checkpointing_kwargs": ("{'use_reentrant': false}", {}),
    "report_to": (["wandb", "tensorboard"], {"log_to": "wandb,tensorboard"}),
    "freeze_trainable_layers": ("4", {"num_layers": 4}),
    "ddp_timeout": ("180000000", {"rank_timeout": 2_592_000.0}),
    "fsdp": ("full_shard offload", {"sharding_strategy": "full_shard", "use_cpu_offload": True}),
    "deepspeed": ("ds_z2_offload_config.json", {"sharding_strategy": "shard_grad_op", "use_cpu_offload": True}),
    "plugins": (["axolotl.integrations.liger.LigerPlugin"], {}),
    "model_type": ("LlamaForCausalLM", {}),
    "type_of_model": ("LlamaForCausalLM", {}),
    "chat_template": ("chatml", {"chat_template": "chatml"}),
    "chat_template_jinja": ("mine.jinja", {"chat_template": "mine.jinja"}),
    "pretraining_dataset": ([{"path": "a/b", "name": "en"}], {"name": "a/b:en"}),
    "hf_dataset": (
        {"path": "a/b", "prompt_feature": "q", "config": {"name": "main"}},
        {"name": "a/b:main", "columns": {"prompt": "q"}},
    ),
    **{
        f"optimizer_config.{n}.betas": ([0.9, 0.95], {"adam_beta1": 0.9, "adam_beta2": 0.95}) for n in ("adam", "adamw")
    },
    "optimizer.betas": ([0.9, 0.95], {"adam_beta1": 0.9, "adam_beta2": 0.95}),
    "optimizer.init_args.betas": ("(0.9, 0.95)", {"adam_beta1": 0.9, "adam_beta2": 0.95}),
    "model.lora_attn_modules": (["q_proj", "output_proj"], {"lora_target_modules": "q_proj,o_proj"}),
    "data": ("alpaca2k", {"dataset": "mhenrichsen/alpaca_2k_test"}),
    "data.class_path": ("litgpt.data.Dolly", {"dataset": "databricks/databricks-dolly-15k"}),
    "test_split_size": ("0.1", {"validation_split": 0.1}),
    "val_set_size": ("0.1", {"validation_split": 0.1}),
    "val_size": ("0.1", {"validation_split": 0.1}),
    "completion_only_loss": ("false", {"train_on_prompt": True}),
    "assistant_only_loss": ("true", {}),
    "quantization_bit": ("8", {"train_type": "qlora", "n_bits": 8}),
    "datasets": ([{"path": "a/b", "type": "alpaca", "split": "x"}], {"name": "a/b", "split": "x", "format": "alpaca"}),
    "test_datasets": ([{"path": "a/b", "split": "test"}], {"validation_dataset": "a/b@test"}),
    "dataset": ("examples/chat.jsonl", {"name": "examples/chat.jsonl"}),
    "model._component_": ("torchtune.models.llama3.qlora_llama3_8b", {"train_type": "qlora"}),
    "dataset._component_": ("torchtune.datasets.alpaca_cleaned_dataset", {"dataset": "yahma/alpaca-cleaned"}),
    "optimizer._component_": ("bitsandbytes.optim.PagedAdamW8bit", {"optimizer": "paged_adamw_8bit"}),
    "lr_scheduler._component_": (
        "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.0},
    ),
    "loss._component_": ("torchtune.rlhf.loss.DPOLoss", {"preference": "dpo"}),
    "optimizer": ("AdamW", {"optimizer": "adamw"}),
    "optimizer.class_path": ("torch.optim.SGD", {"optimizer": "sgd"}),
}
ROWS = [(program, name) for program, names in PROGRAMS.items() for name in names]


def sample(flag: str) -> str:
    """A value that a flag takes."""
    field = FIELDS[NAMES[flag]]
    if field.metadata["choices"]:
        return field.metadata["choices"][-1]
    kind = value_type(field)
    return "true" if kind is bool else "3" if kind is int else "0.25" if kind is float else "some/thing"


def parsed(*argv: str) -> tuple[dict, list[str]]:
    lines: list[str] = []
    return parse_overrides(list(argv), PARSER, lines.append), lines


def flags_in(words: str, value: str) -> dict:
    parts = shlex.split(words.replace("|", " ").replace("{}", value))
    return {NAMES[n[2:]]: parse_value(NAMES[n[2:]], v) for n, v in zip(parts[::2], parts[1::2], strict=True)}


def check(program: str, name: str, entry, value: str, expected) -> None:
    """`expected`: our flags, LeftOut, or the Instead that is raised."""
    where = f"{name} {value}"
    if isinstance(expected, Instead):
        assert all(f"--{n}" in OUR_FLAGS for n in re.findall(r"--(\w+)", expected.what)), where
        with pytest.raises(PlanError) as error:
            translated(entry, value, f"--{name}")
        assert str(error.value) == f"--{name}: {expected.what}"
        return
    found = translated(entry, value, f"--{name}")
    settings = {NAMES[k]: parse_value(NAMES[k], v) for part in (found.given, found.otherwise) for k, v in part.items()}
    assert settings == ({} if isinstance(expected, LeftOut) else expected), where
    assert bool(found.line) == (not isinstance(entry, str) and (bool(settings) or isinstance(expected, LeftOut))), where
    if isinstance(expected, LeftOut):
        assert expected.why in found.line
    if (
        known(name) is entry and name not in NAMES and "." not in name
    ):  # the one that a command line without a program means
        assert parsed(f"--{name}={value}")[0] == settings, where
        lines: list[str] = []
        assert parse_named({name: value}, str, str, lines.append) == settings and len(lines) == bool(found.line), where


OUR_FLAGS = {f"--{name}" for name in NAMES} | {"--checkpoint", "--prompt", "--output_dir"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_name_does_what_its_table_says(program):
    for name, entry in PROGRAMS[program].items():
        if isinstance(entry, str):
            value = sample(entry)
            check(program, name, entry, value, {NAMES[entry]: parse_value(NAMES[entry], value)})
        elif isinstance(entry, LeftOut):
            check(program, name, entry, "true", entry)
        elif isinstance(entry, Instead):
            check(program, name, entry, "something", entry)
            assert translated(entry, False, name).given == {}
        elif isinstance(entry, ByValue):
            for value, outcome in entry.words.items():
                tried = "7" if value == "*" else value
                check(program, name, entry, tried, flags_in(outcome, tried) if isinstance(outcome, str) else outcome)
        else:
            value, expected = TRIED[name]
            found = translated(entry, value, name)
            if "name" in expected:
                assert found.given == {"dataset": [expected]}
            else:
                assert {n: parse_value(n, v) for n, v in {**found.given, **found.otherwise}.items()} == expected, name


def test_there_are_more_than_three_hundred_names_that_are_no_flags_here():
    assert len({name for _, name in ROWS} - NAMES.keys()) > 500
    assert all(len(names) >= 30 for program, names in PROGRAMS.items() if program != "fsdp_qlora")


def fields_of(module: str, *classes: str) -> set[str]:
    """The fields of dataclasses, read from a module's source without importing what it imports."""
    folder = Path(importlib.util.find_spec(module.partition(".")[0]).origin).parent
    tree = ast.parse((folder / (module.partition(".")[2].replace(".", "/") + ".py")).read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in classes]
    return {
        s.target.id for body in bodies for s in body if isinstance(s, ast.AnnAssign) if isinstance(s.target, ast.Name)
    }


@pytest.mark.parametrize(
    ("program", "module", "classes"),
    [
        ("transformers", "transformers.training_args", ["TrainingArguments"]),
        ("PEFT", "peft.tuners.lora.config", ["LoraConfig"]),
        ("TRL", "trl.trainer.sft_config", ["SFTConfig"]),
        ("TRL", "trl.trainer.dpo_config", ["DPOConfig"]),
        ("TRL", "trl.trainer.model_config", ["ModelConfig"]),
        ("TRL", "trl.scripts.utils", ["ScriptArguments"]),
    ],
)
def test_every_field_of_an_installed_library_has_an_entry(program, module, classes):
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module.partition('.')[0]} is not installed")
    found = fields_of(module, *classes)
    assert len(found) > 5 and found <= PROGRAMS[program].keys()


def test_every_default_of_mlx_lm_has_an_entry():
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    source = (Path(importlib.util.find_spec("mlx_lm").origin).parent / "lora.py").read_text()
    defaults = next(
        ast.literal_eval(n.value) for n in ast.parse(source).body if "CONFIG_DEFAULTS" in ast.unparse(n)[:20]
    )
    for name in defaults:
        table = PROGRAMS["mlx-lm"]
        assert name in table or any(n.startswith(f"{name}.") for n in table) or name == "config", name


# ---- the command line


def test_a_command_line_of_trl_is_ours():
    theirs = "--model_name_or_path a/b --dataset_name c/d --dataset_config e --dataset_train_split f --use_peft"
    theirs += " --load_in_4bit --num_train_epochs 3.0 --bf16 True --lora_target_modules q_proj v_proj"
    theirs += " --no_remove_unused_columns"
    found, lines = parsed(*theirs.split(), "--learning_rate", "1e-4", "--lr_scheduler_type", "cosine")
    assert found == {
        **dict(model_name="a/b", dataset="c/d:e@f", train_type="qlora", n_bits=4, num_epochs=3, precision="bf16"),
        **dict(lora_target_modules="q_proj,v_proj", lr=1e-4, lr_scheduler="cosine", cosine_min_lr_ratio=0.0),
    }
    assert "--bf16 True -> --precision bf16" in lines and len(lines) == 6


def test_the_last_of_a_flag_given_twice_counts_and_a_line_says_so():
    found, lines = parsed("--lr", "1", "--batch_size", "2", "--learning_rate", "2", "--lr", "3")
    assert found == {"lr": 3.0, "batch_size": 2}
    assert lines == [
        "--learning_rate 2: the last one counts; --lr was 1.0 before",
        "--lr 3: the last one counts; --lr was 2.0 before",
    ]
    assert parsed("--group_size", "32", "--hqq_group_size", "64")[0] == {"group_size": 64}
    assert parsed("--per_device_train_batch_size", "4", "--batch_size", "2")[0] == {"batch_size": 2}
    assert parsed("--lr", "1", "--lr", "1")[1] == []


def test_a_weak_setting_gives_way_to_a_given_one():
    assert parsed("--use_peft", "--train_type", "full")[0] == {"train_type": "full"}
    assert parsed("--lr_scheduler_type", "cosine", "--cosine_min_lr_ratio", "0.5")[0]["cosine_min_lr_ratio"] == 0.5


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--dataset", "a", "b", "--lr", "1"], {"dataset": ["a", "b"], "lr": 1.0}),
        (["--score_metric", "exact", "json"], {"score_metric": "exact,json"}),
        (["--train_type", "dora"], {"train_type": "lora", "use_dora": True}),
        (["--optimizer", "paged_adamw"], {"optimizer": "paged_adamw_32bit"}),
        (["--adapter", "qlora"], {"train_type": "qlora"}),
        (["--max_grad_norm", "0"], {"apply_gradient_clipping": False}),
        (["--warmup_steps", "0.1"], {"warmup_ratio": 0.1}),
        (["--use_ddp", "true"], {"sharding_strategy": "ddp"}),
        (["--precision", "bfloat16"], {"precision": "bf16"}),
        (["--resume", "true"], {"resume": "auto"}),
        (["--log_to", "wandb", "csv"], {"log_to": "wandb,csv"}),
        (["--log_to", "none"], {}),
    ],
)
def test_lists_and_values_of_other_programs(argv, expected):
    assert parsed(*argv)[0] == expected
    name, values = argv[0][2:], argv[1 : argv.index("--lr") if "--lr" in argv else None]
    rest = {"lr": 1.0} if "--lr" in argv else {}
    given = {name: values if len(values) > 1 else values[0], **rest}
    assert parse_named(given, str, str, lambda line: None) == expected


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--deepspeed", "ds.json"], "--deepspeed ds.json: Sharding, offload and DDP are built in"),
        (["--num_train_epochs", "half"], "--num_train_epochs half: not an integer"),
        (["--push_to_hub", "true"], "--push_to_hub true: It takes the repository"),
        (["--load_in_4bit", "--train_type", "lora", "extra"], "extra: not a flag"),
        (["--rl", "grpo"], "--rl grpo: There are dpo, orpo, simpo and kto"),
        (["--load_in_4bit", "--load_in_8bit"], "--n_bits: is both 4 and 8. Give one of them."),
    ],
)
def test_what_is_not_here_is_one_line(argv, text):
    if "extra" in argv:
        argv = argv[-1:]
    with pytest.raises(PlanError) as error:
        parsed(*argv)
    assert str(error.value).startswith(text) and "\n" not in str(error.value)


ODD_VALUES = (3, -1.5, "", "{bad", "{'a': 1}", True, [], [1], {}, {"a": 1}, [{"a": 1}])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_value_that_means_nothing_is_one_line(program):
    for name in table(program):
        for value in ODD_VALUES:
            try:
                parse_named({name: value}, str, str, lambda line: None)
            except PlanError as error:
                assert "\n" not in str(error), (name, value)


def test_a_dataset_to_pretrain_on_may_be_a_name_alone():
    assert parse_named({"pretraining_dataset": "a/b"}, str, str, lambda line: None) == {"dataset": [{"name": "a/b"}]}
    assert parse_named({"test_datasets": []}, str, str, lambda line: None) == {}


def test_one_projection_is_a_name_and_not_its_letters():
    given = {"model.lora_attn_modules": "output_proj"}
    assert parse_named(given, str, str, lambda line: None) == {"lora_target_modules": "o_proj"}


INVENTED = [
    f"{a}{b}"
    for a in ("zorble", "quimp", "frobni", "wugge", "xylop", "blork", "dwindo", "kreeb", "mufti", "plonki")
    for b in ("cate", "_snorf", "_grax", "tion_vex", "_yoyo", "_hjk", "lize", "_pumpernickel", "_quux", "_ombre")
]


def test_a_hundred_inventions_have_no_nearest_name():
    known_flags = [f"--{name}" for name in NAMES]
    assert len(set(INVENTED)) == 100
    assert [name for name in INVENTED if "Nearest" in nearest(f"--{name}", known_flags)] == []


MISLED = (
    "push_to_hub deepspeed chat_template tokenizer neftune_noise_alpha early_stopping_patience finetuning_type".split()
)
MISLED += (
    "load_best_model_at_end out cutoff_len template adam_beta1 label_smoothing early_stopping eval_strategy".split()
)
MISLED += "attn_implementation liger seq_len num_layers merge".split()


@pytest.mark.parametrize("name", MISLED)
def test_names_that_were_answered_by_a_flag_that_only_looked_alike(name):
    try:
        _, lines = parsed(f"--{name}", "12345x")
    except PlanError as error:
        lines = [str(error)]
    assert not any("Nearest" in line or "unknown flag" in line for line in lines), lines


def test_python_names_the_nearest_too():
    with pytest.raises(PlanError, match=r"fine_tune\(datset=...\): no such flag. Nearest: dataset."):
        fine_tune(datset="x")


# ---- files

AXOLOTL = """
base_model: a/b
adapter: qlora
load_in_4bit: true
datasets:
  - path: c/d
    type: chat_template
    split: train
  - path: mine.jsonl
    field_messages: turns
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
lora_target_linear: true
lora_target_modules:
val_set_size: 0.05
wandb_project:
special_tokens:
  pad_token: <|end|>
output_dir: ./out
"""
LLAMA_FACTORY = """
model_name_or_path: a/b
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: rows,plain.jsonl
dataset_dir: {folder}
template: llama3
cutoff_len: 1024
max_samples: 100
per_device_train_batch_size: 1
num_train_epochs: 3.0
lr_scheduler_type: linear
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
plot_loss: true
"""
MLX = "model: a/b\ntrain: true\ndata: d\niters: 50\nnum_layers: -1\nlora_parameters:\n  rank: 8\n  scale: 20.0\n"
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  lora_rank: 8
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /m
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: false
epochs: 1
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
device: cuda
"""
LITGPT = "checkpoint_dir: a/b\nlora_r: 8\nquantize: bnb.nf4\ntrain:\n  global_batch_size: 16\n"
LITGPT += "  micro_batch_size: 2\n  epochs: 2\n"
TRL = "model_name_or_path: a/b\ndataset_name: c/d\nper_device_train_batch_size: 2\nlearning_rate: 1e-5\n"
FILES = {
    "Axolotl": (
        AXOLOTL,
        dict(model_name="a/b", train_type="qlora", n_bits=4, context_length=2048, batch_size=2, num_epochs=3, lr=2e-4)
        | dict(optimizer="paged_adamw_8bit", lr_scheduler="cosine", cosine_min_lr_ratio=0.0, precision="auto")
        | dict(lora_target_modules="all", validation_split=0.05, output_dir="./out", gradient_accumulation_steps=4)
        | {
            "dataset": [
                {"name": "c/d", "split": "train", "format": "chat"},
                {"name": "mine.jsonl", "columns": {"messages": "turns"}},
            ]
        },
    ),
    "LLaMA-Factory": (
        LLAMA_FACTORY,
        dict(model_name="a/b", train_type="lora", lora_target_modules="all", context_length=1024, dataset_samples=100)
        | dict(
            batch_size=1, num_epochs=3, lr_scheduler="linear", warmup_ratio=0.1, precision="bf16", validation_split=0.1
        )
        | {
            "dataset": [
                {"name": "{folder}/r.json", "columns": {"instruction": "q", "output": "a"}},
                {"name": "plain.jsonl"},
            ]
        },
    ),
    "mlx-lm": (
        MLX,
        dict(
            model_name="a/b", dataset="d", max_steps=50, num_layers=-1, lora_rank=8, lora_alpha=160.0, train_type="lora"
        ),
    ),
    "torchtune": (
        TORCHTUNE,
        dict(model_name="/m", train_type="qlora", lora_rank=8, num_epochs=1, lr=3e-4)
        | dict(dataset=[{"name": "yahma/alpaca-cleaned"}])
        | dict(optimizer="adamw", backend="cuda", train_on_prompt=True),
    ),
    "LitGPT": (
        LITGPT,
        dict(model_name="a/b", lora_rank=8, batch_size=2, gradient_accumulation_steps=8, num_epochs=2)
        | dict(train_type="qlora", quant_type="nf4"),
    ),
    "TRL": (TRL, dict(model_name="a/b", dataset="c/d", batch_size=2, lr=1e-5, train_type="full")),
}


@pytest.mark.parametrize("program", FILES)
def test_a_file_of_another_program_is_translated_with_a_line_per_key(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plain.jsonl").write_text("")
    info = {"rows": {"file_name": "r.json", "columns": {"prompt": "q", "response": "a"}}}
    Path("dataset_info.json").write_text(json.dumps(info))
    text, expected = (json.loads(json.dumps(part).replace("{folder}", str(tmp_path))) for part in FILES[program])
    Path("theirs.yaml").write_text(text)
    lines: list[str] = []
    assert read_config("theirs.yaml", lines.append) == expected
    assert f"read as a file of {program}" in lines[0] and all(line.startswith("theirs.yaml: ") for line in lines)
    for key in re.findall(r"^(\w+): *\S", text, re.M):
        together = {"dataset_dir": "dataset"}.get(key, key)
        assert any(f": {together}" in line or f": {key}" in line for line in lines[1:]), key
    assert parsed("--config", "theirs.yaml", "--num_epochs", "9")[0]["num_epochs"] == 9


def test_a_file_of_ours_is_not_taken_for_another_programs():
    assert (
        recognised({"model_name": "a", "dataset": "b", "lora_rank": 4, "lr": 1, "bf16": True, "optim": "adamw"}) is None
    )
    assert recognised(dict.fromkeys(FIELDS, 1)) is None
    assert recognised({"model_name": "a", "per_device_train_batch_size": 4}) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("reinit_weights: x\nplugins: [x]\n", "reinit_weights x: The base is not changed before training."),
        ("nobody_knows: 1\n", "'nobody_knows' is not known here."),
        ("rl: grpo\n", "rl grpo: There are dpo, orpo, simpo and kto"),
        ("dataset_prepared_path: [\n", "Fix the YAML"),
    ],
)
def test_what_a_file_asks_for_and_is_not_here_is_one_line(change, text, tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(AXOLOTL + change)
    with pytest.raises(PlanError) as error:
        read_config(str(file))
    assert text in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)
    assert "plugins" not in change or str(error.value).endswith("Also unsupported: plugins.")


def test_the_lines_are_printed_once_before_the_plan():
    done = finish(command("--config examples/axolotl.yaml --num_train_epochs 2 --bf16 --dry_run"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "--bf16 -> --precision bf16"
    assert lines[1].startswith("examples/axolotl.yaml: read as a file of Axolotl")
    assert sum("micro_batch_size 4 -> --batch_size" in line for line in lines) == 1
    assert "rows per step: 4" in done.stdout and (ROOT / "examples/axolotl.yaml").exists()


def test_every_entry_is_of_a_known_kind():
    for program, name in ROWS:
        assert isinstance(PROGRAMS[program][name], str | LeftOut | Instead | ByValue | Computed), name


# ---- the files of the tables


def test_flags_of_ours_read_no_table():
    flags = ["--lora_rank", "8", "--optimizer", "adamw", "--warmup_steps", "3", "--resume", "auto"]
    code = "import sys; from train import build_parser; from finetune.cli import parse_overrides\n"
    code += "from finetune.names.entries import sections_of\n"
    code += f"parse_overrides({flags} + sys.argv[1:], build_parser())\n"
    code += "print(sections_of.cache_info().currsize, 'yaml' in sys.modules)"
    ours, theirs = (
        subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True).stdout
        for words in ([], ["--per_device_train_batch_size", "2"])
    )
    assert (ours, theirs) == ("0 False\n", "1 True\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_key_stands_twice_in_a_mapping_of_a_file(program):
    file = ROOT / "finetune/names" / entries.FILES[program]
    nodes = [yaml.compose(file.read_text(), yaml.BaseLoader)]
    while nodes:
        node = nodes.pop()
        keys = [key.value for key, _ in node.value]
        assert sorted(keys) == sorted(set(keys))
        nodes += [value for _, value in node.value if isinstance(value, yaml.MappingNode)]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("same: lr seed lr", "lr has two entries"),
        ("names: {x: lr}\nleft out: {A reason.: x}", "x has two entries"),
        ("names: {x: no_flag}", "x: no_flag"),
        ("instaed: {A reason.: x}", "instaed"),
        ("names: {x: {true: {left uot: A reason.}}}", "left uot"),
    ],
)
def test_a_file_that_is_not_as_the_tables_are_written_is_found(text, fact, tmp_path, monkeypatch):
    (tmp_path / "theirs.yaml").write_text(text)
    monkeypatch.setitem(entries.FILES, fact, str(tmp_path / "theirs.yaml"))
    with pytest.raises(AssertionError, match=fact):
        table(fact)


def test_trls_beta_is_the_divergence_of_rewards_and_the_strength_of_preferences():
    def read(**given):
        return parse_named(given, str, str, lambda line: None)

    assert read(reward_funcs="exact", beta=0.04) == {"reward": "exact", "kl_beta": 0.04}
    assert read(reward="exact", beta=0.04) == {"reward": "exact", "kl_beta": 0.04}
    assert read(preference="dpo", beta=0.3) == {"preference": "dpo", "preference_beta": 0.3}
