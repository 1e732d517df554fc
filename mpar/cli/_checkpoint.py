"""`mpar checkpoint`: verifies, shows, compares and converts checkpoints."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mpar import checkpoint
from mpar.checkpoint import Json, Reader
from mpar.checkpoint.dcp import from_dcp, to_dcp
from mpar.cli._later import later
from mpar.cli._screen import say, say_aside
from mpar.errors import CheckpointError, ConfigError

__all__ = ["main"]

_HELP = """usage: mpar checkpoint COMMAND PATH ...

  verify PATH...          read all of each checkpoint and compare every checksum; of a folder of Hugging Face, see whether vLLM,
                          SGLang, llama.cpp's converter and transformers load it as what it is
  show PATH...            step, mesh, and a table of tensors with shape, dtype and norm; --no-norms reads no tensors
  diff A B                what differs: values of the configuration, names, shapes, and values of tensors
  to-dcp PATH OUT         write a checkpoint as a folder of torch.distributed.checkpoint
  from-dcp PATH OUT       read such a folder, whose metadata are a pickle (of which only DCP's own classes are made), and write
                          a checkpoint; --step N says of which step it is

PATH is the folder of a checkpoint (step_00000020), or of a run, whose newest is taken.
Exit code: 0; 1 if a checkpoint is damaged, or two differ; 2 if the command is not understood."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"mpar checkpoint: {message}.\n{_HELP}")


def main(args: Sequence[str]) -> int:
    """Run a command on checkpoints; returns the exit code."""
    if not args or not {"-h", "--help"}.isdisjoint(args):
        say(_HELP)
        return 0
    parser = _Parser(prog="mpar checkpoint", add_help=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name in ("verify", "show"):
        commands.add_parser(name, add_help=False).add_argument("paths", nargs="+", type=Path)
    commands.choices["show"].add_argument("--no-norms", action="store_true")
    for name, operands in (("diff", ("a", "b")), ("to-dcp", ("path", "out")), ("from-dcp", ("path", "out"))):
        for operand in operands:
            (commands.choices.get(name) or commands.add_parser(name, add_help=False)).add_argument(operand, type=Path)
    commands.choices["from-dcp"].add_argument("--step", type=int, default=None)
    parsed = parser.parse_args(list(args))
    match parsed.command:
        case "verify":
            return max([_verify(path) for path in parsed.paths])
        case "show":
            return max([_show(_newest(path), norms=not parsed.no_norms) for path in parsed.paths])
        case "diff":
            return _diff(_newest(parsed.a), _newest(parsed.b))
        case "to-dcp":
            with _Bytes("written", _size(path := _newest(parsed.path))) as progress:
                to_dcp(path, parsed.out, progress)
        case _:
            with _Bytes("read", None) as progress:
                left_out = from_dcp(parsed.path, parsed.out, parsed.step, progress)
            names = ", ".join(map(repr, left_out))
            say_aside(f"left out, as they are no tensors: {names}" if left_out else "all of it was converted")
    say(str(parsed.out))
    return 0


def _verify(given: Path) -> int:
    """Verify one checkpoint, and say the outcome; the others are verified even if it is damaged."""
    path = given
    if (given / "config.json").is_file() and not (given / "checkpoints").exists():
        return _validate(given)
    try:
        path = _newest(given)
        with _Bytes("verified", _size(path)) as progress:
            checkpoint.verify(path, progress)
    except CheckpointError as error:
        say(f"{path}: not sound\n{error}")
        return 1
    with Reader(path) as source:
        say(f"{path}: sound, step {source.step}, {len(source.tensors)} tensors, {_bytes(_size(path))}, format {source.version}")
    return 0


def _validate(folder: Path) -> int:
    """Say whether other programs will load a folder of Hugging Face as what it is."""
    problems = later("mpar.models").folder_problems(folder)
    say("\n  ".join([f"{folder}: {'not sound' if problems else 'sound, a folder of Hugging Face'}", *problems]))
    return 1 if problems else 0


def _show(path: Path, *, norms: bool) -> int:
    with Reader(path) as source, _Bytes("read", _size(path) if norms else 0) as progress:
        config = source.extras.get("config")
        rows = [("tensor", "shape", "dtype", "shards", "norm")]
        for name, tensor in source.tensors.items():
            norm = f"{checkpoint.norm(source, name, progress):.6g}" if norms else "-"
            rows.append((name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."), str(tensor.num_shards), norm))
        count = sum(math.prod(tensor.shape) for tensor in source.tensors.values())
        extras = {key: value for key, value in source.extras.items() if key not in ("config", "step")}
    say(f"{path}\nstep {source.step}, saved from {source.mesh}, format {source.version}")
    say(_printable("\n".join(f"{key}: {_short(value)}" for key, value in extras.items())))
    if isinstance(config, dict):
        say(f"configuration: {len(config)} keys")
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    say("\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows))
    say(f"{len(source.tensors)} tensors, {count:,} values, {_bytes(_size(path))}")
    return 0


def _diff(one: Path, other: Path) -> int:
    """Say what differs between two checkpoints; 0 if nothing does."""
    lines, equal = [], 0
    with Reader(one) as a, Reader(other) as b:
        lines += [f"{key}: {_short(old)} -> {_short(new)}" for key, old, new in checkpoint.extras_differences(a.extras, b.extras)]
        lines += [f"{name}: only in {one}" for name in a.tensors if name not in b.tensors]
        lines += [f"{name}: only in {other}" for name in b.tensors if name not in a.tensors]
        both = [name for name in a.tensors if name in b.tensors]
        with _Bytes("compared", 2 * sum(a.tensors[name].num_bytes for name in both)) as progress:
            for name in both:
                old, new = a.tensors[name], b.tensors[name]
                if (old.shape, old.dtype) != (new.shape, new.dtype):
                    lines.append(f"{name}: {old.dtype} {list(old.shape)} -> {new.dtype} {list(new.shape)}")
                elif (difference := checkpoint.tensor_difference(a, b, name, progress)) is None:
                    equal += 1
                else:
                    figures = f"largest difference {difference.max_abs:.4g}, relative norm {difference.relative_norm:.4g}"
                    lines.append(f"{name}: {figures}")
    title = f"{one} (step {a.step}, saved from {a.mesh}) -> {other} (step {b.step}, saved from {b.mesh})"
    say(_printable("\n".join([title, *lines, f"{equal} of {len(both)} tensors that both have are equal in every bit"])))
    return 1 if lines else 0


def _newest(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest one of a run or of a folder of checkpoints, sound or not."""
    for folder in (path / "checkpoints", path):
        found = checkpoint.named(folder)
        if found:
            return found[-1]
    return path


def _size(path: Path) -> int:
    with Reader(path) as source:
        return sum(tensor.num_bytes for tensor in source.tensors.values())


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _short(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _printable(text: str) -> str:
    """`text` with everything escaped that a terminal would act on, or that cannot be encoded."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class _Bytes:
    """A bar of bytes on a terminal, which the library's functions tell how many more were read; elsewhere nothing is shown."""

    def __init__(self, verb: str, total: int | None) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(verb), DownloadColumn(), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task(verb, total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        return lambda size: self._progress.advance(self._task, size)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
