"""The checking decoder run stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.config.build_config import BuildConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.quantization.quant_config import QuantConfig
from ingot.device import parse_dtype
from ingot.engine.assembly import Assembly, model_of
from ingot.engine.manifest import WEIGHTS_FILE, Manifest, is_engine
from ingot.engine.reference_encoder import keep_for, own_stages
from ingot.engine.reference_run import EngineTensors, ReferenceRun, SequenceSpan, WeightSource
from ingot.layers.decoder import Decoder
from ingot.measure.align.stages.stage_names import CONVS
from ingot.reference.plain_rotary import plain_section
from ingot.reference.plain_stage import Passage

_WITHIN = {
    "attn_in": "input_norm",
    "attended": "attended",
    "cross_in": "cross_norm",
    "cross_attended": "cross_attended",
    "mlp_in": "post_norm",
    "inner": "inner",
}
_AROUND = {name: name for name in (*CONVS, "encoder.ln_vision", "encoder.projector", "logits")}
_AROUND |= {"encoder.norm": "encoder.final_norm", "encoder.qformer.norm": "encoder.qformer.embedding"}
_AROUND |= {"encoder.vit.patch_embedding": "encoder.vit.patch_embedding"}
_KEYS_VALUES, _LAST_NORM = ".encoder_attn.kv_proj", ".mlp_norm"
_BRANCHES = {"self_attn": "attention", "encoder_attn": "cross_attention", "mlp": "mlp"}
_POST = "encoder.qformer.layers."  # whose norms stand behind sums
_SUMS = {"attention": "residual", "cross_attention": "cross_residual", "mlp": "output"}


class StagedRun(ReferenceRun):
    """A run that hands every stage to ``reached``."""

    _within = ""  # the layer, or another stage of an encoder
    _branch = ""
    _spans: Sequence[SequenceSpan] = ()

    def reached(self, stage: str, computed: torch.Tensor) -> torch.Tensor:
        """The stage's values to go on with."""
        raise NotImplementedError

    def within(self, name: str) -> None:
        """Begin a layer, or another stage."""
        self._within = name

    def recorded(
        self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hand on the place if it is a stage."""
        post = self._within.startswith(_POST)
        if post and place == "attn_in":  # the layer's input is a stage of another layer
            return computed
        if place in _WITHIN:
            return self.reached(f"{self._within}.{_WITHIN[place]}", computed)
        if place in _AROUND:
            return self.reached(_AROUND[place], computed)
        if place.endswith(f"{_KEYS_VALUES}/in"):
            return self.encoder_output(computed)
        if place.endswith(_KEYS_VALUES):
            halves = zip(("cross_keys", "cross_values"), computed.chunk(2, dim=-1), strict=True)
            return torch.cat([self.reached(f"{self._within}.{name}", half) for name, half in halves], dim=-1)
        if place.endswith("/in"):
            return self.bridge_input(computed)
        if place.endswith(_LAST_NORM):
            return self.reached(f"{self._within}.output", computed)
        if place != "stream":
            return computed
        if "layers." in self._within:
            last = "mlp_residual" if post and self._branch == "mlp" else _SUMS[self._branch]
            return self.reached(f"{self._within}.{last}", computed)
        return self.reached(self._within.replace(".embed_positions", ".embedding") or "embedding", computed)

    def encoder_output(self, computed: torch.Tensor) -> torch.Tensor:
        """The encoder's last stage as the input of the layer's keys and values."""
        return computed

    def bridge_input(self, computed: torch.Tensor) -> torch.Tensor:
        """The input of the product between encoder and decoder."""
        return computed

    def branch(self, name: str, output: torch.Tensor) -> torch.Tensor:
        self._branch = _BRANCHES[name.rpartition(".")[2]]
        return self.reached(f"{self._within}.{self._branch}", output)

    def layer_of(self, index: int, hidden: torch.Tensor, span: SequenceSpan) -> torch.Tensor:
        self.within(f"layers.{index}")
        if self._spans != [span]:  # the same list for every layer, so that positions are computed once
            self._spans = [span]
        return self.layer(index, hidden, self._spans, _unseen)

    def ends(self, hidden: torch.Tensor) -> torch.Tensor:
        self.within("")
        return self.logits(self.reached("final_norm", self.final_norm(hidden, _unseen)))


def run_tokens(run: StagedRun, span: SequenceSpan) -> torch.Tensor:
    """New tokens of a sequence through the whole decoder; their logits [T, vocab_size]."""
    run.within("")
    hidden = run.embed([span])
    for index in range(run.config.num_layers):
        hidden = run.layer_of(index, hidden, span)
        run.weights.release()
    logits = run.ends(hidden)
    run.weights.release()
    return logits


def run_encoder(run: StagedRun, features: torch.Tensor) -> None:
    """Features [mels, frames] through the encoder, and each layer's keys and values of its outputs."""
    at = Passage.of(run.features(features))
    for stage in own_stages(run, _unseen):
        at = at.after(stage)
        run.weights.release()
    for index in range(1 if run.config.splices else run.config.num_layers):
        run_cross(run, index, at.hidden)


def run_encoder_stage(run: StagedRun, name: str, at: Passage) -> None:
    """One of an encoder's stages, from its input."""
    at.after(next(stage for stage in own_stages(run, _unseen) if stage.name == name))
    run.weights.release()


def run_cross(run: StagedRun, layer: int, encoded: torch.Tensor) -> None:
    """A decoder layer's keys and values of the encoder's outputs, or the first layer's spliced rows."""
    run.within(f"layers.{layer}")
    keep_for(run, 0, layer, _unseen, encoded)


class Stored(NamedTuple):
    """The empty modules of an engine or a checkpoint, and its tensors."""

    model: Decoder
    weights: WeightSource

    @classmethod
    def of(cls, path: Path, build: BuildConfig, device: torch.device) -> Stored:
        """An engine with its stored weights, or a checkpoint with dense ones in the dtype of ``build``."""
        if is_engine(path):
            model = model_of(Manifest.read(path))
            return cls(model, EngineTensors(path / WEIGHTS_FILE, model, device))
        source = open_checkpoint(path)
        assembly = Assembly.of(source, build, QuantConfig())
        model = assembly.architecture.empty_model(assembly.model_config, build, QuantConfig())
        return cls(model, _Assembled(assembly, source, device))

    def span(self, ids: Sequence[int], start: int, prompt_len: int, *, encodes: bool) -> SequenceSpan:
        """New tokens of a request with this many prompt tokens."""
        rotary = self.model.rotary
        rows = 0 if rotary is None else rotary.max_positions
        offset = plain_section(self.model.config.rope, prompt_len) * rows
        return SequenceSpan(0, tuple(ids), start, offset, 0 if encodes else None)


class _Assembled:
    """A checkpoint's tensors by the engine's names."""

    def __init__(self, assembly: Assembly, source: Checkpoint, device: torch.device) -> None:
        self.device = device
        self._assembly, self._source = assembly, source

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._assembly.original(name, self._source)

    def release(self) -> None: ...


class RoundedWeights:
    """Dense weights, biases and norms rounded to their half's dtype, where that is coarser than theirs."""

    def __init__(self, stored: Stored, dtypes: HalfDtypes) -> None:
        self.device = stored.weights.device
        self._wide_norms = stored.model.config.wide_norms
        self._weights, self._dtypes = stored.weights, dtypes

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._weights[name]
        if not (tensor.is_floating_point() and name.endswith((".weight", ".bias"))):
            return tensor
        dtype = parse_dtype(self._dtypes.at(name))
        coarser = torch.finfo(dtype).eps > torch.finfo(tensor.dtype).eps
        kept = self._wide_norms and "norm" in name
        return tensor.to(dtype) if coarser and not kept else tensor

    def release(self) -> None:
        self._weights.release()


def _unseen(name: str, output: torch.Tensor) -> None:
    return
