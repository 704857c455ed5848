"""torch.distributed below its Python functions: groups, handles of work, and functional operators that torch lacks.

In: the script objects that operators of ``c10d`` take and return. Out: groups, names of reductions, works of ours.
Guarantees: an operator made here runs the collective that eager runs, on copies, and returns what that writes; like
torch's own functional operators it returns at once, and `wait_tensor` waits. Limits: written for torch 2.13.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_OWN = "functionalize"
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")  # by their numbers in ReduceOp


def register_shapes() -> None:
    """Have torch register the shapes of what its functional operators return."""
    import torch.distributed._functional_collectives  # private, as are these operators


def group_of(script_object: Any) -> Any:
    """The process group that an operator of ``c10d`` gets."""
    return dist.ProcessGroup.unbox(script_object)


def reduction_name(script_object: Any) -> str | None:
    """The name of a reduction in functional operators; None for one with a factor."""
    number = int(script_object.op())
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else None


def boxed(work: Any) -> Any:
    """A work as operators of ``c10d`` return it."""
    return dist.Work.boxed(work)


def completed(tensors: Sequence[torch.Tensor]) -> Any:
    """A work that has nothing to wait for, as operators of ``c10d`` return it."""
    private: Any = torch._C._distributed_c10d  # as torch's own reducer does

    future = torch.futures.Future[Any]()
    future.set_result([*tensors])
    return boxed(private._create_work_from_future(future))


@functools.cache
def work_class() -> type:
    """The class of works that run a function where the program waits for them; made late, as torch may lack c10d."""

    class Work(dist.Work):
        """``settle`` is called where the program waits, or asks for the results, which are ``tensors``."""

        def __init__(self, settle: Callable[[], None], tensors: Sequence[torch.Tensor]) -> None:
            super().__init__()
            self._settle, self._tensors = settle, tensors

        def wait(self, timeout: Any = None) -> bool:
            self._settle()
            return True

        def is_completed(self) -> bool:
            self._settle()
            return True

        def result(self) -> Any:
            self._settle()
            return [*self._tensors]

        def get_future(self) -> Any:
            self._settle()
            future = torch.futures.Future[Any]()
            future.set_result([*self._tensors])
            return future

    return Work


def _group(name: str) -> Any:
    from torch._C._distributed_c10d import _resolve_process_group  # no public way from a name to its group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def _pending(result: torch.Tensor, work: Any) -> torch.Tensor:
    """The result of an operator, for which `wait_tensor` waits."""
    from torch._C._distributed_c10d import _register_work  # as torch's own functional operators do in C++

    _register_work(result, work)
    return result


def _options(cls: Any, **values: Any) -> Any:
    options = cls()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _reduce(input: torch.Tensor, reduce_op: str, root: int, group_name: str) -> torch.Tensor:
    out = _contiguous(input)
    options = _options(dist.ReduceOptions, reduceOp=_reduce_op(reduce_op), rootRank=root)
    return _pending(out, _group(group_name).reduce([out], options))


def _reduce_scatter(inputs: Sequence[torch.Tensor], reduce_op: str, group_name: str) -> torch.Tensor:
    out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    options = _options(dist.ReduceScatterOptions, reduceOp=_reduce_op(reduce_op))
    return _pending(out, _group(group_name).reduce_scatter([out], [[*map(_contiguous, inputs)]], options))


def _gather(input: torch.Tensor, count: int, root: int, group_name: str) -> torch.Tensor:
    out = input.new_empty((count, *input.shape))
    parts = [[*out.unbind(0)]] if count else []
    return _pending(
        out, _group(group_name).gather(parts, [_contiguous(input)], _options(dist.GatherOptions, rootRank=root))
    )


def _scatter(like: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, group_name: str) -> torch.Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    parts = [[*map(_contiguous, inputs)]] if inputs else []
    return _pending(out, _group(group_name).scatter([out], parts, _options(dist.ScatterOptions, rootRank=root)))


def _all_to_all(like: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group_name: str) -> torch.Tensor:
    out = _flat_empty(like)
    parts = [part.view(shown.shape) for part, shown in zip(out.split(_lengths(like)), like, strict=True)]
    work = _group(group_name).alltoall(parts, [*map(_contiguous, inputs)], dist.AllToAllOptions())
    return _pending(out, work)


def _lengths(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _flat_empty(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0].new_empty(sum(_lengths(tensors)))


def of_symbols(method: Any) -> Any:
    """The method of process groups that `all_to_all_single` calls, for splits that may be symbols, too."""

    def all_to_all_single(group: Any, output: Any, input: Any, received: Any, sent: Any, *options: Any) -> Any:
        if not any(isinstance(size, torch.SymInt) for size in (*received, *sent)):
            return method(group, output, input, received, sent, *options)
        op: Any = torch.ops.functionalize.alltoall_base_.default
        return dist.Work.unbox(op(output, input, group.boxed(), received, sent))

    return all_to_all_single


def _barrier(group_name: str, device_ids: Sequence[int]) -> torch.Tensor:
    options = _options(dist.BarrierOptions, device_ids=[*device_ids])
    return _pending(torch.empty(0), _group(group_name).barrier(options))


def _send(input: torch.Tensor, peer: int, tag: int, group_name: str) -> torch.Tensor:
    return _pending(input.new_empty(0), _group(group_name).send([_contiguous(input)], peer, tag))


def _receive(like: torch.Tensor, peer: int, tag: int, group_name: str) -> torch.Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _pending(out, _group(group_name).recv([out], peer, tag))


def _like_first(first: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


# Each operator's schema, what it runs, and the shapes of its result.
_DEFINED: Sequence[tuple[str, Callable[..., Any], Callable[..., Any]]] = (
    ("reduce(Tensor input, str reduce_op, int root, str group_name) -> Tensor", _reduce, _like_first),
    (
        "reduce_scatter(Tensor[] inputs, str reduce_op, str group_name) -> Tensor",
        _reduce_scatter,
        lambda inputs, reduce_op, group_name: _like_first(inputs[0]),
    ),
    (
        "gather(Tensor input, int count, int root, str group_name) -> Tensor",
        _gather,
        lambda input, count, root, group_name: input.new_empty((count, *input.shape)),
    ),
    ("scatter(Tensor like, Tensor[] inputs, int root, str group_name) -> Tensor", _scatter, _like_first),
    (
        "all_to_all(Tensor[] like, Tensor[] inputs, str group_name) -> Tensor",
        _all_to_all,
        lambda like, inputs, group_name: _flat_empty(like),
    ),
    ("barrier(str group_name, int[] device_ids) -> Tensor", _barrier, lambda group_name, device_ids: torch.empty(0)),
    (
        "send(Tensor input, int peer, int tag, str group_name) -> Tensor",
        _send,
        lambda input, peer, tag, group_name: input.new_empty(0),
    ),
    ("receive(Tensor like, int peer, int tag, str group_name) -> Tensor", _receive, _like_first),
    (  # not functional: that of c10d takes no symbols
        "alltoall_base_(Tensor output, Tensor input, __torch__.torch.classes.c10d.ProcessGroup process_group, "
        "SymInt[] output_split_sizes, SymInt[] input_split_sizes) -> __torch__.torch.classes.c10d.Work",
        lambda *args: torch.ops.c10d.alltoall_base_(*args),
        lambda output, *_: completed([output]),
    ),
)


def _define() -> Any:
    """The library of our functional operators: it must live as long as they are called."""
    library = torch.library.Library(_OWN, "DEF")
    for schema, run, shape in _DEFINED:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_OWN}::{name}", shape, lib=library)
    return library


_LIBRARY = _define() if dist.is_available() else None


def is_alone(group_name: str | None = None) -> bool:
    """Whether no other process is in a group, or in the world: it has one rank, or its ranks are pretended."""
    group = dist.group.WORLD if group_name is None else _group(group_name)
    return bool(dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake")


def ranks_of(group_name: str) -> list[int]:
    """The ranks of a group, in the world."""
    return [*dist.get_process_group_ranks(_group(group_name))]


class Meeting:
    """Ranks of a group that leave texts for one another, in the store from which the groups were made.

    ``about``: which meeting it is, the same on all ranks.
    """

    def __init__(self, group_name: str, about: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # the only way to it

        group = _group(group_name)
        self.size, self.rank, self._about = group.size(), group.rank(), f"{group_name}/{about}"
        self._until: float | None = None
        self._store = PrefixStore("functionalize", _get_default_store())

    def leave(self, text: str) -> None:
        """Leave the text of this rank."""
        self._store.set(f"{self._about}/{self.rank}", text)

    def text(self, rank: int, seconds: float) -> str | None:
        """The text of a rank; None if it is not there so many seconds after the first question."""
        self._until, key = self._until or time.monotonic() + seconds, f"{self._about}/{rank}"
        try:
            self._store.wait([key], datetime.timedelta(seconds=max(0.01, self._until - time.monotonic())))
        except RuntimeError:
            return None
        return self._store.get(key).decode()

    def settle(self, verdict: bool) -> bool:
        """The first verdict that a rank of the meeting has given: this one's, if no other was before."""
        first = self._store.compare_set(f"{self._about}/verdict", "", "yes" if verdict else "no")
        return bool(first == b"yes")


def kernel_of(op: Any) -> Any:
    """The kernel in Python of an operator of ``fully_shard``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as kernels

    name = op.name().removeprefix("fsdp::")
    if name == "chunk_cat_mixed_dtype":  # of later versions of torch, in C++
        return _chunk_cat_mixed_dtype
    names = {"all_gather_copy_in": "all_gather_copy_in_cuda"}  # it is the kernel of all devices
    return getattr(kernels, names.get(name, name))


def _chunk_cat_mixed_dtype(tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    torch._chunk_cat([tensor.to(out.dtype) for tensor in tensors], dim, num_chunks, out=out)
