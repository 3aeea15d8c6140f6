"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ingot.runtime.likelihood import Keep
from ingot.runtime.sampling.log_normaliser import log_normaliser
from ingot.serve.engine_calls.process_protocol import Logprob

PART_VALUES = 4096  # log-probabilities in a part of a prompt's scores


def keep_scores(prompt_ids: Sequence[int], top: int) -> Keep:
    """Of a chunk's logits, for each token that follows: its log-probability, the ``top`` highest ones and
    their ids, float64 [count, 1 + 2 * top] on the CPU. After the last token nothing follows.
    """

    def keep(logits: torch.Tensor, start: int) -> torch.Tensor:
        following = prompt_ids[start + 1 : start + 1 + len(logits)]
        targets = torch.tensor(following, dtype=torch.int64, device=logits.device)
        logprobs = logits[: len(following)].double() - log_normaliser(logits[: len(following)])
        best = logprobs.topk(min(top, logprobs.shape[1]), dim=1)
        chosen = logprobs.gather(1, targets[:, None])
        return torch.cat([chosen, best.values, best.indices.double()], dim=1).cpu()

    return keep


def scores(prompt_ids: Sequence[int], kept: torch.Tensor) -> Iterator[tuple[list[Logprob], bool]]:
    """What was kept of a prompt, as one entry for each token but the first; in parts, each with whether it is
    the last. Other requests wait for a part, a few milliseconds.
    """
    width = (kept.shape[1] - 1) // 2
    count = max(1, PART_VALUES // (1 + width))
    for start in range(0, max(1, len(kept)), count):
        rows = kept[start : start + count].tolist()
        found = []
        for token, (chosen, *rest) in zip(prompt_ids[1 + start :], rows, strict=False):
            top = zip(map(int, rest[width:]), rest[:width], strict=True)
            found.append(Logprob(token, chosen, tuple(top)))
        yield found, start + count >= len(kept)
