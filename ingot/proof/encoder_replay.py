"""Replays a proof's encoder inputs here and compares them with the proof's checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import singledispatch

import torch

from ingot.audio.log_mel import log_mel
from ingot.building.golden.golden_encoder import GoldenInput, GoldenPicture, GoldenSpeech
from ingot.config.sampling_params import SamplingParams
from ingot.engine.proof_file import InputClaim
from ingot.engine.sketch import Checksum, Sketch, deviation
from ingot.errors import EngineError
from ingot.image.image_decoder import png_of
from ingot.llm.llm import LLM
from ingot.llm.picture_prompts import Pictures
from ingot.proof.encoder_record import encoder_observed
from ingot.text.prompt import Input, Prompt

_OUTPUT_OF = {
    f".{module}.{product}": f".{module}"
    for module, product in (("self_attn", "o_proj"), ("encoder_attn", "o_proj"), ("mlp", "down_proj"))
}


def features_deviations(
    llm: LLM, claims: Sequence[InputClaim], inputs: Sequence[GoldenInput]
) -> Iterator[tuple[str, float, float]]:
    """(name, deviation, noise floor) of each input's features."""
    for claim, one in zip(claims, inputs, strict=True):
        made = prepared(one, llm)
        yield one.name, deviation(one.checksum(made), claim.features), claim.floor


@singledispatch
def prepared(given: GoldenInput, llm: LLM) -> torch.Tensor:
    """An input's features, made as requests' are; here requests bring them.

    Raises:
        RequestError: Pillow is missing.
    """
    return given.features.float()


@prepared.register
def _log_mel(given: GoldenSpeech, llm: LLM) -> torch.Tensor:
    return log_mel(given.samples.to(llm.engine.device), given.shape[0])


@prepared.register
def _pixels(given: GoldenPicture, llm: LLM) -> torch.Tensor:
    pictures = Pictures.of(llm.engine.manifest.model)
    assert pictures is not None
    try:
        return pictures.read(png_of(given.values)).features
    finally:
        pictures.close()


def encoder_deviations(llm: LLM, claim: InputClaim, features: torch.Tensor) -> Iterator[tuple[str, float]]:
    """(module, deviation) in the order of execution."""
    found: dict[str, Checksum] = {}

    def see(name: str, rows: torch.Tensor) -> None:
        for product, module in _OUTPUT_OF.items():
            name = name.replace(product, module) if name.endswith(product) else name
        if name in claim.modules:
            found[name] = Sketch(name).add(rows, first=0).checksum()

    # Logits that are not finite end the request; the checksums say where they begin.
    with encoder_observed(llm, see), suppress(EngineError):
        llm.generate(Prompt([Input(features), [0]]), SamplingParams(max_new_tokens=1, ignore_eos=True))
    for name, expected in claim.modules.items():
        yield name, deviation(found[name], expected)
