"""The architecture, held by reading the sources: imports, private torch, sizes, docstrings.

Each rule is a function from a parsed module to its violations; a test runs one rule over all modules and
reports every violation at once. Limits: what is imported by a computed name is not seen.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders and modules of `functionalize`, lowest first: each imports from lower layers, and without cycles from its own.
LAYERS = {
    "ops": 0,
    "call_stack": 0,
    "errors": 0,
    "patches": 0,
    "reachability": 0,
    "refusals": 0,
    "uninterrupted": 0,
    "_torch": 1,
    "aliasing": 2,
    "python_state": 2,
    "tracing": 3,
    "report": 3,
    "transform": 4,
    "runtime": 4,
    "graph_capture": 5,
    "verify": 5,
    "deferred": 5,
    "backends": 6,
    "torchdistx": 6,
    "__init__": 6,
    "cli": 7,
    "__main__": 7,
}
# Beyond the layers: who knows nothing of whom, and why.
BANS: dict[str, dict[str, str]] = {
    "aliasing": dict.fromkeys(("tracing", "transform"), "who shares memory is told without running an op"),
    "python_state": {"aliasing": "it knows Python objects, and no storages"},
    "report": dict.fromkeys(("tracing", "transform", "runtime", "graph_capture"), "it draws what it is given"),
    "tracing": dict.fromkeys(("transform", "report"), "it records what it is shown, functional or not"),
    "transform": {"runtime": "it serves traces as well, which nobody calls"},
    "runtime": dict.fromkeys(("graph_capture", "tracing", "transform"), "a call runs without what made its program"),
}
# Who may import packages that are not dependencies of the distribution. Everything else is core.
OPTIONAL_DOORS = ("functionalize.backends", "functionalize.cli")
# Which views have a rule of which kind, beside the rules.
RULES_OF_VIEWS = ("UNSUPPORTED_VIEWS", "BY_LAYOUT", "MULTI_OUTPUT_VIEWS")
MODULE_LINES = 600
FUNCTION_LINES = 60
CLASS_FIELDS = 15
TOP_MODULES = 7  # beside the folders
FOLDER_MODULES = 12
# Private names of others that stand where they are used, each with its reason. All else goes through `_torch`.
PRIVATE_OF_OTHERS = {
    "_schema": "what an operator declares; no public name, and torch's own pages on custom operators use it",
    "_version": "how often a tensor was written; torch's notes on autograd explain it by this name",
    "_getframe": "sys: documented, in spite of its name",
    "_fields": "of named tuples: documented, in spite of its name",
    "_make": "of named tuples: documented, in spite of its name",
    "_replace": "of named tuples: documented, in spite of its name",
}


@dataclass(frozen=True)
class Source:
    """One parsed module. `name` is its import name, without `.__init__`."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, text: str, path: Path = Path("<test>")) -> Source:
        return cls(name, path, text, ast.parse(text))

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


def sources(folder: str, package: str) -> list[Source]:
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT / folder).with_suffix("").parts
        name = ".".join((package, *parts)).removesuffix(".__init__")
        found.append(Source.parse(name, file.read_text(), file.relative_to(ROOT)))
    return found


TRANSFORM = sources("functionalize", "functionalize")
CODEGEN = sources("codegen", "functionalize.codegen")
OURS = frozenset(source.name for source in TRANSFORM + CODEGEN) | {
    "functionalize.generated",
    *(f"functionalize.{module}" for module in LAYERS),
}


def imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every imported dotted name, relative ones resolved; `from m import n` gives `m.n`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = source.package.split(".")
                base = ".".join(filter(None, [*package[: len(package) - node.level + 1], node.module]))
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def our_module(name: str) -> str:
    """The module of ours that an imported dotted name lies in: itself, or what it is taken from."""
    while name not in OURS and "." in name:
        name = name.rpartition(".")[0]
    return name


def layer_key(module: str) -> str:
    return "__init__" if module == "functionalize" else module.split(".")[1]


def upward_imports(source: Source) -> Iterator[str]:
    key = layer_key(source.name)
    if key not in LAYERS:
        yield source.at(source.tree, f"{source.name} has no layer: give it one in LAYERS")
        return
    for node, name in imports(source):
        if name.split(".")[0] != "functionalize" or name.startswith("functionalize.generated"):
            continue
        target = layer_key(our_module(name))
        if target == "codegen":
            if key not in ("ops", "cli"):
                yield source.at(node, f"imports {name}: the transform meets codegen only in ops")
        elif LAYERS.get(target, 0) > LAYERS[key]:
            yield source.at(node, f"layer {LAYERS[key]} imports {name} of layer {LAYERS[target]}")


def banned_imports(source: Source) -> Iterator[str]:
    """What the table of bans says, whatever the layers are."""
    bans = BANS.get(layer_key(source.name), {})
    for node, name in imports(source):
        target = layer_key(our_module(name)) if name.split(".")[0] == "functionalize" else ""
        if target in bans:
            yield source.at(node, f"imports {name}, which {layer_key(source.name)} does not know: {bans[target]}")


def foreign_imports(source: Source) -> Iterator[str]:
    """Third-party packages: torch for the transform, yaml and jinja2 for codegen, jinja2 for the report, no others."""
    codegen = source.name.startswith("functionalize.codegen")
    allowed = {"yaml", "jinja2"} if codegen else {"torch"}
    if source.name.startswith("functionalize.report"):
        allowed.add("jinja2")
    if source.name.startswith(OPTIONAL_DOORS):
        return
    for node, name in imports(source):
        top = name.split(".")[0]
        if top == "functionalize":
            if codegen and not name.startswith("functionalize.codegen"):
                yield source.at(node, f"codegen imports {name}; it knows nothing of the transform")
        elif top not in sys.stdlib_module_names | allowed:
            yield source.at(node, f"imports {name}; allowed are the standard library and {sorted(allowed)}")


def generated_imports(source: Source) -> Iterator[str]:
    if source.name == "functionalize.ops.tables":
        return
    for node, name in imports(source):
        if name.startswith("functionalize.generated"):
            yield source.at(node, f"imports {name}; only functionalize.ops.tables does")


def private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")


def private_torch(source: Source) -> Iterator[str]:
    """Private names reached through torch's modules. `torch.ops.aten._x` is an operator, not a symbol."""
    if source.name.startswith("functionalize._torch"):
        return
    roots = {"torch": "torch"}  # local name -> what it stands for
    for node, name in imports(source):
        if name.split(".")[0] == "torch" and any(map(private, name.split("."))):
            yield source.at(node, f"imports {name}; private torch comes through functionalize._torch")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            roots.update(torch_names(node))
    for node in ast.walk(source.tree):
        chain = dotted(node)
        if chain is None or chain[0] not in roots:
            continue
        full = (*roots[chain[0]].split("."), *chain[1:])
        if full[:2] != ("torch", "ops") and private(full[-1]):
            yield source.at(node, f"uses {'.'.join(full)}; private torch comes through functionalize._torch")


def private_objects(source: Source) -> Iterator[str]:
    """Private attributes of objects that are not the module's own: `tensor._base`, `graph._len`.

    A private name is its module's. So whatever is called so elsewhere is torch's or somebody else's.
    """
    if source.name.startswith("functionalize._torch"):
        return
    own = bound_names(source.tree)
    for node, chain, name in attributes(source.tree):
        if private(name) and name not in own and name not in PRIVATE_OF_OTHERS and not is_operator(chain):
            yield source.at(node, f"uses {name} of another; private torch comes through functionalize._torch")


def attributes(tree: ast.AST) -> Iterator[tuple[ast.AST, tuple[str, ...], str]]:
    """Every attribute that is asked for, with the names that lead to it where these are plain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, (dotted(node) or ())[:-1], node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _ASKED_BY_TEXT:
            yield from ((node, (), str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant))


_ASKED_BY_TEXT = ("getattr", "setattr", "hasattr", "attrgetter")


def bound_names(tree: ast.AST) -> set[str]:
    """What a module binds: functions, classes, variables, fields, slots, and attributes of `self` and `cls`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        if isinstance(node, ast.ClassDef):
            found |= slots(node)
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def slots(node: ast.ClassDef) -> set[str]:
    """The entries of a class's `__slots__`."""
    return {
        entry.value
        for one in node.body
        if isinstance(one, ast.Assign) and "__slots__" in map(ast.unparse, one.targets)
        for entry in ast.walk(one.value)
        if isinstance(entry, ast.Constant) and isinstance(entry.value, str)
    }


def is_operator(chain: tuple[str, ...]) -> bool:
    """Whether names lead into `torch.ops`: what is asked there is an operator, private or not."""
    return chain[:1] == ("aten",) or chain[:2] == ("torch", "ops")


def torch_names(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The local names that an import binds to torch's public modules and functions."""
    if isinstance(node, ast.Import):
        return {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
    if node.level or not node.module or node.module.split(".")[0] != "torch":
        return {}
    return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}


def dotted(node: ast.AST) -> tuple[str, ...] | None:
    """`a.b.c` as its parts; None where it does not start with a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if parts and isinstance(node, ast.Name) else None


def sizes(source: Source) -> Iterator[str]:
    """Modules and functions over the limits; a function's docstring does not count."""
    lines = source.text.count("\n")
    if lines > MODULE_LINES:
        yield source.at(source.tree, f"{lines} lines, over {MODULE_LINES}: is there a seam?")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if length > FUNCTION_LINES:
            yield source.at(node, f"{node.name} has {length} lines, over {FUNCTION_LINES}")


def fields(source: Source) -> Iterator[str]:
    """Classes with too many fields: annotated ones, slots, and what methods set on `self`."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        found = slots(node)
        found |= {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        found |= {
            one.attr
            for one in ast.walk(node)
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and is_self(one.value)
        }
        if len(found) > CLASS_FIELDS:
            yield source.at(node, f"{node.name} has {len(found)} fields, over {CLASS_FIELDS}: is there a seam?")


def operator_tables(source: Source) -> Iterator[str]:
    """Sets of operators, and operators by operators: such facts stand in `ops`. Rules by operator may be anywhere."""
    key = layer_key(source.name)
    if key == "ops" or source.name.startswith(OPTIONAL_DOORS):
        return
    for node in source.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if name not in RULES_OF_VIEWS and is_table(node.value):
            yield source.at(node, f"{name} is a table of facts about operators, which stand in `ops`")


def is_table(value: ast.AST) -> bool:
    """Whether a value has several operators, and nothing that says what to do about them."""
    if isinstance(value, ast.Dict):
        return len(value.keys) > 1 and all(is_operator(dotted(entry) or ()) for entry in value.values)
    collections = [node for node in ast.walk(value) if isinstance(node, ast.Set | ast.Tuple | ast.List)]
    return any(sum(is_operator(dotted(entry) or ()) for entry in node.elts) > 1 for node in collections) and not any(
        isinstance(node, ast.Dict | ast.Lambda) for node in ast.walk(value)
    )


def unexplained(source: Source) -> Iterator[str]:
    """Every module opens with what it is for."""
    if source.tree.body and not ast.get_docstring(source.tree):
        yield source.at(source.tree, "no docstring: open with the module's job, invariant and limits")


Rule = Callable[[Source], Iterator[str]]
RULES: list[tuple[Rule, list[Source]]] = [
    (upward_imports, TRANSFORM),
    (banned_imports, TRANSFORM),
    (foreign_imports, TRANSFORM + CODEGEN),
    (generated_imports, TRANSFORM + CODEGEN),
    (private_torch, TRANSFORM + CODEGEN),
    (private_objects, TRANSFORM + CODEGEN),
    (sizes, TRANSFORM + CODEGEN),
    (fields, TRANSFORM),  # codegen's `Override` has a field for each key of exceptions.yaml
    (operator_tables, TRANSFORM),
    (unexplained, TRANSFORM + CODEGEN),
]


@pytest.mark.parametrize(("rule", "over"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_rule_holds(rule: Rule, over: list[Source]) -> None:
    violations = [violation for source in over for violation in rule(source)]
    assert not violations, "\n" + "\n".join(violations)


def test_no_import_cycles() -> None:
    edges = {
        source.name: {our_module(name) for _, name in imports(source) if name.split(".")[0] == "functionalize"}
        for source in TRANSFORM + CODEGEN
    }
    # A package's __init__ gathers its modules and is imported with each of them: no edge of its own.
    packages = {source.name for source in TRANSFORM + CODEGEN if source.path.name == "__init__.py"}
    graph = {name: targets - packages - {name} for name, targets in edges.items() if name not in packages}
    while graph:
        imported = set().union(*graph.values())
        loose = {name for name, targets in graph.items() if not targets & graph.keys() or name not in imported}
        assert loose, f"import cycle among {sorted(graph)}"
        graph = {name: targets for name, targets in graph.items() if name not in loose}


def test_few_modules_lie_beside_the_folders() -> None:
    found = [source.name for source in TRANSFORM if source.path.parent == Path("functionalize")]
    assert len(found) <= TOP_MODULES, f"{found}: each folder is a layer's, which one is it?"


def test_no_folder_has_too_many_modules() -> None:
    folders = Counter(source.path.parent for source in TRANSFORM + CODEGEN if source.path.name != "__init__.py")
    fuller = {str(f): n for f, n in folders.items() if n > FOLDER_MODULES}
    assert not fuller, f"over {FOLDER_MODULES} modules: {fuller}: which of them belong together?"


def test_every_folder_is_in_the_distribution() -> None:
    listed = (ROOT / "pyproject.toml").read_text().partition("\npackages = [")[2].partition("]")[0]
    assert set(re.findall('"(.+)"', listed)) == {source.package for source in TRANSFORM + CODEGEN} | {
        "functionalize.generated"
    }


def test_the_map_prints_a_job_for_each_module_lower_layers_first(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.repository.map import main  # which imports this module

    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    jobs = [line.split(maxsplit=1) for line in printed if line.startswith("    ")]
    modules = [source for source in TRANSFORM + CODEGEN if source.path.name != "__init__.py"]
    assert sorted(name for name, _ in jobs) == sorted(source.path.stem for source in modules)
    folders = [line.split("/")[1] for line in printed if line.startswith("functionalize/") and line.count("/") > 1]
    assert [LAYERS[folder] for folder in folders] == sorted(LAYERS[folder] for folder in folders)


@pytest.mark.parametrize(
    ("rule", "module", "text", "expected"),
    [
        (upward_imports, "functionalize.aliasing.bases", "from functionalize.transform.api import f", "2 imports"),
        (upward_imports, "functionalize.transform.mode", "from .. import verify", "layer 4 imports"),
        (upward_imports, "functionalize.report.page", "from ..transform import mode", "layer 3 imports"),
        (banned_imports, "functionalize.aliasing.bases", "from ..tracing.fakeify import f", "does not know"),
        (banned_imports, "functionalize.transform.mode", "import functionalize.runtime.guards.guards", "does not know"),
        (upward_imports, "functionalize.novel", "", "has no layer"),
        (upward_imports, "functionalize.transform.mode", "from ..codegen import spec", "codegen only"),
        (foreign_imports, "functionalize.transform.mode", "import numpy", "imports numpy"),
        (foreign_imports, "functionalize.codegen.emit", "import torch", "imports torch"),
        (foreign_imports, "functionalize.codegen.emit", "from ..transform import mode", "nothing of the transform"),
        (generated_imports, "functionalize.transform.mode", "from ..generated import ops", "only functionalize.ops"),
        (private_torch, "functionalize.transform.mode", "import torch\ntorch._C.f()", "torch._C"),
        (private_torch, "functionalize.transform.mode", "from torch._ops import OpOverload", "torch._ops"),
        (private_torch, "functionalize.transform.mode", "from torch.utils import _pytree as p", "torch.utils._pytree"),
        (private_torch, "functionalize.transform.mode", "from torch import fx\nfx._x.y", "torch.fx._x"),
        (private_torch, "functionalize.transform.mode", "import torch.fx as t\nt._x", "torch.fx._x"),
        (private_objects, "functionalize.transform.mode", "def f(tensor): return tensor._base", "_base"),
        (private_objects, "functionalize.transform.mode", "def f(graph): graph._len += 1", "_len"),
        (private_objects, "functionalize.transform.mode", "class A(B):\n  def f(self): self._x()", "_x"),
        (private_objects, "functionalize.transform.mode", "getattr(module, '_parameters')", "_parameters"),
        (fields, "functionalize.transform.mode", "class A:\n" + "".join(f"  f{i}: int\n" for i in range(16)), "16"),
        (sizes, "functionalize.transform.mode", "x = 1\n" * 601, "601 lines"),
        (sizes, "functionalize.transform.mode", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        (operator_tables, "functionalize.transform.mode", "X = frozenset({aten.t.default, aten.mm.default})", "X is a"),
        (operator_tables, "functionalize.transform.mode", "X = {aten.t: aten.mm.out, aten.dot: aten.t.out}", "X is a"),
        (unexplained, "functionalize.transform.mode", "x = 1", "no docstring"),
    ],
)
def test_rule_catches(rule: Rule, module: str, text: str, expected: str) -> None:
    found = list(rule(Source.parse(module, text)))
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (private_torch, "import torch\ntorch.ops.aten._unsafe_view, torch.__version__, x._schema"),
        (private_torch, "from functionalize._torch import OpOverload"),
        (private_objects, "import torch\ntorch.ops.aten._unsafe_view, x._schema, aten._conj"),
        (private_objects, "class A:\n  _x: int\n  def __eq__(self, other): return self._x == other._x"),
        (upward_imports, "from functionalize.aliasing.alias_graph import Base\nfrom . import errors"),
        (sizes, 'def f():\n    """' + "line\n" * 70 + '"""\n' + "    x = 1\n" * 59),
    ],
)
def test_rule_lets_pass(rule: Rule, text: str) -> None:
    assert list(rule(Source.parse("functionalize.transform.mode", text))) == []
