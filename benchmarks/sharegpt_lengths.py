"""Requests with lengths like ShareGPT's, for ``ingot sweep --requests`` where that file is not at hand.

Prompts and answers are lognormal, with the means that the PagedAttention paper (SOSP 2023, section 6.1)
reports of ShareGPT: 161 tokens and 338. The spreads are ours: half of the prompts are under 60 tokens, half
of the answers under 205.

    python benchmarks/sharegpt_lengths.py requests.jsonl --count 512
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from random import Random

PROMPT, ANSWER = (161.31, 1.4), (337.99, 1.0)  # mean, and spread of the logarithm
LEAST = 4  # tokens; shorter turns are left out of a load


def drawn(random: Random, mean: float, spread: float) -> int:
    """A number of tokens from a lognormal distribution with this mean."""
    return max(LEAST, round(random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = Random(arguments.seed)
    pairs = ((drawn(random, *PROMPT), drawn(random, *ANSWER)) for _ in range(arguments.count))
    lines = (json.dumps({"prompt_tokens": prompt, "new_tokens": new}) for prompt, new in pairs)
    arguments.file.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
