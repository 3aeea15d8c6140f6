"""The tests of the pocket speech model as recordings with a manifest, for ``ingot eval wer`` and ``sweep``.

Files are at 16 kHz; a record of each has its text, its language, and start and end of every sentence in
seconds.

    python -m recipes.whisper.recordings --speech /tmp/speech --test test-unseen --noise --out /tmp/unseen
    ingot eval wer engines/pocket-whisper --data /tmp/unseen/manifest.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import soundfile
import torch

from recipes.whisper.evaluate import first_of_each, tested_windows
from recipes.whisper.render import CLEAN, NOISY, Acoustics, Sound
from recipes.whisper.utterances import RATE, read_shards
from recipes.whisper.vocabulary import SpeechVocabulary
from recipes.whisper.windows import Batch, Plan, Planner


def write_recordings(
    folder: Path, plans: list[Plan], sound: Sound, how: Acoustics, seconds: int, kind: str
) -> Path:
    """Write a file (``kind``: flac, ogg) of every window, without the silence behind its end.

    Returns:
        The manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator, records = torch.Generator().manual_seed(7), []
    for number, plan in enumerate(plans):
        name = f"{plan.language}-{number:03d}.{kind}"
        wave = sound.waves(Batch.of([plan]), seconds * RATE, generator, how)[0, : plan.length]
        soundfile.write(folder / name, wave.cpu().numpy(), RATE)
        times = [[round(start, 3), round(end, 3)] for _, start, end in plan.said]
        text = " ".join(text for text, _, _ in plan.said)
        records.append({"audio": name, "text": text, "language": plan.language, "times": times})
    manifest = folder / "manifest.jsonl"
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    manifest.write_text("".join(lines), encoding="utf-8")
    return manifest


def main() -> None:
    """Parse the command line and write recordings and manifest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--speech", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--model", type=Path, default=Path("models/pocket-whisper"), help="its vocabulary")
    parser.add_argument("--test", choices=("test-seen", "test-unseen"), default="test-unseen")
    parser.add_argument("--together", type=int, default=5, help="sentences of a recording")
    parser.add_argument("--seconds", type=int, default=30, help="of a recording, at most")
    parser.add_argument("--kind", choices=("flac", "ogg"), default="flac")
    parser.add_argument("--most", type=int, help="sentences of a language; all")
    parser.add_argument("--noise", action="store_true", help="in rooms and noise")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    utterances, samples, labels = read_shards(args.speech, args.test)
    planner = Planner(utterances, SpeechVocabulary(args.model), args.seconds)
    plans = tested_windows(first_of_each(utterances, args.most), planner, args.together)
    sound = Sound(samples, labels, torch.device("cpu"))
    how = NOISY if args.noise else CLEAN
    print(write_recordings(args.out, plans, sound, how, args.seconds, args.kind))


if __name__ == "__main__":
    main()
