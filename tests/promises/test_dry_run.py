"""A dry run prints the plan and imports no framework."""

from tests.support.commands import without_frameworks, words


def test_a_dry_run_prints_the_plan_without_importing_a_framework(flags):
    argv = words(flags, "--dry_run", precision="auto")
    out = without_frameworks(argv)
    assert out.returncode == 0, out.stderr
    assert "rows per step: 4" in out.stdout and "precision: auto ->" in out.stdout


def test_neither_does_one_for_ranks_of_another_machine_on_a_model_of_which_there_is_the_config(tmp_path):
    assumed = "--assume_memory 24GiB --assume_world_size 2"
    model = "--model_name examples/configs/mixtral-8x22b"
    out = without_frameworks(words(f"{model} {assumed} --dry_run", output_dir=tmp_path))
    assert out.returncode in (0, 2) and "memory" in out.stdout, out.stderr
