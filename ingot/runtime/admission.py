"""Checks prompts and sampling values against an engine's limits, and makes requests of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.encoding.prompt_rows import RowRules
from ingot.runtime.scheduling.inputs import InputRules, RequestInput, no_inputs
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.request import Probe, Request
from ingot.text.grammar.grammar_compiler import GrammarMatcher, Grammars


@dataclass(frozen=True)
class Admission:
    """An engine's limits. ``rope_offset`` gives the rotary table's offset for a prompt's length, ``rows`` the
    embeddings that a prompt may bring. Without ``inputs`` the model encodes nothing; ``grammars`` compile
    those of requests, which ``stop_ids`` end.
    """

    vocab_size: int
    max_batch_size: int
    max_seq_len: int
    blocks: BlockManager
    rope_offset: Callable[[int], int]
    inputs: InputRules | None = None
    grammars: Grammars | None = None
    stop_ids: frozenset[int] = frozenset()
    rows: RowRules | None = None

    def check(
        self, prompt_ids: Sequence[int], params: SamplingParams, inputs: Sequence[RequestInput] = ()
    ) -> list[int]:
        """The prompt's ids, if a request for new tokens can be served.

        Raises:
            RequestError: the prompt is empty or too long, prompt or bias have unknown ids, the beams cannot
                fit, or the model does not take these inputs.
        """
        self.check_inputs(inputs)
        ids = self.checked_ids(prompt_ids, room=1)
        bad = [token for token in params.logit_bias if token >= self.vocab_size]
        if bad:
            raise RequestError(
                "logit_bias has token ids outside the vocabulary",
                seen=bad[:5],
                allowed=f"0 to {self.vocab_size - 1}",
                field="logit_bias",
            )
        self._check_fit(len(ids), params)
        rules, length = params.transcript, len(ids)
        if rules is None:
            return ids
        if rules.largest >= self.vocab_size:
            seen, allowed = rules.largest, f"below {self.vocab_size}"
            raise RequestError("an id of the transcript's rules is unknown", seen=seen, allowed=allowed)
        if rules.framed >= length:
            raise RequestError(
                "the transcript's prompt lacks the token that starts it",
                seen=f"{length} tokens, {rules.framed} of them behind it",
                fix="the prompt, or the rules' framed",
            )
        return ids

    def matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """The initial state of the request's grammar, from any thread; may take seconds. None without a
        grammar.

        Raises:
            RequestError: the grammar cannot be served.
            DeviceError: llguidance is not installed.
        """
        return None if self.grammars is None else self.grammars.prepare(params, self.stop_ids)

    def check_inputs(self, inputs: Sequence[RequestInput]) -> None:
        """Raises:
        RequestError: the model does not take these inputs.
        """
        encoded = [given for given in inputs if given.encodes]
        if encoded and self.inputs is None:
            raise no_inputs()
        if self.inputs is not None:
            self.inputs.check(encoded)
        for given in inputs:
            given.content.result()

    def request(
        self,
        name: str,
        ids: list[int],
        params: SamplingParams,
        index: int,
        inputs: Sequence[RequestInput] = (),
        matcher: GrammarMatcher | None = None,
        salt: str = "",
        seed: int = 0,
    ) -> Request:
        """A request for one answer to checked ids and inputs, with a copy of its grammar's state. Its tokens
        are drawn from ``seed``.
        """
        room = self.max_seq_len - len(ids)
        new = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        offset = self.rope_offset(len(ids))
        return Request(
            name,
            ids,
            params,
            len(ids) + new,
            rope_offset=offset,
            cache_key=_cache_key(offset, inputs, salt),
            seed=seed,
            sample_index=index,
            inputs=tuple(inputs),
            matcher=None if matcher is None else matcher.copy(),
            probe=_probe(len(ids), params),
            penalizes_prompt=self.inputs is None or self.inputs.config.penalizes_prompt,
        )

    def checked_ids(self, prompt_ids: Sequence[int], room: int) -> list[int]:
        """The prompt's ids, if ``room`` more tokens fit after them.

        Raises:
            RequestError: the prompt is empty, too long, or holds unknown ids.
        """
        ids = list(prompt_ids)
        if not ids:
            raise RequestError(
                "the prompt is empty", seen="0 tokens", allowed="at least 1 token", fix="the prompt"
            )
        bad = [] if self._all_ids(ids) else [i for i in ids if not self._is_id(i)]
        if bad:
            raise RequestError(
                "token ids outside the vocabulary",
                seen=bad[:5],
                allowed=f"0 to {self.vocab_size - 1}",
                fix="the prompt's ids, or the tokenizer that produced them: it must be this model's",
            )
        if len(ids) > self.max_seq_len - room:
            raise RequestError(
                "the prompt is too long",
                seen=f"{len(ids)} tokens",
                allowed=f"<= {self.max_seq_len - room} tokens",
                fix="shorten the prompt, or raise `max_seq_len`, up to the engine's own limit",
            )
        return ids

    def _all_ids(self, ids: list[int]) -> bool:
        """Whether all are plain integers of the vocabulary; quick, as a first token waits for it."""
        if set(map(type, ids)) != {int}:
            return False
        try:
            values = np.frombuffer(array("q", ids), np.int64)
        except OverflowError:
            return False
        return bool(values.min() >= 0 and values.max() < self.vocab_size)

    def _is_id(self, token: object) -> bool:
        whole = isinstance(token, int) and not isinstance(token, bool)
        return whole and 0 <= token < self.vocab_size  # type: ignore[operator]

    def _check_fit(self, length: int, params: SamplingParams) -> None:
        """Refuse a beam search whose beams could never all be in the batch or in the cache, or that asks for
        log-probabilities of other tokens.
        """
        width = params.num_beams
        if width > 1 and params.logprobs:
            what = "beam search gives the log-probabilities of its own tokens alone"
            raise RequestError(what, seen=params.logprobs, allowed="0", field="logprobs")
        if width > self.max_batch_size:
            raise RequestError(
                "more beams than the engine's batch size",
                seen=width,
                allowed=f"<= {self.max_batch_size}",
                field="num_beams",
            )
        new = self.max_seq_len if params.max_new_tokens is None else params.max_new_tokens
        worst = 2 * width * self.blocks.blocks_for(min(length + new, self.max_seq_len))
        if width > 1 and worst > self.blocks.num_blocks:
            raise RequestError(
                "the beams do not fit in the KV cache",
                seen=f"{worst} blocks at worst",
                allowed=f"<= {self.blocks.num_blocks} blocks",
                fix="lower num_beams or max_new_tokens, or raise cache_tokens",
            )


def _probe(length: int, params: SamplingParams) -> Probe | None:
    """A transcript that wants log-probabilities has one after the token that starts it."""
    rules = params.transcript
    if rules is None or params.logprobs is None:
        return None
    return Probe(length - 1 - rules.framed, rules.no_speech)


def _cache_key(offset: int, inputs: Sequence[RequestInput], salt: str) -> bytes:
    """A request's cache key; an input without placeholders changes every token's keys and values. Requests of
    another ``salt`` find none of the others' blocks.
    """
    key = offset.to_bytes(8, "little") + b"".join(one.digest for one in inputs if not one.tokens)
    return hashlib.blake2b(key, key=hashlib.sha256(salt.encode()).digest()).digest() if salt else key
