"""Steps with autograd in them: new leaves, ``grad``, ``backward``, hooks, writes that autograd must not see.

A maker returns a whole statement. Limits: first derivatives, and second ones through ``create_graph``.
"""

from __future__ import annotations

from tests.sweeps.fuzz.pool import Pool, Tensor, need
from tests.sweeps.fuzz.views import register
from tests.sweeps.fuzz.writes import Maker

GRADIENTS: dict[str, Maker] = {}
gradient = register(GRADIENTS)


def _smooth(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _tracked(t: Tensor) -> bool:
    return t.requires_grad and t.grad_fn is not None


@gradient
def leaf(p: Pool) -> str:
    x = p.pick(_smooth)
    way = p.one_of("detach()", "clone().detach()", "detach()", "data")
    return p.one_of(f"{p.new()} = {x}.{way}.requires_grad_()", f"{x}.requires_grad_()", f"{x}.requires_grad_()")


@gradient
def computed(p: Pool) -> str:
    x = p.pick(lambda t: t.requires_grad)
    new, other = p.new(), p.other(p[x])
    return p.one_of(
        f"{new} = {x} * {x}", f"{new} = {x} * {other}", f"{new} = {x}.clone()", f"{new} = {x}.sin()", f"{new} = {x} * 2"
    )


def _scalar(p: Pool, y: str) -> str:
    total = p.one_of(f"{y}.sum()", f"({y} * {y}).sum()", f"({y} * 3).sum()")
    return f"torch.view_as_real({total}).sum()" if p[y].is_complex() else total


@gradient
def grad(p: Pool) -> str:
    y, x = p.pick(_tracked), p.pick(lambda t: t.requires_grad)
    options = p.one_of("", "", ", create_graph=True", ", retain_graph=True")
    return f"{p.new()} = torch.autograd.grad({_scalar(p, y)}, [{x}]{options})[0]"


@gradient
def backward(p: Pool) -> str:
    y = p.pick(_tracked)
    return f"{_scalar(p, y)}.backward({p.one_of('', 'retain_graph=True')})"


@gradient
def of_grad(p: Pool) -> str:
    x = p.pick(lambda t: t.is_leaf and t.grad is not None)
    return p.one_of(f"{x}.grad.zero_()", f"{p.new()} = {x}.grad", f"{x}.grad = None", f"{x}.grad.mul_(2)")


@gradient
def unseen(p: Pool) -> str:
    x = p.pick(lambda t: t.requires_grad)
    write = p.one_of(f"{x}.add_(1)", f"{x}.mul_(2)", f"{x}.view(-1)[:1].zero_()", f"{x}.sub_({p.other(p[x])})")
    return f"with torch.no_grad(): {write}"


@gradient
def hook(p: Pool) -> str:
    # Eager crashes for a view that a write has made unusable.
    x = p.pick(lambda t: t.requires_grad and not t._is_view())
    return p.one_of(f"{x}.register_hook(lambda g: g * 2)", f"{x}.retain_grad()")


@gradient
def detached(p: Pool) -> str:
    x = p.pick(lambda t: t.requires_grad)
    need(p.chance(0.5))
    return p.one_of(f"{p.new()} = {x}.detach()", f"{x}.detach_()", f"{p.new()} = {x}.detach() * 2")


@gradient
def masked(p: Pool) -> str:
    x = p.pick(_tracked)
    return p.one_of(f"{x}.masked_fill_({x} > 0, 0)", f"{x}.relu_()", f"{x}.mul_({x})", f"{x}.exp_()", f"{x}.tanh_()")


_DRAWS = (
    "torch.nn.functional.dropout({0}, 0.5)",
    "{0} * torch.randint_like({0}, 1, 4)",
    "{0} * torch.bernoulli(torch.full({0}.shape, 0.5))",
    "{0} * torch.randperm({0}.numel()).reshape({0}.shape)",
)


def _region(p: Pool, x: str, depth: int) -> str:
    """A call of ``checkpoint`` on a tensor: with draws, and regions of its own."""
    inside = "abc"[depth]
    parts = list(_DRAWS) + [f"{{0}} * {inside}", f"{x} * {{0}}"] * 2
    terms = [p.one_of(*parts).format(inside) for _ in range(1 + p.chance(0.5) + p.chance(0.3))]
    while depth < 2 and p.chance(0.6):
        terms.insert(p.rng.randrange(len(terms) + 1), _region(p, inside, depth + 1))
    options = p.one_of(*[""] * 4, ", preserve_rng_state=False", ", early_stop=False")
    body = " + ".join(terms)
    return f"torch.utils.checkpoint.checkpoint(lambda {inside}: {body}, {x}, use_reentrant=False{options})"


@gradient
def checkpointed(p: Pool) -> str:
    """A region that runs again in the backward, with regions inside."""
    return f"{p.new()} = {_region(p, p.pick(lambda t: t.requires_grad and not t.is_complex()), 0)}"
