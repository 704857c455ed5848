"""Programs that an exporter once got wrong, or refused without a clear word: on all routes, four calls beside eager."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from functionalize import (
    DataDependentError,
    InputMismatchError,
    UnsupportedExportError,
    UnsupportedProgramError,
    capture,
)
from tests.support.export_programs import made, on_onnx

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")

Inputs = Callable[[], tuple[Any, ...]]


class Replaced(nn.Module):
    """Gives its buffer, the entries of a list and a number other values with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.cache, self.factor = nn.Buffer(torch.zeros(3)), [torch.zeros(3) for _ in range(2)], 0.5

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.hidden * 0.5 + x  # type: ignore[assignment]
        self.cache[0] = self.cache[0] + self.hidden
        self.factor = self.factor * 2
        return self.cache[0] * self.factor, self.cache[1], self.factor


def at_a_position() -> tuple[Any, Inputs]:
    """Writes where a tensor without dimensions says."""
    cache, weight = torch.zeros(6, 2), nn.Parameter(torch.ones(6, 2))

    def decode(x: Tensor, position: Tensor) -> Tensor:
        cache[position] = x
        with torch.no_grad():
            weight[position] += 1
        return (cache * weight.detach()).sum(-1) + cache[position, 0]

    return decode, lambda: (torch.randn(2), torch.randint(-6, 6, ()))


class Exchanged(nn.Module):
    """Gives back a tensor that it replaces, exchanges two others and writes to one of them; keeps its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.one, self.other, self.last = torch.zeros(3), torch.zeros(3), torch.ones(3), torch.zeros(3)

    def forward(self, x: Tensor) -> Any:
        old, last = self.old, self.last
        old.add_(x)
        self.old, self.last = old * 2, x
        self.one, self.other = self.other, self.one
        self.one.add_(x)
        return old, self.one * 2 + self.other, last


class Derived(nn.Module):
    """Replaces a tensor that shares memory with a parameter, which stays, as torch's old spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.current = self.weight.data

    def forward(self, x: Tensor) -> Tensor:
        self.current = self.weight.data * 2
        return x * self.current + self.weight


class Aliased(nn.Module):
    """Attributes that are no buffers are written: by themselves, and by tensors whose memory they show."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.weight, self.plain = nn.Buffer(torch.zeros(3)), nn.Parameter(torch.ones(3)), torch.zeros(3)
        self.tail, self.average = self.sums[1:], self.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        self.sums.add_(x)
        self.plain.sub_(x)
        self.average.mul_(0.5).add_(x)
        return self.tail * 2 + (self.weight + self.plain).sum()


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(3).half())

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.abs().cumsum(0)[-1])
        return self.mean.abs() + x.sum(0)


class LastArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x
        return x - last


def old_gradient() -> tuple[Any, Inputs]:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()

    def step(x: Tensor) -> Any:
        old = layer.weight.grad
        layer.zero_grad()
        layer(x).square().mean().backward()
        return old, layer.weight.grad

    return step, lambda: (torch.randn(4, 3),)


def norms_and_bits() -> tuple[Any, Inputs]:
    table = torch.nn.Embedding(7, 4, max_norm=0.5)

    def run(x: Tensor, index: Tensor) -> Any:
        return torch.cdist(table(index), x), index >> 1, index << 2

    return run, lambda: (torch.randn(5, 4), torch.randint(0, 7, (3,)))


def stepped(**options: Any) -> tuple[Any, Inputs]:
    layer = nn.Linear(3, 2)
    update = torch.optim.AdamW(layer.parameters(), **options)

    def step(x: Tensor) -> Any:
        update.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        update.step()
        return loss

    return step, lambda: (torch.randn(4, 3),)


def functions_of_numbers() -> tuple[Any, Inputs]:
    def run(x: Tensor, number: Tensor) -> Any:
        n = number.item()
        chosen = x * min(n, 0.5, n * 2) + max(n, 0.25)
        return chosen, x * math.expm1(n) * math.degrees(n) + math.fmod(n, 0.1), nn.functional.leaky_relu(x, n * 2 + 1)

    return run, lambda: (torch.randn(3), torch.rand((), dtype=torch.float64))


def in_part_shared() -> tuple[Any, Inputs]:
    """Neither input has all the memory that the two share."""

    def run(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        y.mul_(2)
        return x + 0, y

    def inputs() -> tuple[Tensor, ...]:
        whole = torch.randn(6)
        return whole[:4], whole[2:]

    return run, inputs


class BegunAsOne(nn.Module):
    """States that begin as one tensor, and are several ones from the first call on: of an LSTM, of a delay line."""

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(3)
        self.state, self.line, self.cells = (zeros, zeros), [zeros] * 3, [(zeros, zeros), (zeros, zeros)]

    def forward(self, x: Tensor) -> Any:
        hidden, cell = self.state
        self.state = hidden + x, cell * 0.5 + 1
        self.line.append(x * 1)
        self.line.pop(0)
        self.cells = [(one + x, other + 2 * x) for one, other in self.cells]
        return self.state[0] * cell, torch.stack(self.line).sum(0), self.cells[1][1] - self.cells[0][0]


def returned_state() -> tuple[Any, Inputs]:
    state: dict[str, Any] = {"kept": torch.ones(3), "n": 0, "nested": [torch.zeros(3)], "sum": torch.ones(3)}
    pair = [torch.zeros(3), torch.ones(3)]

    def program(x: Tensor) -> Any:
        state["n"] += 1
        state["sum"] = state["sum"] + x
        state["nested"][0] = state["nested"][0] - x
        state["kept"].add_(x)
        pair[0], pair[1] = pair[1], pair[0]
        return state, pair

    return program, lambda: (torch.randn(3),)


class Turned(nn.Module):
    """Puts whole new values into its buffers: by other data, and by other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.turned = nn.Buffer(torch.arange(4.0).reshape(2, 2)), nn.Buffer(torch.rand(2, 2))

    def forward(self, x: Tensor) -> Any:
        self.other.data = self.other.data * 0.5 + x
        self.other[0].add_(1)
        self.turned.t_()[0].add_(x[0])
        return self.other[0] + self.turned[0]


def of_a_number_first() -> tuple[Any, Inputs]:
    return lambda x: torch.add(0.25, x, alpha=0.5) + x.clamp(-0.5, 2), lambda: (torch.randn(3),)


def bounded_steps() -> tuple[Any, Inputs]:
    """Its optimizer bounds by a float and an integer."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Rprop(layer.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(torch.ones(2, 3))
    return step, lambda: (torch.randn(2, 3),)


def fake_quantized() -> tuple[Any, Inputs]:
    scale, place = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
    layer, on = nn.Linear(3, 2), torch.ones(1, dtype=torch.int64)

    def run(x: Tensor) -> Tensor:
        scale.mul_(1.5)
        with torch.no_grad():
            found: Tensor = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                layer(x), scale, place, on, 0, 15
            )[0]
        return found

    return run, lambda: (torch.randn(4, 3),)


PROGRAMS: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "turned": lambda: (Turned(), lambda: (torch.randn(2),)),
    "of-a-number-first": of_a_number_first,
    "bounded-steps": bounded_steps,
    "fake-quantized": fake_quantized,
    "replaced": lambda: (Replaced(), lambda: (torch.randn(3),)),
    "begun-as-one": lambda: (BegunAsOne(), lambda: (torch.randn(3),)),
    "returned-state": returned_state,
    "at-a-position": at_a_position,
    "in-part-shared": in_part_shared,
    "number-of-one-element": lambda: (lambda x: torch.tensor(x[:1].item()) * 2, lambda: (torch.randn(3),)),
    "sixteen-bits": lambda: (Short(), lambda: (torch.randn(4, 3).half(),)),
    "aliased": lambda: (Aliased(), lambda: (torch.randn(3),)),
    "derived": lambda: (Derived(), lambda: (torch.randn(3),)),
    "exchanged": lambda: (Exchanged(), lambda: (torch.randn(3),)),
    "old-gradient": old_gradient,
    "last-argument": lambda: (LastArgument(), lambda: (torch.randn(3),)),
    "norms-and-bits": norms_and_bits,
    "named-results": lambda: (lambda x: x.sort(-1), lambda: (torch.randn(2, 3),)),
    "stepped-in-lists": lambda: stepped(lr=0.1, foreach=True),  # whose operators take numbers that the step tells
    "rate-in-a-tensor": lambda: stepped(lr=torch.tensor(0.1)),  # combined with such numbers
    "functions-of-numbers": functions_of_numbers,
    "bilinear": lambda: (nn.Bilinear(3, 4, 5), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
    "none": lambda: (lambda x, y=None: (None, {"y": y, "x": x + 1}), lambda: (torch.randn(3), None)),
}


def _module(program: Any, folder: Path) -> Any:
    file = io.BytesIO()
    torch.export.save(program.to_exported_program(), file)
    file.seek(0)
    return torch.export.load(file).module()


def _stablehlo(program: Any, folder: Path) -> Any:
    pytest.importorskip("jax")
    from functionalize.backends.jax import from_torch, load, to_torch

    loaded = load(program.to_stablehlo(folder / "program.stablehlo"))
    writes = program.specialization.capture.convention.names if program.mutations else ()

    def run(*args: Any) -> Any:
        arrays = [arg if arg is None else from_torch(arg) for arg in args]
        result = tree_map_only(type(arrays[0]), to_torch, loaded(*arrays))
        if (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], dict)
            and set(result[1]) <= set(writes)
        ):
            result, written = result
            for name, value in written.items():
                args[list(writes).index(name)].copy_(value)
        return result

    return run


ROUTES = {"module": _module, "onnx": on_onnx, "stablehlo": _stablehlo}


_CASES = [
    pytest.param(name, route, marks=pytest.mark.full)
    if route == "onnx" and name not in ("replaced", "at-a-position", "exchanged", "sixteen-bits")
    else pytest.param(name, route, marks=pytest.mark.slow(seconds=3))
    for name in PROGRAMS
    for route in ROUTES
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "route"), _CASES)
def test_four_calls(name: str, route: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program, inputs = PROGRAMS[name]()
    torch.manual_seed(0)
    twin, _ = PROGRAMS[name]()
    run = ROUTES[route](capture(program, inputs()), tmp_path)
    for _ in range(4):
        mine = inputs()
        given = copy.deepcopy(mine)
        expected, found = twin(*given), run(*mine)
        leaves = [[leaf for leaf in tree_leaves(one) if leaf is not None] for one in (found, expected)]
        for one, other in zip(*leaves, strict=True):
            torch.testing.assert_close(
                torch.as_tensor(one), torch.as_tensor(other), check_dtype=isinstance(other, Tensor)
            )
        torch.testing.assert_close(mine, given)


# Kernels that copy along a dimension that stays as it is, and others that take the scale there as well.
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("mode", "dims"),
    [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("nearest", 1), ("nearest", 2), ("nearest-exact", 2)],
)
@pytest.mark.parametrize("factor", [1.3, pytest.param(2.4, marks=pytest.mark.full)])
def test_scales_count_where_eager_takes_them(mode: str, dims: int, factor: float) -> None:
    x = torch.randn(1, 1, *[3] * dims)

    def interpolated(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, mode=mode, scale_factor=(factor, *[2.0] * (dims - 1)))

    program, expected = capture(interpolated, (x,)), interpolated(x)
    torch.testing.assert_close(program.to_core_aten().module()(x), expected)
    pytest.importorskip("jax")
    from functionalize.backends.jax import from_torch, to_torch

    lowered = program.to_jax()
    torch.testing.assert_close(to_torch(lowered(lowered.initial_state, from_torch(x))[1]), expected)


@pytest.mark.every(6)
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(("mode", "dims"), [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("nearest", 2)])
@pytest.mark.parametrize("factor", [1.3, pytest.param(2.4, marks=pytest.mark.full)])
def test_scales_count_where_eager_takes_them_in_onnx(mode: str, dims: int, factor: float, tmp_path: Path) -> None:
    x = torch.randn(1, 1, *[3] * dims)

    def interpolated(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, mode=mode, scale_factor=(factor, *[2.0] * (dims - 1)))

    torch.testing.assert_close(on_onnx(capture(interpolated, (x,)), tmp_path)(x), interpolated(x))


@pytest.mark.parametrize("size", [(3, 9), (8, 8), (5, 6)])
def test_nearest_exact_in_onnx(size: tuple[int, int], tmp_path: Path) -> None:
    x = torch.randn(1, 1, 5, 6)

    def interpolated(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, size, mode="nearest-exact")

    torch.testing.assert_close(on_onnx(capture(interpolated, (x,)), tmp_path)(x), interpolated(x))


def test_what_decompositions_ask_of_sizes_is_held_to_in_onnx(tmp_path: Path) -> None:
    """Torch takes pooling to a size apart for sizes that it divides, or for others."""
    x, dynamic = torch.randn(1, 1, 8, 6), {"x": {2: Dim("h", min=4, max=64), 3: Dim("w", min=4, max=64)}}

    def halved(x: Tensor) -> Any:
        return nn.functional.interpolate(x, scale_factor=0.5, mode="area"), nn.functional.adaptive_avg_pool2d(x, 2)

    run = on_onnx(capture(halved, (x,), dynamic_shapes=dynamic), tmp_path)
    other = torch.randn(1, 1, 8, 6)
    torch.testing.assert_close(run(other), halved(other))
    with pytest.raises(InputMismatchError, match="the program was captured for sizes with"):
        run(torch.randn(1, 1, 7, 9))


def parity() -> Any:
    calls = [0]

    def run(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * 2 if calls[0] % 2 else x

    return run


def test_a_first_call_that_decides_otherwise_is_refused() -> None:
    program = capture(parity(), (torch.ones(2),))
    with pytest.raises(UnsupportedExportError, match=r"(?s)takes another branch than later calls.*calls\[0\] % 2"):
        program.to_exported_program()


def test_decisions_by_changed_numbers_are_no_business_of_jax() -> None:
    pytest.importorskip("jax")
    with pytest.raises(UnsupportedProgramError, match="changes this Python object"):
        capture(parity(), (torch.ones(2),)).to_jax()


def test_a_decision_about_a_flag_is_saved_and_loaded() -> None:
    program = capture(lambda x, n: x * 2 if n.item() > 2 else x, (torch.ones(2), torch.tensor(1)))
    module = _module(program, Path())
    assert module(torch.ones(2), torch.tensor(2)).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="-> False"):
        module(torch.ones(2), torch.tensor(3))


def test_complex_inputs_and_state_of_onnx_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    state = torch.zeros(2, dtype=torch.complex64)
    program = capture(lambda z: state.add_(z).abs(), (torch.ones(2, dtype=torch.complex64),))
    with pytest.raises(UnsupportedExportError, match=r"(?s)for 3 causes.*takes `z`, of torch.complex64.*view_as_real"):
        program.to_onnx(tmp_path / "complex.onnx")
    assert not list(tmp_path.iterdir())


def test_arguments_that_no_stablehlo_file_takes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    program = capture(lambda x, n: x * n, (torch.ones(2), 3))
    with pytest.raises(UnsupportedProgramError, match="takes 3 as an argument"):
        program.to_stablehlo(tmp_path / "program.stablehlo")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("route", ROUTES)
def test_arguments_that_are_state_count_for_both(route: str, tmp_path: Path) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer.requires_grad_(False)

    def run(weight: Tensor, bias: Tensor, x: Tensor) -> Any:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    loaded = ROUTES[route](capture(run, (layer.weight, layer.bias, x)), tmp_path)
    others = torch.randn(2, 3), torch.randn(2), torch.randn(4, 3)
    torch.testing.assert_close(loaded(*others), run(*others))


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
    module = _module(capture(whole_numbers, (x, torch.tensor(2.0))), Path())
    for number in (1.25, 2.5, 3.0):
        expected = whole_numbers(x, torch.tensor(number))
        found = module(x, torch.tensor(number))
        torch.testing.assert_close(found, tuple(map(torch.as_tensor, expected)))


def test_what_an_operator_takes_no_gradients_of_has_none(tmp_path: Path) -> None:
    """A scale that is computed of weights, by an observer that reads them without gradients."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    model = nn.Sequential(nn.Linear(3, 2), fake)
    model(torch.ones(2, 3))
    run = _module(capture(model, (torch.randn(4, 3),)), tmp_path)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(run(x), model(x).detach())


@pytest.mark.parametrize(
    "product", [torch.mv, lambda m, v: torch.addmv(v[:3], m, v, beta=2), lambda m, v: m.expand(2, 3, 4) @ v]
)
def test_transposed_matrices_times_vectors_in_onnx(product: Any, tmp_path: Path) -> None:
    """What ONNX Runtime joins the two operators to is wrong for vectors."""
    matrix, vector = torch.randn(4, 3), torch.randn(4)
    run = on_onnx(capture(lambda m, v: product(m.t(), v), (matrix, vector)), tmp_path)
    torch.testing.assert_close(run(matrix, vector), product(matrix.t(), vector))


@pytest.mark.parametrize("op", [torch.addmm, torch.baddbmm, torch.addmv])
def test_products_are_scaled_by_numbers_that_the_data_tell(op: Any) -> None:
    x = torch.randn(3, 3)
    args = {torch.addmm: (x, x, x), torch.baddbmm: (x[None],) * 3, torch.addmv: (x[0], x, x[1])}[op]

    def program(n: Tensor, *args: Tensor) -> Any:
        return op(*args, beta=n.item(), alpha=2 * n.item())

    module = capture(program, (torch.tensor(2.0), *args)).to_core_aten().module()
    torch.testing.assert_close(module(torch.tensor(3.0), *args), program(torch.tensor(3.0), *args))


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


def test_what_torch_cannot_take_apart_is_refused_with_its_line() -> None:
    program = capture(lambda x, n: x.norm(p=n.item()), (torch.randn(3), torch.tensor(2.0)))
    program.to_exported_program()
    with pytest.raises(UnsupportedExportError, match=r"(?s)cannot decompose linalg_vector_norm.*x.norm\(p=n.item"):
        program.to_core_aten()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_tensors_that_are_not_strided_are_refused(layout: torch.layout) -> None:
    weight = torch.eye(3).to_sparse(layout=layout)
    program = capture(lambda x: weight @ x, (torch.randn(3, 3),))
    with pytest.raises(UnsupportedExportError, match=rf"(?s)takes a tensor of layout {layout}.*weight @ x"):
        program.to_exported_program()


def test_sizes_that_the_data_tell_are_refused_before_operators_are_spelt_out() -> None:
    pytest.importorskip("jax")
    with pytest.raises(UnsupportedProgramError, match=r"arange.* returns a tensor of data-dependent size"):
        capture(lambda n: torch.arange(n.item()), (torch.tensor(4),)).to_jax()


def test_decisions_by_complex_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedExportError, match="branches on a complex number"):
        capture(lambda z: z.item(), (torch.ones((), dtype=torch.complex64),)).to_exported_program()


def test_state_that_is_passed_and_replaced_is_refused() -> None:
    model, _ = made("swap")
    program = capture(model, (model.a,))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedExportError, match="replaces the state `a` by another tensor"):
        program.to_exported_program()


def test_generators_of_a_program_are_refused() -> None:
    """An ExportedProgram has no place for them; torch's verifier raised."""
    own = torch.Generator()

    def reached(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=own)

    def made(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=torch.Generator().manual_seed(3))

    for program in (reached, made):
        with pytest.raises(UnsupportedExportError, match=r"(?s)its own generator.*test_export_finds.*try  draw"):
            capture(program, (torch.ones(3),)).to_exported_program()


def _gives_its_gradient(w: Tensor, x: Tensor) -> Any:
    (w * x).sum().backward()
    return w.grad


def _accumulates(w: Tensor, x: Tensor) -> Any:
    loss = (w * x).sum()
    loss.backward()
    return loss.detach()


def _begins_with_zeros(w: Tensor, x: Tensor) -> Any:
    if w.grad is not None:
        w.grad.zero_()
    (w * x).sum().backward()
    return w.detach() * x


@pytest.mark.parametrize("function", [_gives_its_gradient, _accumulates, _begins_with_zeros])
def test_gradients_of_a_first_call_are_added_to_by_later_ones(function: Any, tmp_path: Path) -> None:
    mine, twin = (nn.Parameter(torch.tensor([1.0, 3.0])) for _ in range(2))
    program = capture(lambda x: function(mine, x), (torch.ones(2),))
    module = _module(program, tmp_path)
    runs = [module, _stablehlo(program, tmp_path)]
    for number in range(3):
        x = torch.tensor([1.0, 2.0]) + number
        expected = function(twin, x)
        for run in runs:
            torch.testing.assert_close(run(x), expected)
        torch.testing.assert_close(dict(module.named_buffers()), {"mine_grad": twin.grad})
    assert mine.grad is None


def test_a_first_call_that_asks_for_gradients_is_refused() -> None:
    w = nn.Parameter(torch.tensor([1.0, 3.0]))

    def asks(x: Tensor) -> Tensor:
        result = w * x * 3 if w.grad is None else w * x
        (w * w).sum().backward()
        return result.detach()

    program = capture(asks, (torch.ones(2),), on_guard_failure="recapture")
    with pytest.raises(UnsupportedExportError, match=r"(?s)first call creates `w\.grad`.*try  call the program once"):
        program.to_exported_program()
    assert w.grad is None
    program(torch.ones(2))
    assert torch.equal(program.to_exported_program().module()(torch.ones(2)), w.detach())


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
    to_jax, module = program.to_jax(), _module(program, tmp_path)
    run, state = to_jax.jit(), to_jax.initial_state
    for _ in range(3):
        state, (given, weight) = run(state, {"x": jnp.ones((1, 2))})
        expected = step({"x": torch.ones(1, 2)})[1]
        torch.testing.assert_close(torch.tensor(weight.tolist()), expected)
        torch.testing.assert_close(module({"x": torch.ones(1, 2)})[1], expected)
        assert given["x"].tolist() == [[1.0, 1.0]]


def whole_quotients(x: Tensor, n: Tensor) -> Any:
    return x // 0.1, 0.7 // x, x // x.flip(0), 7 // n, n // 2.5, torch.div(x, n, rounding_mode="floor")


def truths(x: Tensor, n: Tensor) -> Any:
    b = n > 2
    both = b + ~b, b * b, torch.stack([b, n.to(torch.int8)]), b.masked_fill(b, False), torch.where(b, b, ~b)
    return both, b.amin(), b.amax(0), b.max(0).values, b.sort(), n.to(torch.uint8).neg(), n.to(torch.int8) ** 2


def of_no_elements(x: Tensor, n: Tensor) -> Any:
    none = x[x > 9]
    return none.mean(), (none > 0).any(), (none > 0).all(), none.sum(), x[:0].mean(), x[:0].any(), x[x > 0].mean()


def means_of_no_elements(x: Tensor, n: Tensor) -> Any:
    losses: list[Callable[..., Any]] = [
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.soft_margin_loss,
        functional.binary_cross_entropy_with_logits,
        lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b),
    ]
    parts = x[:0], x[x > 9], x[x > 0]
    spread = [(one.var(), one.std(correction=0), *torch.var_mean(one, 0, keepdim=True)) for one in parts]
    return spread, [loss(one, torch.ones_like(one)) for loss in losses for one in parts]


def without_dimensions(x: Tensor, n: Tensor) -> Any:
    x, n = x[1], n[1]
    zero = torch.tensor(0)
    one = x.topk(1), n.all(0), n.any(0), n.prod(0), x.scatter(0, zero, 2.0), x.amax(), x.aminmax()
    return one, n.sort(stable=True), x.max(0)


@pytest.mark.every(2)
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    "function", [whole_quotients, truths, of_no_elements, means_of_no_elements, without_dimensions]
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_operators_that_onnx_has_otherwise(function: Any, tmp_path: Path) -> None:
    inputs = torch.tensor([1.0, 2.0, -0.7, 3.0]), torch.tensor([2, -3, 7, 1])
    run = on_onnx(capture(function, inputs), tmp_path)
    pairs = zip(*(tree_leaves(one) for one in (run(*inputs), function(*inputs))), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_median_of_no_elements_in_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    program = capture(
        lambda x, n: (x.median(), x.nanmedian(), n.median()), (torch.ones(0), torch.ones(0).int())
    ).to_jax()
    floats, other, whole = program(program.initial_state, jnp.ones(0), jnp.ones(0, jnp.int32))[1]
    assert [math.isnan(floats), math.isnan(other), int(whole)] == [True, True, torch.iinfo(torch.int32).min]


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


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_steps_of_parametrized_layers_in_jax(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(getattr(nn.utils.parametrizations, name)(nn.Linear(4, 3)))

    def step(layer: Any, x: Tensor) -> Any:
        layer.zero_grad()
        layer(x).square().sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
        return layer.weight.detach()

    x = torch.randn(2, 4)
    program = capture(lambda x: step(layers[0], x), (x,)).to_jax()
    run, state = program.jit(), program.initial_state
    for _ in range(3):
        state, weight = run(state, jnp.asarray(x.numpy()))
        torch.testing.assert_close(torch.tensor(weight.tolist()), step(layers[1], x))


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
    module = _module(capture(watched, (torch.ones(2),)), tmp_path)
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


def test_random_numbers_are_saved_and_loaded() -> None:
    """Torch loads `uniform` only with its argument `from`, which a keyword names."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.zeros(3))

        def forward(self) -> Any:
            return self.noise.uniform_(), self.noise.new_empty(2).uniform_(2, 3)  # type: ignore[operator]

    eager, file = Noise(), io.BytesIO()
    torch.export.save(capture(Noise(), ()).to_exported_program(), file)
    file.seek(0)
    module = torch.export.load(file).module()
    for _ in range(2):
        torch.manual_seed(0)
        expected = [one.tolist() for one in eager()]
        torch.manual_seed(0)
        assert [one.tolist() for one in module()] == expected


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


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_elements_of_shared_memory_that_nobody_shows(remove: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.ones(3, 3, dtype=dtype)
    eager, program = Gaps(False, dtype), capture(Gaps(False, dtype), (x,), remove=remove)
    for needed in ("jax", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed)
    from functionalize.backends import onnx

    routes: list[Any] = [program.to_core_aten().module(), onnx.load(program.to_onnx(tmp_path / "gaps.onnx"))]
    for _ in range(3):
        expected = [one.tolist() for one in eager(x)]
        assert all([one.tolist() for one in route(x)] == expected for route in routes)
    reading = capture(Gaps(True, dtype), (x,), remove=remove)
    for to in (reading.to_core_aten, lambda: reading.to_onnx(tmp_path / "reading.onnx")):
        with pytest.raises(UnsupportedExportError, match="computes with elements of it outside all of them"):
            to()
    with pytest.raises(UnsupportedProgramError, match="computes with elements of it outside all of them"):
        reading.to_jax()


@pytest.mark.parametrize(
    "kind", [functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW, torch.optim.Muon]
)
def test_a_first_step_in_low_precision(kind: Any, tmp_path: Path) -> None:
    """What is exported rounds otherwise; that is no other first call."""

    def step_of() -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(64, 8, bias=False).bfloat16()
        optimizer = kind(layer.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = layer(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    inputs = [torch.randn(16, 64, dtype=torch.bfloat16) for _ in range(3)]
    module, reference = _module(capture(step_of(), (inputs[0],)), tmp_path), step_of()
    for x in inputs:
        torch.testing.assert_close(module(x), reference(x), rtol=2e-2, atol=1e-3)


def test_a_first_call_that_fails_for_other_data_is_refused() -> None:
    cache: dict[str, Tensor] = {}

    def second_of_those_above(x: Tensor) -> Tensor:
        if "last" not in cache:
            cache["last"] = x[(x > 5).nonzero()[1, 0]].clone()
        result: Tensor = x + cache["last"]
        return result

    program = capture(second_of_those_above, (torch.tensor([9.0, 1.0, 8.0]),))
    with pytest.raises(
        UnsupportedExportError, match=r"(?s)fails for data other than that of the capture.*try  call the"
    ):
        program.to_exported_program()


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(5, generator=None).to(x),
    "randn": lambda x: torch.randn(5, generator=None).to(x),
    "rand_like": lambda x: torch.rand_like(x, generator=None),
    "randint": lambda x: torch.randint(3, 8, (5,), generator=None),
    "randperm": lambda x: torch.randperm(5, generator=None),
    "normal": lambda x: torch.normal(x, 1.0, generator=None),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_without_a_generator_that_may_have_one(name: str, tmp_path: Path) -> None:
    expected = DRAWS[name](torch.zeros(5))
    program = capture(DRAWS[name], (torch.zeros(5),))
    for run in (_module(program, tmp_path), on_onnx(program, tmp_path), _stablehlo(program, tmp_path)):
        first, second = (torch.as_tensor(run(torch.zeros(5))) for _ in range(2))
        assert first.shape == expected.shape and first.dtype.is_floating_point == expected.dtype.is_floating_point
        assert name == "randperm" or not torch.equal(first, second)
        assert name != "randperm" or sorted(first.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str)
def test_steps_of_recurrent_layers(options: dict[str, Any], tmp_path: Path) -> None:
    def step() -> Callable[[Tensor], Tensor]:
        torch.manual_seed(0)
        layers = nn.LSTM(4, 5, batch_first=True, **options)
        first = nn.Parameter(torch.randn((1 + layers.bidirectional) * layers.num_layers, 2, 5))
        optimizer = torch.optim.SGD([*layers.parameters(), first], 0.5)

        def run(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            output, (hidden, cell) = layers(x, (first, torch.zeros_like(first)))
            loss: Tensor = output.square().mean() + hidden.sin().mean() + cell.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return run

    eager, x = step(), torch.randn(4, 2, 3, 4)
    program = capture(step(), (x[0],))
    runs = [route(program, tmp_path) for route in (_module, on_onnx, _stablehlo)]
    for batch in x:
        expected = eager(batch)
        for run in runs:
            torch.testing.assert_close(torch.as_tensor(run(batch)), expected)


SCATTERS: dict[str, Callable[..., Tensor]] = {
    "scatter_add": lambda base, index, values: base.scatter_add(0, index, values),
    "amin": lambda base, index, values: base.scatter_reduce(0, index, values, "amin"),
    "amax of others": lambda base, index, values: base.scatter_reduce(0, index, values, "amax", include_self=False),
    "index_add": lambda base, index, values: base.index_add(0, index, values),
    "index_put": lambda base, index, values: base.index_put((index,), values, accumulate=True),
    "masked": lambda base, index, values: torch.ops.aten._unsafe_masked_index_put_accumulate(
        base, values > 0, [index], values
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_that_reduce_what_the_engine_has_no_kernel_for(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    args = torch.arange(5).to(dtype), torch.tensor([0, 2, 2, 4]), torch.tensor([3, 0, 5, 7]).to(dtype)
    run = on_onnx(capture(SCATTERS[name], args), tmp_path)
    assert torch.equal(run(*args), SCATTERS[name](*args))


def test_places_of_a_tensor_without_dimensions(tmp_path: Path) -> None:
    run = on_onnx(capture(torch.nonzero, (torch.tensor(0.0),)), tmp_path)
    assert [run(torch.tensor(value)).shape for value in (0.0, 2.0)] == [(0, 0), (1, 0)]


def test_statistics_that_an_evaluation_has_not(tmp_path: Path) -> None:
    def normalized(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
        return torch.native_batch_norm(x, None, None, mean, variance, False, 0.1, 1e-5)

    args = torch.randn(3, 2, 4), torch.rand(2), torch.rand(2)
    found, expected = on_onnx(capture(normalized, args), tmp_path)(*args), normalized(*args)
    torch.testing.assert_close(tuple(found), expected)


def test_losses_that_overflow_in_float16(tmp_path: Path) -> None:
    args = torch.tensor([12.0, -12.5, 3.0]).half(), torch.tensor([-1.0, 1.0, 1.0]).half()
    run = on_onnx(capture(functional.soft_margin_loss, args), tmp_path)
    torch.testing.assert_close(run(*args), functional.soft_margin_loss(*args))
