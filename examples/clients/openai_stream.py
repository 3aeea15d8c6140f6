"""Two streams at once with OpenAI's client: ingot serve engines/pocket-chat

python examples/clients/openai_stream.py [URL]
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, question: str) -> None:
    """Print an answer piece by piece."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        stream=True,
        extra_body={"top_k": 20, "repetition_penalty": 1.1},  # what OpenAI's API does not have
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    print(f"> {question}\n{text}")


async def main(url: str) -> None:
    """Both questions share the engine's decode steps."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        await asyncio.gather(
            *(ask(client, model, text) for text in ("Hello!", "Tell me a story about a fox."))
        )


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
