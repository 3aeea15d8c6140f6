"""Ingot: a checkpoint becomes an engine that answers, and proves itself.

from ingot import LLM, SamplingParams, build
build("checkpoint", "engine", dtype="fp16")
print(LLM("engine").generate("Hello", SamplingParams(max_new_tokens=16))[0].text)
"""

from ingot.config.sampling import SamplingParams
from ingot.engine.builder import build
from ingot.errors import IngotError
from ingot.llm import LLM
from ingot.processors.prompt import Prompt
from ingot.version import VERSION

__version__ = VERSION
__all__ = ["LLM", "IngotError", "Prompt", "SamplingParams", "build"]
