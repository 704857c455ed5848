"""Derivatives of derivatives, through a call, captured and compiled by Dynamo: those of eager, or a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint

from functionalize import DataDependentError, capture
from functionalize.runtime.autograd.joint import Derivative, Orders

pytestmark = [
    # Dynamo warns of torch's own code.
    pytest.mark.filterwarnings("ignore:.*(autograd.function.Function.*should not be instantiated|torch.jit)"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
Run = Callable[..., Any]


def captured(module: Run, *inputs: Any) -> Run:
    return capture(module, inputs)


def compiled(module: Run, *inputs: Any) -> Run:
    torch._dynamo.reset()
    result: Run = torch.compile(module, backend="functionalize", fullgraph=True)
    return result


WAYS = [captured, compiled]


class StraightThrough(torch.autograd.Function):
    """Rounds, with the derivative of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Cubed(torch.autograd.Function):
    """A cube, whose backward is a function with a backward of its own: one that says double of the truth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return SquaredTwice.apply(*ctx.saved_tensors) * gradient  # type: ignore[no-untyped-call]


class SquaredTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 3 * x**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 12 * x * gradient


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


class Applied(nn.Module):
    """A function of a module and an input."""

    def __init__(self, func: Callable[[Any, Tensor], Any], inner: nn.Module) -> None:
        super().__init__()
        self.inner, self._func = inner, func

    def forward(self, x: Tensor) -> Any:
        return self._func(self.inner, x)


def without_gradient(inner: Any, x: Tensor) -> Tensor:
    y = inner(x)
    with torch.no_grad():
        scale = y.exp() + x.sum()
    return y.tanh() * scale + (y * y.detach()).sin()  # type: ignore[no-any-return]


def written(inner: Any, x: Tensor) -> Tensor:
    y = inner(x).mul(2)
    y[0].mul_(y.detach()[1].clone())
    y.t()[1].add_(x.sin()[:, 0])
    return y.square()  # type: ignore[no-any-return]


def in_a_checkpoint(inner: Any, x: Tensor) -> Any:
    return checkpoint(lambda t: inner(t).tanh(), x, use_reentrant=False).sin()


def square(hidden: int = 4) -> nn.Module:
    return nn.Linear(4, hidden)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(square(8), nn.Tanh(), nn.Linear(8, 4), nn.Softplus(), square(1)),
    "polynomial": lambda: Applied(lambda m, x: (m(x) ** 4).sum(0), square()),
    "linear": square,
    "convolution": lambda: Applied(lambda m, x: m(x.view(1, 1, 4, 4)).sin(), nn.Conv2d(1, 2, 3, padding=1)),
    "normalized": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4)),
    "evaluated": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), square()).eval(),
    "dropped": lambda: nn.Sequential(square(), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)),
    "unused numbers": lambda: Applied(lambda m, x: (torch.rand(3), m(x).sin() * torch.rand(4))[1], square()),
    "straight through": lambda: Applied(
        lambda m, x: m(StraightThrough.apply(x * 3) ** 2).tanh(),  # type: ignore[no-untyped-call]
        square(),
    ),
    "backward of its own": lambda: Applied(lambda m, x: m(Cubed.apply(x)).tanh(), square()),  # type: ignore[no-untyped-call]
    "without gradient": lambda: Applied(without_gradient, square()),
    "written": lambda: Applied(written, square()),
    "attention": lambda: Applied(
        lambda m, x: (m(x) @ x.t()).softmax(-1) @ m(x),
        square(),
    ),
    "checkpointed": lambda: Applied(in_a_checkpoint, square()),
    "several results": lambda: Applied(lambda m, x: (y := m(x).sin(), y.t(), y.exp().sum(), y.detach()), square()),
}


def scalar(results: Any) -> Tensor:
    leaves = results if isinstance(results, (tuple, list)) else [results]
    total: Any = sum((n + 1) * leaf.mul(1.3).cos().sum() for n, leaf in enumerate(leaves) if leaf.requires_grad)
    return total  # type: ignore[no-any-return]


def derivatives(run: Run, module: nn.Module, x: Tensor, order: int) -> list[Any]:
    """All gradients of a function of all gradients of ... of what a call gives."""
    torch.manual_seed(0)
    sources = [x.clone().requires_grad_(), *module.parameters()]
    values, found = scalar(run(sources[0] * 1)), list[Any]()
    for one in range(order):
        last = one == order - 1
        gradients = torch.autograd.grad(values, sources, create_graph=not last, allow_unused=True)
        found += [None if gradient is None else gradient.detach() for gradient in gradients]
        if not last:
            known = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
            values = sum(gradient.mul(0.7).sin().sum() for gradient in known)  # type: ignore[assignment]
    return [*found, torch.rand(2), *map(torch.clone, module.buffers())]


def assert_same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    assert [value is None for value in actual] == [value is None for value in expected]
    for one, other in zip(actual, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)


# Dynamo traces through a function inside of a backward, under any backend.
NOT_BY_DYNAMO = {"backward of its own"}
THIRD = {"polynomial", "straight through", "dropped"}
CASES = [
    pytest.param(name, way, marks=[pytest.mark.slow] if way is compiled and name != "mlp" else [])
    for name in MODULES
    for way in WAYS
    if way is captured or name not in NOT_BY_DYNAMO
]


@pytest.mark.every(6)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_further_derivatives_are_those_of_eager(name: str, way: Callable[..., Run]) -> None:
    torch.manual_seed(1)
    module, x = MODULES[name]().double(), torch.randn(4, 4, dtype=torch.float64)
    twin, order = copy.deepcopy(module), 3 if name in THIRD else 2
    run = way(module, x.clone().requires_grad_() * 1)
    for _ in range(2):
        assert_same(derivatives(run, module, x, order), derivatives(twin, twin, x, order))


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_penalty_trains_as_in_eager(way: Callable[..., Run]) -> None:
    critic, x = MODULES["mlp"](), torch.randn(4, 4)
    twin = copy.deepcopy(critic)
    run = way(critic, x.clone().requires_grad_())
    for called, module in ((run, critic), (twin, twin)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            given = x.clone().requires_grad_()
            values = called(given)
            (slope,) = torch.autograd.grad(values.sum(), given, create_graph=True)
            (values.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()
    assert_same([*critic.parameters()], [*twin.parameters()])


def test_a_step_of_maml_is_differentiated_as_in_eager() -> None:
    module, x = MODULES["mlp"](), torch.randn(4, 4)
    parameters, skeleton = dict(module.named_parameters()), copy.deepcopy(module)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(skeleton, parameters, (x,)).square().mean()

    def after_steps(run: Callable[..., Any]) -> list[Any]:
        adapted: dict[str, Any] = dict(parameters)
        for _ in range(2):
            gradients = torch.autograd.grad(run(adapted, x), list(adapted.values()), create_graph=True)
            pairs = zip(adapted.items(), gradients, strict=True)
            adapted = {name: value - 0.1 * gradient for (name, value), gradient in pairs}
        return list(torch.autograd.grad(run(adapted, x + 1), list(parameters.values())))

    fixed = {name: value * 1 for name, value in parameters.items()}
    assert_same(after_steps(capture(loss, (fixed, x), on_guard_failure="recapture")), after_steps(loss))


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_an_input_is_differentiated_twice(way: Callable[..., Run]) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        out = (x.clone() * y).sin()
        x.mul_(y)
        return out + x.detach()

    def twice(run: Run) -> list[Any]:
        leaf, y = torch.arange(3.0, requires_grad=True), torch.full((3,), 0.5, requires_grad=True)
        x = leaf * leaf
        result = run(x, y)
        values = (result * x.cos()).sum()
        gradients = torch.autograd.grad(values, [leaf, y], create_graph=True)
        return [result, x, *gradients, *torch.autograd.grad([g.sin().sum() for g in gradients], [leaf, y])]

    run = way(program, torch.ones(3, requires_grad=True) * 1, torch.ones(3, requires_grad=True))
    assert_same(twice(run), twice(program))


def test_a_view_of_an_input_that_is_detached_afterwards_is_differentiated_twice() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        view = x.view(-1)
        x.detach_()
        return view * weight

    def twice(run: Callable[..., Any]) -> list[Any]:
        leaf, weight = torch.arange(3.0, requires_grad=True), torch.full((3,), 0.5, requires_grad=True)
        x = leaf * 2
        result = run(x, weight)
        gradients = torch.autograd.grad(result.sin().sum(), [leaf, weight], create_graph=True)
        return [result, x.requires_grad, *gradients, *torch.autograd.grad([g.sum() for g in gradients], [leaf, weight])]

    run = capture(program, (torch.ones(3, requires_grad=True) * 1, torch.ones(3, requires_grad=True)))
    assert_same(twice(run), twice(program))


@pytest.mark.parametrize("way", WAYS)
def test_hooks_are_called_in_each_backward(way: Callable[..., Run]) -> None:
    def twice(run: Run) -> list[Any]:
        seen: list[Tensor] = []
        x = torch.arange(3.0, requires_grad=True)
        y = run(x)
        y.register_hook(lambda gradient: seen.append(gradient.detach().clone()))
        y.register_hook(lambda gradient: gradient * 2)
        (gradient,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
        return [*torch.autograd.grad(gradient.square().sum(), x), *seen]

    run = way(torch.sin, torch.ones(3, requires_grad=True))
    assert_same(twice(run), twice(torch.sin))


def test_a_gradient_that_depends_on_nothing_requires_no_gradient() -> None:
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    program = capture(lambda w, x: w * 3 + x.sin(), (weight, x))
    of_weight, of_x = torch.autograd.grad(program(weight, x).sum(), [weight, x], create_graph=True)
    assert (of_weight.requires_grad, of_x.requires_grad) == (False, True)


# What is refused


def second(run: Run, x: Tensor) -> Any:
    (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0]


def test_a_function_that_is_once_differentiable_stays_so() -> None:
    x = torch.ones(3, requires_grad=True)
    program = capture(lambda x: Once.apply(x.sin()), (x,))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"order 2 .*marked with @once_differentiable is differentiated twice"):
        second(program, x)
    torch.testing.assert_close(torch.autograd.grad(program(x).sum(), x)[0], 2 * x.cos())


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.sin() * torch.rand(3)


def test_a_backward_that_draws_random_numbers_is_differentiated_once() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"aten.rand.default in a backward that is differentiated"):
        second(capture(lambda x: Noisy.apply(x), (x,)), x)  # type: ignore[no-untyped-call]


def test_python_state_that_changed_since_the_call_is_noticed() -> None:
    module: Any = MODULES["evaluated"]()
    x = torch.ones(4, 4, requires_grad=True)
    module.power = 2
    program = capture(Applied(lambda m, x: m(x) ** m.power, module), (x,))
    (gradient,) = torch.autograd.grad(program(x).sum(), x, create_graph=True)
    module.power = 3
    with pytest.raises(RuntimeError, match=r"order 2 .*power. is 3, and was 2"):
        gradient.sum().backward()
    module.power = 2
    gradient.sum().backward()


def test_a_program_that_changes_python_state_says_why_not() -> None:
    module: Any = nn.Linear(3, 3)
    x = torch.ones(3, requires_grad=True)
    module.calls = 0

    def counted(module: Any, x: Tensor) -> Any:
        module.calls += 1
        return module(x).sin()

    program = capture(Applied(counted, module), (x,))
    with pytest.raises(RuntimeError, match="the program changes Python state"):
        second(program, x)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_since_the_call_is_noticed(way: Callable[..., Run]) -> None:
    run = way(torch.exp, torch.ones(3, requires_grad=True) * 1)
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    y = run(x)
    x.detach().mul_(2)
    (gradient,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    torch.testing.assert_close(gradient, torch.ones(3).exp())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient.sum().backward()


OPS = [
    *("abs", "add", "addmm", "atan2", "baddbmm", "bmm", "cat", "clamp", "cumsum", "div", "einsum", "exp", "gather"),
    *("index_select", "log", "logsumexp", "masked_fill", "matmul", "mul", "nn.functional.gelu", "pow", "prod"),
    *("nn.functional.layer_norm", "nn.functional.silu", "roll", "sigmoid", "sin", "softmax", "sqrt", "tanh", "tril"),
    *("var", "where"),
]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_operators_pass_gradgradcheck(name: str) -> None:
    case = next(op for op in op_db if op.name == name)
    sample = next(case.sample_inputs(torch.device("cpu"), torch.float64, requires_grad=True))
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def program(*tensors: Tensor) -> Any:
        filled = [tensors[places.index(n)] if n in places else leaf for n, leaf in enumerate(leaves)]
        given, args, kwargs = pytree.tree_unflatten(filled, spec)
        return case.op(given, *args, **kwargs)

    inputs = tuple(leaves[n].detach().requires_grad_() for n in places)
    run = capture(program, inputs)
    torch.autograd.gradgradcheck(run, inputs, fast_mode=True, check_batched_grad=False)


@pytest.mark.parametrize("way", [captured, compiled])
def test_sizes_that_are_symbols(way: Callable[..., Run]) -> None:
    def program(x: Tensor) -> Tensor:
        return (x[1:].sin() * x[:-1]).view(-1).cumsum(0) / x.size(0)

    torch._dynamo.reset()
    example = torch.randn(4, 3, requires_grad=True)
    if way is captured:
        run: Run = capture(program, (example,), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    else:
        run = torch.compile(program, backend="functionalize", dynamic=True)
    for rows in (4, 6):
        x = torch.randn(rows, 3, requires_grad=True)
        torch.testing.assert_close(second(run, x), second(program, x))


class Sized(torch.autograd.Function):
    """A sine, whose second derivative depends on how many elements there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return SizedCosine.apply(gradient, x)  # type: ignore[no-untyped-call]


class SizedCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, x)
        return gradient * x.cos()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Any:
        gradient, x = ctx.saved_tensors
        scale = 10.0 if x.shape[0] > 4 else float(int(x.shape[0]))
        return None, tangent * gradient * scale


def sized(x: Tensor) -> Any:
    return Sized.apply(x)  # type: ignore[no-untyped-call]


# What decides by sizes in its second derivative, and sizes of calls.
BY_SIZES: dict[str, tuple[Callable[[], Run], list[tuple[int, ...]]]] = {
    "own backward": (lambda: sized, [(3,), (6,), (2,), (7,), (3,)]),
    "normalized": (lambda: nn.BatchNorm1d(2), [(4, 2), (3, 2), (8, 2), (4, 2)]),
    "convolution": (lambda: nn.Conv2d(1, 2, 3, padding=1), [(2, 1, 5, 6), (3, 1, 7, 6), (1, 1, 4, 4)]),
    "transposed": (lambda: nn.ConvTranspose1d(1, 2, 3, stride=2), [(2, 1, 5), (2, 1, 6), (3, 1, 4)]),
    "gated": (lambda: Applied(lambda m, x: nn.functional.glu(x.sin()), nn.Identity()), [(4, 4), (3, 4)]),
}
SIZED = [
    pytest.param(name, way, marks=[pytest.mark.slow] if way is compiled and name != "normalized" else [])
    for name in BY_SIZES
    for way in WAYS
    if way is captured or name != "own backward"
]


def of_any_size(way: Callable[..., Run], func: Run, x: Tensor, dim: Any = torch.export.Dim.AUTO) -> Run:
    torch._dynamo.reset()
    if way is compiled:
        run: Run = torch.compile(func, backend="functionalize", dynamic=True)
        return run
    return capture(func, (x,), dynamic_shapes=(dict.fromkeys(range(x.dim()), dim),), on_guard_failure="recapture")


@pytest.mark.every(6)
@pytest.mark.parametrize(("name", "way"), SIZED)
def test_what_a_second_derivative_decides_by_sizes(name: str, way: Callable[..., Run]) -> None:
    make, sizes = BY_SIZES[name]
    func = make()
    run = of_any_size(way, func, torch.randn(sizes[0]))
    for size in sizes:
        x = torch.linspace(-1, 2, torch.Size(size).numel()).view(size).clone().requires_grad_()
        one, two = (second(lambda x, run=run: run(x).sin().square(), x) for run in (run, func))
        torch.testing.assert_close(one, two)


def test_a_second_derivative_of_a_size_serves_where_the_program_takes_any() -> None:
    run = of_any_size(captured, sized, torch.randn(3), torch.export.Dim.DYNAMIC)
    for count in (2, 3, 5, 6):
        x = torch.ones(count, requires_grad=True)
        torch.testing.assert_close(second(run, x), second(sized, x))


@pytest.mark.slow
def test_a_number_that_changes_is_a_part_of_what_dynamo_compiled_a_derivative_for() -> None:
    module = nn.BatchNorm1d(2)
    run = of_any_size(compiled, module, torch.randn(4, 2))
    for eps, rows in ((1e-5, 4), (0.5, 4), (0.5, 3), (1e-5, 3)):
        module.eps = eps
        x = torch.linspace(-1, 2, 2 * rows).view(rows, 2).clone().requires_grad_()
        one, two = (second(lambda x, run=run: run(x).sin().square(), x) for run in (run, module))
        torch.testing.assert_close(one, two)


def test_few_derivatives_are_kept_for_sizes() -> None:
    asked: list[Any] = []
    nothing: Any = None

    def derivative(order: int, sizes: Any) -> Derivative:
        asked.append(sizes)
        return Derivative(sizes, sizes.__eq__)

    orders, many = Orders(nothing, derivative), list[Any](((0, (n,), (1,)),) for n in range(12))
    assert [orders.call(2, sizes) for sizes in (*many, *many[-8:])] == [*many, *many[-8:]]
    assert asked == many
    orders.call(2, many[0])
    assert len(asked) == 13


def test_sparse_results_take_dense_tangents() -> None:
    """As in eager, where the derivative of `to_sparse` is `to_dense`, which leaves dense tangents as they are."""

    def derivatives(run: Callable[..., Any]) -> list[Tensor]:
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        tangent = torch.ones(2, 3).requires_grad_()
        (first,) = torch.autograd.grad(run(x), x, tangent, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, tangent, torch.full((2, 3), 2.0))]

    def func(x: Tensor) -> Tensor:
        return (x * 3).to_sparse()

    torch.testing.assert_close(derivatives(capture(func, (torch.ones(2, 3, requires_grad=True),))), derivatives(func))


def test_sparse_results_take_tangents_that_are_not_coalesced() -> None:
    tangent = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [1, 1, 2]]), torch.tensor([1.0, 2.0, 3.0]), (2, 3), check_invariants=False
    )

    def derivative(run: Callable[..., Any]) -> Tensor:
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        return torch.autograd.grad(run(x), x, tangent)[0]

    def func(x: Tensor) -> Tensor:
        return (x * 3).to_sparse()

    captured = capture(func, (torch.ones(2, 3, requires_grad=True),))
    torch.testing.assert_close(derivative(captured).to_dense(), derivative(func).to_dense())


@pytest.mark.slow
def test_a_derivative_that_decides_by_data_is_refused() -> None:
    def func(x: Tensor) -> Tensor:
        return x.scatter_reduce(0, torch.tensor([0, 0, 1]), torch.ones(3), "prod")

    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(capture(func, (x,))(x).sum(), x, create_graph=True)
    with pytest.raises(DataDependentError, match="derivative of order 2 of a captured program branches on the value"):
        first.sum().backward()


def test_what_has_no_gradient_leaves_the_history_of_what_it_is_written_to() -> None:
    """To autograd the tensor is then still what it was computed as, also where a gradient is a function of it."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        x.logical_or_(torch.ones(3))
        return (x * weight).sum()

    def derivatives(function: Callable[..., Any]) -> list[Tensor]:
        leaf, weight = torch.full((3,), 2.0, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
        x = leaf * 3
        (first,) = torch.autograd.grad(function(x, weight), weight, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), leaf)]

    leaf = torch.ones(3, requires_grad=True)
    program = capture(run, (leaf * 1, torch.ones(3, requires_grad=True)))
    torch.testing.assert_close(derivatives(program), derivatives(run))
    assert derivatives(run)[1].sum() == 9


@pytest.mark.parametrize("write", [Tensor.logical_not_, lambda y: y.fill_(3)], ids=["logical_not_", "fill_"])
@pytest.mark.parametrize("requires", [False, True], ids=["plain", "requires gradients"])
def test_a_tensor_whose_memory_another_wrote_keeps_its_history(write: Callable[[Tensor], Any], requires: bool) -> None:
    """Autograd misses a write through a tensor that is no view of this one: the value is new, the history old."""

    def run(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        write(y)
        return (x * weight).sum()

    def arguments() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        leaf, weight, memory = (
            torch.full((3,), 2.0, requires_grad=True),
            torch.ones(3, requires_grad=True),
            torch.ones(3),
        )
        x, y = (torch.empty(0).set_(memory.untyped_storage(), 0, (3,), (1,)) for _ in range(2))
        x.mul_(leaf)
        return leaf, (x, y.mul_(leaf) if requires else y, weight)

    def derivatives(function: Callable[..., Any]) -> list[Tensor]:
        leaf, given = arguments()
        (first,) = torch.autograd.grad(function(*given), given[2], create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), leaf)]

    program = capture(run, arguments()[1])
    torch.testing.assert_close(derivatives(program), derivatives(run))
    assert derivatives(run)[1].sum() == 3


def test_gradients_that_are_computed_from_nothing_have_derivatives() -> None:
    def run(x: Tensor) -> None:
        x.ne_(torch.ones(3))

    def derivatives(function: Callable[..., Any]) -> list[Any]:
        leaf, tangent = torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True)
        x = leaf * leaf
        function(x)
        (first,) = torch.autograd.grad(x, leaf, tangent, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), [leaf, tangent], allow_unused=True, materialize_grads=True)]

    program = capture(run, (torch.ones(3, requires_grad=True) * 1,))
    torch.testing.assert_close(derivatives(program), derivatives(run))


def test_gradients_require_gradients_as_in_eager_where_autograd_missed_a_write() -> None:
    def run(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        y.add_(1)
        return (x * weight).sum()

    def requires(function: Callable[..., Any]) -> list[bool]:
        leaves, memory = [torch.ones(3, requires_grad=True) for _ in range(3)], torch.ones(3)
        x, y = (torch.empty(0).set_(memory.untyped_storage(), 0, (3,), (1,)).mul_(leaf) for leaf in leaves[:2])
        result = function(x, y, leaves[2])
        return [one.requires_grad for one in torch.autograd.grad([result, y.sum()], leaves, create_graph=True)]

    leaf, memory = torch.ones(3, requires_grad=True), torch.ones(3)
    x, y = (torch.empty(0).set_(memory.untyped_storage(), 0, (3,), (1,)).mul_(leaf) for _ in range(2))
    assert requires(run) == [True, False, True]
    assert requires(capture(run, (x, y, leaf))) == [True, False, True]


def test_what_a_mask_was_computed_from_is_kept_where_the_call_writes_it() -> None:
    """No gradient flows through a mask; the next order computes it again."""

    def run(x: Tensor) -> Tensor:
        positive = x[x > 0]
        x.sub_(1)
        return positive

    found = []
    for way in (run, capture(run, (torch.ones(6, requires_grad=True) * torch.arange(-2.0, 4.0),))):
        leaf = torch.ones(6, requires_grad=True)
        result = way(leaf * torch.arange(-2.0, 4.0))
        tangent = torch.ones_like(result, requires_grad=True)
        (gradient,) = torch.autograd.grad(result, leaf, tangent, create_graph=True)
        found.append((gradient, *torch.autograd.grad(gradient.square().sum(), tangent)))
    torch.testing.assert_close(*found)


def test_what_nobody_reads_but_draws_beyond_an_input_is_no_part_of_a_second_derivative() -> None:
    """A draw from the whole storage of an input stays, for the numbers that come after it; the input is not held."""

    def program(w: Tensor, x: Tensor) -> Tensor:
        x.resize_((23, 1))
        x.bernoulli_(0.5)
        x.fill_(3)
        return w**3

    def inputs() -> tuple[Tensor, Tensor]:
        whole = torch.zeros(47).untyped_storage()
        return torch.ones(2, requires_grad=True), torch.empty(0).set_(whole, 0, (8, 3), (6, 2))

    w, x = inputs()
    call = capture(program, inputs(), remove="mutations_and_views")
    (gradient,) = torch.autograd.grad(call(w, x).sum(), w, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), w)[0].tolist() == [6, 6]
