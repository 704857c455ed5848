"""Wrappers in captured programs: each kind in each role does what eager does, or is refused by name.

Each program is called three times, in eager and captured, on objects that are built alike. Compared are results,
arguments, parameters, gradients, their classes and metadata, and which of them are the same object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from functionalize import InputMismatchError, UnsupportedProgramError, capture
from functionalize._torch.subclasses.wrappers import Wrapping, is_wrapper_class
from functionalize.verify import assert_functional
from tests.support.wrappers import Int8Weight, int8, nested_two, numbers, two

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*prototype.*:UserWarning", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
Program = Callable[[Any], Any]
MESHES: list[Any] = []  # of the process group


class Named(Tensor):
    """A subclass that says nothing of what it holds."""


def jagged() -> Any:
    return torch.nested.nested_tensor([numbers(n, 4) for n in (2, 3)], layout=torch.jagged)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    MESHES.append(dist.device_mesh.init_device_mesh("cpu", (1,)))
    yield MESHES[0]
    MESHES.clear()
    dist.destroy_process_group()


def sharded() -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(numbers(4, 4), MESHES[0], [Shard(0)])


def partial_sum() -> Any:
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(numbers(4, 4), MESHES[0], [Partial()])


KINDS: dict[str, Callable[[], Any]] = {
    "two tensors": lambda: two(4, 4),
    "two tensors of two tensors": nested_two,
    "not contiguous": lambda: two(4, 4).t(),
    "int8 weight": int8,
    "jagged": jagged,
    "sharded": sharded,
    "partial sum": partial_sum,
}
REFUSED_KINDS: dict[str, Callable[[], Any]] = {
    "named": lambda: numbers(4, 4).as_subclass(Named),
    "masked": lambda: masked_tensor(numbers(4, 4), numbers(4, 4) > 0),
}


def opened(tree: Any) -> list[Any]:
    """Values that show all of a pytree: classes, metadata, plain tensors."""
    seen = list[Any]()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and is_wrapper_class(type(leaf)):
            wrapping = Wrapping.of(leaf)
            metadata = wrapping.context if leaf.layout is torch.strided else None
            seen += [wrapping.cls, str(metadata), leaf.requires_grad, leaf.is_leaf]
            seen += [part.detach().clone() for part in wrapping.parts_of(leaf)]
        elif isinstance(leaf, Tensor):
            seen += [leaf.requires_grad, leaf.detach().clone()]
        else:
            seen.append(leaf)
    return seen


def check(make: Callable[[], tuple[Program, Any]], calls: int = 3, backward: bool = False) -> Any:
    """Compare eager with a captured program; ``make``: gives the program and its argument."""
    histories = []
    for captured in (False, True):
        torch.manual_seed(0)
        func, x = make()
        program: Any = capture(func, (x,)) if captured else func
        history: list[Any] = []
        for _ in range(calls):
            result = program(x)
            if backward:
                differentiable = [leaf for leaf in pytree.tree_leaves(result) if leaf.requires_grad]
                ends = [(leaf.values() if leaf.is_nested else leaf).sum() for leaf in differentiable]
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            same = [leaf is other for leaf in pytree.tree_leaves(result) for other in pytree.tree_leaves(x)]
            tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
            history += [*opened(result), *opened(x), *opened([leaf.grad for leaf in tensors]), same]
            if isinstance(func, nn.Module):
                history += opened([[parameter, parameter.grad] for parameter in func.parameters()])
                history += opened(list(func.buffers()))
        histories.append(history)
    eager, ours = histories
    assert len(eager) == len(ours)
    for wanted, got in zip(eager, ours, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(got, wanted, check_stride=True, equal_nan=True)
        else:
            assert got == wanted
    assert_functional(program.graph_module)
    assert not any(isinstance(value, Tensor) for value in vars(program.graph_module).values())
    return program


class Holder(nn.Module):
    def __init__(self, held: Any, as_parameter: bool, requires_grad: bool, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._forward = forward
        if as_parameter:
            self.held = nn.Parameter(held, requires_grad=requires_grad)
        else:
            self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self.held, x)


def add_in_place(x: Any) -> Any:
    with torch.no_grad():
        if isinstance(x, Int8Weight):
            return x.copy_(Int8Weight.of(x.dequantize() * 0.5))
        return x.mul_(0.5)


ROLES: dict[str, Callable[[Any], tuple[Program, Any]]] = {
    "argument": lambda made: (lambda x: x * 2, made),
    "argument in containers": lambda made: (lambda x: {"sum": x["a"][0] * 2, "same": x["a"]}, {"a": (made, 3)}),
    "parameter": lambda made: (Holder(made, True, False, lambda held, x: held * 2), numbers(4)),
    "buffer": lambda made: (Holder(made, False, False, lambda held, x: held * 2), numbers(4)),
    "result": lambda made: (lambda x: (x, x.detach(), x * 1), made),
    "written argument": lambda made: (add_in_place, made),
    "written buffer": lambda made: (Holder(made, False, False, lambda held, x: add_in_place(held) is held), numbers(4)),
    "written parameter": lambda made: (Holder(made, True, True, lambda held, x: add_in_place(held) * 1), numbers(4)),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_in_each_role_does_what_eager_does(kind: str, role: str, mesh: Any) -> None:
    check(lambda: ROLES[role](KINDS[kind]()))


@pytest.mark.parametrize("role", ["argument", "parameter", "buffer"])
@pytest.mark.parametrize("kind", REFUSED_KINDS)
def test_a_class_that_does_not_say_what_it_holds_is_refused(kind: str, role: str) -> None:
    func, x = ROLES[role](REFUSED_KINDS[kind]())
    name = "x" if role == "argument" else "held"
    with pytest.raises(UnsupportedProgramError, match=rf"`{name}` is a .*, a subclass[\s\S]*__tensor_flatten__"):
        capture(func, (x,))


GRADIENTS: dict[str, Callable[[], tuple[Program, Any]]] = {
    "of an argument": lambda: (lambda x: (x * x).sin(), two(2, 3).requires_grad_()),
    "of a plain argument": lambda: (lambda x: x * two(2, 3), numbers(2, 3).requires_grad_()),
    "of two results": lambda: (lambda x: (x * 2, (x * x).sum()), two(2, 3).requires_grad_()),
    "of an unused argument": lambda: (lambda x: x["a"] * 2, {k: two(2).requires_grad_() for k in "ab"}),
    "of a parameter": lambda: (
        Holder(two(4, 4), True, True, lambda held, x: nn.functional.linear(x, held)),
        numbers(2, 4),
    ),
    "beside an int8 weight": lambda: (
        Holder(int8(), True, False, lambda held, x: nn.functional.linear(x, held)),
        numbers(2, 4).requires_grad_(),
    ),
    "through a view": lambda: (lambda x: (x.view(-1), x[0]), two(2, 3).requires_grad_()),
    "beside a detached result": lambda: (lambda x: (x.detach() + 1, x * 2), two(2, 3).requires_grad_()),
    "of nested wrappers": lambda: (lambda x: (x * x).exp(), nested_two().requires_grad_()),
    "of a jagged product": lambda: (
        Holder(numbers(4, 4), True, True, lambda held, x: nn.functional.linear(x, held).relu()),
        jagged(),
    ),
    "of a shard": lambda: (lambda x: (x * 2).full_tensor(), sharded().requires_grad_()),
    "of a partial sum": lambda: (lambda x: x.to_local() * 2, partial_sum().requires_grad_()),
    "of a result that is a partial sum": lambda: (lambda x: x + x, partial_sum().requires_grad_()),
    "of a shard made inside": lambda: (made_inside, numbers(4, 4).requires_grad_()),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_outside_have_the_classes_and_metadata_of_eager(name: str, mesh: Any) -> None:
    check(GRADIENTS[name], backward=True)


def made_inside(x: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x * 2, MESHES[0], [Shard(0)])


def train(optimizer: Callable[..., Any], zeros: bool | None = False, clip: bool = False) -> tuple[Program, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = [nn.Linear(4, 8, bias=clip), nn.Linear(8, 4, bias=clip)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    if clip:
        parallelize_module(model, MESHES[0], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        for layer in layers:
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach().clone(), layer.weight.detach() * 2))
    steps = optimizer(model.parameters())

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            if zeros is not None:
                steps.zero_grad(set_to_none=not zeros)
            loss: Tensor = self.model(x).pow(2).mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            steps.step()
            return loss.detach()

    return Step(), numbers(2, 4)


TRAININGS: dict[str, Callable[[], tuple[Program, Any]]] = {
    "SGD with momentum": lambda: train(lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)),
    "AdamW into zeros": lambda: train(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), zeros=True),
    "accumulated gradients": lambda: train(lambda parameters: torch.optim.SGD(parameters, lr=0.001), zeros=None),
    "tensor parallel, AdamW, clipped": lambda: train(lambda p: torch.optim.AdamW(p, lr=0.01), clip=True),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_steps_update_parameters_that_are_wrappers(name: str, mesh: Any) -> None:
    check(TRAININGS[name])


def shared(x: Any) -> Any:
    x[0].add_(1)
    return x[1] * 2


SHARED: dict[str, Callable[[], Any]] = {
    "one wrapper twice": lambda: [two(2, 3)] * 2,
    "wrappers of one tensor": lambda: (lambda x: [x, TwoTensor(x.a, x.b)])(two(2, 3)),
    "a wrapper and its part": lambda: (lambda x: [x, x.a])(two(2, 3)),
    "a wrapper and what its parts are views of": lambda: (lambda x: [TwoTensor(x[:2], x.clone()[:2]), x])(numbers(4)),
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_is_shared_by_parts(name: str) -> None:
    program = check(lambda: (shared, SHARED[name]()))
    first, second = SHARED[name](), SHARED[name]()
    with pytest.raises(InputMismatchError, match=r"share memory|are the same tensor"):
        program([first[0], second[1]])


def test_the_graph_takes_the_parts_by_their_names() -> None:
    linear: Any = nn.Linear(2, 2, bias=False)
    linear.weight = nn.Parameter(two(2, 2))
    with torch.no_grad():
        program = capture(linear, (two(3, 2),))
    placeholders = [node.target for node in program.graph.find_nodes(op="placeholder")]
    assert placeholders == ["p_weight_a", "p_weight_b", "input_a", "input_b"]
    assert {"weight.a", "weight.b"} <= {spec.target for spec in program.signature.input_specs}
    assert [*program.state] == placeholders[:2] and program.state["p_weight_b"].equal(linear.weight.b)
    assert re.search(r"inputs    input_a, input_b\n  state     2 tensors", repr(program))


def test_a_call_is_compared_by_class_and_metadata(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate

    program = capture(lambda x: x * 2, (sharded(),))
    with pytest.raises(InputMismatchError, match="the input `x` has other metadata than when"):
        program(sharded().redistribute(mesh, [Replicate()]))
    with pytest.raises(InputMismatchError, match=r"the class of the input `x` is .*TwoTensor"):
        program(two(4, 4))
    with pytest.raises(InputMismatchError, match=r"the class of the input `x` is .*Tensor"):
        program(numbers(4, 4))
    again = capture(lambda x: x * 2, (sharded(),), on_guard_failure="recapture")
    assert again(sharded().redistribute(mesh, [Replicate()])).placements == (Replicate(),)
    assert again(two(4, 4)).b.equal(2 * two(4, 4).b)


def test_what_a_class_plans_is_not_recorded(mesh: Any) -> None:
    """DTensor runs an operator on fake tensors of the whole size, to learn how the result is sharded."""
    program = capture(lambda x: torch.relu(x @ x), (sharded(),))
    names = [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]
    assert names == ["mm.default", "relu.default"]


def test_data_dependent_numbers_for_sharded_operators_decide_nothing(mesh: Any) -> None:
    def scaled(x: Any, t: Tensor) -> Any:
        return x.lerp(x * t.item(), t.item())

    program = capture(scaled, (sharded(), torch.tensor(0.5)))
    for number in (0.5, 0.25, 0.75):
        wanted = scaled(sharded(), torch.tensor(number)).to_local()
        torch.testing.assert_close(program(sharded(), torch.tensor(number)).to_local(), wanted)
    assert len(program.variants) == 1


def test_what_a_class_of_the_programs_own_reads_is_compared() -> None:
    class Scaled(Int8Weight):
        factor = 1.0

        def dequantize(self) -> Tensor:
            return super().dequantize() * Scaled.factor

    program = capture(lambda x: x * 1, (Scaled.of(numbers(4, 4)),), on_guard_failure="recapture")
    before = program(Scaled.of(numbers(4, 4)))
    Scaled.factor = 2.0
    assert program(Scaled.of(numbers(4, 4))).equal(2 * before)


def test_changes_of_more_than_data_are_refused() -> None:
    def replaced(x: Any) -> None:
        x.a = x.a + 1

    with pytest.raises(UnsupportedProgramError, match="`x` is a TwoTensor, and the program changes its `a`"):
        capture(replaced, (two(2),))
    weight = numbers(2).requires_grad_()
    with pytest.raises(UnsupportedProgramError, match="the program writes a value with a gradient to it"):
        capture(lambda x: x.mul_(weight), (two(2),))
    with pytest.raises(UnsupportedProgramError, match="`x` is a TwoTensor, and has sizes that are symbols"):
        capture(lambda x: x * 2, (two(4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def test_derivatives_of_gradients_are_refused() -> None:
    x = two(2).requires_grad_()
    y = capture(lambda x: (x * x).sum(), (x,))(x)
    with pytest.raises(RuntimeError, match="a derivative of a gradient of a captured program with a TwoTensor"):
        torch.autograd.grad(y, x, create_graph=True)
