"""Mutations of parallelism and its launchers."""

from tests.mutations.mutation import Mutation

DIMS, ENV = "finetune/parts/parallel_dims.py", "finetune/distributed/env.py"

TABLE = (
    Mutation(
        "FT_01",
        "another parallel backend is accepted",
        "finetune/flag_values.py",
        '    if word not in meta["choices"]:\n',
        "    if not word:\n",
    ),
    Mutation(
        "FT_02",
        "gradients do not reach the stage before",
        "finetune/torch_engine/parallel/pipeline.py",
        "self._post(received.grad, self.prev_rank,",
        "self._post(0 * received.grad, self.prev_rank,",
    ),
    Mutation(
        "FT_03",
        "dp_degree ranks are shards",
        DIMS,
        "dims = ParallelDims(dp_degree, dp_shards, **others",
        "dims = ParallelDims(1, dp_degree * dp_shards, **others",
    ),
    Mutation(
        "FT_04",
        "the ranks that are left do not shard",
        DIMS,
        "dp_shards = max(1, world_size // taken)",
        "dp_degree, dp_shards = dp_degree * max(1, world_size // taken), 1",
    ),
    Mutation(
        "FT_05",
        "queries do not see the keys of other ranks",
        "finetune/torch_engine/parallel/context.py",
        "return within + self.across(source, window)",
        "return within + (self.across(source, window) if source == self.rank else ())",
    ),
    Mutation(
        "FT_06",
        "rows' partial products are not summed",
        "finetune/torch_engine/parallel/tensor.py",
        "        out = x.contiguous().clone()\n        dist.all_reduce(out, group=group)\n",
        "        out = x.contiguous().clone()\n",
    ),
    Mutation(
        "FT_07",
        "FSDP2 averages gradients",
        "finetune/torch_engine/parallel/fsdp.py",
        "        module.set_gradient_divide_factor(1.0)\n",
        "        module.set_gradient_divide_factor(2.0)\n",
    ),
    Mutation(
        "FT_08",
        "ranks beyond the product of the degrees are accepted",
        DIMS,
        "if dims.world_size != world_size:",
        "if dims.world_size > world_size:",
    ),
    Mutation(
        "FT_09",
        "a page starts torchrun with --nodes",
        "docs/getting_started.md",
        "torchrun --standalone --nproc_per_node=8 train.py",
        "torchrun --standalone --nodes=1 --nproc_per_node=8 train.py",
    ),
    Mutation(
        "FT_10",
        "every rank takes the first device",
        "finetune/torch_engine/device.py",
        "return torch.device(backend, local_rank)",
        "return torch.device(backend, 0)",
    ),
    Mutation(
        "FT_11",
        "uncompiled_4.yaml is for 8 processes",
        "accelerate_configs/uncompiled_4.yaml",
        "num_processes: 4",
        "num_processes: 8",
    ),
    Mutation(
        "FT_12",
        "a rank of SLURM takes its number on the host from its number in the job",
        ENV,
        '_number(e, "SLURM_LOCALID", rank % local_size)',
        "rank",
    ),
)
