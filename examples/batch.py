"""Many prompts at once, each with its own sampling values; answers are in the prompts' order.

python examples/batch.py [ENGINE]
"""

import sys
import time

from ingot import LLM

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat")
questions = [f"How much is {a} + {b}?" for a in (12, 47) for b in (5, 30, 99, 250)]
prompts = [llm.chat_ids([{"role": "user", "content": question}]) for question in questions]
greedy = llm.default_params.replace(temperature=0.0, max_new_tokens=32)
params = [greedy, *(greedy.replace(temperature=0.7, seed=i) for i in range(1, len(prompts)))]

start = time.perf_counter()
outputs = llm.generate(prompts, params)
seconds = time.perf_counter() - start

for question, output in zip(questions, outputs, strict=True):
    print(f"{question:<22} {output.text}")
tokens = sum(len(output.token_ids) for output in outputs)
print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
