"""What folds on the page: the graph's nodes by module, the storages by kind and module; and what is open at first.

Invariant: folding keeps the order. Limits: modules that run several times in a row without a break are one fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from functionalize.report.model import Node, Storage

LANES = 24  # in one picture
ROWS = 150  # in one picture, or in a fold of the graph
_OPEN = 160  # rows of the graph that are open at first
_DRAWN = 110  # rows of pictures that are
Step = TypeVar("Step")
GROUPS = {
    "written back": ("Written back", "inputs and state that the program changed"),
    "written inside": ("Written inside", "tensors that the program made and changed in place"),
    "read": ("Only viewed", "inputs and state that the program viewed and did not write"),
    "viewed inside": ("Intermediates", "tensors that the program made and viewed"),
}


@dataclass
class Fold:
    """Nodes and folds in order, under one title."""

    title: str
    kind: str
    parts: list[Fold | Node] = field(default_factory=list)
    open: bool = False

    @property
    def nodes(self) -> int:
        """How many nodes are inside, at any depth."""
        return sum(part.nodes if isinstance(part, Fold) else 1 for part in self.parts)


def folded(nodes: Sequence[Node]) -> Fold:
    """The graph as a tree of folds; of the outer ones so many are open as a reader can take in."""
    root = Fold("", "", open=True)
    trail = [root]
    path: tuple[tuple[str, str], ...] = ()
    for node in nodes:
        kept = len(_prefix([path, node.path]))
        path = node.path
        del trail[kept + 1 :]
        for step in path[kept:]:
            inner = Fold(*step)
            trail[-1].parts.append(inner)
            trail.append(inner)
        trail[-1].parts.append(node)
    _settle(root, "")
    _open(root)
    return root


def _settle(fold: Fold, above: str) -> None:
    """Join folds that hold nothing but one fold, name each by what it adds, and part those that are too long."""
    for index, part in enumerate(fold.parts):
        while isinstance(part, Fold) and len(part.parts) == 1 and isinstance(part.parts[0], Fold):
            part = fold.parts[index] = part.parts[0]
        if isinstance(part, Fold):
            _settle(part, part.title)
            part.title = part.title.removeprefix(f"{above}.") if above else part.title
    if sum(isinstance(part, Node) for part in fold.parts) > ROWS:
        chunks = ((start, fold.parts[start : start + ROWS]) for start in range(0, len(fold.parts), ROWS))
        of = f"of {len(fold.parts)}"
        fold.parts = [Fold(f"{start + 1} to {start + len(chunk)}", of, chunk) for start, chunk in chunks]


def _open(root: Fold) -> None:
    """Open folds level by level, until the page is full."""
    shown, queue = len(root.parts), _inner(root)
    for fold in queue:  # which gets longer
        if shown + len(fold.parts) <= _OPEN and fold.title != "inputs":
            fold.open = True
            shown += len(fold.parts)
            queue += _inner(fold)


def _inner(fold: Fold) -> list[Fold]:
    return [part for part in fold.parts if isinstance(part, Fold)]


@dataclass
class Cluster:
    """Storages that are drawn in one picture."""

    title: str
    storages: list[Storage]
    prefix: str = ""  # of their names
    open: bool = False

    @property
    def rows(self) -> int:
        return sum(storage.events for storage in self.storages)


def clustered(storages: Sequence[Storage]) -> dict[str, list[Cluster]]:
    """The storages by what became of them, each group in pictures of a readable size."""
    groups = {name: [storage for storage in storages if storage.group == name] for name in GROUPS}
    clusters = {name: list(_clusters(chosen, 0)) if chosen else [] for name, chosen in groups.items()}
    shown = 0
    for cluster in (*clusters["written back"], *clusters["written inside"]):
        if shown + cluster.rows <= _DRAWN:
            cluster.open = True
            shown += cluster.rows
    if storages and not shown:
        next(group[0] for group in clusters.values() if group).open = True
    return clusters


def _clusters(storages: list[Storage], depth: int) -> Iterator[Cluster]:
    """Parted by one more step of their paths wherever they are too many."""
    prefix = _prefix([storage.path for storage in storages])
    depth, title, common = max(depth, len(prefix)), _title(prefix), "".join(prefix)
    if _fits(storages):
        ends = [_title(storages[index].path[:depth]) for index in (0, -1)]
        yield Cluster(" to ".join(dict.fromkeys(ends)) if all(ends) else title, storages, common)
        return
    parts: dict[tuple[str, ...], list[Storage]] = {}
    for storage in storages:
        parts.setdefault(storage.path[: depth + 1], []).append(storage)
    if len(parts) > 1:
        for part in _gathered(parts.values(), lambda together: len(together) <= LANES // 2):
            yield from _clusters(part, depth + 1)
        return
    start = 0
    for part in _gathered([[storage] for storage in storages], _fits):
        yield Cluster(f"{title} {start + 1} to {start + len(part)}".strip(), part, common)
        start += len(part)


def _fits(storages: list[Storage]) -> bool:
    """Whether one picture takes so many."""
    return len(storages) <= LANES and sum(storage.events for storage in storages) <= ROWS


def _gathered(parts: Iterable[list[Storage]], fits: Callable[[list[Storage]], bool]) -> Iterator[list[Storage]]:
    """Parts that follow one another are one as long as they fit."""
    pending: list[Storage] = []
    for part in parts:
        if pending and not fits([*pending, *part]):
            yield pending
            pending = []
        pending = [*pending, *part]
    yield pending


def _prefix(paths: Sequence[tuple[Step, ...]]) -> tuple[Step, ...]:
    """The steps that all paths begin with."""
    return tuple(steps[0] for steps in takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False)))


def _title(path: tuple[str, ...]) -> str:
    return "".join(path).rstrip("._")
