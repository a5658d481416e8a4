"""The shape of a batch of audio, from a model's config."""

from __future__ import annotations

from typing import Any


def takes_length(config: Any) -> bool:
    """Tell whether clips may have any length; otherwise the config fixes it."""
    return hasattr(config, "conv_kernel")


def audio_shape(config: Any, *, batch: int, frames: int) -> tuple[str, tuple[int, ...]]:
    """Return the name of a model's audio input, and its shape.

    Args:
        frames: how many frames the model gets of each clip, if clips may have any length.
    """
    if takes_length(config):
        return "input_values", (batch, _samples(frames, config.conv_kernel, config.conv_stride))
    if config.model_type == "audio-spectrogram-transformer":
        return "input_values", (batch, config.max_length, config.num_mel_bins)
    if hasattr(config, "input_feat_per_channel"):
        return "input_features", (batch, config.max_source_positions, config.input_feat_per_channel)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return "input_features", (batch, config.num_mel_bins, 2 * config.max_source_positions)
    raise ValueError(
        f"the config of a {config.model_type} model does not tell the shape of its audio: "
        "backsketch.profile(model, **batch) takes a batch of yours"
    )


def _samples(frames: int, kernels: list[int], strides: list[int]) -> int:
    """Return the fewest samples from which the convolutions make ``frames`` frames."""
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames
