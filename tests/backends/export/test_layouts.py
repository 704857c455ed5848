"""Programs whose results depend on how their arguments lie in memory: exported, they refuse what lies otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture
from tests.support.routes import ONNX, SAVED, Route

Program = Callable[..., Any]


def in_one_piece(x: Tensor) -> Tensor:
    return x + 1 if x.is_contiguous() else x + 2


def steps(x: Tensor) -> Tensor:
    return x * x.stride(0)


def written_flat(x: Tensor) -> Tensor:
    x.reshape(-1).add_(1)
    return x * 2


def written_by_operator(x: Tensor) -> Tensor:
    torch.ops.aten.reshape.default(x, [-1]).add_(1)
    return x * 2


def written_copy(x: Tensor) -> Tensor:
    flat = x.contiguous()
    flat.mul_(3)
    return flat - x


def written_between(x: Tensor) -> Tensor:
    flat = torch.flatten(x)
    x.add_(1)
    return flat * 2


def place(x: Tensor) -> Tensor:
    return x.add(x.storage_offset())


def by_places(x: Tensor) -> Tensor:
    return x[1:].as_strided((2,), (1,), 1) + 1


def square() -> Tensor:
    return torch.arange(4.0).view(2, 2)


def turned() -> Tensor:
    return torch.tensor([[0.0, 2.0], [1.0, 3.0]]).t()


def part() -> Tensor:
    return torch.arange(12.0).narrow(0, 4, 4)


def whole() -> Tensor:
    return torch.arange(4.0)


def images(memory_format: torch.memory_format) -> Tensor:
    return torch.arange(16.0).view(1, 4, 2, 2).contiguous(memory_format=memory_format)


CASES: dict[str, tuple[Program, Callable[[], Tensor], Callable[[], Tensor]]] = {
    "contiguous": (in_one_piece, square, turned),
    "turned": (in_one_piece, turned, square),
    "strides": (steps, square, turned),
    "reshape": (written_flat, square, turned),
    "reshape of turned": (written_flat, turned, square),
    "reshape by its operator": (written_by_operator, square, turned),
    "copy": (written_copy, square, turned),
    "flatten": (written_between, square, turned),
    "channels last": (
        written_flat,
        lambda: images(torch.channels_last),
        lambda: images(torch.contiguous_format),
    ),
    "offset": (place, whole, part),
    "offset of a part": (place, part, whole),
    "as_strided": (by_places, whole, part),
}


both = pytest.mark.parametrize("route", [SAVED, ONNX])


@both
@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_arguments_that_lie_otherwise_are_refused(name: str, route: Route, tmp_path: Path) -> None:
    program, example, other = CASES[name]
    called = route(capture(program, (example(),)), tmp_path)
    for _ in range(2):
        mine, eager = example(), example()
        torch.testing.assert_close(called(mine), program(eager), rtol=0, atol=0)
        torch.testing.assert_close(mine, eager, rtol=0, atol=0)
    untouched = other()
    with pytest.raises((RuntimeError, ValueError), match="another memory layout"):
        called(untouched)
    torch.testing.assert_close(untouched, other(), rtol=0, atol=0)


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_torch_takes_programs_with_assertions_apart(name: str) -> None:
    """Its own assertion of strides holds for no fake tensor."""
    program, example, _ = CASES[name]
    called = capture(program, (example(),)).to_exported_program().run_decompositions().module()
    mine, eager = example(), example()
    torch.testing.assert_close(called(mine), program(eager), rtol=0, atol=0)
    torch.testing.assert_close(mine, eager, rtol=0, atol=0)


@both
def test_other_programs_take_arguments_that_lie_in_any_way(route: Route, tmp_path: Path) -> None:
    def program(x: Tensor) -> Tensor:
        return (x.reshape(-1) * 2).view(2, 2) + x

    called = route(capture(program, (square(),)), tmp_path)
    torch.testing.assert_close(called(turned()), program(turned()), rtol=0, atol=0)


@both
def test_sizes_that_differ(route: Route, tmp_path: Path) -> None:
    called = route(capture(written_flat, (torch.zeros(3, 2),), dynamic_shapes=({0: torch.export.Dim("n")},)), tmp_path)
    mine, eager = torch.ones(5, 2), torch.ones(5, 2)
    torch.testing.assert_close(called(mine), written_flat(eager), rtol=0, atol=0)
    torch.testing.assert_close(mine, eager, rtol=0, atol=0)
    with pytest.raises((RuntimeError, ValueError), match="another memory layout"):
        called(torch.ones(2, 5).t())


@both
def test_arguments_that_are_taken_apart_begin_where_they_did(route: Route, tmp_path: Path) -> None:
    """Both share memory that nobody writes: what is exported takes each by itself."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        return y.mul(y.storage_offset()) + x.sum()

    def arguments() -> tuple[Tensor, Tensor]:
        memory = torch.arange(6.0)
        return memory[:4], memory[2:]

    torch.testing.assert_close(route(capture(program, arguments()), tmp_path)(*arguments()), program(*arguments()))


def test_memory_that_an_argument_does_not_show_is_named() -> None:
    def program(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.as_strided((1,), (1,), 3) + 1

    memory = torch.arange(4.0)
    captured = capture(program, (torch.arange(4.0)[::2], memory[:2], memory[1:]))
    for export in (captured.to_exported_program, captured.to_core_aten):
        with pytest.raises(
            UnsupportedProgramError, match=r"outside the argument\n    at .*as_strided\(\(1,\), \(1,\), 3\)"
        ):
            export()


def test_onnx_has_no_elements_before_those_of_a_tensor(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    captured = capture(by_places, (part(),))
    with pytest.raises(UnsupportedExportError, match="has the storage offset 4"):
        captured.to_onnx(tmp_path / "program.onnx")
    assert not list(tmp_path.iterdir())


@both
def test_what_nobody_writes_may_share_memory(route: Route, tmp_path: Path) -> None:
    """An argument that is written has its own memory; the others share some, as they may."""

    def program(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        z.add_(1)
        return x.sum() + y + z

    def arguments() -> tuple[Tensor, Tensor, Tensor]:
        memory = torch.arange(6.0)
        return memory[:4], memory[2:], torch.zeros(4)

    mine, eager = arguments(), arguments()
    torch.testing.assert_close(route(capture(program, arguments()), tmp_path)(*mine), program(*eager))
    torch.testing.assert_close(mine, eager)


def test_other_dtypes_are_refused() -> None:
    """A conversion to what a tensor is already is in no graph, as ``torch.export`` asserts as well."""
    module = capture(lambda x: x.to(torch.float32) * 2, (whole(),)).to_exported_program().module()
    torch.testing.assert_close(module(whole()), whole() * 2)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        module(whole().double())


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_random_arguments_lie_as_they_must(name: str, tmp_path: Path) -> None:
    program, example, _ = CASES[name]
    called: Any = ONNX(capture(program, (example(),)), tmp_path)
    args, _ = called.random_arguments(0)
    assert args[0].size() == example().size()
    assert called(*args).size() == program(example()).size()


def test_gradients_that_are_left_at_arguments_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    def program(x: Tensor) -> Tensor:
        (x * weight).sum().backward()
        return x.detach() * 2

    captured = capture(program, (whole().requires_grad_(),))
    with pytest.raises(UnsupportedExportError, match="leaves a gradient at the input `x`"):
        captured.to_exported_program()
    pytest.importorskip("jax", reason="needs jax")
    with pytest.raises(UnsupportedProgramError, match=r"the input `x`\n    why  .*arrays have no gradients"):
        captured.to_jax()


def test_what_arrays_are_hidden_in_is_refused() -> None:
    pytest.importorskip("jax", reason="needs jax")
    for program in (lambda x: lambda: x * 2, lambda x: {x * 2}):
        called = capture(program, (whole(),)).to_jax()
        with pytest.raises(UnsupportedProgramError, match=r"returns an object of class (function|set)"):
            called(called.initial_state, whole().numpy())


def test_assertions_are_of_the_argument_that_was_asked() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        made = torch.ones(2, 2)
        made.add_(1)
        return in_one_piece(x) * y * made._version

    exported = capture(program, (square(), square())).to_exported_program().module()
    assert torch.equal(exported(square(), turned()), program(square(), turned()))
    with pytest.raises(RuntimeError, match="`x` has another memory layout"):
        exported(turned(), square())
