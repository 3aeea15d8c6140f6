"""A token embedding in the host's memory: where it is, what is counted, and that answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import small_cards_run
from benchmarks.small_cards import SHAPES as SMALL_CARDS
from ingot import LLM
from ingot.building.ledger_source import read_setting
from ingot.building.random_weights import config_manifest
from ingot.config.half_dtypes import HalfDtypes
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.assembly import model_of
from ingot.engine.engine_loader import fill, setting_of
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, OutOfMemoryError
from ingot.kernels.weight.host_rows import host_rows
from ingot.layers import embedding as embeddings
from ingot.memory.host_memory import host_ledger
from ingot.memory.ledger import Capacity, ledger
from ingot.memory.memory_fixes import fixes
from ingot.memory.memory_sizes import activation_bytes
from tests.e2e.terminal import ingot
from tests.kernels.numerics import launched
from tests.tiny_models import tiny_config

HOST = RuntimeConfig(embedding="host")
CUDA = torch.device("cuda")
SEVEN_B = SMALL_CARDS["7B"]
TABLE = 151936 * 4096 * 2
GIB = 1 << 30


def config_file(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """config.json of a tiny model; heads of its own unless ``changes`` tie them."""
    config = tiny_config(kind, **{"tie_word_embeddings": False} | changes).to_dict()
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"architectures": [f"{kind.capitalize()}ForCausalLM"]}))
    return path


def manifest(folder: Path, quant: QuantConfig | None = None, **changes: Any) -> Manifest:
    return config_manifest(config_file(folder, **changes), "fp16", 1, 64, quant)


class TestLedger:
    def test_the_table_is_the_host_s(self) -> None:
        asked: dict[str, Any] = {"quant": "w4a16", "max_batch_size": 1, "max_seq_len": 1024}
        near, far = (read_setting(SEVEN_B, **asked, runtime=runtime) for runtime in (RuntimeConfig(), HOST))
        assert ledger(near).needed - ledger(far).needed == TABLE
        assert ledger(far).of("weights") == ledger(near).of("weights") - TABLE
        card = Capacity("8 GiB", 8 * GIB)
        assert (ledger(near, card).fits, ledger(far, card).fits) == (False, True)
        grown = host_ledger(far).load_memory - host_ledger(near).load_memory
        assert grown == 2 * GIB, "PyTorch pins a power of two"

    def test_it_is_the_first_advice_where_it_is_enough(self) -> None:
        setting = read_setting(SEVEN_B, quant="w4a16", max_batch_size=1, max_seq_len=1024)
        first = fixes(ledger(setting, Capacity("8 GiB", 8 * GIB)))[0]
        assert (first.changes, first.cost) == ({"embedding": "host"}, "speed")
        assert first.where == "RuntimeConfig(embedding='host')"

    @pytest.mark.parametrize(("tied", "device"), [(True, "cuda"), (False, "cpu")])
    def test_it_is_no_advice_without_effect(self, tied: bool, device: Any, tmp_path: Path) -> None:
        path = config_file(tmp_path, tie_word_embeddings=tied, vocab_size=60_000)
        setting = read_setting(str(path), device=device, max_batch_size=1)
        missing = 100_000  # less than the table takes
        total = int((ledger(setting).needed - missing) / setting.runtime.memory_fraction)
        found = fixes(ledger(setting, Capacity("card", total)))
        assert found
        assert not [fix for fix in found if "embedding" in fix.changes]

    def test_a_cpu_has_it_anyway(self, tmp_path: Path) -> None:
        path = str(config_file(tmp_path, tie_word_embeddings=True))
        near, far = (read_setting(path, device="cpu", runtime=one) for one in (RuntimeConfig(), HOST))
        assert ledger(near).items == ledger(far).items
        assert host_ledger(near) == host_ledger(far)

    def test_position_embeddings_stay(self, tmp_path: Path) -> None:
        config = tiny_config("gpt2", tie_word_embeddings=False).to_dict()
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
        setting = read_setting(str(path), dtype="fp32", runtime=HOST)
        (item,) = [one for one in ledger(setting).items if one.name == "embedding"]
        assert item.bytes == 128 * 32 * 4
        assert item.note == "12.4 kB on the host"


class TestTied:
    """A head that is the embedding is read by every step."""

    def test_it_is_refused_by_name(self, tmp_path: Path) -> None:
        tied = manifest(tmp_path, tie_word_embeddings=True)
        with pytest.raises(ConfigError, match="it is also the head") as raised:
            setting_of(tied, torch.float16, CUDA, HOST)
        assert raised.value.field == "embedding"
        assert "`head`: a head of its own" in str(raised.value)
        setting_of(tied, torch.float16, torch.device("cpu"), HOST)
        shown = ingot("plan", tmp_path / "config.json", "--embedding", "host", "--gpu", "8GiB")
        assert shown.exit_code == 2
        assert "leave out --embedding, or `ingot build` with --quant-head: a head of its own" in shown.stderr

    def test_a_head_in_8_bits_is_another_weight(self, tmp_path: Path) -> None:
        own = manifest(tmp_path, QuantConfig(head="w8a16"), tie_word_embeddings=True)
        assert setting_of(own, torch.float16, CUDA, HOST).host_embedding_bytes == 97 * 32 * 2


@pytest.mark.parametrize("value", ["disk", "", None, 3])
def test_where_it_may_be(value: Any) -> None:
    with pytest.raises(ConfigError, match="allowed: device, host"):
        RuntimeConfig(embedding=value)


class TestLoading:
    def filled(self, folder: Path, device: torch.device, runtime: RuntimeConfig | None) -> torch.Tensor:
        """The embedding of a model that is loaded; nothing else is, as there is no GPU."""
        model = model_of(manifest(folder), KernelPlan())
        model.rotary = None
        table = (torch.arange(97 * 32) % 1024).view(97, 32).half()
        fill(model, [("embed_tokens.weight", table)], device, HalfDtypes.of("fp32"), runtime)
        return model.embed_tokens.weight

    def test_it_is_pinned_in_the_dtype_of_arithmetic(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pinned: list[torch.Tensor] = []
        monkeypatch.setattr("ingot.engine.engine_loader.pinned", lambda t: pinned.append(t) or t)
        weight = self.filled(tmp_path, CUDA, HOST)
        assert len(pinned) == 1
        assert weight.dtype == torch.float32
        assert weight.flatten().tolist() == [i % 1024 for i in range(97 * 32)]

    @pytest.mark.parametrize("runtime", [HOST, None], ids=["host", "none"])
    def test_a_cpu_pins_nothing(
        self, runtime: RuntimeConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ingot.engine.engine_loader.pinned", lambda t: pytest.fail("pinned"))
        self.filled(tmp_path, torch.device("cpu"), runtime)

    def test_without_pinned_memory_the_option_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty(*_: Any, **values: Any) -> torch.Tensor:
            assert values["pin_memory"]
            assert values["device"] == "cpu"
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

        table = torch.zeros(4, 8)
        monkeypatch.setattr(torch, "empty", empty)
        with pytest.raises(OutOfMemoryError, match="128 bytes: CUDA error: out of memory; to fix: leave out"):
            embeddings.pinned(table)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_answers_are_the_same_to_the_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows read by the kernel; gemma2 scales them."""
    prompt = list(range(1, 20))
    path = config_file(tmp_path, kind)
    with LLM.from_config(path, "cpu", max_batch_size=1) as llm:
        expected = llm.logits(prompt)
        read: list[int] = []

        def far(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            read.append(len(ids))
            return launched(host_rows)(table, ids)

        monkeypatch.setattr(F, "embedding", far)
        llm.executor.blocks.prefix_reuse = False
        assert torch.equal(llm.logits(prompt), expected)
        assert sum(read) == len(prompt)


def test_ids_on_another_device_are_looked_up_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def far(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        asked.extend((table.device, ids.device))
        return torch.empty(len(ids), table.shape[1], device=ids.device)

    monkeypatch.setattr(embeddings, "host_rows", far)
    with LLM.from_config(config_file(tmp_path), "cpu", max_batch_size=1) as llm:
        llm.engine.model.embed_tokens(torch.tensor([1, 2]))
        assert asked == []
        llm.engine.model.embed_tokens(torch.tensor([1, 2], device="meta"))
    assert [device.type for device in asked] == ["cpu", "meta"]


class TestHead:
    """A head in few bits has few rows, and is multiplied as it is stored."""

    def settings(self, **values: Any) -> Any:
        return read_setting(SEVEN_B, max_seq_len=1024, **{"max_batch_size": 1} | values)

    @pytest.mark.parametrize(("batch", "widened"), [(1, 0), (256, 0), (264, 1)])
    def test_it_is_widened_for_more_than_256_rows(self, batch: int, widened: int) -> None:
        """A step's logits are of at most 256 tokens, or of one per request."""
        quants = [QuantConfig(head=head) for head in ("none", "w8a16")]
        runtime = RuntimeConfig(token_budget=2048)
        plain, narrow = (
            activation_bytes(self.settings().model, torch.float16, runtime, batch, quant=quant)
            for quant in quants
        )
        logits = max(batch, 256) * (4096 + 151936) * 2
        assert narrow == max(plain, logits + widened * TABLE)

    def test_batch_invariance_widens_it_always(self) -> None:
        runtime = RuntimeConfig(batch_invariant=True)
        quant = QuantConfig(head="w8a16")
        found = activation_bytes(self.settings().model, torch.float16, runtime, 1, quant=quant)
        assert found == 256 * (4096 + 151936) * 2 + TABLE

    def test_small_chunks_widen_nothing(self) -> None:
        """240 tokens and a sixteenth are up to 256 rows."""
        model, quant = self.settings().model, QuantConfig("w4a16")
        sizes = {}
        for budget in (240, 242):
            runtime = RuntimeConfig(token_budget=budget)
            pair = (
                activation_bytes(model, torch.float16, runtime, 1, quant=q) for q in (QuantConfig(), quant)
            )
            plain, narrow = pair
            sizes[budget] = narrow - plain
        assert sizes[240] < 22016 * 4096 * 2
        in_full = self.settings().replace(dtype="fp32")
        wide = activation_bytes(in_full.model, torch.float32, RuntimeConfig(token_budget=240), 1, quant=quant)
        assert wide >= 22016 * 4096 * 4


class TestScript:
    """benchmarks/small_cards_run.py with tiny shapes on a CPU, which has no caps."""

    @pytest.fixture(autouse=True)
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = config_file(tmp_path, max_position_embeddings=1024)
        for shape in ("7B", "14B"):
            monkeypatch.setitem(SMALL_CARDS, shape, str(path))
        monkeypatch.setattr(small_cards_run, "TOKENS", 80)
        monkeypatch.setattr(
            small_cards_run, "RUNS", {8: (("7B", "w4a16, embedding on the host"), ("7B", "w4a16"))}
        )

    def test_every_run_answers(self) -> None:
        runs = list(small_cards_run.all_runs(torch.device("cpu"), 1e9))
        assert [(one["answered"], one["as_planned"], one["new_tokens"]) for one in runs] == [
            (True, True, 64)
        ] * 2
        assert small_cards_run.faults(runs) == []
        runs[1]["sha256_of_ids"] = "another"
        (fault,) = small_cards_run.faults(runs)
        assert fault.startswith("other tokens: 7B, w4a16, embedding on the host, 8 GiB and 7B, w4a16, 8 GiB")

    def test_a_refusal_is_a_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: Any) -> LLM:
            raise OutOfMemoryError("too small", seen=5, fix="more")

        monkeypatch.setattr(LLM, "of_engine", refused)
        first, _ = small_cards_run.all_runs(torch.device("cpu"), 1e9)
        assert (first["refused"], first["seen"], first["fix"]) == ("too small", "5", "more")
        assert small_cards_run.faults([first]) == [
            "7B, w4a16, embedding on the host, 8 GiB: answered False, planned True"
        ]

    def test_time_runs_out(self) -> None:
        runs = list(small_cards_run.all_runs(torch.device("cpu"), -1))
        assert [one["not_run"] for one in runs] == ["no time left"] * 2
        assert len(small_cards_run.faults(runs)) == 2
