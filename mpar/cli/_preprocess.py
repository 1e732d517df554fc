"""`mpar preprocess`: tokenises text into indexed files, which `mpar train` and Megatron read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpar.cli._arguments import SWITCHES_HELP, read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._screen import RowProgress, say, say_aside
from mpar.cli._switches import answer_switches
from mpar.data import PreprocessConfig, preprocess, write_malformed
from mpar.errors import ConfigError
from mpar.train import key

__all__ = ["PreprocessKeys", "main"]

_HELP = f"""usage: mpar preprocess sources=[FILE,...] out=NAME [tokenizer=FOLDER] [workers=8] [key=value] ...

Writes NAME.bin and NAME.idx, the files that Megatron's tools/preprocess_data.py writes. Then
  mpar train task=pt data=jsonl data.sources=[NAME] data.tokenizer=FOLDER

{SWITCHES_HELP}"""


@dataclass(frozen=True, kw_only=True)
class PreprocessKeys:
    """The keys of `mpar preprocess`."""

    sources: tuple[str, ...] = key("text: files, folders, globs or addresses; rows have it in a column `text` or `content`")
    out: str = key("the files to write, without .bin and .idx")
    tokenizer: str = key("`bytes`, or a folder with a tokenizer", default="bytes")
    columns: dict[str, str] = key(
        "for names of columns in the files, those that formats have, such as {body: text}", default_factory=dict
    )
    preprocess: str | None = key("module:function of your own, as data.preprocess of mpar train", default=None)
    append_eod: bool = key("end each text with the end-of-text token", default=True)
    workers: int | None = key("processes that tokenise; null: as many as there are cores", default=None, at_least=1)
    overwrite: bool = key("replace files of this name", default=False)
    progress: bool = key("show how far it is, on a terminal", default=True)


def main(args: Sequence[str]) -> int:
    """Preprocess; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "preprocess", PreprocessKeys):
        return 0
    keys, _ = compose_config("preprocess", PreprocessKeys, arguments.overrides, arguments.user_dir)
    there = [f"{keys.out}.{suffix}" for suffix in ("bin", "idx") if Path(f"{keys.out}.{suffix}").exists()]
    if there and not keys.overwrite:
        raise ConfigError(f"cannot write {' and '.join(there)}: it exists. Choose another out=, or set overwrite=true.")
    if Path(keys.out).is_dir():
        raise ConfigError(f"cannot write {keys.out}.bin: {keys.out} is a folder. Choose another out=.")
    workers = keys.workers or len(os.sched_getaffinity(0))
    config = PreprocessConfig(keys.sources, keys.out, keys.tokenizer, keys.columns, keys.preprocess, keys.append_eod, workers)
    with RowProgress("preprocess", shown=keys.progress) as progress:
        report = preprocess(config, progress)
    malformed = Path(f"{keys.out}.malformed.jsonl")
    say_aside(f"{report}")
    if write_malformed(malformed, [report]):
        say_aside(f"malformed rows are listed in {malformed}")
    say(f"{keys.out}.bin\n{keys.out}.idx")
    return 0
