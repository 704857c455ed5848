"""Models of transformers at toy size, and a batch for each.

Invariant: nothing is downloaded; two layers, random weights, dropout on where the model has it. Limits: CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 64, shape)


def _text(rows: int = 2, length: int = 6) -> dict[str, Tensor]:
    ids = tokens(rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_text() -> dict[str, Tensor]:
    """With a mask by position: transformers would inspect the values of any other mask, or of none."""
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    return {**_text(), "attention_mask": mask}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 0])}


def _t5_text() -> dict[str, Tensor]:
    return {"input_ids": tokens(2, 6), "labels": tokens(2, 4)}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 16), "labels": tokens(2, 4)}


def _bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    )


def _gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def _decoder_sizes() -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
        "use_cache": False,
    }


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes()))


def _qwen2() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_decoder_sizes()))


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32}
    sizes |= {"num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, use_cache=False))


def _vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def _swin() -> torch.nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[1, 2],
            window_size=2,
            hidden_dropout_prob=0.1,
        )
    )


def resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )


def _mamba() -> torch.nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=8, state_size=4, num_hidden_layers=2, use_cache=False)
    )


def _whisper() -> torch.nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=64,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=8,
            max_target_positions=8,
            dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
        )
    )


TRANSFORMERS: Mapping[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "bert": (_bert, _text),
    "gpt2": (_gpt2, _masked_text),
    "llama": (llama, _text),
    "qwen2": (_qwen2, _text),
    "t5": (_t5, _t5_text),
    "vit": (_vit, _image),
    "swin": (_swin, _image),
    "resnet": (resnet, _image),
    "mamba": (_mamba, partial(_text, 1, 4)),
    "whisper": (_whisper, _speech),
}
