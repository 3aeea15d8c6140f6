"""A prompt cut as MiniGPT-4's demonstration cuts it: what the model is given is the end of what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot import LLM
from ingot.errors import RequestError
from ingot.llm.prompt_inputs import Embeddings, Input, Prompt
from ingot.llm.prompt_left_cut import left_cut
from ingot.proof.repro_run import capture_layer
from ingot.text.chat.chat_pictures import ALIGNMENT, alignment_prompt
from tests.vision.conftest import COLOUR, image

ANSWER = 5


def asked(*urls: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(image, urls), {"type": "text", "text": COLOUR}]}]


def given(llm: LLM, prompt: Any) -> torch.Tensor:
    """What the first layer gets."""
    return capture_layer(llm, prompt, 0).inputs.hidden


@pytest.mark.stays("1", "in the picture", "in the second")
@pytest.mark.parametrize("gone", [1, 20, "at the picture", "in the picture", "behind it", "in the second"])
def test_the_end_of_the_prompt_stays(gone: int | str, llm: LLM, urls: list[str]) -> None:
    talk = asked(*urls)
    ids = llm.prompt_ids(talk)
    first = ids.index(0)
    second = ids.index(0, first + 16)
    named = {"at the picture": first, "in the picture": first + 5, "behind it": first + 16}
    count = gone if isinstance(gone, int) else {**named, "in the second": second + 15}[gone]
    left = left_cut(llm, talk, len(ids) + ANSWER - count, max_new_tokens=ANSWER)
    assert len(llm.prompt_ids(left)) == len(ids) - count
    torch.testing.assert_close(given(llm, left), given(llm, talk)[count:], rtol=0, atol=1e-6)
    kinds = [type(part) for part in left.parts if not isinstance(part, list)]
    assert kinds == {
        "in the picture": [Embeddings, Input],
        "behind it": [Input],
        "in the second": [Embeddings],
    }.get(str(gone), [Input, Input])
    assert llm.generate(left, max_new_tokens=ANSWER, stop=["###"])[0].token_ids


def test_what_fits_is_whole(llm: LLM, urls: list[str]) -> None:
    talk = asked(urls[0])
    ids = llm.prompt_ids(talk)
    for most in (len(ids) + ANSWER, 2000):
        left = left_cut(llm, talk, most, max_new_tokens=ANSWER)
        assert llm.prompt_ids(left) == ids
        options: dict[str, Any] = {"max_new_tokens": ANSWER, "temperature": 0.0}
        assert llm.generate(left, stop=["###"], **options)[0].token_ids == llm.chat(talk, **options).token_ids
    texts = left_cut(llm, [5, 6, 7, 8], 6, max_new_tokens=3)
    assert texts.parts == ([6, 7, 8],)
    rows = llm.encode_image(urls[0])
    (kept,) = left_cut(llm, Prompt([Embeddings(rows)]), 6, max_new_tokens=3).parts
    assert isinstance(kept, Embeddings)
    assert torch.equal(kept.rows, rows[-3:])


def test_an_answer_that_leaves_no_room(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"no room for a prompt.*300 of 300 tokens"):
        left_cut(llm, [5, 6, 7], 300)


def test_a_seed_draws_one_of_four_questions(llm: LLM, urls: list[str]) -> None:
    picture = llm.read_image(urls[0])
    assert llm.tokenizer is not None
    drawn = [alignment_prompt(picture, seed) for seed in range(40)]
    texts = [str(one.parts[2]) for one in drawn]
    assert set(texts) == {f"</Img> {question} ###Assistant: " for question in ALIGNMENT}
    assert texts == [str(alignment_prompt(picture, seed).parts[2]) for seed in range(40)]
    assert alignment_prompt(picture).parts == (
        "###Human: <Img>",
        picture,
        f"</Img> {ALIGNMENT[0]} ###Assistant: ",
    )
    ids = llm.prompt_ids(drawn[0])
    assert (ids[0], ids.count(llm.tokenizer.bos_id)) == (llm.tokenizer.bos_id, 1)
    other = alignment_prompt(picture, 0, "minigpt4-llama2").parts
    assert (other[0], str(other[2]).endswith(" [/INST] ")) == ("[INST] <Img>", True)
    with pytest.raises(RequestError, match="no such chat format; seen: chatml"):
        alignment_prompt(picture, 0, "chatml")
