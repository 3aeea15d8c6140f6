"""Ingot: a checkpoint becomes an engine that answers, and proves itself.

from ingot import LLM, SamplingParams, build
build("checkpoint", "engine", dtype="fp16")
print(LLM("engine").generate("Hello", SamplingParams(max_new_tokens=16))[0].text)

Each name is imported when it is first used: neither the terminal's help nor a process that renders a chat
template waits for what it does not need.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ingot.version import VERSION

if TYPE_CHECKING:
    from ingot.building.builder import build
    from ingot.building.tuner import tune
    from ingot.config.grammar_spec import Grammar
    from ingot.config.runtime_config import RuntimeConfig
    from ingot.config.sampling_params import SamplingParams
    from ingot.errors import IngotError
    from ingot.llm import LLM, Answer, Output, Piece
    from ingot.llm.prompt_inputs import Chat
    from ingot.proof.verify_engine import verify
    from ingot.speech.transcriber import Transcriber
    from ingot.text.prompt import Embeddings, Input, Prompt

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
    "Chat": "ingot.llm.prompt_inputs",
    "Embeddings": "ingot.text.prompt",
    "Grammar": "ingot.config.grammar_spec",
    "IngotError": "ingot.errors",
    "Input": "ingot.text.prompt",
    "LLM": "ingot.llm",
    "Output": "ingot.llm",
    "Piece": "ingot.llm",
    "Prompt": "ingot.text.prompt",
    "RuntimeConfig": "ingot.config.runtime_config",
    "SamplingParams": "ingot.config.sampling_params",
    "Transcriber": "ingot.speech.transcriber",
    "build": "ingot.building.builder",
    "tune": "ingot.building.tuner",
    "verify": "ingot.proof.verify_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
