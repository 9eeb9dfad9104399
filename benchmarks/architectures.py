"""Every class of transformers' causal-LM mapping, tiny and random, beside transformers + PEFT.

    python benchmarks/architectures.py run > architectures.jsonl        all of them, about 25 minutes on two cores
    python benchmarks/architectures.py run llama mamba2 >> architectures.jsonl
    python benchmarks/architectures.py run --short > short.jsonl        limits of classes below the rows' length
    python benchmarks/architectures.py draw architectures.jsonl --write

Per class and train type: loss and gradients of one step in fp32 against transformers + PEFT, greedy text with the cache
against whole forwards, and a run through train.py that is cut and resumed, then asked by generate.py.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from finetune.errors import MODEL_ERRORS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
KINDS = ("full", "lora", "qlora", "dora")
# What a class raises is a row of the table, not its end.
RAISED = (*MODEL_ERRORS, ImportError, StrictDataclassError)
LIMITS = dict(loss=1e-5, gradient=1e-5)


def row_of(model_type: str, short: bool = False) -> dict:
    """What happened to one class under every kind of training. `short`: see architectures.short_limits."""
    from finetune.errors import PlanError
    from tests.support import architectures

    row = {"model_type": model_type, "class": architectures.class_of(model_type)}
    try:
        changes = architectures.short_limits(model_type) if short else {}
        architectures.build(model_type, **changes)
    except RAISED as error:
        return row | {"not_built": f"{type(error).__name__}: {error}"[:300]}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS[:2] if short else KINDS:
            train_type, use_dora = ("lora", True) if kind == "dora" else (kind, False)
            try:
                found = architectures.compare(model_type, train_type, Path(folder) / "compared", use_dora, **changes)
                row[kind] = {"layout": found.layout, "reason": found.reason, "loss": found.loss}
                row[kind] |= {"gradient": found.gradient, "worst": found.worst, "generates": found.generates}
                if kind != "dora" and not short:
                    row[kind] |= architectures.trains_resumes_and_answers(model_type, kind, Path(folder))
            except PlanError as error:
                row[kind] = {"refused": str(error).replace(folder, "")}
            except RAISED as error:
                row[kind] = row.get(kind, {}) | {"error": f"{type(error).__name__}: {error}"[:300]}
    return row


def run(args) -> None:
    import torch
    import transformers

    from tests.support import architectures

    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for model_type in args.model_types or architectures.model_types():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            row = row_of(model_type, args.short)
        print(json.dumps(row), flush=True)


def cell(found: dict | None) -> str:
    """One word of what happened, and which part failed."""
    if found is None:
        return ""
    if "refused" in found:
        return "refused"
    if "error" in found:
        return "error"
    failed = [f"{n} {found[n]:.0e}" for n, limit in LIMITS.items() if not found[n] <= limit]
    failed += [word for word in ("generates", "resumed", "answered") if not found.get(word, True)]
    return "no: " + ", ".join(failed) if failed else "yes"


def table(rows: list[dict]) -> str:
    lines = ["| model type | class | full | lora | qlora | dora | rows |", "|---|---|---|---|---|---|---|"]
    notes = {}
    for row in sorted(rows, key=lambda r: r["model_type"]):
        name = row["model_type"]
        if "not_built" in row:
            lines.append(f"| {name} | {row['class']} | not built | | | | |")
            notes[f"{name}: transformers does not build it from a config ({' '.join(row['not_built'].split())})"] = None
            continue
        cells = [cell(row.get(kind)) for kind in KINDS]
        layout = (row.get("full") or {}).get("layout", "")
        lines.append(f"| {name} | {row['class']} | {' | '.join(cells)} | {layout.replace('_', '-')} |")
        for kind in KINDS:
            said = (row.get(kind) or {}).get("refused") or (row.get(kind) or {}).get("error")
            if said:
                notes.setdefault(f"{name}: {' '.join(said.split())}")
                break
    counts = {k: sum(cell(row.get(k)) == "yes" for row in rows) for k in KINDS}
    total = f"{len(rows)} classes; equal to transformers + PEFT: " + ", ".join(f"{k} {n}" for k, n in counts.items())
    return "\n".join([total + ".", "", *lines, "", *(f"- {note}" for note in notes)])


def draw(args) -> None:
    """The newest line of each class."""
    rows = {row["model_type"]: row for row in map(json.loads, args.results.read_text().splitlines())}
    made = table(list(rows.values()))
    if not args.write:
        print(made)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("model_types", nargs="*")
    one.add_argument("--short", action="store_true", help="limits of classes below the rows' length")
    one.set_defaults(call=run)
    two = commands.add_parser("draw")
    two.add_argument("results", type=Path)
    two.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    two.set_defaults(call=draw)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
