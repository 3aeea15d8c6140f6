"""When a window is decoded again, and when it is silent: OpenAI's rules, written out."""

from __future__ import annotations

from itertools import product

from ingot.speech.recording_features import _is_silent
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import Decoded, needs_another

LOGPROBS, SILENCES, RATIOS = (-1.1, -1.0, -0.9), (0.5, 0.6, 0.7), (2.3, 2.4, 2.5)
THRESHOLDS = ((-1.0, None), (0.6, None), (2.4, None))


def falls_back(window: Decoded, logprob: float | None, silence: float | None, ratio: float | None) -> bool:
    """``decode_with_fallback``."""
    again = False
    if ratio is not None and window.compression_ratio > ratio:
        again = True
    if logprob is not None and window.avg_logprob < logprob:
        again = True
    quiet = silence is not None and window.no_speech_prob > silence
    return again and not (quiet and logprob is not None and window.avg_logprob < logprob)


def skips(window: Decoded, logprob: float | None, silence: float | None) -> bool:
    """``transcribe``, behind "no voice activity check"."""
    if silence is None:
        return False
    skip = window.no_speech_prob > silence
    if logprob is not None and window.avg_logprob > logprob:
        skip = False
    return skip


def test_rules_are_the_originals() -> None:
    """Around each threshold, and without it."""
    seen = set()
    for mean, silence, ratio in product(LOGPROBS, SILENCES, RATIOS):
        window = Decoded([5], "a", mean, silence, 0.0, ratio)
        for logprob, no_speech, most in product(*THRESHOLDS):
            options = TranscribeOptions(logprob=logprob, no_speech=no_speech, compression_ratio=most)
            found = needs_another(window, options), _is_silent(window, options)
            expected = falls_back(window, logprob, no_speech, most), skips(window, logprob, no_speech)
            assert found == expected, (mean, silence, ratio, logprob, no_speech, most)
            seen.add(found)
    assert len(seen) >= 3
