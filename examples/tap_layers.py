"""Collect the hidden states of every layer while a prompt runs; the output does not change.

python examples/tap_layers.py [ENGINE]
"""

import sys

import torch

from ingot import LLM

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/pocket-chat")

with llm.tap("layers.*", "layers.*.mlp") as seen:
    logits = llm.logits("The quick brown fox")

for name, hidden in seen.items():  # [num_tokens, hidden_size]
    print(f"{name:<16} {tuple(hidden.shape)}  rms {hidden.float().square().mean().sqrt():.3f}")
print("next token:", int(torch.argmax(logits[-1])))
