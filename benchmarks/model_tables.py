"""Small configurations of architectures, with random inputs, for model_zoo.py.

The tables have a line for each model of transformers, diffusers, MONAI and
segmentation_models_pytorch, and for each way in which peft adapts a transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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


def tokens(**more: Callable[[], Any]) -> MakeInputs:
    """Return inputs of two sequences of 64 tokens, and further arguments."""
    return lambda: [
        {
            "input_ids": torch.randint(VOCABULARY, (2, 64)),
            **{name: make() for name, make in more.items()},
        }
    ]


def tensors(**shapes: tuple[int, ...]) -> MakeInputs:
    """Return inputs of random tensors by name."""
    return lambda: [{name: torch.randn(shape) for name, shape in shapes.items()}]


# The same few settings, under the names that different configurations give them.
_ENCODER = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_ENCODER |= {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
_BOTH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
_BOTH |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_BOTH |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BOTH |= {"decoder_start_token_id": 1}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_T5 |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
_IMAGES = {**_ENCODER, "image_size": 64, "patch_size": 8}
_SPEECH = {
    **_ENCODER,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
}
_SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LABELLED = tokens(labels=lambda: torch.randint(VOCABULARY, (2, 64)))

# By class: arguments of the configuration that replace its defaults, and the inputs.
TRANSFORMERS: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    "LlamaForCausalLM": (_DECODER, tokens()),
    "MistralForCausalLM": (_DECODER, tokens()),
    "Qwen2ForCausalLM": (_DECODER, tokens()),
    "Qwen3ForCausalLM": (_DECODER, tokens()),
    "Gemma2ForCausalLM": (_DECODER, tokens()),
    "Gemma3ForCausalLM": (_DECODER, tokens()),
    "Phi3ForCausalLM": (_DECODER, tokens()),
    "OlmoeForCausalLM": ({**_DECODER, "num_experts": 4, "num_experts_per_tok": 2}, tokens()),
    "MixtralForCausalLM": ({**_DECODER, **_EXPERTS}, tokens()),
    "GPT2LMHeadModel": (_GPT, tokens()),
    "GPTNeoXForCausalLM": (_ENCODER, tokens()),
    "BloomForCausalLM": (
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
        tokens(),
    ),
    "OPTForCausalLM": ({**_ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 64}, tokens()),
    "MambaForCausalLM": (
        {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "vocab_size": VOCABULARY},
        tokens(),
    ),
    "BertForMaskedLM": (_ENCODER, tokens()),
    "RobertaForMaskedLM": (_ENCODER, tokens()),
    "DistilBertForMaskedLM": (
        {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY},
        tokens(),
    ),
    "AlbertForMaskedLM": ({**_ENCODER, "embedding_size": 32}, tokens()),
    "ElectraForMaskedLM": ({**_ENCODER, "embedding_size": 32}, tokens()),
    "DebertaV2ForMaskedLM": (_ENCODER, tokens()),
    "ModernBertForMaskedLM": ({**_ENCODER, "pad_token_id": 0}, tokens()),
    "T5ForConditionalGeneration": (_T5, _LABELLED),
    "BartForConditionalGeneration": (_BOTH, _LABELLED),
    "WhisperForConditionalGeneration": (
        {**_BOTH, "num_mel_bins": 16, "max_source_positions": 64},
        lambda: [
            {
                "input_features": torch.randn(2, 16, 128),
                "decoder_input_ids": torch.randint(VOCABULARY, (2, 16)),
            }
        ],
    ),
    "Wav2Vec2Model": (_SPEECH, tensors(input_values=(2, 8000))),
    "ViTModel": (_IMAGES, tensors(pixel_values=(2, 3, 64, 64))),
    "Dinov2Model": (_IMAGES, tensors(pixel_values=(2, 3, 64, 64))),
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
_TRANSFORMER = {"num_attention_heads": 4, "attention_head_dim": 16}

# By class: its arguments, and the inputs.
DIFFUSERS: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    "UNet2DModel": (
        {
            **_BLOCKS,
            "sample_size": 32,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        tensors(sample=(2, 3, 32, 32), **_STEP),
    ),
    "UNet2DConditionModel": (
        {
            **_BLOCKS,
            "sample_size": 32,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        tensors(sample=(2, 4, 32, 32), encoder_hidden_states=(2, 16, 32), **_STEP),
    ),
    "AutoencoderKL": (
        {
            **_BLOCKS,
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        },
        tensors(sample=(2, 3, 64, 64)),
    ),
    "VQModel": (
        {
            **_BLOCKS,
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        },
        tensors(sample=(2, 3, 64, 64)),
    ),
    "DiTTransformer2DModel": (
        {**_TRANSFORMER, "num_layers": 2, "sample_size": 16},
        lambda: [
            {
                "hidden_states": torch.randn(2, 4, 16, 16),
                "timestep": torch.randint(1000, (2,)),
                "class_labels": torch.randint(1000, (2,)),
            }
        ],
    ),
    "PixArtTransformer2DModel": (
        {**_TRANSFORMER, "num_layers": 2, "sample_size": 16, "cross_attention_dim": 64}
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
        {**_TRANSFORMER, "num_layers": 2, "sample_size": 16, "joint_attention_dim": 32}
        | {"caption_projection_dim": 64, "pooled_projection_dim": 64, "in_channels": 4},
        tensors(
            hidden_states=(2, 4, 16, 16),
            encoder_hidden_states=(2, 8, 32),
            pooled_projections=(2, 64),
            **_STEP,
        ),
    ),
    "FluxTransformer2DModel": (
        {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
        | {"num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 64}
        | {"in_channels": 4, "axes_dims_rope": (4, 4, 8)},
        tensors(
            hidden_states=(2, 64, 4),
            encoder_hidden_states=(2, 8, 32),
            pooled_projections=(2, 64),
            img_ids=(64, 3),
            txt_ids=(8, 3),
            **_STEP,
        ),
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (32, 32, 64),
            "sample_size": 256,
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 64,
        },
        tensors(sample=(2, 2, 256), **_STEP),
    ),
}


# Sides that no stride brings down to 2: for a volume of 2 x 2 x 2, the gradient of a 3 x 3 x 3
# convolution's weight in bfloat16 contains uninitialized memory in PyTorch itself (torch 2.14.1,
# AVX-512).
_VOLUME = tensors(**{"": (2, 1, 48, 48, 48)})
_LARGE_VOLUME = tensors(**{"": (1, 1, 96, 96, 96)})
_SEGMENTS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_WIDTHS = {"channels": (8, 16, 32), "strides": (2, 2)}
_CLASSES = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}
_RESNET3D = {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 3}
_SENET = {"spatial_dims": 3, "in_channels": 1, "num_classes": 3}
_DIFFUSION = {
    **_SEGMENTS,
    "num_res_blocks": 1,
    "channels": (8, 16),
    "attention_levels": (False, True),
    "norm_num_groups": 8,
}

# By class: its arguments, and the inputs.
MONAI: dict[str, tuple[dict[str, Any], MakeInputs]] = {
    "UNet": ({**_SEGMENTS, **_WIDTHS, "num_res_units": 2}, _VOLUME),
    "AttentionUnet": ({**_SEGMENTS, **_WIDTHS}, _VOLUME),
    "BasicUNet": ({**_SEGMENTS, "features": (8, 8, 16, 32, 64, 8)}, _VOLUME),
    "BasicUNetPlusPlus": ({**_SEGMENTS, "features": (8, 8, 16, 32, 64, 8)}, _VOLUME),
    "DynUNet": (
        {
            **_SEGMENTS,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [8, 16, 32],
            "deep_supervision": True,
            "deep_supr_num": 1,
        },
        _VOLUME,
    ),
    "SegResNet": ({**_SEGMENTS, "init_filters": 8, "dropout_prob": 0.2}, _VOLUME),
    "SegResNetDS": ({**_SEGMENTS, "init_filters": 8}, _VOLUME),
    "VNet": (_SEGMENTS, _VOLUME),
    "HighResNet": (_SEGMENTS, _VOLUME),
    "MedNeXt": ({**_SEGMENTS, "init_filters": 8}, _VOLUME),
    "UNETR": (
        {"in_channels": 1, "out_channels": 2, "img_size": 48, "feature_size": 8}
        | {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4},
        _VOLUME,
    ),
    "SwinUNETR": ({"in_channels": 1, "out_channels": 2, "feature_size": 12}, _LARGE_VOLUME),
    "FlexibleUNet": (
        {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0"},
        images(),
    ),
    "ViT": (
        {"in_channels": 1, "img_size": (48, 48, 48), "patch_size": (8, 8, 8), "hidden_size": 48}
        | {"mlp_dim": 96, "num_layers": 2, "num_heads": 4, "classification": True},
        _VOLUME,
    ),
    "DenseNet121": (_CLASSES, _LARGE_VOLUME),
    "ResNet": (
        {**_RESNET3D, "block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [8, 16, 32, 64]},
        _VOLUME,
    ),
    "SEResNet50": (_SENET, _LARGE_VOLUME),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 3}
        | {"in_channels": 1, "num_classes": 3},
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
        lambda: [{"x": torch.randn(2, 1, 16, 16, 16), "timesteps": torch.tensor([1, 2])}],
    ),
    "AutoencoderKL": (
        {**_DIFFUSION, "out_channels": 1, "latent_channels": 4},
        tensors(**{"": (2, 1, 16, 16, 16)}),
    ),
    "VQVAE": (
        {**_SEGMENTS, "out_channels": 1, "channels": (8, 8), "num_res_channels": (8, 8)}
        | {"num_res_layers": 1, "num_embeddings": 16, "embedding_dim": 8}
        | {"downsample_parameters": ((2, 4, 1, 1),) * 2}
        | {"upsample_parameters": ((2, 4, 1, 1, 0),) * 2},
        _VOLUME,
    ),
}

# By architecture of segmentation_models_pytorch: the encoders.
SEGMENTATION: dict[str, tuple[str, ...]] = {
    "Unet": (
        *("resnet18", "vgg11_bn", "densenet121", "efficientnet-b0", "mobilenet_v2", "mit_b0"),
        *("se_resnet50", "timm-skresnet18", "mobileone_s0", "tu-convnext_atto"),
    ),
    **dict.fromkeys(
        (
            *("UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3"),
            *("DeepLabV3Plus", "UPerNet", "Segformer"),
        ),
        ("resnet18",),
    ),
    "DPT": ("tu-vit_tiny_patch16_224",),
}


class Adapted(NamedTuple):
    """A transformer and how peft adapts it.

    Attributes:
        transformer: The class, of `TRANSFORMERS`.
        config: The class of peft's configuration.
        arguments: Its arguments.
    """

    transformer: str
    config: str
    arguments: dict[str, Any]


_ALL_LINEAR = {"target_modules": "all-linear"}
_RANKS = {"r": 4, **_ALL_LINEAR}
PEFT: dict[str, Adapted] = {
    "LoRA": Adapted("LlamaForCausalLM", "LoraConfig", {**_RANKS, "lora_dropout": 0.1}),
    "DoRA": Adapted("LlamaForCausalLM", "LoraConfig", {**_RANKS, "use_dora": True}),
    "LoRA and trained norms": Adapted(
        "Qwen2ForCausalLM", "LoraConfig", {**_RANKS, "modules_to_save": ["norm", "lm_head"]}
    ),
    "LoRA of BERT": Adapted("BertForMaskedLM", "LoraConfig", _RANKS),
    "LoRA of T5": Adapted("T5ForConditionalGeneration", "LoraConfig", _RANKS),
    "LoRA of a ViT": Adapted("ViTModel", "LoraConfig", _RANKS),
    "LoRA of Mixtral": Adapted("MixtralForCausalLM", "LoraConfig", _RANKS),
    "AdaLoRA": Adapted("LlamaForCausalLM", "AdaLoraConfig", {"total_step": 10, **_ALL_LINEAR}),
    "LoHa": Adapted("LlamaForCausalLM", "LoHaConfig", _RANKS),
    "LoKr": Adapted("LlamaForCausalLM", "LoKrConfig", _RANKS),
    "IA3": Adapted("LlamaForCausalLM", "IA3Config", {"task_type": "CAUSAL_LM"}),
    "OFT": Adapted("LlamaForCausalLM", "OFTConfig", {"oft_block_size": 8, **_ALL_LINEAR}),
    "VeRA": Adapted("BertForMaskedLM", "VeraConfig", {"r": 4, "target_modules": ["query"]}),
    "trained norms": Adapted("LlamaForCausalLM", "LNTuningConfig", {"task_type": "CAUSAL_LM"}),
    "prompts": Adapted(
        "LlamaForCausalLM",
        "PromptTuningConfig",
        {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
    ),
    "prefixes": Adapted(
        "LlamaForCausalLM",
        "PrefixTuningConfig",
        {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
    ),
}
