"""The families of models, by name."""

from __future__ import annotations

from tests.sweeps.zoo import from_diffusers, from_transformers, from_vision

FAMILIES = {
    family.name: family
    for family in (from_transformers.FAMILY, from_vision.TIMM, from_diffusers.FAMILY, from_vision.TORCHVISION)
}
