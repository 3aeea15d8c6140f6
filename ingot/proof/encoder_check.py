"""Judges one encoding place by place, as step_check.py does steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ingot.config.half_dtypes import in_encoder
from ingot.config.sampling_params import SamplingParams
from ingot.engine.reference_encoder import encode
from ingot.engine.reference_run import Arithmetic, KeysValues, ReferenceRun, WeightSource
from ingot.layers.decoder import Decoder
from ingot.layers.step_record import Recorded, copied
from ingot.llm.llm import LLM
from ingot.models.model_registry import plain_encoder
from ingot.proof.encoder_record import encoder_walked
from ingot.proof.product_noise import ProductNoise
from ingot.proof.step_judge import ENCODED, Judge
from ingot.proof.step_witness import MODULES, TAKEN, rounded_by
from ingot.text.prompt import Input, Prompt

_HOST = torch.device("cpu")
_BRANCHES = {
    "attended": "self_attn.o_proj",
    "cross_attended": "encoder_attn.o_proj",
    "inner": "mlp.down_proj",
}


class EncoderRun(NamedTuple):
    """What the reference computes: the empty modules, whose ``weights`` are read, and the arithmetic of the
    decoder and of the encoder.
    """

    model: Decoder
    weights: WeightSource
    arithmetic: Arithmetic
    encoder_arithmetic: Arithmetic


def check_encoder(llm: LLM, given: EncoderRun, features: torch.Tensor, judge: Judge, taking: Judge) -> None:
    """Encode an input's features in a request, and judge every module's recorded values; ``taking`` judges
    those of the decoder's modules.
    """
    recorded: dict[str, list[Recorded]] = defaultdict(list)
    with encoder_walked(llm, lambda name, value: recorded[name].append(copied(value, _HOST))):
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        llm.generate(Prompt([Input(features), [0]]), params)
    witness = _Witness(recorded, llm, judge, taking)
    model, weights, *both = given
    run = ReferenceRun(model, weights, both[0], witness=witness, encoder_arithmetic=both[1])
    encode(run, 0, features, lambda name, output: None)


class _Witness:
    """Recorded values of the encoding, as ``ReferenceRun`` asks for them (``Witness``)."""

    def __init__(
        self, recorded: Mapping[str, Sequence[Recorded]], llm: LLM, judge: Judge, taking: Judge
    ) -> None:
        self._recorded, self._judges, self._model = recorded, (judge, taking), llm.engine.model
        self._device = llm.engine.device
        self._plain = plain_encoder(llm.engine.manifest.model)
        self._met: Counter[str] = Counter()
        self._noise = ProductNoise()
        self._stage = ""
        self._taken: tuple[str, str, Recorded] | None = None

    def within(self, stage: str) -> None:
        self._stage = stage
        self._taken = None

    def value(self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        name, number = self._name(place), self._met[place]
        self._met[place] += 1
        recorded = copied(self._recorded[place][number], self._device)
        if place in TAKEN or place.endswith("/in"):
            self._taken = place, name, recorded
        if not isinstance(recorded, torch.Tensor) or not self._as_many(recorded, computed, place, name):
            return computed
        wide = recorded.to(computed.dtype).view_as(computed)
        noise = self._noise.take(place, computed if change is None else change)
        judge = self._judge(name)
        judge.value(_kind(place), name, wide, computed, change, self._labels(len(recorded)), noise)
        return wide

    def rounded(self, product: str, exact: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        assert self._taken is not None
        place, name, taken = self._taken
        wide = isinstance(taken, torch.Tensor)  # then ``exact`` was recorded, and ``value`` judged it
        if not self._as_many(taken if isinstance(taken, torch.Tensor) else taken.values, exact, place, name):
            return near
        recorded, step = rounded_by(self._model, product, taken, exact)
        kind = f"{_kind(place)}, rounded" if wide else _kind(place)
        noise = self._noise.take(place, exact)
        judge = self._judge(name)
        judge.rounded(kind, name, recorded, step, exact, near, self._labels(len(recorded)), noise)
        return recorded

    def summed(self, product: str, output: torch.Tensor, noise: torch.Tensor) -> None:
        self._noise.keep(product, output, noise)

    def cached(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[KeysValues]:
        raise NotImplementedError  # of decoder steps

    def encoded(self, layer: int) -> list[KeysValues]:
        raise NotImplementedError  # of decoder steps

    def _as_many(self, recorded: torch.Tensor, wanted: torch.Tensor, place: str, name: str) -> bool:
        """Whether a record has the expected positions; else reports a failure."""
        if recorded.numel() == wanted.numel():
            return True
        self._judge(name).fail(_kind(place), name, f"has {len(recorded)} positions, not {len(wanted)}")
        return False

    def _judge(self, name: str) -> Judge:
        return self._judges[0 if in_encoder(name) else 1]

    def _labels(self, count: int) -> torch.Tensor:
        return torch.full((count,), ENCODED, device=self._device)

    def _name(self, place: str) -> str:
        """The module that made a place's value: by its own name, or one of the stage's."""
        if "." in place:
            return place.removesuffix("/in")
        if place != "stream":
            return f"{self._stage}.{self._made(place)}"
        return self._stage if self._taken is None else f"{self._stage}.{_BRANCHES[self._taken[0]]}"

    def _made(self, place: str) -> str:
        """The module that makes a place of a layer."""
        shape = None if self._plain is None else self._plain.shape_of(self._stage)
        if shape is None or not shape.post_norm or place not in ("cross_in", "mlp_in"):
            return MODULES[place]
        return "encoder_attn_norm" if place == "mlp_in" and shape.crosses else "self_attn_norm"


def _kind(place: str) -> str:
    return place.rpartition(".")[2]
