"""Mutations of train.py's flags, of launch forms and the environment."""

from tests.mutations.mutation import Mutation

ENV = "finetune/distributed/env.py"

TABLE = (
    Mutation(
        "CLI_01",
        "an unavailable backend is noticed after its model is looked for",
        "finetune/plan/make.py",
        '    manager, skipped = select_backend(overrides.get("backend"))\n'
        "    files = find_model_of(overrides, fetch=prepare)\n",
        "    files = find_model_of(overrides, fetch=prepare)\n"
        '    manager, skipped = select_backend(overrides.get("backend"))\n',
    ),
    Mutation(
        "CLI_02",
        "a folder that is missing is named in two lines",
        "finetune/model_files/files.py",
        'raise PlanError(f"{label}: no such folder. {nearest(folder)}")',
        'raise PlanError(f"{label}: no such folder.\\n{nearest(folder)}")',
    ),
    Mutation(
        "CLI_03",
        "the number of trainable parameters is not printed",
        "finetune/run/report.py",
        'return [*lines, f"trainable parameters: {trainable:,} of {total:,} ({trainable / total:.2%})"]',
        "return lines",
    ),
    Mutation(
        "CLI_04",
        "rows per step do not count the data ranks",
        "finetune/parts/parts.py",
        "return self.steps.batch_size * self.steps.accumulation * self.dims.data_ranks",
        "return self.steps.batch_size * self.steps.accumulation",
    ),
    Mutation(
        "CLI_05",
        "bf16_autocast keeps its weights in bf16",
        "finetune/parts/precision.py",
        'weights = "fp32" if word.endswith("autocast") else compute',
        'weights = "fp32" if word == "fp16_autocast" else compute',
    ),
    Mutation(
        "CLI_06",
        "an epoch drops the rows that do not fill a step",
        "finetune/data/sampler.py",
        "num_epochs * -(-num_rows_of(rows) // rows_per_step)",
        "num_epochs * (num_rows_of(rows) // rows_per_step)",
    ),
    Mutation(
        "CLI_07",
        "the error on two ranks of MLX has other words",
        "finetune/plan/mlx.py",
        "MLX backend doesn't support distributed training {by}",
        "MLX has one process {by}",
    ),
    Mutation(
        "CLI_08", "yes is not a boolean", "finetune/flag_values.py", '("true", "1", "yes", "on")', '("true", "1", "on")'
    ),
    Mutation(
        "CLI_09",
        "--low_memory reads as many weights at a time as without it",
        "finetune/torch_engine/weights/load.py",
        "    if memory.low_memory:\n        workers = 1",
        "    if False:\n        workers = 1",
    ),
    Mutation(
        "CLI_10",
        "flash attention that is not here is ignored without a line",
        "finetune/plan/memory.py",
        'yield Change("use_flash_attention", False, f"{reason}; attention runs per document through torch")',
        'yield Change("use_flash_attention", False)',
    ),
    Mutation(
        "CLI_11",
        "a quantizer that failed its probe is used",
        "finetune/plan/quantization.py",
        "    if error:\n        raise",
        "    if False:\n        raise",
    ),
    Mutation(
        "CLI_12",
        "bits between those of a method are accepted",
        "quantization_wrapper.py",
        "    if bits not in method.bits:\n",
        "    if bits > max(method.bits):\n",
    ),
    Mutation(
        "CLI_13",
        "--hqq_group_size is unknown",
        "finetune/config.py",
        'aliases=("hqq_group_size",)',
        'aliases=("hqq_groups",)',
    ),
    Mutation(
        "CLI_14",
        "each microbatch counts its own targets only",
        "finetune/torch_engine/engine.py",
        "num_targets, num_tokens, *totals = (int(n) for n in by_rank[:, :-2].sum(0))",
        "num_targets, num_tokens, *totals = (int(n) // len(microbatches) for n in by_rank[:, :-2].sum(0))",
    ),
    Mutation(
        "CLI_15",
        "an unknown setting of --mlx_config is ignored",
        "finetune/mlx_options.py",
        "        if unknown:\n            raise",
        "        content = {name: content[name] for name in content if name in known}\n"
        "        if unknown[1:]:\n            raise",
    ),
    Mutation(
        "CLI_16",
        "no trace is written",
        "finetune/torch_engine/profiling.py",
        "        if plan.export_trace:\n",
        "        if False:\n",
    ),
    Mutation(
        "CLI_17",
        "a page has a comment behind a continued line",
        "docs/mps_fsdp.md",
        "--node_rank=0 \\\n",
        "--node_rank=0 \\ # the first\n",
    ),
    Mutation(
        "ENV_01",
        "FSDP_BACKEND beats --backend",
        "finetune/plan/backend.py",
        'name = name or os.environ.get("FSDP_BACKEND") or None',
        'name = os.environ.get("FSDP_BACKEND") or name',
    ),
    Mutation(
        "ENV_02",
        "visible CUDA devices are not counted",
        "backend_manager.py",
        "return max(1, detect.num_cuda_devices())",
        "return 1",
    ),
    Mutation(
        "ENV_03",
        "all ranks of torchrun are taken for one host's",
        ENV,
        'local_size = _number(e, "LOCAL_WORLD_SIZE", size)',
        "local_size = size",
    ),
    Mutation("ENV_04", "another port than 12355", ENV, "port: int = 12355", "port: int = 29500"),
    Mutation(
        "ENV_05",
        "watermarks are compared the wrong way round",
        "finetune/backend/machine.py",
        "float(low) > float(high):",
        "float(low) < float(high):",
    ),
    Mutation(
        "ENV_06",
        "OMP_NUM_THREADS is overridden",
        "finetune/torch_engine/device.py",
        'set_by = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ)',
        'set_by = {"MKL_NUM_THREADS"} & set(os.environ)',
    ),
    Mutation(
        "ENV_07",
        "a missing package is named without its pip line",
        "quantization_wrapper.py",
        'return f"{method.package} is not installed: {method.install}"',
        'return f"{method.package} is not installed"',
    ),
    Mutation(
        "ENV_08",
        "an old CUDA capability is not noticed",
        "finetune/backend/capabilities.py",
        'tuple(facts["capability"]) < (7, 0)',
        'tuple(facts["capability"]) < (6, 0)',
    ),
)
