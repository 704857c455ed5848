"""Modules that communicate while autograd runs: their own reducers run in a capture, on its fake tensors.

In: the modules of a program's state. Out: replacements for attributes of the modules while the program runs.
Guarantees: collectives have the order and the sizes of eager's. Limits: DistributedDataParallel,
and `fully_shard` without CPU offload.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize._torch.dispatch import DisableTorchFunction
from functionalize._torch.distributed.parallel import (
    Shards,
    SilentLogger,
    buckets_of,
    finds_unused,
    is_data_parallel,
    leaves_unused,
    shards_of,
    traced_reducer,
    unasked_versions,
    unsupported_option,
)
from functionalize.patches import Patch
from functionalize.python_state.reconstruct import ObjectRef
from functionalize.reachability import functions_behind
from functionalize.refusals.calls import USED_BY_OTHER_THREAD
from functionalize.refusals.gradients import REDUCED_OUTSIDE, UNUSED_OUTSIDE
from functionalize.refusals.tensors import DATA_PARALLEL_OPTION, FULLY_SHARDED_MODULE, LEFT_SHARDED
from functionalize.runtime.outputs.side_effects import AwaitedBackward
from functionalize.tracing.fakeify import stopping_at_inputs

_LOGGER = SilentLogger()


def _keeping(edge: Any, kept: dict[int, Any]) -> Any:
    """Keep the gradient that reaches an edge, by the identity of the edge."""
    return edge.node.register_prehook(lambda gradients: kept.update({id(edge): gradients[edge.output_nr]}))


def _leaves_behind(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The leaves, by identity, that autograd reaches from some tensors."""
    return {id(getattr(function, "variable", None)) for function in functions_behind(t.grad_fn for t in tensors)}


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
        self._awaits = False  # whether a backward of sharded modules is to come
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

        If their backward is to come, a call leaves sharded parameters, where eager may leave gathered ones until then.

        Raises:
            UnsupportedProgramError: it does.
        """
        if self._sharded:
            with DisableTorchFunction():
                reached = _leaves_behind(
                    leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)
                )
            leaves = (leaf for shards in self._sharded if shards.has_run_forward for leaf in shards.leaves.values())
            self._awaits = any(id(leaf) in reached for leaf in leaves)
        for shards in self._sharded:
            if self._awaits and shards.began_unreduced:
                raise REDUCED_OUTSIDE.error(problem="which holds gradients that are not reduced")
            if self._awaits:
                shards.hide_gathered()
            if shards.problem is not None:
                raise LEFT_SHARDED.error(problem=shards.problem)

    def begin(self, fakes: Mapping[int, Any]) -> None:
        """Make reducers of the fake tensors that have replaced the parameters."""
        for shards in self._sharded:
            shards.begin(FirstForward)
        for module in self._modules:
            buckets = [[fakes[id(parameter)] for parameter in bucket] for bucket in self._buckets[id(module)]]
            self._reducers[id(module)] = traced_reducer(module, buckets)

    def awaited(
        self, returned: Any, seen: Sequence[Iterable[Any]], describe: Callable[[Any], Any]
    ) -> list[AwaitedBackward]:
        """The modules whose backward is to come when the program has ended.

        ``seen``: the objects of its state, and of its arguments; ``describe``: how a call makes a tensor that the
        program returns.

        Raises:
            UnsupportedProgramError: a call could not tell which parameters the module does not use; or a backward in
                the program has not used all, which only the module's own reducer knows.
        """
        static = (self._reducers[id(module)] for module in self._modules if module.static_graph and self._reducers)
        if any(leaves_unused(reducer) for reducer in static):
            raise DATA_PARALLEL_OPTION.error(option="static_graph=True, and a backward that leaves parameters unused")
        waiting = {key: reducer for key, reducer in self._reducers.items() if not reducer.begun.is_set()}
        if not waiting:
            return []
        places = {
            id(value): ObjectRef(n, number) for n, walked in enumerate(seen) for number, value in enumerate(walked)
        }
        left = list[AwaitedBackward]()
        for module in (module for module in self._modules if id(module) in waiting):
            outputs = list[Any]()
            if finds_unused(module):
                outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
                with DisableTorchFunction():
                    used, reached = map(_leaves_behind, (waiting[id(module)].outputs, outputs))
                buckets = [set(map(id, bucket)) for bucket in waiting[id(module)].buckets]
                if not used <= reached or any(used.isdisjoint(bucket) for bucket in buckets):
                    raise UNUSED_OUTSIDE.error()
            left.append(AwaitedBackward(places[id(module)], tuple(map(describe, outputs))))
        return left

    @property
    def rearrange(self) -> bool:
        """Whether eager rearranges what modules reduce together, in the order in which their first backward was.

        No graph tells that order, since autograd gets all gradients of a graph at once.
        """
        return any(reducer.rearranges for reducer in self._reducers.values())

    def gathered(self, sources: Sequence[Any]) -> list[Any]:
        """Leaves and edges that autograd reaches in the places of others: gathered parameters for sharded ones."""
        leaves = {key: leaf for shards in self._sharded for key, leaf in shards.leaves.items()} if self._awaits else {}
        return [leaves.get(id(source), source) for source in sources]

    @property
    def buffers(self) -> Iterator[torch.Tensor]:
        """What a backward of the modules may write to."""
        return (buffer for shards in self._sharded for buffer in shards.buffers)

    def gradients(self, targets: Any, sources: Sequence[Any], tangents: Any, *, create_graph: bool) -> Sequence[Any]:
        """What `torch.autograd.grad` gives, but that of a sharded parameter is the one that its module reduces.

        Raises:
            UnsupportedProgramError: a call cannot leave what the modules do, or the gradients are differentiated.
        """
        if not self._awaits:
            return torch.autograd.grad(targets, sources, tangents, allow_unused=True, create_graph=create_graph)
        if create_graph:
            raise REDUCED_OUTSIDE.error(problem="twice")
        leaves = [source for source in sources if isinstance(source, torch.Tensor)]
        at_edges = dict[int, Any]()
        hooks = [_keeping(edge, at_edges) for edge in sources if not isinstance(edge, torch.Tensor)]
        with DisableTorchFunction():
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        for shards in self._sharded:
            shards.show_gathered()
        try:
            with stopping_at_inputs():
                torch.autograd.backward(targets, tangents, inputs=self.gathered(sources))
            if any(shards.has_unreduced or shards.gathered for shards in self._sharded):
                raise REDUCED_OUTSIDE.error(problem="in a backward that does not reduce or reshard")
            with DisableTorchFunction():
                by_leaf = {id(leaf): leaf.grad for leaf in leaves}
            return [by_leaf.get(id(source), at_edges.get(id(source))) for source in sources]
        finally:
            for hook in hooks:
                hook.remove()
            with DisableTorchFunction():
                for leaf, gradient in zip(leaves, before, strict=True):
                    leaf.grad = gradient

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
