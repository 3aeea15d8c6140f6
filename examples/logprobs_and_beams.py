"""Log-probabilities of each token, and the best of several beams.

python examples/logprobs_and_beams.py [ENGINE]
"""

import math
import sys

from ingot import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat")
assert llm.tokenizer is not None
prompt = llm.chat_ids([{"role": "user", "content": "How much is 19 + 23?"}])

output = llm.generate([prompt], SamplingParams(max_new_tokens=16, logprobs=3))[0]
for step in output.logprobs or []:
    others = ", ".join(f"{llm.tokenizer.token_text(i)!r} {math.exp(p):.1%}" for i, p in step.top)
    print(f"{llm.tokenizer.token_text(step.token_id)!r:>12} {math.exp(step.logprob):6.1%}   ({others})")

beams = llm.generate([prompt], SamplingParams(max_new_tokens=16, num_beams=4, n=3))[0]
for answer in beams.answers:
    print(f"{answer.score:8.3f}  {answer.text}")
