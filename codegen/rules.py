"""Which view ops have a rule, read from the text of view_rules.py: importing that module would import torch.

Invariant: an op has a rule where it stands in a decorator of a function (`@view_rule(aten.select.int)`), or
in a constant of the module: in a set of ops, or as a key (`WAYS_BACK`, `UNSUPPORTED_VIEWS`). Limits: computed
names are not seen; a test holds what is found against the live registry.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# In a checkout codegen stands beside `functionalize`, installed it stands inside.
_PLACES = (_HERE.parent / "functionalize" / "aliasing" / "view_rules.py", _HERE.parent / "aliasing" / "view_rules.py")


def read_rules() -> dict[str, str]:
    """For each op that the view rules name, where: `view_rules.py:185, select`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    file = next((place for place in _PLACES if place.is_file()), _PLACES[0])
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                for op, _ in _ops(decorator):
                    found[op] = f"{file.name}:{node.lineno}, {node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            rows = node.value.keys if isinstance(node.value, ast.Dict) else [node.value]
            for op, line in (named for row in rows if row is not None for named in _ops(row)):
                found[op] = f"{file.name}:{line}, {ast.unparse(target)}"
    return found


def _ops(node: ast.expr) -> Iterator[tuple[str, int]]:
    """The ops written as `aten.select.int` inside an expression, as rows write them, with their lines."""
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="aten"), attr=base), attr=overload):
                yield f"aten::{base}" if overload == "default" else f"aten::{base}.{overload}", inner.lineno
