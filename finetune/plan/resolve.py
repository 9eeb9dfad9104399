"""Wishes and facts in, one frozen plan out, with a reason for every difference. No framework is imported here.

`resolve_plan` runs before anything is loaded; `settle` runs once after loading, with what was proved on the loaded model.
Nothing changes after that.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import quantization_wrapper
from backend_manager import Backend, BackendCapabilities, package_version
from finetune.config import DEFAULTS, DEPRECATED_OPTIMIZERS, DEPRECATED_TRAIN_TYPES, TrainConfig
from finetune.distributed import accelerate_config
from finetune.distributed.env import RankEnv
from finetune.distributed.parallel_dims import ParallelDims, check_model, check_settings, dims_of
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.plan.run_plan import Adjustment, RunPlan, format_value

EXAMPLES = Path(__file__).parent.parent / "examples"
DEMO_DATASET, DEMO_TEST = str(EXAMPLES / "orders_train.jsonl"), str(EXAMPLES / "orders_test.jsonl")
# What suits the demo's few short rows: reached the score soonest among the settings tried (dev/LOG.md).
DEMO_SETTINGS = {"lr": 2e-3, "batch_size": 8, "warmup_ratio": 0.1, "score_max_new_tokens": 40}
ADAPTER_SETTINGS = (
    "use_dora",
    "use_rslora",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "init_lora_weights",
    "loraplus_lr_ratio",
)
CACHE_PART_OF_MEMORY = 0.04  # dense copies of a quantized base are kept where they take no more than this


def resolve_plan(
    requested: dict,
    backend: Backend,
    capabilities: BackendCapabilities,
    shape: ModelShape | None,
    now: datetime | None = None,
    kept: dict | None = None,
    probe: Callable[[str, int], dict | None] | None = None,
    stored: dict | None = None,
    world: RankEnv | None = None,
    num_devices: int = 1,
    environment: dict | None = None,
) -> RunPlan:
    """Settles the overrides against what the machine can do and the model's config. Raises PlanError.

    `kept`: what a saved run settled where the user left it open; see kept_settings. `probe(method, bits)`: the probe of one
    quantizer, None where it was not run; by default what `capabilities.quantizers` holds. `stored`: the settings
    of a base that is stored quantized (hf_files.stored_format). `world`: this process's place among ranks that a launcher
    started; without one, there are `num_devices` ranks unless --world_size says otherwise. `environment`: the process's, where
    `accelerate launch` leaves what its config file asks for.
    """
    known = capabilities.quantizers
    probe = probe or (lambda method, bits: known.get(f"{method}/{bits}"))
    resolver = _Resolver(requested, backend, capabilities, shape, kept, probe, stored)
    resolver.world, resolver.num_devices, resolver.environment = world, num_devices, environment or {}
    return resolver.plan(now or datetime.now())


def demo_defaults(requested: dict) -> dict:
    """What a run without --dataset takes: the demo's rows and the settings that suit them."""
    if requested.get("dataset") is not None:
        return {}
    return {"dataset": DEMO_DATASET, "score_dataset": DEMO_TEST, **DEMO_SETTINGS}


def memory_budget(
    values: dict, backend: str, memory_bytes: int | None, backend_given: bool
) -> budget.MemoryBudget | None:
    """The memory a plan is made for; None where it is not known. An assumed device is an accelerator unless --backend says else."""
    assumed, ranks = values.get("assume_memory"), values.get("assume_world_size") or 1
    if assumed:
        return budget.MemoryBudget(budget.parse_size(assumed), backend if backend_given else "cuda", ranks)
    return budget.MemoryBudget(memory_bytes, backend, ranks) if memory_bytes else None


class _Resolver:
    """One setting after another, in the order a reader would ask; each change is recorded with its reason."""

    def __init__(self, requested, backend, capabilities, shape, kept, probe, stored):
        self.probe, self.stored = probe, stored
        self.requested = {k: v for k, v in requested.items() if v is not None}
        self.backend, self.caps, self.shape = backend, capabilities, shape
        self.demo, self.kept = demo_defaults(self.requested), dict(kept or {})
        self.kept_rows = self.kept.pop("rows_per_step", None)
        left_open = {k: v for k, v in self.kept.items() if self.requested.get(k) == "auto"}
        self.values = {**DEFAULTS, **self.demo, **self.kept, **self.requested, **left_open}
        self.adjustments, self.notices = [], []
        self.world, self.num_devices, self.dims, self.local_size = None, 1, ParallelDims(), 1
        self.environment, self.distribution = {}, "ptd"

    def plan(self, now) -> RunPlan:
        self.older_names()
        if self.stored:
            self.stored_base()
        self.contradictions()
        self.not_in_this_version()
        self.ranks()
        self.machine()
        self.precision()
        if self.distribution != "ptd":
            self.accelerate_limits()
        self.quantization()
        self.steps()
        self.model_limits()
        self.memory()
        self.output(now)
        settings = TrainConfig(**self.values)
        return RunPlan(
            settings,
            self.requested,
            tuple(self.adjustments),
            tuple(self.notices),
            str(self.backend),
            self.caps.engine,
            self.dims,
            self.distribution,
            shape=self.shape,
            room=self.room(),
        )

    def set(self, setting, value, reason):
        if self.values[setting] != value:
            self.adjustments.append(Adjustment(setting, self.values[setting], value, reason))
            self.values[setting] = value

    @property
    def assumed(self) -> bool:
        """Whether the plan is for an accelerator that is not here."""
        return bool(self.values["assume_memory"]) and not self.given("backend")

    def given(self, name) -> bool:
        return name in self.requested

    def older_names(self):
        v = self.values
        older = DEPRECATED_TRAIN_TYPES.get(v["train_type"])
        if older:
            word = v["train_type"]
            for name, value in older.items():
                if value == "required":
                    if not v[name]:
                        raise PlanError(f"--train_type {word}: needs --{name}, the folder of the expanded model.")
                elif name != "train_type" and self.given(name) and v[name] != value:
                    raise PlanError(
                        f"--train_type {word}: means --{name} {format_value(value)}, and {format_value(v[name])} is given."
                    )
                else:
                    self.set(name, value, f"what --train_type {word} means")
        if v["optimizer"] in DEPRECATED_OPTIMIZERS:
            word = v["optimizer"]
            self.set(
                "optimizer", DEPRECATED_OPTIMIZERS[word], "torch's fused kernels are used wherever the device has them"
            )

    def stored_base(self):
        """A base that is stored quantized is trained on as it is."""
        v, how = self.values, self.stored
        words = f"its weights are stored quantized ({how['quantization_backend']} at {how['n_bits']} bits)"
        if v["train_type"] == "full":
            raise PlanError(
                f"--train_type full: {v['model_name']}: {words}, and only adapters train on those. Use --train_type qlora, or "
                "give the unquantized model it was made from."
            )
        self.set("train_type", "qlora", words)
        for name, value in how.items():
            if self.given(name) and v[name] not in ("auto", value):
                raise PlanError(
                    f"--{name} {format_value(v[name])}: {v['model_name']}: {words}, and quantizing again would lose more. Leave it out, or "
                    "give the unquantized model it was made from."
                )
            self.set(name, value, words)
        if v["init_lora_weights"] not in ("default", "gaussian"):
            raise PlanError(
                f"--init_lora_weights {v['init_lora_weights']}: starts from unquantized weights; of {v['model_name']} {words}. "
                "Use default or gaussian."
            )

    def contradictions(self):
        v = self.values
        for one, other in (
            ("warmup_steps", "warmup_ratio"),
            ("validation_dataset", "validation_split"),
            ("resume", "overwrite"),
        ):
            if self.given(one) and self.given(other) and v[one] and v[other]:
                raise PlanError(f"--{one} {v[one]}: contradicts --{other} {v[other]}. Give one of them.")
        for name, limit in (
            ("validation_split", 1),
            ("warmup_ratio", 1),
            ("lora_dropout", 1),
            ("cosine_min_lr_ratio", 1.0001),
        ):
            if v[name] >= limit:
                raise PlanError(f"--{name} {v[name]}: must be below 1.")
        if v["train_type"] == "full":
            for name in ADAPTER_SETTINGS:
                if self.given(name) and v[name] != DEFAULTS[name]:
                    raise PlanError(
                        f"--{name} {format_value(v[name])}: full fine-tuning has no adapter. Use --train_type lora."
                    )
        if v["llama_pro_path"]:
            self.llama_pro()
        if v["train_type"] != "qlora":
            for name in ("n_bits", "group_size", "quant_type", "double_quant"):
                if self.given(name):
                    raise PlanError(
                        f"--{name} {format_value(v[name])}: nothing is quantized with --train_type {v['train_type']}. "
                        "Use --train_type qlora."
                    )
            if self.given("quantization_backend") and v["quantization_backend"] not in ("auto", "none"):
                raise PlanError(
                    f"--quantization_backend {v['quantization_backend']}: --train_type {v['train_type']} keeps its "
                    "weights unquantized. Use --train_type qlora."
                )
            if v["init_lora_weights"] == "loftq":
                raise PlanError(
                    f"--init_lora_weights loftq: starts from what quantization loses, and --train_type {v['train_type']} "
                    "quantizes nothing. Use --train_type qlora, or pissa."
                )
        elif v["quantization_backend"] == "none":
            raise PlanError("--quantization_backend none: qlora quantizes its base. Use --train_type lora.")
        if v["reentrant_checkpointing"] and v["use_gradient_checkpointing"] == "false":
            raise PlanError("--reentrant_checkpointing true: contradicts --use_gradient_checkpointing false.")
        if v["assume_memory"]:
            budget.parse_size(v["assume_memory"])
        for name in ("assume_memory", "assume_world_size"):
            if v[name] and not v["dry_run"]:
                raise PlanError(f"--{name} {v[name]}: plans for another machine. Add --dry_run.")
        if v["loading_workers"] == 0:
            raise PlanError("--loading_workers 0: reads nothing. Give 1 or more, or -1.")
        if not any(part.strip() for part in v["lora_target_modules"].split(",")):
            raise PlanError(
                f"--lora_target_modules {v['lora_target_modules']!r}: names nothing. Name layers, or use all."
            )
        if v["max_steps"] == 0:
            raise PlanError("--max_steps 0: trains nothing. Give a number of steps, or -1.")
        if self.given("max_steps") and v["max_steps"] > 0 and self.given("num_epochs"):
            self.notices.append(f"num_epochs {v['num_epochs']} is overridden by max_steps {v['max_steps']}")

    def llama_pro(self):
        """LLaMA-Pro trains the layers that expand.py added, and no adapter."""
        v, folder = self.values, self.values["llama_pro_path"]
        if v["train_type"] == "full":
            raise PlanError(
                f"--llama_pro_path {folder}: trains the new layers alone, and --train_type full trains all. "
                f"Use --train_type lora, or --model_name {folder} with full."
            )
        for name in ADAPTER_SETTINGS:
            if self.given(name) and v[name] != DEFAULTS[name]:
                raise PlanError(
                    f"--{name} {format_value(v[name])}: --llama_pro_path trains whole layers and has no adapter. Leave it out."
                )
        if self.given("model_name") and v["model_name"] != folder:
            self.set("model_name", folder, "the expanded folder is the model; it says what it was made from")
        self.values["model_name"] = folder
        self.notices.append("no adapter: the new layers train, whole and in fp32; all others are frozen")

    def not_in_this_version(self):
        v = self.values
        for name, fine, why in (("mlx_config", (None,), "this version has no MLX engine"),):
            if v[name] not in fine:
                use = " or ".join(format_value(f) for f in fine if f is not None)
                raise PlanError(
                    f"--{name} {format_value(v[name])}: {why}. " + (f"Use {use}." if use else "Leave it out.")
                )
        if self.backend is Backend.MLX and v["world_size"] > 1:
            raise PlanError(
                f"--world_size {v['world_size']}: MLX backend doesn't support distributed training. Use --world_size 1."
            )
        if self.caps.engine != "torch":
            raise PlanError(
                f"--backend {self.backend}: this version has no {self.caps.engine.upper()} engine. Use --backend cpu."
            )

    def ranks(self):
        """How many ranks, what each does, and the settings that only one or only several of them have a use for."""
        v, started = self.values, self.world
        if started and v["world_size"] not in (-1, started.size):
            raise PlanError(
                f"--world_size {v['world_size']}: {started.launcher} started {started.size} ranks. Leave --world_size out."
            )
        size = started.size if started else v["world_size"] if v["world_size"] > 0 else self.num_devices
        size = v["assume_world_size"] or size
        self.local_size = started.local_size if started else size
        self.who_distributes(size)
        self.dims = dims_of(v, size, self.local_size)
        check_settings(self.dims, v)
        batches = v["gradient_accumulation_steps"] * self.dims.data_ranks
        if self.kept_rows and self.kept_rows % batches == 0:
            why = (
                "as the saved run settled it"
                if v["batch_size"] == "auto"
                else (f"the saved run's {self.kept_rows} rows a step in {batches} batches")
            )
            self.set("batch_size", self.kept_rows // batches, why)
        data_ranks, rows = self.dims.data_ranks, DEMO_SETTINGS["batch_size"]
        if "batch_size" in self.demo and not self.given("batch_size") and rows % data_ranks == 0:
            self.set("batch_size", rows // data_ranks, f"the demo's {rows} rows a step, over {data_ranks} ranks")
        v["world_size"], v["dp_degree"], v["dp_shards"] = size, self.dims.dp_replicate, self.dims.dp_shard
        if size == 1:
            alone = "one process meets no other"
            if not (v["assume_world_size"] and v["assume_world_size"] > 1):
                self.set("use_cpu_offload", False, "one process shards nothing")
            for name, why in (
                ("no_sync", "one process exchanges nothing"),
                ("sharding_strategy", "one process holds everything"),
                ("rank_timeout", alone),
                ("master_addr", alone),
                ("master_port", alone),
            ):
                self.set(name, DEFAULTS[name], why)
            return
        if self.dims.pp > 1 and v["score_dataset"]:
            why = "a pipeline generates no answers; score.py does after the run"
            if self.given("score_dataset"):
                raise PlanError(
                    f"--score_dataset {v['score_dataset']}: {why}. Use --validation_dataset with --pp_degree."
                )
            if not (v["validation_dataset"] or v["validation_split"]):
                self.set("validation_dataset", v["score_dataset"], "its loss is what a pipeline measures")
            self.set("score_dataset", None, why)
        if self.distribution.startswith("zero"):
            self.notices.append("memory is predicted as for replicas, which DeepSpeed's ZeRO takes less than")
        elif self.dims.shards == 1:
            self.set("no_sync", True, "gradients of weights that are not sharded are summed once a step")
            if v["use_cpu_offload"]:
                raise PlanError(
                    "--use_cpu_offload true: keeps sharded weights in host memory, and nothing is sharded here. Use --dp_shards, "
                    "or leave it out."
                )
        else:
            if self.backend is Backend.MPS:
                self.set("use_cpu_offload", False, "host and device have one memory")
            if v["optimizer"] == "adamw_8bit":
                raise PlanError(
                    "--optimizer adamw_8bit: its scales are of blocks of one rank's rows, so a checkpoint would fit no other number "
                    "of ranks. Use adamw, with --use_cpu_offload true where moments do not fit, or --sharding_strategy ddp."
                )
            if v["cache_dequantized"] == "true":
                raise PlanError(
                    "--cache_dequantized true: keeps every weight whole and dense on every rank, which sharding is there to "
                    "avoid. Leave it out, or use --sharding_strategy ddp."
                )

    def who_distributes(self, size):
        """--parallel_backend, and what a config file of accelerate's asks for; sets the degrees that this means."""
        v, asked = self.values, accelerate_config.method_of(self.environment)
        named = accelerate_config.NAMES.get(asked, asked)
        if size == 1 and v["world_size"] == -1 and accelerate_config.launched_one_process(self.environment):
            raise PlanError(
                "--world_size -1: accelerate launch --cpu starts one process whatever --num_processes says, and leaves the others to "
                "mpirun. Give train.py --world_size N, or start it with torchrun."
            )
        if size > 1 and asked.startswith("zero") and not self.given("parallel_backend"):
            self.set("parallel_backend", "accelerate", f"accelerate's config file asks for {named}")
        if v["parallel_backend"] == "ptd":
            if asked != "ddp" and size > 1:
                self.notices.append(
                    f"parallel_backend ptd: our own FSDP2 and DDP run; {named}, which accelerate's config file asks for, runs with "
                    "--parallel_backend accelerate"
                )
            return
        if size == 1:
            self.set("parallel_backend", "ptd", "one process distributes nothing")
            return
        said = "--parallel_backend accelerate"
        if package_version("accelerate") is None:
            raise PlanError(f"{said}: accelerate is not installed. pip install accelerate, or use ptd.")
        if self.backend not in (Backend.CPU, Backend.CUDA):
            raise PlanError(f"{said}: was never run with several ranks on {self.backend}. Use --parallel_backend ptd.")
        for name in ("tp_degree", "cp_degree", "pp_degree"):
            if v[name] != 1:
                raise PlanError(
                    f"--{name} {v[name]}: accelerate runs data ranks only here. Use --parallel_backend ptd, or --{name} 1."
                )
        if asked not in accelerate_config.NAMES:
            raise PlanError(
                f"{said}: its config file asks for {asked}. There is {', '.join(list(accelerate_config.NAMES)[1:])}: see "
                "examples/accelerate."
            )
        if asked == "fsdp2" and self.backend is not Backend.CUDA:
            raise PlanError(
                f"{said}: its FSDP2 is for GPUs, and on {self.backend} it would wrap DDP without a word. Use --parallel_backend ptd, "
                "which shards on any backend."
            )
        if asked.startswith("zero") and package_version("deepspeed") is None:
            raise PlanError(
                f"{said}: {named} needs DeepSpeed, which is not installed. requirements-deepspeed.txt says how, or use "
                "--parallel_backend ptd."
            )
        odd = accelerate_config.unsupported(self.environment)
        if odd:
            raise PlanError(
                f"{said}: its config file sets {odd[0]} {odd[1]}, which is not followed here. Take it out, or use --parallel_backend ptd."
            )
        self.accelerate_degrees(asked, size)
        self.distribution = asked
        word = accelerate_config.mixed_precision(self.environment)
        if word and not v["precision"].startswith(word):
            self.notices.append(
                f"mixed_precision {word} of accelerate's config file is not used: --precision {v['precision']} says it"
            )

    def accelerate_degrees(self, method, size):
        """accelerate's method says who shards; degrees that say something else are refused."""
        v, shards = self.values, method == "fsdp2"
        fine = {
            "dp_degree": (1,) if shards else (1, size),
            "dp_shards": (-1, size) if shards else (-1, 1),
            "sharding_strategy": (None, "full_shard") if shards else (None, "ddp"),
        }
        for name, values in fine.items():
            if v[name] not in values:
                raise PlanError(
                    f"--{name} {v[name]}: accelerate's config file says who shards, and asks for {accelerate_config.NAMES[method]}. "
                    f"Leave --{name} out, or use --parallel_backend ptd."
                )
        if not shards:
            v["dp_degree"], v["dp_shards"] = size, 1

    def accelerate_limits(self):
        """TrainConfig that go with our own distribution only."""
        v, zero = self.values, self.distribution.startswith("zero")
        named = accelerate_config.NAMES[self.distribution]
        if v["reentrant_checkpointing"]:
            raise PlanError(
                f"--reentrant_checkpointing true: accelerate's {named} waits for each gradient once. Use false."
            )
        if not zero:
            return
        for name, bad, why, remedy in (
            ("precision", v["precision"].startswith("fp16"), "scales its loss by itself", "Use bf16 or fp32"),
            ("optimizer", v["optimizer"] == "adamw_8bit", "cuts what 8-bit blocks run over", "Use adamw"),
            ("no_sync", v["no_sync"], "exchanges gradients in each microbatch", "Leave it out"),
        ):
            if bad:
                raise PlanError(
                    f"--{name} {format_value(v[name])}: {named} {why}. {remedy}, or --parallel_backend ptd."
                )

    def machine(self):
        self.values["backend"] = str(self.backend)
        self.notices += [
            f"{setting}: {why}" for setting, why in self.caps.reasons.items() if setting in ("probes", "capability")
        ]
        if self.backend is Backend.CPU and not self.assumed:
            self.notices.append(
                "training on a CPU: performance is limited; --backend auto takes a GPU where there is one"
            )

    def precision(self):
        v, word = self.values, self.values["precision"]
        why = self.caps.reasons.get("bf16", "")
        speed = (
            f"{self.caps.bfloat16_speed:.2f} x the speed of fp32, measured"
            if self.caps.bfloat16_speed
            else "documented"
        )
        if word == "auto":
            if self.assumed:
                self.set("precision", "bf16", "--assume_memory: a device with bf16 products is assumed")
            elif self.caps.supports_bfloat16:
                self.set("precision", "bf16", f"bf16 products: {speed}")
            elif self.backend is Backend.CPU:
                self.set("precision", "fp32", why or "the documented choice for a CPU")
            else:
                self.set("precision", "fp16", why or "no bf16 here")
        elif word.startswith("bf16") and not self.caps.supports_bfloat16:
            if self.backend is Backend.CPU:
                self.notices.append(
                    f"precision {word}: {why or 'this processor may lack bf16 products'}; fp32 is faster"
                )
            else:
                label = "MPS" if self.backend is Backend.MPS else str(self.backend)
                used = "fp16" if word == "bf16" else "fp16_autocast"
                self.set("precision", used, f"{label} backend doesn't support bfloat16: {why or 'documented'}")
        if v["train_type"] == "full" and v["precision"] in ("bf16", "fp16"):
            self.set(
                "precision",
                v["precision"] + "_autocast",
                "full fine-tuning trains every weight, and trainable weights are kept in fp32",
            )

    def quantization(self):
        v = self.values
        if v["train_type"] != "qlora":
            self.values["quantization_backend"] = "none"
            return
        if v["quantization_backend"] == "auto":
            self.first_quantizer()
        name, asked = (v["quantization_backend"], (v["n_bits"], v["quant_type"], v["group_size"], v["double_quant"]))
        problem = quantization_wrapper.unsupported(name, *asked)
        if problem:
            raise PlanError(problem)
        self.groups(name)
        found = self.probe(name, v["n_bits"])
        if found and found["error"]:
            raise PlanError(
                f"--quantization_backend {name}: {found['error']}. On {self.backend} these work: {self.working()}."
            )
        if v["quant_type"] is None:
            books = quantization_wrapper.METHODS[name].quant_types[v["n_bits"]]
            self.values["quant_type"] = books[0] if books else None
        if self.backend is Backend.MPS and not self.assumed:
            self.notices.append(
                "4-bit weights on MPS are dequantized by plain torch operations: slower than 16-bit ones"
            )
        if self.backend is Backend.CPU and not self.assumed:
            self.notices.append("quantization on a CPU saves memory, not time: weights are dequantized at each use")

    def groups(self, name):
        """Refuses a group size that some layer's rows are no multiple of, where the method needs that."""
        v = self.values
        linears = () if self.stored or not self.shape else self.shape.linears
        for layer, _, columns in linears:
            if quantization_wrapper.group_mismatch(name, v["n_bits"], v["group_size"], columns):
                sizes = quantization_wrapper.METHODS[name].group_sizes
                fine = [g for g in sizes if not any(c % g for _, _, c in linears)]
                use = (
                    f"Use --group_size {fine[-1]}" if fine else "Use --quantization_backend nf4, which takes any width"
                )
                raise PlanError(
                    f"--group_size {v['group_size']}: does not divide the {columns} columns of {layer}, as {name} needs. {use}."
                )

    def first_quantizer(self):
        """auto: the first of AUTO_ORDER that has what is asked for and passes its probe here."""
        v, failed = self.values, []
        asked = (v["n_bits"], v["quant_type"], v["group_size"], v["double_quant"])
        able = [n for n in quantization_wrapper.AUTO_ORDER if not quantization_wrapper.unsupported(n, *asked)]
        if not able:
            able_widths = [
                n for n in quantization_wrapper.AUTO_ORDER if v["n_bits"] in quantization_wrapper.METHODS[n].bits
            ]
            books = {b for m in quantization_wrapper.METHODS.values() for many in m.quant_types.values() for b in many}
            if v["quant_type"] is not None and v["quant_type"] not in books:
                raise PlanError(
                    f"--quant_type {v['quant_type']}: no method has it. There is {', '.join(sorted(books))}. Use one "
                    "of these."
                )
            raise PlanError(quantization_wrapper.unsupported((able_widths or ["nf4"])[0], *asked))
        for name in able:
            found = self.probe(name, v["n_bits"])
            if found is None:
                self.set("quantization_backend", name, "the first documented, not probed: run --doctor")
                return
            if found["error"] is None:
                why = f"the first that passed its probe here{''.join(f'; {line}' for line in failed)}"
                self.set("quantization_backend", name, why)
                return
            failed.append(f"{name} {found['error']}")
        raise PlanError(
            f"--n_bits {v['n_bits']}: no quantizer passed its probe on {self.backend} ({'; '.join(failed)}). These work: "
            f"{self.working()}. Use one of them, or --train_type lora."
        )

    def working(self) -> str:
        """The pairs that pass their probes here, in words."""
        results = {pair: self.probe(*pair) for pair in quantization_wrapper.pairs()}
        passed = [f"{name} at {bits} bits" for (name, bits), found in results.items() if found and not found["error"]]
        return ", ".join(passed) or "none"

    def memory(self):
        v = self.values
        self.auto_cache = v["cache_dequantized"] == "auto" and v["train_type"] == "qlora"
        if self.auto_cache and self.dims.shards > 1:
            self.set("cache_dequantized", "false", "sharded weights are gathered packed")
        elif self.auto_cache:
            self.cache_dequantized()
        elif v["cache_dequantized"] == "auto":
            self.values["cache_dequantized"] = "false"
        if v["cache_dequantized"] == "true" and v["train_type"] != "qlora":
            raise PlanError(
                f"--cache_dequantized true: --train_type {v['train_type']} has nothing quantized. Leave it out."
            )
        if v["use_activation_cpu_offload"] and self.backend in (Backend.CPU, Backend.MPS):
            self.set("use_activation_cpu_offload", False, f"activations on {self.backend} already are in host memory")
        if v["use_flash_attention"] and self.caps.supports_flash_attention:
            self.notices.append("flash attention: torch's own kernels, which it takes for bf16 and fp16")
        if v["use_flash_attention"] and not self.caps.supports_flash_attention:
            reason = self.caps.reasons.get("flash_attention", f"no flash attention kernels on {self.backend}")
            self.set("use_flash_attention", False, f"{reason}; attention runs document by document through torch")
        self.rows_and_recomputation()

    def rows_and_recomputation(self):
        """What memory decides: checkpointing and batch_size where they are auto, microbatch_tokens where it is unset."""
        v, room = self.values, self.room()
        default = max(budget.DEFAULT_MICROBATCH_TOKENS, v["context_length"])
        if room and self.shape and self.shape.known and self.shape.linears:
            given = {k for k in ("microbatch_tokens",) if v[k] is not None}
            self.leave_room(room, default)
            for name, (value, reason) in budget.settle_memory(TrainConfig(**v), self.shape, room, given).items():
                self.set(name, value, reason)
            self.tell_if_short(room)
        elif v["batch_size"] == "auto":
            self.set("batch_size", DEFAULTS["batch_size"], "the model's sizes are not known yet")
        if v["use_gradient_checkpointing"] == "auto":
            used = "true" if v["reentrant_checkpointing"] else "false"
            self.set(
                "use_gradient_checkpointing",
                used,
                "recomputation costs about a third of the speed; ask for it when memory runs out"
                if used == "false"
                else "--reentrant_checkpointing asks for it",
            )
        if v["microbatch_tokens"] is None:
            self.values["microbatch_tokens"] = default

    def leave_room(self, room, default):
        """Dense copies that auto would keep are given up where the run, not recomputed, does not fit with them."""
        v = self.values
        if not self.auto_cache or v["cache_dequantized"] != "true":
            return
        rows = DEFAULTS["batch_size"] if v["batch_size"] == "auto" else v["batch_size"]
        plain = dict(
            use_gradient_checkpointing="false", batch_size=rows, microbatch_tokens=v["microbatch_tokens"] or default
        )
        took = budget.predicted_bytes(TrainConfig(**v | plain), self.shape, room)
        if took > room.usable:
            self.adjustments = [a for a in self.adjustments if a.setting != "cache_dequantized"]
            self.values["cache_dequantized"] = "auto"
            self.set(
                "cache_dequantized",
                "false",
                f"{budget.gib(took)} predicted with dense copies do not fit in {budget.gib(room.usable)}",
            )

    def tell_if_short(self, room):
        """A run that is predicted not to fit is told so before it loads; full rows make the prediction an upper bound."""
        took = budget.predicted_bytes(TrainConfig(**self.values), self.shape, room)
        if took > room.usable and not self.values["dry_run"]:
            self.notices.append(
                f"memory: {budget.gib(took)} predicted for full rows, {budget.gib(room.usable)} usable; --dry_run says what would make it fit"
            )

    def room(self) -> budget.MemoryBudget | None:
        """The memory that is planned for: this machine's device, or the ones that --assume_memory and --assume_world_size name."""
        room = memory_budget(self.values, str(self.backend), self.caps.memory_bytes, self.given("backend"))
        if room is None or self.dims.world_size == 1:
            return room
        one_memory = self.backend in (Backend.CPU, Backend.MPS) and not self.values["assume_memory"]
        shared = self.local_size if one_memory else 1
        return replace(room, memory_bytes=room.memory_bytes // shared, ranks=self.dims.shards, dims=self.dims)

    def cache_dequantized(self):
        """On where dense copies are small beside the memory: they save two dequantizations a layer and microbatch."""
        room = self.room()
        weights, memory = self.shape and self.shape.num_weights, room and room.memory_bytes
        if not (weights and memory):
            self.set("cache_dequantized", "false", "dequantized weights would be as large as unquantized ones")
            return
        dense = weights * (4 if "32" in self.values["precision"] or "autocast" in self.values["precision"] else 2)
        fits = dense <= CACHE_PART_OF_MEMORY * memory
        self.set(
            "cache_dequantized",
            "true" if fits else "false",
            f"dense copies take {dense / 2**30:.1f} GiB of {memory / 2**30:.0f} GiB",
        )

    def steps(self):
        v = self.values
        if v["lr"] is None:
            self.values["lr"] = 2e-5 if v["train_type"] == "full" else 2e-4
        if self.given("warmup_steps"):
            self.values["warmup_ratio"] = 0.0

    def model_limits(self):
        shape, v = self.shape, self.values
        if v["model_name"] is None:
            self.values["model_name"] = DEMO_MODEL
        if shape is None:
            return
        check_model(self.dims, shape)
        if self.dims.tp * self.dims.pp > 1:
            self.notices.append(
                "what transformers plans for this model's layers is asked when it loads, before its weights are read"
            )
        if shape.context_limit and v["context_length"] > shape.context_limit:
            limit, length = shape.context_limit, v["context_length"]
            if self.given("context_length"):
                raise PlanError(
                    f"--context_length {length}: is over this model's limit of {limit}. Use at most {limit}."
                )
            self.set("context_length", limit, "this model's limit")
        if shape.num_experts and self.values["train_type"] != "full" and not self.values["llama_pro_path"]:
            self.experts(shape.num_experts)

    def experts(self, number):
        v = self.values
        said = [f"{number} experts a layer"]
        if v["train_type"] == "qlora":
            dense = v["cache_dequantized"] == "true"
            said.append("are quantized" + (", with dense copies" if dense else ", and dequantized one at a time"))
        if v["use_dora"]:
            said.append("get no adapter: PEFT has no DoRA for weights of experts held as one parameter")
        elif v["lora_target_modules"] == "all":
            said.append("get adapters of their own" + (" without dropout, as PEFT's" if v["lora_dropout"] else ""))
        self.notices.append(said[0] + " " + "; ".join(said[1:] or ["stay frozen"]))

    def output(self, now):
        v = self.values
        if v["output_dir"] is None:
            model = Path(v["model_name"]).name
            self.values["output_dir"] = f"outputs/{now:%Y%m%d-%H%M%S}-{model}"
        if not v["save_model"] and (v["save_every"] or v["resume"]):
            name = "save_every" if v["save_every"] else "resume"
            raise PlanError(f"--save_model false: contradicts --{name} {v[name]}, which needs what it would not write.")
