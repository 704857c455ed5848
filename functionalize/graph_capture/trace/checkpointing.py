"""Regions of a program that ``torch.utils.checkpoint`` computes again in the backward: which nodes they are.

A region runs twice while a program is captured, once forward and once for the backward. Partition functions repeat
marked nodes without help, so nodes of the second run count as those of the first. Regions within a region run
with it: their first runs within its second run are not regions of their own, but part of a second run.

Invariant: what a generator draws in a position in which it has drawn before is what it drew there first; the generators
know their positions. Limits: a draw that the second run repeats from other values is refused.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import CheckpointPolicy

from functionalize._torch.autograd import checkpoint_frame, in_reentrant_checkpoint, selected
from functionalize._torch.dispatch import kernels_alone
from functionalize._torch.symbols.sizes import unbacked
from functionalize._torch.symbols.tracing import is_erased
from functionalize._torch.tensors import SYMBOLS
from functionalize.ops.collectives import starts
from functionalize.refusals.random_numbers import DRAWN_DIFFERENTLY_AGAIN, DRAWN_IN_UNSAVED_REGION
from functionalize.runtime.random_state import is_random, source_of


class CheckpointRegions:
    """Records, node by node, which region a program is in."""

    def __init__(self) -> None:
        self.node_of: Callable[[Any], Node | None] = lambda tensor: None  # the node of a program's tensor
        self._kept = set[Any]()  # what selective checkpointing keeps of the first runs
        self.frames: dict[int, tuple[Any, int]] = {}  # torch's, held as their identities are keys; empty at first
        self._first: dict[Node, int] = {}  # nodes of the first runs, each with the number of its region
        self._second: dict[Node, int] = {}
        self._inside: int | None = None
        self._draws_the_same = True  # in the second run of the regions around
        self._running_again: list[int] = []  # regions, by number, the innermost last
        self._values = _Values(torch.nn.Module())
        self._drawn_again = dict[Node, Node]()  # each with the node that drew the same first

    @property
    def runs_again(self) -> bool:
        """Whether a region is computed for the second time."""
        return bool(self._running_again) or in_reentrant_checkpoint()

    def find_attributes_on(self, root: torch.nn.Module) -> None:
        """Called before the program runs; ``root``: the module that holds the graph's attributes."""
        self._values = _Values(root)

    def begin(self, frame: Any) -> None:
        """A region begins; ``frame``: torch's record of it."""
        number = len(self.frames)
        self.frames[id(frame)] = frame, number
        frame.recompute_fn = self._within_again(frame.recompute_fn, number)

    def note(self, node: Node) -> None:
        """A node was added to the graph just now."""
        if not self.frames:
            return
        self._values.note(node)
        if self._running_again:
            self._second[node] = self._running_again[-1]
            return
        if not self._draws_the_same and torch.is_grad_enabled() and is_random(node):
            raise DRAWN_IN_UNSAVED_REGION.error(op=node.target)
        number = self._inside
        if number is None:
            _, number = self.frames.get(id(checkpoint_frame()), (None, None))
        if number is not None:
            self._first[node] = number

    def note_drawn_again(self, node: Node, first: Node) -> None:
        """A node that was added just now draws in the position in which ``first`` has drawn.

        Raises:
            UnsupportedProgramError: they draw from other values, so that the numbers differ.
        """
        if not self._values.are_equal(node, first):
            raise DRAWN_DIFFERENTLY_AGAIN.error(op=node.target)
        self._values.equate(node, first)
        self._drawn_again[node] = first

    def _within_again(self, run: Callable[..., None], number: int) -> Callable[..., None]:
        def second_run(*args: Any) -> None:
            self._kept |= {node for node in map(self.node_of, selected(run)) if node in self._first}
            self._running_again.append(number)
            try:
                run(*args)
            finally:
                self._running_again.pop()

        return second_run

    def first_of(self, node: Node) -> Node:
        """The first node that computes the same: the one of a region's first run."""
        return self._values.first(node)

    @contextlib.contextmanager
    def inside(self, *, draws_the_same: bool) -> Iterator[None]:
        """Record the nodes inside as a region of their own, which runs once.

        ``draws_the_same``: whether its second run is to draw the random numbers of the first.
        """
        before, number = (self._inside, self._draws_the_same), len(self.frames)
        self.frames[-number - 1] = (None, number)
        self._inside, self._draws_the_same = number, draws_the_same and self._draws_the_same
        try:
            yield
        finally:
            self._inside, self._draws_the_same = before

    def release(self) -> None:
        """Drop what the regions were called with: nothing runs again from now on."""
        for frame, _ in self.frames.values():
            if frame is not None:
                frame.recompute_fn = None
        self.frames.clear()
        self.node_of = lambda tensor: None

    def drawn_again(self, node: Node) -> bool:
        """Whether a node draws random numbers that the first run of its region has drawn."""
        return node in self._drawn_again

    def resolve(self) -> dict[Node, int | None]:
        """The nodes to be computed again, each with the number of its region; draws are erased the second time.

        A kept node of a region has the number None: partition functions recognize random ops, but not random bodies.
        """
        second, self._second = self._second, {}
        again, regions = {self._values.first(node) for node in second}, set(second.values())
        kept = self._kept | {item_of(node) for node in self._kept}
        once = {number for key, (_, number) in self.frames.items() if key < 0}
        met, marked = set[int](), dict[Node, int | None](dict.fromkeys(self._kept))
        for node, number in reversed(self._first.items()):
            if node in kept:
                continue
            repeated = bool(again) and self._values.first(node) in again
            met |= {number} if repeated else set()
            left_out = number in regions and number not in met and not is_random(node)  # a second run stops early
            if number in once or repeated or left_out:
                marked[node] = number if is_random(node) or not self._values.draws(node) else None
        self._erase_drawn_again()
        return marked

    def _erase_drawn_again(self) -> None:
        for node, first in self._drawn_again.items():
            if not is_erased(node):
                node.replace_all_uses_with(first)
                node.graph.erase_node(node)
        self._drawn_again.clear()


class _Values:
    """Which nodes of a graph compute the same: the same op of the same arguments. The first of these counts."""

    def __init__(self, root: torch.nn.Module) -> None:
        """``root``: the module that holds the graph's attributes."""
        self._root = root
        self._first, self._by_text = dict[Node, Node](), dict[str, Node]()
        self._constants = dict[Node, str]()  # of nodes that copy a constant, as each run does
        self._analyzed: Node | None = None  # the last node that was analyzed

    def note(self, node: Node) -> None:
        """A node was added to the graph just now."""
        of = node.args[0] if node.target is torch.ops.aten.lift_fresh_copy.default else None
        if isinstance(of, Node) and of.op == "get_attr":  # it becomes an input at the end
            value = self._attribute(of)
            with kernels_alone():
                self._constants[node] = f"{value.dtype} {value.device} {value.tolist()}"

    def first(self, node: Node) -> Node:
        """The first node that computes the same as a node."""
        if node not in self._first and not is_erased(node):
            self._analyze(node.graph)
        return self._first.get(node, node)

    def are_equal(self, node: Node, other: Node) -> bool:
        """Whether two nodes do the same, except for the random numbers that they draw."""
        self._analyze(node.graph)
        return self._text(node) == self._text(other)

    def draws(self, node: Node) -> bool:
        """Whether a node draws random numbers, as the body of a higher-order op may."""
        return source_of(node, self._root) is not None

    def equate(self, node: Node, first: Node) -> None:
        """Have a node count as one that computes the same as ``first``."""
        self._first[node] = self._first.get(first, first)

    def _analyze(self, graph: Graph) -> None:
        """Analyze the nodes that were added since."""
        nodes = list[Node]()
        for node in reversed(graph.nodes):
            if node is self._analyzed:
                break
            nodes.append(node)
        for node in reversed(nodes):
            if node not in self._first:
                self._first[node] = node if self.draws(node) else self._by_text.setdefault(self._text(node), node)
        self._analyzed = nodes[0] if nodes else self._analyzed

    def _text(self, node: Node) -> str:
        """A description of a call, equal for two nodes that compute the same."""

        def named(arg: Any) -> Any:
            whole = item_of(arg) if isinstance(arg, Node) else None
            if whole is not None:
                return f"{self._first.get(whole, whole).name}[{arg.args[1]}]"
            return self._first.get(arg, arg).name if isinstance(arg, Node) else arg

        value, of = node.meta.get("val"), node.args[0] if node.args else None
        if isinstance(value, SYMBOLS) and not unbacked([value]):
            return f"{type(value)} {value.node.expr}"
        if node.op == "get_attr" and isinstance(body := self._attribute(node), GraphModule):
            return body.print_readable(print_output=False)
        args, kwargs = map_aggregate((node.args, node.kwargs), named)
        if isinstance(of, Node) and str(node.target).startswith("aten.") and "_like." in str(node.target):
            like = of.meta["val"]  # its values do not matter
            args = (f"{like.shape} {like.stride()} {like.dtype} {like.device}", *args[1:])
        return f"{node.op} {node.target} {self._constants.get(node, args)} {kwargs}"

    def _attribute(self, node: Node) -> Any:
        return attrgetter(str(node.target))(self._root)


def item_of(node: Node) -> Node | None:
    """The node with several results from which a node takes one; None for other nodes."""
    return node.args[0] if node.target is operator.getitem else None  # type: ignore[return-value]


def copied(
    graph: Graph,
    placeholders: tuple[Sequence[Node], Sequence[Node]],
    outputs: Sequence[Any],
    forward: set[Node],
    marked: dict[Node, int | None],
) -> Graph:
    """A copy of a graph, whose nodes have the metadata that partition functions read."""
    made, new = dict[Node, Node](), Graph()
    for prefix, nodes in zip(("primals", "tangents"), placeholders, strict=True):
        for number, node in enumerate(nodes):
            made[node] = new.placeholder(f"{prefix}_{number}")
            made[node].meta = dict(node.meta)
    new.graph_copy(graph, made)
    for node, copy in made.items():
        if node.op == "placeholder":
            continue
        phase = "forward" if (item_of(node) or node) in forward else "backward"
        region = marked.get(item_of(node) or node)
        if marked.get(node, 0) is None:
            copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if region is not None:
            copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            if node.all_input_nodes:  # without inputs, nodes are equal in all regions, and merged
                copy.meta["ac_graph_id"] = region
        stays = starts(node.target) or (is_random(node) and region is None)
        copy.meta["partitioner_tag"] = f"must_be_in_{phase}" if stays else f"is_{phase}"
    new.output(tuple(made[node] if isinstance(node, Node) else node for node in outputs))
    return new
