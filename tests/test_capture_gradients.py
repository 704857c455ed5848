"""Gradients through a call, captured and compiled by Dynamo: those of eager, saved as torch's partitioners say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functionalize import capture, dynamo_backend
from functionalize._torch.autograd import default_partition_fn

pytestmark = [
    # Dynamo and inductor warn of torch's own code.
    pytest.mark.filterwarnings("ignore:.*(autograd.function.Function.*should not be instantiated|torch.jit)"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
Make = Callable[[], tuple[nn.Module, Tensor]]


class Applied(nn.Module):
    """A function of a module and an input."""

    def __init__(self, func: Callable[[nn.Module, Tensor], Any], inner: nn.Module) -> None:
        super().__init__()
        self.inner, self._func = inner, func

    def forward(self, x: Tensor) -> Any:
        return self._func(self.inner, x)


def dropped(inner: Any, x: Tensor) -> Tensor:
    out: Any = checkpoint(lambda t: nn.functional.dropout(inner(t).relu(), 0.5), x, use_reentrant=False)
    return inner(out)  # type: ignore[no-any-return]


def drawn_in_several(inner: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = checkpoint(lambda t: nn.functional.dropout(inner(t), 0.3).sin(), x, use_reentrant=False) + x
    return x


def written(inner: Any, x: Tensor) -> Tensor:
    y = inner(x)
    y[0].mul_(2)
    y.t()[1].add_(y.detach()[0, 0])
    return y  # type: ignore[no-any-return]


MODULES: dict[str, Make] = {
    "as many rows as features": lambda: (nn.Linear(3, 4), torch.randn(4, 3)),
    "square": lambda: (nn.Linear(4, 4), torch.randn(4, 4)),
    "gru": lambda: (nn.GRU(3, 4), torch.randn(4, 2, 3)),
    "lstm": lambda: (nn.LSTM(3, 4), torch.randn(4, 2, 3)),
    "rnn": lambda: (nn.RNN(3, 4), torch.randn(4, 2, 3)),
    "cat": lambda: (Applied(lambda m, x: torch.cat([x, m(x)]), nn.Linear(4, 4)), torch.randn(4, 4)),
    "stack": lambda: (Applied(lambda m, x: torch.stack([m(x), x]), nn.Linear(4, 4)), torch.randn(4, 4)),
    "transposed copy": lambda: (Applied(lambda m, x: m(x).t().clone(), nn.Linear(4, 4)), torch.randn(4, 4)),
    "view of a result": lambda: (Applied(lambda m, x: m(x).t()[1:], nn.Linear(4, 4)), torch.randn(4, 4)),
    "several views": lambda: (
        Applied(lambda m, x: (y := m(x), y.t(), y[0], x.view(-1), x.detach()), nn.Linear(4, 4)),
        torch.randn(4, 4),
    ),
    "written": lambda: (Applied(written, nn.Linear(4, 4)), torch.randn(4, 4)),
    "checkpointed": lambda: (Applied(dropped, nn.Linear(4, 4)), torch.randn(4, 4)),
    "several regions": lambda: (Applied(drawn_in_several, nn.Linear(4, 4)), torch.randn(4, 4)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(True)), torch.randn(3, 3)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True), torch.randn(4, 4, 4)),
}


def gradients(run: Callable[..., Any], module: nn.Module, x: Tensor) -> list[Any]:
    """Results, what requires grad among them, and gradients for random tangents, some of them expanded."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    results = run(x)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if isinstance(r, Tensor)]
    torch.manual_seed(1)
    differentiable = [result for result in results if result.requires_grad]
    tangents = [torch.randn_like(result) for result in differentiable]
    tangents[-1] = torch.randn(()).expand(differentiable[-1].size())
    torch.autograd.backward(differentiable, tangents)
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [[r.detach() for r in results], [r.requires_grad for r in results], found]


def ways(module: nn.Module, x: Tensor, remove: str) -> dict[str, Callable[..., Any]]:
    torch._dynamo.reset()
    return {
        "call": capture(module, (x.clone().requires_grad_(),), remove=remove),
        "dynamo": torch.compile(module, backend=dynamo_backend(remove=remove)),
    }


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_eager(name: str, remove: str) -> None:
    torch.manual_seed(2)
    module, x = MODULES[name]()
    twin = copy.deepcopy(module)
    wanted = [gradients(twin, twin, x) for _ in range(2)]
    state = copy.deepcopy(module.state_dict())
    for way, run in ways(module, x, remove).items():
        if way == "dynamo" and name in ("gru", "lstm", "rnn"):
            continue  # Dynamo leaves recurrent modules to eager
        module.load_state_dict(state)
        for want in wanted:
            torch.testing.assert_close(gradients(run, module, x), want, msg=f"{way} differs from eager")


def test_what_the_caller_partitions_by_is_called() -> None:
    seen: list[tuple[int, int]] = []

    def cut(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        seen.append((len(joint.graph.find_nodes(op="placeholder")), num_fwd_outputs))
        return default_partition_fn()(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    module, x = nn.Linear(3, 4), torch.randn(4, 3)
    program = capture(module, (x,), partition_fn=cut)
    assert seen == []  # until a call is differentiated
    program(x).sum().backward()
    program(x).sum().backward()
    assert seen == [(4, 1)]
    torch._dynamo.reset()
    torch.compile(module, backend=dynamo_backend(partition_fn=cut))(x).sum().backward()
    assert len(seen) == 2


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)) for _ in "1234"
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


@pytest.mark.parametrize("way", ["call", "dynamo"])
def test_checkpointed_regions_stay_checkpointed(way: str) -> None:
    x = torch.randn(32, 16)
    kept = {}
    for checkpointed in (False, True):
        module = Blocks(checkpointed)
        run, saved = ways(module, x, "mutations_and_views")[way], list[Tensor]()
        own = {parameter.data_ptr() for parameter in module.parameters()}

        def pack(tensor: Tensor, saved: list[Tensor] = saved, own: set[int] = own) -> Tensor:
            if tensor.data_ptr() not in own:
                saved.append(tensor)
            return tensor

        run(x)  # compiled outside of the hooks
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(x).sum().backward()
        kept[checkpointed] = sum(tensor.nbytes for tensor in saved)
    assert kept[True] <= 5 * x.nbytes < kept[False] / 4


@pytest.mark.parametrize("way", ["call", "dynamo"])
def test_a_write_between_forward_and_backward_is_refused_as_in_eager(way: str) -> None:
    module, x = Applied(lambda m, x: x * x.exp(), nn.Identity()), torch.randn(3)
    scale = x.clone().requires_grad_()
    for run in (module, ways(module, x, "mutations_and_views")[way]):
        held = scale * 1
        result = run(held)
        with torch.no_grad():
            held.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_inputs_that_require_gradients_only_later() -> None:
    module, x = nn.Linear(3, 3).requires_grad_(False), torch.randn(3, 3)
    with torch.no_grad():
        program = capture(module, (x,))
    assert not program(x).requires_grad
    given = x.clone().requires_grad_()
    program(given).sum().backward()
    torch.testing.assert_close(given.grad, module.weight.sum(0).expand(3, 3))
    module.requires_grad_(True)
    program(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(3, 3))


def test_what_is_detached_has_no_gradient() -> None:
    for func in (lambda a: a.detach(), lambda a: a[0].detach(), lambda a: (a * 2).detach()):
        a = torch.ones(3, requires_grad=True)
        assert not capture(func, (a,))(a).requires_grad


def test_a_backward_that_writes_to_what_is_outside_is_refused() -> None:
    seen = torch.zeros(3)

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.add_(gradient)
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    program = capture(lambda x: Noting.apply(x) + seen[:1], (x,))  # type: ignore[no-untyped-call]
    result = program(x)
    torch.testing.assert_close(result, torch.full((3,), 2.0, requires_grad=True))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        result.sum().backward()
    assert torch.equal(seen, torch.zeros(3))


def test_calls_inside_of_a_transform_are_refused() -> None:
    program = capture(lambda x: (x * 2).sum(), (torch.ones(3),))
    for transformed in (torch.func.grad(program), torch.func.vmap(program)):
        with pytest.raises(RuntimeError, match="called inside of"):
            transformed(torch.ones(3, 3))


def test_what_hooks_leave_in_objects_during_the_trace_is_taken_back() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.seen: dict[str, Any] = {"example": torch.zeros(1), "gradients": []}

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            y.register_hook(self.seen["gradients"].append)
            return y * 2

    module = Hooked()
    capture(module, (torch.ones(3),))
    assert module.seen["gradients"] == []


def test_threads_that_differentiate_at_once_share_the_halves() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    program = capture(module, (x,))
    (wanted,) = torch.autograd.grad(module(given := x.clone().requires_grad_()).sum(), given)
    program_of = capture(module, (given,))

    def gradient(run: Callable[..., Any]) -> Tensor:
        own = x.clone().requires_grad_()
        return torch.autograd.grad(run(own).sum(), own)[0]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(gradient, [program_of] * 16):
            torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient(program), wanted)
