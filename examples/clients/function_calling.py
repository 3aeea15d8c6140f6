"""Function calling with OpenAI's client: ingot serve engines/qwen3

The model's chat template must take tools, as those of Qwen2.5 and Qwen3 do.

python examples/clients/function_calling.py [--url URL] [--model NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

try:
    from openai import APIConnectionError, OpenAI, OpenAIError
except ModuleNotFoundError:
    sys.exit("error: OpenAI's client is not installed; to fix: pip install openai")


def add(a: int, b: int) -> int:
    """The function that the model may call."""
    return a + b


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers from 0 to 999.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in "ab"},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]


def main(url: str, model: str | None) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("INGOT_API_KEY", "none")) as client:
        model = model or client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": "How much is 27 + 58?"}]
        # "required" makes sure that there is a call; with "auto" the model decides.
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            if call.type == "function":
                result = add(**json.loads(call.function.arguments))
                print(f"{call.function.name}({call.function.arguments}) = {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=64)
        print(answer.choices[0].message.content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    try:
        main(args.url, args.model)
    except APIConnectionError:
        sys.exit(f"error: no server answers at {args.url}; to fix: ingot serve engines/qwen3")
    except OpenAIError as error:
        sys.exit(f"error: the server refused the request; seen: {error}")
