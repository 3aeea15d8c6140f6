"""One sequence on its way through the executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.scheduling.inputs import EncoderEntry, RequestInput
from ingot.text.grammar.grammar_compiler import GrammarMatcher


class FinishReason(StrEnum):
    """Why a request ended: an end token or stop string, its length limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Probe:
    """A place in a prompt, and the token whose log-probability after it is wanted."""

    place: int
    token: int


@dataclass(eq=False)
class Request:
    """A prompt and its generated tokens.

    Attributes:
        max_total_tokens: prompt and output may reach this many tokens.
        rope_offset: rows added to positions, fixed by the prompt's length.
        cache_key: what else, besides tokens, decides the keys and values; equal tokens share blocks only
            under equal keys.
        all_logits, all_hidden: wants the logits, or last hidden states, of every prompt position; such a
            request reuses no prefix.
        heads: of cross-attention, as (layer, head), whose scores it wants beside its logits.
        seed: of all answers to its prompt: that of its values, or a random one.
        sample_index: which of the ``n`` answers to its prompt this is.
        width: places in the batch that it will take (the root of a beam search counts all its beams).
        num_computed: tokens whose keys and values are in the cache.
        num_reused: tokens of its prompt that were in the cache when it first entered a step; None before.
        num_published: full blocks that the prefix cache knows.
        blocks: cache blocks in order.
        block_hashes: hashes of its first full blocks, as far as they have been needed.
        held: not scheduled until its beam group moves on.
        num_pending: tokens that steps have chosen and the host has not read yet.
        pending_row: row of the newest of them on the device (in the last step's choices).
        inputs: what it carries beside ids, in the order of their places.
        encoded: entries of the encoder cache that it holds, by the index of the input.
        matcher: what its grammar allows; the host asks it between two tokens.
        sits_out: not scheduled until the mask of its next token is there.
        is_long: its prompt is cut into chunks beside decodes, to its end.
        arrival: its number in the order of submission.
        draw: the part of its ``RowSampling`` that all its tokens share; empty until first needed.
        probe: what else is wanted of its prompt; ``probed``: the result.
        penalizes_prompt: as in ``EncoderConfig``.
        ended: no longer scheduled; a step in flight may still compute a token of it.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    rope_offset: int = 0
    cache_key: bytes = b""
    all_logits: bool = False
    all_hidden: bool = False
    heads: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    sample_index: int = 0
    width: int = 1
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    num_reused: int | None = None
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    held: bool = False
    num_pending: int = 0
    pending_row: int = -1
    matcher: GrammarMatcher | None = None
    sits_out: bool = False
    is_long: bool = False
    arrival: int = 0
    draw: tuple[float | int | bool, ...] = ()
    ended: bool = False
    probe: Probe | None = None
    probed: float | None = None
    inputs: tuple[RequestInput, ...] = ()
    encoded: dict[int, EncoderEntry] = field(default_factory=dict)
    penalizes_prompt: bool = True

    @property
    def counted_ids(self) -> list[int]:
        """The prompt's ids for penalties, without the rows that it brings."""
        ids = self.prompt_ids
        for given in reversed([one for one in self.inputs if not one.encodes]):
            ids = ids[: given.place] + ids[given.end :]
        return ids if self.penalizes_prompt else ids[:1]

    @property
    def num_known(self) -> int:
        """Prompt and output tokens that the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, pending ones included."""
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no step has put into the cache yet."""
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending - self.num_computed

    @property
    def is_full(self) -> bool:
        """Whether it ends by length as soon as its pending tokens are read."""
        if not self.num_pending:
            return False
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending >= self.max_total_tokens

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Tokens [start, end) of prompt and output together, without pending ones."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : end - split]
        if end <= split:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[: end - split]
