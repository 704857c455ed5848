"""Process groups of many ranks in one process: collectives have the right sizes, and move nothing.

In: how many ranks, and which of them this process is. Guarantees: afterwards there is no default group again.
Limits: one default group a process; the values of results mean nothing, except under `AllRanks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.ops.collectives import OWN


def in_use() -> bool:
    """Whether this process is a rank of a world."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Make this process one rank of a world whose other ranks do not exist.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process has a default group already.
    """
    import torch.distributed as dist  # here: not all builds of torch have it, and programs of one rank need none
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; there is no public one

    if not 0 <= rank < size:
        raise ValueError(f"a world of {size} ranks has no rank {rank}")
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a default process group: end it with torch.distributed.destroy_process_group"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Group:
    """A process group: the axis of a mesh, or what else it is called, and its ranks in the world."""

    axis: str
    ranks: tuple[int, ...]


def group_named(name: str) -> Group | None:
    """The group of this process that operators know by a name; None if it has no such group."""
    import torch.distributed as dist

    if not in_use():
        return None
    distributed: Any = dist.distributed_c10d
    try:
        group = distributed._resolve_process_group(name)  # operators in graphs have names; there is no public look-up
    except RuntimeError:
        return None
    axis = str(group.group_desc).removeprefix("mesh_")
    return Group(_AXES.get(axis, axis), tuple(dist.get_process_group_ranks(group)))


_AXES = {"default_pg": "all ranks", "undefined": "a group"}  # for what torch calls groups that are no axis of a mesh


class AllRanks:
    """All ranks of a world in this process: a mode that runs each operator on the numbers of every rank."""

    def __init__(self, size: int) -> None:
        from torch.distributed._local_tensor import LocalTensorMode  # here: not public, and rarely needed

        class Mode(LocalTensorMode):
            """Runs the kernels of our functional operators once, as torch's mode does with torch's own."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace != OWN:
                    return super().__torch_dispatch__(func, types, args, kwargs)
                with LocalTensorMode(self.ranks):
                    return func._op_dk(torch.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))

        self.mode = Mode(size)

    def tensor(self, by_rank: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor that holds another tensor for each rank."""
        made: torch.Tensor = self.mode.rank_map(by_rank.__getitem__)
        return made

    @staticmethod
    def number(by_rank: Sequence[int | float]) -> Any:
        """A number that is another one on each rank."""
        from torch.distributed._local_tensor import LocalIntNode

        integers = {rank: value for rank, value in enumerate(by_rank) if isinstance(value, int)}
        if len(integers) < len(by_rank):
            raise NotImplementedError("numbers in the graphs that are no integers differ by rank")
        return torch.SymInt(LocalIntNode(integers))

    @staticmethod
    def on_rank(tensor: Any, rank: int) -> torch.Tensor:
        """What a tensor is on one rank."""
        held = getattr(tensor, "_local_tensors", None)
        made: torch.Tensor = tensor if held is None else held[rank]
        return made
