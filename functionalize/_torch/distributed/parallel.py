"""The reducer of DistributedDataParallel, which averages gradients over ranks while autograd computes them.

In: a wrapped module whose parameters are fake tensors. Out: a reducer of these, which issues the collectives that the
module's own would, in the same buckets. Guarantees: the module's own reducer is not used. Limits: torch's reducer in
C++.
"""

from __future__ import annotations

from collections.abc import Sequence
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
