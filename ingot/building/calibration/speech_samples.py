"""Speech to calibrate with, as the model reads it: windows, and the ids that the decoder reads with them.

The ids are a transcript's behind what frames it, else those that the checkpoint itself gives, one likeliest
token after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ingot.building.calibration.calibrate import Held, dense_model
from ingot.building.calibration.calibration_data import CalibrationData
from ingot.building.calibration.calibration_speech import SpokenWindow, read_windows
from ingot.building.calibration.sample_records import needed
from ingot.building.calibration.walk_halves import unseen
from ingot.building.golden.golden_cases import steady_threads
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.device import parse_dtype
from ingot.engine.assembly import Assembly
from ingot.engine.engine_text import TextParts
from ingot.engine.reference_encoder import encode
from ingot.engine.reference_run import EXACT, ReferenceRun, SequenceSpan
from ingot.memory.host_memory import dense_bytes
from ingot.models.speech_tokens import SpeechTokens
from ingot.models.whisper_generation import SpeechGeneration
from ingot.text.tokenizer.tokenizer import Tokenizer

_FRAMES_OF_A_POSITION = 2
_BATCH = 8  # windows that are written at once: keys and values of one take 0.5 GB in a large model


def read_speech(
    path: Path,
    count: int,
    length: int,
    assembly: Assembly,
    source: Checkpoint,
    text: TextParts,
    device: torch.device,
) -> CalibrationData:
    """At most ``count`` windows of recordings, each with at most ``length`` ids.

    Raises CheckpointError where nothing says which ids frame a transcript; RequestError where a recording
    cannot be read, or the model does not know its language.
    """
    encoder = assembly.model_config.encoder
    assert encoder is not None
    found = read_windows(path, encoder.features[0], _FRAMES_OF_A_POSITION * encoder.max_positions, count)
    windows, ids = found.windows, [one.token_ids or () for one in found.windows]
    unknown = [place for place, own in enumerate(ids) if not own]
    if unknown:
        writer = _Writer(assembly, source, text.tokenizer, device, length)
        for start in range(0, len(unknown), _BATCH):
            places = unknown[start : start + _BATCH]
            for place, own in zip(places, writer.ids([windows[i] for i in places]), strict=True):
                ids[place] = own
    samples = tuple(own[:length] for own in ids)
    return CalibrationData(path, samples, found.records, found.sha256, tuple(w.features for w in windows))


class _Kept(Held):
    """All weights so far: each token asks for them again."""

    def release(self) -> None:
        """Keep them."""


class _Writer:
    """The ids that a decoder reads with windows; the arithmetic is the walk's."""

    def __init__(
        self,
        assembly: Assembly,
        source: Checkpoint,
        tokenizer: Tokenizer | None,
        device: torch.device,
        length: int,
    ) -> None:
        config = assembly.model_config
        generation = SpeechGeneration.of(source.generation_config, config.vocab_size)
        self._tokens = SpeechTokens.of_model(config.vocab_size, tokenizer).with_generation(generation)
        self._tokenizer = tokenizer
        self._most = min(length, config.max_positions // 2)  # tokens of a window's text, as in transcripts
        self._model = dense_model(assembly)
        self._weights = _Kept(partial(assembly.load, checkpoint=source, device=device), device)
        self._num_bytes = dense_bytes(config, parse_dtype(assembly.build.dtype))

    def ids(self, windows: Sequence[SpokenWindow]) -> list[tuple[int, ...]]:
        """Of each window: what frames a transcript, its text, the end."""
        run = ReferenceRun(self._model, self._weights, EXACT)
        with torch.inference_mode(), steady_threads(self._num_bytes, self._weights.device):
            for number, one in enumerate(windows):
                if one.text is None or self._detects(one):
                    encode(run, number, one.features, unseen)
            frames = [self._frame(run, number, one) for number, one in enumerate(windows)]
            texts = {}
            for n, one in enumerate(windows):
                if one.text is not None:
                    words = [" " + one.text.strip()]
                    texts[n] = needed(self._tokenizer, "a transcript").encode_parts(words)
            texts |= self._transcribed(run, {n: frame for n, frame in enumerate(frames) if n not in texts})
        return [(*frame, *texts[n], self._tokens.end) for n, frame in enumerate(frames)]

    def _detects(self, one: SpokenWindow) -> bool:
        return one.language is None and self._tokens.multilingual

    def _frame(self, run: ReferenceRun, number: int, one: SpokenWindow) -> list[int]:
        """The start of a window's transcript; the likeliest language is taken where none is named."""
        language = one.language
        if self._detects(one):
            codes = list(self._tokens.languages)
            first = SequenceSpan(-1 - number, (self._tokens.start,), 0, self._model.rope_offset(1), number)
            row = self._logits(run, [first])[0, [self._tokens.languages[code] for code in codes]]
            language = codes[int(row.argmax())]
        return self._tokens.prompt(language, "transcribe", timestamps=False)

    def _transcribed(self, run: ReferenceRun, frames: dict[int, list[int]]) -> dict[int, list[int]]:
        """The likeliest tokens behind each window's frame, up to the end or as many as are allowed."""
        written: dict[int, list[int]] = {number: [] for number in frames}
        new = dict(frames)
        while new:
            starts = {n: len(frames[n]) + len(written[n]) - len(ids) for n, ids in new.items()}
            offset = self._model.rope_offset(1)
            spans = [SequenceSpan(n, tuple(ids), starts[n], offset, n) for n, ids in new.items()]
            rows = self._logits(run, spans)
            for number, row in zip(list(new), rows, strict=True):
                token = int(row.argmax())
                if token == self._tokens.end or len(written[number]) == self._most:
                    del new[number]
                else:
                    written[number].append(token)
                    new[number] = [token]
        return written

    def _logits(self, run: ReferenceRun, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        """After the last token of each, [spans, vocab_size]."""
        hidden = run.embed(spans)
        for index in range(run.config.num_layers):
            hidden = run.layer(index, hidden, spans, unseen)
        ends = torch.tensor([len(span.ids) for span in spans], device=hidden.device).cumsum(0) - 1
        return run.logits(run.final_norm(hidden[ends], unseen))
