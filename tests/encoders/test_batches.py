"""Inputs that are encoded together give what each gives alone; captured encodings; rehearsals with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot import LLM
from ingot.building.ledger_source import read_setting
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.layers.decoder import Decoder
from ingot.memory.ledger import MemorySetting, ledger
from ingot.runtime.encoding import encoder_graphs
from ingot.runtime.encoding.input_encoding import Encoding
from ingot.runtime.rehearsal import rehearse
from ingot.runtime.scheduling.inputs import EncoderEntry, EncoderJob, InputRules
from ingot.runtime.step.runner import make_caches
from ingot.text.prompt import Input, Prompt
from tests.encoders.conftest import Side
from tests.encoders.speech import FRAMES, LAYERS, MELS, POSITIONS

BLOCK = 16
FRAMES_OF = (FRAMES, 33, FRAMES, FRAMES, 33, FRAMES, FRAMES)  # 40 and 17 positions


class Encoded:
    """An encoder cache of its own, and the sizes of the batches that the encoder was given."""

    def __init__(self, model: Decoder, **options: Any) -> None:
        device = torch.device("cpu")
        self.caches = make_caches(model, 1, BLOCK, device, torch.float32)
        self.encoding = Encoding(model, self.caches, 32, BLOCK, device, **options)
        self.sizes: list[int] = []
        self._keep = self.encoding._keep
        self.encoding._keep = self._seen  # type: ignore[method-assign]

    def _seen(
        self, features: torch.Tensor, slots: torch.Tensor, between: Callable[[], None] | None = None
    ) -> None:
        self.sizes.append(len(features))
        self._keep(features, slots, between)

    @property
    def tensors(self) -> list[torch.Tensor]:
        seconds = [cache.encoded for cache in self.caches if cache.encoded is not None]
        return [self.encoding._rows, *(tensor for second in seconds for tensor in second.tensors)]


def jobs_of(side: Side, shapes: list[tuple[int, ...]]) -> list[EncoderJob]:
    """Inputs of these shapes, in blocks that do not stand in order."""
    llm = side.open()
    model, generator = llm.engine.model, torch.Generator().manual_seed(5)
    encoder, config = model.encoder, model.config.encoder
    assert encoder is not None
    assert config is not None
    rules = InputRules(model.config, encoder, 4096)  # type: ignore[arg-type]
    free, jobs = list(range(32))[::-1], []
    for shape in shapes:
        given = rules.read(torch.randn(shape, generator=generator), 0)
        taken = [free.pop() for _ in range(-(-given.positions // BLOCK))]
        jobs.append(EncoderJob(given, EncoderEntry(given.digest, taken[::-1], given.positions)))
    return jobs


def ids_by_input(llm: LLM, features: list[Input]) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    return [one.token_ids for one in llm.generate([Prompt([given, [1]]) for given in features], params)]


def test_named_features_are_taken_as_they_are(speech: Side) -> None:
    llm = speech.open()
    rules, features = llm.executor.admission.inputs, torch.randn(MELS, FRAMES)
    assert rules is not None
    given = rules.read(features, 0, b"a window")
    assert given.features.data_ptr() == features.data_ptr()
    assert given.digest == b"a window"
    assert ids_by_input(llm, [Input(features, b"a window")]) == ids_by_input(llm, [Input(features)])


@pytest.mark.gpu
def test_features_on_a_gpu_stay_there(speech: Side) -> None:
    """Beside some on the host, in one step; both are encoded by graphs."""
    llm = LLM(speech.folder, "cuda", max_batch_size=8, runtime=RuntimeConfig(block_size=16))
    host = [torch.randn(MELS, FRAMES) for _ in range(6)]
    mixed = [Input(one.cuda(), bytes([place])) if place % 2 else Input(one) for place, one in enumerate(host)]
    torch.cuda.synchronize()
    assert ids_by_input(llm, mixed) == ids_by_input(llm, [Input(one) for one in host])


def assert_alike(found: Encoded, wanted: Encoded) -> None:
    for ours, theirs in zip(found.tensors, wanted.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert any(tensor.any() for tensor in found.tensors)


@pytest.mark.parametrize(("name", "at_once"), [("speech", 1), ("speech", 2), ("speech", 8), ("pictures", 4)])
def test_inputs_together_are_inputs_alone(name: str, at_once: int, request: pytest.FixtureRequest) -> None:
    side: Side = request.getfixturevalue(name)
    model = side.open().engine.model
    encoder: Any = model.encoder
    shapes = [(MELS, frames) for frames in FRAMES_OF] if name == "speech" else [encoder.longest] * 7
    jobs = jobs_of(side, shapes)
    alone, together = Encoded(model), Encoded(model, at_once=at_once)
    for job in jobs:
        alone.encoding.encode([job])
    together.encoding.encode(jobs)
    assert_alike(together, alone)
    # Of 40 positions, and of 17, as many as fit where so many of 40 do; each time those like the oldest.
    wanted = {1: [1, 2] + [1] * 4, 2: [2, 2, 2, 1], 8: [4, 2, 1], 4: [4, 2, 1]}
    assert together.sizes == wanted[at_once]


def test_captured_encodings_are_the_same(speech: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder that runs again what it was given: buffers, sizes and what no graph takes."""
    replays: list[int] = []

    class Graph:
        def __init__(self, run: Callable[[], None]) -> None:
            self.run = run

        def replay(self) -> None:
            replays.append(1)
            self.run()

    class Recorder:
        def __init__(self, device: torch.device) -> None:
            pass

        def record_parts(self, run: Callable[[Callable[[], None]], None]) -> tuple[list[Graph], None]:
            return [Graph(lambda: run(lambda: None))], None

    monkeypatch.setattr(encoder_graphs, "Recorder", Recorder)
    model = speech.open().engine.model
    encoder: Any = model.encoder
    assert encoder.longest == (MELS, FRAMES)
    alone, captured = Encoded(model), Encoded(model, at_once=2, cuda_graphs=True)
    jobs = jobs_of(speech, [(MELS, frames) for frames in FRAMES_OF])
    alone.encoding.encode(jobs)
    captured.encoding.encode(jobs[:4])  # sizes 2 and 1, and a short one without a graph
    captured.encoding.encode(jobs[4:])
    assert_alike(captured, alone)
    assert len(replays) == 1
    captured.encoding.encode(jobs, by_module=True)
    assert len(replays) == 1
    reported, before = [], len(captured.sizes)
    captured.encoding.observer = lambda name, value: reported.append(name)
    captured.encoding.encode(jobs)
    assert len(replays) == 1
    assert reported.count("attn_in") == LAYERS * len(captured.sizes[before:])


def test_the_ledger_counts_what_is_encoded_together(speech: Side) -> None:
    model = read_setting(str(speech.folder)).model
    assert model.encoder is not None
    one = model.encoder.max_positions * model.encoder.activation_values * 2
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 16), ({"cuda_graphs": False}, 8), ({"encoder_budget": 100}, 4), ({"encoder_budget": 1}, 2),
        ({"batch_invariant": True}, 2),
    ]  # fmt: skip
    for changes, inputs in cases:
        found = ledger(MemorySetting(model, "fp16", 8, POSITIONS, runtime=RuntimeConfig(**changes)))
        bill = {item.name: item.bytes for item in found.items}
        assert bill["encoding"] == inputs * one, changes
    found = ledger(MemorySetting(model, "fp16", 8, POSITIONS, device="cpu"))
    assert {item.name: item.bytes for item in found.items}["encoding"] == one


def test_a_rehearsal_encodes_as_many_as_are_encoded_together(speech: Side) -> None:
    llm = speech.open()
    executor, sizes = llm.executor, []
    encoding = executor.runner.encoding
    assert encoding is not None
    encode = encoding.encode

    def seen(jobs: list[EncoderJob], **options: Any) -> None:
        sizes.append(len(jobs))
        encode(jobs, **options)

    encoding.encode = seen  # type: ignore[assignment, method-assign]
    rehearse(executor)
    assert [size for size in sizes if size][:4] == [8, 4, 2, 1]
    assert not executor.has_work
