"""From files to batches: formats, faults, truncation, chunks, names, cache."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch

from mpar import data
from mpar.data import DataConfig, load_dataset
from mpar.data.reading import _json
from mpar.errors import ConfigError, DataError

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def config(*sources, kind="sft", **options):
    return DataConfig(**{"kind": kind, "sources": sources, "batch_size": 2, "seq_len": 256, "shuffle": False, **options})


def texts(batches, tokenizer, what="tokens"):
    """The documents of an epoch as text: their tokens, or their labels without the untrained."""
    found = []
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        for numbers, ids in zip(batch["documents"], batch[what], strict=True):
            for number in range(int(numbers.max()) + 1):
                chosen = ids[numbers == number].tolist()
                found.append(tokenizer.decode([i for i in chosen if i != -100]))
    return found


@pytest.mark.parametrize(
    ("row", "name", "roles"),
    [
        (GOOD, "messages", "ua"),
        ({"query": "q", "response": "a"}, "query/response", "ua"),
        ({"query": "q", "response": "a", "system": "s", "history": [["q", "a"], ["q", "a"]]}, "query/response", "suauaua"),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction/output", "ua"),
        ({"instruction": "q", "output": "a", "system": "s"}, "instruction/output", "sua"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "conversations", "ua"),
    ],
    ids=str,
)
def test_formats(byte_tokenizer, write_rows, row, name, roles):
    """Each format becomes the conversation it stands for and is counted under its name."""
    turns = {"s": ("system", "s"), "u": ("user", "q"), "a": ("assistant", "a")}
    expected = "".join(f"<|im_start|>{turns[r][0]}\n{turns[r][1]}<|im_end|>\n" for r in roles)
    batches = load_dataset(config(write_rows(row)), byte_tokenizer)
    assert texts(batches, byte_tokenizer) == [expected[:-1]]
    assert texts(batches, byte_tokenizer, "labels") == ["a<|im_end|>" * roles.count("a")]
    assert batches.report.formats == {name: 1}


def test_alpaca_input_follows_the_instruction(byte_tokenizer, write_rows):
    """Instruction and input are one message, a line each."""
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    (text,) = texts(load_dataset(config(write_rows(row)), byte_tokenizer), byte_tokenizer)
    assert "user\nAdd.\n1 + 1<|im_end|>" in text


def test_system_is_inserted_once(byte_tokenizer, write_rows):
    """Where there is none; a row's own stays."""
    own = {"messages": [{"role": "system", "content": "own"}, *GOOD["messages"]]}
    found = texts(load_dataset(config(write_rows(GOOD, own), system="default"), byte_tokenizer), byte_tokenizer)
    starts = Counter(text.split("<|im_end|>")[0] for text in found)
    assert starts == {"<|im_start|>system\ndefault": 1, "<|im_start|>system\nown": 1}
    assert all(text.count("system") == 1 for text in found)


BAD = [
    (b"{\n", "not JSON"),
    (b"[1]\n", "a JSON list, not an object"),
    (b'"q"\n', "a JSON str, not an object"),
    (b'{"messages": "\xff"}\n', "not UTF-8"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    (b'{"query": ' + b"9" * 10_000 + b', "response": "a"}\n', "an integer has 10,000 digits"),
    (b'{"query": NaN, "response": "a"}\n', "not JSON: NaN"),
    (b'{"query": 1e999, "response": "a"}\n', "larger than any float"),
    (b'{"query": "q", "query": "p", "response": "a"}\n', "the key 'query' occurs twice"),
    (b'{"query": "' + b"q" * 2**23 + b'", "response": "a"}\n', "more than 8 MiB"),
    ({}, "no known format"),
    ({"text": "plain"}, "no known format"),
    ({"messages": []}, "'messages' is not a list of objects"),
    ({"messages": "q"}, "'messages' is not a list of objects"),
    ({"messages": [1]}, "'messages' is not a list of objects"),
    ({"messages": [{"role": "user", "content": "q"}]}, "no assistant message"),
    ({"messages": [{"role": "asistant", "content": "q"}]}, "role 'asistant'"),
    ({"messages": [{"role": ["user"], "content": "q"}]}, "role ['user']"),
    ({"messages": [{"role": "assistant", "content": None}]}, "content of type NoneType"),
    ({"messages": [{"role": "assistant", "content": [{"text": 3}]}]}, "a block of content that is"),
    (b'{"query": "\\ud800", "response": "a"}\n', "half a surrogate pair"),
    ({"query": "q"}, "no response"),
    ({"query": "q", "response": "a", "history": ["q"]}, "'history'"),
    ({"instruction": "q"}, "no output"),
    ({**GOOD, "tools": "x"}, "'tools' is a str"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_rows_are_counted_and_the_first_is_shown(byte_tokenizer, write_rows, bad, reason):
    """Good rows around a bad one are used; the report has its line and reason."""
    path = write_rows(GOOD, bad, GOOD, b"null\n")
    report = load_dataset(config(path), byte_tokenizer).report
    assert (report.num_rows, report.num_used, report.num_malformed) == (4, 2, 2)
    assert report.first_malformed.startswith(f"{path}:2: ") and reason in report.first_malformed
    assert report.first_malformed in str(report)


def test_rows_that_the_template_refuses_are_counted(byte_tokenizer, write_rows, tmp_path):
    """raise_exception and undefined values concern one row, not the run."""
    byte_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad') }}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    bad = {"query": "bad", "response": "a"}
    report = load_dataset(config(write_rows(GOOD, bad)), data.Tokenizer.from_folder(tmp_path)).report
    assert report.num_malformed == 1 and "no bad" in report.first_malformed


def test_nothing_left_is_an_error(byte_tokenizer, write_rows):
    """With the first reason in it."""
    with pytest.raises(DataError, match=r"(?s)no document is left.*rows\.jsonl:1: not JSON"):
        load_dataset(config(write_rows(b"{\n", b"{\n")), byte_tokenizer)


def test_empty_file_is_an_error(byte_tokenizer, write_rows):
    """No row at all."""
    with pytest.raises(DataError, match="no document is left"):
        load_dataset(config(write_rows()), byte_tokenizer)


def test_line_ends_marks_and_blank_lines(byte_tokenizer, write_rows):
    """CRLF, a byte-order mark, blank lines, U+2028 inside a string and a missing last line end change nothing."""
    row = {"query": "q\u2028", "response": "a"}
    line = json.dumps(row, ensure_ascii=False).encode()
    path = write_rows(b"\xef\xbb\xbf" + line + b"\r\n", b"\r\n", b"  \n", line)
    batches = load_dataset(config(path), byte_tokenizer)
    assert batches.report.num_rows == batches.report.num_used == 2
    assert texts(batches, byte_tokenizer)[0] == texts(load_dataset(config(write_rows(row)), byte_tokenizer), byte_tokenizer)[0]


def test_empty_answer_trains_its_end(byte_tokenizer, write_rows):
    """Saying nothing is an answer."""
    batches = load_dataset(config(write_rows({"query": "q", "response": ""})), byte_tokenizer)
    assert texts(batches, byte_tokenizer, "labels") == ["<|im_end|>"]


@pytest.mark.parametrize(("truncation", "used", "dropped"), [("drop", 1, 2), ("right", 2, 1)])
def test_long_conversations(byte_tokenizer, write_rows, truncation, used, dropped):
    """Dropped, or cut at the end; one whose answer lies beyond the cut is dropped. All are counted."""
    rows = [GOOD, {"query": "q", "response": "a" * 10**6}, {"query": "q" * 10**6, "response": "a"}]
    batches = load_dataset(config(write_rows(*rows), truncation=truncation), byte_tokenizer)
    report = batches.report
    assert (report.num_used, report.num_too_long, report.num_dropped, report.num_malformed) == (used, 2, dropped, 0)
    assert int(batches.documents.lengths.max()) == (
        256 if truncation == "right" else len("<|>user\nq<|>\n<|>assistant\na<|>") - 8
    )


def test_long_conversations_can_be_an_error(byte_tokenizer, write_rows):
    """The row, its length and what fits are named."""
    with pytest.raises(DataError, match=r"rows\.jsonl:2: its conversation has 1\d\d\d tokens, 257 fit"):
        load_dataset(config(write_rows(GOOD, {"query": "q" * 1000, "response": "a"}), truncation="error"), byte_tokenizer)


def test_a_conversation_of_one_more_token_than_positions_fits(byte_tokenizer, write_rows):
    """Its last token is only a label."""
    length = len(byte_tokenizer.apply_chat_template(GOOD["messages"]))
    assert load_dataset(config(write_rows(GOOD), seq_len=length - 1), byte_tokenizer).report.num_too_long == 0
    with pytest.raises(DataError, match=r"1 too long \(1 dropped\)"):
        load_dataset(config(write_rows(GOOD), seq_len=length - 2), byte_tokenizer)


def test_plain_text_predicts_every_token_once(byte_tokenizer, tmp_path):
    """The labels of the chunks put together are the text without its first byte, and the end; inputs follow the text too."""
    text = "".join(chr(0x4E00 + i) for i in range(100)) + "\r\nend"
    (tmp_path / "a.txt").write_bytes(text.encode())
    batches = load_dataset(config(str(tmp_path / "a.txt"), kind="pt", seq_len=64, packing=False), byte_tokenizer)
    batch = {name: torch.cat([batches.batch(i)[name] for i in range(batches.steps_per_epoch)]) for name in ("tokens", "labels")}
    real = batch["labels"] != -100
    ids = [*text.encode(), 258]
    assert batch["tokens"][real].tolist() == ids[:-1]
    assert batch["labels"][real].tolist() == ids[1:]
    assert batches.report.num_trained == batches.report.num_tokens == len(ids) - 1


def test_plain_text_sources(byte_tokenizer, tmp_path, write_rows):
    """Globs in sorted order, json lines with `text`; undecodable and empty files are counted apart."""
    for name, content in [("b.md", b"B"), ("a.md", b"\xef\xbb\xbfA"), ("c.md", b"\xff"), ("d.md", b"")]:
        (tmp_path / name).write_bytes(content)
    rows = write_rows({"text": "J"}, {"text": 1}, {"text": ""}, name="x.jsonl")
    batches = load_dataset(config(str(tmp_path / "*.md"), rows, kind="pt"), byte_tokenizer)
    assert texts(batches, byte_tokenizer) == ["A", "B", "J"]
    report = batches.report
    assert (report.num_rows, report.num_used, report.num_malformed, report.num_empty) == (7, 3, 2, 2)
    assert report.first_malformed == f"{tmp_path / 'c.md'}: not UTF-8: invalid start byte at byte 0"
    assert batches.documents.names == (str(tmp_path / "a.md"), str(tmp_path / "b.md"), f"{rows}:1")


def test_json_list(byte_tokenizer, write_rows):
    """A .json file holds a list of rows."""
    path = write_rows(json.dumps([GOOD, 3, GOOD]).encode(), name="rows.json")
    report = load_dataset(config(path), byte_tokenizer).report
    assert (report.num_used, report.first_malformed) == (2, f"{path}:2: it is a JSON int, not an object")
    with pytest.raises(DataError, match=r"holds a list of rows"):
        load_dataset(config(write_rows(GOOD, name="one.json")), byte_tokenizer)


def test_standard_library(byte_tokenizer):
    """The interpreter's own source is there offline, the same each time, without its tests."""
    load = [load_dataset(config("python-stdlib#5", kind="pt"), byte_tokenizer) for _ in range(2)]
    assert load[0].report.num_used == 5
    assert load[0].fingerprint == load[1].fingerprint
    assert not any("/test/" in name or "site-packages" in name for name in load[0].documents.names)


@pytest.mark.parametrize("limit", [0, 3, 10, 25])
def test_number_of_rows(byte_tokenizer, write_rows, limit):
    """#N takes exactly N usable rows, each as often as the others up to one, the same each time."""
    path = write_rows(*[{"query": "q", "response": chr(97 + i)} for i in range(10)], b"{\n")
    if limit == 0:
        with pytest.raises(DataError, match="no document is left"):
            load_dataset(config(f"{path}#0"), byte_tokenizer)
        return
    batches, again = (load_dataset(config(f"{path}#{limit}"), byte_tokenizer) for _ in range(2))
    counts = Counter(texts(batches, byte_tokenizer, "labels"))
    assert sum(counts.values()) == limit and max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == min(limit, 10) and batches.report.num_malformed == 1
    assert batches.fingerprint == again.fingerprint


def test_repeated_rows_do_not_leak_into_validation(byte_tokenizer, write_rows):
    """A row that is taken twice is on one side of a split."""
    path = write_rows(*[{"query": "q", "response": chr(97 + i)} for i in range(10)])
    train, validation = load_dataset(config(f"{path}#30"), byte_tokenizer).split(0.3)
    sides = [set(texts(side, byte_tokenizer, "labels")) for side in (train, validation)]
    assert (len(sides[0]), len(sides[1]), sides[0] & sides[1]) == (7, 3, set())
    assert (len(train.documents), len(validation.documents)) == (21, 9)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("sft", "missing/*.jsonl", "no such file"),
        ("sft", str(Path(__file__).parent / "megatron"), "the folder has no file that ends in"),
        ("sft", "python-stdlib", "it holds plain text"),
        ("pt", "self-cognition", "it holds conversations"),
        ("sft", __file__, r"kind sft reads \.jsonl, \.json, \.csv"),
    ],
)
def test_sources_that_cannot_be(byte_tokenizer, kind, source, reason):
    """Every source at fault is named with its reason."""
    with pytest.raises(DataError, match=rf"'missing.txt': no such file; '.*': {reason}"):
        load_dataset(config("missing.txt", source, kind=kind, model_name="n", model_author="a"), byte_tokenizer)


def test_settings_are_checked_together(byte_tokenizer):
    """All faults of a configuration are listed at once."""
    wrong = config(
        "self-cognition#5", kind="rl", truncation="cut", token_weights="none", batch_size=0, seq_len=0, seed=-1, model_name=("a",)
    )
    with pytest.raises(ConfigError) as caught:
        load_dataset(wrong, byte_tokenizer)
    for word in (
        "kind='rl'",
        "truncation='cut'",
        "token_weights='none'",
        "batch_size=0",
        "seq_len=0",
        "seed=-1",
        "model_name=",
        "model_author",
    ):
        assert word in str(caught.value)


def test_ids_beyond_the_models_vocabulary(byte_tokenizer, write_rows):
    """Found at loading, with the row, the id and both sizes at hand."""
    path = write_rows(GOOD)
    with pytest.raises(DataError, match=r"vocabulary of 258: .*rows\.jsonl:1 has id 258"):
        load_dataset(config(path), byte_tokenizer, vocab_size=258)


@pytest.mark.parametrize("names", ["Mira", ("米拉", "Mira")], ids=str)
def test_self_cognition_sample(byte_tokenizer, names):
    """All its rows are used and short, half in each language, no placeholder is left, names are in the row's language."""
    batches = load_dataset(config("self-cognition", model_name=names, model_author=("测试组", "the test team")), byte_tokenizer)
    found, answers = texts(batches, byte_tokenizer), texts(batches, byte_tokenizer, "labels")
    chinese = [text for text in found if any("\u4e00" <= c <= "\u9fff" for c in text)]
    assert len(chinese) * 2 == len(found) == len(set(found)) == 128 and batches.report.num_malformed == 0
    assert not any("{{" in text or "}}" in text for text in found)
    assert all("the test team" not in text and (names == "Mira" or "Mira" not in text) for text in chinese)
    assert all("测试组" not in text and "米拉" not in text for text in set(found) - set(chinese))
    assert sum("Mira" in a or "米拉" in a for a in answers) > 40
    raw = resources.files("mpar.data").joinpath("self_cognition.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, raw):
        answer = row["messages"][-1]["content"]
        assert len(answer.encode()) <= (60 if answer.isascii() else 100)


def test_self_cognition_packs_tightly(byte_tokenizer):
    """At most one sequence more than the fewest possible."""
    for seq_len in (256, 512, 1024):
        batches = load_dataset(config("self-cognition", seq_len=seq_len, model_name="M", model_author="A"), byte_tokenizer)
        assert batches.num_sequences <= -(-batches.report.num_tokens // seq_len) + 1


def test_placeholders_stay_in_other_files_unless_names_are_given(byte_tokenizer, write_rows):
    """{{NAME}} may be meant as it stands."""
    path = write_rows({"query": "q", "response": "{{NAME}}"})
    assert texts(load_dataset(config(path), byte_tokenizer), byte_tokenizer, "labels") == ["{{NAME}}<|im_end|>"]
    named = load_dataset(config(path, model_name="Mira"), byte_tokenizer)
    assert texts(named, byte_tokenizer, "labels") == ["Mira<|im_end|>"]


def test_cache_gives_the_same_batches(byte_tokenizer, write_rows, tmp_path):
    """A second load reads the folder; other settings or another content of the file do not."""
    path, cache = write_rows(GOOD, b"{\n"), str(tmp_path / "cache")
    first = load_dataset(config(path, cache_dir=cache), byte_tokenizer)
    second = load_dataset(config(path, cache_dir=cache, batch_size=3, seed=4), byte_tokenizer)
    assert (first.report.cached, second.report.cached) == (False, True)
    assert second.documents.fingerprint == first.documents.fingerprint
    assert second.report.first_malformed == first.report.first_malformed
    assert not load_dataset(config(path, cache_dir=cache, system="s"), byte_tokenizer).report.cached
    write_rows(GOOD, GOOD)
    assert not load_dataset(config(path, cache_dir=cache), byte_tokenizer).report.cached
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_malformed_rows_are_described(byte_tokenizer, write_rows):
    """Source, line, reason, and the first 200 characters; of a row that is read but refused later, too."""
    long = {"messages": [{"role": "user", "content": "x" * 300}]}
    path = write_rows(GOOD, b'{"a": \xff\n', long, GOOD)
    first, second = load_dataset(config(path), byte_tokenizer).report.malformed
    assert (first.file, first.line, first.text) == (path, 2, '{"a": \ufffd')
    assert second.line == 3 and second.text == json.dumps(long)[:200] and second.reason == "no assistant message"


def test_malformed_rows_can_be_an_error(byte_tokenizer, write_rows, tmp_path):
    """With strict, the first ten are listed and reading stops; rows that come from the cache are no exception."""
    path, cache = write_rows(GOOD, *[b"{\n"] * 300, *[GOOD] * 600), str(tmp_path / "cache")
    with pytest.raises(DataError, match=r"data\.strict=true") as caught:
        load_dataset(config(path, strict=True, cache_dir=cache), byte_tokenizer)
    assert [f"rows.jsonl:{line}: not JSON" in str(caught.value) for line in (2, 11, 12)] == [True, True, False]
    assert load_dataset(config(path, cache_dir=cache), byte_tokenizer).report.num_malformed == 300
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not JSON"):
        load_dataset(config(path, strict=True, cache_dir=cache), byte_tokenizer)
    assert load_dataset(config(write_rows(GOOD), strict=True), byte_tokenizer).report.num_malformed == 0


def test_files_that_are_no_data_are_not_read_to_their_end(byte_tokenizer, write_rows):
    """After a thousand malformed rows and none that can be used, reading stops."""
    path = write_rows(*[b"x\n"] * 5000)
    with pytest.raises(DataError, match=r"every row so far is malformed, and reading stopped.\n0 of 1024 rows used"):
        load_dataset(config(path), byte_tokenizer)


def test_list_is_read_in_pieces(byte_tokenizer, write_rows, monkeypatch):
    """Whatever is read at a time, the rows are those of the list, up to the first fault, which says what is wrong."""
    rows = [{"query": "q" * i, "response": "\U0001f600", "score": 1.5e-3 * i} for i in range(40)]
    content = json.dumps(rows, ensure_ascii=False, indent=1)
    path = write_rows(content.encode(), name="rows.json")
    expected = texts(load_dataset(config(write_rows(*rows)), byte_tokenizer), byte_tokenizer)
    monkeypatch.setattr(_json, "_MIN_READ", 3)
    batches = load_dataset(config(path), byte_tokenizer)
    assert texts(batches, byte_tokenizer) == expected and batches.report.num_rows == len(expected) == 40
    for cut, used, reason in [
        (content[:-3], 39, "Expecting"), (content[:-1] + " x", 40, "comma or ]"), (content + "x", 40, "follows"),
    ]:  # fmt: skip
        report = load_dataset(config(write_rows(cut.encode(), name="rows.json")), byte_tokenizer).report
        assert (report.num_used, report.num_malformed) == (used, 1) and reason in report.first_malformed


def test_progress_is_told(byte_tokenizer, write_rows):
    """Rows and tokens so far, the last time all of them."""
    told = []
    load_dataset(config(write_rows(*[GOOD] * 600)), byte_tokenizer, progress=lambda *numbers: told.append(numbers))
    assert [rows for rows, _ in told] == [256, 512, 600]
    assert told[-1][1] == 600 * len(byte_tokenizer.apply_chat_template(GOOD["messages"]))


def test_transformers_is_not_imported():
    """Data works without the `hf` extra."""
    assert importlib.util.find_spec("transformers") is not None
    code = "import sys, mpar.data; mpar.data.byte_tokenizer().encode('a'); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_that_two_sources_name_is_mixed_as_two(byte_tokenizer, write_rows):
    """By weight there are as many rows of each as asked for, and as many documents as rows."""
    path = write_rows(*[{"query": "q", "response": chr(97 + i)} for i in range(10)])
    batches = load_dataset(config(path, f"{path}#5", weights=(0.5, 0.5)), byte_tokenizer)
    assert batches.report.used_of_source == {path: 5, f"{path}#5": 5} and len(batches.documents) == 10
    assert sum(batches.report.tokens_of_source.values()) == batches.report.num_tokens
