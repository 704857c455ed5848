"""What torch runs on a GPU alone, as engines get it, held against torch's own on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from functionalize.backends.decompositions.families import gpu_kernels, recurrent_layers
from functionalize.backends.preparation.devices import on_cpu

aten = torch.ops.aten
KERNELS = {
    "efficient": (gpu_kernels.efficient_attention, gpu_kernels.efficient_attention_backward),
    "flash": (gpu_kernels.flash_attention, gpu_kernels.flash_attention_backward),
    "cudnn": (gpu_kernels.cudnn_attention, gpu_kernels.cudnn_attention_backward),
}


def backward_of(kernel: str, gradient: Tensor, tensors: list[Tensor], given: Any, mask: Any, is_causal: bool) -> Any:
    out, total, *others = given
    of_mask = () if kernel == "flash" else (mask,)
    options: dict[str, Any] = {"scale": 0.3}
    backward: Any = KERNELS[kernel][1]
    if kernel == "efficient":
        wanted = [True, True, True, False]
        return backward(gradient, *tensors, mask, out, total, *others, 0.0, wanted, is_causal, **options)
    lengths, state = others[:4], others[4:6]
    if kernel == "flash":
        return backward(gradient, *tensors, out, total, *lengths, 0.0, is_causal, *state, **options)
    return backward(gradient, *tensors, out, total, *state, *of_mask, *lengths, 0.0, is_causal, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("how", ["plain", "causal", "mask"])
def test_attention(kernel: str, how: str) -> None:
    if kernel == "flash" and how == "mask":
        how = "plain"  # it takes none
    query, key, value = (torch.randn(2, 3, size, 8, requires_grad=True) for size in (6, 9, 9))
    mask = torch.randn(2, 3, 6, 9) if how == "mask" else None
    causal = how == "causal"
    options: Any = {"scale": 0.3}
    expected = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, **options)
    gradient = torch.randn_like(expected)
    of_inputs = torch.autograd.grad(expected, [query, key, value], gradient)
    tensors = [one.detach() for one in (query, key, value)]
    forward: Any = KERNELS[kernel][0]
    masks = () if kernel == "flash" else (mask, True)
    given = forward(*tensors, *masks, 0.0, causal, **options)
    torch.testing.assert_close(given[0], expected.detach())
    found = backward_of(kernel, gradient, tensors, given, mask, causal)
    torch.testing.assert_close(tuple(found[:3]), of_inputs)
    assert forward(*tensors, *masks, 0.5, causal, **options) is NotImplemented


LAYERS: dict[str, Any] = {
    "LSTM": lambda **options: nn.LSTM(4, 5, **options),
    "GRU": lambda **options: nn.GRU(4, 5, **options),
    "tanh": lambda **options: nn.RNN(4, 5, nonlinearity="tanh", **options),
    "relu": lambda **options: nn.RNN(4, 5, nonlinearity="relu", **options),
    "projected": lambda **options: nn.LSTM(4, 5, proj_size=3, **options),
}
MODES = {"relu": 0, "tanh": 1, "LSTM": 2, "projected": 2, "GRU": 3}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_recurrent_layers(name: str, both: bool, biases: bool) -> None:
    layers = LAYERS[name](num_layers=2, bidirectional=both, bias=biases)
    projected = 3 if name == "projected" else 0
    data, states = torch.randn(3, 2, 4), [torch.randn(2 * (1 + both), 2, projected or 5), None]
    if "LSTM" in type(layers).__name__:
        states[1] = torch.randn(2 * (1 + both), 2, 5)
    with torch.no_grad():
        expected = layers(data, tuple(states) if states[1] is not None else states[0])
        stride = (4 if biases else 2) + (projected > 0)
        sizes: Any = MODES[name], 5, projected, 2, False, 0.0, True, both, [], None
        given: Any = data, layers._flat_weights, stride, None, *states
        output, hidden, cell, *_ = recurrent_layers.cudnn_layers(*given, *sizes)
    torch.testing.assert_close(output, expected[0])
    found = (hidden, cell) if states[1] is not None else hidden
    torch.testing.assert_close(found, expected[1])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_gradients_of_recurrent_layers(both: bool, biases: bool) -> None:
    layers = nn.LSTM(4, 5, num_layers=2, bidirectional=both, bias=biases)
    data, *states = (torch.randn(size, requires_grad=True) for size in ((3, 2, 4), *[(2 + 2 * both, 2, 5)] * 2))
    output, last = layers(data, tuple(states))
    weights = list(layers.parameters())
    gradients = [torch.randn_like(one) for one in (output, *last)]
    expected = torch.autograd.grad([output, *last], [data, *states, *weights], gradients)
    given = data, weights, 4 if biases else 2, None, *states, output, *gradients
    sizes: Any = 2, 5, 0, 2, False, 0.0, True, both, [], None, None, [True] * 4
    with torch.no_grad():
        *found, of_weights = recurrent_layers.cudnn_layers_backward(*given, *sizes)
    torch.testing.assert_close((*found, *of_weights), expected)


@pytest.mark.parametrize("biases", [False, True])
def test_cells(biases: bool) -> None:
    data, hidden, cell = torch.randn(2, 4), torch.randn(2, 5), torch.randn(2, 5)
    for module, run, state in (
        (nn.LSTMCell(4, 5, bias=biases), gpu_kernels.lstm_cell, (hidden, cell)),
        (nn.GRUCell(4, 5, bias=biases), gpu_kernels.gru_cell, (hidden,)),
    ):
        with torch.no_grad():
            expected = module(data, state if len(state) > 1 else hidden)
            gates = data @ module.weight_ih.t(), hidden @ module.weight_hh.t()
            given = (module.bias_ih, module.bias_hh) if biases else ()
            *found, _ = run(*gates, state[-1], *given)
        torch.testing.assert_close(tuple(found) if len(found) > 1 else found[0], expected)


@pytest.mark.parametrize("stride", [(1, 2), (0, 1), (3, 1)])
def test_a_graph_of_a_gpu_on_the_cpu(stride: tuple[int, int]) -> None:
    graph = Graph()
    with FakeTensorMode():
        there = torch.empty_strided((2, 3), stride, device="cuda:0")
        x = graph.placeholder("x")
        x.meta["val"] = there
        ones = graph.call_function(aten.ones.default, ([3],), {"device": torch.device("cuda")})
        ones.meta["val"] = there.new_empty(3)
        graph.output((graph.call_function(aten.add.Tensor, (x, ones)),))
    moved = on_cpu(graph)
    placeholder, made, *_ = moved.nodes
    assert (placeholder.meta["val"].device.type, placeholder.meta["val"].stride()) == ("cpu", stride)
    assert (made.kwargs["device"], made.meta["val"].device) == (torch.device("cpu"), torch.device("cpu"))
    assert x.meta["val"] is there and ones.kwargs["device"] == torch.device("cuda")
    assert on_cpu(moved) is moved
