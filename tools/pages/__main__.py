"""The command line of the pages."""

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tools import pages
from tools.pages._blocks import Kind, PageError, read_blocks
from tools.pages._page import check_page, renew_page

ROOT = Path(__file__).parents[2]
DONE = {
    Kind.PYTHON: "run",
    Kind.FILE: "written, and used by later blocks",
    Kind.OUTPUT: "compared",
    Kind.CONSOLE: "run and compared",
    Kind.SHELL: "run, planned or checked",
    Kind.PICTURE: "drawn by the site",
}


def main() -> int:
    """Do what the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.pages", description=pages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("check", "renew", "count"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    options = parser.parse_args()
    files = options.files or all_pages()
    if options.what == "count":
        return _count(files)
    if len(files) > 1:  # each in a process of its own: pages may register the same names
        command = [sys.executable, "-m", "tools.pages", options.what]
        return max(subprocess.run([*command, str(file)], check=False, cwd=ROOT).returncode for file in files)
    try:
        if options.what == "check":
            check_page(files[0])
        elif renew_page(files[0]):
            print(f"{files[0]} has changed")
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def all_pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and the pages of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _count(files: list[Path]) -> int:
    counts = Counter(block.kind for file in files for block in read_blocks(file))
    for kind, done in DONE.items():
        print(f"{counts[kind]:4} {kind:8} {done}")
    print(f"{counts.total():4} blocks of {len(files)} pages; none of another kind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
