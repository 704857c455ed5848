"""Which operators trust the strides of their arguments: each op of the database and of its backward, tried on others.

An op is run again on the same values in other strides, one argument at a time and then all. Limits: dense strides; ops
that write, view or draw are left out, and results of ops that leave some of them uninitialized.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize.ops.calls import draws
from tests.sweeps.opinfo.cases import op_table

SAMPLES = 8
KINDS = 6  # of sizes, of each op
# Of storage, or of memory that nobody has written.
_LEFT_OUT = (
    "aten::as_strided",
    "aten::_efficientzerotensor",
    "aten::empty",
    "aten::new_empty",
    "aten::_unsafe_view",
    "aten::_ctc_loss",
)


def reversed_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, the first dimension innermost."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, the second dimension innermost."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


class StridesTried(TorchDispatchMode):
    """Tries each op that runs, and notes in ``trusting`` those that give something else, or raise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trusting: set[Any] = set()
        self._tried: dict[Any, set[Any]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        plain = not schema.is_mutable and not any(result.alias_info for result in schema.returns)
        if plain and not schema.name.startswith(_LEFT_OUT) and not draws(func, args, kwargs or {}):
            self._try(func, args, kwargs or {}, pytree.tree_leaves(out))
        return out

    def _try(self, func: Any, args: Any, kwargs: Any, wanted: Sequence[Any]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in (*leaves, *wanted)):
            return
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
        sizes = tuple(leaves[place].size() for place in places)
        if func in self.trusting or sizes in self._tried[func] or len(self._tried[func]) == KINDS:
            return
        self._tried[func].add(sizes)
        for lay_out in (reversed_strides, channels_last):
            for chosen in [*({place} for place in places), set(places)]:
                given = [lay_out(leaf) if place in chosen else leaf for place, leaf in enumerate(leaves)]
                if not _gives(func, pytree.tree_unflatten(given, spec), wanted):
                    self.trusting.add(func)
                    return


def _gives(func: Any, call: Any, wanted: Sequence[Any]) -> bool:
    try:
        found = pytree.tree_leaves(func(*call[0], **call[1]))
    except RuntimeError:
        return False
    pairs = [pair for pair in zip(found, wanted, strict=True) if isinstance(pair[1], torch.Tensor)]
    return all(torch.allclose(*pair, rtol=1e-3, atol=1e-4, equal_nan=True) for pair in pairs)


def trusting(names: Sequence[str]) -> set[Any]:
    """The ops that trust strides among those that some of the database's come to, forward and backward."""
    tried = StridesTried()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in (run for name in names for run in _runs(name)):
            with contextlib.suppress(Exception), tried:  # it may have no backward
                results = [one for one in pytree.tree_leaves(run()) if isinstance(one, torch.Tensor)]
                results = [one for one in results if one.requires_grad]
                torch.autograd.backward(results, [torch.randn_like(one) for one in results])
    return tried.trusting


def _runs(name: str) -> Iterator[Callable[[], Any]]:
    info: Any = op_table()[name]
    if torch.float32 in info.supported_dtypes("cpu"):
        for one in islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), SAMPLES):
            yield partial(info, one.input, *one.args, **one.kwargs)
