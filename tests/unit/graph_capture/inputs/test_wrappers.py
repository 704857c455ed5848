"""Wrappers in captured programs: each kind in each role does what eager does, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from functionalize import InputMismatchError, UnsupportedProgramError, capture
from functionalize.verify import assert_functional
from tests.support.wrappers import (
    GRADIENTS,
    KINDS,
    MESHES,
    ROLES,
    SHARED,
    Int8Weight,
    Program,
    compare,
    numbers,
    one_rank,
    sharded,
    shared,
    two,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*prototype.*:UserWarning", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with one_rank() as mesh:
        yield mesh


def check(make: Callable[[], tuple[Program, Any]], calls: int = 3, backward: bool = False) -> Any:
    """Compare eager with a captured program; ``make``: gives the program and its argument."""
    program = compare(make, capture, calls, backward=backward)
    assert_functional(program.graph_module)
    assert not any(isinstance(value, Tensor) for value in vars(program.graph_module).values())
    return program


class Named(Tensor):
    """A subclass that says nothing of what it holds."""


@pytest.mark.parametrize(
    ("kind", "role"),
    [(kind, role) for kind in KINDS for role in ROLES if not (kind == "masked" and role.startswith("written"))],
)
def test_each_kind_in_each_role_does_what_eager_does(kind: str, role: str, mesh: Any) -> None:
    check(lambda: ROLES[role](KINDS[kind]()))


@pytest.mark.parametrize("role", [role for role in ROLES if role.startswith("written")])
def test_a_masked_tensor_that_is_written_holds_others_afterwards_and_is_refused(role: str) -> None:
    with pytest.raises(UnsupportedProgramError, match="is a MaskedTensor, and the program changes its `_masked_data`"):
        check(lambda: ROLES[role](KINDS["masked"]()))


@pytest.mark.parametrize("role", ["argument", "parameter", "buffer"])
def test_a_class_that_does_not_say_what_it_holds_is_refused(role: str) -> None:
    func, x = ROLES[role](numbers(4, 4).as_subclass(Named))
    name = "x" if role == "argument" else "held"
    with pytest.raises(UnsupportedProgramError, match=rf"`{name}` is a .*, a subclass[\s\S]*__tensor_flatten__"):
        capture(func, (x,))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_outside_have_the_classes_and_metadata_of_eager(name: str, mesh: Any) -> None:
    check(GRADIENTS[name], backward=True)


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
    "tensor parallel, accumulated gradients": lambda: train(
        lambda p: torch.optim.SGD(p, lr=0.001), zeros=None, clip=True
    ),
    "tensor parallel, AdamW, clipped": lambda: train(lambda p: torch.optim.AdamW(p, lr=0.01), clip=True),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_steps_update_parameters_that_are_wrappers(name: str, mesh: Any) -> None:
    check(TRAININGS[name])


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


def test_batches_of_other_sizes_go_through_sharded_layers(mesh: Any) -> None:
    """DTensor compares what redistributions cost with infinity: costs of symbols decide nothing."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    program = capture(layers, (numbers(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for size in (3, 5):
        gradients = []
        for function in (layers, program):
            layers.zero_grad()
            function(numbers(size, 4)).pow(2).sum().backward()
            parameters: list[Any] = [*layers.parameters()]
            gradients.append([parameter.grad.to_local() for parameter in parameters])
        torch.testing.assert_close(gradients[1], gradients[0])
    assert not program.variants[0].decisions


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
