"""A captured program as plain data.

Invariant: keys that machines read are added to, not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def _numbers(sizes: Iterable[Any]) -> list[Any]:
    """Symbols among sizes become texts."""
    return [size if isinstance(size, int) else str(size) for size in sizes]
