"""A stream with OpenAI's client and asyncio: ingot serve engines/pocket-chat

python examples/clients/openai_stream.py [--url URL] [--model NAME] [QUESTION]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

try:
    from openai import APIConnectionError, AsyncOpenAI, OpenAIError
except ModuleNotFoundError:
    sys.exit("error: OpenAI's client is not installed; to fix: pip install openai")


async def main(url: str, model: str | None, question: str) -> None:
    """Print an answer piece by piece, then its number of tokens."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ.get("INGOT_API_KEY", "none")) as client:
        stream = await client.chat.completions.create(
            model=model or (await client.models.list()).data[0].id,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},  # in a last chunk, which has no choice
            extra_body={"top_k": 20, "repetition_penalty": 1.1},  # what OpenAI's API does not have
        )
        print(f"> {question}")
        async for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", nargs="?", default="Tell me a story about a fox.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    try:
        asyncio.run(main(args.url, args.model, args.question))
    except APIConnectionError:
        sys.exit(f"error: no server answers at {args.url}; to fix: ingot serve engines/pocket-chat")
    except OpenAIError as error:
        sys.exit(f"error: the server refused the request; seen: {error}")
