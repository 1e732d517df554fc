"""Steps of inference that are recorded and replayed, with a recording that is none: the memory that a CUDA graph would use."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpar import Mesh, models, tree
from mpar.errors import ConfigError
from mpar.infer import Engine, Sampling, Sizes
from mpar.infer.compile import ProgramRunner, compile_decode
from mpar.kernels import Kernels
from mpar.program import Program, RankRun, Replay
from mpar.runtime import ALONE, _bind

SIZES = Sizes(rows=4, tokens=12, pages=40, page_size=4, length=48)
PROMPTS = [[1, 5, 2], [7], list(range(3, 19)), [4] * 9, [60, 0]]
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


class Recorded(ProgramRunner):
    """A runner whose programs are recorded by keeping the function."""

    def _bound(self, program: Program) -> Replay:
        return Replay(RankRun(program, ALONE), capture=lambda work, given: lambda: work() is None)


class Copies(TorchDispatchMode):
    """The sizes of all copies into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def answers(runner):
    """Greedy answers to all prompts, with their log-probabilities."""
    engine = Engine(runner)
    requests = [engine.add(prompt, Sampling(max_tokens=6, num_alternatives=0)) for prompt in PROMPTS]
    list(engine.run())
    return [request.chosen for request in requests]


def test_recorded_steps_are_the_steps():
    """Programs for several numbers of tokens, recorded one by one, share a state that stays where it is, and is not copied; the
    same tokens and bits, also with other parameters."""
    model = models.build("llama", SMALL)
    plain, recorded = ProgramRunner(model, model.init(0), SIZES), Recorded(model, model.init(0), SIZES, execution="cuda_graph")
    assert answers(recorded) == answers(plain)
    assert all(run.replay is not None for count, run in recorded._runs.items()), "every program was recorded"
    places = {path: leaf.data_ptr() for path, leaf in recorded.state.leaves.items()}
    with Copies() as copies:
        assert answers(recorded) == answers(plain)
    assert {path: leaf.data_ptr() for path, leaf in recorded.state.leaves.items()} == places
    smallest = min(leaf.numel() for path, leaf in recorded.state.leaves.items() if path.startswith("state."))
    assert copies.sizes and max(copies.sizes) < smallest
    for runner in (plain, recorded):
        runner.load(dict(tree.leaves_with_path(model.init(1))))
    assert answers(recorded) == answers(plain)


def test_a_step_with_kernels_can_be_recorded():
    """With the kernel of paged attention nothing reads data on the host; its reference does, and is refused by name."""
    model = models.build("llama", SMALL | {"head_dim": 64})
    sizes = models.CacheSizes(tokens=4, rows=4, pages_per_row=6, page_size=16, num_pages=25)
    on_chip = torch.device("cuda")
    program = compile_decode(model, Mesh(tp=1), "tp", sizes, precision="bf16", kernels=Kernels("auto", "sm_90"))
    _bind._check_arguments(program, on_chip, None, None, "cuda_graph")
    program = compile_decode(model, Mesh(tp=1), "tp", sizes, precision="bf16", kernels=Kernels("torch", "sm_90"))
    with pytest.raises(ConfigError, match="the references of paged_attention read data on the host"):
        _bind._check_arguments(program, on_chip, None, None, "cuda_graph")
