"""``ingot transcribe``: where transcripts go, what its flags mean, and files that cannot be read."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from ingot.cli import transcribe as verb
from ingot.cli.terminal.field_flags import flag_of
from ingot.errors import RequestError
from ingot.speech.recording_features import Transcript
from ingot.speech.recording_files import transcribe_each
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.subtitles import SubtitleLayout
from ingot.speech.transcriber import Transcriber
from ingot.speech.transcript_writers import WRITERS, written
from tests.audio_files import media
from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config

QUICK = ("--temperature", "0", "--max-new-tokens", "9", "--language", "de", "--device", "cpu")
OPTIONS: dict[str, Any] = {"temperatures": (0.0,), "max_new_tokens": 9, "language": "de"}


@pytest.fixture(scope="module")
def transcriber(whisper: Path) -> Transcriber:
    return Transcriber(whisper, "cpu", max_batch_size=4)


@pytest.fixture(scope="module")
def wanted(transcriber: Transcriber, clips: list[Path]) -> list[Transcript]:
    return [transcriber(clip, **OPTIONS) for clip in clips]


@pytest.mark.parametrize("format", WRITERS)
def test_one_recording_goes_to_stdout(
    whisper: Path, clips: list[Path], wanted: list[Transcript], format: str
) -> None:
    found = ingot("transcribe", whisper, clips[0], "--format", format, *QUICK)
    assert found.exit_code == 0, found.stderr
    assert wanted[0].text
    assert found.stdout == WRITERS[format](wanted[0])


@pytest.mark.parametrize("flags", [(), ("--batch",), ("--batch", "--max-batch-size", "2")])
def test_several_become_files(
    whisper: Path, clips: list[Path], wanted: list[Transcript], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out = tmp_path / "new" / "folder"
    found = ingot("transcribe", whisper, clips[0].parent, "-f", "json", "-o", out, *QUICK, *flags)
    assert (found.exit_code, found.stdout) == (0, "")
    reported = [json.loads((out / f"{clip.stem}.json").read_text()) for clip in clips]
    assert [one["text"] for one in reported] == [one.text for one in wanted]
    assert len({one["text"] for one in reported}) == 3
    assert len(list(out.iterdir())) == 3


def test_without_a_folder_they_lie_here(
    whisper: Path, clips: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ingot("transcribe", whisper, *clips[:2], "-f", "srt", *QUICK).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.srt", "two.srt"]


def test_stdin(whisper: Path, clips: list[Path], wanted: list[Transcript]) -> None:
    found = ingot("transcribe", whisper, "-", *QUICK, stdin=clips[1].read_bytes())
    assert found.stdout == WRITERS["txt"](wanted[1])


@pytest.mark.parametrize("flags", [(), ("--batch",)])
def test_a_bad_file_does_not_lose_the_others(
    whisper: Path, clips: list[Path], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_text("no audio")
    missing = tmp_path / "missing.wav"
    out = tmp_path / "out"
    found = ingot("transcribe", whisper, broken, clips[0], missing, clips[2], "-o", out, *QUICK, *flags)
    assert found.exit_code == 1
    assert f"error: {broken}: this is no audio that can be read" in found.stderr
    assert f"error: {missing}: there is no such audio file" in found.stderr
    assert "2 of 4 recordings failed" in found.stderr
    assert sorted(path.name for path in out.iterdir()) == ["one.txt", "three.txt"]
    assert ingot("transcribe", whisper, broken, *QUICK).exit_code == 1


def test_no_engine_is_loaded_for_files_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.speech.transcriber.Transcriber.__init__", lambda *_, **__: 1 // 0)
    names = [tmp_path / name for name in ("one.wav", "two.wav")]
    found = ingot("transcribe", tmp_path, *names)
    assert found.exit_code == 1
    assert [f"error: {name}: there is no such audio file" in found.stderr for name in names] == [True] * 2
    assert "2 of 2 recordings failed" in found.stderr


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--format", "doc"), "--format: doc; allowed: txt, srt"),
        (("--beam-size", "0"), "beam_size is out of range"),
        (("--temperature", "warm"), "--temperature: warm is not a number"),
        (("--temperature", "3"), "fix: --temperature"),
        (("--no-speech-threshold", "loud"), "--no-speech-threshold: loud is not a number"),
        (("--language", "klingon"), "unknown language"),
        (("--task", "sing"), "unknown task"),
        (("--beam-size", "many"), "--beam-size: many is not a number"),
        (("--patience", "2"), "fix: --patience"),
        (("--clip-timestamps", "5,4"), "fix: --clip-timestamps"),
        (("--max-line-width", "42"), "needs --format srt or vtt; seen: txt"),
        (("--max-line-width", "42", "-f", "srt"), "needs --word-timestamps"),
        (("--highlight-words", "-f", "vtt"), "needs --word-timestamps"),
        (("--max-line-count", "2", "-f", "srt", "--word-timestamps"), "needs --max-line-width"),
        (("--max-words-per-line", "0", "-f", "srt"), "--max-words-per-line"),
    ],
)
def test_misuse_is_reported_before_anything_is_loaded(words: tuple[str, ...], reported: str) -> None:
    found = ingot("transcribe", "no/such/engine", "no.wav", *words)
    assert (found.exit_code, found.stdout) == (2, "")
    assert reported in found.stderr


def test_chunked_and_batch_are_two_things(
    whisper: Path, clips: list[Path], transcriber: Transcriber, tmp_path: Path
) -> None:
    """One is of a recording's stretches, the other of recordings; both together do both."""
    wanted = [transcriber(clip, chunked=True, clip_timestamps=(0, 0.4, 0.6), **OPTIONS) for clip in clips]
    flags = (*QUICK, "--chunked", "--clip-timestamps", "0,0.4,0.6")
    for more in ((), ("--batch",)):
        assert ingot("transcribe", whisper, *clips, "-o", tmp_path, *flags, *more).exit_code == 0
        for clip, one in zip(clips, wanted, strict=True):
            assert (tmp_path / f"{clip.stem}.txt").read_text() == WRITERS["txt"](one)
    refused = ingot("transcribe", whisper, clips[0], *QUICK, "--batched")
    assert (refused.exit_code, "--batched" in refused.stderr) == (2, True)


def test_names_that_meet(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    shutil.copy(clips[0], tmp_path / "one.flac")
    found = ingot("transcribe", whisper, clips[0], tmp_path / "one.flac", "-o", tmp_path, *QUICK)
    assert found.exit_code == 2
    assert "several recordings would become one file" in found.stderr
    assert ingot("transcribe", whisper, tmp_path / "one.flac", "-", *QUICK).exit_code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "the folder has no recordings" in ingot("transcribe", whisper, empty, *QUICK).stderr


def test_a_language_that_the_model_lacks_is_no_files_fault(whisper: Path, clips: list[Path]) -> None:
    found = ingot("transcribe", whisper, *clips, *QUICK[:-4], "--language", "yue", "--device", "cpu")
    assert found.exit_code == 2
    assert found.stderr.count("error:") == 1
    assert "the model does not know this language" in found.stderr


def test_a_model_of_text(clips: list[Path], tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=1)
    found = ingot("transcribe", tmp_path, clips[0], *QUICK)
    assert found.exit_code == 2
    assert "this engine does not take speech" in found.stderr


def test_every_option_has_a_flag_that_says_what_it_does() -> None:
    found = {p.name: p for p in inspect.signature(verb.transcribe).parameters.values()}
    for field in fields(TranscribeOptions):
        (option,) = found[field.name].annotation.__metadata__
        assert option.help, field.name
        assert (option.default or option.param_decls[0]).startswith(flag_of(field.name))
        assert found[field.name].default is None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a transcription, which is not made."""
    found: dict[str, Any] = {}

    def note(transcriber: object, sources: object, together: int, **options: Any) -> Any:
        found.update(options)
        return
        yield

    monkeypatch.setattr("ingot.speech.recording_files.transcribe_each", note)
    return found


def test_what_flags_become(whisper: Path, clips: list[Path], seen: dict[str, Any]) -> None:
    words = "--temperature 0,0.5 --logprob-threshold none --compression-ratio-threshold 3 --no-timestamps"
    words += " --suppress-tokens 1,2 --word-timestamps --beam-size 4 --initial-prompt Hi"
    ingot("transcribe", whisper, clips[0], *words.split(), "--device", "cpu")
    assert seen == {
        "temperatures": (0.0, 0.5), "logprob": None, "compression_ratio": 3.0, "timestamps": False,
        "suppress": (1, 2), "word_timestamps": True, "beam_size": 4, "initial_prompt": "Hi",
        "allow_truncated": False,
    }  # fmt: skip


def test_none_is_a_value_of_each_option_that_may_be_none(
    whisper: Path, clips: list[Path], seen: dict[str, Any]
) -> None:
    names = ("beam_size", "best_of", "patience", "length_penalty", "max_initial_timestamp")
    words = [word for name in names for word in (flag_of(name), "None")]
    ingot("transcribe", whisper, clips[0], *words, "--device", "cpu")
    assert seen == {**dict.fromkeys(names), "allow_truncated": False}


def test_subtitles_are_laid_out(whisper: Path, clips: list[Path], transcriber: Transcriber) -> None:
    wanted = transcriber(clips[0], word_timestamps=True, **OPTIONS)
    flags = ("--word-timestamps", "-f", "srt", "--max-words-per-line", "2", "--highlight-words")
    found = ingot("transcribe", whisper, clips[0], *QUICK, *flags)
    layout = SubtitleLayout(max_words_per_line=2, highlight_words=True)
    assert found.stdout == written(wanted, "srt", layout) != WRITERS["srt"](wanted)


def test_a_model_of_english_alone_says_that_it_does_not_translate(
    transcriber: Transcriber, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = dataclasses.replace(transcriber.vocabulary.tokens, multilingual=False)
    english = dataclasses.replace(transcriber.vocabulary, tokens=tokens)
    monkeypatch.setattr("ingot.speech.window_decoding.Vocabulary.of_model", lambda *_: english)
    monkeypatch.setattr("ingot.speech.transcriber.LLM", lambda *_, **__: transcriber.llm)
    found = ingot("transcribe", "engine.en", clips[0], "--task", "translate")
    assert found.exit_code == 2
    assert "does not translate\n  seen: translate\n" in found.stderr
    assert "fix: --task\n" in found.stderr


def test_files_of_a_folder_that_are_left_out(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    """Are named, and the exit code says it. Transcripts of an earlier run are none of them, nor hidden files;
    a file that is named itself is read whatever its ending.
    """
    folder, out = tmp_path / "talks", tmp_path / "out"
    (folder / "more").mkdir(parents=True)
    shutil.copy(clips[0], folder / "one.WAV")
    sound = soundfile.read(clips[1], dtype="float32")[0]
    (folder / "more" / "two.m4a").write_bytes(media(sound, "ipod", "alac"))
    for name in ("one.txt", "one.srt", "one.json", ".DS_Store"):
        (folder / name).write_text("not a recording")
    found = ingot("transcribe", whisper, folder, "-o", out, *QUICK)
    assert (found.exit_code, "left out" in found.stderr) == (0, False), found.stderr
    assert sorted(path.name for path in out.iterdir()) == ["one.txt", "two.txt"]
    shutil.copy(clips[2], folder / "more" / "three.xyz")
    for flags in ((), ("--batch",)):
        found = ingot("transcribe", whisper, folder, "-o", out, *QUICK, *flags)
        assert found.exit_code == 1
        assert "error: files of the folder are left out" in found.stderr
        assert f"seen: {folder / 'more' / 'three.xyz'}\n" in found.stderr
        assert sorted(path.name for path in out.iterdir()) == ["one.txt", "two.txt"]
    assert ingot("transcribe", whisper, folder / "more" / "three.xyz", *QUICK).exit_code == 0


def test_a_file_that_was_cut_off(whisper: Path, clips: list[Path], tmp_path: Path) -> None:
    """An error that says how to take what is there; a recorder that was killed is heard to the end."""
    path = tmp_path / "cut.wav"
    soundfile.write(path, torch.randn(6 * 16000, generator=torch.Generator().manual_seed(1)) * 0.1, 16000)
    path.write_bytes(path.read_bytes()[: 3 * 32000])
    found = ingot("transcribe", whisper, path, *QUICK)
    assert (found.exit_code, found.stdout) == (1, "")
    assert "cut.wav: the audio ends early" in found.stderr
    assert "3.0 of 6.0 s" in found.stderr
    assert "fix: get the file again, or take what is there (--allow-truncated)" in found.stderr
    found = ingot("transcribe", whisper, path, *QUICK, "--allow-truncated")
    assert found.exit_code == 0
    assert "3.0 s of audio" in found.stderr
    killed = bytearray(clips[2].read_bytes())
    whole = ingot("transcribe", whisper, clips[2], *QUICK)
    killed[4:8] = killed[40:44] = bytes(4)
    found = ingot("transcribe", whisper, "-", *QUICK, stdin=bytes(killed))
    assert (found.exit_code, found.stdout) == (0, whole.stdout)
    assert whole.stdout.strip()


def test_segments_come_before_the_transcript_and_closing_ends_the_work(
    transcriber: Transcriber, clips: list[Path], wanted: list[Transcript]
) -> None:
    reported = list(transcribe_each(transcriber, list(clips), together=3, **OPTIONS))
    for position, one in enumerate(wanted):
        mine = [found for place, found in reported if place == position]
        assert all(isinstance(found, Segment) for found in mine[:-1])
        assert isinstance(mine[-1], Transcript)
        assert [segment.tokens for segment in mine[-1].segments] == [s.tokens for s in one.segments]
        assert (mine[-1].text, mine[-1].segments) == (one.text, mine[:-1])
    begun = transcribe_each(transcriber, [*clips, *clips], together=1, **OPTIONS)
    next(begun)
    begun.close()
    assert transcriber(clips[0], **OPTIONS).text == wanted[0].text
    with pytest.raises(RequestError, match="max_new_tokens"):
        next(transcribe_each(transcriber, list(clips), max_new_tokens=0))


def test_a_bar_in_seconds_of_audio_leaves_stdout_alone(
    whisper: Path, clips: list[Path], wanted: list[Transcript], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    bars = io.StringIO()
    console = Console(file=bars, force_terminal=True, width=100)
    monkeypatch.setattr("ingot.cli.terminal.step_list.stderr", lambda: console)
    found = ingot("transcribe", whisper, clips[2], *QUICK)
    assert found.stdout == WRITERS["txt"](wanted[2])
    assert "/2 s" in bars.getvalue()
    assert "three.wav" in bars.getvalue()


def test_ctrl_c_ends_it(whisper: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.wav"
    soundfile.write(long, 0.1 * torch.randn(200 * 16000, generator=torch.Generator().manual_seed(1)), 16000)
    words = [sys.executable, "-m", "ingot", "transcribe", str(whisper), str(long), *QUICK, "--threads", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    work = subprocess.Popen(words, **pipes)
    assert work.stdout is not None
    assert work.stdout.readline().strip()
    work.send_signal(signal.SIGINT)
    _, reported = work.communicate(timeout=60)
    assert work.returncode == 130
    assert reported.strip().endswith("interrupted")
    assert "Traceback" not in reported
