"""One page: its blocks run from top to bottom in an empty folder."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.pages._blocks import Block, Kind, PageError, read_blocks
from tools.pages._masks import differences, renewed, same
from tools.pages._shell import PROMPT, check_line, commands, lines_of, printed

__all__ = ["check_page", "renew_page"]

Show = Callable[[str, str], str]
"""`show(shown, printed)`: what a page should show, where it shows `shown` and its block printed `printed`."""


def check_page(page: Path) -> None:
    """Run the blocks of a page. Raises PageError, with file and line, at the first that fails or shows something untrue."""

    def compare(shown: str, now: str) -> str:
        if not same(shown, now):
            raise PageError(f"what it shows is not what is printed:\n{differences(shown, now)}")
        return shown

    _run(page, compare)


def renew_page(page: Path) -> bool:
    """Write into a page what its blocks print today. Returns whether anything has changed."""
    old = page.read_text(encoding="utf-8")
    new = old
    for block, text in reversed(_run(page, renewed)):
        new = new[: block.start] + text + new[block.end :]
    if new != old:
        page.write_text(new, encoding="utf-8")
    return new != old


def _run(page: Path, show: Show) -> list[tuple[Block, str]]:
    """Run every block of a page. Returns each block with what it should show."""
    blocks = read_blocks(page.resolve())
    names: dict[str, Any] = {"__name__": "__page__"}
    results, output = [], ""
    with _empty_folder():
        for block in blocks:
            try:
                text, output = _do(block, names, output, show)
            except (PageError, AssertionError) as error:
                raise PageError(f"{page}:{block.line}: {error}") from None
            except Exception as error:
                raise PageError(f"{page}:{block.line}: {type(error).__name__}: {error}") from error
            results.append((block, text))
    return results


def _do(block: Block, names: dict[str, Any], output: str, show: Show) -> tuple[str, str]:
    """Run one block. Returns what it should show, and what it printed. `output` is what the block before it printed."""
    match block.kind:
        case Kind.FILE:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        case Kind.PYTHON:
            printed_text = io.StringIO()
            code = compile("\n" * block.line + block.text, "page", "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed_text):
                exec(code, names)
            return block.text, printed_text.getvalue()
        case Kind.OUTPUT:
            return show(block.text, output), ""
        case Kind.CONSOLE:
            parts = [(command, show(shown, printed(command))) for command, shown in commands(block.text)]
            return "".join(f"{PROMPT}{command}{shown}" for command, shown in parts), ""
        case Kind.SHELL:
            for line in lines_of(block.text):
                check_line(line)
    return block.text, ""


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    """While this lasts, an empty folder is the current one, and modules can be imported from it."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder, contextlib.chdir(folder):
        sys.path.insert(0, folder)
        os.environ["COLUMNS"] = "120"
        try:
            yield
        finally:
            sys.path.remove(folder)
