"""What ends an answer, and why.

Covers the origin of every stop id and stop string of a request.

    stop_rules(manifest, text, used, wanted)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.llm.explanation import StopRule
from ingot.text.chat.chat_format import ChatML

GENERATION, CONFIG, TOKENIZER = "generation_config", "config.json", "tokenizer"
CHAT, REQUEST = "chat format", "request"
CONFIG_OR_TOKENIZER = f"{CONFIG} or {TOKENIZER}"


def eos_ids(named: Any) -> tuple[int, ...]:
    """``eos_token_id`` of a generation_config: an id, a list of ids, or none."""
    return tuple(named) if isinstance(named, (list, tuple)) else () if named is None else (named,)


def stop_rules(
    manifest: Manifest, text: TextParts, used: SamplingParams, wanted: SamplingParams
) -> tuple[StopRule, ...]:
    """Every id and string that can end the answer; the model's own ids, turned off, under ``ignore_eos``.

    Args:
        used: the values with the chat format's stop strings.
        wanted: the request's own.
    """
    return (*_ids(manifest, text, used), *_strings(used, wanted))


def _ids(manifest: Manifest, text: TextParts, used: SamplingParams) -> Iterator[StopRule]:
    for token in sorted({*manifest.stop_ids, *used.stop_token_ids}):
        asked = token in used.stop_token_ids
        own = _origins(token, manifest, text) if token in manifest.stop_ids else ()
        shown = text.tokenizer.token_text(token) if text.tokenizer is not None else None
        yield StopRule(
            shown or None, token, (*own, *((REQUEST,) if asked else ())), asked or not used.ignore_eos
        )


def _strings(used: SamplingParams, wanted: SamplingParams) -> Iterator[StopRule]:
    own = used.stop[len(wanted.stop) :]
    for string in dict.fromkeys(used.stop):
        named = ((REQUEST,) if string in wanted.stop else ()) + ((CHAT,) if string in own else ())
        yield StopRule(string, None, named, True)


def _origins(token: int, manifest: Manifest, text: TextParts) -> tuple[str, ...]:
    """Where one of the engine's own ids is from.

    An engine does not keep config.json: what nothing else names was named there.
    """
    tokenizer, chat = text.tokenizer, text.chat
    named = eos_ids(manifest.generation.get("eos_token_id"))
    found = [GENERATION] if token in named else []
    is_eos = tokenizer is not None and token == tokenizer.eos_id
    if tokenizer is not None and chat is not None and token in chat.stop_ids(tokenizer):
        found += [TOKENIZER] if is_eos else []
        found += [CHAT] if not is_eos or isinstance(chat, ChatML) else []
    if not found:
        found = [CONFIG_OR_TOKENIZER if is_eos and not named else CONFIG]
    return tuple(found)
