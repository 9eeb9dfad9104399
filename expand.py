"""Adds decoder layers to a model, each a copy initialized as an identity: LLaMA-Pro block expansion.

python expand.py --model_name ID --output_dir expanded --expansion_rate 0.1
python train.py --llama_pro_path expanded --dataset my.jsonl
"""

import json
import shutil
import tempfile
from pathlib import Path

from finetune import process, safetensors_io
from finetune.checkpoint.store import storage
from finetune.cli import Parser
from finetune.errors import PlanError


def build_parser() -> Parser:
    parser = Parser(prog="expand.py", description=__doc__)
    parser.add_argument("--model_name", required=True, metavar="ID|DIR", help="the model to expand")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub model")
    parser.add_argument(
        "--output_dir", required=True, metavar="DIR", help="folder for the expanded model; must be empty or not exist"
    )
    parser.add_argument(
        "--expansion_rate", type=float, metavar="X", help="added layers per existing layer (default: 0.1)"
    )
    parser.add_argument("--num_new_blocks", type=int, metavar="N", help="number of added layers, instead of the rate")
    return parser


def choose(args, num_layers: int) -> int:
    from finetune.model_files import llama_pro as llama_pro_files

    number, rate = args.num_new_blocks, args.expansion_rate
    if number is not None and rate is not None:
        raise PlanError(f"--expansion_rate {rate}: contradicts --num_new_blocks {number}. Give one of them.")
    rate = 0.1 if rate is None else rate
    if not 0 < rate <= 1:
        raise PlanError(f"--expansion_rate {rate}: must be above 0 and at most 1. Use 0.1.")
    if number is None:
        number = llama_pro_files.num_new_blocks(num_layers, rate)
    if not 1 <= number <= num_layers:
        raise PlanError(f"--num_new_blocks {number}: must be 1 to {num_layers}, the number of layers.")
    return number


def main(argv=None) -> int:
    process.prepare_environment()
    args = build_parser().parse_args(argv)
    from backend_manager import BackendManager
    from finetune.model_files import llama_pro as llama_pro_files
    from finetune.model_files.files import find_model
    from finetune.torch_engine import llama_pro

    said, target = f"--model_name {args.model_name}", Path(args.output_dir)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise PlanError(f"--output_dir {target}: exists and is not empty. Give another folder.")
    files = find_model(args.model_name, args.revision)
    if files.stored:
        how = f"{files.stored['quantization_backend']} at {files.stored['n_bits']} bits"
        raise PlanError(
            f"{said}: is prequantized ({how}), but layers can be copied only unquantized. Give the model it was "
            "made from."
        )
    if safetensors_io.shapes_of(files.weight_files):
        raise PlanError(f"{said}: is a sharded checkpoint. Give the output_dir of the finished run.")

    config, count_key = llama_pro.full_config(files.folder)
    num_layers = (config if count_key in config else config["text_config"])[count_key]
    copied = llama_pro_files.new_positions(num_layers, choose(args, num_layers))
    order, new = llama_pro_files.order_of(num_layers, copied)
    tensors = llama_pro_files.read_sources(files.weight_files)
    prefix = llama_pro_files.layers_prefix([t.name for t in tensors], num_layers)
    if prefix is None:
        raise PlanError(f"{said}: its tensor names do not number its {num_layers} layers. Expand another model.")
    zeros, kinds = zeros_by_layer(llama_pro, config, count_key, prefix, tensors, num_layers, copied, said)
    written = llama_pro_files.expanded(tensors, prefix, order, new, lambda i, pattern: pattern in zeros[i])
    grown = llama_pro_files.resized(config, count_key, order)
    with storage(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as beside:
            beside = Path(beside)
            llama_pro_files.write(written, beside)
            (beside / "config.json").write_text(json.dumps(grown, indent=2) + "\n")
            for file in (*files.tokenizer_files, files.folder / "generation_config.json"):
                if file.is_file():
                    shutil.copyfile(file, beside / file.name)
            record = {
                "expanded_from": files.name,
                "digest": files.digest,
                "layers": prefix,
                "layers_before": num_layers,
                "layers_after": len(order),
                "new_layers": new,
                "zeros": sorted(set().union(*zeros.values())),
            }
            (beside / llama_pro_files.RECORD).write_text(json.dumps(record, indent=1) + "\n")
            stored = sum(t.num_bytes for t in tensors)
            whole = 3 * stored < (BackendManager("cpu", verbose=False).capabilities.memory_bytes or 0)
            last = num_layers - 1 if whole else max(kinds)
            proved = prove(llama_pro, files, beside, config, grown, count_key, order, last, said)
            target.mkdir(exist_ok=True)
            for file in sorted(beside.iterdir()):
                file.replace(target / file.name)
    print(
        f"{num_layers} layers -> {len(order)}; new: {', '.join(map(str, new))}; zeros in each: "
        f"{', '.join(record['zeros'])}"
    )
    print(f"{proved}\nsaved: {target}\ntrain it: python train.py --llama_pro_path {target} --dataset FILE")
    return 0


def zeros_by_layer(blocks, config, count_key, prefix, tensors, num_layers, copied, said):
    """({source layer: patterns of tensors that are zero in its copy}, the first source layer of each kind)."""
    from finetune.model_files import llama_pro as llama_pro_files

    inside = {}
    for tensor in tensors:
        at = llama_pro_files.split(tensor.name, prefix)
        if at:
            inside.setdefault(at[0], {})[at[1]] = (llama_pro_files.pattern_of(at[1]), tensor.shape)
    kind_of = {
        i: llama_pro_files.entries_of(config, count_key, i) + json.dumps(sorted(inside[i].items()))
        for i in range(num_layers)
    }
    found, zeros, firsts = {}, {}, []
    for i in copied:
        kind = kind_of[i]
        if kind not in found:
            firsts.append(i)
            first = next(j for j in range(num_layers) if kind_of[j] == kind)
            cut = llama_pro_files.resized(config, count_key, list(range(first + 1)))
            found[kind] = blocks.residual_writers(cut, prefix, first, inside[first], said)
        zeros[i] = found[kind]
    return zeros, firsts


def prove(blocks, files, beside, config, grown, count_key, order, last, said) -> str:
    """Checks that the expanded model gives the original logits; returns the line to print. PlanError if it does not."""
    from finetune.model_files import llama_pro as llama_pro_files

    upto = max(i for i, source in enumerate(order) if source <= last) + 1
    before = blocks.logits_of(
        list(files.folder.glob("model*.safetensors*")),
        llama_pro_files.resized(config, count_key, range(last + 1)),
        said,
    )
    after = blocks.logits_of(
        list(beside.glob("model*.safetensors*")), llama_pro_files.resized(grown, count_key, range(upto)), said
    )
    off = ((after - before).abs().max() / before.abs().max()).item()
    if not off <= 1e-5:
        raise PlanError(
            f"{said}: its logits change by {off:.1e} with copied layers, so a layer depends on its "
            "position. Expand another model."
        )
    part = (
        "its" if upto == len(order) else f"with only its first {last + 1} layers, as the rest does not fit in memory,"
    )
    return f"the expanded model starts with {part} logits: " + (
        "equal bit for bit" if off == 0.0 else f"within {off:.1e}"
    )


if __name__ == "__main__":
    process.exit_with(main)
