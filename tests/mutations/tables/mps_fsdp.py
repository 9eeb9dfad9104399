"""Mutations of mps_fsdp_wrapper."""

from tests.mutations.mutation import Mutation

WRAPPER, OLDER = "mps_fsdp_wrapper.py", "finetune/older/mps_fsdp.py"

TABLE = (
    Mutation(
        "FS_01", "wrap_model_for_mps has another name", WRAPPER, "def wrap_model_for_mps(", "def wrapped_for_mps("
    ),
    Mutation(
        "FS_02",
        "reduces in float16 by default",
        WRAPPER,
        "reduce_dtype: torch.dtype = torch.float32",
        "reduce_dtype: torch.dtype = torch.float16",
    ),
    Mutation(
        "FS_03",
        "names of strategies are not coerced",
        WRAPPER,
        '    "sharding_strategy": ShardingStrategy.of,\n',
        '    "sharding_strategy": lambda value: value,\n',
    ),
    Mutation(
        "FS_04",
        "profile_memory set after construction has no effect",
        WRAPPER,
        "        if not self.config.profile_memory:\n",
        "        if True:\n",
    ),
    Mutation(
        "FS_05",
        "a wrapper is made without MPS",
        WRAPPER,
        "        if reason:\n            name",
        "        if reason and device_type != 'mps':\n            name",
    ),
    Mutation("FS_06", "another backend is kept", WRAPPER, '    return "gloo"\n', "    return name\n"),
    Mutation("FS_07", "one process needs MASTER_ADDR", WRAPPER, "store=dist.HashStore(), ", ""),
    Mutation(
        "FS_08",
        "bfloat16 stays where the device has none",
        WRAPPER,
        "            return torch.float16\n",
        "            return dtype\n",
    ),
    Mutation(
        "FS_09",
        "layers of the class are not units",
        WRAPPER,
        "return recurse or isinstance(module, classes)",
        "return recurse",
    ),
    Mutation(
        "FS_10",
        "a checkpoint is written in place",
        "finetune/torch_engine/parallel/wrapper_checkpoint.py",
        "        with replace(path, durable=True) as file:\n",
        '        with open(path, "wb") as file:\n',
    ),
    Mutation(
        "FS_11",
        "the optimizer's state is not restored",
        "finetune/torch_engine/parallel/wrapper_checkpoint.py",
        "        optimizer.state[p][key] = value\n",
        "        assert value is not None\n",
    ),
    Mutation(
        "FS_12",
        "memory statistics lack the process",
        WRAPPER,
        '"reserved": reserved, "process_memory": current_resident_bytes()}',
        '"reserved": reserved}',
    ),
    Mutation(
        "FS_13",
        "memory is logged without being asked",
        WRAPPER,
        "        if not self.config.profile_memory:\n",
        "        if False:\n",
    ),
    Mutation(
        "FS_14",
        "a model of half the memory is not sharded",
        OLDER,
        "elif ratio < 0.8:\n            strategy = ShardingStrategy.SHARD_GRAD_OP",
        "elif ratio < 0.8:\n            strategy = ShardingStrategy.NO_SHARD",
    ),
    Mutation(
        "FS_15",
        "the pool's cap is 80 % of its size",
        OLDER,
        "        return pool\n",
        "        return int(0.8 * pool)\n",
    ),
    Mutation(
        "FS_16", "mixed_precision does not reach the config", WRAPPER, '"use_mixed_precision": mixed_precision, ', ""
    ),
    Mutation(
        "FS_17",
        "wrap_model_for_mps ignores transformer_layer_cls",
        WRAPPER,
        "    if transformer_layer_cls is not None:\n",
        "    if False:\n",
    ),
    Mutation(
        "FS_18",
        "the check raises for an unknown device",
        WRAPPER,
        "except (RuntimeError, AttributeError) as error:\n        return first_line(error)",
        "except AttributeError as error:\n        return first_line(error)",
    ),
    Mutation(
        "FS_19",
        "the switch stays set",
        OLDER,
        "            for name, value in before.items():\n",
        "            for name, value in ():\n",
    ),
    Mutation(
        "FS_20",
        "clearing the cache raises",
        OLDER,
        "            module.empty_cache()\n",
        "            module.empty_the_cache()\n",
    ),
    Mutation(
        "FS_21",
        "the predicted bytes of quantized weights are not divided by the ranks",
        "finetune/estimate/memory.py",
        "quantized += count * quantization.weight_bytes(rows, columns, m.weight, ranks)",
        "quantized += count * quantization.weight_bytes(rows, columns, m.weight)",
    ),
    Mutation(
        "FS_22",
        "a table of the guides is repeated",
        "docs/mps_fsdp.md",
        "# FSDP on Apple GPUs\n",
        "# FSDP on Apple GPUs\n\n| M2 Ultra | 16 |\n",
    ),
    Mutation(
        "FS_23",
        "versions are compared as texts",
        WRAPPER,
        "    if version < (2, 11):\n",
        '    if [*map(str, version)] < ["2", "7"]:\n',
    ),
    Mutation(
        "FS_24",
        "debug records appear with debug_mode off",
        WRAPPER,
        "        if self.config.debug_mode:\n",
        "        if True:\n",
    ),
)
