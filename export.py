"""Merges an adapter or trained added layers into the base: a model folder for transformers, vLLM and mlx-lm.

python export.py --checkpoint outputs/my-run --output_dir merged
"""

import sys
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune import process
from finetune.checkpoint.store import storage
from finetune.cli import Parser
from finetune.errors import PlanError
from finetune.new_folder import check_new, new_folder
from finetune.terminal import say


def build_parser() -> Parser:
    parser = Parser(prog="export.py", description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="an output_dir or step-N folder with an adapter"
    )
    parser.add_argument(
        "--output_dir", required=True, metavar="DIR", help="folder for the merged model; must be empty or not exist"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "fp32", "bf16", "fp16"),
        help="dtype of the saved weights (default: that of the base)",
    )
    return parser


def main(argv=None) -> int:
    process.prepare_environment()
    args = build_parser().parse_args(argv)
    from finetune import inference
    from finetune.model_files.tokenizer import load_tokenizer
    from finetune.torch_engine.save import merge_to_folder

    checkpoint, target = Path(args.checkpoint), Path(args.output_dir)
    if not any((checkpoint / name).is_file() for name in ("adapter_config.json", "trained_blocks.json")):
        raise PlanError(
            f"--checkpoint {checkpoint}: has no adapter_config.json. Give the --output_dir of a run with an adapter."
        )
    check_new(target, "--output_dir")
    files = inference.base_of(args.checkpoint)
    with storage(target), new_folder(target) as folder:
        off = merge_to_folder(checkpoint, files, folder, args.dtype)
        load_tokenizer(inference.tokenizer_folder(checkpoint, files)).save_pretrained(folder)
    say(f"merged into {target}: logits within {off:.1e} of base + adapter (relative to the largest)")
    return 0


if __name__ == "__main__":
    process.exit_with(main)
