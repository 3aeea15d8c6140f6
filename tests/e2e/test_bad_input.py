"""Every user error is one clear error, and the same LLM works afterwards."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import LLM, IngotError, Prompt, SamplingParams, build
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import CheckpointError, ConfigError, DeviceError, OutOfMemoryError, RequestError
from ingot.llm.sampling_defaults import default_params
from tests.e2e.watch import before_steps, check_idle
from tests.tiny_models import edit_config, random_ids, save_model, tiny_config

IDS = random_ids(9, seed=2)
PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA in three shards or more, without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(tiny_config("llama"), folder, seed=1, max_shard_size="32KB")
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> tuple[LLM, list[int]]:
    """An LLM that all tests of this file use, and what it says when nothing is wrong."""
    llm = LLM(checkpoint, "cpu", max_batch_size=4, runtime=RuntimeConfig(cache_tokens=256, block_size=16))
    return llm, llm.generate(IDS, PARAMS)[0].token_ids


@pytest.fixture
def llm(shared: tuple[LLM, list[int]]) -> Iterator[LLM]:
    """The shared LLM; after the test nothing is in flight and its answers are unchanged."""
    model, expected = shared
    yield model
    check_idle(model)
    assert model.generate(IDS, PARAMS)[0].token_ids == expected
    check_idle(model)


def clear(error: pytest.ExceptionInfo[IngotError]) -> str:
    """The message, which says what to change: a fix, or the values allowed."""
    assert error.value.fix or error.value.allowed, str(error.value)
    return str(error.value)


def largest(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)


def write_pickle(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / "owned",)

    for path in folder.glob("model*"):
        path.unlink()
    torch.save({"w": torch.ones(1), "evil": Evil()}, folder / "pytorch_model.bin", pickle_module=pickle)


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json"),
    "config no json": (lambda f: (f / "config.json").write_text("{,"), r"config\.json"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json"),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"]),
        r"MambaForCausalLM.*LlamaForCausalLM",
    ),
    "architectures a number": (lambda f: edit_config(f, architectures=7), "architecture"),
    "architectures a string": (lambda f: edit_config(f, architectures="LlamaForCausalLM"), "architecture"),
    "missing shard": (lambda f: largest(f).unlink(), r"model-0000\d-of-0000\d\.safetensors"),
    "missing index": (lambda f: (f / "model.safetensors.index.json").unlink(), r"index\.json"),
    "cut shard": (lambda f: largest(f).write_bytes(largest(f).read_bytes()[:-100]), "safetensors"),
    "empty shard": (lambda f: largest(f).write_bytes(b""), "safetensors"),
    "shard of noise": (lambda f: largest(f).write_bytes(bytes(range(256)) * 9), "safetensors"),
    "pickle with code": (write_pickle, "pytorch_model.bin"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "no readable weights"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_that_is_none(copy: Path, name: str) -> None:
    damage, reported = CHECKPOINTS[name]
    damage(copy)
    for call in (lambda: LLM(copy, "cpu"), lambda: build(copy, copy.parent / "engine", device="cpu")):
        with pytest.raises(CheckpointError, match=re.compile(reported, re.S)) as error:
            call()
        clear(error)
    assert [p.name for p in copy.parent.iterdir()] == ["checkpoint"]
    assert not (copy / "owned").exists(), "the pickle ran"


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, reported in (("nowhere/at/all", "nowhere"), ("empty", r"config\.json"), ("file", "folder")):
        with pytest.raises(CheckpointError, match=reported) as error:
            LLM(tmp_path / name, "cpu")
        clear(error)


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "reported"),
        [
            ([[]], "empty"),
            ([97], r"97.*0 to 96"),
            ([-1, 3], r"-1.*0 to 96"),
            ([1 << 70], "vocabulary"),
            ("text", "tokenizer"),
            (Prompt(["text", [1]]), "tokenizer"),
            (7, "prompt"),
            (None, "prompt"),
            (1.5, "prompt"),
            ([1.5, 2], "prompt"),
            ([True, False], "prompt"),
            ([None], "prompt"),
            ({"a": 1}, "prompt"),
            ([[1, 2], "text"], "tokenizer"),
            ([[1, 2], [97]], "97"),
            (list(range(90)) * 2, r"180 tokens.*<= 127.*shorten"),
            ([1] * 128, r"128 tokens.*<= 127"),
            (np.array([1.5, 2.5]), "prompt"),
            (torch.tensor([[1, 2]]), "prompt"),
        ],
        ids=lambda v: repr(v)[:24],
    )
    def test_generate(self, llm: LLM, prompt: Any, reported: str) -> None:
        with pytest.raises(RequestError, match=reported) as error:
            llm.generate(prompt, PARAMS)
        clear(error)

    @pytest.mark.parametrize("prompt", [[], [97], [1] * 129, "text", None], ids=repr)
    def test_logits_and_stream(self, llm: LLM, prompt: Any) -> None:
        for call in (llm.logits, llm.stream):
            with pytest.raises(RequestError) as error:
                call(prompt)
            clear(error)

    def test_one_bad_prompt_of_many_starts_none(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="97"):
            llm.generate([IDS, IDS, [97]], PARAMS.replace(n=3, temperature=1.0))

    def test_arrays_of_ids_are_ids(self, llm: LLM) -> None:
        expected = llm.generate(IDS, PARAMS)[0].token_ids
        for ids in (np.array(IDS), torch.tensor(IDS), tuple(IDS), [np.int64(i) for i in IDS]):
            assert llm.generate(ids, PARAMS)[0].token_ids == expected  # type: ignore[arg-type]

    def test_no_prompts_give_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([], PARAMS) == []

    @pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"role": "king", "content": "x"}]])
    def test_chat_without_a_format(self, llm: LLM, messages: Any) -> None:
        with pytest.raises(RequestError):
            llm.chat(messages)


class TestParams:
    @pytest.mark.parametrize(
        "params", [[PARAMS], [PARAMS] * 3, {"temperature": 1}, ["a", "b"], 7, [PARAMS, None]], ids=repr
    )
    def test_not_one_for_each_prompt(self, llm: LLM, params: Any) -> None:
        with pytest.raises(RequestError, match="params") as error:
            llm.generate([IDS, IDS], params)
        clear(error)

    def test_values_by_name_count_over_params(self, llm: LLM) -> None:
        expected = llm.generate(IDS, PARAMS.replace(max_new_tokens=3))[0].token_ids
        for values in ({"max_new_tokens": 3}, {"max_tokens": 3}):
            assert llm.generate(IDS, PARAMS, **values)[0].token_ids == expected
            assert llm.generate([IDS, IDS], [PARAMS, PARAMS], **values)[1].token_ids == expected
            pieces = list(llm.stream(IDS, ignore_eos=True, **values))
            assert [token for piece in pieces for token in piece.token_ids] == expected
            many = list(llm.stream_many([IDS], PARAMS, **values))
            assert [token for _, piece in many for token in piece.token_ids] == expected

    def test_values_by_wrong_names(self, llm: LLM) -> None:
        calls: list[Callable[..., Any]] = [llm.generate, llm.stream, llm.stream_many]
        for call in calls:
            with pytest.raises(RequestError, match=r"temprature.*did you mean temperature\?"):
                call(IDS, temprature=1)
            with pytest.raises(RequestError, match="temperature is out of range"):
                call(IDS, temperature=-1)
        with pytest.raises(RequestError, match="unknown sampling parameter; seen: best_of"):
            llm.chat([{"role": "user", "content": "Hi"}], best_of=3)

    def test_beams_that_cannot_fit(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"5.*<= 4.*num_beams"):
            llm.generate(IDS, SamplingParams(num_beams=5))
        with pytest.raises(RequestError, match=r"blocks.*cache_tokens"):
            llm.generate(IDS, SamplingParams(num_beams=4, max_new_tokens=100))
        with pytest.raises(RequestError, match="logprobs"):
            llm.generate(IDS, SamplingParams(num_beams=2, max_new_tokens=5, logprobs=1))
        assert len(llm.generate(IDS, SamplingParams(num_beams=4, max_new_tokens=5))[0].answers) == 1

    def test_odd_generation_configs_fall_back(self) -> None:
        odd: dict[str, tuple[object, ...]] = {
            "top_p": (1.5, None),
            "top_k": (-2, None),
            "temperature": ("hot", -3),
            "repetition_penalty": (0, "x"),
            "max_new_tokens": (0, True),
            "min_p": (7,),
        }
        for name, value in ((name, value) for name, values in odd.items() for value in values):
            assert default_params({"do_sample": True, name: value}) == SamplingParams(temperature=1.0)
        good = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 64}
        params = default_params(good)
        assert params == SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=64)
        assert default_params({**good, "do_sample": False}) == SamplingParams(max_new_tokens=64)


class TestSetup:
    @pytest.mark.parametrize(
        ("values", "reported"),
        [
            ({"max_batch_size": 0}, "max_batch_size"),
            ({"max_seq_len": -1}, "max_seq_len"),
            ({"max_seq_len": "long"}, "max_seq_len"),
            ({"compute_dtype": "fp8"}, "dtype"),
        ],
        ids=str,
    )
    def test_values_out_of_range(self, checkpoint: Path, values: dict[str, Any], reported: str) -> None:
        with pytest.raises(ConfigError, match=reported) as error:
            LLM(checkpoint, "cpu", **values)
        clear(error)

    @pytest.mark.parametrize("device", ["GPU", "cuda:x", "tpu", "cuda:99", ""])
    def test_devices_that_are_not_there(self, checkpoint: Path, device: str) -> None:
        with pytest.raises(DeviceError) as error:
            LLM(checkpoint, device)
        clear(error)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("block_size", 3),
            ("block_size", 0),
            *((n, 0) for n in ("memory_fraction", "token_budget", "cache_tokens")),
        ],
    )
    def test_runtime_values(self, name: str, value: int) -> None:
        with pytest.raises(ConfigError, match=name):
            RuntimeConfig(**{name: value})

    def test_a_cache_smaller_than_one_request(self, checkpoint: Path) -> None:
        with pytest.raises(OutOfMemoryError, match=r"at least 128.*cache_tokens=128.*max_seq_len=64"):
            LLM(checkpoint, "cpu", runtime=RuntimeConfig(cache_tokens=64))

    def test_taps_that_match_nothing(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match=r"layers\.9.*layers\.0") as error, llm.tap("layers.9"):
            pass
        clear(error)

    def test_every_json_of_a_checkpoint_may_hold_anything(self, copy: Path) -> None:
        (copy / "generation_config.json").write_text(
            json.dumps({"eos_token_id": "x", "top_p": [], "do_sample": 1})
        )
        try:
            model = LLM(copy, "cpu")
        except IngotError as error:
            assert "eos_token_id" in str(error)  # noqa: PT017
        else:
            assert len(model.generate(IDS)[0].token_ids) > 0


class TestAFailingStep:
    def test_leaves_the_llm_usable(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def failing(step: Any) -> None:
            calls.append(step)
            if len(calls) == 4:
                raise RuntimeError("the GPU fell off")

        stream = llm.stream(IDS, PARAMS.replace(max_new_tokens=50))
        next(stream)
        before_steps(llm, monkeypatch, failing)
        beams = SamplingParams(num_beams=2, max_new_tokens=20, ignore_eos=True)
        with pytest.raises(RuntimeError, match="fell off"):
            llm.generate([IDS, IDS[:3]], [PARAMS, beams])
        monkeypatch.undo()
        check_idle(llm)
        stream.close()  # type: ignore[attr-defined]

    def test_an_interrupt_too(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(step: Any) -> None:
            raise KeyboardInterrupt

        before_steps(llm, monkeypatch, interrupted)
        for call in (lambda: llm.generate(IDS, PARAMS), lambda: llm.logits(IDS)):
            with pytest.raises(KeyboardInterrupt):
                call()
            check_idle(llm)
