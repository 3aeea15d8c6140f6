"""Ingot: a checkpoint becomes an engine that answers, and proves itself.

from ingot import LLM, SamplingParams, build
build("checkpoint", "engine", dtype="fp16")
print(LLM("engine").generate("Hello", SamplingParams(max_new_tokens=16))[0].text)

What needs PyTorch is imported when it is first used, so that ``ingot --help`` does not wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ingot.config.grammar import Grammar
from ingot.config.runtime import RuntimeConfig
from ingot.config.sampling import SamplingParams
from ingot.errors import IngotError
from ingot.version import VERSION

if TYPE_CHECKING:
    from ingot.engine.builder import build
    from ingot.engine.tuner import tune
    from ingot.llm import LLM, Answer, Output, Piece
    from ingot.llm.prompts import Chat
    from ingot.llm.verify import verify
    from ingot.processors.prompt import Embeddings, Input, Prompt
    from ingot.speech.transcriber import Transcriber

__version__ = VERSION
__all__ = [
    "LLM",
    "Answer",
    "Chat",
    "Embeddings",
    "Grammar",
    "IngotError",
    "Input",
    "Output",
    "Piece",
    "Prompt",
    "RuntimeConfig",
    "SamplingParams",
    "Transcriber",
    "build",
    "tune",
    "verify",
]

_HOMES = {
    "Answer": "ingot.llm",
    "Chat": "ingot.llm.prompts",
    "Embeddings": "ingot.processors.prompt",
    "Input": "ingot.processors.prompt",
    "LLM": "ingot.llm",
    "Output": "ingot.llm",
    "Piece": "ingot.llm",
    "Prompt": "ingot.processors.prompt",
    "Transcriber": "ingot.speech.transcriber",
    "build": "ingot.engine.builder",
    "tune": "ingot.engine.tuner",
    "verify": "ingot.llm.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
