"""Programs on a GPU: what differs there is devices, random numbers, kernels of attention and of layers, and modes.

Each program is made twice, and called three times in a row from the same random state: by eager, and as captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from functionalize import capture, functionalize
from functionalize.errors import InputMismatchError
from tests.support.routes import JAX, MODULE, ONNX, Route

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, which all of these programs run on")

DEVICE = torch.device("cuda")
CTC: Any = F.ctc_loss  # stated of lengths in tensors alone
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def randn(*size: int, requires_grad: bool = False, **options: Any) -> Tensor:
    return torch.randn(*size, device=DEVICE, requires_grad=requires_grad, **options)


def model(module: nn.Module, *size: int, **options: Any) -> Made:
    return module.to(DEVICE), (randn(*size, requires_grad=True, **options),)


def step_of(module: nn.Module, make: Callable[..., torch.optim.Optimizer], size: Sequence[int], **options: Any) -> Made:
    module = module.to(DEVICE)
    optimizer = make(module.parameters(), lr=0.01, **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (randn(*size),)


def scaled_step() -> Made:
    module = mlp().to(DEVICE)
    optimizer, scaler = torch.optim.AdamW(module.parameters()), torch.amp.GradScaler("cuda", 8.0)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss: Tensor = module(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step, (randn(5, 8),)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
    )


def by_channels(module: nn.Module) -> nn.Module:
    to: Any = module.to  # stated without memory formats
    result: nn.Module = to(DEVICE, memory_format=torch.channels_last)
    return result


def attention(dtype: torch.dtype, **options: Any) -> Made:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    return attend, tuple(randn(2, 4, 64, 32, dtype=dtype, requires_grad=True) for _ in range(3))


def attention_with_bias(dtype: torch.dtype, rows: int) -> Made:
    """Rows of 9 numbers, which torch pads for the kernel."""

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias.expand(2, 4, 9, 9), dropout_p=0.1)

    return attend, (randn(2, 4, 9, 16, dtype=dtype, requires_grad=True), randn(4, rows, 9, dtype=dtype))


def by_kernel(kernel: SDPBackend) -> Made:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)

    return attend, tuple(randn(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))


def last_of(module: nn.Module, *size: int) -> Made:
    module = module.to(DEVICE)
    return lambda x: module(x)[0], (randn(*size, requires_grad=True),)


def drawing(draw: Callable[[Tensor], Any]) -> Made:
    return draw, (torch.rand(6, 4, device=DEVICE) + 0.5,)


def with_generator() -> Made:
    generator = torch.Generator(DEVICE).manual_seed(3)
    return lambda x: x + torch.rand(4, generator=generator, device=DEVICE), (randn(4),)


def on_both(x: Tensor) -> tuple[Tensor, ...]:
    there = x.cpu()
    there.add_(1)
    back = there.to(x.device, non_blocking=True)
    back[torch.tensor([0, 2])] *= torch.tensor(3.0)
    return back, x.sum().cpu(), torch.arange(3).cuda(), there.cuda().mul_(2)


def decode(cache: Tensor, position: Tensor, x: Tensor) -> Tensor:
    cache.index_copy_(1, position, x)
    position.add_(1)
    cache[:, 0].mul_(0.5)
    return cache.cumsum(1)[:, -1]


def decides(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    x.add_(1)
    return x * int((x > 0).sum()) + len(x[x > 1])


def in_surroundings(x: Tensor) -> Tensor:
    with torch.cuda.device(0), torch.autocast("cuda", dtype=torch.bfloat16):
        y = x @ x
    torch.cuda.synchronize()
    with torch.device("cuda"):
        y = y + torch.ones(4)
    return y.float()


def on_a_stream(x: Tensor) -> Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    torch.cuda.current_stream().wait_stream(stream)
    y.record_stream(torch.cuda.current_stream())
    return y + 1


def seeds(x: Tensor) -> Tensor:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand_like(x)
    torch.cuda.set_rng_state(state)
    return first - torch.rand_like(x) + x


def set_back(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.rand_like(x) + torch.rand(4).cuda()


def set_back_in_part(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand_like(x) + torch.rand(4).cuda()


def set_back_nothing(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand_like(x)


def checkpointed(use_reentrant: bool) -> Made:
    module = mlp().to(DEVICE)
    return lambda x: checkpoint(module, x, use_reentrant=use_reentrant), (randn(5, 8, requires_grad=True),)


def embeddings() -> Made:
    module = nn.Sequential(nn.Embedding(10, 8, max_norm=1.0, padding_idx=0), nn.Linear(8, 3)).to(DEVICE)
    return module, (torch.tensor([[1, 2, 2], [0, 9, 1]], device=DEVICE),)


PROGRAMS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: model(mlp(), 5, 8),
    "convolutions": lambda: model(convolutions(), 4, 3, 8, 8),
    "convolutions, channels last": lambda: (
        by_channels(convolutions()),
        (randn(4, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_(),),
    ),
    "LSTM": lambda: last_of(nn.LSTM(8, 6, num_layers=2, batch_first=True), 3, 5, 8),
    "LSTM, dropout": lambda: last_of(nn.LSTM(8, 6, num_layers=2, dropout=0.5), 3, 5, 8),
    "GRU, two directions": lambda: last_of(nn.GRU(8, 6, bidirectional=True), 3, 5, 8),
    "encoder": lambda: model(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, 5, 16),
    "encoder, eval": lambda: model(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), 3, 5, 16),
    "embeddings": embeddings,
    "group norm": lambda: model(nn.GroupNorm(2, 8), 3, 8, 4),
    "attention, float32": lambda: attention(torch.float32),
    "attention, bfloat16, causal": lambda: attention(torch.bfloat16, is_causal=True),
    "attention, bfloat16, dropout": lambda: attention(torch.bfloat16, dropout_p=0.3),
    "attention, float32, dropout": lambda: attention(torch.float32, dropout_p=0.3),
    "attention, float16, mask": lambda: attention(
        torch.float16, attn_mask=torch.ones(64, 64, dtype=torch.bool, device=DEVICE).tril()
    ),
    "attention, float32, bias": lambda: attention_with_bias(torch.float32, 9),
    "attention, bfloat16, bias": lambda: attention_with_bias(torch.bfloat16, 9),
    "attention, float32, bias for all": lambda: attention_with_bias(torch.float32, 1),
    "attention, flash": lambda: by_kernel(SDPBackend.FLASH_ATTENTION),
    "attention, memory efficient": lambda: by_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "attention, plain": lambda: by_kernel(SDPBackend.MATH),
    "step of SGD": lambda: step_of(mlp(), torch.optim.SGD, (5, 8), momentum=0.9),
    "step of AdamW": lambda: step_of(mlp(), torch.optim.AdamW, (5, 8)),
    "step of AdamW, fused": lambda: step_of(mlp(), torch.optim.AdamW, (5, 8), fused=True),
    "step of AdamW, capturable": lambda: step_of(mlp(), torch.optim.AdamW, (5, 8), capturable=True),
    "step of Adam, a loop": lambda: step_of(convolutions(), torch.optim.Adam, (4, 3, 8, 8), foreach=False),
    "scaled step": scaled_step,
    "uniform_": lambda: drawing(lambda x: x.uniform_()),
    "normal_ of a view": lambda: drawing(lambda x: (x.t()[1:].normal_(), x)),
    "bernoulli": lambda: drawing(lambda x: torch.bernoulli(x / 2)),
    "multinomial": lambda: drawing(lambda x: torch.multinomial(x, 3)),
    "randperm": lambda: drawing(lambda x: x[torch.randperm(6, device=DEVICE)]),
    "dropout": lambda: drawing(lambda x: F.dropout(x, inplace=True)),
    "draws of both devices": lambda: drawing(lambda x: x + torch.rand(6, 4).cuda() + torch.rand_like(x)),
    "generator": with_generator,
    "seeds": lambda: (seeds, (randn(4),)),
    "draws that are set back": lambda: drawing(set_back),
    "draws that are set back in part": lambda: drawing(set_back_in_part),
    "draws on a GPU alone that stay": lambda: drawing(set_back_nothing),
    "both devices": lambda: (on_both, (randn(3),)),
    "decode": lambda: (
        decode,
        (torch.zeros(2, 6, 4, device=DEVICE), torch.tensor([0], device=DEVICE), randn(2, 1, 4)),
    ),
    "decides": lambda: (decides, (torch.arange(1.0, 7, device=DEVICE),)),
    "surroundings": lambda: (in_surroundings, (randn(4, 4),)),
    "a stream": lambda: (on_a_stream, (randn(4),)),
    "checkpointed": lambda: checkpointed(False),
    "checkpointed, reentrant": lambda: checkpointed(True),
    "accumulates": lambda: (
        lambda x, i: x.index_put_((i,), torch.ones(3, device=DEVICE), accumulate=True),
        (torch.zeros(5, device=DEVICE), torch.tensor([1, 1, 3], device=DEVICE)),
    ),
    "ctc": lambda: (
        lambda x: CTC(x.log_softmax(2), torch.tensor([[1, 2], [2, 2]]), (8, 8), (2, 1)),
        (randn(8, 2, 4, requires_grad=True),),
    ),
}
# What is refused, by what its message says.
REFUSED = {
    "a stream": "stream",
    "seeds": "sets the state of a torch generator",
    "LSTM, dropout": "with dropout between",
    "checkpointed, reentrant": "use_reentrant",
    "draws that are set back": "sets the state of a torch generator",
    "draws that are set back in part": "sets the state of a torch generator",
}


def called(run: Callable[..., Any], args: Sequence[Any], module: Callable[..., Any]) -> list[Any]:
    """What three calls give and leave: results, inputs, gradients, buffers, random states."""
    seen: list[Any] = []
    for _ in range(3):
        results = run(*args)
        leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        of_module = list(module.parameters()) if isinstance(module, nn.Module) else []
        roots = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        if roots and (leaves or of_module):
            torch.autograd.backward([r.float().sin().sum() for r in roots])
        kept = list(module.state_dict().values()) if isinstance(module, nn.Module) else []
        taken = [results, args, [x.grad for x in (*leaves, *of_module)], kept, torch.rand(2, device=DEVICE)]
        seen.append(torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), taken))
    return seen


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", ["capture", "mutations_and_views"])
def test_calls_equal_those_of_eager(name: str, way: str) -> None:
    def made() -> Made:
        torch.manual_seed(0)
        return PROGRAMS[name]()

    def run(program: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        if way == "capture":
            return capture(program, args)
        return functionalize(program, remove="mutations_and_views")

    program, args = made()
    torch.manual_seed(1)
    expected = called(program, args, program)
    program, args = made()
    if way == "capture" and name in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[name]):
            called(run(program, args), args, program)
        return
    torch.manual_seed(1)
    actual = called(run(program, args), args, program)
    torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=True)


def test_modes_of_the_gpu_are_guards() -> None:
    x = randn(4, 4)
    program = capture(lambda x: x @ x, (x,))
    with torch.autocast("cuda", dtype=torch.bfloat16), pytest.raises(InputMismatchError, match="autocast on cuda"):
        program(x)
    with pytest.raises(InputMismatchError, match="device"):
        program(x.cpu())


def test_a_graph_of_cuda_replays_a_captured_program() -> None:
    program = capture(lambda x, y: x.add_(y).relu_() * 2, (randn(4), randn(4)))
    x, y = randn(4), randn(4)
    want_x = x.clone()
    program(want_x.clone(), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = program(x, y)
    graph.replay()
    expected = want_x.add_(y).relu_() * 2
    torch.testing.assert_close((result, x), (expected, want_x))


EXPORTED = (
    *("convolutions", "LSTM", "GRU, two directions", "encoder, eval", "embeddings", "group norm", "attention, float32"),
    *("attention, bfloat16, causal", "decode", "step of Adam, a loop"),
)


def exported(route: Route, program: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> Callable[..., Any]:
    """A program by a route, as a function of tensors on the GPU."""
    elsewhere = route(capture(program, args), folder)
    if route is MODULE:
        return elsewhere

    def on_cpu(*args: Tensor) -> Any:
        there = [arg.cpu() for arg in args]
        results = elsewhere(*there)
        for arg, value in zip(args, there, strict=True):
            arg.copy_(value)
        return results

    return on_cpu


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("route", [MODULE, ONNX, JAX])
def test_exports_equal_eager(name: str, route: Route, tmp_path: Path) -> None:
    def made() -> Made:
        torch.manual_seed(0)
        program, args = PROGRAMS[name]()
        return program, tuple(arg.detach() for arg in args)

    program, args = made()
    state = torch.cuda.get_rng_state()
    run = exported(route, program, args, tmp_path)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    other, wanted = made()
    for _ in range(3):
        found, expected = run(*args), other(*wanted)
        pairs = zip(*(torch.utils._pytree.tree_leaves(one) for one in (found, expected)), strict=True)
        coarse = 2e-2 if "bfloat16" in name else 1e-4
        for one, value in pairs:
            torch.testing.assert_close(torch.as_tensor(one).cpu(), value.detach().cpu(), rtol=coarse, atol=coarse)
        torch.testing.assert_close(args, wanted, rtol=coarse, atol=coarse)
