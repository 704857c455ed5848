"""Arguments of single classes of diffusers that no rule can know.

Invariant: nothing is here that names and sizes of settings tell.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.sweeps.zoo.diffusers_inputs import (
    BATCH,
    FRAMES,
    SIDE,
    TEXT,
    TOKENS,
    Maker,
    Settings,
    below,
    full,
    listed,
    mask,
    normal,
    plain,
    whole,
)

_FAR = {
    "hidden_states": normal(BATCH, FRAMES, "in_channels", SIDE, SIDE),
    "timestep": full(5.0, BATCH, FRAMES),
    "r_timestep": full(3.0, BATCH, FRAMES),
}
_HUNYUAN_TEXT = {
    "encoder_hidden_states": normal(BATCH, TEXT, "cross_attention_dim"),
    "image_meta_size": full(16.0, BATCH, 6),
    "style": whole([0] * BATCH),
}
_FRAME_TEXT = {"encoder_hidden_states": normal(BATCH * FRAMES, TEXT, "cross_attention_dim")}


def _rotary(settings: Settings) -> Any:
    """Cosines and sines for each token and width."""
    width = settings["num_attention_heads"] * settings["attention_head_dim"]
    angles = torch.randn(BATCH, TOKENS, width)
    return angles.cos(), angles.sin()


# Instead of, or beside, what the names of parameters tell.
ARGUMENTS: dict[str, dict[str, Maker]] = {
    "AceStepTransformer1DModel": {
        "hidden_states": normal(BATCH, TOKENS, 8),
        "context_latents": normal(BATCH, TOKENS, 16),
        "encoder_hidden_states": normal(BATCH, TEXT, "hidden_size"),
    },
    "AnyFlowTransformer3DModel": _FAR,
    "AnyFlowFARTransformer3DModel": {**_FAR, "chunk_partition": plain([1, 2, 2])},
    "AutoencoderKLHunyuanVideo15": {"sample": normal(1, 3, FRAMES, 2 * SIDE, 2 * SIDE)},
    "AutoencoderKLLTX2Video": {"sample": normal(1, 3, 9, 8 * SIDE, 8 * SIDE)},
    "AutoencoderKLMiniMaxH3": {"sample": normal(1, 3, 18, 2 * SIDE, 2 * SIDE)},
    "AutoencoderKLMochi": {"sample": normal(1, 3, 7, 2 * SIDE, 2 * SIDE)},
    "AutoencoderKLQwenImage21": {"sample": normal(BATCH, 4, 1, 4 * SIDE, 4 * SIDE)},
    "BriaFibo2Transformer2DModel": {"encoder_hidden_states": normal(BATCH, 3, TEXT, "cap_feat_dim")},
    "BriaFiboTransformer2DModel": {
        "text_encoder_layers": listed(*[normal(BATCH, TEXT, "text_encoder_dim")] * 4),
    },
    "ControlNetUnionModel": {
        "control_type": full(1.0, BATCH, "num_control_type"),
        "control_type_idx": plain([0]),
        "controlnet_cond": listed(normal(BATCH, 3, 8 * SIDE, 8 * SIDE)),
        "conditioning_scale": plain([1.0]),
    },
    "Cosmos3AVAEAudioTokenizer": {"sample": normal(BATCH, 2, 4096)},
    "CosmosControlNetModel": {
        "controls_latents": normal(BATCH, 16, FRAMES, SIDE, SIDE),
        "latents": normal(BATCH, 16, FRAMES, SIDE, SIDE),
        "condition_mask": full(1.0, BATCH, 1, FRAMES, SIDE, SIDE),
        "padding_mask": full(0.0, 1, 1, SIDE, SIDE),
    },
    "CosmosTransformer3DModel": {"padding_mask": full(0.0, 1, 1, SIDE, SIDE)},
    "DiTTransformer2DModel": {"timestep": full(5, BATCH), "class_labels": below(10, BATCH)},
    "ErnieImageTransformer2DModel": {"text_bth": normal(BATCH, TEXT, "text_in_dim"), "text_lens": full(TEXT, BATCH)},
    "FluxMultiControlNetModel": {"controlnet_mode": listed(below(1, BATCH), below(1, BATCH))},
    "GlmImageTransformer2DModel": {
        "prior_token_id": below("prior_vq_quantizer_codebook_size", BATCH, SIDE * SIDE // 4),
        "prior_token_drop": whole([False, True]),
    },
    "HiDreamImageTransformer2DModel": {
        "encoder_hidden_states_t5": normal(BATCH, TEXT, 32),
        "encoder_hidden_states_llama3": normal(2, BATCH, TEXT, 32),
        "pooled_embeds": normal(BATCH, "text_emb_dim"),
    },
    "HunyuanDiT2DControlNetModel": _HUNYUAN_TEXT,
    "HunyuanDiT2DModel": _HUNYUAN_TEXT,
    "HunyuanDiT2DMultiControlNetModel": _HUNYUAN_TEXT,
    "HunyuanVideoFramepackTransformer3DModel": {
        "indices_latents": whole(list(range(FRAMES))),
        "latents_clean": normal(BATCH, "in_channels", 2, SIDE, SIDE),
        "indices_latents_clean": whole([0, 9]),
        "latents_history_2x": normal(BATCH, "in_channels", 2, SIDE, SIDE),
        "indices_latents_history_2x": whole([0, 1]),
        "latents_history_4x": normal(BATCH, "in_channels", 4, SIDE, SIDE),
        "indices_latents_history_4x": whole([0, 1, 2, 3]),
    },
    "I2VGenXLUNet": {
        "image_latents": normal(BATCH, 4, FRAMES, SIDE, SIDE),
        "image_embeddings": normal(BATCH, "cross_attention_dim"),
    },
    "Ideogram4Transformer2DModel": {
        "encoder_hidden_states": normal(BATCH, TOKENS, "llm_features_dim"),
        "position_ids": below(TOKENS, BATCH, TOKENS, 3),
        "segment_ids": full(0, BATCH, TOKENS),
        "indicator": whole([[3] * (TOKENS // 2) + [2] * (TOKENS // 2)] * BATCH),
    },
    "JoyImageEditPlusTransformer3DModel": {
        "hidden_states": normal(BATCH, TOKENS, "in_channels", 1, 2, 2),
        "shape_list": plain([[(1, 4, 4)]] * BATCH),
    },
    "Kandinsky6SRLatentUpscalerBank": {"scale": plain(2)},
    "Kandinsky6SRTransformer3DModel": {"hidden_states": normal(BATCH, FRAMES, 8, 8, 17)},
    "Kandinsky6Transformer3DModel": {"hidden_states": normal(BATCH, FRAMES, SIDE, SIDE, 33)},
    "Krea2Transformer2DModel": {
        "position_ids": below(8, TEXT + TOKENS, 3),
        "encoder_hidden_states": normal(BATCH, TEXT, "num_text_layers", "text_hidden_dim"),
    },
    "LTX2VideoDiffusionDecoderModel": {"z": normal(1, "latent_channels", 3, 4, 4)},
    "LuminaNextDiT2DModel": {
        "image_rotary_emb": lambda settings: torch.randn(SIDE, SIDE, 8, dtype=torch.complex64),
        "cross_attention_kwargs": plain({}),
    },
    "MMAudioVAE": {"sample": normal(BATCH, 8 * 4096)},
    "MiniMaxH3Transformer3DModel": {
        "hidden_states": lambda settings: torch.randn(1, TOKENS, 4 * settings["in_channels"]),
        "audio_hidden_states": normal(1, TEXT, "audio_in_channels"),
        "encoder_hidden_states": normal(1, TEXT, "text_dim"),
        "timestep": full(5.0, 1),
        "timestep_indices": full(0, 32),
        "token_tags": whole([0] * TEXT + [1] * TOKENS + [2] * TEXT),
        "position_ids": below(TOKENS, 32, 3),
        "text_indices": whole(list(range(TEXT))),
        "video_indices": whole(list(range(TEXT, TEXT + TOKENS))),
        "audio_indices": whole(list(range(TEXT + TOKENS, 32))),
    },
    "MiniMaxMusic3Transformer1DModel": {"encoder_hidden_states": normal(BATCH, 64, "condition_dim")},
    "MultiAdapter": {"xs": listed(*[normal(BATCH, 3, 4 * SIDE, 4 * SIDE)] * 2)},
    "OmniGenTransformer2DModel": {
        "input_ids": below("vocab_size", BATCH, TEXT),
        "input_img_latents": plain([]),
        "input_image_sizes": plain({}),
        "attention_mask": full(1, BATCH, TEXT + 65, TEXT + 65),
        "position_ids": whole([list(range(TEXT + 65))] * BATCH),
    },
    "PriorTransformer": {
        "hidden_states": normal(BATCH, "embedding_dim"),
        "encoder_hidden_states": normal(BATCH, "num_embeddings", "embedding_dim"),
    },
    "QwenImage21Transformer2DModel": {"img_mask": whole([[False] * TEXT + [True] * 4] * BATCH)},
    "SanaWMLTX2RefinerTransformer3DModel": {"timestep": full(5.0, BATCH, TOKENS), "video_rotary_emb": _rotary},
    "SanaWMTransformer3DModel": {
        "mask": mask(BATCH, TEXT),
        "encoder_hidden_states": normal(BATCH, 1, TEXT, "caption_channels"),
        "timestep": full(5.0, BATCH, 1, FRAMES),
    },
    "SparseControlNetModel": {
        **_FRAME_TEXT,
        "controlnet_cond": normal(BATCH, "conditioning_channels", FRAMES, SIDE, SIDE),
        "conditioning_mask": full(1.0, BATCH, 1, FRAMES, SIDE, SIDE),
    },
    "StableAudio3DiTModel": {"global_hidden_states": normal(BATCH, "global_cond_dim")},
    "T5FilmDecoder": {
        "encodings_and_masks": lambda settings: [(normal(BATCH, TEXT, "d_model")(settings), torch.ones(BATCH, TEXT))],
        "decoder_input_tokens": normal(BATCH, TEXT, "input_dims"),
        "decoder_noise_time": full(0.5, BATCH),
    },
    "UNetControlNetXSModel": {"sample": normal(BATCH, 4, SIDE, SIDE)},
    "UNetMotionModel": _FRAME_TEXT,
    "UNetSpatioTemporalConditionModel": {"encoder_hidden_states": normal(BATCH, 1, "cross_attention_dim")},
    "UVit2DModel": {
        "input_ids": below(100, BATCH, SIDE, SIDE),
        "pooled_text_emb": normal(BATCH, "cond_embed_dim"),
        "micro_conds": full(8.0, BATCH, 5),
    },
    "WanAnimateTransformer3DModel": {
        "pose_hidden_states": normal(BATCH, "latent_channels", FRAMES - 1, SIDE, SIDE),
        "face_pixel_values": normal(BATCH, 3, 4 * FRAMES - 7, SIDE, SIDE),
        "encoder_hidden_states_image": normal(BATCH, 9, "image_dim"),
    },
    "WanVACETransformer3DModel": {"control_hidden_states": normal(BATCH, "vace_in_channels", FRAMES, SIDE, SIDE)},
    "ZImageTransformer2DModel": {
        "x": listed(normal("in_channels", 1, SIDE, SIDE), normal("in_channels", 1, SIDE, SIDE)),
        "t": full(0.5, BATCH),
        "cap_feats": listed(normal(TEXT, "cap_feat_dim"), normal(TEXT, "cap_feat_dim")),
    },
}
