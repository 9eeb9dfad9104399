"""A warm process that runs cases in forked children: `python -m tests.rig.worker ROOT NUMBER`.

Reads {"kind", "seeds"} as JSON lines on stdin and answers with a line per case. It has imported everything a run needs
and has started no thread, so that its children are as good as new processes.
"""

import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from pathlib import Path

QUIET = dict(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    PYTHONWARNINGS="ignore",
    CUDA_VISIBLE_DEVICES="",
)


def main() -> None:
    root, number = Path(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.update(QUIET, XDG_CACHE_HOME=str(root / "cache"))
    import_everything()
    from tests.rig.kinds import KINDS
    from tests.rig.materials import Place

    place = Place(root, root / f"worker-{number}", number)
    import_what_a_run_imports(place)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started before the fork"
    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        for seed, outcome, seconds in run_cases(KINDS[asked["kind"]], asked["seeds"], place):
            answer = dict(kind=asked["kind"], seed=seed, tried=outcome.tried, failures=outcome.failures)
            answers.write(json.dumps(answer | dict(kept=outcome.kept, seconds=seconds)) + "\n")
        answers.write(json.dumps({"done": len(asked["seeds"])}) + "\n")


def run_cases(kind, seeds: list, place):
    """Yields (seed, outcome, seconds) of each case of a kind."""
    from tests.rig.oracle import Caught, Outcome

    module = importlib.import_module(f"tests.rig.{kind.module}")
    if kind.batched:
        from tests.rig.batch import run_batch

        yield from run_batch(module, kind, seeds, place)
        return
    for seed in seeds:
        began = time.monotonic()
        with Caught() as caught:
            outcome = getattr(module, kind.function)(seed, place)
        if caught.error is not None:  # a fault of the rig itself is a row of its table too
            outcome = Outcome()
            outcome.fail("rig", "".join(traceback.format_exception(caught.error))[-380:])
        yield seed, outcome, time.monotonic() - began


def import_everything() -> None:
    """Imports this repository's modules and the libraries they use."""
    import numpy.random  # noqa: F401
    import torch.distributed  # noqa: F401
    import transformers  # noqa: F401
    import yaml  # noqa: F401

    import finetune
    import train  # noqa: F401

    for module in pkgutil.walk_packages(finetune.__path__, "finetune."):
        if not module.name.endswith(("mlx", "_triton", "triton_kernels", "bnb", "hqq", "quanto", "accelerate")):
            importlib.import_module(module.name)


def import_what_a_run_imports(place) -> None:
    """Runs once in a child, and imports here what it has imported: mostly parts of transformers, loaded lazily."""
    import train
    from tests.rig.children import Child, argv_of

    def make(folder: Path) -> None:
        for variant in ("lora", "full"):
            argv = argv_of(place.flags(variant, folder / variant))

            def call(argv=argv, variant=variant) -> int:
                code = train.main(argv)
                (folder / f"{variant}.json").write_text(json.dumps(sorted(sys.modules)))
                return code

            ended = Child(folder).start(call).end(300)
            assert ended.code == 0, ended.err

    folder = place.once("imports", make)
    for variant in ("lora", "full"):
        for name in json.loads((folder / f"{variant}.json").read_text()):
            if name not in sys.modules:
                try:
                    importlib.import_module(name)
                except (ImportError, AttributeError, ValueError, TypeError):
                    continue  # made by another module, not found under its own name


if __name__ == "__main__":
    main()
