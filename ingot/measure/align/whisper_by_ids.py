"""Hugging Face's Whisper called as a model of text is: with token ids alone.

Owns the recording. Knows no verdict.

    run_steps(WhisperByIds(model, given), ids, steps=4)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.stages.stage_names import LOG_MEL


class WhisperByIds(nn.Module):
    """Encodes the speech with the first tokens of a text, and reads its outputs from then on."""

    def __init__(self, inner: Any, given: Given) -> None:
        super().__init__()
        self.inner = inner
        self.given = given
        self._shown = given.features
        self._encoded: Any = None
        self.add_module(LOG_MEL, nn.Identity())  # so that a trace has the features, too

    @property
    def generation_config(self) -> Any:
        """The class's own, which says what ends its answers."""
        return self.inner.generation_config

    @property
    def config(self) -> Any:
        return self.inner.config

    @property
    def _supports_sdpa(self) -> bool:
        return bool(self.inner._supports_sdpa)

    def set_attn_implementation(self, name: str) -> None:
        """As of the class."""
        self.inner.set_attn_implementation(name)

    def as_noise(self, *, noise: bool) -> None:
        """What stands for the features in a trace: the original's, or our own sum in fp64."""
        own = self.given
        self._shown = own.nearly if noise else own.features

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        """As of a causal language model."""
        if past_key_values is None:
            encoder = self.inner.get_encoder()
            weight = encoder.conv1.weight
            self.get_submodule(LOG_MEL)(self._shown.T)
            with torch.backends.cudnn.flags(enabled=False):  # whose convolutions round fp32 to TF32
                self._encoded = encoder(self.given.features.to(weight.device, weight.dtype)[None])
        return self.inner(
            encoder_outputs=self._encoded,
            decoder_input_ids=input_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
