"""Example inputs of a model of diffusers, by the names of the parameters of its `forward` and by its settings.

Names and shapes are regular: nearly all models take their arguments from one table. The first argument has one of a few
forms (images, videos, sequences, sounds), which are tried one after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.sweeps.zoo.specimen import Call, NotApplicable

Settings = Mapping[str, Any]
Size = int | str
Maker = Callable[[Settings], Any]
BATCH = 2
TEXT = 8
FRAMES = 5  # one, and as many as two halvings of time take
SIDE = 16
TOKENS = 16  # of an image of 1 by 4 by 4 patches


def size(settings: Settings, wanted: Size) -> int:
    """A number, or the first of the settings "one|other|32" that is there."""
    if isinstance(wanted, int):
        return wanted
    for name in wanted.split("|"):
        found = int(name) if name.isdigit() else settings.get(name)
        found = found[0] if isinstance(found, list | tuple) and found else found
        if found:
            return int(found)
    raise NotApplicable(f"no setting of {wanted}")


def _shape(settings: Settings, sizes: tuple[Size, ...]) -> list[int]:
    return [size(settings, one) for one in sizes]


def normal(*sizes: Size) -> Maker:
    """Random numbers."""
    return lambda settings: torch.randn(_shape(settings, sizes))


def full(value: float, *sizes: Size) -> Maker:
    """One number everywhere, as a time."""
    return lambda settings: torch.full(_shape(settings, sizes), value)


def mask(*sizes: Size) -> Maker:
    """Of texts of which the last is padded."""

    def make(settings: Settings) -> torch.Tensor:
        made = torch.ones(_shape(settings, sizes), dtype=torch.bool)
        made[-1, -2:] = False
        return made

    return make


def below(limit: Size, *sizes: Size) -> Maker:
    """Random integers."""
    return lambda settings: torch.randint(0, size(settings, limit), _shape(settings, sizes))


def positions(length: int, axes: str) -> Maker:
    """Where each token is, along the axes that a rotary embedding has."""

    def make(settings: Settings) -> torch.Tensor:
        found: Any = next((settings[name] for name in axes.split("|") if settings.get(name)), (1, 2, 3))
        return torch.arange(length).float()[:, None].repeat(1, len(found))

    return make


def whole(values: Any) -> Maker:
    """These numbers."""
    return lambda settings: torch.tensor(values)


def plain(value: Any) -> Maker:
    """A number, a list: the same for all."""
    return lambda settings: value


def listed(*makers: Maker) -> Maker:
    """A list of others."""
    return lambda settings: [make(settings) for make in makers]


_CHANNELS = "in_channels|in_visual_dim|input_channels|in_dim|io_channels|num_channels|audio_channels|latent_dim|3"
_TEXT_WIDTH = (
    "encoder_hid_dim|joint_attention_dim|text_embed_dim|caption_channels|text_dim|cap_feat_dim|context_in_dim|in_text_dim|"
    "text_in_dim|llm_features_dim|text_hidden_dim|dit_text_dim|cond_token_dim|cross_attention_input_dim|condition_dim|"
    "encoder_hidden_size|cross_attention_dim|embedding_dim|32"
)
_AXES = "axes_dims_rope|axes_dims|rope_axes_dim"
_BY_NAME: dict[str, Maker] = {
    "timestep": full(5.0, BATCH),
    "timesteps": full(5.0, BATCH),
    "timestep_r": full(3.0, BATCH),
    "r_timestep": full(3.0, BATCH),
    "timestep_ratio": full(0.5, BATCH),
    "encoder_hidden_states": normal(BATCH, TEXT, _TEXT_WIDTH),
    "encoder_hidden_states_2": normal(BATCH, TEXT, "text_embed_2_dim"),
    "encoder_hidden_states_t5": normal(BATCH, "text_len_t5|8", "cross_attention_dim_t5|text_embed_dim_t5"),
    "encoder_attention_mask": mask(BATCH, TEXT),
    "encoder_attention_mask_2": mask(BATCH, TEXT),
    "encoder_hidden_states_mask": mask(BATCH, TEXT),
    "encoder_mask": mask(BATCH, TEXT),
    "text_embedding_mask": mask(BATCH, "text_len|8"),
    "text_embedding_mask_t5": mask(BATCH, "text_len_t5|8"),
    "pooled_projections": normal(BATCH, "pooled_projection_dim|in_text_dim2"),
    "clip_text_pooled": normal(BATCH, 1, "clip_text_pooled_in_channels"),
    "image_embeds": normal(BATCH, TEXT, "image_proj_dim|image_embed_dim"),
    "source_hidden_states": normal(BATCH, TEXT, "source_dim"),
    "target_input_ids": below("target_vocab_size", BATCH, TEXT),
    "inputs_embeds": normal(BATCH, TEXT, "hidden_size"),
    "mel": normal(BATCH, "num_mels", 4 * SIDE),
    "img_ids": positions(TOKENS, _AXES),
    "txt_ids": positions(TEXT, _AXES),
    "guidance": full(3.0, BATCH),
    "class_labels": below("num_class_embeds|num_embeds_ada_norm", BATCH),
    "conditioning_scale": plain(1.0),
    "proj_embedding": normal(BATCH, "embedding_proj_dim|embedding_dim"),
    "img_shapes": plain([[(1, 4, 4)]] * BATCH),
    "num_frames": plain(1),
    "height": plain(4),
    "width": plain(4),
    "original_size": full(64.0, BATCH, 2),
    "target_size": full(64.0, BATCH, 2),
    "crop_coords": full(0.0, BATCH, 2),
    "fps": full(16.0, BATCH),
    "global_hidden_states": normal(BATCH, 1, "global_states_input_dim|global_cond_dim"),
    "added_time_ids": full(1.0, BATCH, 3),
    "audio_hidden_states": normal(BATCH, TEXT, "audio_in_channels"),
    "audio_encoder_hidden_states": normal(BATCH, TEXT, "caption_channels"),
    "audio_num_frames": plain(TEXT),
    "visual_rope_pos": lambda settings: [torch.arange(FRAMES), torch.arange(SIDE // 2), torch.arange(SIDE // 2)],
    "text_rope_pos": lambda settings: torch.arange(TEXT),
}
# Optional ones that are given, and the setting without which they are not.
_OPTIONAL = {
    "encoder_hidden_states": "",
    "encoder_attention_mask": "",
    "encoder_hidden_states_mask": "",
    "encoder_hidden_states_2": "text_embed_2_dim",
    "encoder_attention_mask_2": "text_embed_2_dim",
    "encoder_hidden_states_t5": "cross_attention_dim_t5",
    "text_embedding_mask": "",
    "text_embedding_mask_t5": "cross_attention_dim_t5",
    "pooled_projections": "pooled_projection_dim",
    "image_embeds": "image_embed_dim",
    "timestep": "",
    "timesteps": "",
    "timestep_r": "use_meanflow",
    "img_ids": "",
    "txt_ids": "",
    "guidance": "guidance_embeds",
    "class_labels": "num_class_embeds",
    "img_shapes": "",
    "num_frames": "",
    "height": "",
    "width": "",
    "audio_num_frames": "",
    "global_hidden_states": "",
    "controlnet_cond": "",
    "conditioning_scale": "",
}
_MAIN = ("sample", "hidden_states", "x", "latents", "z")
_FORMS: tuple[tuple[Size, ...], ...] = (
    (_CHANNELS, SIDE, SIDE),
    (_CHANNELS, FRAMES, SIDE, SIDE),
    (TOKENS, _CHANNELS),
    (_CHANNELS, 4 * SIDE, 4 * SIDE),
    (_CHANNELS, FRAMES, 4 * SIDE, 4 * SIDE),
    (FRAMES, _CHANNELS, SIDE, SIDE),
    (_CHANNELS, 8, SIDE, SIDE),
    (FRAMES, SIDE, SIDE, _CHANNELS),
    (_CHANNELS, 64),
    (1, 4096),
    (_CHANNELS, 4096),
)


def attempts(model: nn.Module, own: Mapping[str, Maker]) -> Iterator[Callable[[], Call]]:
    """Sets of arguments to try; ``own``: what only this class takes."""
    parameters = inspect.signature(model.forward).parameters
    nets: Any = getattr(model, "nets", None)  # one model of several of a kind: arguments for each
    settings: Settings = nets[0].config if nets else getattr(model, "config", {})
    makers = {**_BY_NAME, **({"conditioning_scale": plain([0.5] * len(nets))} if nets else {}), **own}
    required = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    extra = [name for name in parameters if name in own or _is_wanted(name, settings)]
    main = next((name for name in _MAIN if name in parameters and name not in own), None)
    for form in _FORMS if main else ((),):
        first = normal(BATCH, *form)
        chosen = {**makers, **({main: first} if main else {})}
        condition = _condition(first, settings)
        chosen.setdefault("controlnet_cond", listed(*[condition] * len(nets)) if nets else condition)
        unmasked = [name for name in extra if "mask" not in name]
        for names in (dict.fromkeys((*required, *extra)), dict.fromkeys((*required, *unmasked)), required):
            yield partial(_call, {name: chosen[name] for name in names if name in chosen}, settings)


def _is_wanted(name: str, settings: Settings) -> bool:
    needs = _OPTIONAL.get(name)
    return needs is not None and (not needs or bool(settings.get(needs)))


def _condition(first: Maker, settings: Settings) -> Maker:
    """What controls: an image before it was encoded, or one as the first argument is."""
    encoded = any(name.endswith("conditioning_embedding_out_channels") for name in settings)
    return normal(BATCH, 3, 8 * SIDE, 8 * SIDE) if encoded else first


def _call(makers: Mapping[str, Maker], settings: Settings) -> Call:
    return (), {name: make(settings) for name, make in makers.items()}
