"""Where a rank is, as its launcher reads it."""

import torch

from mpar.train import Place, Watch, describe_place, read_place


def test_a_place_is_what_was_last_written(tmp_path):
    """Step, line and collectives begun can be read from outside while the rank runs."""
    path = tmp_path / "place"
    assert read_place(path) is None
    with Watch(path) as watch:
        watch.begin_step(7)
        watch(12, None)
        watch.add("all_gather", ("tp",), [torch.zeros(3), torch.zeros(2)])
        watch.add("all_reduce", ("tp",), [torch.zeros(1)])
        place = read_place(path)
        assert (place.step, place.line, place.collectives, place.communication_bytes) == (7, 12, 2, 24)
        watch(13, None)
        assert read_place(path).collectives == 0
        watch.between_steps(7)
        assert read_place(path).line == -1
        assert watch.communication_bytes == 24


def test_words(program):
    """The line, what it does, and the ranks of the collective that it is in."""
    line, step = next((i, s) for i, s in enumerate(program.instructions) if s.op == "backward" and "layers" in s.segment)
    uses = program.kinds[step.kind].collectives
    head = f"rank 3, step 12, line {line:04d} backward {step.segment} mb{step.microbatch}"
    assert describe_place(program, 3, Place(12, line, 0, 0, 0)) == f"{head}: computes"
    for count, use in enumerate(uses, 1):
        assert use.axes == ("tp",)
        assert describe_place(program, 3, Place(12, line, count, 0, 0)) == f"{head}: waits in {use.op} over tp with rank 2"
    assert describe_place(program, 3, Place(12, line, 1, 0, 0), dead=True) == f"{head}: was in {uses[0].op} over tp with rank 2"
    assert describe_place(program, 0, Place(4, -1, 0, 0, 0)) == "rank 0, after step 4: between two steps"
    assert describe_place(program, 0, None) == "rank 0: had not begun"


def test_an_evaluation_is_told_apart(program, tmp_path):
    """Lines of the program that evaluates are called so, until the next step begins."""
    path = tmp_path / "place"
    with Watch(path) as watch:
        watch.between_steps(3)
        watch.begin_evaluation()
        watch(5, program.instructions[5])
        assert read_place(path).evaluating
        assert describe_place(program, 1, read_place(path)).startswith("rank 1, evaluation after step 3, line 0005 ")
        watch.between_steps(3)
        assert not read_place(path).evaluating
