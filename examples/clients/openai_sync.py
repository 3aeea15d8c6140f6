"""OpenAI's client: ingot serve engines/pocket-chat

python examples/clients/openai_sync.py [--url URL] [--model NAME] [QUESTION]
"""

from __future__ import annotations

import argparse
import os
import sys

try:
    from openai import APIConnectionError, OpenAI, OpenAIError
except ModuleNotFoundError:
    sys.exit("error: OpenAI's client is not installed; to fix: pip install openai")


def main(url: str, model: str | None, question: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("INGOT_API_KEY", "none")) as client:
        answer = client.chat.completions.create(
            model=model or client.models.list().data[0].id,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
        )
        print(answer.choices[0].message.content)
        print(answer.usage)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", nargs="?", default="How much is 27 + 58?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    try:
        main(args.url, args.model, args.question)
    except APIConnectionError:
        sys.exit(f"error: no server answers at {args.url}; to fix: ingot serve engines/pocket-chat")
    except OpenAIError as error:
        sys.exit(f"error: the server refused the request; seen: {error}")
