"""How long the event loop is held by one answer with many log-probabilities.

128 answers of 100 tokens with 20 alternatives each are put together and encoded, without a server: CPU time
of each part, between which other streams go on. Ends with 1 if a part takes longer than the limit. The last
line is JSON.

    python benchmarks/large_answers.py engines/pocket-chat --json docs/results/large_answers.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from ingot.serve.api.chat_completions import ChatCall  # noqa: E402
from ingot.serve.engine_calls.answering import Answering  # noqa: E402
from ingot.serve.engine_calls.process_protocol import Logprob, News, Ready  # noqa: E402
from ingot.serve.grammar_checks import GrammarChecks  # noqa: E402
from ingot.serve.json_parts import in_parts  # noqa: E402
from ingot.serve.request_schemas import ChatRequest, decode  # noqa: E402
from ingot.serve.served_model import ServedModel, TextSide  # noqa: E402

N, TOKENS, TOP = 128, 100, 20


def answered(engine: str) -> tuple[ChatCall, Answering]:
    """A chat call whose answers have ended, with random tokens."""
    side = TextSide.read("m", Path(engine))
    stub: Any = SimpleNamespace(limits=Ready(side.manifest.model.vocab_size, N, 4096), most_answers=2 * N)
    model = ServedModel(side, stub, GrammarChecks())
    body = {"model": "m", "messages": [{"role": "user", "content": "How much is 1 + 2?"}], "n": N}
    body |= {"max_tokens": TOKENS, "logprobs": True, "top_logprobs": TOP}
    call = ChatCall(model, decode(ChatRequest, json.dumps(body).encode()))
    found = Answering(call.jobs(), side.tokenizer, by_piece=False, most_unread=4096)
    draw = random.Random(0)
    for count in range(TOKENS):
        reason = "length" if count == TOKENS - 1 else None
        for index in range(N):
            top = tuple((draw.randrange(300, 2000), -draw.random()) for _ in range(TOP))
            news = News("1", index, (top[0][0],), reason, logprobs=(Logprob(*top[0], top),))  # type: ignore[arg-type]
            found.take(0, news)
    model.close()
    return call, found


async def times(call: ChatCall, found: Answering) -> tuple[list[float], int]:
    """Milliseconds of CPU time of each part, and all bytes."""
    parts, size, start = [], 0, time.process_time()
    async for data in in_parts(call.full_answer(found)):
        parts.append(round((time.process_time() - start) * 1000, 2))
        size += len(data)
        start = time.process_time()
    return parts, size


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--limit", type=float, default=50.0, help="ms of a part")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts, size = asyncio.run(times(*answered(args.engine)))
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": platform.machine(),
        "mib": round(size / 2**20, 1),
        "parts": len(parts),
        "longest_ms": max(parts),
        "all_ms": round(sum(parts)),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if max(parts) <= args.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
