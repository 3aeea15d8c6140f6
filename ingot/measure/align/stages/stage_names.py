"""The stages of a decoder in their order, and files of activations read by these names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ingot.errors import CheckpointError, NoSuchPathError
from ingot.measure.align.trace import FORMAT, PRODUCTS

OWN_NAMES = "stages"  # metadata of a file whose keys are our stages'
# Places inside a stage where its module is judged in parts: the input of its last product.
PLACES = {
    "attention": ("attended", "attention"),
    "cross_attention": ("cross_attended", "cross_attention"),
    "mlp": ("inner", "mlp"),
}
LAYER_STAGES = ("input_norm", "attention", "residual", "post_norm", "mlp", "output")
_LLAMA = (
    "input_layernorm",
    "self_attn",
    "post_attention_layernorm/in",
    "post_attention_layernorm",
    "mlp",
    "",
)
_GPT2 = ("ln_1", "attn", "ln_2/in", "ln_2", "mlp", "")
_LLAMA_PLACES = {"attended": "self_attn.o_proj/in", "inner": "mlp.down_proj/in"}
LLAMA_NAMES = dict(zip(LAYER_STAGES, _LLAMA, strict=True)) | _LLAMA_PLACES
GEMMA2_NAMES = LLAMA_NAMES | {
    "residual": "pre_feedforward_layernorm/in",
    "post_norm": "pre_feedforward_layernorm",
}
GPT2_NAMES = dict(zip(LAYER_STAGES, _GPT2, strict=True))
GPT2_NAMES |= {"attended": "attn.c_proj/in", "inner": "mlp.c_proj/in"}
# A decoder layer that attends to an encoder's outputs; between residual and post_norm
CROSS_STAGES = ("cross_norm", "cross_attention", "cross_residual")
_WHISPER = ("self_attn_layer_norm", "self_attn", "final_layer_norm/in", "final_layer_norm", "fc2", "")
WHISPER_ENCODER_NAMES = dict(zip(LAYER_STAGES, _WHISPER, strict=True))
WHISPER_ENCODER_NAMES |= {"attended": "self_attn.out_proj/in", "inner": "fc2/in"}
OPT_NAMES = WHISPER_ENCODER_NAMES
WHISPER_NAMES = WHISPER_ENCODER_NAMES | {
    "residual": "encoder_attn_layer_norm/in",
    "cross_norm": "encoder_attn_layer_norm",
    "cross_attended": "encoder_attn.out_proj/in",
    "cross_attention": "encoder_attn",
    "cross_residual": "final_layer_norm/in",
    "cross_keys": "encoder_attn.k_proj",
    "cross_values": "encoder_attn.v_proj",
}
LOG_MEL = "log_mel"
FEATURES = (LOG_MEL, "pixels")
CONVS = ("encoder.conv1", "encoder.conv2")

# (the layers, the embedding, the final norm, a layer's modules, the stage whose module a layer is known by),
# most specific first. GPT-2's, Whisper's and OPT's embedding is the sum of tokens and positions.
_SUM = "decoder.layers.0.self_attn_layer_norm/in"
_FAMILIES = (
    ("layers", "embed_tokens", "norm", GEMMA2_NAMES, "post_norm"),
    ("layers", "embed_tokens", "norm", LLAMA_NAMES, "input_norm"),
    ("h", "h.0.ln_1/in", "ln_f", GPT2_NAMES, "input_norm"),
    ("decoder.layers", _SUM, "decoder.layer_norm", WHISPER_NAMES, "cross_norm"),
    ("decoder.layers", _SUM, "decoder.final_layer_norm", OPT_NAMES, "input_norm"),
)


def stage_names(num_layers: int, encoder_layers: int = 0) -> list[str]:
    """Every stage of a step, in order; those of an encoder are in the first step only."""
    kinds: tuple[str, ...] = LAYER_STAGES
    before: list[str] = []
    if encoder_layers:
        kinds = (*LAYER_STAGES[:3], *CROSS_STAGES, *LAYER_STAGES[3:])
        before = [LOG_MEL, *CONVS, "encoder.embedding"]
        before += [f"encoder.layers.{i}.{kind}" for i in range(encoder_layers) for kind in LAYER_STAGES]
        before += ["encoder.final_norm"]
        before += [f"layers.{i}.cross_{part}" for i in range(num_layers) for part in ("keys", "values")]
    inner = [f"layers.{i}.{kind}" for i in range(num_layers) for kind in kinds]
    return [*before, "embedding", *inner, "final_norm", "logits"]


def places_of(stage: str) -> list[str]:
    """The places at which a stage's module is judged, in order, the stage itself last."""
    start, dot, kind = stage.rpartition(".")
    return [f"{start}{dot}{place}" for place in PLACES.get(kind, (kind,))]


def inner_places_of(stage: str) -> list[str]:
    """Places of a stage that no original records."""
    layer = layer_of(stage)
    return [f"layers.{layer}.{kind}" for kind in ("query", "keys")] if kind_of(stage) == "attention" else []


def layer_of(stage: str) -> int | None:
    return int(stage.split(".")[1]) if stage.startswith("layers.") else None


def kind_of(stage: str) -> str:
    """``mlp`` of ``layers.3.mlp``, ``encoder.mlp`` in an encoder; outside layers the stage itself."""
    kind = stage.rpartition(".")[2]
    return f"encoder.{kind}" if stage.startswith("encoder.") else kind


class StageFile:
    """Stages read one at a time from a file in the trace format, whose keys are our stage names or the module
    names of a known class. Tensors come without their leading dimension of one sequence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self._keys = set(self._file.keys())
        except FileNotFoundError:
            raise NoSuchPathError("no such trace", seen=path, field="reference") from None
        except (SafetensorError, OSError) as error:
            raise _no_trace(path, error) from None
        if self.metadata.get("format") != FORMAT:
            raise _no_trace(path, f"format {self.metadata.get('format')!r}")
        self._names = self._find_names()
        self.num_layers = self._count_layers("")
        self.encoder_layers = self._count_layers("encoder.")
        self._starts = self._find_starts()

    @property
    def steps(self) -> int:
        return len(self._starts) - 1

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.metadata.get("dtype", ""), None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def ids(self, step: int) -> list[int]:
        """The tokens that ran in a step."""
        found: list[int] = self._read(f"{step}/input_ids", step).tolist()
        return found

    def start(self, step: int) -> int:
        return self._starts[step]

    def stages(self) -> list[str]:
        """Every stage of a step, in order."""
        listed = self.metadata.get("stages")
        if listed is None:
            return stage_names(self.num_layers, self.encoder_layers)
        inner = {place for places in PLACES.values() for place in places[:-1]}
        return [stage for stage in json.loads(listed) if stage.rpartition(".")[2] not in inner]

    def get(self, step: int, stage: str) -> torch.Tensor | None:
        """A stage's output for the tokens of a step, [T, ...] on the host; None if it was not recorded."""
        key = self._key(step, stage)
        if key not in self._keys:
            return None
        found = self._read(key, step)
        if stage in CONVS and self._names:  # of a class, whose convolutions have frames last
            found = found.T
        return found

    def so_far(self, step: int, stage: str) -> torch.Tensor | None:
        """A stage's output for the tokens of all steps up to this one, [S, ...]."""
        found = [self.get(s, stage) for s in range(step + 1)]
        return None if any(t is None for t in found) else torch.cat(found)  # type: ignore[arg-type]

    def _read(self, key: str, step: int) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(key)
        rows = self._squeeze(key, tensor)
        return rows[self._skip[step] :]

    def _squeeze(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        is_flat = tensor.dim() == (1 if key.endswith("/input_ids") else 2)
        if is_flat:
            return tensor
        if tensor.shape[0] != 1:
            raise CheckpointError(
                "the trace holds several sequences",
                seen=f"{key} {tuple(tensor.shape)}",
                allowed="one sequence per call",
                field="reference",
            )
        return tensor[0]

    def _key(self, step: int, stage: str) -> str:
        return f"{step}/{self._names.get(stage, stage)}"

    def _find_starts(self) -> list[int]:
        """Where each step begins; of a step that runs the whole text again only the new tokens count."""
        steps = sorted(int(k.split("/")[0]) for k in self._keys if k.endswith("/input_ids"))
        if not steps or steps != list(range(len(steps))):
            raise _no_trace(self.path, "no token ids for some steps")
        starts, total, skips = [], 0, []
        whole: list[int] = []
        for step in steps:
            ids = self._squeeze("/input_ids", self._file.get_tensor(f"{step}/input_ids")).tolist()
            again = len(ids) > total > 0 and ids[:total] == whole
            whole = ids if again else whole + ids
            starts.append(total)
            skips.append(total if again else 0)
            total = len(whole)
        self._skip = skips
        return starts

    def _find_names(self) -> dict[str, str]:
        """Stage → key after the step."""
        if self.metadata.get("names") == OWN_NAMES:
            return {}
        for layers, embedding, norm, names, known_by in _FAMILIES:
            own = f"{layers}.0.{names[known_by]}"
            prefix = next((k[2 : -len(own)] for k in self._keys if _ends(k, own)), None)
            if prefix is not None:
                found = {"embedding": prefix + embedding, "final_norm": prefix + norm}
                found |= dict(_layer_names(f"{prefix}{layers}", "layers", names, self._keys))
                root, encoder = f"{prefix}encoder", WHISPER_ENCODER_NAMES
                encoder_layers = dict(_layer_names(f"{root}.layers", "encoder.layers", encoder, self._keys))
                if encoder_layers:
                    found |= encoder_layers | {conv: f"{root}.{_last(conv)}" for conv in CONVS}
                    found["encoder.embedding"] = f"{root}.layers.0.{encoder['input_norm']}/in"
                    found["encoder.final_norm"] = f"{root}.layer_norm"
                return found
        raise CheckpointError(
            "the trace has no known module names",
            seen=sorted(self._keys)[:5],
            allowed="LLaMA's (layers.0.input_layernorm), GPT-2's (h.0.ln_1), OPT's or Whisper's",
            field="reference",
        )

    def _count_layers(self, side: str) -> int:
        found = 0
        while self._key(0, f"{side}layers.{found}.attention") in self._keys:
            found += 1
        return found


def hf_patterns(keys: Iterable[str]) -> list[str]:
    """The ``keys`` of a class's modules that are stages, for ``trace``."""
    named = (*LLAMA_NAMES.values(), *GEMMA2_NAMES.values(), *GPT2_NAMES.values(), *_WHISPER)
    ends = {"norm", "ln_f", "embed_tokens", *named, "layer_norm", "conv1", "conv2", LOG_MEL}
    ends |= {"encoder_attn_layer_norm", "encoder_attn"}
    wanted = {end for end in ends if end and not end.endswith("/in")}
    crossing = ("encoder_attn.k_proj", "encoder_attn.v_proj")
    products = tuple(end.removeprefix("*") for end in PRODUCTS)
    return [k for k in keys if _last(k) in wanted or _last(k).isdigit() or k.endswith((*crossing, *products))]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _ends(key: str, name: str) -> bool:
    return key == f"0/{name}" or (key.startswith("0/") and key.endswith("." + name))


def _layer_names(root: str, ours: str, names: dict[str, str], keys: set[str]) -> Iterator[tuple[str, str]]:
    layer = 0
    while f"0/{root}.{layer}.{names['input_norm']}" in keys:
        for kind, name in names.items():
            yield f"{ours}.{layer}.{kind}", f"{root}.{layer}.{name}".removesuffix(".")
        layer += 1


def _no_trace(path: Path, why: object) -> CheckpointError:
    return CheckpointError(
        "not a trace",
        seen=f"{path}: {why}",
        allowed="a file that `python -m ingot.measure.align.trace` writes",
        field="reference",
    )
