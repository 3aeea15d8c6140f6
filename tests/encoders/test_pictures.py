"""A LLaMA with prefix embeddings: Hugging Face's logits and tokens, in flight beside text, however it is
scheduled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, Embeddings, Input, Prompt, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import ConfigError, RequestError
from tests.encoders.conftest import Side
from tests.encoders.pictures import IMAGE, PICTURE, POSITIONS

TOLERANCE = 1e-4  # of the largest logit
NEW_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)


def picture(seed: int) -> torch.Tensor:
    return torch.randn(3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(seed))


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, PICTURE, (count,), generator=generator).tolist()


Parts = list[list[int] | int]  # runs of ids, and the seeds of pictures
MIXED: list[Parts] = [
    [ids(5, 1), 100, ids(7, 2)],
    [ids(30, 3)],
    [101, ids(3, 4), 102, 100, ids(20, 5)],
    [ids(2, 6)],
    [ids(18, 7), 103],
    [ids(18, 7), 100, ids(1, 8)],
]


def prompt(parts: Parts) -> Prompt:
    return Prompt([Input(picture(part)) if isinstance(part, int) else part for part in parts])


@torch.inference_mode()
def hf_logits(side: Side, parts: Parts, output: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab_size] of Hugging Face's model."""
    given: list[int] = []
    for part in parts:
        given += [PICTURE] * POSITIONS if isinstance(part, int) else part
    pixels = [picture(part) for part in parts if isinstance(part, int)]
    values = {"pixel_values": torch.stack(pixels)} if pixels else {}
    logits: torch.Tensor = side.model(input_ids=torch.tensor([given + output]), **values).logits[0]
    return logits


def hf_greedy(side: Side, parts: Parts, count: int = NEW_TOKENS) -> list[int]:
    """Without a cache; its winners lead clearly, so that equality means something."""
    output: list[int] = []
    for _ in range(count):
        best = hf_logits(side, parts, output)[-1].topk(2)
        assert float(best.values[0] - best.values[1]) > 1e-3, "a tie: choose another seed"
        output.append(int(best.indices[0]))
    return output


@pytest.fixture(scope="module")
def expected(pictures: Side) -> list[list[int]]:
    return [hf_greedy(pictures, parts) for parts in MIXED]


@pytest.mark.parametrize("parts", MIXED, ids=range(len(MIXED)))
def test_logits_equal_hugging_faces(pictures: Side, parts: Parts) -> None:
    ours, theirs = pictures.open().logits(prompt(parts)), hf_logits(pictures, parts, [])
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


RUNTIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pictures-cut-by-chunks": {"token_budget": 9},
    "one-picture-a-step": {"encoder_budget": 1},
    "cache-of-one-picture": {"encoder_positions": 32},
    "cache-of-one-picture-in-chunks": {"encoder_positions": 32, "token_budget": 9, "max_batch_size": 3},
    "preempted": {"cache_tokens": 256, "max_batch_size": 5},
    "preempted-in-chunks": {"cache_tokens": 256, "token_budget": 20, "encoder_positions": 32},
    "no-prefix-reuse": {"prefix_reuse": False},
    "batch-invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_pictures_beside_text_give_hugging_faces_tokens(
    pictures: Side, expected: list[list[int]], runtime: dict[str, Any]
) -> None:
    llm = pictures.open(**runtime)
    outputs = llm.generate([prompt(parts) for parts in MIXED], GREEDY)
    assert [out.token_ids for out in outputs] == expected
    assert idle(llm)


def test_one_by_one_they_give_the_same(pictures: Side, expected: list[list[int]]) -> None:
    llm = pictures.open()
    assert [llm.generate(prompt(parts), GREEDY)[0].token_ids for parts in MIXED] == expected


def test_a_small_cache_preempts(pictures: Side, expected: list[list[int]]) -> None:
    """Else the runtimes above would show nothing of preemption."""
    llm = pictures.open(cache_tokens=256)
    outputs = llm.generate([prompt(parts) for parts in MIXED] * 2, GREEDY)
    assert [out.token_ids for out in outputs] == expected * 2
    assert llm.executor.num_preemptions > 0


def test_equal_ids_with_other_pictures_share_no_blocks(pictures: Side) -> None:
    """The block before the picture is shared; those of the picture only with the same one, at its place."""
    llm, reused = pictures.open(), []
    reuse = llm.executor.blocks.reuse_prefix
    llm.executor.blocks.reuse_prefix = lambda request: reused.append(reuse(request)) or reused[-1]  # type: ignore
    start, end = ids(16, 9), ids(9, 10)
    for seed, tokens in ((100, 0), (101, 16), (100, 48), (102, 16)):
        parts: Parts = [start, seed, end]
        assert llm.generate(prompt(parts), GREEDY)[0].token_ids == hf_greedy(pictures, parts)
        assert reused[-1] == tokens


def test_a_picture_is_encoded_once_for_all_that_show_it(
    pictures: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, encoded = pictures.open(prefix_reuse=False), []
    encode = llm.engine.model.encode
    monkeypatch.setattr(llm.engine.model, "encode", lambda f, walk: encoded.append(f) or encode(f, walk))
    shown = [[ids(3, 11), 100], [100, ids(4, 12)], [101, ids(4, 12)]]
    llm.generate([prompt(parts) for parts in shown], GREEDY, n=2, temperature=0.5, seed=1)
    assert len(encoded) == 2
    llm.generate(prompt([100, ids(2, 13)]), GREEDY)  # not evicted since
    assert len(encoded) == 2


def test_a_picture_is_what_it_was_when_it_was_given(pictures: Side, expected: list[list[int]]) -> None:
    shown = picture(100)
    stream = pictures.open().stream(Prompt([MIXED[0][0], Input(shown), MIXED[0][2]]), GREEDY)  # type: ignore
    shown.zero_()
    assert [token for piece in stream for token in piece.token_ids] == expected[0]


def test_beams_and_answers_of_a_picture_equal_hugging_faces(pictures: Side) -> None:
    parts = MIXED[0]
    given = [token for part in parts for token in ([PICTURE] * POSITIONS if isinstance(part, int) else part)]
    tokens = torch.tensor([given])
    beams = pictures.model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        pixel_values=picture(100)[None],
        num_beams=3,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    llm = pictures.open(cache_tokens=704)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, num_beams=3, ignore_eos=True)
    outputs = llm.generate([prompt(parts), prompt(MIXED[2])], params)
    assert outputs[0].token_ids == beams[0, len(given) :].tolist()
    assert idle(llm)


def test_a_dropped_stream_gives_its_picture_back(pictures: Side, expected: list[list[int]]) -> None:
    llm = pictures.open(encoder_positions=32, token_budget=9)
    stream = llm.stream(prompt(MIXED[2]), GREEDY)
    next(stream)
    stream.close()
    waiting = llm.stream(prompt(MIXED[0]), GREEDY)
    first = next(waiting)
    assert llm.generate(prompt(MIXED[4]), GREEDY)[0].token_ids == expected[4]
    assert [*first.token_ids, *(token for piece in waiting for token in piece.token_ids)] == expected[0]
    assert idle(llm)


def test_a_failed_step_forgets_what_it_was_to_encode(
    pictures: Side, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pictures.open()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "encode", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompt(MIXED[0]), GREEDY)
    assert idle(llm)
    assert llm.generate(prompt(MIXED[0]), GREEDY)[0].token_ids == expected[0]


def test_a_request_names_what_is_wrong_with_its_picture(pictures: Side) -> None:
    llm = pictures.open(encoder_positions=16)
    cases = {
        "another shape": [torch.zeros(3, IMAGE, IMAGE + 1), torch.zeros(IMAGE, IMAGE), torch.zeros(0)],
        "tensor of numbers": ["a.png", [[1], [2, 3]], None],
        "too many positions": [picture(1)],  # 25 of 16
    }
    for message, odd in cases.items():
        for features in odd:
            with pytest.raises(RequestError, match=message):
                llm.generate(Prompt([[1, 2], Input(features)]), GREEDY)
    whole = pictures.open()
    for value in (float("nan"), float("-inf")):
        features = torch.zeros(3, IMAGE, IMAGE)
        features[0, :2, 3] = value
        for call in (whole.generate, whole.logits):
            with pytest.raises(RequestError, match="2 of 1200 are NaN or infinite"):
                call(Prompt([[1, 2], Input(features)]))  # type: ignore[operator]
    with pytest.raises(RequestError, match="prompt 2: the prompt is too long"):
        whole.generate([[1, 2], prompt([100] * 11)], GREEDY)
    with pytest.raises(RequestError, match="too long"):
        whole.logits(prompt([100] * 11))


def test_schemes_that_need_samples_are_refused(pictures: Side, tmp_path: Path) -> None:
    """Calibration reads no pictures."""
    quant = QuantConfig("w4a16", method="gptq")
    with pytest.raises(ConfigError, match=r"encoder takes neither.*w8a16, w4a16 or w8a8 by rounding"):
        build(pictures.folder, tmp_path / "engine", quant=quant, calib=tmp_path, device="cpu")
    assert not (tmp_path / "engine").exists()


def idle(llm: LLM) -> bool:
    """Whether no block and no entry is held."""
    blocks, encoders = llm.executor.blocks, llm.executor.scheduler.encoders
    assert encoders is not None
    return blocks.num_free == blocks.num_blocks and not any(e.holders for e in encoders._entries.values())


def test_rows_that_a_request_brings_beside_pictures(pictures: Side, expected: list[list[int]]) -> None:
    """A picture's own rows answer as the picture does, in a step with pictures, in a prompt with another."""
    llm = pictures.open(token_budget=64)
    brought = []
    for parts in MIXED:
        rows = [llm.engine.model.encode(picture(p)).detach() if isinstance(p, int) else p for p in parts]
        brought.append(Prompt([Embeddings(r) if isinstance(r, torch.Tensor) else r for r in rows]))
    outputs = llm.generate([*brought, *map(prompt, MIXED)], GREEDY)
    assert [out.token_ids for out in outputs] == expected * 2
    first, text, second, third, last = MIXED[2]
    both = Prompt([Input(picture(101)), text, brought[2].parts[2], Input(picture(100)), last])  # type: ignore
    assert [first, second, third] == [101, 102, 100]
    assert llm.generate(both, GREEDY)[0].token_ids == expected[2]
    assert idle(llm)
