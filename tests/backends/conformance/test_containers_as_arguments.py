"""Containers among arguments, on every exporter's route: computed as eager computes with them, or refused.

An exported program and JAX take each container that ``capture`` takes; a file takes those that it can name.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture
from functionalize._torch import pytree

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("jax")
from functionalize.backends import jax as ours
from functionalize.backends import onnx
from functionalize.backends.jax import stablehlo

Container = Callable[[Tensor, Tensor], Any]


class Pair(NamedTuple):
    first: Any
    second: Any


# What makes a container, and the files that refuse it.
CONTAINERS: dict[str, tuple[Container, set[str]]] = {
    "tuple": (lambda x, y: (x, [y]), set()),
    "empty": (lambda x, y: (x, [], {}, (), y), set()),
    "dict": (lambda x, y: {"b": x, "a": y}, set()),
    "ordered": (lambda x, y: OrderedDict(b=x, a=y), set()),
    "integer keys": (lambda x, y: {2: x, 1: y}, {"stablehlo"}),
    "bool keys": (lambda x, y: {True: x, False: y}, {"stablehlo"}),
    "tuple keys": (lambda x, y: {(1, "a"): x, (0, "b"): y}, {"onnx", "stablehlo"}),
    "mixed keys": (lambda x, y: {"b": x, 1: [y]}, {"stablehlo"}),
    "dtype keys": (lambda x, y: {torch.int64: x, torch.float32: y}, {"onnx", "stablehlo"}),
    "ordered, tuple keys": (lambda x, y: OrderedDict([((1, 0), x), ((0, 1), y)]), {"onnx", "stablehlo"}),
    "defaultdict": (lambda x, y: defaultdict(list, b=x, a=y), {"stablehlo"}),
    "deque": (lambda x, y: {"d": deque([x, deque([y], maxlen=2)])}, {"stablehlo"}),
    "named tuple": (lambda x, y: Pair(x, {"b": y}), {"onnx", "stablehlo"}),
    "return type": (lambda x, y: torch.return_types.max((x, y)), {"onnx", "stablehlo"}),
}


def program(given: Any) -> Tensor:
    """Adds up the tensors, each with a weight of its own."""
    leaves = pytree.tree_leaves(given)
    return sum((weight * leaf for weight, leaf in enumerate(leaves, 2)), torch.zeros(2))


def _by_torch(make: Container, route: Callable[..., Any]) -> Tensor:
    result: Tensor = route(make(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])))
    return result


def _by_jax(make: Container, route: Callable[..., Any]) -> Tensor:
    arrays = pytree.tree_map(ours.from_torch, make(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0])))
    return ours.to_torch(route(arrays))


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CONTAINERS)
def test_arguments_in_containers(name: str, tmp_path: Path) -> None:
    make, refusing = CONTAINERS[name]
    want = _by_torch(make, program)
    captured = capture(program, (make(torch.zeros(2), torch.ones(2)),))
    pure = captured.to_jax()
    step = pure.jit()
    assert torch.equal(_by_torch(make, captured), want)
    assert torch.equal(_by_torch(make, captured.to_exported_program().module()), want)
    assert torch.equal(_by_jax(make, lambda given: pure(pure.initial_state, given)[1]), want)
    assert torch.equal(_by_jax(make, lambda given: step(pure.initial_state, given)[1]), want)
    assert torch.equal(_by_jax(make, ours.jaxify(program)), want)
    if "onnx" in refusing:
        with pytest.raises(UnsupportedExportError, match="files cannot name"):
            captured.to_onnx(tmp_path / "program.onnx")
    else:
        assert torch.equal(_by_torch(make, onnx.load(captured.to_onnx(tmp_path / "program.onnx"))), want)
    if "stablehlo" in refusing:
        with pytest.raises(UnsupportedProgramError, match=r"the program takes a|files cannot name"):
            captured.to_stablehlo(tmp_path / "program.stablehlo")
    else:
        loaded = stablehlo.load(captured.to_stablehlo(tmp_path / "program.stablehlo"))
        assert torch.equal(_by_jax(make, loaded), want)


def test_an_argument_called_self_is_called_by_its_name(tmp_path: Path) -> None:
    def function(self: Tensor, other: Tensor) -> Tensor:
        return self.mul(3) - other

    named = {"self": torch.ones(2), "other": torch.zeros(2)}
    loaded = onnx.load(capture(function, (), named).to_onnx(tmp_path / "program.onnx"))
    assert torch.equal(loaded(self=torch.ones(2), other=torch.ones(2)), torch.full((2,), 2.0))
