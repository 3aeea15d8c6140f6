"""What Hugging Face's ``generate`` would do differently for a request.

The rules of transformers 5 (read in 5.23: ``GenerationMixin``, ``GenerationConfig``) are written down, not
run. The call compared with is ``model.generate`` with the prompt of the same tokenizer, the checkpoint's
generation_config, and the values that the request names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.engine.engine_text import TextParts
from ingot.engine.manifest import Manifest
from ingot.llm.explanation import StopRule
from ingot.llm.sampling_defaults import read_defaults
from ingot.text.chat.chat_format import ChatML, FramedFormat

CONFIG, CONFIG_OR_TOKENIZER = "config.json", "config.json or tokenizer"  # origins of a stop id
_NEW_TOKENS = 20  # when neither call nor generation_config names a length
# What generate takes where none is named.
_DEFAULTS = {"top_k": 50, "top_p": 1.0, "min_p": None, "temperature": 1.0}
# Keys of a generation_config that generate obeys and Ingot does not read → values that change nothing.
_OBEYED: dict[str, tuple[Any, ...]] = {
    "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "sequence_bias": ({},),
    "guidance_scale": (1,), "renormalize_logits": (False,), "stop_strings": ([],), "max_time": (),
    "num_beams": (1,), "num_return_sequences": (1,), "watermarking_config": (),
}  # fmt: skip
_OBEYED_SAMPLING = {"typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": ()}
_OBEYED_BEAMS = {"length_penalty": (1,), "early_stopping": (False,)}
_OUR_NAMES = {"num_return_sequences": "n", "stop_strings": "stop", "min_length": "min_new_tokens"}


@dataclass(frozen=True)
class GenerateCall:
    """A request as ``explain_request`` has read it.

    Attributes:
        params: its values, without the chat format's stop strings.
        given: names of the values that the request itself names.
        num_prompt_tokens, room: tokens of the prompt, and what the engine leaves for new ones.
        messages, rendered: a conversation and what the chat format wrote; None for other prompts.
        stops: what ends the answer.
    """

    manifest: Manifest
    text: TextParts
    params: SamplingParams
    given: frozenset[str]
    num_prompt_tokens: int
    room: int
    messages: Any
    rendered: str | None
    stops: tuple[StopRule, ...]

    @property
    def generation(self) -> dict[str, Any]:
        return self.manifest.generation

    @property
    def samples(self) -> bool:
        """Whether Ingot draws."""
        return self.params.temperature > 0 and self.params.num_beams == 1

    @property
    def hf_samples(self) -> bool:
        """Whether generate draws: the request has no name for do_sample."""
        return bool(self.generation.get("do_sample"))

    @property
    def hf_ends(self) -> tuple[Sequence[int], str]:
        """The ids that end generate's answer, and where they are from."""
        if self.params.stop_token_ids:
            return self.params.stop_token_ids, "the call, which overrides generation_config"
        if self.generation:
            return eos_ids(self.generation), "generation_config"
        own = {CONFIG, CONFIG_OR_TOKENIZER}
        return [s.id for s in self.stops if s.id is not None and own & set(s.origins)], CONFIG

    def hf_value(self, name: str, default: Any) -> Any:
        """The value that generate takes: the request's, generation_config's, its default."""
        if name in self.given:
            return getattr(self.params, name)
        stored = self.generation.get(name)
        return default if stored is None else stored


def eos_ids(generation: dict[str, Any]) -> tuple[int, ...]:
    """``eos_token_id`` of a generation_config, which is an id, a list of ids, or absent."""
    named = generation.get("eos_token_id")
    return tuple(named) if isinstance(named, (list, tuple)) else () if named is None else (named,)


def generate_differences(call: GenerateCall) -> Iterator[str]:
    """A sentence for each difference that this request meets on this engine; its subject is ``generate``."""
    for rule in (_prompt, _length, _ends, _choice, _values, _answers):
        yield from rule(call)


def _prompt(call: GenerateCall) -> Iterator[str]:
    tokenizer, chat = call.text.tokenizer, call.text.chat
    if call.rendered is None or tokenizer is None or chat is None:
        return
    if isinstance(chat, FramedFormat):
        yield (
            f"does not know the built-in format {chat.name}: apply_chat_template takes the tokenizer's own "
            "template, or raises if there is none"
        )
    for token in tokenizer.prefix_ids:
        shown = tokenizer.token_text(token)
        if call.rendered.startswith(shown):
            yield (
                f"gets a second {shown} (id {token}) at the start when the rendered prompt is "
                "encoded by tokenizer(text), unless add_special_tokens=False"
            )
    contents = " ".join(str(message.get("content")) for message in call.messages)
    typed = [text for text in tokenizer.special_tokens if text in contents]
    if typed and not isinstance(chat, ChatML):
        yield (
            f"turns {', '.join(typed)} inside a message into a control token, as its tokenizer does "
            "in any text; in Ingot it stays text"
        )


def _length(call: GenerateCall) -> Iterator[str]:
    wanted, stored = call.params.max_new_tokens, call.generation.get("max_length")
    ours = call.room if wanted is None else min(wanted, call.room)
    theirs = call.hf_value("max_new_tokens", None)
    if theirs is not None:
        if theirs != ours:
            limit = f"the engine's limit is {call.manifest.build.max_seq_len} tokens in total"
            reason = limit if ours == call.room else "the request's limit"
            yield f"stops after {theirs} new tokens; Ingot after {ours}: {reason}"
    elif isinstance(stored, int):
        left = stored - call.num_prompt_tokens
        if left != ours:
            does = f"stops after {left} new tokens" if left > 0 else "raises ValueError"
            yield (
                f"{does}: generation_config's max_length {stored} counts the prompt's "
                f"{call.num_prompt_tokens} tokens; Ingot does not read it and stops after {ours}"
            )
    else:
        left = min(_NEW_TOKENS, call.manifest.model.max_positions - call.num_prompt_tokens)
        if left != ours:
            yield f"stops after {left} new tokens, its own default; Ingot after {ours}"


def _ends(call: GenerateCall) -> Iterator[str]:
    theirs, source = call.hf_ends
    ours = {s.id: s.text for s in call.stops if s.id is not None and s.active}
    extra = [token for token in ours if token not in theirs]
    if extra:
        named = ", ".join(f"{token} {ours[token]}" if ours[token] else str(token) for token in extra)
        yield f"does not stop at {named}: its eos_token_id is {list(theirs) or None}, from {source}"
    missed = [token for token in theirs if token not in ours]
    if missed:
        yield f"still stops at {', '.join(map(str, missed))}: it has no ignore_eos"
    strings = [s.text for s in call.stops if s.id is None]
    if strings:
        yield (
            f"needs stop_strings={strings!r} and tokenizer= in the call, and leaves the stop string in the "
            "text; Ingot cuts it off"
        )
    if call.params.min_new_tokens and extra:
        yield (
            f"bans only its eos_token_id before {call.params.min_new_tokens} new tokens are "
            f"generated; Ingot bans {', '.join(map(str, extra))} too"
        )


def _choice(call: GenerateCall) -> Iterator[str]:
    params = call.params
    temperature = call.hf_value("temperature", 1.0)
    if call.hf_samples and temperature == 0:
        yield (
            "raises ValueError: do_sample is true in generation_config and temperature 0 is not allowed then"
        )
    elif call.hf_samples and not call.samples:
        how = f"searches with {params.num_beams} beams" if params.num_beams > 1 else "is greedy"
        yield f"samples at temperature {temperature}: do_sample is true in generation_config; Ingot {how}"
    elif call.samples and not call.hf_samples:
        yield (
            f"stays greedy and ignores temperature {params.temperature:g}: do_sample is not true in "
            "generation_config, so the call must set do_sample=True"
        )
        yield from (f"with do_sample=True it {sentence}" for sentence in _draw(call))
    elif call.samples:
        yield from _draw(call)


def _draw(call: GenerateCall) -> Iterator[str]:
    """Both draw: the values that differ."""
    refused = read_defaults(call.generation).refused
    for name, default in _DEFAULTS.items():
        theirs, ours = call.hf_value(name, default), getattr(call.params, name)
        if name in refused and name not in call.given:
            yield f"uses generation_config's {name} {theirs} as it is; Ingot refuses it and uses {ours:g}"
        elif (theirs or 0) != ours:
            source = "its own default" if call.generation.get(name) is None else "generation_config"
            all_tokens = " (all tokens)" if name == "top_k" and ours == 0 else ""
            yield f"uses {name} {theirs}, {source}; Ingot uses {ours:g}{all_tokens}"
    if call.params.seed is not None:
        yield (
            f"has no per-request seed (here {call.params.seed}): it samples with torch's global "
            "generator, so the same seed gives different tokens"
        )


def _values(call: GenerateCall) -> Iterator[str]:
    """Penalties, and what only generate reads of a generation_config."""
    theirs, ours = call.hf_value("repetition_penalty", 1.0), call.params.repetition_penalty
    if theirs != ours:
        yield f"uses repetition_penalty {theirs}, generation_config; Ingot uses {ours:g}"
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(call.params, name):
            yield f"has no {name} (here {getattr(call.params, name):g})"
    obeyed = _OBEYED | (_OBEYED_SAMPLING if call.hf_samples else {})
    obeyed |= _OBEYED_BEAMS if call.params.num_beams > 1 else {}
    for name, neutral in obeyed.items():
        stored = call.generation.get(name)
        if not (stored is None or stored in neutral or _OUR_NAMES.get(name, name) in call.given):
            yield f"applies {name} {stored} from generation_config, which Ingot does not read"


def _answers(call: GenerateCall) -> Iterator[str]:
    count = call.params.n
    if count == 1:
        return
    if call.params.num_beams == 1 and not call.hf_samples:
        unless = " unless the call sets do_sample=True" if call.samples else ""
        yield f"raises ValueError{unless}: greedy search gives one answer, not {count}"
        return
    theirs, source = call.hf_ends
    filler, why = call.generation.get("pad_token_id"), "pad_token_id"
    if filler is None:
        filler = next(iter(theirs), None)
        why = f"the first eos_token_id, from {source}, since there is no pad_token_id"
    if filler is not None:
        yield f"pads the shorter of the {count} answers with id {filler} ({why}); Ingot does not pad"
