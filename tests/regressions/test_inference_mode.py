"""Programs in inference mode: inference tensors, versions, what requires gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.tracing import meta_cache
from tests.support.graphs import REMOVES

SPAN = torch.arange(6.0)
Program = Callable[..., Any]


def test_input_that_becomes_an_inference_tensor_and_goes_back_to_its_storage() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.data = x + 1
        x.set_(y)  # type: ignore[call-overload]
        return x.add_(1)

    def inputs() -> tuple[Tensor, Tensor]:
        memory = torch.arange(12.0)
        return memory[:4], memory[4:8]

    program = capture(f, inputs(), on_guard_failure="recapture")
    for mode in (torch.no_grad, torch.inference_mode):
        (x, y), (same, other) = inputs(), inputs()
        with mode():
            f(x, y)
            program(same, other)
        assert (same.is_inference(), other.is_inference()) == (x.is_inference(), y.is_inference())
        assert torch.equal(same, x)
        assert same.data_ptr() == other.data_ptr()


def test_outputs_of_one_storage_are_inference_tensors_as_in_eager() -> None:
    def f(x: Tensor) -> Any:
        moved: Any = x.view(1, 8)
        moved.set_(moved.clone())
        return moved, moved.expand(2, 8), moved.clone()

    x = torch.randn(8)
    with torch.inference_mode():
        ours, eager = capture(f, (x,))(x), f(x)
    assert [one.is_inference() for one in ours] == [one.is_inference() for one in eager] == [False, False, True]


def test_a_view_with_a_history_in_inference_mode() -> None:
    base = torch.arange(6.0, requires_grad=True) * 1
    view = base.as_strided((3,), (1,), 2)
    with torch.inference_mode():
        captured = capture(lambda x: x * 2, (view,))
        assert torch.equal(captured(view), view * 2)


def test_unsafe_pieces_have_versions_of_their_own_in_inference_mode() -> None:
    def program(x: Tensor) -> None:
        x.unsafe_chunk(2)[0].add_(1)

    example, x, wanted = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    with torch.inference_mode():
        capture(program, (example,))(x)
        program(wanted)
    assert torch.equal(x, wanted)
    assert x._version == wanted._version == 0


def test_a_mask_makes_one_size_where_nothing_is_cached() -> None:
    meta_cache.clear()  # in inference mode fake tensors do not remember what size their data gave
    with torch.inference_mode():
        captured = capture(lambda x: x[x > 0], (torch.ones(2),))
        assert torch.equal(captured(torch.arange(2.0)), torch.ones(1))


def test_unsafe_pieces_require_gradients_in_inference_mode_as_views_do() -> None:
    with torch.inference_mode(False):
        example, x = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    with torch.inference_mode():
        captured = capture(lambda x: x.unsafe_chunk(2)[0], (example,))
        assert captured(x).requires_grad == x.unsafe_chunk(2)[0].requires_grad


def data_after_a_copy(x: Tensor) -> Tensor:
    x.set_(x.clone())  # type: ignore[call-overload]
    view = x.select(0, 0)
    x.data = x + 1
    return view


def a_view_set_to_a_copy(x: Tensor) -> Tensor:
    view = x.view(2, 3)
    view.set_(view.clone())  # type: ignore[call-overload]
    return view


@pytest.mark.parametrize("program", [data_after_a_copy, a_view_set_to_a_copy, lambda x: x * 2, lambda x: x[1:]])
@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])
def test_inference_tensors_are_those_of_eager(program: Callable[[Tensor], Tensor], inference: bool) -> None:
    def made() -> Tensor:
        with torch.inference_mode(inference):
            return SPAN.clone()

    captured = capture(program, (SPAN.clone(),), on_guard_failure="recapture")
    with torch.inference_mode():
        want, got = program(made()), captured(made())
        assert want.is_inference() == got.is_inference()
        assert torch.equal(want, got)


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("view", [torch.view_as_complex, lambda x: x.view(-1), lambda x: x.view(torch.int32)])
def test_views_require_gradients_in_inference_mode_as_in_eager(remove: str, view: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        want, got = view(x), capture(view, (x,), remove=remove)(x)
    assert (got.requires_grad, got.is_inference()) == (want.requires_grad, want.is_inference())
