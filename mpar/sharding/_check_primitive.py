"""Check a primitive: run it on small meshes of simulated ranks and compare with the op on global operands.

A wrong sharding rule gives wrong numbers without any error: for example a rule that allows the reversed dim of a reversal to be
sharded, or that treats a mean as a sum. Every factor is sharded in turn, and every pair of factors; every operand in which the
rule says that the op is linear is also given as a pending sum.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, fx

from mpar import testing, tree
from mpar.errors import MparError, ShardingError
from mpar.mesh import Mesh
from mpar.ops import Operand, Primitive, Static
from mpar.sharding._declared import check_declared
from mpar.sharding._lower import RankGraph, lower
from mpar.sharding._rules import NodeRule, rule_of
from mpar.sharding._simulate import distribute, run_lockstep
from mpar.sharding._trace import LogicalGraph, trace
from mpar.shards import assemble
from mpar.spec import P
from mpar.strategy import AxisTable

__all__ = ["check_primitive"]

MESHES = (Mesh(a=2), Mesh(a=4))
SQUARE = Mesh(a=2, b=2)


@dataclass(frozen=True)
class _Case:
    """One way to shard the operands.

    label: describes it in messages.
    hints: ask for results that are sharded along factors that no operand has.
    tried: the factors, or dims, that are sharded.
    """

    label: str
    mesh: Mesh
    in_specs: tuple[P, ...]
    hints: tuple[P | None, ...] = ()
    tried: tuple[str, ...] = ()


def check_primitive(
    primitive: Primitive,
    operands: Sequence[Operand],
    params: Mapping[str, Static] = MappingProxyType({}),
    *,
    within: Callable[..., object] | None = None,
    table: AxisTable = MappingProxyType({}),
) -> tuple[str, ...]:
    """Compare the op on simulated ranks with the op on global operands; returns the factors that were sharded on some mesh.

    operands: examples, real tensors. Floating ones are best float64. A factor is cut into 2 and 4 parts where its size allows
              that, so sizes that 4 divides check the most. Operands may be None or lists where the primitive allows it.
    params:   all static parameters.
    within:   for an op with operands or results that describe the rows of one rank, such as `dispatch` and `combine`: a function
              of `operands` that calls the primitive and whose results do not depend on the mesh. Then the dims of the function's
              operands are sharded, and their names are returned.
    table:    for the logical axes that the local program asks for, mesh axes: `a` of size 2 or 4, or `a` and `b` of size 2.

    Raises ConfigError for a primitive that lacks rules or contradicts itself; ShardingError, which names the primitive, how it
    was sharded, the mesh and the first result that differs.
    """
    check_declared(primitive, None if within else operands, params)
    if sum(result.type.kind() == "ListType" for result in primitive.op._schema.returns) > 1:
        raise ShardingError(f"cannot check primitive {primitive.name!r}: ops with several lists of results are not sharded")
    logical = trace(within or (lambda *given: primitive.op(*given, **params)), operands, canonical=within is not None)
    nodes = logical.graph.find_nodes(op="call_function", target=primitive.op)
    if not nodes:
        raise ShardingError(f"cannot check primitive {primitive.name!r}: the function given as `within` does not call it")
    leaves = [leaf for leaf in tree.leaves(tuple(operands)) if leaf is not None]
    expected = _whole(within or primitive.impl, operands, {} if within else params)
    cases = list(_cases_of_dims(logical) if within else _cases_of_factors(nodes[0]))
    for case in cases:
        _compare(primitive, logical, leaves, expected, case, table)
    return tuple(dict.fromkeys(name for case in cases for name in case.tried))


def _whole(fn: Callable[..., object] | None, operands: Sequence[Operand], params: Mapping[str, Static]) -> list[Tensor]:
    """The results for global operands. The op gets copies of these, because it may write over them."""
    assert fn is not None, "the primitive has no implementation"
    copies = tree.map_leaves(lambda x: None if x is None else x.clone(), tuple(operands))
    with torch.no_grad():
        return [result for result in tree.leaves(fn(*copies, **params)) if isinstance(result, Tensor)]


def _cases_of_factors(node: fx.Node) -> Iterator[_Case]:
    """Every factor sharded on every mesh, every pair of factors on the square mesh, every linear operand as a pending sum."""
    rule = rule_of(node)
    names = list(dict.fromkeys(name for dims in (*rule.factors, *rule.results) for factors in dims for name in factors))
    for name, mesh in itertools.product(names, MESHES):
        yield from _case_of(rule, {name: ("a",)}, mesh, f"factor {name!r} sharded by a")
    for name in names:
        yield from _case_of(rule, {name: ("a", "b")}, SQUARE, f"factor {name!r} sharded by a and b")
    for first, second in itertools.combinations(names, 2):
        label = f"factor {first!r} sharded by a, factor {second!r} by b"
        yield from _case_of(rule, {first: ("a",), second: ("b",)}, SQUARE, label)
    for index in sorted(rule.linear):
        if rule.operands[index].meta["val"].is_floating_point():
            specs = tuple(P(partial="a") if i == index else P() for i in range(len(rule.operands)))
            yield from (_Case(f"operand {index} a pending sum over a", mesh, specs) for mesh in MESHES)


def _case_of(rule: NodeRule, axes_of: dict[str, tuple[str, ...]], mesh: Mesh, label: str) -> Iterator[_Case]:
    """The case in which factors are sharded as `axes_of` says, in every dim where the shards are contiguous.

    There is none if a size does not allow it, or if no dim of an operand or result can be sharded so.
    """
    if any(rule.sizes[factor] % mesh.axis_size(axes) for factor, axes in axes_of.items()):
        return
    in_specs = tuple(
        P() if i in rule.as_is else P(*(_axes_of_dim(factors, rule, axes_of, mesh) for factors in dims))
        for i, dims in enumerate(rule.factors)
    )
    of_results = tuple(P(*(_axes_of_dim(factors, rule, axes_of, mesh) for factors in dims)) for dims in rule.results)
    used = frozenset[str]().union(*(spec.axes for spec in (*in_specs, *of_results)))
    if used:
        yield _Case(label, mesh, in_specs, of_results, tuple(name for name, axes in axes_of.items() if set(axes) <= used))


def _axes_of_dim(factors: tuple[str, ...], rule: NodeRule, axes_of: dict[str, tuple[str, ...]], mesh: Mesh) -> tuple[str, ...]:
    """The axes that shard a dim made of `factors`: those of the major factor, and those of each next factor if every factor
    before it has one element per rank."""
    axes: tuple[str, ...] = ()
    for name in factors:
        axes = (*axes, *axes_of.get(name, ()))
        if mesh.axis_size(axes_of.get(name, ())) != rule.sizes[name]:
            break
    return axes


def _cases_of_dims(logical: LogicalGraph) -> Iterator[_Case]:
    """Every dim of every operand sharded on every mesh; the dims of the same number in all operands together; every pair of dims
    on the square mesh."""
    shapes = [tuple(node.meta["val"].shape) for node in logical.placeholders]
    dims = [(i, dim) for i, shape in enumerate(shapes) for dim in range(len(shape))]

    def case(placed: Mapping[tuple[int, int], tuple[str, ...]], mesh: Mesh, label: str, *tried: str) -> Iterator[_Case]:
        if not any(shapes[i][dim] % mesh.axis_size(axes) for (i, dim), axes in placed.items()):
            specs = (P(*(placed.get((i, dim), ()) for dim in range(len(shape)))) for i, shape in enumerate(shapes))
            yield _Case(label, mesh, tuple(specs), tried=tried)

    for (i, dim), mesh in itertools.product(dims, MESHES):
        name = f"{logical.names[i]} dim {dim}"
        yield from case({(i, dim): ("a",)}, mesh, f"{name} sharded by a", name)
    for dim, mesh in itertools.product(range(max(map(len, shapes), default=0)), MESHES):
        alike = {(i, dim): ("a",) for i, shape in enumerate(shapes) if dim < len(shape) and not shape[dim] % mesh.size}
        yield from case(alike, mesh, f"dim {dim} of all operands sharded by a")
    for first, second in itertools.combinations(dims, 2):
        names = [f"{logical.names[i]} dim {dim}" for i, dim in (first, second)]
        yield from case({first: ("a",), second: ("b",)}, SQUARE, f"{names[0]} sharded by a, {names[1]} by b")


def _compare(
    primitive: Primitive,
    logical: LogicalGraph,
    leaves: Sequence[Tensor],
    expected: Sequence[Tensor],
    case: _Case,
    table: AxisTable,
) -> None:
    """Raise ShardingError unless the results of all ranks, assembled, are `expected`."""
    on_mesh = {name: tuple(axis for axis in axes if axis in case.mesh.axes) for name, axes in table.items()}
    try:
        ranked = lower(logical, case.mesh, case.in_specs, None, on_mesh, case.hints)
        results = _simulate(ranked, leaves)
    except (AssertionError, MparError, RuntimeError, ValueError) as error:
        raise ShardingError(_message(primitive, logical, case, f"the ranks' program fails: {error}")) from error
    names = primitive.results if len(expected) == len(primitive.results) else tuple(map(str, range(len(expected))))
    dtypes = {x.dtype for x in (*leaves, *expected) if x.is_floating_point()}
    rtol = max((testing.TOLERANCES[dtype] for dtype in dtypes if dtype in testing.TOLERANCES), default=0.0)
    for name, actual, expected_result, spec in zip(names, results, expected, ranked.out_specs, strict=True):
        difference = _difference(actual, expected_result, rtol)
        if difference:
            raise ShardingError(_message(primitive, logical, case, f"result {name!r}, which comes as {spec}, {difference}"))


def _simulate(ranked: RankGraph, leaves: Sequence[Tensor]) -> list[Tensor]:
    columns = [_columns(leaf, spec, ranked.mesh) for leaf, spec in zip(leaves, ranked.in_specs, strict=True)]
    results = run_lockstep(ranked.graph, ranked.mesh, columns, ranked.logical.constants)
    return [assemble(column, spec, ranked.mesh) for column, spec in zip(results, ranked.out_specs, strict=True)]


def _columns(x: Tensor, spec: P, mesh: Mesh) -> list[Tensor]:
    """Every rank's shard. A pending sum gets a random term on each rank, because zeros would hide an op that is not linear."""
    if not spec.partial:
        return distribute(x, spec, mesh)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for _ in range(mesh.size - 1)]
    return [*parts, x - sum(parts[1:], parts[0])]


def _difference(actual: Tensor, expected: Tensor, rtol: float) -> str:
    """How a result differs from the expected one by more than a relative error of `rtol`; empty if it does not."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {tuple(actual.shape)} {actual.dtype}; the whole gives {tuple(expected.shape)} {expected.dtype}"
    a, b = actual.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    finite = torch.where(same | ~b.isfinite(), 0.0, b)
    scale = float(torch.linalg.vector_norm(b[b.isfinite()])) / max(b.numel(), 1) ** 0.5
    wrong = ~same & ~((a - finite).abs() <= rtol * (b.abs() + scale))
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"differs first at {list(place)}: the ranks give {float(a[place])!r}, the whole gives {float(b[place])!r}"


def _message(primitive: Primitive, logical: LogicalGraph, case: _Case, problem: str) -> str:
    operands = [
        f"{name} {tuple(node.meta['val'].shape)} by {spec}"
        for name, node, spec in zip(logical.names, logical.placeholders, case.in_specs, strict=True)
    ]
    return (
        f"the sharding rule of primitive {primitive.name!r} does not hold, with {case.label}:\n{problem}.\n"
        f"operands: {', '.join(operands)}\nmesh: {case.mesh}\n"
        "Name the factor in need_replication, write its local program with def_sharded, or correct the factors or `linear`."
    )
