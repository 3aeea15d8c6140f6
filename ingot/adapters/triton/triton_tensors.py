"""The tensors of a model in Triton: names, types and shapes of its vLLM backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
EXTRAS = (FINISH_REASON, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS)  # outputs that a request asks for


@dataclass(frozen=True)
class Tensor:
    """One input or output; ``size``: its only dimension, -1 for any."""

    name: str
    kind: Literal["STRING", "BOOL", "UINT32"]
    size: int = 1
    optional: bool = False


INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("image", "STRING", -1, optional=True),
    Tensor("stream", "BOOL", optional=True),
    Tensor("sampling_parameters", "STRING", optional=True),
    Tensor("exclude_input_in_output", "BOOL", optional=True),
    *(Tensor(f"return_{name}", "BOOL", optional=True) for name in EXTRAS),
)
OUTPUTS = (
    Tensor("text_output", "STRING", -1),
    Tensor(FINISH_REASON, "STRING", -1),
    Tensor(NUM_INPUT_TOKENS, "UINT32"),
    Tensor(NUM_OUTPUT_TOKENS, "UINT32", -1),
)
