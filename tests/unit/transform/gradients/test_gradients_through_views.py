"""Gradients through views of tensors that are written, or get new metadata, in place: random programs, beside eager.

What eager refuses is not counted. Of the rest most must equal eager, and none may differ.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functionalize import UnsupportedMutationError, UnsupportedProgramError, capture
from functionalize.errors import InputMismatchError

VIEWS = [
    *("{b}.view(-1)", "{b}[0]", "{b}[:, 1:]", "{b}.t()", "{b}.unsqueeze(0)", "{b}.expand_as({b})", "{b}.diagonal()"),
    *("{b}.transpose(0, 1)[1]", "{b}.select(-1, 0)", "{b}.unfold(0, 2, 1)", "{b}.narrow(0, 0, 1)", "{b}.chunk(2)[0]"),
    *("{b}.split(1)[1]", "{b}.unbind(0)[1]", "{b}.detach()", "{b}.reshape(-1)", "{b}.movedim(0, -1)", "{b}.squeeze()"),
]
METADATA = [
    *("{b}.t_()", "{b}.squeeze_()", "{b}.unsqueeze_(0)", "{b}.transpose_(0, 1)", "{b}.swapaxes_(0, -1)"),
    *("{b}.unsqueeze_(-1)", "{b}.detach_()", "{b}.requires_grad_()"),
]
WRITES = [
    *("{b}.mul_(2)", "{b}.copy_({b}.detach() + 1)", "{b}.add_({o}.sum())", "{b}.zero_()", "{b}[0] = 1.5"),
    *("{b}[..., 0].mul_(3)", "{b}.sin_()", "{b}.fill_(2)", "{b}.masked_fill_({b} > 1, 0.5)", "{b}.data.mul_(2)"),
]
FRESH = ["{b} * {o}.sum()", "{b}.sin()", "{b}.clone()", "{b} + 1", "{b}.contiguous()", "{b}.cumsum(0)", "{b}.flip(0)"]
INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaf": lambda leaf: leaf,
    "computed": lambda leaf: leaf.clone(),
    "transposed": lambda leaf: leaf.clone().t(),
    "view": lambda leaf: leaf.clone()[:],
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "without gradients": lambda leaf: leaf.detach().clone(),
    "a view without gradients": lambda leaf: leaf.detach().clone()[:],
    "a parameter": lambda leaf: torch.nn.Parameter(leaf.detach().clone()),
    "every other": lambda leaf: torch.stack([leaf, leaf], -1)[..., 0],
    "float": lambda leaf: leaf.detach().clone().float(),
    "a row": lambda leaf: leaf.clone()[:1],
}
MODES = [contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode]
SHARDS, PROGRAMS, CALLS = 8, 60, 3
Mode = Callable[[], contextlib.AbstractContextManager[Any]]


def program(rng: random.Random) -> str:
    """The lines of a function of ``x``, a matrix."""
    lines, names = [rng.choice(["y = x", "y = x * 1"])], ["y"]
    for number in range(rng.randint(2, 6)):
        base, other = rng.choice(names), rng.choice(names)
        kind: Any = rng.choices([VIEWS, METADATA, WRITES, FRESH], [4, 3, 2, 1])[0]
        mode = rng.choice(["torch.no_grad", "torch.enable_grad"])
        line = rng.choice(kind).format(b=base, o=other)
        if kind in (VIEWS, FRESH):
            names.append(f"v{number}")
            line = f"v{number} = {line}"
        lines.append(f"with {mode}(): {line}" if rng.random() < 0.2 else line)
    results = rng.sample(names, min(len(names), rng.randint(1, 3)))
    lines.append(f"return [{', '.join(rng.choice([name, f'{name} * 3']) for name in results)}]")
    return "\n    ".join(["def f(x):", *lines])


def inputs(kind: str, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf of a size, and the input of a kind, which is computed of it, or is a leaf itself."""
    leaf = torch.linspace(-2, 2, size[0] * size[1], dtype=torch.float64).view(size).clone().requires_grad_()
    x = (INPUTS | OTHERS)[kind](leaf)
    return (x if x.is_leaf else leaf), x


def observed(
    run: Callable[[torch.Tensor], Any], leaf: torch.Tensor, x: torch.Tensor, mode: Mode = contextlib.nullcontext
) -> Any:
    """What a caller sees: the results and the input afterwards, and the gradient of all of them."""
    with mode():
        seen = [*run(x), x]
    total: Any = 0
    for tensor in seen:
        if tensor.requires_grad and not tensor.is_inference():
            weights = torch.arange(1.0, tensor.numel() + 1, dtype=tensor.dtype).view(tensor.shape)
            total = total + (tensor.sin() * weights).sum()
    follows = isinstance(total, torch.Tensor) and leaf.requires_grad
    grad = torch.autograd.grad(total, leaf, allow_unused=True) if follows else None
    shown = [tensor for tensor in seen if tensor.numel()]
    flags = [(t.requires_grad, t.is_leaf, t.is_inference()) for t in shown]
    return flags, [(t.stride(), t.detach().clone()) for t in shown], grad


@pytest.mark.every(5)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs(shard: int) -> None:
    equal = refused = 0
    for seed in range(shard * PROGRAMS, (shard + 1) * PROGRAMS):
        rng = random.Random(seed)
        code, size, kind = program(rng), rng.choice([(2, 3), (3, 3)]), rng.choice(list(INPUTS))
        names: dict[str, Any] = {"torch": torch}
        exec(code, names)
        try:
            wanted = observed(names["f"], *inputs(kind, size))
        except Exception:  # which is eager's
            continue
        try:
            found = observed(capture(names["f"], (inputs(kind, size)[1],)), *inputs(kind, size))
        except (UnsupportedMutationError, UnsupportedProgramError):
            refused += 1
            continue
        where = f"{kind}, {code}\n"
        torch.testing.assert_close(found, wanted, msg=where.__add__)
        equal += 1
    assert equal > refused


@pytest.mark.every(6)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs_called_otherwise(shard: int) -> None:
    """With other inputs than those of the capture, and under other modes."""
    equal = refused = 0
    for seed in range(shard * PROGRAMS // 2, (shard + 1) * PROGRAMS // 2):
        rng = random.Random(-seed - 1)
        code, size, names = program(rng), rng.choice([(2, 3), (3, 3)]), {"torch": torch}
        exec(code, names)
        run: Any = names["f"]
        captured: Any = None
        for kind, mode in [(rng.choice([*INPUTS, *OTHERS]), rng.choice(MODES)) for _ in range(CALLS)]:
            try:
                wanted = observed(run, *inputs(kind, size), mode)
            except Exception:  # which is eager's
                continue
            try:
                if captured is None:
                    with mode():
                        captured = capture(run, (inputs(kind, size)[1],), on_guard_failure="recapture")
                found = observed(captured, *inputs(kind, size), mode)
            except (UnsupportedMutationError, UnsupportedProgramError):
                refused += 1
                continue
            where = f"{kind}, {mode.__name__}, {code}\n"
            torch.testing.assert_close(found, wanted, msg=where.__add__)
            equal += 1
    assert equal > refused


def test_inference_tensors_are_no_others() -> None:
    """A program that was captured on one would make one of what it writes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    plain = torch.ones(3)
    with torch.inference_mode():
        program = capture(f, (torch.ones(3),))
        with pytest.raises(InputMismatchError, match="is not an inference tensor, and was one"):
            program(plain)
        with pytest.raises(InputMismatchError, match="is an inference tensor, and was not"):
            capture(f, (plain,))(torch.ones(3))
        again = capture(f, (torch.ones(3),), on_guard_failure="recapture")
        assert again(plain) is plain
    assert not plain.is_inference()


def _reads_without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        part = x[:, 1:]
    return part


def _writes_what_has_views(x: torch.Tensor) -> torch.Tensor:
    part = x[:, 0]
    with torch.no_grad():
        x.mul_(2)
    return part * 3


def _turns_what_has_views(x: torch.Tensor) -> torch.Tensor:
    part = x[:1, :1]
    with torch.no_grad():
        x.t_()
    return part * 3


LEAF_VIEWS = [_reads_without_gradients, _writes_what_has_views, _turns_what_has_views]


@pytest.mark.parametrize("f", LEAF_VIEWS)
def test_leaves_that_are_views(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Eager goes back to what such a leaf is a view of, which requires no gradients."""
    with pytest.raises(UnsupportedProgramError, match="a view whose requires_grad was set"):
        capture(f, (torch.arange(4.0).view(2, 2).requires_grad_(),))
    program = capture(f, (torch.ones(2, 2, requires_grad=True),))
    with pytest.raises(InputMismatchError, match="is both a leaf and a view"):
        program(torch.arange(4.0).view(2, 2).requires_grad_())
    ours, eager = (run(torch.ones(2, 2, requires_grad=True)) for run in (program, f))
    assert (ours.requires_grad, ours.is_leaf) == (eager.requires_grad, eager.is_leaf)
    torch.testing.assert_close(ours, eager)


def test_leaves_that_are_views_are_inputs_like_others() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x[:, 1:] * x.t()[1:].t()).cumsum(0)

    x = torch.arange(4.0).view(2, 2).requires_grad_()
    ours, eager = (torch.autograd.grad(run(x).sum(), x) for run in (capture(f, (x,)), f))
    torch.testing.assert_close(ours, eager)


def test_new_metadata_of_an_input_where_gradients_are_off_is_refused() -> None:
    """Eager's autograd is not told: gradients go to other elements, or have the wrong size."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.t_()
        return x * 2

    leaf = torch.ones(2, 2, requires_grad=True)
    torch.testing.assert_close(capture(f, (leaf.clone(),))(leaf.clone()), f(leaf.clone()))
    with pytest.raises(UnsupportedMutationError, match="with grad mode off"):
        capture(f, (leaf.clone(),))(leaf.clone()).sum().backward()


def test_new_metadata_of_what_is_computed_where_gradients_are_off() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        view = y.view(4)
        with torch.no_grad():
            y.t_()
            y.t_()
        view.add_(y.sum())
        with torch.no_grad():
            y.t_()
        return y * torch.arange(4.0).view(2, 2)

    x = torch.randn(2, 2, requires_grad=True)
    ours, eager = (torch.autograd.grad(run(x).sum(), x) for run in (capture(f, (x,)), f))
    torch.testing.assert_close(ours, eager)


def test_new_metadata_of_another_view_is_refused() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x * 1
        turned, other = y.expand_as(y), y.unsqueeze(0)
        turned.t_()
        other.squeeze_()
        return turned

    x = torch.arange(4.0).view(2, 2).requires_grad_()
    with pytest.raises(UnsupportedMutationError, match="after its metadata, or its base's, changed"):
        capture(f, (x,))(x).sum().backward()


def test_new_metadata_of_what_has_views_that_autograd_accepts_no_more() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        first, _ = y.unbind(0)
        y.unsqueeze_(0)
        return y * first.numel()

    x = torch.arange(4.0).view(2, 2).requires_grad_()
    ours, eager = (torch.autograd.grad(run(x).sum(), x) for run in (capture(f, (x,)), f))
    torch.testing.assert_close(ours, eager)


def test_a_hook_on_the_gradient_of_a_view_that_is_written() -> None:
    """Autograd goes from a view that was written to what it is a view of, past what it was before."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        x.register_hook(lambda gradient: gradient * 2)
        x.mul_(3)
        return [x]

    program = capture(f, (inputs("computed", (2, 2))[1],))
    wanted = observed(f, *inputs("computed", (2, 2)))
    torch.testing.assert_close(observed(program, *inputs("computed", (2, 2))), wanted)
    with pytest.raises(InputMismatchError, match="is a view, and was not"):
        program(inputs("view", (2, 2))[1])
    with pytest.raises(UnsupportedProgramError, match="a write after a hook on its gradient"):
        capture(f, (inputs("view", (2, 2))[1],))


def _hooks_what_it_computes(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return [y.add_(1)]


def _hooks_a_part(x: torch.Tensor) -> list[torch.Tensor]:
    part = x[0]
    part.register_hook(lambda gradient: gradient * 3)
    x.mul_(2)
    return [part]


@pytest.mark.parametrize("function", [_hooks_what_it_computes, _hooks_a_part])
@pytest.mark.parametrize("kind", INPUTS)
def test_hooks_on_what_a_program_makes_ask_nothing_of_inputs(kind: str, function: Any) -> None:
    if kind == "leaf" and function is _hooks_a_part:
        kind = "computed"  # a leaf may not be written
    program = capture(function, (inputs(kind, (2, 2))[1],))
    wanted = observed(function, *inputs(kind, (2, 2)))
    torch.testing.assert_close(observed(program, *inputs(kind, (2, 2))), wanted)


def test_a_tangent_of_a_write_lies_as_the_input_does_that_was_written() -> None:
    """What the graph computes for it lies otherwise; the backward takes views of the tangent as eager would."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        windows = x.unfold(0, 3, 4).flatten(0, 2)
        x.copy_(y)
        return windows.fill_(0.5)

    def gradient(call: Callable[..., Any]) -> torch.Tensor:
        leaf = torch.ones(2, 3).t().requires_grad_()
        x = leaf * torch.arange(6.0).reshape(2, 3).t()
        weights = torch.arange(6.0).reshape(3, 2)
        result = call(x, torch.ones(1, 2))
        return torch.autograd.grad((x * weights).sum() + result.sum(), leaf)[0]

    inputs = (torch.ones(2, 3).t().requires_grad_() * 2, torch.ones(1, 2))
    torch.testing.assert_close(gradient(capture(program, inputs, remove="mutations")), gradient(program))
