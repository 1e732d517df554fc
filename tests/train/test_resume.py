"""Going on: what changed since a checkpoint, what is refused, and the ways to go on on purpose."""

import dataclasses
import json

import pytest
import torch

from mpar import checkpoint, models, tree
from mpar.cli._compose import compose_config
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.spec import P
from mpar.train import Progress, TrainConfig, load_state, make_setup, resume_from
from mpar.train._changes import config_changes, function_changes, model_then
from mpar.train._config import ResumeConfig
from mpar.train._data_items import data_items, unlike_data
from mpar.train._origin import find_origin, steps_done
from mpar.train._run_data import load_data
from mpar.train._setup import model_of
from mpar.train._state import read_params
from mpar.train.compile import compile_program
from tests.program.oracle import DEEPSEEK
from tests.train.conftest import SMALL

CPU = torch.device("cpu")
ONE = ["strategy=ddp", "mesh=one", "steps=9"]


def composed(*overrides):
    return compose_config("train", TrainConfig, [*SMALL, *ONE, *overrides])


def write(folder, step, config, plain, **progress):
    """A checkpoint in which only names and shapes are those of a run; its moments are 1, its parameters 0.5."""
    model = make_setup(config).model
    params = {f"params.{path}": torch.full(leaf.shape, 0.5) for path, leaf in tree.leaves_with_path(model.abstract_params)}
    slots = {name.replace("params.", f"opt.{slot}."): torch.ones_like(x) for name, x in params.items() for slot in ("m", "v")}
    tensors = params | slots
    reached = Progress(step, 10 * step, "data", 0, hf_config=json.loads(model.hf_config_json), **progress)
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    return checkpoint.save(folder, step, tensors, dict.fromkeys(tensors, P()), Mesh(), 0, shapes, reached.as_extras(plain))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run_dir of a run with a checkpoint of step 4."""
    run_dir = tmp_path_factory.mktemp("run")
    config, plain = composed()
    write(run_dir / "checkpoints", 4, config, plain, data_items={"data.batch_size": 6})
    return run_dir


def origin(run_dir, *overrides):
    config, plain = composed(f"run_dir={run_dir}", *overrides)
    return find_origin(make_setup(config), plain)


def test_the_folder_of_a_job_is_of_that_job(run, tmp_path):
    """A job of a sweep goes on with more steps and on another mesh, but not from checkpoints of a job with other values."""
    assert steps_done(*composed(f"run_dir={tmp_path}"), []) == 0
    how = f"run_dir={run}"
    for others in ([], ["steps=20", "mesh=tp2", "checkpoint.keep=5", "task.chat=[hi]"]):
        assert steps_done(*composed(how, *others), ["optimizer"]) == 4
    for change in ("optimizer.lr=0.5", "seed=1", "model.config.rms_norm_eps=0.5"):
        key, _, value = change.partition("=")
        with pytest.raises(CheckpointError, match=rf"(?s)job {run.name} of the sweep.*{key}: \S+ -> {value}\n.*another run_dir"):
            steps_done(*composed(how, change), [])
    with pytest.raises(CheckpointError, match=r"mesh.tp: 1 -> 2"):
        steps_done(*composed(how, "mesh=tp2"), ["mesh"])
    assert steps_done(*composed(how, "model.config.rms_norm_eps=0.5", "resume.allow_change=true"), []) == 4


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("auto", "all", "same")),
        (["resume=weights"], ("auto", "weights", "same")),
        (["resume=weights", "resume.path=a"], ("a", "weights", "same")),
        (["resume.data=restart", "resume=never"], ("never", "all", "restart")),
        (["resume='a, b=c'"], ("a, b=c", "all", "same")),
    ],
    ids=str,
)
def test_one_word_stands_for_the_group(overrides, expected):
    """`resume=WORD` sets one key of the group, wherever it stands among arguments that set others."""
    resume = composed(*overrides)[0].resume
    assert (resume.path, resume.state, resume.data) == expected


def test_a_resume_lists_what_changed(run):
    """Each key that differs is a line, value then and value now; without a difference there is none."""
    assert origin(run).changes == ()
    lines = origin(run, "optimizer.lr=0.5", "data.shuffle=false", "mesh=tp2", "strategy=tp", "steps=20").changes
    assert set(lines) >= {"optimizer.lr: 0.003 -> 0.5", "data.shuffle: true -> false", "mesh.tp: 1 -> 2", "steps: 9 -> 20"}
    assert not [line for line in lines if line.startswith(("run_dir", "resume"))]


def test_defaults_are_no_changes():
    """A key that one of two configurations leaves out has its default there."""
    plain = composed()[1]
    fewer = {**plain, "model": {name: value for name, value in plain["model"].items() if name != "ignore"}, "steps": 3, "old": 1}
    assert config_changes(fewer, plain) == ["steps: 3 -> 9", "old: 1 -> (not given)"]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.config.rope_theta=7.0", "ropes.main.theta: 10000.0 -> 7.0"),
        ("model.config.rms_norm_eps=0.1", "eps: "),
        ("model.config.hidden_act=gelu", "mlp.activation: silu -> gelu (layers 0)"),
        ("model.config.use_sliding_window=true model.config.sliding_window=3 model.config.max_window_layers=0", "window: "),
        ("model.config.num_hidden_layers=2", "number of layers: 1 -> 2"),
        ("model.config.vocab_size=300", "vocab_size: "),
    ],
    ids=lambda text: text.split()[0],
)
def test_another_function_is_refused(run, override, line):
    """What changes the function is named and refused. It is accepted only when told so, which shapes do not permit for all."""
    overrides = override.split()
    with pytest.raises(CheckpointError, match="another function") as error:
        origin(run, *overrides)
    assert line in str(error.value)
    fits = "num_hidden_layers" not in override  # the padded vocabularies are equal
    assert ("resume.allow_change=true" in str(error.value)) == fits
    assert origin(run, *overrides, "resume.allow_change=true").resume is not None


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "override", ["model.logits_chunk=8", "model.mlp_chunk=8", "precision=bf16", "model.config.initializer_range=1.0"]
)
def test_what_computes_the_same_function_is_accepted(run, override):
    """Tiles, precision and the spread of fresh weights do not change the function of the parameters."""
    assert origin(run, override).resume is not None


def test_other_frozen_parameters_are_refused(run):
    """The change is named; a run that takes weights only may freeze others if it is told so."""
    with pytest.raises(CheckpointError, match=r'(?s)other parameters would be frozen.*freeze.names: \[\] -> \["embed"\]'):
        origin(run, "freeze.names=[embed]")
    assert origin(run, "freeze.names=[embed]", "resume=weights", "resume.allow_change=true").resume is not None


def test_frozen_parameters_are_cast_to_what_the_program_stores(run, tmp_path):
    """A run in bf16 stores what is frozen in bf16: it starts from a checkpoint in float32, whose other parameters stay float32;
    and the model reads what it saved in its own dtype."""
    config, plain = composed(f"run_dir={tmp_path}", "precision=bf16", "freeze.names=[embed]")
    setup = make_setup(config)
    program = compile_program(setup)
    state, _ = load_state(program, run / "checkpoints" / "step_00000004", 0, CPU, params_only=True)
    dtypes = {path: leaf.dtype for path, leaf in state.leaves.items()}
    frozen = {path for path, dtype in dtypes.items() if dtype is torch.bfloat16}
    assert frozen == {"params.embed.table_VD"}
    specs = {leaf.path: leaf.spec for leaf in program.state_in}
    shapes = {leaf.path: leaf.shape for leaf in program.state_in}
    path = checkpoint.save(tmp_path, 4, state.leaves, specs, Mesh(), 0, shapes, {"config": plain})
    again = dict(read_params(setup.model, path))
    assert again["embed.table_VD"].dtype is torch.float32
    assert torch.equal(again["embed.table_VD"], state.leaves["params.embed.table_VD"].float())


def test_a_model_folder_that_changed_is_noticed(run, tmp_path):
    """The model of a checkpoint is the config.json that it records, not the one that the folder has now."""
    config, plain = composed()
    hf_config = json.loads(make_setup(config).model.hf_config_json)
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"rope_theta": 5.0}), encoding="utf-8")
    recorded = {**plain, "model": {**plain["model"], "config": None, "path": str(tmp_path)}}
    then = model_then(recorded, hf_config)
    now = model_of(dataclasses.replace(config.model, config=None, path=str(tmp_path)))
    assert function_changes(then, now) == ["ropes.main.theta: 10000.0 -> 5.0"]
    assert model_then(recorded, None) is None


def test_another_optimizer_begins_anew_or_not_at_all(run):
    """Its state is that of another kind; with parameters only that does not matter."""
    with pytest.raises(CheckpointError, match=r"it has the state of adamw.*\n.*resume=weights"):
        origin(run, "optimizer=sgd")
    assert origin(run, "optimizer=sgd", "resume=weights").resume is not None


def test_the_batch_is_that_of_the_run(run):
    """Its size is recorded, for a command line that leaves it to the run."""
    assert origin(run).batch_size == 6
    assert origin(run.parent / "nothing").batch_size is None


def test_a_run_or_checkpoint_can_be_named(run, tmp_path):
    """resume and init_from take the folder of a checkpoint or of a run; no other checkpoint may be written twice."""
    step = run / "checkpoints" / "step_00000004"
    assert origin(tmp_path, f"resume={run}").resume == origin(tmp_path, f"resume={step}").resume == step
    assert origin(tmp_path, f"init_from={run}").init == origin(tmp_path, f"init_from={step}").init == step
    with pytest.raises(CheckpointError, match="nor a Hugging Face folder"):
        origin(tmp_path, f"init_from={tmp_path}")
    config, plain = composed()
    own = write(tmp_path / "checkpoints", 7, config, plain)
    with pytest.raises(CheckpointError, match="holds step_00000007, which would be written again"):
        resume_from(tmp_path, str(run))
    assert resume_from(tmp_path, str(own)) == own
    assert origin(tmp_path, f"init_from={run}").resume == own  # and a run that has begun goes on


def test_parameters_only(run):
    """The optimizer's state and its number of updates are zero, parameters are those of the checkpoint."""
    config, _ = composed()
    program = compile_program(make_setup(config))
    path = run / "checkpoints" / "step_00000004"
    for params_only, value, step in ((False, 1.0, 4), (True, 0.0, 0)):
        state, reached = load_state(program, path, 0, CPU, params_only=params_only)
        assert (state.step, reached.step) == (step, 4)
        for name, leaf in state.leaves.items():
            assert leaf.eq(0.5 if name.startswith("params.") else value).all(), name


def test_progress_goes_on():
    """Unlike data begin at their start, or are refused; like data stay where they are. A fresh optimizer counts steps anew."""
    reached = Progress(4, 40, "data", 0, data_items={"seed": 0}, data_start=1)
    same, restart, weights = ResumeConfig(), ResumeConfig(data="restart"), ResumeConfig(state="weights")
    assert reached.go_on("path", same, "data", {}) == reached.go_on("path", restart, "data", {}) == reached
    with pytest.raises(CheckpointError, match=r"other data \(then -> now\):\n  seed: 0 -> 1\n"):
        reached.go_on("path", same, "other", {"seed": 1})
    begun = reached.go_on("path", restart, "other", {"seed": 1})
    assert (begun.step, begun.data_start, begun.data, begun.data_items) == (4, 4, "other", {"seed": 1})
    assert reached.go_on("path", weights, "data", {}).optimizer_start == 4


def test_progress_survives_json(tmp_path):
    """What a checkpoint records is read back; one of an older version lacks the new entries."""
    reached = Progress(4, 40, "data", 1, data_items={"a": [1, None]}, data_start=2, optimizer_start=3, hf_config={"b": 1.5})
    extras = json.loads(json.dumps(reached.as_extras({"steps": 1})))
    assert Progress.from_extras(extras, tmp_path) == reached
    old = {name: extras[name] for name in ("step", "tokens", "data", "seed")}
    assert Progress.from_extras(old, tmp_path) == Progress(4, 40, "data", 1)
    with pytest.raises(CheckpointError, match="lacks"):
        Progress.from_extras(extras | {"data_start": "x"}, tmp_path)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["seed=1"], ["seed: 0 -> 1"]),
        (["data.batch_size=2"], ["data.batch_size: 4 -> 2"]),
        (["data.packing=false", "data.shuffle=false"], ["data.packing: True -> False", "data.shuffle: True -> False"]),
        (["data.sources=['self-cognition#50']"], ["data.sources: ['self-cognition'] -> ['self-cognition#50']"]),
        (["data.model_name=[a,b]"], ["data.model_name: ['小帕', 'Parry'] -> ['a', 'b']"]),
        (["evaluation.fraction=0.5"], ["evaluation.fraction: None -> 0.5"]),
        (["data.token_weights=last_round"], []),  # the sample has one answer in each conversation, so nothing changes
    ],
    ids=lambda words: words[0] if words else "none",
)
def test_the_item_that_differs_is_named(overrides, lines):
    """The message lists what differs, and nothing else; what changes no document is no difference."""
    data = [load_data(make_setup(composed(*words)[0])) for words in ([], overrides)]
    assert (data[0].training.fingerprint != data[1].training.fingerprint) == bool(lines)
    message = str(unlike_data("path", data[0].items, data[1].items))
    assert [line.strip() for line in message.splitlines() if line.startswith("  ")] == lines or not lines


def test_rows_tokenizer_and_template_are_named():
    """A hash that differs is said in words; rows only if nothing else explains them; an old checkpoint cannot tell."""
    data = load_data(make_setup(composed()[0]))
    items = data_items(composed()[0], data.tokenizer, data.training)
    assert items == data.items
    other = items | {"rows": "x"}
    assert "other rows are in the files" in str(unlike_data("path", items, other))
    assert "other rows" not in str(unlike_data("path", items, other | {"tokenizer": "x"}))
    assert "tokenizer: another one" in str(unlike_data("path", items, other | {"tokenizer": "x"}))
    assert "chat template: another one" in str(unlike_data("path", items, other | {"chat template": "x"}))
    assert "does not record which" in str(unlike_data("path", {}, items))


def test_slots_of_a_bias_that_no_optimizer_changes_are_left_out(tmp_path):
    """A checkpoint of a version in which AdamW had slots for the bias of routers is gone on from; other names are refused."""
    model = models.from_config({**DEEPSEEK, "num_hidden_layers": 2}, vocab_multiple=8, router={"bias_rate": 0.01})
    program = compile_step(model, AdamW(lr=1e-3), Mesh(), "ddp", (2, 8))
    tensors = {leaf.path: torch.full(leaf.shape, 0.5) for leaf in program.state_in}
    biases = {
        f"opt.{slot}.{path}": torch.zeros(tree.get(model.abstract_params, path).shape) for path in model.updates for slot in "mv"
    }
    _, plain = composed()
    extras = Progress(4, 40, "data", 0).as_extras(plain)

    def saved(folder, tensors):
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        return checkpoint.save(tmp_path / folder, 4, tensors, dict.fromkeys(tensors, P()), Mesh(), 0, shapes, extras)

    assert biases and not biases.keys() & tensors.keys()
    state, _ = load_state(program, saved("then", tensors | biases), 0, CPU)
    assert state.leaves.keys() == tensors.keys()
    with pytest.raises(CheckpointError, match=r"opt\.m\.nobody"):
        load_state(program, saved("other", tensors | {"opt.m.nobody": torch.zeros(2)}), 0, CPU)
