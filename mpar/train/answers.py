"""A model that answers: from a folder of Hugging Face, perhaps of quantised weights, and folders of adapters, on any mesh."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from mpar import adapters, models
from mpar.data import Tokenizer
from mpar.errors import CheckpointError
from mpar.infer import Assistant, Sampling, Sizes, end_ids
from mpar.infer.compile import divisible_pages, make_runner, num_groups
from mpar.mesh import Mesh
from mpar.models import QUANTISATION, HfReader, Model, Read, Trainable
from mpar.quantised import QuantisedReader, is_quantised_folder, quantised_as
from mpar.strategy import Strategy
from mpar.train._adapters import adapted_part
from mpar.train._config import ModelConfig
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
    execution: str = "eager",
) -> tuple[Model, Assistant]:
    """The model in an HF `folder`, and an assistant that answers with it up to `rows` requests at the same time.

    A prompt and its answer may have as many tokens as the model can take, or 8,192. Weights that are quantised stay so. `group`:
    how the model was made, if the folder alone does not tell because it is a plug-in's. adapter: a folder of PEFT, whose adapter
    the programs compute beside the weights. execution: "eager" or "inductor", as `Program.bind` says.
    mesh, strategy: with several ranks, where parameters are; every process of torch.distributed reads its own. If they are in
    groups, there are as many more rows as make all groups equal.
    """
    mesh = mesh or Mesh(tp=1)
    folders = {} if adapter is None else {"default": Path(adapter)}
    plain = _plain(folder, group, dtype)
    model = _with_adapters(plain, folder, folders)
    with _reading(model, plain, folder, folders) as read:
        params = models.read_params(model, read, *((mesh, strategy) if mesh.size > 1 else ()))
    length = min(_LENGTH, model.max_positions or _LENGTH)
    groups = num_groups(mesh, strategy)
    group_rows = -(-rows // groups)
    sizes = Sizes(
        rows=group_rows * groups,
        tokens=max(2 * group_rows, _STEP_TOKENS),
        beside=max(2 * group_rows, _BESIDE_TOKENS),
        length=length,
        pages=divisible_pages(1 + group_rows * -(-length // _PAGE_SIZE), mesh, strategy),
        page_size=_PAGE_SIZE,
        groups=groups,
    )
    runner = make_runner(model, params, sizes, mesh, strategy, execution=execution)
    return plain, Assistant(runner, Tokenizer.from_folder(folder), end_ids(plain))


def answer(folder: Path, questions: Sequence[str], *, max_new_tokens: int, group: ModelConfig | None = None) -> list[str]:
    """The answers of the model in an HF `folder`, always with the likeliest tokens. Each question is asked by itself."""
    _, assistant = load_assistant(folder, group)
    return assistant.answer(questions, Sampling(max_tokens=max_new_tokens))


def _plain(folder: Path, group: ModelConfig | None, dtype: torch.dtype) -> Model:
    """The model in a folder, without adapters and as if its weights were not quantised."""
    if group is None or group.plugin is None:
        ignored = (QUANTISATION,) if is_quantised_folder(folder) else ()
        return models.from_config(folder, dtype=dtype, ignore=ignored)
    model = model_of(group).plain
    if not isinstance(model, Model):
        raise CheckpointError(f"cannot answer with {model.name}: it does not say how its parameters are called in {folder}.")
    return model


def _with_adapters(plain: Model, folder: Path, folders: Mapping[str, Path]) -> Trainable:
    """The model with adapters by their names, and quantised weights if the folder has them."""
    model: Trainable = plain
    for name, path in folders.items():
        model = adapters.add(model, adapters.read_lora(path), name)
    return quantised_as(model, folder) if is_quantised_folder(folder) else model


@contextmanager
def _reading(model: Trainable, plain: Model, folder: Path, folders: Mapping[str, Path]) -> Iterator[Read]:
    """What gives the leaves of the model: those of adapters from their folders, all others from the folder of the weights."""
    adapted, made = adapted_part(model), quantised_part(model)
    with ExitStack() as stack:
        source: Read
        if made is not None:
            source = stack.enter_context(QuantisedReader(made, folder))
        else:
            source = stack.enter_context(HfReader(plain, folder)).read_leaf
        owners: dict[str, Read] = {}
        for name, path in folders.items():
            assert adapted is not None
            reader = stack.enter_context(adapters.AdapterReader(adapted, path, name))
            owners |= dict.fromkeys(reader.paths, reader.read_leaf)
        yield lambda path, slices: owners[path](path, slices) if path in owners else model.first_leaf(0, path, slices, source)
