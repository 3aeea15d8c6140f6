"""RPTQ on OPT, its own model: clusters, ranges and logits beside the paper's algorithm in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from ingot import LLM, build, verify
from ingot.config.quantization.quant_config import QuantConfig
from ingot.measure.align.align_session import align
from ingot.quant.methods.channel_clusters import cluster_channels
from tests.quant.plain_rptq import Array, Cluster, PlainOpt, Sites, inertia_of, kmeans
from tests.tiny_models import make_model, random_ids, tiny_config

BLOCK, HIDDEN, HEADS, LAYERS = 32, 128, 2, 2
SIZES = {"hidden_size": HIDDEN, "ffn_dim": HIDDEN, "num_attention_heads": HEADS}
CLUSTERS = {"R1": 4, "R3": 2, "R4": 4, "R5": 4}
OURS = {"qkv": "self_attn.qkv_proj", "out": "self_attn.o_proj", "fc1": "mlp.up_proj", "fc2": "mlp.down_proj"}
RECORDS = [random_ids(60, seed=n) for n in range(6)]
SCHEMES = ("rptq-w8a8", "rptq-w4a8", "rptq-w4a4")
Made = Callable[[str], tuple[PlainOpt, Path, "Stored"]]


def planted_groups(size: int, seed: int) -> list[list[int]]:
    """Channels in groups as large as a block, spread over the input."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return [sorted(part.tolist()) for part in order.split(BLOCK)]


@torch.no_grad()
def outliers(folder: Path) -> None:
    """A tiny OPT with groups of channels at each site, far from each other and in the middle of each other's
    places; ReLU cuts some of a group, and all of none.
    """
    model: Any = make_model(tiny_config("opt", **SIZES), seed=4)
    for index, layer in enumerate(model.model.decoder.layers):
        for norm, seed in ((layer.self_attn_layer_norm, 1), (layer.final_layer_norm, 2)):
            norm.weight.mul_(0.4)
            shift(norm.bias, planted_groups(HIDDEN, seed + 10 * index), (0, 6, -6, 12))
        attention, size = layer.self_attn, HIDDEN // HEADS
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight.mul_(0.05)  # whose inputs are large
        for head in range(HEADS):
            shift(
                attention.v_proj.bias[head * size : (head + 1) * size], planted_groups(size, 3 + head), (0, 9)
            )
        layer.fc1.weight.mul_(0.05)
        shift(layer.fc1.bias, planted_groups(HIDDEN, 5 + index), (0, 6, 12, 18))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def shift(bias: torch.Tensor, groups: list[list[int]], shifts: tuple[float, ...]) -> None:
    for own, place in zip(groups, shifts, strict=True):
        bias[own] = 0.1 * bias[own] + place


class Stored:
    """What an engine stores, read without Ingot: values, scales, and the order that channels have."""

    def __init__(self, engine: Path, plain: PlainOpt) -> None:
        self._tensors = load_file(engine / "weights.safetensors")
        self.orders: dict[tuple[int, str], list[int]] = {}
        self.weights: dict[tuple[int, str], Array] = {}
        exact = plain.weights()
        for layer in range(LAYERS):
            rows = {"qkv": 2 * HIDDEN, "fc1": 0}
            for place in ("qkv", "fc1"):  # channels in the model's order
                order = self._get(layer, place, "order").astype(int).tolist()
                self.orders[layer, place] = order
                values = np.empty((len(exact[layer, place]), HIDDEN))
                values[:, order] = self._values(layer, place)
                behind = {"qkv": "out", "fc1": "fc2"}[place]
                moved = nearest_rows(values[rows[place] :], exact[layer, place][rows[place] :])
                self.orders[layer, behind] = moved
                self.weights[layer, place] = values.copy()
                self.weights[layer, place][[rows[place] + one for one in moved]] = values[rows[place] :]
                columns = np.empty((HIDDEN, HIDDEN))
                columns[:, moved] = self._values(layer, behind)
                self.weights[layer, behind] = columns

    def _get(self, layer: int, place: str, leaf: str) -> Array:
        return np.asarray(self._tensors[f"layers.{layer}.{OURS[place]}.{leaf}"], np.float64)

    def _values(self, layer: int, place: str) -> Array:
        return self._get(layer, place, "weight") * self._get(layer, place, "scales")[:, None]

    def clusters(self, layer: int, place: str) -> set[Cluster]:
        """Blocks as clusters."""
        order = self.orders[layer, place]
        pairs = zip(self._get(layer, place, "steps"), self._get(layer, place, "zeros"), strict=True)
        return {
            Cluster(frozenset(order[BLOCK * n : BLOCK * (n + 1)]), float(scale), float(zero))
            for n, (scale, zero) in enumerate(pairs)
        }


def nearest_rows(stored: Array, exact: Array) -> list[int]:
    """Which of the checkpoint's rows each stored row is."""
    found = [int(((exact - row) ** 2).sum(1).argmin()) for row in stored]
    assert sorted(found) == list(range(len(exact)))
    return found


def sites_of(plain: PlainOpt, stored: Stored, scheme: str) -> Sites:
    bits = dict.fromkeys(CLUSTERS, 8) | ({"R3": 4, "R5": 4} if scheme == "rptq-w4a4" else {})
    return plain.calibrated(RECORDS, stored.weights, CLUSTERS, bits)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made("rptq-w8a8"): the plain model, the engine, and what it stores; each once."""
    root = tmp_path_factory.mktemp("opt")
    outliers(root / "hf")
    plain = PlainOpt(load_file(root / "hf" / "model.safetensors"), LAYERS, HEADS)
    samples = root / "samples.jsonl"
    samples.write_text("".join(f'{{"token_ids": {ids}}}\n' for ids in RECORDS))

    @cache
    def make(scheme: str) -> tuple[PlainOpt, Path, Stored]:
        quant = QuantConfig(scheme, BLOCK)
        engine = build(root / "hf", root / scheme, quant=quant, device="cpu", dtype="fp32", calib=samples)
        return plain, engine, Stored(engine, plain)

    return make


def test_the_plain_model_is_hugging_faces(made: Made, tmp_path: Path) -> None:
    plain, engine, _ = made("rptq-w8a8")
    model = AutoModelForCausalLM.from_pretrained(engine.parent / "hf").double()
    with torch.inference_mode():
        theirs = model(torch.tensor([RECORDS[0]])).logits[0].numpy()
    ours = plain.logits(RECORDS[0], plain.weights(), {})
    assert np.abs(ours - theirs).max() < 1e-9 * np.abs(theirs).max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_clusters_and_ranges_are_the_papers(made: Made, scheme: str) -> None:
    """Where clusters fill whole blocks: the same channels together, with the same scale and zero."""
    plain, _, stored = made(scheme)
    sites = sites_of(plain, stored, scheme)
    for (layer, name), site in sites.items():
        place = {"R1": "qkv", "R3": "out", "R4": "fc1", "R5": "fc2"}[name]
        ours = {one.channels: one for one in stored.clusters(layer, place)}
        theirs = {one.channels: one for one in site.clusters}
        assert ours.keys() == theirs.keys(), (layer, name)
        for channels, own in theirs.items():
            assert ours[channels].scale == pytest.approx(own.scale, rel=1e-4), (layer, name)
            assert ours[channels].zero == own.zero, (layer, name)
    groups = {frozenset(own) for own in planted_groups(HIDDEN, 1)}
    assert {one.channels for one in sites[0, "R1"].clusters} == groups, "what was planted is found"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_rounding_in_floating_point(made: Made, scheme: str) -> None:
    """Products of whole numbers across LayerNorm, ReLU and biases, beside the paper's clusters in fp64. A few
    values of 8 bits are so near to a tie that fp32 decides: x / scale is 1000 here.
    """
    plain, engine, stored = made(scheme)
    ids = random_ids(40, seed=9)
    theirs = plain.logits(ids, stored.weights, sites_of(plain, stored, scheme))
    ours = LLM(engine, "cpu").logits(ids).double().numpy()
    exact = plain.logits(ids, plain.weights(), {})
    off, cost = np.linalg.norm(ours - theirs), np.linalg.norm(exact - theirs)
    assert off < 1e-4 * np.linalg.norm(exact)
    assert off < (0.2 if scheme == "rptq-w8a8" else 0.05) * cost


@pytest.mark.parametrize("scheme", SCHEMES)
def test_they_are_proven_and_aligned(made: Made, scheme: str) -> None:
    _, engine, _ = made(scheme)
    found = verify(engine, "cpu", note=False, source=engine.parent / "hf")
    assert found.verdict == "proven", found.failures
    report = align(engine, engine.parent / "hf", [random_ids(19)], steps=1, device="cpu")
    assert report.aligned, report.first_stage


@pytest.mark.parametrize("clusters", [4, 32])
def test_clusters_of_any_channels_are_as_near_as_the_papers(made: Made, clusters: int) -> None:
    """Of channels without groups two runs of k-means differ; neither is nearer by more than a little."""
    draws = np.random.default_rng(clusters)
    high, low = draws.gamma(2.0, 1.0, 512), -draws.gamma(1.5, 2.0, 512)
    points = np.stack([high, low], -1)
    ours = cluster_channels(torch.tensor(low), torch.tensor(high), clusters).numpy()
    theirs = kmeans(points, clusters)
    assert inertia_of(points, ours) == pytest.approx(inertia_of(points, theirs), rel=0.05)
