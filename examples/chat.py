"""A conversation that remembers its turns, and drops the oldest when they no longer fit.

python examples/chat.py [ENGINE]
"""

import sys

from ingot import LLM
from ingot.llm.conversation import Conversation

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat")
talk = Conversation(llm, system="You are a helpful assistant.")

for question in ("Hello! My name is Ada.", "What is my name?", "你好！"):
    print(f"> {question}")
    for piece in talk.ask(question):
        print(piece.text, end="", flush=True)
    print()
