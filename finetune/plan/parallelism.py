"""Several ranks in the plan: world size, degrees, who distributes, and settings only one or several ranks can use."""

from collections.abc import Generator

from backend_manager import GIB, Backend, package_version
from finetune.config import DEFAULTS
from finetune.distributed import accelerate_config
from finetune.distributed.env import check_devices
from finetune.errors import PlanError
from finetune.estimate.budget import MemoryBudget
from finetune.estimate.model_shape import WITHOUT_TP_PLAN
from finetune.parts.degrees import MODEL_PARALLEL
from finetune.parts.parallel import CHUNKS
from finetune.parts.parallel_dims import ParallelDims, check_model, dims_of
from finetune.parts.precision import Precision
from finetune.plan.asked import Asked, Change, Notice, Ranks, Said
from finetune.plan.facts import Facts


def world(asked: Asked, facts: Facts) -> Said:
    """World size, degrees and who distributes."""
    env = facts.env
    world_size = asked.world_size
    if env and world_size not in (-1, env.size):
        each = ""
        if env.launcher == "srun":
            each = " srun starts one rank per task: set --ntasks-per-node to the ranks per node."
        raise PlanError(f"--world_size {world_size}: {env.launcher} started {env.size} ranks.{each} Omit --world_size.")
    if env:
        world_size = env.size
    elif world_size <= 0:
        world_size = facts.num_devices
    if facts.backend is Backend.CUDA and not asked.dry_run:
        check_devices(world_size, env, facts.num_devices, facts.environment)
    world_size = asked.assume_world_size or world_size
    if env:
        local = env.local_size
    else:
        local = world_size
    distribution = yield from _distribution(asked, facts, world_size)
    if distribution in ("ptd", "fsdp2"):
        degrees = asked.settings
    else:
        degrees = asked.settings.changed(dp_degree=world_size, dp_shards=1)
    dims = dims_of(vars(degrees), world_size, local)
    yield Change("world_size", world_size)
    yield Change("dp_degree", dims.dp_replicate)
    yield Change("dp_shards", dims.dp_shard)
    yield Ranks(dims, local, distribution)


def _distribution(asked: Asked, facts: Facts, world_size: int) -> Generator[Change | Notice, None, str]:
    """--parallel_backend and the request of accelerate's config file. Returns who shards and reduces."""
    method = accelerate_config.method_of(facts.environment)
    name = accelerate_config.NAMES.get(method, method)
    by = asked.parallel_backend
    if world_size == 1 and asked.world_size == -1 and accelerate_config.launched_one_process(facts.environment):
        raise PlanError(
            "--world_size -1: accelerate launch --cpu starts one process whatever --num_processes is, and leaves the "
            "others to mpirun. Give train.py --world_size N, or start it with torchrun."
        )
    if world_size > 1 and method.startswith("zero") and not asked.given("parallel_backend"):
        by = "accelerate"
        yield Change("parallel_backend", by, f"accelerate's config file asks for {name}")
    if by == "ptd":
        if method != "ddp" and world_size > 1:
            yield Notice(
                f"parallel_backend ptd: built-in FSDP2 and DDP run; {name}, which accelerate's config file asks for, "
                "runs with --parallel_backend accelerate"
            )
        return "ptd"
    if world_size == 1:
        yield Change("parallel_backend", "ptd", "a single process distributes nothing")
        return "ptd"
    check_accelerate(asked, facts, method, name)
    check_degrees(asked, method, world_size)
    return method


def check_accelerate(asked: Asked, facts: Facts, method: str, name: str) -> None:
    """Raises PlanError if accelerate cannot run this here."""
    flag = "--parallel_backend accelerate"
    if package_version("accelerate") is None:
        raise PlanError(f"{flag}: accelerate is not installed. pip install accelerate, or use ptd.")
    if facts.backend not in (Backend.CPU, Backend.CUDA):
        raise PlanError(f"{flag}: untested with several ranks on {facts.backend}. Use --parallel_backend ptd.")
    for degree in MODEL_PARALLEL:
        value = getattr(asked, degree)
        if value != 1:
            raise PlanError(
                f"--{degree} {value}: accelerate runs data parallelism only here. Use --parallel_backend ptd, "
                f"or --{degree} 1."
            )
    if method not in accelerate_config.NAMES:
        known = ", ".join(list(accelerate_config.NAMES)[1:])
        raise PlanError(f"{flag}: its config file asks for {method}. Supported are {known}: see examples/accelerate.")
    if method == "fsdp2" and facts.backend is not Backend.CUDA:
        raise PlanError(
            f"{flag}: its FSDP2 is for GPUs, and on {facts.backend} it would silently wrap DDP. "
            "Use --parallel_backend ptd, which shards on any backend."
        )
    if method.startswith("zero") and package_version("deepspeed") is None:
        raise PlanError(
            f"{flag}: {name} needs DeepSpeed, which is not installed. See requirements-deepspeed.txt, or use "
            "--parallel_backend ptd."
        )
    unsupported = accelerate_config.unsupported(facts.environment)
    if unsupported:
        raise PlanError(
            f"{flag}: its config file sets {unsupported[0]} {unsupported[1]}, which is not supported here. Remove it, "
            "or use --parallel_backend ptd."
        )


def check_degrees(asked: Asked, method: str, world_size: int) -> None:
    """Raises PlanError for degrees that contradict accelerate's method; the others follow from it."""
    allowed: dict[str, tuple] = {"dp_degree": (1, world_size), "dp_shards": (-1, 1), "sharding_strategy": (None, "ddp")}
    if method == "fsdp2":
        allowed = {"dp_degree": (1,), "dp_shards": (-1, world_size), "sharding_strategy": (None, "full_shard")}
    for name, fine in allowed.items():
        value = getattr(asked, name)
        if value not in fine:
            raise PlanError(
                f"--{name} {value}: accelerate's config file decides what is sharded, and asks for "
                f"{accelerate_config.NAMES[method]}. Omit --{name}, or use --parallel_backend ptd."
            )


def shared_work(asked: Asked, facts: Facts, ranks: Ranks, room: MemoryBudget | None) -> Said:
    """Settings that these ranks have no use for, and rows per rank of a run that is resumed."""
    dims = ranks.dims
    yield from rows_per_rank(asked, facts, dims)
    if dims.tp == 1:
        yield Change("sequence_parallel", False, "no layer is tensor parallel")
    elif asked.sequence_parallel and facts.num_experts:
        raise PlanError(
            f"--sequence_parallel: this model has {facts.num_experts} experts per layer, which take tokens of "
            "full rows. Omit it."
        )
    if dims.shards == 1:
        why = "nothing is sharded"
        if dims.tp > 1:
            why = "tensor parallelism shards embedding and head in any case"
        yield Change("vocab_parallel", "false", why if asked.given("vocab_parallel") else "")
    if dims.world_size == 1:
        yield from single_process(asked, facts)
        return
    if facts.backend is Backend.MPS:
        yield from ranks_on_apple_gpus(facts, ranks, room)
    for name in ("master_addr", "master_port"):
        if facts.env is None and asked.given(name):
            yield Change(name, DEFAULTS[name], "ranks started here meet over loopback, on a free port")
    if ranks.distribution.startswith("zero"):
        yield Notice("memory is predicted as for DDP replicas; DeepSpeed's ZeRO needs less")
    elif dims.shards == 1:
        yield Change("no_sync", True, "gradients of weights that are not sharded are all-reduced once per step")
    elif facts.backend is Backend.MPS:
        yield Change("use_cpu_offload", False, "host and device have one memory")


def rows_per_rank(asked: Asked, facts: Facts, dims: ParallelDims) -> Said:
    """batch_size, so that rows per step are the saved run's on any number of data ranks."""
    saved_rows = (facts.inherited or {}).get("rows_per_step")
    batches = asked.gradient_accumulation_steps * dims.data_ranks
    if saved_rows and saved_rows % batches == 0:
        reason = f"the saved run's {saved_rows} rows per step in {batches} batches"
        if asked.batch_size == "auto":
            reason = "as the saved run settled it"
        yield Change("batch_size", saved_rows // batches, reason)


def single_process(asked: Asked, facts: Facts) -> Said:
    """Settings that only several processes have a use for go back to their defaults; --use_cpu_offload is then the
    frozen base's.
    """
    offloads = asked.use_cpu_offload and (facts.backend is Backend.CUDA or asked.assumes_cuda)
    if offloads and not asked.trains_in_full and asked.is_open("base_offload"):
        yield Change("base_offload", "host", "--use_cpu_offload in one process")
    yield Change("use_cpu_offload", False, "a single process shards nothing")
    yield Change("no_sync", DEFAULTS["no_sync"], "a single process all-reduces nothing")
    yield Change("sharding_strategy", DEFAULTS["sharding_strategy"], "a single process shards nothing")
    for name in ("rank_timeout", "master_addr", "master_port"):
        yield Change(name, DEFAULTS[name], "a single process needs no rendezvous")


def ranks_on_apple_gpus(facts: Facts, ranks: Ranks, room: MemoryBudget | None) -> Said:
    """Several processes on Macs: what one memory for host and device means, and what sharding needs there."""
    if facts.environment.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1":
        raise PlanError(
            "PYTORCH_ENABLE_MPS_FALLBACK=1: operators that fall back to the CPU have given wrong results with several "
            "ranks (pytorch#173808). Unset it, or use --world_size 1."
        )
    if ranks.local == 1:
        return
    share = ""
    if room:
        all_of_them = ranks.local * room.memory_bytes
        share = f"{room.memory_bytes / GIB:.1f} GiB each, {all_of_them / GIB:.1f} in all; "
    yield Notice(
        f"{ranks.local} processes share this Mac's memory and GPU: {share}sharding saves nothing on one machine. It "
        "pays over several Macs, one process each (docs/mps_fsdp.md)"
    )


def by_accelerate(facts: Facts, ranks: Ranks, precision: Precision) -> Said:
    """A notice where accelerate's config file asks for another precision."""
    word = accelerate_config.mixed_precision(facts.environment)
    if ranks.distribution != "ptd" and word and not precision.word.startswith(word):
        yield Notice(
            f"mixed_precision {word} of accelerate's config file is ignored: --precision {precision.word} decides"
        )


def degrees_of_the_model(asked: Asked, facts: Facts, ranks: Ranks) -> None:
    """Raises PlanError for degrees that do not divide the model, and for layers that it lacks."""
    shape = facts.shape
    if shape is None:
        return
    check_model(ranks.dims, shape, CHUNKS[asked.pp_schedule])
    if shape.num_layers is not None:
        check_layers(asked, shape.num_layers)


def plans_of_transformers(facts: Facts, ranks: Ranks) -> Said:
    """Notices of tensor and pipeline plans that are checked later, or that transformers lacks."""
    dims = ranks.dims
    if facts.shape is None:
        return
    if dims.tp * dims.pp > 1:
        yield Notice(
            "transformers' tensor and pipeline plans of this model are checked when it loads, before its weights are "
            "read"
        )
    if dims.tp > 1 and facts.shape.kind in WITHOUT_TP_PLAN:
        yield Notice(
            f"tp_degree {dims.tp}: transformers has no tensor-parallel plan for {facts.shape.kind}: its experts "
            "are sliced, all else is replicated"
        )


def check_layers(asked: Asked, count: int) -> None:
    """Raises PlanError if --num_layers or --layers_to_transform name layers that the model lacks."""
    last = asked.num_layers
    named = asked.layers_to_transform
    if last > count:
        raise PlanError(f"--num_layers {last}: the model has {count} layers. Use {count} or fewer, or -1 for all.")
    if named is not None and any(int(n) >= count for n in named.split(",")):
        raise PlanError(f"--layers_to_transform {named}: the model has layers 0 to {count - 1}. Name some of them.")
