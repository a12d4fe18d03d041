"""Models of images, of images with text, of speech, and of series, of transformers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from architectures.architecture import BATCH, CLASSES, Architecture
from architectures.pretrained import (
    Fields,
    configuration,
    detection_inputs,
    image_inputs,
    pair_inputs,
    picture_inputs,
    pretrained,
    reconstruction_inputs,
    segment_inputs,
    series_inputs,
    spectrogram_class_inputs,
    spectrogram_inputs,
    video_inputs,
    wave_class_inputs,
    wave_inputs,
)


def image(name: str, config: str, size: int = 16, **fields: Any) -> Architecture:
    """A model that classifies images of that size."""
    inputs = partial(image_inputs, size)
    return pretrained(
        "AutoModelForImageClassification", inputs, name, config,
        num_labels=CLASSES, image_size=size, **fields,
    )  # fmt: skip


def pair(name: str, prefix: str) -> Architecture:
    """A model of images and text that are to match."""
    return pretrained(
        "AutoModel", pair_inputs, name, prefix,
        text_config=partial(configuration, prefix + "Text"),
        vision_config=partial(configuration, prefix + "Vision"),
    )  # fmt: skip


def smoothed_loss(outputs: Fields, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)


def box_loss(outputs: Fields, labels: Tensor) -> Tensor:
    """The distance of the boxes; the model's own loss needs torchvision."""
    return F.l1_loss(outputs["pred_boxes"], labels)


def text_loss(outputs: Fields, labels: Tensor) -> Tensor:
    """Connectionist temporal classification."""
    scores = outputs["logits"].log_softmax(dim=-1).transpose(0, 1)
    return torch.ctc_loss(scores, labels, [len(scores)] * BATCH, [labels.shape[1]] * BATCH)


STAGES: Fields = {"hidden_sizes": [16, 32], "depths": [1, 1]}
RESIDUAL: Fields = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
PYRAMID: Fields = STAGES | {
    "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1],
    "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
}  # fmt: skip
WINDOWS: Fields = {
    "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2,
}  # fmt: skip

IMAGES = (
    image("ViT", "ViT"),
    image("ViT, smoothed labels", "ViT", loss=smoothed_loss),
    image("DeiT", "DeiT", architectures=["DeiTForImageClassification"]),
    image("BEiT", "Beit", use_relative_position_bias=True),
    image("DINOv2", "Dinov2"),
    image("ViT-MSN", "ViTMSN"),
    image("Swin", "Swin", **WINDOWS),
    image("Swin v2", "Swinv2", **WINDOWS),
    image("ConvNeXt", "ConvNext", num_stages=2, **STAGES, layer_scale_init_value=0.1),
    image("ConvNeXt v2", "ConvNextV2", num_stages=2, **STAGES),
    image("PoolFormer", "PoolFormer", **PYRAMID, padding=[2, 1], layer_scale_init_value=0.1),
    image("PVT v2", "PvtV2", **PYRAMID),
    image("FocalNet", "FocalNet", embed_dim=16, **STAGES, focal_levels=[1, 1],
          focal_windows=[3, 3]),
    image("ResNet", "ResNet", **RESIDUAL, layer_type="basic"),
    image("ResNet, frozen statistics", "ResNet", **RESIDUAL, training=False),
    image("RegNet", "RegNet", **RESIDUAL, groups_width=8),
    image("BiT", "Bit", 32, **RESIDUAL, num_groups=4),
    image("MobileNetV1", "MobileNetV1", 64, depth_multiplier=0.25),
    image("MobileNetV2", "MobileNetV2", 64, depth_multiplier=0.25),
    image("MobileViT", "MobileViT", 64, hidden_sizes=[16, 16, 32],
          neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32], initializer_range=0.2),
    image("EfficientNet", "EfficientNet", 64, width_coefficient=0.25, depth_coefficient=0.25,
          hidden_dim=320, initializer_range=0.6, training=False),
    image("LeViT", "Levit", 128, architectures=["LevitForImageClassification"], patch_size=16,
          hidden_sizes=[16, 32, 32], num_attention_heads=[2, 4, 4], depths=[1, 1, 1],
          key_dim=[8, 8, 8], training=False),
    pretrained("AutoModelForSemanticSegmentation", segment_inputs, "SegFormer", "Segformer",
               num_labels=CLASSES, **PYRAMID, semantic_loss_ignore_index=255,
               initializer_range=0.2, training=False),
    pretrained("ViTMAEForPreTraining", reconstruction_inputs, "ViT-MAE", "ViTMAE",
               decoder_hidden_size=32, decoder_num_hidden_layers=1,
               decoder_num_attention_heads=4, decoder_intermediate_size=64),
    pretrained("AutoModelForVideoClassification", video_inputs, "VideoMAE", "VideoMAE",
               num_frames=4, num_labels=CLASSES),
    pretrained("AutoModelForObjectDetection", detection_inputs, "DETR", "Detr", num_queries=8,
               loss=box_loss, backbone_config=partial(configuration, "ResNet", **RESIDUAL),
               unexportable="asks whether all hidden states are finite: a branch on data"),
)  # fmt: skip

PAIRS = (
    pair("CLIP", "CLIP"),
    pair("SigLIP", "Siglip"),
    pretrained("AutoModelForImageTextToText", picture_inputs, "LLaVA", "Llava",
               text_config=partial(configuration, "Llama"),
               vision_config=partial(configuration, "CLIPVision", patch_size=8),
               image_token_index=3, vision_feature_layer=-1),
)  # fmt: skip

WAVES: Fields = {
    "conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
}  # fmt: skip

sound = partial(pretrained, "AutoModelForAudioClassification", num_labels=CLASSES)

SOUNDS = (
    pretrained("AutoModelForSpeechSeq2Seq", spectrogram_inputs, "Whisper", "Whisper",
               num_mel_bins=16),
    sound(spectrogram_class_inputs, "Audio spectrogram transformer", "AST", max_length=16,
          num_mel_bins=16, frequency_stride=4, time_stride=4),
    sound(wave_class_inputs, "Wav2Vec2", "Wav2Vec2", classifier_proj_size=32, **WAVES),
    sound(wave_class_inputs, "HuBERT", "Hubert", classifier_proj_size=32, **WAVES),
    pretrained("AutoModelForCTC", wave_inputs, "Wav2Vec2, text", "Wav2Vec2", loss=text_loss,
               **WAVES, unexportable="the shape of ctc_loss's second result depends on data"),
    pretrained("AutoModelForCTC", wave_inputs, "Wav2Vec2, text, its own loss", "Wav2Vec2", **WAVES,
               unexportable="raises an error if a label is too large: a branch on data"),
)  # fmt: skip

SERIES = (
    pretrained("PatchTSTForPrediction", series_inputs, "PatchTST", "PatchTST",
               num_input_channels=4, patch_length=4, patch_stride=4, prediction_length=8),
)  # fmt: skip

VISION: tuple[Architecture, ...] = IMAGES + PAIRS + SOUNDS + SERIES
