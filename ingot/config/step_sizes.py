"""How large steps become, and which sizes of them have CUDA graphs.

Owns the arithmetic that the scheduler, the runner and the memory ledger share. Knows no request, no tensor.

    most_tokens(token_budget=2048, max_batch_size=64)  # 2176
"""

from __future__ import annotations

from bisect import bisect_left

LOGITS_CHUNK = 256  # most tokens a step of a request that wants the logits of each: they are wide
TOKEN_BUCKETS = (16, 32, *range(64, 513, 64), 640, 768, 896, 1024, 2048)  # of a prompt step's graph
REQUEST_BUCKETS = (1, 4, 16)  # of a prompt step's graph
# Ways of sampling; a decode step has a graph for each.
DRAW_KINDS = ("greedy", "unfiltered", "filtered", "penalized", "logprobs")
LOGITS_AT_ONCE = 5 * 2**20  # that sampling in PyTorch handles: bounds its 64-bit temporaries to about 320 MB


def most_tokens(token_budget: int, max_batch_size: int) -> int:
    """Tokens of the largest step."""
    budget = max(token_budget, max_batch_size)
    return budget + spare_tokens(budget)


def spare_tokens(token_budget: int) -> int:
    """Tokens that a step may compute beyond its budget when nothing of a prompt remains then."""
    return token_budget // 16


def most_logits(token_budget: int, max_batch_size: int) -> int:
    """Rows of logits of the largest step."""
    return min(most_tokens(token_budget, max_batch_size), max(max_batch_size, LOGITS_CHUNK))


def batch_buckets(max_batch_size: int) -> list[int]:
    """Batch sizes of decode graphs: 1, 2, 4, then multiples of 8 up to the first that holds the largest
    batch.
    """
    buckets = [1, 2, 4, *range(8, max_batch_size + 8, 8)]
    return buckets[: bisect_left(buckets, max_batch_size) + 1]
