"""One of four processes: trains a small model in several pipelines, evaluates it, and sends messages through grouped channels.

usage: torchrun --nproc-per-node 4 pipeline_worker.py FOLDER (which has the programs of all cases)
"""

import pathlib
import pickle
import sys

import torch
import torch.distributed as dist

from mpar import models
from mpar.compiler import Schedule
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program, batch_rows
from mpar.program.compile import compile_eval, compile_step
from mpar.runtime.comm._channels import Channels, Message
from tests.small_llama import CONFIG

CASES = {  # mesh, strategy, schedule, tied
    "one_f_one_b": (Mesh(pp=4), "ddp", Schedule("one_f_one_b"), False),
    "zbv_tied": (Mesh(pp=4), "ddp", Schedule("zbv"), True),
    "dual_pipe_tied": (Mesh(pp=4), "ddp", Schedule("dual_pipe"), True),
    "interleaved_zero3": (Mesh(pp=2, fsdp=2), "zero3", Schedule("interleaved"), False),
    "zb_h1_zero3_tied": (Mesh(pp=2, fsdp=2), "zero3", Schedule("zb_h1"), True),
    "gpipe_tp_sp": (Mesh(pp=2, tp=2), "tp_sp", Schedule("gpipe"), False),
    "zbv_tp_sp_tied": (Mesh(pp=2, tp=2), "tp_sp", Schedule("zbv"), True),
    "empty_stages": (Mesh(pp=4), "ddp", Schedule("zb_h1", layout=(4, 0, 0, 4)), True),
    "zb_h1_slices": (Mesh(pp=2, fsdp=2), "zero3", Schedule("zb_h1"), False),
}
SLICES = {"zb_h1_slices": 2}
TRANSPORTS = {"backend": "backend", "default": None}
OPTIMIZER = AdamW(lr=1e-2, clip_norm=0.5)
SHAPE, NUM_MICROBATCHES, NUM_STEPS = (16, 8), 8, 3
GROUPED = [(0, 1, "F"), (1, 2, "F"), (2, 3, "F"), (1, 0, "B"), (2, 1, "B"), (3, 2, "B"), (0, 3, "G"), (3, 0, "G")]
NUM_GROUPED = 5


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Random tokens and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(NUM_STEPS):
        tokens, labels = (torch.randint(0, 96, SHAPE, generator=generator) for _ in range(2))
        labels[torch.rand(SHAPE, generator=generator) < 0.2] = -100
        out.append({"tokens": tokens, "labels": labels})
    return out


def make_model(case: str) -> models.Model:
    """Eight layers, in float32."""
    return models.from_config({**CONFIG, "num_hidden_layers": 8, "tie_word_embeddings": CASES[case][3]})


def make_program(case: str) -> Program:
    """The training step of a case."""
    mesh, strategy, schedule, _ = CASES[case]
    how = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, "num_slices": SLICES.get(case, 1)}
    return compile_step(make_model(case), OPTIMIZER, mesh, strategy, SHAPE, **how)


def make_eval(case: str) -> Program:
    """The loss alone, on the stages of that step."""
    mesh, strategy, schedule, _ = CASES[case]
    how = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, "num_slices": SLICES.get(case, 1)}
    return compile_eval(make_model(case), mesh, strategy, SHAPE, **how)


def train(case: str, transport: str | None, program: Program, evaluation: Program) -> dict:
    """Metrics of all steps and this rank's state behind the last; the loss by evaluation before the first."""
    rank, params = dist.get_rank(), make_model(case).init(0)
    state, run = program.init_state(params, rank), program.bind(transport=transport)
    evaluate = evaluation.bind(transport=transport)
    _, before = evaluate(evaluation.init_state(params, rank), batch_rows(evaluation, make_batches()[0], rank))
    metrics = []
    for batch in make_batches():
        state, found = run(state, batch_rows(program, batch, rank))
        metrics.append(found)
    return {"metrics": metrics, "leaves": state.leaves, "evaluation": before}


def message(channel: tuple[int, int, str], number: int) -> torch.Tensor:
    """What is sent as the `number`-th message of a channel: its size changes with the number, as on no real channel."""
    source, target, kind = channel
    return torch.arange(1 + number, dtype=torch.float64) + 1000 * source + 100 * target + 10 * "FBG".index(kind)


def exchange() -> dict:
    """All messages of all grouped channels, posted at once in the order of their numbers and waited for in the opposite one."""
    rank = dist.get_rank()
    messages = [
        Message(index * NUM_GROUPED + number, *channel, 8 * (1 + number))
        for index, channel in enumerate(GROUPED)
        for number in range(NUM_GROUPED)
    ]
    channels = Channels(Mesh(pp=4), rank, messages, grouped=True, device=torch.device("cpu"))
    received, posted = {}, []
    for number in range(NUM_GROUPED):
        for index, channel in enumerate(GROUPED):
            source, target, kind = channel
            name = index * NUM_GROUPED + number
            if rank == source:
                channels.send(message(channel, number), target, name, kind)
                posted.append(name)
            elif rank == target:
                received[channel, number] = torch.empty(1 + number, dtype=torch.float64)
                channels.receive(received[channel, number], source, name, kind)
                posted.append(name)
    for name in reversed(posted):
        channels.wait(name)
    return received


def main(folder: pathlib.Path) -> None:
    """Train the cases that the folder has programs of; every rank saves its own results next to those of the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for path in sorted(folder.glob("*.pickle")):
        programs = pickle.loads(path.read_bytes())
        results |= {(path.stem, name): train(path.stem, how, *programs) for name, how in TRANSPORTS.items()}
    torch.save({"trained": results, "grouped": exchange()}, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
