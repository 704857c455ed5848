"""Steps that change a tensor's metadata: in-place views, ``resize_``, ``set_``, assignment to ``.data``.

A maker returns what follows ``tensor.`` in the source; ``_same_`` stands for the tensor.
Limits: memory that nobody has written is never read.
"""

from __future__ import annotations

from tests.sweeps.fuzz.pool import Pool, Tensor, need
from tests.sweeps.fuzz.views import Maker, as_strided, register

IN_PLACE: dict[str, Maker] = {}
in_place = register(IN_PLACE)


@in_place
def t_(p: Pool, t: Tensor) -> str:
    need(t.dim() <= 2)
    return "t_()"


@in_place
def transpose_(p: Pool, t: Tensor) -> str:
    return f"{p.one_of('transpose_', 'swapaxes_')}({p.dim(t)}, {p.dim(t)})"


@in_place
def squeeze_(p: Pool, t: Tensor) -> str:
    return p.one_of("squeeze_()", f"squeeze_({p.dim(t)})", f"squeeze_((0, {p.rng.randrange(max(t.dim(), 1))}))")


@in_place
def unsqueeze_(p: Pool, t: Tensor) -> str:
    return f"unsqueeze_({p.rng.randint(-t.dim() - 1, t.dim())})"


@in_place
def as_strided_(p: Pool, t: Tensor) -> str:
    need(p.chance(0.4))
    return as_strided(p, t).replace("as_strided(", "as_strided_(")


@in_place
def resize_(p: Pool, t: Tensor) -> str:
    need(p.chance(0.6) and t.numel() > 0)
    return f"resize_({p.factors(p.rng.randint(1, t.numel()))})"


@in_place
def resize_grow(p: Pool, t: Tensor) -> str:
    """More elements than there are; those that nobody has written yet are written at once."""
    need(p.chance(0.6) and 0 < t.numel() < 60 and not t.is_conj() and not t.is_neg())
    count = p.rng.randint(t.numel() + 1, 2 * t.numel() + 2)
    known = t.untyped_storage().nbytes() // t.itemsize - int(t.storage_offset())
    fill = "" if known >= count else f"; _same_.view(-1)[{max(known, 0)}:].fill_({p.number(t.dtype)})"
    return f"resize_({p.factors(count)}){fill}"


@in_place
def resize_as_(p: Pool, t: Tensor) -> str:
    other = p.pick(lambda other: 0 < other.numel() <= t.numel())
    return f"resize_as_({other})"


@in_place
def set_(p: Pool, t: Tensor) -> str:
    need(p.chance(0.6))
    y = p.pick(lambda other: other.dtype is t.dtype and not other.is_conj() and not other.is_neg())
    other = p[y]
    room = other.untyped_storage().nbytes() // t.itemsize
    need(room > 0)
    offset = p.rng.randrange(room)
    count = p.rng.randint(1, room - offset)
    step = p.rng.randint(1, max(1, (room - offset - 1) // max(1, count - 1)))
    place = f"{offset}, ({count},), ({step},)"
    return p.one_of(
        f"set_({y})",
        f"set_({y})",
        "set_()",
        f"set_({y}.untyped_storage())",
        f"set_({y}.untyped_storage(), {place})",
        f"set_({y}, {place})",
        f"set_({y}.clone())",
        f"set_({y}.untyped_storage(), {offset}, ({count},))",
    )


@in_place
def data(p: Pool, t: Tensor) -> str:
    """Assignment to ``.data``."""
    y = p.pick(lambda other: other.dtype is t.dtype)
    value = p.one_of(y, f"{y}.data", f"{y}.clone()", f"{y} * 2", f"{y}.detach().view(-1)", "_same_.t()", "_same_ + 1")
    return f"data = {value}"


@in_place
def detach_(p: Pool, t: Tensor) -> str:
    return "detach_()"
