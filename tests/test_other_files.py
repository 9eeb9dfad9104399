"""Config files of other programs as people have them: each key is taken, translated with a line, or refused with what
to do instead.
"""

import json
from pathlib import Path

import pytest

from finetune.cli import parse_overrides, read_config
from finetune.config import NAMES
from finetune.errors import PlanError
from finetune.flag_values import nearest
from train import build_parser

LLAMA_FACTORY = """
model_name_or_path: a/b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: examples/deepspeed/ds_z3_offload_config.json
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
mask_history: true
overwrite_cache: true
image_max_pixels: 262144
output_dir: saves/a
save_only_model: false
report_to: none
per_device_train_batch_size: 1
learning_rate: 1.0e-4
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
AXOLOTL = """
base_model: a/b
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
trust_remote_code: true
chat_template: llama3
datasets:
  - path: c/d
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    field_thinking: thinking
    template_thinking_key: thinking
    roles: {user: [human], assistant: [gpt]}
    roles_to_train: [assistant]
    train_on_eos: turn
  - path: rows.jsonl
    ds_type: json
    split: train
    type: alpaca
adapter: qlora
load_in_4bit: true
quantize_moe_experts: true
lora_r: 16
lora_target_linear: true
lora_target_modules: [q_proj, v_proj]
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch_4bit
lr_scheduler: cosine
learning_rate: 2e-5
eta_min: 2e-6
bf16: auto
torch_dtype: bfloat16
gradient_checkpointing: false
fsdp: [auto_wrap, full_shard]
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  reshard_after_forward: true
  activation_checkpointing: true
special_tokens:
  pad_token: <pad>
  eos_token: <|im_end|>
evals_per_epoch: 4
wandb_project:
"""
TORCHTUNE = """
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  apply_lora_to_output: false
  lora_rank: 8
  lora_alpha: 16
  use_dora: true
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /m/original/tokenizer.model
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /m
  checkpoint_files:
    filename_format: model-{}-of-{}.safetensors
    max_filename: "00004"
  output_dir: ${output_dir}
resume_from_checkpoint: false
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  split: train[:95%]
  packed: false
dataset_val:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  split: train[95%:]
batch_size_val: ${batch_size}
batch_size: 2
epochs: 2
max_steps_per_epoch: 100
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  betas: [0.9, 0.95]
  lr: 3e-4
optimizer_in_bwd: true
low_cpu_ram: false
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
"""
MLX = """
model: a/b
train: true
data: mlx-community/WikiSQL
optimizer: adamw
optimizer_config:
  adamw: {betas: [0.9, 0.95], bias_correction: true}
iters: 100
trust_remote_code: true
lora_parameters:
  keys: [self_attn.q_proj, self_attn.v_proj]
  rank: 8
  scale: 20.0
  dropout: 0.0
"""
LITGPT = """
checkpoint_dir: checkpoints/a/b
out_dir: out/lora
precision: bf16-true
quantize: null
devices: 1
lora_r: 8
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: false
lora_head: false
data:
  class_path: litgpt.data.Alpaca2k
  init_args: {mask_prompt: false, val_split_fraction: 0.05, prompt_style: alpaca, ignore_index: -100, seed: 42}
train: {global_batch_size: 8, micro_batch_size: 1, epochs: 2, min_lr: 6.0e-05, max_steps: null}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.0002, betas: [0.9, 0.95]}
"""
# program: (a file of it, some of the flags that it becomes, words that the lines must have)
FILES = {
    "LLaMA-Factory": (
        LLAMA_FACTORY,
        dict(lora_rank=8, lora_alpha=16.0, train_on_last_turn=True, rank_timeout=2_592_000.0, train_type="lora")
        | dict(sharding_strategy="full_shard", use_cpu_offload=True)
        | dict(dataset=[{"name": "identity"}, {"name": "alpaca_en_demo"}]),
        ("dataset_info.json is not here", "trust_remote_code true: left out"),
    ),
    "Axolotl": (
        AXOLOTL,
        dict(train_type="qlora", optimizer="adamw_8bit", cosine_min_lr_ratio=0.1, precision="bf16")
        | dict(lora_target_modules="all")
        | dict(use_gradient_checkpointing="true", use_cpu_offload=True, sharding_strategy="full_shard")
        | dict(eos_token="<|im_end|>")
        | dict(
            dataset=[
                {"name": "c/d", "split": "train[:20%]", "format": "chat"},
                {"name": "rows.jsonl", "format": "alpaca"},
            ]
        ),
        ("its moments have 8 bits here", "plugins", "quantize_moe_experts true: left out"),
    ),
    "torchtune": (
        TORCHTUNE,
        dict(lora_target_modules="q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", use_dora=True, max_steps=200)
        | dict(dataset=[{"name": "yahma/alpaca-cleaned", "split": "train[:95%]"}], train_on_prompt=True)
        | dict(validation_dataset="yahma/alpaca-cleaned@train[95%:]", train_type="lora")
        | dict(adam_beta2=0.95, model_name="/m"),
        ("optimizer_in_bwd true: left out", "metric_logger.log_dir /tmp/out/logs"),
    ),
    "mlx-lm": (
        MLX,
        dict(lora_target_modules="self_attn.q_proj,self_attn.v_proj", lora_alpha=160.0)
        | dict(adam_beta1=0.9, adam_beta2=0.95),
        ("trust_remote_code true: left out",),
    ),
    "LitGPT": (
        LITGPT,
        dict(dataset="mhenrichsen/alpaca_2k_test", lora_target_modules="default", train_type="lora", adam_beta2=0.95)
        | dict(train_on_prompt=True, validation_split=0.05, gradient_accumulation_steps=8, cosine_min_lr_ratio=0.0),
        ("ignore_index -100: left out",),
    ),
}
PARSER = build_parser()


def read(text: str, folder: Path) -> tuple[dict, list[str]]:
    file = folder / "theirs.yaml"
    file.write_text(text)
    lines: list[str] = []
    return read_config(str(file), lines.append), lines


@pytest.mark.parametrize("program", FILES)
def test_a_file_as_its_program_ships_them_is_read(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, expected, said = FILES[program]
    found, lines = read(text, tmp_path)
    assert f"read as a file of {program};" in lines[0]
    assert {name: found.get(name) for name in expected} == expected
    assert all(any(words in line for line in lines) for words in said)


@pytest.mark.parametrize(
    ("program", "change", "key", "advice"),
    [
        ("LLaMA-Factory", "finetuning_type: oft", "finetuning_type oft", "--train_type lora trains adapters too"),
        ("LLaMA-Factory", "use_dft_loss: true", "use_dft_loss true", "Omit it"),
        ("LLaMA-Factory", "stage: ppo", "stage ppo", "use a tool such as TRL"),
        ("LLaMA-Factory", "do_train: false\ndo_predict: true", "do_predict", "score.py --checkpoint RUN"),
        ("LLaMA-Factory", "do_train: false\ndataset: null\ninfer_backend: vllm", "infer_backend", "generate.py"),
        ("Axolotl", "processor_type: AutoProcessor", "processor_type AutoProcessor", "--image_max_pixels shrinks them"),
        ("Axolotl", "rl: grpo", "rl grpo", "use a tool such as TRL"),
        ("Axolotl", "qat: {weight_dtype: int4}", "qat.weight_dtype int4", "export.py quantizes"),
        ("Axolotl", "plugins: [axolotl.integrations.spectrum.SpectrumPlugin]", "plugins", "--layers_to_transform"),
        ("Axolotl", "datasets: [{path: a, roles_to_train: [user]}]", "datasets", "with --train_on_prompt"),
        ("Axolotl", "datasets: [{path: a, train_on_eos: all}]", "datasets", "the end of each answer is learned"),
        ("Axolotl", "datasets: [{path: a, message_field_role: who}]", "datasets", "use one of role, from in the rows"),
        ("Axolotl", "datasets: [{path: a, type: {format: 'Q {instruction} A'}}]", "datasets", "prompt and completion"),
        ("Axolotl", "context_parapllel_size: 2", "'context_parapllel_size'", "Nearest: context_parallel_size"),
        ("torchtune", "quantizer: {groupsize: 32}", "quantizer.groupsize 32", "export.py quantizes"),
        ("torchtune", "teacher_model: {_component_: a.b}", "teacher_model._component_", "--teacher"),
        ("torchtune", "model: {_component_: torchtune.models.x_vision.lora_y}", "model._component_", "with images"),
        ("torchtune", "metric_logger: {log_dir: '${nowhere}'}", "${nowhere}", "Write the value out"),
        ("LitGPT", "data: {class_path: litgpt.data.TinyStories}", "data.class_path", "--dataset FILE"),
    ],
)
def test_what_is_not_here_is_refused_by_its_key_with_what_to_do(program, change, key, advice, tmp_path, monkeypatch):
    import yaml

    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load(FILES[program][0]) | yaml.safe_load(change)
    with pytest.raises(PlanError) as error:
        read(yaml.safe_dump(values), tmp_path)
    assert f"theirs.yaml: {key}" in str(error.value)
    assert advice in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("program", "change", "error"),
    [
        ("LLaMA-Factory", "ddp_timeout: -5", "theirs.yaml: ddp_timeout -5: must be > 0.0."),
        ("Axolotl", "micro_batch_size: few", "theirs.yaml: micro_batch_size few: not an integer."),
        ("torchtune", "optimizer: {lr: fast}", "theirs.yaml: optimizer.lr fast: not a number."),
        ("Axolotl", "fp16: true", "torch_dtype, fp16: --precision is both bf16 and fp16. Give one of them."),
    ],
)
def test_an_error_names_the_key_that_the_file_has(program, change, error, tmp_path, monkeypatch):
    import yaml

    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load(FILES[program][0]) | yaml.safe_load(change)
    with pytest.raises(PlanError) as raised:
        read(yaml.safe_dump(values, sort_keys=False), tmp_path)
    assert error in str(raised.value)


def test_names_of_llama_factory_are_looked_up_beside_its_examples(tmp_path, monkeypatch):
    """As in its repository: examples/train_lora has the file, data has dataset_info.json."""
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs"
    (theirs / "examples").mkdir(parents=True)
    (theirs / "data").mkdir()
    info = {"identity": {"file_name": "identity.json"}, "alpaca_en_demo": {"hf_hub_url": "x/y"}}
    (theirs / "data" / "dataset_info.json").write_text(json.dumps(info))
    found, _ = read(LLAMA_FACTORY, theirs / "examples")
    assert found["dataset"] == [{"name": str(theirs / "data" / "identity.json")}, {"name": "x/y"}]
    (theirs / "data" / "dataset_info.json").write_text(json.dumps({"identity": info["identity"]}))
    with pytest.raises(PlanError, match="alpaca_en_demo is no name in .*dataset_info.json"):
        read(LLAMA_FACTORY, theirs / "examples")


def test_a_file_of_deepspeed_says_more_than_its_name(tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    (tmp_path / "ds_z3.json").write_text(json.dumps({"zero_optimization": zero}))
    found, _ = read(f"{TRL}deepspeed: {tmp_path}/ds_z3.json\n", tmp_path)
    assert (found["sharding_strategy"], found["use_cpu_offload"]) == ("shard_grad_op", True)
    found, _ = read(f"{TRL}deepspeed: elsewhere/zero1.json\n", tmp_path)
    assert found["sharding_strategy"] == "shard_grad_op" and "use_cpu_offload" not in found
    with pytest.raises(PlanError, match="DDP are built in"):
        read(f"{TRL}deepspeed: ds.json\n", tmp_path)


TRL = "model_name_or_path: a/b\ndataset_name: c/d\nper_device_train_batch_size: 2\nlearning_rate: 1e-5\n"
TYPED = [
    ("--loss_type dft", "the same weight"),
    ("--use_vllm", "sampled by the model that trains"),
    ("--seq_kd true", "Let the teacher answer first"),
    ("--num_labels 2", "--task classify counts"),
    ("--trainer grpo", "for GRPO and PPO use a tool"),
    ("--rlhf_type gkd", "for GRPO and PPO use a tool"),
    ("--train_on_eos all", "The end of each answer is learned"),
    ("--mixture_of_depths convert", "Every token passes through every layer"),
    ("--accelerate_config zero3.yaml", "--parallel_backend accelerate"),
    ("--push_to_hub", "It takes the repository"),
]


@pytest.mark.parametrize(("words", "advice"), TYPED)
def test_a_word_of_another_program_is_answered_by_what_it_means(words, advice):
    with pytest.raises(PlanError) as error:
        parse_overrides(words.split(), PARSER)
    assert advice in str(error.value) and "Nearest" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num_processes 4", {"world_size": 4}),
        ("--eos_token <|im_end|>", {"eos_token": "<|im_end|>"}),
        ("--chat_template_path mine.jinja", {"chat_template": "mine.jinja"}),
        ("--push_to_hub --hub_model_id a/b", {"push_to_hub": "a/b"}),
        ("--rlhf_type dpo", {"preference": "dpo"}),
        ("--train_on_eos turn", {}),
        ("--optimizer galore_adamw", {"optimizer": "adamw_8bit"}),
        ("--use_gradient_checkpointing unsloth", {"use_gradient_checkpointing": "true"}),
        ("--use_lora --random_state 3", {"train_type": "lora", "seed": 3}),
    ],
)
def test_words_of_other_programs_on_the_command_line(words, expected):
    assert parse_overrides(words.split(), PARSER) == expected


@pytest.mark.parametrize(
    "name", "use_vllm teacher_model num_labels num_processes train_on_eos rlhf_type total_batch_size".split()
)
def test_no_flag_of_another_meaning_is_suggested(name):
    assert nearest(f"--{name}", [f"--{flag}" for flag in NAMES]) == ""


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("lora_rnk", "lora_rank"),
        ("val_dataset", "validation_dataset"),
        ("num_epoch", "num_epochs"),
        ("lora_targets", "lora_target_modules"),
    ],
)
def test_a_misspelled_or_shortened_flag_is_suggested(name, flag):
    assert nearest(f"--{name}", [f"--{n}" for n in NAMES]) == f" Nearest: --{flag}."
