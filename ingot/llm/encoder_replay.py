"""The encoder's part of a replay: what it makes of a proof's speech, beside the proof's checksums.

Owns the runs. Knows no limit.

    for name, error in encoder_deviations(llm, heard, features): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from ingot.config.sampling import SamplingParams
from ingot.engine.golden_encoder import Speech, mel_checksum
from ingot.engine.proof import Heard
from ingot.engine.sketch import Checksum, Sketch, deviation
from ingot.errors import EngineError
from ingot.llm.encoder_record import encoder_observed
from ingot.llm.llm import LLM
from ingot.processors.log_mel import log_mel
from ingot.processors.prompt import Input, Prompt

_OUTPUT_OF = {".self_attn.o_proj": ".self_attn", ".mlp.down_proj": ".mlp"}


def log_mel_deviations(
    llm: LLM, inputs: Sequence[Heard], speech: Sequence[Speech]
) -> Iterator[tuple[str, float, float]]:
    """(name, deviation, noise floor) of each input's features, made on the engine's device."""
    for claimed, one in zip(inputs, speech, strict=True):
        made = log_mel(one.samples.to(llm.engine.device), len(one.features))
        yield one.name, deviation(mel_checksum(made), claimed.features), claimed.floor


def encoder_deviations(llm: LLM, claimed: Heard, features: torch.Tensor) -> Iterator[tuple[str, float]]:
    """(module, deviation) in the order of execution."""
    found: dict[str, Checksum] = {}

    def see(name: str, rows: torch.Tensor) -> None:
        for product, module in _OUTPUT_OF.items():
            name = name.replace(product, module) if name.endswith(product) else name
        if name in claimed.modules:
            found[name] = Sketch(name).add(rows, first=0).checksum()

    # Where numbers end, what was seen tells it.
    with encoder_observed(llm, see), suppress(EngineError):
        llm.generate(Prompt([Input(features), [0]]), SamplingParams(max_new_tokens=1, ignore_eos=True))
    for name, expected in claimed.modules.items():
        yield name, deviation(found[name], expected)
