"""Every model class of diffusers: transformers, U-Nets, autoencoders and what stands beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.from_vision import prepare_torchvision
from tests.zoo.shrink import SCALES, small
from tests.zoo.specimen import Call, Candidate, Family

_BATCH, _TEXT, _SIDE = 2, 8, 16
_LARGEST = 40_000_000


def _module() -> Any:
    prepare_torchvision()
    return import_module("diffusers")


def names() -> list[str]:
    """The classes of models that diffusers exports."""
    diffusers = _module()
    listed = dir(diffusers.models)
    found = [(name, getattr(diffusers, name, None)) for name in listed if name[0].isupper()]
    return sorted(n for n, one in found if isinstance(one, type) and issubclass(one, diffusers.ModelMixin))


def candidates(name: str) -> Iterator[Candidate]:
    """A class with its default settings made small, called with what its `forward` asks for."""
    model_class = getattr(_module(), name)
    defaults = {
        key: one.default
        for key, one in inspect.signature(model_class.__init__).parameters.items()
        if one.default is not inspect.Parameter.empty
    }
    errors: list[Exception] = []
    for scale in SCALES:
        try:
            settings = {key: small(key, value, scale) for key, value in defaults.items()}
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(**settings).parameters())
            if size > _LARGEST:
                raise ValueError(f"{size} parameters with widths by {scale}")
            torch.manual_seed(0)
            model = model_class(**settings)
        except Exception as error:  # what a class raises for settings that it does not take is its own choice
            errors.append(error)
            continue
        for dims in ((), (1,), (4,)):
            yield Candidate(model, _Arguments(model, dims))
        yield Candidate(model, _Arguments(model, None))
    if len(errors) == len(SCALES):
        raise errors[0]


class _Arguments:
    """Arguments by the names of the parameters of `forward`.

    ``frames``: dimensions between channels and image, or None for a sequence of vectors.
    """

    def __init__(self, model: nn.Module, frames: tuple[int, ...] | None) -> None:
        self._settings: Any = getattr(model, "config", {})
        self._parameters = inspect.signature(model.forward).parameters
        self._frames = frames

    def __call__(self) -> Call:
        makers = self._makers()
        arguments = {}
        for name, parameter in self._parameters.items():
            needed = parameter.default is inspect.Parameter.empty or name in _ASKED_FOR
            if needed and name in makers:
                arguments[name] = makers[name]()
        return (), arguments

    def _setting(self, *names: str, default: Any) -> Any:
        found = next((self._settings[name] for name in names if self._settings.get(name) is not None), default)
        return found[0] if isinstance(found, list | tuple) else found

    def _image(self) -> Tensor:
        channels = self._setting("in_channels", "latent_channels", default=4)
        if self._frames is None:
            return torch.randn(_BATCH, _SIDE, channels)
        return torch.randn(_BATCH, channels, *self._frames, _SIDE, _SIDE)

    def _makers(self) -> dict[str, Callable[[], Any]]:
        names = ("cross_attention_dim", "joint_attention_dim", "text_embed_dim", "caption_channels", "text_dim")
        text = self._setting(*names, "cap_feat_dim", "encoder_hidden_size", "text_hidden_dim", default=32)
        pooled = self._setting("pooled_projection_dim", "pooled_embed_dim", default=32)
        axes = len(self._settings.get("axes_dims_rope") or (1, 2, 3))
        return {
            "sample": self._image,
            "hidden_states": self._image,
            "x": self._image,
            "timestep": lambda: torch.full((_BATCH,), 5.0),
            "timesteps": lambda: torch.full((_BATCH,), 5.0),
            "encoder_hidden_states": lambda: torch.randn(_BATCH, _TEXT, text),
            "encoder_attention_mask": lambda: torch.ones(_BATCH, _TEXT),
            "pooled_projections": lambda: torch.randn(_BATCH, pooled),
            "img_ids": lambda: torch.zeros(_SIDE, axes),
            "txt_ids": lambda: torch.zeros(_TEXT, axes),
            "guidance": lambda: torch.full((_BATCH,), 3.0),
            "class_labels": lambda: torch.tensor([0, 1]),
            "controlnet_cond": lambda: torch.randn(_BATCH, 3, 8 * _SIDE, 8 * _SIDE),
            "conditioning_scale": lambda: 1.0,
            "proj_embedding": lambda: torch.randn(_BATCH, self._setting("embedding_dim", default=32)),
            "num_frames": lambda: 1,
        }


_ASKED_FOR = ("encoder_hidden_states", "pooled_projections", "img_ids", "txt_ids", "guidance")
FAMILY = Family("diffusers", names, candidates)
