"""The plan's rules for several ranks: world size, degrees, who distributes, and settings only one or several ranks can
use.
"""

from backend_manager import GIB, Backend, package_version
from finetune.config import DEFAULTS
from finetune.distributed import accelerate_config
from finetune.distributed.env import check_devices
from finetune.distributed.parallel_dims import dims_of
from finetune.errors import PlanError
from finetune.plan import conflicts
from finetune.plan.conflicts import check
from finetune.plan.draft import Draft


def resolve_parallelism(draft: Draft) -> None:
    """World size and degrees, rows per rank, and the settings that these make meaningless."""
    values, env = draft.values, draft.facts.env
    if env and values["world_size"] not in (-1, env.size):
        each = (
            " srun starts one rank per task: set --ntasks-per-node to the ranks per node."
            if env.launcher == "srun"
            else ""
        )
        raise PlanError(
            f"--world_size {values['world_size']}: {env.launcher} started {env.size} ranks.{each} Omit --world_size."
        )
    if env:
        world_size = env.size
    else:
        world_size = values["world_size"] if values["world_size"] > 0 else draft.facts.num_devices
    if draft.backend is Backend.CUDA and not values["dry_run"]:
        check_devices(world_size, env, draft.facts.num_devices, draft.facts.environment)
    world_size = values["assume_world_size"] or world_size
    draft.local_world_size = env.local_size if env else world_size
    resolve_parallel_backend(draft, world_size)
    draft.dims = dims_of(values, world_size, draft.local_world_size)
    check(draft, conflicts.PARALLELISM)
    rows_per_rank(draft)
    values["world_size"], values["dp_degree"], values["dp_shards"] = (
        world_size,
        draft.dims.dp_replicate,
        draft.dims.dp_shard,
    )
    if draft.dims.tp == 1:
        draft.adjust("sequence_parallel", False, "no layer is tensor parallel")
    elif values["sequence_parallel"] and draft.shape and draft.shape.num_experts:
        raise PlanError(
            f"--sequence_parallel: this model has {draft.shape.num_experts} experts per layer, which take tokens of "
            "full rows. Omit it."
        )
    if draft.dims.shards == 1 and not draft.given("vocab_parallel"):
        values["vocab_parallel"] = "false"
    elif draft.dims.shards == 1:
        why = "tensor parallelism shards embedding and head in any case" if draft.dims.tp > 1 else "nothing is sharded"
        draft.adjust("vocab_parallel", "false", why)
    if world_size == 1:
        single_process(draft)
        return
    if draft.backend is Backend.MPS:
        ranks_on_apple_gpus(draft)
    for name in ("master_addr", "master_port") if env is None else ():
        if draft.given(name):
            draft.adjust(name, DEFAULTS[name], "ranks started here meet over loopback, on a free port")
    if draft.distribution.startswith("zero"):
        draft.notices.append("memory is predicted as for DDP replicas; DeepSpeed's ZeRO needs less")
    elif draft.dims.shards == 1:
        replicated_weights(draft)
    else:
        sharded_weights(draft)


def rows_per_rank(draft: Draft) -> None:
    """batch_size, so that rows per step are the saved run's on any number of data ranks."""
    values, data_ranks = draft.values, draft.dims.data_ranks
    batches, saved_rows = values["gradient_accumulation_steps"] * data_ranks, draft.inherited_rows_per_step
    if saved_rows and saved_rows % batches == 0:
        reason = f"the saved run's {saved_rows} rows per step in {batches} batches"
        if values["batch_size"] == "auto":
            reason = "as the saved run settled it"
        draft.adjust("batch_size", saved_rows // batches, reason)


def single_process(draft: Draft) -> None:
    """Settings that only several processes have a use for go back to their defaults."""
    values, adjust = draft.values, draft.adjust
    if not (values["assume_world_size"] and values["assume_world_size"] > 1):
        adjust("use_cpu_offload", False, "a single process shards nothing")
    adjust("no_sync", DEFAULTS["no_sync"], "a single process all-reduces nothing")
    adjust("sharding_strategy", DEFAULTS["sharding_strategy"], "a single process shards nothing")
    for name in ("rank_timeout", "master_addr", "master_port"):
        adjust(name, DEFAULTS[name], "a single process needs no rendezvous")


def replicated_weights(draft: Draft) -> None:
    draft.adjust("no_sync", True, "gradients of weights that are not sharded are all-reduced once per step")
    check(draft, conflicts.REPLICATED)


def sharded_weights(draft: Draft) -> None:
    values = draft.values
    if draft.backend is Backend.MPS:
        draft.adjust("use_cpu_offload", False, "host and device have one memory")
    open_or_auto = draft.requested.get("cache_dequantized", "auto") == "auto"
    if open_or_auto and values["cache_dequantized"] == "true":  # a single process may have settled on it
        draft.adjust("cache_dequantized", "false", "sharded weights are all-gathered packed")
    check(draft, conflicts.SHARDED)


def ranks_on_apple_gpus(draft: Draft) -> None:
    """Several processes on Macs: what one memory for host and device means, and what sharding needs there."""
    local = draft.local_world_size
    if draft.facts.environment.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1":
        raise PlanError(
            "PYTORCH_ENABLE_MPS_FALLBACK=1: operators that fall back to the CPU have given wrong results with several "
            "ranks (pytorch#173808). Unset it, or use --world_size 1."
        )
    if local > 1:
        budget = draft.memory_budget()
        share = (
            f"{budget.memory_bytes / GIB:.1f} GiB each, {local * budget.memory_bytes / GIB:.1f} in all; "
            if budget
            else ""
        )
        draft.notices.append(
            f"{local} processes share this Mac's memory and GPU: {share}sharding saves nothing on one machine. It pays "
            "over several Macs, one process each (docs/mps_fsdp.md)"
        )


def recompute_on_apple_gpus(draft: Draft) -> None:
    """What sharded weights that are not quantized need on MPS."""
    values = draft.values
    sharded = draft.backend is Backend.MPS and draft.dims.shards > 1
    if sharded and values["train_type"] != "qlora" and values["use_gradient_checkpointing"] == "auto":
        reason = (
            "MPS cannot resize storages: gathered weights that autograd has saved leave memory only where layers are "
            "recomputed"
        )
        draft.adjust("use_gradient_checkpointing", "true", reason)


def resolve_parallel_backend(draft: Draft, world_size: int) -> None:
    """--parallel_backend and the request of accelerate's config file.
    Sets `distribution` and the degrees it implies.
    """
    values, environment = draft.values, draft.facts.environment
    method = accelerate_config.method_of(environment)
    name = accelerate_config.NAMES.get(method, method)
    if world_size == 1 and values["world_size"] == -1 and accelerate_config.launched_one_process(environment):
        raise PlanError(
            "--world_size -1: accelerate launch --cpu starts one process whatever --num_processes is, and leaves the "
            "others to mpirun. Give train.py --world_size N, or start it with torchrun."
        )
    if world_size > 1 and method.startswith("zero") and not draft.given("parallel_backend"):
        draft.adjust("parallel_backend", "accelerate", f"accelerate's config file asks for {name}")
    if values["parallel_backend"] == "ptd":
        if method != "ddp" and world_size > 1:
            draft.notices.append(
                f"parallel_backend ptd: built-in FSDP2 and DDP run; {name}, which accelerate's config file asks for, "
                "runs with --parallel_backend accelerate"
            )
        return
    if world_size == 1:
        draft.adjust("parallel_backend", "ptd", "a single process distributes nothing")
        return
    check_accelerate(draft, method, name)
    accelerate_degrees(draft, method, world_size)
    draft.distribution = method


def check_accelerate(draft: Draft, method: str, name: str) -> None:
    """Raises PlanError if accelerate cannot run this here."""
    values, flag = draft.values, "--parallel_backend accelerate"
    if package_version("accelerate") is None:
        raise PlanError(f"{flag}: accelerate is not installed. pip install accelerate, or use ptd.")
    if draft.backend not in (Backend.CPU, Backend.CUDA):
        raise PlanError(f"{flag}: untested with several ranks on {draft.backend}. Use --parallel_backend ptd.")
    for degree in ("tp_degree", "cp_degree", "pp_degree", "ep_degree"):
        if values[degree] != 1:
            raise PlanError(
                f"--{degree} {values[degree]}: accelerate runs data parallelism only here. Use --parallel_backend ptd, "
                f"or --{degree} 1."
            )
    if method not in accelerate_config.NAMES:
        known = ", ".join(list(accelerate_config.NAMES)[1:])
        raise PlanError(f"{flag}: its config file asks for {method}. Supported are {known}: see examples/accelerate.")
    if method == "fsdp2" and draft.backend is not Backend.CUDA:
        raise PlanError(
            f"{flag}: its FSDP2 is for GPUs, and on {draft.backend} it would silently wrap DDP. "
            "Use --parallel_backend ptd, which shards on any backend."
        )
    if method.startswith("zero") and package_version("deepspeed") is None:
        raise PlanError(
            f"{flag}: {name} needs DeepSpeed, which is not installed. See requirements-deepspeed.txt, or use "
            "--parallel_backend ptd."
        )
    unsupported = accelerate_config.unsupported(draft.facts.environment)
    if unsupported:
        raise PlanError(
            f"{flag}: its config file sets {unsupported[0]} {unsupported[1]}, which is not supported here. Remove it, "
            "or use --parallel_backend ptd."
        )


def accelerate_degrees(draft: Draft, method: str, world_size: int) -> None:
    """Degrees that contradict accelerate's method are refused; the others follow from it."""
    values, shards = draft.values, method == "fsdp2"
    allowed = {
        "dp_degree": (1,) if shards else (1, world_size),
        "dp_shards": (-1, world_size) if shards else (-1, 1),
        "sharding_strategy": (None, "full_shard") if shards else (None, "ddp"),
    }
    for name, fine in allowed.items():
        if values[name] not in fine:
            raise PlanError(
                f"--{name} {values[name]}: accelerate's config file decides what is sharded, and asks for "
                f"{accelerate_config.NAMES[method]}. Omit --{name}, or use --parallel_backend ptd."
            )
    if not shards:
        values["dp_degree"], values["dp_shards"] = world_size, 1


def accelerate_limits(draft: Draft) -> None:
    """Settings that work with the built-in distribution only."""
    if draft.distribution == "ptd":
        return
    values = draft.values
    mixed_precision = accelerate_config.mixed_precision(draft.facts.environment)
    if mixed_precision and not values["precision"].startswith(mixed_precision):
        draft.notices.append(
            f"mixed_precision {mixed_precision} of accelerate's config file is ignored: "
            f"--precision {values['precision']} decides"
        )
    check(draft, conflicts.ACCELERATE)
