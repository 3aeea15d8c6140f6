"""Learn the pocket model's vocabulary from generated conversations.

The rules are in ``bpe``.

    python -m recipes.train_tokenizer --out models/pocket-chat/qwen.tiktoken
"""

from __future__ import annotations

import argparse
import base64
import random
from collections.abc import Iterator
from pathlib import Path

from recipes.bpe import train_bpe
from recipes.world.mixture import conversation
from recipes.world.names import spelling_characters


def corpus(seed: int, conversations: int) -> Iterator[str]:
    """The messages of ``conversations`` training conversations, and the role lines of the frame."""
    rng = random.Random(seed)
    for _ in range(conversations):
        for message in conversation(rng).messages():
            yield f"{message['role']}\n"
            yield message["content"]


def write_vocabulary(vocabulary: dict[bytes, int], path: Path) -> None:
    """Write tiktoken's format: base64 token, space, rank; one a line in order of rank."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in vocabulary.items())
    path.write_text("".join(lines))


def main() -> None:
    """Parse the command line and write the vocabulary file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--conversations", type=int, default=12000)
    parser.add_argument("--ranks", type=int, default=2800)
    parser.add_argument("--rare", type=int, default=40, help="characters up to this count have no token")
    args = parser.parse_args()
    texts = corpus(args.seed, args.conversations)
    vocabulary = train_bpe(texts, args.ranks, spelling_characters(), args.rare)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_vocabulary(vocabulary, args.out)


if __name__ == "__main__":
    main()
