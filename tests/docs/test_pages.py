"""README.md, CONTRIBUTING.md and the pages of docs/: what they print is so, what they name is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S
from tools.pages.__main__ import all_pages
from tools.pages._blocks import read_blocks

ROOT = Path(__file__).parents[2]
PAGES = [page.relative_to(ROOT).as_posix() for page in all_pages()]
WITH_BLOCKS = [page for page in PAGES if page != "README.md" and read_blocks(ROOT / page)]
TOP = "mpar|conf|tests|bench|docs|tools"


def run(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The finished `python` with these words, in a process that fails at any warning."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def check(page: str) -> None:
    """Every block of a page runs, in order, and shows what it prints."""
    done = run("-m", "tools.pages", "check", page)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.cases(1)
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_of_a_page(page):
    """Everything that a page shows is so today."""
    check(page)


@pytest.mark.full("trains the model of the README")
def test_blocks_of_the_readme():
    """The same of the README."""
    check("README.md")


def test_examples_of_ones_own_are_short():
    """A file on a page of what users bring along has at most 60 lines."""
    for page in sorted((ROOT / "docs" / "bring_your_own").glob("*.md")):
        for name, text in re.findall(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            assert text.count("\n") <= 60, f"{page.name}: {name}"


@pytest.mark.cases(2)
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """A link to a file names one that there is; those that the site makes have an entry in its navigation."""
    text, navigation = (ROOT / page).read_text(encoding="utf-8"), (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", text):
        there = ((ROOT / page).parent / link).resolve()
        generated = there.is_relative_to(ROOT / "docs") and f": {there.relative_to(ROOT / 'docs')}\n" in navigation
        assert there.exists() or generated, link


@pytest.mark.cases(2)
@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    """`mpar/kernels/table.yaml` in backticks is a file of the repository, `mpar.models` a module, or a name in one."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(rf"`((?:{TOP})/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.cases(2)
@pytest.mark.parametrize("page", PAGES)
def test_pictures_are_what_their_commands_draw(page, tmp_path):
    """`<!-- made by: mpar plan ... timeline=docs/images/x.svg -->` above a picture makes that picture, byte for byte."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for command in re.findall(r"<!-- made by: mpar (.*?) -->", text):
        file = re.search(r"timeline=(\S+)", command)
        assert file is not None, command
        drawn = tmp_path / "drawn.svg"
        words = command.replace(file.group(1), str(drawn)).split()
        done = run("-m", "mpar", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert drawn.read_text(encoding="utf-8") == (ROOT / file.group(1)).read_text(encoding="utf-8"), file.group(1)


@pytest.mark.full("builds the site")
def test_the_site_builds(tmp_path):
    """Strictly: a page that is missing, a link to nothing, or an object without documentation ends the build."""
    words = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()
