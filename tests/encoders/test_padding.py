"""Padding tokens of a captured step read nothing of an encoder cache."""

from __future__ import annotations

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.scheduling.inputs import EncoderEntry
from ingot.runtime.scheduling.request import Request
from ingot.runtime.scheduling.scheduled_batch import ScheduledRequest, layout_of
from ingot.runtime.step.step_buffer import StepBuffer


def test_padding_tokens_have_no_encoded_position() -> None:
    buffer = StepBuffer(
        16, 1, 4, 2, torch.device("cpu"), 2, encoded_positions=70, block_size=16, tile_rows=16
    )
    request = Request("r", [1, 2, 3], SamplingParams(), 9, blocks=[0])
    request.encoded[0] = EncoderEntry(b"", [4, 2, 3, 0, 1], 70)
    buffer.fill(layout_of([ScheduledRequest(request, 0, 3, samples=True)], 16))
    buffer.upload()
    encoded = buffer.padded_batch(16, 96).encoded
    assert encoded is not None
    assert encoded.by_token().lens.tolist() == [70] * 3 + [0] * 13
    assert encoded.by_token().block_tables[2].tolist() == [4, 2, 3, 0, 1]
