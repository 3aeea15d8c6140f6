"""Whole recordings: in chunks, beside each other, with words; and those that are no speech or no audio."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch

from ingot.audio import log_mel as log_mel_module
from ingot.audio.log_mel import RATE, LongLogMel, features_by, fit, log_mel
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.config.transcript_rules import TranscriptRules
from ingot.errors import RequestError
from ingot.kernels.cache.cache_scales import NARROW_CACHES
from ingot.kernels.sampling.timestamp_rules import TranscriptRows, hold_transcripts
from ingot.llm.outputs import Answer, TokenLogprobs
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.runtime.sampling.transcript_masks import Transcripts
from ingot.runtime.scheduling.request import Request
from ingot.speech.recording_features import Transcript
from ingot.speech.recording_files import transcribe_each
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.transcriber import Transcriber
from ingot.speech.transcript_writers import WRITERS
from ingot.speech.voice_activity import VoiceDetector
from ingot.speech.window_decoding import _best
from tests.encoders.speech import write_multilingual
from tests.speech.test_huggingface import noise, opened

ONE_PASS: dict[str, Any] = {"language": "en", "temperatures": (0.0,), "no_speech": None}


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    """Of one layer, whose windows have few tokens."""
    return opened(tmp_path_factory.mktemp("turbo"), "turbo", positions=64).ours


def reported(
    segments: Iterable[Segment],
) -> list[tuple[float, float, list[int], list[tuple[str, float, float]]]]:
    """Without probabilities, whose last digits depend on what else a step computes."""
    return [(s.start, s.end, s.tokens, [(w.text, w.start, w.end) for w in s.words or []]) for s in segments]


@pytest.mark.slow
@pytest.mark.stays("False")
@pytest.mark.parametrize("words", [False, True])
def test_chunks_are_recordings_of_their_own(transcriber: Transcriber, words: bool) -> None:
    samples, spans = noise(70.0), [(1.0, 5.0), (20.0, 49.0), (60.0, 70.0)]
    options = ONE_PASS | {"word_timestamps": words}
    found = transcriber(samples, chunked=True, vad=lambda _: spans, **options)
    alone = [transcriber(samples[int(a * RATE) : int(b * RATE)], **options) for a, b in spans]
    assert found.duration == 70.0
    assert [s.tokens for s in found.segments] == [s.tokens for one in alone for s in one.segments]
    assert [s.id for s in found.segments] == list(range(len(found.segments)))
    wanted = [
        (min(s.start + a, b), min(s.end + a, b))
        for (a, b), one in zip(spans, alone, strict=True)
        for s in one.segments
    ]
    assert [(s.start, s.end) for s in found.segments] == [pytest.approx(pair) for pair in wanted]
    seeks = [s.seek + round(a * 100) for (a, _), one in zip(spans, alone, strict=True) for s in one.segments]
    assert [s.seek for s in found.segments] == seeks
    assert words == any(s.words for s in found.segments)
    streamed = transcriber.stream(samples, chunked=True, vad=lambda _: spans, **options)
    assert reported(streamed) == reported(found.segments)


def test_the_silence_before_speech_is_no_segments(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spans(VoiceDetector):
        def __call__(self, samples: torch.Tensor) -> list[tuple[float, float]]:
            return [(0.0, 5.0), (20.0, 49.0)]

    def one(_: Transcriber, samples: torch.Tensor, *rest: Any) -> Transcript:
        return Transcript([Segment(0, 0.0, 3.0, " Yes.", [1], 0.0, -0.1, 1.0, 0.0)])

    monkeypatch.setattr(Transcriber, "_one_by_one", one)
    found = transcriber(noise(50.0), chunked=True, vad=Spans(pad=0.3), language="en")
    assert [(s.start, s.end) for s in found.segments] == [(0.0, 3.0), (20.3, 23.0)]


@pytest.mark.parametrize("given", [None, "de"])
def test_chunks_have_one_language(
    given: str | None, transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's, unless it is known."""
    seen: list[str | None] = []

    def note(_: Transcriber, samples: torch.Tensor, options: TranscribeOptions, *rest: Any) -> Transcript:
        seen.append(options.language)
        return Transcript()

    monkeypatch.setattr(Transcriber, "_one_by_one", note)
    spans = [(1.0, 5.0), (20.0, 49.0), (60.0, 70.0)]
    found = transcriber(noise(70.0), chunked=True, vad=lambda _: spans, language=given)
    assert found.language is not None
    assert found.language == (given or found.language)
    assert seen == [found.language] * 3


def test_nobody_speaks(transcriber: Transcriber) -> None:
    found = transcriber(torch.zeros(40 * RATE), chunked=True, vad=lambda _: [])
    assert (found.segments, found.text, found.duration, found.language) == ([], "", 40.0, None)
    assert WRITERS["vtt"](found) == "WEBVTT\n"


def test_clips_are_all_that_is_transcribed(transcriber: Transcriber) -> None:
    samples = noise(50.0)
    found = transcriber(samples, clip_timestamps=(10.0, 14.0, 40.0), **ONE_PASS)
    starts = [segment.start for segment in found.segments]
    assert starts
    assert all(start >= 10.0 for start in starts)
    chunks = transcriber(samples, clip_timestamps=(10.0, 14.0, 40.0), chunked=True, **ONE_PASS)
    assert all(10.0 <= s.start <= s.end <= 14.0 or s.start >= 40.0 for s in chunks.segments)
    assert transcriber(samples, clip_timestamps=(60.0,), **ONE_PASS).segments == []


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"vad": lambda _: []}, "vad"),
        ({"vad": 3, "chunked": True}, "vad"),
        ({"vad": lambda _: [], "chunked": True, "clip_timestamps": (1, 2)}, "vad"),
        ({"clip_timestamps": (2, 1)}, "clip_timestamps"),
        ({"clip_timestamps": (-1, 1)}, "clip_timestamps"),
        ({"clip_timestamps": (0, float("inf"))}, "clip_timestamps"),
        ({"suppress": (-2,)}, "suppress"),
        ({"seed": -(2**70)}, "seed"),
        ({"beam_size": 64}, "beam_size"),
    ],
)
def test_options_that_nobody_could_follow(
    transcriber: Transcriber, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(RequestError) as caught:
        transcriber(noise(1.0), **options)
    assert caught.value.field == flag


def test_files_share_steps_and_give_what_they_give_alone(transcriber: Transcriber) -> None:
    sounds, steps = [noise(4.0 + i, seed=i) for i in range(6)], []
    alone = [reported(transcriber(one, **ONE_PASS).segments) for one in sounds]
    runner = transcriber.llm.executor.runner
    run = runner.run

    def counted(step: Any) -> torch.Tensor:
        steps.append(len(step.requests))
        return run(step)

    runner.run = counted  # type: ignore[method-assign]
    try:
        assert [reported(one.segments) for one in transcriber.batch(sounds, **ONE_PASS)] == alone
    finally:
        runner.run = run  # type: ignore[method-assign]
    assert max(steps) >= 5
    assert sum(steps) > 2 * len(steps), "most steps serve several files"


def test_one_bad_file_of_many_ends_all_with_its_own_error(transcriber: Transcriber, tmp_path: Path) -> None:
    bad = tmp_path / "words.wav"
    bad.write_text("no audio, but text")
    before = threading.active_count()
    with pytest.raises(RequestError, match=r"no audio.*words\.wav"):
        transcriber.batch([noise(60.0), noise(60.0, seed=2), bad], **ONE_PASS)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:  # what is under way ends
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "options", [{}, {"word_timestamps": True}, {"chunked": True, "vad": lambda _: [(0, 0.1)]}]
)
@pytest.mark.parametrize("seconds", [0.1, 0.005, 0.0])
def test_a_tenth_of_a_second(transcriber: Transcriber, seconds: float, options: dict[str, Any]) -> None:
    if seconds < 0.1 and "vad" in options:
        options = options | {"vad": lambda _: []}
    found = transcriber(noise(1.0)[: int(seconds * RATE)], **ONE_PASS, **options)
    assert found.duration == pytest.approx(seconds, abs=1e-4)
    assert all(segment.end <= 30 for segment in found.segments)
    if seconds < 0.01:  # no frame of features
        assert (found.segments, found.text) == ([], "")


def test_two_channels_at_48_khz(transcriber: Transcriber, tmp_path: Path) -> None:
    """What both say on average, and neither alone."""
    both = np.stack([noise(3.0, seed=seed).repeat_interleave(3).numpy() for seed in (1, 2)], axis=1)
    soundfile.write(tmp_path / "stereo.wav", both, 48_000, subtype="FLOAT")
    found = transcriber(tmp_path / "stereo.wav", **ONE_PASS)
    wanted, left, right = (
        transcriber(soxr.resample(channel, 48_000, RATE), **ONE_PASS) for channel in (both.mean(1), *both.T)
    )
    assert found.duration == 3.0
    assert reported(found.segments) == reported(wanted.segments)
    assert reported(found.segments) not in (reported(left.segments), reported(right.segments))


def test_whatever_holds_a_recording_is_transcribed(transcriber: Transcriber, tmp_path: Path) -> None:
    """Paths, bytes, open files and samples of several types; of integers the type says the scale."""
    path = tmp_path / "clip.wav"
    integers = (noise(2.0) * 32767).to(torch.int16)
    soundfile.write(path, integers.numpy(), RATE)
    wanted = reported(transcriber(path, **ONE_PASS).segments)
    data, floats = path.read_bytes(), integers.float() / 32768
    for source in (
        *(str(path), data, bytearray(data), memoryview(data), io.BytesIO(data)),
        *(integers, integers.numpy(), integers.numpy().astype(np.int32) << 16),
        *(floats, floats.numpy(), floats.double(), floats.numpy().astype(np.float64), floats.tolist()),
    ):
        assert reported(transcriber(source, **ONE_PASS).segments) == wanted, type(source)
    with path.open("rb") as file:
        assert [reported(one.segments) for one in transcriber.batch([file, path], **ONE_PASS)] == [wanted] * 2
    refused: list[Any] = [
        None,
        7,
        ["a.wav"],
        floats * 32767,
        integers.long(),
        torch.zeros(2, 100),
        io.StringIO(),
    ]
    for bad in refused:
        with pytest.raises(RequestError):
            transcriber(bad, **ONE_PASS)


def test_a_file_that_was_cut_off(transcriber: Transcriber, tmp_path: Path) -> None:
    path = tmp_path / "cut.wav"
    soundfile.write(path, noise(10.0).numpy(), RATE)
    path.write_bytes(path.read_bytes()[: 4 * RATE])
    ways: list[Callable[..., object]] = [
        lambda **more: transcriber(path, **ONE_PASS, **more),
        lambda **more: transcriber.batch([path], **ONE_PASS, **more)[0],
        lambda **more: list(transcriber.stream(path, **ONE_PASS, **more)),
    ]
    for transcribe in ways:
        with pytest.raises(RequestError, match=r"ends early.*cut\.wav: 2\.0 of 10\.0 s.*allow_truncated"):
            transcribe()
        assert transcribe(allow_truncated=True)
    assert transcriber(path, **ONE_PASS, allow_truncated=True).duration == pytest.approx(2.0, abs=0.01)
    *_, (_, error) = transcribe_each(transcriber, [path], **ONE_PASS)
    assert "allow_truncated" in str(error)
    *_, (_, found) = transcribe_each(transcriber, [path], **ONE_PASS, allow_truncated=True)
    assert isinstance(found, Transcript)
    assert found.duration == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("seconds", [0.3, 59.0, 150.0])
def test_features_of_a_part_are_those_of_the_whole(seconds: float) -> None:
    samples = noise(seconds)
    whole = log_mel(fit(samples, len(samples) + 30 * RATE), 80)
    parts = LongLogMel(samples, 80, torch.device("cpu"))
    assert (parts.num_frames, parts.seconds) == (len(samples) // 160, len(samples) / RATE)
    for start in range(0, whole.shape[1] - 3000, 1700):
        found = parts.window(start, start + 3000).features
        torch.testing.assert_close(found, whole[:, start : start + 3000], rtol=0, atol=1e-5)
    assert torch.equal(features_by(torch.device("cpu"), fit(samples, len(samples) + 30 * RATE), 80), whole)


def test_every_feature_is_made_beside_the_steps(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's device, on its stream for features: never inside of a step, never elsewhere."""
    inside, transforms, devices = threading.local(), [], []
    stft, beside = torch.stft, log_mel_module.beside

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        devices.append(device)
        with beside(device):
            inside.yes = True
            yield
            inside.yes = False

    def transform(*args: Any, **named: Any) -> torch.Tensor:
        transforms.append(getattr(inside, "yes", False))
        return stft(*args, **named)

    wanted = transcriber(noise(70.0), **ONE_PASS)
    monkeypatch.setattr(log_mel_module, "beside", watched)
    monkeypatch.setattr(torch, "stft", transform)
    assert reported(transcriber(noise(70.0), **ONE_PASS).segments) == reported(wanted.segments)
    assert transcriber(noise(3.0), chunked=True, vad=lambda _: [(0, 1), (2, 3)], temperatures=(0.0,)).language
    assert len(transforms) > 3
    assert all(transforms)
    assert set(devices) == {transcriber.llm.engine.device}


@pytest.mark.gpu
def test_features_on_a_gpu_wait_for_nothing_and_are_those_of_the_cpu() -> None:
    gpu, samples = torch.device("cuda"), noise(150.0)
    ours = LongLogMel(samples, 80, torch.device("cpu"))
    starts = (0, 1234, 9000)
    first = LongLogMel(samples, 80, gpu)
    for start in starts:
        first.window(start, start + 3000)  # makes constants, and a plan of the transform for each length
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # 2 seconds and more of a step, on the default stream
    busy = torch.cuda.Event()
    busy.record()
    theirs = LongLogMel(samples, 80, gpu)
    found = [theirs.window(start, start + 3000).features for start in starts]
    assert not busy.query(), "features waited for the step"
    for start, one in zip(starts, found, strict=True):
        wanted = ours.window(start, start + 3000).features
        torch.testing.assert_close(one, wanted.to(gpu), rtol=0, atol=1e-4)


def test_a_window_has_a_name_of_its_own() -> None:
    """So that nobody copies and hashes it, and a second temperature encodes nothing."""
    ours, other = (LongLogMel(noise(40.0), 80, torch.device("cpu")) for _ in range(2))
    names = [one.window(*place).name for one in (ours, other) for place in ((0, 3000), (0, 2999), (1, 3000))]
    assert len(set(names)) == 6
    assert ours.window(0, 3000).name == names[0]
    behind = ours.window(3000, 4000, 3000)
    assert behind.features.shape == (80, 3000)
    assert not behind.features[:, 1000:].any()


@pytest.mark.parametrize("hours", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_long_recording_has_features_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Samples are a view here; what is transformed at once is a minute."""
    longest = []
    stft = torch.stft

    def watched(samples: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        longest.append(samples.shape[-1] / RATE)
        return stft(samples, *args, **named)

    monkeypatch.setattr(torch, "stft", watched)
    samples = torch.zeros(1).expand(hours * 3600 * RATE)
    parts = LongLogMel(samples, 128, torch.device("cpu"))
    assert parts.window(300_000, 303_000).features.shape == (128, 3000)
    assert len(longest) == 60 * hours + 2
    assert max(longest) < 60.1


def held(rules: TranscriptRules, output: list[int], row: torch.Tensor) -> torch.Tensor:
    """A row of logits as the rules leave it behind an output."""
    transcripts = Transcripts(1, len(row), torch.device("cpu"))
    params = SamplingParams(transcript=rules)
    (mark,) = transcripts.marks([Request("r", [0], params, 448, output_ids=output)])
    assert mark is not None
    columns = [torch.tensor([value]) for value in mark]
    stand = TranscriptRows(*columns, ids=torch.tensor(output[-1:] or [0]), places=torch.tensor([0]))
    return hold_transcripts(row[None], transcripts.tables, stand)[0]


@pytest.mark.parametrize("beams", [2, 3])
def test_a_beam_tells_the_log_probability_of_its_text(transcriber: Transcriber, beams: int) -> None:
    features, names = log_mel(noise(30.0), 128), transcriber.vocabulary.tokens
    options = TranscribeOptions(language="en", temperatures=(0.0,), beam_size=beams)
    found = transcriber.decode(features, **options.to_json())
    start = names.prompt("en", "transcribe", timestamps=True)
    ids = [*start, *found.tokens, names.end]
    logits, rules = (
        transcriber.logits(features, ids),
        transcriber.vocabulary.rules(options, framed=len(start) - 1),
    )
    assert found.no_speech_prob == pytest.approx(float(logits[0].softmax(0)[rules.no_speech]), rel=1e-4)
    total, ended = 0.0, len(found.logprobs) > len(found.tokens)
    for place in range(len(start) - 1, len(ids) - 2 + ended):
        row = held(rules, ids[len(start) : place + 1], logits[place])
        total += float(row.log_softmax(0)[ids[place + 1]])
    assert found.avg_logprob == pytest.approx(total / (len(found.tokens) + 1), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"beam_size": 2}, {"temperatures": (0.5,), "best_of": 2}])
def test_a_window_that_ends_at_once_says_nothing(
    transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Checkpoints may allow it. How likely silence is, is still known."""
    features, vocabulary = log_mel(noise(30.0), 128), transcriber.vocabulary
    options = {"language": "en", "temperatures": (0.0,), "timestamps": False, **options}
    wanted = transcriber.decode(features, **options).no_speech_prob
    free = dataclasses.replace(vocabulary, begin_suppressed=())
    monkeypatch.setattr(transcriber, "vocabulary", free)
    end = vocabulary.tokens.end
    others = tuple(token for token in range(vocabulary.tokens.first_timestamp) if token != end)
    found = transcriber.decode(features, suppress=others, **options)
    assert (found.tokens, found.text, found.avg_logprob) == ([], "", pytest.approx(0.0, abs=1e-6))
    assert found.no_speech_prob == pytest.approx(wanted, rel=1e-4)


def test_attention_is_read_in_chunks_as_at_once(transcriber: Transcriber, tmp_path: Path) -> None:
    names = transcriber.vocabulary.tokens
    features, heads = log_mel(noise(30.0), 128), [(0, 3), (0, 0)]
    ids = [*names.prompt("en", "transcribe", timestamps=False), *range(100, 130), names.end]
    prompt = Prompt([Input(features), ids])
    logprobs, scores = transcriber.llm.cross_attention(prompt, heads, below=names.end)
    assert (logprobs.shape, scores.shape) == ((len(ids) - 1,), (len(ids), 2, 1500))
    assert (logprobs == -torch.inf).tolist() == [token >= names.end for token in ids[1:]]
    wanted = transcriber.logits(features, ids)[3:33, : names.end].log_softmax(-1)
    torch.testing.assert_close(logprobs[3:33], wanted[range(30), ids[4:34]], rtol=0, atol=1e-4)
    scheduler = transcriber.llm.executor.scheduler
    budget, scheduler.token_budget = scheduler.token_budget, 7
    try:
        again = transcriber.llm.cross_attention(prompt, heads[::-1], below=names.end)
    finally:
        scheduler.token_budget = budget
    torch.testing.assert_close(again[1].flip(1), scores, rtol=0, atol=1e-4)
    torch.testing.assert_close(again[0], logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("heads", [[], [(1, 0)], [(0, 4)], [(-1, 0)]])
def test_heads_that_are_not_there(transcriber: Transcriber, heads: list[tuple[int, int]]) -> None:
    prompt = Prompt([Input(log_mel(noise(2.0), 128)), [1, 2]])
    with pytest.raises(RequestError, match="layer 0 to 0, head 0 to 3"):
        transcriber.llm.cross_attention(prompt, heads)
    with pytest.raises(RequestError, match="no cross-attention"):
        transcriber.llm.cross_attention([1, 2], [(0, 0)])


@pytest.mark.stays("1-int8", "2-fp8")
@pytest.mark.parametrize("cache", NARROW_CACHES)
@pytest.mark.parametrize("beams", [1, 2])
def test_caches_in_8_bits(whisper: Path, clips: list[Path], cache: str, beams: int) -> None:
    """Of text and of speech: recordings side by side say what each says alone, words and beams included."""
    runtime = RuntimeConfig(kv_dtype=cache)  # type: ignore[arg-type]
    narrow = Transcriber(whisper, "cpu", runtime=runtime, max_batch_size=4)
    options = ONE_PASS | {"max_new_tokens": 6, "beam_size": beams, "word_timestamps": True}
    alone = [reported(narrow(clip, **options).segments) for clip in clips]
    assert any(alone)
    assert [reported(one.segments) for one in narrow.batch(clips, **options)] == alone
    names = narrow.vocabulary.tokens
    ids = [*names.prompt("en", "transcribe", timestamps=False), *range(100, 110), names.end]
    prompt, heads = Prompt([Input(log_mel(noise(30.0), 80)), ids]), [(0, 3), (1, 0)]
    wide = Transcriber(whisper, "cpu").llm.cross_attention(prompt, heads)[1]
    scores = narrow.llm.cross_attention(prompt, heads)[1]
    assert 1e-5 < float((scores - wide).norm() / wide.norm()) < (0.02 if cache == "int8" else 0.1)


def test_samples_whose_power_is_no_number(transcriber: Transcriber) -> None:
    with pytest.raises(RequestError, match="out of range"):
        transcriber(noise(1.0) * 1e25, **ONE_PASS)
    with pytest.raises(RequestError, match="too loud"):
        LongLogMel(noise(1.0) * 1e25, 80, torch.device("cpu"))


def test_minus_one_suppresses_what_is_not_speech(transcriber: Transcriber) -> None:
    vocabulary = dataclasses.replace(transcriber.vocabulary, suppressed=(7, 9))
    by_default = vocabulary.rules(TranscribeOptions())
    assert vocabulary.rules(TranscribeOptions(suppress=(-1,))) == by_default
    assert vocabulary.rules(TranscribeOptions(suppress=(5, -1))).suppressed == (5, *by_default.suppressed)
    assert {7, 9}.isdisjoint(vocabulary.rules(TranscribeOptions(suppress=(5,))).suppressed)


def test_an_engine_of_a_shorter_length_takes_all_that_is_said_before(tmp_path: Path) -> None:
    """Its windows read and write half of it each, as those of 448 tokens do."""
    checkpoint = write_multilingual(tmp_path, 3)
    short = Transcriber(checkpoint, "cpu", max_seq_len=40)
    assert short.vocabulary.longest == 40
    before = " ".join(map(str, range(300, 500)))
    found = short(noise(40.0), initial_prompt=before, hotwords=before, **ONE_PASS)
    assert found.duration == 40.0
    with pytest.raises(RequestError, match="no tokenizer for a text"):
        short(noise(1.0), initial_prompt="Names", **ONE_PASS)


@pytest.mark.parametrize(("penalty", "text"), [(0.0, "1"), (1.0, "1 2 3")])
def test_answers_are_compared_over_their_length(transcriber: Transcriber, penalty: float, text: str) -> None:
    def answer(tokens: list[int], logprob: float) -> Answer:
        reported = [TokenLogprobs(token, logprob, ((token, logprob),)) for token in tokens]
        return Answer(token_ids=tokens, text="", finish_reason="stop", logprobs=reported)

    vocabulary = dataclasses.replace(transcriber.vocabulary, tokenizer=None)
    best = _best(vocabulary, [answer([1], -0.9), answer([1, 2, 3], -0.6)], 0.5, 0.0, penalty)
    assert best.text == text
