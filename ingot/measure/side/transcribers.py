"""Speech sides: an engine, and Hugging Face's Whisper asked for the same windows, rules and thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ingot.audio.log_mel import HOP, RATE, WINDOW, fit
from ingot.checkpoint.checkpoint_files import read_json
from ingot.checkpoint.checkpoint_reader import GENERATION_CONFIG
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, RequestError
from ingot.llm import LLM
from ingot.measure.side.class_side import HuggingFaceSide
from ingot.measure.side.freed_memory import free_memory
from ingot.measure.side.huggingface import class_features, class_memory, generation_config
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, read_text
from ingot.speech.batched_windows import run_in_order
from ingot.speech.recording_features import Transcript, mel_bins
from ingot.speech.speech_options import MAX_INITIAL_TIMESTAMP, TranscribeOptions
from ingot.speech.transcriber import Transcriber
from ingot.speech.window_decoding import Vocabulary

_FRAMES = WINDOW // HOP  # of a window


@dataclass(frozen=True)
class SideTranscript:
    """One side's transcript of a recording; ``token_ids`` are those of its text, without timestamps."""

    text: str
    token_ids: list[int]
    language: str | None = None


class IngotSpeechSide(IngotSide):
    """An engine whose windows share steps."""

    def __init__(self, spec: SideSpec, batch: int | None) -> None:
        most = spec.max_batch_size if batch is None else batch
        super().__init__(spec.replace(engine_batch_size=batch, max_batch_size=most))
        self.transcriber = Transcriber.of_llm(self.llm)
        self.batch = self.llm.executor.admission.max_batch_size

    def transcribe(
        self, recordings: Sequence[torch.Tensor], asked: Sequence[TranscribeOptions]
    ) -> list[SideTranscript]:
        pairs = list(zip(recordings, asked, strict=True))
        return list(run_in_order(lambda pair, cancelled: self._one(*pair), pairs, self.batch))

    def warm_up(self, most: int | None = None) -> None:
        self.llm.warm_up(kinds=["greedy"])
        self.transcribe([torch.zeros(RATE)], [_SHORT])

    def facts(self) -> dict[str, Any]:
        return self.model_facts() | {"device": str(self.device), "batch": self.batch}

    def resize(self, batch: int) -> None:
        """New caches over the same weights, of exactly ``batch`` windows."""
        engine, runtime = self.llm.engine, self.llm.runtime
        limits = engine.manifest.build.replace(max_batch_size=batch)
        engine = replace(engine, manifest=engine.manifest.replace(build=limits))
        blocks = batch * -(-self.max_seq_len // runtime.block_size)
        del self.transcriber, self.llm
        free_memory()
        self.llm = LLM.of_engine(engine, runtime.replace(cache_tokens=blocks * runtime.block_size))
        self.transcriber, self.batch = Transcriber.of_llm(self.llm), batch

    def close(self) -> None:
        del self.transcriber
        super().close()

    def _one(self, samples: torch.Tensor, options: TranscribeOptions) -> SideTranscript:
        return side_transcript(self.transcriber(samples, **vars(options)), self.transcriber.vocabulary)


def side_transcript(found: Transcript, vocabulary: Vocabulary) -> SideTranscript:
    """A transcript without its times."""
    ids = [token for segment in found.segments for token in segment.tokens if token < vocabulary.tokens.end]
    return SideTranscript(found.text.strip(), ids, found.language)


class HuggingFaceSpeechSide(HuggingFaceSide):
    """``WhisperForConditionalGeneration.generate`` on features of its own extractor, decoded by Ingot's
    tokenizer.

    It gets the windows that OpenAI's Whisper reads: a recording ends where it ends and not after 30 seconds.
    """

    def __init__(self, spec: SideSpec, batch: int) -> None:
        super().__init__(spec)
        is_random = spec.random_weights is not None
        tokenizer = None if is_random else read_text(spec.source).tokenizer
        folder = None if is_random else resolve_checkpoint(spec.source)
        file = folder / GENERATION_CONFIG if folder is not None else None
        generation = read_json(file) if file is not None and file.exists() else {}
        longest = self.config.max_positions
        self.vocabulary = Vocabulary.of_model(self.config, tokenizer, longest, generation)
        self.batch = batch
        self._extract = class_features(mel_bins(self.config))
        tokens, rules = self.vocabulary.tokens, self.vocabulary.rules(TranscribeOptions())
        self.model.generation_config = generation_config(
            folder,
            is_multilingual=tokens.multilingual,
            no_timestamps_token_id=tokens.no_timestamps,
            prev_sot_token_id=tokens.previous,
            lang_to_id={f"<|{code}|>": token for code, token in tokens.languages.items()},
            task_to_id={"transcribe": tokens.transcribe, "translate": tokens.translate},
            # The class itself suppresses <|notimestamps|>, which it forces if it wants no timestamps.
            suppress_tokens=sorted(set(rules.suppressed) - {tokens.no_timestamps}),
            begin_suppress_tokens=list(rules.begin_suppressed),
            max_initial_timestamp_index=self.vocabulary.last_first,
            max_length=self.vocabulary.longest,
            decoder_start_token_id=tokens.start,
            bos_token_id=tokens.end,
            eos_token_id=tokens.end,
            pad_token_id=tokens.end,
        )

    def resize(self, batch: int) -> None:
        """Padded batches of ``batch`` recordings from now on."""
        free_memory()
        self.batch = batch

    @torch.inference_mode()
    def transcribe(
        self, recordings: Sequence[torch.Tensor], asked: Sequence[TranscribeOptions]
    ) -> list[SideTranscript]:
        """In padded batches of recordings with the same options, the shortest first."""
        found: dict[int, SideTranscript] = {}
        for places in _alike(recordings, asked, self.batch):
            batch = [recordings[place] for place in places]
            with class_memory("`against_batch`"):
                found |= zip(places, self._batch(batch, asked[places[-1]]), strict=True)
        return [found[place] for place in range(len(recordings))]

    def warm_up(self, most: int | None = None) -> None:
        self.transcribe([torch.zeros(RATE)], [_SHORT])

    def facts(self) -> dict[str, Any]:
        return self.model_facts() | {"device": str(self.device), "batch": self.batch}

    def _batch(self, recordings: list[torch.Tensor], options: TranscribeOptions) -> list[SideTranscript]:
        frames = [len(samples) // HOP for samples in recordings]
        if not all(frames):  # the class takes no empty recordings
            kept = [i for i, count in enumerate(frames) if count]
            found = self._batch([recordings[i] for i in kept], options) if kept else []
            rest = iter(found)
            return [next(rest) if count else SideTranscript("", []) for count in frames]
        given = self._asked(options, max(frames))
        whole = [self._features(samples) for samples in recordings]
        if "language" in given and given["language"] is None:
            given["language"] = self._languages(whole)
        features = [one[:, :count] for one, count in zip(whole, frames, strict=True)]
        if len(features) > 1:
            # The class transcribes recordings of a batch to their own ends where the longest has two windows.
            width = max(*frames, _FRAMES + (1 if options.timestamps else 0))
            mask = torch.arange(width) < torch.tensor(frames)[:, None]
            given["attention_mask"] = mask.long().to(self.device)
            features = [fit(one, width) for one in features]
        joined = torch.stack(features).to(self.device, self.dtype)
        found = self.model.generate(joined, return_segments=True, **given)
        spoken = given.get("language")
        languages = spoken if isinstance(spoken, list) else [spoken] * len(recordings)
        return [self._transcript(*one) for one in zip(found["segments"], languages, strict=True)]

    def _languages(self, features: Sequence[torch.Tensor]) -> list[str]:
        """Of the first 30 seconds of each, silence included."""
        codes = {token: code for code, token in self.vocabulary.tokens.languages.items()}
        windows = torch.stack([one[:, :_FRAMES] for one in features]).to(self.device, self.dtype)
        found = self.model.detect_language(input_features=windows)
        return [codes[token] for token in found.flatten().tolist()]

    def _features(self, samples: torch.Tensor) -> torch.Tensor:
        """[mels, frames], as the original makes them: of the recording with 30 seconds of silence."""
        padded = fit(samples, len(samples) + WINDOW).numpy()
        made = self._extract(
            padded, sampling_rate=RATE, truncation=False, padding=False, return_tensors="pt",
            device=str(self.device),
        )  # fmt: skip
        found: torch.Tensor = made["input_features"][0]
        return found

    def _transcript(self, segments: Sequence[dict[str, Any]], language: str | None) -> SideTranscript:
        pieces = [one["tokens"].tolist() for one in segments]
        texts = [self.vocabulary.text(piece) for piece in pieces]
        ids = [token for piece in pieces for token in piece if token < self.vocabulary.tokens.end]
        return SideTranscript("".join(texts).strip(), ids, language)

    def _asked(self, options: TranscribeOptions, frames: int) -> dict[str, Any]:
        """Arguments of ``generate``.

        Raises:
            RequestError: the class cannot do it.
        """
        if frames > _FRAMES and not options.timestamps:
            fix = "recordings of at most 30 s, or timestamps"
            raise RequestError("Hugging Face's class needs timestamps behind 30 s", fix=fix)
        lacking = [name for name, plain in _LACKING.items() if getattr(options, name) != plain]
        if lacking:
            raise RequestError(
                "Hugging Face's class does not have these options", seen=lacking, field="against"
            )
        tokens, most = self.vocabulary.tokens, self.vocabulary.longest // 2
        reads = options.condition_on_previous_text or options.initial_prompt
        given: dict[str, Any] = {
            "return_timestamps": options.timestamps,
            "temperature": options.temperatures,
            "compression_ratio_threshold": options.compression_ratio,
            "logprob_threshold": options.logprob,
            "no_speech_threshold": options.no_speech if options.logprob is not None else None,
            "condition_on_prev_tokens": options.condition_on_previous_text,
            "num_beams": options.beam_size or 1,
            "length_penalty": options.length_exponent,
        }
        if options.max_new_tokens is not None:
            given["max_new_tokens"] = min(options.max_new_tokens, most)
        elif not reads or frames <= _FRAMES:
            given["max_new_tokens"] = most
        if tokens.multilingual:
            given |= {"language": options.language, "task": options.task}
        if options.suppress is not None or not options.timestamps:  # otherwise as the checkpoint says
            times = [] if options.timestamps else range(tokens.first_timestamp, self.config.vocab_size)
            suppressed = {*self.vocabulary.rules(options).suppressed, *times}
            given["suppress_tokens"] = sorted(suppressed - {tokens.no_timestamps})
        if options.initial_prompt:
            ids = self.vocabulary.ids(options.initial_prompt)
            given["prompt_ids"] = torch.tensor([tokens.previous, *ids], device=self.device)
        return given


SpeechSide = IngotSpeechSide | HuggingFaceSpeechSide


def open_speech_side(spec: SideSpec, batch: int | None = None) -> SpeechSide:
    """Load what the spec names, for ``batch`` recordings at once (None: an engine's limit)."""
    mel_bins(spec.config())
    if spec.kind == HUGGINGFACE:
        return HuggingFaceSpeechSide(spec, batch or 1)
    if spec.is_engine and batch is not None:
        most = Manifest.read(Path(spec.source)).build.max_batch_size
        if batch > most:
            raise ConfigError(
                "the batch is larger than the engine's max_batch_size",
                seen=batch,
                allowed=f"<= {most}",
                field="batch",
                fix="`batch`, or build with a larger `max_batch_size`",
            )
    return IngotSpeechSide(spec, batch)


_SHORT = TranscribeOptions(language="en", temperatures=(0.0,), max_new_tokens=4)
_LACKING: dict[str, Any] = {
    "hotwords": None,
    "carry_initial_prompt": False,
    "patience": None,
    "prefix": None,
    "suppress_blank": True,
    "max_initial_timestamp": MAX_INITIAL_TIMESTAMP,
    "chunked": False,
    "clip_timestamps": (),
    "word_timestamps": False,  # windows begin behind words
    "hallucination_silence_threshold": None,
}


def _alike(
    recordings: Sequence[torch.Tensor], asked: Sequence[TranscribeOptions], most: int
) -> Iterator[list[int]]:
    """Indices of recordings that can share a batch, whose options differ at most in ``max_new_tokens``."""
    places = sorted(range(len(recordings)), key=lambda i: (repr(_kind(asked[i])), len(recordings[i])))
    batch: list[int] = []
    for place in places:
        if batch and (len(batch) == most or _kind(asked[place]) != _kind(asked[batch[0]])):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _kind(options: TranscribeOptions) -> TranscribeOptions:
    return options.replace(max_new_tokens=None)
