"""Students of a teacher on MLX: losses, metrics, evaluations and states are those of the torch engine."""

import pytest

from finetune.data.taught_rows import PART_ROWS
from tests.run.test_teacher import ROWS
from tests.support.cells import but_slow
from tests.support.mlx_engines import is_torch_s_moves_and_resumes
from tests.support.rows import jsonl
from tests.support.runs import read_events
from tests.support.small_runs import model_in
from train import fine_tune

KINDS = {
    "forward_kl": {},
    "reverse_kl": dict(distill_loss="reverse_kl", teacher_top_k=10**6, distill_alpha=0.6),
    "jsd": dict(distill_loss="jsd", distill_beta=0.3, train_type="full", lr=1e-3),
    "own answers": dict(on_policy_fraction=0.5, max_completion_length=6, teacher_cache="auto"),
    "sampled_kl": dict(
        on_policy_fraction=0.5, max_completion_length=6, teacher_cache="auto", distill_loss="sampled_kl"
    ),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("teaching")
    return dict(
        model_name=str(model_in(root / "student", 1, 2)),
        teacher=str(model_in(root / "teacher", 2, 3)),
        teacher_cache=str(root / "cache"),
        dataset=str(jsonl(root / "rows.jsonl", ROWS)),
        validation_split=0.2,
        train_type="lora",
        precision="fp32",
        context_length=64,
        batch_size=5,
        lr=5e-3,
        log_to="stdout",
        async_save="false",
        keep_last=99,
    )


@pytest.mark.parametrize(
    ("kind", "count"), but_slow([(k, 20) for k in KINDS] + [("forward_kl", 3)], [("forward_kl", 3)])
)
def test_a_student_is_torch_s_moves_and_resumes(flags, tmp_path, kind, count):
    """The teacher is opened in torch, and what it gives is kept for both."""
    assert len(ROWS) < PART_ROWS
    for backend in ("mlx", "cpu"):
        how = dict(backend=backend, max_steps=count, save_every=5, output_dir=str(tmp_path / backend))
        assert fine_tune(**flags | KINDS[kind] | how).step == count
    mine, theirs = (read_events(tmp_path / backend, "step") for backend in ("mlx", "cpu"))
    for one, other in zip(mine, theirs, strict=True):
        # Of an answer alone the divergence is a difference of logarithms near zero.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        for name in ("loss/divergence", "loss/nll"):  # a step may have answers of the model's own alone, or none
            assert (name in one) == (name in other)
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-4, abs=1e-6)
    evaluated = [[event["loss"] for event in read_events(tmp_path / b, "eval")] for b in ("mlx", "cpu")]
    assert evaluated[0] and evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    if count == 20 and "on_policy_fraction" not in KINDS[kind]:
        is_torch_s_moves_and_resumes(tmp_path, (("cpu", "mlx"), ("mlx", "cpu")))
