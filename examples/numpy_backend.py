"""A backend of one's own: PyTorch programs on NumPy arrays, with state that is threaded from call to call.

A backend is a table of lowerings, one function for each operator. No row writes and none is a view: the programs that
arrive have neither, and operators that have no row are spelt out by torch's own decompositions.

Run it: ``python examples/numpy_backend.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from functionalize import capture
from functionalize.backends import ArrayProgram, Backend, Lowerings

aten = torch.ops.aten
lowering = Lowerings("numpy")

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: lambda x, y, alpha=1: np.add(x, y * alpha if alpha != 1 else y),
    aten.sub.Tensor: np.subtract,
    aten.mul: np.multiply,
    aten.div.Tensor: np.true_divide,
    aten.sqrt: np.sqrt,
    aten.mm: np.matmul,
    aten.le: np.less_equal,
    aten.where.self: np.where,
    aten.unsqueeze: np.expand_dims,
    aten.clone: lambda x, memory_format=None: x,
    aten.relu: lambda x: np.maximum(x, 0),
    aten.rsqrt: lambda x: 1 / np.sqrt(x),
    aten.t: lambda x: x.T,
    aten.permute: np.transpose,
    aten.view.default: np.reshape,
    aten.squeeze.dims: lambda x, dims: np.squeeze(x, tuple(dims)),
    aten.sum.dim_IntList: lambda x, dim, keepdim=False, dtype=None: x.sum(tuple(dim), keepdims=keepdim),
    aten.mean.dim: lambda x, dim, keepdim=False, dtype=None: x.mean(tuple(dim), keepdims=keepdim),
    aten.amax: lambda x, dim=(), keepdim=False: x.max(tuple(dim), keepdims=keepdim),
}
for op, function in FUNCTIONS.items():
    lowering(op)(function)


@lowering(aten.addmm)
def addmm(begin: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Any:
    return beta * begin + alpha * (x @ y)


@lowering(aten.var.correction)
def var(x: Any, dim: Any, correction: float = 1, keepdim: bool = False) -> Any:
    return x.var(tuple(dim), ddof=correction, keepdims=keepdim, dtype=x.dtype)


@lowering(aten.expand)
def expand(x: Any, size: Any) -> Any:
    return np.broadcast_to(x, np.where(np.equal(size, -1), (1,) * (len(size) - x.ndim) + x.shape, size))


@lowering(aten._softmax)
def softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    powers = np.exp(x - x.max(dim, keepdims=True))
    return powers / powers.sum(dim, keepdims=True)


@lowering(aten.index_copy)
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    new = x.copy()
    new[(slice(None),) * (dim % x.ndim) + (index,)] = source
    return new


@lowering(aten.slice.Tensor)
def slice_(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@lowering(aten.arange.start_step, takes_call=True)
def arange(call: Any, start: float, end: float, step: float = 1, **_: Any) -> Any:
    return np.arange(start, end, step).astype(call.dtype)


@lowering(aten.scalar_tensor, takes_call=True)
def scalar_tensor(call: Any, value: float, **_: Any) -> Any:
    return np.asarray(value, call.dtype)


@lowering(aten._to_copy, takes_call=True)
def to_copy(call: Any, x: Any, **_: Any) -> Any:
    return x.astype(call.dtype)


NUMPY = Backend(
    lowering,
    array=lambda tensor: tensor.numpy().copy(),
    dtype=lambda dtype: torch.empty(0, dtype=dtype).numpy().dtype,
    is_array=lambda value: isinstance(value, np.ndarray),
    differentiates=False,
)


class Decoder(torch.nn.Module):
    """One step of attention over a cache: writes a row at a position that moves on."""

    def __init__(self, size: int = 8, slots: int = 16) -> None:
        super().__init__()
        self.project, self.out = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size)
        self.keys, self.values = (torch.nn.Buffer(torch.zeros(slots, size)) for _ in range(2))
        self.position = torch.nn.Buffer(torch.zeros(1, dtype=torch.int64))

    def forward(self, token: torch.Tensor) -> Any:
        query, key, value = self.project(token).chunk(3, -1)
        self.keys.index_copy_(0, self.position, key)
        self.values.index_copy_(0, self.position, value)
        scores = query @ self.keys.t() / self.keys.size(1) ** 0.5
        seen = torch.arange(self.keys.size(0)) <= self.position
        self.position.add_(1)
        return self.out(torch.where(seen, scores, -1e9).softmax(-1) @ self.values)


def main() -> None:
    """Three calls of each model, state threaded, beside eager."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4)
    models = {
        "MLP": (torch.nn.Sequential(linear, torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2)), (8, 4)),
        "KV-cache decode": (Decoder(), (1, 8)),
        "BatchNorm training": (torch.nn.Sequential(linear, torch.nn.BatchNorm1d(4)).train(), (8, 4)),
    }
    for name, (model, size) in models.items():
        program = ArrayProgram(capture(model, (torch.randn(size),)).specialization, NUMPY)
        state = program.initial_state()
        for _ in range(3):
            x = torch.randn(size)
            state, outputs = program(state, x.numpy())
            np.testing.assert_allclose(outputs, model(x).detach().numpy(), atol=1e-5)
        for path, value in model.state_dict().items():
            np.testing.assert_allclose(state[path], value.numpy(), atol=1e-5)
        print(f"{name}: three calls as eager, state too")


if __name__ == "__main__":
    main()
