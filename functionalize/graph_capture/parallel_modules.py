"""Modules that communicate while autograd runs: their own reducers run in a capture, on its fake tensors.

In: the modules of a program's state. Out: replacements for attributes of the modules while the program runs.
Guarantees: collectives have the order and the sizes of eager's. Limits: DistributedDataParallel,
and `fully_shard` without CPU offload.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize._torch.dispatch import DisableTorchFunction
from functionalize._torch.distributed.parallel import (
    Shards,
    SilentLogger,
    buckets_of,
    is_data_parallel,
    shards_of,
    traced_reducer,
    unasked_versions,
    unsupported_option,
)
from functionalize.patches import Patch
from functionalize.reachability import functions_behind
from functionalize.refusals.calls import USED_BY_OTHER_THREAD
from functionalize.refusals.gradients import REDUCED_OUTSIDE
from functionalize.refusals.tensors import DATA_PARALLEL_OPTION, FULLY_SHARDED_MODULE, LEFT_SHARDED

_LOGGER = SilentLogger()


class FirstForward(BaseException):
    """A program runs a module of ``fully_shard`` that never ran: not an `Exception`, which the program could catch."""

    def __init__(self, shards: Shards) -> None:
        super().__init__("the first forward of a module of fully_shard")
        self.shards = shards


class ParallelModules:
    """The modules of one capture."""

    def __init__(self, objects: Iterable[Any]) -> None:
        """``objects``: those of the program's state, while they have their own parameters."""
        in_use = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._modules = [value for value in objects if is_data_parallel(value)] if in_use else []
        for module in self._modules:
            option = unsupported_option(module)
            if option is not None:
                raise DATA_PARALLEL_OPTION.error(option=option)
        self._buckets = {id(module): buckets_of(module) for module in self._modules}
        self._reducers: dict[int, Any] = {}
        self._sharded = shards_of(objects) if in_use else []
        for shards in self._sharded:
            if shards.problem is not None:
                raise FULLY_SHARDED_MODULE.error(problem=shards.problem)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put the records of sharded modules back at the end."""
        for shards in self._sharded:
            shards.keep()
        try:
            yield
        finally:
            for shards in self._sharded:
                shards.put_back()

    def check_left(self, returned: Any) -> None:
        """Raise where the program leaves records of sharded modules that no call can leave.

        Raises:
            UnsupportedProgramError: it does, or it returns what is differentiated by gathered parameters.
        """
        gathered = {id(tensor) for shards in self._sharded for tensor in shards.gathered}
        if gathered:
            with DisableTorchFunction():
                ends = [leaf.grad_fn for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
            if any(id(getattr(function, "variable", None)) in gathered for function in functions_behind(ends)):
                raise REDUCED_OUTSIDE.error(module="fully_shard")
        for shards in self._sharded:
            if shards.problem is not None:
                raise LEFT_SHARDED.error(problem=shards.problem)

    def begin(self, fakes: Mapping[int, Any]) -> None:
        """Make reducers of the fake tensors that have replaced the parameters."""
        for shards in self._sharded:
            shards.begin(FirstForward)
        for module in self._modules:
            buckets = [[fakes[id(parameter)] for parameter in bucket] for bucket in self._buckets[id(module)]]
            self._reducers[id(module)] = traced_reducer(module, buckets)

    def refuse_backward(self) -> None:
        """Raise where autograd runs a backward after the program, in which a module's own reducer would take part.

        Raises:
            UnsupportedProgramError: the program ran such a module with gradients on.
        """
        if any(reducer.expects_backward for reducer in self._reducers.values()):
            raise REDUCED_OUTSIDE.error(module="DistributedDataParallel")
        if self._sharded:
            raise REDUCED_OUTSIDE.error(module="fully_shard")

    def rows(self) -> Iterator[Patch]:
        """Have the modules find the reducers, and keep other threads from the records of sharded ones."""
        thread = threading.get_ident()
        states = {id(shards.state) for shards in self._sharded}

        def guarded(state: Any) -> dict[str, Any]:
            if threading.get_ident() != thread and id(state) in states:
                raise USED_BY_OTHER_THREAD.error()
            records: dict[str, Any] = vars(state)
            return records

        def in_training(name: str) -> property:
            """An attribute that each forward and backward reads first."""
            return property(
                lambda state: guarded(state)[name], lambda state, value: guarded(state).update({name: value})
            )

        for cls in {type(shards.state) for shards in self._sharded}:
            yield Patch.by(in_training("_training_state"), cls, "_training_state", shared=True)
        if not self._modules:
            return

        def traced(name: str, values: Mapping[int, Any]) -> property:
            def get(module: Any) -> Any:
                own = module.__dict__[name]
                return values.get(id(module), own) if threading.get_ident() == thread else own

            return property(get)

        loggers = {id(module): _LOGGER for module in self._modules}
        cls = torch.nn.parallel.DistributedDataParallel
        yield Patch.by(traced("reducer", self._reducers), cls, "reducer", shared=True)
        yield Patch.by(traced("logger", loggers), cls, "logger", shared=True)
        yield Patch(torch.autograd, "_unsafe_preserve_version_counter", unasked_versions)
