"""How many config files of other programs `--config FILE` reads, and which keys block the others.

    python benchmarks/other_configs.py configs.jsonl
    python benchmarks/other_configs.py configs.jsonl --program axolotl --lines

A line of the file is a config: {"program": "torchtune", "file": its path there, "values": what its YAML holds}. Each is
written as YAML and read as the command line reads it: parsed only, without a network or a model. A file that is taken
for another program's counts as failed.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from finetune.cli import read_config  # noqa: E402
from finetune.errors import PlanError  # noqa: E402

NAMES = {"axolotl": "Axolotl", "llama_factory": "LLaMA-Factory", "mlx_lm": "mlx-lm", "litgpt": "LitGPT", "trl": "TRL"}
READ_AS = re.compile(r"read as a file of ([\w-]+);")
MORE = re.compile(r" Also unsupported: (.*)\.$")
# Recipes of torchtune whose subject is not the fine-tuning of text, by words of their path and of what they contain.
NOT_TEXT_SFT = re.compile(
    r"vision|multi_dataset|multimodal|_dpo|_ppo|grpo|_kd_|qat|eval|generat|quantizer|early_fusion|reward|classifier",
    re.IGNORECASE,
)


@dataclass
class Result:
    """What became of one file: the lines said, or the error."""

    file: str
    lines: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def keys(self) -> list[str]:
        """The keys that block it."""
        if self.error is None:
            return []
        found = re.match(r"[^:]*: '?([\w.<|>/-]+)", self.error)
        more = MORE.search(self.error)
        return [found[1] if found else self.error[:40], *(more[1].split(", ") if more else ())]


def read(config: dict, folder: Path) -> Result:
    """A config, through a file, by the reader of --config."""
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(config["values"], sort_keys=False, allow_unicode=True), encoding="utf-8")
    result = Result(config["file"])
    try:
        read_config(str(file), result.lines.append)
    except PlanError as error:
        result.error = str(error).replace(f"{folder}/", "")
        return result
    program = NAMES.get(config["program"], config["program"])
    read_as = READ_AS.search(result.lines[0] if result.lines else "")
    if read_as is None or read_as[1] != program:
        result.error = (
            f"{file.name}: recognition: taken for {read_as[1] if read_as else 'a file of ours'}, not {program}"
        )
    return result


def is_text_sft(config: dict) -> bool:
    """True for torchtune's recipes that fine-tune text: full, LoRA, QLoRA, DoRA."""
    values = config["values"]
    built = [part.get("_component_") for part in values.values() if isinstance(part, dict)]
    return not NOT_TEXT_SFT.search(json.dumps([config["file"], built])) and {"model", "dataset"} <= values.keys()


def table(title: str, results: list[Result]) -> str:
    accepted = [r for r in results if r.error is None]
    blocking = Counter(key for r in results for key in r.keys)
    first = Counter(r.error for r in results if r.error)
    said = sum(len(r.lines) - 1 for r in accepted)
    lines = [
        f"{title}: {len(results)} files, {len(accepted)} accepted ({len(accepted) / len(results):.0%}), "
        f"{said / max(1, len(accepted)):.0f} lines each; {len(results) - len(accepted)} refused"
    ]
    lines += [f"  {number:4d}  {error}" for error, number in first.most_common()]
    if blocking:
        lines.append("  keys: " + ", ".join(f"{key} {number}" for key, number in blocking.most_common()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, help="JSON lines of configs")
    parser.add_argument("--program", help="only this program's")
    parser.add_argument("--lines", action="store_true", help="print what is said of each file too")
    args = parser.parse_args()
    configs = [json.loads(line) for line in args.configs.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for config in configs:
            if args.program not in (None, config["program"]):
                continue
            result = read(config, Path(folder))
            found.setdefault(config["program"], []).append(result)
            if config["program"] == "torchtune" and is_text_sft(config):
                found.setdefault("torchtune, text SFT", []).append(result)
    for title, results in sorted(found.items()):
        print(table(title, results))
        for result in results if args.lines else ():
            print("\n".join([f"  {result.file}", *(f"      {line}" for line in result.lines)]), result.error or "")


if __name__ == "__main__":
    main()
