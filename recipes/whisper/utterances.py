"""Spoken sentences with the times of their words and phonemes, in shards on disk.

Shards hold 16 kHz int16 samples and a phoneme label per 20 ms. Every utterance is a sentence of one speaker
at one speed; some voices are held out.

    python -m recipes.whisper.utterances --out /tmp/speech --hours 60 --processes 16
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from recipes.whisper.actions import Language
from recipes.whisper.espeak import Espeak, Spoken
from recipes.whisper.sentences import LANGUAGES, Pair, training_sentences, unseen_sentences

RATE = 16_000
HOP = 320  # samples of a label, and of a step of timestamps
PHONES = 128  # labels: 0 is silence
CHUNK = 400  # utterances of a shard
ACCENTS: dict[Language, tuple[str, ...]] = {
    "en": ("en-us", "en-us", "en", "en", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc", "en-gb-x-gbcwmd"),
    "de": ("de",),
}
SEEN = (
    *(
        "m1",
        "m2",
        "m3",
        "m5",
        "m7",
        "m8",
        "f1",
        "f2",
        "f3",
        "f5",
        "Alex",
        "Alicia",
        "Andrea",
        "Andy",
        "Denis",
    ),
    *(
        "Diogo",
        "Gene",
        "Gene2",
        "Henrique",
        "Hugo",
        "Jacky",
        "Lee",
        "Marco",
        "Mario",
        "Michael",
        "Mike",
        "adam",
    ),
    *(
        "anika",
        "antonio",
        "aunty",
        "belinda",
        "benjamin",
        "boris",
        "caleb",
        "ed",
        "edward",
        "grandma",
        "grandpa",
    ),
    *("ian", "iven", "iven2", "iven4", "john", "kaukovalta", "klatt", "klatt2", "klatt4", "linda", "marcelo"),
    *("max", "michel", "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert", "sandro"),
    *("shelby", "steph", "steph2", "travis", "victor", "zac", "Reed", "Tweaky", "Annie", "announcer"),
)
UNSEEN = ("m4", "m6", "f4", "david")  # never in training


@dataclass(frozen=True)
class Utterance:
    """One sentence as it was spoken.

    Attributes:
        other: its translation.
        words: (text, first sample, last sample) of each word with its punctuation; those of a word that
            espeak gave no time are -1.
        samples: how many.
        offset: of its first sample in all samples; it is a multiple of ``HOP``.
    """

    language: Language
    text: str
    other: str
    voice: str
    words: tuple[tuple[str, int, int], ...]
    samples: int
    offset: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last sample of speech."""
        return self.words[0][1], self.words[-1][2]


Recorded = tuple[Utterance, np.ndarray, np.ndarray]


def speak(
    espeak: Espeak,
    rng: random.Random,
    pair: Pair,
    language: Language,
    variants: Sequence[str],
    shift: float = 1.0,
) -> Recorded:
    """An utterance, its samples (int16 [N], N a multiple of ``HOP``) and its labels (uint8 [N / HOP]).

    ``shift``: the recording is played so many times as fast, which moves pitch and formants: another throat.
    """
    text, other = (pair.en, pair.de) if language == "en" else (pair.de, pair.en)
    voice = f"{rng.choice(ACCENTS[language])}+{rng.choice(variants)}"
    spoken = espeak.speak(text, voice, rng.randint(120, 210), rng.randint(25, 75), rng.randint(25, 75))
    rate = round(spoken.rate * shift / 50) * 50
    ratio = RATE / rate
    phonemes = [(name.strip("ˈˌ"), round(at * ratio)) for name, at in spoken.phonemes]
    words = _words(text, spoken, phonemes, ratio)
    last = next(i for i in range(len(phonemes) - 1, -1, -1) if phonemes[i][0])
    length = -(-(phonemes[last + 1][1] if last + 1 < len(phonemes) else 10**9) // HOP) * HOP
    samples = resampled(spoken.samples, rate)
    length = min(length, len(samples) // HOP * HOP)
    found = Utterance(language, text, other, voice, words, length)
    return found, samples[:length], _labels(phonemes, length)


def _words(
    text: str, spoken: Spoken, phonemes: Sequence[tuple[str, int]], ratio: float
) -> tuple[tuple[str, int, int], ...]:
    """Words end where the next begins, or where a pause does behind their last phoneme."""
    starts, position = [], 0
    for word in text.split():
        at = text.index(word, position)
        position = at + len(word)
        events = [sample for character, sample in spoken.words if at <= character < position]
        starts.append(round(events[0] * ratio) if events else -1)
    words = text.split()
    starts[0] = next(at for name, at in phonemes if name)
    final = max(at for _, at in phonemes)
    ends = []
    for index, start in enumerate(starts):
        following = next((at for at in starts[index + 1 :] if at >= 0), final)
        inside = [(name, at) for name, at in phonemes if start <= at < following]
        while inside and not inside[-1][0]:
            following = inside.pop()[1]
        ends.append(-1 if start < 0 else following)
    ends[-1] = ends[-1] if ends[-1] >= 0 else final
    return tuple(zip(words, starts, ends, strict=True))


def _labels(phonemes: Sequence[tuple[str, int]], length: int) -> np.ndarray:
    """The phoneme in the middle of each 20 ms; names become numbers by a hash."""
    labels = np.zeros(length // HOP, np.uint8)
    middles = np.arange(length // HOP) * HOP + HOP // 2
    for (name, start), (_, end) in zip(phonemes, [*phonemes[1:], ("", length)], strict=True):
        number = 1 + zlib.crc32(name.encode()) % (PHONES - 1) if name else 0
        labels[np.searchsorted(middles, start) : np.searchsorted(middles, end)] = number
    return labels


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """int16 [N] at ``rate`` (a multiple of 50) → int16 at 16 kHz, by its spectrum."""
    block = rate // 50
    count = -(-len(samples) // block) + 1
    padded = np.zeros(count * block, np.float32)
    padded[: len(samples)] = samples
    length = count * RATE // 50
    spectrum = np.fft.rfft(padded)[: length // 2 + 1]
    found = np.fft.irfft(spectrum, length) * (length / len(padded))
    return np.clip(np.round(found), -32768, 32767).astype(np.int16)


def write_shard(path: Path, utterances: Sequence[Recorded]) -> float:
    """Write samples, labels and what was said; returns the hours."""
    np.save(path.with_suffix(".samples.npy"), np.concatenate([samples for _, samples, _ in utterances]))
    np.save(path.with_suffix(".labels.npy"), np.concatenate([labels for _, _, labels in utterances]))
    path.with_suffix(".json").write_text(json.dumps([asdict(one) for one, _, _ in utterances]))
    return sum(one.samples for one, _, _ in utterances) / RATE / 3600


def read_shards(folder: Path, prefix: str) -> tuple[list[Utterance], np.ndarray, np.ndarray]:
    """Utterances of all shards whose names begin with ``prefix``, samples and labels."""
    paths = sorted(folder.glob(f"{prefix}*.json"))
    if not paths:
        raise FileNotFoundError(f"no shard {prefix}* in {folder}; make them with recipes.whisper.utterances")
    found: list[Utterance] = []
    offset = 0
    for path in paths:
        for record in json.loads(path.read_text()):
            words = tuple((word, start, end) for word, start, end in record.pop("words"))
            found.append(Utterance(**{**record, "offset": offset}, words=words))
            offset += found[-1].samples
    samples = [np.load(path.with_suffix(".samples.npy")) for path in paths]
    labels = [np.load(path.with_suffix(".labels.npy")) for path in paths]
    return found, np.concatenate(samples), np.concatenate(labels)


_espeak = functools.cache(Espeak)  # once in each process


def _training_shard(job: tuple[Path, int, int]) -> float:
    folder, seed, count = job
    rng, espeak = random.Random(f"voice {seed}"), _espeak()
    pairs = islice(training_sentences(seed), count)
    said = []
    for pair in pairs:
        shift = rng.uniform(0.88, 1.15) if rng.random() < 0.6 else 1.0
        said.append(speak(espeak, rng, pair, rng.choice(LANGUAGES), SEEN, shift))
    return write_shard(folder / f"train-{seed:05d}", said)


def _test_shard(job: tuple[Path, str, tuple[str, ...]]) -> float:
    """The test sentences once, by ``variants``."""
    folder, name, variants = job
    rng, espeak = random.Random(f"test {name}"), _espeak()
    said = []
    for language in LANGUAGES:
        for text in unseen_sentences(language):
            pair = Pair(text, "") if language == "en" else Pair("", text)
            said.append(speak(espeak, rng, pair, language, variants))
    return write_shard(folder / name, said)


def make_utterances(folder: Path, hours: float, processes: int) -> float:
    """Write training shards of about ``hours``, and both tests'; returns the hours of training speech."""
    folder.mkdir(parents=True, exist_ok=True)
    mean_seconds = 3.65
    shards = max(1, round(hours * 3600 / mean_seconds / CHUNK))
    jobs = [(folder, seed, CHUNK) for seed in range(1, shards + 1)]
    with get_context("fork").Pool(processes) as pool:
        tests = pool.map_async(_test_shard, [(folder, "test-seen", SEEN), (folder, "test-unseen", UNSEEN)])
        made = sum(pool.imap_unordered(_training_shard, jobs))
        tests.get()
    return made


def main() -> None:
    """Parse the command line and write the shards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=60)
    parser.add_argument("--processes", type=int, default=16)
    args = parser.parse_args()
    start = time.perf_counter()
    hours = make_utterances(args.out, args.hours, args.processes)
    print(f"{hours:.1f} h of speech in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
