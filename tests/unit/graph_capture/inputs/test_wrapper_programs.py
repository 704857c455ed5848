"""Programs of wrappers that AOTAutograd is tested with, and others that users write: as eager, or refused by name.

They write data and metadata of wrappers and of views of them, return these, differentiate them inside and outside, and
update modules and optimizers that hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn import functional as F
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from functionalize import UnsupportedProgramError, capture
from functionalize.verify import assert_functional
from tests.support.wrappers import Holder, Program, compare, nested_two, numbers, opened, two

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit",
    "ignore:It is not recommended to create a MaskedTensor",
    "ignore:.*prototype.*:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@dataclass(frozen=True)
class Case:
    program: Program
    argument: Callable[[], Any]
    backward: bool = False


CASES: dict[str, Case] = {}


def case(argument: Callable[[], Any], *, backward: bool = False) -> Callable[[Program], Program]:
    """Add a function as a program; ``argument``: makes its argument."""

    def add(program: Program) -> Program:
        CASES[program.__name__] = Case(program, argument, backward)
        return program

    return add


def trained(made: Any) -> Any:
    return made.requires_grad_()


def pair() -> Any:
    return [two(3, 3), numbers(3, 3)]


def trained_pair() -> Any:
    return [trained(two(3, 3)), trained(numbers(3, 3))]


# Data, metadata and aliases


@case(trained_pair, backward=True)
def views_of_inputs_beside_results(x: Any) -> Any:
    return x[0].view(-1), x[0].t()[:1], x[1].view(-1), x[0] * x[1]


@case(pair)
def a_view_is_written(x: Any) -> Any:
    view = x[0].view(-1)
    view.mul_(2)
    return view, x[0] + 1, x[0].t(), x[0][1]


@case(pair)
def both_inputs_are_written(x: Any) -> Any:
    x[0].mul_(2)
    x[1].mul_(3)
    return x[0].view(-1), x[0] + x[1]


@case(pair)
def metadata_of_what_is_made(x: Any) -> Any:
    y = x[0] * 1
    y.t_()
    y.mul_(2)
    z = x[0] * 1
    z.resize_(2)
    return y, z, y.unsqueeze_(0).shape


@case(trained_pair, backward=True)
def copies_are_written(x: Any) -> Any:
    a, b = x[0] * 1, x[1] * 1
    a.mul_(2)
    b.mul_(3)
    return a.view(-1), a + b


@case(trained_pair, backward=True)
def gradients_are_off_for_a_part(x: Any) -> Any:
    with torch.no_grad():
        y, z = x[0] * 2, x[0].view(-1)
    return y, z, x[0] * x[1]


@case(lambda: (lambda base: [base[:2], base[1:], base])(two(4, 4)))
def overlapping_views_are_written(x: Any) -> Any:
    x[0].mul_(2)
    return x[1] + 1, x[2] + 1


@case(lambda: (lambda base: [base, base.view(-1)])(trained(two(4, 4))), backward=True)
def a_leaf_and_its_view(x: Any) -> Any:
    return x[0] * x[1].view(4, 4)


@case(lambda: [trained(two(3, 3)), two(3, 3)])
def data_are_replaced(x: Any) -> Any:
    x[0].data = x[1] * 2
    return x[0] * 2


@case(lambda: two(3, 3))
def parts_are_read_and_written(x: Any) -> Any:
    x.a.mul_(2)
    return x + 1, x.b, TwoTensor(x.b, x.a)


@case(lambda: numbers(3, 3))
def one_tensor_is_both_parts(x: Any) -> Any:
    made = TwoTensor(x, x)
    made.mul_(2)
    return made, x + 1


@case(lambda: two(4, 4))
def elements_are_written(x: Any) -> Any:
    x[0] = 5.0
    x[:, 1].add_(1)
    first, second = x.split(2)
    first.mul_(2)
    torch._foreach_mul_([second, x.t()], 2.0)
    result = torch.empty_like(x)
    torch.mul(x, 2, out=result)
    return x.sum(), result


@case(pair)
def copies_between_classes(x: Any) -> Any:
    x[0].copy_(x[1])
    x[1].copy_(x[0] * 2)
    return x[0] + torch.ones(3, 3), torch.zeros_like(x[0]), x[0].new_ones(2), torch.full_like(x[0], 3.0)


def tagged() -> Any:
    made = trained(two(4)) * 1
    made.scale = 3
    return made


@case(tagged)
def somebody_has_set_an_attribute(x: Any) -> Any:
    return x * x.scale


@case(lambda: two(4))
def data_decide(x: Any) -> Any:
    return x * x.b[0].item() if x.a.sum() > 0 else x - 1


@case(lambda: two(4))
def data_give_the_size(x: Any) -> Any:
    return TwoTensor(x.a[x.a > 0], x.b[x.a > 0]), torch.cat([x, x])


@case(lambda: TwoTensor(*(numbers(2, 3, 4, 4).to(memory_format=torch.channels_last) for _ in "ab")))
def another_memory_format(x: Any) -> Any:
    return x * 2, x.mean((2, 3))


# Gradients


@case(lambda: trained(TwoTensor(WrapperSubclass(numbers(3, 3)), two(3, 3))), backward=True)
def wrappers_of_two_classes_inside(x: Any) -> Any:
    return x * x, x.view(-1)[::2]


@case(lambda: [trained(WrapperSubclass(numbers(3, 3))), trained(nested_two())], backward=True)
def results_of_two_classes(x: Any) -> Any:
    return x[0] * 2, (x[1] * x[1]).sin()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@case(lambda: trained(two(3, 3)), backward=True)
def what_backward_needs_is_made_otherwise(x: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 1, lambda saved: saved):
        y = (x * x).sin()
    squared = Square.apply(x)  # type: ignore[no-untyped-call]
    return y, squared, checkpoint(lambda x: (x * x).sin(), x, use_reentrant=False)


@case(lambda: trained(two(3, 3)))
def gradients_inside(x: Any) -> Any:
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda gradient: gradient * 3)
    (first,) = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    y.sum().backward()
    return second, y.grad


@case(lambda: [trained(numbers(3, 3)), two(3, 3)])
def a_plain_leaf_gets_the_gradient_of_a_wrapper(x: Any) -> Any:
    (x[0] * x[1]).sum().backward()


def with_gradient() -> Any:
    made = trained(two(3, 3))
    made.grad = two(3, 3)
    return made


@case(with_gradient)
def gradients_are_added_and_zeroed(x: Any) -> Any:
    (x * x).sum().backward()
    kept = x.grad * 1
    x.grad.zero_()
    (x * x).sum().backward()
    return kept


@case(with_gradient)
def gradients_are_replaced(x: Any) -> Any:
    x.grad = x.detach() * 2
    x.requires_grad_(False)
    return x * 2


@case(lambda: trained(numbers(3, 3)))
def masked_tensors_are_made(x: Any) -> Any:
    made: Any = masked_tensor(x.detach(), x > 0, requires_grad=True)
    made.sum().backward()
    return made.grad, (made.detach() * 2).softmax(-1).mean(1).to_tensor(0.0)


@case(lambda: two(3, 4))
def transforms_of_functions(x: Any) -> Any:
    def squares(x: Any) -> Any:
        return (x * x).sum()

    doubled = torch.vmap(lambda row: row * 2)(x)
    return doubled, torch.func.grad(squares)(x), torch.func.jvp(squares, (x,), (x,))


@pytest.mark.parametrize("name", CASES)
def test_programs_do_what_eager_does(name: str) -> None:
    case = CASES[name]
    program = compare(lambda: (case.program, case.argument()), capture, 2, backward=case.backward)
    assert_functional(program.graph_module)


# Modules that hold wrappers


def training(optimizer: Callable[[Any], Any], *, scaled: bool = False) -> tuple[Program, Any]:
    weight = nn.Parameter(two(4, 4))
    steps = optimizer([weight])
    scaler = torch.amp.GradScaler("cpu") if scaled else None

    def step(held: Any, x: Tensor) -> Tensor:
        steps.zero_grad()
        loss = F.linear(x, held).pow(2).mean()
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_value_([held], 0.1)
            steps.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(steps)
            scaler.update()
        return loss.detach()

    holder = Holder(two(4, 4), True, True, step)
    holder.held = weight
    return holder, numbers(2, 4)


def called_with_others(held: Any, x: Tensor) -> Any:
    layer = nn.Linear(4, 4, bias=False, device="meta")
    return torch.func.functional_call(layer, {"weight": held * 2}, (x,))


def loaded(held: Any, x: Tensor) -> Any:
    module = nn.ParameterDict({"held": held})
    module.load_state_dict({"held": held.detach() * 2})
    return held * x.sum()


def averaged(held: Any, x: Tensor) -> Any:
    return held.lerp_(held * x[0], 0.1) * 1


MODULES: dict[str, Callable[[], tuple[Program, Any]]] = {
    "AdamW, foreach": lambda: training(lambda weights: torch.optim.AdamW(weights, lr=0.01, foreach=True)),
    "AdamW, one by one": lambda: training(lambda weights: torch.optim.AdamW(weights, lr=0.01, foreach=False)),
    "Adafactor": lambda: training(torch.optim.Adafactor),
    "GradScaler": lambda: training(lambda weights: torch.optim.SGD(weights, lr=0.01), scaled=True),
    "functional_call": lambda: (Holder(two(4, 4), True, True, called_with_others), numbers(2, 4)),
    "load_state_dict": lambda: (Holder(two(4, 4), True, True, loaded), numbers(2, 4)),
    "a buffer that averages": lambda: (Holder(nn.Buffer(two(4, 4)), False, False, averaged), numbers(2, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_optimizers_hold_wrappers(name: str) -> None:
    compare(MODULES[name], capture)


def test_a_buffer_is_replaced_by_another_wrapper() -> None:
    class Running(nn.Module):
        held: Any

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", two(4))

        def forward(self, x: Tensor) -> Any:
            self.held = self.held + x
            return self.held * 1

    compare(lambda: (Running(), numbers(4)), capture)


@pytest.mark.parametrize("weight", [lambda: two(4, 4), nested_two])
def test_sizes_of_results_differ_from_call_to_call(weight: Callable[[], Any]) -> None:
    def program(held: Any, x: Tensor) -> Any:
        y = F.linear(x, held)
        return y, y.relu().view(-1), TwoTensor(x * 2, x).t()

    eager, holder = (Holder(weight(), True, True, program) for _ in range(2))
    captured = capture(holder, (numbers(3, 4),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for rows in (3, 5, 2):
        for module in (eager, holder):
            module.zero_grad()
        results = [module(numbers(rows, 4)) for module in (eager, captured)]
        for y, *_ in results:
            (y * y).sum().backward()
        for wanted, result in zip(
            *(opened((each, module.held.grad)) for each, module in zip(results, (eager, holder), strict=True)),
            strict=True,
        ):
            if isinstance(wanted, Tensor):
                torch.testing.assert_close(result, wanted)
            else:
                assert result == wanted


# Nested tensors


def jagged(*lengths: int) -> Any:
    return torch.nested.nested_tensor([numbers(length, 8) for length in lengths], layout=torch.jagged)


NESTED: dict[str, Case] = {
    "a network": Case(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Softmax(-1)), lambda: jagged(2, 3), backward=True
    ),
    "reductions": Case(lambda x: (x.sum(1), x.mean(dim=1), x.to_padded_tensor(0.0), x + x * 2), lambda: jagged(2, 3)),
    "its rows": Case(lambda x: [row * 2 for row in x.unbind()], lambda: jagged(2, 3)),
    "made of values and offsets": Case(
        lambda x: torch.nested.nested_tensor_from_jagged(x[0], x[1]) * 2,
        lambda: [numbers(5, 8), torch.tensor([0, 2, 5])],
    ),
    "made of rows": Case(
        lambda x: torch.nested.as_nested_tensor(x, layout=torch.jagged) * 2, lambda: [numbers(2, 8), numbers(3, 8)]
    ),
}


def test_gradients_go_through_a_nested_tensor_that_the_program_makes() -> None:
    network = nn.Linear(8, 8)

    def network_of(*rows: Tensor) -> Tensor:
        nested: Any = torch.nested.as_nested_tensor([*rows], layout=torch.jagged)
        return network(nested).sin().to_padded_tensor(0.0)  # type: ignore[no-any-return]

    rows = [numbers(length, 8).requires_grad_() for length in (2, 3)]
    captured = capture(network_of, rows)
    ours, eager = captured(*rows), network_of(*rows)
    assert torch.equal(ours, eager)
    weights = [*rows, network.weight]
    gradients = [torch.autograd.grad(padded.sum(), weights) for padded in (ours, eager)]
    assert all(map(torch.equal, *gradients))


def test_the_first_nested_tensor_of_a_process_may_be_made_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nested._internal.nested_tensor, "_dummy_instance", None)
    rows = [numbers(2, 8), numbers(3, 8)]
    captured = capture(NESTED["made of rows"].program, (rows,))
    assert torch.equal(captured(rows).values(), torch.cat(rows) * 2)


@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_do_what_eager_does(name: str) -> None:
    case = NESTED[name]
    compare(lambda: (case.program, case.argument()), capture, 2, backward=case.backward)


# Refusals


class Named(Tensor):
    """A subclass that holds no tensors."""


def computed() -> Any:
    return trained(two(3, 3)) * 1


def attention(x: Any) -> Any:
    heads = x.unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads)


REFUSED: dict[str, Case] = {
    "the program changes its strides": Case(lambda x: x.t_(), lambda: two(3, 3)),
    "the program changes its size": Case(lambda x: x.unsqueeze_(0), lambda: two(3, 3)),
    "writes a value with a gradient to it": Case(lambda x: x.mul_(2), computed),
    "with `as_subclass` is a Named": Case(lambda x: x.as_subclass(Named) * 2, lambda: numbers(3)),
    "has no fake implementation": Case(attention, lambda: jagged(2, 3)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_call_cannot_do_is_refused(said: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=said):
        capture(REFUSED[said].program, (REFUSED[said].argument(),))
