"""A request explained before it runs, without weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ingot.config.decoder_config import DecoderConfig
from ingot.config.sampling_params import VALUE_NAMES, SamplingParams, named_values
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.errors import RequestError
from ingot.llm.explanation import Explanation, Origin, SamplingValue, StopRule, TokenPiece
from ingot.llm.generate_rules import (
    CONFIG,
    CONFIG_OR_TOKENIZER,
    GenerateCall,
    eos_ids,
    generate_differences,
)
from ingot.llm.picture_prompts import with_inputs
from ingot.llm.prompt_inputs import (
    Chat,
    Messages,
    PromptLike,
    is_conversation,
    prompt_pieces,
    with_chat_stops,
)
from ingot.llm.sampling_defaults import READ_FIELDS, SAMPLED_FIELDS, Defaults, read_defaults
from ingot.runtime.scheduling.inputs import no_inputs
from ingot.text.chat.chat_format import ChatML
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
    chat = Chat.of(prompt) if is_conversation(prompt) else None  # type: ignore[arg-type]
    if chat is not None and manifest.model.modality.in_messages:
        chat = replace(chat, messages=with_inputs(chat.messages, lambda part, where: Input(None)))
    pieces, _ = prompt_pieces(prompt if chat is None else chat, text)
    ids, tokens, prompt_text = _read(pieces, manifest.model, text.tokenizer)
    used = wanted if chat is None else with_chat_stops(wanted, text)
    limit = manifest.build.max_seq_len
    room = max(limit - len(ids), 0)
    messages = rendered = chat_format = None
    notes = list(_notes(ids, text, used, manifest))
    if chat is not None and text.chat is not None:
        messages, chat_format = chat.messages, text.chat.name
        rendered = text.chat.prompt_text(messages, tokenizer=text.tokenizer, variables=chat.variables)
        if len(text.chat.prompt_text(messages, variables=chat.variables)) > len(rendered):
            notes.append("the chat format's window dropped the oldest turns of the conversation")
    stops = tuple(_stop_rules(manifest, text, used, wanted))
    call = GenerateCall(manifest, text, wanted, given, len(ids), room, messages, rendered, stops)
    return Explanation(
        kind=_kind(prompt) if chat is None else "conversation",
        chat_format=chat_format,
        prompt_text=prompt_text,
        rendered_text=rendered,
        tokens=tokens,
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
        notes=tuple(notes),
    )


def _values(defaults: Defaults, params: Given) -> tuple[SamplingParams, frozenset[str]]:
    """The values of the request, and the names of those that it gives itself."""
    if params is None:
        return defaults.params, frozenset()
    if isinstance(params, SamplingParams):
        plain = SamplingParams()
        return params, frozenset(n for n in VALUE_NAMES if getattr(params, n) != getattr(plain, n))
    named = named_values(params)
    return defaults.params.replace(**named), frozenset(named)


def _kind(prompt: object) -> Literal["text", "token ids", "parts"]:
    if isinstance(prompt, str):
        return "text"
    parts = Prompt.of(prompt).parts
    if len(parts) > 1:
        return "parts"
    return "text" if isinstance(parts[0], str) else "token ids"


def _read(
    pieces: Sequence[Piece], model: DecoderConfig, tokenizer: Tokenizer | None
) -> tuple[list[int], tuple[TokenPiece, ...], str | None]:
    """Ids, tokens and text of a prompt as the model reads it; a picture is not read: its placeholders stand
    for it. Raises RequestError where the model takes no such input.
    """
    ids: list[int] = []
    tokens: list[TokenPiece] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, Embeddings):
            what = "only text and token ids are taken here"
            raise RequestError(what, seen="embeddings", fix="the prompt")
        if isinstance(piece, Input):
            if not model.placeholders:
                raise no_inputs()
            assert model.encoder is not None
            stands = TokenPiece(model.encoder.placeholder_id, MARK, None, special=True)
            ids += [stands.id] * model.placeholders
            tokens += [stands] * model.placeholders
            texts.append(MARK)
            continue
        ids += piece
        tokens += [_token(i, tokenizer) for i in piece]
        if tokenizer is not None and tokenizer.joins_bytes:
            texts.append(b"".join(map(tokenizer.token_bytes, piece)).decode("utf-8", "backslashreplace"))
        elif tokenizer is not None:
            texts.append(tokenizer.decode(piece, skip_special_tokens=False))
    return ids, tuple(tokens), None if tokenizer is None else "".join(texts)


def _token(token_id: int, tokenizer: Tokenizer | None) -> TokenPiece:
    data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    if tokenizer is None or not data:
        return TokenPiece(token_id, None, None, False)
    text = data.decode("utf-8", "backslashreplace")
    whole = data == data.decode("utf-8", "replace").encode()
    return TokenPiece(token_id, text, None if whole else data.hex(" "), tokenizer.is_special(token_id))


def _stop_rules(
    manifest: Manifest, text: TextParts, used: SamplingParams, wanted: SamplingParams
) -> Iterator[StopRule]:
    """Every id and string that can end the answer; ``used``: the ``wanted`` values with the chat format's
    stop strings. An engine does not keep config.json: an id that nothing else names was named there.
    """
    tokenizer, chat = text.tokenizer, text.chat
    named = eos_ids(manifest.generation)
    of_chat = () if tokenizer is None or chat is None else chat.stop_ids(tokenizer)
    for token in sorted({*manifest.stop_ids, *used.stop_token_ids}):
        asked = token in used.stop_token_ids
        origins = []
        if token in manifest.stop_ids:
            is_eos = tokenizer is not None and token == tokenizer.eos_id
            origins += ["generation_config"] if token in named else []
            origins += ["tokenizer"] if is_eos and token in of_chat else []
            origins += (
                ["chat format"] if token in of_chat and (not is_eos or isinstance(chat, ChatML)) else []
            )
            origins = origins or [CONFIG_OR_TOKENIZER if is_eos and not named else CONFIG]
        shown = None if tokenizer is None else tokenizer.token_text(token) or None
        yield StopRule(
            shown, token, (*origins, *(["request"] if asked else [])), asked or not used.ignore_eos
        )
    own = used.stop[len(wanted.stop) :]
    for string in dict.fromkeys(used.stop):
        places = (("request", wanted.stop), ("chat format", own))
        yield StopRule(string, None, tuple(name for name, given in places if string in given), True)


def _sampling(
    used: SamplingParams,
    wanted: SamplingParams,
    given: frozenset[str],
    defaults: Defaults,
    generation: Mapping[str, Any],
) -> Iterator[SamplingValue]:
    greedy = "no effect: temperature 0 is greedy" if used.temperature == 0 else None
    extra = used.stop[len(wanted.stop) :]
    for name in VALUE_NAMES:
        value, stored = getattr(used, name), generation.get(name)
        differs = stored not in (None, value)
        sampled = name in SAMPLED_FIELDS
        origin: Origin = "default"
        note = None
        if name in given:
            origin = "request"
            if greedy and sampled and name != "temperature":
                note = greedy
            elif differs and (sampled or name in READ_FIELDS):
                note = f"generation_config says {stored}"
        elif name in defaults.used and getattr(wanted, name) == getattr(defaults.params, name):
            origin = "generation_config"
            note = greedy if sampled else None
            if name == "temperature" and stored is None:
                note = "do_sample is true and no temperature is given"
        elif name in defaults.refused:
            note = f"generation_config says {stored}, which is out of range"
        elif name in defaults.used:
            note = f"the request sets all values; generation_config says {stored}"
        elif sampled and differs and not generation.get("do_sample"):
            note = f"generation_config says {stored}, but not do_sample: true"
        elif name == "stop" and extra:
            note = f"from the chat format: {', '.join(map(repr, extra))}"
        yield SamplingValue(name, value, origin, note)


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


def _notes(ids: list[int], text: TextParts, params: SamplingParams, manifest: Manifest) -> Iterator[str]:
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
    begin = None if text.tokenizer is None else text.tokenizer.bos_id
    if text.tokenizer is not None and begin is not None and ids[:2] == [begin, begin]:
        token = text.tokenizer.token_text(begin)
        yield f"the prompt begins with {token} twice, as no text of the model's training did"
    room = limit - len(ids)
    if params.max_new_tokens is not None and 0 < room < params.max_new_tokens:
        yield f"the prompt leaves room for {room} new tokens, not {params.max_new_tokens}"
    if params.stop and params.num_beams > 1:
        yield "beam search ends at stop ids only: stop strings cut the text afterwards"
    if params.stop and text.tokenizer is None:
        yield "refused: the engine has no tokenizer to find stop strings with"
