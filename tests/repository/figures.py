"""Figures of the package: `scripts/figures [CHECKOUT]` prints them, of this checkout or another.

Lines and modules of each folder; floors of the import graph, of folders and of modules; which modules replace
attributes of modules that they import; and which modules run for a call and while one operator is captured. Invariant:
the same script counts any commit. Limits: sources are parsed, and only a call and a capture of two operators are run;
what is replaced under a computed name counts only where `setattr` or `patch` names its owner.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

PACKAGE = "functionalize"


@dataclass(frozen=True)
class Module:
    """A parsed module: its import name without `.__init__`, its path below the package, its text and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def top(self) -> str:
        """The folder below the package, or the module where it lies beside the folders."""
        return self.path.parts[0].removesuffix(".py")


def modules_of(root: Path) -> dict[str, Module]:
    """All modules of a checkout's package, by name."""
    modules = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root / PACKAGE)
        name = ".".join((PACKAGE, *path.with_suffix("").parts)).removesuffix(".__init__")
        text = file.read_text()
        modules[name] = Module(name, path, text, ast.parse(text))
    return modules


def imports_of(module: Module, modules: dict[str, Module]) -> set[str]:
    """Modules of the package that are imported when a module is: at its top level, not for types alone."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    imported: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = [*parts[: len(parts) - node.level + 1], node.module] if node.level else [node.module]
            source = ".".join(filter(None, base))
            imported |= {full if (full := f"{source}.{alias.name}") in modules else source for alias in node.names}
    return (imported & modules.keys()) - {module.name}


def floors(graph: dict[str, set[str]]) -> list[str]:
    """The longest path of a graph, its foot first; what leads back into a path counts for nothing."""
    active: set[str] = set()

    @cache
    def longest(name: str) -> tuple[str, ...]:
        active.add(name)
        paths = [longest(other) for other in sorted(graph[name] - active)]
        below = max(paths, key=len) if paths else ()
        active.discard(name)
        return (*below, name)

    paths = [longest(name) for name in sorted(graph)]
    path = max(paths, key=len)
    return list(path)


def replaced(module: Module) -> Iterator[str]:
    """Attributes of imported modules and classes that a module assigns, deletes, or hands to `setattr` or `patch`."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(module.tree):
        owners: list[ast.expr] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            owners = [node.value]
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called in ("setattr", "delattr") or called.rpartition(".")[2] in ("patch", "patched", "object"):
                owners = [node.args[0]]
        for owner in owners:
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported:
                yield ast.unparse(owner)


def table(modules: dict[str, Module]) -> Iterator[str]:
    """Lines and modules of each folder, `__init__.py` counted in lines alone."""
    lines, counts, folders = Counter[str](), Counter[str](), Counter[str]()
    for module in modules.values():
        lines[module.top] += module.lines
        if module.path.name != "__init__.py":
            counts[module.top] += 1
            folders[str(module.path.parent)] += 1
    yield f"{'folder':<20}{'lines':>8}{'modules':>9}"
    for top, count in sorted(lines.items()):
        yield f"{top:<20}{count:>8,}{counts[top]:>9}"
    yield f"{'together':<20}{lines.total():>8,}{counts.total():>9}"
    full = ", ".join(f"{folder} {count}" for folder, count in folders.most_common(5))
    yield f"folders with the most modules: {full}"
    longest = max(modules.values(), key=lambda module: module.lines)
    yield f"longest module: {longest.path} {longest.lines}"


class TrainingStep(torch.nn.Module):
    """Writes to a parameter and a buffer, branches on a tensor value, returns a view of its input and has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps: Any = self.steps
        with torch.no_grad():
            self.weight.mul_(0.5)
        steps.add_(1)
        y = x * self.weight
        return y + 1 if steps > 0 else y, x.view(3, 1)


def returns_of(call: Callable[[], Any], root: Path) -> Counter[str]:
    """How many functions return during a call, by module of a checkout's package; comprehensions are not counted."""
    returns, folder = Counter[str](), f"{root.resolve() / PACKAGE}/"

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_filename.startswith(folder) and not code.co_name.startswith("<"):
            returns[code.co_filename.removeprefix(folder)] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return returns


def returns_of_training_step(root: Path) -> Counter[str]:
    """The same, of a warm call of a captured training step that no short way serves."""
    sys.path.insert(0, str(root))
    from functionalize import capture

    x = torch.ones(3)
    program = capture(TrainingStep(), (x,))
    for _ in range(4):
        program(x)
    return returns_of(lambda: program(x), root)


def modules_of_ops(root: Path) -> list[list[str]]:
    """The modules that run for an operator in its first trace, and once the caches know it."""
    sys.path.insert(0, str(root))
    from functionalize import capture

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x))

    folder, code = f"{(root / PACKAGE).resolve()}/", program.__code__
    ops: list[set[str]] = []
    inside = False

    def note(frame: FrameType, event: str, function: Any) -> None:
        nonlocal inside
        if frame.f_code is code and event.startswith("c_"):
            inside = event == "c_call" and function is torch.sin
            ops.extend([set()] if inside else [])
        elif inside and event == "call" and frame.f_code.co_filename.startswith(folder):
            ops[-1].add(frame.f_code.co_filename.removeprefix(folder))

    with torch.no_grad():
        capture(lambda x: x + 1, (torch.ones(3),))  # what the first capture of a process does once
        sys.setprofile(note)
        try:
            capture(program, (torch.ones(3),))
        finally:
            sys.setprofile(None)
    return [sorted(modules) for modules in ops]


def main(arguments: list[str]) -> int:
    """Print the figures of a checkout."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[2]
    modules = modules_of(root)
    print(*table(modules), sep="\n")
    imports = {name: imports_of(module, modules) for name, module in modules.items()}
    folders: dict[str, set[str]] = {module.top: set() for module in modules.values()}
    for name, others in imports.items():
        folders[modules[name].top] |= {modules[other].top for other in others} - {modules[name].top, "__init__"}
    for what, graph in (("folders", folders), ("modules", imports)):
        path = floors(graph)
        print(f"floors of {what}: {len(path)}: {' < '.join(part.removeprefix(PACKAGE + '.') for part in path)}")
    owners = {module.path: Counter(replaced(module)) for module in modules.values()}
    print(f"modules that replace attributes of what they import: {sum(map(bool, owners.values()))}")
    for file, counts in owners.items():
        if counts:
            print(f"    {file!s:<44} {', '.join(counts)}")
    returns = returns_of_training_step(root)
    print(f"a call of a training step: {len(returns)} modules, {returns.total()} returns")
    for called, count in returns.most_common():
        print(f"    {called:<44} {count}")
    for when, names in zip(("in its first trace", "when it is known"), modules_of_ops(root), strict=True):
        print(f"modules that an op passes {when}: {len(names)}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
