"""Online learning in one process: it learns, its numbers are right, it goes on bitwise, and what goes wrong is said."""

import functools
import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mpar import checkpoint
from mpar.cli._compose import compose_config
from mpar.errors import CheckpointError, NumericsError, RewardError
from mpar.program import Program
from mpar.rollouts import list_rollouts, read_rollouts
from mpar.train import (
    Progress,
    Rank,
    Saving,
    StepRecord,
    Stop,
    TrainConfig,
    Watch,
    draw_rollouts,
    load_data,
    make_optimizer,
    make_setup,
    run_steps,
    start,
)
from mpar.train.compile import compile_program
from tests.train.test_health import alone

CPU = torch.device("cpu")
MODEL = {
    "vocab_size": 13, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
COMMON = (
    *(f"model.config.{name}={value}" for name, value in MODEL.items()),
    *("model.vocab_multiple=16", "data=jsonl", "mesh=one", "strategy=ddp", "checkpoint.every=null", "optimizer.lr=3e-3"),
    "on_zero_gradient=warn",
)
GRPO = (
    *("task=grpo", "task.rewards=[exact]", "task.group_size=4", "task.max_new_tokens=3", "task.max_prompt_tokens=5"),
    *("data.seq_len=28", "data.batch_size=8", "data.sources=[prompts.jsonl]"),
)


LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=64")
QLORA = (*LORA, "model.quantise=int8")


def write_arithmetic(folder: Path) -> None:
    """Sums of two digits below 4, with answers that are off by up to 3; prompts; and a tokenizer of digits."""
    draw, pairs = random.Random(0), [(a, b) for a in range(4) for b in range(4)]
    noisy = [{"question": f"{a}+{b}", "answer": str(max(0, a + b + draw.randint(-3, 3)))} for a, b in draw.choices(pairs, k=1000)]
    prompts = [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]
    for name, rows in (("noisy", noisy), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<end>", *"0123456789+="])}, unk_token="<end>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    (folder / "digits").mkdir()
    backend.save(str(folder / "digits" / "tokenizer.json"))
    config = {"eos_token": "<end>", "pad_token": "<end>"}
    (folder / "digits" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = (
        "{%- for message in messages %}{%- if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<end>' }}{% endgeneration %}"
        "{%- else %}{{ message['content'] + '=' }}{%- endif %}{%- endfor %}"
    )
    (folder / "digits" / "chat_template.jinja").write_text(template, encoding="utf-8")


@pytest.fixture
def arithmetic(tmp_path, monkeypatch):
    """A folder with the data, which is the working directory."""
    write_arithmetic(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@functools.cache
def compiled(overrides: tuple[str, ...]) -> Program:
    """The program of a run, without an optimizer."""
    return compile_program(make_setup(compose_config("train", TrainConfig, [*COMMON, *overrides, "steps=1"])[0]))


def trained(run_dir: Path, steps: int, *overrides: str, init: Path | None = None) -> list[StepRecord]:
    """The records of a run in this process, which goes on from the newest checkpoint in its folder."""
    given = [*COMMON, *overrides, f"run_dir={run_dir}", f"steps={steps}", "data.tokenizer=digits"]
    config, resolved = compose_config("train", TrainConfig, given)
    setup, records = make_setup(config), []
    program = compiled(overrides).with_optimizer(make_optimizer(config.optimizer, steps))
    run_dir.mkdir(exist_ok=True)
    data = load_data(setup, run_dir / "data")
    with Watch(run_dir / "place") as watch:
        run = program.bind(counter=watch, progress=watch)
        stop, saving = Stop(alone), Saving(config, resolved, program, 0, CPU, alone, watch, str)
        draw_rollouts(setup, program, data, 0, lambda mine: [mine], CPU)
        rank = Rank(setup, program, data.training, 0, CPU, run, watch, saving, stop, alone, data.items)
        state, progress = start(rank, checkpoint.latest(run_dir / "checkpoints"), init)
        run_steps(rank, state, progress, records.append)
    return records


def test_it_learns_to_add(arithmetic):
    """After examples of which most are wrong, GRPO takes the share of right answers from a fifth to more than three quarters."""
    sft = ("task=sft", "data.seq_len=64", "data.batch_size=8", "data.sources=[noisy.jsonl]", "optimizer.lr=1e-2")
    trained(arithmetic / "noisy", 100, *sft)
    init = checkpoint.latest(arithmetic / "noisy" / "checkpoints")
    more = ("data.batch_size=16", "task.group_size=8", "task.rollout_rounds=3", "optimizer.lr=4e-3")
    records = trained(arithmetic / "grpo", 180, *GRPO, *more, init=init)
    rewards = [record.batch_numbers["reward"] for record in records if record.batch_numbers]
    assert len(rewards) == 60
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-10:]) / 10 > 0.75
    for record in records[::3]:  # the first of three updates meets the log-probabilities of the sampler
        assert record.task_means["apart"] == 0
        assert record.task_means["gap"] < 1e-5
        assert record.task_means["ratio"] == pytest.approx(1, abs=1e-5)
    assert any(record.task_means["gap"] > 1e-3 for record in records[1::3])


@pytest.mark.parametrize("policy", [(), LORA], ids=["all", "lora"])
def test_a_run_goes_on_between_two_updates_with_the_same_bits(arithmetic, policy):
    """A run of 7 updates in three parts, stopped between updates of one drawing and at a drawing, ends with the same bits."""
    options = (*GRPO, *policy, "task.rollout_batches=2", "task.rollout_rounds=2", "optimizer.lr_decay=constant")
    expected = trained(arithmetic / "one", 7, *options)
    records = [record for end in (3, 4, 7) for record in trained(arithmetic / "parts", end, *options)]
    assert [record.loss for record in records] == [record.loss for record in expected]
    ends = [checkpoint.latest(arithmetic / name / "checkpoints") for name in ("one", "parts")]
    with checkpoint.Reader(ends[0]) as one, checkpoint.Reader(ends[1]) as parts:
        assert one.tensors.keys() == parts.tensors.keys()
        for name in one.tensors:
            assert torch.equal(one.read(name), parts.read(name)), name
    for path in list_rollouts(arithmetic / "one" / "rollouts"):
        assert path.read_bytes() == (arithmetic / "parts" / "rollouts" / path.name).read_bytes()


@pytest.mark.parametrize("policy", [(), LORA, QLORA], ids=["all", "lora", "qlora"])
def test_it_is_held_to_the_model_of_the_beginning(arithmetic, policy):
    """With beta, a frozen copy lies beside the model, or the model without its adapter: the divergence is 0 at first, and then it
    is not. What was drawn has the log-probabilities that the trainer computes."""
    short = ("task.rewards=[length]", "task.reward_options={length: {target: 1}}", "optimizer.lr_decay=constant")
    records = trained(arithmetic / "run", 4, *GRPO, *policy, *short, "task.beta=0.1", "task.rollout_rounds=3")
    assert [record.task_means["gap"] < 1e-6 for record in records] == [True, False, False, True]
    divergences = [record.task_means["kl"] for record in records]
    assert divergences[0] < 1e-9 < divergences[1] < divergences[2]


def test_answers_that_are_gone_are_asked_for(arithmetic):
    """Between two updates of one drawing a run cannot go on without its answers, and says from where it can."""
    options = (*GRPO, "task.rollout_rounds=4")
    trained(arithmetic / "run", 2, *options)
    (arithmetic / "run" / "rollouts" / "000000.jsonl").unlink()
    with pytest.raises(CheckpointError, match="a step that 4 divides"):
        trained(arithmetic / "run", 4, *options)


def test_a_reward_that_raises_saves_the_steps_before(arithmetic, monkeypatch):
    """The run stops with the name of the reward, has a checkpoint of the last step, and goes on once the function is mended."""
    (arithmetic / "fragile_reward.py").write_text(
        "import os\n\n\ndef reward(rollouts):\n"
        "    if rollouts[0].group >= 16 and 'MENDED' not in os.environ:\n        raise KeyError('solution')\n"
        "    return [float(one.answer == one.columns['answer']) for one in rollouts]\n",
        encoding="utf-8",
    )
    options = (*GRPO, "task.rewards=[fragile_reward:reward]")
    with pytest.raises(RewardError, match=r"fragile_reward:reward: it raised KeyError: 'solution'"):
        trained(arithmetic / "run", 4, *options)
    newest = checkpoint.latest(arithmetic / "run" / "checkpoints")
    assert Progress.from_extras(checkpoint.read_extras(newest), newest).step == 2
    assert not read_rollouts(arithmetic / "run" / "rollouts" / "000002.jsonl").header.scored
    monkeypatch.setenv("MENDED", "1")
    records = trained(arithmetic / "run", 4, *options)
    assert [record.step for record in records] == [3, 4]


def test_a_sampler_out_of_step_is_refused(arithmetic, monkeypatch):
    """If the sampler does not draw with the parameters that are trained, the first update says so."""
    from mpar.rollouts import EngineSampler

    load = EngineSampler.load
    monkeypatch.setattr(
        EngineSampler, "load", lambda self, params: load(self, {name: 1.5 * leaf for name, leaf in params.items()})
    )
    with pytest.raises(NumericsError, match="sampler and trainer are out of step"):
        trained(arithmetic / "run", 1, *GRPO)
