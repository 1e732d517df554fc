"""The tool that runs the blocks of pages: what it takes for right, what it refuses, what it writes."""

import pytest

from mpar.errors import MparError
from tools.pages._blocks import Kind, PageError, read_blocks
from tools.pages._masks import renewed, same
from tools.pages._page import check_page, renew_page
from tools.pages._shell import check_line, commands

PAGE = """# A page

```python title="theirs.py"
NUMBER = 3
```

```python
import theirs
print("three", theirs.NUMBER)
print("noise", 0.5)
```

```text
three 3
noise [...]
```

```console
$ cat theirs.py
NUMBER = 3
```
"""


@pytest.fixture
def page(tmp_path):
    """A function that makes a page of a text."""

    def make(text: str):
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def test_a_true_page_passes(page):
    """Files are there for later blocks, names are kept, outputs are compared, masks stand for anything."""
    path = page(PAGE)
    assert [block.kind for block in read_blocks(path)] == [Kind.FILE, Kind.PYTHON, Kind.OUTPUT, Kind.CONSOLE]
    check_page(path)
    assert not renew_page(path)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [("three 3", "three 4", 13), ("NUMBER = 3\n```\n", "NUMBER = 5\n```\n", 18), ("import theirs", "import others", 7)],
)
def test_an_untrue_page_fails_with_its_line(page, old, new, line):
    """The error names the block: what it shows, what was printed, or what was raised."""
    at = PAGE.rindex(old)
    path = page(PAGE[:at] + new + PAGE[at + len(old) :])
    with pytest.raises(PageError, match=f"page.md:{line}: "):
        check_page(path)


def test_renewed_pages_are_true(page):
    """What has changed is written anew; masked lines that still fit stay."""
    path = page(PAGE.replace("three 3", "three 4"))
    assert renew_page(path)
    assert path.read_text(encoding="utf-8") == PAGE


@pytest.mark.parametrize("block", ["```text\nfrom nowhere\n```\n", "```\nplain\n```\n", "```bash\nls\n```\n"])
def test_blocks_that_nobody_checks_are_refused(page, block):
    """Text that no python block printed, and languages for which nothing is done."""
    with pytest.raises(PageError, match=r"page\.md:1: nothing can be done"):
        read_blocks(page(block))


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\n", "b\n", False),
        ("took [...] s\n", "took 3.2 s\n", True),
        ("took [...] s\n", "took 3.2 h\n", False),
        ("a.c\n", "abc\n", False),
        ("  a  \n\n", "  a\n", True),
    ],
)
def test_masks(shown, printed, expected):
    """A line of dots stands for lines, dots in brackets for words; everything else for itself."""
    assert same(shown, printed) is expected
    assert same(renewed(shown, printed), printed)


def test_commands_and_what_they_print():
    """A prompt begins a command, a backslash continues it, the rest is shown."""
    assert list(commands("$ a \\\n  b\nx\ny\n$ c\n")) == [("a \\\n  b\n", "x\ny\n"), ("c\n", "")]


@pytest.mark.parametrize(
    "line",
    [
        "mpar train optimzer.lr=1",
        "mpar plan mesh=fsdp2 strategy=zero9",
        "mpar dance",
        "pip install 'mpar[gold]'",
        "python -m tools.nothing",
        "curl https://example.org",
        "mpar train -m optimizer.lrr=1,2",
    ],
)
def test_wrong_commands_are_refused(line, tmp_path, monkeypatch):
    """Keys, choices, commands, extras, modules and programs that there are not."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((PageError, MparError)):
        check_line(line)
