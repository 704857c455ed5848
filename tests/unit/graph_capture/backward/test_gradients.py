"""Gradients through a call, captured and compiled by Dynamo: those of eager, saved as torch's partitioners say."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.partitioners import default_partition
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from functionalize import (
    InputMismatchError,
    UnsupportedMutationError,
    UnsupportedProgramError,
    capture,
    dynamo_backend,
)
from functionalize._torch import FakeTensor, pytree
from functionalize._torch.autograd import default_partition_fn

pytestmark = [
    # Dynamo and inductor warn of torch's own code.
    pytest.mark.filterwarnings("ignore:.*(autograd.function.Function.*should not be instantiated|torch.jit)"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
Make = Callable[[], tuple[nn.Module, Tensor]]


class Applied(nn.Module):
    """A function of a module and an input."""

    def __init__(self, func: Callable[[nn.Module, Tensor], Any], inner: nn.Module) -> None:
        super().__init__()
        self.inner, self._func = inner, func

    def forward(self, x: Tensor) -> Any:
        return self._func(self.inner, x)


def dropped(inner: Any, x: Tensor) -> Tensor:
    out: Any = checkpoint(lambda t: nn.functional.dropout(inner(t).relu(), 0.5), x, use_reentrant=False)
    return inner(out)  # type: ignore[no-any-return]


def drawn_in_several(inner: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = checkpoint(lambda t: nn.functional.dropout(inner(t), 0.3).sin(), x, use_reentrant=False) + x
    return x


def written(inner: Any, x: Tensor) -> Tensor:
    y = inner(x)
    y[0].mul_(2)
    y.t()[1].add_(y.detach()[0, 0])
    return y  # type: ignore[no-any-return]


MODULES: dict[str, Make] = {
    "as many rows as features": lambda: (nn.Linear(3, 4), torch.randn(4, 3)),
    "square": lambda: (nn.Linear(4, 4), torch.randn(4, 4)),
    "gru": lambda: (nn.GRU(3, 4), torch.randn(4, 2, 3)),
    "lstm": lambda: (nn.LSTM(3, 4), torch.randn(4, 2, 3)),
    "rnn": lambda: (nn.RNN(3, 4), torch.randn(4, 2, 3)),
    "cat": lambda: (Applied(lambda m, x: torch.cat([x, m(x)]), nn.Linear(4, 4)), torch.randn(4, 4)),
    "stack": lambda: (Applied(lambda m, x: torch.stack([m(x), x]), nn.Linear(4, 4)), torch.randn(4, 4)),
    "transposed copy": lambda: (Applied(lambda m, x: m(x).t().clone(), nn.Linear(4, 4)), torch.randn(4, 4)),
    "view of a result": lambda: (Applied(lambda m, x: m(x).t()[1:], nn.Linear(4, 4)), torch.randn(4, 4)),
    "several views": lambda: (
        Applied(lambda m, x: (y := m(x), y.t(), y[0], x.view(-1), x.detach()), nn.Linear(4, 4)),
        torch.randn(4, 4),
    ),
    "written": lambda: (Applied(written, nn.Linear(4, 4)), torch.randn(4, 4)),
    "checkpointed": lambda: (Applied(dropped, nn.Linear(4, 4)), torch.randn(4, 4)),
    "several regions": lambda: (Applied(drawn_in_several, nn.Linear(4, 4)), torch.randn(4, 4)),
    "complex numbers": lambda: (
        Applied(lambda m, x: (torch.view_as_complex(m(x).view(4, 2, 2)) * (1 + 2j)).abs(), nn.Linear(4, 4)),
        torch.randn(4, 4),
    ),
    "a row of a data-dependent tensor": lambda: (
        Applied(lambda m, x: (x.detach().nonzero()[-1], m(x)), nn.Linear(4, 4)),
        torch.randn(4, 4),
    ),
    "batch norm": lambda: (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(True)), torch.randn(3, 3)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True), torch.randn(4, 4, 4)),
}


def gradients(run: Callable[..., Any], module: nn.Module, x: Tensor) -> list[Any]:
    """Results, what requires grad among them, and gradients for random tangents, some of them expanded."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    results = run(x)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if isinstance(r, Tensor)]
    torch.manual_seed(1)
    differentiable = [result for result in results if result.requires_grad]
    tangents = [torch.randn_like(result) for result in differentiable]
    tangents[-1] = torch.randn(()).expand(differentiable[-1].size())
    torch.autograd.backward(differentiable, tangents)
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [[r.detach() for r in results], [r.requires_grad for r in results], found]


def ways(module: nn.Module, x: Tensor, remove: str) -> dict[str, Callable[..., Any]]:
    torch._dynamo.reset()
    return {
        "call": capture(module, (x.clone().requires_grad_(),), remove=remove),
        "dynamo": torch.compile(module, backend=dynamo_backend(remove=remove)),
    }


@pytest.mark.every(5)
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.slow
def test_gradients_are_those_of_eager(name: str, remove: str) -> None:
    torch.manual_seed(2)
    module, x = MODULES[name]()
    twin = copy.deepcopy(module)
    wanted = [gradients(twin, twin, x) for _ in range(2)]
    state = copy.deepcopy(module.state_dict())
    for way, run in ways(module, x, remove).items():
        if way == "dynamo" and name in ("gru", "lstm", "rnn"):
            continue  # Dynamo leaves recurrent modules to eager
        module.load_state_dict(state)
        for want in wanted:
            torch.testing.assert_close(gradients(run, module, x), want, msg=f"{way} differs from eager")


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn"])
def test_recurrent_layers_learn_in_a_training_step(name: str) -> None:
    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = module(x)[0].square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    module, x = MODULES[name]()
    twin = copy.deepcopy(module)
    program, eager = capture(step_of(module), (x,)), step_of(twin)
    for _ in range(3):
        torch.testing.assert_close(program(x), eager(x))
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def test_leaves_whose_gradients_are_one_tensor() -> None:
    def made() -> tuple[Any, Any]:
        held: Any = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
        held[0].grad = held[1].grad = torch.ones(2)
        return held, lambda x: (x * held[0]).sum().backward()

    (ours, program), (theirs, eager) = made(), made()
    capture(program, (torch.ones(2),))(torch.ones(2))
    eager(torch.ones(2))
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, its.grad)
    assert ours[0].grad is ours[1].grad


def test_what_the_caller_partitions_by_is_called() -> None:
    seen: list[tuple[int, int]] = []

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        seen.append((len(joint.graph.find_nodes(op="placeholder")), num_fwd_outputs))
        return default_partition_fn()(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    module, x = nn.Linear(3, 4), torch.randn(4, 3)
    program = capture(module, (x,), partition_fn=cut)
    assert seen == []  # until a call is differentiated
    program(x).sum().backward()
    program(x).sum().backward()
    assert seen == [(4, 1)]
    torch._dynamo.reset()
    torch.compile(module, backend=dynamo_backend(partition_fn=cut))(x).sum().backward()
    assert len(seen) == 2


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)) for _ in "1234"
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


@pytest.mark.parametrize("way", ["call", "dynamo"])
@pytest.mark.slow
def test_checkpointed_regions_stay_checkpointed(way: str) -> None:
    x = torch.randn(32, 16)
    kept = {}
    for checkpointed in (False, True):
        module = Blocks(checkpointed)
        run, saved = ways(module, x, "mutations_and_views")[way], list[Tensor]()
        own = {parameter.data_ptr() for parameter in module.parameters()}

        def pack(tensor: Tensor, saved: list[Tensor] = saved, own: set[int] = own) -> Tensor:
            if tensor.data_ptr() not in own:
                saved.append(tensor)
            return tensor

        run(x)  # compiled outside of the hooks
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(x).sum().backward()
        kept[checkpointed] = sum(tensor.nbytes for tensor in saved)
    assert kept[True] <= 5 * x.nbytes < kept[False] / 4


@pytest.mark.parametrize("way", ["call", "dynamo"])
def test_a_write_between_forward_and_backward_is_refused_as_in_eager(way: str) -> None:
    module, x = Applied(lambda m, x: x * x.exp(), nn.Identity()), torch.randn(3)
    scale = x.clone().requires_grad_()
    for run in (module, ways(module, x, "mutations_and_views")[way]):
        held = scale * 1
        result = run(held)
        with torch.no_grad():
            held.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_inputs_that_require_gradients_only_later() -> None:
    module, x = nn.Linear(3, 3).requires_grad_(False), torch.randn(3, 3)
    with torch.no_grad():
        program = capture(module, (x,))
    assert not program(x).requires_grad
    given = x.clone().requires_grad_()
    program(given).sum().backward()
    torch.testing.assert_close(given.grad, module.weight.sum(0).expand(3, 3))
    module.requires_grad_(True)
    program(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(3, 3))


def test_what_is_detached_has_no_gradient() -> None:
    for func in (lambda a: a.detach(), lambda a: a[0].detach(), lambda a: (a * 2).detach()):
        a = torch.ones(3, requires_grad=True)
        assert not capture(func, (a,))(a).requires_grad


def test_a_backward_that_writes_to_what_is_outside_is_refused() -> None:
    seen = torch.zeros(3)

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.add_(gradient)
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    program = capture(lambda x: Noting.apply(x) + seen[:1], (x,))  # type: ignore[no-untyped-call]
    result = program(x)
    torch.testing.assert_close(result, torch.full((3,), 2.0, requires_grad=True))
    with pytest.raises(UnsupportedMutationError, match="the backward writes to a tensor that existed before it"):
        result.sum().backward()
    assert torch.equal(seen, torch.zeros(3))


class Scales(torch.autograd.Function):
    """Its backward writes to the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(3)


class Masks(torch.autograd.Function):
    """Its backward writes to parts of the gradients that arrive, and reads one in the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * 2, x.exp()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        first[x < 0] = 0
        first.t()[1].add_(second[0])
        return first + second


WRITES_GRADIENTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "at the end": lambda x: (Scales.apply(x.sin()),),  # type: ignore[no-untyped-call]
    "in between": lambda x: (Scales.apply(x).sin(),),  # type: ignore[no-untyped-call]
    "of a view": lambda x: (Scales.apply(x.sin()).t().reshape(-1),),  # type: ignore[no-untyped-call]
    "of a result that is added": lambda x: (Scales.apply(x.sin()) + Scales.apply(x),),  # type: ignore[no-untyped-call]
    "of several results": lambda x: (*Masks.apply(x.sin()), x * 3),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("compiled", [False, True], ids=["capture", "dynamo"])
@pytest.mark.parametrize("name", WRITES_GRADIENTS)
def test_a_backward_may_write_to_the_gradient_that_arrives(name: str, compiled: bool) -> None:
    program = WRITES_GRADIENTS[name]
    x = torch.linspace(-1, 2, 9).reshape(3, 3).requires_grad_()
    call = torch.compile(program, backend="functionalize") if compiled else capture(program, (x,))
    found = []
    for function in (call, program):
        results = function(x)
        given = [torch.arange(1.0, 1 + result.numel()).reshape(result.shape) for result in results]
        found.append([*torch.autograd.grad(results, x, given), *given])
        loss: Any = sum((result * result).sum() for result in function(x))
        found[-1] += torch.autograd.grad(loss, x)
        strided = [torch.ones(*result.shape, 2)[..., 0] for result in function(x)]
        found[-1] += [*torch.autograd.grad(function(x), x, strided), *strided]
    torch.testing.assert_close(*found)


def test_a_gradient_that_a_backward_writes_is_that_of_one_result() -> None:
    x = torch.ones(3, requires_grad=True)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return Scales.apply(x.sin()), x * 2  # type: ignore[no-untyped-call]

    call, gradient = capture(program, (x,)), torch.ones(3)
    with pytest.raises(RuntimeError, match=r"shares\n(.|\n)*gradient.clone"):
        torch.autograd.grad(call(x), x, [gradient, gradient])
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):  # as in eager
        call(x)[0].sum().backward()


def test_calls_inside_of_a_transform_are_refused() -> None:
    program = capture(lambda x: (x * 2).sum(), (torch.ones(3),))
    for transformed in (torch.func.grad(program), torch.func.vmap(program)):
        with pytest.raises(RuntimeError, match="called inside"):
            transformed(torch.ones(3, 3))


def test_what_hooks_leave_in_objects_during_the_trace_is_taken_back() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.seen: dict[str, Any] = {"example": torch.zeros(1), "gradients": []}

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            y.register_hook(self.seen["gradients"].append)
            return y * 2

    module = Hooked()
    capture(module, (torch.ones(3),))
    assert module.seen["gradients"] == []


def test_threads_that_differentiate_at_once_share_the_halves() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    program = capture(module, (x,))
    (wanted,) = torch.autograd.grad(module(given := x.clone().requires_grad_()).sum(), given)
    program_of = capture(module, (given,))

    def gradient(run: Callable[..., Any]) -> Tensor:
        own = x.clone().requires_grad_()
        return torch.autograd.grad(run(own).sum(), own)[0]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(gradient, [program_of] * 16):
            torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient(program), wanted)


class Halved(torch.autograd.Function):
    """Its input, or a view of it, with another gradient than that of a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flat: bool = False) -> Tensor:
        ctx.size = x.size()
        return x.view(-1) if flat else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient * 0.5).view(ctx.size), None


halved: Any = Halved.apply


def hooked(x: Tensor) -> Tensor:
    y = x.view(-1)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def halved_after_a_write(x: Tensor) -> Tensor:
    y = x.view(-1)
    x.mul_(3)
    return halved(y)[1:]  # type: ignore[no-any-return]


IN_MEMORY_OF_OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "input": lambda x: halved(x),
    "view of the input": lambda x: halved(x, True),
    "view of that": lambda x: halved(x).t()[1:],
    "of a view": lambda x: halved(x[1]),
    "result and itself": lambda x: (y := x * 2, halved(y), halved(y, True)[1:], y[0]),
    "in the memory of a hidden result": lambda x: ((y := x * 2).view(-1), halved(y), y.detach()),
    "with a hook": hooked,
    "beyond a hook": lambda x: hooked(x)[1:],
    "in another dtype": lambda x: torch.view_as_complex(x.view(-1, 2)),
    "views alone": lambda x: (x.t()[0], x.unbind()[1], x.view(-1).expand(2, 6), x.squeeze().movedim(0, 1)),
    "after a write": halved_after_a_write,
}


@pytest.mark.every(5)
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("name", IN_MEMORY_OF_OTHERS)
def test_what_shares_memory_has_the_gradient_of_eager(name: str, remove: str) -> None:
    func = IN_MEMORY_OF_OTHERS[name]
    torch._dynamo.reset()
    example = torch.ones(2, 3, requires_grad=True) * 1
    ways = {"call": capture(func, (example,), remove=remove)}
    if name not in ("with a hook", "beyond a hook", "in another dtype"):  # not Dynamo's
        ways["dynamo"] = torch.compile(func, backend=dynamo_backend(remove=remove))  # type: ignore[assignment]

    def observed(run: Callable[[Tensor], Any]) -> list[Any]:
        leaf = torch.arange(6.0).view(2, 3).requires_grad_()
        x = leaf * 1
        results = run(x)
        results = list(results) if isinstance(results, tuple) else [results]
        tensors = [x, *results]
        shared = [[one.untyped_storage()._cdata == two.untyped_storage()._cdata for one in tensors] for two in tensors]
        weighted = [torch.view_as_real(r) if r.is_complex() else r for r in results if r.requires_grad]
        sum((number + 1) * (r * r).sum() for number, r in enumerate(weighted)).backward()  # type: ignore[union-attr]
        return [x.detach(), [r.detach() for r in results], [r.requires_grad for r in results], shared, leaf.grad]

    wanted = observed(func)
    for way, run in ways.items():
        torch.testing.assert_close(observed(run), wanted, msg=f"{way} differs from eager")


def test_a_gradient_flows_through_the_one_of_two_inputs_in_the_same_memory() -> None:
    memory = torch.arange(4.0)
    one, two = (memory.detach()[:3].requires_grad_() for _ in range(2))
    result = capture(lambda one, two: two[1:], (one, two))(one, two)
    result.sum().backward()
    assert one.grad is None
    torch.testing.assert_close(two.grad, torch.tensor([0.0, 1.0, 1.0]))
    assert result.data_ptr() == memory[1:].data_ptr()


def test_writing_to_what_a_function_returned_is_refused_as_in_eager() -> None:
    x = torch.ones(2, 3, requires_grad=True) * 1
    for run in (halved, capture(lambda x: halved(x), (x,))):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            run(x).add_(1)


def requires_gradients(x: Tensor) -> tuple[Tensor, ...]:
    before = x * 2
    x.requires_grad_()
    return before, x * 3, x.view(-1)


def requires_none(x: Tensor) -> tuple[Tensor, Tensor]:
    before = x * 2
    x.detach_()
    return before, x * 3


def leaves_a_gradient(x: Tensor) -> Tensor:
    x.requires_grad_()
    (x * x).sum().backward()
    return x.detach() * 2


REQUIRING: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "from then on": (requires_gradients, False),
    "already": (requires_gradients, True),
    "no more": (requires_none, True),
    "no more, of none": (requires_none, False),
    "inside alone": (leaves_a_gradient, False),
    "a leaf that nobody sees": (lambda x: x + torch.ones(3, requires_grad=True), False),
    "that and the input": (
        lambda x: (x + torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 2),
        True,
    ),
    "a leaf that is given away": (lambda x: (x.detach().clone().requires_grad_(), x * 2), True),
    "a leaf in the input's memory": (lambda x: x.detach()[1:].requires_grad_(), True),
    "a parameter": (lambda x: torch.nn.Parameter(x * 2), False),
}


@pytest.mark.parametrize("name", REQUIRING)
def test_what_requires_gradients_is_as_in_eager(name: str) -> None:
    func, requires = REQUIRING[name]

    def observed(run: Callable[[Tensor], Any]) -> list[Any]:
        x = torch.arange(3.0).requires_grad_(requires)
        results = run(x)
        results = list(results) if isinstance(results, tuple) else [results]
        look = [
            (r.requires_grad, r.is_leaf, isinstance(r, nn.Parameter), r.data_ptr() == x.data_ptr())
            for r in [x, *results]
        ]
        weighted = [(r * (number + 1)).sum() for number, r in enumerate(results) if r.requires_grad]
        if weighted:
            sum(weighted).backward()
        return [look, [r.detach() for r in [x, *results]], [t.grad for t in [x, *results] if t.is_leaf]]

    example = torch.ones(3).requires_grad_(requires)
    program = capture(func, (example,))
    assert example.requires_grad == requires
    assert example.grad is None
    for _ in range(2):
        torch.testing.assert_close(observed(program), observed(func))


@pytest.mark.slow
def test_a_gradient_for_a_leaf_that_the_program_made_is_refused() -> None:
    def given_away(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = torch.ones(3, requires_grad=True)
        return leaf, x * leaf

    with pytest.raises(UnsupportedProgramError, match="returns or keeps a new tensor that requires gradients"):
        capture(given_away, (torch.ones(3),))


def test_a_backward_that_gives_none_gives_none() -> None:
    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, None

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    capture(lambda x, y: First.apply(x, y), (x, y))(x, y).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, torch.ones(3))
    assert y.grad is None


@pytest.mark.parametrize("requires", [True, False])
def test_a_tensor_that_is_passed_twice_has_one_gradient(requires: bool) -> None:
    def func(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        return x * y * 3

    example, x = (torch.ones(2).requires_grad_(requires) for _ in range(2))
    capture(func, (example, example))(x, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 6.0))


@pytest.mark.parametrize("part", [slice(None), slice(3, 6)], ids=["whole", "view"])
def test_gradients_of_a_written_input_go_to_what_it_is_a_part_of(part: slice) -> None:
    def func(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y[1:].mul_(3)
        return y * 2, y[:2]

    gradients = []
    for captured in (False, True):
        leaf = torch.arange(1.0, 10.0, requires_grad=True)
        taken = (leaf * 1)[part]
        outputs = (capture(func, (taken,)) if captured else func)(taken)
        sum(output.sin().sum() for output in outputs).backward()  # type: ignore[union-attr]
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_view_from_before_its_root_requires_gradients() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x.view(-1)
        x.requires_grad_()
        return x, before

    x = torch.ones(2, 2)
    whole, before = capture(run, (torch.ones(2, 2),))(x)
    assert whole is x
    assert x.requires_grad
    assert before.data_ptr() == x.data_ptr()
    assert before.size() == (4,)


def test_a_view_that_autograd_accepts_no_more_is_refused() -> None:
    def run(x: Tensor) -> Tensor:
        x.requires_grad_()
        first: Tensor = x.split([1, 2])[0]
        with torch.no_grad():
            x.mul_(2)
        return first

    with pytest.raises(UnsupportedMutationError, match=r"no longer accepts(?s:.*)clone"):
        capture(run, (torch.ones(3),))


def test_a_view_that_is_saved_survives_what_the_call_does_to_its_input() -> None:
    weight = torch.ones(2, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        x.as_strided_((2,), (2,), 1)
        return x * weight

    program = capture(run, (torch.arange(4.0),), remove="mutations")
    for _ in range(2):
        program(torch.arange(4.0)).sum().backward()
        torch.testing.assert_close(weight.grad, torch.tensor([1.0, 3.0]))
        weight.grad = None


def test_a_write_without_a_backward_raises_when_a_gradient_is_asked_for() -> None:
    def run(x: Tensor) -> None:
        x.cumprod_(0)
        x[0] = 2  # eager, too, has no gradient for the line above from here on

    leaf = torch.full((3,), 2.0, requires_grad=True)
    x = leaf * 1
    capture(run, (leaf * 1,))(x)
    torch.testing.assert_close(x.detach(), torch.tensor([2.0, 4, 8]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_results_that_are_differentiated_one_after_the_other() -> None:
    program = capture(lambda x, y: (x.sin(), y.cos()), tuple(torch.ones(3, requires_grad=True) for _ in range(2)))
    one, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    y, z = program(one, other)
    y.sum().backward()
    with pytest.raises(
        RuntimeError, match=r"a second time\n    why  .*\n    try  sum the results .* or pass retain_graph=True"
    ):
        z.sum().backward()
    y, z = program(one, other)
    one.grad = other.grad = None
    y.sum().backward(retain_graph=True)
    z.sum().backward()
    torch.testing.assert_close([one.grad, other.grad], [one.cos().detach(), -other.sin().detach()])


@pytest.mark.slow
def test_views_of_a_result_without_a_backward_raise_when_a_gradient_is_asked_for() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 2
        first, second = y.hsplit(2)
        first.mul_(second)  # eager, too, has no gradient for that: it changes the version of what is saved
        return y[...], second

    results = capture(run, (torch.arange(4.0, requires_grad=True),))(torch.arange(4.0, requires_grad=True))
    for result in results:
        assert result.requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward(retain_graph=True)
    assert results[0].untyped_storage().data_ptr() == results[1].untyped_storage().data_ptr()


def test_a_view_of_an_input_whose_memory_another_has_is_of_that_input() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        y.requires_grad_()
        (y * y).sum().backward()
        return y.view(-1)

    memory = torch.arange(2.0)
    arguments = [(memory.detach().requires_grad_(), memory.detach()) for _ in range(2)]
    program = capture(run, (memory.detach().requires_grad_(), memory.detach()))
    runs: tuple[Callable[..., Any], ...] = (run, program)
    for function, (x, y) in zip(runs, arguments, strict=True):
        function(x, y).sum().backward()
        assert x.grad is None
        assert torch.equal(y.grad, 2 * memory + 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [lambda view: view.mul_(2), lambda view: view.t_()], ids=["write", "reshape"])
@pytest.mark.parametrize("first", [lambda y: y[:1], lambda y: y.diagonal(0, 1, 0)], ids=["slice", "diagonal"])
def test_a_part_beyond_a_view_that_is_changed_afterwards_has_no_gradient(first: Any, change: Any) -> None:
    def run(x: Tensor, write: bool) -> Tensor:
        y = x * 1
        view = first(y)
        part: Tensor = view.as_strided((1, 1), (1, 1), 3)
        if write:
            change(view)
        return part

    for write in (False, True):
        x = torch.ones(4, 1, requires_grad=True)
        (want,) = torch.autograd.grad(run(x, write).sum(), x)
        assert want.sum() == write  # eager looks for the part in the whole memory, once that was written
        result = capture(run, (x, write))(x, write)
        if write:
            with pytest.raises(UnsupportedMutationError, match="reads memory beyond"):
                result.sum().backward()
        else:
            torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], want)


@pytest.mark.parametrize("anew", [False, True], ids=["added", "anew"])
def test_a_write_beside_a_backward_inside_is_none_that_gradients_pass_by(anew: bool) -> None:
    def run(weight: Tensor, x: Tensor) -> None:
        x[0] = -2
        if anew:
            weight.grad = None
        (weight * weight).sum().backward()

    def arguments() -> tuple[Tensor, Tensor, Tensor]:
        leaf = torch.ones(3, requires_grad=True)
        return leaf, torch.ones(3, requires_grad=True), leaf * 2

    program = capture(run, arguments()[1:])
    leaf, weight, x = arguments()
    program(weight, x)
    assert torch.equal(weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    if anew:  # the backward is a part of the graph
        with pytest.raises(RuntimeError, match="that itself calls backward"):
            x.sum().backward()
        assert leaf.grad is None
    else:
        x.sum().backward()
        assert torch.equal(leaf.grad, torch.tensor([0.0, 2.0, 2.0]))  # type: ignore[arg-type]


PARTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "slice": lambda x, at: x[at[0].item() :],
    "between": lambda x, at: x[at[0].item() : at[1].item()],
    "narrow": lambda x, at: x.narrow(0, at[0].item(), 2),
    "pieces": lambda x, at: torch.tensor_split(x, at, 0),
}


@pytest.mark.parametrize("on_data", ["decide", "raise"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_that_begin_where_the_data_say_are_views_with_gradients(part: str, on_data: Any) -> None:
    program = capture(PARTS[part], (torch.ones(5, 2, requires_grad=True), torch.tensor([1, 3])), on_data=on_data)
    for bounds in ((1, 3), (2, 4), (0, 2)):
        x = torch.arange(10.0).reshape(5, 2).requires_grad_()
        at = torch.tensor(bounds)
        found = [pytree.tree_leaves(run(x, at)) for run in (PARTS[part], program)]
        for want, got in zip(*found, strict=True):
            assert got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert (got.stride(), got.storage_offset()) == (want.stride(), want.storage_offset())
            assert torch.equal(got, want)
            gradients = [torch.autograd.grad(one.sin().sum(), x) for one in (want, got)]
            assert torch.equal(*(gradient for (gradient,) in gradients))


def test_zeros_of_autograd_that_forget_their_device_are_refused() -> None:
    def run(x: Tensor) -> Tensor:
        view = x.view(1, 2, 2)
        view.cumsum_(0)
        return view.abs_()

    x = torch.tensor([1.0, -2.0, 3.0, 4.0], requires_grad=True)
    result = capture(run, (x * 1,))(x * 1)
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    assert torch.equal(gradient, x.sign())
    with pytest.raises(RuntimeError, match="zero everywhere"):
        gradient.sum().backward()


def test_data_of_a_view_that_autograd_accepts_no_more() -> None:
    def run(x: Tensor) -> None:
        first, _ = x.unbind(0)
        x.mul_(2)
        first.data = first

    x = torch.arange(2.0) * torch.ones(2, requires_grad=True)
    capture(run, (x,))(x)
    torch.testing.assert_close(x.detach(), 2 * torch.arange(2.0))


def permuted_norm(inner: Any, x: Tensor) -> Tensor:
    return nn.functional.group_norm(inner(x).reshape(2, 1, 2, 3).permute(0, 3, 1, 2), 3)


def permuted_pool(inner: Any, x: Tensor) -> Tensor:
    return nn.functional.adaptive_max_pool3d(inner(x).expand(2, 3, 4, 3).permute(3, 0, 2, 1), 2)


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize(
    "func",
    [
        lambda inner, x: torch.linalg.det(inner(x)[:3].t() + torch.eye(3)),
        lambda inner, x: torch.linalg.slogdet(inner(x)[:3].t() + torch.eye(3))[1],
        permuted_norm,
        permuted_pool,
    ],
    ids=["det", "slogdet", "group_norm", "max_pool3d"],
)
def test_ops_whose_backward_asks_strides(func: Any, remove: str) -> None:
    module = Applied(func, nn.Linear(3, 3))
    x = torch.rand(4, 3, requires_grad=True)
    wanted = torch.autograd.grad(module(x).sin().sum(), [x, *module.parameters()])
    given = torch.autograd.grad(capture(module, (x,), remove=remove)(x).sin().sum(), [x, *module.parameters()])
    for one, other in zip(given, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        assert one.stride() == other.stride()


def test_data_of_a_view_of_a_tensor_that_is_written_are_refused() -> None:
    """Autograd would look for the gradient where the new data lie: eager does so before they are there."""

    def run(x: Tensor, y: Tensor) -> None:
        x.add_(1)
        y.data = y * 2

    with pytest.raises(
        UnsupportedMutationError, match="`y`, which requires gradients, changes its size, strides or memory"
    ):
        memory = torch.arange(4.0) * torch.ones(4, requires_grad=True)
        capture(run, (memory[0], memory[1:]))(memory[0], memory[1:])


def data_written_without_gradients(x: Tensor) -> Tensor:
    x.data = x + 1
    with torch.no_grad():
        x.add_(1)
    return x * 2


def data_written_detached(x: Tensor) -> Tensor:
    x.data = x + 1
    x.detach().mul_(2)
    return x.view_as(x)


def older_data_written(x: Tensor) -> Tensor:
    older = x.detach()
    x.data = x + 1
    older.mul_(2)
    return x * 2


REPLACED = [data_written_without_gradients, data_written_detached, older_data_written]


@pytest.mark.parametrize("run", REPLACED)
def test_data_of_a_view_that_are_written_are_refused(run: Callable[[Tensor], Tensor]) -> None:
    """Autograd looks for such a view, in what it is a view of, at the place that it has in other memory."""
    leaf = torch.arange(6.0, requires_grad=True)
    assert torch.autograd.grad(run((leaf * 1)[2:4]).sum(), leaf)[0].count_nonzero() == 2
    for view in ((leaf * 1)[2:4], (leaf * 1)[:2], leaf.as_strided((2, 1), (1, 1), 3)):
        with pytest.raises(UnsupportedProgramError, match=r"the data of `x` by `\.data =`(?s:.*)test_gradients"):
            capture(run, (view,))
        captured = capture(lambda x: run(x.clone()), (view,))  # as the error says
        wanted = torch.autograd.grad(run(view.clone()).sum(), leaf, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(captured(view).sum(), leaf)[0], wanted)
    captured = capture(run, (torch.arange(2.0, requires_grad=True),))
    with pytest.raises(InputMismatchError, match="is a view of a tensor that requires gradients, and was not"):
        captured((leaf * 1)[:2])


@pytest.mark.parametrize("run", REPLACED)
def test_data_of_other_tensors_may_be_written(run: Callable[[Tensor], Tensor]) -> None:
    for make in (lambda leaf: leaf, lambda leaf: leaf * 1):
        leaves = [torch.arange(4.0).view(2, 2).requires_grad_() for _ in range(2)]  # leaves that are views, too
        eager, own = map(make, leaves)
        results = run(eager), capture(run, (own,))(own)
        assert torch.equal(*results)
        gradients = [torch.autograd.grad(r.sum(), leaf)[0] for r, leaf in zip(results, leaves, strict=True)]
        assert torch.equal(*gradients) and torch.equal(own, eager)


def test_new_metadata_of_a_view_that_has_views_are_refused() -> None:
    """These are to autograd views of what the tensor is a view of, and keep what the tensor loses."""

    def run(x: Tensor) -> Tensor:
        whole = x.view(-1)
        x.as_strided_((1,), (1,), 0)
        return whole

    leaf = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(run((leaf * 2).view(2)).sum(), leaf)[0].tolist() == [2, 2]
    with pytest.raises(UnsupportedProgramError, match="if it has views, by `requires_grad_` or `as_strided_`"):
        capture(run, ((leaf * 2).view(2),))

    def turned(x: Tensor) -> Tensor:
        whole = x.view(-1)
        x.unsqueeze_(0)
        return whole

    captured = capture(turned, ((leaf * 2).view(2),))
    assert torch.autograd.grad(captured((leaf * 2).view(2)).sum(), leaf)[0].tolist() == [2, 2]


def test_views_stay_views_beside_copies_of_views() -> None:
    """Memory around an input is read by a copy, its parts are views of the result, at places of a whole storage."""

    def run(x: Tensor, numbers: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        y.zero_()
        return x @ weight

    def arguments() -> tuple[Tensor, ...]:
        memory = torch.arange(8.0).untyped_storage()
        x, y = (torch.empty(0).set_(memory, *where) for where in ((6, (1, 1), (1, 1)), (0, (2, 2), (4, 2))))
        return x, torch.empty(0, dtype=torch.int16).set_(memory, 8, (), ()), y, torch.ones(1, 1, requires_grad=True)

    captured, given = capture(run, arguments(), remove="mutations"), arguments()
    result = captured(*given)
    assert result.item() == given[0].item() == 0


@pytest.mark.parametrize("write", [lambda y: y.mul_(2), lambda y: y.detach().mul_(2)], ids=["seen", "detached"])
def test_pieces_of_a_part_are_refused_where_another_part_is_written(write: Callable[[Tensor], Any]) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        first, _ = x.split(1)
        write(y)
        return first * 2  # type: ignore[no-any-return]

    def parts(by: Tensor) -> tuple[Tensor, Tensor]:
        memory = torch.arange(4.0) * by
        return memory[:2], memory[2:]

    with pytest.raises(RuntimeError, match="Output 0 of Split is a view"):
        run(*parts(torch.ones(4, requires_grad=True)))
    with pytest.raises(UnsupportedMutationError, match=r"`y` is written, and the program splits .* `x`"):
        capture(run, parts(torch.ones(4, requires_grad=True)))
    assert torch.equal(capture(run, parts(torch.ones(4)))(*parts(torch.ones(4))), torch.zeros(1))


def test_a_view_that_requires_gradients_whose_memory_is_written_behind_it_is_refused() -> None:
    def run(x: Tensor) -> None:
        leaf = x[0].requires_grad_()
        view = leaf.expand(2, 1)
        x.detach().add_(-2)
        (view * view).sum().backward()

    with pytest.raises(
        UnsupportedProgramError, match="sets requires_grad on a view, and then writes to the view's base"
    ):
        capture(run, (torch.ones(1, 1),))


def test_a_decoder_whose_layers_are_checkpointed() -> None:
    """Its regions hold what its layers are called with, and graphs of autograd hold the regions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the method has another name from now on
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    tokens = torch.randint(0, 32, (2, 8))

    def program(tokens: Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    captured, parameters = capture(program, (tokens,)), list(model.parameters())
    wanted: Any = torch.autograd.grad(program(tokens), parameters)
    found: Any = torch.autograd.grad(captured(tokens), parameters)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_backward_takes_no_base_that_it_computes_again() -> None:
    """Rotary embeddings of whole heads leave pieces without elements, which are saved; their base is not."""

    def region(x: Tensor, weight: Tensor) -> Tensor:
        heads = (x @ weight).view(x.size(0), 2, 4)
        query, key = (torch.cat([head.sin(), head[:, 4:]], -1) for head in (heads[:, 0], heads[:, 1]))
        return x + (query.t() @ key).sum()

    def program(x: Tensor, weight: Tensor) -> Any:
        x = checkpoint(region, x, weight, use_reentrant=False)
        return checkpoint(region, torch.cat([x, x]), weight, use_reentrant=False).sum()

    held = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    wanted, gradients = (torch.autograd.grad(run(*held), held) for run in (program, capture(program, held)))
    torch.testing.assert_close(gradients, wanted)


def test_calls_in_a_checkpointed_region_are_captured_outside_of_it() -> None:
    layer = nn.Linear(3, 3)
    program = capture(lambda x: layer(x).sin(), (torch.ones(2, 3),), on_guard_failure="recapture")
    x = torch.ones(2, 3, requires_grad=True)
    want = torch.autograd.grad(layer(x).sin().sum(), [x, layer.weight])
    got = torch.autograd.grad(checkpoint(program, x, use_reentrant=False).sum(), [x, layer.weight])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).relu()
        return self.one(hidden), self.other(hidden)


@pytest.mark.parametrize("way", ["captured", "compiled"])
def test_what_a_loss_does_not_depend_on_gets_no_gradient(way: str) -> None:
    module = Heads()
    x = torch.randn(2, 3)
    program: Any = capture(module, (x,)) if way == "captured" else torch.compile(module, backend="functionalize")
    program(x)[0].sum().backward()
    assert module.one.weight.grad is not None
    assert module.other.weight.grad is None and module.other.bias.grad is None
    want = torch.autograd.grad(module(x)[0].sum(), module.trunk.weight)[0]
    torch.testing.assert_close(module.trunk.weight.grad, want)


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full((3,), 7.0)


def test_a_backward_that_does_not_read_its_gradient_gives_one() -> None:
    x = torch.ones(3, requires_grad=True)
    program = capture(lambda x, y: (Constant.apply(x), y * 3), (x, torch.ones(3, requires_grad=True)))  # type: ignore[no-untyped-call]
    y = torch.ones(3, requires_grad=True)
    got = torch.autograd.grad(program(x, y)[0].sum(), [x, y], allow_unused=True)
    assert torch.equal(got[0], torch.full((3,), 7.0)) and got[1] is None


def test_modes_around_a_call_are_none_of_its_capture() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not any(isinstance(arg, FakeTensor) for arg in args)
            return func(*args, **(kwargs or {}))

    program = capture(lambda x: x.sin() * x, (torch.ones(3),), on_guard_failure="recapture")
    x = torch.ones(2, requires_grad=True)
    with Seen(), warnings.catch_warnings():  # type: ignore[no-untyped-call]
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            got = torch.autograd.grad(program(x).sum(), x)[0]
    torch.testing.assert_close(got, torch.autograd.grad((x.sin() * x).sum(), x)[0])


def test_tangents_of_forward_mode_are_not_lost() -> None:
    program = capture(torch.sin, (torch.ones(3),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match=r"inside torch\.func\.grad, vmap, jvp, dual_level"):
            program(dual)
    assert torch.equal(program(torch.ones(3)), torch.ones(3).sin())


def asks_for_a_gradient(w: Tensor, x: Tensor) -> Any:
    result = w * x * 3 if w.grad is None else w * x
    (w * w).sum().backward()
    return result


def tells_of_a_gradient(w: Tensor, x: Tensor) -> Any:
    known = w.grad is None
    (w * w).sum().backward()
    return w.detach() * x, known


def begins_with_zeros(w: Tensor, x: Tensor) -> Any:
    if w.grad is not None:
        w.grad.zero_()
    (w * x).sum().backward()
    return w.detach() * x


@pytest.mark.parametrize("func", [asks_for_a_gradient, tells_of_a_gradient, begins_with_zeros])
def test_a_program_that_asks_whether_there_is_a_gradient_is_two(func: Callable[..., Any]) -> None:
    """A capture supposes that the next call finds the gradients that this one leaves, but where that matters."""
    x, given = torch.tensor([1.0, 2.0]), list[Any]()
    for captured in (False, True):
        w = torch.tensor([1.0, 3.0], requires_grad=True)
        called = capture(func, (w, x), on_guard_failure="recapture") if captured else func
        given.append([])
        for _ in range(3):
            result = called(w, x)
            assert w.grad is not None
            given[-1] += [str(result), w.grad.tolist()]
    assert [_numbers(one) for one in given[0]] == [_numbers(one) for one in given[1]]


def _numbers(value: Any) -> Any:
    return re.sub(r", grad_fn=<\w+>", "", value) if isinstance(value, str) else value


@pytest.mark.parametrize("stepping", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_autocast_keeps_the_casts_of_weights_as_in_eager(stepping: bool, cached: bool) -> None:
    """The gradients of one cast are summed up in its dtype; a step inside of the region leaves the cast stale."""

    def outcome(captured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                y = layer(layer(layer(x)))
                y.float().sum().backward()
                if stepping:
                    optimizer.step()
                return layer(x)

        call = capture(step, (x,)) if captured else step
        return [*(call(x).detach().float() for _ in range(3)), layer.weight.detach()]

    assert all(map(torch.equal, outcome(True), outcome(False)))
    assert torch.is_autocast_cache_enabled()


LAYER, NORM = nn.Linear(3, 2), nn.LayerNorm(3)


def target_of_a_layer(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        target = LAYER(x).max(1)[0]
    return LAYER(x).max(1)[0], target


ALIKE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "randn_like": lambda x: (torch.randn_like(x) * x, torch.randn_like(x) * x),
    "randint_like": lambda x: (torch.randint_like(x, 99) * x, torch.randint_like(x, 99) * x),
    "exponential_": lambda x: (torch.empty_like(x).exponential_() * x, torch.empty_like(x).exponential_() * x),
    "gumbel_softmax": lambda x: (nn.functional.gumbel_softmax(x), nn.functional.gumbel_softmax(x)),
    "rrelu": lambda x: (nn.functional.rrelu(x, -1, 1, True), nn.functional.rrelu(x, -1, 1, True)),
    "max": target_of_a_layer,
    "sort": lambda x: (x.sort(1)[0], x.sort(1)[0].detach()),
    "layer norm": lambda x: (NORM(x), NORM(x)),
    "layer norm, detached": lambda x: (NORM(x), NORM(x).detach()),
}


@pytest.mark.parametrize("way", [lambda f, x: capture(f, (x,)), lambda f, x: torch.compile(f, backend="functionalize")])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_computed_twice_is_two(name: str, way: Callable[..., Any]) -> None:
    """Draws are others, results other tensors, and one may be detached."""

    def seen(function: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        x = torch.arange(12.0).view(4, 3).sub(6).requires_grad_()
        results = function(x)
        (gradient,) = torch.autograd.grad(sum(r.square().sum() for r in results if r.requires_grad), x)
        return [*results, *[r.requires_grad for r in results], results[0] is results[1], gradient, torch.rand(2)]

    torch._dynamo.reset()
    torch.testing.assert_close(seen(way(ALIKE[name], torch.ones(4, 3, requires_grad=True))), seen(ALIKE[name]))


@pytest.mark.parametrize(
    "compute", [lambda x: x.max(1)[0], lambda x: x.sort(1)[0], lambda x: x.topk(1)[0].detach() * x]
)
def test_operators_with_several_results_are_cut_by_the_default_partition(compute: Callable[[Tensor], Any]) -> None:
    def gradients(run: Callable[[Tensor], Any]) -> Any:
        return torch.autograd.grad(run(torch.arange(12.0).view(4, 3)).sum(), list(LAYER.parameters()))

    def program(x: Tensor) -> Any:
        return compute(LAYER(x))

    mine = capture(program, (torch.ones(4, 3),), partition_fn=default_partition)
    torch.testing.assert_close(gradients(mine), gradients(program))


def test_a_leaf_that_the_program_gets_twice_has_the_gradient_that_it_has() -> None:
    def world() -> tuple[Tensor, Callable[..., Tensor], Callable[[Tensor, Tensor], None]]:
        weight = torch.ones(3, requires_grad=True)

        def added(x: Tensor, y: Tensor) -> Tensor:
            return (x * y * weight).sum()

        return weight, added, lambda x, y: (x * y * weight).sum().backward()

    (mine, func, step), (its, eager, eager_step) = world(), world()
    mine.grad, its.grad = torch.ones(3), torch.ones(3)
    captured, stepping = capture(func, (mine, mine)), capture(step, (mine, mine))
    assert not captured.specialization.metadata.gradients
    for gradient in (torch.ones(3), None, torch.zeros(3)):
        mine.grad, its.grad = (None if gradient is None else gradient.clone() for _ in range(2))
        for _ in range(2):
            captured(mine, mine).backward()
            eager(its, its).backward()
            torch.testing.assert_close(mine.grad, its.grad)
            stepping(mine, mine)
            eager_step(its, its)
            torch.testing.assert_close(mine.grad, its.grad)


def test_a_gradient_that_the_program_assigns_is_added_to() -> None:
    weight = torch.ones(3, requires_grad=True)

    def func(x: Tensor) -> Tensor:
        weight.grad = torch.ones(3)
        return (x * weight).sum()

    captured = capture(func, (torch.ones(3),))
    for _ in range(2):
        captured(torch.ones(3)).backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, torch.full((3,), 2.0))


def test_a_history_in_state_that_a_program_reads_detached_is_not_gone_back_through() -> None:
    """The state of the call before gets no gradient, whose backward has let go of what it saved."""

    def gradients(capturing: bool) -> list[Tensor]:
        held, found = torch.zeros(3), list[Tensor]()
        x = torch.ones(3, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            y = held.detach().sin() + x.exp()
            held.copy_(x.exp())
            return y

        program = capture(step, (x,), on_guard_failure="recapture") if capturing else step
        for _ in range(3):
            found += torch.autograd.grad(program(x).sum(), x)
        return found

    assert len(gradients(capturing=True)) == 3
    torch.testing.assert_close(gradients(capturing=True), gradients(capturing=False))


class Lazy(nn.Module):
    """A module that makes its layer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[-1], 2)
        return self.layer(x).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["raise", "recapture"])
def test_a_module_may_make_its_parameters_in_the_first_call(policy: str) -> None:
    eager, module = Lazy(), Lazy()
    program = capture(module, (torch.ones(4, 3),), on_guard_failure=policy)
    assert module.layer is None
    for number in range(3):
        x = torch.arange(12.0).view(4, 3) + number
        for run in (eager, program):
            torch.manual_seed(number)
            run(x).square().sum().backward()
        ours, theirs = list(module.parameters()), list(eager.parameters())
        assert all(map(torch.equal, ours, theirs))
        assert all(torch.equal(mine.grad, its.grad) for mine, its in zip(ours, theirs, strict=True))  # type: ignore[arg-type]
