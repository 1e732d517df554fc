"""Wrong variants of what users bring along: each is refused before anything runs, by one error of mpar that fits on a screen."""

import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import mpar
from mpar import models, ops
from mpar.chain import Segment
from mpar.compiler import Schedule
from mpar.errors import MparError
from mpar.kernels import check_kernels, def_kernel
from mpar.models import Trainable
from mpar.ops import PRIMITIVES, Cost, Primitive
from mpar.optim import Lion
from mpar.plug_ins import PlugIn
from mpar.schedules import Action
from mpar.strategy import preset

SCREEN = (25, 2000)
"""Lines and characters of a message."""
CONFIG = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 32}
NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _known_primitives():
    """Primitives that are made here are forgotten afterwards: other tests walk over all that there are."""
    before = dict(PRIMITIVES)
    yield
    for name in PRIMITIVES.keys() - before.keys():
        del PRIMITIVES[name]
PLAIN = preset("zero3_tp")


@functools.cache
def model():
    return models.from_config(CONFIG)


def compile_with(optimizer=Lion(0.1), mesh=mpar.Mesh(fsdp=2), strategy="zero3", chain=None, **options):  # noqa: B008
    mpar.compile_step(chain or model(), optimizer, mesh, strategy, (4, 16), **options)


def optimizer(**members) -> Callable[[], None]:
    return lambda: compile_with(type("Mine", (Lion,), members)(0.1))


def update(result) -> Callable[[], None]:
    return optimizer(update_leaf=lambda self, param, grad, slots, lr, step, scale, *, decays: result(param, slots))


def first(params, x, context, *, training):
    return ops.embedding(context["tokens"], params[0]), {}


def last(params, x_BSD, context, *, training):
    loss, _ = ops.cross_entropy(ops.einsum("bsd,vd->bsv", x_BSD, params[0]), context["labels"])
    return None, {"loss": loss}


@dataclass(frozen=True)
class Bigram(Trainable):
    """The smallest chain: a table."""

    vocab_size: int = 128

    @property
    def segments(self):
        return (Segment("first", first, ("table",), ("batch", "seq", "embed")), Segment("last", last, ("table",)))

    @property
    def abstract_params(self):
        return {"table": torch.empty(128, 16, device="meta")}

    @property
    def param_axes(self):
        return {"table": ("vocab", "embed")}

    def context(self, batch, row_length=None):
        return dict(batch)


def chain(**members) -> Callable[[], None]:
    """Compile a chain with other members; a function is a property."""
    made = {name: property(member) if name not in ("context", "weight") else member for name, member in members.items()}
    return lambda: compile_with(chain=type("Mine", (Bigram,), made)())


def head(fn) -> Callable[[], None]:
    return chain(segments=lambda self: (Bigram().segments[0], Segment("last", fn, ("table",))))


def primitive(
    signature="x -> y",
    *,
    abstract=torch.empty_like,
    impl=lambda x: x * 2,
    sharding="... -> ...",
    cost=lambda x: Cost(1, 1),
    name=None,
    **params,
) -> Primitive:
    """A primitive of a new name with these rules; None leaves one out."""
    made = Primitive(name or f"wrong_{next(NUMBERS)}", signature, **params)
    for rule, define in (
        (abstract, made.def_abstract),
        (impl, made.def_impl),
        (sharding, made.def_sharding),
        (cost, made.def_cost),
    ):
        if rule is not None:
            define(rule)
    return made


def checked(**how) -> Callable[[], None]:
    return lambda: mpar.check(primitive(**how), (torch.randn(4, 8, dtype=torch.float64),))


def kernel(module, function=None, **how):
    made = primitive()
    def_kernel(made, module, function, **how)
    check_kernels(made, (torch.ones(4),))


def rows(**changed) -> Callable[[], None]:
    """A strategy with other rows, on a mesh with an axis `node`."""
    return lambda: compile_with(mesh=mpar.Mesh(node=3), strategy=replace(PLAIN, compute={**PLAIN.compute, **changed}))


def table(*positions) -> Callable[[], None]:
    return lambda: compile_with(mesh=mpar.Mesh(pp=2), strategy="ddp", num_microbatches=2, schedule=Schedule(table=positions))


def module_that_exits() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder, "script_that_exits.py").write_text("raise SystemExit(4)")
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        plug_in(reference="script_that_exits:make")()


def plug_in(group="optimizer", reference="tests.test_wrong_plug_ins:example", **options) -> Callable[[], None]:
    return lambda: PlugIn(group, reference, options, given=("lr",) if group == "optimizer" else ()).call(lr=0.1)


def example(lr, gamma: float = 1.0):
    raise SystemExit(4) if gamma == 3 else ValueError("gamma is bad")


F, B = (Action(0, kind, 0) for kind in "FB")
WRONG = {
    "an update that returns only the parameter": (
        update(lambda param, slots: param),
        "it returned float32 (128, 16), not a pair",
    ),
    "an update that returns nothing": (update(lambda param, slots: None), "it returned nothing, not a pair"),
    "an update in which an op fails": (
        update(lambda param, slots: (param @ torch.ones(7, 7), slots)),
        "raised RuntimeError at test_w",
    ),
    "an update that reads a dict": (update(lambda param, slots: {}["momentum"]), "raised KeyError at test_wrong_plug_ins.py"),
    "an update that branches": (
        update(lambda param, slots: (param if param.sum() > 0 else -param, slots)),
        "from the data of a tensor",
    ),
    "an update that draws": (
        update(lambda param, slots: (param + torch.randn_like(param), slots)),
        "draws from torch's generator",
    ),
    "a scale that is a number": (optimizer(scale=lambda self, norm: 1.0), "scale of Mine returned 1.0"),
    "a scale with a dim": (optimizer(scale=lambda self, norm: norm.expand(3)), "returned float32 (3,)"),
    "decays that says nothing": (optimizer(decays=lambda self, path, leaf: None), "returned None: return True or False"),
    "decays of a tensor only": (optimizer(decays=lambda self, path, leaf: leaf.shape[0] > 1), "raised AttributeError"),
    "a rate that is a text": (optimizer(rate=lambda self, step: "1e-3"), "`rate(1)` is '1e-3'"),
    "a rule that is none": (optimizer(leaf_rule=lambda self, path, axes: None), "returned None, which is no rule"),
    "segments that are none": (chain(segments=lambda self: None), "`segments` is None"),
    "parameters without tensors": (chain(abstract_params=lambda self: {"table": (128, 16)}), "no tensors at table"),
    "members that raise": (chain(abstract_params=lambda self: 1 / 0), "making the members of Mine raised ZeroDivisionError"),
    "axes of another rank": (chain(param_axes=lambda self: {"table": ("vocab",)}), "has 2 dims, but its axes"),
    "a context of another key": (chain(context=lambda self, batch, row_length=None: {"a": batch["label"]}), "raised KeyError"),
    "a segment without losses": (head(lambda params, x, context, *, training: x), "returned a tensor: return (x, losses)"),
    "a segment that takes less": (head(lambda params, x: (None, {})), "unexpected keyword argument"),
    "no loss": (head(lambda params, x, context, *, training: (None, {})), "nothing has a gradient"),
    "a loss that is a number": (
        head(lambda params, x, context, *, training: (None, {"loss": 1.0})),
        "losses has 'loss', a float",
    ),
    "a loss of each row": (head(lambda params, x, context, *, training: (None, {"loss": x.sum(-1)})), "it must be a scalar"),
    "a loss in numpy": (
        head(lambda params, x, context, *, training: (None, {"loss": x.detach().numpy()})),
        "raised RuntimeError",
    ),
    "a primitive that exists": (lambda: primitive(name="rms_norm"), "again"),
    "a signature without results": (lambda: primitive("x y"), "is not `operand, operand -> result`"),
    "a parameter of no type": (lambda: primitive(n="whole"), "n='whole'"),
    "a rule of another operand": (lambda: primitive(sharding="..., ... -> ..."), "it has 2 operands, the primitive 1 (x)"),
    "a rule without results": (lambda: primitive(sharding="a b"), "is not operands -> results"),
    "a primitive without a meaning": (checked(impl=None), "it has no def_impl"),
    "results unlike the abstract ones": (checked(impl=lambda x: x.float()), "its implementation gives float32 (4, 8)"),
    "a rule that does not hold": (checked(impl=lambda x: x.softmax(-1)), "does not hold"),
    "a rule of another rank": (checked(sharding="a b c -> a b c"), "has 2 dims, its sharding rule 3"),
    "a cost in parts": (checked(cost=lambda x: Cost(0.5, 1)), "whole numbers"),
    "a kernel of no module": (lambda: kernel("no_such_module"), "No module named 'no_such_module'"),
    "a kernel of other results": (lambda: kernel("torch", "neg"), "relative error"),
    "a kernel that takes less": (
        lambda: kernel("torch", "neg", supports=lambda arch: None),
        "cannot be called as supports(arch, x)",
    ),
    "a second kernel": (lambda: def_kernel(ops.PRIMITIVES["rms_norm"], "torch"), "has a kernel already"),
    "a row of a text": (rows(mlp="node"), "'mlp': 'node'"),
    "a mesh axis that is not there": (rows(mlp=("nodes",)), "no mesh axis is called ['nodes']"),
    "a dim that an axis does not divide": (rows(mlp=("node",)), "which node=3 does not divide"),
    "a mesh axis of no size": (lambda: mpar.Mesh(node=0), "sizes must be positive"),
    "a schedule of texts": (table(["0F0"], ["1F0"]), "has '0F0' among its actions"),
    "a schedule that stops": (table([F, B, F._replace(microbatch=1)], []), "0B1 is missing"),
    "a plug-in without a function": (plug_in(reference="lion"), "a plug-in is module:function"),
    "a plug-in of no module": (plug_in(reference="no_such_module:make"), "there is no module 'no_such_module'"),
    "a plug-in of another name": (plug_in(reference="tests.test_wrong_plug_ins:exampel"), "did you mean 'example'"),
    "a plug-in with another parameter": (plug_in(gama=1), "there is no optimizer.gama; did you mean 'gamma'"),
    "a plug-in with a text": (plug_in(gamma="large"), "must be a number"),
    "a plug-in that raises": (plug_in(gamma=2), "raised ValueError: gamma is bad"),
    "a module that exits": (module_that_exits, "importing script_that_exits raised SystemExit: 4 ("),
    "a plug-in that exits": (plug_in(gamma=3), "raised SystemExit: 4 ("),
    "a plug-in without what mpar gives": (plug_in(reference="tests.test_wrong_plug_ins:model"), "it has no parameter lr"),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize(("make", "part"), WRONG.values(), ids=[name.replace(" ", "_") for name in WRONG])
def test_wrong_variants_are_refused(make, part):
    """One error of mpar, with the two facts that disagree, at most a screen long."""
    with pytest.raises(MparError) as caught:
        make()
    text = str(caught.value)
    assert part in text, text
    assert text.count("\n") < SCREEN[0] and len(text) < SCREEN[1], text


def test_what_is_right_is_accepted():
    """The variants are wrong because of what is changed: unchanged, each is accepted."""
    compile_with(chain=Bigram())
    optimizer()()
    checked()()
