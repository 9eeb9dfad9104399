"""The kinds of cases: where each is written, and how many a quick and a full rig run try."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of case. `quick`, `full`: cases of a rig run at either scale.

    `function`: case(seed, place) -> Outcome of `module`; of a batched kind, the name of its batch there.
    """

    name: str
    module: str
    function: str
    quick: int
    full: int
    what: str
    batched: bool = False


def _kinds() -> list[Kind]:
    data, model, own, flags = "data_cases", "model_cases", "own_cases", "flag_cases"
    return [
        Kind("controls", "control_cases", "control", 6, 6, "resumes that lose a part of the state, to be noticed"),
        Kind("kills", "kill_cases", "random_kills", 20, 130, "SIGKILL at random moments, 5 a run"),
        Kind("call-kills", "kill_cases", "call_kills", 20, 60, "SIGKILL before or after a chosen system call, 5 a run"),
        Kind("rank-call-kills", "kill_cases", "rank_call_kills", 8, 50, "the same on 2 ranks, 5 a run"),
        Kind("save-kills", "kill_cases", "save_kills", 10, 40, "SIGKILL while a save goes on beside steps, 5 a run"),
        Kind("io-faults", "fault_cases", "fault", 150, 4_000, "every call of a run x every fault that applies"),
        Kind("flips", "damage_cases", "flip", 500, 5000, "one flipped bit in a file of a run"),
        Kind("cuts-swaps", "damage_cases", "cut_or_swap", 300, 2000, "a file cut, grown, deleted, zeroed or swapped"),
        Kind("jsonl", data, "JSONL", 300, 5000, "mutants of .jsonl rows", batched=True),
        Kind("json", data, "JSON", 300, 3000, "mutants of .json rows", batched=True),
        Kind("csv", data, "CSV", 300, 3000, "mutants of .csv rows", batched=True),
        Kind("txt", data, "TXT", 300, 2000, "mutants of .txt rows", batched=True),
        Kind("parquet", data, "PARQUET", 400, 4000, "mutants of .parquet rows", batched=True),
        Kind("arrow", data, "ARROW", 400, 3000, "mutants of .arrow rows", batched=True),
        Kind("config", model, "CONFIG", 300, 2000, "mutants of a model's config.json", batched=True),
        Kind("tokenizer", model, "TOKENIZER", 200, 2000, "mutants of tokenizer files", batched=True),
        Kind("safetensors", model, "SAFETENSORS", 300, 2000, "mutants of model and adapter weights", batched=True),
        Kind("yaml", flags, "YAML", 300, 2000, "mutants of a YAML --config", batched=True),
        Kind("flags", flags, "FLAGS", 500, 5000, "random command lines", batched=True),
        Kind("own-json", own, "OWN", 300, 2000, "mutants of the JSON files a run writes", batched=True),
        Kind(
            "readers",
            "reader_cases",
            "READERS",
            300,
            2000,
            "edits of shards, adapters and published files",
            batched=True,
        ),
        Kind("stored", "reader_cases", "STORED", 300, 2000, "edits of the tensors of quantized folders", batched=True),
        Kind("writers", "writer_cases", "WRITERS", 60, 400, "files of others where a run writes", batched=True),
        Kind("caches", "cache_cases", "CACHES", 200, 1000, "edits of token cache entries and locks", batched=True),
        Kind("builders", "builder_cases", "BUILDERS", 200, 1000, "odd input and folders of the builders", batched=True),
        Kind("wrapper", "wrapper_cases", "WRAPPER", 200, 1000, "edits of the MPS wrapper's checkpoints", batched=True),
        Kind("preference", "preference_cases", "ROWS", 200, 1000, "mutants of rows of pairs and labels", batched=True),
        Kind("mlx", "mlx_cases", "MLX", 200, 1000, "edits of checkpoints opened by MLX, beside torch", batched=True),
        Kind("preference-kills", "preference_cases", "preference_kills", 8, 40, "SIGKILL of runs on pairs, labels"),
        Kind(
            "continued-kills",
            "kill_cases",
            "continued_kills",
            8,
            40,
            "SIGKILL of runs that continue or merge an adapter",
        ),
        Kind(
            "exports",
            "export_cases",
            "EXPORTS",
            300,
            2000,
            "damaged folders exported, scored, asked, continued",
            batched=True,
        ),
        Kind(
            "packed", "packed_cases", "PACKED", 100, 500, "edits of a packed base at a start, amid a run", batched=True
        ),
        Kind("packed-faults", "packed_cases", "packed_fault", 10, 100, "calls on a packed base that fail, 5 a run"),
        Kind("streaming", "stream_cases", "streaming", 10, 100, "streamed files edited between a kill and a resume"),
        Kind("signals", "signal_cases", "signals", 30, 200, "SIGTERM and SIGINT by phase, half at a system call"),
        Kind("rank-kills", "rank_cases", "rank_kill", 6, 60, "SIGKILL of a rank: launched, spawned, torchrun"),
        Kind("rank-stops", "rank_cases", "rank_stop", 3, 30, "SIGSTOP of a rank: launched, spawned, torchrun"),
        Kind("strangers", "stranger_cases", "stranger", 15, 200, "bytes of a stranger on every listening port"),
        Kind("listeners", "stranger_cases", "listeners", 1, 4, "addresses on which local ranks listen"),
        Kind("combinations", "combination_cases", "combination", 20, 400, "runs of random valid flags"),
        Kind("owners", "limit_cases", "owners", 20, 100, "2 or 3 runs that start in one output_dir"),
        Kind("disk-full", "limit_cases", "disk_full", 12, 60, "tmpfs, RLIMIT_FSIZE, ENOSPC"),
        Kind("memory", "limit_cases", "memory_limit", 12, 60, "RLIMIT_AS from too little to enough"),
        Kind("soak", "soak_cases", "soak", 1, 1, "resident memory, descriptors, threads and steps over a long run"),
    ]


KINDS = {kind.name: kind for kind in _kinds()}
