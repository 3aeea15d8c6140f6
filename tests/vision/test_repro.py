"""``ingot repro`` on a model of pictures: layers of ViT, Q-Former and decoder, extracted and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot import LLM
from ingot.errors import EngineError, RequestError
from ingot.kernels.attention import encoder_attention
from ingot.layers.encoder_blocks import qformer
from ingot.proof.repro_bundle import read_bundle, write_bundle
from ingot.proof.repro_run import capture_layer, replay
from tests.e2e.terminal import ingot
from tests.vision.conftest import COLOUR, POCKET, image

CPU = torch.device("cpu")
PLACES = {
    "layers.1": ("decoder", 2),
    "encoder.vit.layers.0": ("encoder.vit", 0),
    "encoder.vit.layers.3": ("encoder.vit", 0),
    "encoder.qformer.layers.0": ("encoder.qformer", 0),
    "encoder.qformer.layers.1": ("encoder.qformer", 0),
}


def asked(*urls: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(image, urls), {"type": "text", "text": COLOUR}]}]


@pytest.mark.stays("layers.1", "encoder.vit.layers.3", "encoder.qformer.layers.1")
@pytest.mark.parametrize("name", PLACES)
def test_round_trip(name: str, llm: LLM, urls: list[str], tmp_path: Path) -> None:
    half, step = PLACES[name]
    captured = capture_layer(llm, asked(urls[0]), int(name.rpartition(".")[2]), step, half=half)
    write_bundle(tmp_path / "b.safetensors", captured)
    bundle = read_bundle(tmp_path / "b.safetensors")
    assert bundle.facts == captured.facts
    assert bundle.facts.name == name
    found = replay(bundle, CPU)
    assert (found.agrees, found.against_output, found.proves) == (True, 0, True)
    assert 0 < found.against_expected == bundle.facts.output_error <= found.floor < 1e-5
    assert bundle.facts.private.endswith("share it only as you would share the picture.")
    read = bundle.inputs.encoded
    assert (None if read is None else tuple(read.shape)) == (
        (65, 176) if name.endswith("former.layers.0") else None
    )


def test_a_bundle_holds_what_its_own_picture_became(llm: LLM, urls: list[str]) -> None:
    """The decoder's first layer is given the picture's rows between the texts, and the ViT its patches."""
    for url in urls:
        rows = llm.encode_image(url)
        inputs = capture_layer(llm, asked(url), 0).inputs
        first = llm.prompt_ids(asked(url)).index(0)
        torch.testing.assert_close(inputs.hidden[first : first + len(rows)], rows, rtol=0, atol=1e-5)
    both = [capture_layer(llm, asked(url), 0, half="encoder.vit").inputs.hidden for url in urls]
    assert not torch.equal(*both)
    seen = capture_layer(llm, asked(urls[0]), 2, half="encoder.qformer").inputs.encoded
    exact = capture_layer(llm, asked(urls[0]), 3, half="encoder.vit").output
    assert torch.equal(llm.engine.model.get_submodule("encoder.ln_vision")(exact)[0], seen)


def _off() -> Any:
    """Scores of attention that are not scaled as they should be."""
    functional = torch.nn.functional

    def wrong(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(1.1 * query, *others)

    return SimpleNamespace(**vars(functional) | {"scaled_dot_product_attention": wrong})


@pytest.mark.parametrize(
    ("half", "module"), [("encoder.vit", encoder_attention), ("encoder.qformer", qformer)]
)
def test_a_wrong_kernel_shows_in_the_bundle_and_not_in_its_replay(
    half: str, module: Any, llm: LLM, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as wrong:
        wrong.setattr(module, "F", _off())
        bundle = capture_layer(llm, asked(urls[0]), 0, half=half)
        assert bundle.facts.output_error > 100 * bundle.facts.floor
        assert (replay(bundle, CPU).agrees, replay(bundle, CPU).repeats) == (False, True)
    assert replay(bundle, CPU).agrees


def test_what_cannot_be_extracted(llm: LLM, urls: list[str]) -> None:
    for prompt, layer, step, half, why in (
        (asked(urls[0]), 0, 0, "encoder", r"no such part.*encoder\.vit\.N', 'encoder\.qformer\.N"),
        (asked(urls[0]), 4, 0, "encoder.vit", r"no such layer.*encoder\.vit\.0 to encoder\.vit\.3"),
        (asked(urls[0]), 0, 1, "encoder.vit", "runs once"),
        (asked(), 0, 0, "encoder.vit", "with one picture in the prompt.*seen: 0"),
        (asked(*urls), 0, 0, "encoder.qformer", "with one picture in the prompt.*seen: 2"),
    ):
        with pytest.raises(RequestError, match=f"(?s){why}"):
            capture_layer(llm, prompt, layer, step, half=half)


def test_bundles_that_do_not_fit_together(llm: LLM, urls: list[str], tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    write_bundle(path, capture_layer(llm, asked(urls[0]), 0, half="encoder.qformer"))
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["ingot_repro"])
    tensors = load_file(path)
    encoded = tensors["input.encoded"]
    changes: tuple[tuple[dict[str, Any], dict[str, torch.Tensor]], ...] = (
        ({"half": "encoder.ln_vision"}, tensors),
        ({"half": "encoder.vit"}, tensors),
        ({"layer": 1}, tensors),
        ({}, {name: one for name, one in tensors.items() if name != "input.encoded"}),
        ({}, tensors | {"input.encoded": encoded[:, :5].clone()}),
    )
    for changed, own in changes:
        save_file(own, path, {"ingot_repro": json.dumps(facts | changed)})
        with pytest.raises(EngineError, match="damaged"):
            read_bundle(path)


def test_the_verb(scene: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.safetensors"
    usual = ("--image", scene, "--prompt", COLOUR, "--device", "cpu", "--max-batch-size", 1)
    shown = ingot("repro", POCKET, "--layer", "encoder.vit.1", *usual, "--out", target)
    assert shown.exit_code == 0, shown.output
    assert "positions   65" in shown.stdout
    assert str(scene) not in target.read_bytes().decode("latin1")
    again = ingot("repro", "--run", target, "--device", "cpu")
    assert again.exit_code == 0
    assert f"encoder.vit.layers.1 of {POCKET.name}" in again.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("--layer", "encoder.vit.x", "--ids", "1"),
            "it takes N or encoder.N; of pictures also encoder.vit.N",
        ),
        (("--layer", "vit.1", "--ids", "1"), "it takes N or encoder.N"),
        (("--layer", "0", "--image", "absent.png", "--prompt", "a"), "no such file"),
        (("--layer", "0", "--image", "absent.png", "--ids", "1"), "--image goes with --prompt"),
        (("--layer", "0", "--image", "absent.png"), "--image goes with --prompt"),
    ],
)
def test_what_is_misused(words: tuple[str, ...], why: str) -> None:
    shown = ingot("repro", POCKET, *words, "--device", "cpu")
    assert shown.exit_code == 2, shown.output
    assert why in " ".join(shown.stderr.replace("│", " ").split())
