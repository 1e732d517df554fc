"""The order of layers, and rules about imports and printing, read from the source itself."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampling import EVERY_CASE

pytestmark = pytest.mark.cases(EVERY_CASE)

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "mpar").rglob("*.py"))

VALUES = (
    "errors",
    "hardware",
    "tree",
    "mesh",
    "optimizer",
    "plain",
    "spec",
    "strategy",
    "arrange",
    "precision",
    "plain_value",
    "plug_ins",
    "preset_names",
    "shards",
    "chain",
    "check_optimizer",
    "code_facts",
    "collectives",
    "conf_dir",
    "control",
    "exit_codes",
    "dtensor",
    "files",
    "kept_files",
    "op_shape",
    "parent_process",
    "testing",
    "torch_private",
    "typed_values",
    "user_cache",
    "user_code",
)
BELOW = {name: set(VALUES) for name in VALUES}
"""By room, the rooms that it may import besides itself. A facade, such as `program`, is imported by nobody below it."""
BELOW["cpp"] = set(VALUES)
BELOW["ops"] = {*VALUES, "cpp"}
for _name in ("kernels", "sharding", "schedules"):
    BELOW[_name] = {*VALUES, "ops"}
BELOW["models"] = {*VALUES, "ops", "sharding"}  # its `traced` finds out how a model may be sharded
BELOW["ir"] = {*VALUES, "kernels", "schedules"}
BELOW["proof"] = {*VALUES, "schedules", "ir"}
BELOW["forecast"] = {*VALUES, "ir"}
BELOW["compiler"] = {*VALUES, "ops", "kernels", "sharding", "schedules", "ir", "forecast"}
BELOW["runtime"] = {*VALUES, "cpp", "ops", "kernels", "ir"}
BELOW["measure"] = {*VALUES, "ops", "kernels", "ir", "runtime"}
BELOW["program"] = {*VALUES, "kernels", "sharding", "schedules", "ir", "proof", "forecast", "compiler", "runtime"}
# data, optim, checkpoint, infer and train are neighbours above all of these: who may use whom among them
_TRUNK = {*VALUES, "ops", "kernels", "schedules", "program", "compiler", "models"}
BELOW["adapters"] = {*VALUES, "ops", "models"}
BELOW["quantised"] = {*VALUES, "ops", "models"}
BELOW["tasks"] = {*VALUES, "ops", "models"}
BELOW["data"] = set(VALUES)
BELOW["optim"] = {*VALUES, "ops"}
BELOW["checkpoint"] = set(VALUES)
BELOW["infer"] = {*_TRUNK, "data"}
BELOW["rollouts"] = {"errors", "files", "plug_ins", "ops", "data", "infer", "tasks"}
BELOW["train"] = {*_TRUNK, "adapters", "quantised", "tasks", "data", "optim", "checkpoint", "infer", "rollouts"}
BELOW["serve"] = {"errors", "data", "infer"}
BELOW["cli"] = {
    *_TRUNK, "measure", "quantised", "tasks", "data", "optim", "checkpoint", "infer", "rollouts", "train", "serve",
}  # fmt: skip

PRIVATE_TORCH = re.compile(r"^torch(\.\w+)*\._(?!_)\w+|^torch\.fx\.experimental|^torch\.utils\._")


def module(path: Path) -> str:
    """`mpar.ops._rope` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(name: str) -> str | None:
    """`ops` for `mpar.ops._rope`; None for the package itself and for what is not ours."""
    parts = name.split(".")
    return parts[1] if parts[0] == "mpar" and len(parts) > 1 else None


def imports(path: Path) -> Iterator[tuple[str, ast.stmt, bool]]:
    """(imported module or module.name, statement, whether it is for type checking only) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node, id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (
                    (whole if is_module(whole) or not is_module(str(node.module)) else str(node.module)),
                    node,
                    id(node) in typing_only,
                )


def is_module(name: str) -> bool:
    """Whether `name` is a module of ours."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_point_down(path):
    """A module imports its own package and lower layers only."""
    own = layer(module(path))
    if own in (None, "__main__"):
        return
    wrong = [
        f"{ids(path)}:{node.lineno} imports {name}"
        for name, node, _ in imports(path)
        if (target := layer(name)) is not None and target != own and target not in BELOW[own]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_layer():
    """No package is outside the order."""
    found = {layer(module(path)) for path in FILES} - {None, "__main__"}
    assert found <= set(BELOW), found - set(BELOW)


def test_no_module_imports_itself_over_others():
    """There is no circle of imports, inside packages too, those for type checking included."""
    edges = {module(path): {name for name, _, _ in imports(path) if layer(name) and is_module(name)} for path in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for target in sorted(edges.get(name, set()) - {name}):
                visit(target, (*above, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_private_modules_stay_in_their_package(path):
    """A module `_x.py` is imported by its own package, subpackages included, and by nobody else: others read the contract."""
    here = module(path) if path.name == "__init__.py" else module(path).rpartition(".")[0]
    wrong = []
    for name, node, _ in imports(path):
        parts = name.split(".") if layer(name) else []
        owner = next((".".join(parts[:i]) for i, part in enumerate(parts) if part.startswith("_")), here)
        if is_module(name) and not f"{here}.".startswith(f"{owner}."):
            wrong.append(f"{ids(path)}:{node.lineno} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_modules_are_found_by_name_in_few_places():
    """`import_module` serves public names that are loaded lazily, and what a process may never need."""
    found = {ids(path) for path in FILES if "import_module(" in path.read_text(encoding="utf-8")}
    assert found == set(LAZY)


LAZY = {
    "mpar/__init__.py": "public names, so that a rank loads no compiler",
    "mpar/cli/main.py": "the command that is called, and no other",
    "mpar/cli/_later.py": "what a command needs torch for, once nothing is wrong with its arguments",
    "mpar/data/__init__.py": "public names, so that a missing file is found before torch is loaded",
    "mpar/data/_fast_encoder.py": "gigatoken, where it is installed",
    "mpar/data/_tokenizer_files.py": "sentencepiece, tiktoken and transformers, where a tokenizer is in their files",
    "mpar/data/reading/_files.py": "what reads tables, other file systems and zstd, where it is installed",
    "mpar/infer/_program_runner.py": "the compiler, which answers whose programs are kept do not need",
    "mpar/infer/_grammar.py": "llguidance, where it is installed",
    "mpar/models/traced/__init__.py": "public names, so that a declared model loads no tracer",
    "mpar/models/traced/_skeleton.py": "transformers, where it is installed",
    "mpar/kernels/_catalogue.py": "a kernel when it is launched: a laptop without Triton reads the catalogue",
    "mpar/plug_ins.py": "modules of the user's own, which a command names",
    "mpar/optim/__init__.py": "public names, so that a learning rate is checked before torch is loaded",
    "mpar/schedules/__init__.py": "public names, so that a rank loads no search",
    "mpar/torch_private.py": "private names of torch, of which a rank needs few",
    "mpar/train/prepare.py": "the compiler, which a run whose program is kept does not need",
    "mpar/train/__init__.py": "public names, so that a wrong value is refused before torch is loaded",
    "mpar/train/_rollouts.py": "the runners of the sampler, which only a task that draws answers needs",
    "mpar/train/_metrics.py": "tensorboard, where it is installed",
}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_import_inside_a_function(path):
    """Imports stand at the top of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    wrong = [
        f"{ids(path)}:{node.lineno}"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_only_the_command_line_prints(path):
    """`print` and writes to the standard streams are in mpar/cli alone."""
    if layer(module(path)) == "cli":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    wrong = [f"{ids(path)}:{call.lineno}" for call in calls if ast.unparse(call.func) in PRINTING]
    assert not wrong, "\n".join(wrong)


PRINTING = ("print", "sys.stdout.write", "sys.stderr.write")


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_private_torch_names_are_in_one_place(path):
    """What torch may change without notice is named in torch_private.py alone."""
    if path.name in ("torch_private.py",):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = [(node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    wrong = sorted({f"{ids(path)}:{line} uses {name}" for line, name in used if PRIVATE_TORCH.match(name)})
    assert not wrong, "\n".join(wrong)


def test_every_package_is_packaged():
    """pyproject.toml lists each package, and the folder of configurations."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {module(path) for path in FILES if path.name == "__init__.py"}
    assert set(listed) == {*found, "mpar.conf"}


def test_every_room_is_on_the_map():
    """docs/rooms.md has a line for each package of mpar, and every file and folder that it names is there."""
    page = (ROOT / "docs" / "rooms.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(mpar/[\w/]*)/`", page))
    assert {f"mpar/{path.name}" for path in (ROOT / "mpar").iterdir() if (path / "__init__.py").is_file()} <= {
        "/".join(name.split("/")[:2]) for name in named
    }
    assert all((ROOT / name).is_dir() for name in (*named, "conf", "tools", "bench", "tests"))
