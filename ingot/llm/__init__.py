"""The public Python API: ``LLM`` and what it returns."""

from ingot.llm.explanation import Explanation
from ingot.llm.llm import LLM
from ingot.llm.outputs import Answer, Output, Piece, TokenLogprobs

__all__ = ["LLM", "Answer", "Explanation", "Output", "Piece", "TokenLogprobs"]
