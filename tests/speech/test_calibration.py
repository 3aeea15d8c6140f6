"""What calibration hears and reads: windows of real recordings, transcripts, or what the model says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from ingot import LLM, Input, Prompt, SamplingParams, build
from ingot.audio.log_mel import RATE, LongLogMel
from ingot.audio.recording_samples import read_audio
from ingot.building.calibration.calibration_cache import cache_path
from ingot.building.calibration.calibration_data import CalibrationData, SampleFile
from ingot.building.calibration.sample_readers import read_samples
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import Assembly, build_config
from ingot.engine.engine_text import read_text_parts
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, RequestError
from ingot.models.speech_tokens import SpeechTokens
from tests.encoders.speech import write_speech
from tests.speech.openai import save_openai

CPU = torch.device("cpu")
MELS, POSITIONS = 8, 100  # a window is 2 seconds
FRAMES = 2 * POSITIONS
STATIC = QuantConfig("w8a8", activations="static")
NAMES = SpeechTokens.of_vocabulary(51865)
TASK = [NAMES.transcribe, NAMES.no_timestamps]


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of many languages, with the published tokenizer and random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_speech(folder, 3, vocab_size=51865, max_source_positions=POSITIONS)
    shutil.copy(data / "tokenizers" / "whisper" / "multilingual.tiktoken", folder)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, "cpu")


@pytest.fixture
def clip(data: Path, tmp_path: Path) -> Path:
    """The first second and a half of a real recording."""
    samples = read_audio(data / "audio" / "jfk.flac")[: 3 * RATE // 2]
    soundfile.write(tmp_path / "clip.wav", samples.numpy(), RATE)
    return tmp_path / "clip.wav"


def read(checkpoint: Path, path: Path, count: int = 128, length: int = 24) -> CalibrationData:
    with open_checkpoint(checkpoint) as source:
        config = build_config(source, "fp32", 1, length, None)
        assembly = Assembly.of(source, config, STATIC)
        return read_samples(SampleFile(path, count, assembly, source, read_text_parts(source), CPU))


def write(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "spoken.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def greedy(llm: LLM, features: torch.Tensor, ids: list[int], count: int) -> list[int]:
    """The engine's likeliest tokens, without a transcript's rules."""
    params = SamplingParams(max_new_tokens=count, stop_token_ids=(NAMES.end,), ignore_eos=True)
    return llm.generate(Prompt([Input(features), ids]), params)[0].token_ids


def test_a_transcript_is_read_behind_its_frame(checkpoint: Path, llm: LLM, clip: Path) -> None:
    text = "And so my fellow Americans"
    found = read(checkpoint, write(clip.parent, {"audio": clip.name, "text": text, "language": "German"}))
    assert llm.tokenizer is not None
    words = llm.tokenizer.encode_parts([f" {text}"])
    assert found.samples == ((NAMES.start, NAMES.languages["de"], *TASK, *words, NAMES.end),)
    transcribed = LongLogMel(read_audio(clip), MELS, CPU)
    exact = transcribed.window(0, transcribed.num_frames, FRAMES).features
    assert not exact[:, transcribed.num_frames :].any()  # as where it is transcribed
    assert torch.equal(found.features[0], exact)
    short = read(checkpoint, clip.parent / "spoken.jsonl", length=6)
    assert short.samples == (found.samples[0][:6],)


def test_without_a_transcript_it_is_what_the_model_says(checkpoint: Path, llm: LLM, clip: Path) -> None:
    """In the language that the model hears; several windows at once say what each says alone."""
    silent, text = {"audio": clip.name, "language": "fr"}, {"audio": clip.name, "text": "And so"}
    found = read(checkpoint, write(clip.parent, *[silent, text] * 5))
    features = found.features[0]
    codes = list(NAMES.languages.values())
    row = llm.logits(Prompt([Input(features), [NAMES.start]]))[0]
    transcribed = codes[int(row[codes].argmax())]
    assert {ids[:4] for ids in found.samples[1::2]} == {(NAMES.start, transcribed, *TASK)}
    frame = [NAMES.start, NAMES.languages["fr"], *TASK]
    said = greedy(llm, features, frame, 24 - len(frame))
    assert len(said) > 4
    assert set(found.samples[::2]) == {(*frame, *said, NAMES.end)[:24]}


def test_windows_of_long_recordings(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Whole ones, spread over all; the transcript is of no window."""
    long = shutil.copy(data / "audio" / "jfk.flac", tmp_path)  # 11 seconds
    path = write(tmp_path, {"audio": "jfk.flac", "text": "And so my fellow Americans", "language": "en"})
    found = read(checkpoint, path, length=6)
    mel = LongLogMel(read_audio(long), MELS, CPU)
    assert len(found.features) == 5
    assert torch.equal(found.features[3], mel.window(3 * FRAMES, 4 * FRAMES).features)
    assert len(set(found.samples)) > 1  # its own words
    fewer = read(checkpoint, path, count=2, length=6)
    assert fewer.samples == (found.samples[0], found.samples[2])


def test_folders(checkpoint: Path, data: Path, clip: Path, tmp_path: Path) -> None:
    """Of recordings alone, in LibriSpeech's layout, and one file."""
    cards = read(checkpoint, data / "audio" / "cards", count=3, length=5)
    assert (cards.records, len(cards.samples)) == (5, 3)
    books = tmp_path / "books" / "1" / "2"
    books.mkdir(parents=True)
    for number in range(2):
        soundfile.write(books / f"1-2-{number}.flac", read_audio(clip).numpy(), RATE)
    (books / "1-2.trans.txt").write_text("1-2-0 AND SO\n1-2-1 MY FELLOW\n")
    found = read(checkpoint, tmp_path / "books")
    assert [ids[1] for ids in found.samples] == [NAMES.languages["en"]] * 2
    assert found.samples[0] != found.samples[1]
    assert torch.equal(read(checkpoint, clip, length=5).features[0], found.features[0])


def test_a_build_on_real_speech(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    given = {"device": "cpu", "proof": False, "max_seq_len": 8, "calib_samples": 3}
    build(checkpoint, engine, quant=STATIC, calib=data / "audio" / "jfk.flac", **given)
    reported = Manifest.read(engine).calibration
    assert reported is not None
    assert (reported.samples, reported.tokens, reported.length) == (3, 24, 8)
    assert bool(
        LLM(engine, "cpu").logits(Prompt([Input(torch.randn(MELS, FRAMES)), [NAMES.start]])).isfinite().all()
    )


@pytest.mark.parametrize(
    ("record", "reported"),
    [
        ({"text": "nothing to hear"}, r"1: it names no audio, and this is a speech model"),
        ({"audio": "none.wav"}, r"no such audio file.*none\.wav"),
        ({"audio": "spoken.jsonl"}, r"no audio that can be read"),
        ({"audio": "clip.wav", "text": " "}, r"text is missing or empty"),
        ({"audio": "clip.wav", "language": "Klingon"}, r"unknown language"),
        ({"audio": "clip.wav", "token_ids": []}, r"no tokens"),
        ({"audio": "clip.wav", "token_ids": [-1]}, r"not a list of token ids"),
        ({"audio": "clip.wav", "token_ids": [60000]}, r"outside the vocabulary"),
    ],
)
def test_records_that_are_no_samples(
    checkpoint: Path, clip: Path, record: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    path = write(clip.parent, record)
    with pytest.raises(ConfigError, match=reported):
        build(checkpoint, tmp_path / "engine", quant=STATIC, calib=path, device="cpu", max_seq_len=24)
    assert not (tmp_path / "engine").exists()


def test_refusals(checkpoint: Path, whisper: Path, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no records"):
        read(checkpoint, tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"needs calibration data.*manifest or folder of recordings"):
        build(checkpoint, tmp_path / "engine", quant=STATIC, device="cpu")
    with pytest.raises(ConfigError, match="a transcript needs a tokenizer"):
        read(whisper, write(clip.parent, {"audio": clip.name, "text": "And so", "language": "en"}))
    (tmp_path / "cut.wav").write_bytes(clip.read_bytes()[:9000])
    with pytest.raises(RequestError, match="ends early"):
        read(checkpoint, tmp_path / "cut.wav")


def test_openai_s_file(data: Path, clip: Path, tmp_path: Path) -> None:
    """With the tokenizer beside it; its recordings' ranges are kept."""
    model = write_speech(tmp_path / "model", 4, vocab_size=51864, encoder_ffn_dim=128, decoder_ffn_dim=128)
    file = save_openai(model, tmp_path / "tiny.en.pt")
    shutil.copy(data / "tokenizers" / "whisper" / "gpt2.tiktoken", tmp_path)
    path = write(clip.parent, {"audio": clip.name}, {"audio": clip.name})
    given = {"device": "cpu", "proof": False, "max_seq_len": 12}
    engine = build(file, tmp_path / "engine", quant=STATIC, calib=path, **given)
    reported = Manifest.read(engine).calibration
    assert reported is not None
    assert reported.samples == 2
    assert cache_path(engine).is_file()
