"""Word error rates and timestamp errors of a pocket speech model on its two tests.

One test has sentences that training never saw, the other the same by voices that it never had; each is
transcribed clean and in noise, one sentence per window and several.

    python -m recipes.whisper.evaluate --model models/pocket-whisper --speech /tmp/speech
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from recipes.whisper.model import PocketWhisper, Shape
from recipes.whisper.render import CLEAN, NOISY, Acoustics, Sound
from recipes.whisper.sentences import LANGUAGES, words
from recipes.whisper.utterances import RATE, Utterance, read_shards
from recipes.whisper.vocabulary import SpeechVocabulary
from recipes.whisper.windows import Batch, Plan, Planner

MOST = 224  # tokens of a window
GOOD_SECONDS = 0.1
SILENT = 0.6  # a transcriber's threshold
NOISE_ALONE = replace(NOISY, babble=0.0)  # babble is speech
_ROWS = 50
_TOGETHER = 5  # sentences of a long window


def word_errors(reference: str, said: str) -> tuple[int, int]:
    """Substitutions, insertions and deletions, and words of the reference."""
    wanted, found = words(reference), words(said)
    row = list(range(len(found) + 1))
    for index, word in enumerate(wanted):
        before, row[0] = row[0], index + 1
        for column, other in enumerate(found, 1):
            best = min(before + (word != other), row[column] + 1, row[column - 1] + 1)
            before, row[column] = row[column], best
    return row[-1], len(wanted)


def read_times(ids: Sequence[int], vocabulary: SpeechVocabulary) -> list[tuple[float, float]]:
    """Start and end (seconds) of each segment that has both."""
    zero, found, start = vocabulary.no_timestamps + 1, [], None
    text = False
    for token in ids:
        if token < zero:
            text = True
        elif start is None or not text:
            start, text = (token - zero) / 50, False
        else:
            found.append((start, (token - zero) / 50))
            start, text = None, False
    return found


def tested_windows(utterances: Sequence[Utterance], planner: Planner, together: int) -> list[Plan]:
    """Windows of ``together`` utterances of one language in a row; what does not fit is left out."""
    plans = []
    for language in LANGUAGES:
        chosen = [one for one in utterances if one.language == language]
        for first in range(0, len(chosen), together):
            group = chosen[first : first + together]
            while sum(one.samples + 9600 for one in group) > planner.length - 2 * RATE:
                group = group[:-1]
            plans.append(planner.whole(group))
    return plans


def first_of_each(utterances: Sequence[Utterance], most: int | None) -> list[Utterance]:
    """At most so many of each language."""
    return [u for name in LANGUAGES for u in [u for u in utterances if u.language == name][:most]]


def scored(
    model: PocketWhisper, plans: Sequence[Plan], sound: Sound, vocabulary: SpeechVocabulary, how: Acoustics
) -> dict[str, Any]:
    """WER in percent by language, share of segments within ``GOOD_SECONDS``, and errors of their times."""
    counts = {"en": [0, 0], "de": [0, 0]}
    errors: list[float] = []
    matched = 0
    failures: list[dict[str, str]] = []
    generator = torch.Generator().manual_seed(7)
    for language in LANGUAGES:
        mine = [plan for plan in plans if plan.language == language]
        prompt = [vocabulary.start, vocabulary.languages[language], vocabulary.tasks["transcribe"]]
        for first in range(0, len(mine), _ROWS):
            rows = mine[first : first + _ROWS]
            features = sound.render(Batch.of(rows), 30 * RATE, generator, how).features
            answers = model.generate(features, prompt, vocabulary.end, MOST, vocabulary.no_timestamps + 1)
            for plan, ids in zip(rows, answers, strict=True):
                wanted, said = " ".join(text for text, _, _ in plan.said), vocabulary.text(ids)
                wrong, total = word_errors(wanted, said)
                counts[language][0] += wrong
                counts[language][1] += total
                if wrong and len(failures) < 6:
                    failures.append({"wanted": wanted, "said": said})
                times = read_times(ids, vocabulary)
                if len(times) == len(plan.said):
                    matched += 1
                    for (_, *truth), found in zip(plan.said, times, strict=True):
                        errors += [abs(a - b) for a, b in zip(truth, found, strict=True)]
    wrong, total = (sum(values) for values in zip(*counts.values(), strict=True))
    return {
        "wer": round(100 * wrong / total, 2),
        **{f"wer_{name}": round(100 * a / max(b, 1), 2) for name, (a, b) in counts.items()},
        "words": total,
        "windows_with_all_segments": round(matched / len(plans), 4),
        "times_within_100_ms": round(float(np.mean(np.array(errors) <= GOOD_SECONDS)), 4) if errors else None,
        "mean_time_error_s": round(float(np.mean(errors)), 4) if errors else None,
        "failures": failures,
    }


@torch.no_grad()
def silence(
    model: PocketWhisper, spoken: Sequence[Plan], sound: Sound, vocabulary: SpeechVocabulary
) -> dict[str, float]:
    """Shares of noisy windows rightly separated by <|nospeech|> at 0.6: those with speech, those without."""
    generator, length = torch.Generator().manual_seed(9), 30 * RATE
    empty = [Plan([vocabulary.start], [0], [(-1, -1)], length=(5 + i) * RATE) for i in range(25)]
    shares = []
    for plans in (spoken[:_ROWS], empty):
        features = sound.render(Batch.of(plans), length, generator, NOISE_ALONE).features
        start = torch.full((len(plans), 1), vocabulary.start, device=features.device)
        logits = model.logits(model.decoder(start, model.encoder(features))[0][:, 0])
        shares.append(float((logits.softmax(-1)[:, vocabulary.no_speech] > SILENT).float().mean()))
    return {"speech_is_speech": round(1 - shares[0], 4), "silence_is_silence": round(shares[1], 4)}


def evaluate(
    model: PocketWhisper,
    speech: Path,
    vocabulary: SpeechVocabulary,
    device: torch.device,
    most: int | None = None,
) -> dict[str, Any]:
    """All scores by test, windows and acoustics; ``most``: utterances of a language and test."""
    model = model.eval().float()
    results: dict[str, Any] = {}
    for test in ("test-seen", "test-unseen"):
        utterances, samples, labels = read_shards(speech, test)
        utterances = first_of_each(utterances, most)
        sound, planner = Sound(samples, labels, device), Planner(utterances, vocabulary, 30)
        for together, windows in ((1, "single"), (_TOGETHER, "several")):
            plans = tested_windows(utterances, planner, together)
            for how, name in ((CLEAN, "clean"), (NOISY, "noisy")):
                found = scored(model, plans, sound, vocabulary, how)
                results[f"{test} {windows} {name}"] = found
                shown = {key: value for key, value in found.items() if key != "failures"}
                print(f"{test} {windows} {name}: {json.dumps(shown)}", flush=True)
        results[f"{test} silence"] = silence(model, plans, sound, vocabulary)
        print(f"{test} silence: {json.dumps(results[f'{test} silence'])}", flush=True)
    return results


def load_exported(folder: Path) -> PocketWhisper:
    """The model of an exported folder, in fp32; its phoneme head is not trained."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        config["vocab_size"], config["d_model"], config["encoder_attention_heads"], config["encoder_ffn_dim"],
        config["encoder_layers"], config["decoder_layers"],
    )  # fmt: skip
    model = PocketWhisper(shape)
    weights = {
        name.removeprefix("model."): w.float() for name, w in load_file(folder / "model.safetensors").items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any(not name.startswith("phones.") for name in missing):
        raise ValueError(f"other tensors than expected: missing {missing}, unexpected {unexpected}")
    return model


def main() -> None:
    """Parse the command line, print the scores and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="JSON with all scores")
    parser.add_argument("--most", type=int, help="utterances of a language and test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = load_exported(args.model).to(device)
    results = evaluate(model, args.speech, SpeechVocabulary(args.model), device, args.most)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
