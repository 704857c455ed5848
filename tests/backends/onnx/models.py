"""Models of libraries at toy size, as people export them, each with a batch: for files that other engines run.

Invariant: nothing is downloaded; random weights; no random numbers inside. Limits: CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.transformer_models import TRANSFORMERS, llama, tokens

Inputs = Callable[[], dict[str, Tensor]]
Example = tuple[Callable[..., Any], Inputs]


class StreamingGru(nn.Module):
    """Keeps its state in a buffer, and the end of the last chunk in another."""

    hidden: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)
        self.register_buffer("hidden", torch.rand(1, 1, 4))
        self.register_buffer("last", torch.zeros(1, 1, 3))

    def forward(self, chunk: Tensor) -> dict[str, Tensor]:
        x = torch.cat([self.last, chunk], 1)
        self.last.copy_(chunk[:, -1:])
        y, hidden = self.layer(x, self.hidden)
        self.hidden.copy_(hidden)
        return {"frames": y, "hidden": self.hidden}


def _chunk() -> dict[str, Tensor]:
    return {"chunk": torch.randn(1, 5, 3)}


def _of_transformers(name: str) -> Callable[[], Example]:
    def made() -> Example:
        make, inputs = TRANSFORMERS[name]

        def unlabelled() -> dict[str, Tensor]:
            given = inputs()
            if name not in ("t5", "whisper"):
                return {key: value for key, value in given.items() if key != "labels"}
            return {("decoder_input_ids" if key == "labels" else key): value for key, value in given.items()}

        return make().eval(), unlabelled

    return made


class _Decode(nn.Module):
    """A decoding step of a model, with its cache."""

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        given = {"past_key_values": self.cache, "use_cache": True, "position_ids": position_ids}
        return {"logits": self.model(input_ids, **given).logits}


def _llama() -> Example:
    from transformers import StaticCache

    model: Any = llama().eval()
    positions = iter(range(16))

    def inputs() -> dict[str, Tensor]:
        return {"input_ids": tokens(1, 1), "position_ids": torch.tensor([[next(positions)]])}

    return _Decode(model, StaticCache(config=model.config, max_cache_len=16)), inputs


def _llava() -> Example:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    tokens_of_images: Any = {"image_token_index": 63, "image_token_id": 63}
    config = LlavaConfig(vision_config=vision, text_config=text, **tokens_of_images)
    model = LlavaForConditionalGeneration(config).eval()

    def inputs() -> dict[str, Tensor]:
        ids = torch.randint(0, 60, (1, 9))
        ids[:, 1:5] = 63
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16), "attention_mask": torch.ones_like(ids)}

    return model, inputs


def _detr() -> Example:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    features: Any = {"out_features": ["stage2"]}
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **features)
    sizes: dict[str, Any] = {
        "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "d_model": 16,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 4, "num_labels": 3,
    }  # fmt: skip
    model = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **sizes)).eval()

    def inputs() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(1, 3, 32, 32), "pixel_mask": torch.ones(1, 32, 32, dtype=torch.int64)}

    return model, inputs


def _sam() -> Example:
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    vision = SamVisionConfig(
        hidden_size=16, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        mlp_dim=32, window_size=2, global_attn_indexes=[1], num_pos_feats=8,
    )  # fmt: skip
    prompt_sizes: dict[str, Any] = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4}
    prompt = SamPromptEncoderConfig(mask_input_channels=4, **prompt_sizes)
    decoder = SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=32, num_hidden_layers=2, num_attention_heads=2, iou_head_hidden_dim=16
    )
    config = SamConfig(
        vision_config=vision.to_dict(), prompt_encoder_config=prompt.to_dict(), mask_decoder_config=decoder.to_dict()
    )
    model = SamModel(config).eval()

    def inputs() -> dict[str, Tensor]:
        points, labels = torch.rand(1, 1, 2, 2) * 32, torch.ones(1, 1, 2, dtype=torch.int64)
        return {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": points, "input_labels": labels}

    return model, inputs


def _vits() -> Example:
    from transformers import VitsConfig, VitsModel

    config = VitsConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, window_size=2, ffn_dim=16,
        flow_size=8, spectrogram_bins=9, upsample_initial_channel=8, upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]],
        prior_encoder_num_flows=1, prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1,
        duration_predictor_num_flows=1, use_stochastic_duration_prediction=False, noise_scale=0.0,
    )  # fmt: skip
    model: Any = VitsModel(config).eval()
    model.noise_scale = 0.0
    return model, lambda: {"input_ids": torch.randint(1, 20, (1, 6))}


def _mixtral() -> Example:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval(), lambda: {"input_ids": tokens(1, 6)}


def _gru() -> Example:
    return StreamingGru(), _chunk


INSPECTING = ("mixtral",)  # where `is_exporting` makes transformers call an operator of its own

MODELS: dict[str, Callable[[], Example]] = {
    **{name: _of_transformers(name) for name in ("bert", "gpt2", "vit", "resnet", "t5", "mamba", "whisper")},
    "llama": _llama,
    "llava": _llava,
    "detr": _detr,
    "sam": _sam,
    "vits": _vits,
    "mixtral": _mixtral,
    "gru": _gru,
}
