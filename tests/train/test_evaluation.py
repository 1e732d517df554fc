"""The program that evaluates, beside the one that trains."""

import json

import pytest
import torch

from mpar.cli._compose import compose_config
from mpar.train import TrainConfig, fresh_state, load_data, make_setup
from mpar.train._evaluation import Evaluation
from mpar.train._watch import Watch
from mpar.train.compile import compile_evaluation, compile_program
from tests.train.conftest import SMALL

DEEP = [*SMALL, "model.config.num_hidden_layers=6", "data.batch_size=8", "schedule.num_microbatches=4", "evaluation.fraction=0.2"]


@pytest.mark.parametrize(
    "how",
    [
        ["mesh=pp2", "strategy=ddp", "schedule=zbv"],
        ["mesh=pp2", "strategy=ddp", "schedule=auto"],
        ["mesh=pp2", "strategy=ddp", "schedule=dual_pipe"],
        ["mesh=pp2", "strategy=ddp", "schedule.layout=balance"],
        ["mesh=pp2", "strategy=ddp", "schedule.layout='E|tttttt||L'", "schedule=zbv"],
        ["mesh=pp2_fsdp2", "strategy=zero3", "schedule=interleaved", "model.config.tie_word_embeddings=true"],
        ["mesh=pp2", "strategy=ddp", "schedule=zbv", "schedule.num_slices=2"],
    ],
    ids=["v", "auto", "dual", "balance", "letters", "tied", "slices"],
)
def test_parameters_lie_where_training_has_them(how):
    """Stages are the training's, and every parameter that evaluation reads is on the same ranks in the same shards."""
    config = compose_config("train", TrainConfig, [*DEEP, *how])[0]
    setup = make_setup(config)
    training = compile_program(setup)
    evaluation = compile_evaluation(setup, training)
    assert evaluation.facts.stage_of == training.facts.stage_of
    assert evaluation.num_slices == config.schedule.num_slices
    for ours, theirs in zip(evaluation.parts, training.parts, strict=True):
        held = {leaf.path: (leaf.spec, leaf.shape, leaf.dtype) for leaf in theirs.state_in}
        assert all(held[leaf.path] == (leaf.spec, leaf.shape, leaf.dtype) for leaf in ours.state_in)
        assert {step.op for step in ours.instructions}.isdisjoint({"backward", "backward_input", "update", "reduce"})


@pytest.mark.parametrize(
    "how",
    [
        ["mesh=fsdp2_cp2", "strategy=zero3", "strategy.expert_parallel=4"],
        ["mesh=pp2", "strategy=ddp", "schedule=zbv", "schedule.layout='Et|tt|m|L'"],
        ["mesh=pp2_fsdp2", "strategy=zero3", "schedule=dual_pipe"],
    ],
    ids=["experts", "stage of its own", "dual"],
)
def test_a_layer_for_further_tokens_is_left_out(how):
    """Evaluation reads neither this layer nor its keys; all else lies where training has it, though a stage be empty now."""
    base = ["model=tiny_deepseek_v3", "model.mtp_loss_weight=0.1", "data.batch_size=8", "schedule.num_microbatches=4"]
    config = compose_config("train", TrainConfig, [*base, "evaluation.fraction=0.2", *how])[0]
    setup = make_setup(config)
    training = compile_program(setup)
    evaluation = compile_evaluation(setup, training)
    stages = dict(training.facts.stage_of)
    assert stages.pop("mtp") is not None
    assert evaluation.facts.stage_of == stages
    assert set(training.facts.batch) - set(evaluation.facts.batch) == {"next_tokens", "next_labels"}
    for ours, theirs in zip(evaluation.parts, training.parts, strict=True):
        held = {leaf.path: (leaf.spec, leaf.shape, leaf.dtype) for leaf in theirs.state_in}
        assert all(held[leaf.path] == (leaf.spec, leaf.shape, leaf.dtype) for leaf in ours.state_in)
        assert not any(leaf.path.startswith("params.mtp.") for leaf in ours.state_in)


def test_several_sets(tmp_path):
    """Each has the loss that it has alone; that of all is the mean over the labels of all. Rows held out are one of them."""
    for name, answers in (("short", ["a", "b"]), ("long", ["c" * 50])):
        rows = [json.dumps({"query": "q", "response": answer}) + "\n" for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    sets = f"evaluation.sources={{short: {tmp_path}/short.jsonl, long: [{tmp_path}/long.jsonl]}}"
    config = compose_config("train", TrainConfig, [*DEEP, "mesh=one", "strategy=ddp", sets])[0]
    setup = make_setup(config)
    program = compile_program(setup)
    state = fresh_state(program, setup.model, 0, seed=0, source=None, device=torch.device("cpu"))
    forwards, data = compile_evaluation(setup, program), load_data(setup)
    assert list(data.evaluation) == ["held_out", "short", "long"]
    assert "data to evaluate on (short): 2 of 2 rows" in data.summary and "(held_out)" not in data.summary
    with Watch(tmp_path / "place") as watch:

        def losses(**batches):
            return Evaluation(forwards, forwards.bind(), batches, None).losses(state, 0, 0, torch.device("cpu"), watch)

        found = losses(short=data.evaluation["short"], long=data.evaluation["long"])
        assert found.of_set == {name: losses(**{name: data.evaluation[name]}).mean for name in ("short", "long")}
    assert found.mean == pytest.approx((4 * found.of_set["short"] + 51 * found.of_set["long"]) / 55, rel=1e-6)


def test_the_state_stays_as_it_is(tmp_path):
    """After an evaluation the same tensors with the same elements are in the state, which the next step can take."""
    how = ["mesh=one", "strategy=ddp", "steps=10", "evaluation.every=4"]
    config = compose_config("train", TrainConfig, [*DEEP, *how])[0]
    setup = make_setup(config)
    program = compile_program(setup)
    state = fresh_state(program, setup.model, 0, seed=0, source=None, device=torch.device("cpu"))
    before = {path: (leaf.data_ptr(), leaf.clone()) for path, leaf in state.leaves.items()}
    forwards = compile_evaluation(setup, program)
    batches = load_data(setup).evaluation
    with Watch(tmp_path / "place") as watch:
        evaluation = Evaluation(forwards, forwards.bind(), batches, config.evaluation.every, 2)
        losses = [evaluation.losses(state, 0, 0, torch.device("cpu"), watch).mean for _ in range(2)]
    assert losses[0] == losses[1] > 0
    assert state.leaves.keys() == before.keys()
    assert all(leaf.data_ptr() == before[path][0] for path, leaf in state.leaves.items())
    assert all(torch.equal(leaf, before[path][1]) for path, leaf in state.leaves.items())
    assert [step for step in range(1, 11) if evaluation.is_due(step, 10)] == [4, 8, 10]
