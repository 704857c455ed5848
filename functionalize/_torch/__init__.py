"""The only door to private torch symbols. Each stands in here with the reason why no public one serves.

What most modules need is passed on here; what loads sympy or Dynamo is imported from its module. Invariant: nothing
here knows of bases, views or rules. Limits: written against torch 2.13 and 2.15.
"""

from __future__ import annotations

from torch.utils import _pytree as pytree  # torch has no public one

from functionalize._torch.fakes import FakeTensor
from functionalize._torch.modes import (
    DisableTorchFunction,
    FakeTensorMode,
    ProxyTorchDispatchMode,
    TorchDispatchMode,
    below_all_modes,
    below_autograd,
    below_mode,
    counting_versions,
    current_proxy_mode,
    functionalized_outside,
    in_functorch_transform,
    mode_stack,
    on_handles,
    uncached_fakes,
    uncompiled,
    unwrap_functorch,
)
from functionalize._torch.ops import (
    HigherOrderOperator,
    OpOverload,
    auto_functionalized,
    auto_functionalized_v2,
    can_auto_functionalize,
    counts_versions,
    decomposes,
)
from functionalize._torch.proxies import (
    last_node,
    node_of,
    point_proxy,
    record_effect,
    record_symbols,
    record_view,
    same_node,
    tensors_with_storage,
    track_symbols,
)
from functionalize._torch.sizes import SYMBOLS, forget_offset, has_symbols, hint_of, sized_by_data, unbacked
from functionalize._torch.tensors import (
    PLAIN_TYPES,
    alias_of_wrapper,
    bytes_of_original,
    copy_of_memory,
    is_symbolic,
    is_view,
    is_zero_tensor,
    memory_view,
    memory_write,
    set_versions,
    storage_id,
    storage_key,
)

__all__ = [
    "PLAIN_TYPES",
    "SYMBOLS",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "ProxyTorchDispatchMode",
    "TorchDispatchMode",
    "alias_of_wrapper",
    "auto_functionalized",
    "auto_functionalized_v2",
    "below_all_modes",
    "below_autograd",
    "below_mode",
    "bytes_of_original",
    "can_auto_functionalize",
    "copy_of_memory",
    "counting_versions",
    "counts_versions",
    "current_proxy_mode",
    "decomposes",
    "forget_offset",
    "functionalized_outside",
    "has_symbols",
    "hint_of",
    "in_functorch_transform",
    "is_symbolic",
    "is_view",
    "is_zero_tensor",
    "last_node",
    "memory_view",
    "memory_write",
    "mode_stack",
    "node_of",
    "on_handles",
    "point_proxy",
    "pytree",
    "record_effect",
    "record_symbols",
    "record_view",
    "same_node",
    "set_versions",
    "sized_by_data",
    "storage_id",
    "storage_key",
    "tensors_with_storage",
    "track_symbols",
    "unbacked",
    "uncached_fakes",
    "uncompiled",
    "unwrap_functorch",
]
