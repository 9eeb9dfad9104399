"""Writes a checkpoint as other programs read it: by default base and adapter merged, for transformers and vLLM.

python export.py --checkpoint outputs/my-run --output_dir merged
python export.py --checkpoint outputs/my-run --output_dir gguf --to gguf --outtype q8_0    llama.cpp, LM Studio
python export.py --checkpoint outputs/my-run --output_dir ollama --to ollama    a GGUF and its Modelfile
python export.py --checkpoint outputs/my-run --output_dir for-mlx --to mlx-lm    the adapter for mlx_lm.generate
python export.py --checkpoint adapters --output_dir ours --to peft               an adapter of mlx_lm.lora for peft
python export.py --checkpoint outputs/my-run --plain checkpoint.pt          one file for torch.load
python export.py --from_older model_state_dict.safetensors --model_name BASE --output_dir adapter
"""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

from finetune.callers_process import callers_process
from finetune.checkpoint.store import storage
from finetune.cli import Parser
from finetune.errors import PlanError
from finetune.model_files.files import ModelFiles, lacks_tokenizer, tokenizer_folder
from finetune.model_files.hub_upload import check_upload, upload
from finetune.system.files import check_new, new_folder
from finetune.system.program import started_as
from finetune.system.terminal import say

MERGED = ("hf", "mlx", "gguf", "ollama")
ADAPTERS = ("peft", "mlx-lm", "gguf-lora")
LIBRARIES = {"mlx": "mlx", "mlx-lm": "mlx", "gguf": "gguf", "ollama": "gguf", "gguf-lora": "gguf"}  # the Hub's names
MLX_BITS = ("2bit", "3bit", "4bit", "5bit", "6bit", "8bit")
MLX_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def build_parser() -> Parser:
    parser = Parser(prog="export.py", description=__doc__)
    parser.add_argument("--checkpoint", metavar="DIR", help="an output_dir or step-N folder with an adapter")
    parser.add_argument("--output_dir", metavar="DIR", help="folder for the result; must be empty or not exist")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "fp32", "bf16", "fp16"),
        help="dtype of the saved weights (default: that of the base)",
    )
    parser.add_argument(
        "--to",
        default="hf",
        choices=(*MERGED, *ADAPTERS),
        help="the merged model: hf, mlx (converted by mlx-lm), gguf, ollama (GGUF and Modelfile); or the adapter "
        "alone: peft, mlx-lm, gguf-lora (default: hf)",
    )
    parser.add_argument(
        "--outtype",
        default="auto",
        metavar="TYPE",
        help="with gguf and ollama: f32, f16, bf16, q8_0, or q4_k_m and its like by llama.cpp's quantizer; with "
        "gguf-lora: f32, f16; with mlx: f32, f16, bf16, or 2bit to 8bit (default: f16; f32 for an adapter; the base's "
        "for mlx)",
    )
    parser.add_argument(
        "--base", metavar="ID|DIR", help="the base model of an mlx-lm adapter (default: the one its config names)"
    )
    parser.add_argument(
        "--verify",
        default="layers",
        choices=("layers", "logits"),
        help="compare what was written with base + adapter: each layer, or also the full models' logits, which takes "
        "the memory of one in fp32 (default: layers)",
    )
    parser.add_argument(
        "--score_dataset",
        metavar="FILE|none",
        help="rows to score the merged folder on, beside the run's own score (default: the run's, if the model fits)",
    )
    parser.add_argument(
        "--push_to_hub",
        metavar="ID",
        help="then upload the folder to this Hub repository, which is created as a private one; needs HF_TOKEN",
    )
    older = parser.add_argument_group("Plain checkpoints and the older scripts")
    older.add_argument("--plain", metavar="FILE", help="write --checkpoint as one file of five keys for torch.load")
    older.add_argument(
        "--from_older", metavar="FILE", help="a state dict of the older scripts, read into an adapter or a full model"
    )
    older.add_argument("--model_name", metavar="ID|DIR", help="with --from_older: the base it was trained on")
    older.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub model")
    older.add_argument(
        "--lora_alpha",
        type=float,
        metavar="X",
        help="its alpha (default: the file's; else 16, or the rank for older DoRA layers)",
    )
    older.add_argument(
        "--for_backend",
        choices=("cuda", "mps", "mlx", "cpu"),
        help="with --from_older: where it will run; for mps bf16 becomes fp16",
    )
    return parser


def refuse_unread(args: Namespace) -> None:
    """Raises PlanError for a flag that this form of the command does not read."""
    older = ("model_name", "revision", "lora_alpha", "for_backend")
    unread: tuple[str, ...]
    if args.from_older:
        unread = ("base", "to", "outtype", "verify", "score_dataset", "push_to_hub")
    elif args.plain:
        unread = ("output_dir", "base", "to", "outtype", "verify", "score_dataset", "push_to_hub", *older)
    elif args.to in MERGED:
        unread = ("base", *(("outtype",) if args.to == "hf" else ("dtype", "score_dataset")), *older)
    else:
        unread = ("dtype", "verify", "score_dataset", *(() if args.to == "gguf-lora" else ("outtype",)), *older)
    for name in unread:
        if getattr(args, name) not in (None, "auto", "hf", "layers"):
            raise PlanError(f"--{name} {getattr(args, name)}: is not read by this form of the command. Omit it.")


def settle_outtype(args: Namespace) -> None:
    """Replaces --outtype auto. Raises PlanError for a type that this form does not write, or cannot write here."""
    from finetune.model_files import gguf_files

    known = {
        "gguf": (*gguf_files.CONVERTED, *gguf_files.QUANTIZED),
        "gguf-lora": ("f32", "f16"),
        "mlx": ("auto", *MLX_DTYPES, *MLX_BITS),
    }[args.to if args.to != "ollama" else "gguf"]
    if args.outtype == "auto" and args.to != "mlx":
        args.outtype = "f32" if args.to == "gguf-lora" else "f16"
    if args.outtype not in known:
        raise PlanError(f"--outtype {args.outtype}: --to {args.to} writes {', '.join(known)}. Use one of them.")
    if args.to == "mlx":
        from backend_manager import package_version

        if package_version("mlx-lm") is None:
            raise PlanError("--to mlx: mlx-lm is not installed. pip install mlx-lm.")
    else:
        gguf_files.check_tools(f"--outtype {args.outtype}", args.outtype)


def convert_adapter(args: Namespace) -> None:
    """Writes the adapter of a checkpoint in the other format. Raises PlanError."""
    import json

    from finetune import open_checkpoint
    from finetune.adapters import formats, saved
    from finetune.checkpoint.store import replace_tensors
    from finetune.model_files.files import find_base, started_in_of

    source = Path(args.checkpoint)
    target = Path(args.output_dir)
    from_mlx = saved.is_mlx_lm(source)
    config, tensors = saved.read_adapter(source)
    name = args.base or formats.base_name(config, f"--checkpoint {source}")
    files = find_base(name, None, None if args.base else started_in_of(source, config), flag="--base")
    if not from_mlx and not args.base:
        open_checkpoint.base_of(args.checkpoint)  # the base it was trained on, where its digest is known
    if args.to == "mlx-lm" and not from_mlx:
        tensors, config = formats.to_mlx_lm(tensors, config, files.config)
    elif args.to == "peft" and from_mlx:
        tensors, config = formats.to_peft(tensors, config, formats.linear_names(files.weight_files))
        config["base_model_name_or_path"] = files.name
    if args.to == "mlx-lm":
        name = saved.MLX_LM_FILE
    else:
        name = saved.PEFT_FILE
    with storage(target), new_folder(target) as folder:
        replace_tensors(folder / name, tensors)
        (folder / saved.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_card(folder, source, args)
    say(f"adapter for {args.to} in {target}: {len(tensors)} tensors, on {files.name}")


def from_older(args: Namespace) -> int:
    """Writes what --from_older holds: an adapter where it has one, else the base with its weights."""
    from finetune.model_files.files import find_model
    from finetune.model_files.tokenizer import load_tokenizer
    from finetune.model_files.tokenizer_files import save_tokenizer
    from finetune.torch_engine import older_state

    needed = {"model_name": args.model_name, "output_dir": args.output_dir}
    missing = [name for name, value in needed.items() if not value]
    if missing or args.checkpoint or args.plain:
        fact = "is read alone, without --checkpoint and --plain"
        if missing:
            fact = f"needs --{missing[0]}"
        raise PlanError(f"--from_older {args.from_older}: {fact}. See --help.")
    target = Path(args.output_dir)
    check_new(target, "--output_dir")
    state = older_state.read_state(Path(args.from_older).expanduser(), args.for_backend)
    base = find_model(args.model_name, args.revision)
    has_adapter = bool(older_state.adapter_of(state)[0])
    with storage(target), new_folder(target) as folder:
        if has_adapter:
            what = older_state.write_adapter(state, base, folder, args.lora_alpha)
        else:
            what = older_state.write_model(state, base, folder, args.dtype)
        save_tokenizer(load_tokenizer(base.folder), folder, base.tokenizer_folder)
    for notice in state.notices:
        say(f"note: {notice}", in_words=True)
    say(f"{what}: {target}\ntry it: {started_as('generate.py')} --checkpoint {target} --prompt ...")
    return 0


def plain(args: Namespace) -> int:
    """Writes --plain FILE."""
    from finetune.torch_engine import older_state

    if not args.checkpoint:
        raise PlanError(f"--plain {args.plain}: needs --checkpoint, the run to write. Give its --output_dir.")
    check_head(Path(args.checkpoint), f"--plain {args.plain}")
    file = Path(args.plain).expanduser()
    if file.exists():
        raise PlanError(f"--plain {file}: exists. Give another file.")
    with storage(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        say(f"{older_state.write_plain(Path(args.checkpoint), file, args.dtype)}: {file}")
    return 0


def check_head(checkpoint: Path, flag: str) -> None:
    """Raises PlanError for a checkpoint with a head, which only transformers' format holds."""
    from finetune.adapters.heads import HeadRecord

    record = HeadRecord.read(checkpoint)
    if record is not None:
        raise PlanError(
            f"{flag}: {checkpoint} was trained with --task {record.task}, and that format does not hold its head. Use "
            "--to hf."
        )


def merge_into(folder: Path, checkpoint: Path, files: ModelFiles, args: Namespace) -> list[str]:
    """Writes base + adapter into an empty folder, checked; what to say of it. Raises PlanError."""
    from finetune.adapters.heads import HeadRecord
    from finetune.backend.machine import system_memory
    from finetune.estimate.model_shape import ModelShape
    from finetune.model_files.ends import write_ends
    from finetune.model_files.sentence_files import write_sentence_files
    from finetune.model_files.tokenizer import generation_ends, load_tokenizer
    from finetune.model_files.tokenizer_files import save_tokenizer
    from finetune.torch_engine.device import DTYPES
    from finetune.torch_engine.weights import merge
    from finetune.torch_engine.weights.stream import config_dtype
    from finetune.trained_base import settings_of_run

    merging = merge.Merge.of(checkpoint, files.folder)
    if args.verify == "logits" and merging.fp32_bytes > system_memory()[1]:
        needed, there = (size / 2**30 for size in (merging.fp32_bytes, system_memory()[1]))
        raise PlanError(
            f"--verify logits: the full model takes {needed:.1f} GiB in fp32, {there:.1f} GiB are available. "
            "Use --verify layers."
        )
    if args.dtype == "auto":
        dtype = config_dtype(files.config)
    else:
        dtype = DTYPES[args.dtype]
    merging.write(folder, dtype)
    notes = [f"note: {line}" for line in merging.base.lines]
    del merging
    lines = [str(merge.check_written(checkpoint, files.folder, folder, dtype)), *notes]
    if args.verify == "logits":
        off = merge.compare_logits(checkpoint, files, folder)
        lines.append(f"logits within {off:.1e} of base + adapter (relative to the largest)")
    if line := lacks_tokenizer(checkpoint, files):
        lines.append(f"note: {line}")
    tokenizer = load_tokenizer(tokenizer_folder(checkpoint, files))
    save_tokenizer(tokenizer, folder, files.tokenizer_folder)
    record = HeadRecord.read(checkpoint)
    if record is not None and record.gives_vectors:
        run = settings_of_run(checkpoint)
        length = run.context_length if run else None
        write_sentence_files(folder, ModelShape.from_config(files.config).hidden_size, length)
        lines.append("sentence-transformers opens it: SentenceTransformer(folder)")
    ends = write_ends(folder, generation_ends(checkpoint), tokenizer)
    if ends:
        return [*lines, ends]
    return lines


def export_merged(checkpoint: Path, target: Path, args: Namespace) -> None:
    """Writes the merged model as --to says; of a checkpoint without an adapter, the model as it is."""
    import tempfile

    from finetune import open_checkpoint

    adapted = any((checkpoint / name).is_file() for name in ("adapter_config.json", "trained_blocks.json"))
    if not adapted and args.to == "hf":
        raise PlanError(
            f"--checkpoint {checkpoint}: has no adapter_config.json. Give the --output_dir of a run with an adapter."
        )
    if args.to != "hf":
        settle_outtype(args)
    files = open_checkpoint.base_of(str(checkpoint))
    if not adapted and not any(Path(files.folder).glob("model*.safetensors")):
        raise PlanError(f"--checkpoint {checkpoint}: has no model.safetensors. Give the --output_dir of its run.")
    with storage(target), new_folder(target) as folder:
        if args.to == "hf":
            lines = merge_into(folder, checkpoint, files, args)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".merged-") as beside:
                model, lines = (Path(beside), merge_into(Path(beside), checkpoint, files, args)) if adapted else (
                    Path(files.folder), ["converted as it is"],
                )  # fmt: skip
                write = {"mlx": write_mlx, "gguf": write_gguf, "ollama": write_ollama}[args.to]
                lines += write(model, folder, Path(files.name).name, args)
        write_card(folder, checkpoint, args)
    say(f"{'merged into' if adapted else 'written to'} {target}: {lines[0]}")
    for line in lines[1:]:
        say(line, in_words=True)


def say_score(checkpoint: Path, target: Path, args: Namespace) -> None:
    """Scores a merged folder on --score_dataset or the run's own rows, beside the run's; a line where it cannot."""
    from finetune.backend.machine import system_memory
    from finetune.parts.parts import Parts
    from finetune.trained_base import settings_of_run

    run = settings_of_run(checkpoint)
    was = None
    if run:
        was = Parts(run).quantization
    differs = ""
    if was:
        differs = f"trained on a base in {was}, merged into the dense one"
    later = f"To have its score: {started_as('score.py')} --checkpoint {target} --dataset FILE"
    if args.to not in ("hf", "mlx"):  # which score.py does not read
        later = "To have it: export with --to hf too, whose weights are the same, and score that"
    dataset = args.score_dataset or (run.score_dataset if run else None)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    reason = "" if 2 * size < system_memory()[1] else "it does not fit in memory beside a copy in fp32"
    if args.to != "hf" or dataset in (None, "none") or reason:
        if differs or (reason and dataset):
            fact = f"{differs or 'not scored'}{'; ' + reason if reason else ''}"
            say(f"note: {fact}: its score may differ. {later}", in_words=True)
        return
    try:
        found, found_of, many = scored(target, dataset, run)
    except PlanError as error:
        if args.score_dataset:
            raise
        say(f"note: the run's own rows cannot be scored now ({error}) {later}", in_words=True)
        return
    same_rows = args.score_dataset in (None, run.score_dataset if run else None)
    own = {}
    if same_rows:
        own = own_scores(checkpoint)
    beside = ""
    if own:
        beside = f"; the run's own, on {was or 'the same base'}: {said_own(own)}"
    say(f"score of {target}: {found}{beside}" + (f" ({differs})" if differs else ""), in_words=True)
    if same_rows:
        write_card(target, checkpoint, args, {f"this model, {many} rows": found_of})


def scored(folder: Path, dataset: Any, run: Any) -> tuple[str, dict[str, float], int]:
    """(loss and scores of a model folder on as many rows of a file as the run scored, by its --score_metric: in words;
    by name; the number of rows).
    """
    import argparse

    from finetune import open_checkpoint
    from finetune.adapters.heads import HeadRecord
    from finetune.config import TrainConfig
    from finetune.data.prepare import cut_of, images_of, read_datasets
    from finetune.data.run_data import Data
    from finetune.parts.parts import Parts
    from finetune.run import evaluation, head_scores, heads, scoring
    from finetune.run.metrics import numbers_of

    settings = replace(run or TrainConfig(), score_dataset=dataset)
    how_read = Parts(settings).data
    alone = replace(settings, dataset=None, validation_dataset=None)
    datasets = read_datasets(Parts(alone).data)["score"]
    # a score in another one would not say what the merge changed
    precision = "auto"
    if run:
        precision = run.precision
    how = argparse.Namespace(checkpoint=str(folder), device=None, precision=precision, n_bits=None)
    found = open_checkpoint.find(how)
    if how_read.images:
        found = open_checkpoint.seeing_images(found, f"--score_dataset {dataset}")
    engine, tokenizer, ends, base = open_checkpoint.open_engine(how, found=found)
    if HeadRecord.read(folder) is not None:
        rows, values = heads.values_of(engine, tokenizer, datasets, cut_of(how_read, "score"))
        return head_scores.line_of(values), numbers_of(values), rows.num_rows
    with images_of(how_read, found.files, tokenizer) as images:
        rows, questions, result = scoring.evaluated(engine, tokenizer, datasets, cut_of(how_read, "score"), images)
        loss = f"loss {result.loss:.4f}"
        if not questions:
            return loss, {"loss": result.loss}, len(rows)
        data = Data(tokenizer, ends, rows, rows, questions, None, rows)
        values = evaluation.scores(engine, data, how_read, result.loss).values
    return f"{said_scores(values)} of {len(questions)}, {loss}", values | {"loss": result.loss}, len(questions)


def said_scores(values: dict[str, float]) -> str:
    """Scores in words."""
    from finetune.run.report import score_text

    return ", ".join(f"{name.replace('_', ' ')} {score_text(name, value)}" for name, value in values.items())


def said_own(values: dict[str, float]) -> str:
    """The run's scores in words: of exact match alone the number, as its name stands before it."""
    if list(values) == ["exact_match"]:
        return f"{values['exact_match']:.1%}"
    return said_scores(values)


def own_scores(checkpoint: Path) -> dict[str, float]:
    """The scores that the run had last, by name; empty without any."""
    from finetune.run.evaluation import SCORE_NAMES
    from finetune.run.model_card import facts_of

    after = facts_of(checkpoint).after
    return {name: after[name] for name in SCORE_NAMES if name in after}


def write_card(folder: Path, checkpoint: Path, args: Namespace, scores: dict | None = None) -> None:
    """The folder's README.md: what is known of the run, and `scores` of what was written."""
    from finetune.run import model_card

    words = "merged into its base and " if args.to in MERGED and (checkpoint / "adapter_config.json").is_file() else ""
    note = f"It was {words}written by export.py --to {args.to}."
    kind = "model" if args.to in MERGED else "adapter"
    library = LIBRARIES.get(args.to, "")
    name = Path(args.output_dir).resolve().name
    text = model_card.card(model_card.facts_of(checkpoint), name, kind, scores, note, library)
    (folder / model_card.README).write_text(text, encoding="utf-8")


def write_gguf(model: Path, folder: Path, name: str, args: Namespace) -> list[str]:
    from finetune.model_files import gguf_files

    file = f"{name}-{args.outtype}.gguf"
    return [f"{file}: {gguf_files.write_gguf(model, folder / file, args.outtype)}"]


def write_ollama(model: Path, folder: Path, name: str, args: Namespace) -> list[str]:
    from finetune.data import ollama
    from finetune.data.chat_template import stop_ids
    from finetune.model_files import gguf_files
    from finetune.model_files.tokenizer import load_tokenizer

    file = "model.gguf"
    lines = [f"{file}: {gguf_files.write_gguf(model, folder / file, args.outtype)}"]
    tokenizer = load_tokenizer(model)
    stops = [tokenizer.convert_ids_to_tokens(i) for i in sorted(stop_ids(tokenizer, model))]
    text, notice = ollama.modelfile(model, tokenizer, [stop for stop in stops if stop], file)
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    own = ollama.model_name(Path(args.checkpoint), Path(args.output_dir))
    run = f"try it: ollama create {own} -f {args.output_dir}/Modelfile && ollama run {own}"
    return [*lines, *([notice] if notice else []), run]


def write_mlx(model: Path, folder: Path, name: str, args: Namespace) -> list[str]:
    import subprocess

    from finetune.model_files.rope_names import add_older_names
    from finetune.system.isolated import python_command

    how = []
    if args.outtype in MLX_BITS:
        how = ["--quantize", "--q-bits", args.outtype.removesuffix("bit")]
    elif args.outtype != "auto":
        how = ["--dtype", MLX_DTYPES[args.outtype]]
    made = folder / ".mlx"
    command = python_command("mlx_lm", "convert", "--hf-path", str(model), "--mlx-path", str(made), *how)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [""])[-1]
        raise PlanError(f"--to mlx: mlx-lm's converter ended with {done.returncode} ({said[:300]}). Use --to hf.")
    add_older_names(made / "config.json")  # those of a model that is converted as it is
    for file in sorted(made.iterdir()):
        file.replace(folder / file.name)
    made.rmdir()
    lines = [f"try it: python -m mlx_lm generate --model {args.output_dir} --prompt ..."]
    if mtp := mtp_tensors(model):
        lines.append(f"note: {len(mtp)} tensors of MTP layers, such as {mtp[0]}: mlx-lm's converter leaves them out")
    return lines


def mtp_tensors(model: Path) -> list[str]:
    """Names of a folder's tensors of MTP layers. In a converted folder, versions of mlx-lm take them for a sign that
    its norms are yet to be converted.
    """
    from finetune.model_files.mtp import is_mtp
    from finetune.safetensors_io import read_header
    from finetune.system.json_files import read_json

    config = read_json(model / "config.json", {})
    num_layers = (config.get("text_config") or config).get("num_hidden_layers")
    names = {name for file in model.glob("model*.safetensors") for name in read_header(file)}
    return sorted(name for name in names if is_mtp(name, num_layers))


def gguf_lora(checkpoint: Path, target: Path, args: Namespace) -> None:
    """Writes the adapter as llama.cpp puts it beside a base of its own."""
    from finetune import open_checkpoint
    from finetune.model_files import gguf_files

    settle_outtype(args)
    files = open_checkpoint.base_of(str(checkpoint))
    with storage(target), new_folder(target) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        held = gguf_files.write_gguf_lora(Path(files.folder), checkpoint, folder / "adapter.gguf", args.outtype)
        write_card(folder, checkpoint, args)
    say(f"adapter for llama.cpp in {target}/adapter.gguf: {held}, on {files.name}")


@callers_process()
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    refuse_unread(args)
    if args.from_older:
        return from_older(args)
    if args.plain:
        return plain(args)
    for flag in ("checkpoint", "output_dir"):
        if not getattr(args, flag):
            raise PlanError(f"--{flag}: is required. See --help.")
    target = Path(args.output_dir)
    check_new(target, "--output_dir")
    if args.push_to_hub:
        check_upload(args.push_to_hub)
    from finetune.model_files.hub_adapter import fetched

    args.checkpoint = fetched(args.checkpoint)
    checkpoint = Path(args.checkpoint)
    if args.to != "hf":
        check_head(checkpoint, f"--to {args.to}")
    if args.to == "gguf-lora":
        gguf_lora(checkpoint, target, args)
    elif args.to in ADAPTERS:
        convert_adapter(args)
    else:
        export_merged(checkpoint, target, args)
        say_score(checkpoint, target, args)
    if args.push_to_hub:
        say(upload(target, args.push_to_hub, f"export.py --to {args.to} of {checkpoint.name}"))
    return 0


if __name__ == "__main__":
    process.exit_with(main)
