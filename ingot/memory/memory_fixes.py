"""Changes after which an engine fits, ranked by cost, and what fits on common cards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from ingot.config.build_config import NARROW_KV_DTYPES
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import SCHEMES, weight_only_schemes
from ingot.config.units import gib_text, size_text
from ingot.memory.fix_text import where_of
from ingot.memory.ledger import Capacity, Ledger, MemorySetting, ledger
from ingot.models.model_registry import can_calibrate
from ingot.quant.methods.rotated_weights import can_rotate

Goal = Literal["fits", "loads"]
Changes = dict[str, int | float | str]
Cost = Literal["headroom", "limits", "speed", "quality", "hardware"]
COSTS: tuple[Cost, ...] = ("headroom", "limits", "speed", "quality", "hardware")
MOST_FRACTION = 0.95
_LEAST_TOKEN_BUDGET = 64
_MOST_BATCH = 1 << 16
# What PyTorch reports of cards, by what they are sold as; others of the same name differ by 2 % or so.
CARDS: dict[str, int] = {
    "8 GB": int(7.8 * 2**30),
    "12 GB": int(11.8 * 2**30),
    "16 GB": int(15.7 * 2**30),
    "24 GB": int(23.6 * 2**30),
    "40 GB": int(39.4 * 2**30),
    "80 GB": int(79.2 * 2**30),
    "141 GB": int(139.8 * 2**30),
}


@dataclass(frozen=True)
class Fix(JsonConfig):
    """A change after which it fits.

    Attributes:
        changes: field → value: limits of an engine, fields of ``RuntimeConfig``, ``dtype`` and ``quant`` of a
            build, or ``gpu``, the size of another card.
        where: what takes the change in Python.
        needed, usable: bytes, then.
    """

    changes: Changes
    where: str
    cost: Cost
    note: str
    needed: int
    usable: int
    setting: MemorySetting


@dataclass(frozen=True)
class CardRow(JsonConfig):
    """What a card holds in one number format: 0 where not even one request fits."""

    card: str
    total: int
    dtype: str
    quant: str
    max_batch_size: int
    max_seq_len: int


@dataclass(frozen=True)
class _Way:
    """One knob: how it changes a setting, and its range of values."""

    field: str
    cost: Cost
    note: str
    change: Callable[[MemorySetting, int], MemorySetting]
    least: int
    most: int
    step: int = 1


def fixes(found: Ledger, goal: Goal = "fits") -> list[Fix]:
    """Changes that reach the goal, the cheapest first: headroom, then limits, speed, quality, and last
    another card. Single changes where one is enough, else several at once; empty if nothing helps.
    """
    if found.capacity is None or _reached(found, goal):
        return []
    search = _Search(found.capacity, goal)
    single = [*search.singles(found.setting), *search.formats(found.setting)]
    options = single or list(search.combined(found.setting))
    options += search.cards(found.setting)
    return sorted(options, key=lambda fix: COSTS.index(fix.cost))


def eased(found: Ledger) -> list[Fix]:
    """Smaller caches and steps for what should start and ran out all the same: memory went elsewhere."""
    if found.capacity is None or not found.loads:
        return []
    search, runtime = _Search(found.capacity, "loads"), found.setting.runtime
    fraction, budget = round(runtime.memory_fraction - 0.1, 2), max(runtime.token_budget // 2, 1)
    tries: list[tuple[Changes, str]] = []
    if found.setting.device == "cuda" and fraction > 0:
        tries.append(({"memory_fraction": fraction}, "a smaller cache"))
    if budget < runtime.token_budget:
        tries.append(({"token_budget": budget}, _CHUNKS))
    changed = [(c, found.setting.replace(runtime=runtime.replace(**c)), note) for c, note in tries]
    return [search.fix(s, changes, "speed", note) for changes, s, note in changed if search.bill(s).loads]


def fits_by_card(setting: MemorySetting) -> Iterator[CardRow]:
    """For every common card and number format: the largest batch at ``max_seq_len``, the longest request at
    batch 1; no other process holds memory there.
    """
    forms = [(form, *_bills(form)) for form in _formats(setting)]
    for name, total in CARDS.items():
        card = Capacity(name, total)
        for form, by_batch, by_length in forms:
            batch = _largest(lambda n, b=by_batch: replace(b(n), capacity=card).fits, 1, _MOST_BATCH)  # type: ignore[misc]  # noqa: B023
            longest = form.model.max_positions
            length = _largest(lambda n, b=by_length: replace(b(n), capacity=card).fits, 1, longest)  # type: ignore[misc]  # noqa: B023
            yield CardRow(name, total, form.dtype, form.quant.label, batch, length)


def _bills(form: MemorySetting) -> tuple[Callable[[int], Ledger], Callable[[int], Ledger]]:
    """By the batch, and by the length of the one request; cards share what was counted."""
    whole = form.replace(device="cuda", runtime=form.runtime.replace(cache_tokens=None))
    one, weights = whole.replace(max_batch_size=1), whole.weight_bytes()
    return (
        cache(lambda batch: ledger(whole.replace(max_batch_size=batch), weights=weights)),
        cache(lambda length: ledger(one.replace(max_seq_len=length), weights=weights)),
    )


def _largest(reaches: Callable[[int], bool], least: int, most: int) -> int:
    """The largest value that reaches a goal, 0 if the least does not; larger values need more."""
    if least > most or not reaches(least):
        return 0
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle - 1)
    return low


class _Search:
    """Tries settings on one capacity."""

    def __init__(self, capacity: Capacity, goal: Goal) -> None:
        self.capacity = capacity
        self.goal: Goal = goal

    def bill(self, setting: MemorySetting) -> Ledger:
        return ledger(setting, self.capacity)

    def largest(self, at: Callable[[int], MemorySetting], least: int, most: int) -> int:
        """The largest value that reaches the goal, 0 if the least does not."""
        return _largest(lambda n: _reached(self.bill(at(n)), self.goal), least, most)

    def singles(self, setting: MemorySetting) -> Iterator[Fix]:
        runtime = setting.runtime
        for percent in range(int(runtime.memory_fraction * 100) + 1, int(MOST_FRACTION * 100) + 1):
            value = percent / 100
            changed = setting.replace(runtime=runtime.replace(memory_fraction=value))
            if _reached(self.bill(changed), self.goal):
                note = "leaves less for other processes"
                yield self.fix(changed, {"memory_fraction": value}, "headroom", note)
                break
        changed = setting.replace(runtime=runtime.replace(embedding="host"))
        if _reached(self.bill(changed), self.goal):  # never where it is there, or may not go
            yield self.fix(changed, {"embedding": "host"}, "speed", _HOST)
        for way in _ways(setting):
            steps = self.largest(
                lambda n, w=way: w.change(setting, n * w.step),  # type: ignore[misc]
                -(-way.least // way.step),
                way.most // way.step,
            )
            if steps:
                size = steps * way.step
                yield self.fix(way.change(setting, size), {way.field: size}, way.cost, way.note)
        tokens = setting.blocks_per_request * runtime.block_size
        if runtime.cache_tokens is not None and runtime.cache_tokens < tokens:
            changed = setting.replace(runtime=runtime.replace(cache_tokens=tokens))
            if _reached(self.bill(changed), self.goal):
                note = "room for one request of the full length"
                yield self.fix(changed, {"cache_tokens": tokens}, "headroom", note)

    def formats(self, setting: MemorySetting) -> Iterator[Fix]:
        """A cache in 8 bits, and the first other number format of the weights that is enough: that costs the
        least quality. None on a CPU, which widens the weights at every step.
        """
        if setting.device == "cpu":
            return
        if setting.runtime.kv_dtype not in NARROW_KV_DTYPES:
            narrow = setting.replace(runtime=setting.runtime.replace(kv_dtype="int8"))
            if _reached(self.bill(narrow), self.goal):
                yield self.fix(narrow, {"kv_dtype": "int8"}, "quality", _KV_QUALITY)
        for form in _smaller_formats(setting):
            if _reached(self.bill(form), self.goal):
                yield self.fix(form, _format_changes(setting, form), "quality", _QUALITY)
                return

    def combined(self, setting: MemorySetting) -> Iterator[Fix]:
        """Several knobs at once: all of the memory and one limit; a smaller number format and one more; else
        batch 1 in small chunks and the longest request that fits then.
        """
        if setting.runtime.memory_fraction < MOST_FRACTION:
            runtime = setting.runtime.replace(memory_fraction=MOST_FRACTION)
            for fix in self.singles(setting.replace(runtime=runtime)):
                changes: Changes = {"memory_fraction": MOST_FRACTION, **fix.changes}
                yield fix.replace(changes=changes, where=where_of(changes))
        for form in _smaller_formats(setting):
            found = [_joined(setting, form, fix) for fix in self.singles(form)]
            if found:
                yield from found
                return
        for form in (setting, *_smaller_formats(setting)):
            length = self.largest(lambda n, s=form: _one_short(s, n), 1, setting.max_seq_len)  # type: ignore[misc]
            if length:
                one = _one_short(form, length)
                changes = {"max_batch_size": 1, "max_seq_len": length}
                changes["token_budget"] = _LEAST_TOKEN_BUDGET
                if one.runtime.cache_tokens is not None:
                    changes["cache_tokens"] = one.runtime.cache_tokens
                fix = self.fix(one, changes, "speed", "all of these together")
                yield fix if form is setting else _joined(setting, form, fix)
                return

    def cards(self, setting: MemorySetting) -> Iterator[Fix]:
        """The smallest common card that reaches the goal as asked; for a CPU, how much memory does."""
        if setting.device == "cpu":
            bill = self.bill(setting)
            needed = bill.needed if self.goal == "fits" else bill.least
            total = self.capacity.others + math.ceil(needed / setting.runtime.memory_fraction) + 1
            larger = ledger(setting, replace(self.capacity, total=total))
            if total > self.capacity.total and _reached(larger, self.goal):
                note = f"at least {size_text(total - self.capacity.others)} of available memory"
                yield Fix({}, where_of({}), "hardware", note, needed, needed, setting)
            return
        for name, total in CARDS.items():
            search = _Search(Capacity(name, total), self.goal)
            if total > self.capacity.total and _reached(search.bill(setting), self.goal):
                note = f"a card sold as {name}, with these settings"
                yield search.fix(setting, {"gpu": gib_text(total)}, "hardware", note)
                return

    def fix(self, changed: MemorySetting, changes: Changes, cost: Cost, note: str) -> Fix:
        """A change with what it needs and what there is then."""
        bill = self.bill(changed)
        one_request = changed.blocks_per_request * changed.block_bytes
        needed = bill.needed if self.goal == "fits" else bill.fixed + one_request
        return Fix(changes, where_of(changes), cost, note, needed, bill.usable or 0, changed)


_HOST = "each step reads its tokens' rows of the embedding from pinned host memory"
_CHUNKS = "prompts are computed in smaller chunks"
_KV_QUALITY = "keys and values in 8 bits: measure with `ingot eval`"
_QUALITY = "fewer bits per weight: measure with `ingot eval`"


def _reached(bill: Ledger, goal: Goal) -> bool:
    return bill.fits if goal == "fits" else bill.loads


def _one_short(setting: MemorySetting, length: int) -> MemorySetting:
    """One request at a time, of so many tokens, in the smallest chunks; a given cache size holds it."""
    one = setting.replace(max_batch_size=1, max_seq_len=length)
    tokens = one.blocks_per_request * one.runtime.block_size if one.runtime.cache_tokens is not None else None
    runtime = one.runtime.replace(cache_tokens=tokens, token_budget=_LEAST_TOKEN_BUDGET)
    return one.replace(runtime=runtime)


def _ways(setting: MemorySetting) -> Iterator[_Way]:
    """The knobs with an integer each, below their present values."""
    runtime = setting.runtime
    if runtime.cache_tokens is None:
        yield _Way(
            "max_batch_size", "limits", "fewer requests per step",
            lambda s, n: s.replace(max_batch_size=n), 1, setting.max_batch_size - 1,
        )  # fmt: skip
    block = min(runtime.block_size, max(setting.max_seq_len - 1, 1))
    yield _Way(
        "max_seq_len", "limits", "shorter requests",
        lambda s, n: s.replace(max_seq_len=n), block, setting.max_seq_len - 1, block,
    )  # fmt: skip
    most = (runtime.cache_tokens or setting.wanted_blocks * runtime.block_size) - 1
    yield _Way(
        "cache_tokens", "speed",
        "when it is full, requests wait or are recomputed",
        lambda s, n: s.replace(runtime=s.runtime.replace(cache_tokens=n)),
        setting.blocks_per_request * runtime.block_size, most, runtime.block_size,
    )  # fmt: skip
    yield _Way(
        "token_budget", "speed", _CHUNKS,
        lambda s, n: s.replace(runtime=s.runtime.replace(token_budget=n)),
        _LEAST_TOKEN_BUDGET, runtime.token_budget - 1, _LEAST_TOKEN_BUDGET,
    )  # fmt: skip


def _formats(setting: MemorySetting) -> Iterator[MemorySetting]:
    """The setting in every number format that the model takes; a quantized checkpoint has only its own."""
    if setting.quant.source:
        yield setting
        return
    half = setting.dtype if setting.dtype in ("fp16", "bf16") else "fp16"
    yield setting.replace(dtype="fp32", encoder_dtype=None, quant=QuantConfig())
    for name in SCHEMES:
        quant = QuantConfig(scheme=name)
        if quant.rotation and not can_rotate(setting.model):
            quant = quant.replace(rotation=False)
        if can_calibrate(setting.model) or not quant.calibrated:
            yield setting.replace(dtype=half, encoder_dtype=None, quant=quant)


def _smaller_formats(setting: MemorySetting) -> Iterable[MemorySetting]:
    """Number formats in fewer bits than the setting's, on a GPU; none as large as a better one."""
    if setting.device == "cpu" or not setting.quant.dense:
        return ()
    forms = [form for form in _formats(setting) if form.quant.scheme in ("none", *weight_only_schemes())]
    return [f for f in forms if f.dtype != "fp32" and (f.dtypes, f.quant) != (setting.dtypes, setting.quant)]


def _joined(setting: MemorySetting, form: MemorySetting, fix: Fix) -> Fix:
    """The fix of another number format, as one of the setting's own."""
    changes = _format_changes(setting, form) | fix.changes
    return fix.replace(changes=changes, where=where_of(changes), cost="quality")


def _format_changes(setting: MemorySetting, form: MemorySetting) -> Changes:
    dtype: Changes = {"dtype": form.dtype} if form.dtypes != setting.dtypes else {}
    return dtype | ({"quant": form.quant.scheme} if form.quant != setting.quant else {})
