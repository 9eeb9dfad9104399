"""Several ranks against one process: every layout of ranks times every kind of training, on real Gloo processes of this
machine.

python benchmarks/parallel_matrix.py                                the whole matrix, about five minutes on two cores
python benchmarks/parallel_matrix.py --kinds lora,nf4               some columns
python benchmarks/parallel_matrix.py --architectures mixtral        expert parallelism too
python benchmarks/parallel_matrix.py --kinds "lora dpo,lora kto"    preferences, see PREFERENCES in tests/support/cases

Six steps of a tiny Llama in fp32 with unequal targets on each rank. loss: largest relative difference of a step's loss;
gradients: of the first step, by tensor, max|a - b| / max|b|; norms: of all steps' gradient norms; bytes: whether each
rank holds its ceil(rows / N) rows of every tensor, scales included, between steps.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from finetune.run.metrics import table
from tests.support import cases, ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = list(cases.MATRIX)
    parser.add_argument("--kinds", default=",".join(kinds), help="comma list of " + ", ".join(kinds))
    parser.add_argument("--architectures", default="llama", help="comma list of names in tests/support/tiny.py")
    parser.add_argument("--layouts", default=",".join(cases.LAYOUTS), help="comma list of " + ", ".join(cases.LAYOUTS))
    args = parser.parse_args()
    rows = [("ranks", "kind", "model", "loss", "gradients", "norms", "bytes")]
    for size in sorted({dims.world_size for dims in cases.LAYOUTS.values()}):
        layouts = [n for n in args.layouts.split(",") if cases.LAYOUTS[n].world_size == size]
        if not layouts:
            continue
        wanted = [
            (layout, kind, architecture)
            for layout in layouts
            for architecture in args.architectures.split(",")
            for kind in args.kinds.split(",")
            if not cases.LAYOUTS[layout].ep > 1 or architecture in cases.MIXTURES
        ]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = ranks.run(size, cases.matrix, Path(folder), timeout_s=1800, wanted=wanted)
        for i, f in enumerate(found[0]):
            if "refused" in f:
                rows.append((f["layout"], f["kind"], f["architecture"], "refused", f["refused"], "", ""))
                continue
            share = "as cut" if all(rank[i]["bytes"] for rank in found) else "WRONG"
            numbers = (f"{f[name]:.1e}" for name in ("loss", "gradients", "norms"))
            rows.append((f["layout"], f["kind"], f["architecture"], *numbers, share))
    print(table(rows))


if __name__ == "__main__":
    main()
