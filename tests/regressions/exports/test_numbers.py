"""Data-dependent numbers and decisions of exported programs: as factors, sizes, slices and state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from functionalize import (
    DataDependentError,
    UnsupportedExportError,
    UnsupportedProgramError,
    capture,
)
from tests.support.routes import SAVED


def test_a_decision_about_a_flag_is_saved_and_loaded() -> None:
    program = capture(lambda x, n: x * 2 if n.item() > 2 else x, (torch.ones(2), torch.tensor(1)))
    module = SAVED(program, Path())
    assert module(torch.ones(2), torch.tensor(2)).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="-> False"):
        module(torch.ones(2), torch.tensor(3))


def test_functions_of_numbers_that_no_graph_has_are_refused() -> None:
    program = capture(lambda x, n: x * math.gamma(n.item()), (torch.ones(2), torch.tensor(0.5)))
    with pytest.raises(UnsupportedExportError, match=r"(?s)gamma of a data-dependent number.*math.gamma\(n.item"):
        program.to_exported_program()


def whole_numbers(x: Tensor, n: Tensor) -> Any:
    """As factors, as a size, and as results."""
    at = n.item()
    return x * round(at) + math.trunc(at), x[: math.floor(at)], math.ceil(at) * 2, round(at)


def test_floats_made_whole_are_saved_and_loaded() -> None:
    x = torch.randn(4, 3)
    module = SAVED(capture(whole_numbers, (x, torch.tensor(2.0))), Path())
    for number in (1.25, 2.5, 3.0):
        expected = whole_numbers(x, torch.tensor(number))
        found = module(x, torch.tensor(number))
        torch.testing.assert_close(found, tuple(map(torch.as_tensor, expected)))


@pytest.mark.parametrize("op", [torch.addmm, torch.baddbmm, torch.addmv])
def test_products_are_scaled_by_data_dependent_numbers(op: Any) -> None:
    x = torch.randn(3, 3)
    args = {torch.addmm: (x, x, x), torch.baddbmm: (x[None],) * 3, torch.addmv: (x[0], x, x[1])}[op]

    def program(n: Tensor, *args: Tensor) -> Any:
        return op(*args, beta=n.item(), alpha=2 * n.item())

    module = capture(program, (torch.tensor(2.0), *args)).to_core_aten().module()
    torch.testing.assert_close(module(torch.tensor(3.0), *args), program(torch.tensor(3.0), *args))


def test_what_torch_cannot_take_apart_is_refused_with_its_line() -> None:
    program = capture(lambda x, n: x.norm(p=n.item()), (torch.randn(3), torch.tensor(2.0)))
    program.to_exported_program()
    with pytest.raises(UnsupportedExportError, match=r"(?s)cannot decompose linalg_vector_norm.*x.norm\(p=n.item"):
        program.to_core_aten()


def test_data_dependent_sizes_are_refused_before_operators_are_spelt_out() -> None:
    pytest.importorskip("jax")
    with pytest.raises(UnsupportedProgramError, match=r"arange.* returns a tensor of data-dependent size"):
        capture(lambda n: torch.arange(n.item()), (torch.tensor(4),)).to_jax()


def test_decisions_by_complex_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedExportError, match="branches on a complex number"):
        capture(lambda z: z.item(), (torch.ones((), dtype=torch.complex64),)).to_exported_program()


def test_slices_begin_where_the_data_say_in_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    caches = torch.zeros(2, 7, 3), torch.zeros(2, 7, 3)

    def decode(cache: Tensor, x: Tensor, position: Tensor) -> Any:
        n = position.item()
        torch._check(n >= 0)
        torch._check(n + 4 <= 7)
        cache[:, n : n + 2] = x
        cache[:, n : n + 4 : 2] += 1
        return cache[:, n : n + 3] * 1, cache.clone()

    x = torch.randn(2, 2, 3)
    program = capture(lambda x, n: decode(caches[0], x, n), (x, torch.tensor(0, dtype=torch.int32))).to_jax()
    run, state = program.jit(), program.initial_state
    for number in (0, 3, 1):
        state, found = run(state, jnp.asarray(x.numpy()), jnp.asarray(number, dtype=jnp.int32))
        expected = decode(caches[1], x, torch.tensor(number))
        torch.testing.assert_close([torch.tensor(one.tolist()) for one in found], list(expected))
    assert not caches[0].any()


def test_numbers_in_objects_by_which_a_program_decides_are_compared_on_jax() -> None:
    pytest.importorskip("jax")
    import jax.numpy as jnp

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.position = nn.Buffer(torch.zeros(6, 3)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows[self.position] = x
            if self.position < 3:
                self.position += 1
            return self.rows * 1

    program, original = capture(Cache(), (torch.ones(3),)).to_jax(), Cache()
    state = program.initial_state
    for number in range(3):
        x = torch.full((3,), number + 1.0)
        state, rows = program(state, jnp.asarray(x.numpy()))
        assert rows.tolist() == original(x).tolist()
    with pytest.raises(DataDependentError, match=r"if self\.position < 3:"):
        program(state, jnp.ones(3))


def test_numbers_that_a_program_only_leaves_are_state(tmp_path: Path) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = 3.0

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.sum().item()
            return x + 1

    watched = Watched()
    module: Any = SAVED(capture(watched, (torch.ones(2),)), tmp_path)
    assert dict(module.named_buffers()) == {"last": torch.tensor(3.0, dtype=torch.float64)}
    assert module(torch.ones(2)).tolist() == [2.0, 2.0]
    assert dict(module.named_buffers()) == {"last": torch.tensor(2.0, dtype=torch.float64)}
    assert watched.last == 3.0


def test_symbols_of_an_export_that_would_get_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch names symbols by a hash of where they are from, and looks for collisions in one environment alone."""

    def first_free(env: Any, _: str) -> int:
        free = next(number for number in range(100) if number not in env.unique_ids)
        env.unique_ids.add(free)
        return free

    monkeypatch.setattr(torch.fx.experimental.symbolic_shapes.ShapeEnv, "_generate_unique_id", first_free)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(x)).square().mean()

    model, sizes = Loss(), ({0: Dim("n", min=2, max=64)},)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    exported = capture(model, (torch.ones(4, 3),), dynamic_shapes=sizes, optimizer=optimizer).to_exported_program()
    module = exported.module()
    module(torch.ones(6, 3))
    with pytest.raises(AssertionError, match="Guard failed"):
        module(torch.ones(65, 3))
