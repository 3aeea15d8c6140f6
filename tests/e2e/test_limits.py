"""Limits that are lowered when an engine is loaded, in Python and in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.cli.options.limit_flags import Limits
from ingot.config.build_config import BuildConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import setting_of
from ingot.errors import ConfigError, RequestError
from ingot.memory.ledger import ledger
from ingot.proof.verify_engine import verify
from tests.e2e.folders import contents
from tests.e2e.terminal import ingot, run_json
from tests.e2e.tiny import write_tiny
from tests.support.shown_errors import raises_shown
from tests.tiny_models import random_ids, save_model, tiny_config

GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
NTK_IDS = [i % 250 for i in random_ids(90, seed=3)]  # beyond the 64 tokens that were trained: another base


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two engines of 8 requests: Qwen v1 with four rotary sections, and a LLaMA."""
    root = tmp_path_factory.mktemp("limits")
    write_tiny(root / "qwen-hf", seq_length=64, max_position_embeddings=512)
    save_model(tiny_config("llama"), root / "llama-hf", seed=1)
    lengths = {"qwen": 500, "llama": 128}
    return {
        kind: build(root / f"{kind}-hf", root / kind, device="cpu", max_batch_size=8, max_seq_len=length)
        for kind, length in lengths.items()
    }


class TestLowered:
    def test_everything_agrees_and_the_folder_stays(self, engines: dict[str, Path]) -> None:
        before = contents(engines["llama"])
        llm = LLM(engines["llama"], "cpu", max_batch_size=3, max_seq_len=70)
        limits = llm.engine.manifest.build
        assert (limits.max_batch_size, limits.max_seq_len) == (3, 70)
        assert (llm.executor.max_batch_size, llm.executor.max_seq_len) == (3, 70)
        assert "max_batch_size=3, max_seq_len=70" in repr(llm)
        assert llm.engine.model.rotary is not None
        assert len(llm.engine.model.rotary.table) == 70
        found = ledger(setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device))
        assert found.blocks == llm.executor.blocks.num_blocks == 3 * 2
        with pytest.raises(RequestError, match=r"<= 69 tokens.*max_seq_len"):
            llm.generate(random_ids(70))
        assert contents(engines["llama"]) == before
        assert verify(engines["llama"], "cpu", note=False).verdict == "proven"

    @pytest.mark.parametrize(
        ("kind", "ids", "length"), [("qwen", NTK_IDS, 128), ("qwen", NTK_IDS[:50], 60), ("llama", None, 40)]
    )
    def test_it_computes_the_same(
        self, engines: dict[str, Path], kind: str, ids: list[int] | None, length: int
    ) -> None:
        ids = ids or random_ids(30, seed=2)
        whole, low = LLM(engines[kind], "cpu"), LLM(engines[kind], "cpu", max_seq_len=length)
        assert torch.equal(whole.logits(ids), low.logits(ids))
        assert whole.generate(ids, GREEDY)[0].token_ids == low.generate(ids, GREEDY)[0].token_ids

    def test_the_sections_are_those_that_prompts_can_need(self, engines: dict[str, Path]) -> None:
        whole, low = LLM(engines["qwen"], "cpu"), LLM(engines["qwen"], "cpu", max_seq_len=128)
        assert whole.engine.model.rotary is not None
        assert low.engine.model.rotary is not None
        assert [len(llm.engine.model.rotary.table) for llm in (whole, low)] == [4 * 500, 2 * 128]  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("values", "reported"),
        [
            (
                {"max_seq_len": 129},
                r"smaller max_seq_len; seen: 129; allowed: <= 128; .*rebuild with a larger limit",
            ),
            (
                {"max_batch_size": 9},
                r"smaller max_batch_size; seen: 9; allowed: <= 8; .*rebuild with a larger limit",
            ),
            ({"max_seq_len": 0}, "max_seq_len must be an integer >= 1"),
            ({"max_batch_size": "many"}, "max_batch_size must be an integer >= 1"),
        ],
        ids=str,
    )
    def test_what_was_not_built(
        self, engines: dict[str, Path], values: dict[str, Any], reported: str
    ) -> None:
        with raises_shown(ConfigError, reported):
            LLM(engines["llama"], "cpu", **values)

    def test_one_token_alone(self, engines: dict[str, Path]) -> None:
        assert LLM(engines["llama"], "cpu", max_batch_size=1, max_seq_len=1).logits([3]).shape == (1, 97)

    def test_verify_needs_no_room_for_the_longest_request(
        self, tmp_path: Path, setups: list[tuple[BuildConfig, RuntimeConfig]]
    ) -> None:
        save_model(tiny_config("llama", max_position_embeddings=8192), tmp_path / "hf", seed=1)
        engine = build(tmp_path / "hf", tmp_path / "engine", device="cpu", max_seq_len=8192)
        found = verify(engine, "cpu", note=False)
        lengths = [limits.max_seq_len for limits, _ in setups]
        assert (found.verdict, found.num_cases > 0, lengths) == ("proven", True, [2048])


class TestFlags:
    def test_they_reach_the_engine(
        self, engines: dict[str, Path], setups: list[tuple[BuildConfig, RuntimeConfig]]
    ) -> None:
        words = ["--memory-fraction", 0.5, "--cache-tokens", 256, "--token-budget", 64]
        words += ["--max-batch-size", 2, "--max-seq-len", 100, "--max-new-tokens", 2, "--device", "cpu"]
        plain = ["--max-new-tokens", 2, "--device", "cpu"]
        assert ingot("run", engines["qwen"], "Hi", *words).exit_code == 0
        assert ingot("chat", engines["qwen"], *words, stdin="Hi\n").exit_code == 0
        assert ingot("run", engines["qwen"], "Hi", *plain).exit_code == 0
        asked = RuntimeConfig(memory_fraction=0.5, cache_tokens=256, token_budget=64)
        found = [(limits.max_batch_size, limits.max_seq_len, runtime) for limits, runtime in setups]
        assert found == [(2, 100, asked)] * 2 + [(8, 500, RuntimeConfig())]

    def test_a_checkpoint_takes_them_too(self, engines: dict[str, Path]) -> None:
        checkpoint = engines["qwen"].parent / "qwen-hf"
        (line,) = run_json(checkpoint, "Hi", "--raw", "--max-seq-len", 5, "--ignore-eos")
        assert len(line["answers"][0]["token_ids"]) == 3

    @pytest.mark.parametrize("verb", ["run", "chat"])
    def test_more_than_was_built_is_misuse(self, engines: dict[str, Path], verb: str) -> None:
        result = ingot(verb, engines["qwen"], "--max-seq-len", 501, "--device", "cpu", stdin="Hi\n")
        assert result.exit_code == 2
        assert "allowed: <= 500" in result.stderr
        assert "fix: --max-seq-len, or rebuild with a larger limit" in result.stderr

    def test_repro_prints_them_in_its_command(self, engines: dict[str, Path], tmp_path: Path) -> None:
        file = tmp_path / "layer.safetensors"
        words = ("--layer", 1, "--ids", "1 2 3", "--out", file, "--token-budget", 64, "--batch-invariant")
        result = ingot("repro", engines["llama"], *words, "--device", "cpu", "--json")
        assert result.exit_code == 0
        assert "--layer 1 --step 0 --token-budget 64 --batch-invariant" in result.stdout

    def test_words(self) -> None:
        limits = Limits(memory_fraction=0.5, max_seq_len=9, batch_invariant=True)
        assert limits.words() == ["--memory-fraction", "0.5", "--max-seq-len", "9", "--batch-invariant"]
        assert Limits().arguments() == {}
