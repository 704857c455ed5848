"""Operators that torch's exporters and tables lack: fake quantization, histograms, scaled gradients, loops, fills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.utils import _pytree as pytree

from functionalize import UnsupportedProgramError, capture
from tests.support.routes import CORE_ATEN, JAX, MODULE, ONNX, Route

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo reads it
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),  # of a module that Dynamo loads
]
Program = Callable[..., Any]
map_rows: Any = torch_map
on_each_route = pytest.mark.parametrize("route", [MODULE, CORE_ATEN, ONNX, JAX])


@pytest.fixture(autouse=True)
def _bodies_compiled_afresh() -> None:
    """Dynamo, which traces bodies of loops, does so for a few loops of a process alone."""
    torch._dynamo.reset()


def with_gradient(quantize: Program) -> Program:
    def run(x: Tensor, *parameters: Any) -> Any:
        x = x.detach().requires_grad_()
        y = quantize(x, *parameters)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    return run


def learned(quantize: Program) -> Program:
    def run(*tensors: Tensor) -> Any:
        given = [tensor.detach().requires_grad_() for tensor in tensors]
        y = quantize(*given)
        return y, torch.autograd.grad(y.square().sum(), given)

    return run


NOT_FINITE = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, 0.5, 2.5])


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.cat([NOT_FINITE, torch.randn(6) * 4]).reshape(2, 6).to(dtype)


def scales(zero_point: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    zero = torch.randint(-3, 3, (2,)).to(zero_point)
    return torch.rand(2) + 0.1, zero + 0.25 if zero_point.is_floating_point else zero


def by_channel(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7)


def experts(x: Tensor) -> Tensor:
    chosen = x.softmax(-1).topk(2, -1)[1]
    return torch.histc(chosen.flatten().float(), bins=4, min=0, max=3).cumsum(0)


class Scaled(nn.Module):
    """What GradScaler runs in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.successes = nn.Buffer(torch.tensor(4.0)), nn.Buffer(torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Any:
        gradients, found = [x * 8, x.clamp(-9, 9).half()], torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, 1 / self.scale)
        torch._amp_update_scale_(self.scale, self.successes, found, 2.0, 0.5, 2)
        return [*gradients, found, self.scale.clone()]


class Reading(nn.Module):
    """What the bodies of loops and branches read: a layer and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(3, 3), nn.Buffer(torch.tensor(3))
        self.shift, self.calls = nn.Buffer(torch.linspace(-1, 1, 3)), nn.Buffer(torch.tensor(0))

    def looped(self, x: Tensor) -> Any:
        def goes_on(count: Tensor, h: Tensor) -> Tensor:
            return count < self.most

        def step(count: Tensor, h: Tensor) -> Any:
            return count + 1, self.layer(h) + self.shift

        return while_loop(goes_on, step, (torch.tensor(0), x))


class Loop(Reading):
    def forward(self, x: Tensor) -> Any:
        return self.looped(x)


class LoopInside(Reading):
    """Of what is computed, and computed with; as often as a counter says, and none at first."""

    def forward(self, x: Tensor) -> Any:
        count, h = while_loop(
            lambda count, h: (count < self.calls) & (h.abs().sum() < 1e3),
            lambda count, h: (count + 1, self.layer(h)),
            (torch.tensor(0), x * 2),
        )
        self.calls.add_(1)
        self.shift.copy_(h.detach()[0])
        return h.relu() + self.shift, count


class LoopTwice(Reading):
    def forward(self, x: Tensor) -> Any:
        return self.looped(self.looped(x)[1].clone())[1]


class Branch(Reading):
    def forward(self, x: Tensor) -> Any:
        yes, no = lambda x: (self.layer(x), x + 1), lambda x: (x * self.shift, x - 1)
        return torch.cond((x > 1).any() & (self.most > 2), yes, no, (x,))


class Mapped(Reading):
    """Twice, since Dynamo passes sizes that differ from those of the call before."""

    def forward(self, x: Tensor) -> Any:
        once = map_rows(lambda row: self.layer(row) + self.shift, x)
        return map_rows(lambda row, scale: self.layer(row) * scale, once[:, :3], self.shift)


class Scanned(Reading):
    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.reverse = reverse

    def forward(self, x: Tensor) -> Any:
        def step(h: Tensor, row: Tensor) -> Any:
            h = torch.tanh(self.layer(h) + row + self.shift)
            return h, h * 2

        return scan(step, torch.zeros(3), x, reverse=self.reverse)


class Associated(Reading):
    def forward(self, x: Tensor) -> Any:
        return associative_scan(lambda a, b: a * b + self.shift * 0, self.layer(x), 0, combine_mode="generic")


def observer() -> nn.Module:
    """A layer with observers as `prepare_qat_fx` has them, whose statistics have their sizes."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.of_x = FusedMovingAvgObsFakeQuantize(quant_min=0, quant_max=127)
            self.of_weight = FusedMovingAvgObsFakeQuantize(
                MovingAveragePerChannelMinMaxObserver,
                quant_min=-128,
                quant_max=127,
                dtype=torch.qint8,
                qscheme=torch.per_channel_symmetric,
            )

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.of_x(x), self.of_weight(self.layer.weight), self.layer.bias)

    return Quantized()


def trained() -> Program:
    model = observer()
    model(torch.randn(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def of(program: Program) -> Callable[[], Program]:
    return lambda: program


Case = tuple[Callable[[], Program], Callable[[], tuple[Any, ...]]]
CASES: dict[str, Case] = {
    "channels": (of(with_gradient(by_channel)), lambda: (rows(), *scales())),
    "channels in 16 bits": (of(with_gradient(by_channel)), lambda: (rows(torch.float16), *scales())),
    "channels in double": (of(with_gradient(by_channel)), lambda: (rows(torch.float64), *scales())),
    "zero points that are floats": (of(with_gradient(by_channel)), lambda: (rows(), *scales(torch.float32))),
    "one scale": (
        of(with_gradient(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 2, -8, 7))),
        lambda: (rows(),),
    ),
    "one scale in a tensor": (
        of(with_gradient(lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s[:1], z[:1], -8, 7))),
        lambda: (rows(), *scales()),
    ),
    "a learned scale": (
        of(learned(lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7, 0.5))),
        lambda: (torch.randn(3, 4), torch.rand(1) + 0.1, torch.randn(1)),
    ),
    "learned scales": (
        of(learned(lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s, z, 0, -8, 7, 0.5))),
        lambda: (torch.randn(3, 4), torch.rand(3) + 0.1, torch.randn(3)),
    ),
    "observers, trained": (trained, lambda: (torch.randn(3, 4),)),
    "experts": (of(experts), lambda: (torch.randn(6, 4),)),
    "histogram": (of(lambda x: torch.histc(x, 5, -1, 1)), lambda: (rows(),)),
    "histogram by its elements": (of(lambda x: torch.histc(x, 5)), lambda: (torch.randn(3, 4).double(),)),
    "histogram of equal ones": (of(lambda x: torch.histc(x * 0 + 2, 5)), lambda: (torch.randn(4),)),
    "scaled gradients": (Scaled, lambda: (torch.randn(3) * torch.tensor([1, 1, 1e38]),)),
    "loop": (Loop, lambda: (torch.randn(2, 3),)),
    "loop without gradients": (lambda: torch.no_grad()(Loop()), lambda: (torch.randn(2, 3),)),
    "loop inside": (LoopInside, lambda: (torch.randn(2, 3),)),
    "two loops": (LoopTwice, lambda: (torch.randn(2, 3),)),
    "branch": (Branch, lambda: (torch.randn(2, 3),)),
    "map": (Mapped, lambda: (torch.randn(2, 3),)),
    "scan": (lambda: torch.no_grad()(Scanned()), lambda: (torch.randn(2, 3),)),
    "scan in reverse": (lambda: torch.no_grad()(Scanned(reverse=True)), lambda: (torch.randn(2, 3),)),
    "associative scan": (Associated, lambda: (torch.randn(2, 3),)),
}


@pytest.mark.every(24)
@on_each_route
@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager(name: str, route: Route, tmp_path: Path) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    program = make()
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(1)
    run = route(capture(program, inputs()), tmp_path)
    for _ in range(3):
        args = inputs()
        wanted, actual = pytree.tree_leaves(eager(*args)), pytree.tree_leaves(run(*args))
        torch.testing.assert_close([leaf.detach() for leaf in actual], wanted, equal_nan=True)


class LoopThenBranch(Reading):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, self.layer, lambda h: h - self.shift, (self.looped(x)[1],))


@pytest.mark.parametrize("make", [Scanned, LoopThenBranch])
def test_refusals_say_what_works(make: Callable[[], Program]) -> None:
    x = torch.randn(2, 3)
    with pytest.raises(UnsupportedProgramError, match=r"torch\.no_grad\(\)"):
        capture(make(), (x,))
    program = make()
    torch.testing.assert_close(capture(torch.no_grad()(program), (x,))(x), torch.no_grad()(program)(x))


def test_complex_slices_of_data_dependent_sizes(tmp_path: Path) -> None:
    def program(x: Tensor, at: Tensor) -> Any:
        return torch.tensor_split(torch.view_as_complex(x) * 2, at)[1].abs().sum()

    x = torch.randn(6, 3, 2)
    for route in (MODULE, ONNX):
        run = route(capture(program, (x, torch.tensor([2, 4]))), tmp_path)
        for at in (torch.tensor([2, 4]), torch.tensor([1, 6])):
            torch.testing.assert_close(pytree.tree_leaves(run(x, at))[0], program(x, at))


def test_a_first_call_sizes_statistics() -> None:
    model, eager = observer(), observer()
    eager.load_state_dict(model.state_dict())
    program = capture(model, (torch.randn(3, 4),))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(program(x), eager(x))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


FILLS: dict[str, Program] = {
    "full": lambda x: torch.full((x.size(0), 2), 3 / x.size(0)),
    "of its own dtype": lambda x: torch.full((x.size(0),), x.size(0) ** -0.5, dtype=torch.float64),
    "like": lambda x: torch.full_like(x, 1 / x.size(0)),
    "filled": lambda x: torch.empty_like(x).fill_(1 / x.size(0)),
    "new": lambda x: x.new_full((x.size(0),), x.size(0) * 0.5),
    "scaled": lambda x: x * (1 / x.size(0)) + torch.arange(x.size(0)).unsqueeze(1) / x.size(0),
}


@pytest.mark.every(8)
@on_each_route
@pytest.mark.parametrize("name", FILLS)
def test_numbers_computed_of_sizes(name: str, route: Route, tmp_path: Path) -> None:
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    run = route(capture(FILLS[name], (torch.randn(5, 2),), dynamic_shapes=sizes), tmp_path)
    for count in (5, 3, 7):
        x = torch.randn(count, 2)
        torch.testing.assert_close(pytree.tree_leaves(run(x))[0], FILLS[name](x))


def test_channels_of_dynamic_size() -> None:
    sizes = ({1: torch.export.Dim.DYNAMIC}, None, None)
    program = capture(by_channel, (torch.randn(2, 5), *scales()), dynamic_shapes=sizes)
    args = torch.randn(2, 7), *scales()
    torch.testing.assert_close(program(*args), by_channel(*args))


@pytest.mark.parametrize("divisor", [0.1, 3.0, 127.5])
def test_jax_divides_exactly(divisor: float) -> None:
    """XLA multiplies by reciprocals, and what is rounded afterwards shows that."""
    pytest.importorskip("jax")
    x = torch.randn(64, 64)
    run = JAX(capture(lambda x: x / divisor, (x,)))
    torch.testing.assert_close(run(x), x / divisor, rtol=0, atol=0)
