"""The recipe of the pocket speech model, in small: what is held out stays out, and speech, windows, training
and export fit together.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from recipes.whisper.actions import number_word
from recipes.whisper.espeak import HINT, Espeak, available
from recipes.whisper.evaluate import load_exported, read_times, word_errors
from recipes.whisper.export import export, generation_config
from recipes.whisper.model import PocketWhisper, Shape
from recipes.whisper.render import CLEAN, NOISY, Sound
from recipes.whisper.sentences import (
    LANGUAGES,
    held_out_runs,
    runs,
    training_sentences,
    unseen_sentences,
    vocabulary,
    words,
)
from recipes.whisper.train import Losses, Run, TrainOptions, rate_at
from recipes.whisper.utterances import HOP, PHONES, RATE, SEEN, UNSEEN, Utterance, resampled, speak
from recipes.whisper.vocabulary import SpeechVocabulary, write_vocabulary
from recipes.whisper.windows import IGNORE, Batch, Plan, Planner

TINY = Shape(vocab=2100, size=32, heads=2, inner=48, encoder_layers=2)
needs_espeak = pytest.mark.skipif(not available(), reason=f"espeak-ng is not installed: {HINT}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(found, sentences=600, ranks=TINY.vocab - 1511)
    return found


@pytest.fixture(scope="module")
def names(folder: Path) -> SpeechVocabulary:
    return SpeechVocabulary(folder)


def _said() -> tuple[list[Utterance], np.ndarray, np.ndarray]:
    """Tones in place of speech: a word of 0.4 s at a pitch of its own."""
    rng, found, samples, labels, offset = random.Random(3), [], [], [], 0
    for index, pair in enumerate(islice(training_sentences(5), 12)):
        language = LANGUAGES[index % 2]
        text, other = (pair.en, pair.de) if language == "en" else (pair.de, pair.en)
        parts = text.split()
        tones = [np.sin(np.arange(6400) * rng.uniform(0.05, 1.5)) * 8000 for _ in parts]
        samples.append(np.concatenate(tones).astype(np.int16))
        labels.append(np.repeat(np.arange(1, len(parts) + 1), 20).astype(np.uint8))
        times = tuple((word, 6400 * i, 6400 * (i + 1)) for i, word in enumerate(parts))
        found.append(Utterance(language, text, other, "tone", times, len(samples[-1]), offset))
        offset += len(samples[-1])
    return found, np.concatenate(samples), np.concatenate(labels)


def test_nothing_of_the_test_is_trained_on() -> None:
    held_out = held_out_runs()
    tested = {text for language in LANGUAGES for text in unseen_sentences(language)}
    assert len(tested) == 500
    assert min(len(runs(text)) for text in tested) >= 1
    for pair in islice(training_sentences(7), 1500):
        for text in pair:
            assert text not in tested
            assert held_out.isdisjoint(runs(text))
    assert not set(SEEN) & set(UNSEEN)


def test_words_of_the_test_are_trained_on_and_are_more_than_2000() -> None:
    known = vocabulary(8000)
    assert len(known["en"]) > 800
    assert len(known["de"]) > 1500
    assert len(known["en"] | known["de"]) >= 2000
    tested = [word for language in LANGUAGES for text in unseen_sentences(language) for word in words(text)]
    everything = known["en"] | known["de"]
    assert sum(word in everything for word in tested) / len(tested) > 0.99


@pytest.mark.parametrize(
    ("value", "en", "de"),
    [
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (21, "twenty one", "einundzwanzig"),
        (90, "ninety", "neunzig"),
        (100, "one hundred", "hundert"),
        (347, "three hundred forty seven", "dreihundertsiebenundvierzig"),
    ],
)
def test_numbers(value: int, en: str, de: str) -> None:
    assert (number_word(value, "en"), number_word(value, "de")) == (en, de)


def test_vocabulary_is_as_ingot_reads_it(folder: Path, names: SpeechVocabulary) -> None:
    reported = generation_config(TINY, names, folder)
    assert names.size == TINY.vocab
    assert reported["no_timestamps_token_id"] + 1501 == TINY.vocab - 1
    assert names.time(0.0) == reported["no_timestamps_token_id"] + 1
    assert names.time(30.0) == TINY.vocab - 1
    space = names.word("")
    assert not set(space) & set(reported["suppress_tokens"])  # a space alone begins words that are spelled
    for text in unseen_sentences("de")[:20]:
        ids = [token for word in text.split() for token in names.word(word)]
        assert names.text(ids) == " " + text
        assert not set(ids) & set(reported["suppress_tokens"])


def test_plans_have_the_spoken_text(names: SpeechVocabulary) -> None:
    utterances, *_ = _said()
    planner, rng = Planner(utterances, names, 30), random.Random(4)
    kinds = set()
    for _ in range(300):
        plan = planner.plan(rng)
        start = plan.inputs.index(names.start)
        body = [token for token in plan.targets[start + 1 :] if token != IGNORE]
        assert len(plan.inputs) <= 448
        assert plan.targets[:start] == [IGNORE] * start
        kinds.add((bool(start), bool(plan.pieces), names.no_timestamps in plan.inputs, body[0] > names.end))
        if not plan.pieces:
            assert plan.targets[start] == names.no_speech
            continue
        assert plan.targets[start] == names.languages[plan.language]
        assert body[-1] == names.end
        assert names.text(body) == "".join(" " + text for text, _, _ in plan.said)
        if names.no_timestamps not in plan.inputs:
            found = read_times(body[:-1], names)
            truth = [times for _, *times in plan.said]
            assert np.abs(np.array(found) - np.array(truth)).max() <= 0.0101
    assert len(kinds) >= 6


def test_short_windows_lie_anywhere_in_thirty_seconds(names: SpeechVocabulary) -> None:
    planner, rng = Planner(_said()[0], names, 10), random.Random(3)
    plans = [planner.plan(rng) for _ in range(300)]
    starts = Batch.of(plans).starts
    assert starts.min() < 50
    assert 950 < starts.max() <= 1000
    for plan in plans:
        zero, last = names.time(plan.start / 50), names.time(plan.start / 50 + 10)
        assert all(zero <= token <= last for token in plan.targets if token > names.no_timestamps)
        if plan.said and names.no_timestamps not in plan.inputs:
            found = np.array(read_times([t for t in plan.targets if t != IGNORE][1:-1], names))
            truth = [times for _, *times in plan.said]
            assert np.abs(found - plan.start / 50 - np.array(truth)).max() <= 0.0101


def test_a_window_further_on_has_later_positions() -> None:
    torch.manual_seed(5)
    encoder = PocketWhisper(TINY).encoder
    features = torch.randn(2, 80, 40)
    both = encoder(features, torch.tensor([0, 9]))
    torch.testing.assert_close(both[0], encoder(features)[0])
    encoder.embed_positions.weight[:20] = encoder.embed_positions.weight[9:29].clone()
    torch.testing.assert_close(both[1], encoder(features)[1])


def test_looks_are_where_words_are(names: SpeechVocabulary) -> None:
    utterances, samples, labels = _said()
    plan = Planner(utterances, names, 30).whole(utterances[::2][:2])
    transcribed = Sound(samples, labels, torch.device("cpu")).render(
        Batch.of([plan]), 30 * RATE, torch.Generator().manual_seed(1), CLEAN
    )
    at = 3  # behind the prompt and the first timestamp
    for number, (word, _, _) in enumerate(utterances[0].words, 1):  # a tone's label is its word's number
        for token in names.word(word):
            begin, end = plan.looks[at]
            assert plan.targets[at] == token
            assert set(transcribed.labels[0, begin + 2 : end - 2].tolist()) == {number}
            at += 1
    assert plan.targets[at] > names.no_timestamps


@pytest.mark.parametrize("how", [CLEAN, NOISY], ids=["clean", "noisy"])
def test_features_are_finite_and_the_rest_is_zero_or_silent(names: SpeechVocabulary, how: object) -> None:
    utterances, samples, labels = _said()
    plans = [Planner(utterances, names, 10).whole(utterances[::2][:1]), Plan(length=16000)]
    plans[1].inputs, plans[1].targets, plans[1].looks = [1], [1], [(-1, -1)]
    sound = Sound(samples, labels, torch.device("cpu"))
    transcribed = sound.render(Batch.of(plans), 10 * RATE, torch.Generator().manual_seed(2), how)  # type: ignore[arg-type]
    assert transcribed.features.shape == (2, 80, 1000)
    assert transcribed.labels.shape == (2, 500)
    assert transcribed.features.isfinite().all()
    assert transcribed.labels.max() < PHONES
    assert not transcribed.labels[1].any()
    speech = slice(40, 40 + 10 * len(utterances[0].words))
    behind = transcribed.features[0, :, plans[0].length // 160 + 3 :]
    assert transcribed.features[0, :, speech].amax() > behind.amax()
    assert behind.std(1).max() < 1e-3


def test_resampling_keeps_a_tone() -> None:
    time = np.arange(22050) / 22050
    found = resampled((np.sin(2 * np.pi * 440 * time) * 10000).astype(np.int16), 22050)[1600:14400]
    wanted = np.sin(2 * np.pi * 440 * np.arange(1600, 14400) / 16000) * 10000
    assert np.abs(found - wanted).max() < 50


def test_word_errors() -> None:
    assert word_errors("Anna buys a lamp.", "anna buys lamp") == (1, 4)
    assert word_errors("one two", "one three four") == (2, 2)
    assert word_errors("one", "") == (1, 1)


def _run(folder: Path, names: SpeechVocabulary, shape: Shape = TINY) -> tuple[Run, Batch, Sound]:
    utterances, samples, labels = _said()
    torch.manual_seed(0)
    planner, rng = Planner(utterances, names, 6), random.Random(2)
    batch = Batch.of([planner.plan(rng) for _ in range(4)])
    options = TrainOptions(minutes=1, warmup=0.0, peak_rate=4e-3, workers=0)
    return Run(folder, PocketWhisper(shape), options), batch, Sound(samples, labels, torch.device("cpu"))


@pytest.mark.slow
def test_training_learns_and_goes_on_where_it_stopped(names: SpeechVocabulary, tmp_path: Path) -> None:
    run, batch, sound = _run(tmp_path, names)
    transcribed = sound.render(batch, 6 * RATE, torch.Generator().manual_seed(1), CLEAN)
    losses = Losses(run.options)
    first = run.update(batch, transcribed, losses)
    for _ in range(5):
        last = run.update(batch, transcribed, losses)
    assert (last < first).all()
    run.seconds = 12.0
    run.save()
    again, *_ = _run(tmp_path, names)
    assert again.resume()
    assert (again.step, again.seconds) == (6, 12.0)
    assert all(path.stat().st_size < 16 * 2**20 for path in tmp_path.iterdir())
    torch.testing.assert_close(
        again.update(batch, transcribed, losses), run.update(batch, transcribed, losses)
    )
    for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_rate_warms_up_and_falls() -> None:
    options = TrainOptions(warmup=0.1, peak_rate=1.0)
    rates = [rate_at(progress, options) for progress in (0.05, 0.1, 0.5, 1.0)]
    assert rates[0] == pytest.approx(0.5)
    assert rates[1] == pytest.approx(1.0)
    assert rates[3] == pytest.approx(0.01)
    assert 0.01 < rates[2] < 1


def test_export_is_what_hugging_face_computes(folder: Path, names: SpeechVocabulary, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = PocketWhisper(TINY)
    size = export(model.state_dict(), TINY, folder, tmp_path)
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    ours = load_exported(tmp_path).eval()
    theirs = WhisperForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    features, ids = torch.randn(1, 80, 3000), torch.randint(0, TINY.vocab, (1, 9))
    with torch.no_grad():
        wanted = theirs(input_features=features, decoder_input_ids=ids).logits
        found = ours(features, ids).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        prompt = [names.start, names.languages["de"], names.tasks["transcribe"]]
        said = ours.generate(features, prompt, names.end, 6, names.no_timestamps + 1)[0]
    assert said
    assert said[0] > names.no_timestamps


def test_shipped_shape_fits_8_mb() -> None:
    kept = {
        name: tensor for name, tensor in PocketWhisper(Shape()).state_dict().items() if "phones" not in name
    }
    assert 2 * sum(tensor.numel() for tensor in kept.values()) + 230_000 < 8_000_000


@needs_espeak
def test_espeak_gives_the_times_of_words() -> None:
    espeak, rng = Espeak(), random.Random(5)
    for index, pair in enumerate(islice(training_sentences(3), 12)):
        one, samples, labels = speak(espeak, rng, pair, LANGUAGES[index % 2], SEEN)
        assert len(samples) == one.samples == len(labels) * HOP
        loud = np.sqrt(np.square(samples.astype(float)).reshape(-1, 160).mean(1))
        transcribed = np.flatnonzero(loud > 0.03 * loud.max()) * 160
        assert abs(transcribed[0] - one.bounds[0]) < 0.1 * RATE
        assert abs(transcribed[-1] + 160 - one.bounds[1]) < 0.2 * RATE
        starts = [start for _, start, _ in one.words if start >= 0]
        assert starts == sorted(starts)
        assert len(starts) >= len(one.words) - 1
        assert all(end > start for _, start, end in one.words if start >= 0)
    with pytest.raises(ValueError, match="has no voice"):
        espeak.speak("Hello", "none+m1", 150, 50)
