"""Nodes that no exported program may have: each with what, why, what to try, and the user's line.

Invariant: what torch's verifier would refuse without a word of the program is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph

from functionalize._torch import VERSION, pytree
from functionalize._torch.exporting import on_numbers
from functionalize.backends.decompositions.decompose import is_operator
from functionalize.backends.export.passes.taking_apart import user_line
from functionalize.call_stack import line_of_trace
from functionalize.runtime.calls.specialization import Recorded
from functionalize.runtime.random_state import fresh_generator

Refusal = tuple[str, str, str, str]
_GRADIENT_OF_RESULT = (
    "the program leaves a gradient on a tensor that it creates",
    "the results of an exported program have no gradients",
    "return the gradient itself",
)
_ASKED_VERSION = (
    "the program reads the version of a tensor",
    "a graph has no operator that counts writes",
    "count the writes in an attribute of your own",
)


def refused_nodes(graph: Graph, root: torch.nn.Module, recorded: Recorded) -> Iterator[Refusal]:
    """Those of a graph, and what of its program is in no node; ``root``: what its attributes are found on."""
    yield from _functions(graph)
    yield from _draws_from_generators(graph, root)
    if recorded.metadata.gives_gradients:
        yield *_GRADIENT_OF_RESULT, ""
    if any(question == VERSION for _, question in recorded.asked):
        yield *_ASKED_VERSION, ""


def refused_layouts(graph: Graph) -> list[Refusal]:
    """Nodes whose tensors are not strided: before anything looks at their strides."""
    found: dict[Refusal, None] = {}
    for node in graph.nodes:
        values = [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
        layout = next((one.layout for one in values if one.layout is not torch.strided), None)
        if layout is not None:
            verb = "takes" if node.op == "placeholder" else "makes"
            what = f"the program {verb} a tensor of layout {layout}"
            why, hint = "an exported program has only strided tensors", "compute with dense tensors (to_dense())"
            found[what, why, hint, user_line(node) or ""] = None
    return list(found)


def _functions(graph: Graph) -> Iterator[Refusal]:
    for node in graph.nodes:
        if node.op != "call_function" or is_operator(node.target) or node.target is fresh_generator:
            continue
        if not on_numbers(node.target):
            yield (
                f"the program computes {node.target.__name__} of a data-dependent number",
                "torch's graphs have no such function for numbers",
                "compute it on the tensor, without .item()",
                user_line(node) or "",
            )


def _draws_from_generators(graph: Graph, root: torch.nn.Module) -> Iterator[Refusal]:
    for node in graph.nodes:
        attribute = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        for user in node.users if node.target is fresh_generator or isinstance(attribute, torch.Generator) else ():
            if user.target is not fresh_generator:
                yield (
                    "the program draws random numbers from its own generator",
                    "an exported program cannot hold generators",
                    "draw from torch's default generator",
                    line_of_trace(user.stack_trace),
                )
