"""Make models/pocket-whisper: vocabulary, speech, training, export, scores.

A step that is done is skipped. Their commands are in ``recipes.whisper``.

    python -m recipes.pocket_whisper --minutes 8 --out run
    python -m recipes.pocket_whisper --minutes 8 --out run --resume      # goes on where a broken-off call was
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from recipes.whisper.evaluate import evaluate, load_exported
from recipes.whisper.export import export
from recipes.whisper.model import PocketWhisper, Shape
from recipes.whisper.train import Run, TrainOptions, opened, train
from recipes.whisper.utterances import make_utterances
from recipes.whisper.vocabulary import SpeechVocabulary, write_vocabulary


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="run folder; the model is in its model/")
    parser.add_argument(
        "--speech", type=Path, default=Path("/tmp/pocket-speech"), help="folder of the shards"
    )
    parser.add_argument("--hours", type=float, default=80, help="of speech to synthesise")
    parser.add_argument("--minutes", type=float, default=TrainOptions.minutes, help="of training in all")
    parser.add_argument("--call-minutes", type=float, default=9.0, help="of this call; --resume goes on")
    parser.add_argument("--rows", type=int, default=TrainOptions.rows)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="torch.compile the encoder")
    parser.add_argument("--test", type=int, help="utterances of a language and test; all")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Parse the command line and make the model."""
    args, start = _parse(), time.perf_counter()
    model_folder, device = args.out / "model", torch.device(args.device)
    if not (model_folder / "tokenizer.json").exists():
        write_vocabulary(model_folder)
        print(f"vocabulary: {time.perf_counter() - start:.0f} s", flush=True)
    done = args.speech / "done.json"
    if not done.exists():
        hours = make_utterances(args.speech, args.hours, args.processes)
        done.write_text(json.dumps({"hours": hours}))
        print(f"speech: {hours:.1f} h, {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(TrainOptions.seed)
    torch.set_float32_matmul_precision("high")
    vocabulary = SpeechVocabulary(model_folder)
    options = TrainOptions(minutes=args.minutes, rows=args.rows, workers=max(0, args.processes - 3))
    shape = Shape(vocab=vocabulary.size)
    model = PocketWhisper(shape).to(device)
    run = Run(args.out, model, options)
    if args.resume:
        print("resumed" if run.resume() else "nothing to resume", flush=True)
    if args.compile:
        model.encoder.compile(dynamic=False)
    utterances, sound = opened(args.speech, device)
    print(f"ready: {len(utterances)} utterances, {time.perf_counter() - start:.0f} s", flush=True)
    train(run, utterances, sound, vocabulary, start + 60 * args.call_minutes)
    print(f"{run.step} steps in {run.seconds:.0f} s, {time.perf_counter() - start:.0f} s in all", flush=True)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    print(f"{export(weights, shape, model_folder, model_folder)} bytes", flush=True)
    (args.out / "log.json").write_text(json.dumps({"options": vars(options), "log": run.log}))
    if run.progress < 1:
        print(f"{100 * run.progress:.0f} % of the run; --resume goes on", flush=True)
        return
    del sound
    results = evaluate(load_exported(model_folder).to(device), args.speech, vocabulary, device, args.test)
    (args.out / "scores.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
