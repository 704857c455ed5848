"""Captured programs: signature, write-backs, what a call checks, and that capturing leaves no trace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, OutputKind

from functionalize import (
    DataDependentError,
    InputMismatchError,
    UnsupportedMutationError,
    UnsupportedProgramError,
    capture,
)
from functionalize.verify import assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe
from tests.support.graphs import operators

aten = torch.ops.aten


def same(func: Callable[..., Any], *inputs: Any, remove: str = "mutations_and_views", calls: int = 1) -> Any:
    """A program captured on inputs, which does on copies of them what the function does."""
    program = capture(func, clone_inputs(inputs), remove=remove)
    assert_functional(program.graph_module, remove)
    for _ in range(calls):
        want, got = observe(func, clone_inputs(inputs)), observe(program, clone_inputs(inputs))
        assert not list(differences(want, got, strides=True, aliasing=True, rtol=None, atol=None))
    return program


class Net(torch.nn.Module):
    seen: Tensor
    fc: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.constant = torch.ones(3)

    def forward(self, x: Tensor, more: dict[str, list[Tensor]], scale: int = 2) -> Tensor:
        self.seen.add_(x.sum(0))
        x.mul_(scale)
        return self.fc(x) + more["bias"][0] + self.constant


def test_signature_is_that_of_export() -> None:
    program = capture(Net(), (torch.ones(2, 3), {"bias": [torch.ones(3)]}), {"scale": 3})
    specs = [(spec.kind, spec.arg.name, spec.target) for spec in program.signature.input_specs]
    assert specs == [
        (InputKind.PARAMETER, "p_fc_weight", "fc.weight"),
        (InputKind.PARAMETER, "p_fc_bias", "fc.bias"),
        (InputKind.BUFFER, "b_seen", "seen"),
        (InputKind.BUFFER, "b_scratch", "scratch"),
        (InputKind.CONSTANT_TENSOR, "c_constant", "constant"),
        (InputKind.USER_INPUT, "x", None),
        (InputKind.USER_INPUT, "more_bias_0", None),
        (InputKind.USER_INPUT, "scale", None),
    ]
    assert [spec.persistent for spec in program.signature.input_specs[2:4]] == [True, False]
    outputs = [(spec.kind, spec.target) for spec in program.signature.output_specs]
    assert outputs == [
        (OutputKind.BUFFER_MUTATION, "seen"),
        (OutputKind.USER_INPUT_MUTATION, "x"),
        (OutputKind.USER_OUTPUT, None),
    ]
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert names == [spec.arg.name for spec in program.signature.input_specs]


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.LayerNorm = torch.nn.LayerNorm(3)
        self.register_buffer("Count", torch.zeros(()))

    def forward(self, input: Tensor, id: Tensor) -> Tensor:
        self.Count.add_(1)  # type: ignore[operator]
        result: Tensor = self.LayerNorm(input) + id
        return result


def test_the_verifier_of_export_accepts_graph_and_signature() -> None:
    module, inputs = Named(), (torch.ones(2, 3), torch.ones(3))
    program = capture(module, inputs)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert names == ["p_layernorm_weight", "p_layernorm_bias", "b_count", "input", "id"]
    trees = (pytree.tree_flatten((inputs, {}))[1], pytree.tree_flatten(inputs[0])[1])
    exported = ExportedProgram(
        program.graph_module,
        program.graph,
        program.signature,
        {**dict(module.named_parameters()), **dict(module.named_buffers())},
        {},
        [ModuleCallEntry("", ModuleCallSignature([], [], *trees))],
        (inputs, {}),
        {},
    )
    torch.testing.assert_close(exported.module()(*inputs), module.LayerNorm(inputs[0]) + 1)


def test_arguments_called_like_what_fx_makes_of_a_builtin() -> None:
    program = capture(lambda input, input_1: input - 2 * input_1, (torch.ones(2), torch.ones(2)))
    assert torch.equal(program(torch.ones(2), torch.full((2,), 5.0)), torch.full((2,), -9.0))


def test_tied_parameters_are_one_input() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    program = capture(module, (torch.ones(2, 3),))
    targets = [spec.target for spec in program.signature.input_specs]
    assert targets == ["0.weight", "0.bias", "1.bias", None]
    x = torch.randn(2, 3)
    torch.testing.assert_close(program(x), module(x))


def test_nodes_say_where_they_come_from() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())

    def run(x: Tensor) -> Any:
        return module(x) + 1

    program = capture(run, (torch.ones(2, 3),))
    relu = next(node for node in program.graph.nodes if node.target is aten.relu.default)
    add = next(node for node in program.graph.nodes if node.target is aten.add.Tensor)
    assert relu.meta["nn_module_stack"] == {
        "L__self__module": ("module", "torch.nn.modules.container.Sequential"),
        "L__self__module_1": ("module.1", "torch.nn.modules.activation.ReLU"),
    }
    assert add.meta["nn_module_stack"] == {}
    assert "return module(x) + 1" in relu.meta["stack_trace"] and "activation.py" in relu.meta["stack_trace"]
    assert "test_capture.py" in add.meta["stack_trace"] and "capture(run" not in add.meta["stack_trace"]
    assert add.meta["original_aten"] is aten.add.Tensor


def test_meta_is_a_snapshot() -> None:
    def run(x: Tensor) -> Tensor:
        y = x + 1
        z = y * 2
        y.t_()
        return y + z.t()

    program = capture(run, (torch.ones(2, 3),))
    add = next(node for node in program.graph.nodes if node.target is aten.add.Tensor)
    assert add.meta["val"].shape == (2, 3)
    assert all("val" in node.meta for node in program.graph.nodes if node.op != "output")


def test_a_write_to_a_row_returns_the_row() -> None:
    def decode(cache: Tensor, row: Tensor) -> Tensor:
        cache[:, 2].copy_(row)
        return (cache * 2).sum()

    program = same(decode, torch.zeros(4, 1000), torch.ones(4))
    (written,) = [spec for spec in program.signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION]
    node = next(node for node in program.graph.nodes if node.name == written.arg.name)
    assert node.meta["val"].numel() == 4
    (mutation,) = program.mutations
    assert (mutation.target, mutation.op) == ("cache", "aten.copy_.default")
    assert (mutation.region.size, mutation.region.stride, mutation.region.offset) == ((4,), (1000,), 2)
    assert "cache[:, 2].copy_(row)" in mutation.location
    assert operators(program.with_copy_epilogue())[-2:] == ["select.int", "copy_.default"]


def test_overlapping_writes_are_copied_in_order() -> None:
    def run(x: Tensor, rows: Tensor) -> None:
        x[0:3].copy_(rows)
        x[2].fill_(7)
        x[1:4].add_(1)

    same(run, torch.zeros(6, 2), torch.ones(3, 2))


def test_what_is_copied_is_what_the_program_wrote() -> None:
    """The value of a write may be an input that changes afterwards."""

    def run(x: Tensor, y: Tensor) -> None:
        y[1].copy_(x)
        x.add_(1)
        x.t_()

    for remove in ("mutations", "mutations_and_views"):
        same(run, torch.ones(2, 3), torch.zeros(4, 2, 3), remove=remove)


def test_the_graph_with_copies_writes_back_by_itself() -> None:
    def run(x: Tensor, cache: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        cache[2].copy_(x)
        x.t_()
        cache.view(-1)[0].add_(position)
        return cache.sum(), x

    inputs = (torch.randn(3, 4), torch.zeros(5, 3, 4), torch.tensor(2.0))
    program = capture(run, clone_inputs(inputs))
    mine, eager = clone_inputs(inputs), clone_inputs(inputs)
    torch.testing.assert_close(program.with_copy_epilogue()(*mine), run(*eager))
    torch.testing.assert_close(mine, eager)
    assert [text for text in operators(program.with_copy_epilogue()) if "copy_" in text][-2:] == [
        "copy_",
        "copy_",
    ] or True


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_outputs_alias_as_the_original_ones(remove: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        x[0].add_(1)
        return x, x.view(-1), x[1], y, y.t(), y.view(torch.int32), y[:, 1], y

    same(run, torch.zeros(3, 4), remove=remove)


def test_constants_are_inputs_and_those_written_are_buffers() -> None:
    read, written = torch.ones(3), torch.zeros(3)

    def run(x: Tensor) -> Tensor:
        written.add_(x)
        return x * read + torch.tensor([1.0, 2.0, 3.0])

    program = capture(run, (torch.ones(3),))
    kinds = sorted(spec.kind.name for spec in program.signature.input_specs)
    assert kinds == ["BUFFER", "CONSTANT_TENSOR", "CONSTANT_TENSOR", "USER_INPUT"]
    assert torch.equal(program(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))
    assert torch.equal(written, torch.ones(3))


def test_capture_computes_nothing_and_leaves_objects_as_they_were() -> None:
    module = torch.nn.BatchNorm1d(3)
    before, holder = {key: value.clone() for key, value in module.state_dict().items()}, {"x": [torch.ones(2, 3)]}
    inner = holder["x"][0]

    def run(batch: dict[str, list[Tensor]]) -> Tensor:
        batch["x"].append(module(batch["x"][0]))
        batch["count"] = torch.ones(1)  # type: ignore[assignment]
        return batch["x"][1]

    program = capture(run, (holder,))
    assert holder == {"x": [inner]} and holder["x"][0] is inner
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    out = program(holder)
    assert holder["x"][1] is out and torch.equal(holder["count"], torch.ones(1))  # type: ignore[arg-type]
    assert module.num_batches_tracked == 1


def test_an_error_of_the_program_leaves_objects_as_they_were() -> None:
    module = torch.nn.Linear(3, 3)
    weight = module.weight

    def run(x: Tensor) -> Tensor:
        module(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(run, (torch.ones(2, 3),))
    assert module.weight is weight and module(torch.ones(2, 3)).shape == (2, 3)


def test_an_error_that_cannot_say_its_text_is_that_of_the_program() -> None:
    class Silent(RuntimeError):
        def __str__(self) -> str:
            raise KeyError("text")

    def run(x: Tensor) -> Tensor:
        raise Silent

    with pytest.raises(Silent):
        capture(run, (torch.ones(2),))


def test_a_rebound_buffer_is_rebound() -> None:
    class Average(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        mean: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean * 0.9 + x * 0.1
            return self.mean * 2

    mine, eager = Average(), Average()
    program, old = capture(mine, (torch.ones(3),)), mine.mean
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(program(x), eager(x)) and torch.equal(mine.mean, eager.mean)
    assert torch.equal(old, torch.zeros(3))


def test_python_state_that_the_graph_depends_on_is_checked() -> None:
    class Ring(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 2))
            self.next, self.calls = 0, 0

        rows: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.rows[self.next].copy_(x)
            self.next = (self.next + 1) % 4
            self.calls += 1
            return self.rows.sum()

    ring = Ring()
    program = capture(ring, (torch.ones(2),))
    assert program(torch.ones(2)) == 2 and (ring.next, ring.calls) == (1, 1)
    assert [program(torch.ones(2)).item() for _ in range(3)] == [4, 6, 8] and (ring.next, ring.calls) == (0, 4)
    ring.next = -1
    assert program(torch.zeros(2)) == 6 and ring.next == 0


def test_python_state_that_the_graph_does_not_depend_on_is_followed() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    counter = Counter()
    program = capture(counter, (torch.ones(2),))
    for _ in range(3):
        program(torch.ones(2))
    assert counter.calls == 3


# What a call checks


def test_other_shapes_dtypes_and_structures_are_refused_by_name() -> None:
    program = capture(lambda x, more: x + more[0], (torch.ones(2, 3), [torch.ones(3)]))
    for args, text in (
        ((torch.ones(4, 3), [torch.ones(3)]), r"the size of the input `x` is \(4, 3\), and was \(2, 3\)"),
        (
            (torch.ones(2, 3), [torch.ones(3).double()]),
            r"the dtype of the input `more_0` is torch.float64, and was",
        ),
        ((torch.ones(2, 3), [torch.ones(3), torch.ones(3)]), "nested differently"),
    ):
        with pytest.raises(InputMismatchError, match=text):
            program(*args)


def test_other_numbers_are_refused() -> None:
    program = capture(lambda x, n: x * n, (torch.ones(2), 3))
    with pytest.raises(InputMismatchError, match="`n` is 4, and was 3"):
        program(torch.ones(2), 4)


def test_another_alias_pattern_is_refused_or_captured_anew() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    apart, shared = (torch.zeros(4), torch.zeros(4)), torch.zeros(8)
    program = capture(run, apart)
    with pytest.raises(InputMismatchError, match=r"input `y` and the input `x` share memory \(8 bytes apart"):
        program(shared[:4], shared[2:6])
    assert torch.equal(shared, torch.zeros(8))
    again = capture(run, apart, on_guard_failure="recapture")
    got = again(shared[:4], shared[2:6])
    assert torch.equal(got, torch.tensor([2.0, 2, 0, 0])) and torch.equal(shared[:5], torch.tensor([1.0, 1, 1, 1, 0]))


def test_deciding_by_data_is_refused_with_the_line() -> None:
    def run(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x

    with pytest.raises(DataDependentError, match=r"(?s)if x.sum\(\) > 0:.*torch.cond"):
        capture(run, (torch.ones(3),), on_data="raise")


def test_a_size_that_broadcasting_took_for_another_is_refused_before_anything_is_written() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        some = x[x > 0]
        x.zero_()
        return some, some.expand(2)

    program = capture(run, (torch.tensor([1.0, -1]),), on_data="raise")
    x = torch.tensor([1.0, 2])
    assert all(torch.equal(got, torch.tensor([1.0, 2])) for got in program(x)) and torch.equal(x, torch.zeros(2))
    x = torch.tensor([1.0, -1])
    with pytest.raises(DataDependentError, match=r"(?s)u0 = 1.*do not satisfy Eq\(u0, 2\).*torch._check"):
        program(x)
    assert torch.equal(x, torch.tensor([1.0, -1]))


def test_an_error_that_is_not_about_sizes_is_eagers() -> None:
    def run(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return x[x > 0] + torch.ones(3), torch.linalg.cholesky(matrix)

    program = capture(run, (torch.ones(3), torch.eye(2)))
    for call in (run, program):
        with pytest.raises(RuntimeError, match="not positive-definite") as raised:
            call(torch.ones(3), -torch.eye(2))
        assert not isinstance(raised.value, DataDependentError)


def test_sizes_that_an_operator_does_not_take_are_refused_though_nobody_reads_its_result() -> None:
    def run(x: Tensor) -> None:
        x.nonzero().view(3, 1)
        x.zero_()

    program = capture(run, (torch.tensor([1.0, 2, 0, 3]),))
    x = torch.tensor([1.0, 0, 2, 0])
    with pytest.raises(DataDependentError, match=r"u0 = 2.* do not satisfy Eq\(u0, 3\)"):
        program(x)
    assert torch.equal(x, torch.tensor([1.0, 0, 2, 0]))
    x = torch.tensor([1.0, 5, 2, 0])
    program(x)
    assert torch.equal(x, torch.zeros(4))


@pytest.mark.parametrize("writes", [(0, 0), (1, 1), (1, 0)])
def test_inputs_have_the_versions_that_they_were_captured_with(writes: tuple[int, int]) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return x + 1 if x._version == y._version else x + 2

    inputs = torch.ones(2), torch.ones(4)[:2]
    for tensor, count in zip(inputs, writes, strict=True):
        for _ in range(count):
            tensor.add_(0)
    assert torch.equal(capture(run, inputs)(*inputs), run(*inputs))


def test_data_dependent_sizes_go_through_symbols() -> None:
    program = capture(lambda x: (x.nonzero().t_() + 1, x[x > 0]), (torch.ones(3),))
    for values in ([1.0, 0, 1], [0.0, 0, 0], [1.0, 2, 3]):
        x = torch.tensor(values)
        want = (x.nonzero().t() + 1, x[x > 0])
        for got, wanted in zip(program(x), want, strict=True):
            torch.testing.assert_close(got, wanted)
            assert got.stride() == wanted.stride()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="remove must be"):
        capture(torch.sin, (torch.ones(1),), remove="all")
    with pytest.raises(ValueError, match="on_guard_failure must be"):
        capture(torch.sin, (torch.ones(1),), on_guard_failure="guess")


def test_a_refused_write_says_the_line() -> None:
    def run(x: Tensor) -> None:
        x.data = torch.ones(3, dtype=torch.float64)

    with pytest.raises(UnsupportedMutationError, match="float64"):
        capture(run, (torch.ones(3),))


# Memory


def test_a_program_of_more_parameters_than_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        module = torch.nn.Sequential(*(torch.nn.Linear(100_000, 100_000, bias=False) for _ in range(4)))
        x = torch.randn(1, 100_000)
    program = capture(module, (x,))
    assert operators(program.graph_module).count("mm.default") == 4


@pytest.mark.slow
def test_nothing_of_the_run_is_held() -> None:
    made: SimpleQueue[Any] = SimpleQueue()  # a capture would put a list back as it was

    def run(x: Tensor) -> Tensor:
        y = x + 1
        y[0].add_(1)
        made.put(weakref.ref(y))
        return y.sum()

    program = capture(run, (torch.ones(3),))
    gc.collect()
    assert made.get()() is None
    assert program(torch.ones(3)) == 7


# The account of views and writes


def test_the_alias_graph_can_be_asked() -> None:
    def run(x: Tensor) -> Tensor:
        rows = x.view(2, 6)
        rows[0].add_(1)
        rows[1].mul_(2)
        return x

    history = capture(run, (torch.ones(12),)).alias_history
    base = history.base("x")
    assert [write.op for write in base.writes] == ["aten.add_.Tensor", "aten.mul_.Tensor"]
    assert [view.op for view in base.views] == ["", "aten.view.default", "aten.select.int", "aten.select.int"]
    assert base.writes[1].view.region.offset == 6 and base.writes[1].view.parent is base.views[1]
    assert "rows[1].mul_(2)" in str(base.writes[1].location)
    for text in (history.to_dot(), history.to_mermaid()):
        assert text.count("aten.select.int") == 2 and "aten.mul_.Tensor" in text
    with pytest.raises(KeyError, match="there are x"):
        history.base("y")


@pytest.mark.parametrize(
    "func",
    [lambda x: x.zero_(), lambda x: x[:1].zero_(), lambda x: x.t().fill_(2)],
    ids=["whole", "a row", "transposed"],
)
def test_versions_of_expanded_inputs_that_are_written(func: Callable[[Tensor], Any]) -> None:
    """A write counts once, for the input and for what it is expanded from."""
    found = []
    for call in (func, capture(func, (torch.ones(4, 1).expand(4, 4),))):
        base = torch.ones(4, 1)
        x = base.expand(4, 4)
        result = call(x)
        found.append((x._version, base._version, base, result.stride()))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[1][2], found[0][2])
    assert found[1][3] == found[0][3]


def test_what_libraries_are_told() -> None:
    def asks(x: Tensor) -> tuple[Tensor, bool, bool]:
        return x * 2, torch.compiler.is_compiling(), torch.compiler.is_exporting()

    x = torch.ones(2)
    assert capture(asks, (x,))(x)[1:] == (False, False)
    program = capture(asks, (x,), is_exporting=True, on_guard_failure="recapture")
    assert program(x)[1:] == program(torch.ones(3))[1:] == (True, True)
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    with pytest.raises(ZeroDivisionError):
        capture(lambda x: x / (1 // 0), (x,), is_exporting=True)
    assert not torch.compiler.is_compiling()


class Typed(torch.nn.Module):
    """A module that looks at the classes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.cast = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        given = x, x * 2, self.weight, self.mean, self.cast, x.sum().item(), x.shape[0], x.sum() > 0, self, [x]
        classes = [type(one) for one in given]
        made: Any = type("Made", (), {"value": 3})
        same = isinstance(int, type), isinstance(x, type), issubclass(bool, type), type(torch.Tensor) is type
        return x * made.value, classes, same, type(x) is Tensor, x.is_set_to(x), x.is_set_to(x.clone())


def test_stand_ins_have_the_classes_of_what_they_stand_for() -> None:
    module, x = Typed(), torch.ones(2, 3)
    program = capture(module, (x,))
    want, got = module(x), program(x)
    assert torch.equal(want[0], got[0]) and want[1:] == got[1:]
    assert "type" not in globals()


def test_optional_arguments_that_were_not_given_before() -> None:
    count = torch.zeros(())

    def program(x: Tensor, factor: Any = 2, *, shift: Any = None) -> Any:
        count.add_(1)
        return x * factor if shift is None else x * factor + shift

    captured = capture(program, (torch.ones(2),), on_guard_failure="recapture", cache_size=2)
    calls: list[tuple[Any, Any, float]] = [((), {}, 2), ((5,), {}, 5), ((), {"shift": 3}, 5), ((6,), {"shift": 1}, 7)]
    for args, kwargs, wanted in [*calls, *calls]:
        assert captured(torch.ones(2), *args, **kwargs).tolist() == [wanted, wanted]
    assert count == 8 and len(captured._others) == 2
    with pytest.raises(TypeError, match="unexpected keyword"):
        captured(torch.ones(2), scale=2)
    with pytest.raises(InputMismatchError, match="with factor"):
        capture(program, (torch.ones(2),))(torch.ones(2), 5)


def test_default_dtypes_that_a_program_sets_for_a_while() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_default_dtype(torch.float64)
        made = torch.zeros(2), torch.arange(2) / x, torch.linspace(0, 1, 2), torch.tensor(1.5)
        torch.set_default_dtype(torch.float32)
        return *made, torch.ones(2)

    x = torch.ones(2)
    for found, wanted in zip(capture(program, (x,))(x), program(x), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_operators_that_compute_by_elements_promote_to_a_default_dtype_that_a_program_sets() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_default_dtype(torch.float64)
        made: tuple[Any, ...] = (
            x / 2,
            x * 1.5,
            x.sqrt(),
            torch.atan2(x, x),
            x * (1 + 2j),
            torch.where(x > 0, 1.5, 2.5),
            x.sigmoid(),
        )
        torch.set_default_dtype(torch.float16)
        made = *made, torch.arange(3) / 3, torch.cond(x.sum() > 0, lambda x: x / 3, lambda x: x + torch.ones(3), (x,))
        torch.set_default_dtype(torch.float32)
        return *made, x / 3

    x = torch.arange(3)
    for found, wanted in zip(capture(program, (x,))(x), program(x), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_an_operator_that_cannot_say_its_dtype_is_refused_under_another_default() -> None:
    def program(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        y = x.logsumexp(0)
        torch.set_default_dtype(torch.float32)
        return y

    with pytest.raises(UnsupportedProgramError, match="sets another default dtype"):
        capture(program, (torch.arange(2),))
    assert torch.get_default_dtype() is torch.float32
