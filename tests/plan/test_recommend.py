import pytest

from backend_manager import BackendManager
from finetune.plan.facts import Facts
from finetune.plan.recommend import recommend
from finetune.plan.resolve import resolve_plan
from train import build_parser


@pytest.mark.promise("TAB_04")
def test_the_tree_ends_in_flags_that_parse():
    text = recommend(BackendManager("cpu", verbose=False))
    assert text[0].startswith("NVIDIA or AMD GPU? ") and text[3].startswith("so: --backend cpu")
    (advice,) = [line for line in text if line.startswith("if memory runs out on cpu: ")]
    for flag in ("--low_memory", "--microbatch_tokens", "--use_gradient_checkpointing"):
        assert flag in advice
    build_parser().parse_args(text[-1].split()[2:])


@pytest.mark.parametrize("name", ["cpu", "mlx"])
def test_the_recommended_precision_is_the_one_that_auto_picks(name):
    if name == "mlx":
        pytest.importorskip("mlx_lm")
    manager = BackendManager(name, verbose=False)
    text = recommend(manager)
    given = vars(build_parser().parse_args(text[-1].split()[2:]))
    auto = resolve_plan(given | {"precision": "auto"}, Facts(manager.backend, manager.capabilities))
    assert auto.settings.precision == given["precision"]
    assert resolve_plan(given, Facts(manager.backend, manager.capabilities)).settings.precision == given["precision"]
