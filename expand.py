"""Adds decoder layers to a model, each a copy initialized as an identity: LLaMA-Pro block expansion.

python expand.py --model_name ID --output_dir expanded --expansion_rate 0.1
python train.py --llama_pro_path expanded --dataset my.jsonl
"""

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

from finetune import safetensors_io
from finetune.callers_process import callers_process
from finetune.checkpoint.store import storage
from finetune.cli import Parser
from finetune.errors import PlanError
from finetune.model_files.files import ModelFiles, find_model
from finetune.model_files.llama_pro import (
    RECORD,
    entries_of,
    expanded,
    layers_prefix,
    new_positions,
    num_new_blocks,
    order_of,
    pattern_of,
    read_sources,
    resized,
    split,
    write,
)
from finetune.model_files.published import verified
from finetune.system.files import check_new, new_folder
from finetune.system.program import started_as
from finetune.system.terminal import say


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


def choose(args: Namespace, num_layers: int) -> int:
    """The number of layers to add. Raises PlanError."""
    number = args.num_new_blocks
    rate = args.expansion_rate
    if number is not None and rate is not None:
        raise PlanError(f"--expansion_rate {rate}: contradicts --num_new_blocks {number}. Give one of them.")
    rate = 0.1 if rate is None else rate
    if not 0 < rate <= 1:
        raise PlanError(f"--expansion_rate {rate}: must be above 0 and at most 1. Use 0.1.")
    if number is None:
        number = num_new_blocks(num_layers, rate)
    if not 1 <= number <= num_layers:
        raise PlanError(f"--num_new_blocks {number}: must be 1 to {num_layers}, the number of layers.")
    return number


@dataclass(frozen=True)
class Expansion:
    """A model and the layers it gets: `order` lists the source layer of each layer of the expanded model, `new` those
    added.

    `config`: the full config, whose `count_key` holds the number of layers; `prefix`: what precedes a layer's number in
    tensor names; `flag` begins the messages.
    """

    files: ModelFiles
    config: dict
    count_key: str
    num_layers: int
    prefix: str
    tensors: list
    order: list
    copied: list
    new: list
    flag: str

    def resized(self, order: Iterable[int]) -> dict:
        """The config with these source layers."""
        return resized(self.config, self.count_key, list(order))


def plan_expansion(args: Namespace, files: ModelFiles) -> Expansion:
    """The layers to copy and their places. Raises PlanError for a model whose layers cannot be."""
    from finetune.torch_engine import llama_pro

    flag = f"--model_name {args.model_name}"
    if files.stored:
        how = f"{files.stored['quantization_backend']} at {files.stored['n_bits']} bits"
        raise PlanError(
            f"{flag}: is prequantized ({how}), but layers can be copied only unquantized. Give the model it was made "
            "from."
        )
    if safetensors_io.shapes_of(files.weight_files):
        raise PlanError(f"{flag}: is a sharded checkpoint. Give the output_dir of the finished run.")
    config, count_key = llama_pro.full_config(files.folder)
    num_layers = (config if count_key in config else config["text_config"])[count_key]
    copied = new_positions(num_layers, choose(args, num_layers))
    order, new = order_of(num_layers, copied)
    tensors = read_sources(files.weight_files)
    prefix = layers_prefix([t.name for t in tensors], num_layers)
    if prefix is None:
        raise PlanError(f"{flag}: its tensor names do not number its {num_layers} layers. Expand another model.")
    return Expansion(files, config, count_key, num_layers, prefix, tensors, order, copied, new, flag)


@callers_process()
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    target = Path(args.output_dir)
    check_new(target, "--output_dir")
    e = plan_expansion(args, find_model(args.model_name, args.revision))
    zeros, first_of_kinds = zeros_by_layer(e)
    zero_patterns = sorted(set().union(*zeros.values()))
    with storage(target), new_folder(target) as folder:
        with verified(e.files.folder, e.files.weight_files):
            write(expanded(e.tensors, e.prefix, e.order, e.new, lambda i, pattern: pattern in zeros[i]), folder)
        write_configs(e, zero_patterns, folder)
        checked = check_logits(e, first_of_kinds, folder)
    new = ", ".join(map(str, e.new))
    say(f"{e.num_layers} layers -> {len(e.order)}; new: {new}; zeros in each: {', '.join(zero_patterns)}")
    say(f"{checked}\nsaved: {target}\ntrain it: {started_as('train.py')} --llama_pro_path {target} --dataset FILE")
    return 0


def write_configs(e: Expansion, zero_patterns: list[str], folder: Path) -> None:
    """Writes all of the expanded folder but its weights: config, tokenizer, and the record that train.py reads."""
    (folder / "config.json").write_text(json.dumps(e.resized(e.order), indent=2) + "\n")
    for file in (*e.files.tokenizer_files, e.files.folder / "generation_config.json"):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    record = {
        "expanded_from": e.files.name,
        "digest": e.files.digest,
        "layers": e.prefix,
        "layers_before": e.num_layers,
        "layers_after": len(e.order),
        "new_layers": e.new,
        "zeros": zero_patterns,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def zeros_by_layer(e: Expansion) -> tuple[dict, list[int]]:
    """({source layer: patterns of tensors that are zero in its copy}, the first source layer of each kind)."""
    from finetune.torch_engine import llama_pro

    in_layer: dict[int, dict] = {}
    for tensor in e.tensors:
        at = split(tensor.name, e.prefix)
        if at:
            in_layer.setdefault(at[0], {})[at[1]] = (pattern_of(at[1]), tensor.shape)
    kind_of = {
        i: entries_of(e.config, e.count_key, i) + json.dumps(sorted(in_layer[i].items())) for i in range(e.num_layers)
    }
    found = {}
    zeros = {}
    firsts = []
    for i in e.copied:
        kind = kind_of[i]
        if kind not in found:
            firsts.append(i)
            first = next(j for j in range(e.num_layers) if kind_of[j] == kind)
            truncated = e.resized(range(first + 1))
            found[kind] = llama_pro.residual_writers(truncated, e.prefix, first, in_layer[first], e.flag)
        zeros[i] = found[kind]
    return zeros, firsts


def check_logits(e: Expansion, first_of_kinds: list[int], folder: Path) -> str:
    """Checks that the expanded model gives the original logits; returns the line to print. PlanError if it does not."""
    from backend_manager import BackendManager
    from finetune.torch_engine import llama_pro

    stored = sum(t.num_bytes for t in e.tensors)
    in_full = 3 * stored < (BackendManager("cpu", verbose=False).capabilities.memory_bytes or 0)
    if in_full:
        last = e.num_layers - 1
    else:
        last = max(first_of_kinds)
    upto = max(i for i, source in enumerate(e.order) if source <= last) + 1
    weights = [list(f.glob("model*.safetensors*")) for f in (e.files.folder, folder)]
    before = llama_pro.logits_of(weights[0], e.resized(range(last + 1)), e.flag)
    grown = resized(e.resized(e.order), e.count_key, list(range(upto)))
    after = llama_pro.logits_of(weights[1], grown, e.flag)
    off = ((after - before).abs().max() / before.abs().max()).item()
    if not off <= 1e-5:
        raise PlanError(
            f"{e.flag}: its logits change by {off:.1e} with copied layers, so a layer depends on its position. "
            "Expand another model."
        )
    if upto == len(e.order):
        which = "its"
    else:
        which = f"with only its first {last + 1} layers, as the rest does not fit in memory,"
    if off == 0.0:
        equal = "equal bit for bit"
    else:
        equal = f"within {off:.1e}"
    return f"the expanded model starts with {which} logits: {equal}"


if __name__ == "__main__":
    process.exit_with(main)
