"""Merges an adapter, or trained new layers, into its base: a plain model folder that transformers, vLLM and mlx-lm load.

python export.py --checkpoint outputs/my-run --output_dir merged
"""

from pathlib import Path

from finetune import launch
from finetune.checkpoint import storage
from finetune.cli import Parser
from finetune.errors import PlanError


def build_parser() -> Parser:
    parser = Parser(prog="export.py", description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="an output_dir or step-N folder with an adapter"
    )
    parser.add_argument(
        "--output_dir", required=True, metavar="DIR", help="the new model folder; must not exist, or be empty"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "fp32", "bf16", "fp16"),
        help="of the weights (default: the base's own)",
    )
    return parser


def main(argv=None) -> int:
    launch.prepare_environment()
    args = build_parser().parse_args(argv)
    from finetune import tokenizer, trained

    checkpoint, target = Path(args.checkpoint), Path(args.output_dir)
    if not any((checkpoint / name).is_file() for name in ("adapter_config.json", "trained_blocks.json")):
        raise PlanError(
            f"--checkpoint {checkpoint}: holds no adapter_config.json, so there is nothing to merge."
        )
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise PlanError(f"--output_dir {target}: exists and is not empty. Give another.")
    files = trained.base_of(args.checkpoint)
    from finetune.torch_engine import hf_model

    with storage(target):
        off = hf_model.merge_to_folder(checkpoint, files, target, args.dtype)
        tokenizer.load_tokenizer(trained.tokenizer_folder(checkpoint, files)).save_pretrained(target)
    print(f"merged into {target}: logits within {off:.1e} of base + adapter (relative to the largest)")
    return 0


if __name__ == "__main__":
    launch.exit_with(main)
