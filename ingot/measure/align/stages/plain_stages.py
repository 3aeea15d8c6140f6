"""Every stage of a recorded run, computed by the checking decoder from the recorded stage before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ingot.engine.reference_run import Arithmetic, SequenceSpan
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear
from ingot.measure.align.stages.encoder_stages import EncoderStages
from ingot.measure.align.stages.isolated_encoder import CROSS_PARTS
from ingot.measure.align.stages.isolated_module import as_read, reader_of
from ingot.measure.align.stages.stage_names import FEATURES, StageFile, kind_of, layer_of
from ingot.measure.align.stages.staged_run import StagedRun, Stored, run_cross, run_encoder_stage
from ingot.quant.plain_rows import split_rows
from ingot.quant.schemes.in_panels import split_columns
from ingot.reference.plain_layer import PlainAttention
from ingot.reference.plain_stage import Passage


@dataclass(frozen=True)
class Pass:
    """How a layer is computed: its arithmetic, its inputs' dtype or grid, and whether products read them as a
    CPU that splits them does.
    """

    arithmetic: Arithmetic
    dtype: torch.dtype
    on_grid: bool = False
    splits: bool = False


class PlainStages:
    """Keeps the stages of one layer, or outside layers, until another one is asked for. ``model`` has the
    engine's modules on the device, whose schemes round inputs ``on_grid``; ``recorded`` is the run whose
    stages are read.
    """

    def __init__(self, stored: Stored, model: Decoder, recorded: StageFile, device: torch.device) -> None:
        self.stored, self.model, self.recorded, self.device = stored, model, recorded, device
        self._group: str | None = None
        self._kept: dict[Pass, dict[str, torch.Tensor]] = {}
        self._stages = EncoderStages.of(model.config)

    @torch.inference_mode()
    def at(self, stage: str, step: int, how: Pass) -> torch.Tensor | None:
        """The stage for the step's tokens, on the host; None if its input is not recorded."""
        layer = layer_of(stage)
        group = "embedding" if stage == "embedding" else "ends"
        if layer is not None:
            group = f"cross.{layer}" if kind_of(stage) in CROSS_PARTS else f"layers.{layer}"
        elif stage.startswith("encoder."):
            assert self._stages is not None
            group = self._stages.group(stage)
        if group != self._group:
            self._group, self._kept = group, {}
        if how not in self._kept:
            self._kept[how] = self._computed(group, how)
        found = self._kept[how].get(stage)
        if found is None or stage.startswith("encoder.") or kind_of(stage) in CROSS_PARTS:
            return found
        start = self.recorded.start(step)
        return found[start : start + len(self.recorded.ids(step))]

    def given(self, stage: str, how: Pass, reader: nn.Module | None = None) -> torch.Tensor | None:
        """A recorded stage of all tokens, as the next module reads it."""
        once = stage in FEATURES or stage.startswith("encoder.") or kind_of(stage) in CROSS_PARTS
        read = self.recorded
        found = read.get(0, stage) if once else read.so_far(read.steps, stage)
        if found is None:
            return None
        x = as_read(found.to(self.device), how.dtype, reader if how.on_grid else None)
        return x.to(how.arithmetic.dtype)

    def _computed(self, group: str, how: Pass) -> dict[str, torch.Tensor]:
        run = _Placed(self, how)
        read = self.recorded
        ids = [i for step in range(read.steps + 1) for i in read.ids(step)]
        encodes = self.model.config.encoder is not None
        span = self.stored.span(ids, 0, len(read.ids(0)), encodes=encodes)
        if group.startswith("encoder"):
            self._encoder(run, group, how)
        elif group.startswith("cross"):
            encoded = self.given("encoder.final_norm", how)
            if encoded is not None:
                run_cross(run, int(group.split(".")[1]), encoded)
        elif group == "embedding":
            run.within("")
            rows = self.given("encoder.projector", how) if self.model.config.splices else None
            if rows is not None:
                run.rows[0] = rows
            run.embed([span])
        elif group.startswith("layers."):
            self._layer(run, int(group.split(".")[1]), span, how)
        else:
            last = self.given(f"layers.{len(self.model.layers) - 1}.output", how)
            if last is not None:
                run.ends(last)
        self.stored.weights.release()
        return run.found

    def _layer(self, run: _Placed, index: int, span: SequenceSpan, how: Pass) -> None:
        hidden = self.given(f"layers.{index - 1}.output" if index else "embedding", how)
        if hidden is None:
            return
        if self.model.config.crosses:
            pair = [self.given(f"layers.{index}.{part}", how) for part in CROSS_PARTS]
            if pair[0] is None or pair[1] is None:
                return
            heads = (self.model.config.num_kv_heads, self.model.config.head_dim)
            run.encoded[index, 0] = (pair[0].unflatten(1, heads), pair[1].unflatten(1, heads))
        run.layer_of(index, hidden, span)

    def _encoder(self, run: _Placed, group: str, how: Pass) -> None:
        stages = self._stages
        assert stages is not None
        taken = stages.taken(group)
        before, kept = self.given(taken, how), self.given(stages.kept, how)
        if before is None:
            return
        if taken == stages.features:
            before = stages.as_features(before)
        run_encoder_stage(run, group, Passage(before, before.new_empty(0) if kept is None else kept))


class _Placed(StagedRun):
    """Keeps each stage computed from the recorded ones before it, and goes on with the recorded one."""

    def __init__(self, plain: PlainStages, how: Pass) -> None:
        feed = partial(_split, plain.model) if how.splits else None
        super().__init__(plain.stored.model, plain.stored.weights, how.arithmetic, single=True, feed=feed)
        self._plain, self._how = plain, how
        self.found: dict[str, torch.Tensor] = {}

    def reached(self, stage: str, computed: torch.Tensor) -> torch.Tensor:
        self.found[stage] = computed.to("cpu")
        recorded = self._plain.given(stage, self._how, self._reader(stage))
        return computed if recorded is None else recorded

    def recorded(
        self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Keeps queries too, which no original records."""
        if place == "query":
            self.found[f"{self._within}.query"] = computed.flatten(1).to("cpu")
        return super().recorded(place, computed, change)

    def attend(
        self, attention: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.found[f"{self._within}.keys"] = key.flatten(1).to("cpu")
        return super().attend(attention, query, key, value)

    def encoder_output(self, computed: torch.Tensor) -> torch.Tensor:
        reader = self._plain.model.get_submodule(f"{self._within}.encoder_attn.kv_proj")
        stages = self._plain._stages
        recorded = None if stages is None else self._plain.given(stages.kept, self._how, reader)
        return computed if recorded is None else recorded

    def bridge_input(self, computed: torch.Tensor) -> torch.Tensor:
        reader = self._plain.model.get_submodule(_BRIDGE) if self._how.on_grid else None
        return as_read(computed, self._how.dtype, reader).to(self.arithmetic.dtype)

    def _reader(self, stage: str) -> nn.Module | None:
        if stage == "final_norm":
            return self._plain.model.lm_head
        kind = stage.rpartition(".")[2]
        if kind not in _READ_BY or "layers." not in stage:
            return None
        return reader_of(self._plain.model.get_submodule(stage.rpartition(".")[0]), _READ_BY[kind])


def _split(model: Decoder, name: str, x: torch.Tensor) -> torch.Tensor:
    """The input of a product of the engine as a CPU reads it."""
    linear = model.get_submodule(name)
    assert isinstance(linear, Linear)
    columns = split_columns(linear.origin, linear.in_features)
    return split_rows(x, columns, linear._parameters.get("order")) if columns else x


_BRIDGE = "encoder.projector"
_READ_BY = {
    "input_norm": "attended",
    "attended": "attention",
    "cross_norm": "cross_attended",
    "cross_attended": "cross_attention",
    "post_norm": "inner",
    "inner": "mlp",
}
