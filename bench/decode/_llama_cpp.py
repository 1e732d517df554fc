"""llama.cpp: the ceiling of decode on a CPU, by node-llama-cpp, with the same weights in the same dtype.

It needs Node.js, `npm install node-llama-cpp` in some folder, and `pip install gguf`.
"""

import importlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.decode._case import Shape, Workload

__all__ = ["LlamaCpp"]

_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class LlamaCpp:
    """A process that answers with a model of transformers; to call it answers a workload. folder: where node-llama-cpp is."""

    def __init__(self, peer: transformers.PreTrainedModel, shape: Shape, folder: Path) -> None:
        if not (folder / "node_modules" / "node-llama-cpp").is_dir():
            raise FileNotFoundError(f"no node-llama-cpp in {folder}: run `npm install node-llama-cpp` there")
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "model.gguf"
        _write(path, peer, shape)
        script = Path(__file__).with_name("llama_cpp.mjs")
        command = ["node", script, folder, path, torch.get_num_threads(), shape.length]
        self._process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, workload: Workload, vocab_size: int) -> list[list[int]]:
        """The tokens of the answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": workload.prompts(vocab_size), "answers": workload.answers}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp has ended with status {self._process.wait()}; what it said is on stderr")
        return json.loads(line)


def _write(path: Path, peer: transformers.PreTrainedModel, shape: Shape) -> None:
    """The model as a GGUF file, whose vocabulary has names without meaning."""
    gguf: Any = importlib.import_module("gguf")
    config, kind = peer.config, str(shape.config["model_type"])
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(config.vocab_size - 1)
    stored = gguf.GGMLQuantizationType.BF16 if shape.dtype == torch.bfloat16 else gguf.GGMLQuantizationType.F32
    for name, x in peer.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = (_in_pairs(x, name, config) if kind == "llama" else x).float().numpy()
        dtype = stored if x.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_renamed(name), gguf.quants.quantize(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    _, _, layer, inside = name.split(".", 3)
    matrix, _, leaf = inside.rpartition(".")
    return f"blk.{layer}.{_MATRICES[matrix]}.{leaf}"


def _in_pairs(x: Tensor, name: str, config: transformers.PretrainedConfig) -> Tensor:
    """Queries and keys of Llama as llama.cpp rotates them: what RoPE rotates together are neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else x
