"""What a report says, as data: storages with their events, source lines, graph nodes, mutations, sizes.

Invariant: plain values alone, no tensor and no node; what refers to another part does so by its number.
Limits: none of its own; how it looks is up to the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

INTERMEDIATE = "intermediate"


@dataclass(eq=False)
class Line:
    """A line of the user's source. ``nodes``: those that it dispatched itself; ``through``: how many its calls did."""

    number: int  # in the report; -1 for what only stands beside a line that did something
    file: str  # as shown
    path: str  # on disk
    lineno: int
    text: str
    function: str = ""
    nodes: list[int] = field(default_factory=list)
    through: int = 0
    views: int = 0
    writes: int = 0


@dataclass(frozen=True)
class Function:
    """Lines of one function, in order; None where lines are left out."""

    name: str
    file: str
    path: str
    lines: tuple[Line | None, ...]
    library: bool  # an installed package's, not the user's own

    @property
    def passes_on(self) -> bool:
        """Whether it is a package's, and only calls what does the work."""
        return self.library and not any(line and (line.nodes or line.writes or line.views) for line in self.lines)

    @property
    def nodes(self) -> int:
        return sum(len(line.nodes) for line in self.lines if line)

    @property
    def writes(self) -> int:
        return sum(line.writes for line in self.lines if line)


@dataclass(frozen=True)
class Node:
    """One line of the graph's code."""

    number: int
    role: str  # input, op or output
    name: str
    code: str
    look: str  # dtype and size of the result
    note: str  # what it is to the caller
    chain: int | None  # the lines that led to it: an index into the report's chains
    path: tuple[tuple[str, str], ...]  # where it folds: modules or a function, outermost first, each with its kind


@dataclass(frozen=True)
class View:
    """One view of a storage; ``parent`` is a number among the storage's views, None for the first tensor on it."""

    number: int
    parent: int | None
    op: str
    region: str
    time: int
    line: int | None


@dataclass(frozen=True)
class Write:
    """One write, through a view of the storage."""

    view: int
    op: str
    region: str
    time: int
    line: int | None


@dataclass(frozen=True)
class Back:
    """One write-back: the graph's output that goes to a target, what it covers, and its bytes."""

    output: int
    node: int | None
    target: str
    value: str
    region: str
    bytes: int | None


@dataclass(frozen=True)
class Storage:
    """One storage that the program viewed or wrote."""

    number: int
    name: str
    kind: str  # parameter, buffer, constant, input or intermediate
    look: str
    bytes: int | None
    path: tuple[str, ...]  # where it folds
    views: tuple[View, ...]
    writes: tuple[Write, ...]
    backs: tuple[Back, ...]

    @property
    def group(self) -> str:
        """Which part of the picture it belongs to."""
        if self.kind == INTERMEDIATE:
            return "written inside" if self.writes else "viewed inside"
        return "written back" if self.backs or self.writes else "read"

    @property
    def made(self) -> int:
        """How many views the program made; the first tensor on a storage is none."""
        return len(self.views) - 1

    @property
    def events(self) -> int:
        return len(self.views) + len(self.writes) + len(self.backs)


@dataclass(frozen=True)
class Mutation:
    """A row of the table of mutations."""

    kind: str
    target: str
    op: str
    region: str
    bytes: int | None
    line: int | None
    location: str


@dataclass(frozen=True)
class Amount:
    """So many tensors of so many bytes."""

    label: str
    tensors: int
    bytes: int
    detail: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective, send or receive: the number of its node, and what it moves over which axis of the mesh."""

    node: int
    kind: str
    axis: str
    ranks: int  # how many are in the group
    bytes: int | None


@dataclass(frozen=True)
class Branch:
    """A row of the tree of variants: a decision with its answer and how many variants go on so, or a variant's end."""

    depth: int
    place: str = ""  # of the line that asked: file, number, function
    text: str = ""  # of the line
    answer: str = ""
    ways: int = 1
    way: int | None = None  # of an end: the number of the variant


@dataclass(frozen=True)
class Report:
    """All of it."""

    title: str
    subtitle: str
    amounts: tuple[Amount, ...]
    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...]
    functions: tuple[Function, ...]
    lines: Mapping[int, Line]
    chains: tuple[tuple[int, ...], ...]
    mutations: tuple[Mutation, ...]
    metadata: tuple[tuple[str, str], ...] = ()  # what gets another size, strides or storage, and by which op
    sizes: tuple[str, ...] = ()  # that may differ: the name of each, its bounds and the dimensions that have it
    branches: tuple[Branch, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @property
    def ops(self) -> int:
        return sum(node.role == "op" for node in self.nodes)

    @property
    def views(self) -> int:
        return sum(storage.made for storage in self.storages)

    @property
    def writes(self) -> int:
        return sum(len(storage.writes) for storage in self.storages)

    @property
    def backs(self) -> int:
        return sum(len(storage.backs) for storage in self.storages)
