"""One model of each family of timm and of torchvision: of each module that defines some."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from tests.sweeps.zoo.specimen import Call, Candidate, Family, by_module, smallest

_SIDES = (64, 96, 128, 224, 256, 288, 299, 320)


def prepare_torchvision() -> None:
    """Let torchvision be imported where its operators do not load, as those of a build for another torch.

    It registers fake kernels for two of them when it is imported, and fails where these are not there. Models that call
    such an operator fail in eager too, and do not count.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _timm_module() -> Any:
    prepare_torchvision()
    return import_module("timm")


def _torchvision_module() -> Any:
    prepare_torchvision()
    return import_module("torchvision")


def _images(*shapes: tuple[int, ...]) -> Call:
    return tuple(torch.randn(shape) for shape in shapes), {}


def timm_names() -> list[str]:
    """The smallest model of each module of timm."""
    timm = _timm_module()
    kinds = ((module, timm.list_models(module=module)) for module in timm.list_modules())
    return sorted({smallest(names) for _, names in kinds if names})


def _timm(name: str) -> Iterator[Candidate]:
    timm = _timm_module()
    errors: list[Exception] = []
    own = timm.get_pretrained_cfg(name).input_size if timm.get_pretrained_cfg(name) else (3, 224, 224)
    for options in ({"img_size": 64}, {}):
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, pretrained=False, **options)
        except Exception as error:  # some take no size, and raise what their constructors raise
            errors.append(error)
            continue
        for side in (*_SIDES, own[-1]):
            yield Candidate(model, partial(_images, (2, own[0], side, side)))
    if len(errors) > 1:
        raise errors[-1]


def torchvision_names() -> list[str]:
    """The smallest model of each module of torchvision."""
    torchvision = _torchvision_module()
    found = {name: torchvision.models.get_model_builder(name).__module__ for name in torchvision.models.list_models()}
    return by_module(found)


def _torchvision(name: str) -> Iterator[Candidate]:
    torchvision = _torchvision_module()
    options: dict[str, Any] = {"weights": None}
    builder = torchvision.models.get_model_builder(name)
    if "weights_backbone" in signature(builder).parameters:
        options["weights_backbone"] = None
    torch.manual_seed(0)
    model = builder(**options)
    for side in _SIDES:
        yield Candidate(model, partial(_images, (2, 3, side, side)))
    yield Candidate(model, partial(_images, (1, 3, 8, 64, 64)))
    yield Candidate(model, partial(_images, (1, 3, 16, 112, 112)))
    yield Candidate(model, partial(_images, (1, 3, 16, 224, 224)))
    yield Candidate(model, partial(_images, (1, 3, 128, 128), (1, 3, 128, 128)))
    yield Candidate(model, lambda: (([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],), {}))


TIMM = Family("timm", timm_names, _timm)
TORCHVISION = Family("torchvision", torchvision_names, _torchvision)
