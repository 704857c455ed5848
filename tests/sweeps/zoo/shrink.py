"""Makes a configuration small by the names and values of its settings, whatever model it is of.

Widths are divided by one factor, and either the sizes of heads or their numbers with them: so what the authors made fit
together (width, heads, projections between parts) still does. Layers, experts, vocabulary and images get small numbers.
Limits: where a model asks for more than that, another `Scale` may do: the callers try one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LAYERS = 2
VOCABULARY = 128
_FEW_EXPERTS = 4

_COUNT_OF_LAYERS = re.compile(
    r"(^|_)(num|n)_(\w+_)?(layers?|blocks)$|^layers$|(^|_)depths?$|(encoder|decoder|hidden|_)_layers$|^n_layers?$"
    r"|^layers_per_block$|^(enc|dec)_layers$|_depth$"
)
_LAYER_INDEX = re.compile(r"(idxs?|indexes|indices|index|layer_ids?|_layers)$")
_EXPERTS = re.compile(r"^(num_|n_)?(\w+_)?experts$")
_CHOSEN_EXPERTS = re.compile(r"experts_per_tok|top_?k$|num_experts_per|topk_group|n_group")
_VOCABULARY = re.compile(r"vocab_?size|codebook_size|num_embeddings$|vocab_dim$")
_TOKEN = re.compile(r"(token|_tok)(_id|_ids|_index)$|_id$|_token$")
_IMAGE = re.compile(r"^(image|img|input|sample|crop)_?size$|^(target|resized)_(height|width)$")
_NO_WIDTH = re.compile(
    r"patch|kernel|stride|window|position|^num_|_num_|heads|head$|layer|token|_id|max_|min_|rate|group|bucket|len|"
    r"factor|ratio|steps|freq|fps|sampling|hop|mel|offset|pad|chunk_size|frames|grid|scale|seed|codebook|temporal|"
    r"spatial|bins|levels|stage|dilation|version"
)
_WIDTH = re.compile(
    r"size|dim|width|channel|embd|embed|d_model|d_ff|d_kv|d_inner|ffn|inner|rank|hidden|state|mlp|intermediate|feature|"
    r"proj|planes|mrope_section|inplanes|filters|^d_|^dff$"
)
_HEADS = re.compile(r"^(num_|n_)(\w+_)?heads?$|^n_head$|_attention_heads$|^attention_heads$")
_OF_ONE_HEAD = re.compile(r"head_dim|head_size|^d_kv$|dim_head|mrope_section|axes_dims?|rope_(axes_)?dim")
_GROUPS = re.compile(r"norm_num_groups$|^groups$")
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """What widths are divided by, and how large images may be.

    ``heads``: there are fewer heads, and each is as wide as before.
    """

    factor: int
    heads: bool = False
    image: int = 64


SCALES = (
    Scale(8),
    Scale(4),
    Scale(8, heads=True),
    Scale(8, image=384),
    Scale(16),
    Scale(2),
    Scale(2, heads=True),
    Scale(8, heads=True, image=1024),
    Scale(1),
)


def small(name: str, value: Any, scale: Scale) -> Any:
    """What a setting becomes. Anything that no rule names stays."""
    if isinstance(value, bool) or value is None or isinstance(value, float | str):
        return value
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return _small_list(name, value, scale)
    if type(value) is not int:
        return value
    for pattern, rule in _RULES:
        if pattern.search(name):
            return rule(value)
    if _IMAGE.search(name):
        return min(value, scale.image)
    if _GROUPS.search(name):
        return max(1, value // scale.factor)
    if scale.heads and _HEADS.search(name):
        return max(1, value // scale.factor)
    return value // scale.factor if _is_width(name, value, scale) and value >= 4 * scale.factor else value


def _is_width(name: str, value: int, scale: Scale) -> bool:
    if _OF_ONE_HEAD.search(name):
        return not scale.heads and value % scale.factor == 0
    return bool(_WIDTH.search(name)) and not _NO_WIDTH.search(name) and value % scale.factor == 0


_RULES: tuple[tuple[re.Pattern[str], Callable[[int], int]], ...] = (
    (_VOCABULARY, lambda value: min(value, VOCABULARY)),
    (_CHOSEN_EXPERTS, lambda value: min(value, 2)),
    (_EXPERTS, lambda value: min(value, _FEW_EXPERTS)),
    (_COUNT_OF_LAYERS, lambda value: min(value, LAYERS)),
    (re.compile(r"^(num_queries|num_detection_tokens|num_proposals)$"), lambda value: min(value, 20)),
)


def _small_list(name: str, value: Any, scale: Scale) -> Any:
    kind = type(value)
    if name.endswith(("indices", "indexes")) or _COUNT_OF_LAYERS.search(name):
        return kind(min(one, LAYERS - 1 if "ind" in name else LAYERS) for one in value)
    if _IMAGE.search(name):
        return kind(min(one, scale.image) for one in value)
    if all(_is_width(name, one, scale) for one in value):
        return kind(one // scale.factor for one in value)
    if scale.heads and _HEADS.search(name):
        return kind(max(1, one // scale.factor) for one in value)
    return value


def shrink(config: Any, scale: Scale) -> Any:
    """Make a configuration of transformers small, with those that it holds; in place."""
    before = dict(vars(config))
    layers = _layers(before)
    vocabulary = next((v for k, v in before.items() if _VOCABULARY.search(k) and type(v) is int), VOCABULARY)
    tokens = _tokens(before, max(vocabulary, VOCABULARY))
    for name, value in before.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, scale)
        elif name in tokens:
            setattr(config, name, tokens[name])
        elif isinstance(value, list) and len(value) == layers and value and isinstance(value[0], str):
            setattr(config, name, _kinds(value))
        elif isinstance(value, dict) and name.startswith("rope"):
            setattr(config, name, {key: small(key, one, scale) for key, one in value.items()})
        elif not name.startswith("_") and name not in ("id2label", "label2id"):
            setattr(config, name, small(name, value, scale))
    _agree_on_layers(config, before, layers)
    return config


def _layers(settings: Settings) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "depth"):
        if type(settings.get(name)) is int:
            return settings[name]  # type: ignore[no-any-return]
    return None


def _kinds(value: list[str]) -> list[str]:
    """One layer of each kind, in their order; at least as many as layers are to be."""
    kinds = list(dict.fromkeys(value))
    return (kinds * LAYERS)[: max(LAYERS, len(kinds))]


def _agree_on_layers(config: Any, before: Settings, layers: int | None) -> None:
    """As many layers as lists by layer have entries; lists by layer of other things are cut."""
    lengths = {len(getattr(config, n)) for n, v in before.items() if _is_by_layer(v, layers) and isinstance(v[0], str)}
    count = max(lengths, default=LAYERS)
    for name, value in before.items():
        if _is_by_layer(value, layers):
            current = list(getattr(config, name))
            setattr(config, name, (current + current[-1:] * count)[:count])
        elif lengths and value == layers and _COUNT_OF_LAYERS.search(name):
            setattr(config, name, count)


def _is_by_layer(value: Any, layers: int | None) -> bool:
    return isinstance(value, list) and layers is not None and layers > 4 and len(value) == layers


def _tokens(settings: Settings, vocabulary: int) -> dict[str, Any]:
    """Ids of special tokens, told apart, that the small vocabulary has."""
    found = [(n, v) for n, v in settings.items() if _TOKEN.search(n) and type(v) is int and v >= VOCABULARY - 40]
    values = list(dict.fromkeys(value for _, value in found))
    return {name: VOCABULARY - 1 - values.index(value) for name, value in found}


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside of it, itself first."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these settings that a configuration, or one inside of it, has."""
    for name in names:
        for part in parts(config):
            value = vars(part).get(name)
            if value is not None:
                return value
    return default
