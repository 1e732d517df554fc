"""Online learning in one process: it learns, its numbers are right, it goes on bitwise, and what goes wrong is said."""

import functools
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mpar import checkpoint, tree
from mpar.cli._compose import compose_config
from mpar.errors import CheckpointError, NumericsError, RewardError
from mpar.models import from_config as build_model
from mpar.models import from_hf, stored_leaves, write_hf
from mpar.program import Program
from mpar.rollouts import list_rollouts, read_rollouts
from mpar.train import (
    HeldOutEvaluation,
    Progress,
    Rank,
    RolloutPrograms,
    Saving,
    StepRecord,
    Stop,
    TrainConfig,
    Watch,
    draw_rollouts,
    load_data,
    load_params,
    make_optimizer,
    make_setup,
    run_steps,
    start,
)
from mpar.train._reward_models import find_reward_model, reward_folders
from mpar.train.compile import compile_measure, compile_program, compile_scorer
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
PPO = (
    *("task=ppo", "task.rewards=[exact]", "task.max_new_tokens=3", "task.max_prompt_tokens=5", "task.rollout_rounds=3"),
    *("data.seq_len=28", "data.batch_size=8", "data.sources=[prompts.jsonl]"),
)


GKD = (
    *("task=gkd", "task.teacher=teacher", "task.max_new_tokens=3", "task.max_prompt_tokens=5", "task.lmbda=0.5"),
    *("data.seq_len=28", "data.batch_size=8", "data.sources=[noisy.jsonl]"),
)


SHORT = ("task.rewards=[length]", "task.reward_options={length: {target: 1}}")  # fresh models have different ones
ECHO = ("task.environment=echo:reply", "task.max_turns=3", "task.max_new_tokens=10", "task.max_turn_tokens=4", *SHORT)


def write_echo(folder: Path) -> None:
    """An environment that goes on with how many signs the policy wrote, if these are more than one."""
    text = "def reply(conversation):\n    size = len(conversation.answer)\n    return str(size % 10) if size > 1 else None\n"
    (folder / "echo.py").write_text(text, encoding="utf-8")


def write_teacher(folder: Path) -> None:
    """A model of the same vocabulary with one layer more and half of the width."""
    config = {**MODEL, "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
    teacher = build_model({**config, "initializer_range": 0.4}, vocab_multiple=16)
    names = [name for leaf in stored_leaves(teacher).values() for name in leaf.names]
    leaves = tree.leaves_with_path(teacher.init(3))
    write_hf(teacher, leaves, folder / "teacher", dict.fromkeys(names, torch.float32), 2**30)


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


@functools.cache
def rollout_programs(overrides: tuple[str, ...]) -> RolloutPrograms:
    """The programs of forwards of a run."""
    setup = make_setup(compose_config("train", TrainConfig, [*COMMON, *overrides, "steps=1"])[0])
    if not setup.config.task.draws:
        return RolloutPrograms()
    measure = compile_measure(setup, compiled(overrides)) if setup.chain.task.measured else None
    folders = reward_folders(setup.config.task)
    return RolloutPrograms(
        measure, {folder: compile_scorer(setup, find_reward_model(folder, setup.model).model) for folder in folders}
    )


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
        held_out = draw_rollouts(setup, program, data, 0, lambda mine: [mine], CPU, rollout_programs(overrides))
        evaluation = None if held_out is None else HeldOutEvaluation(held_out, config.evaluation.every)
        rank = Rank(setup, program, data.training, 0, CPU, run, watch, saving, stop, alone, data.items, evaluation)
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


METER = """
def reply(conversation, *, ask: str = "+"):
    return str(conversation.columns["answer"]) if conversation.answer == ask else None
"""
TOOL = (
    *("task=grpo", "task.rewards=[exact]", "task.group_size=8", "task.environment=meter:reply", "task.max_turns=2"),
    *("task.max_new_tokens=7", "task.max_turn_tokens=3", "task.max_prompt_tokens=3", "data.seq_len=27", "data.batch_size=16"),
    "data.sources=[readings.jsonl]",
)


def write_meter(folder: Path) -> None:
    """A tool that tells a number which nobody can know, if it is asked by a sign; and conversations of which half ask it."""
    (folder / "meter.py").write_text(METER, encoding="utf-8")
    draw, calls = random.Random(1), []
    for number in range(1000):
        question, guess, reading = (str(draw.randrange(10)) for _ in range(3))
        texts = [question, "+", reading, reading] if number % 2 == 0 else [question, guess]
        roles = itertools.cycle(("user", "assistant"))
        calls.append({"messages": [{"role": role, "content": text} for text, role in zip(texts, roles, strict=False)]})
    readings = [{"question": str(number % 10), "answer": str(draw.randrange(10))} for number in range(200)]
    for name, rows in (("calls", calls), ("readings", readings)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def test_it_learns_to_ask_a_tool(arithmetic):
    """After examples of which half guess, nearly all answers ask the tool for what it alone knows, and are right more often. The
    first update of each drawing meets the sampler's log-probabilities in all turns."""
    write_meter(arithmetic)
    sft = ("task=sft", "data.seq_len=64", "data.batch_size=16", "data.sources=[calls.jsonl]", "optimizer.lr=1e-2")
    trained(arithmetic / "calls", 200, *sft)
    init = checkpoint.latest(arithmetic / "calls" / "checkpoints")
    records = trained(arithmetic / "tool", 30, *TOOL, "task.rollout_rounds=2", "optimizer.lr=2e-3", init=init)
    numbers = [record.batch_numbers for record in records if record.batch_numbers]
    assert numbers[0]["turns"] < 1.5
    assert sum(one["turns"] for one in numbers[-5:]) / 5 > 1.8
    assert sum(one["reward"] for one in numbers[-5:]) / 5 > numbers[0]["reward"] + 0.25
    for record in records[::2]:
        assert record.task_means["gap_highest"] < 1e-4
        assert record.task_means["ratio"] == pytest.approx(1, abs=1e-5)
    last = read_rollouts(list_rollouts(arithmetic / "tool" / "rollouts")[-1]).rollouts
    asked = next(one for one in last if one.reward == 1 and one.num_turns == 2)
    assert [message["content"] for message in asked.turns] == ["+", asked.columns["answer"], asked.columns["answer"]]
    ids = [1 + "0123456789+=".index(sign) for sign in f"+{asked.answer}={asked.answer}"]
    assert asked.answer_ids == (ids[0], 0, *ids[1:], 0)  # the end of each turn, and what the template writes behind a reading
    assert asked.given == ((2, 4),)


@pytest.mark.parametrize("name", ["grpo", "lora", "ppo", "gkd", "turns"])
def test_a_run_goes_on_between_two_updates_with_the_same_bits(arithmetic, name):
    """A run of 7 updates in three parts, stopped between updates of one drawing and at a drawing, ends with the same bits."""
    if name == "gkd":
        write_teacher(arithmetic)
    if name == "turns":
        write_echo(arithmetic)
    grpo, ppo = (*GRPO, *SHORT), (*PPO, *SHORT)
    chosen = {"grpo": grpo, "lora": (*grpo, *LORA), "ppo": ppo, "gkd": GKD, "turns": (*PPO, *ECHO)}[name]
    options = (*chosen, "task.rollout_batches=2", "task.rollout_rounds=2", "optimizer.lr_decay=constant")
    expected = trained(arithmetic / "one", 7, *options)
    records = [record for end in (3, 4, 7) for record in trained(arithmetic / "parts", end, *options)]
    assert [record.loss for record in records] == [record.loss for record in expected]
    assert all(record.grad_norm > 0 for record in expected)
    ends = [checkpoint.latest(arithmetic / name / "checkpoints") for name in ("one", "parts")]
    with checkpoint.Reader(ends[0]) as one, checkpoint.Reader(ends[1]) as parts:
        assert one.tensors.keys() == parts.tensors.keys()
        for name in one.tensors:
            assert torch.equal(one.read(name), parts.read(name)), name
    for path in list_rollouts(arithmetic / "one" / "rollouts"):
        assert path.read_bytes() == (arithmetic / "parts" / "rollouts" / path.name).read_bytes()


def test_values_are_those_of_the_model_when_answers_were_drawn(arithmetic):
    """The first update of each drawing meets the old values, log-probabilities, and a reference model that is the same."""
    records = trained(arithmetic / "ppo", 7, *PPO, "optimizer.lr_decay=constant", "task.value_weight=2")
    for number in (0, 3, 6):
        means, path = records[number].task_means, list_rollouts(arithmetic / "ppo" / "rollouts")[number // 3]
        first = read_rollouts(path).rollouts
        values = [value for one in first for value in one.of_tokens["values"]]
        assert means["values"] == pytest.approx(sum(values) / len(values), abs=1e-6)
        assert means["gap_highest"] < 1e-5
        assert means["ratio"] == pytest.approx(1, abs=1e-5)
    assert records[0].task_means["values"] == 0
    assert records[0].task_means["kl"] < 1e-9 < records[2].task_means["kl"]
    assert records[1].task_means["gap_highest"] > records[1].task_means["gap"] > 1e-4


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_student_comes_nearer_to_a_teacher_of_another_size(arithmetic, share):
    """The divergence falls; so many answers are the student's own, and the others those of the data."""
    write_teacher(arithmetic)
    records = trained(arithmetic / "gkd", 24, *GKD, f"task.lmbda={share}", "optimizer.lr=1e-2")
    divergences = [record.task_means["divergence"] for record in records]
    assert sum(divergences[-4:]) < 0.7 * sum(divergences[:4])
    rollouts = read_rollouts(list_rollouts(arithmetic / "gkd" / "rollouts")[0]).rollouts
    writers = [one.writer for one in rollouts]
    assert set(writers) == ({"policy", "data"} if share < 1 else {"policy"})
    assert records[0].batch_numbers["on_policy"] == pytest.approx(writers.count("policy") / len(writers))
    rows = [json.loads(line) for line in (arithmetic / "noisy.jsonl").read_text().splitlines()]
    for one in rollouts:
        if one.writer == "data":
            assert one.answer == rows[int(one.name.rpartition(":")[2]) - 1]["answer"]


def test_the_teacher_draws_what_the_student_does_not(arithmetic, monkeypatch):
    """With seq_kd no answer is that of the data; an answer of the teacher is likely for the teacher, whose parameters are loaded
    once, and those of the student for each drawing."""
    from mpar.rollouts import EngineSampler

    load, loaded = EngineSampler.load, []
    monkeypatch.setattr(EngineSampler, "load", lambda self, params: [loaded.append(self), load(self, params)])
    write_teacher(arithmetic)
    trained(arithmetic / "gkd", 3, *GKD, "task.lmbda=0", "task.seq_kd=true")
    assert sorted(Counter(map(id, loaded)).values()) == [1, 3]
    rollouts = read_rollouts(list_rollouts(arithmetic / "gkd" / "rollouts")[0]).rollouts
    assert {one.writer for one in rollouts} == {"teacher"}
    teacher, params = from_hf(arithmetic / "teacher", dtype=torch.float32)
    for one in rollouts[:4]:
        ids = torch.tensor([*one.prompt_ids, *one.answer_ids])
        logps = teacher.apply(params, ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert (logps[len(one.prompt_ids) - 1 :] - torch.tensor(one.logps)).abs().max() < 1e-4


def test_a_reward_model_rewards_answers(arithmetic):
    """The reward of an answer is the score at its last token by the model in the folder, beside a function, both weighed."""
    pairs = [{"prompt": f"{a}+1", "chosen": str(a + 1), "rejected": str(a)} for a in range(4)]
    (arithmetic / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs), encoding="utf-8")
    judge = ("task=reward", "data.seq_len=16", "data.batch_size=4", "data.sources=[pairs.jsonl]", "optimizer.lr=1e-2")
    trained(arithmetic / "judge", 6, *judge)
    both = ("task.rewards=[judge,exact]", "task.reward_weights=[0.5,2]")
    trained(arithmetic / "run", 1, *GRPO, *both)
    newest = checkpoint.latest(arithmetic / "judge" / "checkpoints")
    model = make_setup(compose_config("train", TrainConfig, [*COMMON, *judge, "steps=1"])[0]).model
    params = load_params(model, newest)
    with checkpoint.Reader(newest) as reader:
        score_D1 = reader.read("params.task.score_D1")
    for one in read_rollouts(arithmetic / "run" / "rollouts" / "000000.jsonl").rollouts[:8]:
        ids = torch.tensor([[*one.prompt_ids, *one.answer_ids]])
        x, context = None, model.context({"tokens": ids, "labels": torch.full_like(ids, -100)})
        for segment in model.segments:
            reads = tuple(tree.get(params, path) for path in segment.paths)
            if segment is model.segments[-1]:
                x = segment.fn.hidden(reads, x, context)
            else:
                x, *_ = segment.fn(reads, x, context, training=False)
        expected = float((x[0, -1] @ score_D1)[0])
        assert expected != 0
        assert one.rewards["judge"] == pytest.approx(expected, abs=1e-5)
        assert one.reward == pytest.approx(0.5 * expected + 2 * one.rewards["exact"], abs=1e-5)


@pytest.mark.parametrize("policy", [(), LORA, QLORA], ids=["all", "lora", "qlora"])
def test_it_is_held_to_the_model_of_the_beginning(arithmetic, policy):
    """With beta, a frozen copy lies beside the model, or the model without its adapter: the divergence is 0 at first, and then it
    is not. What was drawn has the log-probabilities that the trainer computes."""
    short = ("task.rewards=[length]", "task.reward_options={length: {target: 1}}", "optimizer.lr_decay=constant")
    records = trained(arithmetic / "run", 4, *GRPO, *policy, *short, "task.beta=0.1", "task.rollout_rounds=3")
    assert [record.task_means["gap"] < 1e-6 for record in records] == [True, False, False, True]
    divergences = [record.task_means["kl"] for record in records]
    assert divergences[0] < 1e-9 < divergences[1] < divergences[2]


@pytest.mark.parametrize("name", ["grpo", "ppo", "gkd"])
def test_held_out_prompts_are_rewarded_at_intervals(arithmetic, name):
    """The mean reward of greedy answers is the share of held-out sums that the model in the checkpoint of that step gets right,
    and training is, bit for bit, the one without them, on the prompts that are left."""
    if name == "gkd":
        write_teacher(arithmetic)
    lines = (arithmetic / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (arithmetic / "others.jsonl").write_text("\n".join(lines[:6]) + "\n", encoding="utf-8")
    chosen = {"grpo": GRPO, "ppo": PPO, "gkd": (*GKD, "task.rewards=[exact]")}[name]
    options = (*chosen, "optimizer.lr=2e-2", "optimizer.lr_decay=constant", "task.rollout_rounds=1")
    wanted = ("evaluation.sources=[others.jsonl]", "evaluation.every=2")
    records = trained(arithmetic / "run", 5, *options, *wanted)
    assert [record.step for record in records if record.eval_task_means] == [2, 4, 5]
    assert all(record.eval_loss is None and record.perplexity is None for record in records)
    plain = trained(arithmetic / "plain", 5, *(item for item in options if name != "gkd" or item != "task.rewards=[exact]"))
    assert [record.loss for record in plain] == [record.loss for record in records]
    setup = make_setup(compose_config("train", TrainConfig, [*COMMON, *options, "steps=1", *wanted])[0])
    params = load_params(setup.model, checkpoint.latest(arithmetic / "run" / "checkpoints"))
    right = []
    for line in lines[:6]:
        row = json.loads(line)
        ids, answer = [1 + "0123456789+=".index(sign) for sign in f"{row['question']}="], []
        while len(answer) < 3 and answer[-1:] != [0]:
            logits = setup.model.apply(params, torch.tensor([[*ids, *answer]]))[0, -1, :13]
            answer.append(int(logits.argmax()))
        right.append("".join("0123456789+="[token - 1] for token in answer if token) == row["answer"])
    found = records[-1].numbers()
    assert found["eval_reward"] == found["eval_reward/exact"] == pytest.approx(sum(right) / 6)
    assert found["eval_answer_tokens"] > 0
    assert [path.stem for path in list_rollouts(arithmetic / "run" / "rollouts" / "held_out")] == ["000002", "000004", "000005"]


def test_a_reward_that_raises_in_an_evaluation_saves_the_step(arithmetic):
    """The run stops with the name of the reward and a checkpoint of the step that was evaluated."""
    (arithmetic / "picky_reward.py").write_text(
        "def reward(rollouts):\n    if rollouts[0].columns['answer'] == '77':\n        raise KeyError('solution')\n"
        "    return [float(len(one.answer)) for one in rollouts]\n",
        encoding="utf-8",
    )
    (arithmetic / "others.jsonl").write_text('{"question": "3+3", "answer": "77"}\n', encoding="utf-8")
    wanted = ("task.rewards=[picky_reward:reward]", "evaluation.sources=[others.jsonl]", "evaluation.every=2")
    with pytest.raises(RewardError, match=r"KeyError: 'solution'[^\n]*\n.*held-out prompts"):
        trained(arithmetic / "run", 4, *GRPO, *wanted)
    newest = checkpoint.latest(arithmetic / "run" / "checkpoints")
    assert Progress.from_extras(checkpoint.read_extras(newest), newest).step == 2


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
