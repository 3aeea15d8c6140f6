"""Two streams at once by server-sent events, with aiohttp: ingot serve engines/pocket-chat

python examples/clients/sse_aiohttp.py [--url URL] [--model NAME] [QUESTION ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

try:
    import aiohttp
except ModuleNotFoundError:
    sys.exit("error: aiohttp is not installed; to fix: pip install aiohttp")

HEADERS = {"Authorization": f"Bearer {os.environ.get('INGOT_API_KEY', 'none')}"}


async def pieces(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """Texts of an answer as they come. Leaving the loop ends the request on the server."""
    async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": True}) as reply:
        if reply.status != 200:
            raise RuntimeError(await reply.text())
        async for line in reply.content:
            name, _, data = line.decode().strip().partition(": ")
            if name != "data" or data == "[DONE]":  # an empty line ends an event
                continue
            event = json.loads(data)
            if "error" in event:  # an answer that began may still fail
                raise RuntimeError(data)
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


async def ask(session: aiohttp.ClientSession, url: str, model: str, question: str) -> None:
    """Print an answer once it is complete, so that two do not mix; its pieces come one by one."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 64}
    texts = [piece async for piece in pieces(session, url, body)]
    print(f"> {question}\n{''.join(texts)}")


async def main(url: str, model: str | None, questions: list[str]) -> None:
    """All questions share the engine's decode steps."""
    no_limit = aiohttp.ClientTimeout(
        total=None, sock_connect=10
    )  # aiohttp's own ends a stream after 5 minutes
    async with aiohttp.ClientSession(headers=HEADERS, timeout=no_limit) as session:
        if model is None:
            async with session.get(f"{url}/v1/models", raise_for_status=True) as reply:
                model = str((await reply.json())["data"][0]["id"])
        async with asyncio.TaskGroup() as group:
            for question in questions:
                group.create_task(ask(session, url, model, question))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("questions", nargs="*", default=["Hello!", "Tell me a story about a fox."])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    try:
        asyncio.run(main(args.url, args.model, args.questions))
    except aiohttp.ClientConnectorError:
        sys.exit(f"error: no server answers at {args.url}; to fix: ingot serve engines/pocket-chat")
    except (aiohttp.ClientError, RuntimeError, ExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        sys.exit(f"error: the server refused the request; seen: {first}")
