"""Whisper's decoding rules on a row of logits.

Owns which tokens may follow which in a transcript. Source: OpenAI's Whisper, ``SuppressTokens``,
``SuppressBlank`` and ``ApplyTimestampRules``.

    hold_to_transcript(rules, output_ids, logits)      # logits: float32 [vocab_size], changed in place
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ingot.config.transcript import DETECT, TranscriptRules

_NEVER = -math.inf


def hold_to_transcript(rules: TranscriptRules, output_ids: Sequence[int], row: torch.Tensor) -> None:
    """Rule out what cannot be the next token behind ``output_ids``."""
    place = len(output_ids)
    if place < len(rules.forced):
        forced = rules.forced[place]
        _leave(row, [forced] if forced != DETECT else rules.languages)
        return
    _rule_out(row, rules.suppressed)
    text = output_ids[len(rules.forced) :]
    if not text:
        _rule_out(row, rules.begin_suppressed)
    if rules.timestamps:
        _hold_timestamps(rules, text, row)
    else:
        row[rules.first_timestamp :] = _NEVER


def _hold_timestamps(rules: TranscriptRules, text: Sequence[int], row: torch.Tensor) -> None:
    """In pairs, unless the text ends; never falling, and no pair of length 0 but the first; first of all."""
    first = rules.first_timestamp
    after_time = len(text) >= 1 and text[-1] >= first
    in_pair = after_time and (len(text) < 2 or text[-2] >= first)
    if in_pair:
        row[first:] = _NEVER
    elif after_time:
        row[: rules.end] = _NEVER
    times = [token for token in text if token >= first]
    if times:
        row[first : times[-1] + (not after_time or in_pair)] = _NEVER
    if not text:
        row[:first] = _NEVER
        if rules.last_first is not None:
            row[first + rules.last_first + 1 :] = _NEVER
    if row[first:].logsumexp(0) > row[:first].max():
        row[:first] = _NEVER


def _leave(row: torch.Tensor, ids: Sequence[int]) -> None:
    kept = torch.tensor(ids, device=row.device)
    values = row[kept].clone()
    row.fill_(_NEVER)
    row[kept] = values


def _rule_out(row: torch.Tensor, ids: Sequence[int]) -> None:
    if ids:
        row[torch.tensor(ids, device=row.device)] = _NEVER
