"""Exact answers of a pocket picture model about held-out scenes, greedy, by the plain PyTorch model or by an
engine of Ingot.

    python -m recipes.vision.evaluate --model models/pocket-vision --count 500
    python -m recipes.vision.evaluate --engine engine --count 300
    python -m recipes.vision.evaluate --write-heldout recipes/vision/heldout.jsonl

A record of ``heldout.jsonl`` has a scene's number and the checksum of its pixels, the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.scoring import exact
from recipes.vision.draw import draw, normalize
from recipes.vision.export import load_exported
from recipes.vision.model import MiniGPT4
from recipes.vision.scenes import held_out_scene
from recipes.vision.talk import TASKS, Round, ask, conversation
from recipes.vision.vocabulary import Vocabulary

HELD_OUT = Path(__file__).parent / "heldout.jsonl"
MOST = 64  # tokens of an answer
_ROWS = 100


@dataclass(frozen=True)
class Item:
    """A conversation about the held-out scene of a number."""

    scene: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Result:
    """An item and the model's answer to its last question."""

    item: Item
    text: str

    @property
    def exact(self) -> bool:
        """True where the answer is the right one."""
        return exact(self.text, self.item.rounds[-1].answer)


def held_out_items(numbers: Iterable[int]) -> list[Item]:
    """One conversation for each number: tasks in turn, every third in two rounds."""
    items = []
    for number in numbers:
        scene, rng = held_out_scene(number), random.Random(f"held-out talk {number}")
        if number % 3 == 2:
            rounds = conversation(scene, rng, 2)
        else:
            rounds = [ask(scene, rng, TASKS[(number - number // 3) % len(TASKS)])]
        items.append(Item(number, tuple(rounds)))
    return items


def score(
    model: MiniGPT4, vocabulary: Vocabulary, items: Sequence[Item], system: bool = True
) -> list[Result]:
    """The model's greedy answers to the last question of each item."""
    results = []
    for start in range(0, len(items), _ROWS):
        part = items[start : start + _ROWS]
        texts = answer(model, vocabulary, part, system)
        results += [Result(item, text) for item, text in zip(part, texts, strict=True)]
    return results


@torch.no_grad()
def answer(model: MiniGPT4, vocabulary: Vocabulary, items: Sequence[Item], system: bool) -> list[str]:
    """Greedy answers in one batch. Prompts differ in length; the padding stands behind them."""
    device = next(model.parameters()).device
    examples = [vocabulary.example(item.rounds, system) for item in items]
    embeds = model.encode(normalize(draw([held_out_scene(item.scene) for item in items], device)))
    before = model.embed(torch.tensor([example.before for example in examples], device=device))
    lengths = torch.tensor([len(example.after) for example in examples], device=device)
    after = torch.zeros(len(items), int(lengths.max()) + MOST, dtype=torch.long, device=device)
    for row, example in enumerate(examples):
        after[row, : len(example.after)] = torch.tensor(example.after)
    start = before.shape[1] + embeds.shape[1]
    rows, done = (
        torch.arange(len(items), device=device),
        torch.zeros(len(items), dtype=torch.bool, device=device),
    )
    for step in range(MOST):
        width = int(lengths.max()) + step
        hidden = model.hidden(torch.cat((before, embeds, model.embed(after[:, :width])), 1))
        best = model.head(hidden[rows, start + lengths - 1 + step]).argmax(-1)
        after[rows, lengths + step] = torch.where(done, vocabulary.end, best)
        done |= best == vocabulary.end
        if bool(done.all()):
            break
    found = [ids[len(example.after) :][:MOST] for ids, example in zip(after.tolist(), examples, strict=True)]
    return [vocabulary.text(ids) for ids in found]


def score_engine(path: str, items: Sequence[Item]) -> list[Result]:
    """The same by an engine, through its chat format and its way from pixels to features."""
    from ingot import LLM, Output

    pictures = draw([held_out_scene(item.scene) for item in items])
    talks = [messages_of(item, picture) for item, picture in zip(items, pictures, strict=True)]
    with LLM(path) as llm:
        outputs: list[Output] = llm.chat(talks, max_new_tokens=MOST, temperature=0.0)
    return [Result(item, (output.text or "").strip()) for item, output in zip(items, outputs, strict=True)]


def messages_of(item: Item, picture: Tensor) -> list[dict[str, Any]]:
    """An item as messages, the picture [3, side, side] before the first question."""
    messages: list[dict[str, Any]] = list(record(item, picture)["messages"])
    text = {"type": "text", "text": messages[0]["content"]}
    messages[0] = {"role": "user", "content": [{"type": "image", "image": picture}, text]}
    return messages


def summary(results: Sequence[Result]) -> dict[str, float]:
    """Percent of exact answers: all, those in a second round, and by task."""
    groups = {"all": list(results), "second round": [r for r in results if len(r.item.rounds) > 1]}
    for task in TASKS:
        groups[task] = [result for result in results if result.item.rounds[-1].task == task]
    return {
        name: round(100 * sum(result.exact for result in group) / len(group), 2)
        for name, group in groups.items()
        if group
    }


def checksum(picture: Tensor) -> int:
    """CRC-32 of a picture's bytes, channels last."""
    return zlib.crc32(picture.permute(1, 2, 0).contiguous().cpu().numpy().tobytes())


def record(item: Item, picture: Tensor) -> dict[str, Any]:
    """A line of ``heldout.jsonl``."""
    *answered, last = item.rounds
    messages = []
    for turn in answered:
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    return {
        "scene": item.scene,
        "pixels": checksum(picture),
        "task": last.task,
        "messages": [*messages, {"role": "user", "content": last.question}],
        "answer": last.answer,
    }


def write_held_out(path: Path, count: int) -> None:
    """Write the first ``count`` items, one record a line."""
    items = held_out_items(range(count))
    pictures = draw([held_out_scene(item.scene) for item in items])
    lines = [json.dumps(record(item, picture)) for item, picture in zip(items, pictures, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def pictures_agree(device: torch.device) -> bool:
    """True where the held-out pictures drawn on this device have the checksums of ``heldout.jsonl``."""
    records = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    pictures = draw([held_out_scene(entry["scene"]) for entry in records], device)
    return [checksum(picture) for picture in pictures] == [entry["pixels"] for entry in records]


def main() -> None:
    """Score a model folder, or write the held-out file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("models/pocket-vision"))
    parser.add_argument("--engine", help="an engine in place of the model")
    parser.add_argument("--count", type=int, default=500, help="held-out scenes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the scores here, too")
    parser.add_argument("--write-heldout", type=Path)
    args = parser.parse_args()
    if args.write_heldout:
        write_held_out(args.write_heldout, args.count)
        return
    items, more = held_out_items(range(args.count)), {}
    if args.engine:
        results = score_engine(args.engine, items)
    else:
        device = torch.device(args.device)
        model, vocabulary = load_exported(args.model).to(device), Vocabulary(args.model / "llama")
        results = score(model, vocabulary, items)
        plain = summary(score(model, vocabulary, items, system=False))
        more = {"exact without the system text": plain["all"], "pictures agree": pictures_agree(device)}
    wrong = [
        {"scene": r.item.scene, "question": r.item.rounds[-1].question, "answer": r.text}
        for r in results
        if not r.exact
    ]
    found = {"items": len(items), "exact": summary(results), **more, "wrong": wrong}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
