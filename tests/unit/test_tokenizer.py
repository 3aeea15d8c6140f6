"""Tokenizers against the ids of other implementations."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers

from ingot.errors import RequestError
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.vocabularies import (
    QWEN2_SPECIALS,
    awkward_cases,
    gpt2_folder,
    load,
    metaspace_folder,
    qwen2_fast_folder,
    qwen2_slow_folder,
)

KINDS = {
    "gpt2": "gpt-2",
    "gpt2-openai-names": "gpt-2",
    "llama-sentencepiece": "llama-spm",
    "qwen-v1": "qwen2",
    "qwen2-slow": "qwen2",
    "qwen2-fast": "qwen2",
}


@pytest.fixture(scope="module")
def folders(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    slow = qwen2_slow_folder(data, tmp_path_factory.mktemp("qwen2_slow"))
    return {
        "gpt2": gpt2_folder(data, tmp_path_factory.mktemp("gpt2")),
        "gpt2-openai-names": data / "tokenizers" / "gpt2",
        "llama-sentencepiece": data / "tokenizers" / "llama",
        "qwen-v1": data / "tokenizers" / "qwen-v1",
        "qwen2-slow": slow,
        "qwen2-fast": qwen2_fast_folder(slow, tmp_path_factory.mktemp("qwen2_fast")),
    }


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load(folder) for kind, folder in folders.items()}


@pytest.mark.stays("gpt2", "llama-sentencepiece", "qwen2-fast")
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_strings(kind: str, loaded: dict[str, Tokenizer], data: Path) -> None:
    """All 47, both ways; Qwen v1 has Qwen2's ranks and regex, and no case needs NFC."""
    for text, ids in awkward_cases(data, KINDS[kind]):
        assert loaded[kind].encode(text, add_special_tokens=False) == ids, text
        assert loaded[kind].encode(text, add_special_tokens=False, parse_special=False) == ids, text
        assert loaded[kind].decode(ids) == text
        joined = b"".join(map(loaded[kind].token_bytes, ids)).decode()
        assert joined in (text, f" {text}")


def test_no_awkward_string_depends_on_nfc(data: Path) -> None:
    """What the Qwen v1 comparison above rests on."""
    assert all(unicodedata.is_normalized("NFC", text) for text, _ in awkward_cases(data, "qwen2"))


@pytest.mark.parametrize("kind", ["qwen-v1", "qwen2-slow", "qwen2-fast"])
def test_qwen_normalises(kind: str, loaded: dict[str, Tokenizer]) -> None:
    decomposed = "Cafe\u0301 \u1112\u1161\u11ab A\u030a"
    composed = unicodedata.normalize("NFC", decomposed)
    assert decomposed != composed
    assert loaded[kind].encode(decomposed) == loaded[kind].encode(composed)
    assert loaded[kind].decode(loaded[kind].encode(decomposed)) == composed


def test_gpt2_and_llama_do_not_normalise(loaded: dict[str, Tokenizer]) -> None:
    for kind in ("gpt2", "llama-sentencepiece"):
        assert loaded[kind].decode(loaded[kind].encode("Cafe\u0301")) == "Cafe\u0301"


@pytest.mark.parametrize(
    "files", [["tokenizer.model"], ["tokenizer.json"], ["tokenizer.model", "tokenizer.json"]]
)
def test_llama_golden(files: list[str], golden: Path, tmp_path: Path) -> None:
    """Both layouts give the ids of the original; the golden set reads a literal "<s>" as text."""
    source = golden / "llama_aidreams260K" / "hf"
    for name in (*files, "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, tmp_path)
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 512)
    for case in json.loads((golden / "llama_aidreams260K" / "tokenize.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"], parse_special=False) == case["ids"]
        assert (
            tokenizer.encode(case["text"], parse_special=False, add_special_tokens=False) == case["ids"][1:]
        )
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_llama_layouts_agree_on_special_tokens(golden: Path, tmp_path: Path) -> None:
    source = golden / "llama_aidreams260K" / "hf"
    fast = load(source)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    slow = load(tmp_path)
    for text in ("hi <s> x", "<s>", "</s></s> a", "a</s>b", "<unk>", " <s>  é"):
        ids = fast.encode(text)
        assert slow.encode(text) == ids
        assert slow.decode(ids) == fast.decode(ids)
        assert slow.decode(ids, skip_special_tokens=False) == fast.decode(ids, skip_special_tokens=False)
    assert slow.special_tokens == fast.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_minigpt4_conversation(golden: Path) -> None:
    """Ids of each text segment, and the text of what the original generated, broken bytes included."""
    tokenizer = load(golden / "minigpt4" / "weight" / "llama")
    rounds = json.loads((golden / "minigpt4" / "conversation.json").read_text(encoding="utf-8"))["rounds"]
    arrays = np.load(golden / "minigpt4" / "conversation.npz", allow_pickle=False)
    for n, case in enumerate(rounds):
        before, after = case["prompt"].split("<ImageHere>")
        assert tokenizer.encode(before) == arrays[f"r{n}_before_ids"].tolist()
        assert tokenizer.encode(after, add_special_tokens=False) == arrays[f"r{n}_after_ids"].tolist()
        assert tokenizer.decode(arrays[f"r{n}_greedy_ids"]) == case["decoded"]
    assert "\ufffd" in rounds[0]["decoded"]


def test_template_around_text(tmp_path: Path) -> None:
    """What tokenizer.json's post-processor puts around a text, for any way of encoding."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("bc")}, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> <s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((2, 2), (3,))
    assert tokenizer.encode("bc") == tokenizer.encode("bc", parse_special=False) == [2, 2, 0, 1, 3]


def test_llama_without_legacy_spaces_only_the_start(golden: Path, tmp_path: Path) -> None:
    source = golden / "llama_aidreams260K" / "hf"
    shutil.copy(source / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "legacy": false}')
    tokenizer = load(tmp_path)
    hf = transformers.LlamaTokenizer.from_pretrained(str(source), legacy=False)
    for text in ("hi</s>hi there", "</s>hi", "x</s> y"):
        assert tokenizer.encode(text) == hf(text).input_ids
    assert tokenizer.encode("hi</s>hi there") != load(source).encode("hi</s>hi there")


def test_llama_decodes_bytes_as_sentencepiece(data: Path, loaded: dict[str, Tokenizer]) -> None:
    path = data / "tokenizers" / "llama" / "tokenizer.model"
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    byte = 3  # id of <0x00>
    for values in (b"\xf0\x9f\x98\x80\xe4", b"\xe4\xbd\x41", b"\xed\xa0\x80", b"\xc0\x80", b"\xff"):
        ids = [15043, *(byte + value for value in values), 3186]
        assert loaded["llama-sentencepiece"].decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("kind", ["qwen2-slow", "qwen2-fast"])
def test_qwen2_as_transformers(kind: str, loaded: dict[str, Tokenizer], folders: dict[str, Path]) -> None:
    hf = transformers.AutoTokenizer.from_pretrained(str(folders["qwen2-slow"]))
    tokenizer = loaded[kind]
    for text in ("<|im_start|>user\nHi<|im_end|>\n", "<think>a</think>", "<|im_end", " <|endoftext|> x", ""):
        ids = hf(text).input_ids
        assert tokenizer.encode(text) == ids
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)
    assert tokenizer.special_tokens == QWEN2_SPECIALS
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, QWEN2_SPECIALS["<|im_end|>"])


def test_gpt2_as_transformers(loaded: dict[str, Tokenizer], folders: dict[str, Path]) -> None:
    hf = transformers.GPT2TokenizerFast.from_pretrained(str(folders["gpt2"]))
    for text in ("a<|endoftext|>b", "  two\n\n\nlines ", "it's I'LL", "naïve 你好"):
        assert loaded["gpt2"].encode(text) == hf(text).input_ids
    assert loaded["gpt2"].bos_id == loaded["gpt2"].eos_id == 50256


def test_gpt2_json_without_config(
    folders: dict[str, Path], loaded: dict[str, Tokenizer], tmp_path: Path
) -> None:
    """tokenizer.json written by transformers gives the same as vocab.json with merges.txt."""
    transformers.GPT2TokenizerFast.from_pretrained(str(folders["gpt2"])).save_pretrained(str(tmp_path))
    fast = load(tmp_path)
    text = "Hello 你好 😀 <|endoftext|>  x"
    assert fast.encode(text) == loaded["gpt2"].encode(text)
    assert fast.decode(fast.encode(text)) == loaded["gpt2"].decode(fast.encode(text))


def test_qwen_v1_special_tokens(loaded: dict[str, Tokenizer]) -> None:
    qwen = loaded["qwen-v1"]
    assert len(qwen.special_tokens) == 208
    names = ("endoftext", "im_start", "im_end", "extra_0", "extra_204")
    ids = [qwen.special_tokens[f"<|{name}|>"] for name in names]
    assert ids == [151643, 151644, 151645, 151646, 151850]
    assert (qwen.vocab_size, qwen.bos_id, qwen.eos_id) == (151851, None, 151643)


@pytest.mark.parametrize("kind", KINDS)
def test_special_text_can_stay_text(kind: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    special = next(text for text, i in tokenizer.special_tokens.items() if i == tokenizer.eos_id)
    text = f"a{special} b{special}"
    parsed = tokenizer.encode(text, add_special_tokens=False)
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert parsed.count(tokenizer.eos_id) == 2
    assert not set(plain) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(plain, skip_special_tokens=True) == text
    assert tokenizer.encode_parts(tokenizer.split_special(text)) == parsed


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_nothing(kind: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.decode([tokenizer.vocab_size, *ids, 10**9, -1]) == "Hi"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.token_text(-1) == ""


@pytest.mark.stays("gpt2", "llama-sentencepiece", "qwen2-fast")
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_enough(kind: str, loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    for path in loaded[kind].files:
        shutil.copy(path, tmp_path)
    copy = load(tmp_path)
    text = "Hello wörld <|endoftext|></s> 你好"
    assert copy.encode(text) == loaded[kind].encode(text)
    assert copy.special_tokens == loaded[kind].special_tokens
    assert [path.name for path in copy.files] == [path.name for path in loaded[kind].files]


def test_token_text(loaded: dict[str, Tokenizer]) -> None:
    llama = loaded["llama-sentencepiece"]
    assert [llama.token_text(i) for i in llama.encode("Hello world")] == ["<s>", " Hello", " world"]
    half = loaded["gpt2"].encode("😀")
    assert loaded["gpt2"].token_text(half[-1]) == "\ufffd"
    assert b"".join(map(loaded["gpt2"].token_bytes, half)) == "😀".encode()


def test_decoders_that_do_not_join_bytes(tmp_path: Path) -> None:
    tokenizer = load(metaspace_folder(tmp_path))
    assert not tokenizer.joins_bytes
    assert tokenizer.decode(tokenizer.encode("the cats sat")) == "the cats sat"
    middle = tokenizer.encode_parts(["the", tokenizer.special_tokens["<s>"], "s"])
    assert middle == tokenizer.encode("the<s>s")
    assert tokenizer.decode([99, *middle]) == "thes"


def test_stripping_added_tokens(tmp_path: Path) -> None:
    """Tokens that swallow white space do so in ``split_special`` too."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("abĠ")}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken("<x>", lstrip=True), tokenizers.AddedToken("<y>", rstrip=True)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    for text in ("a  <x> b", "a <y>  b", "<y> <x>", "  <x>"):
        assert tokenizer.encode_parts(tokenizer.split_special(text)) == tokenizer.encode(text), text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["\ud83d", "a\udc00b", None, b"bytes", ["a"]])
def test_unencodable_input(kind: str, bad: object, loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError):
        loaded[kind].encode(bad)  # type: ignore[arg-type]


def test_long_runs_are_quick_enough(loaded: dict[str, Tokenizer]) -> None:
    """Runs that a backtracking regex could choke on still encode and come back."""
    for tokenizer in loaded.values():
        for text in (" " * 20_000, "\n" * 20_000, "7" * 20_000, "é" * 5_000):
            assert tokenizer.decode(tokenizer.encode(text)) == text
