"""Steps that make views: primitive, composite, multi-output, maybe-alias ones.

A maker returns what follows ``tensor.`` in the source, or a whole call of ``_same_``, the tensor.
Limits: sizes are small, so are steps and offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from tests.sweeps.fuzz.pool import Pool, Tensor, need

Maker = Callable[[Pool, Tensor], str]
AnyMaker = TypeVar("AnyMaker", bound=Callable[..., str])
VIEWS: dict[str, Maker] = {}
MULTI: dict[str, Maker] = {}


def register(table: dict[str, AnyMaker]) -> Callable[[AnyMaker], AnyMaker]:
    def add(maker: AnyMaker) -> AnyMaker:
        table[maker.__name__] = maker
        return maker

    return add


view, multi = register(VIEWS), register(MULTI)


def bounds(p: Pool, length: int) -> tuple[int, int]:
    start = p.rng.randrange(length + 1)
    return start, p.rng.randrange(start, length + 1) if p.chance(0.1) else p.rng.randint(min(start + 1, length), length)


@view
def select(p: Pool, t: Tensor) -> str:
    dim = p.dim(t)
    return f"select({dim}, {p.index(t.shape[dim])})"


@view
def slices(p: Pool, t: Tensor) -> str:
    dim = p.dim(t) % t.dim()
    start, stop = bounds(p, t.shape[dim])
    step = p.rng.choice([1, 1, 1, 2, 3])
    low = start - t.shape[dim] if p.chance(0.2) and start < t.shape[dim] else start
    cut = f"{low}:{stop}" if step == 1 else f"{low}:{stop}:{step}"
    return f"__getitem__(({'slice(None), ' * dim}slice({cut.replace(':', ', ')}),))"


@view
def permute(p: Pool, t: Tensor) -> str:
    return f"permute({p.rng.sample(range(t.dim()), t.dim())})"


@view
def transpose(p: Pool, t: Tensor) -> str:
    return f"{p.one_of('transpose', 'transpose', 'swapaxes', 'movedim')}({p.dim(t)}, {p.dim(t)})"


@view
def view_(p: Pool, t: Tensor) -> str:
    need(t.is_contiguous() or p.chance(0.3))
    return f"view({p.factors(t.numel())})"


@view
def reshape(p: Pool, t: Tensor) -> str:
    return f"reshape({p.factors(t.numel())})"


@view
def flatten(p: Pool, t: Tensor) -> str:
    if p.chance(0.4) or t.dim() < 2:
        return p.one_of("flatten()", "ravel()", "view(-1)", "reshape(-1)")
    start = p.rng.randrange(t.dim() - 1)
    return f"flatten({start}, {p.rng.randrange(start, t.dim())})"


@view
def squeeze(p: Pool, t: Tensor) -> str:
    ones = [dim for dim, size in enumerate(t.shape) if size == 1]
    need(bool(ones) or p.chance(0.2))
    return p.one_of(
        "squeeze()",
        f"squeeze({p.dim(t)})",
        f"squeeze({tuple(p.rng.sample(range(t.dim()), min(2, t.dim())))})",
    )


@view
def unsqueeze(p: Pool, t: Tensor) -> str:
    return f"unsqueeze({p.rng.randint(-t.dim() - 1, t.dim())})"


@view
def expand(p: Pool, t: Tensor) -> str:
    shape = [p.rng.choice([2, 3]) if size == 1 else size for size in t.shape]
    lead = [p.rng.choice([1, 2])] if p.chance(0.5) or shape == list(t.shape) else []
    return f"{p.one_of('expand', 'broadcast_to')}({(*lead, *shape)})"


@view
def diagonal(p: Pool, t: Tensor) -> str:
    need(t.dim() >= 2)
    one, two = p.rng.sample(range(t.dim()), 2)
    return f"diagonal({p.rng.randint(-1, 1)}, {one}, {two})"


@view
def unfold(p: Pool, t: Tensor) -> str:
    dim = p.dim(t)
    need(t.shape[dim] >= 1)
    size = p.rng.randint(1, min(3, t.shape[dim]))
    step = p.rng.randint(1, 3) if p.chance(0.4) else size + p.rng.randint(0, 1)
    return f"unfold({dim}, {size}, {step})"


@view
def narrow(p: Pool, t: Tensor) -> str:
    dim = p.dim(t)
    start, stop = bounds(p, t.shape[dim])
    return f"narrow({dim}, {start}, {stop - start})"


@view
def as_strided(p: Pool, t: Tensor) -> str:
    need(not t.is_conj() and not t.is_neg())
    room = t.untyped_storage().nbytes() // t.itemsize
    need(room > 0)
    offset = p.rng.randrange(room)
    left = room - offset
    if p.chance(0.5):
        count = p.rng.randint(1, left)
        step = p.rng.randint(1, max(1, (left - 1) // max(1, count - 1)))
        return f"as_strided(({count},), ({step},), {offset})"
    inner = p.rng.randint(1, min(3, left))
    outer = p.rng.randint(1, max(1, min(3, left // inner)))
    size, stride = ((outer, inner), (inner, 1)) if p.chance(0.5) else ((inner, outer), (1, inner))
    return f"as_strided({size}, {stride}, {offset})"


@view
def dtype(p: Pool, t: Tensor) -> str:
    need(not t.is_conj() and not t.is_neg())
    need(t.dtype is not torch.bool)
    names = ("float32", "int32", "int64", "complex64", "int16")
    return f"view(torch.{p.one_of(*names)})"


@view
def as_real(p: Pool, t: Tensor) -> str:
    need(t.is_complex())
    return p.one_of("real", "imag", "imag", "torch.view_as_real(_same_)", "torch.view_as_real(_same_)[..., 1]")


@view
def as_complex(p: Pool, t: Tensor) -> str:
    need(t.is_floating_point() and t.dim() > 0 and t.shape[-1] == 2)
    return "torch.view_as_complex(_same_)"


@view
def conj(p: Pool, t: Tensor) -> str:
    need(t.is_complex())
    return p.one_of("conj()", "mH" if t.dim() == 2 else "conj()", "resolve_conj()", "conj().imag", "conj().real")


@view
def negated(p: Pool, t: Tensor) -> str:
    need(t.dtype is not torch.bool)
    return p.one_of("torch._neg_view(_same_)", "resolve_neg()")


@view
def same(p: Pool, t: Tensor) -> str:
    calls = ("detach()", "view_as(_same_)", "__getitem__(...)", "data", "torch.ops.aten.alias(_same_)")
    return p.one_of(*calls, "expand_as(_same_)", "torch.ops.aten.slice(_same_)", "reshape_as(_same_)")


@view
def maybe(p: Pool, t: Tensor) -> str:
    return p.one_of(
        "contiguous()",
        f"to(torch.{str(t.dtype)[6:]})",
        "to(torch.int64)",
        "contiguous().view(-1)",
        "resolve_conj()",
        "type_as(_same_)",
        "float()" if not t.is_complex() else "contiguous()",
        "torch.atleast_2d(_same_)",
        "contiguous(memory_format=torch.channels_last)" if t.dim() == 4 else "contiguous()",
        "requires_grad_(False)" if not t.requires_grad else "contiguous()",
    )


@view
def indexed(p: Pool, t: Tensor) -> str:
    """Item access of several kinds at once."""
    keys: list[str] = []
    for size in t.shape:
        kinds = [":", "None, :", "::2", "...", "-1" if size else ":", "0" if size else ":", "1:", ":-1"]
        key = p.one_of(*kinds)
        keys.append(":" if key == "..." and "..." in keys else key)
        if p.chance(0.3):
            break
    need(bool(keys))
    return f"torch.ops.aten.alias(_same_)[{', '.join(keys)}]" if p.chance(0.1) else f"[{', '.join(keys)}]"


@view
def turned(p: Pool, t: Tensor) -> str:
    need(t.dim() == 2)
    return p.one_of("T", "mT", "t()", "adjoint()", "t().contiguous()", "t().reshape(-1)")


@view
def unflatten(p: Pool, t: Tensor) -> str:
    dim = p.dim(t)
    return f"unflatten({dim}, {p.factors(t.shape[dim])})"


@multi
def split(p: Pool, t: Tensor) -> str:
    dim = p.dim(t)
    return f"{p.one_of('split', 'chunk', 'tensor_split')}({p.rng.randint(1, 3)}, {dim})"


@multi
def split_with_sizes(p: Pool, t: Tensor) -> str:
    dim = p.dim(t)
    cut = p.rng.randint(0, t.shape[dim])
    return f"split([{cut}, {t.shape[dim] - cut}], {dim})"


@multi
def unbind(p: Pool, t: Tensor) -> str:
    return f"unbind({p.dim(t)})"


@multi
def thirds(p: Pool, t: Tensor) -> str:
    need(t.dim() > 0)
    calls = ["hsplit(1)", "tensor_split([1], 0)", "tensor_split([1, 2], -1)", "split_with_sizes([1, 0], 0)"]
    calls += ["hsplit(2)", "vsplit(2)", "unsafe_chunk(2)", "unsafe_split(1)"]
    return p.one_of(*calls)
