"""How large steps become, and which sizes of them have CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left

from ingot.config.modality import Modality

# Where memory allows, prompts that wait may fill a step of so many token budgets, and at most so many tokens.
WIDE_STEP, WIDEST_STEP = 4, 8192
LOGITS_CHUNK = 256  # most tokens per step of a request that wants the logits of each: they are wide
# Sizes of CUDA graphs of steps with prompts: tokens, so fine that padding costs less than single launches,
# and requests.
TOKEN_BUCKETS = (16, 32, *range(64, 513, 64), 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2176)
REQUEST_BUCKETS = (1, 8, 64, 256)
# Tokens of a chunk that is computed a few layers per step: more are cheaper each, and take longer per layer.
LAYERED_TOKENS = (64, 128, 192, 256, 384, 512)
# Ways of sampling; a decode step has a graph for each. Transcripts have their own: greedy ones, and those
# that sample or have other rules.
DRAW_KINDS = ("greedy", "unfiltered", "filtered", "penalized", "masked", "greedy_logprobs", "logprobs")
SPEECH_KINDS = ("transcript", "everything")
# Share of a decode step's time for an input that is encoded next to it; ten that wait have all of it.
ENCODER_SHARE = 0.1
ENCODER_PART = 2  # layers of the encoder that are computed at once then
ENCODED_AT_ONCE = 8  # inputs of one shape: their products fill a GPU
LOGITS_AT_ONCE = 5 * 2**20  # that sampling in PyTorch handles: bounds its 64-bit temporaries to about 320 MB


def most_tokens(token_budget: int, max_batch_size: int) -> int:
    """Tokens of the largest step."""
    budget = max(token_budget, max_batch_size)
    return budget + spare_tokens(budget)


def spare_tokens(token_budget: int) -> int:
    """Tokens by which a step may exceed its budget to end a prompt."""
    return token_budget // 16


def most_logits(token_budget: int, max_batch_size: int) -> int:
    """Rows of logits of the largest step."""
    return min(most_tokens(token_budget, max_batch_size), max(max_batch_size, LOGITS_CHUNK))


def draw_kinds(modality: Modality) -> tuple[str, ...]:
    """Ways of sampling for models of this modality."""
    return DRAW_KINDS if modality.takes_text else (*SPEECH_KINDS, *DRAW_KINDS)


def request_buckets(max_batch_size: int) -> tuple[int, ...]:
    """The ``REQUEST_BUCKETS`` for steps of up to so many requests."""
    return REQUEST_BUCKETS[: bisect_left(REQUEST_BUCKETS, max_batch_size) + 1]


def tile_list_length(num_tokens: int, num_requests: int, tile_rows: int) -> int:
    """Most tiles of up to ``tile_rows`` queries in such a step, whose prompts have at least two tokens
    each.
    """
    return num_tokens // tile_rows + min(num_requests, num_tokens // 2)


def batch_buckets(max_batch_size: int) -> list[int]:
    """Batch sizes of decode graphs: 1, 2, 4, then multiples of 8 until the largest batch fits."""
    buckets = [1, 2, 4, *range(8, max_batch_size + 8, 8)]
    return buckets[: bisect_left(buckets, max_batch_size) + 1]
