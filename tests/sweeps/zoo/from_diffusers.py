"""Every model class of diffusers: transformers, U-Nets, autoencoders and what stands beside them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.sweeps.zoo.diffusers_arguments import ARGUMENTS
from tests.sweeps.zoo.diffusers_inputs import attempts
from tests.sweeps.zoo.diffusers_settings import SETTINGS, SINGLE
from tests.sweeps.zoo.from_vision import prepare_torchvision
from tests.sweeps.zoo.shrink import SCALES, Scale, small
from tests.sweeps.zoo.specimen import Candidate, Family

_LARGEST = 40_000_000
# Heads of their own size first: axes of rotary embeddings add up to it.
_SCALES = (Scale(8, heads=True), Scale(16, heads=True), *SCALES)


def _module() -> Any:
    prepare_torchvision()
    return import_module("diffusers")


def names() -> list[str]:
    """The classes of models that diffusers exports."""
    diffusers = _module()
    listed = dir(diffusers.models)
    found = [(name, getattr(diffusers, name, None)) for name in listed if name[0].isupper()]
    return sorted(n for n, one in found if isinstance(one, type) and _is_model(one, diffusers.ModelMixin))


def _is_model(one: type, base: type) -> bool:
    """Whether a class is that of a model: one that has a call."""
    return issubclass(one, base) and one.forward is not base.forward  # type: ignore[attr-defined]


def candidates(name: str) -> Iterator[Candidate]:
    """A class with its default settings made small, called with what its `forward` asks for."""
    errors: list[Exception] = []
    for scale in _SCALES:
        try:
            model = _made(name, scale)
        except Exception as error:  # what a class raises for settings that it does not take is its own choice
            errors.append(error)
            continue
        for attempt in attempts(model, ARGUMENTS.get(name, {})):
            yield Candidate(model, attempt)
    if len(errors) == len(_SCALES):
        raise errors[0]


def _made(name: str, scale: Scale) -> nn.Module:
    settings = _settings(name, scale)
    model_class = getattr(_module(), name)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(**settings).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size} parameters with widths by {scale}")
    torch.manual_seed(0)
    with torch.no_grad():  # weights that are computed from others are leaves, and can be copied
        model: nn.Module = model_class(**settings)
    return model


def _settings(name: str, scale: Scale) -> dict[str, Any]:
    """Defaults made small, what a class has by itself, and other models for those that are made of them."""
    parameters = inspect.signature(getattr(_module(), name).__init__).parameters
    settings = {
        key: small(key, one.default, scale)
        for key, one in parameters.items()
        if one.default is not inspect.Parameter.empty
    }
    for several, one in (("controlnets", name.replace("Multi", "")), ("adapters", "T2IAdapter")):
        if several in parameters:
            settings[several] = [_made(one, scale) for _ in range(1 if name in SINGLE else 2)]
    return {**settings, **SETTINGS.get(name, {})}


FAMILY = Family("diffusers", names, candidates)
