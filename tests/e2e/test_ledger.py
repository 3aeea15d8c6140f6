"""``ingot plan``, the ledger of engines that are really loaded, and out-of-memory errors on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, build
from ingot.building.ledger_source import read_setting
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import setting_of
from ingot.errors import OutOfMemoryError
from ingot.layers.linear import Linear
from ingot.memory import memory_error
from ingot.memory.ledger import Capacity, ledger
from ingot.quant.schemes.half_packed import HalfPacked
from ingot.quant.schemes.in_panels import InPanels
from ingot.runtime import executor
from ingot.runtime.sampling.token_counts import TokenCounts
from ingot.runtime.step.step_buffer import StepBuffer
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.support.shown_errors import raises_shown
from tests.tiny_models import save_model, tiny_config

KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "opt", "qwen")
SHAPE = str(Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-7b.json")
GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS[:-1]:
        save_model(
            tiny_config(kind, tie_word_embeddings=kind in ("gpt2", "qwen2", "gemma2", "gemma3", "opt")),
            root / kind,
        )
    write_tiny(root / "qwen")
    return {kind: root / kind for kind in KINDS}


def bytes_of(tensors: Any) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def packed_bytes(module: torch.nn.Module) -> int:
    """Of packed weights of 16 bits: 2 bytes per value, rows in whole sixteens; in panels beside a scale and
    a bias per row.
    """
    found = 0
    for one in (m for m in module.modules() if isinstance(m, Linear)):
        rows = -(-one.out_features // 16) * 16
        if isinstance(one.scheme, HalfPacked):
            found += rows * one.in_features * 2
        elif isinstance(one.scheme, InPanels):
            found += rows * (one.in_features * 2 + 4 + 4)
    return found


class TestLoadedModels:
    @pytest.mark.parametrize("dtype", ["fp32", "fp16"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_and_cache_to_the_byte(self, kind: str, dtype: str, checkpoints: dict[str, Path]) -> None:
        runtime = RuntimeConfig(cache_tokens=300, block_size=16)
        limits = {"max_batch_size": 3, "max_seq_len": 100}
        llm = LLM(checkpoints[kind], "cpu", compute_dtype=dtype, runtime=runtime, **limits)
        setting = setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device)
        found = ledger(setting.replace(runtime=runtime))
        model = llm.engine.model
        assert found.of("weights") == bytes_of([*model.parameters(), *model.buffers()]) + packed_bytes(model)
        caches = [tensor for cache in llm.executor.runner.caches for tensor in (cache.keys, cache.values)]
        assert found.of("KV cache") == bytes_of(caches)
        assert found.blocks == llm.executor.blocks.num_blocks

    def test_rotary_tables_of_several_bases(self, tmp_path: Path) -> None:
        folder = write_tiny(tmp_path / "tiny", seq_length=64, max_position_embeddings=512)
        llm = LLM(folder, "cpu", max_seq_len=500)
        setting = setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device)
        table = next(item.bytes for item in ledger(setting).items if item.name == "rotary table")
        assert llm.engine.model.rotary is not None
        assert table == bytes_of([llm.engine.model.rotary.table]) > 500 * 16 * 4

    def test_kinds_add_up(self, checkpoints: dict[str, Path]) -> None:
        llm = LLM(checkpoints["qwen2"], "cpu", max_seq_len=100)
        found = ledger(setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device))
        layers = llm.engine.model.layers
        by_name = {item.name: item.bytes for item in found.items}
        assert by_name["mlp"] == sum(bytes_of(x.mlp.parameters()) + packed_bytes(x.mlp) for x in layers)
        attention = [layer.self_attn for layer in layers]
        assert by_name["attention"] == sum(bytes_of(x.parameters()) + packed_bytes(x) for x in attention)
        assert by_name["head"] == 0  # tied

    def test_the_cache_of_a_cpu_that_was_not_asked_for_one(self, checkpoints: dict[str, Path]) -> None:
        llm = LLM(checkpoints["llama"], "cpu", max_batch_size=3, max_seq_len=100)
        setting = setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device)
        assert setting.wanted_blocks == llm.executor.blocks.num_blocks

    def test_step_buffers(self) -> None:
        from ingot.memory.step_memory import step_buffer_bytes

        buffer = StepBuffer(40, 3, 7, 5, torch.device("cpu"), 2)
        counts = 0 if buffer._arrivals is None else buffer._arrivals.nbytes
        assert step_buffer_bytes(40, 3, 7, 5, 2) == buffer._device.nbytes + counts
        buffer = StepBuffer(40, 3, 7, 5, torch.device("cpu"), 2, tile_rows=16, tile_parts=8)
        assert buffer._arrivals is not None
        needed = buffer._device.nbytes + buffer._arrivals.nbytes
        assert step_buffer_bytes(40, 3, 7, 5, 2, tiles=8) == needed

    def test_token_counts(self, checkpoints: dict[str, Path]) -> None:
        """Beside them sampling takes what depends on the batch alone."""
        from ingot.memory.step_memory import sampling_bytes

        config = read_setting(str(checkpoints["llama"]), dtype="fp32").model
        for batch in (3, 6):
            rests = set()
            for seq_len in (8191, 8192):
                table = TokenCounts(batch, config.vocab_size, seq_len, torch.device("cpu")).table
                rests.add(sampling_bytes(config, batch, seq_len) - table.nbytes)
            assert len(rests) == 1

    def test_an_engine_a_checkpoint_and_its_config_are_the_same(
        self, checkpoints: dict[str, Path], tmp_path: Path
    ) -> None:
        engine = build(checkpoints["llama"], tmp_path / "engine", device="cpu")
        config = checkpoints["llama"] / "config.json"
        found = [read_setting(str(path), dtype="fp32") for path in (engine, checkpoints["llama"], config)]
        assert found[0] == found[1] == found[2]


class TestRunningOut:
    """Every place that allocates says what was asked for."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (memory_error, executor):
            card = Capacity("a small card", GIB // 2 + GIB // 4)  # of which a tiny model needs less
            monkeypatch.setattr(module, "capacity_of", lambda device, own=None, card=card: card)

    def check(self, error: OutOfMemoryError) -> None:
        assert "a small card" in str(error)
        assert error.ledger is not None
        assert 0 < error.ledger["needed_bytes"] == sum(error.ledger["by_kind"].values())
        assert "needs" in error.lines[0]
        assert error.fix

    @staticmethod
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    @pytest.mark.parametrize(
        ("place", "kind", "reported"),
        [
            ("ingot.engine.engine_loader.cast_weight", "engine", "the weights do not fit"),
            ("ingot.engine.engine_loader.cast_weight", "checkpoint", "the weights do not fit"),
            ("ingot.building.random_weights.fill", "config", "the weights do not fit"),
            ("ingot.runtime.setup.make_caches", "checkpoint", "too little device memory to run"),
        ],
    )
    def test_loading(
        self,
        checkpoints: dict[str, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        place: str,
        kind: str,
        reported: str,
    ) -> None:
        path = checkpoints["llama"]
        if kind == "engine":
            path = build(path, tmp_path / "engine", device="cpu", proof=False)
        monkeypatch.setattr(place, self.fail)
        with raises_shown(OutOfMemoryError, reported) as error:
            (LLM.from_config if kind == "config" else LLM)(path, "cpu")
        self.check(error.value)

    def test_a_cache_that_is_too_small(self, checkpoints: dict[str, Path]) -> None:
        with pytest.raises(OutOfMemoryError, match="cannot hold one request") as error:
            LLM(checkpoints["llama"], "cpu", runtime=RuntimeConfig(cache_tokens=64))
        self.check(error.value)

    def test_a_step(self, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        llm = LLM(checkpoints["llama"], "cpu")
        monkeypatch.setattr(llm.executor.runner, "run", self.fail)
        monkeypatch.setattr(llm.executor.runner, "launch", self.fail)
        with pytest.raises(OutOfMemoryError, match="a step does not fit") as error:
            llm.generate([[1, 2, 3]])
        self.check(error.value)
        assert not llm.executor.has_work


class TestVerb:
    def test_it_fits(self) -> None:
        done = ingot("plan", SHAPE, "--gpu", "139.8GiB", "--max-batch-size", "8", "--max-seq-len", "4096")
        assert done.exit_code == 0
        for words in ("KV cache", "17.2 GB", "fits: ", "CUDA graphs", "disk for the engine", "139.8GiB"):
            assert words in done.stdout

    def test_it_does_not_and_the_first_fix_works(self) -> None:
        asked = ("plan", SHAPE, "--gpu", "24GiB", "--max-seq-len", "4096")
        done = ingot(*asked)
        assert done.exit_code == 1
        assert "2 of 64 requests of 4096 tokens at once" in done.stdout
        assert "--max-batch-size 2 " in done.stdout
        assert ingot(*asked, "--max-batch-size", "2").exit_code == 0
        assert ingot(*asked, "--max-batch-size", "3").exit_code == 1
        assert ingot(*asked, "--cache-tokens", "10880").exit_code == 0
        assert ingot(*asked, "--cache-tokens", "11008").exit_code == 1

    def test_the_table_by_cards_agrees_with_each_card(self) -> None:
        asked = ("plan", SHAPE, "--gpu", "23.6GiB", "--max-seq-len", "1024", "--dtype", "fp16")
        table = ingot(*asked).stdout.partition("largest batch")[2].splitlines()
        column = table[1].split().index("23.6GiB")
        most = int(next(line for line in table if line.split()[:2] == ["fp16", "none"]).split()[column])
        assert ingot(*asked, "--max-batch-size", most).exit_code == 0
        assert ingot(*asked, "--max-batch-size", most + 1).exit_code == 1

    def test_gb_are_not_gib_and_what_a_card_is_sold_as_is_neither(self) -> None:
        reported = ingot("plan", SHAPE, "--gpu", "24GB").stdout
        assert "the device has 24.0 GB (--gpu 24GB)" in reported
        assert "a card sold as 24 GB has 23.6GiB, which is 25.3 GB: use --gpu 23.6GiB" in reported
        assert "a card sold as" not in ingot("plan", SHAPE, "--gpu", "25GB").stdout.partition("host")[0]

    def test_nothing_helps(self) -> None:
        done = ingot("plan", SHAPE, "--gpu", "1GiB")
        assert done.exit_code == 1
        assert "no change of limits makes it fit" in done.stdout

    def test_json(self) -> None:
        done = ingot("plan", SHAPE, "--gpu", "24GiB", "--json")
        reported = json.loads(done.stdout)
        assert done.exit_code == 1
        assert (reported["fits"], reported["loads"]) == (False, True)
        assert reported["fixes"][0]["flags"] == "--max-batch-size 1"
        assert {"card", "dtype", "quant", "max_batch_size", "max_seq_len"} <= set(reported["cards"][0])
        assert reported["host"]["build_disk"] > reported["by_kind"]["weights"]

    def test_a_machine_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        done = ingot("plan", SHAPE)
        assert done.exit_code == 0
        assert "no GPU on this machine" in done.stdout
        assert json.loads(ingot("plan", SHAPE, "--json").stdout)["fits"] is None

    def test_a_cpu(self, checkpoints: dict[str, Path]) -> None:
        done = ingot("plan", str(checkpoints["llama"]), "--gpu", "cpu")
        assert done.exit_code == 0
        assert "this machine's memory" in done.stdout
        assert "CUDA" not in done.stdout

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--gpu", "24"), "24GiB"),
            (("--gpu", "cuda:99"), "--gpu"),
            (("--quant", "w3"), "--quant"),
            (("--dtype", "fp8"), "--dtype"),
            (("--max-seq-len", "99999"), "<= 8192"),
            (("--max-batch-size", "0"), "--max-batch-size"),
            (("--memory-fraction", "2"), "--memory-fraction"),
            (("--cache-tokens", "0"), "--cache-tokens"),
        ],
    )
    def test_misuse(self, flags: tuple[str, ...], words: str) -> None:
        done = ingot("plan", SHAPE, *flags)
        assert done.exit_code == 2
        assert words in done.stderr

    def test_a_path_that_leads_nowhere(self) -> None:
        assert ingot("plan", "no/such/folder").exit_code == 2
