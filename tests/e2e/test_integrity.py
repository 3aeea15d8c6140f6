"""An engine with changed or foreign bytes neither runs nor verifies."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.engine.engine_diff import compare_engines
from ingot.engine.engine_loader import load_engine
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, EngineError
from ingot.measure.side.side_spec import SideSpec, read_tokenizer
from ingot.proof.verify_engine import verify
from tests.e2e.folders import contents
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny

TOKENS = "tokenizer/qwen.tiktoken"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("integrity")
    return build(write_tiny(root / "checkpoint"), root / "engine", device="cpu", max_seq_len=64)


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "engine"))


def load(engine: Path) -> None:
    load_engine(engine, torch.device("cpu"))


def failures(engine: Path) -> list[str]:
    """What ``verify`` says is wrong; nothing may have run."""
    try:
        found = verify(engine, "cpu", note=False)
    except EngineError as error:  # no manifest to compare with
        return [str(error)]
    assert (found.verdict == "failed", found.dtype) == (
        bool(found.failures),
        None if found.failures else "fp32",
    )
    return [failure.message for failure in found.failures]


class TestEveryByte:
    """Every file of an engine except verify.json, which is shown and not trusted."""

    FILES = ("manifest.json", "weights.safetensors", "plan.json", "proof.json", TOKENS)

    def test_these_are_all_files(self, built: Path) -> None:
        assert set(contents(built)) == {*self.FILES, "verify.json"}

    @pytest.mark.stays("manifest.json", "weights.safetensors")
    @pytest.mark.parametrize("file", FILES)
    def test_a_flipped_bit_anywhere(self, engine: Path, file: str) -> None:
        path = engine / file
        whole, rng = path.read_bytes(), random.Random(file)
        header = [8, 9, 7 + int.from_bytes(whole[:8], "little")] if file == "weights.safetensors" else []
        for place in [0, len(whole) - 1, *header, *(rng.randrange(len(whole)) for _ in range(6))]:
            for bit in (1, 1 << rng.randrange(1, 8)):
                path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
                with pytest.raises(EngineError):
                    load(engine)
                assert failures(engine), f"byte {place}"
        path.write_bytes(whole)
        load(engine)
        assert not failures(engine)

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("change", [b"".join, lambda parts: parts[0][:-1]], ids=["longer", "shorter"])
    def test_a_byte_more_or_less(
        self, engine: Path, file: str, change: Callable[[list[bytes]], bytes]
    ) -> None:
        path = engine / file
        path.write_bytes(change([path.read_bytes(), b"\n"]))
        with pytest.raises(EngineError):
            load(engine)
        assert failures(engine)

    def test_a_header_with_an_extra_tensor(self, engine: Path) -> None:
        """No tensor's hash covers the header, and safetensors takes any metadata."""
        path = engine / "weights.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size]) | {"__metadata__": {"format": "pt"}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        with pytest.raises(EngineError, match=r"header of weights\.safetensors was changed"):
            load(engine)
        assert failures(engine) == ["weights.safetensors has a modified header"]
        with pytest.raises(EngineError, match="header"):
            compare_engines(engine, engine)

    def test_an_edited_manifest_is_not_run_with_its_old_proof(self, engine: Path) -> None:
        path = engine / "manifest.json"
        path.write_text(path.read_text().replace('"max_seq_len": 64', '"max_seq_len": 32'))
        with pytest.raises(EngineError, match=r"proof\.json belongs to a different manifest\.json"):
            LLM(engine, "cpu")
        assert "belongs to a different" in failures(engine)[0]


class TestStrangers:
    ADDED = (
        "tokenizer/chat_template.jinja",
        "tokenizer/chat_template.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer.model",
        "tokenizer/config.json",
        "tokenizer/inner/tokenizer.json",
        "chat_template.jinja",
        "tokenizer.json",
        "notes.txt",
        ".hidden",
        "verify.json.bak",
        ".plan.json-12x",
        "extra/plan.json",
    )

    @pytest.mark.parametrize("name", ADDED)
    def test_a_file_that_the_manifest_does_not_name_is_named(self, engine: Path, name: str) -> None:
        (engine / name).parent.mkdir(exist_ok=True)
        (engine / name).write_text("{}")
        reported = name if name.startswith("tokenizer/") else name.partition("/")[0]
        reported = reported.replace("/inner/tokenizer.json", "/inner")
        expected = f"{reported} is not in the manifest"
        with pytest.raises(EngineError, match=re.escape(f"seen: {expected}; to fix: move files")):
            LLM(engine, "cpu")
        assert failures(engine) == [expected]
        for words in (["inspect", engine], ["explain", engine, "--prompt", "Hi"], ["diff", engine, engine]):
            shown = ingot(*words)
            assert shown.exit_code != 0
            assert expected in shown.stderr

    def test_all_extra_and_damaged_files_are_named(self, engine: Path) -> None:
        for name in ("tokenizer/chat_template.jinja", "tokenizer.model", "a\x1b[31m"):
            (engine / name).write_text("{}")
        (engine / TOKENS).write_text("")
        found = failures(engine)
        assert found == [
            "'a\\x1b[31m' is not in the manifest",
            "tokenizer/chat_template.jinja is not in the manifest",
            "tokenizer.model is not in the manifest",
            f"{TOKENS} is missing or has changed since the build",
        ]
        with pytest.raises(EngineError) as caught:
            LLM(engine, "cpu")
        assert caught.value.seen == ", ".join(found)
        assert str(caught.value.fix).endswith("out of its folder; build the engine again")

    def test_what_ingot_itself_leaves_is_none(self, engine: Path) -> None:
        """Files half written by a killed ``tune`` or ``verify``, or by one that runs now."""
        for name in (".plan.json-123", ".proof.json-9", ".verify.json-4711"):
            (engine / name).write_text("{")
        (engine / "verify.json").write_text("{")
        load(engine)
        assert not failures(engine)

    def test_a_folder_or_pipe_is_not_a_file(self, engine: Path) -> None:
        (engine / "plan.json").unlink()
        (engine / "plan.json").mkdir()
        assert failures(engine) == ["plan.json is not a file"]
        (engine / "plan.json").rmdir()
        os.mkfifo(engine / "plan.json")
        assert failures(engine) == ["plan.json is not a file"]
        with pytest.raises(EngineError, match=r"plan\.json is not a file"):
            load(engine)

    def test_the_tokenizer_alone_is_not_read_either(self, engine: Path) -> None:
        spec = SideSpec(path=str(engine))
        assert read_tokenizer(spec).encode("Hi")
        (engine / "tokenizer" / "tokenizer.json").write_text("{}")
        with pytest.raises(EngineError, match=r"tokenizer\.json is not in the manifest"):
            read_tokenizer(spec)


class TestLinks:
    @pytest.mark.parametrize(
        "name", ["manifest.json", "weights.safetensors", "plan.json", "proof.json", TOKENS, "tokenizer"]
    )
    def test_a_link_out_of_the_engine_is_refused_whatever_it_leads_to(self, engine: Path, name: str) -> None:
        place = engine / name
        place.rename(engine.parent / "elsewhere")
        place.symlink_to(engine.parent / "elsewhere")
        expected = f"{name} is a link that leads outside the engine"
        assert failures(engine)[0] == expected
        with pytest.raises(EngineError, match=re.escape(expected)):
            load(engine)

    def test_a_link_to_the_engine_is_followed(self, engine: Path) -> None:
        link = engine.parent / "link"
        link.symlink_to(engine)
        load(link)
        assert failures(link) == []

    def test_the_hugging_face_cache_is_made_of_links(self, engine: Path, tmp_path: Path) -> None:
        repository = tmp_path / "models--org--engine"
        snapshot = repository / "snapshots" / ("a" * 40)
        shutil.copytree(engine, snapshot)
        (repository / "blobs").mkdir()
        for number, path in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
            blob = repository / "blobs" / f"{number:064x}"
            path.rename(blob)
            path.symlink_to(os.path.relpath(blob, path.parent))
        load(snapshot)
        assert not failures(snapshot)
        (repository / "refs").mkdir()
        (repository / "blobs" / f"{0:064x}").rename(repository / "refs" / "main")
        (snapshot / "manifest.json").unlink()
        (snapshot / "manifest.json").symlink_to("../../refs/main")
        assert failures(snapshot) == ["manifest.json is a link that leads outside the engine"]


class TestManifestNames:
    def rewritten(self, engine: Path, **changes: object) -> Path:
        """The engine with another manifest."""
        path = engine / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return engine

    @pytest.mark.parametrize("name", ["/etc/hostname", "tokenizer/qwen.tiktoken", "alpaca", "", 5])
    def test_a_chat_template_is_a_built_in_format(self, engine: Path, name: object) -> None:
        self.rewritten(engine, chat_template=name)
        with pytest.raises(EngineError, match="chat_template is not a built-in chat format"):
            LLM(engine, "cpu")
        assert "chat_template is not a built-in chat format" in failures(engine)[0]

    @pytest.mark.parametrize("name", ["../../x", "/etc/hostname", "a/b", "..", ".", "", "a\\b", "a\0b"])
    def test_files_are_names_in_the_tokenizers_folder(self, engine: Path, name: str) -> None:
        self.rewritten(engine, files={name: "0" * 64})
        with pytest.raises(EngineError, match="files must be plain file names"):
            LLM(engine, "cpu")
        assert "files must be plain file names" in failures(engine)[0]

    @pytest.mark.parametrize("value", [["a"], 5, None])
    def test_files_map_names_to_hashes(self, engine: Path, value: object) -> None:
        with pytest.raises(EngineError, match=r"manifest\.json is damaged"):
            Manifest.read(self.rewritten(engine, files=value))

    def test_a_template_that_a_user_gave_is_a_file_with_a_hash(self, built: Path, tmp_path: Path) -> None:
        template = tmp_path / "mine.jinja"
        template.write_text("{{ messages[0].content }}!")
        engine = build(
            built.parent / "checkpoint", tmp_path / "own", device="cpu", chat_template=str(template)
        )
        assert Manifest.read(engine).chat_template is None
        template.write_text("other")
        llm = LLM(engine, "cpu")
        assert llm.engine.text.chat is not None
        assert llm.engine.text.chat.prompt_text([{"role": "user", "content": "Hi"}]) == "Hi!"
        (engine / "tokenizer" / "chat_template.jinja").write_text("other")
        assert failures(engine) == ["tokenizer/chat_template.jinja is missing or has changed since the build"]


def test_one_flipped_bit_is_found_by_its_hash(engine: Path) -> None:
    weights = engine / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(EngineError, match=r"changed since the build \(hash mismatch\); seen: 1 of"):
        LLM(engine, device="cpu")


def test_an_engine_as_built_runs(engine: Path) -> None:
    assert repr(LLM(engine, device="cpu")).startswith("LLM(qwen, cpu, fp32")


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "checkpoint", seq_length=64)
    with pytest.raises(ConfigError, match="exceeds the model's context length"):
        build(checkpoint, tmp_path / "engine", max_seq_len=100_000)


def test_every_tensor_is_hashed(engine: Path) -> None:
    """By loading and by verify, from the first to the last: a flipped bit in any one is named."""
    path = engine / "weights.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    names = list(Manifest.read(engine).tensors)
    assert set(names) == set(header) - {"__metadata__"}
    for name in names:
        data = bytearray(whole)
        data[start + header[name]["data_offsets"][0]] ^= 1
        path.write_bytes(data)
        with pytest.raises(EngineError, match=re.escape(name)):
            LLM(engine, device="cpu")
        failures = verify(engine, "cpu", note=False).failures
        assert [(f.kind, f.name) for f in failures] == [("tensor", name)]


def test_an_extra_tensor_is_named(engine: Path) -> None:
    path = engine / "weights.safetensors"
    save_file({**load_file(path), "spare.weight": torch.ones(1)}, path)
    failures = verify(engine, "cpu", note=False).failures
    assert ("tensor", "spare.weight") in [(f.kind, f.name) for f in failures]
