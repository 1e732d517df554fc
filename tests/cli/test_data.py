"""`mpar data` and `mpar preprocess` from the command line."""

import json

import pytest

from mpar.cli.main import main


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """A file of two conversations and one row that is no JSON, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"query": "why", "response": answer} for answer in ("so", "thus")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    return ["data=jsonl", "data.sources=[chats.jsonl]", "data.seq_len=64", "data.shuffle=false"]


def test_show_marks_what_is_trained_on(chats, capsys):
    """Each document with its place; answers and their ends are marked, questions are not."""
    assert main(["data", "show", *chats, "rows=1"]) == 0
    out = capsys.readouterr().out
    assert "data: 2 of 3 rows used" in out and "1 malformed" in out
    _, _, row = out.partition("step 0, row 0: ")
    assert row.startswith("64 of 64 positions, 2 documents, ") or "2 documents" in row
    assert "--- chats.jsonl:1\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n[[so<|im_end|>]]" in row
    assert "--- chats.jsonl:2\n" in row and "[[thus<|im_end|>]]" in row


def test_stats_count_and_draw(chats, capsys, tmp_path):
    """Rows used and left out, by source and format, lengths, and a picture of them."""
    assert main(["data", "stats", *chats, "picture=lengths.png"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    numbers = {name.strip(): text.strip() for name, text in lines.items()}
    assert (numbers["rows"], numbers["used"], numbers["left out"]) == ("3", "2", "1 malformed")
    assert numbers["documents"] == "2" and numbers["duplicates"].startswith("0 ")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_preprocess_keeps_what_is_there(tmp_path, monkeypatch, capsys):
    """Both files are written; a second run is refused unless it may replace them; malformed rows are listed beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"text": 3}\n')
    command = ["preprocess", "sources=[texts.jsonl]", "out=corpus/one", "workers=1"]
    assert main(command) == 0
    assert capsys.readouterr().out == "corpus/one.bin\ncorpus/one.idx\n"
    listed = json.loads((tmp_path / "corpus" / "one.malformed.jsonl").read_text())
    assert (listed["line"], listed["source"]) == (2, "texts.jsonl")
    assert main(command) == 2
    assert "cannot write corpus/one.bin and corpus/one.idx: it exists" in capsys.readouterr().err
    assert main([*command, "overwrite=true"]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["data"], "there are `mpar data show` and `mpar data stats`"),
        (["data", "shwo"], "mpar data shwo: there are"),
        (["data", "show", "rows=0"], "rows"),
        (["data", "show", "data=jsonl", "data.sources=[missing.jsonl]"], "no such file"),
        (["data", "stats", "dta.seq_len=3"], "data.seq_len"),
        (["preprocess", "sources=[missing.txt]", "out=x"], "no such file"),
        (["preprocess", "out=x"], "sources"),
        (["preprocess", "sources=[x.txt]", "out=/tmp"], "/tmp is a folder"),
        (["data", "stats", "picture=lengths.doc"], "a picture ends in .png, .svg, .pdf"),
        (["data", "stats", "picture=nowhere/lengths.png"], "there is no folder"),
        (["data", "stats", "data=jsonl", "data.sources=[rows.jsonl#-3]"], "behind # stands a whole number of rows"),
    ],
    ids=str,
)
def test_wrong_command_lines(args, message, capsys, tmp_path, monkeypatch):
    """Each is refused with what is wrong, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    assert main(args) != 0
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
