"""Windows and long recordings give the tokens that Hugging Face's ``generate`` gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from ingot.audio.log_mel import fit, log_mel
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.models.speech_tokens import SpeechTokens
from ingot.speech.dtw_alignment import smoothed, warp
from ingot.speech.recording_features import Transcript
from ingot.speech.transcriber import Transcriber
from tests.audio_files import swelling_noise
from tests.encoders.speech import write_speech

SHAPES: dict[str, dict[str, Any]] = {
    "tiny.en": {"vocab_size": 51864, "num_mel_bins": 80},
    "multilingual": {"vocab_size": 51865, "num_mel_bins": 80},
    "large-v3": {"vocab_size": 51866, "num_mel_bins": 128, "encoder_layers": 3, "decoder_layers": 3},
    "turbo": {"vocab_size": 51866, "num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1},
}


@dataclass
class Both:
    """Ours and Hugging Face's, of the same weights."""

    ours: Transcriber
    theirs: Any
    mels: int

    @property
    def tokens(self) -> SpeechTokens:
        return self.ours.vocabulary.tokens


def opened(folder: Path, shape: str, seed: int = 0, positions: int = 448) -> Both:
    changes = SHAPES[shape]
    tokens = SpeechTokens.of_vocabulary(changes["vocab_size"])
    size = {"max_source_positions": 1500, "max_target_positions": positions, "eos_token_id": tokens.end}
    model = write_speech(
        folder, seed, **changes, **size, pad_token_id=tokens.end, bos_token_id=tokens.end,
        decoder_start_token_id=tokens.start,
    )  # fmt: skip
    frame = ("transcribe", "translate", "start", "previous", "start_lm", "no_speech")
    settings: dict[str, Any] = {
        "is_multilingual": tokens.multilingual,
        "no_timestamps_token_id": tokens.no_timestamps,
        "prev_sot_token_id": tokens.previous,
        "lang_to_id": {f"<|{code}|>": i for code, i in tokens.languages.items()},
        "task_to_id": {"transcribe": tokens.transcribe, "translate": tokens.translate},
        "suppress_tokens": sorted(getattr(tokens, name) for name in frame),
        "begin_suppress_tokens": [tokens.end],
        "max_initial_timestamp_index": 50,
        "max_length": positions,
        "decoder_start_token_id": tokens.start,
        "eos_token_id": tokens.end,
        "pad_token_id": tokens.end,
    }
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return Both(Transcriber(folder, "cpu", max_batch_size=8), model, changes["num_mel_bins"])


@pytest.fixture(scope="module", params=SHAPES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return opened(tmp_path_factory.mktemp(request.param), request.param)


def noise(seconds: float, seed: int = 1) -> torch.Tensor:
    """Something that changes as it goes on."""
    return torch.from_numpy(swelling_noise(int(seconds * 16000), seed, 2.1))


def greedy(both: Both, features: torch.Tensor, count: int, timestamps: bool) -> list[int]:
    """Without a cache, by Hugging Face's logits processors."""
    model, names = both.theirs, both.tokens
    ids = names.prompt("en", "transcribe", timestamps=timestamps)
    begin, config = len(ids), model.generation_config
    rules = [
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin),
    ]
    if timestamps:
        rules.append(WhisperTimeStampLogitsProcessor(config, begin))
    else:
        rules.append(SuppressTokensLogitsProcessor([*range(names.first_timestamp, model.config.vocab_size)]))
    states = model.model.encoder(features[None])
    while len(ids) < begin + count and ids[-1] != names.end:
        given = torch.tensor([ids])
        scores = model(encoder_outputs=states, decoder_input_ids=given).logits[:, -1].float()
        for rule in rules:
            scores = rule(given, scores)
        best = scores[0].topk(2)
        assert float(best.values[0] - best.values[1]) > 1e-4, "a tie: choose another seed"
        ids.append(int(best.indices[0]))
    return [token for token in ids[begin:] if token != names.end]


def said(transcript: Transcript) -> list[int]:
    return [token for segment in transcript.segments for token in segment.tokens]


@pytest.mark.stays("multilingual", "turbo")
def test_teacher_forced_logits(both: Both) -> None:
    features = log_mel(fit(noise(9.0)), both.mels)
    ids = [*both.tokens.prompt("en", "transcribe", timestamps=True), *range(100, 140)]
    wanted = both.theirs(features[None], decoder_input_ids=torch.tensor([ids])).logits[0].detach()
    ours = both.ours.logits(features, ids)
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-4


@pytest.mark.stays("multilingual-False")
@pytest.mark.grid(1)
@pytest.mark.parametrize("timestamps", [True, False])
def test_one_window(both: Both, timestamps: bool) -> None:
    features = log_mel(noise(30.0), both.mels)
    with torch.inference_mode():
        wanted = greedy(both, features, 60, timestamps)
    found = both.ours.decode(features, language="en", timestamps=timestamps, temperatures=(0.0,))
    assert len(wanted) > 10
    assert found.tokens[: len(wanted)] == wanted
    assert len(found.tokens) == len(wanted) or len(wanted) == 60
    assert timestamps == (max(wanted) >= both.tokens.first_timestamp)


@pytest.mark.stays("multilingual")
def test_token_timestamps(both: Both) -> None:
    """Of what Hugging Face has drawn; it times a token by what the token itself attends to, and normalises
    over generated tokens alone.
    """
    heads = [(layer, head) for layer in range(both.theirs.config.decoder_layers) for head in (1, 3)]
    features, settings = log_mel(noise(30.0), both.mels), both.theirs.generation_config
    settings.alignment_heads, kept = [list(head) for head in heads], both.theirs.config._attn_implementation
    both.theirs.set_attn_implementation("eager")
    torch.manual_seed(3)
    chosen = {"language": "en", "task": "transcribe"} if both.tokens.multilingual else {}
    reported = both.theirs.generate(
        features[None], return_token_timestamps=True, return_dict_in_generate=True, max_new_tokens=40,
        do_sample=True, num_beams=1, **chosen,
    )  # fmt: skip
    both.theirs.set_attn_implementation(kept)
    ids, wanted = reported["sequences"][0].tolist(), reported["token_timestamps"][0]
    first = len(both.tokens.prompt("en", "transcribe", timestamps=False))
    _, scores = both.ours.llm.cross_attention(Prompt([Input(features), ids]), heads)
    rows, positions = warp(-smoothed(scores[first:-1].softmax(-1).transpose(0, 1)).double().numpy())
    found = positions[np.diff(rows, prepend=-1) > 0] * 0.02
    assert len(set(found)) > 4
    assert found == pytest.approx(wanted[first:-1].numpy(), abs=1e-4)
