"""Exported programs of wrappers take, keep and return the tensors inside: dicts of them, or state under their names."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from functionalize import UnsupportedProgramError, capture
from functionalize._torch.subclasses.wrappers import Wrapping
from tests.support.wrappers import Int8Weight, Quantized, int8, nested_two, numbers, two

Exporter = Callable[[Any], Any]
EXPORTERS: dict[str, Exporter] = {
    "ExportedProgram": lambda program: program.to_exported_program(),
    "core ATen": lambda program: program.to_core_aten(),
}


class Named(Quantized):
    """Its results by name, with the weight."""

    def forward(self, x: Tensor) -> Any:
        y, kept = super().forward(x)
        return {"y": y, "kept": kept, "weight": self.layer.weight}


@pytest.mark.parametrize("name", EXPORTERS)
def test_state_is_the_tensors_inside_by_their_names(name: str) -> None:
    module, eager, x = Named(), Named(), numbers(2, 4)
    for other in (module, eager):
        other.layer.bias = nn.Parameter(numbers(4))
    exported = EXPORTERS[name](capture(module, (x,)))
    assert {"layer.weight.q", "layer.weight.scale", "kept.a", "kept.b"} < exported.state_dict.keys()
    assert exported.state_dict["layer.weight.q"].dtype is torch.int8
    run = exported.module()
    for _ in range(2):
        wanted, results = eager(x), run(x)
        torch.testing.assert_close(results["y"], wanted["y"])
        torch.testing.assert_close(results["kept"], {"a": wanted["kept"].a, "b": wanted["kept"].b})
        assert results["weight"]["q"].equal(wanted["weight"].q)
    assert run.get_buffer("kept.a").equal(eager.kept.a) and module.kept.a.equal(two(2, 4).a)


@pytest.mark.parametrize("name", EXPORTERS)
def test_arguments_and_results_are_dicts_of_the_tensors_inside(name: str) -> None:
    def program(pair: Any, plain: Tensor) -> Any:
        return [pair["first"] * plain, pair["first"], plain + 1]

    exported = EXPORTERS[name](capture(program, ({"first": two(2, 3)}, numbers(2, 3))))
    parts = {"a": numbers(2, 3) + 1, "b": numbers(2, 3) + 2}
    arguments = ({"first": parts}, numbers(2, 3))
    product, same, rest = exported.module()(*arguments)
    assert product["a"].equal(parts["a"] * numbers(2, 3)) and product["b"].equal(parts["b"] * numbers(2, 3))
    assert same["a"].equal(parts["a"]) and rest.equal(numbers(2, 3) + 1)
    placeholders = [node.name for node in exported.graph.find_nodes(op="placeholder")]
    assert placeholders == ["pair_first_a", "pair_first_b", "plain"]


def test_arguments_that_hold_wrappers_are_nested_dicts() -> None:
    exported = capture(lambda x: x * 2, (nested_two(),)).to_exported_program()
    result = exported.module()(
        {"a": {"a": numbers(4, 4), "b": numbers(4, 4)}, "b": {"a": numbers(4, 4), "b": numbers(4, 4)}}
    )
    assert result["b"]["a"].equal(2 * numbers(4, 4))


def test_written_arguments_are_written_by_their_parts() -> None:
    def program(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x is y, y * 1

    x = two(2, 3)
    exported = capture(program, (x, x)).to_exported_program()
    parts = {"a": numbers(2, 3), "b": numbers(2, 3)}
    same, y = exported.module()(parts, parts)
    assert same and parts["a"].equal(2 * numbers(2, 3)) and y["b"].equal(2 * numbers(2, 3))


def test_gradients_go_to_the_tensors_inside() -> None:
    module: Any = nn.Linear(4, 2, bias=False)
    module.weight = nn.Parameter(two(2, 4))
    exported = capture(module, (numbers(3, 4),)).to_exported_program()
    run = exported.module()
    result = run(numbers(3, 4))
    (result["a"].sum() + 2 * result["b"].sum()).backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in run.named_parameters()}
    torch.testing.assert_close(gradients["weight.b"], 2 * gradients["weight.a"])


def test_an_exported_program_is_saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.export.save(capture(Named(), (numbers(2, 4),)).to_exported_program(), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert loaded.state_dict["layer.weight.q"].equal(int8().q)
    assert loaded.module()(numbers(2, 4))["kept"]["a"].equal(two(2, 4).a * 0.5)


def test_a_jagged_argument_is_its_values_and_offsets() -> None:
    jagged = torch.nested.nested_tensor([numbers(n, 4) for n in (2, 3)], layout=torch.jagged)
    layer = nn.Linear(4, 4)
    exported = capture(layer, (jagged,)).to_exported_program()
    names = [path[0] for path in Wrapping.of(jagged).paths]
    parts = {name: getattr(jagged, name) for name in names}
    torch.testing.assert_close(exported.module()(parts)["_values"], layer(jagged).values())


def left_in_objects() -> Any:
    weight, held = nn.Parameter(two(4)), {"x": two(4)}

    def trains(x: Tensor) -> None:
        (x * weight).sum().backward()

    def replaces(x: Tensor) -> None:
        held["x"] = held["x"] * x

    return {"the gradient of the state `weight` is a TwoTensor": trains, "leaves in an object is a TwoTensor": replaces}


@pytest.mark.parametrize("said", left_in_objects())
def test_what_is_left_in_objects_is_refused(said: str) -> None:
    program = capture(left_in_objects()[said], (numbers(4),))
    with pytest.raises(UnsupportedProgramError, match=said):
        program.to_exported_program()


def test_a_program_of_other_arguments_is_exported_as_it_was_captured() -> None:
    def program(x: Any) -> Any:
        return x * 2 if isinstance(x, Int8Weight) else x + 1

    for made, result in ((int8(), int8() * 2), (TwoTensor(numbers(2), numbers(2)), numbers(2) + 1)):
        exported = capture(program, (made,)).to_exported_program()
        parts = {path[0]: getattr(made, path[0]) for path in Wrapping.of(made).paths}
        given = exported.module()(parts)
        assert (given["a"] if isinstance(given, dict) else given).equal(result)
