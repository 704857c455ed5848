"""Which calls draw random numbers, by the generator's word, over torch's operator database."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize import capture
from functionalize.ops.calls import draws

RANDOM = (
    "dropout",
    "rrelu",
    "attention",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "cauchy",
    "uniform",
    "geometric",
)
DATABASE = [
    info
    for info in op_db
    if any(word in info.name for word in RANDOM) and torch.float32 in info.dtypes and "aten" not in info.name
]


class _Watched(TorchDispatchMode):
    """Notes the calls of which `draws` says something else than the generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrong, self.silent = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        drew = not torch.equal(before, torch.get_rng_state())
        said = draws(func, args, kwargs or {})
        if drew and not said:
            self.wrong.append(f"{func} drew")
        self.silent += torch.Tag.nondeterministic_seeded in func.tags and not said and not drew
        return result


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize("info", DATABASE, ids=lambda info: info.formatted_name)
def test_a_call_that_is_said_to_draw_nothing_draws_nothing(info: Any) -> None:
    watched = _Watched()
    for sample in info.sample_inputs("cpu", torch.float32, requires_grad=False):
        with watched:
            info.op(sample.input, *sample.args, **sample.kwargs)
    assert not watched.wrong


def test_dropout_that_drops_nothing_is_known() -> None:
    query = torch.ones(1, 2, 3, 4)
    with _Watched() as watched:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        torch.ops.aten.native_dropout.default(query, 0.5, False)
        torch.ops.aten.rrelu_with_noise.default(query, query.clone(), 0.1, 0.3, False)
    assert watched.silent == 3 and not watched.wrong


def test_attention_without_dropout_keeps_no_state_of_a_generator() -> None:
    layer = torch.nn.MultiheadAttention(4, 2, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    out = capture(lambda x: layer(x, x, x, need_weights=False)[0], (x,))(x)
    assert out.grad_fn.next_functions
    nodes, met = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        nodes += [edge[0] for edge in node.next_functions]
        derivation = getattr(node, "derivation", None)
        assert derivation is None or not derivation.random.states
