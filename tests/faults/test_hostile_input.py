"""Files made to harm whoever reads them: each is refused in bounded time and memory, by a message that names the file."""

import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from mpar import data
from tests.cli.conftest import SMALL, environment

GOOD = b'{"query": "q", "response": "a"}\n'
MODEL = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
SHORT = [word for word in SMALL if not word.startswith("model.")]
MOST_CPU_S = 10.0  # of a slow machine; a fast one takes half of it at most
MOST_RSS_BYTES = 2**30

Make = Callable[[pathlib.Path], None]
"""Makes the hostile file at a path."""


def write(content: bytes | str | Callable[[], bytes]) -> Make:
    """A file with this content."""

    def make(path: pathlib.Path) -> None:
        value = content() if callable(content) else content
        path.write_bytes(value.encode() if isinstance(value, str) else value)

    return make


def sparse(path: pathlib.Path) -> None:
    """A file of 1 GiB without a line break, which takes no space."""
    with path.open("wb") as file:
        file.truncate(2**30)


def zeros(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: pathlib.Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


KINDS: dict[str, Make] = {
    "pipe": os.mkfifo, "device": zeros, "socket": listening, "folder": pathlib.Path.mkdir, "1 GiB": sparse,
}  # fmt: skip
"""What may be where a regular file should be."""
SOME_KINDS = {name: KINDS[name] for name in ("pipe", "1 GiB")}


def config(**changed: object) -> Make:
    return write(json.dumps({**MODEL, **changed}))


def tensors(header: bytes, size: int | None = None) -> Make:
    return write(struct.pack("<Q", len(header) if size is None else size) + header)


def laughs() -> bytes:
    """Nine levels of nine aliases each, a billion values."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join(levels).encode()


def interpolations() -> bytes:
    """A name whose length doubles forty times."""
    text = "\n".join(f"x{i}: ${{schedule.options.x{i - 1}}}${{schedule.options.x{i - 1}}}" for i in range(1, 41))
    inner = "\n".join(f"    {line}" for line in f"x0: xxxxxxxxxxxxxxxx\n{text}".splitlines())
    return f"# @package _global_\nschedule:\n  options:\n{inner}\n".encode()


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
ROWS: dict[str, Make] = {
    **KINDS,
    "deep": write(b'{"query": ' + b"[" * 2**20 + b"\n"),
    "deep and long": write(b"[" * 2**23 + b"\n"),
    "small lists": write(b"[" + b"[]," * (2**21) + b"[]]\n"),
    "digits": write(b'{"query": ' + b"9" * 2**20 + b', "response": "a"}\n'),
    "NaN": write(b'{"query": NaN, "response": "a"}\n'),
    "infinity": write(b'{"query": -1e999, "response": "a"}\n'),
    "not UTF-8": write(b'{"query": "\xff", "response": "a"}\n'),
    "zero bytes": write(b"\0" * 2**20 + b"\n"),
    "surrogate": write(b'{"query": "\\ud800", "response": "a"}\n'),
    "surrogate in a key": write(b'{"\\ud800": "q"}\n'),
    "surrogate in a tool": write(b'{"query": "q", "tools": ["\\udfff"], "response": "\\udfff"}\n'),
    "keys twice": write(b'{"query": "q", "query": "p", "response": "a"}\n'),
    "role of a million letters": write(b'{"messages": [{"role": "' + b"r" * 2**20 + b'", "content": "q"}]}\n'),
    "a million bad lines": write(b"x\n" * 2**20),
    "another encoding": write(GOOD.decode().encode("utf-16")),
}
LISTS: dict[str, Make] = {
    "deep": write(b"[" * 2**22),
    "long string": write(b'["' + b"x" * 2**25 + b'"]'),
    "many": write(b"[" + b"{}," * 2**20),
    "cut": write(b'[{"query": "q", '),
    "spaces": write(b" " * 2**26),
}
TEMPLATES: dict[str, Make] = {
    **SOME_KINDS,
    "endless": write(LOOP),
    "text of ten billion letters": write("{{ 'a' * 10**10 }}"),
    "list of ten billion": write("{{ ([0] * 10**10) | length }}"),
    "doubling": write(
        "{% set x = namespace(v='aaaaaaaa') %}{% for i in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}"
    ),
    "power": write("{{ 10 ** (10 ** 9) }}"),
    "deep": write("{{ " + "(" * 10_000 + ")" * 10_000 + " }}"),
    "blocks": write("{% if 1 %}" * 200 + "{% endif %}" * 200),
    "not UTF-8": write(b"\xff"),
    "long": write("x" * 2**20),
    "digits": write("{{ " + "9" * 100_000 + " }}"),
}
CONFIGS: dict[str, Make] = {
    **KINDS,
    "layers": config(num_hidden_layers=10**9),
    "hidden": config(hidden_size=10**18),
    "digits": write(json.dumps(MODEL)[:-1] + ', "vocab_size2": ' + "9" * 10**5 + "}"),
    "head": config(head_dim=10**9),
    "NaN": write(json.dumps({**MODEL, "hidden_size": float("nan")})),
    "infinity": write(json.dumps({**MODEL, "rms_norm_eps": float("inf")})),
    "keys twice": write(json.dumps(MODEL)[:-1] + ', "vocab_size": 4}'),
    "unknown keys": config(**{f"k{i}": "v" * 1000 for i in range(10_000)}),
    "deep": write(b'{"rope_scaling": ' + b'{"a": ' * 10**5),
    "list": write("[]"),
    "small lists": write(b'{"a": [' + b"[]," * (5 * 10**6) + b"[]]}"),
    "not UTF-8": write(b"\xff\xfe"),
}
WEIGHTS: dict[str, Make] = {
    **KINDS,
    "empty": write(b""),
    "header larger than the file": tensors(b"{}", 2**63),
    "header of 1 GB": tensors(b"{}", 2**30),
    "no JSON": tensors(b"x" * 100),
    "deep": tensors(b'{"a":' * 10**5),
    "negative": tensors(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}'),
    "outside": tensors(b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}'),
    "overflow": tensors(b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296, 4294967296], "data_offsets": [0, 0]}}'),
}
TOKENIZERS: dict[str, Make] = {
    **SOME_KINDS, "list": write("[]"), "deep": write("[" * 10**6),
    "values": write('{"model": {"type": "BPE", "x": [' + "0," * 10**7 + "0]}}"),
}  # fmt: skip
EXPERIMENTS: dict[str, Make] = {
    **SOME_KINDS,
    "laughs": write(laughs),
    "interpolations": write(interpolations),
    "contains itself": write("a: &a [*a]"),
    "deep": write("a: " + "[" * 10_000),
    "long": write("a:\n" + "- 1\n" * 10**5),
    "digits": write("steps: " + "9" * 10_000),
    "not UTF-8": write(b"steps: \xff"),
    "tag": write("steps: !!python/object/apply:os.system [id]"),
    "itself": write("defaults: [mine]"),
}
INDICES: dict[str, Make] = {
    **SOME_KINDS,
    "outside": write('{"weight_map": {"a": "../../secret"}}'),
    "absolute": write('{"weight_map": {"a": "/dev/zero"}}'),
    "no names": write('{"weight_map": {"a": {"b": 1}}}'),
    "many": write(lambda: json.dumps({"weight_map": {f"t{i}": f"f{i}" for i in range(10**5)}}).encode()),
}
TABLES: dict[str, Make] = {**SOME_KINDS, "zero bytes": write(b"\0" * 1000), "not UTF-8": write(b"\xff")}

OF_FOLDER = ["model=hf", "model.path={folder}/model", "model.random_init=true"]
PLACES: dict[str, tuple[str, dict[str, Make], list[str]]] = {
    "rows": ("rows.jsonl", ROWS, ["data=jsonl", "data.sources=[{file}]"]),
    "list": ("rows.json", LISTS, ["data=jsonl", "data.sources=[{file}]"]),
    "text": ("text.txt", SOME_KINDS, ["task=pt", "data=jsonl", "data.sources=[{file}]"]),
    "template": ("model/chat_template.jinja", TEMPLATES, ["data.tokenizer={folder}/model"]),
    "tokenizer": ("model/tokenizer.json", TOKENIZERS, ["data.tokenizer={folder}/model"]),
    "tokenizer_config": ("model/tokenizer_config.json", SOME_KINDS, ["data.tokenizer={folder}/model"]),
    "config": ("model/config.json", CONFIGS, OF_FOLDER),
    "generation": ("model/generation_config.json", SOME_KINDS, OF_FOLDER),
    "experiment": ("own/experiment/mine.yaml", EXPERIMENTS, ["--config-dir", "{folder}/own", "experiment=mine"]),
    "weights": ("model/model.safetensors", WEIGHTS, []),
    "index": ("model/model.safetensors.index.json", INDICES, []),
    "table": ("table.csv", TABLES, ["schedule.table={file}", "mesh.pp=2"]),
}
"""For each input: where its file is, what may be in it, and the arguments of `mpar train` that read it; `mpar generate` reads
weights."""
CASES = [(place, name) for place, (_, made, _) in PLACES.items() for name in made]


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[list[str]], dict]]:
    """Run `mpar ARGUMENTS` in a fork of a process that has imported mpar; what became of it."""
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.hostile_worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip

    def ask(arguments: list[str]) -> dict:
        worker.stdin.write(json.dumps(arguments) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    with worker:
        yield ask
        worker.stdin.close()


@pytest.mark.cases(8)
@pytest.mark.parametrize(("place", "name"), CASES, ids=[f"{place}: {name}" for place, name in CASES])
def test_hostile_file_is_refused(ask, tmp_path, place, name):
    """In less than ten seconds of computing and one GiB, by an error of mpar that fits on a screen and names the file."""
    file, made, arguments = PLACES[place]
    data.byte_tokenizer().save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    made[name](path)
    words = [word.format(folder=tmp_path, file=path) for word in arguments]
    train = ["train", *SHORT, "mesh=one", *words, "strategy=ddp", "steps=1", f"run_dir={tmp_path}/run"]
    done = ask(train if words else ["generate", f"path={tmp_path}/model", "prompt=hi"])
    text = done["output"]
    assert done["code"] in (1, 2), text[-2000:]
    assert "Traceback" not in text and len(text) < 4000 and len(text.splitlines()) < 25, text[:3000]
    assert str(path) in text or str(tmp_path / "own") in text or "folder" in name, text
    assert done["cpu_s"] < MOST_CPU_S and done["rss_bytes"] < MOST_RSS_BYTES, done
    assert not (tmp_path / "run").exists()
