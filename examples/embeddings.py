"""Put rows of a tensor into a prompt in place of tokens: a soft prompt, or the output of your own encoder.

python examples/embeddings.py [ENGINE]
"""

import sys

from ingot import LLM, Embeddings, Prompt

with LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat") as llm:
    assert llm.tokenizer is not None
    start, fire = (
        llm.tokenizer.encode("A "),
        llm.tokenizer.encode("fire broke out in a", add_special_tokens=False),
    )
    with llm.tap("embed_tokens") as seen:
        llm.logits(fire)
    rows = seen["embed_tokens"]  # outputs of the embedding layer: float [tokens, hidden_size]

    prompts = [Prompt([start, fire]), Prompt([start, Embeddings(rows)])]
    print([one.text for one in llm.generate(prompts, max_new_tokens=12, temperature=0.0)])  # equal

    between = Embeddings((rows + rows.mean(0)) / 2)  # of no real token
    print(llm.generate(Prompt([start, between]), max_new_tokens=12, temperature=0.0)[0].text)
