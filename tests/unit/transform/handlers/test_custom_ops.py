"""Custom operators: those that write, those that give nothing, gradients through them.

Of those that write: optional arguments, lists, arguments that share elements, what they return. In direct use they run
on the program's own tensors; in a graph they stand in `auto_functionalized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.utils import autograd_not_implemented
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from functionalize import UnsupportedMutationError, UnsupportedProgramError, capture, functionalize
from functionalize.verify import assert_equivalent, assert_functional
from tests.support.graphs import MODES, REMOVES, operators, trace

NAMESPACE = "functionalize_custom_ops"
EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
ops: Any = getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(f"{NAMESPACE}::accumulate", mutates_args=("total",))
def accumulate(x: Tensor, total: Tensor) -> Tensor:
    total.add_(x)
    return x * 2


@accumulate.register_fake
def _(x: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{NAMESPACE}::count_calls", mutates_args=("calls",))
def count_calls(calls: Tensor, x: Tensor) -> Tensor:
    calls.add_(1)
    return x.clone()


@count_calls.register_fake
def _(calls: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{NAMESPACE}::clear", mutates_args=("x", "y"))
def clear(x: Tensor, y: Tensor | None = None) -> None:
    x.zero_()
    if y is not None:
        y.fill_(7)


@torch.library.custom_op(f"{NAMESPACE}::raise_all", mutates_args=("xs",))
def raise_all(xs: list[Tensor], by: float) -> None:
    for index, x in enumerate(xs):
        x.add_(by + index)


@torch.library.custom_op(f"{NAMESPACE}::both", mutates_args=("a", "b"))
def both(a: Tensor, b: Tensor) -> None:
    a.add_(1)
    b.mul_(2)


@torch.library.custom_op(f"{NAMESPACE}::double_rows", mutates_args=("out",))
def double_rows(x: Tensor, out: Tensor) -> None:
    for source, target in zip(x, out, strict=True):
        target.copy_(source * 2)


@torch.library.custom_op(f"{NAMESPACE}::scale", mutates_args=("a",))
def scale(a: Tensor, n: int, text: str = "x", *, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    a.mul_(factor)
    return a + n, a.sum()


@scale.register_fake
def _(a: Tensor, n: int, text: str = "x", *, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), a.new_empty(())


@torch.library.custom_op(f"{NAMESPACE}::unknown", mutates_args="unknown")
def unknown(a: Tensor, b: Tensor) -> None:
    b.add_(a)


@torch.library.custom_op(f"{NAMESPACE}::pieces", mutates_args=("a",))
def pieces(a: Tensor) -> list[Tensor]:
    a.add_(1)
    return [a + 1, a * 2]


@torch.library.custom_op(f"{NAMESPACE}::without_formula", mutates_args=())
def without_formula(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin()


@without_formula.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{NAMESPACE}::note", mutates_args=())
def note(x: Tensor) -> None:
    NOTED.append(("note", x.sum().item()))


@note.register_fake
def _(x: Tensor) -> None:
    return None


NOTED: list[tuple[str, float]] = []


def fill(x: Tensor, out: Tensor | None = None) -> Tensor:
    if out is not None:
        out.copy_(x * 2)
    return x + 1


def fill_each(x: Tensor, outs: list[Tensor | None] | None = None) -> Tensor:
    for number, out in enumerate(outs or ()):
        if out is not None:
            out.add_(x * (number + 2))
    return x + 1


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:

        def define(schema: str, kernel: Callable[..., Any], key: str, *tags: Any) -> None:
            library.define(schema, tags=tags)
            library.impl(schema.partition("(")[0], kernel, key)

        explicit = "CompositeExplicitAutograd"
        define("plus_(Tensor(a!) x, Scalar s) -> Tensor(a!)", lambda x, s: x.add_(s), explicit)
        define("tagged_(Tensor(a!) x, Scalar s) -> Tensor(a!)", lambda x, s: x.add_(s), explicit, torch.Tag.inplace)
        define("twice(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: out.copy_(x * 2), explicit)
        define("tail(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1)[1:], explicit)
        define("plus(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: x.add_(y) * y, "CompositeImplicitAutograd")
        define("fill(Tensor x, Tensor(a!)? out=None) -> Tensor", fill, explicit)
        define("fill_named(Tensor x, *, Tensor(a!)? out=None) -> Tensor", lambda x, *, out=None: fill(x, out), explicit)
        define("fill_each(Tensor x, Tensor(a!)[]? outs=None) -> Tensor", fill_each, explicit)
        define("fill_some(Tensor x, Tensor(a!)?[] outs) -> Tensor", fill_each, explicit)
        for name, key in FOLLOWED.items():
            define(f"{name}(Tensor x, Tensor y) -> Tensor", lambda x, y: (x * y).sin(), key)
        library.impl("fallthrough", torch.library.fallthrough_kernel, "Autograd")
        define("scale_by(Tensor(a!) x, Tensor y) -> ()", lambda x, y: (x.mul_(y), None)[1], "CPU")
        define("log(Tensor x, str name) -> ()", lambda x, name: NOTED.append((name, x.sum().item())), explicit)
        define("tick() -> ()", lambda: NOTED.append(("tick", 0)), explicit)
        for name in ("fill", "fill_named", "fill_each", "fill_some", *FOLLOWED):
            torch.library.register_fake(f"{NAMESPACE}::{name}", lambda x, *_, **__: torch.empty_like(x), lib=library)
        for name in ("scale_by", "log", "tick"):
            torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *_: None, lib=library)
        yield


FOLLOWED = {"of_cpu": "CPU", "of_all": "CompositeExplicitAutograd", "fallthrough": "CPU"}


def numbers(*size: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)


PROGRAMS: list[Any] = []


def program(*inputs: Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(func: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(pytest.param(func, inputs, id=func.__name__))
        return func

    return register


@program(numbers(3), numbers(3))
def views_and_inputs(x: Tensor, total: Tensor) -> Any:
    rows = torch.ones(2, 3)
    first = accumulate(x, total)
    accumulate(x, rows[1])
    clear(rows[0], first[1:])
    clear(total[:1])
    return first, rows, total + 1


@program(numbers(2, 3))
def lists(x: Tensor) -> Any:
    y = x + 1
    raise_all([y[0], y[1], x[0]], 2.0)
    raise_all([], 1.0)
    return y


@program(numbers(2, 3))
def two_views_of_one_base(x: Tensor) -> Any:
    y = x + 0
    both(y[0], y[1])
    both(y[:, 0], y[:, 1])
    return y


@program(numbers(2, 3))
def a_base_and_its_view(x: Tensor) -> Any:
    y = x + 0
    both(y, y[0])
    both(y[1], y.t())
    return y


@program(numbers(2, 3))
def one_tensor_twice(x: Tensor) -> Any:
    y = x + 0
    both(y, y)
    both(x, x)
    return y


@program(numbers(4))
def overlapping_parts_of_an_input(x: Tensor) -> Any:
    both(x[1:], x[:-1])
    return x * 1


@program(numbers(5))
def a_list_that_overlaps(x: Tensor) -> Any:
    y = x + 0
    raise_all([y[1:], x[:2], y[:-1], y], 1.0)
    return y


@program(numbers(3, 4))
def several_results(x: Tensor) -> Any:
    a, b = scale(x.t()[1:], 3, factor=3.0)
    a.add_(1)
    return a, b, *scale(x, 1, "z")


@program(numbers(3, 4))
def into_an_out_argument(x: Tensor) -> Any:
    out = torch.empty(2, 4)
    double_rows(x[:2], out)
    double_rows(x[:1], x[2:])
    return out


@program(numbers(3))
def what_is_written_is_unknown(x: Tensor) -> Any:
    y = x + 1
    unknown(x, y)
    return y


@program(numbers(3, 4))
def a_view(x: Tensor) -> Any:
    y = x + 1
    z = ops.tail(y)
    z.add_(1)
    return y, z


@program(numbers(3, 4))
def a_composite(x: Tensor) -> Any:
    y = x + 1
    z = ops.plus(y[0], x[0])
    ops.plus(x[1], z)
    return y, z


@program(numbers(3, 2))
def a_tag_that_says_in_place(x: Tensor) -> Any:
    y = x + 1
    z = ops.tagged_(y[0], 2)
    z.mul_(2)
    return y, z, ops.tagged_(x, 1)


@program(numbers(3))
def between_autograd(x: Tensor) -> Any:
    leaf, total = torch.ones(3, requires_grad=True), torch.zeros(3)
    accumulate(x, total)
    (leaf * total).sum().backward()
    return leaf.grad, total


@program(numbers(3))
def elements_of_many_positions(x: Tensor) -> Any:
    clear(x[:1].expand(3))
    return x


@program(numbers(3, 2))
def in_inference_mode(x: Tensor) -> Any:
    with torch.inference_mode():
        y = x + 1
        clear(y[0])
        accumulate(x[0], y[1])
        return y


@program(numbers(2, 3))
def optional_arguments_left_out(x: Tensor) -> Any:
    results = ops.fill(x), ops.fill(x, None), ops.fill_named(x), ops.fill_each(x), ops.fill_each(x, None)
    return *results, ops.fill_each(x, []), ops.fill_some(x, [None])


@program(numbers(2, 3))
def optional_arguments_given(x: Tensor) -> Any:
    rows = torch.zeros(5, 2, 3)
    found = ops.fill(x + 1, x), ops.fill(x, rows[0]), ops.fill_named(x, out=rows[1]), ops.fill_each(x, [rows[2]])
    return *found, ops.fill_some(x, [None, rows[3], rows[4]]), rows


@program(numbers(3))
def a_list_of_which_some_overlap(x: Tensor) -> Any:
    rows = torch.zeros(4, 3)
    ops.fill_each(x, [rows[0], rows[0], rows[2]])
    ops.fill_some(x, [rows[1], None, rows[1], rows[3]])
    return rows


@WHILE
@EITHER
@pytest.mark.parametrize(("func", "inputs"), PROGRAMS)
def test_programs(func: Callable[..., Any], inputs: tuple[Tensor, ...], mode: Any, remove: str) -> None:
    assert_equivalent(func, *inputs, remove=remove, tracing_mode=mode)


@EITHER
def test_graphs_hold_the_operator_in_auto_functionalized(remove: str) -> None:
    plain = operators(trace(views_and_inputs, numbers(3), numbers(3), remove=remove))
    shared = operators(trace(one_tensor_twice, numbers(2, 3), remove=remove))
    assert plain.count("auto_functionalized") == 4 and shared.count("auto_functionalized_v2") == 2


def returns_what_it_writes(x: Tensor) -> Any:
    y = x + 1
    z = ops.plus_(y[0], 2)
    z.mul_(2)
    return y, z


def writes_out_and_returns_it(x: Tensor) -> Any:
    y = x + 1
    ops.twice(x[0], out=y[1]).add_(1)
    return y


def returns_a_list(x: Tensor) -> Any:
    y = x * 1
    found = pieces(y[0])
    found[0].add_(1)
    return found, y


def reads_what_it_writes(x: Tensor) -> Any:
    y = x + 1
    double_rows(y[:-1], y[1:])
    return y


def two_dtypes(x: Tensor) -> Any:
    y = x + 1
    both(y, y.view(torch.int32))
    return y


NO_FORM: dict[Callable[..., Any], str] = {
    returns_what_it_writes: "returns the tensor that it writes",
    writes_out_and_returns_it: "returns the tensor that it writes",
    returns_a_list: "return tensors or nothing",
    reads_what_it_writes: "on a copy of the tensor that it writes",
    two_dtypes: "one base of one dtype",
}


@EITHER
@pytest.mark.parametrize("func", NO_FORM)
def test_without_a_form_in_graphs(func: Callable[..., Any], remove: str) -> None:
    assert_equivalent(func, numbers(3, 4), remove=remove)
    for mode in ("real", "fake"):
        with pytest.raises(UnsupportedMutationError, match=NO_FORM[func]):
            make_fx(functionalize(func, remove=remove), tracing_mode=mode)(numbers(3, 4))


@EITHER
@WHILE
def test_results_have_the_strides_that_eager_gives(mode: Any, remove: str) -> None:
    def f(x: Tensor, calls: Tensor) -> Any:
        y = count_calls(calls, x.t())
        flat = y.view(-1) if y.is_contiguous() else y.t().view(-1)
        flat[1:4].mul_(2)
        return y, [int(n) for n in y.stride()]

    assert_equivalent(f, numbers(3, 4), torch.zeros(1), remove=remove, tracing_mode=mode)


@EITHER
def test_optional_arguments_leave_functional_graphs(remove: str) -> None:
    for func in (optional_arguments_left_out, optional_arguments_given):
        program = capture(func, (numbers(2, 3),), remove=remove)
        assert_functional(program.graph_module, remove)
        x, y, z = numbers(2, 3), numbers(2, 3), numbers(2, 3)
        expected = func(x), x
        torch.testing.assert_close((program(y), y), expected, rtol=0, atol=0)
        torch.testing.assert_close((program.to_exported_program().module()(z), z), expected, rtol=0, atol=0)
    compiled: Any = torch.compile(optional_arguments_left_out, backend="functionalize")
    torch.testing.assert_close(compiled(numbers(2, 3)), optional_arguments_left_out(numbers(2, 3)))


# Gradients through operators without a formula

NO_FORMULA = "autograd has no formula"
# Of eager, which differentiates what the kernels call.
WARNS = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")


def leaves() -> tuple[Tensor, Tensor]:
    return torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, 0.25], requires_grad=True)


def through(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: getattr(ops, name)(x * 2, y) * 3


def written(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    ops.scale_by(z, y)
    return z * 3


FUNCTIONS = {name: through(name) for name in FOLLOWED} | {"scale_by": written}


@WARNS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_without_a_formula_are_refused_in_graphs(name: str) -> None:
    func, inputs = FUNCTIONS[name], leaves()
    expected = torch.autograd.grad(func(*inputs).sum(), inputs)

    def step(x: Tensor, y: Tensor) -> Any:
        return torch.autograd.grad(func(x, y).sum(), (x, y))

    torch.testing.assert_close(torch.autograd.grad(functionalize(func)(*inputs).sum(), inputs), expected)
    torch.testing.assert_close(functionalize(step)(*inputs), expected)
    torch._dynamo.reset()
    for call in (capture(func, inputs), torch.compile(func, backend="functionalize")):
        result = call(*inputs)
        torch.testing.assert_close(result, func(*inputs))
        assert result.requires_grad
        with pytest.raises(UnsupportedProgramError, match=f"{name}.*{NO_FORMULA}") as raised:
            result.sum().backward()
        assert "test_custom_ops.py" in str(raised.value) and "register_autograd" in str(raised.value)
    for trace_step in (
        lambda: capture(step, inputs),
        lambda: make_fx(functionalize(step), tracing_mode="fake")(*inputs),
    ):
        with pytest.raises(UnsupportedProgramError, match=NO_FORMULA):
            trace_step()


@WARNS
def test_only_results_of_such_operators_have_no_gradients() -> None:
    def func(x: Tensor, y: Tensor) -> Any:
        z = x * 1
        ops.scale_by(z, y)
        with torch.no_grad():
            factor = ops.of_cpu(x, y)
        seen = ops.of_cpu(x.detach(), y.detach()) * x
        return (x * y * factor).sum() + seen.sum(), ops.of_cpu(x, y)[0], z, without_formula(x, y), ops.of_all(x, y) > 0

    inputs = leaves()
    expected = torch.autograd.grad(func(*inputs)[0], inputs)
    torch._dynamo.reset()
    for call in (capture(func, inputs), torch.compile(func, backend="functionalize")):
        results, eager = call(*inputs), func(*inputs)
        assert [one.requires_grad for one in results] == [one.requires_grad for one in eager]
        torch.testing.assert_close(results, eager)
        torch.testing.assert_close(torch.autograd.grad(results[0], inputs), expected)
        for number, text in ((1, NO_FORMULA), (2, NO_FORMULA), (3, "no autograd formula was registered")):
            with pytest.raises(RuntimeError, match=text):
                results[number].sum().backward()


def test_errors_that_operators_raise_in_their_backward() -> None:
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        library.define("raising(Tensor x) -> Tensor")
        library.impl("raising", lambda x: x.sin(), "CPU")
        library.impl("raising", autograd_not_implemented(ops.raising.default, deferred_error=True), "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::raising", torch.empty_like, lib=library)

        def func(x: Tensor) -> Any:
            return ops.raising(x), without_formula(x, x), x * 2

        x = torch.tensor([1.0, 2.0], requires_grad=True)
        torch._dynamo.reset()
        alone: list[Any] = [lambda x: (ops.raising(x),), lambda x: (without_formula(x, x),)]
        for number, one in enumerate(alone):
            for call in (func, capture(func, (x,)), torch.compile(func, backend="functionalize"), capture(one, (x,))):
                results = call(x)
                text = ("Autograd not implemented for .*raising", "no autograd formula was registered")[number]
                with pytest.raises(RuntimeError, match=text):
                    results[number if len(results) > 1 else 0].sum().backward()
                if len(results) > 1:
                    torch.testing.assert_close(torch.autograd.grad(results[2].sum(), x)[0], torch.full((2,), 2.0))


@WARNS
def test_a_formula_or_detached_arguments_help() -> None:
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        for name, autograd in (("helped", None), ("helped_below", torch.library.fallthrough_kernel)):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x.sin(), "CPU")
            if autograd is not None:
                library.impl(name, autograd, "Autograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", torch.empty_like, lib=library)
            op, x = getattr(ops, name), torch.tensor([1.0, 2.0], requires_grad=True)
            with pytest.raises(UnsupportedProgramError, match=NO_FORMULA):
                capture(op, (x,))(x).sum().backward()
            capture(lambda x, op=op: op(x.detach()) * x, (x,))(x).sum().backward()
            torch.testing.assert_close(x.grad, x.detach().sin())
            torch.library.register_autograd(
                f"{NAMESPACE}::{name}",
                lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
                lib=library,
            )
            torch.testing.assert_close(torch.autograd.grad(capture(op, (x,))(x).sum(), x)[0], x.detach().cos())


# Operators that give nothing


def noting(x: Tensor) -> Tensor:
    ops.log(x, "given")
    y = x * 2
    note(y)
    y = y.sin()
    ops.log(y[0], "row")
    ops.tick()
    return y


def noting_and_writing(x: Tensor) -> Tensor:
    y = noting(x)
    y.add_(1)
    note(y)
    x.mul_(2)
    ops.log(x[0], "written")
    return y


def noting_gradients(x: Tensor) -> Tensor:
    gradient = torch.autograd.grad(noting(x).sum(), x)[0]
    ops.log(gradient, "gradient")
    return gradient


def noting_again(x: Tensor) -> Any:
    return torch.autograd.grad(checkpoint(noting, x, use_reentrant=False).sum(), x)


def dropping(x: Tensor) -> Tensor:
    ops.log(x, "given")
    return torch.nn.functional.dropout(x * 2, 0.5)


def noted(call: Callable[..., Any], *args: Any) -> list[tuple[str, float]]:
    NOTED.clear()
    call(*args)
    return list(NOTED)


ONCE = [(noting, False), (noting_and_writing, False), (noting, True), (noting_gradients, True), (dropping, True)]


@EITHER
@pytest.mark.parametrize(("func", "requires_grad"), ONCE)
def test_what_gives_nothing_is_called_once_in_order(func: Any, requires_grad: bool, remove: str) -> None:
    def given() -> Tensor:
        return numbers(2, 3).requires_grad_(requires_grad)

    expected = noted(func, given())
    torch._dynamo.reset()
    calls: list[Any] = [functionalize(func, remove=remove), capture(func, (given(),), remove=remove)]
    assert len(NOTED) == len(expected)  # a capture notes nothing
    calls.append(torch.compile(func, backend="functionalize"))
    for call in (*calls, calls[1]):
        assert noted(call, given()) == expected
    with torch.no_grad():
        assert func is noting_gradients or noted(calls[1], given().detach().clone()) == expected


def test_a_checkpointed_region_calls_what_gives_nothing_as_often_as_in_eager() -> None:
    x = numbers(2, 3).requires_grad_()
    expected = noted(noting_again, x)
    assert noted(capture(noting_again, (x,)), x) == expected and len(expected) > 4
    result = capture(lambda x: checkpoint(noting, x, use_reentrant=False), (x,))(x)
    with pytest.raises(UnsupportedMutationError, match="in a backward"):
        result.sum().backward()


def test_what_gives_nothing_is_called_once_for_all_derivatives() -> None:
    x = numbers(2, 3).requires_grad_()
    result = capture(noting, (x,))(x)
    NOTED.clear()
    gradient = torch.autograd.grad(result.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(gradient.sum(), x)[0], -4 * (2 * x).detach().sin())
    assert not NOTED


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_exported_programs_call_what_gives_nothing() -> None:
    expected = noted(noting_and_writing, numbers(2, 3))
    program = capture(noting_and_writing, (numbers(2, 3),))
    exported = program.to_exported_program()
    for form in (exported, exported.run_decompositions(), program.to_core_aten()):
        assert noted(form.module(), numbers(2, 3)) == expected


def test_what_gives_nothing_is_called_once_whatever_branch_a_call_takes() -> None:
    """What decides is computed ahead."""

    def branches(x: Tensor) -> Tensor:
        ops.log(x, "given")
        return x + 1 if x.sum() > 0 else x - 1

    def in_one_branch(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        ops.log(x, "negative")
        return x - 1

    for run in (branches, in_one_branch):
        program = capture(run, (numbers(3).requires_grad_(),))
        for sign in (1, -1, -1, 1):
            x = (sign * numbers(3)).requires_grad_()
            assert noted(program, x) == noted(run, x)
            torch.testing.assert_close(program(x), run(x))
        assert len(program.variants) == 2


def test_what_gives_nothing_is_refused_where_it_might_be_called_twice() -> None:
    def branches(x: Tensor) -> Tensor:
        ops.log(x, "given")
        return x + 1 if torch.rand(()) > 0.5 else x - 1

    with pytest.raises(UnsupportedProgramError, match=r"branches on .*\n    at   .*test_custom_ops.py.*ops\.log"):
        capture(branches, (numbers(3),))
    chosen = capture(lambda x: torch.where(x.sum() > 0, branchless(x), x - 1), (numbers(3),))
    assert noted(chosen, -numbers(3)) == [("given", -6)]


def branchless(x: Tensor) -> Tensor:
    ops.log(x, "given")
    return x + 1


class Counted(torch.nn.Module):
    """Branches on a number of its own, which a call compares before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 3

    def forward(self, x: Tensor) -> Tensor:
        ops.log(x, "given")
        self.times -= 1
        return x * self.times if self.times > 1 else x


def test_numbers_of_state_may_decide_beside_what_gives_nothing() -> None:
    program = capture(Counted(), (numbers(3),))
    for _ in range(3):
        assert noted(program, numbers(3)) == [("given", 6)]


class NotingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        note(gradient)
        return gradient * 2


def test_what_gives_nothing_is_refused_in_a_captured_backward() -> None:
    x = numbers(3).requires_grad_()
    result = capture(lambda x: NotingBackward.apply(x).sin(), (x,))(x)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedMutationError, match=r"in a backward(.|\n)*note\(gradient\)"):
        result.sum().backward()

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(NotingBackward.apply(x).sin().sum(), x)  # type: ignore[no-untyped-call]

    assert noted(capture(step, (x,)), x) == noted(step, x)


def test_a_call_that_fails_is_not_run_again_where_something_was_noted() -> None:
    def func(x: Tensor) -> Any:
        ops.log(x, "given")
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x

    program = capture(func, (torch.eye(2),))
    assert noted(program, torch.eye(2)) == [("given", 2)]
    NOTED.clear()
    with pytest.raises(RuntimeError, match="cholesky"):
        program(-torch.eye(2))
    assert NOTED == [("given", -2)]


def test_torchs_own_operators_that_give_nothing_stay_as_they_are() -> None:
    def func(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all())
        return x + 1

    program = capture(func, (numbers(3),))
    torch.testing.assert_close(program(numbers(3)), numbers(3) + 1)
    assert not program.specialization.metadata.graph.acts


@torch.library.custom_op(f"{NAMESPACE}::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op(f"{NAMESPACE}::chosen_without_fake", mutates_args=())
def chosen_without_fake(x: Tensor) -> Tensor:
    return x[x > 0]


@torch.library.custom_op(f"{NAMESPACE}::of_wrong_fake", mutates_args=())
def of_wrong_fake(x: Tensor) -> Tensor:
    return x * 2


@of_wrong_fake.register_fake
def _(x: Tensor) -> Tensor:
    raise ValueError("nobody has written this")


@torch.library.custom_op(f"{NAMESPACE}::of_reading_fake", mutates_args=())
def of_reading_fake(x: Tensor) -> Tensor:
    return x.new_zeros(int(x.sum()))


@of_reading_fake.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_zeros(int(x.sum()))


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("kernel_alone(Tensor x) -> Tensor")
_library.impl("kernel_alone", lambda x: x * 2, "CPU")


def _catches(x: Tensor) -> Any:
    try:
        return ops.kernel_alone(x)
    except RuntimeError:
        return x * 3


REFUSED_ON_FAKES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "custom_op": (lambda x: without_fake(x), "without_fake has no fake implementation"),
    "of a size by data": (lambda x: chosen_without_fake(x), "chosen_without_fake has no fake implementation"),
    "Library.impl": (lambda x: ops.kernel_alone(x), "kernel_alone.default has no fake implementation"),
    "caught": (_catches, "kernel_alone.default has no fake implementation"),
    "a fake that raises": (lambda x: of_wrong_fake(x), "of_wrong_fake raises ValueError: nobody has written this"),
    "a fake that reads": (lambda x: of_reading_fake(x), "of_reading_fake reads the values of a tensor"),
}


@pytest.mark.parametrize("route", ["capture", "exported", "fake", "symbolic"])
@pytest.mark.parametrize("program", REFUSED_ON_FAKES)
def test_operators_that_fake_tensors_cannot_run(program: str, route: Any) -> None:
    f, says = REFUSED_ON_FAKES[program]
    with pytest.raises(UnsupportedProgramError, match=rf"{says}[\s\S]*test_custom_ops.py:\d+ in [\s\S]*torch.library."):
        if route in ("capture", "exported"):
            capture(f, (torch.ones(2),), on_data="raise" if route == "exported" else "decide").to_exported_program()
        else:
            make_fx(functionalize(f), tracing_mode=route)(torch.ones(2))


def test_what_the_refusal_advises() -> None:
    @torch.library.custom_op(f"{NAMESPACE}::registered_later", mutates_args=())
    def later(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(UnsupportedProgramError, match=r"torch\.library\.register_fake"):
        capture(lambda x: later(x), (torch.ones(2),))
    torch.library.register_fake(f"{NAMESPACE}::registered_later", torch.empty_like)
    assert capture(lambda x: later(x), (torch.ones(2),))(torch.ones(2)).tolist() == [2, 2]


def test_errors_of_kernels_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="nobody"):
        torch.ops.functionalize_custom_ops.of_wrong_fake(torch.ones(2, device="meta"))
    assert functionalize(_catches)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("read", [lambda x: x, lambda x: x[1:]], ids=["the same", "a part"])
def test_an_operator_that_reads_what_it_writes_is_refused(read: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedMutationError, match="reads another argument with the same elements"):
        capture(lambda x: count_calls(x, read(x)), (torch.ones(3),))
