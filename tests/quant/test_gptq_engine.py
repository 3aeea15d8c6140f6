"""Engines whose numbers GPTQ chose: built of a checkpoint and a file of samples, told of, and nearer."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.config.quant import QuantConfig
from ingot.engine.compare import compare_engines
from ingot.engine.manifest import CalibrationEntry, Manifest
from ingot.errors import BuildError, ConfigError, OutOfMemoryError
from ingot.layers.linear import linears
from ingot.llm.verify import verify
from ingot.quant import weight_only
from tests.e2e.terminal import ingot
from tests.quant.models import divergence
from tests.tiny_models import make_model, random_ids, save_model, tiny_config

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "models" / "pocket-chat"
NARROW = QuantConfig("w4a16", 32, method="gptq")
MIXED = QuantConfig(
    "w4a16",
    64,
    symmetric=True,
    head="w8a16",
    method="gptq",
    layers={"*.o_proj": "none", "layers.1.mlp.*": "w8a16"},
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in ("llama", "qwen2", "gpt2"):
        save_model(tiny_config(kind), root / kind, seed=3)
    save_model(tiny_config("llama", tie_word_embeddings=True), root / "tied", seed=3)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    path.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))
    return path


@pytest.mark.grid(1)
@pytest.mark.parametrize("quant", [NARROW, MIXED, QuantConfig("w8a16", method="gptq")], ids=lambda q: q.label)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "tied"])
def test_it_is_built_told_of_and_proven(
    checkpoints: dict[str, Path], samples: Path, kind: str, quant: QuantConfig, tmp_path: Path
) -> None:
    folder = build(
        checkpoints[kind], tmp_path / "engine", quant=quant, calib=samples, calib_samples=6, device="cpu"
    )
    manifest = Manifest.read(folder)
    assert manifest.quant == quant
    digest = hashlib.sha256(samples.read_bytes()).hexdigest()
    assert manifest.calibration == CalibrationEntry(digest, samples=6, tokens=360, length=128)
    assert verify(folder, "cpu", note=False).verdict == "proven"


def test_its_outputs_are_nearer_than_those_of_rounding(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    quant = QuantConfig("w4a16", method="gptq")
    found = {}
    for method, calib in (("gptq", samples), ("round", None)):
        folder = build(
            checkpoints["llama"],
            tmp_path / method,
            quant=quant.replace(method=method),
            calib=calib,
            device="cpu",
            proof=False,
        )
        found[method] = LLM(folder, "cpu")
    exact = LLM(checkpoints["llama"], "cpu")
    ids = random_ids(120, seed=99)
    wanted = exact.logits(ids).log_softmax(-1)
    costs = {m: divergence(wanted, llm.logits(ids).log_softmax(-1)) for m, llm in found.items()}
    assert costs["gptq"] < 0.8 * costs["round"]
    own, other = (linears(found[m].engine.model)["layers.0.mlp.down_proj"] for m in ("gptq", "round"))
    assert not torch.equal(own.dequantized(torch.float32), other.dequantized(torch.float32))


def test_the_same_inputs_give_the_same_bytes(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "copied.jsonl"
    shutil.copy(samples, elsewhere)
    folders = [
        build(checkpoints["qwen2"], tmp_path / name, quant=MIXED, calib=calib, device="cpu", proof=False)
        for name, calib in (("one", samples), ("two", elsewhere))
    ]
    names = sorted(file.name for file in folders[0].iterdir() if file.is_file())
    assert "weights.safetensors" in names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    fewer = build(
        checkpoints["qwen2"], tmp_path / "fewer", quant=MIXED, calib=samples, calib_samples=3, device="cpu"
    )
    changes = {c.name: (c.left, c.right) for c in compare_engines(folders[0], fewer).config}
    assert changes["calibration.samples"] == (12, 3)


def test_layers_that_stay_whole_and_the_head_are_as_rounding_leaves_them(
    checkpoints: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    kinds = {"gptq": samples, "round": None}
    hashes = [
        Manifest.read(
            build(
                checkpoints["tied"],
                tmp_path / method,
                quant=MIXED.replace(method=method),
                calib=calib,
                device="cpu",
                proof=False,
            )
        ).tensors
        for method, calib in kinds.items()
    ]
    changed = {name.rpartition(".")[0] for name in hashes[0] if hashes[0][name] != hashes[1][name]}
    products = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert changed == {f"layers.{index}.{name}" for index in (0, 1) for name in products}


def test_progress_tells_of_every_layer(checkpoints: dict[str, Path], samples: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    build(
        checkpoints["llama"],
        tmp_path / "engine",
        quant=NARROW,
        calib=samples,
        device="cpu",
        proof=False,
        progress=lambda *now: told.append(now),
    )
    assert [what for what, _, _ in told if what.endswith("mlp.down_proj by GPTQ")] == [
        f"layers.{index}.mlp.down_proj by GPTQ" for index in (0, 1)
    ]
    assert "calibration 100 %" in {what for what, _, _ in told}
    done = [now for _, now, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][2]


class TestRefusals:
    def test_a_method_without_samples(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"seen: method gptq.*--calib FILE"):
            build(checkpoints["llama"], tmp_path / "engine", quant=NARROW, device="cpu")
        assert not (tmp_path / "engine").exists()

    def test_samples_without_a_method(
        self, checkpoints: dict[str, Path], samples: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=r"this build uses no calibration data.*--method gptq"):
            build(checkpoints["llama"], tmp_path / "engine", quant="w4a16", calib=samples, device="cpu")

    def test_texts_without_a_tokenizer(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        path = tmp_path / "texts.jsonl"
        path.write_text('{"text": "Good news."}\n')
        with pytest.raises(ConfigError, match=r"needs a tokenizer.*token_ids.*--calib"):
            build(checkpoints["llama"], tmp_path / "engine", quant=NARROW, calib=path, device="cpu")
        assert not (tmp_path / "engine").exists()

    def test_in_memory(self, checkpoints: dict[str, Path]) -> None:
        words = r"GPTQ needs calibration.*seen: method gptq.*ingot build .* --method gptq --calib FILE"
        with pytest.raises(ConfigError, match=words):
            LLM(checkpoints["llama"], "cpu", quant=NARROW)
        with pytest.raises(ConfigError, match=words):
            LLM.from_config(checkpoints["llama"], device="cpu", quant=NARROW)

    def test_an_input_of_zeros_names_its_layer(self, samples: Path, tmp_path: Path) -> None:
        model = make_model(tiny_config("llama"))
        model.model.layers[1].post_attention_layernorm.weight.data.zero_()
        model.save_pretrained(tmp_path / "checkpoint")
        with pytest.raises(BuildError, match=r"layers\.1\.mlp\.gate_up_proj: .*all 0"):
            build(tmp_path / "checkpoint", tmp_path / "engine", quant=NARROW, calib=samples, device="cpu")
        assert not (tmp_path / "engine").exists()

    def test_a_device_without_memory(
        self, checkpoints: dict[str, Path], samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def too_large(*args: object, **options: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(weight_only, "gptq", too_large)
        with pytest.raises(OutOfMemoryError, match=r"calibration does not fit.*layers\.0.*--device cpu"):
            build(checkpoints["llama"], tmp_path / "engine", quant=NARROW, calib=samples, device="cpu")
        assert not (tmp_path / "engine").exists()

    def test_no_samples(self, checkpoints: dict[str, Path], samples: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"seen: 0 samples.*--calib-samples"):
            build(
                checkpoints["llama"],
                tmp_path / "engine",
                quant=NARROW,
                calib=samples,
                calib_samples=0,
                device="cpu",
            )

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--method", "gptq"), ("--method", "--quant")),
            (("--method", "gptq", "--quant-head"), ("--method", "--quant")),
            (("--quant", "w4a16", "--method", "magic"), ("--method", "round", "gptq")),
            (("--quant", "w4a16", "--method", "gptq"), ("--calib FILE",)),
            (("--quant", "w4a16", "--calib-samples", "8"), ("--calib-samples 8", "--method gptq")),
            (("--quant", "w4a16", "--calib", "chats.jsonl"), ("--calib chats.jsonl", "--method gptq")),
            (("--quant", "w4a16", "--method", "gptq", "--calib", "nowhere.jsonl"), ("--calib", "nowhere")),
        ],
    )
    def test_of_the_verb(
        self, checkpoints: dict[str, Path], tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        done = ingot("build", str(checkpoints["llama"]), "-o", str(tmp_path / "engine"), *flags)
        assert done.exit_code == 2
        for word in words:
            assert word in done.stderr


def test_the_verb_on_the_pocket_model(tmp_path: Path) -> None:
    """Conversations through its chat template; nearer than rounding on others of the same kind."""
    lines = (ROOT / "recipes" / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    calib = tmp_path / "calib.jsonl"
    calib.write_text("".join(lines[::2]), encoding="utf-8")
    flags = ("--quant", "w4a16", "--method", "gptq", "--calib", str(calib), "--calib-samples", "24")
    folder = tmp_path / "engine"
    done = ingot("build", str(POCKET), "-o", str(folder), *flags, "--no-proof", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    text = ingot("inspect", str(folder)).stdout
    assert "w4a16, one scale per 128 columns, asymmetric, by GPTQ" in text
    assert "24 samples, " in text
    told = json.loads(ingot("inspect", str(folder), "--json").stdout)["calibration"]
    assert (told["samples"], told["length"]) == (24, 512)
    assert told["sha256"] == hashlib.sha256(calib.read_bytes()).hexdigest()
    exact, plain, near = LLM(POCKET, "cpu"), LLM(POCKET, "cpu", quant="w4a16"), LLM(folder, "cpu")
    chat, tokenizer = exact.chat_format, exact.tokenizer
    assert chat is not None
    asked = [json.loads(line)["messages"] for line in lines[1::40]]
    prompts = [chat.prompt_ids(messages, tokenizer) for messages in asked]

    wanted = [exact.logits(ids).log_softmax(-1) for ids in prompts]

    def cost(llm: LLM) -> float:
        pairs = zip(wanted, (llm.logits(ids).log_softmax(-1) for ids in prompts), strict=True)
        return sum(divergence(*pair) for pair in pairs)

    assert cost(near) < 0.75 * cost(plain)
