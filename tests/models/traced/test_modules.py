"""Modules of a user's own through `models.from_module`: what they compute on every mesh, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpar
from mpar import models, testing, tree
from mpar.errors import ConfigError
from mpar.optim import SGD


class Block(nn.Module):
    """Attention with queries, keys and values in one matrix, and a feed-forward layer."""

    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 48, bias=False), nn.Linear(48, width, bias=False)

    def forward(self, x):
        heads = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Learned positions, a head that is tied to the embedding."""

    def __init__(self, blocks=None):
        super().__init__()
        self.embed, self.places = nn.Embedding(64, 32), nn.Embedding(24, 32)
        self.blocks = nn.ModuleList(blocks or [Block(), Block()])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, positions=None):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        return self.head(self.norm(self.run_blocks(self.embed(tokens) + self.places(positions))))

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x


TOKENS, LABELS = torch.randint(64, (2, 4, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def net():
    """A module in float64."""
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture(scope="module")
def made(net):
    """Its model and parameters."""
    return models.from_module(net, TOKENS)


@pytest.mark.parametrize(
    ("mesh", "strategy"), [(mpar.Mesh(fsdp=2, tp=2), "zero3_tp_sp"), (mpar.Mesh(pp=2), "ddp"), (mpar.Mesh(cp=2), "ddp")], ids=str
)
def test_a_step_has_the_gradients_of_the_module(mesh, strategy, net, made):
    """Whatever the mesh; two messages in the forward of a block over tp."""
    model, params = made
    loss = F.cross_entropy(net(TOKENS).flatten(0, 1), LABELS.flatten())
    gradients = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
    optimizer = SGD(lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=1e9)
    program = mpar.compile_step(model, optimizer, mesh, strategy, (4, 12))
    after, metrics = program.simulate(program.init_state(params), {"tokens": TOKENS, "labels": LABELS})
    testing.assert_close(metrics["loss"], loss.detach(), name="loss")
    new = model.state_dict(after.params(model.abstract_params))
    for name, old in net.named_parameters():
        testing.assert_close(old.detach() - new[name], gradients[name], name=name)


def test_the_strategy_finds_heads_and_hidden_features(made):
    """The fused matrix becomes a leaf each for queries, keys and values, with a dim for heads; a block has two messages."""
    model, _ = made
    axes = dict(tree.leaves_with_path(model.param_axes, is_leaf=lambda x: isinstance(x, tuple)))
    assert axes["blocks.1.qkv.weight.0"] == ("heads", None, "embed")
    assert axes["blocks.1.out.weight"] == ("embed", "heads", None)
    assert axes["blocks.1.up.weight"] == ("mlp", "embed") and axes["embed.weight"] == ("vocab", "embed")
    assert model.traits.permutable and model.traits.documents and model.traits.continues and model.vocab_size == 64
    program = mpar.compile_step(model, SGD(lr=1.0), mpar.Mesh(tp=2), "tp", (4, 12))
    assert [len(kind.collectives) for name, kind in program.kinds.items() if name == "layers forward"] == [2]


def test_parameters_come_back_by_the_names_of_the_module(net, made):
    """Bit by bit; and they are copies."""
    model, params = made
    given = model.state_dict(params)
    stored = dict(net.named_parameters())
    assert set(given) == set(stored)
    assert all(torch.equal(x, stored[name]) and x.data_ptr() != stored[name].data_ptr() for name, x in given.items())


class Turned(Block):
    """Queries and keys are multiplied with a table."""

    def forward(self, x, table):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q * table, k * table, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class WithTable(Net):
    def __init__(self):
        super().__init__([Turned(), Turned()])
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x, self.table)
        return x


def test_a_module_in_bfloat16_has_its_loss():
    """Its buffers are tables of float32 for the model, which do not make attention wider."""
    torch.manual_seed(0)
    net = WithTable().bfloat16()
    model, params = models.from_module(net, TOKENS)
    loss, weight = model.loss(params, {"tokens": TOKENS, "labels": LABELS})
    expected = F.cross_entropy(net.float()(TOKENS).flatten(0, 1), LABELS.flatten())
    assert model.dtype == torch.bfloat16
    testing.assert_close((loss / weight).bfloat16(), expected.bfloat16(), name="loss")


class WithoutList(Net):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = self.blocks[0], None

    def run_blocks(self, x):
        return self.first(x)


class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.wider, self.block = nn.Linear(32, 64), Block(64)

    def forward(self, x):
        return self.block(self.wider(x))


class UnlikeBlocks(Net):
    def __init__(self):
        super().__init__([Block(), Wider(), nn.Linear(64, 32)])


class ByKeyword(Net):
    def run_blocks(self, x):
        return self.blocks[1](self.blocks[0](input=x) if isinstance(self.blocks[0], nn.Linear) else x)


class Depending(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Around(Net):
    def run_blocks(self, x):
        return self.blocks[1](self.blocks[0](x) + 0.1 * x)


class Twice(Net):
    def run_blocks(self, x):
        return super().run_blocks(super().run_blocks(x))


class Drawing(Block):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class Reduced(Net):
    def forward(self, tokens):
        return super().forward(tokens).sum(-1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (WithoutList, r"looked for a torch.nn.ModuleList or Sequential within it.*it has embed, places, norm, head, first"),
        (UnlikeBlocks, r"blocks.1 with x \(4, 12, 32\)\n  blocks.2 with x \(4, 12, 64\)"),
        (lambda: ByKeyword([nn.Linear(32, 32), Block()]), r"blocks.0 with no tensor first"),
        (
            lambda: Net([Depending(), Block()]),
            r"at test_modules.py:\d+ makes a Python value or a shape from the data",
        ),
        (Around, r"does something besides x pass from block to block, or around them\?\n  logits differ"),
        (Twice, r"must call each of blocks.0 to blocks.1 once, in order"),
        (lambda: Net([Drawing(), Block()]), r"draws from torch's generator"),
        (Reduced, r"it gives \(4, 12\), not logits"),
        (lambda: Net().to("meta"), r"embed.weight, places.weight, blocks.0.norm1.weight have no values"),
        (lambda: Net([Block().double(), Block()]), r"dtypes torch.float32, torch.float64"),
    ],
)
def test_what_cannot_be_traced_is_refused(make, words):
    """With what was looked for, and what was found."""
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        models.from_module(make(), TOKENS)


@pytest.mark.parametrize("example", [TOKENS[0], TOKENS[:, :6], TOKENS.float()], ids=["(S,)", "short", "float"])
def test_an_example_is_rows_of_tokens(example):
    """Of integers, and long enough to be cut into parts."""
    with pytest.raises(ConfigError, match=r"give tokens \(B, S\), S at least 8"):
        models.from_module(Net(), example)
