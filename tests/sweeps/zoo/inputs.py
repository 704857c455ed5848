"""Example inputs of a model of transformers, from its `forward` and its configuration.

Each attempt is a set of arguments that some kind of model takes; the callers take the first that eager runs. An attempt
gives other values of the same shapes each time that it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.sweeps.zoo.shrink import setting
from tests.sweeps.zoo.specimen import NotApplicable

Arguments = dict[str, Any]
Attempt = Callable[[], Arguments]
BATCH = 2
LENGTH = 8
_ORDINARY_TOKENS = range(5, 60)  # below what the small configurations take for special


class Inputs:
    """The attempts for one model."""

    def __init__(self, model: Any) -> None:
        self._config = model.config
        self._main = getattr(model, "main_input_name", "input_ids")
        self._model = model
        self._parameters = inspect.signature(model.forward).parameters

    def attempts(self) -> Iterator[Attempt]:
        """Sets of arguments to try, those that use most of the model first."""
        makers = self._makers()
        names = [name for name in self._parameters if name in makers]
        required = [n for n in names if self._parameters[n].default is inspect.Parameter.empty]
        main = [self._main] if self._main in names else []
        if "pixel_values" in names and "input_ids" in names:
            yield lambda: self._image_and_text()
            yield lambda: self._packed_images()
        for some in self._sets(names, required, main):
            yield lambda some=some: {name: makers[name]() for name in some}  # type: ignore[misc]
            if "pixel_values" in some:
                for shape in self._image_shapes()[1:]:
                    yield lambda some=some, shape=shape: {  # type: ignore[misc]
                        name: torch.randn(shape) if name == "pixel_values" else makers[name]() for name in some
                    }
            if self._main in ("input_values", "input_features") and self._main in some:
                for shape in self._sound_shapes():
                    yield lambda some=some, shape=shape: {  # type: ignore[misc]
                        name: torch.randn(shape) if name == self._main else makers[name]() for name in some
                    }
        yield lambda: dict(self._model.dummy_inputs)

    def _sets(self, names: list[str], required: list[str], main: list[str]) -> list[list[str]]:
        decoder = [name for name in ("decoder_input_ids",) if name in names]
        wanted = [
            [*main, *required, *decoder],
            [*main, *required],
            *([one, *required, *decoder] for one in ("input_ids", "pixel_values", "input_features", "input_values")),
            [n for n in ("input_ids", "pixel_values", "attention_mask", "bbox", *decoder) if n in names] + required,
            [n for n in names if n.startswith(("past_", "future_", "static_"))] + required,
            [n for n in ("input_ids", "attention_mask", "input_features", "input_values") if n in names] + required,
            ["inputs"],
            ["query_embeds" if "query_embeds" in names else "inputs_embeds", *required],
        ]
        sets: list[list[str]] = []
        for one in wanted:
            chosen = list(dict.fromkeys(one))
            if chosen and all(name in names for name in chosen) and chosen not in sets:
                sets.append(chosen)
        return sets

    def _makers(self) -> dict[str, Callable[[], Tensor]]:
        config = self._config
        width = setting(config, "hidden_size", "d_model", "embed_dim", default=32)
        encoded = setting(config, "encoder_hidden_size", default=width)
        context = setting(config, "context_length", default=8)
        lags = max(setting(config, "lags_sequence", default=[0]) or [0])
        past = context + lags
        future = setting(config, "prediction_length", default=4) or 4
        series = setting(config, "num_input_channels", default=None)
        features = setting(config, "num_time_features", default=0)
        sides = (series,) if series else ()
        return {
            "input_ids": self._tokens,
            "decoder_input_ids": self._tokens,
            "attention_mask": lambda: torch.ones(BATCH, LENGTH, dtype=torch.long),
            "token_type_ids": lambda: torch.zeros(BATCH, LENGTH, dtype=torch.long),
            "bbox": lambda: torch.tensor([1, 2, 30, 40]).expand(BATCH, LENGTH, 4).contiguous(),
            "pixel_values": lambda: torch.randn(self._image_shapes()[0]),
            "pixel_values_videos": lambda: torch.randn(self._video_shape()),
            "input_features": lambda: torch.randn(self._sound_shapes()[0]),
            "input_values": lambda: torch.randn(BATCH, 2000),
            "audio_values": lambda: torch.randn(BATCH, 1, 2000),
            "inputs": self._tokens,
            "inputs_embeds": lambda: torch.randn(BATCH, LENGTH, width),
            "query_embeds": lambda: torch.randn(BATCH, LENGTH, width),
            "encoder_hidden_states": lambda: torch.randn(BATCH, LENGTH, encoded),
            "grid_thw": lambda: torch.tensor([[1, 4, 4]]),
            "past_values": lambda: torch.randn(BATCH, past, *sides),
            "past_time_features": lambda: torch.randn(BATCH, past, features),
            "past_observed_mask": lambda: torch.ones(BATCH, past, *sides),
            "future_values": lambda: torch.randn(BATCH, future, *sides),
            "future_time_features": lambda: torch.randn(BATCH, future, features),
            "states": lambda: torch.randn(BATCH, LENGTH, setting(config, "state_dim", default=17)),
            "actions": lambda: torch.randn(BATCH, LENGTH, setting(config, "act_dim", default=4)),
            "rewards": lambda: torch.randn(BATCH, LENGTH, 1),
            "returns_to_go": lambda: torch.randn(BATCH, LENGTH, 1),
            "timesteps": lambda: torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous(),
        }

    def _tokens(self) -> Tensor:
        low, high = _ORDINARY_TOKENS.start, _ORDINARY_TOKENS.stop
        return torch.randint(low, high, (BATCH, LENGTH))

    def _image_sides(self) -> tuple[int, int]:
        size = setting(self._config, "image_size", "img_size", "input_size", "sample_size", default=64)
        if isinstance(size, list | tuple):
            return int(size[0]), int(size[-1])
        return (int(size), int(size)) if isinstance(size, int) else (64, 64)

    def _image_shapes(self) -> list[tuple[int, ...]]:
        height, width = self._image_sides()
        given = setting(self._config, "num_channels", "in_channels", "in_chans", default=3)
        channels = given if isinstance(given, int) else 3
        video = self._video_shape()
        shapes = [
            (BATCH, channels, height, width),
            (BATCH, channels, 64, 64),
            video,
            (BATCH, 1, channels, height, width),
            (BATCH, 2, channels, height, width),
            (BATCH, channels, 224, 224),
            (BATCH, 3, height, width),
        ]
        return list(dict.fromkeys(shapes))

    def _video_shape(self) -> tuple[int, ...]:
        height, width = self._image_sides()
        frames = setting(self._config, "num_frames", "frames_per_clip", default=4)
        return (BATCH, int(frames), 3, height, width)

    def _sound_shapes(self) -> list[tuple[int, ...]]:
        config = self._config
        mels = setting(config, "num_mel_bins", "feature_size", "input_dim", "input_channels", "n_mels", default=80)
        positions = setting(config, "max_source_positions", default=None)
        frames = 2 * positions if isinstance(positions, int) and positions <= 2000 else 64
        length = setting(config, "max_length", default=64)
        shapes = [(BATCH, mels, frames), (BATCH, 64, mels), (BATCH, length, mels), (BATCH, mels, 64)]
        return [*dict.fromkeys(shapes), (BATCH, 1, 2000), (BATCH, 2000), (BATCH, 1, 64, mels), (BATCH, 1, mels, 64)]

    def _image_and_text(self) -> Arguments:
        """An image, and text with as many places for it as the model's own encoder makes of it."""
        token = setting(self._config, "image_token_id", "image_token_index")
        for shape in self._image_shapes() if token is not None else ():
            pixels = torch.randn(shape)
            try:
                with torch.no_grad():
                    found = self._model.get_image_features(pixel_values=pixels)
            except Exception:  # what models raise for a shape that they do not take is theirs to choose
                continue
            count = sum(_rows(one) for one in _tensors_of(found)) // BATCH
            return {"input_ids": self._with_places(token, count), "pixel_values": pixels}
        raise NotApplicable("no image features")

    def _packed_images(self) -> Arguments:
        """Images as rows of patches, with their grids, as models take them that allow for any size."""
        token = setting(self._config, "image_token_id", "image_token_index")
        if token is None or "image_grid_thw" not in self._parameters:
            raise NotApplicable("no grids")
        merge = setting(self._config, "spatial_merge_size", default=2)
        patch = setting(self._config, "patch_size", default=14)
        channels = setting(self._config, "in_channels", "num_channels", default=3)
        times = setting(self._config, "temporal_patch_size", default=1)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * BATCH)
        pixels = torch.randn(BATCH * 4 * merge * merge, channels * times * patch * patch)
        arguments = {"input_ids": self._with_places(token, 4), "pixel_values": pixels, "image_grid_thw": grid}
        if "mm_token_type_ids" in self._parameters:
            arguments["mm_token_type_ids"] = (arguments["input_ids"] == token).long()
        return arguments

    def _with_places(self, token: int, count: int) -> Tensor:
        places = torch.full((BATCH, count), token)
        ordinary = self._tokens()
        return torch.cat([ordinary[:, :2], places, ordinary[:, 2:]], 1)


def _rows(tensor: Tensor) -> int:
    """How many vectors a tensor of features is."""
    return tensor.numel() // tensor.shape[-1]


def _tensors_of(found: Any) -> list[Tensor]:
    """The features themselves: what is called so in an output, else the tensors that were returned."""
    pooled = getattr(found, "pooler_output", None)
    if pooled is not None:
        found = pooled
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, list | tuple):
        return [one for one in found if isinstance(one, Tensor)]
    hidden = getattr(found, "last_hidden_state", None)
    return [hidden] if isinstance(hidden, Tensor) else []
