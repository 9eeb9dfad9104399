"""A dry run prints the plan and imports no framework."""

from tests.support.commands import without_frameworks, words


def test_a_dry_run_prints_the_plan_without_importing_a_framework(flags):
    argv = words(flags, "--dry_run", precision="auto")
    out = without_frameworks(argv)
    assert out.returncode == 0, out.stderr
    assert "rows per step: 4" in out.stdout and "precision: auto ->" in out.stdout
