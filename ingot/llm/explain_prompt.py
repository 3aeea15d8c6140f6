"""A request explained before it runs.

Covers the collection of what decides an answer beside the weights: the exact prompt and its split into
tokens, what ends it, and where every sampling value is from. Runs nothing and needs no weights; what Hugging
Face would do is compared in ``generate_rules``.

    explain_request(manifest, text, [{"role": "user", "content": "Hi"}], {"temperature": 0.7})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ingot.config.decoder_config import DecoderConfig
from ingot.config.sampling_params import VALUE_NAMES, SamplingParams, named_values
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.errors import RequestError
from ingot.llm.explanation import Explanation, SamplingValue, TokenPiece
from ingot.llm.generate_rules import GenerateCall, generate_differences
from ingot.llm.picture_prompts import with_inputs
from ingot.llm.prompt_inputs import (
    Chat,
    Messages,
    PromptLike,
    is_conversation,
    prompt_pieces,
    with_chat_stops,
)
from ingot.llm.sampling_defaults import SAMPLED_FIELDS, Defaults, read_defaults
from ingot.llm.stop_origins import stop_rules
from ingot.runtime.scheduling.inputs import no_inputs
from ingot.text.chat.chat_pictures import MARK
from ingot.text.prompt import Embeddings, Input, Piece, Prompt
from ingot.text.tokenizer.tokenizer import Tokenizer

Given = SamplingParams | Mapping[str, Any] | None


def explain_request(
    manifest: Manifest, text: TextParts, prompt: PromptLike | Messages, params: Given = None
) -> Explanation:
    """Explain a request to an engine.

    Args:
        prompt: text, token ids, a Prompt, or a conversation; its pictures are not read.
        params: None for the engine's defaults; all values, as ``generate`` takes them; or a mapping of the
            values that the request names, which go over the defaults.

    Raises:
        RequestError: it is no prompt, or a value is unknown or out of range. A prompt that is too long, or
            holds unknown ids, is explained, with a note.
    """
    defaults = read_defaults(manifest.generation)
    wanted, given = _values(defaults, params)
    prompt = _unread(prompt) if manifest.model.modality.in_messages else prompt
    pieces, is_chat = prompt_pieces(prompt, text)
    read = _Read.of(pieces, manifest.model, text.tokenizer)
    ids = read.ids
    used = with_chat_stops(wanted, text) if is_chat else wanted
    limit = manifest.build.max_seq_len
    room = max(limit - len(ids), 0)
    chat = Chat.of(prompt) if is_chat else None  # type: ignore[arg-type]
    messages = None if chat is None else chat.messages
    rendered = None if chat is None else _rendered(chat, text)
    stops = stop_rules(manifest, text, used, wanted)
    call = GenerateCall(manifest, text, wanted, given, len(ids), room, messages, rendered, stops)
    return Explanation(
        kind=_kind(prompt, is_chat),
        chat_format=text.chat.name if is_chat and text.chat is not None else None,
        prompt_text=read.text,
        rendered_text=rendered,
        tokens=read.tokens,
        num_prompt_tokens=len(ids),
        max_seq_len=limit,
        room=room,
        max_new_tokens=room if used.max_new_tokens is None else min(room, used.max_new_tokens),
        stops=stops,
        sampling=tuple(_sampling(used, wanted, given, defaults, manifest.generation)),
        processors=tuple(_rules(used, manifest)),
        choice=_choice(used),
        seed=_seed_rule(used),
        differences=tuple(generate_differences(call)),
        notes=tuple(_notes(chat, ids, text, used, manifest)),
    )


def _unread(prompt: PromptLike | Messages) -> PromptLike | Messages:
    """A conversation with an input of no values in the place of each picture; all else as it is."""
    if not is_conversation(prompt):
        return prompt
    chat = Chat.of(prompt)  # type: ignore[arg-type]
    return replace(chat, messages=with_inputs(chat.messages, lambda part, where: Input(None)))


@dataclass(frozen=True)
class _Read:
    """A prompt as the model reads it; a picture, which is not read, as its placeholders."""

    ids: list[int]
    tokens: tuple[TokenPiece, ...]
    text: str | None

    @classmethod
    def of(cls, pieces: Sequence[Piece], model: DecoderConfig, tokenizer: Tokenizer | None) -> _Read:
        """Raises:
        RequestError: the model takes no such input.
        """
        ids: list[int] = []
        tokens: list[TokenPiece] = []
        texts: list[str | None] = []
        for piece in pieces:
            if isinstance(piece, Embeddings):
                what = "only text and token ids are taken here"
                raise RequestError(what, seen="embeddings", fix="the prompt")
            if isinstance(piece, Input) and not model.placeholders:
                raise no_inputs()
            if isinstance(piece, Input):
                assert model.encoder is not None
                stands = TokenPiece(model.encoder.placeholder_id, MARK, None, special=True)
                ids += [stands.id] * model.placeholders
                tokens += [stands] * model.placeholders
                texts.append(MARK)
            else:
                ids += piece
                tokens += [_piece(i, tokenizer) for i in piece]
                texts.append(_joined(piece, tokenizer))
        whole = None if tokenizer is None else "".join(text or "" for text in texts)
        return cls(ids, tuple(tokens), whole)


def _values(defaults: Defaults, params: Given) -> tuple[SamplingParams, frozenset[str]]:
    """The values of the request, and the names of those that it gives itself."""
    if params is None:
        return defaults.params, frozenset()
    if isinstance(params, SamplingParams):
        plain = SamplingParams()
        return params, frozenset(n for n in VALUE_NAMES if getattr(params, n) != getattr(plain, n))
    named = named_values(params)
    return defaults.params.replace(**named), frozenset(named)


def _kind(prompt: object, is_chat: bool) -> Literal["text", "conversation", "token ids", "parts"]:
    if is_chat:
        return "conversation"
    if isinstance(prompt, str):
        return "text"
    parts = Prompt.of(prompt).parts
    if len(parts) > 1:
        return "parts"
    return "text" if isinstance(parts[0], str) else "token ids"


def _rendered(chat: Chat, text: TextParts) -> str:
    assert text.chat is not None  # prompt_entry has made its ids
    return text.chat.prompt_text(chat.messages, tokenizer=text.tokenizer, variables=chat.variables)


def _joined(ids: list[int], tokenizer: Tokenizer | None) -> str | None:
    """The text of all ids, special tokens included."""
    if tokenizer is None:
        return None
    if not tokenizer.joins_bytes:
        return tokenizer.decode(ids, skip_special_tokens=False)
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "backslashreplace")


def _piece(token_id: int, tokenizer: Tokenizer | None) -> TokenPiece:
    data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    if tokenizer is None or not data:
        return TokenPiece(token_id, None, None, False)
    text = data.decode("utf-8", "backslashreplace")
    whole = data == data.decode("utf-8", "replace").encode()
    return TokenPiece(token_id, text, None if whole else data.hex(" "), tokenizer.is_special(token_id))


def _sampling(
    used: SamplingParams,
    wanted: SamplingParams,
    given: frozenset[str],
    defaults: Defaults,
    generation: Mapping[str, Any],
) -> Iterator[SamplingValue]:
    whole = wanted is not defaults.params
    for name in VALUE_NAMES:
        value = getattr(used, name)
        same = not whole or getattr(wanted, name) == getattr(defaults.params, name)
        if name in given:
            yield SamplingValue(name, value, "request", _given_note(name, used, generation))
        elif name in defaults.used and same:
            yield SamplingValue(name, value, "generation_config", _used_note(name, used, generation))
        else:
            yield SamplingValue(
                name, value, "default", _default_note(name, used, wanted, defaults, generation)
            )


def _given_note(name: str, used: SamplingParams, generation: Mapping[str, Any]) -> str | None:
    if name in SAMPLED_FIELDS[1:] and used.temperature == 0:
        return "no effect: temperature 0 is greedy"
    stored, value = generation.get(name), getattr(used, name)
    is_read = name in (*SAMPLED_FIELDS, "repetition_penalty", "max_new_tokens")
    return f"generation_config says {stored}" if is_read and stored not in (None, value) else None


def _used_note(name: str, used: SamplingParams, generation: Mapping[str, Any]) -> str | None:
    if name == "temperature" and generation.get(name) is None:
        return "do_sample is true and no temperature is given"
    return "no effect: temperature 0 is greedy" if name in SAMPLED_FIELDS and used.temperature == 0 else None


def _default_note(
    name: str, used: SamplingParams, wanted: SamplingParams, defaults: Defaults, generation: Mapping[str, Any]
) -> str | None:
    stored = generation.get(name)
    if name in defaults.refused:
        return f"generation_config says {stored}, which is out of range"
    if name in defaults.used:
        return f"the request sets all values; generation_config says {stored}"
    if (
        name in SAMPLED_FIELDS
        and stored not in (None, getattr(used, name))
        and not generation.get("do_sample")
    ):
        return f"generation_config says {stored}, but not do_sample: true"
    extra = used.stop[len(wanted.stop) :]
    return f"from the chat format: {', '.join(map(repr, extra))}" if name == "stop" and extra else None


def _rules(params: SamplingParams, manifest: Manifest) -> Iterator[str]:
    """What changes the logits before a token is chosen, in the order in which it is applied."""
    if params.logit_bias:
        yield f"logit_bias of {len(params.logit_bias)} tokens"
    if params.repetition_penalty != 1.0:
        encoder = manifest.model.encoder
        whole = encoder is None or encoder.penalizes_prompt
        where = "of the prompt and the answer" if whole else "of the answer, and on the prompt's first"
        yield f"repetition_penalty {params.repetition_penalty:g}, on tokens {where}"
    if params.presence_penalty or params.frequency_penalty:
        parts = (
            f"presence_penalty {params.presence_penalty:g}",
            f"frequency_penalty {params.frequency_penalty:g}",
        )
        yield f"{' and '.join(parts)}, on tokens of the answer"
    ends = sorted(params.end_ids(frozenset(manifest.stop_ids)))
    if params.min_new_tokens and any(token < manifest.model.vocab_size for token in ends):
        banned = ", ".join(map(str, ends))
        yield f"min_new_tokens {params.min_new_tokens}: no end token before that ({banned})"
    if params.grammar is not None:
        yield f"grammar {params.grammar.kind}: only tokens that continue a text of it"


def _choice(params: SamplingParams) -> str:
    if params.num_beams > 1:
        ends = "at the first finished beams" if params.early_stopping else "when no beam can improve"
        exponent = f"length_penalty {params.length_penalty:g}"
        return f"beam search with {params.num_beams} beams, {exponent}, ending {ends}"
    if params.temperature == 0:
        return "greedy: the highest score; ties go to the lowest id"
    filters = [f"temperature {params.temperature:g}"]
    filters += [f"top_k {params.top_k}"] if params.top_k else []
    filters += [f"top_p {params.top_p:g}"] if params.top_p < 1 else []
    filters += [f"min_p {params.min_p:g}"] if params.min_p else []
    return "sampled after " + ", then ".join(filters)


def _seed_rule(params: SamplingParams) -> str:
    if params.temperature == 0 or params.num_beams > 1:
        return "not needed: nothing is sampled"
    if params.seed is None:
        return "none given: each call uses a new one, so answers differ from call to call"
    answers = ", its index among the answers" if params.n > 1 else ""
    return (
        f"{params.seed}: a token depends on its logits, this seed{answers} and its position in "
        "the answer, not on other requests"
    )


def _notes(
    chat: Chat | None, ids: list[int], text: TextParts, params: SamplingParams, manifest: Manifest
) -> Iterator[str]:
    limit, vocabulary = manifest.build.max_seq_len, manifest.model.vocab_size
    if not ids:
        yield "refused: the prompt is empty"
    if len(ids) >= limit:
        yield (
            f"refused: the prompt has {len(ids)} tokens; the engine's limit is {limit}, including the answer"
        )
    unknown = [i for i in ids if not 0 <= i < vocabulary]
    if unknown:
        yield f"refused: ids outside the model's vocabulary of {vocabulary}: {unknown[:5]}"
    room = limit - len(ids)
    if params.max_new_tokens is not None and 0 < room < params.max_new_tokens:
        yield f"the prompt leaves room for {room} new tokens, not {params.max_new_tokens}"
    if params.stop and params.num_beams > 1:
        yield "beam search ends at stop ids only: stop strings cut the text afterwards"
    if params.stop and text.tokenizer is None:
        yield "refused: the engine has no tokenizer to find stop strings with"
    if chat is not None and text.chat is not None:
        whole = text.chat.prompt_text(chat.messages, variables=chat.variables)
        if len(whole) > len(_rendered(chat, text)):
            yield "the chat format's window dropped the oldest turns of the conversation"
