"""Runs a mutation-free graph over a table of lowerings: node by node, on the arrays of whatever backend.

Invariant: each tensor that a node gives has the dtype and the size that torch gives it, or an error says which node has
not. Limits: sizes are integers when a graph is run: those of its inputs; a data-dependent number may be
computed with, and is no size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functionalize.backends.arrays.registry import Lowering, Lowerings
from functionalize.backends.arrays.sizes import fits
from functionalize.backends.decompositions.decompose import (
    decomposed,
    is_operator,
    rounds,
    sized_by_data,
    without_row,
    without_stacks,
)
from functionalize.backends.preparation.devices import on_cpu
from functionalize.call_stack import line_of_trace
from functionalize.errors import UnsupportedProgramError
from functionalize.ops import tables
from functionalize.runtime.random_state import is_random


@dataclass(frozen=True, eq=False)
class Backend:
    """What a backend is: rows, and how what belongs to torch becomes its own.

    ``array``: of a tensor, an array of its own. ``dtype``: of a ``torch.dtype``. ``is_array``: whether an argument is
    one, and no plain value. ``split``: of a random key, the next
    key and one to draw with; None for backends that draw no random numbers. ``number``: what an array of no dimensions
    holds. ``settings``: of the backend, while it runs a graph. ``differentiates``: False where nobody differentiates
    its arrays; True where it ends gradients as ``ArrayProgram.stopped`` says; else programs that end some are refused.
    """

    lowerings: Lowerings
    array: Callable[[torch.Tensor], Any]
    dtype: Callable[[torch.dtype], Any]
    is_array: Callable[[Any], bool]
    split: Callable[[Any], tuple[Any, Any]] | None = None
    number: Callable[[Any], Any] = methodcaller("item")
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext
    differentiates: bool | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.lowerings.name


class UnknownNumberError(Exception):
    """What an array holds is not known yet; the message says why."""


class Call:
    """One call of an operator, as its lowering may see it beside the arguments."""

    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        self.node, self._interpreter = node, interpreter

    @property
    def value(self) -> Any:
        """What torch says of the result: a fake tensor, or several."""
        return self.node.meta.get("val")

    @property
    def dtype(self) -> Any:
        """The backend's dtype of the result, of the first of several."""
        value = self.value[0] if isinstance(self.value, (list, tuple)) else self.value
        return self._interpreter.backend.dtype(value.dtype)

    def meta(self, position: int) -> Any:
        """What torch says of an argument: a fake tensor, with its strides."""
        argument = self.node.args[position]
        return argument.meta.get("val") if isinstance(argument, Node) else argument

    def key(self) -> Any:
        """A random key that nobody else draws with."""
        return self._interpreter.next_key()

    def run(self, body: GraphModule, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the graph of a higher-order operator: what it gives, as a tuple."""
        return self._interpreter.run_body(body, arguments)

    def constant(self, tensor: torch.Tensor) -> Any:
        """A tensor as an array of the backend."""
        return self._interpreter.backend.array(tensor)


class Interpreter:
    """A graph, ready to be run by a backend.

    Raises:
        UnsupportedProgramError: it has operators without row or decomposition, or data-dependent sizes; all
            of them are in the one error, with the lines of the program.
    """

    def __init__(self, backend: Backend, graph: Graph, root: torch.nn.Module) -> None:
        """``root``: what the attributes of the graph are found on."""
        self.backend = backend
        self.graph, self.root = decomposed(without_stacks(on_cpu(graph)), root, self._computes)
        self._bodies: dict[GraphModule, Interpreter] = {}
        self._key: Any = None
        self.placeholders = self.graph.find_nodes(op="placeholder")

    def _computes(self, node: Node) -> bool:
        return node.target in self.backend.lowerings and not rounds(node)

    def causes(self) -> list[tuple[str, str]]:
        """Why the backend cannot run the graph: lines of the program, each with the reason."""
        found = []
        for node in without_row(self.graph, self.backend.lowerings):
            found.append((_line(node), f"{node.target} has no lowering for {self.backend.name}, and no decomposition"))
        for node in self.graph.nodes:
            # What is made of such a tensor has such sizes as well, for no other reason.
            first = not any(map(sized_by_data, node.all_input_nodes))
            if node.op == "call_function" and sized_by_data(node) and first:
                found.append((_line(node), f"{node.target} returns a tensor of data-dependent size"))
        for node in self.graph.find_nodes(op="get_attr"):
            body = self._attribute(node)
            if isinstance(body, GraphModule):
                found += self._body(body).causes()
            elif isinstance(body, torch.Generator):
                found.append((_line(node), "it draws from its own torch.Generator: draw from the default generator"))
        return found

    def check(self) -> None:
        """Raise the causes, if there are any."""
        causes = self.causes()
        if causes:
            raise refusal(self.backend, causes)

    @property
    def draws(self) -> bool:
        """Whether the graph may draw random numbers."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        if any(map(is_random, nodes)):
            return True
        bodies = map(self._attribute, self.graph.find_nodes(op="get_attr"))
        return any(self._body(body).draws for body in bodies if isinstance(body, GraphModule))

    def run(self, inputs: Sequence[Any], key: Any = None) -> tuple[Sequence[Any], Any]:
        """The graph's results for arrays, in the order of its placeholders, and the next random key."""
        self._key = key
        values: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        try:
            with self.backend.settings():
                self._run(values)
            results: Any = map_arg(self.graph.output_node().args[0], values.__getitem__)
            return results, self._key
        finally:
            self._key = None

    def _run(self, values: dict[Node, Any]) -> None:
        for node in self.graph.nodes:
            if node.op == "call_function":
                values[node] = self._called(node, values)
            elif node.op == "get_attr":
                value = self._attribute(node)
                values[node] = self.backend.array(value.detach()) if isinstance(value, torch.Tensor) else value

    def next_key(self) -> Any:
        """A key to draw with.

        Raises:
            UnsupportedProgramError: none was given.
        """
        if self.backend.split is None or self._key is None:
            raise UnsupportedProgramError(
                f"the program draws random numbers, and got no key for {self.backend.name}",
                why="random keys are explicit: a call draws only from the key that it gets",
                hint="pass the state together with its random key, or switch off dropout (module.eval())",
                at="the call",
            )
        self._key, key = self.backend.split(self._key)
        return key

    def run_body(self, body: GraphModule, arguments: Sequence[Any]) -> Sequence[Any]:
        """The results of the graph of a higher-order operator; it draws with keys of its own."""
        interpreter = self._body(body)
        results, _ = interpreter.run(arguments, self.next_key() if interpreter.draws else None)
        return results if isinstance(results, (list, tuple)) else (results,)

    def _body(self, body: GraphModule) -> Interpreter:
        if body not in self._bodies:
            self._bodies[body] = Interpreter(self.backend, body.graph, body)
        return self._bodies[body]

    def _attribute(self, node: Node) -> Any:
        return attrgetter(str(node.target))(self.root)

    def _called(self, node: Node, values: dict[Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        row = self.backend.lowerings.get(node.target)
        if row is None:
            row = Lowering(node.target)  # type: ignore[arg-type]  # a function of Python's, on numbers
        first = (Call(node, self),) if row.takes_call else ()
        try:
            result = row.rule(*first, *args, **kwargs)
            self._check(node, node.meta.get("val"), result)
        except UnsupportedProgramError:
            raise
        except Exception as error:
            raise UnsupportedProgramError(
                f"the lowering of {node.target} for {self.backend.name} fails: {error}",
                why="it does not support these arguments"
                if is_operator(node.target)
                else "it needs a number, not an array",
                hint="register your own lowering for it with @lowering, or use other operators in the program",
                at=_line(node),
            ) from error
        return result

    def _check(self, node: Node, expected: Any, result: Any) -> None:
        """Hold what a lowering gave to what torch says of it."""
        if isinstance(expected, (list, tuple)) and isinstance(result, (list, tuple)):
            for one, other in zip(expected, result, strict=False):
                self._check(node, one, other)
        elif isinstance(expected, torch.Tensor) and hasattr(result, "shape"):
            agrees = fits(expected.size(), result.shape)
            if not agrees or result.dtype != self.backend.dtype(expected.dtype):
                raise UnsupportedProgramError(
                    f"the lowering of {node.target} for {self.backend.name} returns "
                    f"{result.dtype}{list(result.shape)} instead of {expected.dtype}{list(expected.size())}",
                    why="each node must have the dtype and size that it has in torch",
                    hint="correct the lowering, or register another one with @lowering",
                    at=_line(node),
                )


def refusal(backend: Backend, causes: Sequence[tuple[str, str]]) -> UnsupportedProgramError:
    """The error for all causes at once."""
    said, hints = " ".join(why for _, why in causes), []
    if "no lowering" in said:
        hints.append(
            "register a lowering for an operator that has none (docs/tutorials/backend.md), or use other operators"
        )
    if "data" in said:
        hints.append(
            "make sizes and branches independent of tensor values: use torch.where or torch.cond, masks instead of "
            "indices, and operator.index(n) for a size that is the same in all calls"
        )
    count = "one cause" if len(set(causes)) == 1 else f"{len(set(causes))} causes"
    return UnsupportedProgramError.of_causes(
        f"the program cannot be run by {backend.name}, for {count}",
        causes,
        "; ".join(hints) or "remove this from the program, or do it outside the exported program",
    )


def _line(node: Node) -> str:
    return line_of_trace(node.meta.get("stack_trace"))


def without_dead(graph: Graph) -> Graph:
    """A graph without what nobody reads, but for draws of random numbers, which move the key on, and for what acts."""
    for node in reversed(graph.nodes):
        kept = node.users or is_random(node) or tables.acts(node.target)
        if node.op in ("call_function", "get_attr") and not kept:
            graph.erase_node(node)
    return graph
