"""Random numbers in checkpointed regions, within each other too: gradients and generators are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from functionalize import UnsupportedProgramError, capture

Body = Callable[[Tensor], Tensor]
aten = torch.ops.aten
OWN = torch.Generator()


def checkpoint(body: Body, x: Tensor, **options: Any) -> Tensor:
    """A region, not reentrant unless the options say so."""
    result: Tensor = checkpoints.checkpoint(body, x, **({"use_reentrant": False} | options))
    return result


def same(x: Tensor) -> Tensor:
    return x


def nested(
    draw: Body,
    inner: dict[str, Any] | None = None,
    outer: dict[str, Any] | None = None,
    before: Body = same,
    after: Body = same,
) -> Body:
    """A region that draws within another one, which may draw before and after it."""

    def outside(x: Tensor) -> Tensor:
        return after(checkpoint(lambda y: draw(y.sin()).cos(), before(x), **(inner or {})) * x)

    return lambda x: checkpoint(outside, x, **(outer or {}))


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x).cos()


def attended(x: Tensor) -> Tensor:
    query = x[None, None]
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)[0, 0]


def in_a_row(x: Tensor) -> Tensor:
    return checkpoint(dropped, x) * checkpoint(dropped, x) * checkpoint(lambda y: F.dropout(y.sin()), x)


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(3):
        x = checkpoint(lambda y: F.dropout(y.sin(), 0.3), x) + x
    return x


def written(x: Tensor) -> Tensor:
    numbers = torch.empty(3, 3).uniform_()
    numbers[0].normal_()
    numbers[:, 1].bernoulli_(0.5)
    return x * numbers


def with_gradients(x: Tensor) -> Tensor:
    y = checkpoint(lambda z: F.dropout(z.sin()).exp(), x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y * gradient


def with_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 1, same):
        return checkpoint(dropped, dropped(x.sin())) * x


def deciding(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        y = F.dropout(y.sin())
        return dropped(y.exp()) if y.sum() > 1 else y.cos() * torch.rand(3, 3)

    y = checkpoint(inner, x)
    return y * x if y.sum() > 1 else F.dropout(y).sin()


def by_cond(x: Tensor) -> Tensor:
    drawn: Tensor = torch.cond(x.sum() > 0, F.dropout, lambda y: y * 2, (x.sin(),))
    return drawn.cos()


class DrawsInBackward(torch.autograd.Function):
    """Draws in both of its directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        result: Tensor = gradient * mask * torch.rand_like(gradient)
        return result


def early_stop_off(x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return nested(dropped, after=dropped)(x)


def selective(op: Any) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, [op])}


def module(make: Callable[[], Any]) -> Body:
    """A region within a region, whose parameters are the same in all captures."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = make()
    return nested(lambda x: layer(x[None])[0])


NO_STATE = {"preserve_rng_state": False}
PROGRAMS: dict[str, Body] = {
    "dropout": nested(dropped),
    "rrelu": nested(lambda x: F.rrelu(x - 0.5, training=True)),
    "rand": nested(lambda x: x * torch.rand(3, 3)),
    "bernoulli of values": nested(lambda x: x * torch.bernoulli(x.detach().abs())),
    "bernoulli of a constant": nested(lambda x: x * torch.bernoulli(torch.tensor([0.2, 0.5, 0.7]))),
    "written": nested(written),
    "attention": nested(attended),
    "sequence": module(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Tanh())),
    "before and after": nested(dropped, before=dropped, after=lambda x: dropped(x) * torch.rand(3, 3)),
    "in a row": lambda x: checkpoint(in_a_row, x),
    "in a loop": lambda x: checkpoint(in_a_loop, x),
    "three levels": lambda x: checkpoint(nested(dropped, before=dropped, after=dropped), x),
    "nothing of its own": lambda x: checkpoint(lambda y: checkpoint(dropped, y), x),
    "early stop off": nested(dropped, {"early_stop": False}, {"early_stop": False}, after=dropped),
    "early stop off by a context": early_stop_off,
    "inner draws other numbers": nested(dropped, NO_STATE, before=dropped),
    "outer draws other numbers": nested(dropped, outer=NO_STATE, before=dropped),
    "both draw other numbers": nested(dropped, NO_STATE, NO_STATE, before=dropped),
    "draws to the end": lambda x: checkpoint(
        lambda y: dropped(y.sin()) * y * torch.rand(3, 3), x, early_stop=False, **NO_STATE
    ),
    "own generator": nested(lambda x: x * torch.rand(3, 3, generator=OWN)),
    "selective inside": nested(lambda x: dropped(x @ x), selective(aten.mm.default)),
    "selective outside": nested(lambda x: dropped(x @ x), outer=selective(aten.mm.default), before=dropped),
    "gradients in a region": lambda x: checkpoint(with_gradients, x),
    "hooks": lambda x: checkpoint(with_hooks, x),
    "decides": lambda x: checkpoint(deciding, x),
    "cond": nested(by_cond),
    "draws in its backward": nested(DrawsInBackward.apply),
}
REENTRANT: dict[str, Body] = {
    "alone": lambda x: checkpoint(dropped, x, use_reentrant=True),
    "both": nested(dropped, {"use_reentrant": True}, {"use_reentrant": True}, dropped, dropped),
    "inside": nested(dropped, {"use_reentrant": True}, before=dropped),
    "outside": nested(dropped, outer={"use_reentrant": True}, after=dropped),
    "other numbers": lambda x: checkpoint(dropped, x, use_reentrant=True, preserve_rng_state=False),
}
SECOND_ORDER = ("dropout", "rand", "before and after", "in a row", "three levels", "early stop off")


def twice(program: Body, x: Tensor) -> Tensor:
    """The gradient of a function of the gradient."""
    (gradient,) = torch.autograd.grad(program(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((gradient * gradient).sum(), x)
    return second


def trained(program: Body) -> Callable[[Tensor], Tensor]:
    """A program that takes its gradients itself, and draws afterwards."""

    def step(x: Tensor) -> Tensor:
        y = program(x)
        (y * y).sum().backward()
        return y.detach() * torch.rand(3, 3)

    return step


def called(program: Body, seed: int, finish: Callable[[Body, Tensor], Tensor]) -> list[Any]:
    """What one call gives, its gradient, and what the generators draw after it."""
    torch.manual_seed(seed)
    OWN.manual_seed(seed)
    x = torch.randn(3, 3, requires_grad=True)
    result = finish(program, x)
    return [result.detach(), x.grad, torch.rand(2), torch.rand(2, generator=OWN)]


def backward(program: Body, x: Tensor) -> Tensor:
    y = program(x)
    y.sum().backward()
    return y


def check_calls(program: Body, finish: Callable[[Body, Tensor], Tensor], **options: Any) -> None:
    captured = capture(program, (torch.randn(3, 3, requires_grad=True),), **options)
    for seed in range(3):
        torch.testing.assert_close(called(captured, seed, finish), called(program, seed, finish))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's cond asks for it
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_outside(name: str) -> None:
    check_calls(PROGRAMS[name], backward)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_inside(name: str) -> None:
    if name == "forked":  # what draws after a fork is refused
        program = PROGRAMS[name]
        check_calls(lambda x: torch.autograd.grad(program(x).sum(), x)[0], lambda step, x: step(x))
        return
    check_calls(trained(PROGRAMS[name]), lambda step, x: step(x))


@pytest.mark.slow
def test_a_layer_of_a_transformer() -> None:
    program = module(lambda: nn.TransformerEncoderLayer(3, 1, 6, dropout=0.3, batch_first=True))
    check_calls(program, backward)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the inner first run
@pytest.mark.parametrize("name", REENTRANT)
def test_reentrant_regions(name: str) -> None:
    check_calls(trained(REENTRANT[name]), lambda step, x: step(x))


def test_a_reentrant_region_in_a_step_of_an_optimizer() -> None:
    """The learning rate is a symbol, with which the engine's own ops run torch's kernels in Python."""

    def make() -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            y = checkpoint(model, x, use_reentrant=True)
            (y * y).sum().backward()
            optimizer.step()
            return y.detach()

        return step

    eager, original = make(), make()
    captured = capture(original, (torch.randn(3, 3, requires_grad=True),))
    for seed in range(3):
        calls = [called(step, seed, lambda step, x: step(x)) for step in (captured, eager)]
        torch.testing.assert_close(*calls)


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_gradients_of_second_order(name: str) -> None:
    check_calls(PROGRAMS[name], twice)
    check_calls(partial(twice, PROGRAMS[name]), lambda program, x: program(x))


@pytest.mark.parametrize("name", ["before and after", "three levels", "written", "decides"])
def test_without_views(name: str) -> None:
    check_calls(PROGRAMS[name], backward, remove="mutations_and_views")


@pytest.mark.parametrize("name", ["dropout", "in a loop", "three levels"])
def test_sizes_that_differ(name: str) -> None:
    program, batch = PROGRAMS[name], Dim("batch", min=2, max=64)
    captured = capture(program, (torch.randn(4, 3, requires_grad=True),), dynamic_shapes=({0: batch},))
    for size in (3, 7):
        results = []
        for call in (captured, program):
            torch.manual_seed(size)
            x = torch.ones(size, 3, requires_grad=True)
            results.append((backward(call, x).detach(), x.grad, torch.rand(2)))
        torch.testing.assert_close(*results)


def test_what_a_batch_norm_normalizes_is_dropped() -> None:
    norm = nn.BatchNorm1d(3)

    def step(x: Tensor) -> Tensor:
        y = checkpoint(lambda z: F.dropout(norm(z)).sin(), x)
        y.sum().backward()
        return torch.cat([y.detach(), norm.running_mean[None]])  # type: ignore[index]

    x = torch.randn(4, 3)
    program = capture(step, (x,))
    results = []
    for call in (program, step):
        norm.reset_running_stats()
        norm.zero_grad()
        torch.manual_seed(0)
        results.append((call(x), [parameter.grad for parameter in norm.parameters()], torch.rand(2)))
    torch.testing.assert_close(*results)


def test_a_draw_from_other_values_is_refused() -> None:
    count = torch.zeros(3)

    def region(x: Tensor) -> Tensor:
        count.add_(1)
        return x.sin() * torch.bernoulli(torch.sigmoid(count))

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(checkpoint(region, x).cos().sum(), x)[0]

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(UnsupportedProgramError, match=r"bernoulli.*is recomputed(.|\n)*torch.bernoulli(.|\n)*changed"):
        capture(step, (x,))

    def advised(x: Tensor) -> Tensor:
        count.add_(1)
        y = checkpoint(lambda z: z.sin() * torch.bernoulli(torch.sigmoid(count)), x)
        return torch.autograd.grad(y.cos().sum(), x)[0]

    program = capture(advised, (x,))
    results = []
    for call in (program, advised):
        count.zero_()
        torch.manual_seed(0)
        results.append((call(x), torch.rand(2)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["before and after", "three levels"])
def test_through_dynamo(name: str) -> None:
    program = PROGRAMS[name]
    compiled = torch.compile(program, backend="functionalize")
    for seed in range(2):
        torch.testing.assert_close(called(compiled, seed, backward), called(program, seed, backward))


def test_dynamo_has_no_second_run_that_draws_other_numbers() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    for name in ("inner draws other numbers", "outer draws other numbers"):
        with pytest.raises(Exception, match=r"preserve_rng_state=False(.|\n)*functionalize.capture"):
            torch.compile(PROGRAMS[name], backend="functionalize")(x)
    silent = nested(torch.cos, NO_STATE, NO_STATE)
    gradients = [
        torch.autograd.grad(call(x).sum(), x) for call in (silent, torch.compile(silent, backend="functionalize"))
    ]
    torch.testing.assert_close(*gradients)
