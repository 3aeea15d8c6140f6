"""Many asyncio tasks share one engine: several answers, a stream, and a task that is cancelled.

python examples/asyncio_many.py [ENGINE]
"""

import asyncio
import sys

from ingot import LLM

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat")
params = llm.default_params.replace(max_new_tokens=48)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def story() -> str:
    parts = []
    async for piece in llm.astream(ask("Tell me a short story about a fox."), params):
        parts.append(piece.text)
    return "".join(parts)


async def main() -> None:
    too_long = asyncio.create_task(
        llm.agenerate([ask("Tell me a story.")], params.replace(max_new_tokens=400))
    )
    sums = (llm.agenerate([ask(f"How much is {n} + 30?")], params) for n in (12, 47, 61))
    tale, *outputs = await asyncio.gather(story(), *sums)
    too_long.cancel()  # as a server does when its client disconnects: only this request ends
    print(tale)
    for (output,) in outputs:
        print(output.text)


asyncio.run(main())
