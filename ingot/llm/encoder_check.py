"""The encoding of an input as requests do it, judged place by place.

Owns the record of one encoding and its comparison with the reference, which at each place computes from what
the run itself had at the place before (step_check.py does so with steps). Knows no proof.

    check_encoder(llm, weights, features, arithmetic, judge)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from ingot.config.sampling import SamplingParams
from ingot.engine.reference import Arithmetic, KeysValues, ReferenceRun, WeightSource
from ingot.engine.reference_encoder import encode
from ingot.layers.decoder import Decoder
from ingot.layers.step_record import Recorded, copied
from ingot.llm.encoder_record import AROUND, KEYS_VALUES, encoder_walked
from ingot.llm.llm import LLM
from ingot.llm.step_judge import ENCODED, Judge
from ingot.llm.step_witness import MODULES, TAKEN, rounded_by
from ingot.processors.prompt import Input, Prompt

_HOST = torch.device("cpu")


def check_encoder(
    llm: LLM,
    model: Decoder,
    weights: WeightSource,
    features: torch.Tensor,
    arithmetic: Arithmetic,
    judge: Judge,
) -> int:
    """Encode features [mels, frames] in a request, and judge what every module had.

    Args:
        model: the empty modules, whose ``weights`` are read.

    Returns:
        The number of encoded positions.
    """
    had: dict[str, list[Recorded]] = defaultdict(list)
    with encoder_walked(llm, lambda name, value: had[name].append(copied(value, _HOST))):
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        llm.generate(Prompt([Input(features), [0]]), params)
    witness = _Witness(had, llm, judge)
    run = ReferenceRun(model, weights, arithmetic, witness=witness)
    encode(run, 0, features, lambda name, output: None)
    return witness.positions


class _Witness:
    """What the encoding had, as ``ReferenceRun`` asks for it."""

    def __init__(self, had: Mapping[str, Sequence[Recorded]], llm: LLM, judge: Judge) -> None:
        self._had, self._judge, self._model = had, judge, llm.engine.model
        self._device = llm.engine.device
        (norm,) = had["encoder.norm"]
        assert isinstance(norm, torch.Tensor)
        self.positions = len(norm)
        self._met: Counter[str] = Counter()
        self._taken: tuple[str, str, Recorded] | None = None

    def value(self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        """As of ``Witness``."""
        number = self._met[place]
        self._met[place] += 1
        record, index, name = _record_of(place, number)
        had = copied(self._had[record][index], self._device)
        if place in TAKEN or place == "encoded":
            self._taken = place, name, had
        if not isinstance(had, torch.Tensor) or not self._as_many(had, computed, place, name):
            return computed
        wide = had.to(computed.dtype).view_as(computed)
        self._judge.value(place, name, wide, computed, change, self._labels(len(had)))
        return wide

    def rounded(self, product: str, exact: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        """As of ``Witness``."""
        assert self._taken is not None
        place, name, taken = self._taken
        wide = isinstance(taken, torch.Tensor)  # then ``exact`` is what the run had, and ``value`` judged it
        if not self._as_many(taken if isinstance(taken, torch.Tensor) else taken.values, exact, place, name):
            return near
        had, step = rounded_by(self._model, product, taken, exact)
        kind = f"{place}, rounded" if wide else place
        self._judge.rounded(kind, name, had, step, exact, near, self._labels(len(had)))
        return had

    def cached(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[KeysValues]:
        """Of decoder steps alone."""
        raise NotImplementedError

    def encoded(self, layer: int) -> list[KeysValues]:
        """Of decoder steps alone."""
        raise NotImplementedError

    def _as_many(self, had: torch.Tensor, wanted: torch.Tensor, place: str, name: str) -> bool:
        """Whether a record has the positions that it must have; else that is told."""
        if had.numel() == wanted.numel():
            return True
        self._judge.fail(place, name, f"has {len(had)} positions, not {len(wanted)}")
        return False

    def _labels(self, count: int) -> torch.Tensor:
        return torch.full((count,), ENCODED, device=self._device)


def _record_of(place: str, number: int) -> tuple[str, int, str]:
    """What the ``number``th time that a place is met was recorded as: a name, the how many'th, and the name
    of what made it.
    """
    if f"encoder.{place}" in AROUND:
        return (name := f"encoder.{place}"), 0, name
    if place in ("kv", "encoded"):
        name = f"layers.{number}{KEYS_VALUES}"
        return (name, 0, name) if place == "kv" else (f"{name}/in", 0, "encoder.norm")
    if place != "stream":
        return place, number, f"encoder.layers.{number}.{MODULES[place]}"
    layer, part = divmod(number - 1, 2)
    made = f"encoder.layers.{layer}.{('self_attn.o_proj', 'mlp.down_proj')[part]}"
    return place, number, made if number else "encoder.embed_positions"
