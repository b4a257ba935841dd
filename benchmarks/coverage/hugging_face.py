"""Tiny models of transformers: two layers, random weights, sizes that divide nothing where the model allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, WORDS, CLASSES = 5, 7, 101, 3

# What makes a configuration small; each name counts where the configuration has it.
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 44,
    "d_ff": 44,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 44,
    "ffn_dim": 44,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
    "use_cache": False,
    # image and sound
    "image_size": 32,
    "patch_size": 8,
    "apply_spec_augment": False,
    # mixtures of experts
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    # special words
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class Made:
    """A model in float64 and training mode without dropout, a global batch, and its loss where it gives none."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss_fn: Callable[[Any, Any], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: transformers' model type.  kind: what it is trained for, a key of ``TASKS``.  config: beside ``SMALL``."""

    name: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Made:
        import transformers
        from transformers import CONFIG_MAPPING

        transformers.logging.set_verbosity_error()
        cls = CONFIG_MAPPING[self.name]
        config = _small(cls, self.config)
        for key in vars(config):
            if "drop" in key and isinstance(getattr(config, key), (int, float)):
                setattr(config, key, type(getattr(config, key))(0))
        factory, batch = TASKS[self.kind]
        options = {"experts_implementation": "batched_mm"} if self.kind == "experts" else {}
        torch.manual_seed(0)
        model = getattr(transformers, factory).from_config(config, **options)
        return Made(model, batch(config))


def _small(cls: Any, given: Mapping[str, Any]) -> Any:
    """A configuration of ``cls``; of a class in ``sub_configs`` too, by a dict of that name in ``given``."""
    plain = cls()
    fixed = {*cls.sub_configs, *(k for k in SMALL if isinstance(p := getattr(cls, k, None), property) and not p.fset)}
    fixed |= {k for k, own in cls.attribute_map.items() if own in SMALL or own in given}
    values = {k: v for k, v in SMALL.items() if hasattr(plain, k) and k not in fixed}
    for name, sub in cls.sub_configs.items():
        own = given.get(name, {})
        if isinstance(getattr(plain, name, None), sub):
            values[name] = _small(sub, own).to_dict()
    return cls(**values | {k: v for k, v in given.items() if k not in cls.sub_configs})


# ------------------------------------------------------------------------------------------------ batches


def _labels(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[0, 3:] = -100  # few of them count in some rows
    labels[1, -2:] = -100
    return labels


def text(config: Any) -> dict[str, Tensor]:
    """Words, some of them padding; the labels of some are ignored."""
    ids = torch.randint(3, WORDS, (BATCH, TOKENS))
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": _labels(ids)}


def pair(config: Any) -> dict[str, Tensor]:
    """Text in, text of another length out."""
    return text(config) | {"labels": _labels(torch.randint(3, WORDS, (BATCH, TOKENS - 1)))}


def image(config: Any) -> dict[str, Tensor]:
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def wave(config: Any) -> dict[str, Tensor]:
    """Sound as samples, and its class."""
    return {"input_values": torch.randn(BATCH, 1700), "labels": torch.randint(0, CLASSES, (BATCH,))}


def spoken(config: Any) -> dict[str, Tensor]:
    """Sound as samples, and the letters that are spoken."""
    return {"input_values": torch.randn(BATCH, 3200), "labels": torch.randint(1, config.vocab_size, (BATCH, 3))}


def spectrum(config: Any) -> dict[str, Tensor]:
    """Sound by frequencies, and a text."""
    frames = 2 * config.max_source_positions
    if hasattr(config, "num_mel_bins"):
        features = torch.randn(BATCH, config.num_mel_bins, frames)
    else:
        features = torch.randn(BATCH, frames, config.input_feat_per_channel)
    return {"input_features": features, "labels": _labels(torch.randint(3, WORDS, (BATCH, TOKENS)))}


def spectrogram(config: Any) -> dict[str, Tensor]:
    frames = torch.randn(BATCH, config.max_length, config.num_mel_bins)
    return {"input_values": frames, "labels": torch.randint(0, CLASSES, (BATCH,))}


def picture_and_text(config: Any) -> dict[str, Tensor]:
    size = config.vision_config.image_size
    words = config.text_config.vocab_size
    ids = torch.randint(3, words - 1, (BATCH, TOKENS))
    ids[:, -1] = config.text_config.eos_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, size, size), "return_loss": True}


def segments(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, CLASSES, (BATCH, 32, 32))}


TASKS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "causal": ("AutoModelForCausalLM", text),
    "experts": ("AutoModelForCausalLM", text),
    "masked": ("AutoModelForMaskedLM", text),
    "sequence": ("AutoModelForSeq2SeqLM", pair),
    "image": ("AutoModelForImageClassification", image),
    "segmentation": ("AutoModelForSemanticSegmentation", segments),
    "sound": ("AutoModelForAudioClassification", wave),
    "spectrogram": ("AutoModelForAudioClassification", spectrogram),
    "ctc": ("AutoModelForCTC", spoken),
    "speech": ("AutoModelForSpeechSeq2Seq", spectrum),
    "contrast": ("AutoModel", picture_and_text),
}

_CONV = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 6}
_SOUND = _CONV | {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "classifier_proj_size": 10}
_STAGES = {"depths": [1, 1], "hidden_sizes": [10, 20], "num_stages": 2}

ARCHITECTURES = (
    # decoders
    Architecture("gpt2", "causal"),
    Architecture("openai-gpt", "causal"),
    Architecture("gpt_neo", "causal", {"attention_types": [[["global", "local"], 1]], "window_size": 3}),
    Architecture("gpt_neox", "causal"),
    Architecture("gptj", "causal", {"rotary_dim": 4}),
    Architecture("gpt_bigcode", "causal"),
    Architecture("codegen", "causal", {"rotary_dim": 4}),
    Architecture("opt", "causal"),
    Architecture("bloom", "causal"),
    Architecture("mpt", "causal"),
    Architecture("falcon", "causal"),
    Architecture("llama", "causal"),
    Architecture("mistral", "causal", {"sliding_window": 3}),
    Architecture("qwen2", "causal"),
    Architecture("qwen3", "causal"),
    Architecture("gemma", "causal"),
    Architecture("gemma2", "causal", {"sliding_window": 3}),
    Architecture("gemma3_text", "causal", {"sliding_window": 3}),
    Architecture("phi", "causal"),
    Architecture("phi3", "causal"),
    Architecture("stablelm", "causal"),
    Architecture("starcoder2", "causal"),
    Architecture("olmo2", "causal"),
    Architecture("cohere", "causal"),
    Architecture("granite", "causal"),
    Architecture("smollm3", "causal"),
    Architecture("nemotron", "causal"),
    Architecture("biogpt", "causal"),
    Architecture("glm", "causal"),
    Architecture("ctrl", "causal", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 44}),
    Architecture("mamba", "causal", {"state_size": 4}),
    Architecture("mamba2", "causal", {"state_size": 8, "n_groups": 2, "num_heads": 8, "chunk_size": 4}),
    Architecture("recurrent_gemma", "causal", {"lru_width": 32, "attention_window_size": 3}),
    # mixtures of experts
    Architecture("mixtral", "experts", {"output_router_logits": True}),
    Architecture("qwen2_moe", "experts", {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 1}),
    Architecture("qwen3_moe", "experts"),
    Architecture("olmoe", "experts"),
    Architecture("gpt_oss", "experts", {"sliding_window": 3}),
    Architecture(
        "deepseek_v3",
        "experts",
        {
            "q_lora_rank": 12,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 4,
        },
    ),
    # encoders
    Architecture("bert", "masked"),
    Architecture("roberta", "masked"),
    Architecture("albert", "masked"),
    Architecture("distilbert", "masked"),
    Architecture("electra", "masked"),
    Architecture("deberta-v2", "masked"),
    Architecture("mpnet", "masked"),
    Architecture("mobilebert", "masked", {"intra_bottleneck_size": 16, "true_hidden_size": 16}),
    Architecture("modernbert", "masked", {"local_attention": 4, "global_attn_every_n_layers": 2}),
    Architecture("xlm-roberta", "masked"),
    Architecture("camembert", "masked"),
    Architecture("convbert", "masked"),
    Architecture("roformer", "masked"),
    Architecture("fnet", "masked"),
    Architecture("esm", "masked", {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 3}),
    # sequence to sequence
    Architecture("t5", "sequence", {"decoder_start_token_id": 1}),
    Architecture("mt5", "sequence"),
    Architecture("bart", "sequence"),
    Architecture("mbart", "sequence"),
    Architecture("pegasus", "sequence"),
    Architecture("marian", "sequence"),
    Architecture("blenderbot", "sequence"),
    Architecture("m2m_100", "sequence"),
    Architecture("plbart", "sequence"),
    Architecture("led", "sequence", {"attention_window": 4, "max_encoder_position_embeddings": 32}),
    Architecture(
        "switch_transformers",
        "sequence",
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 1},
    ),
    # vision
    Architecture("vit", "image"),
    Architecture("deit", "image", {"architectures": ["DeiTForImageClassification"]}),
    Architecture("beit", "image"),
    Architecture("dinov2", "image"),
    Architecture(
        "swin", "image", {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}
    ),
    Architecture("convnext", "image", {**_STAGES, "patch_size": 4}),
    Architecture("resnet", "image", {**_STAGES, "embedding_size": 10}),
    Architecture("regnet", "image", {**_STAGES, "embedding_size": 10, "groups_width": 5}),
    Architecture("mobilenet_v2", "image", {"depth_multiplier": 0.25}),
    Architecture(
        "segformer",
        "segmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "num_attention_heads": [1, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 20,
        },
    ),
    Architecture("clip", "contrast"),
    Architecture("siglip", "contrast"),
    # speech
    Architecture("wav2vec2", "sound", _SOUND),
    Architecture("hubert", "ctc", _SOUND),
    Architecture("wavlm", "sound", _SOUND),
    Architecture(
        "audio-spectrogram-transformer",
        "spectrogram",
        {"max_length": 20, "num_mel_bins": 12, "patch_size": 4, "frequency_stride": 4, "time_stride": 4},
    ),
    Architecture("whisper", "speech", {"num_mel_bins": 10, "max_source_positions": 11, "max_target_positions": 16}),
    Architecture(
        "speech_to_text",
        "speech",
        {"input_feat_per_channel": 10, "input_channels": 1, "conv_channels": 12, "max_source_positions": 13},
    ),
)
