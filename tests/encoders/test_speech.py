"""An encoder-decoder with cross-attention: Hugging Face's logits and tokens, in flight beside requests
without an input, however it is scheduled.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from ingot import LLM, Embeddings, Input, Prompt, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError, RequestError
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.encoders.conftest import Side
from tests.encoders.speech import FRAMES, MELS, VOCAB
from tests.encoders.test_pictures import idle

TOLERANCE = 1e-4  # of the largest logit
NEW_TOKENS = 14
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)


def speech_of(seed: int, frames: int) -> torch.Tensor:
    return torch.randn(MELS, frames, generator=torch.Generator().manual_seed(seed))


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


# (seed and frames of the speech, or None; prompt)
Spoken = tuple[tuple[int, int] | None, list[int]]
MIXED: list[Spoken] = [
    ((1, FRAMES), ids(4, 1)),
    (None, ids(20, 2)),
    ((2, 34), ids(1, 3)),
    ((3, 64), ids(37, 4)),
    (None, ids(1, 5)),
    ((2, 34), ids(6, 6)),
    ((4, 2), ids(5, 7)),
]


def prompt(spoken: Spoken) -> Prompt:
    given, tokens = spoken
    return Prompt([tokens] if given is None else [Input(speech_of(*given)), tokens])


@torch.inference_mode()
def hf_logits(side: Side, spoken: Spoken, output: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab_size] of Hugging Face's model; without speech its decoder is given nothing to
    attend to.
    """
    given, tokens = spoken
    decoder_ids = torch.tensor([tokens + output])
    if given is None:
        hidden = side.model.model.decoder(input_ids=decoder_ids).last_hidden_state
        logits: torch.Tensor = side.model.proj_out(hidden)[0]
        return logits
    encoder = copy.deepcopy(side.model.model.encoder)  # it takes speech of its config's length alone
    encoder.config.max_source_positions = given[1] // 2
    positions = encoder.embed_positions.weight[: given[1] // 2]
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(positions)
    states = encoder(speech_of(*given)[None]).last_hidden_state
    outputs = side.model(encoder_outputs=BaseModelOutput(states), decoder_input_ids=decoder_ids)
    return outputs.logits[0]


def hf_greedy(side: Side, spoken: Spoken, count: int = NEW_TOKENS) -> list[int]:
    """Without a cache; its winners lead clearly, so that equality means something."""
    output: list[int] = []
    for _ in range(count):
        best = hf_logits(side, spoken, output)[-1].topk(2)
        assert float(best.values[0] - best.values[1]) > 1e-3, "a tie: choose another seed"
        output.append(int(best.indices[0]))
    return output


@pytest.fixture(scope="module")
def expected(speech: Side) -> list[list[int]]:
    return [hf_greedy(speech, spoken) for spoken in MIXED]


@pytest.mark.parametrize("spoken", MIXED, ids=range(len(MIXED)))
def test_logits_equal_hugging_faces(speech: Side, spoken: Spoken) -> None:
    ours, theirs = speech.open().logits(prompt(spoken)), hf_logits(speech, spoken, [])
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


RUNTIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"token_budget": 8},
    "one-speech-a-step": {"encoder_budget": 1},
    "cache-of-one-speech": {"encoder_positions": 48},
    "cache-of-two-in-chunks": {"encoder_positions": 80, "token_budget": 8},
    "preempted": {"cache_tokens": 96},
    "preempted-in-a-small-cache": {"cache_tokens": 96, "encoder_positions": 64, "token_budget": 8},
    "no-prefix-reuse": {"prefix_reuse": False},
    "batch-invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_speech_beside_text_gives_hugging_faces_tokens(
    speech: Side, expected: list[list[int]], runtime: dict[str, Any]
) -> None:
    llm = speech.open(**runtime)
    outputs = llm.generate([prompt(spoken) for spoken in MIXED], GREEDY)
    assert [out.token_ids for out in outputs] == expected
    assert idle(llm)
    assert llm.executor.num_preemptions > 0 or "cache_tokens" not in runtime


def test_one_by_one_they_give_the_same(speech: Side, expected: list[list[int]]) -> None:
    llm = speech.open()
    assert [llm.generate(prompt(spoken), GREEDY)[0].token_ids for spoken in MIXED] == expected


def test_equal_ids_of_other_speech_share_no_blocks(speech: Side) -> None:
    llm, reused = speech.open(), []
    reuse = llm.executor.blocks.reuse_prefix
    llm.executor.blocks.reuse_prefix = lambda request: reused.append(reuse(request)) or reused[-1]  # type: ignore
    tokens = ids(37, 8)
    for given, shared in (((1, 40), 0), ((2, 40), 0), (None, 0), ((1, 40), 32), (None, 32)):
        spoken = (given, tokens)
        assert llm.generate(prompt(spoken), GREEDY)[0].token_ids == hf_greedy(speech, spoken)
        assert reused[-1] == shared


def test_speech_is_encoded_once_while_the_cache_has_it(speech: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, encoded = speech.open(encoder_positions=48), []
    encode = llm.engine.model.encode
    monkeypatch.setattr(llm.engine.model, "encode", lambda f, walk: encoded.append(f) or encode(f, walk))
    first, second = prompt(MIXED[0]), prompt(MIXED[2])
    llm.generate([first, first, first], GREEDY)
    assert len(encoded) == 1
    llm.generate([second, first], GREEDY)  # there is room for one of them
    assert len(encoded) == 3


def test_beams_read_their_speech(speech: Side) -> None:
    """Also when a beam is preempted, and when speech and blocks of held beams are taken."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, num_beams=3, ignore_eos=True)
    many: list[Spoken] = [MIXED[0], MIXED[2], (None, ids(4, 9)), MIXED[6]]
    alone = [speech.open().generate(prompt(spoken), params)[0] for spoken in many]
    assert [out.token_ids for out in alone] != [hf_greedy(speech, spoken) for spoken in many]
    llm = speech.open(cache_tokens=192, encoder_positions=48, prefix_reuse=False)
    together = llm.generate([prompt(spoken) for spoken in many], params)
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.score for out in together] == pytest.approx([out.score for out in alone], rel=1e-5)
    assert idle(llm)


def test_an_engine_folder_names_the_kind_and_gives_the_same(
    speech: Side, tmp_path: Path, expected: list[list[int]]
) -> None:
    engine = tmp_path / "engine"
    build(speech.folder, engine, dtype="fp32")
    manifest = Manifest.read(engine)
    assert manifest.model.wiring == "cross"
    assert Manifest.from_json(manifest.to_json()).model == manifest.model
    llm = LLM(engine, "cpu")
    outputs = llm.generate([prompt(spoken) for spoken in MIXED], GREEDY)
    assert [out.token_ids for out in outputs] == expected
    assert verify(engine, "cpu").verdict == "proven"
    assert "whisper (a model of speech, cross)" in ingot("inspect", engine).output


def test_a_request_to_a_model_of_speech_takes_one_input(speech: Side) -> None:
    llm, two = speech.open(), Prompt([Input(speech_of(1, 4)), [3], Input(speech_of(2, 4))])
    with pytest.raises(RequestError, match="takes one input"):
        llm.generate(two, GREEDY)
    with pytest.raises(RequestError, match="takes one input"):
        llm.logits(two)
    with pytest.raises(RequestError, match="too many positions"):
        llm.generate(Prompt([Input(speech_of(1, FRAMES + 1)), [3]]), GREEDY)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(Prompt([Input(speech_of(1, 4))]), GREEDY)


def test_schemes_without_recordings_or_that_rotate_are_refused(
    speech: Side, pictures: Side, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="folder of recordings"):
        build(speech.folder, tmp_path / "engine", quant=QuantConfig("w4a16", method="gptq"))
    with pytest.raises(ConfigError, match="cannot be rotated"):
        LLM(pictures.folder, "cpu", quant=QuantConfig("w4a8", rotation=True))


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_quantized_layers_read_speech_alike_alone_and_together(speech: Side, scheme: str) -> None:
    llm = LLM(speech.folder, "cpu", max_batch_size=8, quant=scheme)
    together = llm.generate([prompt(spoken) for spoken in MIXED], GREEDY)
    alone = [llm.generate(prompt(spoken), GREEDY)[0] for spoken in MIXED]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    logits, theirs = llm.logits(prompt(MIXED[0])), hf_logits(speech, MIXED[0], [])
    assert float((logits - theirs).norm() / theirs.norm()) < 0.1


def test_a_speech_model_takes_no_embeddings(speech: Side) -> None:
    llm = speech.open()
    rows = torch.zeros(2, llm.engine.manifest.model.hidden_size)
    with pytest.raises(RequestError, match=r"embeddings need a model of text.*a model of speech"):
        llm.generate(Prompt([[5], Embeddings(rows)]), GREEDY)
