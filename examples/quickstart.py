"""Build an engine from a checkpoint, and ask it something.

python examples/quickstart.py [CHECKPOINT ENGINE]
"""

import sys

from ingot import LLM, build

checkpoint, engine = sys.argv[1:] or ("models/pocket-chat", "engines/pocket-chat")
build(checkpoint, engine, force=True)

llm = LLM(engine)
output = llm.chat([{"role": "user", "content": "Hello! Who are you?"}])
print(output.text)
