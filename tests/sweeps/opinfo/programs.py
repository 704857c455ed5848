"""The templates: a sample of an op becomes a function of tensors. Invariant: it closes over no tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from functionalize.verify.observation import clone_inputs
from tests.sweeps.opinfo.cases import Case, op_table, sample_of


@dataclass(frozen=True)
class Program:
    """A function of tensors alone, and tensors to call it on (to be cloned for each call)."""

    run: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Rebuild:
    """Puts a program's tensors back between the constants of its sample."""

    constants: tuple[Any, ...]
    spec: pytree.TreeSpec

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        supply = iter(tensors)
        leaves = [next(supply) if leaf is _HOLE else clone_inputs(leaf) for leaf in self.constants]
        subject, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return subject, args, kwargs


_HOLE = object()


class NoProgramError(Exception):
    """The template says nothing about this sample, as `out=` where the result is no tensor."""


def build(case: Case) -> Program:
    """The program of a case. Raises NoProgramError where the template does not apply."""
    op = op_table()[case.op]
    sample = sample_of(case)
    tensors, rebuild = _flatten(sample)
    if case.template == "call":
        return Program(_call(op, rebuild), tensors)
    if case.template in ("out", "out_resize"):
        return _out(op, tensors, rebuild, resize=case.template == "out_resize")
    if not isinstance(sample.input, torch.Tensor):
        raise NoProgramError("the op's input is no tensor")
    make = {"inplace": _inplace, "inplace_view": _inplace_view, "inplace_input": _inplace_input}
    return Program(make[case.template](op, rebuild), tensors)


def _flatten(sample: SampleInput) -> tuple[tuple[torch.Tensor, ...], _Rebuild]:
    leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor))
    constants = tuple(_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return tensors, _Rebuild(constants, spec)


def _call(op: OpInfo, rebuild: _Rebuild) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Any:
        subject, args, kwargs = rebuild(tensors)
        return op.op(subject, *args, **kwargs)

    return run


def _inplace(op: OpInfo, rebuild: _Rebuild) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Any:
        subject, args, kwargs = rebuild(tensors)
        subject = subject.clone()
        result = op.inplace_variant(subject, *args, **kwargs)
        return subject, result

    return run


def _inplace_view(op: OpInfo, rebuild: _Rebuild) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Any:
        subject, args, kwargs = rebuild(tensors)
        size = list(subject.shape)
        base = torch.zeros([size[0] + 2, *size[1:]] if size else [3], dtype=subject.dtype)
        view = base[1:-1] if size else base[1]
        view.copy_(subject)
        op.inplace_variant(view, *args, **kwargs)
        return base, view

    return run


def _inplace_input(op: OpInfo, rebuild: _Rebuild) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Any:
        subject, args, kwargs = rebuild(tensors)
        return op.inplace_variant(subject, *args, **kwargs)

    return run


def _out(op: OpInfo, tensors: tuple[torch.Tensor, ...], rebuild: _Rebuild, *, resize: bool) -> Program:
    """Results go into given tensors of the right shape, or into empty ones made inside that must grow."""
    torch.manual_seed(0)
    expected = _call(op, rebuild)(*clone_inputs(tensors))
    leaves, spec = pytree.tree_flatten(expected)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise NoProgramError("the result is no tensor")
    dtypes = [leaf.dtype for leaf in leaves]
    given = len(tensors)

    def run(*everything: torch.Tensor) -> Any:
        subject, args, kwargs = rebuild(everything[:given])
        outs = [torch.empty(0, dtype=dtype) for dtype in dtypes] if resize else list(everything[given:])
        out = tuple(outs) if len(outs) > 1 or not spec.is_leaf() else outs[0]
        result = op.op(subject, *args, **kwargs, out=out)
        return outs, result

    outs = () if resize else tuple(torch.zeros_like(leaf) for leaf in leaves)
    return Program(run, (*tensors, *outs))
