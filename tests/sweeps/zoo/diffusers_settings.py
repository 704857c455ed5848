"""Settings of single classes of diffusers that no rule can know: their defaults make no model, or a large one.

Invariant: nothing is here that makes small defaults fit by itself.
"""

from __future__ import annotations

from typing import Any

from tests.sweeps.zoo.diffusers_inputs import FRAMES, SIDE, TEXT

_DIT = {"in_channels": 4, "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": SIDE}
_HUNYUAN = {**_DIT, "hidden_size": 32, "text_len": TEXT, "text_len_t5": TEXT, "cross_attention_dim": 32}
_VIDEO = {"sample_height": SIDE, "sample_width": SIDE, "max_text_seq_length": TEXT}
_BLOCKS = {"block_out_channels": (32, 32, 64, 64), "norm_num_groups": 32, "cross_attention_dim": 32}
# Which take several models in a list, but run with one alone.
SINGLE = {"QwenImageMultiControlNetModel"}
# Instead of the small defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {"in_channels": 24, "audio_acoustic_hidden_dim": 8},
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 64, 64),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "sample_size": 64,
    },
    "AutoencoderKLKVAEVideo": {"ch": 32, "num_res_blocks": 1},
    "AutoencoderKLMochi": {f"{part}_block_out_channels": (32, 32, 32, 32) for part in ("encoder", "decoder")},
    "AutoencoderVidTok": {"ch": 32, "num_res_blocks": 1},
    "BriaFibo2Transformer2DModel": {
        "dim": 64,
        "n_heads": 2,
        "axes_dims": (8, 12, 12),
        "injection_layer_ids": (0, 1),
        "cap_feat_dim": 32,
        "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 8,
        "gist_step": 2,
        "gist_min_text_len": 4,
        "gist_max_text_len": 16,
    },
    "CogVideoXTransformer3DModel": _VIDEO,
    "ConsisIDTransformer3DModel": _VIDEO,
    "ControlNetUnionModel": {"addition_time_embed_dim": 8, "num_trans_channel": 40, "num_proj_channel": 40},
    "CosmosControlNetModel": {"in_channels": 18, "model_channels": 512},
    "DiTTransformer2DModel": {"num_embeds_ada_norm": 10},
    "DreamLiteTransformer2DModel": {"in_channels": 32, "norm_num_groups": 8},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 4,
        "caption_channels": [32, 32],
        "llama_layers": [0, 1, 0, 1],
        "max_resolution": (16, 16),
        "axes_dims_rope": (64, 32, 32),
    },
    "HunyuanDiT2DControlNetModel": _HUNYUAN,
    "HunyuanDiT2DModel": _HUNYUAN,
    "HunyuanVideoFramepackTransformer3DModel": {"has_image_proj": True, "has_clean_x_embedder": True},
    "I2VGenXLUNet": {**_BLOCKS, "attention_head_dim": 8},
    "Kandinsky6SRLatentUpscalerBank": {
        "stage_channels": (64, 32, 32),
        "num_x2_adapter_blocks": 1,
        **dict.fromkeys(("num_pre_blocks", "num_mid_blocks", "num_post_blocks"), 1),
    },
    "Kandinsky6SRTransformer3DModel": {"in_visual_dim": 8},
    "Kandinsky6Transformer3DModel": {"in_visual_dim": 16},
    "LTX2VideoDiffusionDecoderModel": {
        "decoder_stage_channels": (64, 32, 16, 16, 8),
        "decoder_stage_depths": (1, 1, 1, 1, 1),
        "decoder_head_dim": 8,
        "decoder_t_emb_dim": 32,
        "decoder_stage5_kernel": (3, 3, 3),
        "decoder_stage_kernels": ((1, 3, 3),) * 4,
        "decoder_upsample_strides": ((1, 1, 1),) * 4,
    },
    "LatteTransformer3DModel": {**_DIT, "caption_channels": 32, "cross_attention_dim": 32, "video_length": FRAMES},
    "LuminaNextDiT2DModel": {"num_kv_heads": 4, "num_attention_heads": 4, "hidden_size": 64},
    "OmniGenTransformer2DModel": {
        "pad_token_id": 0,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    },
    "Transformer2DModel": {"in_channels": 32, "norm_num_groups": 8},
    "TransformerTemporalModel": {"in_channels": 32},
    "UNet3DConditionModel": {**_BLOCKS, "attention_head_dim": 8},
    "UNet1DModel": {"extra_in_channels": 64, "block_out_channels": (32, 32, 64), "norm_num_groups": 8},
    "UNetMotionModel": {
        "block_out_channels": (32, 32, 64, 64),
        "num_attention_heads": 4,
        "motion_num_attention_heads": 4,
        "cross_attention_dim": 32,
        "norm_num_groups": 8,
    },
    "UNetSpatioTemporalConditionModel": {"block_out_channels": (32, 32, 64, 64), "num_attention_heads": (2, 2, 4, 4)},
    "WanAnimateTransformer3DModel": {
        "motion_encoder_size": 16,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16,
        "inject_face_latents_blocks": 2,
        "image_dim": 8,
    },
    "WanVACETransformer3DModel": {"vace_layers": [0]},
    "ZImageTransformer2DModel": {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [8, 12, 12]},
}
