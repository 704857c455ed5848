"""``torch.compile(..., backend="functionalize")``: graphs without mutation, and eager's results around them.

Each program runs in eager and compiled, on equal inputs: outputs, inputs after the call, aliasing of outputs and
gradients must agree, and each graph that the compiler got must be free of mutations and views.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from functionalize import dynamo_backend
from functionalize.verify import assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe

pytestmark = [
    # Dynamo and inductor warn of torch's own code.
    pytest.mark.filterwarnings("ignore:.*(autograd.function.Function.*should not be instantiated|torch.jit)"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler, c++")
WAYS = pytest.mark.parametrize(  # each way to remove and each kind of sizes is asked by a fast one
    ("remove", "dynamic"),
    [
        pytest.param("mutations", False, id="mutations-static", marks=pytest.mark.slow),
        pytest.param("mutations", True, id="mutations-dynamic"),
        pytest.param("mutations_and_views", False, id="mutations_and_views-static"),
        pytest.param("mutations_and_views", True, id="mutations_and_views-dynamic", marks=pytest.mark.slow),
    ],
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A compiler that runs the graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert len(inputs) == len(graph.graph.find_nodes(op="placeholder"))
        self.graphs.append(graph)
        return graph

    def judge(self, remove: str) -> None:
        for graph in self.graphs:
            assert_functional(graph, remove)
            assert not any(str(node.target).startswith("aten.copy_") for node in graph.graph.nodes)


def check(
    func: Callable[..., Any],
    *inputs: Any,
    graphs: int,
    remove: str = "mutations_and_views",
    backward: bool = False,
    **options: Any,
) -> Recorder:
    """Hold the compiled function against eager; ``graphs`` is how many the compiler must have got."""
    recorder = Recorder()
    compiled = torch.compile(func, backend=dynamo_backend(recorder, remove=remove), **options)
    wanted = observe(_stepped(func, backward), clone_inputs(inputs))
    actual = observe(_stepped(compiled, backward), clone_inputs(inputs))
    if actual.error is not None:
        raise actual.error
    assert wanted.error is None
    found = list(differences(wanted, actual, strides=True, aliasing=True, rtol=None, atol=None))
    assert not found
    for want, got in zip(wanted.outputs, actual.outputs, strict=True):
        if isinstance(want, torch.Tensor):
            assert want.requires_grad == got.requires_grad
    assert len(recorder.graphs) == graphs
    recorder.judge(remove)
    return recorder


def _stepped(func: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    def step(*inputs: Any) -> Any:
        results = func(*inputs)
        if backward:
            tensors = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
            torch.stack([tensor.sin().sum() for tensor in tensors]).sum().backward()
        return results

    return step


def bump(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum()


def bump_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x[0].mul_(2)
    x.t()[1].add_(x[0, 0])
    return x.view(-1), x[1] * 3


def returns_input(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y.copy_(x)
    return x.view(3, -1)[1:], y, x + y, y.detach()


def siblings(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    y[0].zero_()
    return y, y.t(), y.view(-1), y[1], x.exp()


def transposed_copy(x: torch.Tensor) -> torch.Tensor:
    y = x.t().contiguous().add_(1)  # where other functionalizers mistake the copy for a view
    return y + x.t()


def metadata(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x + 1
    y.t_()
    y.unsqueeze_(0)
    return y, x.t()


def sizes(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    x.add_(x.size(0))
    return x.new_zeros(x.size(1)).add_(2), x.size(0) * 2


@torch.library.custom_op("functionalize_dynamo_test::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


def custom(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    increment(y[0])
    increment(x)
    return y


INFERENCE: list[tuple[Callable[..., Any], int]] = [
    (bump, 1),
    (bump_views, 1),
    (returns_input, 2),
    (siblings, 1),
    (transposed_copy, 1),
    (metadata, 1),
    (sizes, 1),
    (custom, 1),
]


@pytest.mark.every(5)
@WAYS
@pytest.mark.parametrize(("func", "inputs"), INFERENCE, ids=[func.__name__ for func, _ in INFERENCE])
def test_inference(func: Callable[..., Any], inputs: int, remove: str, dynamic: bool) -> None:
    check(func, *[torch.randn(3, 4) for _ in range(inputs)], graphs=1, remove=remove, dynamic=dynamic)


def in_place_chain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    y.relu_()
    y = y + 1
    y[0].mul_(2)
    return y, y.t(), (y * w).sum()


def written_differentiably(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(w)
    x[0].add_(w[1])
    return (x * w).sum()


def partly_without_grad(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        scale = (w * 2).sum()
        x.add_(scale)
    return w * scale, x * w, (w * 3).detach()


def saved_then_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.clone() * w
    x.zero_()  # the product needs what x was
    return y.sum()


class Doubled(torch.autograd.Function):
    """A derivative that is not the one of what the forward computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


def own_derivative(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = Doubled.apply(w * x)  # type: ignore[no-untyped-call]
    return y.mul_(3)


def views_of_parameter(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    return w.view(-1), w.t()[0] * x[:, 0]


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu_(x @ w)

    result: torch.Tensor = checkpoint(body, x, w, use_reentrant=False)
    return result


def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    chosen: torch.Tensor = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (w,))
    return chosen * 2


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    query = (x * w).view(1, 1, 3, 3)
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def returned_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * w
    return y, y, y.detach(), *y.split(1)


TRAINING = [
    attention,
    branches,
    checkpointed,
    returned_twice,
    in_place_chain,
    written_differentiably,
    partly_without_grad,
    saved_then_written,
    own_derivative,
    views_of_parameter,
]


@pytest.mark.every(5)
@WAYS
@pytest.mark.parametrize("func", TRAINING, ids=lambda func: func.__name__)
def test_training(func: Callable[..., Any], remove: str, dynamic: bool) -> None:
    inputs = (torch.randn(3, 3), torch.randn(3, 3, requires_grad=True))
    check(func, *inputs, graphs=2, remove=remove, dynamic=dynamic, backward=True)


def test_training_through_an_input_that_is_no_leaf() -> None:
    def outer(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            inner(y)
            return y

        return run

    def inner(y: torch.Tensor) -> None:
        y[0].mul_(y[1].clone())

    recorder = Recorder()
    results = []
    for func in (inner, torch.compile(inner, backend=dynamo_backend(recorder))):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        y = outer(func)(x)
        y.sin().sum().backward()
        results.append((y, x.grad))
    torch.testing.assert_close(*results)
    recorder.judge("mutations_and_views")
    assert len(recorder.graphs) == 2


@pytest.mark.parametrize("writes", [True, False])
def test_a_view_that_is_older_than_its_base_s_storage(writes: bool) -> None:
    def run(a: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = a.view(-1)
        a.set_(other)  # type: ignore[call-overload]
        if writes:
            view.add_(1)
        return a + 1, view * 2, view[1:]

    compiled = torch.compile(run, backend="functionalize")
    for _ in range(2):
        wanted, got = (function(torch.ones(3), torch.full((3,), 4.0)) for function in (run, compiled))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_grad_mode_that_a_function_leaves(requires_grad: bool) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        torch.set_grad_enabled(False)
        return y, y * 3

    compiled = torch.compile(run, backend="functionalize")
    for _ in range(2):
        found = []
        for function in (run, compiled):
            x = torch.ones(3, requires_grad=requires_grad)
            with torch.enable_grad():
                results = function(x)
                found.append([torch.is_grad_enabled(), *(result.requires_grad for result in results)])
        assert found[1] == found[0] == [False, requires_grad, False]


def test_inputs_that_share_memory_in_some_calls() -> None:
    def func(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + x

    recorder = Recorder()
    compiled = torch.compile(func, backend=dynamo_backend(recorder))
    for together in (False, True, False, True):
        wanted, actual = [observe(one, clone_inputs(_two(together))) for one in (func, compiled)]
        assert not list(differences(wanted, actual, strides=True, aliasing=True, rtol=None, atol=None))
    assert len(recorder.graphs) == 2
    recorder.judge("mutations_and_views")


def _two(together: bool) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.arange(8.0)
    return (whole[:4], whole[2:6]) if together else (whole[:4], torch.arange(2.0, 6.0))


def test_sizes_may_change() -> None:
    recorder = Recorder()
    compiled = torch.compile(bump_views, backend=dynamo_backend(recorder), dynamic=True)
    for size in (3, 5, 8):
        x = torch.randn(size, size + 1)
        wanted, actual = observe(bump_views, clone_inputs((x,))), observe(compiled, clone_inputs((x,)))
        assert not list(differences(wanted, actual, strides=True, aliasing=True, rtol=None, atol=None))
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_numbers_may_change(compiler: str) -> None:
    """With dynamic=True a Python number is an input of Dynamo's graph: a symbol, or a tensor with an `item()`."""

    def func(x: torch.Tensor, factor: float, count: int) -> torch.Tensor:
        return x.mul_(factor) + count

    compiled = torch.compile(func, backend=dynamo_backend(compiler), dynamic=True, fullgraph=True)
    for factor, count in ((2.5, 3), (0.5, 7)):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x.clone(), factor, count), func(x.clone(), factor, count))


def test_graph_break() -> None:
    def func(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        torch._dynamo.graph_break()
        x[0].mul_(2)
        return x.view(-1)

    check(func, torch.randn(3, 4), graphs=2)


def test_key_value_cache() -> None:
    """A row is written at a position that is data; the compiler gets values, the cache gets the row."""

    def decode(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, position, new)
        return torch.softmax(cache.sum(-1), -1)

    check(decode, torch.zeros(2, 8, 4), torch.tensor([3]), torch.randn(2, 1, 4), graphs=1)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_that_a_function_makes_of_numbers(requires_grad: bool) -> None:
    def func(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([0, 2])] * torch.tensor([2.0, 3.0])

    check(func, torch.randn(3).requires_grad_(requires_grad), graphs=2 if requires_grad else 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_slices_that_begin_where_the_data_say(dynamic: bool) -> None:
    def run(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[at[0].item() :] * 2, x[:, at[1].item() :].cos(), torch.zeros(x[at[0].item() :].storage_offset() + 1)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(run, backend="functionalize", dynamic=dynamic, fullgraph=True)
        for bounds in ((2, 3), (0, 4), (-2, 1), (9, -9)):
            found = []
            for call in (run, compiled):
                x = torch.arange(24.0).reshape(6, 4).requires_grad_()
                results = call(x, torch.tensor(bounds))
                found.append([*results, *torch.autograd.grad(results[0].sin().sum() + results[1].sum(), x)])
            for want, got in zip(*found, strict=True):
                assert torch.equal(want, got)


def test_a_backward_of_data_dependent_sizes() -> None:
    def func(x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.index_fill(x, 0, index, value)

    inputs = torch.randn(3, 3, requires_grad=True), torch.tensor([0, 2, 2]), torch.tensor(2.0, requires_grad=True)
    check(func, *inputs, graphs=2)


class Block(nn.Module):
    """A ResNet block with in-place ReLUs, and statistics that it updates."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm_one(self.one(x)))
        y = self.norm_two(self.two(y))
        y += x
        out: torch.Tensor = self.relu(y)
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.layers(x)
        return out.clamp_(max=5)


class Transformer(nn.Module):
    """Two layers over a sequence, and a cache of what they saw last."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("last", torch.zeros(1, 8))
        self.last: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        with torch.no_grad():
            self.last.copy_(out.mean((0, 1)).unsqueeze(0))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (5, 6)),
    "resnet": (Block, (2, 4, 6, 6)),
    "transformer": (Transformer, (2, 5, 8)),
}


def trained(model: nn.Module, call: Callable[..., Any], size: tuple[int, ...], steps: int = 3) -> Any:
    """Losses, gradients and state after some steps whose backward and optimizer the caller runs."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = call(torch.randn(size)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, dict(model.state_dict())


def model_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, size = MODELS[name]
    torch.manual_seed(0)
    return make(), size


@pytest.mark.parametrize("name", MODELS)
def test_model_in_training(name: str) -> None:
    model, size = model_of(name)
    twin, recorder = copy.deepcopy(model), Recorder()
    wanted = trained(model, model, size)
    actual = trained(twin, torch.compile(twin, backend=dynamo_backend(recorder)), size)
    torch.testing.assert_close(actual, wanted)
    assert len(recorder.graphs) == 2
    recorder.judge("mutations_and_views")


def test_parameters_that_are_attributes_of_the_graph() -> None:
    """A backend may be called directly, with a graph that holds its parameters and buffers."""
    model, size = model_of("resnet")
    twin, recorder = copy.deepcopy(model), Recorder()
    wanted = trained(model, model, size)
    compiled = dynamo_backend(recorder)(torch.fx.symbolic_trace(twin), [torch.randn(size)])
    torch.testing.assert_close(trained(twin, lambda x: compiled(x)[0], size), wanted)
    recorder.judge("mutations_and_views")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_model_in_evaluation(name: str) -> None:
    model, size = model_of(name)
    model.eval()
    twin, recorder = copy.deepcopy(model), Recorder()
    compiled = torch.compile(twin, backend=dynamo_backend(recorder))
    x = torch.randn(size)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))
    recorder.judge("mutations_and_views")


@needs_compiler
@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.full), True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.full) for name in [*MODELS][1:])])
def test_inductor_equals_eager(name: str, dynamic: bool) -> None:
    model, size = model_of(name)
    twin = copy.deepcopy(model)
    wanted = trained(model, model, size)
    compiled = torch.compile(twin, backend="functionalize", options={"compiler": "inductor"}, dynamic=dynamic)
    torch.testing.assert_close(trained(twin, compiled, size), wanted, rtol=1e-4, atol=1e-4)
    model.eval(), twin.eval()
    x = torch.randn(size)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.slow(seconds=60)
def test_inductor_runs_programs_that_write() -> None:
    for func, inputs in INFERENCE:
        torch._dynamo.reset()
        given = tuple(torch.randn(3, 4) for _ in range(inputs))
        compiled = torch.compile(func, backend=dynamo_backend("inductor"))
        wanted, actual = observe(func, clone_inputs(given)), observe(compiled, clone_inputs(given))
        assert not list(differences(wanted, actual, strides=True, aliasing=True, rtol=None, atol=None)), func


def test_autocast() -> None:
    model, size = model_of("mlp")
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend=dynamo_backend())
    x = torch.randn(size)
    for one in (model, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one(x).float().sum().backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in twin.named_parameters()}, want)


def test_dropout_draws_as_eager() -> None:
    def func(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x @ w, 0.5)
        return y.add_(torch.rand_like(y))

    check(func, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True), graphs=2, backward=True)


def test_optimizer_step() -> None:
    """The parameters are written inside of the graph; they are leaves that require gradients."""
    parameters = [torch.randn(3, requires_grad=True) for _ in range(2)]
    results = []
    for compile_it in (False, True):
        own = [p.detach().clone().requires_grad_() for p in parameters]
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False)
        step = torch.compile(optimizer.step, backend=dynamo_backend()) if compile_it else optimizer.step
        for _ in range(3):
            for parameter in own:
                parameter.grad = parameter.detach() * 2
            step()
        results.append(own)
    torch.testing.assert_close(*results)


def test_lines_of_the_user_are_kept() -> None:
    recorder = check(bump, torch.zeros(3), graphs=1)
    (graph,) = recorder.graphs
    traces = [node.meta.get("stack_trace", "") for node in graph.graph.nodes if node.op == "call_function"]
    assert any("x.add_(1)" in trace for trace in traces)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(Exception, match="no option"):
        torch.compile(bump, backend="functionalize", options={"compilor": "eager"})(torch.zeros(3))
    with pytest.raises(ValueError, match="remove must be"):
        dynamo_backend(remove="all")


ENTRY_POINT = """
import sys, torch
assert "functionalize" not in sys.modules
assert "functionalize" in torch._dynamo.list_backends()

@torch.compile(backend="functionalize", fullgraph=True)
def bump(x):
    x[0].add_(1)
    return x.sum()

x = torch.zeros(3)
assert bump(x) == 1 and x.tolist() == [1, 0, 0]
assert "functionalize.backends.dynamo" in sys.modules
"""


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_name(tmp_path: Path) -> None:
    """The entry point of the installed distribution: nothing of ours is imported beforehand."""
    done = subprocess.run([sys.executable, "-c", ENTRY_POINT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("requires_grad", [False, True])
def test_random_numbers_that_nobody_reads_are_drawn(requires_grad: bool) -> None:
    """Those that are drawn after them would be other ones."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x.sin() * torch.rand(4)

    torch._dynamo.reset()
    x, compiled = torch.ones(4, requires_grad=requires_grad), torch.compile(run, backend="functionalize")
    results = []
    for function in (run, compiled):
        torch.manual_seed(0)
        results.append(function(x))
    assert torch.equal(*results)


@pytest.mark.parametrize("size", [3, 8])
def test_interpolation_of_known_sizes_is_that_of_the_kernels(size: int) -> None:
    """Torch's decomposition scales where eager's kernel copies (3 to 3)."""
    x = torch.randn(1, 2, size, 5, requires_grad=True)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x * 2, scale_factor=1.3, mode="bilinear")

    torch._dynamo.reset()
    want, got = scaled(x), torch.compile(scaled, backend="functionalize", dynamic=False)(x)
    assert torch.equal(want, got)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (want, got)))
