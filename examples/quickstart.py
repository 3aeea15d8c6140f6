"""Build an engine from a checkpoint and ask a question.

python examples/quickstart.py [CHECKPOINT ENGINE]
"""

from __future__ import annotations

import sys

from ingot import LLM, IngotError, build


def main(checkpoint: str, engine: str) -> None:
    build(checkpoint, engine, force=True)
    with LLM(engine) as llm:
        output = llm.chat([{"role": "user", "content": "Hello! Who are you?"}])
    print(output.text)


if __name__ == "__main__":
    words = sys.argv[1:] or ["models/pocket-chat", "engines/pocket-chat"]
    if len(words) != 2:
        sys.exit(__doc__)
    try:
        main(*words)
    except IngotError as error:
        sys.exit(f"error: {error}")
