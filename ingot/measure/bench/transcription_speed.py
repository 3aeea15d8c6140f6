"""Speed of transcription, by clips with the lengths of LibriSpeech's."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import torch

from ingot.audio.log_mel import RATE, WINDOW_SECONDS
from ingot.config.json_config import JsonConfig
from ingot.errors import ConfigError
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.side.open_side import Say, silent
from ingot.measure.side.side_spec import SideSpec, read_text
from ingot.measure.side.timed_run import median, spread
from ingot.measure.side.timed_transcripts import TranscriptionRun, transcribe_all
from ingot.measure.side.token_load import check_counts
from ingot.measure.side.transcribers import SpeechSide, open_speech_side
from ingot.models.speech_tokens import SpeechTokens
from ingot.speech.recording_features import mel_bins
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import Vocabulary

MEAN_SECONDS = 19452 / 2620  # LibriSpeech's test-clean: 5.4 hours in 2,620 utterances
SIGMA = 0.63  # of the logarithm: a tenth of the clips is then longer than 14 seconds
SHORTEST, LONGEST = 1.3, WINDOW_SECONDS
_WARM_UP = 8  # clips at least
LENGTHS = (
    "quantiles of a lognormal with sigma 0.63 and a mean of 7.42 s (LibriSpeech test-clean: 5.4 hours in "
    "2,620 utterances), cut to 1.3 to 30 s, so that each clip is one window"
)


@dataclass(frozen=True)
class TranscriptionBench(JsonConfig):
    """All clips, for each batch size, ``repeats`` times.

    Attributes:
        tokens_per_second: of audio, in each clip's transcript, whatever the weights.
    """

    verb: ClassVar[str] = "transcribe"
    method: ClassVar[str] = (
        "noise that swells at the rate of syllables; greedy, no timestamps, a fixed number of tokens per "
        "second of audio with the end token suppressed; times from samples to text"
    )
    compared: ClassVar[tuple[str, ...]] = ("batch", "seconds", "clip")
    clips: int = 73
    batches: tuple[int, ...] = (1, 64)
    tokens_per_second: float = 4.0
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(clips=self.clips, repeats=self.repeats, batch=min(self.batches))
        if not 0 < self.tokens_per_second * LONGEST <= 200:
            allowed = f"more than 0, at most {200 / LONGEST:.1f}"
            raise ConfigError(
                "`tokens_per_second` is out of range", seen=self.tokens_per_second, allowed=allowed,
                field="tokens_per_second",
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"lengths": LENGTHS, "seconds": [round(s, 3) for s in self.seconds()]}

    def seconds(self) -> list[float]:
        """The clips' lengths, in an order drawn once."""
        normal = NormalDist(0.0, SIGMA)
        found = [math.exp(normal.inv_cdf((i + 0.5) / self.clips)) for i in range(self.clips)]
        scale = MEAN_SECONDS * self.clips / sum(found)
        found = [min(max(scale * one, SHORTEST), LONGEST) for one in found]
        random.Random(self.seed).shuffle(found)
        return found

    def samples(self) -> list[torch.Tensor]:
        """The clips: float32 [N] at 16 kHz."""
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for seconds in self.seconds():
            count = round(seconds * RATE)
            swell = (torch.arange(count) * (4 * math.pi / RATE)).sin() ** 2
            made.append(0.1 * torch.randn(count, generator=generator) * swell)
        return made

    def asked(self, tokens: SpeechTokens) -> list[TranscribeOptions]:
        """The options of each clip: only ids of words, as many as its length asks for."""
        plain = TranscribeOptions(
            language="en",
            timestamps=False,
            temperatures=(0.0,),
            compression_ratio=None,
            logprob=None,
            no_speech=None,
            condition_on_previous_text=False,
            suppress=tuple(range(tokens.end, tokens.first_timestamp)),
        )
        counts = [max(1, round(self.tokens_per_second * seconds)) for seconds in self.seconds()]
        return [plain.replace(max_new_tokens=count) for count in counts]


def measure_transcribing(
    side: SpeechSide, wanted: TranscriptionBench, tokens: SpeechTokens, say: Say = silent, name: str = ""
) -> list[dict[str, Any]]:
    """One entry per batch size, after a warm-up with the longest clips.

    ``seconds``: of all clips, of each run. ``rtfx``: seconds of audio per second, of the median run.
    ``clip_ms``: of each clip of each run, if they are transcribed one after another. ``tokens_per_s``: of the
    median run.

    Raises:
        ConfigError: a transcript has another number of tokens, so that sides would not do the same work.
    """
    samples, asked = wanted.samples(), wanted.asked(tokens)
    entries = []
    for batch in wanted.batches:
        side.batch = batch
        together = 1 if batch == 1 else len(samples)
        say(f"{name}: batch {batch}, warming up")
        first = sorted(range(len(samples)), key=lambda i: -len(samples[i]))[: max(_WARM_UP, batch)]
        transcribe_all(side, [samples[i] for i in first], [asked[i] for i in first], together)
        runs = []
        for repeat in range(wanted.repeats):
            say(f"{name}: batch {batch}, run {repeat + 1} of {wanted.repeats}")
            runs.append(transcribe_all(side, samples, asked, together))
            _check(runs[-1], asked, exact=batch == 1)
        entries.append(_entry(batch, runs, asked))
    return entries


def measure_clips(
    spec: SideSpec, wanted: TranscriptionBench, ceiling: Ceiling | None, say: Say = silent
) -> tuple[dict[str, Any], Ceiling]:
    """Open one side, warm it up and measure it, after the machine's ceiling if none is given."""
    say(f"loading {spec.title}")
    tokens = speech_tokens(spec)
    with open_speech_side(spec, max(wanted.batches)) as side:
        if ceiling is None:
            say("the machine's ceiling")
            ceiling = measure_ceiling(side.device, side.dtype)
        say(f"warming up {spec.title}")
        start = time.perf_counter()
        side.warm_up()
        warmed = {"warm_up_s": round(time.perf_counter() - start, 3)}
        results = measure_transcribing(side, wanted, tokens, say, spec.title)
        record = {"name": spec.title, "spec": spec.to_json(), "facts": side.facts() | warmed}
    return record | {"results": results, "doubts": doubts(results)}, ceiling


def speech_tokens(spec: SideSpec) -> SpeechTokens:
    """A model's special tokens; reads no weights."""
    config = spec.config()
    mel_bins(config)
    tokenizer = None if spec.path is None else read_text(spec.path).tokenizer
    return Vocabulary.of_model(config, tokenizer, config.max_positions, {}).tokens


def _entry(
    batch: int, runs: Sequence[TranscriptionRun], asked: Sequence[TranscribeOptions]
) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    middle, tokens = median(seconds), sum(one.max_new_tokens or 0 for one in asked)
    return {
        "batch": batch,
        "seconds": spread(seconds),
        "rtfx": round(sum(runs[0].audio) / middle, 3),
        "clip_ms": spread([time for run in runs for time in run.times], 1e3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / middle, 1),
    }


def _check(found: TranscriptionRun, asked: Sequence[TranscribeOptions], *, exact: bool) -> None:
    """Check the tokens of each transcript; ``exact`` unless a padded batch runs on for its longest."""
    for transcript, options in zip(found.transcripts, asked, strict=True):
        count, right = len(transcript.token_ids), options.max_new_tokens or 0
        if count < right or (exact and count != right):
            raise ConfigError(
                "a transcript does not have the tokens that were asked for",
                seen=f"{count} instead of {right}",
                fix="an engine whose window has room for them, or fewer `tokens_per_second`",
            )
