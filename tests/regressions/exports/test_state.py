"""State of exported programs that shares memory, is replaced, or is given back."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import (
    UnsupportedExportError,
    UnsupportedProgramError,
    capture,
)
from tests.support.export_programs import made
from tests.support.routes import CORE_ATEN, ONNX, SAVED


def parting(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    state["one"].add_(1)
    state["one"] = state["one"] + x
    return state["one"] + state["other"]


def joining(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    result = state["one"] + state["other"]
    state["one"].add_(x)
    state["other"] = state["one"]
    return result


def viewing(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    state["one"].add_(x)
    result = state["one"] + state["other"]
    state["other"] = state["one"].view(2)
    return result


@pytest.mark.parametrize(("program", "one"), [(parting, True), (joining, False), (viewing, False)])
def test_places_that_a_call_parts_or_joins_and_writes_are_refused(program: Any, one: bool) -> None:
    zeros, other = torch.zeros(2), torch.zeros(2)
    state = {"one": zeros, "other": zeros if one else other}
    with pytest.raises(UnsupportedExportError, match=r"(?s)`state.one` shares memory with other tensors.*clone"):
        capture(lambda x: program(x, state), (torch.ones(2),)).to_exported_program()
    assert state["one"] is zeros and state["other"] is (zeros if one else other) and not zeros.any()


@pytest.mark.parametrize("program", [joining, viewing])
def test_places_that_are_joined_already_are_exported(program: Any) -> None:
    found = []
    for export in (False, True):
        state = {"one": torch.zeros(2), "other": torch.zeros(2)}
        run: Any = functools.partial(program, state=state)
        run(torch.ones(2))
        run = capture(run, (torch.ones(2),)).to_exported_program().module() if export else run
        found.append([run(torch.full((2,), float(n))).tolist() for n in range(3)])
    assert found[0] == found[1]


def test_state_that_is_passed_and_replaced_is_refused() -> None:
    model, _ = made("swap")
    program = capture(model, (model.a,))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedExportError, match="replaces the state `a` by another tensor"):
        program.to_exported_program()


def test_containers_that_are_given_back_are_those_of_the_call_in_jax() -> None:
    jnp, cache = pytest.importorskip("jax.numpy"), {"rows": torch.zeros(2), "unread": torch.ones(2)}

    def keep(x: Tensor, pair: list[Tensor]) -> Any:
        cache["rows"].add_(x)
        pair[0].mul_(2)
        return cache, pair

    program = capture(keep, (torch.ones(2), [torch.ones(2), torch.zeros(2)])).to_jax()
    run, state = program.jit(), program.initial_state
    for number in range(1, 3):
        state, outputs = run(state, jnp.ones(2), [jnp.ones(2), jnp.zeros(2)])
        kept, pair = outputs.returned
        assert [kept["rows"].tolist(), kept["unread"].tolist()] == [[number] * 2, [1.0, 1.0]]
        assert [one.tolist() for one in pair] == [[2.0, 2.0], [0.0, 0.0]]


def test_a_first_call_may_give_back_a_container_of_its_arguments(tmp_path: Path) -> None:
    jnp, layer = pytest.importorskip("jax.numpy"), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)

    def step(given: dict[str, Tensor]) -> Any:
        optimizer.zero_grad()
        layer(given["x"]).sum().backward()
        optimizer.step()
        return given, layer.weight.detach()

    program = capture(step, ({"x": torch.ones(1, 2)},))
    to_jax, module = program.to_jax(), SAVED(program, tmp_path)
    run, state = to_jax.jit(), to_jax.initial_state
    for _ in range(3):
        state, (given, weight) = run(state, {"x": jnp.ones((1, 2))})
        expected = step({"x": torch.ones(1, 2)})[1]
        torch.testing.assert_close(torch.tensor(weight.tolist()), expected)
        torch.testing.assert_close(module({"x": torch.ones(1, 2)})[1], expected)
        assert given["x"].tolist() == [[1.0, 1.0]]


def _doubled(x: Tensor) -> Tensor:
    x.data = x * 2
    return x.sum()


def _counted(x: Tensor) -> Tensor:
    return x * (2 if x._version % 2 else 3)


@pytest.mark.parametrize(
    ("function", "what"),
    [(_doubled, "changes the size, strides or memory of"), (_counted, "reads the version of a tensor")],
)
def test_what_happens_to_arguments_beside_their_values_is_refused(function: Any, what: str) -> None:
    program = capture(function, (torch.arange(4.0)[::2],))
    with pytest.raises(UnsupportedExportError, match=what):
        program.to_exported_program()


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("bits", [False, True])
def test_results_that_reach_beyond_what_they_are_views_of(bits: bool, remove: str) -> None:
    state = nn.Module()
    dtype = torch.complex64 if bits else torch.float32
    state.register_buffer("rows", torch.arange(12).to(dtype)[3:11].view(2, 4))

    def beyond(x: Tensor) -> Tensor:
        rows = state.get_buffer("rows")
        return (rows.conj() if bits else rows).as_strided((2, 2), (2, 1), 8)[:, 0]

    program = capture(beyond, (torch.ones(1),), remove=remove)
    assert program.to_exported_program().module()(torch.ones(1)).tolist() == [8, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_state_that_shares_memory_by_the_core_set(dtype: torch.dtype) -> None:
    """Torch takes no program apart whose state shares memory: each tensor has its own there."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.arange(8.0)
            self.register_buffer("one", memory[:6])
            self.register_buffer("other", memory.view(dtype)[4:6])

        def forward(self) -> Any:
            self.get_buffer("one").as_strided((2,), (1,), 2).mul_(3)
            self.get_buffer("other").add_(1)
            return self.get_buffer("one") * 1, self.get_buffer("other") * 1

    program, eager = capture(Shared(), ()), Shared()
    if dtype is torch.int16:
        with pytest.raises(UnsupportedExportError, match="they share memory, and have different dtypes"):
            program.to_core_aten()
        return
    module = program.to_core_aten().module()
    for _ in range(3):
        assert [one.tolist() for one in module()] == [one.tolist() for one in eager()]


class Gaps(nn.Module):
    """Two buffers in one memory, which has elements that neither shows; reads them, or moves them alone."""

    def __init__(self, reads: bool, dtype: torch.dtype) -> None:
        super().__init__()
        memory, self.reads = torch.arange(16).to(dtype), reads
        self.register_buffer("one", memory[:9].view(3, 3))
        self.register_buffer("other", memory[10:14].view(2, 2).t())

    def forward(self, x: Tensor) -> Any:
        one, other = self.get_buffer("one"), self.get_buffer("other")
        one.as_strided((2, 2), (1, 1), 10).diagonal().add_(1)
        other.mul_(2)
        one.t().add_(x)
        return one * 1, other * 1, one.as_strided((16,), (1,), 0) * 1 if self.reads else one + 1


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_elements_of_shared_memory_that_nobody_shows(remove: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.ones(3, 3, dtype=dtype)
    eager, program = Gaps(False, dtype), capture(Gaps(False, dtype), (x,), remove=remove)
    pytest.importorskip("jax")
    routes = [CORE_ATEN(program), ONNX(program, tmp_path)]
    for _ in range(3):
        expected = [one.tolist() for one in eager(x)]
        assert all([one.tolist() for one in route(x)] == expected for route in routes)
    reading = capture(Gaps(True, dtype), (x,), remove=remove)
    for to in (reading.to_core_aten, lambda: reading.to_onnx(tmp_path / "reading.onnx")):
        with pytest.raises(UnsupportedExportError, match="computes with elements of it outside all of them"):
            to()
    with pytest.raises(UnsupportedProgramError, match="computes with elements of it outside all of them"):
        reading.to_jax()
