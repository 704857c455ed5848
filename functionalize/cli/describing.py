"""A captured program as plain data, and as files.

Invariant: the keys here are what machines read: they are added to, not changed. Limits: a graph module is saved as its
code, without what is noted at its nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functionalize.runtime.captured_program import CapturedProgram


def described(program: CapturedProgram) -> dict[str, Any]:
    """A program's inputs, outputs and writes."""
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    return {
        "remove": program.remove,
        "ops": sum(node.op == "call_function" for node in nodes.values()),
        "inputs": [_entry(spec.kind, spec.target, spec.arg, nodes) for spec in program.signature.input_specs],
        "outputs": [_entry(spec.kind, spec.target, spec.arg, nodes) for spec in program.signature.output_specs],
        "mutations": [_mutation(mutation) for mutation in program.mutations],
    }


def _entry(kind: Any, target: str | None, argument: Any, nodes: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": kind.name.lower(), "name": argument.name, "target": target}
    node = nodes.get(argument.name)
    value: Any = {} if node is None else node.meta.get("val")
    if hasattr(value, "dtype"):
        return entry | {"dtype": str(value.dtype), "shape": [_number(size) for size in value.shape]}
    return entry | {"value": repr(getattr(argument, "value", None))}


def _mutation(mutation: Any) -> dict[str, Any]:
    region = mutation.region
    return {
        "target": mutation.target,
        "kind": mutation.kind.name.lower(),
        "op": mutation.op,
        "location": str(mutation.location),
        "region": {
            "dtype": str(region.dtype),
            "size": [_number(size) for size in region.size],
            "stride": [_number(step) for step in region.stride],
            "offset": _number(region.offset),
        },
    }


def _number(size: Any) -> Any:
    return size if isinstance(size, int) else str(size)


def save(program: CapturedProgram, folder: Path) -> dict[str, str]:
    """Write a program to a folder; the files, by what they hold."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "graph_module": folder / "graph_module.pt",
        "state": folder / "state.pt",
        "signature": folder / "signature.json",
        "code": folder / "graph.txt",
    }
    torch.save(program.graph_module, files["graph_module"])
    torch.save(program.state, files["state"])
    about = {"torch": torch.__version__, "files": {name: file.name for name, file in files.items()}}
    files["signature"].write_text(json.dumps(about | described(program), indent=2) + "\n")
    files["code"].write_text(program.graph_module.print_readable(print_output=False).rstrip() + "\n")
    return {name: str(file) for name, file in files.items()}
