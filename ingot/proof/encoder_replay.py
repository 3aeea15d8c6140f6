"""Replays a proof's encoder inputs here and compares them with the proof's checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from ingot.audio.log_mel import log_mel
from ingot.building.golden.golden_encoder import GoldenInput, GoldenPicture, GoldenSpeech
from ingot.config.decoder_config import DecoderConfig
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
    """(name, deviation, noise floor) of each input's features, made as requests' are."""
    for claim, one in zip(claims, inputs, strict=True):
        made = prepared(llm, one)
        yield one.name, deviation(one.checksum(made), claim.features), claim.floor


def prepared(llm: LLM, given: GoldenInput) -> torch.Tensor:
    """Features of an input by what makes them for requests: log-mel on the engine's device, a file of a
    picture that is decoded, or the features themselves where requests bring them.

    Raises:
        RequestError: Pillow is missing.
    """
    if isinstance(given, GoldenSpeech):
        return log_mel(given.samples.to(llm.engine.device), given.shape[0])
    if isinstance(given, GoldenPicture):
        return _read(llm.engine.manifest.model, given)
    return given.features.float()


def _read(config: DecoderConfig, given: GoldenPicture) -> torch.Tensor:
    pictures = Pictures.of(config)
    assert pictures is not None
    try:
        found: torch.Tensor = pictures.read(png_of(given.values)).features
    finally:
        pictures.close()
    return found


def encoder_deviations(llm: LLM, claim: InputClaim, features: torch.Tensor) -> Iterator[tuple[str, float]]:
    """(module, deviation) in the order of execution."""
    found: dict[str, Checksum] = {}

    def see(name: str, rows: torch.Tensor) -> None:
        for product, module in _OUTPUT_OF.items():
            name = name.replace(product, module) if name.endswith(product) else name
        if name in claim.modules:
            found[name] = Sketch(name).add(rows, first=0).checksum()

    # Where numbers end, what was seen tells it.
    with encoder_observed(llm, see), suppress(EngineError):
        llm.generate(Prompt([Input(features), [0]]), SamplingParams(max_new_tokens=1, ignore_eos=True))
    for name, expected in claim.modules.items():
        yield name, deviation(found[name], expected)
