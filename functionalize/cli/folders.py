"""A captured program as plain data, and as a folder of files.

Invariant: keys that machines read are added to, not changed; the files of a folder are there when all are whole.
Limits: a graph module is saved as its code, without what is noted at its nodes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram


def described(program: CapturedProgram) -> dict[str, Any]:
    """A program's inputs, outputs and writes, by keys that machines read: they are added to, not changed."""
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    return {
        "remove": program.remove,
        "ops": sum(node.op == "call_function" for node in nodes.values()),
        "inputs": [_entry(spec, nodes) for spec in program.signature.input_specs],
        "outputs": [_entry(spec, nodes) for spec in program.signature.output_specs],
        "mutations": [_mutation(mutation) for mutation in program.mutations],
    }


def _entry(spec: Any, nodes: dict[str, Any]) -> dict[str, Any]:
    entry = {"kind": spec.kind.name.lower(), "name": spec.arg.name, "target": spec.target}
    value: Any = nodes[spec.arg.name].meta.get("val") if spec.arg.name in nodes else None
    if hasattr(value, "dtype"):
        return entry | {"dtype": str(value.dtype), "shape": _numbers(value.shape)}
    return entry | {"value": repr(getattr(spec.arg, "value", None))}


def _mutation(mutation: Any) -> dict[str, Any]:
    region = mutation.region
    return {
        "target": mutation.target,
        "kind": mutation.kind.name.lower(),
        "op": mutation.op,
        "location": str(mutation.location),
        "region": {
            "dtype": str(region.dtype),
            "size": _numbers(region.size),
            "stride": _numbers(region.stride),
            "offset": _numbers([region.offset])[0],
        },
    }


def code_of(program: CapturedProgram) -> str:
    return program.graph_module.print_readable(print_output=False).rstrip()


def _numbers(sizes: Iterable[Any]) -> list[Any]:
    """Symbols among sizes become texts."""
    return [size if isinstance(size, int) else str(size) for size in sizes]


def saved(program: CapturedProgram, folder: Path) -> dict[str, str]:
    """Write a program to a folder; the files, by what they hold."""
    import torch

    names = {"graph_module": "graph_module.pt", "state": "state.pt", "signature": "signature.json", "code": "graph.txt"}
    about = {"torch": torch.__version__, "files": names, **described(program)}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished.", dir=folder) as unfinished:
        files = {what: Path(unfinished) / name for what, name in names.items()}
        torch.save(program.graph_module, files["graph_module"])
        torch.save(program.state, files["state"])
        files["signature"].write_text(json.dumps(about, indent=2) + "\n")
        files["code"].write_text(code_of(program) + "\n")
        for file in files.values():
            os.replace(file, folder / file.name)
    return {what: str(folder / name) for what, name in names.items()}
