"""``ingot transcribe``: recordings to text, subtitles and tables."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ingot.cli.options.flags import field_flags, given, set_threads
from ingot.cli.options.limit_flags import Limits
from ingot.cli.options.transcribe_flags import TranscribeFlags, layout_of, transcribe_flags
from ingot.cli.terminal.console import stderr, stdout, write
from ingot.cli.terminal.recordings import STDIN, source_name, source_of, tell_failure, tell_left_out
from ingot.cli.terminal.step_list import parts_shown
from ingot.errors import IngotError, RequestError

if TYPE_CHECKING:
    from ingot.speech.recording_features import Transcript
    from ingot.speech.recording_files import TranscriptEvent
    from ingot.speech.subtitles import SubtitleLayout
    from ingot.speech.transcriber import Transcriber

_FAILED = 1


@field_flags("flags")
@field_flags("limits")
@transcribe_flags
def transcribe(flags: TranscribeFlags, limits: Limits, options: dict[str, Any]) -> None:
    """Transcribe recordings with an engine of Whisper, or translate them to English.

    The text of one recording goes to stdout, segment by segment; several become files beside each other.
    Exit code 0: done; 1: some recordings failed or files of a folder were left out, the others are written;
    2: usage error.
    """
    from ingot.speech.recording_files import recordings

    layout = layout_of(flags, options)
    names, skipped = recordings(flags.files)
    tell_left_out(skipped)
    if len(names) > 1 and STDIN in names:
        raise typer.BadParameter("- is stdin, and stands alone", param_hint="FILE")
    folder = flags.output or (Path() if len(names) > 1 else None)
    if not any(name == STDIN or Path(name).exists() for name in names):
        from ingot.audio.recording_samples import no_such_file

        for name in names:
            tell_failure(name, no_such_file(name))
        if len(names) > 1:
            stderr().print(f"{len(names)} of {len(names)} recordings failed")
        raise typer.Exit(_FAILED)
    written = None
    if folder is not None and not flags.compare:  # named as Whisper's own command line does
        written = [folder / f"{source_name(name, 'stem')}.{flags.format}" for name in names]
        twice = sorted({str(path) for path in written if written.count(path) > 1})
        if twice:
            what, fix = "several recordings would become one file", "--output, one by one"
            raise RequestError(what, seen=twice, field="output", fix=fix)
        folder.mkdir(parents=True, exist_ok=True)
    set_threads(flags.threads)
    if flags.compare is not None:
        from ingot.cli.measure.transcribe_compare import compare

        compare(flags, limits, names, options)
        raise typer.Exit(_FAILED if skipped else 0)
    from ingot.speech.transcriber import Transcriber

    arguments = given(device=flags.device, quant=flags.quant) | limits.arguments()
    transcriber = Transcriber(flags.engine, **arguments)
    work = _Work(names, flags.format, layout, written)
    work.run(transcriber, options | {"allow_truncated": flags.allow_truncated}, batched=flags.batch)
    if work.failed and len(names) > 1:
        stderr().print(f"{work.failed} of {len(names)} recordings failed")
    if work.failed or skipped:
        raise typer.Exit(_FAILED)


@dataclass
class _Work:
    """The transcription of all recordings; ``paths`` None: to stdout."""

    names: list[str]
    format: str
    layout: SubtitleLayout
    paths: list[Path] | None
    failed: int = 0
    audio_seconds: dict[int, float] = field(default_factory=dict)  # seconds, by position

    def run(self, transcriber: Transcriber, options: dict[str, Any], *, batched: bool) -> None:
        """Transcribe all of them; a single one's text is printed as it comes."""
        from ingot.audio.recording_samples import audio_seconds
        from ingot.speech.recording_files import transcribe_each

        sources = [source_of(name) for name in self.names]
        lengths = [audio_seconds(source) for source in sources]
        start = time.perf_counter()
        with ExitStack() as opened:
            progress = None
            if self.paths is not None or not stdout().is_terminal:  # no transcript breaks the bar
                progress = opened.enter_context(parts_shown())(lambda done, total: f"{done}/{total} s")
            events = transcribe_each(transcriber, sources, len(sources) if batched else 1, **options)
            for position, found in opened.enter_context(closing(events)):
                self._take(position, found, lengths)
                if progress is not None:
                    done = round(sum(self.audio_seconds.values()))
                    progress(source_name(self.names[position]), done, round(sum(lengths)))
        if self.audio_seconds:
            audio, seconds = sum(self.audio_seconds.values()), time.perf_counter() - start
            text = f"{audio:.1f} s of audio in {seconds:.2f} s ({audio / seconds:.1f}x)"
            stderr().print(text, style="dim")

    def _take(self, position: int, event: TranscriptEvent, lengths: list[float]) -> None:
        from ingot.speech.segments import Segment

        if isinstance(event, Segment):
            self.audio_seconds[position] = min(event.end, lengths[position])
            if self.paths is None and self.format == "txt" and event.text.strip():
                write(f"{event.text.strip()}\n")
        elif isinstance(event, IngotError):
            self.failed += 1
            lengths[position] = self.audio_seconds.pop(position, 0.0)
            tell_failure(self.names[position], event)
        else:
            self.audio_seconds[position] = event.duration
            self._put(position, event)

    def _put(self, position: int, found: Transcript) -> None:
        from ingot.config.files.atomic_write import atomic_file
        from ingot.speech.transcript_writers import written

        if self.paths is None:
            if self.format != "txt":
                write(written(found, self.format, self.layout))
            return
        with atomic_file(self.paths[position]) as part:
            part.write_text(written(found, self.format, self.layout), encoding="utf-8")
        stderr().print(f"written: {self.paths[position]}", markup=False, style="dim")
