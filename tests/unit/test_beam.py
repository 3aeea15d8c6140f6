"""Beam search against Hugging Face's ``generate`` on tiny random models, and its own edges."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ingot.config.sampling_params import SamplingParams
from ingot.config.transcript_rules import TranscriptRules
from ingot.runtime.scheduling.beam import Beam, BeamResult, BeamSearch, BeamStep, top_candidates
from ingot.runtime.update import updates_of_beams
from tests.unit.penalized import penalized

PROMPT = [3, 14, 15, 9]
END = 7  # of transcripts


@functools.cache
def tiny_model(kind: str, vocab: int) -> PreTrainedModel:
    torch.manual_seed(vocab)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocab, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4
        )
        model: PreTrainedModel = GPT2LMHeadModel(config)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.3,
            )
        )
    return model.eval()


def likely_and_unlikely(model: PreTrainedModel, count: int, likely: bool) -> frozenset[int]:
    """End tokens that greedy search meets within its first steps, or those that rank last."""
    ids = list(PROMPT)
    for _ in range(6):
        logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
    ranked = logits.argsort(descending=True).tolist()
    return frozenset(ranked[1 : 1 + count] if likely else ranked[-count:])


@torch.inference_mode()
def search(
    model: PreTrainedModel, params: SamplingParams, eos: frozenset[int], room: int
) -> list[BeamResult]:
    """Drive BeamSearch with every live beam recomputed from scratch at every step."""
    beams = BeamSearch(params, len(PROMPT), eos, room)
    while not beams.done:
        rows = torch.tensor([[*PROMPT, *beam.output_ids] for beam in beams.live])
        logprobs = model(rows).logits[:, -1].float().log_softmax(-1)
        for row, beam in zip(logprobs, beams.live, strict=True):
            row.copy_(penalized(params, PROMPT, beam.output_ids, eos, row))
        before = beams.live
        steps = beams.advance(top_candidates(logprobs, beams.num_candidates))
        if not beams.done:
            moved = [(*before[s.parent].output_ids, s.token) for s in steps]
            assert moved == [b.output_ids for b in beams.live]
    return beams.results(params.n)


@torch.inference_mode()
def hugging_face(
    model: PreTrainedModel, params: SamplingParams, eos: frozenset[int], room: int
) -> list[tuple[list[int], float]]:
    limit = room - len(PROMPT)
    output = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=limit if params.max_new_tokens is None else min(limit, params.max_new_tokens),
        min_new_tokens=params.min_new_tokens or None,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=sorted(params.end_ids(eos)) or None,
        pad_token_id=model.config.vocab_size - 1,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sequences = output.sequences[:, len(PROMPT) :].tolist()
    return list(zip(sequences, output.sequences_scores.tolist(), strict=True))


def check(
    model: PreTrainedModel, params: SamplingParams, eos: frozenset[int], room: int = 60
) -> list[BeamResult]:
    ours = search(model, params, eos, room)
    theirs = hugging_face(model, params, eos, room)
    assert len(ours) == len(theirs)
    for result, (sequence, score) in zip(ours, theirs, strict=True):
        mine = [*result.output_ids, *([] if result.end_token is None else [result.end_token])]
        assert mine == sequence[: len(mine)]
        assert set(sequence[len(mine) :]) <= {model.config.vocab_size - 1}
        assert result.score == pytest.approx(score, rel=1e-4, abs=1e-5)
        assert (result.finish_reason == "stop") == (result.end_token is not None)
    return ours


@pytest.mark.stays("2-False-False-llama", "5-True-False-gpt2")
@pytest.mark.grid
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("likely", [True, False])
@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_same_sequences_as_hugging_face(
    kind: str, likely: bool, early_stopping: bool, num_beams: int
) -> None:
    model = tiny_model(kind, 60)
    for count in (1, 3):
        eos = likely_and_unlikely(model, count, likely)
        for length_penalty in (0.0, 1.0, 2.0, -1.0):
            params = SamplingParams(
                max_new_tokens=12,
                num_beams=num_beams,
                n=num_beams,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
            check(model, params, eos)


@pytest.mark.parametrize("vocab", [50, 200])
def test_both_finish_reasons_are_met(vocab: int) -> None:
    model = tiny_model("gpt2", vocab)
    params = SamplingParams(max_new_tokens=10, num_beams=4, n=4, early_stopping=True)
    stopped = check(model, params, likely_and_unlikely(model, 8, likely=True))
    assert "stop" in {r.finish_reason for r in stopped}
    cut = check(model, params, frozenset())
    assert {(r.finish_reason, len(r.output_ids)) for r in cut} == {("length", 10)}


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 6},
        {"ignore_eos": True},
        {"stop_token_ids": (7, 11)},
        {"stop_token_ids": (7, 11), "ignore_eos": True},
        {"n": 1},
        {"max_new_tokens": None},
        {"max_new_tokens": 1},
    ],
)
def test_other_values(extra: dict[str, object]) -> None:
    model = tiny_model("llama", 60)
    params = SamplingParams(max_new_tokens=12, num_beams=3, n=3).replace(**extra)
    eos = likely_and_unlikely(model, 2, likely=True)
    results = check(model, params, eos, room=len(PROMPT) + 15)
    assert all(len(r.output_ids) <= 15 for r in results)


def logs(**probabilities: float) -> list[tuple[int, float]]:
    return [(int(name[1:]), math.log(p)) for name, p in probabilities.items()]


def test_end_tokens_count_only_among_the_first_beams() -> None:
    params = SamplingParams(max_new_tokens=5, num_beams=2, n=2)
    beams = BeamSearch(params, 1, frozenset({9}), 100)
    assert beams.num_candidates == 3
    assert beams.advance([logs(t1=0.5, t2=0.3, t9=0.2)]) == [BeamStep(0, 1), BeamStep(0, 2)]
    assert beams.results(2) == []
    steps = beams.advance([logs(t9=0.6, t3=0.3, t4=0.1), logs(t5=0.5, t9=0.4, t6=0.1)])
    assert steps == [BeamStep(0, 3), BeamStep(1, 5)]
    (finished,) = beams.results(2)
    assert finished == BeamResult((1,), pytest.approx(math.log(0.3) / 2), "stop", 9)
    assert [b.output_ids for b in beams.live] == [(1, 3), (2, 5)]


def test_early_stopping_ends_at_num_beams_hypotheses() -> None:
    offered = [logs(t1=0.4, t9=0.35, t2=0.25)], [logs(t3=0.9, t9=0.1), logs(t9=0.9, t4=0.1)]
    for early_stopping in (True, False):
        params = SamplingParams(
            max_new_tokens=9, num_beams=2, n=2, early_stopping=early_stopping, length_penalty=3.0
        )
        beams = BeamSearch(params, 1, frozenset({9}), 100)
        for candidates in offered:
            beams.advance(candidates)
        assert len(beams.results(2)) == 2
        assert beams.done is early_stopping


@pytest.mark.parametrize(("length_penalty", "done"), [(0.0, True), (1.0, True), (3.0, False)])
def test_without_early_stopping_the_best_live_beam_must_be_able_to_win(
    length_penalty: float, done: bool
) -> None:
    params = SamplingParams(max_new_tokens=99, num_beams=2, n=2, length_penalty=length_penalty)
    beams = BeamSearch(params, 1, frozenset({9}), 100)
    beams.advance([logs(t9=0.5, t1=0.3, t2=0.2)])
    assert not beams.done
    beams.advance([logs(t9=0.8, t3=0.2), logs(t4=0.1, t9=0.05)])
    beams.advance([logs(t5=0.6, t9=0.4), logs(t6=0.5, t9=0.5)])
    assert beams.done is done


def test_banned_candidates_do_not_become_beams() -> None:
    beams = BeamSearch(SamplingParams(num_beams=3, n=3), 1, frozenset(), 100)
    assert beams.advance([[(4, -0.1), (5, -math.inf), (6, -math.inf)]]) == [BeamStep(0, 4)]
    assert beams.advance([[(5, -math.inf)]]) == []
    assert beams.done


def test_no_room_is_done_at_once() -> None:
    beams = BeamSearch(SamplingParams(num_beams=2), 10, frozenset(), 10)
    assert beams.done
    assert beams.results(1) == []


def test_one_list_of_candidates_per_live_beam() -> None:
    with pytest.raises(ValueError, match="zip"):
        BeamSearch(SamplingParams(num_beams=2), 1, frozenset(), 9).advance([logs(t1=1.0), logs(t1=1.0)])


def test_top_candidates_keeps_ids_and_order() -> None:
    logprobs = torch.tensor([[-3.0, -0.5, -math.inf, -1.0], [-1.0, -2.0, -0.25, -4.0]])
    assert top_candidates(logprobs, 2) == [[(1, -0.5), (3, -1.0)], [(2, -0.25), (0, -1.0)]]
    assert len(top_candidates(logprobs, 99)[0]) == 4


def original_search(
    table: torch.Tensor, beams: int, patience: float, length: int, penalty: float = 1.0
) -> tuple[list[int], float]:
    """A transcript's search over sequences as OpenAI's Whisper does it; logits depend on the last token."""
    end, most = END, round(beams * patience)
    live: dict[tuple[int, ...], float] = {(0,): 0.0}
    finished: dict[tuple[int, ...], float] = {}
    for _ in range(length):
        scores = {
            (*sequence, int(token)): total + float(value)
            for sequence, total in live.items()
            for value, token in zip(*table[sequence[-1]].log_softmax(0).topk(beams + 1), strict=True)
        }
        live, ended = {}, {}
        for sequence in sorted(scores, key=lambda one: -scores[one]):
            if sequence[-1] == end:
                ended[sequence] = scores[sequence]
            else:
                live[sequence] = scores[sequence]
                if len(live) == beams:
                    break
        for sequence in ended:
            if len(finished) < most:
                finished[sequence] = ended[sequence]
        if len(finished) >= most:
            break
    for sequence in sorted(live, key=lambda one: -live[one]):
        if len(finished) >= beams:
            break
        finished[sequence] = live[sequence]
    texts = [([t for t in sequence[1:] if t != end], total) for sequence, total in finished.items()]
    return max(texts, key=lambda one: one[1] / max(len(one[0]), 1) ** penalty)


@pytest.mark.parametrize("patience", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.3])
def test_transcripts_are_searched_as_the_original_does(beams: int, patience: float, penalty: float) -> None:
    outcomes = set()
    for seed in range(12):
        table = 2.5 * torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        rules = TranscriptRules(END, 6, 1000, timestamps=False, patience=patience)
        params = SamplingParams(
            num_beams=beams, max_new_tokens=8, stop_token_ids=(END,), length_penalty=penalty, transcript=rules
        )
        search = BeamSearch(params, 1, frozenset(), 100)
        while not search.done:
            logits = torch.stack([table[_last(beam)] for beam in search.live])
            search.advance(top_candidates(logits.log_softmax(-1), search.num_candidates))
        best = search.results(1)[0]
        wanted, total = original_search(table, beams, patience, 8, penalty)
        assert list(best.output_ids) == wanted, seed
        assert sum(best.logprobs) == pytest.approx(total, rel=1e-5)
        assert best.score == pytest.approx(total / max(len(wanted), 1) ** penalty, rel=1e-5)
        outcomes.add((best.finish_reason, len(wanted)))
    assert len(outcomes) > 2


@pytest.mark.parametrize(("beams", "patience"), [(1, 0.4), (1, 0.01), (2, 0.1), (5, 0.05)])
def test_a_patience_below_one_hypothesis_waits_for_one(beams: int, patience: float) -> None:
    """Rounded to no hypothesis at all, it ends with the first that ends, not with the first token."""

    def search(value: float, count: int) -> list[BeamResult]:
        rules = TranscriptRules(END, 6, 1000, timestamps=False, patience=value)
        params = SamplingParams(num_beams=count, max_new_tokens=8, stop_token_ids=(END,), transcript=rules)
        found = BeamSearch(params, 1, frozenset(), 100)
        table = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
        table[:, END] = -2.0
        while not found.done:
            logits = torch.stack([table[_last(beam)] for beam in found.live])
            found.advance(top_candidates(logits.log_softmax(-1), found.num_candidates))
        return found.results(1)

    (given,) = search(patience, beams)
    assert len(given.output_ids) > 1
    assert [given] == search(1.0 / beams, beams)


@pytest.mark.parametrize("end", [0, 9])
def test_an_end_token_has_its_log_probability(end: int) -> None:
    """Whatever its id is: 0 is one, too."""
    params = SamplingParams(max_new_tokens=4, num_beams=2, n=2, stop_token_ids=(end,), logprobs=0)
    beams = BeamSearch(params, 1, frozenset(), 100)
    beams.advance([[*logs(t1=0.5, t2=0.3), (end, math.log(0.2))]])
    while not beams.done:
        likely = [[(end, math.log(0.7)), *logs(t3=0.2, t4=0.1)]] * len(beams.live)
        beams.advance(likely)
    updates = updates_of_beams("r", beams.results(2), (6, -1.5), logprobs=True)
    assert [one.stop_id for one in updates] == [end, end]
    for one, first in zip(updates, (0.5, 0.3), strict=True):
        assert one.stop_logprob == pytest.approx(math.log(0.7))
        assert [value.logprob for value in one.logprobs] == pytest.approx([math.log(first)])
        assert [value.top for value in one.logprobs] == [((6, -1.5),)]
    silent = updates_of_beams("r", beams.results(2), None, logprobs=False)
    assert [(one.logprobs, one.stop_logprob) for one in silent] == [((), None)] * 2


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_every_hypothesis_has_its_own_values(penalty: float) -> None:
    """Those that end and those that the length ends: the last token of these is no end token."""
    params = SamplingParams(max_new_tokens=3, num_beams=3, n=3, logprobs=0, length_penalty=penalty)
    beams = BeamSearch(params, 2, frozenset([9]), 100)
    beams.advance([[*logs(t1=0.5, t2=0.3, t3=0.1), (9, math.log(0.05))]])
    step = {1: [*logs(t4=0.6, t5=0.05), (9, math.log(0.3))], 2: logs(t4=0.5, t6=0.4), 3: logs(t4=0.2, t6=0.1)}
    while not beams.done:
        beams.advance([step.get(beam.output_ids[-1], logs(t7=0.3, t8=0.1)) for beam in beams.live])
    results = beams.results(3)
    assert {(one.finish_reason, one.end_token) for one in results} == {("stop", 9), ("length", None)}
    reported = updates_of_beams("r", results, (6, -1.5), logprobs=True)
    chances = {(): {1: 0.5, 2: 0.3, 3: 0.1}, (1,): {4: 0.6, 9: 0.3}, (2,): {4: 0.5, 6: 0.4}, (3,): {4: 0.2}}
    for place, (update, result) in enumerate(zip(reported, results, strict=True)):
        ids = result.output_ids
        ended = result.end_token is not None
        known = [*ids, 9] if ended else [*ids]
        wanted = [
            math.log(chances.get(tuple(known[:i]), {7: 0.3, 8: 0.1})[token]) for i, token in enumerate(known)
        ]
        assert (update.request_id, update.index, update.token_ids) == ("r", place, ids)
        assert (update.finish_reason, update.stop_id) == (result.finish_reason, result.end_token)
        assert update.score == pytest.approx(sum(wanted) / len(known) ** penalty)
        assert [one.token_id for one in update.logprobs] == [*ids]
        assert [one.logprob for one in update.logprobs] == pytest.approx(wanted[: len(ids)])
        assert [one.top for one in update.logprobs] == [((6, -1.5),), *[()] * (len(ids) - 1)]
        assert update.stop_logprob == (pytest.approx(wanted[-1]) if ended else None)


def _last(beam: Beam) -> int:
    """The start token is 0."""
    return beam.output_ids[-1] if beam.output_ids else 0
