"""What is set around a call of ``torch.compile(..., backend="functionalize")``: it finds what eager finds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks

from functionalize import capture

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    # Dynamo, and torch's derivatives forward, warn of torch's own code.
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _writes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(2)
    y = x * x
    y[0].mul_(3)
    return y, y.t()


def _stops(x: torch.Tensor) -> tuple[torch.Tensor]:
    with torch.no_grad():
        y = x * 2
    return (y * x,)


@pytest.mark.parametrize("f", [_writes, _stops, torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())])
@pytest.mark.parametrize("called_before", [False, True])
def test_tangents(f: Callable[..., object], called_before: bool) -> None:
    """Forward-mode derivatives, of a graph that was compiled without tangents as of one compiled with them."""
    compiled = torch.compile(f, backend="functionalize")
    if called_before:
        compiled(torch.ones(3, 3))
    found = []
    for function in (f, compiled):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(3, 3), torch.arange(9.0).view(3, 3))
            results = function(x)
            duals = [*results, x] if isinstance(results, tuple) else [results, x]
            found.append([tuple(forward_ad.unpack_dual(dual)) for dual in duals])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(compiled(torch.ones(3, 3)), f(torch.ones(3, 3)))


def test_anomaly_detection() -> None:
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(model, backend="functionalize")
    with torch.autograd.detect_anomaly():
        x = torch.ones(2, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
        gradient.sum().backward()
        got = x.grad
    x = torch.ones(2, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_hooks_on_saved_tensors_get_those_of_calls() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    compiled = torch.compile(lambda x: (x * x).sin(), backend="functionalize")
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(torch.ones(3, requires_grad=True)).sum().backward()
    assert packed and all(type(tensor) is torch.Tensor for tensor in packed)


@pytest.mark.parametrize("computed", [False, True])
def test_data_of_an_input_that_requires_gradients(computed: bool) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y * 2
        return x * x

    found = []
    for function in (f, torch.compile(f, backend="functionalize")):
        leaf = torch.ones(3, requires_grad=True)
        x = leaf * 3 if computed else leaf
        y = function(x, torch.arange(3.0))
        found.append([y, x, torch.tensor(x._version), *torch.autograd.grad((y + x).sum(), leaf)])
    torch.testing.assert_close(found[1], found[0])


def _in_inference_mode(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        y = x * 2
    return y, y[1:], y + 1, x[1:]


def _out_of_inference_mode(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode(False):
        y = torch.ones(3)
    return (y,)


def _writes_first(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.add_(1)
    return x * 2, x[1:], x


@pytest.mark.parametrize("f", [_in_inference_mode, _out_of_inference_mode, _writes_first])
@pytest.mark.parametrize("called_before", [None, torch.no_grad, torch.inference_mode])
def test_inference_tensors(f: Callable[..., tuple[torch.Tensor, ...]], called_before: Callable[[], Any] | None) -> None:
    """One graph may serve calls in inference mode and calls without gradients."""
    compiled = torch.compile(f, backend="functionalize")
    if called_before is not None:
        with called_before():
            compiled(torch.ones(3))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        x = torch.ones(3)
        with mode():
            found = [[one.is_inference() for one in function(x.clone())] for function in (f, compiled)]
            found += [[one.is_inference() for one in function(x)] for function in (f, compiled)]
        assert found[1] == found[0]
        assert found[3] == found[2]


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_a_region_that_is_compiled_once_is_a_part_of_the_program(remove: str) -> None:
    """Twice called: its writes are seen, and the backward has the numbers that the forward drew."""
    scale = torch.nn.Linear(4, 4)

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, seen: torch.Tensor) -> Any:
        seen.add_(1)
        return torch.nn.functional.dropout(scale(x).relu(), 0.5) * x

    def twice(x: torch.Tensor, seen: torch.Tensor) -> Any:
        return region(region(x, seen), seen)

    found = []
    for function in (twice, torch.compile(twice, backend="functionalize", options={"remove": remove})):
        torch.manual_seed(0)
        x, seen = torch.randn(3, 4, requires_grad=True), torch.zeros(2)
        y = function(x, seen)
        y.sum().backward()
        found.append((y, x.grad, seen, torch.rand(1)))
    torch.testing.assert_close(found[1], found[0])


def test_backwards_of_compiled_autograd_are_refused() -> None:
    layer = torch.nn.Linear(2, 1)

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(Exception, match="compiled autograd passes a backward to this backend"),
    ):
        torch.compile(step, backend="functionalize")(torch.ones(1, 2))


def _own(x: torch.Tensor) -> Any:
    y = x.clone()
    y.add_(1)
    return y * y._version


def _alone(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0].add_(1)
    y.mul_(2)
    return y._version


def _decides(x: torch.Tensor) -> Any:
    y = x.clone()
    y.add_(1)
    return y + 1 if y._version > 0 else y - 1


def _keeps(x: torch.Tensor) -> Any:
    with _unsafe_preserve_version_counter(x):
        x.add_(1)
    return x * 2


@pytest.mark.parametrize(
    ("f", "fullgraph"),  # Dynamo itself refuses to branch on a version in one graph
    [(_own, True), (_alone, True), (_alone, False), (_decides, False), (_keeps, True)],
)
def test_versions(f: Callable[..., Any], fullgraph: bool) -> None:
    """Of what the program makes, the number of its writes."""
    compiled = torch.compile(f, backend="functionalize", fullgraph=fullgraph)
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: torch.ones(3, 2),
        lambda: torch.ones(3, 2).add_(1),
        lambda: torch.ones(6, 2)[2:5],
    ]
    for make in ways * 2:
        x, y = make(), make()
        before = x._version, y._version
        torch.testing.assert_close(compiled(x), f(y))
        assert x._version - before[0] == y._version - before[1]


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_captured_program_is_called_between_graphs(is_alone: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    twin, x = copy.deepcopy(module), torch.randn(3, 2)
    program = capture(module, (x,))
    run = torch.compile(program if is_alone else lambda x: program(x + 1) * 2, backend="functionalize")
    for _ in range(2):
        ours, theirs = run(x), twin(x) if is_alone else twin(x + 1) * 2
        torch.testing.assert_close(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
    torch.testing.assert_close(dict(module.named_buffers()), dict(twin.named_buffers()))
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_the_version_of_an_input_is_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * x._version

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"`_version` of `l_x_`[\s\S]*py:\d+ in program"):
        torch.compile(program, backend="functionalize")(torch.ones(2))

    asked = torch.compiler.disable(lambda x: x._version)  # as the refusal advises
    compiled = torch.compile(lambda x: x * asked(x), backend="functionalize")
    assert compiled(torch.ones(2).add_(1)).tolist() == [2, 2]


def test_the_base_of_an_input_is_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * x._base._version  # type: ignore[union-attr]

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"is a view[\s\S]*py:\d+ in program"):
        torch.compile(program, backend="functionalize")(torch.ones(4)[1:])


def test_the_version_of_an_operand_is_refused_in_a_body() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x.clone()
        y.add_(1)
        return torch.cond(x.sum() > 0, lambda y: y * y._version, lambda y: y - 1, (y,))

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="reads the `_version` of an operand"):
        torch.compile(program, backend="functionalize")(torch.ones(2))


def _made() -> list[torch.Tensor]:
    return [torch.ones(2), torch.tensor([1.5]), torch.arange(0.0, 1.0, 0.5), torch.tensor(3) / 2, torch.arange(3) / 3]


def _leaves_double(x: torch.Tensor) -> Any:
    before = torch.ones(2)
    torch.set_default_dtype(torch.float64)
    return before, _made(), x / 3, torch.arange(3) * 1j


def _sets_back(x: torch.Tensor) -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made: tuple[Any, ...] = _made(), x * 1.5, x + torch.ones(())
    torch.set_default_dtype(torch.float16)
    made += (torch.cond(x.sum() > 0, lambda x: x / 3, lambda x: x + torch.ones(3), (x,)),)
    torch.set_default_dtype(default)
    return made, _made()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", [_leaves_double, _sets_back])
def test_default_dtypes_that_a_program_sets(f: Callable[..., Any], dynamic: bool) -> None:
    compiled = torch.compile(f, backend="functionalize", dynamic=dynamic)
    try:
        for default in (torch.float32, torch.float32, torch.float64, torch.float32):
            found = []
            for function in (f, compiled):
                torch.set_default_dtype(default)
                found.append((function(torch.arange(3)), torch.get_default_dtype()))
            torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
            assert found[1][1] == found[0][1]
    finally:
        torch.set_default_dtype(torch.float32)


def _written_between(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager keeps the cast of a leaf until the outermost region ends, and casts others each time."""
    y = (x @ w) @ w
    with torch.no_grad():
        w.add_(1)
    return y, x @ w


def _written_in_a_region(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = _written_between(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return *results, x @ w, w * 1


def _in_a_region(x: torch.Tensor, w: torch.Tensor, program: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return *program(x, w), w * 1


def _as_captured(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: capture(program, args)(*args)


def _as_compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(program, backend="functionalize")


def _run(call: Callable[..., Any], of_leaf: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients of a call with a leaf, or with what is computed of one."""
    leaf = torch.linspace(-1, 2, 9).reshape(3, 3).clone().requires_grad_()  # of a view no cast is kept
    x = torch.linspace(0, 1, 12).reshape(4, 3)
    results = call(x, of_leaf(leaf))
    sum(result.float().sum() for result in results).backward()
    return [*(result.detach() for result in results), leaf.grad]


_WAYS = pytest.mark.parametrize("way", [_as_captured, _as_compiled], ids=["capture", "dynamo"])


@_WAYS
def test_casts_of_leaves_are_kept_until_the_region_ends(way: Callable[..., Any]) -> None:
    inside, around = way(_written_in_a_region), partial(_in_a_region, program=way(_written_between))
    for of_leaf in (lambda leaf: leaf, lambda leaf: leaf * 1, lambda leaf: leaf):
        torch.testing.assert_close(_run(inside, of_leaf), _run(_written_in_a_region, of_leaf), rtol=0, atol=0)
        wanted = _run(partial(_in_a_region, program=_written_between), of_leaf)
        torch.testing.assert_close(_run(around, of_leaf), wanted, rtol=0, atol=0)


@_WAYS
@pytest.mark.parametrize("program", [_written_between, _written_in_a_region])
def test_the_casts_of_the_caller_outlive_a_capture(way: Callable[..., Any], program: Callable[..., Any]) -> None:
    def kept(made: Callable[..., Any]) -> list[torch.Tensor]:
        x, w, other = torch.ones(4, 3), torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = [x @ w]
            with torch.no_grad():
                w.add_(1)
            results += [*made(x, other), x @ w]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [*results, x @ w]

    torch.testing.assert_close(kept(way(program)), kept(program), rtol=0, atol=0)


def _replaces_data(x: torch.Tensor) -> torch.Tensor:
    x.data = x + 1
    with torch.no_grad():
        x.add_(1)
    return x * 2


def test_a_view_whose_data_are_replaced_and_written_is_refused() -> None:
    """Eager looks for its gradient where its new data lie; other inputs of the same compiled function are right."""
    compiled = torch.compile(_replaces_data, backend="functionalize")
    for _ in range(2):
        leaf = torch.arange(3.0, requires_grad=True)
        want, got = (torch.autograd.grad(call(leaf * 1).sum(), leaf)[0] for call in (_replaces_data, compiled))
        assert torch.equal(got, want)
        with pytest.raises(Exception, match=r"the data of `l_x_` by `\.data =`"):
            compiled((torch.arange(12.0, requires_grad=True) * 1)[3:6])
