"""Regions of a program that ``torch.utils.checkpoint`` computes again in the backward: which nodes they are.

A region runs twice while a program is captured, once forward and once for the backward. What is recorded the second
time is what partition functions do by themselves for nodes that are marked: it stands for what was recorded first.

Invariant: random numbers of the second run are those of the first. Limits: ``use_reentrant=False``; a region of the
other kind that draws random numbers is refused.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import CheckpointPolicy

from functionalize._torch.autograd import checkpoint_frame, in_reentrant_checkpoint, selected
from functionalize.errors import UnsupportedMutationError
from functionalize.runtime.random_state import is_random


class CheckpointRegions:
    """Notes, node by node, which region a program is in."""

    def __init__(self) -> None:
        self.again: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around each second run
        self.node_of: Callable[[Any], Node | None] = lambda tensor: None  # what a tensor of the program stands for
        self._kept = set[Any]()  # what selective checkpointing keeps of the first runs
        self._frames: dict[int, tuple[Any, int]] = {}  # of torch's, held: their identities are keys
        self._first: dict[Node, int] = {}  # nodes of the first runs, each with the number of its region
        self._second: dict[Node, int] = {}
        self._inside: int | None = None
        self._running_again = 0

    @property
    def runs_again(self) -> bool:
        """Whether a region is computed for the second time."""
        return self._running_again > 0 or in_reentrant_checkpoint()

    def note(self, node: Node) -> None:
        """A node was added to the graph just now."""
        if self._inside is not None:
            self._first[node] = self._inside
            return
        found = checkpoint_frame()
        if found is None:
            if in_reentrant_checkpoint() and is_random(node):
                raise UnsupportedMutationError(
                    f"{node.target} in a checkpointed region with use_reentrant=True",
                    why="the region runs again in the backward, and would draw other random numbers there",
                    hint="pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
                )
            return
        frame, again = found
        number = self._number(frame)
        (self._second if again else self._first)[node] = number

    def _number(self, frame: Any) -> int:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = frame, len(self._frames)
            frame.recompute_fn = self._within_again(frame.recompute_fn)
        return self._frames[id(frame)][1]

    def _within_again(self, run: Callable[..., None]) -> Callable[..., None]:
        again = self.again

        def second_run(*args: Any) -> None:
            self._kept |= {node for node in map(self.node_of, selected(run)) if node in self._first}
            self._running_again += 1
            try:
                with again():
                    run(*args)
            finally:
                self._running_again -= 1

        return second_run

    def running(self) -> tuple[int, tuple[Any] | None] | None:
        """The region that runs, by its number, and if it runs again, for which backward; None outside of all."""
        found = checkpoint_frame()
        return None if found is None else (self._number(found[0]), found[1])

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Take what is recorded for a region of its own, which runs once."""
        before, number = self._inside, len(self._frames)
        self._frames[-number - 1] = (None, number)
        self._inside = number
        try:
            yield
        finally:
            self._inside = before

    def release(self) -> None:
        """Nothing runs again from now on: what the regions were called with may go."""
        for frame, _ in self._frames.values():
            if frame is not None:
                frame.recompute_fn = None
        self._frames, self.node_of = {}, lambda tensor: None

    def drawn_again(self, node: Node) -> bool:
        """Whether a node draws random numbers that the first run of its region has drawn."""
        return node in self._second and is_random(node)

    def resolve(self) -> dict[Node, int | None]:
        """The nodes to be computed again, each with the number of its region; what was drawn twice is drawn once.

        Nodes to be kept, of such a region, have none.
        """
        second, self._second = self._second, {}
        names = self._number_values(second) if second else {}
        again, regions = {names[node] for node in second if node in names}, set(second.values())
        kept = self._kept | {item_of(node) for node in self._kept}
        once = {number for key, (_, number) in self._frames.items() if key < 0}
        met, marked = set[int](), dict[Node, int | None](dict.fromkeys(self._kept))
        for node, number in reversed(self._first.items()):
            if node in kept:
                continue
            repeated = names.get(node) in again
            met |= {number} if repeated else set()
            left_out = number in regions and number not in met and not is_random(node)  # a second run stops early
            if number in once or repeated or left_out:
                marked[node] = number
        return marked

    def _number_values(self, second: dict[Node, int]) -> dict[Node, str]:
        """A name for what each node computes; a second draw of random numbers is replaced by the first."""
        names, known = dict[Node, str](), dict[str, str]()
        waiting: dict[tuple[int | None, str], deque[Node]] = defaultdict(deque)
        for node in list(next(iter(second)).graph.nodes):
            text = _text(node, names)
            if not is_random(node):
                names[node] = known.setdefault(text, node.name)
                continue
            names[node] = node.name
            if node in self._first:
                waiting[self._first[node], text].append(node)
            elif twins := waiting.get((second.get(node), text)):
                twin = twins.popleft()
                names[node] = twin.name
                node.replace_all_uses_with(twin)
                node.graph.erase_node(node)
        return names


def item_of(node: Node) -> Node | None:
    """The node of several results that a node takes one of."""
    return node.args[0] if node.target is operator.getitem else None  # type: ignore[return-value]


def _text(node: Node, names: dict[Node, str]) -> str:
    """A call, equal for two nodes that compute the same; ``names`` are equal for arguments that do."""

    def named(arg: Any) -> Any:
        whole = item_of(arg) if isinstance(arg, Node) else None
        if whole is not None:
            return f"{names.get(whole, whole.name)}[{arg.args[1]}]"
        return names.get(arg, arg.name) if isinstance(arg, Node) else arg

    args, kwargs = map_aggregate((node.args, node.kwargs), named)
    return f"{node.op} {node.target} {args} {kwargs}"


def copied(
    graph: Graph,
    placeholders: tuple[Sequence[Node], Sequence[Node]],
    outputs: Sequence[Any],
    forward: set[Node],
    marked: dict[Node, int | None],
) -> Graph:
    """A copy of a graph, whose nodes tell partition functions what they want to know."""
    made, new = dict[Node, Node](), Graph()
    for kind, nodes in zip(("primals", "tangents"), placeholders, strict=True):
        for number, node in enumerate(nodes):
            made[node] = new.placeholder(f"{kind}_{number}")
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
            if node.all_input_nodes:  # others are equal in all regions: merged, they belong to none
                copy.meta["ac_graph_id"] = region
        copy.meta["partitioner_tag"] = f"must_be_in_{phase}" if is_random(node) and region is None else f"is_{phase}"
    new.output(tuple(made[node] if isinstance(node, Node) else node for node in outputs))
    return new
