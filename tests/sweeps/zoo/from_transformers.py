"""Every model type of transformers, by its configuration class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tests.sweeps.zoo.from_vision import prepare_torchvision
from tests.sweeps.zoo.inputs import Inputs
from tests.sweeps.zoo.shrink import SCALES, shrink
from tests.sweeps.zoo.specimen import Candidate, Family

# Where a type's class is looked for, in this order: the bare model, then models with a head, then all others.
_PREFERRED = ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING")
_TABLE = re.compile(r"MODEL_(FOR_\w+_)?MAPPING_NAMES")
_LARGEST = 40_000_000  # numbers: more is not small


@cache
def _classes() -> dict[str, str]:
    """The class of each type, by its name."""
    prepare_torchvision()  # transformers imports it where it is installed
    from transformers.models.auto import modeling_auto

    tables = {name: getattr(modeling_auto, name) for name in dir(modeling_auto) if _TABLE.fullmatch(name)}
    first = [f"{name}_NAMES" for name in _PREFERRED]
    found: dict[str, str] = {}
    for table in (*first, *(name for name in tables if name not in first)):
        for kind, entry in tables[table].items():
            found.setdefault(kind, entry if isinstance(entry, str) else entry[0])
    return found


def names() -> list[str]:
    """The model types that have both, configuration and model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(set(_classes()) & set(CONFIG_MAPPING.keys()))


def constructors(name: str) -> Iterator[Callable[[], nn.Module]]:
    """What makes the model of a type, made small by one scale after the other; each was called once."""
    prepare_torchvision()
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class: Any = getattr(transformers, _classes()[name])
    errors: list[Exception] = []
    for scale in SCALES:
        try:
            config = shrink(CONFIG_MAPPING[name](), scale)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > _LARGEST:
                raise ValueError(f"{size} parameters with widths by {scale}")
            make = partial(model_class, config)
            torch.manual_seed(0)
            make()
        except Exception as error:  # what a class raises for settings that it does not take is its own choice
            errors.append(error)
            continue
        yield make
    if len(errors) == len(SCALES):
        raise errors[0]


def candidates(name: str) -> Iterator[Candidate]:
    """The model of a type, made small by one scale after the other, with one set of arguments after the other."""
    for make in constructors(name):
        torch.manual_seed(0)
        model = make()
        for attempt in Inputs(model).attempts():
            yield Candidate(model, partial(_call, attempt))


def _call(attempt: Any) -> tuple[tuple[()], dict[str, Any]]:
    return (), attempt()


FAMILY = Family("transformers", names, candidates)
