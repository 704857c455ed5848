"""The models of the fixed small part: of each kind of architecture one that is quick, all of transformers."""

from __future__ import annotations

# Encoders of text, images, both, sound; convolutions; attention in windows; several scales.
_NAMES = """
bert clip convnext deberta-v2 resnet roformer segformer smolvlm videomae vit wav2vec2 yolos
"""
CI = frozenset(("transformers", name) for name in _NAMES.split())
