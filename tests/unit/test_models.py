"""Real models and training steps: a pure graph, equal to eager, and state written back."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._inductor import config as inductor_config

from functionalize import capture
from functionalize.verify import assert_equivalent, assert_functional
from functionalize.verify.observation import clone_inputs, differences, observe
from tests.support.models import ALL_MODES, MODELS, Model
from tests.support.transformer_models import TRANSFORMERS

REMOVES = ("mutations", "mutations_and_views")
FAKE = [pytest.param(model, id=model.name) for model in MODELS]
# Each kind of program once, the small ones: a training step, its convolutions, a decoder and its cache, recurrences.
COMPILED_OFTEN = ("mlp-step-adamw-foreach", "convolution-func-step")
COMPILED = [
    pytest.param(model, id=model.name, marks=[pytest.mark.full] * (model.name not in COMPILED_OFTEN))
    for model in MODELS
]
OTHER_MODES = [
    pytest.param(model, mode, id=f"{model.name}-{mode}") for model in MODELS for mode in model.modes if mode != "fake"
]
# Programs that write into their inputs; the others compute, and must have no write-back.
WRITERS = ("resnet-train", "-step-", "func-step", "kv-cache", "state-space")


def quietly(check: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Models warn while they run (deprecated calls, missing fast kernels); that is not our matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check(*args, **kwargs)


def changed_inputs(func: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
    after = clone_inputs(inputs)
    torch.manual_seed(0)
    func(*after)
    pairs = zip(pytree.tree_leaves(inputs), pytree.tree_leaves(after), strict=True)
    return sum(not torch.equal(old, new) for old, new in pairs)


def write_backs(graph: torch.fx.GraphModule) -> int:
    copy = torch.ops.aten.copy_.default
    return sum(node.target is copy for node in graph.graph.nodes)


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize("remove", [pytest.param("mutations", marks=pytest.mark.full), "mutations_and_views"])
@pytest.mark.parametrize("model", FAKE)
def test_model_equals_eager(model: Model, remove: str) -> None:
    func, inputs = model.build()
    graph = quietly(assert_equivalent, func, *inputs, remove=remove, tracing_mode="fake")
    changed = quietly(changed_inputs, func, inputs)
    assert bool(changed) == any(word in model.name for word in WRITERS)
    # Every changed input has its write-back; one that is written with what it held may have one too.
    assert changed <= write_backs(graph)
    assert changed or not write_backs(graph)


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize(("model", "mode"), OTHER_MODES)
def test_model_in_other_modes(model: Model, mode: str, remove: str) -> None:
    func, inputs = model.build()
    quietly(assert_equivalent, func, *inputs, remove=remove, tracing_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv-cache-decode", "state-space-loop", "resnet-step-adamw-fused"])
def test_model_without_tracing(name: str) -> None:
    func, inputs = next(model for model in MODELS if model.name == name).build()
    quietly(assert_equivalent, func, *inputs)


def test_models_that_must_trace_in_all_modes() -> None:
    full = {model.name for model in MODELS if set(model.modes) == set(ALL_MODES)}
    assert full >= {"bert-eval", "bert-train", "gpt2-eval", "gpt2-train", "resnet-train"}


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("model", FAKE)
def test_captured_model_equals_eager(model: Model, remove: str) -> None:
    func, inputs = model.build()
    torch.manual_seed(0)
    program = quietly(capture, func, clone_inputs(inputs), remove=remove)
    assert_functional(program.graph_module, remove)
    want, got = (quietly(observe, run, clone_inputs(inputs)) for run in (func, program))
    assert not list(differences(want, got, strides=True, aliasing=True, rtol=None, atol=None))


# Eager's random numbers; and no layouts of its own for ResNet's gradients: torch's `_fused_*` kernels update the wrong
# elements where gradients are channels-last and parameters are not, in eager too.
INDUCTOR = {"fallback_random": True, "layout_optimization": False}


@pytest.mark.slow(seconds=30)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler, c++")
@pytest.mark.every(2)
@pytest.mark.parametrize("model", COMPILED)
def test_captured_graph_runs_under_inductor(model: Model) -> None:
    func, inputs = model.build()
    program = quietly(capture, func, clone_inputs(inputs))
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        node.args = (node.args[0], 1.0)  # inductor draws for the elements in an order of its own
    flat = tuple(program.flat_inputs(*clone_inputs(inputs)))
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(INDUCTOR):
        results = []
        for run in (program.graph_module, torch.compile(program.graph_module, backend="inductor")):
            torch.manual_seed(0)
            results.append(quietly(run, *clone_inputs(flat)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_captured_module_and_its_gradients_equal_eager(name: str, train: bool) -> None:
    make, inputs = TRANSFORMERS[name]
    torch.manual_seed(0)
    module = quietly(make).train(train)
    other, batch = copy.deepcopy(module), inputs()
    program = quietly(capture, module, (), batch)
    results = []
    for run in (program, other):
        torch.manual_seed(1)
        results.append(quietly(run, **batch))
    got, want = results
    assert type(got) is type(want)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    quietly(got.loss.backward)
    quietly(want.loss.backward)
    for (parameter, ours), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), parameter
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
