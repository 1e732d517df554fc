"""A model that answers: from a folder of Hugging Face, perhaps of quantised weights, and folders of adapters, on any mesh."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from mpar import adapters, models, tree
from mpar.code_facts import code_facts, digest_of
from mpar.data import Tokenizer
from mpar.errors import CheckpointError, ConfigError
from mpar.infer import Assistant, Sampling, Sizes, end_ids
from mpar.infer.run import Compiling, Kept, anew, divisible_pages, make_runner, num_groups
from mpar.mesh import Mesh
from mpar.models import QUANTISATION, HfReader, Model, Read, Trainable
from mpar.program import Program, check_inductor
from mpar.quantised import QuantisedReader, is_quantised_folder, quantised_as
from mpar.strategy import Strategy
from mpar.train._adapters import adapted_part
from mpar.train._config import ModelConfig
from mpar.train._program_cache import COMPILER_PACKAGES, ProgramCache
from mpar.train._quantised import quantised_part
from mpar.train._setup import model_of

__all__ = ["answer", "load_assistant"]

_LENGTH = 8192  # the most tokens of a prompt and its answer
_PAGE_SIZE = 16
_STEP_TOKENS = 2048  # that one step reads
_BESIDE_TOKENS = 256  # that one step reads while answers go on: they wait for it, and fewer would leave cores idle


def load_assistant(
    folder: Path,
    group: ModelConfig | None = None,
    *,
    rows: int = 1,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
    strategy: Strategy | str = "tp",
    adapter: str | None = None,
    by_name: Mapping[str, str] | None = None,
    execution: str = "eager",
    length: int | None = None,
    compiling: Compiling = nullcontext,
    kept_programs: Path | None = None,
    warn: Callable[[str], object] = lambda text: None,
) -> tuple[Model, Assistant]:
    """The model in an HF `folder`, and an assistant that answers with it up to `rows` requests at the same time.

    group: how the model was made, if the folder alone does not tell because it is a plug-in's. Quantised weights stay so.
    adapter: a folder of PEFT, whose adapter the programs compute beside the weights. by_name: such folders by the names of their
    adapters, of which each request has one or none; ConfigError if both are given, or as `adapters.bank_of`.
    length: how many tokens a prompt and its answer may have together; None: as many as the model was made for, at most 8,192.
    ConfigError if the model has learned fewer positions; `warn` is told if its config states fewer.
    execution: "eager" or "inductor", as `Program.bind` says; compiling: see `ProgramRunner`.
    kept_programs: the folder of compiled programs that are kept from run to run, not those of a plug-in's model; None: nothing is
    kept. `warn` is told what is wrong with the first entry there that is not used.
    mesh, strategy: with several ranks, where parameters are; every process of torch.distributed reads its own. If they are in
    groups, there are as many more rows as make all groups equal.
    """
    mesh = mesh or Mesh(tp=1)
    if adapter is not None and by_name:
        raise ConfigError(
            f"cannot add the adapter {adapter} to all answers and choose among {', '.join(by_name)} for each: a model has the "
            "one or the others.\nGive all of them as adapters=, or merge the first into the model."
        )
    if execution == "inductor":
        check_inductor("cpu")  # reading weights in vain takes long
    plain = _plain(folder, group, dtype)
    model = _with_adapters(plain, folder, adapter, by_name or {})
    with _reading(model, plain, folder, adapter, by_name or {}) as read:
        params = models.read_params(model, read, *((mesh, strategy) if mesh.size > 1 else ()))
    sizes = _sizes(rows, _room(model, length, warn), mesh, strategy)
    kept: Kept = anew
    if kept_programs is not None and (group is None or group.plugin is None):
        kept = _kept(kept_programs, model, warn)
    runner = make_runner(model, params, sizes, mesh, strategy, execution=execution, compiling=compiling, kept=kept)
    return plain, Assistant(runner, Tokenizer.from_folder(folder), end_ids(plain))


def _sizes(rows: int, length: int, mesh: Mesh, strategy: Strategy | str) -> Sizes:
    """The sizes of steps for so many answers at the same time, or a few more, so that all groups have as many."""
    groups = num_groups(mesh, strategy)
    group_rows = -(-rows // groups)
    return Sizes(
        rows=group_rows * groups,
        tokens=max(2 * group_rows, _STEP_TOKENS),
        beside=max(2 * group_rows, _BESIDE_TOKENS),
        length=length,
        pages=divisible_pages(1 + group_rows * -(-length // _PAGE_SIZE), mesh, strategy),
        page_size=_PAGE_SIZE,
        groups=groups,
    )


def answer(folder: Path, questions: Sequence[str], *, max_new_tokens: int, group: ModelConfig | None = None) -> list[str]:
    """The answers of the model in an HF `folder`, always with the likeliest tokens. Each question is asked by itself."""
    _, assistant = load_assistant(folder, group)
    return assistant.answer(questions, Sampling(max_tokens=max_new_tokens))


def _kept(folder: Path, model: Trainable, warn: Callable[[str], object]) -> Kept:
    """What gives the programs of a model: those in `folder`, where all others are then kept."""
    cache, bank = ProgramCache(folder), adapted_part(model)
    columns = bank.columns if isinstance(bank, adapters.AdapterBank) else None  # which ranks belong to which adapter
    leaves = [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in tree.leaves_with_path(model.abstract_params)]
    warned: list[str] = []  # only the first time, as the reason often is that of all programs
    facts = [model.hf_config, repr(model.settings), columns, leaves, code_facts(COMPILER_PACKAGES)]

    def kept(role: str, make: Callable[[], Program]) -> Program:
        key = digest_of([(role, json.dumps(facts, sort_keys=True, default=repr).encode())])
        program, _, problems = cache.find(key, make)
        if problems and not warned:
            warn("; ".join(problems))
        warned.extend(problems)
        return program

    return kept


def _room(model: Trainable, length: int | None, warn: Callable[[str], object]) -> int:
    """How many tokens a prompt and its answer may have."""
    learned, stated = model.max_positions, models.stated_positions(model)
    if length is None:
        return min(_LENGTH, learned or _LENGTH, stated or _LENGTH)
    if learned is not None and length > learned:
        raise ConfigError(f"length={length}: this model has learned {learned} positions, and can take no more tokens than that")
    if stated is not None and length > stated:
        warn(
            f"length={length}: the config of this model says that it was made for {stated} positions; answers behind them are "
            "likely to be worse"
        )
    return length


def _plain(folder: Path, group: ModelConfig | None, dtype: torch.dtype) -> Model:
    """The model in a folder, without adapters and as if its weights were not quantised."""
    if group is None or group.plugin is None:
        ignored = (QUANTISATION,) if is_quantised_folder(folder) else ()
        return models.from_config(folder, dtype=dtype, ignore=ignored)
    model = model_of(group).plain
    if not isinstance(model, Model):
        raise CheckpointError(f"cannot answer with {model.name}: it does not say how its parameters are called in {folder}.")
    return model


def _with_adapters(plain: Model, folder: Path, adapter: str | None, by_name: Mapping[str, str]) -> Trainable:
    """The model with an adapter, or with adapters to choose from, and quantised weights if the folder has them."""
    model: Trainable = plain
    if adapter is not None:
        model = adapters.add(model, adapters.read_lora(adapter))
    elif by_name:
        model = adapters.bank_of(model, {name: adapters.read_lora(path) for name, path in by_name.items()})
    return quantised_as(model, folder) if is_quantised_folder(folder) else model


@contextmanager
def _reading(
    model: Trainable, plain: Model, folder: Path, adapter: str | None, by_name: Mapping[str, str]
) -> Iterator[Read]:
    """What gives the leaves of the model: those of adapters from their folders, all others from the folder of the weights."""
    adapted, made = adapted_part(model), quantised_part(model)
    with ExitStack() as stack:
        source: Read
        if made is not None:
            source = stack.enter_context(QuantisedReader(made, folder))
        else:
            source = stack.enter_context(HfReader(plain, folder)).read_leaf
        reader: adapters.AdapterReader | adapters.BankReader | None = None
        if isinstance(adapted, adapters.AdapterBank):
            reader = stack.enter_context(adapters.BankReader(adapted, by_name))
        elif adapted is not None and adapter is not None:
            reader = stack.enter_context(adapters.AdapterReader(adapted, adapter))
        owned = frozenset(reader.paths) if reader is not None else frozenset()

        def read(path: str, slices: Sequence[slice] | None) -> Tensor:
            if reader is not None and path in owned:
                return reader.read_leaf(path, slices)
            return model.first_leaf(0, path, slices, source)

        yield read
