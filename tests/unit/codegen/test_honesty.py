"""Does every op do what its row says? Torch's own operator samples, run under a mode that watches memory.

A schema may deny a write or an alias (native_batch_norm, _unsafe_view); nothing in the YAML tells, running it
does. Each op that runs for a sample is held to its row: arguments that the row does not call written keep
their values, and what it returns shares no storage with an argument unless the row says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize.ops import tables
from functionalize.ops.tables import Kind, OpRow, ViewKind

SAMPLES = 3  # of each op, from the front: those of the database go from plain to odd


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each op; the database, which takes seconds, is not loaded for quick checks."""
    if "info" in metafunc.fixturenames:
        infos = [] if metafunc.config.option.markexpr == "not slow" else on_cpu()
        metafunc.parametrize(
            "info",
            infos,
            ids=lambda info: f"{info.name}.{info.variant_test_name}".rstrip("."),
        )


def on_cpu() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    # These declare dtypes for the CPU and have CUDA kernels alone.
    other = ("jiterator_", "torch.ops.aten._flash_", "torch.ops.aten._efficient_")
    return [info for info in op_db if info.supported_dtypes("cpu") and not info.name.startswith(other)]


def memory(tensor: torch.Tensor) -> int:
    """Identity of a dense tensor's storage; 0 where there is none, or nothing in it."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every dense tensor argument, with its parameter's name."""
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    for name, value in named.items():
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and memory(tensor):
                yield name, tensor


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Below autograd the conjugate and negative bits of an operand are not looked at.
    left, right = left.resolve_conj().resolve_neg(), right.resolve_conj().resolve_neg()
    both_nan = (left != left) & (right != right)
    return bool(((left == right) | both_nan).all())


def first_dtype(info: Any) -> torch.dtype:
    supported = info.supported_dtypes("cpu")
    preferred = [dtype for dtype in (torch.float32, torch.complex64, torch.int64) if dtype in supported]
    return preferred[0] if preferred else min(supported, key=str)


def lies(row: OpRow, before: list[tuple[str, torch.Tensor, torch.Tensor]], result: Any) -> Iterator[str]:
    written = {w.name for w in row.written}
    held = {memory(tensor) for _, tensor, _ in before}
    for name, tensor, copy in before:
        if name not in written and not same(tensor, copy):
            yield f"{row.name} writes {name}"
    if row.view is not ViewKind.NONE or row.kind is not Kind.FUNCTIONAL or row.functional is not None:
        return
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and memory(tensor) in held:
            yield f"{row.name} returns memory of an argument"


class Watch(TorchDispatchMode):
    """Holds each op to its row."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        row = tables.row(func)
        if row.composite and func._can_decompose():
            outcome = func.decompose(*args, **kwargs)
            if outcome is not NotImplemented:
                return outcome
        before = [(name, t, t.clone()) for name, t in arguments(func, args, kwargs)]
        result = func(*args, **kwargs)
        self.found.update(lies(row, before, result))
        return result


@pytest.mark.slow
@pytest.mark.every(20)
@pytest.mark.filterwarnings("ignore")  # of the samples, such as those of deprecated ops
def test_ops_keep_to_their_rows(info: Any) -> None:
    watch = Watch()
    for index, sample in enumerate(info.sample_inputs("cpu", first_dtype(info))):
        if index == SAMPLES:
            break
        with watch:
            info(sample.input, *sample.args, **sample.kwargs)
    assert not watch.found
