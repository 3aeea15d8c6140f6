"""The items a model is judged on: never trained on, one turn each, with the default system message.

heldout_items(seed=2026, summaries=200, questions=200, sums=100)
"""

from __future__ import annotations

import random
from typing import Any

from recipes.world import arithmetic, reading
from recipes.world.conversation import DEFAULT_SYSTEM, Language, Turn


def _record(task: str, language: Language, turn: Turn) -> dict[str, Any]:
    messages = [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": turn.user}]
    return {"task": task, "language": language, "messages": messages, "answer": turn.assistant}


def heldout_items(seed: int, summaries: int, questions: int, sums: int) -> list[dict[str, Any]]:
    """Records with ``task``, ``language``, ``messages`` (ending with the user's) and ``answer``; half in
    each language, all different."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    tasks = (("summary", reading.summary, summaries), ("question", reading.question, questions),
             ("sum", arithmetic.sum_turn, sums))  # fmt: skip
    for task, make, count in tasks:
        for language in ("en", "zh"):
            wanted = len(found) + count // 2
            while len(found) < wanted:
                turn = make(rng, language, "held-out")
                if turn.user not in seen:
                    seen.add(turn.user)
                    found.append(_record(task, language, turn))
    return found
