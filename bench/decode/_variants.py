"""The variants: mpar, transformers with its kinds of caches, each plain and compiled by Inductor, and llama.cpp."""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from bench.decode._case import Shape, Workload
from bench.decode._llama_cpp import LlamaCpp
from mpar import models, tree
from mpar.infer import Engine, Sampling, Sizes
from mpar.infer.compile import ProgramRunner

__all__ = ["CEILING", "OURS", "VARIANTS", "Answer", "Variants"]

Answer = Callable[[Workload], list[list[int]]]
"""`answer(workload)` gives the tokens of the answers, greedily chosen."""
OURS = {"mpar": "eager", "mpar_inductor": "inductor"}
"""The variants of mpar, and how they execute programs."""
VARIANTS = (*OURS, "hf_dynamic", "hf_static", "hf_dynamic_compiled", "hf_static_compiled")
CEILING = "llama_cpp"
"""A program that is made for inference on CPUs alone. No bar is relative to it; its cache is in float16."""


class Variants:
    """All variants of one shape, from the same weights. `weight_bytes`: of the weights that a step reads whole.

    llama_cpp: the folder in which node-llama-cpp is installed, for the variant CEILING.
    """

    def __init__(self, shape: Shape, names: Sequence[str], llama_cpp: Path | None = None) -> None:
        self.model = models.build(str(shape.config["model_type"]), shape.config).with_dtype(shape.dtype)
        params = self.model.init(0)
        tied = bool(shape.config["tie_word_embeddings"])
        embedding = 0 if tied else params.embed.table_VD.nbytes
        self.weight_bytes = sum(leaf.nbytes for leaf in tree.leaves(params)) - embedding
        self.answers: Mapping[str, Answer] = {name: self._answer(name, params, shape, llama_cpp) for name in names}

    def _answer(self, name: str, params: models.DecoderParams, shape: Shape, llama_cpp: Path | None) -> Answer:
        if name in OURS:
            return self._ours(params, shape, OURS[name])
        if name != CEILING:
            return _peer(self.model, _in_transformers(self.model, params, shape), name)
        assert llama_cpp is not None
        ceiling = LlamaCpp(_in_transformers(self.model, params, shape), shape, llama_cpp)
        return lambda workload: ceiling(workload, self.model.vocab_size)

    def _ours(self, params: models.DecoderParams, shape: Shape, execution: str) -> Answer:
        @functools.cache
        def runner(rows: int) -> ProgramRunner:
            pages = 1 + rows * -(-shape.length // 16)
            sizes = Sizes(rows=rows, tokens=512, pages=pages, length=shape.length)
            return ProgramRunner(self.model, params, sizes, execution=execution)  # answers that are not timed compile programs

        def answer(workload: Workload) -> list[list[int]]:
            engine = Engine(runner(len(workload.answers)))
            engine.forget()
            prompts = workload.prompts(self.model.vocab_size)
            requests = [
                engine.add(prompt, Sampling(max_tokens=count, ignore_eos=True))
                for prompt, count in zip(prompts, workload.answers, strict=True)
            ]
            for _ in engine.run():
                pass
            return [request.answer for request in requests]

        return answer


def _in_transformers(model: models.Model, params: models.DecoderParams, shape: Shape) -> transformers.PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        models.to_hf(model, params, Path(folder) / "model")
        return transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=shape.dtype).eval()


def _peer(model: models.Model, peer: transformers.PreTrainedModel, name: str) -> Answer:
    peer.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    options: dict[str, object] = {"cache_implementation": "static"} if "static" in name else {}
    if name.endswith("compiled"):
        torch._dynamo.config.recompile_limit = 64  # a program that must compile again and again would be no peer
        peer.forward = torch.compile(peer.forward, dynamic=None if "static" in name else True)

    def answer(workload: Workload) -> list[list[int]]:
        tokens = torch.tensor(workload.prompts(model.vocab_size))
        with torch.inference_mode():
            given = peer.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max(workload.answers), **options)
        new = given[:, workload.prompt :].tolist()
        return [row[:count] for row, count in zip(new, workload.answers, strict=True)]

    return answer
