"""Programs of wrappers as functions of JAX arrays: of dicts of the arrays inside, and of state under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from functionalize import capture
from functionalize.backends.arrays.program import Written
from tests.support.wrappers import Quantized, numbers, two

jax = pytest.importorskip("jax")
jnp = jax.numpy

from functionalize.backends.jax import load  # noqa: E402


def test_state_is_the_arrays_inside_by_their_names(tmp_path: Path) -> None:
    module, x = Quantized(), numbers(2, 4)
    program = capture(module, (x,))
    function, path = program.to_jax(), program.to_stablehlo(tmp_path / "quantized")
    state = function.initial_state
    assert {"layer.weight.q", "layer.weight.scale", "kept.a", "kept.b"} < state.keys()
    assert state["layer.weight.q"].dtype == jnp.int8 and function.written == {"kept.a", "kept.b"}
    loaded, (y, kept) = load(path), module(x)
    after, results = function(state, jnp.asarray(x.numpy()))
    for result, given in (results, loaded(x.numpy())):
        np.testing.assert_allclose(result, y.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(given["b"], kept.b.numpy())
    for written in (after, loaded.state):
        np.testing.assert_array_equal(written["kept.a"], kept.a.numpy())


def test_arguments_are_dicts_of_arrays() -> None:
    def program(x: Any) -> Any:
        x.mul_(2)
        return x + 1, x

    function = capture(program, (two(2, 3),)).to_jax()
    _, written = function({}, {"a": jnp.ones((2, 3)), "b": jnp.zeros((2, 3))})
    assert isinstance(written, Written) and written.arguments["x"]["a"].max() == 2
    assert written.returned[0]["a"].max() == 3 and written.returned[1]["b"].max() == 0


def test_gradients_go_to_the_arrays_inside() -> None:
    module: Any = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(two(4, 4))
    function = capture(module, (numbers(2, 4),)).to_jax()

    def loss(state: Any) -> Any:
        y = function(state, jnp.ones((2, 4)))[1]
        return y["a"].sum() + 3 * y["b"].sum()

    gradients = jax.grad(loss)(function.initial_state)
    np.testing.assert_allclose(gradients["weight.a"], np.full((4, 4), 2.0))
    np.testing.assert_allclose(gradients["weight.b"], np.full((4, 4), 6.0))
