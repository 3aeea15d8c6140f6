"""A request to an engine without weights, explained.

differs(explained("Hi", {"temperature": 0.7}, tokenizer=tokenizer), "stays greedy")
"""

from __future__ import annotations

from typing import Any

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.llm.explain_prompt import explain_request
from ingot.llm.explanation import Explanation
from ingot.text.chat.chat_format import ChatFormat
from ingot.text.tokenizer.tokenizer import Tokenizer

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}


def explained(
    prompt: Any = (1, 2, 3),
    params: Any = None,
    *,
    generation: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    chat: ChatFormat | None = None,
    stops: tuple[int, ...] = (),
    length: int = 512,
) -> Explanation:
    """A request to an engine without weights."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"), 1)
    model = DecoderConfig("llama", vocab_size=160000, head_dim=2, max_positions=1024, **sizes)
    build = BuildConfig("fp32", max_seq_len=length)
    manifest = Manifest("0", model, build, QuantConfig(), generation=generation or {}, stop_ids=stops)
    given = list(prompt) if isinstance(prompt, tuple) else prompt
    return explain_request(manifest, TextParts(tokenizer, chat, stops), given, params)


def differs(found: Explanation, *words: str) -> bool:
    """Whether one of the differences holds all these words."""
    return any(all(word in sentence for word in words) for sentence in found.differences)
