"""Models of other libraries, with random weights and inputs, for bench_models.py.

- timm: the two smallest models of each family, by parameters times pixels, that have at most 200
  million parameters.
- torchvision: the two smallest of each family of classifiers, and the smallest of each family of
  segmentation, detection, video and optical flow, by parameters.
- Ultralytics: the smallest of each family and task.
- transformers and diffusers: architectures with shrunk default configurations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from inplace_ops.conversion.library import load

VOCABULARY = 128
MOST_PARAMETERS = 200_000_000  # three copies of a model train at once, in each of two processes
# Image sizes to try, the smallest first: some models need a larger one, some exactly one.
SIDES = (96, 128, 224, 256, 384)

MakeInputs = Callable[[], Iterable[dict[str, Any]]]


@dataclass(frozen=True)
class Entry:
    """A model, and the arguments of its forward.

    Attributes:
        name: LIBRARY:NAME, as `load` accepts it.
        inputs: Candidates for the keyword arguments of forward; the name "" means the one
            positional argument. The first candidate that the model accepts is used.
        arguments: Arguments of the library's function; for transformers, of the configuration.
    """

    name: str
    inputs: MakeInputs
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Return the model in training mode, with all parameters requiring grad."""
        return load(self.name, self.arguments).train().requires_grad_(True)


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


class Library(NamedTuple):
    """The names of a library's models to train, and the function that returns a model's entry."""

    names: Callable[[], Iterable[str]]
    entry: Callable[[str], Entry]


def _smallest(size: Callable[[str], int], names: Iterable[str], count: int) -> list[str]:
    """Return the smallest models; models of the same size are ordered by name."""
    return sorted(sorted(names), key=size)[:count]


def _timm_names() -> Iterator[str]:
    """Yield the names of timm's models; takes minutes, since it builds all of them on meta."""
    library = importlib.import_module("timm")

    @cache
    def parameters(name: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in library.create_model(name).parameters())

    def size(name: str) -> int:
        _, height, width = library.get_pretrained_cfg(name).input_size
        return height * width * parameters(name)

    for family in library.list_modules():
        for name in _smallest(size, library.list_models(module=family), 2):
            if parameters(name) <= MOST_PARAMETERS:
                yield name


def _timm_entry(name: str) -> Entry:
    """Return the entry of a model at its fixed image size, or at the sizes to try."""
    config = importlib.import_module("timm").get_pretrained_cfg(name)
    channels, _, own = config.input_size
    sides = [own] if config.fixed_input_size else SIDES
    if config.fixed_input_size and own > SIDES[-1]:  # segmentation models, which would take hours
        return Entry(f"timm:{name}", images([224], channels=channels), {"img_size": 224})
    return Entry(f"timm:{name}", images(sides, channels=channels))


def _flow_inputs() -> Iterator[dict[str, Any]]:
    yield {f"image{i}": torch.randn(2, 3, 128, 128) for i in (1, 2)}


def _clips() -> Iterator[dict[str, Any]]:
    for frames, side in ((8, 64), (8, 224), (16, 224)):
        yield {"": torch.randn(2, 3, frames, side, side)}


def _detection_inputs() -> Iterator[dict[str, Any]]:
    target = {
        "boxes": torch.tensor([[10.0, 20.0, 60.0, 70.0], [30.0, 10.0, 90.0, 50.0]]),
        "labels": torch.tensor([1, 1]),
        "masks": torch.ones(2, 96, 96, dtype=torch.uint8),
        "keypoints": torch.full((2, 17, 3), 40.0),
    }
    yield {"images": [torch.rand(3, 96, 96) for _ in range(2)], "targets": [target, dict(target)]}


# By package: the number of models of each family, and their inputs. `quantization` is left out: its
# models are for inference.
TORCHVISION: dict[str, tuple[int, MakeInputs]] = {
    "torchvision.models": (2, images()),
    "torchvision.models.segmentation": (1, images()),
    "torchvision.models.detection": (1, _detection_inputs),
    "torchvision.models.video": (1, _clips),
    "torchvision.models.optical_flow": (1, _flow_inputs),
}


def _torchvision_names() -> Iterator[str]:
    models = importlib.import_module("torchvision.models")

    def count_parameters(name: str) -> int:
        return min(weights.meta["num_params"] for weights in models.get_model_weights(name))

    for package, (count, _) in TORCHVISION.items():
        families: dict[str, list[str]] = {}
        for name in models.list_models(importlib.import_module(package)):
            families.setdefault(_torchvision_module(name), []).append(name)
        for names in families.values():
            yield from _smallest(count_parameters, names, count)


def _torchvision_entry(name: str) -> Entry:
    package = _torchvision_module(name).rpartition(".")[0]
    _, inputs = TORCHVISION[package]
    arguments: dict[str, Any] = {"weights": None}
    if package.endswith((".segmentation", ".detection")):
        arguments["weights_backbone"] = None
    if package.endswith(".detection") and "ssd" not in name:
        arguments |= {"min_size": 96, "max_size": 96}  # the size to which the model resizes images
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = True
    return Entry(f"torchvision:{name}", inputs, arguments)


def _torchvision_module(name: str) -> str:
    return importlib.import_module("torchvision.models").get_model_builder(name).__module__


ULTRALYTICS = tuple(
    f"{name}.yaml"
    for name in (
        *("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-ghost"),
        *("yolov8n-rtdetr", "yolov8n-cls", "yolov8n-seg", "yolov8n-pose", "yolov8n-obb"),
        *("yolov9t", "yolov10n", "yolo11n", "yolo11n-cls", "yolo11n-seg"),
        *("yolo11n-pose", "yolo11n-obb", "yolo12n", "yolo26n", "yolo26n-seg"),
        *("rtdetr-resnet50",),
    )
)


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


def _ultralytics_entry(name: str) -> Entry:
    return Entry(f"ultralytics:{name}", images((128, 640)))


def _transformers_entry(name: str) -> Entry:
    configuration, inputs = TRANSFORMERS[name]
    return Entry(f"transformers:{name}", inputs, configuration)


def _diffusers_entry(name: str) -> Entry:
    arguments, inputs = DIFFUSERS[name]
    return Entry(f"diffusers:{name}", inputs, arguments)


LIBRARIES = {
    "timm": Library(_timm_names, _timm_entry),
    "torchvision": Library(_torchvision_names, _torchvision_entry),
    "ultralytics": Library(lambda: ULTRALYTICS, _ultralytics_entry),
    "transformers": Library(lambda: TRANSFORMERS, _transformers_entry),
    "diffusers": Library(lambda: DIFFUSERS, _diffusers_entry),
}


def entry_of(name: str) -> Entry:
    """Return the entry of LIBRARY:NAME; timm and torchvision models outside the lists work too."""
    library, _, model = name.partition(":")
    return LIBRARIES[library].entry(model)


def names_of(library: str) -> list[str]:
    """Return the names of all models of a library, as LIBRARY:NAME."""
    return [f"{library}:{name}" for name in LIBRARIES[library].names()]
