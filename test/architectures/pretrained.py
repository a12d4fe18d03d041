"""Examples of transformers: tiny configurations, and the inputs of each kind of task.

The library is imported where a model is built: to collect the tests takes none.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from architectures.architecture import (
    BATCH,
    CLASSES,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCABULARY,
    Architecture,
    Example,
    classes,
    images,
    tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Fields = dict[str, Any]

SIZES: Fields = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_ff", "d_inner", "ffn_dim", "hidden_dim",
         "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
         "shared_expert_intermediate_size"), 2 * HIDDEN),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS // 2),
    **dict.fromkeys(("head_dim", "d_kv"), HIDDEN // HEADS),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "context_length",
         "max_source_positions", "max_target_positions"), 32),
    "image_size": 16, "patch_size": 4, "num_channels": 3, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
"""The fields by which configurations name their sizes."""


def configuration(name: str, **fields: Any) -> "PreTrainedConfig":
    """The configuration of that class, with the sizes above and without dropout.

    A field that is a function gives the configuration of a part of the model.
    """
    import transformers

    cls = getattr(transformers, name + "Config")
    tiny: Fields = {}
    for field, parameter in inspect.signature(cls).parameters.items():
        if field in SIZES:
            tiny[field] = SIZES[field]
        elif "drop" in field and isinstance(parameter.default, float):
            tiny[field] = 0.0
    return cls(**tiny | {f: value() if callable(value) else value for f, value in fields.items()})


def pretrained(
    model: str, inputs: Callable[[], Fields], name: str, config: str,
    *, loss: Callable[..., Tensor] | None = None, attention: str = "", experts: str = "",
    training: bool = True, unexportable: str = "", **fields: Any,
) -> Architecture:  # fmt: skip
    """An architecture of transformers, of the class `model` or as that Auto class finds it.

    It returns its loss, or is trained with `loss`, a function of its outputs and the labels.
    `attention` and `experts` choose among the implementations that it has.
    """

    def build() -> Example:
        import transformers

        cls, settings = getattr(transformers, model), configuration(config, **fields)
        made = cls.from_config(settings) if model.startswith("Auto") else cls(settings)
        if attention:
            made.set_attn_implementation(attention)
        if experts:
            made.set_experts_implementation(experts)
        given = inputs()
        labels = given.pop("labels") if loss else None
        return Example(made.train(training), (), given, labels)

    return Architecture(name, build, loss, unexportable)


def causal_inputs(length: int = LENGTH) -> Fields:
    ids = tokens(length)
    return {"input_ids": ids, "labels": ids}


def masked_inputs() -> Fields:
    """The end of each second sequence is padding, and each second token has a label."""
    inputs = padded_inputs()
    labels = inputs["input_ids"].clone()
    labels[:, ::2] = -100
    return {**inputs, "labels": labels}


def padded_inputs() -> Fields:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[::2, -2:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def classified_inputs() -> Fields:
    return {**padded_inputs(), "labels": classes()}


def span_inputs() -> Fields:
    ends = {"start_positions": classes(), "end_positions": classes()}
    return {**padded_inputs(), **ends}


def translation_inputs() -> Fields:
    return {"input_ids": tokens(), "labels": tokens()}


def masked_translation_inputs() -> Fields:
    return {**padded_inputs(), "labels": tokens()}


def image_inputs(size: int = 16) -> Fields:
    return {"pixel_values": images(size), "labels": classes()}


def segment_inputs(size: int = 32) -> Fields:
    labels = torch.randint(CLASSES, (BATCH, size, size))
    labels[:, 0] = 255  # ignored
    return {"pixel_values": images(size), "labels": labels}


def pair_inputs() -> Fields:
    return {"input_ids": tokens(), "pixel_values": images(16), "return_loss": True}


def picture_inputs() -> Fields:
    """Text that begins with the tokens of an image's four patches."""
    ids = tokens(12)
    ids[:, :4] = 3
    return {"input_ids": ids, "pixel_values": images(16), "labels": ids.masked_fill(ids == 3, -100)}


def reconstruction_inputs() -> Fields:
    """The noise says which patches are hidden; the model draws it if it gets none."""
    return {"pixel_values": images(16), "noise": torch.rand(BATCH, 16)}


def video_inputs() -> Fields:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16), "labels": classes()}


def detection_inputs() -> Fields:
    return {"pixel_values": images(32), "labels": torch.rand(BATCH, 8, 4)}


def spectrogram_inputs() -> Fields:
    return {"input_features": torch.randn(BATCH, 16, 64), "labels": tokens()}


def spectrogram_class_inputs() -> Fields:
    return {"input_values": torch.randn(BATCH, 16, 16), "labels": classes()}


def wave_class_inputs() -> Fields:
    return {"input_values": torch.randn(BATCH, 170), "labels": classes()}


def wave_inputs() -> Fields:
    return {"input_values": torch.randn(BATCH, 170), "labels": tokens(4)}


def series_inputs() -> Fields:
    return {"past_values": torch.randn(BATCH, 32, 4), "future_values": torch.randn(BATCH, 8, 4)}
