"""Mutations of pretrain.py, its data and generate.py on its models."""

from tests.mutations.mutation import Mutation

PLAN = "recursive/plan.py"

TABLE = (
    Mutation(
        "TR_01",
        "pretrain.py prints the device after its plan",
        "pretrain.py",
        '    say(f"Using device: {manager.backend}")\n    plan = resolve(values, overrides, manager, env)\n',
        "    plan = resolve(values, overrides, manager, env)\n",
    ),
    Mutation(
        "TR_02",
        "an unknown key is named without the nearest",
        "recursive/recipe.py",
        'unknown key.{nearest(key, KEYS)} See --help.")',
        'unknown key. See --help.")',
    ),
    Mutation(
        "TR_03", "the default learning rate of cfg_chat is another", "config/cfg_chat.yaml", "lr: 3e-4\n", "lr: 1e-4\n"
    ),
    Mutation(
        "TR_04",
        "arch.seq_len does not cut rows",
        "recursive/data/data.py",
        "return min(s.arch.seq_len or train.seq_len, train.seq_len)",
        "return train.seq_len",
    ),
    Mutation(
        "TR_05",
        "heads that do not divide the hidden size are kept",
        PLAN,
        "if not arch.mlp_t and (not fits or fits[0] != arch.num_heads):",
        "if not arch.mlp_t and not fits:",
    ),
    Mutation(
        "TR_06",
        "bfloat16 is used without asking the probe",
        PLAN,
        'if s.arch.forward_dtype == "bfloat16" and not manager.capabilities.supports_bfloat16:',
        "if False:",
    ),
    Mutation(
        "TR_07",
        "DISABLE_COMPILE is ignored",
        PLAN,
        'if "DISABLE_COMPILE" in os.environ:',
        'if "DISABLE_COMPILATION" in os.environ:',
    ),
    Mutation(
        "TR_08",
        "two ranks on MPS are accepted",
        PLAN,
        'if backend == "mps" and size > 1:',
        'if backend == "mps" and size > 2:',
    ),
    Mutation("TR_09", "--top-p 1.0 is refused", "finetune/run/answers.py", '"top_p": (0, 1)}', '"top_p": (0, 0.99)}'),
    Mutation(
        "TR_10",
        "rows over --max-length are not counted",
        "recursive/data/chat_tokens.py",
        "longer += len(whole[0]) > max_length",
        "longer += len(ids) > max_length",
    ),
    Mutation(
        "TR_11",
        "the example's script asks the Hub for a tokenizer",
        "examples/prepare_example_chat_dataset.sh",
        "--tokenizer bpe:768",
        "--tokenizer gpt2",
    ),
    Mutation(
        "TR_12",
        "checkpoints are named step-N",
        "finetune/checkpoint/store.py",
        'output_dir, "step_"',
        'output_dir, "step-"',
    ),
    Mutation(
        "TR_13",
        "running out of memory ends with 0",
        "finetune/system/process.py",
        "        code = error.exit_code\n",
        "        code = 0 if isinstance(error, OutOfMemoryError) else error.exit_code\n",
    ),
    Mutation(
        "TR_14",
        "device=mps without MPS has other words",
        PLAN,
        'said = "MPS is not available. " if word == "mps" else ""',
        'said = ""',
    ),
    Mutation(
        "TR_15",
        "rows come from worker processes",
        "recursive/data/data.py",
        "ROWS_PER_EVALUATION = 32\n",
        "ROWS_PER_EVALUATION = 32\nDEFAULTS = {'num_workers': 2, 'pin_memory': True}\n",
    ),
    Mutation(
        "TR_16",
        "the number printed is the guide's, without embedding and head",
        "recursive/torch_engine/engine.py",
        'f"{total:,} parameters: {total - outer:,} in the network',
        'f"{total - outer:,} parameters: {total - outer:,} in the network',
    ),
    Mutation(
        "TR_17",
        "an unavailable backend is refused without what is available",
        "backend_manager.py",
        "Available here: {have}. ",
        "",
    ),
)
