"""What folds on the page: the graph's nodes by module, the storages by kind and module; and what is open at first.

Invariant: folding keeps the order. Limits: modules that run several times in a row without a break are one fold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from functionalize.report.model import Node, Storage

LANES = 24  # in one picture
ROWS = 150  # in one picture, or in a fold of the graph
_OPEN = 160  # rows of the graph that are open at first
_DRAWN = 110  # rows of pictures that are
GROUPS = {
    "written back": ("Written back", "inputs and state that the program changed"),
    "written inside": ("Written inside", "intermediate storages that are changed in place, and forgotten"),
    "read": ("Only viewed", "inputs and state of which the program made views, and wrote to none"),
    "viewed inside": ("Intermediates", "storages that the program made and viewed"),
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
    trail: list[tuple[tuple[str, str], Fold]] = []
    for node in nodes:
        depth = 0
        while depth < min(len(trail), len(node.path)) and trail[depth][0] == node.path[depth]:
            depth += 1
        del trail[depth:]
        for step in node.path[depth:]:
            inner = Fold(*step)
            (trail[-1][1] if trail else root).parts.append(inner)
            trail.append((step, inner))
        (trail[-1][1] if trail else root).parts.append(node)
    _settle(root, "")
    _open(root)
    return root


def _settle(fold: Fold, above: str) -> None:
    """Join folds that hold nothing but one fold, name each by what it adds, and part those that are too long."""
    for place, part in enumerate(fold.parts):
        while isinstance(part, Fold) and len(part.parts) == 1 and isinstance(part.parts[0], Fold):
            part = fold.parts[place] = part.parts[0]
        if isinstance(part, Fold):
            _settle(part, part.title)
            part.title = part.title.removeprefix(f"{above}.") if above else part.title
    leaves = sum(isinstance(part, Node) for part in fold.parts)
    if leaves > ROWS:
        fold.parts = list(_chunks(fold.parts))


def _chunks(parts: list[Fold | Node]) -> Iterator[Fold | Node]:
    for start in range(0, len(parts), ROWS):
        chunk = parts[start : start + ROWS]
        yield Fold(f"{start + 1} to {start + len(chunk)}", f"of {len(parts)}", chunk)


def _open(root: Fold) -> None:
    """Open folds level by level, until the page is full."""
    shown, level = len(root.parts), [part for part in root.parts if isinstance(part, Fold)]
    while level:
        below: list[Fold] = []
        for fold in level:
            if shown + len(fold.parts) <= _OPEN and fold.title != "inputs":
                fold.open = True
                shown += len(fold.parts)
                below += [part for part in fold.parts if isinstance(part, Fold)]
        level = below


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
    shown, groups = 0, {}
    for name in GROUPS:
        chosen = [storage for storage in storages if storage.group == name]
        groups[name] = list(_clusters(chosen, 0)) if chosen else []
        for cluster in groups[name]:
            cluster.open = name.startswith("written") and shown + cluster.rows <= _DRAWN
            shown += cluster.rows if cluster.open else 0
    first = next((clusters[0] for clusters in groups.values() if clusters), None)
    if first is not None and not shown:
        first.open = True
    return groups


def _clusters(storages: list[Storage], depth: int) -> Iterator[Cluster]:
    """Parted by one more step of their paths wherever they are too many."""
    prefix = _prefix([storage.path for storage in storages])
    if len(storages) <= LANES and sum(storage.events for storage in storages) <= ROWS:
        ends = [_title(storages[place].path[: max(depth, len(prefix))]) for place in (0, -1)]
        yield Cluster(" to ".join(dict.fromkeys(ends)) if all(ends) else _title(prefix), storages, "".join(prefix))
        return
    depth = max(depth, len(prefix))
    parts: dict[tuple[str, ...], list[Storage]] = {}
    for storage in storages:
        parts.setdefault(storage.path[: depth + 1], []).append(storage)
    if len(parts) == 1:
        yield from _in_order(storages, prefix)
        return
    for part in _gathered(list(parts.values())):
        yield from _clusters(part, depth + 1)


def _gathered(parts: list[list[Storage]]) -> Iterator[list[Storage]]:
    """Small parts that follow one another are one."""
    pending: list[Storage] = []
    for part in parts:
        small = len(pending) + len(part) <= LANES // 2
        if pending and not small:
            yield pending
            pending = []
        pending = [*pending, *part]
    yield pending


def _in_order(storages: list[Storage], prefix: tuple[str, ...]) -> Iterator[Cluster]:
    """As many at a time as one picture takes."""
    title, common = _title(prefix), "".join(prefix)
    chunk: list[Storage] = []
    start, rows = 0, 0
    for place, storage in enumerate(storages):
        if chunk and (len(chunk) == LANES or rows + storage.events > ROWS):
            yield Cluster(f"{title} {start + 1} to {place}".strip(), chunk, common)
            chunk, start, rows = [], place, 0
        chunk.append(storage)
        rows += storage.events
    yield Cluster(f"{title} {start + 1} to {len(storages)}".strip(), chunk, common)


def _prefix(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    shortest = min(paths, key=len)
    for place, step in enumerate(shortest):
        if any(path[place] != step for path in paths):
            return shortest[:place]
    return shortest


def _title(path: tuple[str, ...]) -> str:
    return "".join(path).rstrip("._")
