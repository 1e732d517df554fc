"""The mutants of a file: every small change to one of its lines that is likely to give valid Python with another meaning."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "changes_meaning", "mutants_of"]

COMPARISONS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
}
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "/": "*", "%": "//", "&": "|", "|": "&"}
COMPILED_BY = re.compile(r"(^|\.)(jit|autotune|heuristics)\b")
"""Decorators of functions that another compiler reads: tests do not run their source as Python."""
UNSEEN_METHODS = ("__repr__", "__str__")
UNSEEN_NAMES = ("__all__", "__slots__", "__match_args__")
UNSEEN_CALLS = ("warn", "TypeVar", "cast")
UNSEEN_ARGUMENTS = ("strict", "help", "stacklevel")  # `strict` of `zip` states an invariant, as an assertion does
GENERICS = ("tuple", "list", "dict", "set", "frozenset", "Callable", "Iterator", "Sequence", "Mapping", "Iterable")


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    path:   of the file, from the root of the tree, with forward slashes.
    line:   its number, from 1. column: where in it the change starts, from 0.
    kind:   which sort of change, in words.
    scope:  the function or class that the line is in, as `Class.method`; empty outside of all.
    before, after: the line without and with the change.
    in_function: whether the line runs when a function is called; the others run when the file is imported.
    """

    path: str
    line: int
    column: int
    kind: str
    scope: str
    before: str
    after: str
    in_function: bool

    @property
    def name(self) -> str:
        """Says which mutant of a tree it is."""
        return f"{self.path}:{self.line}:{self.column} {self.kind}: {self.after.strip()}"

    def applied(self, source: str) -> str:
        """`source` with the change."""
        lines = source.split("\n")
        assert lines[self.line - 1] == self.before, f"{self.path}:{self.line} is another line than the mutant's"
        lines[self.line - 1] = self.after
        return "\n".join(lines)


@dataclass(frozen=True)
class _Edit:
    """Characters `start` to `stop` of a line become `text`."""

    line: int
    start: int
    stop: int
    text: str
    kind: str


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines. A few are not valid Python; `changes_meaning` finds these.

    There are no mutants of docstrings, annotations, decorators, assertions, f-strings, what is raised or warned of, `__repr__`,
    and code that another compiler reads.
    """
    text = _Text(source)
    found: dict[tuple[int, str], Mutant] = {}
    for node, scope, in_function in _changeable(ast.parse(source), (), False):
        for edit in _edits(node, text):
            before = text.lines[edit.line - 1]
            after = before[: edit.start] + edit.text + before[edit.stop :]
            mutant = Mutant(path, edit.line, edit.start, edit.kind, ".".join(scope), before, after, in_function)
            found.setdefault((edit.line, after), mutant)
    return sorted(found.values(), key=lambda m: (m.line, m.column, m.after))


def changes_meaning(mutant: Mutant, source: str) -> bool:
    """Whether the file with the mutant is valid Python, and has another syntax tree than without it."""
    try:
        tree = ast.parse(mutant.applied(source))
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


def _changeable(node: ast.AST, scope: tuple[str, ...], in_function: bool) -> Iterator[tuple[ast.AST, tuple[str, ...], bool]]:
    """Every node that may be changed, with its scope and whether it is in a function."""
    if _is_unseen(node):
        return
    yield node, scope, in_function
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        inside = (*scope, node.name)
        for default in () if isinstance(node, ast.ClassDef) else (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                yield from _changeable(default, inside, in_function)
        for statement in node.body:
            yield from _changeable(statement, inside, in_function or not isinstance(node, ast.ClassDef))
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment"):
            continue
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            children = [*node.value.elts]  # in `a, b = c, d` no item may be left out
        for child in children:
            yield from _changeable(child, scope, in_function)


def _is_unseen(node: ast.AST) -> bool:
    """Whether changes of the node, or of nodes below it, do not count as changes of the program's behaviour."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Raise() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring, or a placeholder
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name in UNSEEN_METHODS or any(COMPILED_BY.search(ast.unparse(d)) for d in node.decorator_list)
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name in UNSEEN_NAMES or (isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation))
        case ast.Call(func=function):
            return ast.unparse(function).split(".")[-1] in UNSEEN_CALLS
        case ast.Subscript(value=ast.Name(id=name)):  # such as a type alias
            return name in GENERICS
        case ast.keyword(arg=name):
            return name in UNSEEN_ARGUMENTS
    return False


class _Text:
    """The text of a file. It turns positions of the syntax tree, which count bytes, into characters of a line."""

    def __init__(self, source: str) -> None:
        self.lines = source.split("\n")
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        words = (tokenize.OP, tokenize.NAME)
        self.tokens = [(token.start, token.end, token.string) for token in tokens if token.type in words]

    def start(self, node: ast.expr) -> tuple[int, int]:
        return node.lineno, self._column(node.lineno, node.col_offset)

    def end(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return node.end_lineno, self._column(node.end_lineno, node.end_col_offset)

    def _column(self, line: int, offset: int) -> int:
        return len(self.lines[line - 1].encode()[:offset].decode())

    def of(self, node: ast.expr) -> str | None:
        """The source of a node; None if it is not on one line."""
        (line, start), (last, stop) = self.start(node), self.end(node)
        return self.lines[line - 1][start:stop] if line == last else None

    def whole(self, node: ast.expr, text: str, kind: str) -> Iterator[_Edit]:
        """Replace a node that is on one line by `text`."""
        (line, start), (last, stop) = self.start(node), self.end(node)
        if line == last:
            yield _Edit(line, start, stop, text, kind)

    def between(self, left: ast.expr, right: ast.expr) -> tuple[int, int, int, str] | None:
        """Line, start, stop and words of the operator between two operands, without parentheses; None if not on one line."""
        first, last = self.end(left), self.start(right)
        inside = [t for t in self.tokens if first <= t[0] and t[1] <= last and t[2] not in "()"]
        if not inside or len({t[0][0] for t in inside}) > 1:
            return None
        (line, start), (_, stop) = inside[0][0], inside[-1][1]
        return line, start, stop, " ".join(t[2] for t in inside)


def _edits(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    for make in (_comparison, _operator, _condition, _constant, _call, _items):
        yield from make(node, text)


def _comparison(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if isinstance(node, ast.Compare):
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            if found := text.between(left, right):
                line, start, stop, words = found
                for other in COMPARISONS.get(words, ()):
                    yield _Edit(line, start, stop, other, f"{words} becomes {other}")


def _operator(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if isinstance(node, ast.BinOp) and not _is_display(node.left) and not _is_display(node.right):
        found = text.between(node.left, node.right)
        if found is not None and found[3] in ARITHMETIC:
            line, start, stop, words = found
            yield _Edit(line, start, stop, ARITHMETIC[words], f"{words} becomes {ARITHMETIC[words]}")
        source = text.of(node)
        if isinstance(node.op, ast.FloorDiv) and source is not None:
            yield from text.whole(node, f"(-(-{source}))", "// rounds up")
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            if found := text.between(left, right):
                line, start, stop, words = found
                other = {"and": "or", "or": "and"}[words]
                yield _Edit(line, start, stop, other, f"{words} becomes {other}")
    elif isinstance(node, ast.AugAssign):
        found = text.between(node.target, node.value)
        if found is not None and found[3] in ("+=", "-="):
            line, start, stop, words = found
            other = {"+=": "-=", "-=": "+="}[words]
            yield _Edit(line, start, stop, other, f"{words} becomes {other}")


def _is_display(node: ast.expr) -> bool:
    """Whether the node is a literal string, list or tuple, on which most operators raise TypeError at once."""
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _condition(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and (operand := text.of(node.operand)):
        yield from text.whole(node, f"({operand})", "not is dropped")
    tests: list[ast.expr] = []
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        plain = isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        if plain and (source := text.of(test)):
            yield from text.whole(test, f"(not {source})", "condition is negated")


def _constant(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Constant) and isinstance(side.value, str):
                yield from text.whole(side, repr(side.value + "_"), "string is another")
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield from text.whole(node, str(not value), f"{value} becomes {not value}")
    elif isinstance(value, int):
        for other in (value + 1, value - 1):
            yield from text.whole(node, str(other) if other >= 0 else f"({other})", f"{value} becomes {other}")
    elif isinstance(value, float):
        other_float = value * 2 if value else 1.0
        yield from text.whole(node, repr(other_float), f"{value} becomes {other_float}")


def _call(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = {"min": "max", "max": "min"}[node.func.id]
        yield from text.whole(node.func, other, f"{node.func.id} becomes {other}")
    elif isinstance(node.func, ast.Name) and node.func.id == "sorted":
        if values := text.of(node.args[0]):
            yield from text.whole(node, f"list({values})", "sorted is removed")
    elif len(node.args) >= 2 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        first, second, line = text.of(node.args[0]), text.of(node.args[1]), node.args[0].lineno
        alike = type(node.args[0]) is type(node.args[1])  # what looks otherwise is of another type, as a rule
        if first and second and alike and line == node.args[1].lineno and ast.unparse(node.func) != "isinstance":
            (_, start), (_, stop) = text.start(node.args[0]), text.end(node.args[1])
            middle = text.lines[line - 1][text.end(node.args[0])[1] : text.start(node.args[1])[1]]
            yield _Edit(line, start, stop, second + middle + first, "arguments are swapped")


def _items(node: ast.AST, text: _Text) -> Iterator[_Edit]:
    """Edits that leave out the last item of a tuple or list, or its first."""
    if isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load) and len(node.elts) >= 2:
        sources = [text.of(item) for item in node.elts]
        if text.of(node) is not None and None not in sources:
            opening, closing = "()" if isinstance(node, ast.Tuple) else "[]"
            for kept, label in ((sources[:-1], "last"), (sources[1:], "first")):
                inside = ", ".join(source for source in kept if source is not None)
                comma = "," if isinstance(node, ast.Tuple) and len(kept) == 1 else ""
                yield from text.whole(node, f"{opening}{inside}{comma}{closing}", f"{label} item is dropped")
