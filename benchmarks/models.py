"""The models that captures are timed on: eight of transformers, four layers each, of toy width, in evaluation.

Invariant: nothing is downloaded; weights are random, and a forward's time is Python's, not its kernels'. Limits: CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
LAYERS, WIDTH, WORDS = 4, 16, 64


class Logits(torch.nn.Module):
    """A model of transformers whose output is a tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits


def tokens(length: int) -> Tensor:
    """Token ids, ``(2, length)``."""
    return torch.randint(0, WORDS, (2, length))


def text(*, mask: bool = False) -> Batch:
    """A batch of six tokens; with a mask by position where the model would inspect the values of any other, or none."""
    batch = {"input_ids": tokens(6)}
    return batch | {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()} if mask else batch


def image() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=WORDS, num_attention_heads=2, max_position_embeddings=16))


def vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    return ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=2, image_size=16, patch_size=8))


def swin() -> torch.nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    sizes: dict[str, Any] = {"depths": [2, 2], "num_heads": [1, 2], "window_size": 2, "embed_dim": 8}
    return SwinForImageClassification(SwinConfig(**sizes, image_size=16, patch_size=2))


def resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [2, 2, 2, 2]}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic"))


def convnext() -> torch.nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, patch_size=1))


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": WORDS, "n_positions": 16, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False))


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    sizes |= {"vocab_size": WORDS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_heads": 2}
    sizes |= {"num_layers": LAYERS, "decoder_start_token_id": 0, "use_cache": False}
    return T5ForConditionalGeneration(T5Config(**sizes))


def translation() -> Batch:
    return {"input_ids": tokens(6), "decoder_input_ids": tokens(4)}


MODELS: Mapping[str, tuple[Callable[[], torch.nn.Module], Callable[[], Batch]]] = {
    "bert": (bert, text),
    "vit": (vit, image),
    "swin": (swin, image),
    "resnet": (resnet, image),
    "convnext": (convnext, image),
    "gpt2": (gpt2, lambda: text(mask=True)),
    "llama": (llama, lambda: text(mask=True)),
    "t5": (t5, translation),
}


def build(name: str) -> tuple[torch.nn.Module, Batch]:
    """A model in evaluation whose output is its logits, and a batch; its parameters require gradients."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return Logits(make()).eval(), batch()
