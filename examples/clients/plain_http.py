"""Plain HTTP, with Python alone: ingot serve engines/pocket-chat

python examples/clients/plain_http.py [--url URL] [--model NAME] [QUESTION]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('INGOT_API_KEY', 'none')}",
}


def call(url: str, body: object = None) -> Any:
    """The JSON of an answer: to a POST of ``body``, or to a GET."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, HEADERS), timeout=600) as reply:
        return json.load(reply)


def main(url: str, model: str | None, question: str) -> None:
    body = {
        "model": model or call(f"{url}/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
    }
    answer = call(f"{url}/v1/chat/completions", body)
    print(answer["choices"][0]["message"]["content"])
    print(answer["usage"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", nargs="?", default="How much is 27 + 58?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    try:
        main(args.url, args.model, args.question)
    except urllib.error.HTTPError as error:  # the body says what was wrong and what to change
        sys.exit(f"error: the server refused the request; seen: {error.read().decode()}")
    except OSError as error:
        sys.exit(f"error: no server answers at {args.url} ({error}); to fix: ingot serve engines/pocket-chat")
