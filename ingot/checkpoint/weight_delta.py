"""A model that is published as its difference from another, such as Vicuna v0 and v1.1 over LLaMA.

The sum is FastChat's, bit for bit: it loads both in fp16 and adds them. A sum of two values of fp16 that is
made in fp32 and rounded once more is the sum in fp16, since 24 bits are at least 2 · 11 + 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
_PER_TOKEN = (EMBEDDING, "lm_head.weight")  # a row for each token; v0 adds a token
_COMPUTED = ".rotary_emb.inv_freq"  # in older files; readers compute it
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LISTED = 24  # differences that an error lists one by one
_SAMPLE = 2048  # rows that are judged
_CHUNK = 1 << 24  # values in fp32 at a time
_LARGE = 0.5  # of a base's row: what fine-tuning changes is a few hundredths
_FEWEST = 0.02  # inexact sums of a wrong base, below which the check says nothing


def check_pair(base: Checkpoint, delta: Checkpoint) -> list[str]:
    """Check that ``delta`` is a delta over ``base``; returns notes for the user.

    Raises CheckpointError where names, shapes or sizes differ, one of them is quantized or no LLaMA, they are
    swapped, ``delta`` holds whole weights, or it was made from another base.
    """
    for role, one in (("BASE", base), ("DELTA", delta)):
        _check_kind(role, one)
    ours, theirs = base.tensors[EMBEDDING].shape, delta.tensors[EMBEDDING].shape
    if len(ours) == len(theirs) == 2 and ours[1] == theirs[1]:
        _check_swapped(base, delta)
    differences = _differences(base, delta)
    if differences:
        more = f" and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        raise CheckpointError(
            f"DELTA does not belong to this base: {len(differences)} differences",
            seen="; ".join(differences[:_LISTED]) + more,
            allowed="equal names and shapes; embedding and head of DELTA may have more rows",
            fix="give the base that DELTA was made from, such as LLaMA 7B for vicuna-7b-delta",
        )
    return _judge(base, delta)


def merged_tensors(base: Checkpoint, delta: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the sum, in the dtype of ``delta``; in an order that opens files seldom.

    Raises CheckpointError where a tensor cannot be read, or a sum is not finite.
    """
    names = tensor_names(delta)
    order = sorted(names, key=lambda name: (delta.tensors[name].file, base.tensors[name].file))
    for name in order:
        total = _sum(base.read(name), delta.read(name))
        if not bool(torch.isfinite(total).all()):
            fix = "give the base that DELTA was made from"
            raise CheckpointError(f"{name}: the sum is not finite", seen=total.dtype, fix=fix)
        yield name, total


def added_rows(base: Checkpoint, delta: Checkpoint) -> int:
    """Tokens that ``delta`` has beyond those of ``base``."""
    return delta.tensors[EMBEDDING].shape[0] - base.tensors[EMBEDDING].shape[0]


def tensor_names(one: Checkpoint) -> list[str]:
    """What a merge reads and writes."""
    return [name for name in one.tensors if not name.endswith(_COMPUTED)]


def _sum(base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Rows that ``base`` lacks stay as ``delta`` has them: FastChat adds rows of zeros to the base."""
    total = delta.clone(memory_format=torch.contiguous_format)
    ours, theirs = base.reshape(-1), total.view(-1)
    for start in range(0, ours.numel(), _CHUNK):
        part = ours[start : start + _CHUNK].to(delta.dtype).float()
        theirs[start : start + len(part)] = (part + theirs[start : start + len(part)].float()).to(delta.dtype)
    return total


def _check_kind(role: str, one: Checkpoint) -> None:
    kind = one.config.get("model_type")
    if one.alone or kind != "llama" or EMBEDDING not in one.tensors:
        seen = kind if EMBEDDING in one.tensors else f"{kind}, no {EMBEDDING}"
        fix = f"give {role} as a LLaMA's folder in Hugging Face's layout"
        raise CheckpointError(f"{role} is no LLaMA", seen=seen, allowed="llama", fix=fix)
    odd = sorted({str(one.tensors[name].dtype) for name in tensor_names(one)} - set(map(str, _DTYPES)))
    narrow = one.packed is not None or bool(one.widened)
    if narrow or odd:
        raise CheckpointError(
            f"{role} is quantized",
            seen=one.folder if narrow else odd,
            allowed="weights in fp16, bf16 or fp32",
            fix="give the original weights; `ingot build` with `quant` quantizes the merged ones",
        )


def _differences(base: Checkpoint, delta: Checkpoint) -> list[str]:
    found = [
        f"{key} {base.config.get(key)} in BASE and {delta.config.get(key)} in DELTA"
        for key in _SIZES
        if base.config.get(key) != delta.config.get(key)
    ]
    ours, theirs = tensor_names(base), tensor_names(delta)
    for role, here, there in (("BASE", ours, theirs), ("DELTA", theirs, ours)):
        alone = sorted(set(here) - set(there))
        if alone:
            found.append(f"only in {role}: {shorten(alone)} ({len(alone)})")
    for name in [name for name in theirs if name in base.tensors]:
        left, right = base.tensors[name].shape, delta.tensors[name].shape
        longer = name in _PER_TOKEN and left[1:] == right[1:] and left[0] < right[0]
        if left != right and not longer:
            found.append(f"{name} {list(left)} in BASE and {list(right)} in DELTA")
    rows = {delta.tensors[name].shape[0] for name in _PER_TOKEN if name in delta.tensors}
    if len(rows) > 1:
        found.append(f"embedding and head of DELTA have {' and '.join(map(str, sorted(rows)))} rows")
    return found


def _embeddings(base: Checkpoint, delta: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the same tokens, evenly spread, in DELTA's dtype."""
    change = delta.read(EMBEDDING)
    own = base.read(EMBEDDING).to(change.dtype)
    rows = min(len(own), len(change))
    chosen = torch.arange(0, rows, max(1, rows // _SAMPLE))
    return own[chosen], change[chosen]


def _check_swapped(base: Checkpoint, delta: Checkpoint) -> None:
    """By the typical length of an embedding row: a delta's is a small part of its base's."""
    own, change = (float(rows.double().norm(dim=1).median()) for rows in _embeddings(base, delta))
    seen = f"a typical embedding row is {own:.3g} long in BASE and {change:.3g} in DELTA"
    if own < _LARGE * change:
        raise CheckpointError("BASE and DELTA are swapped", seen=seen, fix="give the base first")
    if change > _LARGE * own:
        raise CheckpointError(
            "DELTA holds whole weights, or BASE is a delta itself",
            seen=seen,
            allowed=f"rows of DELTA at most {_LARGE:g} of BASE's",
            fix="use weights that are published whole (Vicuna from v1.3 on) as they are",
        )


def _judge(base: Checkpoint, delta: Checkpoint) -> list[str]:
    """Refuse a base of the right shape that DELTA was not made from.

    A target and its base are values on the grid of their dtype, and so close that their difference is exact;
    the exact sum of the right base and the delta is on the grid, too. With another base it is often between
    two values. How often is measured with this base's own rows in another order.
    """
    own, change = _embeddings(base, delta)
    right, wrong = _inexact(own, change), _inexact(own.roll(1, 0), change)
    notes = []
    if wrong < _FEWEST:
        notes.append("the embedding does not show whether DELTA was made from this base")
    elif right > wrong / 2:
        raise CheckpointError(
            "DELTA was made from another base of the same shape",
            seen=f"{right:.1%} of the embedding's sums are inexact, {wrong:.1%} with rows of other tokens",
            allowed="at most half as many",
            fix="give the base that DELTA was made from; Vicuna v0 and v1.1 are over LLaMA 1, not Llama 2",
        )
    if base.tensors[EMBEDDING].dtype == torch.bfloat16 and change.dtype == torch.float16:
        notes.append("BASE is in bf16, DELTA in fp16: if BASE was rounded, so is the result")
    return notes


def _inexact(base: torch.Tensor, delta: torch.Tensor) -> float:
    """Of the values that the delta changes, the part whose sum its dtype cannot hold."""
    total = base.double() + delta.double()
    between = total.to(delta.dtype).double() != total
    return float(between[delta != 0].double().mean()) if bool((delta != 0).any()) else 0.0
