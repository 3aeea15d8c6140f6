"""Where a file has a stage, and what of it a comparison reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ingot.measure.align import trace as trace_file
from ingot.measure.align.stages.stage_names import (
    OWN_NAMES,
    StageFile,
    inner_places_of,
    kind_of,
    layer_of,
    places_of,
    stage_names,
)
from ingot.measure.align.trace import TraceWriter, run_steps, trace
from tests.tiny_models import make_model, random_ids, tiny_config

OF_ENCODER = ["log_mel", "encoder.conv1", "encoder.conv2", "encoder.embedding"]
SIX = ["input_norm", "attention", "residual", "post_norm", "mlp", "output"]


def test_stages_run_in_order() -> None:
    layers = [f"layers.{i}.{kind}" for i in range(2) for kind in SIX]
    assert stage_names(2) == ["embedding", *layers, "final_norm", "logits"]
    crossing = [*SIX[:3], "cross_norm", "cross_attention", "cross_residual", *SIX[3:]]
    assert stage_names(2, 3) == [
        *OF_ENCODER,
        *(f"encoder.layers.{i}.{kind}" for i in range(3) for kind in SIX),
        "encoder.final_norm",
        *("layers.0.cross_keys", "layers.0.cross_values", "layers.1.cross_keys", "layers.1.cross_values"),
        "embedding",
        *(f"layers.{i}.{kind}" for i in range(2) for kind in crossing),
        *("final_norm", "logits"),
    ]


@pytest.mark.parametrize(
    ("stage", "layer", "kind", "places", "inner"),
    [
        ("layers.12.mlp", 12, "mlp", ["layers.12.inner", "layers.12.mlp"], []),
        (
            *("layers.3.attention", 3, "attention", ["layers.3.attended", "layers.3.attention"]),
            ["layers.3.query", "layers.3.keys"],
        ),
        (
            *("encoder.layers.3.attention", None, "encoder.attention"),
            *(["encoder.layers.3.attended", "encoder.layers.3.attention"], []),
        ),
        (
            *("layers.1.cross_attention", 1, "cross_attention"),
            *(["layers.1.cross_attended", "layers.1.cross_attention"], []),
        ),
        ("encoder.final_norm", None, "encoder.final_norm", ["encoder.final_norm"], []),
        ("logits", None, "logits", ["logits"], []),
    ],
)
def test_the_parts_of_a_name(
    stage: str, layer: int | None, kind: str, places: list[str], inner: list[str]
) -> None:
    assert (layer_of(stage), kind_of(stage)) == (layer, kind)
    assert (places_of(stage), inner_places_of(stage)) == (places, inner)


def written(path: Path, tensors: dict[str, torch.Tensor], **notes: str) -> Path:
    writer = TraceWriter(path)
    for key, tensor in tensors.items():
        writer.add(key, tensor)
    writer.metadata |= {"names": OWN_NAMES, **notes}
    writer.close()
    return path


@pytest.mark.parametrize("whole", [False, True])
def test_steps_have_their_own_tokens_whether_the_text_runs_again_or_not(whole: bool, tmp_path: Path) -> None:
    ids = [[5, 6, 7], [8], [9, 4]]
    tensors, total = {}, 0
    for step, new in enumerate(ids):
        ran = [token for part in ids[: step + 1] for token in part] if whole else new
        first = 0 if whole else total
        total += len(new)
        tensors[f"{step}/input_ids"] = torch.tensor([ran])
        tensors[f"{step}/layers.0.attention"] = torch.arange(first, total, dtype=torch.float32)[:, None]
    found = StageFile(written(tmp_path / "x", tensors, dtype="float16"))
    assert (found.steps, found.num_layers, found.encoder_layers, found.dtype) == (2, 1, 0, torch.float16)
    assert [found.ids(step) for step in range(3)] == ids
    assert [found.start(step) for step in range(3)] == [0, 3, 4]
    parts = [found.get(step, "layers.0.attention") for step in range(3)]
    assert [None if part is None else part.flatten().tolist() for part in parts] == [[0, 1, 2], [3], [4, 5]]
    so_far = found.so_far(1, "layers.0.attention")
    assert so_far is not None
    assert so_far.flatten().tolist() == [0, 1, 2, 3]
    assert found.get(0, "layers.0.mlp") is None
    assert found.so_far(2, "layers.0.mlp") is None


def test_the_dtype_of_a_file_without_one_is_fp32(tmp_path: Path) -> None:
    found = StageFile(written(tmp_path / "x", {"0/input_ids": torch.tensor([1])}))
    assert found.dtype == torch.float32


def test_a_class_s_modules_are_the_stages_of_its_layers(tmp_path: Path) -> None:
    """The stream after attention is what the second norm reads."""
    model = make_model(tiny_config("llama"))
    model.config.eos_token_id = 3
    path = tmp_path / "x.safetensors"
    seen = {}
    layer = model.model.layers[1]
    handles = [
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, given: seen.update(residual=given[0])
        ),
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.update(attended=given[0])),
        layer.mlp.register_forward_hook(lambda _, given, output: seen.update(mlp=output)),
        layer.register_forward_hook(lambda _, given, output: seen.update(output=output)),
        model.model.norm.register_forward_hook(lambda _, given, output: seen.update(final_norm=output)),
    ]
    with trace(model, path):
        run_steps(model, random_ids(5), 0)
    for handle in handles:
        handle.remove()
    found = StageFile(path)
    for kind, tensor in seen.items():
        name = kind if kind == "final_norm" else f"layers.1.{kind}"
        rows = found.get(0, name)
        assert rows is not None
        assert torch.equal(rows, (tensor[0] if isinstance(tensor, tuple) else tensor)[0]), name


class Counting(nn.Module):
    """Logits that prefer the sum of all ids that it was given; without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[int]] = []
        self.weight = nn.Parameter(torch.eye(50))
        self.inner = nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.given.append(input_ids[0].tolist())
        return self.inner(self.weight[input_ids.cumsum(1) % 50])  # type: ignore[no-any-return]


@pytest.mark.parametrize("forced", [None, [7, 1]])
def test_tokens_that_are_forced_are_fed_and_choices_reported(forced: list[int] | None) -> None:
    model = Counting()
    choices = run_steps(model, [2, 3], 2, forced)
    if forced is None:
        assert (choices, model.given) == ([5, 10, 20], [[2, 3], [2, 3, 5], [2, 3, 5, 10]])
    else:
        assert (choices, model.given) == ([5, 12, 13], [[2, 3], [2, 3, 7], [2, 3, 7, 1]])


@pytest.mark.parametrize(("named", "noted"), [([5, 9], "[5, 9]"), (4, "[4]"), (None, "[]"), ("x", None)])
def test_a_trace_notes_what_a_class_ends_at(named: object, noted: str | None, tmp_path: Path) -> None:
    model = Counting()
    model.generation_config = type("Config", (), {"eos_token_id": named})()
    with trace(model, tmp_path / "x", prompt="told"):
        run_steps(model, [2], 1)
    metadata = trace_file.read_header(str(tmp_path / "x"))["__metadata__"]
    assert metadata.get("stop_ids") == noted
    assert (metadata["model"], metadata["dtype"], metadata["steps"]) == ("Counting", "float32", "1")
    assert metadata["prompt"] == "told"
