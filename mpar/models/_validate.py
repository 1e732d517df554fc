"""Validate: whether vLLM, SGLang, llama.cpp's converter and transformers will load a folder as what it is.

They read the same files with different care: one refuses what another guesses, and a third loads it without a word and answers
nonsense. So a folder should leave nothing to guess. Only headers of weights are read.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpar.errors import CheckpointError, ConfigError
from mpar.models._build import from_config
from mpar.models.architectures import ARCHITECTURES
from mpar.models.hf import DTYPES, INDEX, SINGLE, HfReader, open_weights, read_json

__all__ = ["folder_problems"]

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embeddings.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")


def folder_problems(folder: Path) -> list[str]:
    """What is wrong with a folder of Hugging Face, a sentence each; empty if nothing is."""
    try:
        config = read_json(folder / "config.json")
    except CheckpointError as error:
        return [str(error)]
    problems = [*_config_problems(config)]
    tensors: dict[str, tuple[str, list[int]]] = {}
    try:
        files = _files(folder)
        for file in files:
            with open_weights(folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no dict
                    view = opened.get_slice(name)
                    tensors[name] = view.get_dtype(), view.get_shape()
    except CheckpointError as error:
        return [*problems, str(error)]
    problems += [*_file_problems(folder, files, tensors), *_weight_problems(config, tensors), *_names_problems(folder, config)]
    return [*problems, *_tokenizer_problems(folder, config), *_generation_problems(folder, config)]


def _files(folder: Path) -> list[str]:
    """The files of weights that a reader opens."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    mapped = read_json(folder / INDEX).get("weight_map")
    if not isinstance(mapped, Mapping):
        raise CheckpointError(f"cannot read {folder / INDEX}: it has no weight_map")
    return sorted({str(file) for file in mapped.values()})


def _config_problems(config: Mapping[str, object]) -> Iterator[str]:
    architectures, dtype = config.get("architectures"), config.get("dtype", config.get("torch_dtype"))
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        yield f"config.json: architectures is {architectures!r}; vLLM needs the name of one class, such as ['LlamaForCausalLM']"
    if not isinstance(config.get("model_type"), str):
        yield "config.json: model_type is missing"
    if dtype is None:
        yield "config.json: neither dtype nor torch_dtype says in which dtype the model computes; readers take float32 or guess"
    elif str(dtype) not in {str(known).removeprefix("torch.") for known in DTYPES.values()}:
        yield f"config.json: the dtype {dtype!r} is none of floating-point numbers"


def _file_problems(folder: Path, files: list[str], tensors: Mapping[str, Any]) -> Iterator[str]:
    """Files that readers would load as well, or miss; an index that does not say what is there."""
    strangers = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in files)
    if strangers:
        yield f"{', '.join(strangers[:3])}: weights that no index names; readers without an index load them, too"
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        yield f"{', '.join(pickled[:3])}: pickled files, which some readers take for weights"
    if not (folder / INDEX).is_file():
        return
    index = read_json(folder / INDEX)
    mapped, metadata = index["weight_map"], index.get("metadata")
    assert isinstance(mapped, Mapping)
    missing, unnamed = sorted(set(mapped) - set(tensors)), sorted(set(tensors) - set(mapped))
    if missing:
        yield f"{INDEX} names {', '.join(missing[:3])}, which no file has"
    if unnamed:
        yield f"{INDEX} does not name {', '.join(unnamed[:3])}, which the files have; they are not read"
    sizes = {name: _num_bytes(*entry) for name, entry in tensors.items()}
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if total != sum(sizes.values()):
        yield f"{INDEX}: total_size is {total}, the tensors have {sum(sizes.values())} bytes"


def _num_bytes(dtype: str, shape: list[int]) -> int:
    count = DTYPES[dtype].itemsize if dtype in DTYPES else 1
    for size in shape:
        count *= size
    return count


def _weight_problems(config: Mapping[str, object], tensors: Mapping[str, tuple[str, list[int]]]) -> Iterator[str]:
    """Tensors that do not fit what config.json says."""
    heads = [name for name in tensors if name.endswith(_HEADS)]
    tied, vocab_size = bool(config.get("tie_word_embeddings", False)), config.get("vocab_size")
    if tied and heads:
        yield f"tie_word_embeddings is true, and there is {heads[0]}: some readers use it, others do not"
    for name, (_, shape) in tensors.items():
        if name.endswith((*_EMBEDDINGS, *_HEADS)) and shape[0] != vocab_size:
            yield f"{name} has {shape[0]} rows, vocab_size is {vocab_size}"
    dtype = str(config.get("dtype", config.get("torch_dtype")))
    stored = sorted({str(DTYPES[code]).removeprefix("torch.") for code, _ in tensors.values() if code in DTYPES})
    if len(stored) == 1 and dtype not in ("None", stored[0]):
        yield f"config.json says {dtype}, all tensors are {stored[0]}"


def _names_problems(folder: Path, config: Mapping[str, object]) -> Iterator[str]:
    """Tensors that the architecture does not have, or lacks, by mpar's declaration of it, if there is one."""
    if config.get("model_type") not in ARCHITECTURES:
        return
    try:
        with HfReader(from_config(config), folder):
            pass
    except ConfigError as error:
        yield f"config.json: {error}"
    except CheckpointError as error:
        yield str(error)


def _tokenizer_problems(folder: Path, config: Mapping[str, object]) -> Iterator[str]:
    if not (folder / "tokenizer.json").is_file():
        yield "tokenizer.json is missing: servers have no text without it"
        return
    try:
        content = read_json(folder / "tokenizer.json", 2**27)
    except CheckpointError as error:
        yield str(error)
        return
    ids = _ids(content)
    vocab_size = config.get("vocab_size")
    if ids and isinstance(vocab_size, int) and max(ids.values()) >= vocab_size:
        last = max(ids, key=lambda token: ids[token])
        yield f"tokenizer.json: the token {last!r} has id {ids[last]}, vocab_size is {vocab_size}"
    if not (folder / "tokenizer_config.json").is_file():
        yield "tokenizer_config.json is missing: transformers does not know which tokens are special"
        return
    settings = read_json(folder / "tokenizer_config.json")
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(token, str) and ids and token not in ids:
            yield f"tokenizer_config.json: {name} is {token!r}, which tokenizer.json does not have"


def _ids(content: Mapping[str, Any]) -> dict[str, int]:
    """The id of each token in a tokenizer.json."""
    vocab = content.get("model", {}).get("vocab", {})
    ids = dict(vocab) if isinstance(vocab, Mapping) else {entry[0]: i for i, entry in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _generation_problems(folder: Path, config: Mapping[str, object]) -> Iterator[str]:
    """An end of answers that no reader finds: then they never end."""
    settings: Mapping[str, object] = {}
    if (folder / "generation_config.json").is_file():
        try:
            settings = read_json(folder / "generation_config.json")
        except CheckpointError as error:
            yield str(error)
    value = settings.get("eos_token_id", config.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    vocab_size = config.get("vocab_size")
    outside = [i for i in ids if not isinstance(i, int) or (isinstance(vocab_size, int) and not 0 <= i < vocab_size)]
    if outside:
        yield f"eos_token_id is {json.dumps(value)}, vocab_size is {vocab_size}"
    has_token = (folder / "tokenizer_config.json").is_file() and "eos_token" in read_json(folder / "tokenizer_config.json")
    if value is None and not has_token:
        yield "nothing says what ends an answer: no eos_token_id in generation_config.json or config.json, no eos_token"
