"""The speech model that ships, by every way in: what was said, and when, against what it was made from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from ingot.building.builder import build
from ingot.measure.evaluate.wer import Wer
from ingot.speech.recording_features import Transcript
from ingot.speech.transcriber import Transcriber
from ingot.speech.transcript_writers import WRITERS
from tests.e2e.terminal import ingot
from tests.serve.client import ROOT, Server, started
from tests.serve.recordings import TRANSLATE, streamed, transcribe

TALKS = ROOT / "examples" / "speech"
MODEL = ROOT / "models" / "pocket-whisper"
NEAR = 0.1  # seconds
BRIEF = 45.0  # seconds: a window, and most of another
MOST_WRONG = 2.0  # percent of the words, of sentences and voices that training never had
NAME = "pocket-whisper"
WHOLE = pytest.mark.parametrize(
    ("said", "transcribed"),
    [
        pytest.param("briefs", "brief_transcripts", id="briefs"),
        pytest.param("talks", "found", id="whole", marks=pytest.mark.slow),
    ],
)


@dataclass(frozen=True)
class Talk:
    """A recording and what it was made from; ``times``: (start, end) of each sentence [N, 2]."""

    path: Path
    text: str
    language: str
    times: np.ndarray


@pytest.fixture(scope="module")
def talks() -> list[Talk]:
    records = map(json.loads, (TALKS / "manifest.jsonl").read_text(encoding="utf-8").splitlines())
    return [Talk(TALKS / r["audio"], r["text"], r["language"], np.array(r["times"])) for r in records]


@pytest.fixture(scope="module")
def briefs(talks: list[Talk], tmp_path_factory: pytest.TempPathFactory) -> list[Talk]:
    """Their beginnings, of two windows."""
    return [beginning(talk, tmp_path_factory.mktemp("briefs") / f"{talk.path.stem}.flac") for talk in talks]


def beginning(talk: Talk, path: Path) -> Talk:
    """The sentences that begin by then."""
    count = int((talk.times[:, 0] < BRIEF).sum())
    end = talk.times[count - 1 : count + 1].flatten()[1:3].mean()  # amid the pause after them
    samples, rate = soundfile.read(talk.path)
    soundfile.write(path, samples[: int(end * rate)], rate)
    sentences = re.split(r"(?<=[.!?]) ", talk.text)
    assert len(sentences) == len(talk.times)
    return Talk(path, " ".join(sentences[:count]), talk.language, talk.times[:count])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Proven, in fp32."""
    return build(MODEL, tmp_path_factory.mktemp("pocket") / NAME, device="cpu", max_batch_size=8)


@pytest.fixture(scope="module")
def transcriber(engine: Path) -> Transcriber:
    return Transcriber(engine, "cpu")


@pytest.fixture(scope="module")
def found(transcriber: Transcriber, talks: list[Talk]) -> list[Transcript]:
    """One window after another, the language detected."""
    return [transcriber(talk.path) for talk in talks]


@pytest.fixture(scope="module")
def brief_transcripts(transcriber: Transcriber, briefs: list[Talk]) -> list[Transcript]:
    found = [transcriber(talk.path) for talk in briefs]
    assert all(BRIEF < one.duration < BRIEF + 10 for one in found)
    return found


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Server]:
    with started(engine) as running:
        yield running


def check(texts: Sequence[str], times: Sequence[Any], talk: Talk) -> None:
    """The text is what was said, a segment for each sentence, and its times are right."""
    rates = Wer().rates([talk.text], [" ".join(text.strip() for text in texts)], [talk.language])
    assert rates.wer <= MOST_WRONG
    assert np.shape(times) == talk.times.shape
    assert np.abs(np.array(times) - talk.times).max() <= NEAR


def spans(transcript: Transcript) -> list[tuple[float, float]]:
    return [(one.start, one.end) for one in transcript.segments]


@pytest.mark.slow
@WHOLE
def test_one_window_after_another(request: pytest.FixtureRequest, said: str, transcribed: str) -> None:
    found, talks = map(request.getfixturevalue, (transcribed, said))
    assert [one.language for one in found] == ["en", "de"]
    for transcript, talk in zip(found, talks, strict=True):
        assert transcript.duration > (60 if said == "talks" else BRIEF)
        check([one.text for one in transcript.segments], spans(transcript), talk)


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["en", "de"])
def test_chunks_at_once(transcriber: Transcriber, briefs: list[Talk], place: int) -> None:
    talk = briefs[place]
    transcript = transcriber(talk.path, chunked=True)
    assert transcript.language == talk.language
    check([one.text for one in transcript.segments], spans(transcript), talk)


@pytest.mark.slow
@WHOLE
def test_files_at_once_and_a_stream(
    request: pytest.FixtureRequest, transcriber: Transcriber, said: str, transcribed: str
) -> None:
    found, talks = map(request.getfixturevalue, (transcribed, said))
    together = transcriber.batch([talk.path for talk in talks])
    for transcript, alone in zip(together, found, strict=True):
        assert WRITERS["srt"](transcript) == WRITERS["srt"](alone)
    assert "".join(segment.text for segment in transcriber.stream(talks[0].path)) == found[0].text


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["en", "de"])
def test_words_are_within_a_tenth_of_a_second_of_their_sentence(
    transcriber: Transcriber, briefs: list[Talk], place: int
) -> None:
    talk = briefs[place]
    segments = transcriber(talk.path, word_timestamps=True).segments
    words = [word for segment in segments for word in segment.words or ()]
    assert [word.text.strip() for word in words] == talk.text.split()
    starts = [word.start for word in words]
    assert starts == sorted(starts)
    first = np.cumsum([0, *(len(one.text.split()) for one in segments)])[:-1]
    errors = np.abs(np.array([words[i].start for i in first]) - talk.times[:, 0])
    assert np.median(errors) <= NEAR


def test_german_becomes_english(transcriber: Transcriber, briefs: list[Talk]) -> None:
    transcript = transcriber(briefs[1].path, task="translate")
    assert transcript.segments[0].text == " In June Max drives from Geneva to Leipzig for fourteen years."
    assert transcript.language == "de"
    assert np.abs(np.array(spans(transcript)) - briefs[1].times).max() <= NEAR


@pytest.mark.slow
def test_silence_says_nothing(transcriber: Transcriber) -> None:
    noise = np.random.default_rng(2).normal(0, 1e-3, 16000 * 40).astype(np.float32)
    for samples in (np.zeros(16000 * 5, np.float32), noise):
        transcript = transcriber(samples)
        assert transcript.text == ""
        assert not re.search(r"\d", WRITERS["srt"](transcript))
        assert all(one.no_speech_prob > 0.6 for one in transcript.segments)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["srt", pytest.param("vtt", marks=pytest.mark.slow)])
def test_subtitles_of_the_terminal(engine: Path, briefs: list[Talk], format: str) -> None:
    shown = ingot("transcribe", engine, briefs[0].path, "--format", format, "--device", "cpu").stdout
    cue = re.compile(r"((?:\d\d:)?\d\d:\d\d[.,]\d{3}) --> ((?:\d\d:)?\d\d:\d\d[.,]\d{3})\n(.+)")
    cues = cue.findall(shown)
    check(
        [text for *_, text in cues], [(_seconds(start), _seconds(end)) for start, end, _ in cues], briefs[0]
    )


def _seconds(clock: str) -> float:
    parts = clock.replace(",", ".").split(":")
    return sum(float(part) * 60**power for power, part in enumerate(reversed(parts)))


@pytest.mark.slow
def test_over_http(server: Server, briefs: list[Talk], brief_transcripts: list[Transcript]) -> None:
    english, german = briefs
    reported = transcribe(server, german.path.read_bytes(), model=NAME, response_format="verbose_json").json
    assert reported["language"] == "german"
    segments = reported["segments"]
    check([one["text"] for one in segments], [(one["start"], one["end"]) for one in segments], german)
    assert reported["text"] == brief_transcripts[1].text.strip()
    *deltas, done = streamed(server, english.path.read_bytes(), model=NAME)
    assert "".join(one["delta"] for one in deltas) == done["text"] == brief_transcripts[0].text.strip()
    reported = transcribe(server, german.path.read_bytes(), TRANSLATE, model=NAME, response_format="srt")
    assert "In June Max drives from Geneva to Leipzig for fourteen years." in reported.data.decode()


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["en", "de"])
def test_hugging_face_says_the_same(briefs: list[Talk], tmp_path: Path, place: int) -> None:
    """The same weights in fp32, word for word."""
    talk, data = briefs[place], tmp_path / "talk.jsonl"
    data.write_text(json.dumps({"audio": str(talk.path), "text": talk.text, "language": talk.language}))
    shown = ingot("eval", "wer", MODEL, "--data", data, "--against", "hf", "--device", "cpu", "--json")
    assert shown.exit_code == 0, shown.stderr
    reported = json.loads(shown.stdout)
    assert reported["agreement"]["same_tokens"] == reported["agreement"]["answers"] == 1
    assert [side["metrics"]["wer"] <= MOST_WRONG for side in reported["sides"]] == [True, True]
