"""Real programs at toy size: models of transformers, training steps, caches, recurrences.

Invariant: a model's function takes everything that it reads or writes as inputs, parameters and buffers too,
and depends on them and the random seed alone. Limits: random weights, two layers, CPU; nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from tests.support.transformer_models import TRANSFORMERS, llama, resnet, tokens

Program = tuple[Callable[..., Any], tuple[Any, ...]]
ALL_MODES = ("fake", "real", "symbolic")


@dataclass(frozen=True)
class Model:
    """A named program. `build()` gives the function and inputs for one call (clone them to call again)."""

    name: str
    make: Callable[[], Program]
    modes: tuple[str, ...] = ("fake",)

    def build(self) -> Program:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # configurations warn about kernels that are not installed
            return self.make()


def state_of(module: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers as plain tensors; those of a module in training require grad where they do."""
    parameters = {
        name: p.detach().requires_grad_(module.training and p.requires_grad) for name, p in module.named_parameters()
    }
    return parameters, dict(module.named_buffers())


# Models of transformers


def _evaluation(make: Callable[[], Any], inputs: Callable[[], dict[str, Tensor]]) -> Program:
    module = make().eval()
    parameters, buffers = state_of(module)
    batch = inputs()
    if not module.config.is_encoder_decoder:
        del batch["labels"]  # only where they are the decoder's input

    def evaluate(parameters: Any, buffers: Any, batch: dict[str, Tensor]) -> Any:
        with torch.no_grad():
            return functional_call(module, {**parameters, **buffers}, (), batch).logits

    return evaluate, (parameters, buffers, batch)


def _training(make: Callable[[], torch.nn.Module], inputs: Callable[[], dict[str, Tensor]]) -> Program:
    """Forward in training mode, dropout on, and the gradients of the loss by parameter."""
    module = make().train()
    parameters, buffers = state_of(module)

    def train(parameters: dict[str, Tensor], buffers: Any, batch: dict[str, Tensor]) -> Any:
        loss = functional_call(module, {**parameters, **buffers}, (), batch).loss
        trained = [p for p in parameters.values() if p.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return loss.detach(), gradients

    return train, (parameters, buffers, inputs())


# Training steps with torch.optim


@contextmanager
def _as_when_compiled() -> Iterator[None]:
    """The optimizer's step count stays a tensor, as under torch.compile; else it is read with `.item()`."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


_STATE: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "step"),
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
}
_OPTIMIZERS: Mapping[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "adam": {"lr": 0.01, "capturable": True},
    "adamw": {"lr": 0.01, "capturable": True},
}
_KERNELS: Mapping[str, dict[str, bool]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def _optimizer_state(optimizer: str, parameters: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """State after some steps, so that nothing is initialized inside."""
    state = {name: {key: torch.full_like(p, 0.01) for key in _STATE[optimizer]} for name, p in parameters.items()}
    for values in state.values():
        if "step" in values:
            values["step"] = torch.tensor(3.0)
    return state


def _apply(optimizer: str, kernel: str, leaves: dict[str, Tensor], gradients: Any, state: Any) -> None:
    instance = _OPTIMIZERS[optimizer](leaves.values(), **_SETTINGS[optimizer], **_KERNELS[kernel])
    for name, gradient in zip(leaves, gradients, strict=True):
        leaves[name].grad = gradient
        instance.state[leaves[name]] = dict(state[name])
    with _as_when_compiled(), torch.no_grad():
        type(instance).step.__wrapped__(instance)
    for leaf in leaves.values():
        leaf.grad = None


def _step(loss_of: Callable[..., Tensor], module: torch.nn.Module, batch: Any, optimizer: str, kernel: str) -> Program:
    """Forward, backward, optimizer: parameters, its state and BatchNorm statistics are written in place."""
    parameters, buffers = state_of(module.train())

    def step(parameters: dict[str, Tensor], buffers: Any, state: Any, *batch: Tensor) -> Tensor:
        loss = loss_of(module, {**parameters, **buffers}, *batch)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        _apply(optimizer, kernel, parameters, gradients, state)
        return loss.detach()

    return step, (parameters, buffers, _optimizer_state(optimizer, parameters), *batch)


def _mlp() -> tuple[torch.nn.Module, Tensor, Tensor]:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return module, torch.randn(3, 4), torch.randn(3, 2)


def _mlp_step(optimizer: str, kernel: str) -> Program:
    module, *batch = _mlp()

    def loss_of(module: torch.nn.Module, state: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = functional_call(module, state, (inputs,))
        return torch.nn.functional.mse_loss(outputs, targets)

    return _step(loss_of, module, tuple(batch), optimizer, kernel)


def _resnet_step(optimizer: str, kernel: str) -> Program:
    def loss_of(module: torch.nn.Module, state: Any, images: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(module, state, (images,)).logits
        return torch.nn.functional.cross_entropy(logits, labels)

    batch = (torch.randn(2, 3, 16, 16), torch.tensor([1, 0]))
    return _step(loss_of, resnet(), batch, optimizer, kernel)


def _func_grad_step(module: torch.nn.Module, *batch: Tensor) -> Program:
    """A step of SGD by `torch.func.grad`, the one form of autograd that torch.func.functionalize traces."""
    parameters, buffers = state_of(module.train())
    parameters = {name: p.detach() for name, p in parameters.items()}

    def step(parameters: dict[str, Tensor], buffers: Any, momenta: Any, *batch: Tensor) -> Tensor:
        def loss_of(parameters: dict[str, Tensor]) -> Tensor:
            outputs = functional_call(module, {**parameters, **buffers}, batch[:1])
            return torch.nn.functional.mse_loss(outputs, batch[1])

        gradients, loss = torch.func.grad_and_value(loss_of)(parameters)
        for name, gradient in gradients.items():
            momenta[name].mul_(0.9).add_(gradient)
            parameters[name].add_(momenta[name], alpha=-0.1)
        return loss  # type: ignore[no-any-return]

    momenta = {name: torch.full_like(p, 0.01) for name, p in parameters.items()}
    return step, (parameters, buffers, momenta, *batch)


def _convolution_func_step() -> Program:
    convolution = torch.nn.Conv2d(3, 4, 3)
    module = torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    return _func_grad_step(module, torch.randn(2, 3, 4, 4), torch.randn(2, 2))


# Caches and recurrences


def kv_cache_decode(slots: int = 16) -> Program:
    """One token through Llama: the keys, values and length counter of each layer are written in place."""
    from transformers import StaticCache

    module: Any = llama().eval()
    config = module.config
    parameters, buffers = state_of(module)

    def decode(weights: Any, token: Tensor, layers: list[dict[str, Tensor]]) -> Tensor:
        cache = StaticCache(config=config, max_cache_len=slots)
        for layer, tensors in zip(cache.layers, layers, strict=True):
            vars(layer).update(tensors, is_initialized=True, dtype=torch.float32, device=token.device)
        with torch.no_grad():
            options = {"past_key_values": cache, "use_cache": True}
            logits: Tensor = functional_call(module, weights, (token,), options).logits
        return logits

    head = config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, slots, head)

    def layer() -> dict[str, Tensor]:
        counter = torch.tensor(5)  # tokens that came before
        return {"keys": torch.randn(shape), "values": torch.randn(shape), "cumulative_length": counter}

    return decode, ({**parameters, **buffers}, tokens(1, 1), [layer(), layer()])


def _lstm() -> Program:
    weights = [p.detach() for p in torch.nn.LSTM(4, 6, num_layers=2, dropout=0.1).parameters()]

    def run(weights: list[Tensor], inputs: Tensor, hidden: Tensor, cell: Tensor) -> Any:
        return torch.lstm(inputs, (hidden, cell), weights, True, 2, 0.1, True, False, False)

    return run, (weights, torch.randn(5, 3, 4), torch.zeros(2, 3, 6), torch.zeros(2, 3, 6))


def _gru() -> Program:
    weights = [p.detach() for p in torch.nn.GRU(4, 6, num_layers=2, dropout=0.1).parameters()]

    def run(weights: list[Tensor], inputs: Tensor, hidden: Tensor) -> Any:
        return torch.gru(inputs, hidden, weights, True, 2, 0.1, True, False, False)

    return run, (weights, torch.randn(5, 3, 4), torch.zeros(2, 3, 6))


def _state_space_loop() -> Program:
    """A selective scan by hand: the state decays and is updated in place, the output is filled row by row."""

    def scan(decay: Tensor, inputs: Tensor, read: Tensor, state: Tensor) -> Tensor:
        output = torch.empty_like(inputs)
        for time in range(inputs.shape[0]):
            state.mul_(decay)
            state.add_(inputs[time].unsqueeze(-1))
            output[time] = (state * read[time]).sum(-1)
        return output

    steps, width, size = 8, 6, 4
    inputs = (torch.rand(width, size), torch.randn(steps, width), torch.randn(steps, size))
    return scan, (*inputs, torch.zeros(width, size))


_IN_ALL_MODES = frozenset({"bert-eval", "bert-train", "gpt2-eval", "gpt2-train", "resnet-train"})


def _transformers_models() -> Iterator[Model]:
    for name, (make, inputs) in TRANSFORMERS.items():
        for kind, program in (("eval", _evaluation), ("train", _training)):
            full = f"{name}-{kind}"
            modes = ALL_MODES if full in _IN_ALL_MODES else ("fake",)
            yield Model(full, partial(program, make, inputs), modes)


def _training_models() -> Iterator[Model]:
    for base, step in (("mlp", _mlp_step), ("resnet", _resnet_step)):
        for optimizer in _OPTIMIZERS:
            for kernel in _KERNELS:
                # Plain make_fx has no symbolic shapes for the fused kernels.
                all_modes = (base, optimizer) == ("resnet", "sgd") and kernel != "fused"
                modes = ALL_MODES if all_modes else ("fake",)
                yield Model(f"{base}-step-{optimizer}-{kernel}", partial(step, optimizer, kernel), modes)


MODELS = (
    *_transformers_models(),
    *_training_models(),
    Model("mlp-func-step", lambda: _func_grad_step(*_mlp())),
    Model("convolution-func-step", _convolution_func_step),
    Model("kv-cache-decode", kv_cache_decode),
    Model("lstm", _lstm),
    Model("gru", _gru),
    Model("state-space-loop", _state_space_loop),
)
