"""Print an answer as it is generated; pieces never end in half a character.

python examples/streaming.py [ENGINE]
"""

import sys

from ingot import LLM

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat")
messages = [{"role": "user", "content": "Tell me a short story about a fox."}]

for piece in llm.stream(messages, llm.default_params.replace(max_new_tokens=120)):
    print(piece.text, end="", flush=True)
    if piece.finish_reason:
        print(f"\n[{piece.finish_reason}]")
