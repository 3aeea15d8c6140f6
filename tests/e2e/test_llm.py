"""The Python API as a user meets it: kinds of prompts, streams side by side, stop strings, logprobs, taps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from ingot import LLM, Prompt, SamplingParams
from ingot.errors import RequestError
from ingot.runtime.admission import Admission
from tests.e2e.mixed import GREEDY, TEXTS
from tests.e2e.watch import check_idle, watch


@pytest.fixture(scope="module")
def llm(golden: Path) -> LLM:
    return LLM(golden / "llama_aidreams260K" / "hf", device="cpu")


def greedy(new: int = 20, **values: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **values)


def test_text_ids_and_prompt_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The sea")
    outputs = llm.generate(["The sea", ids, Prompt("The sea"), Prompt([ids])], greedy())
    assert len({tuple(o.token_ids) for o in outputs}) == 1
    assert [o.prompt_token_ids for o in outputs] == [ids] * 4
    assert llm.generate("The sea", greedy())[0].text == outputs[0].text


def test_a_prompt_of_parts_keeps_their_order_and_has_one_start_token(llm: LLM) -> None:
    ids = Prompt(["The", [300, 301], "sea"]).token_ids(llm.tokenizer)
    head, tail = llm.tokenizer.encode("The"), llm.tokenizer.encode("sea", add_special_tokens=False)
    assert ids == [*head, 300, 301, *tail]
    assert ids.count(llm.tokenizer.bos_id) == 1


def test_a_stream_checks_its_request_at_once_and_starts_late(llm: LLM) -> None:
    with pytest.raises(RequestError, match="too long"):
        llm.stream([1] * 500, greedy())
    llm.stream("The sea", greedy())
    assert not llm.executor.has_work


def test_a_call_checks_its_prompts_and_values_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token waits for it: nothing runs on a GPU meanwhile."""
    llm = LLM(tiny, "cpu")
    params = [greedy(2), SamplingParams(max_new_tokens=2, temperature=1.0, ignore_eos=True)] * 3
    counts: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: object, **named: object) -> object:
            counts[name] += 1
            return plain(*args, **named)

        monkeypatch.setattr(owner, name, call)

    counted(Admission, "check")
    counted(SamplingParams, "__post_init__")
    outputs = llm.generate([[5, 6], [7]] * 3, params)
    assert [len(one.token_ids) for one in outputs] == [2] * 6
    assert counts["check"] == 6
    assert counts["__post_init__"] < 6, "of the engine's defaults alone"


def test_answers_without_a_seed_differ_and_those_of_a_seed_repeat(tiny: Path) -> None:
    llm = LLM(tiny, "cpu")

    def drawn(seed: int | None) -> list[tuple[int, ...]]:
        params = SamplingParams(max_new_tokens=12, temperature=2.0, seed=seed, n=2)
        return [tuple(one.token_ids) for one in llm.generate([[1, 5]], params)[0].answers]

    assert len({*drawn(None), *drawn(None)}) == 4
    for seed in (0, 7):
        assert drawn(seed) == drawn(seed)
    assert len({*drawn(0), *drawn(7)}) == 4


def test_an_end_token_ends_and_is_not_in_the_output(llm: LLM) -> None:
    whole = llm.generate("The sea", greedy(40))[0].token_ids
    end = whole[12]
    output = llm.generate("The sea", greedy(40, stop_token_ids=[end, 511]))[0]
    assert output.token_ids == whole[: whole.index(end)]
    assert (output.finish_reason, output.answers[0].stopped_by) == ("stop", end)


def test_min_new_tokens_puts_an_end_token_off(llm: LLM) -> None:
    whole = llm.generate("The sea", greedy(40))[0].token_ids
    params = greedy(40, stop_token_ids=[whole[2]], min_new_tokens=8)
    assert len(llm.generate("The sea", params)[0].token_ids) >= 8


def test_length_ends_at_the_limit(llm: LLM) -> None:
    output = llm.generate("The sea", greedy(7))[0]
    assert (len(output.token_ids), output.finish_reason) == (7, "length")
    endless = llm.generate("The sea", SamplingParams(max_new_tokens=None, ignore_eos=True))[0]
    assert len(endless.prompt_token_ids) + len(endless.token_ids) == llm.engine.manifest.build.max_seq_len


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    output = llm.generate("The sea", greedy(6, logprobs=3, repetition_penalty=1.3))[0]
    full = torch.log_softmax(llm.logits([*output.prompt_token_ids, *output.token_ids]).double(), dim=-1)
    for i, entry in enumerate(output.logprobs):
        row = full[len(output.prompt_token_ids) + i - 1]
        assert entry.token_id == output.token_ids[i]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()


def test_one_params_each(llm: LLM) -> None:
    outputs = llm.generate(["The sea", "Once"], [greedy(3), greedy(5)])
    assert [len(o.token_ids) for o in outputs] == [3, 5]
    with pytest.raises(RequestError, match="as many as prompts"):
        llm.generate(["a", "b"], [greedy()])


def test_logits_of_every_token_and_taps_of_every_layer(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The sea is")
    plain = llm.logits(ids)
    assert plain.shape == (len(ids), llm.engine.model.config.vocab_size)
    assert plain.dtype == torch.float32
    with llm.tap("layers.*", "norm") as seen:
        tapped = llm.logits(ids)
    assert torch.equal(plain, tapped)
    assert set(seen) == {"norm", *(f"layers.{i}" for i in range(4))}
    assert all(t.shape == (len(ids), 64) for t in seen.values())
    with pytest.raises(RequestError, match="no module"), llm.tap("layer.*"):
        pass


def test_warm_up_knows_the_engines_batch(llm: LLM) -> None:
    llm.warm_up([1, 2])
    llm.warm_up()
    with pytest.raises(RequestError, match="unsupported batch size"):
        llm.warm_up([0])


@pytest.mark.stays("stop1")
@pytest.mark.parametrize("stop", [(), ("refine",), ("zzz", ", a")])
def test_stream_joined_is_generate(llm: LLM, stop: tuple[str, ...]) -> None:
    params = GREEDY.replace(max_new_tokens=50, stop=stop, logprobs=2)
    for prompt in TEXTS:
        output = llm.generate(prompt, params)[0]
        pieces = list(llm.stream(prompt, params))
        assert "".join(piece.text for piece in pieces) == output.text
        assert [t for piece in pieces for t in piece.token_ids] == output.token_ids
        assert [p for piece in pieces for p in piece.logprobs] == output.logprobs
        assert [p.finish_reason for p in pieces if p.finish_reason] == [output.finish_reason]
        assert pieces[-1].finish_reason is not None
        assert len(pieces) > 5
        assert not any(s in (output.text or "") for s in stop)
        check_idle(llm)


def test_a_stop_string_ends_the_answer_where_it_begins(llm: LLM) -> None:
    whole = llm.generate("I dream of", GREEDY.replace(max_new_tokens=50))[0]
    answer = llm.generate("I dream of", GREEDY.replace(max_new_tokens=50, stop=("refine",)))[0].answers[0]
    assert whole.text is not None
    assert answer.text == whole.text[: whole.text.index("refine")]
    assert (answer.finish_reason, answer.stopped_by) == ("stop", "refine")


def test_text_held_back_for_a_stop_string_is_emitted_at_the_end(llm: LLM) -> None:
    whole = llm.generate("I dream of", GREEDY)[0].text
    assert whole is not None
    params = GREEDY.replace(stop=(whole[-4:] + "never",))
    assert llm.generate("I dream of", params)[0].text == whole
    assert "".join(piece.text for piece in llm.stream("I dream of", params)) == whole


def test_streams_and_calls_side_by_side(llm: LLM) -> None:
    params = GREEDY.replace(max_new_tokens=30)
    expected = [llm.generate(p, params)[0].text for p in TEXTS]
    streams = [llm.stream(p, params) for p in TEXTS[:2]]
    texts = [next(s).text for s in streams]
    assert [o.text for o in llm.generate(list(TEXTS[2:]), params)] == expected[2:]
    before = llm.logits([5, 6, 7])
    assert before.shape[0] == 3
    for pieces in zip(*streams, strict=True):
        texts = [text + piece.text for text, piece in zip(texts, pieces, strict=True)]
    assert texts == expected[:2]
    check_idle(llm)


def test_a_closed_or_unread_stream_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream("I dream of", GREEDY)
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm)
    stream = llm.stream("I dream of", GREEDY.replace(n=3, temperature=1.0))
    next(stream)
    assert llm.executor.has_work
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm)


def test_an_answer_that_met_its_stop_string_is_computed_no_further(tiny: Path) -> None:
    """Though another one beside it goes on."""
    llm = LLM(tiny, "cpu")
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    whole = llm.generate("hello", params)[0].text
    assert whole is not None
    stop = whole[3:6]
    with watch(llm) as seen:
        first, other = llm.generate(["hello", "another"], [params.replace(stop=(stop,)), params])
    assert (first.text, first.stopped_by) == (whole[: whole.index(stop)], stop)
    assert len(other.token_ids) == 60
    steps = Counter(share.request_id for step in seen.steps for share in step)
    few, many = sorted(steps.values())
    assert few <= len(first.token_ids) + 1 < many
    check_idle(llm)
