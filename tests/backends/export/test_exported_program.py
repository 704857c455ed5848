"""Captured programs as ``torch.export.ExportedProgram``: held against eager over three calls, after save and load."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import math
import operator
import shutil
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture, from_exported_program, functionalize
from functionalize.backends.export.passes.taking_apart import sizes_stay_free, taken_apart
from tests.support.export_programs import PROGRAMS, made

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


def saved_and_loaded(exported: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Buffer(torch.zeros(3))
        self.linear, self.norm = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.count.add_(1)
        self.count[0] += 2
        x[0].mul_(2)
        y = self.norm(self.linear(x)) + self.count + more["z"]
        return {"y": y, "count": self.count, "x": x, "view": more["z"].t(), "constant": 3}


@pytest.mark.filterwarnings("ignore:erase_node:UserWarning")  # torch 2.15, in `run_decompositions`
@pytest.mark.parametrize("as_run", ["module", "loaded", "decomposed"])
def test_state_arguments_and_nesting(as_run: str) -> None:
    model = Counter()
    twin = copy.deepcopy(model)
    batch = Dim("batch", min=2, max=100)
    shapes = {"x": {0: batch}, "more": {"z": None}}
    example = (torch.randn(4, 3),), {"more": {"z": torch.randn(1, 3)}}
    exported: Any = capture(model, *example, dynamic_shapes=shapes).to_exported_program()
    if as_run == "loaded":
        exported = saved_and_loaded(exported)
    if as_run == "decomposed":
        exported = exported.run_decompositions({})
    module = exported.module()
    for rows in (2, 5, 7):
        x, z = torch.randn(rows, 3), torch.randn(1, 3)
        mine = x.clone()
        expected, found = twin(x, more={"z": z}), module(mine, more={"z": z})
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(mine, x)
        assert found["x"] is mine
        assert found["count"] is module.count
        assert found["view"].data_ptr() == z.data_ptr()
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(Counter().named_buffers()))  # is left as it was
    with pytest.raises(AssertionError, match="<= 100"):
        module(torch.randn(200, 3), more={"z": z})


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_three_calls_after_save_and_load(name: str) -> None:
    program, inputs = made(name)
    twin, _ = made(name)
    module = saved_and_loaded(capture(program, inputs()).to_exported_program()).module()
    for _ in range(3):
        given = inputs()
        mine = copy.deepcopy(given)
        expected, found = twin(*given), module(*mine)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(mine, given)


@pytest.mark.parametrize("name", ["sgd", "decode", "sizes-by-data"])
def test_decomposed(name: str) -> None:
    program, inputs = made(name)
    twin, _ = made(name)
    module = capture(program, inputs()).to_core_aten().module()
    for _ in range(3):
        given = inputs()
        mine = copy.deepcopy(given)
        torch.testing.assert_close(module(*mine), twin(*given))


SLOW = {"sgd", "adamw", "tied-step"}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS])
def test_core_operators_alone(name: str) -> None:
    program, inputs = made(name)
    nodes = capture(program, inputs()).to_core_aten().graph.nodes
    ops = {node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)}
    assertions = {torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg}
    assert {op for op in ops - assertions if torch.Tag.core not in op.tags} == set()


def test_lengths_of_sequences_that_differ_stay_so_in_the_core_set() -> None:
    layer = torch.nn.LSTM(3, 4)
    exported = capture(layer, (torch.randn(5, 2, 3),), dynamic_shapes=({0: Dim("n")},)).to_core_aten()
    x = torch.randn(7, 2, 3)
    torch.testing.assert_close(exported.module()(x), layer(x))


def test_which_kernel_a_convolution_takes_is_no_condition_on_the_batch() -> None:
    layer, batch = torch.nn.Conv2d(3, 4, 3), Dim("batch", min=2, max=64)
    program = capture(layer, (torch.randn(4, 3, 5, 5),), dynamic_shapes=({0: batch},))
    for exported in (program.to_exported_program(), program.to_core_aten()):
        assert [(one.lower, one.upper) for one in exported.range_constraints.values()] == [(2, 64)]
        x = torch.randn(20, 3, 5, 5)
        torch.testing.assert_close(exported.module()(x), layer(x))


def test_sizes_that_may_differ_and_no_longer_do_are_refused() -> None:
    dims = ({0: Dim("n")},)
    exported = capture(torch.sin, (torch.ones(4),), dynamic_shapes=dims).to_exported_program()
    row_by_row = {torch.ops.aten.sin.default: lambda x: torch.stack([row.cos() for row in x.unbind()])}
    refused = "dimension 0 of `arg_0` is dynamic, but the decomposed program supports only 4"
    with pytest.raises(UnsupportedExportError, match=refused), sizes_stay_free(exported, "ONNX"):
        taken_apart(exported, row_by_row, "ONNX")


class Tally(torch.nn.Module):
    """State that is written, state that is read, and a result that is state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.count = torch.nn.Buffer(torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.count.add_((x * self.weight).sum(0))
        self.calls += 1
        return {"count": self.count, "x": x, "y": more["z"] * self.calls}


def test_explicit_state_with_nesting_keywords_and_sizes() -> None:
    model, x, z = Tally(), torch.randn(4, 3), torch.randn(2)
    shapes = {"x": {0: Dim("n", min=2, max=99)}, "more": {"z": None}}
    program = capture(model, (x,), {"more": {"z": z}}, dynamic_shapes=shapes)
    program(x, more={"z": z})
    exported = saved_and_loaded(program.to_exported_program(explicit_state=True))
    assert [*exported.state_dict] == ["weight"]
    *state, _ = exported.example_inputs[0]
    for rows in (2, 5, 7):
        x = torch.randn(rows, 3)
        *state, result = exported.module()(*state, x, more={"z": z})
        torch.testing.assert_close(result, model(x, more={"z": z}))
    torch.testing.assert_close(state, [model.count, torch.tensor(4)])


def test_memory_that_is_addressed_lies_as_it_did() -> None:
    """Where views are no copies any more, what is computed from them has other strides."""

    def addressed(x: torch.Tensor) -> Any:
        y = (x.t() + 1).contiguous()
        y.as_strided((2,), (1,), 1).mul_(3)
        return y, x.t().clone().contiguous().as_strided((4,), (1,))

    module = capture(addressed, (torch.zeros(2, 3),)).to_core_aten().module()
    x = torch.arange(6.0).reshape(2, 3)
    torch.testing.assert_close(module(x), addressed(x))


def test_complex_constants_that_are_infinite_or_nan() -> None:
    """Python prints them as `infj` and `nanj`, and so does the code of a graph."""

    def complex_constants(x: torch.Tensor) -> list[torch.Tensor]:
        infinite, nan = complex(1, math.inf), complex(math.nan, math.nan)
        chosen = torch.where(x.real > 0, x, nan)
        return [x * infinite, x - infinite, torch.full((2,), nan), chosen, torch.logaddexp(x, x)]

    x = torch.tensor([1 + 2j, -3j, -1.0])
    program = capture(complex_constants, (x,))
    exported = program.to_exported_program()
    traced = make_fx(functionalize(complex_constants))(x)
    for run in (
        program,
        traced,
        *(form.module() for form in (exported, exported.run_decompositions(), program.to_core_aten())),
    ):
        torch.testing.assert_close(run(x), complex_constants(x), equal_nan=True)


def test_optimizer_state_and_gradients_are_buffers() -> None:
    program, inputs = made("adamw")
    exported = capture(program, inputs()).to_exported_program()
    buffers = exported.graph_signature.buffers_to_mutate.values()
    assert {"update.state.0.step", "update.state.0.exp_avg", "model.0.weight_grad"} <= set(buffers)
    assert set(exported.graph_signature.parameters_to_mutate.values()) == set(exported.graph_signature.parameters)


def test_state_that_the_first_call_makes_otherwise() -> None:
    """The momentum of the first step is not damped: as later steps with zeros it would be another program."""
    layer = torch.nn.Linear(2, 1)
    update = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        update.zero_grad()
        loss: torch.Tensor = layer(x).sum()
        loss.backward()
        update.step()
        return loss

    program = capture(step, (torch.ones(3, 2),))
    with pytest.raises(UnsupportedExportError, match=r"(?s)momentum_buffer.*call the program once"):
        program.to_exported_program()
    assert not update.state
    program(torch.ones(3, 2))
    module = program.to_exported_program().module()
    for _ in range(3):
        torch.testing.assert_close(module(torch.ones(3, 2)), program(torch.ones(3, 2)))


def test_objects_among_the_arguments_are_bound() -> None:
    class Cache:
        def __init__(self) -> None:
            self.rows = torch.zeros(3)

    def add(x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.rows = cache.rows + x
        result: torch.Tensor = cache.rows
        return result

    cache, twin = Cache(), Cache()
    module = capture(add, (torch.zeros(3), cache)).to_exported_program().module()
    for _ in range(3):
        x = torch.randn(3)
        torch.testing.assert_close(module(x), add(x, twin))
    with pytest.raises(ValueError, match=r"input tree spec|args and kwargs"):
        module(torch.zeros(3), Cache())


def test_objects_among_the_results_are_dicts() -> None:
    class Pair:
        def __init__(self, first: torch.Tensor, rest: list[torch.Tensor]) -> None:
            self.first, self.rest = first, rest

    module = capture(lambda x: (x, Pair(x + 1, [x * 2])), (torch.zeros(2),)).to_exported_program().module()
    x = torch.ones(2)
    torch.testing.assert_close(module(x), (x, {"first": x + 1, "rest.0": x * 2}))


def test_all_causes_in_one_error() -> None:
    log: list[torch.Tensor] = []

    def everything(x: torch.Tensor, y: torch.Tensor) -> Any:
        log.append(x.sum())
        x.resize_(2)
        y.t_()
        return object.__new__(torch.nn.Module)

    program = capture(everything, (torch.zeros(3), torch.zeros(2, 3)))
    with pytest.raises(UnsupportedExportError) as caught:
        program.to_exported_program()
    assert len(caught.value.causes) == 3
    for part in ("for 3 causes", "a list that gets longer", "`x`", "`y`"):
        assert part in str(caught.value)


def test_other_decisions_are_refused() -> None:
    program = capture(lambda x: x * 2 if x.sum() > 0 else x, (torch.ones(2),))
    module = saved_and_loaded(program.to_exported_program()).module()
    torch.testing.assert_close(module(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="test_exported_program"):
        module(-torch.ones(2))


def test_what_is_kept_of_the_program() -> None:
    model = Counter()
    exported = capture(model, (torch.randn(4, 3),), {"more": {"z": torch.randn(1, 3)}}).to_exported_program()
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert any("self.count.add_(1)" in node.meta["stack_trace"] for node in nodes)
    assert any("linear" in str(node.meta["nn_module_stack"]) for node in nodes)
    assert {"", "linear", "norm"} <= {entry.fqn for entry in exported.module_call_graph}
    assert set(exported.state_dict) == set(model.state_dict())
    assert exported.state_dict["linear.weight"].data_ptr() == model.linear.weight.data_ptr()
    assert exported.state_dict["count"].data_ptr() != model.count.data_ptr()


def test_from_an_exported_program() -> None:
    model = Counter()
    twin = copy.deepcopy(model)
    batch = Dim("batch", min=2, max=100)
    example = (torch.randn(4, 3),), {"more": {"z": torch.randn(1, 3)}}
    exported = torch.export.export(model, *example, dynamic_shapes={"x": {0: batch}, "more": {"z": None}})
    program = from_exported_program(exported)
    assert {"count", "x"} <= {write.target for write in program.mutations}
    for rows in (4, 6):
        x, z = torch.randn(rows, 3), torch.randn(1, 3)
        mine = x.clone()
        torch.testing.assert_close(program(mine, more={"z": z}), twin(x, more={"z": z}))
        torch.testing.assert_close(mine, x)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
@pytest.mark.filterwarnings("ignore")  # of the compiler's, about its own tools
def test_aotinductor_threads_the_state(tmp_path: Path) -> None:
    """Compiled, loaded and called three times: statistics, a cache with a moving position, and a written argument."""

    def made() -> Any:
        torch.manual_seed(0)
        norm, cache = torch.nn.BatchNorm1d(2), torch.zeros(4, 2)

        def run(x: Tensor, position: Tensor) -> Tensor:
            cache[position] = x[0]
            result: Tensor = norm(x) + cache.sum()
            x.mul_(2)
            return result

        return run

    inductor: Any = importlib.import_module("torch._inductor")
    with torch.no_grad():
        exported = capture(made(), (torch.randn(3, 2), torch.tensor(1))).to_exported_program()
        file = inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        loaded, eager = inductor.aoti_load_package(file), made()
        for position in map(torch.tensor, range(3)):
            mine = torch.randn(3, 2)
            given = mine.clone()
            torch.testing.assert_close(loaded(mine, position), eager(given, position), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine, given)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


@pytest.mark.parametrize("ends", [Tensor.detach, _Reversed.apply, torch.no_grad()(Tensor.exp)])
def test_results_require_no_gradients_where_the_program_ends_some_on_its_own(ends: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    x = torch.randn(3, 2)
    plain = capture(lambda x: layer(x) * 2, (x,)).to_exported_program().module()(x)
    assert plain.requires_grad
    program = capture(lambda x: (layer(x) * ends(x @ layer.weight), x), (x,))
    one, _ = program.to_exported_program().module()(x)
    *_, (other, _) = program.to_exported_program(explicit_state=True).module()(x)
    for found in (one, other):
        assert not found.requires_grad
        torch.testing.assert_close(found, (layer(x) * ends(x @ layer.weight)).detach())


def test_gradients_through_complex_numbers() -> None:
    """As of rotary positions; torch takes none through the copies of some views."""

    def turned(x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.reshape(2, 3, 2))
        angles = torch.polar(torch.ones(3), torch.arange(3.0))
        return torch.view_as_real((numbers * angles).conj() * numbers.conj()).flatten(1)

    x = torch.randn(2, 6, requires_grad=True)
    exported = capture(turned, (x,)).to_exported_program()
    results = [run(x) for run in (turned, exported.module())]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(result.sin().sum(), x) for result in results]
    torch.testing.assert_close(*gradients)
    assert not [node for node in exported.graph.nodes if getattr(node.target, "is_view", False)]


class Positions(torch.nn.Module):
    """Makes tables at its first call: of constants, of a buffer, of a parameter, also with gradients."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.table: Tensor | None = None
        self.rates, self.scales = torch.nn.Buffer(torch.rand(4), persistent=False), torch.nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.size(0) != x.size(0):
            rates = {"constants": torch.ones(4), "buffer": self.rates}.get(self.source, self.scales)
            rates = rates if self.source == "gradients" else rates.detach()
            self.table = torch.outer(torch.arange(float(x.size(0))), rates).cos()
        return x * self.table * self.scales


@pytest.mark.parametrize("source", ["constants", "buffer", "parameter"])
def test_what_the_first_call_makes_of_constants(source: str) -> None:
    module = Positions(source)
    run = saved_and_loaded(capture(module, (torch.randn(3, 4),)).to_exported_program()).module()
    assert module.table is None
    for x in torch.randn(3, 3, 4):
        torch.testing.assert_close(run(x), module(x))


def test_what_the_first_call_makes_with_gradients_is_refused() -> None:
    module = Positions("gradients")
    program = capture(module, (torch.randn(3, 4),))
    with pytest.raises(UnsupportedExportError, match=r"(?s)the first call creates `table`.*try  call the program once"):
        program.to_exported_program()
    program(torch.randn(3, 4))
    run = saved_and_loaded(program.to_exported_program()).module()
    x = torch.randn(3, 4)
    torch.testing.assert_close(run(x), module(x))


# Containers of arguments


def of_dict(**more: Any) -> dict[str, Any]:
    return {"a": torch.ones(2), "b": torch.full((2,), 2.0), **more}


def of_list() -> list[Any]:
    return [torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)]


WRITTEN: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Any]]] = {
    "an entry": (of_dict, lambda x, held: held.update(a=x + 1)),
    "a nested entry": (lambda: {"in": of_dict()}, lambda x, held: held["in"].update(a=x, b=held["in"]["a"])),
    "an item": (of_list, lambda x, held: operator.setitem(held, 0, held[1] + x)),
    "the other way around": (of_list, lambda x, held: held.reverse()),
    "turned": (lambda: deque(of_list()), lambda x, held: held.rotate(1)),
    "pushed out": (lambda: deque(of_list(), maxlen=3), lambda x, held: held.append(x)),
    "sorted": (of_list, lambda x, held: held.sort(key=lambda one: one is held, reverse=True)),
}
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Any], str]] = {
    "moved": (lambda: OrderedDict(of_dict()), lambda x, held: held.move_to_end("a"), "change their order"),
    "put back last": (of_dict, lambda x, held: held.update(a=held.pop("a")), "change their order"),
    "popped": (of_dict, lambda x, held: held.pop("a"), "a call removes"),
    "popped at random": (of_dict, lambda x, held: held.popitem(), "a call removes"),
    "added": (of_dict, lambda x, held: held.update(z=x + 1), "an entry that a call adds"),
    "added unless there": (of_dict, lambda x, held: held.setdefault("z", x), "an entry that a call adds"),
    "added inside": (lambda: {"in": of_dict()}, lambda x, held: held["in"].update(z=x), "an entry that a call adds"),
    "made by default": (lambda: defaultdict(list, of_dict()), lambda x, held: held["z"].append(x), "a call adds"),
    "cleared": (of_dict, lambda x, held: held.clear(), "a call removes"),
    "appended": (of_list, lambda x, held: held.append(x), "length changes"),
    "inserted": (of_list, lambda x, held: held.insert(0, x), "length changes"),
    "popped from a list": (of_list, lambda x, held: held.pop(), "length changes"),
    "a slice": (of_list, lambda x, held: operator.setitem(held, slice(1, None), [x]), "length changes"),
    "popped on the left": (lambda: deque(of_list()), lambda x, held: held.popleft(), "length changes"),
    "a number": (lambda: of_dict(n=1), lambda x, held: held.update(n=held["n"] + 1), "a Python value"),
}


def written_to(change: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Tensor]:
    def program(x: Tensor, held: Any) -> Tensor:
        change(x, held)
        return x * 2

    return program


@pytest.mark.parametrize("name", WRITTEN)
def test_containers_of_arguments_get_new_values(name: str) -> None:
    make, change = WRITTEN[name]
    program = written_to(change)
    run = capture(program, (torch.ones(2), make())).to_exported_program().module()
    for number in range(2):
        x, ours, theirs = torch.full((2,), float(number)), make(), make()
        assert torch.equal(run(x, ours), program(x, theirs))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CHANGED)
def test_containers_of_arguments_that_are_changed_are_refused(name: str) -> None:
    make, change, what = CHANGED[name]
    program, ours, theirs = written_to(change), make(), make()
    captured = capture(program, (torch.ones(2), make()))
    with pytest.raises(
        UnsupportedExportError, match=rf"(?s)cause.*held.*{what}.*of its arguments.*change the container outside"
    ):
        captured.to_exported_program()
    assert torch.equal(captured(torch.ones(2), ours), program(torch.ones(2), theirs))
    assert list(ours) == list(theirs) if isinstance(ours, dict) else len(ours) == len(theirs)


def test_what_is_new_is_returned_and_put_into_the_argument_outside() -> None:
    run = capture(lambda x, held: (x * 2, x + held["a"]), (torch.ones(2), of_dict())).to_exported_program().module()
    held = of_dict()
    _, held["z"] = run(torch.ones(2), held)
    assert torch.equal(held["z"], torch.full((2,), 2.0)) and list(held) == ["a", "b", "z"]


def test_an_argument_that_is_state_of_what_is_exported_has_to_be_there() -> None:
    class Cache:
        def __init__(self) -> None:
            self.a = torch.ones(2)

    def program(x: Tensor, cache: Any) -> Tensor:
        cache.a = cache.a + x
        return x * 2

    cache = Cache()
    captured = capture(program, (torch.ones(2), cache))
    run = captured.to_exported_program().module()
    run(torch.ones(2))
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    del cache
    gc.collect()
    with pytest.raises(UnsupportedProgramError, match=r"(?s)`cache`, an object.* no longer exists.*keep the object"):
        captured.to_exported_program()


# Complex numbers


class Mixing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 4, dtype=torch.complex64))
        self.seen = torch.nn.Buffer(torch.zeros(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z = self.weight * x
        z[1:] = z[:1].conj()
        z[:, ::2] *= 1j
        z[-1, 1:3].real.add_(2)
        torch.view_as_real(z)[..., 0, 1] = 3.0
        self.seen[1:] += x[0, 1:]
        return z, z.imag[1:], z[..., -1], z.select(-1, -2) * 2


def test_slices_of_complex_numbers_are_written_with_gradients() -> None:
    module = Mixing()
    twin = copy.deepcopy(module)
    example = torch.randn(2, 4, dtype=torch.complex64, requires_grad=True)
    run = saved_and_loaded(capture(module, (example,)).to_exported_program()).module()
    for _ in range(2):
        x = torch.randn(2, 4, dtype=torch.complex64, requires_grad=True)
        found = [(called(x), called) for called in (run, twin)]
        torch.testing.assert_close(*(results for results, _ in found))
        gradients = [
            torch.autograd.grad(sum(one.abs().square().sum() for one in results), (x, called.weight))
            for results, called in found
        ]
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(run.seen, twin.seen)


def test_gradients_through_writes_to_complex_numbers_are_taken_inside() -> None:
    def program(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        z = x.clone()
        z[1:] = z[1:].conj() * 2
        torch.view_as_real(z)[..., 0] *= 3.0
        return torch.autograd.grad(z.abs().sum(), x)[0]

    run = capture(program, (torch.randn(3, dtype=torch.complex64),)).to_exported_program().module()
    for x in torch.randn(2, 3, dtype=torch.complex64):
        torch.testing.assert_close(run(x), program(x))
