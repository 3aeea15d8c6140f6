"""Streaming text equals decoding at once, and stop strings do not depend on how text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import tokenizers

from ingot.text.stop_strings import StopStrings
from ingot.text.tokenizer.detokenizer import IncrementalDetokenizer
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.vocabularies import (
    awkward_cases,
    load,
    metaspace_folder,
    qwen2_fast_folder,
    qwen2_slow_folder,
)

KINDS = {
    "gpt2": "gpt-2",
    "llama": "llama-spm",
    "llama-512-json": None,
    "qwen-v1": "qwen2",
    "qwen2-fast": "qwen2",
    "metaspace": None,
    "wordpiece": None,
}


@pytest.fixture(scope="module")
def loaded(data: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    slow = qwen2_slow_folder(data, tmp_path_factory.mktemp("qwen2_slow"))
    folders = {
        "gpt2": data / "tokenizers" / "gpt2",
        "llama": data / "tokenizers" / "llama",
        "llama-512-json": golden / "llama_aidreams260K" / "hf",
        "qwen-v1": data / "tokenizers" / "qwen-v1",
        "qwen2-fast": qwen2_fast_folder(slow, tmp_path_factory.mktemp("qwen2_fast")),
        "metaspace": metaspace_folder(tmp_path_factory.mktemp("metaspace")),
        "wordpiece": _wordpiece_folder(tmp_path_factory.mktemp("wordpiece")),
    }
    return {kind: load(folder) for kind, folder in folders.items()}


def _wordpiece_folder(folder: Path) -> Path:
    words = {word: i for i, word in enumerate(["[UNK]", "the", "cat", "##s", "##é", "[CLS]"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _stream(tokenizer: Tokenizer, ids: Iterable[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add([i]) for i in ids), detokenizer.flush()]


def _random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Any ids, with bytes, special tokens and ids outside the vocabulary likelier than by chance."""
    special = [*tokenizer.special_tokens.values(), tokenizer.vocab_size + 3]
    low = min(300, tokenizer.vocab_size)
    choices = (
        lambda: rng.randrange(tokenizer.vocab_size),
        lambda: rng.randrange(low),
        lambda: rng.choice(special),
    )
    return [rng.choices(choices, (4, 5, 1))[0]() for _ in range(rng.randrange(24))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_stream_as_they_decode(kind: str, skip: bool, loaded: dict[str, Tokenizer]) -> None:
    rng = random.Random(20)
    tokenizer = loaded[kind]
    for _ in range(300):
        ids = _random_ids(tokenizer, rng)
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(_stream(tokenizer, ids, skip)) == expected, ids
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        cut = rng.randrange(len(ids) + 1)
        assert detokenizer.add(ids[:cut]) + detokenizer.add(ids[cut:]) + detokenizer.flush() == expected


@pytest.mark.parametrize("kind", [kind for kind, name in KINDS.items() if name])
def test_awkward_strings_stream(kind: str, loaded: dict[str, Tokenizer], data: Path) -> None:
    name = KINDS[kind]
    assert name is not None
    for text, ids in awkward_cases(data, name):
        pieces = _stream(loaded[kind], ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


def test_small_vocabulary_streams_by_bytes(loaded: dict[str, Tokenizer], data: Path) -> None:
    tokenizer = loaded["llama-512-json"]
    for text, _ in awkward_cases(data, "llama-spm"):
        pieces = _stream(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_emitted_as_soon_as_it_is_certain(loaded: dict[str, Tokenizer], golden: Path) -> None:
    """The reference's text of every prefix of ids, half characters left out, is what has been shown by then.

    The reference holds back nothing but incomplete UTF-8, so this also says that we are never late.
    """
    cases = json.loads((golden / "qwen_chat" / "decode.json").read_text(encoding="utf-8"))
    for case in (c for c in cases if c["kind"] == "prefixes"):
        pieces = _stream(loaded["qwen-v1"], case["ids"])
        assert "".join(pieces) == case["full"]
        for prefix in case["prefixes"]:
            assert "".join(pieces[: prefix["n"]]) == prefix["ignore"]
            assert loaded["qwen-v1"].decode(case["ids"][: prefix["n"]]) == prefix["replace"]


def test_reference_decodes_of_ids(loaded: dict[str, Tokenizer], golden: Path) -> None:
    """Kind "ids"; its "ignore" drops broken bytes, which we show as U+FFFD, so it is compared without
    these.
    """
    cases = json.loads((golden / "qwen_chat" / "decode.json").read_text(encoding="utf-8"))
    compared = [c for c in cases if c["kind"] == "ids"]
    assert compared
    for case in compared:
        shown = loaded["qwen-v1"].decode(case["ids"], skip_special_tokens=False)
        assert loaded["qwen-v1"].decode(case["ids"]) == case["skip_special"]
        assert shown == case["keep_special"]
        assert shown.replace("\ufffd", "") == case["ignore"]


def test_reference_responses(loaded: dict[str, Tokenizer], golden: Path) -> None:
    """Text up to the stop token.

    The reference also strips white space around a response, and without a stop token among its two drops the
    last token. We keep that token: there the reference's text is only the start of the true one.
    """
    cases = json.loads((golden / "qwen_chat" / "decode.json").read_text(encoding="utf-8"))
    qwen = loaded["qwen-v1"]
    stops = {qwen.special_tokens[text] for text in ("<|im_end|>", "<|im_start|>", "<|endoftext|>")}
    compared = [c for c in cases if c["kind"] == "response"]
    assert compared
    for case in compared:
        ids = case["generated_ids"]
        end = next((n for n, i in enumerate(ids) if i in stops), len(ids))
        text = "".join(_stream(qwen, ids[:end]))
        is_dropped = end == len(ids)
        assert qwen.decode(ids[: end - is_dropped]).strip() == case["response"]
        assert text.strip().startswith(case["response"])
        assert (text.strip() != case["response"]) == is_dropped


def test_prompt_keeps_the_leading_space(loaded: dict[str, Tokenizer]) -> None:
    llama = loaded["llama"]
    ids = llama.encode("world", add_special_tokens=False)
    prompt = llama.encode("Hello")
    continued = IncrementalDetokenizer(llama, prompt)
    assert continued.add(ids) + continued.flush() == " world"
    fresh = IncrementalDetokenizer(llama, [1])
    assert fresh.add(ids) == "world"


def test_prompt_that_ends_inside_a_character(loaded: dict[str, Tokenizer]) -> None:
    gpt2 = loaded["gpt2"]
    ids = gpt2.encode("𠮷a")
    assert len(ids) > 3
    detokenizer = IncrementalDetokenizer(gpt2, ids[:1])
    assert detokenizer.add(ids[1:]) + detokenizer.flush() == "𠮷a"


def test_flush_shows_broken_bytes(loaded: dict[str, Tokenizer]) -> None:
    half = loaded["gpt2"].encode("𠮷")[:-1]
    assert _stream(loaded["gpt2"], half) == [*([""] * len(half)), "\ufffd"]
    first_byte_of_three = [3 + 0xE4]
    assert _stream(loaded["llama"], first_byte_of_three) == ["", "\ufffd"]


def _until_stop(stops: list[str], pieces: Iterable[str]) -> tuple[str, str | None]:
    search = StopStrings(stops)
    shown, hit = "", None
    for piece in pieces:
        text, hit = search.feed(piece)
        shown += text
    return shown + search.flush(), hit


def _slow_until_stop(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character, by definition."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_strings_by_hand() -> None:
    stops = StopStrings(["###"])
    assert stops.feed("Hi#") == ("Hi", None)
    assert stops.feed("#a#") == ("##a", None)
    assert stops.feed("##b") == ("", "###")
    assert stops.feed("more") == ("", "###")
    assert stops.flush() == ""


def test_stop_strings_hold_back_no_more_than_needed() -> None:
    stops = StopStrings(["\nUser:", "</s>"])
    assert stops.feed("a\n") == ("a", None)
    assert stops.feed("b <") == ("\nb ", None)
    assert stops.feed("/") == ("", None)
    assert stops.feed("i>") == ("</i>", None)
    assert stops.flush() == ""


def test_no_stop_strings() -> None:
    assert _until_stop([], ["a", "", "b"]) == ("ab", None)


def test_stop_strings_do_not_depend_on_the_cut() -> None:
    rng = random.Random(5)
    num_hits = 0
    for _ in range(3000):
        stops = ["".join(rng.choices("ab#", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choices("ab#", k=rng.randrange(12)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = _slow_until_stop(stops, text)
        num_hits += expected[1] is not None
        assert _until_stop(stops, pieces) == expected, (stops, pieces)
    assert 500 < num_hits < 2900


def test_what_was_held_back_is_given_once() -> None:
    stops = StopStrings(["###"])
    assert stops.feed("a##") == ("a", None)
    assert (stops.flush(), stops.flush()) == ("##", "")
