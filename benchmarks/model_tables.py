"""Small configurations of architectures, with random inputs, for model_zoo.py.

The tables have a line for each model of transformers, diffusers, MONAI, Ultralytics and
segmentation_models_pytorch, and for each way in which peft adapts a transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

VOCABULARY = 128
# Image sizes to try, the smallest first: some models need a larger one, some exactly one.
SIDES = (96, 128, 224, 256, 384)

# Makes candidates for the keyword arguments of forward; the name "" means the one positional
# argument. The first candidate that the model accepts is used.
MakeInputs = Callable[[], Iterable[dict[str, Any]]]


def images(sides: Iterable[int] = SIDES, batch: int = 2, channels: int = 3) -> MakeInputs:
    """Return inputs of square images."""
    return lambda: ({"": torch.randn(batch, channels, side, side)} for side in sides)


def tokens(*names: str, **shapes: tuple[int, ...]) -> MakeInputs:
    """Return inputs of two sequences of 64 tokens for each name, and of random tensors."""
    return lambda: [
        {name: torch.randint(VOCABULARY, (2, 64)) for name in names}
        | {name: torch.randn(shape) for name, shape in shapes.items()}
    ]


def tensors(**shapes: tuple[int, ...]) -> MakeInputs:
    """Return inputs of random tensors by name."""
    return tokens(**shapes)


# A small transformer. Each configuration reads the settings that it knows, under its own names.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "num_mel_bins"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **{"num_experts_per_tok": 2, "state_size": 8, "max_source_positions": 64},
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 1},
    **{"image_size": 64, "patch_size": 8},
}
_SPEECH = {
    **{"conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}
_TEXTS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "OlmoeForCausalLM"),
    *("MixtralForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "BloomForCausalLM"),
    *("OPTForCausalLM", "MambaForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM"),
    *("DistilBertForMaskedLM", "DebertaV2ForMaskedLM", "ModernBertForMaskedLM"),
)

# By class: arguments of the configuration that replace its defaults, and the inputs.
TRANSFORMERS: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    **dict.fromkeys(_TEXTS, (SMALL, tokens("input_ids"))),
    **dict.fromkeys(
        ("AlbertForMaskedLM", "ElectraForMaskedLM"),
        ({**SMALL, "embedding_size": 32}, tokens("input_ids")),
    ),
    **dict.fromkeys(
        ("T5ForConditionalGeneration", "BartForConditionalGeneration"),
        (SMALL, tokens("input_ids", "labels")),
    ),
    "WhisperForConditionalGeneration": (
        SMALL,
        tokens("decoder_input_ids", input_features=(2, 16, 128)),
    ),
    "Wav2Vec2Model": ({**SMALL, **_SPEECH}, tensors(input_values=(2, 8000))),
    **dict.fromkeys(("ViTModel", "Dinov2Model"), (SMALL, tensors(pixel_values=(2, 3, 64, 64)))),
    "SwinModel": (
        {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "image_size": 64},
        tensors(pixel_values=(2, 3, 64, 64)),
    ),
    "ConvNextModel": (
        {"hidden_sizes": (32, 64, 96, 128), "depths": (1, 1, 2, 1)},
        tensors(pixel_values=(2, 3, 96, 96)),
    ),
    "SegformerForSemanticSegmentation": (
        {"hidden_sizes": (16, 32, 48, 64), "decoder_hidden_size": 64},
        tensors(pixel_values=(2, 3, 128, 128)),
    ),
    "ResNetModel": ({"depths": (1, 1, 2, 1)}, tensors(pixel_values=(2, 3, 96, 96))),
}

_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_STEP = {"timestep": (2,)}
_TRANSFORMER = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}


def _types(down: Sequence[str], up: Sequence[str]) -> dict[str, Any]:
    return {**_BLOCKS, "down_block_types": down, "up_block_types": up}


_AUTOENCODER = (
    _types(["DownEncoderBlock2D"] * 2, ["UpDecoderBlock2D"] * 2),
    tensors(sample=(2, 3, 64, 64)),
)

# By class: its arguments, and the inputs.
DIFFUSERS: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    "UNet2DModel": (
        _types(("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D"))
        | {"sample_size": 32},
        tensors(sample=(2, 3, 32, 32), **_STEP),
    ),
    "UNet2DConditionModel": (
        _types(("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D"))
        | {"sample_size": 32, "cross_attention_dim": 32, "attention_head_dim": 8},
        tensors(sample=(2, 4, 32, 32), encoder_hidden_states=(2, 16, 32), **_STEP),
    ),
    "AutoencoderKL": _AUTOENCODER,
    "VQModel": _AUTOENCODER,
    "DiTTransformer2DModel": (
        {**_TRANSFORMER, "sample_size": 16},
        lambda: [
            {
                "hidden_states": torch.randn(2, 4, 16, 16),
                "timestep": torch.randint(1000, (2,)),
                "class_labels": torch.randint(1000, (2,)),
            }
        ],
    ),
    "PixArtTransformer2DModel": (
        {**_TRANSFORMER, "sample_size": 16, "cross_attention_dim": 64}
        | {"caption_channels": 32, "use_additional_conditions": False},
        lambda: [
            {
                "hidden_states": torch.randn(2, 4, 16, 16),
                "encoder_hidden_states": torch.randn(2, 8, 32),
                "timestep": torch.randint(1000, (2,)),
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            }
        ],
    ),
    "SD3Transformer2DModel": (
        {**_TRANSFORMER, "sample_size": 16, "joint_attention_dim": 32, "in_channels": 4}
        | {"caption_projection_dim": 64, "pooled_projection_dim": 64},
        tensors(
            hidden_states=(2, 4, 16, 16),
            encoder_hidden_states=(2, 8, 32),
            pooled_projections=(2, 64),
            **_STEP,
        ),
    ),
    "FluxTransformer2DModel": (
        {**_TRANSFORMER, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32}
        | {"pooled_projection_dim": 64, "in_channels": 4, "axes_dims_rope": (4, 4, 8)},
        tensors(
            hidden_states=(2, 64, 4),
            encoder_hidden_states=(2, 8, 32),
            pooled_projections=(2, 64),
            **{"img_ids": (64, 3), "txt_ids": (8, 3), **_STEP},
        ),
    ),
    "UNet1DModel": (
        {"block_out_channels": (32, 32, 64), "sample_size": 256, "in_channels": 2}
        | {"out_channels": 2, "extra_in_channels": 64},
        tensors(sample=(2, 2, 256), **_STEP),
    ),
}


# Sides that no stride brings down to 2: for a volume of 2 x 2 x 2, the gradient of a 3 x 3 x 3
# convolution's weight in bfloat16 contains uninitialized memory in PyTorch itself (torch 2.14.1,
# AVX-512).
_VOLUME = tensors(**{"": (2, 1, 48, 48, 48)})
_LARGE_VOLUME = tensors(**{"": (1, 1, 96, 96, 96)})
_SEGMENTS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_WIDTHS = {**_SEGMENTS, "channels": (8, 16, 32), "strides": (2, 2)}
_FEATURES = {**_SEGMENTS, "features": (8, 8, 16, 32, 64, 8)}
_FILTERS = {**_SEGMENTS, "init_filters": 8}
_CLASSES = {"spatial_dims": 3, "in_channels": 1, "num_classes": 3}
_PATCHES = {"in_channels": 1, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
_DIFFUSION = {**_SEGMENTS, "num_res_blocks": 1, "channels": (8, 16), "norm_num_groups": 8}
_DIFFUSION |= {"attention_levels": (False, True)}
_SMALL_VOLUME = (2, 1, 16, 16, 16)

# By class: its arguments, and the inputs.
MONAI: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    "UNet": ({**_WIDTHS, "num_res_units": 2}, _VOLUME),
    "AttentionUnet": (_WIDTHS, _VOLUME),
    "BasicUNet": (_FEATURES, _VOLUME),
    "BasicUNetPlusPlus": (_FEATURES, _VOLUME),
    "DynUNet": (
        {**_SEGMENTS, "kernel_size": [3] * 3, "strides": [1, 2, 2], "filters": [8, 16, 32]}
        | {"upsample_kernel_size": [2, 2], "deep_supervision": True, "deep_supr_num": 1},
        _VOLUME,
    ),
    "SegResNet": ({**_FILTERS, "dropout_prob": 0.2}, _VOLUME),
    "SegResNetDS": (_FILTERS, _VOLUME),
    "VNet": (_SEGMENTS, _VOLUME),
    "HighResNet": (_SEGMENTS, _VOLUME),
    "MedNeXt": (_FILTERS, _VOLUME),
    "UNETR": ({**_PATCHES, "out_channels": 2, "img_size": 48, "feature_size": 8}, _VOLUME),
    "SwinUNETR": ({"in_channels": 1, "out_channels": 2, "feature_size": 12}, _LARGE_VOLUME),
    "FlexibleUNet": (
        {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0"},
        images(),
    ),
    "ViT": (
        {**_PATCHES, "img_size": (48, 48, 48), "patch_size": (8, 8, 8), "num_layers": 2}
        | {"classification": True},
        _VOLUME,
    ),
    "DenseNet121": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 3}, _LARGE_VOLUME),
    "ResNet": (
        {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 3, "block": "basic"}
        | {"layers": [1, 1, 1, 1], "block_inplanes": [8, 16, 32, 64]},
        _VOLUME,
    ),
    "SEResNet50": (_CLASSES, _LARGE_VOLUME),
    "EfficientNetBN": (
        {**_CLASSES, "model_name": "efficientnet-b0", "pretrained": False},
        _VOLUME,
    ),
    "AutoEncoder": ({**_SEGMENTS, "channels": (8, 16), "strides": (2, 2)}, _VOLUME),
    "VarAutoEncoder": (
        {"spatial_dims": 3, "in_shape": (1, 48, 48, 48), "out_channels": 2, "latent_size": 8}
        | {"channels": (8, 16), "strides": (2, 2)},
        _VOLUME,
    ),
    "DiffusionModelUNet": (
        {**_DIFFUSION, "num_head_channels": 8},
        lambda: [{"x": torch.randn(_SMALL_VOLUME), "timesteps": torch.tensor([1, 2])}],
    ),
    "AutoencoderKL": (
        {**_DIFFUSION, "out_channels": 1, "latent_channels": 4},
        tensors(**{"": _SMALL_VOLUME}),
    ),
    "VQVAE": (
        {**_SEGMENTS, "out_channels": 1, "channels": (8, 8), "num_res_channels": (8, 8)}
        | {"num_res_layers": 1, "num_embeddings": 16, "embedding_dim": 8}
        | {"downsample_parameters": ((2, 4, 1, 1),) * 2}
        | {"upsample_parameters": ((2, 4, 1, 1, 0),) * 2},
        _VOLUME,
    ),
}

ULTRALYTICS: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    f"{name}.yaml": ({}, images((128, 640)))
    for name in (
        *("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-ghost"),
        *("yolov8n-rtdetr", "yolov8n-cls", "yolov8n-seg", "yolov8n-pose", "yolov8n-obb"),
        *("yolov9t", "yolov10n", "yolo11n", "yolo11n-cls", "yolo11n-seg"),
        *("yolo11n-pose", "yolo11n-obb", "yolo12n", "yolo26n", "yolo26n-seg"),
        *("rtdetr-resnet50",),
    )
}

# Architectures and encoders of segmentation_models_pytorch.
_ENCODERS = ("resnet18", "vgg11_bn", "densenet121", "efficientnet-b0", "mobilenet_v2", "mit_b0")
_ENCODERS += ("se_resnet50", "timm-skresnet18", "mobileone_s0", "tu-convnext_atto")
_DECODERS = ("UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3")
_DECODERS += ("DeepLabV3Plus", "UPerNet", "Segformer")
SEGMENTATION = [f"Unet {encoder}" for encoder in _ENCODERS]
SEGMENTATION += [f"{decoder} resnet18" for decoder in _DECODERS] + ["DPT tu-vit_tiny_patch16_224"]

_ALL_LINEAR = {"target_modules": "all-linear"}
_RANKS = {"r": 4, **_ALL_LINEAR}
_TEXT = {"task_type": "CAUSAL_LM"}
_PROMPTS = {**_TEXT, "num_virtual_tokens": 4}
# By name: a class of `TRANSFORMERS`, the class of peft's configuration, and its arguments.
PEFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LoRA": ("LlamaForCausalLM", "LoraConfig", {**_RANKS, "lora_dropout": 0.1}),
    "DoRA": ("LlamaForCausalLM", "LoraConfig", {**_RANKS, "use_dora": True}),
    "LoRA and trained norms": (
        "Qwen2ForCausalLM",
        "LoraConfig",
        {**_RANKS, "modules_to_save": ["norm", "lm_head"]},
    ),
    "LoRA of BERT": ("BertForMaskedLM", "LoraConfig", _RANKS),
    "LoRA of T5": ("T5ForConditionalGeneration", "LoraConfig", _RANKS),
    "LoRA of a ViT": ("ViTModel", "LoraConfig", _RANKS),
    "LoRA of Mixtral": ("MixtralForCausalLM", "LoraConfig", _RANKS),
    "AdaLoRA": ("LlamaForCausalLM", "AdaLoraConfig", {"total_step": 10, **_ALL_LINEAR}),
    "LoHa": ("LlamaForCausalLM", "LoHaConfig", _RANKS),
    "LoKr": ("LlamaForCausalLM", "LoKrConfig", _RANKS),
    "IA3": ("LlamaForCausalLM", "IA3Config", _TEXT),
    "OFT": ("LlamaForCausalLM", "OFTConfig", {"oft_block_size": 8, **_ALL_LINEAR}),
    "VeRA": ("BertForMaskedLM", "VeraConfig", {"r": 4, "target_modules": ["query"]}),
    "trained norms": ("LlamaForCausalLM", "LNTuningConfig", _TEXT),
    "prompts": ("LlamaForCausalLM", "PromptTuningConfig", _PROMPTS),
    "prefixes": ("LlamaForCausalLM", "PrefixTuningConfig", _PROMPTS),
}
