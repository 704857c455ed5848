"""Models of transformers in other engines: evaluation and training steps, three calls each against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from functionalize import capture
from tests.support.routes import CORE_ATEN, ONNX, RUN_DECOMPOSITIONS, SAVED, Route
from tests.support.transformer_models import TRANSFORMERS, llama, tokens

pytest.importorskip("transformers")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_TRAINED_AS_SUCH = ("resnet",)  # without dropout: in others it would draw other numbers
on_each_route = pytest.mark.parametrize("route", [SAVED, ONNX, CORE_ATEN, RUN_DECOMPOSITIONS])


def _step(model: Any) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(**batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


@on_each_route
@pytest.mark.parametrize("kind", ["eval", "step"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_model(name: str, kind: str, route: Route, tmp_path: Path) -> None:
    make, inputs = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = make().train(name in _TRAINED_AS_SUCH and kind == "step")
    twin = copy.deepcopy(model)
    program, eager = (_step(model), _step(twin)) if kind == "step" else (model, twin)
    run = route(capture(program, (), inputs()), tmp_path)
    for _ in range(3):
        given = inputs()
        found, expected = (torch.utils._pytree.tree_leaves(one(**given)) for one in (run, eager))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@on_each_route
@pytest.mark.parametrize("way", ["closed over", "argument"])
def test_decode_with_a_static_cache(way: str, route: Route, tmp_path: Path) -> None:
    """A cache that the first call makes, and whose position moves."""
    from transformers import StaticCache

    def made() -> tuple[Callable[..., Any], Any]:
        torch.manual_seed(0)
        model: Any = llama().eval()
        held = StaticCache(config=model.config, max_cache_len=16)

        def decode(ids: Any, position: Any, cache: Any) -> Any:
            with torch.no_grad():
                return model(ids, past_key_values=cache, use_cache=True, position_ids=position).logits

        def closed_over(ids: Any, position: Any) -> Any:
            return decode(ids, position, held)

        return (decode, held) if way == "argument" else (closed_over, None)

    decode, cache = made()
    way, argument = "closed over", way == "argument"
    eager, _ = made()
    example: tuple[Any, ...] = (tokens(1, 1), torch.tensor([[0]]))
    run = route(capture(decode, (*example, cache) if argument else example), tmp_path)
    for position in range(4):
        given = tokens(1, 1), torch.tensor([[position]])
        torch.testing.assert_close(run(*given), eager(*given), rtol=1e-4, atol=1e-5)
