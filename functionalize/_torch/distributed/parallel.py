"""What DistributedDataParallel and ``fully_shard`` keep of a module, to average gradients over ranks in a backward.

In: a wrapped module whose parameters are fake tensors. Out: a reducer of these, which issues the collectives that the
module's own would, in the same buckets; the records of ``fully_shard``, which can be read, replaced and put back.
Guarantees: a capture does not use the module's own reducer. Limits: torch's reducer in C++.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from functionalize._torch.dispatch import DisableTorchFunction
from functionalize.refusals.tensors import DATA_PARALLEL_OPTION


def is_data_parallel(value: object) -> bool:
    """Whether an object is a module of DistributedDataParallel."""
    return isinstance(value, torch.nn.parallel.DistributedDataParallel)


def finds_unused(module: Any) -> bool:
    """Whether each forward of a module finds the parameters that it does not use."""
    return bool(module.find_unused_parameters and not module.static_graph)


def buckets_of(module: Any) -> list[list[Tensor]]:
    """The parameters that are reduced together, in the order of the collectives, as they are now."""
    return [bucket.parameters() for bucket in module.reducer._get_zeros_like_grad_buckets()]


class _WithFixedBuckets:
    """What a reducer of a capture leaves out: rearranging buckets, as eager does after its first backward."""

    outputs: Sequence[Tensor] = ()  # those in which the last forward looked for unused parameters
    buckets: Sequence[Sequence[Tensor]]
    may_rearrange: bool
    begun: threading.Event  # set unless a backward is to come
    rearranges = False  # whether eager rearranges buckets, or will

    def _rebuild_buckets(self) -> bool:
        self.rearranges = self.may_rearrange
        return False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        self.outputs = outputs
        self.begun.clear()
        super().prepare_for_backward(outputs)  # type: ignore[misc]


def traced_reducer(module: Any, buckets: Sequence[Sequence[Tensor]]) -> Any:
    """A reducer of the present parameters of a module."""
    dist: Any = torch.distributed  # Reducer is private
    parameters, sparse = module._build_params_for_reducer()
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    made = type("TracedReducer", (_WithFixedBuckets, dist.Reducer), {})(
        parameters,
        [[places[id(parameter)] for parameter in bucket] for bucket in buckets],
        [module.bucket_bytes_cap for _ in buckets],
        module.process_group,
        sparse,
        module.bucket_bytes_cap,
        finds_unused(module),
        module.gradient_as_bucket_view,
        {place: str(place) for place in range(len(parameters))},
        module._bucket_config.first_bucket_bytes_cap,
        module.skip_all_reduce_unused_params,
        False,
        [],
        module.batched_grad_copy,
    )
    for hook, state in (*module._comm_hooks, *_builtin_hooks(module)):
        dist._register_comm_hook(made, state, hook)
    made.buckets = buckets
    made.may_rearrange = not (module._has_rebuilt_buckets or finds_unused(module))
    made.begun = begun = threading.Event()  # not `made`: hooks of autograd in C++ keep what they refer to
    begun.set()

    for parameter in parameters:
        get_gradient_edge(parameter).node.register_prehook(lambda gradients: begun.set())
    return made


def leaves_unused(reducer: Any) -> bool:
    """Whether a backward has given some parameters no gradients, so that their buckets are not reduced."""
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def _builtin_hooks(module: Any) -> list[tuple[Any, Any]]:
    """A communication hook of torch's in C++, as the same in Python, with its state."""
    name = str(vars(module)["logger"]._get_ddp_logging_data().strs_map.get("comm_hook", ""))
    if not name.startswith("BuiltinCommHookType"):
        return []
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
    return [(hooks[name.rpartition(".")[2]], module.process_group)]


def await_backward(module: Any, outputs: Sequence[Tensor]) -> None:
    """Do with a module's own reducer what `forward` does for the backward that follows.

    ``outputs``: those from which it finds unused parameters.
    """
    module.logger.set_runtime_stats_and_log()
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward(list(outputs))


def unsupported_option(module: Any) -> str | None:
    """An option of a module whose reducer works in another way; None if it has no such option."""
    if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
        return "static_graph=True, before its first step"
    if module.mixed_precision is not None:
        return "mixed_precision"
    return "delay_all_reduce_named_params" if module._delay_all_reduce_all_params else None


def unasked_versions(preserve: Any) -> Any:
    """Torch's context that restores version counters, whose reading of them is no question of the program."""

    class PreservingVersions(preserve):  # type: ignore[misc]
        def __init__(self, tensors: Tensor | tuple[Tensor, ...]) -> None:
            with DisableTorchFunction():
                super().__init__(tensors)

    return PreservingVersions


_LOGGED = {  # what a program does with a module when it calls these methods of its logger
    "_set_uneven_input_join": "join()",
    "_set_static_graph": "_set_static_graph()",
    "_set_comm_hook_name": "a communication hook that the program registers",
    "_get_ddp_logging_data": "_get_ddp_logging_data()",
}


class SilentLogger:
    """What DistributedDataParallel calls on its logger, which logs nothing of a capture."""

    def set_runtime_stats_and_log(self) -> None: ...

    def set_error_and_log(self, message: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in _LOGGED:
            raise DATA_PARALLEL_OPTION.error(option=_LOGGED[name])
        raise AttributeError(name)


# What decides how the parameters of a group are gathered, and their gradients reduced.
_OPTIONS = (
    *("reduce_grads", "all_reduce_grads", "reshard_after_backward", "gradient_divide_factor", "mp_policy"),
    *("reduce_scatter_unused_params", "force_sum_reduction_for_comms", "unshard_in_backward", "_all_reduce_hook"),
    *("post_forward_mesh_info", "offload_policy", "_partial_reduce_output", "_sharded_state", "unshard_async_op"),
    *("_all_gather_comm", "_reduce_scatter_comm"),
)
_ATTRIBUTES = {"gathered": "_unsharded_param", "gradient": "unsharded_accumulated_grad"}  # by the name of the record
_OF_PARAMETERS = ("sharded_param", *_ATTRIBUTES)


@dataclass(frozen=True)
class ShardRecord:
    """One of the records that ``fully_shard`` keeps: an option, whether a parameter is gathered, what it then is.

    ``owner``: what has this attribute: the state of the module, a group, or one of its parameters.
    """

    owner: Any
    name: str

    @property
    def is_there(self) -> bool:
        """Whether it has a value."""
        if self.name not in _OF_PARAMETERS:
            return True
        gathered = _is_gathered(self.owner)
        if self.name != "gradient":
            return gathered
        return self.owner.unsharded_accumulated_grad is not None or (not gathered and _left(self.owner) is not None)

    def get(self) -> Any:
        """Its value."""
        value = getattr(self.owner, _ATTRIBUTES.get(self.name, self.name))
        return _left(self.owner) if self.name == "gradient" and value is None else value

    def set(self, value: Any) -> None:
        """Replace its value."""
        setattr(self.owner, _ATTRIBUTES.get(self.name, self.name), value)
        if self.name == "_sharded_state":
            for param in self.owner.fsdp_params:
                param.sharded_state = value
        elif self.name == "gathered":
            self.owner.all_gather_outputs = [_buffer(self.owner)]
        elif self.name == "gradient" and not _is_gathered(self.owner):
            vars(self.owner).pop("_unsharded_param", None)  # the next one has no gradient

    def drop(self) -> None:
        """Let it have no value."""
        if self.name == "gathered":  # not freed: a backward may read it
            vars(self.owner).pop("_unsharded_param", None)
            self.owner.all_gather_outputs, self.owner._unsharded_inner_tensors = [], []
        elif self.name == "gradient":
            self.set(None)


def shard_records(state: Any) -> dict[str, ShardRecord]:
    """The records that ``fully_shard`` keeps of a module, by name."""
    records = {"is_last_backward": ShardRecord(state._state_ctx, "is_last_backward")}
    for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
        records[name] = ShardRecord(state, name)
    for place, group in enumerate(state._fsdp_param_groups):
        records |= {f"{place}.{name}": ShardRecord(group, name) for name in _OPTIONS if hasattr(group, name)}
        for number, param in enumerate(group.fsdp_params):
            names = (*_OF_PARAMETERS, *(name for name in _OPTIONS if name in vars(param)))  # these differ by version
            records |= {f"{place}.{number}.{name}": ShardRecord(param, name) for name in names}
    return records


def _is_gathered(param: Any) -> bool:
    return bool(param.sharded_state.name == "UNSHARDED")


def _left(param: Any) -> Any:
    """The gradient that a backward has left without reducing it."""
    return getattr(getattr(param, "_unsharded_param", None), "grad", None)


def _buffer(param: Any) -> Tensor:
    """The memory of a gathered parameter, into which the next one is gathered."""
    gathered = param._unsharded_param
    local: Tensor = getattr(gathered, "_local_tensor", gathered).detach()
    size = param.padded_sharded_param_size.numel() * getattr(param.mesh_info, "shard_mesh_size", 1)
    storage = local.untyped_storage()
    if storage.nbytes() < size * local.itemsize:
        storage.resize_(size * local.itemsize)
    return local.as_strided((size,), (1,), 0)


class Shards:
    """The records that one ``fully_shard`` keeps of its modules, while a capture runs them on fake parameters."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self._params = [param for group in state._fsdp_param_groups for param in group.fsdp_params]
        self._objects = [state, state._state_ctx, state._comm_ctx, *state._fsdp_param_groups, *self._params]
        self._before: list[_Record] = []
        self._hidden: list[_Held] = []
        self.began_unreduced = False

    @property
    def problem(self) -> str | None:
        """Why the module cannot be captured as it is now; None if it can."""
        if self.state._training_state.name != "IDLE":
            return "is running, or stopped at an error: call `reset_iter_state()` in that case"
        if any(param.offload_to_cpu for param in self._params):
            return "offloads parameters to the CPU"
        if any(param.sharded_state.name == "SHARDED_POST_FORWARD" for param in self._params):
            return "holds parameters that are shared by fewer ranks, as a forward without a backward leaves them"
        if any(getattr(group, "_partial_reduce_output_layout", None) for group in self.state._fsdp_param_groups):
            return "holds gradients that are reduced in part, in a layout of its own (from torch 2.15 on)"
        owned = (param for param in self._params if "unsharded_accumulated_grad" in vars(type(param)))
        if any(ShardRecord(param, "gradient").is_there for param in owned):
            return "holds gradients that are not reduced, which the gathered parameters own (from torch 2.15 on)"
        extended = (param for param in self._params if hasattr(param._sharded_local_tensor, "fsdp_post_all_gather"))
        if any(map(_is_gathered, extended)):
            return "holds gathered parameters of a class with `fsdp_post_all_gather`"
        return None

    @property
    def gathered(self) -> list[Tensor]:
        """The gathered parameters that the module holds now."""
        return [param._unsharded_param for param in self._params if _is_gathered(param)]

    @property
    def has_run_forward(self) -> bool:
        """Whether the last forward has had no backward."""
        return any(group._post_forward_indices for group in self.state._fsdp_param_groups)

    @property
    def leaves(self) -> dict[int, Tensor]:
        """The gathered parameters of the last forward, which autograd knows, by the identities of the sharded ones."""
        last = ((param, vars(param).get("_unsharded_param")) for param in self._params)
        return {id(param.sharded_param): gathered for param, gathered in last if gathered is not None}

    @property
    def buffers(self) -> Iterator[Tensor]:
        """What a backward writes to, and frees: the memory of gathered parameters."""
        for param in self._params:
            yield from (*param.all_gather_outputs, *param._unsharded_inner_tensors)

    @property
    def has_unreduced(self) -> bool:
        """Whether a backward has left gradients that it did not reduce."""
        groups, records = self.state._fsdp_param_groups, (ShardRecord(param, "gradient") for param in self._params)
        return any(group._partial_reduce_output is not None for group in groups) or any(r.is_there for r in records)

    def hide_gathered(self) -> None:
        """Have the modules hold sharded parameters, until :meth:`show_gathered`."""
        self._hidden = [_Held.by(param) for param in self._params]
        for held in self._hidden:
            replace(held, state=type(held.state).SHARDED, value=held.param.sharded_param).put()
        self._set_groups()

    def show_gathered(self) -> None:
        """Have the modules hold the parameters that they held."""
        for held in self._hidden:
            held.put()
        self._set_groups()

    def _set_groups(self) -> None:
        for group in self.state._fsdp_param_groups:
            group._sharded_state = next((param.sharded_state for param in group.fsdp_params), group._sharded_state)

    def initialize(self) -> None:
        """Let the module be the outermost of those below it, as its first forward does."""
        self.state._lazy_init()

    def keep(self) -> None:
        """Take the present records as those to put back."""
        self._before = [_Record.of(value) for value in self._objects]

    def begin(self, first_forward: Callable[[Shards], BaseException]) -> None:
        """Let the records hold the fake parameters of the modules, and no buffers but those of gathered ones.

        Of forwards without a backward they hold nothing, for which eager at times gathers once more in vain.
        ``first_forward``: what a forward raises that would be the first one, which decides which module is outermost.
        """
        if self.state._is_root is None:
            self.state._lazy_init = partial(_raise, partial(first_forward, self))
        self.state._comm_ctx.post_forward_order = []
        for group in self.state._fsdp_param_groups:
            group._post_forward_indices = []
        for param in self._params:
            data, info = param._sharded_param_data, param._module_info
            gathered = _is_gathered(param)
            if not gathered:
                param.sharded_param = getattr(info.module, info.param_name)
                vars(param).pop("_unsharded_param", None)
            param.all_gather_outputs, param._unsharded_inner_tensors = [_buffer(param)] if gathered else [], []
            local = param.sharded_param._local_tensor.detach()
            param._sharded_param_data = local.as_strided(data.size(), data.stride(), data.storage_offset())
        self.began_unreduced = self.has_unreduced

    def put_back(self) -> None:
        """Restore the records."""
        for record in self._before:
            record.restore()
        self._before = []


@dataclass(frozen=True, eq=False)
class _Held:
    """What modules hold of a parameter: sharded, gathered, or shared by fewer ranks."""

    param: Any
    state: Any
    value: Tensor

    @classmethod
    def by(cls, param: Any) -> _Held:
        info = param._module_info
        return cls(param, param.sharded_state, getattr(info.module, info.param_name))

    def put(self) -> None:
        self.param.sharded_state = self.state
        self.param._setattr_on_modules(self.value)


def shards_of(objects: Iterable[Any]) -> list[Shards]:
    """The records of the modules of ``fully_shard`` among objects."""
    modules = (value for value in objects if isinstance(value, torch.distributed.fsdp.FSDPModule))
    return [Shards(state) for state in dict.fromkeys(module._get_fsdp_state() for module in modules)]


def _raise(error: Callable[[], BaseException]) -> None:
    raise error()


@dataclass(frozen=True, eq=False)
class _Record:
    """An object, its attributes, and the contents of those that are lists, sets or dicts."""

    value: Any
    attributes: Mapping[str, Any]
    contents: Mapping[str, Any]  # copies

    @classmethod
    def of(cls, value: Any) -> _Record:
        attributes = dict(vars(value))
        held = {name: item for name, item in attributes.items() if type(item) in (list, set, dict)}
        return cls(value, attributes, {name: item.copy() for name, item in held.items()})

    def restore(self) -> None:
        attributes = vars(self.value)
        attributes.clear()
        attributes.update(self.attributes)
        for name, content in self.contents.items():
            container = attributes[name]
            container.clear()
            container.extend(content) if type(container) is list else container.update(content)
