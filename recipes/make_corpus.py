"""Turn generated conversations into the arrays that training reads.

The same seed gives the same conversations with any number of processes; one longer than the training length
is left out.

    python -m recipes.make_corpus --tokenizer models/pocket-chat/qwen.tiktoken --sample 3
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from recipes.tokenizer import Tokenizer
from recipes.world.heldout import heldout_items
from recipes.world.mixture import conversation

CHUNK = 4000
HELDOUT_SEED = 2026


@dataclass(frozen=True)
class Corpus:
    """``ids`` and ``answers`` (what the assistant produces), flat; conversation i is ``starts[i:i+2]``."""

    ids: np.ndarray
    answers: np.ndarray
    starts: np.ndarray


def _chunk(job: tuple[Path, int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    path, seed, first, length = job
    tokenizer = Tokenizer.load(path)
    ids: list[int] = []
    answers: list[bool] = []
    sizes: list[int] = []
    rng = random.Random(f"{seed}|{first}")
    for _ in range(CHUNK):
        more, produced = tokenizer.frame(conversation(rng).messages())
        if len(more) <= length:
            ids += more
            answers += produced
            sizes.append(len(more))
    return np.array(ids, np.int16), np.array(answers, bool), np.array(sizes, np.int32)


def make_corpus(tokenizer: Path, conversations: int, seed: int, length: int, processes: int) -> Corpus:
    """Draw and encode ``conversations`` (rounded up to whole chunks) of at most ``length`` tokens each."""
    jobs = [(tokenizer, seed, i, length) for i in range(-(-conversations // CHUNK))]
    if processes > 1:
        with get_context("spawn").Pool(processes) as pool:
            parts = pool.map(_chunk, jobs, chunksize=1)
    else:
        parts = [_chunk(job) for job in jobs]
    ids, answers, sizes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Corpus(ids, answers, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))))


def _print_sample(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        drawn = conversation(rng)
        print(f"--- {drawn.task} ({drawn.language})")
        for message in drawn.messages():
            print(f"{message['role']}: {message['content']}")


def main() -> None:
    """Parse the command line; print a sample, write the held-out file, or print the corpus's size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/pocket-chat/qwen.tiktoken"))
    parser.add_argument("--conversations", type=int, default=CHUNK)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sample", type=int, default=0, help="print this many conversations and stop")
    parser.add_argument("--heldout", type=Path, help="write the held-out items to this file and stop")
    args = parser.parse_args()
    if args.heldout:
        items = heldout_items(HELDOUT_SEED, summaries=200, questions=200, sums=100)
        args.heldout.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
        return
    if args.sample:
        _print_sample(args.sample, args.seed)
        return
    corpus = make_corpus(args.tokenizer, args.conversations, args.seed, args.length, processes=1)
    share = corpus.answers.mean()
    print(f"{len(corpus.starts) - 1} conversations, {len(corpus.ids)} tokens, {share:.0%} of them answers")


if __name__ == "__main__":
    main()
