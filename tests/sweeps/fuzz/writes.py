"""Steps that write data: in-place ops, item assignment, ``out=``, foreach; and steps that only read.

A maker returns a whole statement; a new name is taken from the pool. Limits: what eager leaves to the order of
its loops is sorted out later, see :func:`tests.sweeps.fuzz.generate.defined`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.sweeps.fuzz.pool import Pool, Tensor, broadcasts, meet, need, overlaps_itself

Maker = Callable[[Pool], str]
WRITES: dict[str, Maker] = {}
READS: dict[str, Maker] = {}


def write(maker: Maker) -> Maker:
    WRITES[maker.__name__] = maker
    return maker


def read(maker: Maker) -> Maker:
    READS[maker.__name__] = maker
    return maker


def target(p: Pool, fits: Callable[[Tensor], bool] = lambda _: True) -> str:
    """A name to write to. Elements that overlap are rare: eager refuses most such writes."""
    careful = not p.chance(0.05)
    return p.pick(lambda t: fits(t) and not (careful and overlaps_itself(t)))


def _number(t: Tensor) -> bool:
    return t.dtype is not torch.bool


def _real(t: Tensor) -> bool:
    return t.dtype is not torch.bool and not t.is_complex()


@write
def arithmetic(p: Pool) -> str:
    x = target(p, _number)
    op = p.one_of("add_", "sub_", "mul_", "add_")
    return f"{x}.{op}({p.number(p[x].dtype)})"


@write
def with_tensor(p: Pool) -> str:
    x = target(p)
    op = p.one_of("add_", "mul_", "sub_", "copy_", "copy_", "logical_or_", "logical_and_", "eq_", "maximum_")
    op = op if op != "maximum_" else "ne_"
    return f"{x}.{op}({p.other(p[x])})"


@write
def augmented(p: Pool) -> str:
    x = target(p, _number)
    return f"{x} {p.one_of('+=', '*=', '-=')} {p.one_of(p.number(p[x].dtype), p.other(p[x]))}"


@write
def around_autograd(p: Pool) -> str:
    """A write that eager carries out through another tensor object of the same memory."""
    x = target(p, _number)
    way, number = p.one_of("data", "detach()", "detach()[...]"), p.number(p[x].dtype)
    calls = [f".add_({number})", ".mul_(2)", ".zero_()", f".fill_({number})", ".neg_()", f".copy_({p.other(p[x])})"]
    calls += [f".view(-1)[:1].add_({number})", ".t_()", ".unsqueeze_(0)", f"[...] = {number}"]
    return f"{x}.{way}{p.one_of(*calls)}"


@write
def fill(p: Pool) -> str:
    x = target(p)
    return p.one_of(f"{x}.zero_()", f"{x}.fill_({p.number(p[x].dtype)})", f"{x}.fill_(torch.tensor(2))")


@write
def unary(p: Pool) -> str:
    x = target(p, _real)
    calls = ("relu_()", "clamp_(-1, 2)", "neg_()", "abs_()", "clamp_min_(0)", "sign_()", "square_()")
    return f"{x}.{p.one_of(*calls)}"


@write
def flips(p: Pool) -> str:
    x = target(p, lambda t: t.dtype is torch.bool or not (t.is_floating_point() or t.is_complex()))
    return f"{x}.{p.one_of('logical_not_()', 'bitwise_not_()', 'bitwise_and_(1)')}"


@write
def complex_(p: Pool) -> str:
    x = target(p, lambda t: t.is_complex())
    return f"{x}.{p.one_of('conj_physical_()', 'mul_(1j)', 'add_(1 + 2j)', 'neg_()', 'fill_(1 - 1j)')}"


@write
def triangles(p: Pool) -> str:
    x = target(p, lambda t: t.dim() >= 2)
    return f"{x}.{p.one_of('tril_()', 'triu_(1)', 'fill_diagonal_(1)')}"


@write
def along(p: Pool) -> str:
    x = target(p, lambda t: _number(t) and t.dim() > 0)
    return f"{x}.{p.one_of('cumsum_', 'cumprod_', 'cumsum_')}({p.dim(p[x])})"


@write
def pointwise(p: Pool) -> str:
    x = target(p, lambda t: t.is_floating_point())
    one, two = p.other(p[x]), p.other(p[x])
    return p.one_of(f"{x}.addcmul_({one}, {two})", f"{x}.lerp_({x}.sign(), 0.5)", f"{x}.pow_(2)", f"{x}.div_(2)")


@write
def overlapping(p: Pool) -> str:
    """A source that is a part of what is written, or overlaps it, at other positions or in the same."""
    x = target(p, lambda t: _number(t) and t.dim() > 0 and t.shape[-1] > 1)
    op = p.one_of("add_", "sub_", "mul_", "copy_", "copy_")
    parts = [
        ("", "[..., :1]"),
        ("", "[..., -1:]"),
        ("", "[:1]"),
        ("[..., 1:]", "[..., :-1]"),
        ("[..., :-1]", "[..., 1:]"),
        ("[..., ::2]", "[..., :1]"),
        ("[..., ::2]", "[..., 1::2]"),
        ("[..., :1]", "[..., -1:]"),
        ("", ".mT" if p[x].dim() > 1 else ""),
    ]
    part, other = p.rng.choice(parts)
    return f"{x}{part}.{op}({x}{other})"


@write
def random(p: Pool) -> str:
    x = target(p, lambda t: t.is_floating_point())
    return f"{x}.{p.one_of('uniform_()', 'bernoulli_(0.5)', 'normal_()')}"


@write
def masked(p: Pool) -> str:
    x = target(p)
    mask = p.one_of(f"{x} == 1", f"{x} != 0", f"torch.arange({x}.numel()).reshape({x}.shape) % 2 == 0")
    value = p.number(p[x].dtype)
    return p.one_of(f"{x}.masked_fill_({mask}, {value})", f"{x}[{mask}] = {value}")


@write
def item(p: Pool) -> str:
    x = target(p, lambda t: t.dim() > 0)
    size = p[x].shape[0]
    need(size > 0)
    index = p.one_of(
        str(p.index(size)),
        f"{p.index(size)}:",
        f":{size}:2",
        f"..., {p.index(p[x].shape[-1])}",
        "None",
        "...",
    )
    value = p.number(p[x].dtype)
    return p.one_of(f"{x}[{index}] = {value}", f"{x}[{index}] = torch.tensor({value})", f"{x}[{index}] *= {value}")


@write
def item_tensor(p: Pool) -> str:
    x = target(p, lambda t: t.dim() > 0)
    size = p[x].shape[0]
    index = p.index(size)
    piece = p[x][index]
    value = p.pick(lambda t: broadcasts(t.shape, piece.shape))
    return f"{x}[{index}] = {value}"


@write
def index_put(p: Pool) -> str:
    x = target(p, lambda t: t.dim() > 0)
    size = p[x].shape[0]
    need(size > 0)
    rows = p.rng.sample(range(size), min(size, 2))
    accumulate = p[x].dtype is not torch.bool and p.chance(0.5)
    rows = rows + rows[:1] if accumulate else rows
    value = f"torch.tensor({p.number(p[x].dtype)}, dtype={p[x].dtype})"
    return p.one_of(
        f"{x}.index_put_((torch.tensor({rows}),), {value}, {accumulate})",
        f"{x}.index_fill_(0, torch.tensor({rows}), {p.number(p[x].dtype)})",
        f"{x}[torch.tensor({rows})] = {value}",
        f"{x}.index_add_(0, torch.tensor({rows}), {x}[torch.tensor({rows})].clone())",
        f"{x}.index_copy_(0, torch.tensor({rows[:1]}), {x}[{rows[-1]}:{rows[-1] + 1}].clone())",
    )


@write
def scatter(p: Pool) -> str:
    x = target(p, lambda t: t.dim() > 0 and 0 not in t.shape)
    dim = p.dim(p[x])
    index = f"torch.zeros({x}.shape, dtype=torch.int64).narrow({dim}, 0, 1)"
    return f"{x}.scatter_({dim}, {index}, {p.number(p[x].dtype)})"


@write
def out(p: Pool) -> str:
    x = target(p, lambda t: not t.is_conj())
    one = p.other(p[x]) if p.chance(0.85) else p.pick()
    op = p.one_of("add", "mul", "sub", "eq", "add")
    return f"torch.{op}({one}, {p.one_of('2', p.other(p[x]))}, out={x})"


@write
def out_of_one(p: Pool) -> str:
    x, y = target(p, lambda t: not t.is_conj()), p.pick(_real)
    ops = ["neg({y}, out={x})", "abs({y}, out={x})", "sum({y}, {d}, out={x})", "cumsum({y}, {d}, out={x})"]
    ops += ["cat([{y}, {y}], {d}, out={x})", "stack([{y}, {y}], out={x})", "clamp({y}, -1, 2, out={x})"]
    ops += ["amax({y}, {d}, out={x})", "flip({y}, ({d},))[...].clone().add_(0)", "tril({y}, out={x})"]
    return "torch." + p.rng.choice(ops).format(x=x, y=y, d=p.dim(p[y]))


@write
def out_pair(p: Pool) -> str:
    y = p.pick(lambda t: t.dim() > 0 and _real(t) and 0 not in t.shape)
    values = target(p, lambda t: t.dtype is p[y].dtype)
    indices = target(p, lambda t: t.dtype is torch.int64)
    need(values != indices)
    return f"torch.{p.one_of('max', 'min', 'sort')}({y}, {p.dim(p[y])}, out=({values}, {indices}))"


@write
def out_fresh(p: Pool) -> str:
    new, y = p.new(), p.pick(_real)
    return f"{new} = torch.{p.one_of('add', 'mul')}({y}, {y}, out=torch.empty(0, dtype={p[y].dtype}))"


@write
def foreach(p: Pool) -> str:
    names = [target(p, _number) for _ in range(p.rng.randint(1, 3))]
    apart = not any(meet(p[a], p[b]) for i, a in enumerate(names) for b in names[:i])
    need(apart or p.chance(0.02))
    listed = ", ".join(names)
    others = ", ".join(p.pick(lambda t, n=n: t.shape == p[n].shape) for n in names)  # type: ignore[misc]
    return p.one_of(
        f"torch._foreach_add_([{listed}], 1)",
        f"torch._foreach_mul_([{listed}], 2)",
        f"torch._foreach_zero_([{listed}])",
        f"torch._foreach_neg_([{listed}])",
        f"torch._foreach_add_([{listed}], [{others}], alpha=2)",
        f"torch._foreach_mul_([{listed}], [{others}])",
        f"torch._foreach_copy_([{listed}], [{others}])",
        f"torch._foreach_clamp_min_([{listed}], 0)",
    )


@read
def arithmetic_of(p: Pool) -> str:
    x = p.pick()
    return f"{p.new()} = {x} {p.one_of('+', '*')} {p.one_of('1', '2', p.other(p[x]))}"


@read
def function(p: Pool) -> str:
    x = p.pick()
    d = p.dim(p[x])
    return f"{p.new()} = " + p.one_of(
        f"{x}.clone()",
        f"torch.zeros_like({x})",
        f"{x}.sum({d})",
        f"torch.cat([{x}, {x}], {d})",
        f"torch.stack([{x}, {x}])",
        f"{x}.flip({d})",
        f"{x}.roll(1, {d})",
        f"{x}.new_zeros({x}.shape)",
        f"torch.where({x} == 1, {x}, {x} * 2)",
        f"{x}.cumsum({d})",
        f"torch.empty_like({x}).fill_(1)",
        f"{x}.repeat_interleave(2, {d})",
        f"{x}.to(torch.int64)",
        f"torch.ones_like({x}, dtype=torch.float32)",
    )


@read
def by_strides(p: Pool) -> str:
    x, y = p.pick(), p.pick()
    return f"{p.new()} = {x} + " + p.one_of(
        f"{y}.storage_offset()",
        f"sum(step for size, step in zip({y}.size(), {y}.stride()) if size > 1)",
        f"int({y}.is_contiguous())",
        f"{y}.numel()",
        f"{y}.dim()",
        f"int({y}._is_view())",
        f"{y}.element_size()",
    )


@read
def branch(p: Pool) -> str:
    x, y = target(p, _number), p.pick()
    condition = p.one_of(
        f"{y}.is_contiguous()",
        f"{y}.storage_offset() > 0",
        f"{y}.stride() == {x}.stride()",
        f"{y}.is_conj()",
        f"{y}.untyped_storage().nbytes() > 40",
        f"{x}._version == {y}._version",
    )
    return f"if {condition}: {x}.add_(1)"


@read
def by_data(p: Pool) -> str:
    x, y = target(p, _number), p.pick(_real)
    return p.one_of(
        f"if bool(({y} > 0).any()): {x}.add_(1)",
        f"if {y}.sum().item() > 0: {x}.zero_()",
        f"{p.new()} = {y}[{y} > 0]",
        f"{p.new()} = {y}.nonzero()",
        f"{p.new()} = {x} + {y}.sum().item()",
        f"{x}.add_(len(set({y}.flatten().tolist())))",
        f"{x}.add_(int({y}.detach().numpy().sum()) % 5)",
        f"{p.new()} = torch.equal({y}, {y}) and {x} + 1",
        f"if {x}.data_ptr() == {y}.data_ptr(): {x}.add_(1)",
    )
