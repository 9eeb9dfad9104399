"""The site: every page has its place, and `make docs` builds it; a link that leads nowhere ends the build."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.promises.test_docs_are_true import anchors
from tests.support.commands import ROOT

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: requirements-docs.txt"
)
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


def test_every_page_is_once_in_the_navigation():
    assert sorted(pages_of(CONFIG["nav"])) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))


def test_warnings_of_links_and_anchors_are_on_and_end_the_build():
    assert CONFIG["validation"]["links"] == dict.fromkeys(
        ("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"
    )
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert "mkdocs build --strict" in recipe


def test_what_builds_the_site_is_not_a_requirement_of_the_program():
    assert "mkdocs-material" in (ROOT / "requirements-docs.txt").read_text()
    assert "mkdocs" not in (ROOT / "requirements.txt").read_text()


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the site is made of."""
    for name in ("docs", "runs", "dev", "examples", "benchmarks", "config", ".github"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for file in [*ROOT.glob("*.md"), *ROOT.glob("*.yml"), *ROOT.glob("*.txt"), *ROOT.glob("Docker*"), ROOT / "LICENSE"]:
        shutil.copy(file, tmp_path / file.name)
    return tmp_path


def build(folder) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@needs_mkdocs
def test_the_site_builds_strictly_and_has_files_outside_of_docs(checkout):
    built = build(checkout)
    assert built.returncode == 0, built.stderr
    site = checkout / "outputs/site"
    assert "LoRA over the GPUs of several SLURM nodes" in (site / "repository/runs/slurm.sh.html").read_text()
    assert 'href="repository/dev/LOG.html"' in (site / "parallelism.html").read_text()
    assert (
        'src="../docs/results.svg"' not in (site / "repository/index.html").read_text()
        and (site / "results.svg").is_file()
    )
    fetched = [
        re.findall(r'(?:src|href)="(https?://[^"]*\.(?:css|js|woff2?))', p.read_text()) for p in site.glob("*.html")
    ]
    assert not any(fetched)


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.parametrize("link", ["nowhere.md", "flags.md#nowhere", "../nowhere.sh", "../README.md#nowhere"])
def test_a_link_that_leads_nowhere_ends_the_build(checkout, link):
    page = checkout / "docs/index.md"
    page.write_text(f"{page.read_text()}\n[nowhere]({link}), [README](../README.md)\n")
    built = build(checkout)
    assert built.returncode == 1 and "nowhere" in built.stderr


@pytest.mark.slow
@needs_mkdocs
def test_anchors_are_those_of_a_repository_s_own_pages():
    spec = importlib.util.spec_from_file_location("site_files", ROOT / "docs/site_files.py")
    site_files = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site_files)
    assert (
        site_files.anchor("--mlx_config") == "--mlx_config" and site_files.anchor("OpenAI&#x27;s API") == "openais-api"
    )
    made = {
        site_files.anchor(head.lstrip("# "))
        for head in re.findall(r"^#+ .+$", (ROOT / "docs/mlx.md").read_text(), re.M)
    }
    assert made == anchors(ROOT / "docs/mlx.md")
