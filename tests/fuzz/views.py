"""Steps that make views: primitive, composite, multi-output, maybe-alias, and in-place ones.

A maker returns what follows ``tensor.`` in the source. Limits: sizes are small, so are steps and offsets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.pool import Pool, Tensor, need

Maker = Callable[[Pool, Tensor], str]
VIEWS: dict[str, Maker] = {}
MULTI: dict[str, Maker] = {}
IN_PLACE: dict[str, Maker] = {}


def register(table: dict[str, Maker]) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        table[maker.__name__] = maker
        return maker

    return add


view, multi, in_place = register(VIEWS), register(MULTI), register(IN_PLACE)


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
    name = "view_as_real" if not t.is_conj() else "real"
    return p.one_of("real", "imag", f"unsqueeze(0).{name}" if name == "real" else "real")


@view
def conj(p: Pool, t: Tensor) -> str:
    need(t.is_complex())
    return p.one_of("conj()", "mH" if t.dim() == 2 else "conj()", "resolve_conj()", "conj().imag")


@view
def same(p: Pool, t: Tensor) -> str:
    return p.one_of("detach()", "view_as({x})", "__getitem__(...)", "data", "alias()", "expand_as({x})").format(
        x="_same_"
    )


@view
def maybe(p: Pool, t: Tensor) -> str:
    return p.one_of(
        "contiguous()",
        f"to(torch.{str(t.dtype)[6:]})",
        "to(torch.int64)",
        "contiguous().view(-1)",
        "resolve_neg()",
        "type_as(_same_)",
        "float()" if not t.is_complex() else "contiguous()",
    )


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


@in_place
def t_(p: Pool, t: Tensor) -> str:
    need(t.dim() <= 2)
    return "t_()"


@in_place
def transpose_(p: Pool, t: Tensor) -> str:
    return f"{p.one_of('transpose_', 'swapaxes_')}({p.dim(t)}, {p.dim(t)})"


@in_place
def squeeze_(p: Pool, t: Tensor) -> str:
    return p.one_of("squeeze_()", f"squeeze_({p.dim(t)})")


@in_place
def unsqueeze_(p: Pool, t: Tensor) -> str:
    return f"unsqueeze_({p.rng.randint(-t.dim() - 1, t.dim())})"


@in_place
def as_strided_(p: Pool, t: Tensor) -> str:
    need(p.chance(0.4))
    return as_strided(p, t).replace("as_strided(", "as_strided_(")


@in_place
def resize_(p: Pool, t: Tensor) -> str:
    need(p.chance(0.4) and t.numel() > 0)
    return f"resize_({p.factors(p.rng.randint(1, t.numel()))})"


@in_place
def set_(p: Pool, t: Tensor) -> str:
    need(p.chance(0.4))
    return f"set_({p.pick(lambda other: other.dtype is t.dtype and not other.is_conj())})"


@in_place
def detach_(p: Pool, t: Tensor) -> str:
    return "detach_()"
