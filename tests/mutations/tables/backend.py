"""Mutations of BackendManager, its messages and tables."""

from tests.mutations.mutation import Mutation

CAPABILITIES = "finetune/backend/capabilities.py"
OLDER = "finetune/older/backend.py"

TABLE = (
    Mutation(
        "BM_01",
        "backend_manager imports torch",
        "backend_manager.py",
        "import os\nfrom dataclasses",
        "import os\n\nimport torch\nfrom dataclasses",
    ),
    Mutation(
        "BM_02", "the enumeration prints its member's name", CAPABILITIES, "return self.value", "return self.name"
    ),
    Mutation(
        "BM_03",
        "a backend that is detected is a text",
        "backend_manager.py",
        "self.backend = self._choose()",
        "self.backend = str(self._choose())",
    ),
    Mutation(
        "BM_04", "the word auto is unknown", "backend_manager.py", 'if word == "auto":', 'if word == "automatic":'
    ),
    Mutation("BM_05", "upper case is refused", "backend_manager.py", "str(backend).strip().lower()", "str(backend)"),
    Mutation("BM_06", "verbose=False prints", "backend_manager.py", "        if verbose:\n", "        if True:\n"),
    Mutation(
        "BM_07",
        "auto prefers MPS to MLX",
        "finetune/backend/detect.py",
        "Backend.CUDA, Backend.MLX, Backend.MPS",
        "Backend.CUDA, Backend.MPS, Backend.MLX",
    ),
    Mutation(
        "BM_08",
        "an unavailable backend is accepted",
        "backend_manager.py",
        "if backend not in self.available:",
        "if backend not in Backend:",
    ),
    Mutation(
        "BM_09",
        "CUDA has no distributed backend",
        CAPABILITIES,
        '        distributed_backend="nccl",\n',
        "        distributed_backend=None,\n",
    ),
    Mutation(
        "BM_10",
        "a width that no method has is supported",
        "backend_manager.py",
        "return bits == 16 or any(",
        "return bits == 16 or not pairs or any(",
    ),
    Mutation(
        "BM_11", "no row fits a large model", OLDER, "return max(1, rows_that_fit(", "return max(0, rows_that_fit("
    ),
    Mutation(
        "BM_12",
        "a CPU has flash attention",
        CAPABILITIES,
        'supports_flash_attention=base.supports_flash_attention and bool(facts["flash"])',
        "supports_flash_attention=True",
    ),
    Mutation(
        "BM_13",
        "detection that is overridden is not asked",
        "backend_manager.py",
        "self.available = list(self._detect_available_backends())",
        "self.available = list(BackendManager._detect_available_backends(self)) + [Backend.CUDA]",
    ),
    Mutation(
        "BM_14",
        "FSDP_BACKEND is not read",
        "backend_manager.py",
        'return cls(os.environ.get("FSDP_BACKEND") or None, verbose=verbose)',
        "return cls(None, verbose=verbose)",
    ),
    Mutation(
        "BM_15",
        "a backend that is added is never picked",
        "backend_manager.py",
        "return next(b for b in AUTO_ORDER if b in self.available",
        "return next(b for b in AUTO_ORDER if b in self.available and b in tuple(CAPABILITIES)[1:]",
    ),
    Mutation(
        "MSG_01",
        "the line on bf16 has other words",
        "finetune/plan/precision.py",
        "doesn't support bfloat16: {why or 'documented'}",
        "has no bf16: {why or 'documented'}",
    ),
    Mutation(
        "MSG_02",
        "4 bits on MPS are not noticed",
        "finetune/plan/quantization.py",
        "if facts.backend is Backend.MPS and not asked.assumes_accelerator:",
        "if facts.backend is Backend.XPU and not asked.assumes_accelerator:",
    ),
    Mutation(
        "MSG_03",
        "ranks of MPS meet over nccl",
        CAPABILITIES,
        'distributed_backend="gloo",\n        notes="Apple GPUs',
        'distributed_backend="nccl",\n        notes="Apple GPUs',
    ),
    Mutation(
        "MSG_04",
        "the saved backend_type is always cpu",
        "finetune/plan/run_plan.py",
        '"backend_type": self.backend,',
        '"backend_type": "cpu",',
    ),
    Mutation(
        "MSG_05",
        "a CPU's slowness is said twice",
        "finetune/plan/amount.py",
        'yield Notice(f"training on a CPU is slow{hint}")',
        'yield from 2 * [Notice(f"training on a CPU is slow{hint}")]',
    ),
    Mutation(
        "MSG_06",
        "allocated memory is reported as reserved",
        "finetune/backend/report.py",
        "f\"Memory reserved: {memory['reserved']",
        "f\"Memory reserved: {memory['allocated']",
    ),
    Mutation(
        "MSG_07",
        "the advice does not name the batch size",
        "finetune/memory_advice.py",
        "--batch_size {s.batch_size} or --context_length",
        "--context_length",
    ),
    Mutation(
        "TAB_01",
        "a speed of the guides is repeated",
        "README.md",
        "# finetune\n",
        "# finetune\n\nAn A100 trains 50-100 tokens/s.\n",
    ),
    Mutation(
        "TAB_02",
        "MPS is documented with bf16",
        CAPABILITIES,
        'quantization_backends=("mlx", "quanto"),\n        precisions=("fp32", "fp16"),',
        'quantization_backends=("mlx", "quanto"),\n        precisions=("fp32", "fp16", "bf16"),',
    ),
    Mutation("TAB_03", "the CPU is documented with quanto", OLDER, '"cpu": ["hqq"]}', '"cpu": ["hqq", "quanto"]}'),
    Mutation(
        "TAB_04",
        "the decision tree prints flags that do not parse",
        "finetune/plan/recommend.py",
        'text.append(f"{start} --backend {backend} --train_type',
        'text.append(f"{start} --device {backend} --train_type',
    ),
)
