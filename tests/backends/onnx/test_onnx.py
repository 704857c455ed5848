"""Captured programs as ONNX files, run by ONNX Runtime: held against eager over three calls, state threaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.export import Dim

from functionalize import DataDependentError, InputMismatchError, UnsupportedExportError, capture
from tests.support.export_programs import PROGRAMS, made

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from functionalize.backends import onnx  # noqa: E402

_FULL = ("python-counter", "swap", "tied", "tied-step", "outputs-alias-inputs", "sgd", "mutates-input")


def _marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.full if name in _FULL else pytest.mark.slow(seconds=3))


def assert_three_calls(program: Any, inputs: Any, twin: Any, path: Path) -> Any:
    """Write a program, load it, and hold three calls against those of its twin."""
    run = onnx.load(capture(program, inputs()).to_onnx(path))
    for _ in range(3):
        given = inputs()
        mine = copy.deepcopy(given)
        expected, found = twin(*given), run(*mine)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, given)
    return run


@pytest.mark.every(5)
@pytest.mark.parametrize("name", list(map(_marked, PROGRAMS)))
def test_three_calls(name: str, tmp_path: Path) -> None:
    program, inputs = made(name)
    twin, _ = made(name)
    assert_three_calls(program, inputs, twin, tmp_path / "program.onnx")


@pytest.mark.slow
def test_state_is_explicit_and_bound_in_place(tmp_path: Path) -> None:
    program, inputs = made("decode")
    run = onnx.load(capture(program, inputs()).to_onnx(tmp_path / "decode.onnx"))
    names = [one.name for one in run.session.get_inputs()], [one.name for one in run.session.get_outputs()]
    assert "keys" in names[0]
    assert "new.keys" in names[1]
    (memory,) = [value.data_ptr() for value in run.state.values()]
    run(*inputs())
    assert [value.data_ptr() for value in run.state.values()] == [memory]


@pytest.mark.slow(seconds=6)
def test_nesting_keywords_and_dynamic_axes(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    twin = copy.deepcopy(model)

    def nested(x: torch.Tensor, *, more: dict[str, torch.Tensor], factor: int = 2) -> dict[str, Any]:
        x[0].mul_(factor)
        return {"y": model(x) + more["z"] - 2 * more["a"], "x": x, "rows": x.size(0)}

    def eager(x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        x[0].mul_(2)
        return {"y": twin(x) + more["z"] - 2 * more["a"], "x": x, "rows": x.size(0)}

    shapes = {"x": {0: torch.export.Dim("rows", min=2)}, "more": {"z": None, "a": None}, "factor": None}
    more = {"z": torch.randn(3), "a": torch.randn(3)}
    program = capture(nested, (torch.randn(4, 3),), {"more": more, "factor": 2}, dynamic_shapes=shapes)
    run = onnx.load(program.to_onnx(tmp_path / "nested.onnx"))
    for rows in (2, 5, 7):
        x, other = torch.randn(rows, 3), {"a": torch.randn(3), "z": torch.randn(3)}  # the keys in another order
        mine = x.clone()
        expected, found = eager(x, more=other), run(more=other, factor=2, x=mine)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert found["x"] is mine
        torch.testing.assert_close(mine, x)
    for wrong in ({"factor": 3}, {"more": [torch.zeros(3)]}, {"x": torch.zeros(4, 2)}, {"x": 1}, {"y": 1}):
        with pytest.raises(InputMismatchError):
            run(**{"x": torch.randn(4, 3), "more": more, "factor": 2} | wrong)


@pytest.mark.slow(seconds=3)
def test_other_decisions_write_nothing(tmp_path: Path) -> None:
    count = torch.zeros(())

    def decide(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2 if x.sum() > 0 else x

    run = onnx.load(capture(decide, (torch.ones(2),)).to_onnx(tmp_path / "decide.onnx"))
    run(torch.ones(2))
    with pytest.raises(DataDependentError, match="in decide: return x"):
        run(-torch.ones(2))
    assert run.state["count"].item() == 1


@pytest.mark.slow(seconds=3)
def test_arguments_that_share_memory_otherwise_are_refused(tmp_path: Path) -> None:
    program, inputs = made("aliased-inputs")
    run = onnx.load(capture(program, inputs()).to_onnx(tmp_path / "aliased.onnx"))
    with pytest.raises(InputMismatchError, match="share memory"):
        run(torch.randn(6), torch.randn(3))


@pytest.mark.slow(seconds=5)
def test_names_that_the_graph_has_as_well(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 3)

    def named(t: torch.Tensor, add: torch.Tensor, output_0: torch.Tensor) -> Any:
        t.add_(1)
        return layer(t).add(add), add, output_0.t() + add.t(), output_0

    twin = copy.deepcopy(layer)

    def eager(t: torch.Tensor, add: torch.Tensor, output_0: torch.Tensor) -> Any:
        t.add_(1)
        return twin(t).add(add), add, output_0.t() + add.t(), output_0

    assert_three_calls(named, lambda: tuple(torch.randn(3, 3, 3).unbind()), eager, tmp_path / "named.onnx")
    nothing = onnx.load(capture(lambda x: x, (torch.zeros(2),)).to_onnx(tmp_path / "nothing.onnx"))
    x = torch.ones(2)
    assert nothing(x) is x


def near_nothing(x: Tensor) -> Any:
    """Numbers that an optimizer of graphs takes for 0, or for 1, if it does not look closely."""
    return (x * 0 + 1e-8) * 1e8, (x - 1e-9) * 1e8, (x * (1 - 1e-6) - x) * 1e7, x / (1 + 1e-6), x * 0.1, 0.1 - x


def wide_numbers(x: Tensor) -> Any:
    """Numbers that ONNX's operators, and torch's exporter, have with 32 bits."""
    functional, rows = torch.nn.functional, torch.arange(0, 0.3, 0.1, dtype=torch.float64)
    return (
        *(torch.full_like(x, 0.1), 0.3**x, x.clamp(-0.1, 0.1), functional.leaky_relu(x, 0.1), functional.elu(x, 0.1)),
        *(torch.addcmul(x, x, x, value=0.1), torch.addmm(x, x, x, beta=0.1, alpha=0.3), functional.hardswish(x)),
        *(functional.layer_norm(x, (3,)), functional.gelu(x, approximate="tanh"), x + rows, x % 0.3),
        functional.batch_norm(x, x[0] * 0.1, x[1].exp()),
    )


@pytest.mark.every(5)
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("program", "dtype"),
    [(near_nothing, torch.float32), (near_nothing, torch.float64), (wide_numbers, torch.float64)],
)
def test_numbers_are_what_they_are(program: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.linspace(0.21, 3.05, 9, dtype=dtype).view(3, 3)
    run = onnx.load(capture(program, (x,)).to_onnx(tmp_path / "numbers.onnx"))
    limit: Any = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(run(x), program(x), **limit)


@pytest.mark.slow(seconds=4)
def test_steps_where_gradients_are_zero(tmp_path: Path) -> None:
    def made() -> Any:
        weight = torch.nn.Parameter(torch.ones(3))
        update = torch.optim.AdamW([weight], lr=1e-3)

        def step(x: Tensor) -> Any:
            update.zero_grad()
            (weight * x).sum().backward()
            update.step()
            return weight.detach().clone()

        return step

    assert_three_calls(made(), lambda: (torch.tensor([1.0, 0, 0]),), made(), tmp_path / "step.onnx")


@pytest.mark.slow(seconds=6)
def test_recurrent_layers_for_other_batches(tmp_path: Path) -> None:
    layer = torch.nn.LSTM(3, 4, 2, bidirectional=True)
    program = capture(layer, (torch.randn(5, 2, 3),), dynamic_shapes=({1: Dim("batch")},))
    run = onnx.load(program.to_onnx(tmp_path / "lstm.onnx"))
    for batch in (2, 3):
        x = torch.randn(5, batch, 3)
        torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("options", [{"batch_first": True}, {"bidirectional": True, "num_layers": 2, "bias": False}])
def test_recurrent_layers_for_other_lengths(options: dict[str, Any], tmp_path: Path) -> None:
    layer, dims = torch.nn.LSTM(3, 4, **options), (Dim("one", max=32), Dim("other", max=32), None)
    run = onnx.load(capture(layer, (torch.randn(5, 2, 3),), dynamic_shapes=(dims,)).to_onnx(tmp_path / "lstm.onnx"))
    for x in (torch.randn(7, 4, 3), torch.randn(2, 9, 3)):
        torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(seconds=3)
def test_statistics_of_other_batches(tmp_path: Path) -> None:
    norm = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))
    twin = copy.deepcopy(norm)
    program = capture(norm, (torch.randn(4, 3, 2, 2),), dynamic_shapes=({0: Dim("n", max=64)},))
    run = onnx.load(program.to_onnx(tmp_path / "norm.onnx"))
    for batch in (7, 20, 2):
        x = torch.randn(batch, 3, 2, 2)
        torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run.state["1.running_var"], twin[1].running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.slow(seconds=3)
def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    program, inputs = made("batch-norm")
    twin, _ = made("batch-norm")
    path = capture(program, inputs()).to_onnx(tmp_path / "norm.onnx", external_data=True)
    run = onnx.load(path)
    x = inputs()
    torch.testing.assert_close(run(*x), twin(*x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(seconds=3)
def test_all_operators_that_have_no_translation_are_named(tmp_path: Path) -> None:
    def odd(x: torch.Tensor) -> Any:
        (first, *_) = torch.linalg.svd(x)
        second = torch.linalg.eigh(x @ x.t())
        return first, second[0]

    program = capture(odd, (torch.randn(3, 3),))
    with pytest.raises(UnsupportedExportError) as caught:
        program.to_onnx(tmp_path / "odd.onnx")
    assert len(caught.value.causes) == 2
    assert all(text in str(caught.value) for text in ("svd", "eigh", "second = torch.linalg.eigh(x @ x.t())"))
    assert not list(tmp_path.iterdir())


def test_files_that_are_none(tmp_path: Path) -> None:
    import onnx as package

    empty = package.helper.make_model(package.helper.make_graph([], "empty", [], []))
    package.save(empty, str(tmp_path / "other.onnx"))
    whole = (tmp_path / "other.onnx").read_bytes()
    (tmp_path / "truncated.onnx").write_bytes(whole[:-3])
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(FileNotFoundError, match="no file"):
        onnx.load(tmp_path / "none.onnx")
    for name in ("other", "truncated", "text"):
        with pytest.raises(ValueError, match=r"was not written by to_onnx|is not an ONNX file"):
            onnx.load(tmp_path / f"{name}.onnx")
    package.helper.set_model_props(empty, {"functionalize": '{"format": 0}'})
    package.save(empty, str(tmp_path / "older.onnx"))
    with pytest.raises(ValueError, match="another version"):
        onnx.load(tmp_path / "older.onnx")


def test_sizes_are_held_to_what_was_captured(tmp_path: Path) -> None:
    dynamic = {
        "x": {0: Dim("n", min=2, max=16)},
        "y": {0: 2 * Dim("n", min=2, max=16)},
        "z": {0: 4 * Dim("m", min=2, max=16)},
    }

    def run(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.repeat(2) + y + z.view(-1, 4).sum()

    inputs = torch.ones(3), torch.ones(6), torch.ones(8)
    loaded = onnx.load(capture(run, inputs, dynamic_shapes=dynamic).to_onnx(tmp_path / "sizes.onnx"))
    other = torch.randn(5), torch.randn(10), torch.randn(12)
    torch.testing.assert_close(loaded(*other), run(*other))
    for sizes, message in [
        ((1, 2, 8), "is 1, but the program was captured for 2 to 16"),
        ((17, 34, 8), "is 17, but the program was captured for 2 to 16"),
        ((3, 3, 8), "dimension 0 of the argument `y` is 3, but the program was captured for 6"),
        ((3, 6, 9), "was captured for sizes with"),
    ]:
        with pytest.raises(InputMismatchError, match=message):
            loaded(*map(torch.ones, sizes))


def test_arguments_that_cannot_be_written_are_refused_first(tmp_path: Path) -> None:
    count = torch.zeros(())

    def run(x: Tensor) -> None:
        count.add_(1)
        x.mul_(2)

    loaded = onnx.load(capture(run, (torch.ones(2, 3),)).to_onnx(tmp_path / "writes.onnx"))
    for x in (torch.ones(2, 3, requires_grad=True), torch.ones(1, 3).expand(2, 3)):
        with pytest.raises(InputMismatchError, match="writes to the argument `x`"):
            loaded(x)
    assert loaded.state["count"] == 0
    state: Any = loaded.state
    with pytest.raises(TypeError, match="does not support item assignment"):
        state["count"] = torch.ones(())
    x = torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        loaded(x)
    assert loaded.state["count"] == 1 and torch.equal(x, torch.full((2, 3), 2.0))


@pytest.mark.slow(seconds=3)
def test_draws_that_look_alike_are_two(tmp_path: Path) -> None:
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = torch.full((64,), 0.5)
        return *(torch.bernoulli(x), torch.bernoulli(x)), *(half.bernoulli(), half.bernoulli()), x.bernoulli(0.3)

    x = torch.full((64,), 0.5)
    runner = onnx.load(capture(draws, (x,)).to_onnx(tmp_path / "draws.onnx"))
    found = [*runner(x), *runner(x)]
    assert all(set(one.unique().tolist()) == {0, 1} for one in found)
    assert not any(torch.equal(one, other) for n, one in enumerate(found) for other in found[:n])


@pytest.mark.slow(seconds=2)
def test_arguments_without_elements_are_refused_first(tmp_path: Path) -> None:
    total = torch.zeros(2, 2)

    def run(x: Tensor) -> Tensor:
        return total.add_(x)

    x = torch.eye(2)
    runner = onnx.load(capture(run, (x,)).to_onnx(tmp_path / "total.onnx"))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for given in (x.to("meta"), x.to_sparse(), x.to_mkldnn(), fake):
        with pytest.raises(InputMismatchError):
            runner(given)
    torch.testing.assert_close(runner.state["total"], torch.zeros(2, 2))
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    for given in (negated, torch.nn.Parameter(x)):
        runner.state["total"].zero_()
        torch.testing.assert_close(runner(given), given.detach().resolve_neg())


@pytest.mark.slow(seconds=3)
def test_transposed_convolutions_with_more_at_the_end_than_a_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [
        torch.nn.ConvTranspose2d(4, 6, 3, stride=1, padding=2, output_padding=1, dilation=2),
        torch.nn.ConvTranspose2d(4, 6, 3, (1, 2), (0, 1), (2, 1), groups=2, dilation=(3, 1), bias=False),
    ]

    def run(x: Tensor) -> Any:
        return [layer(x).detach() for layer in layers]

    x = torch.rand(2, 4, 5, 6)
    runner = onnx.load(capture(run, (x,)).to_onnx(tmp_path / "layers.onnx"))
    torch.testing.assert_close(runner(x), run(x), rtol=1e-4, atol=1e-5)


def test_operators_that_give_nothing_are_not_dropped(tmp_path: Path) -> None:
    def func(x: Tensor) -> Tensor:
        torch.ops.aten._print("seen")
        return x + 1

    with pytest.raises(UnsupportedExportError, match=r"has no translation\n.*_print"):
        capture(func, (torch.ones(2),)).to_onnx(tmp_path / "printing.onnx")
