"""The reducer of DistributedDataParallel, which averages gradients over ranks while autograd computes them.

In: a wrapped module whose parameters are fake tensors. Out: a reducer of these, which issues the collectives that the
module's own would, in the same buckets. Guarantees: the module's own reducer is not used. Limits: torch's reducer in
C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functionalize._torch.dispatch import DisableTorchFunction


def is_data_parallel(value: object) -> bool:
    """Whether an object is a module of DistributedDataParallel."""
    return isinstance(value, torch.nn.parallel.DistributedDataParallel)


def buckets_of(module: Any) -> list[list[Tensor]]:
    """The parameters that are reduced together, in the order of the collectives, as they are now."""
    return [bucket.parameters() for bucket in module.reducer._get_zeros_like_grad_buckets()]


class _WithFixedBuckets:
    """What a reducer of a capture leaves out: rearranging buckets, for which ranks communicate once."""

    expects_backward = False

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        self.expects_backward = True
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
        module.find_unused_parameters,
        module.gradient_as_bucket_view,
        {place: str(place) for place in range(len(parameters))},
        module._bucket_config.first_bucket_bytes_cap,
        module.skip_all_reduce_unused_params,
        False,
        [],
        module.batched_grad_copy,
    )
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(made, state, hook)
    return made


def unsupported_option(module: Any) -> str | None:
    """An option of a module whose reducer works in another way; None if it has no such option."""
    if module.static_graph:
        return "static_graph=True"
    if module.mixed_precision is not None:
        return "mixed_precision"
    if module._delay_all_reduce_all_params:
        return "delay_all_reduce_named_params"
    builtin = str(module.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")).startswith("BuiltinCommHookType")
    return "a built-in communication hook" if builtin else None


def unasked_versions(preserve: Any) -> Any:
    """Torch's context that restores version counters, whose reading of them is no question of the program."""

    class PreservingVersions(preserve):  # type: ignore[misc]
        def __init__(self, tensors: Tensor | tuple[Tensor, ...]) -> None:
            with DisableTorchFunction():
                super().__init__(tensors)

    return PreservingVersions


class SilentLogger:
    """What DistributedDataParallel calls on its logger."""

    def set_runtime_stats_and_log(self) -> None: ...


# What decides how the parameters of a group are gathered, and their gradients reduced.
_OPTIONS = (
    *("reduce_grads", "all_reduce_grads", "reshard_after_backward", "gradient_divide_factor", "mp_policy"),
    *("reduce_scatter_unused_params", "force_sum_reduction_for_comms", "unshard_in_backward", "_all_reduce_hook"),
    *("post_forward_mesh_info", "offload_policy", "_partial_reduce_output"),
)


def shard_options(state: Any) -> dict[str, Any]:
    """What decides how a module of ``fully_shard`` communicates, and whether its parameters are gathered now."""
    options: dict[str, Any] = {}
    for place, group in enumerate(state._fsdp_param_groups):
        options |= {f"{place}.{name}": getattr(group, name, None) for name in _OPTIONS}
        for param in group.fsdp_params:
            name = f"{place}.{param._module_info.param_name}"
            held = {"sharded_state": param.sharded_state, "has_no_gradient": param.unsharded_accumulated_grad is None}
            options |= {f"{name}.{key}": value for key, value in held.items()}
    return options


class Shards:
    """The records that one ``fully_shard`` keeps of its modules, while a capture runs them on fake parameters."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._params = [param for group in state._fsdp_param_groups for param in group.fsdp_params]
        self._objects = [state, state._state_ctx, state._comm_ctx, *state._fsdp_param_groups, *self._params]
        self._options = shard_options(state)
        self._before: list[_Record] = []

    @property
    def problem(self) -> str | None:
        """Why the module cannot be captured as it is now; None if it can."""
        if any(param.offload_to_cpu for param in self._params):
            return "offloads parameters to the CPU"
        if any(param.sharded_state.name != "SHARDED" for param in self._params):
            return "holds gathered parameters: call its `reshard()` first"
        if any(param.unsharded_accumulated_grad is not None for param in self._params):
            return "holds gradients that are not reduced yet"
        return None

    @property
    def is_as_before(self) -> bool:
        """Whether the program has left the options, and all parameters sharded."""
        return shard_options(self._state) == self._options

    def initialize(self) -> None:
        """Let the module be the outermost of those below it, as its first forward does."""
        self._state._lazy_init()

    def begin(self, fakes: Mapping[int, Any], first_forward: Callable[[Shards], BaseException]) -> None:
        """Let the records hold fake parameters, and no buffers of gathered ones.

        ``first_forward``: what a forward raises that would be the first one, which decides which module is outermost.
        """
        self._before = [_Record.of(value) for value in self._objects]
        if self._state._is_root is None:
            self._state._lazy_init = partial(_raise, partial(first_forward, self))
        for param in self._params:
            data = param._sharded_param_data
            param.sharded_param = fakes[id(param.sharded_param)]
            local = param.sharded_param._local_tensor.detach()
            param._sharded_param_data = local.as_strided(data.size(), data.stride(), data.storage_offset())
            param.all_gather_outputs, param._unsharded_inner_tensors = [], []
            vars(param).pop("_unsharded_param", None)

    def put_back(self) -> None:
        """Restore the records."""
        for record in self._before:
            record.restore()


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
