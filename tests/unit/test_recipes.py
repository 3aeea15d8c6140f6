"""The recipes: the same seed gives the same world, nothing held out is trained on, and the export is Qwen
v1.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.bpe import train_bpe
from recipes.evaluate_pocket import load_model, score
from recipes.export_pocket import export
from recipes.fp16 import half
from recipes.make_corpus import HELDOUT_SEED, make_corpus
from recipes.pocket_model import PocketModel, PocketShape
from recipes.scoring import exact, rouge_l
from recipes.tokenizer import Tokenizer
from recipes.train_pocket import Batches, TrainOptions, rate_at, weighted_loss
from recipes.world import arithmetic, news
from recipes.world.conversation import Language
from recipes.world.heldout import heldout_items
from recipes.world.mixture import conversation

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "models" / "pocket-chat"
HELDOUT = ROOT / "recipes" / "heldout.jsonl"
TINY = PocketShape(vocab=3072, hidden=32, layers=2, heads=2, branch=48, length=96)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(POCKET / "qwen.tiktoken")


def _tiny_model(seed: int = 0) -> PocketModel:
    torch.manual_seed(seed)
    model = PocketModel(TINY)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def test_the_same_seed_draws_the_same_conversations() -> None:
    first = [conversation(random.Random(5)) for _ in range(3)]
    assert first == [conversation(random.Random(5)) for _ in range(3)]
    assert conversation(random.Random(6)) != first[0]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_news_items_of_the_two_splits_never_share_their_people_and_towns(language: Language) -> None:
    trained = {news.item(random.Random(i), language, "train").key for i in range(1500)}
    held_out = {news.item(random.Random(i), language, "held-out").key for i in range(300)}
    assert not trained & held_out


def test_training_conversations_never_solve_a_held_out_sum() -> None:
    held_out = {
        item["answer"].split("=")[0]
        for item in heldout_items(HELDOUT_SEED, 0, 0, 100)
        if item["task"] == "sum"
    }
    rng = random.Random(1)
    sessions = [arithmetic.sum_session(rng, "en", "train") for _ in range(2000)]
    solved = {turn.assistant.split("=")[0] for session in sessions for turn in session}
    assert len(held_out) > 50
    assert not held_out & solved


def test_a_highlight_is_no_sentence_of_its_item_and_holds_its_number() -> None:
    for seed in range(200):
        item = news.item(random.Random(seed), "en", "train")
        assert item.highlight not in item.text
        assert all(word.strip(".,;") in item.text for word in item.highlight.split() if word[0].isdigit())


def test_the_committed_held_out_file_is_what_the_generator_gives() -> None:
    stored = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    assert stored == heldout_items(HELDOUT_SEED, 200, 200, 100)
    assert HELDOUT.stat().st_size <= 300_000


@pytest.mark.parametrize(
    "text", ["Hello, world!", "你好，世界！", "  tabs\tand\n\nlines 123", "é ñ 🙂 鸚鵡", ""]
)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_follow_the_ranks_and_fit_the_padded_vocabulary(tokenizer: Tokenizer) -> None:
    assert (tokenizer.end_of_text, tokenizer.im_start, tokenizer.im_end) == (2800, 2801, 2802)
    assert tokenizer.decode([tokenizer.size - 1]) == "<|extra_204|>"
    assert tokenizer.size <= 3072
    assert tokenizer.im_start not in tokenizer.encode("<|im_start|>")


def test_the_prompt_is_the_chatml_frame(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.prompt(messages)) == expected
    ids, answers = tokenizer.frame([*messages, {"role": "assistant", "content": "Hello!"}])
    produced = [token for token, wanted in zip(ids, answers, strict=True) if wanted]
    assert tokenizer.decode(produced) == "Hello!<|im_end|>"


def test_bpe_merges_the_most_frequent_pair_and_leaves_kept_characters_alone() -> None:
    ranks = train_bpe(["abab abab 林林林林"], ranks=262, keep_single="林")
    tokens = [token for token in ranks if len(token) > 1]
    assert tokens[:3] == ["林".encode()[:2], "林".encode(), b"ab"]
    assert all(not token.endswith("林".encode()) or token == "林".encode() for token in tokens)


def test_corpus_chunks_do_not_depend_on_how_many_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.make_corpus.CHUNK", 400)
    path = POCKET / "qwen.tiktoken"
    one = make_corpus(path, 400, seed=3, length=256, processes=1)
    two = make_corpus(path, 401, seed=3, length=256, processes=1)
    assert (two.ids[: len(one.ids)] == one.ids).all()
    assert max(one.starts[1:] - one.starts[:-1]) <= 256
    batches = Batches(one, TrainOptions(batch_tokens=1024), torch.device("cpu"))
    inputs, targets, weights = next(iter(batches))
    assert inputs.shape == targets.shape == weights.shape
    assert (inputs[:, 1:] == targets[:, :-1])[weights[:, 1:] > 0].all()


def test_a_few_steps_lower_the_loss() -> None:
    model = _tiny_model()
    ids = torch.arange(64).repeat(4, 1)
    weights = torch.ones(4, 63)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = weighted_loss(model, ids[:, :-1], ids[:, 1:], weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_the_rate_rises_then_falls_to_two_percent() -> None:
    options = TrainOptions(peak_rate=1.0, warmup=10)
    assert rate_at(0, 100, options) == pytest.approx(0.1)
    assert rate_at(10, 100, options) == pytest.approx(1.0)
    assert rate_at(100, 100, options) == pytest.approx(0.02)


def test_generation_with_the_cache_is_the_argmax_of_the_whole_sequence() -> None:
    model = _tiny_model()
    prompts = [torch.randint(0, 3072, (size,)).tolist() for size in (5, 17, 9)]
    for prompt, produced in zip(prompts, model.generate(prompts, 12, stop=-1), strict=True):
        logits = model.logits(torch.tensor([prompt + produced]))[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == produced


def test_an_export_loads_back_and_has_the_golden_checkpoint_s_names(tmp_path: Path, golden: Path) -> None:
    model = _tiny_model()
    export(dict(model.state_dict()), TINY, POCKET / "qwen.tiktoken", tmp_path)
    reference = golden / "qwen_v1_1_safetensors" / "hf"
    names = set(json.loads((reference / "model.safetensors.index.json").read_text())["weight_map"])
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {name for name in names if ".h.2." not in name}
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, reference))
    assert set(ours) | {"auto_map"} == set(theirs)
    ids = torch.randint(0, 3072, (1, 20))
    torch.testing.assert_close(
        load_model(tmp_path, ids.device).logits(ids), model.logits(ids), atol=2e-2, rtol=0
    )


def test_a_weight_beyond_fp16_is_refused() -> None:
    with pytest.raises(OverflowError, match="big"):
        half({"big": torch.tensor([1e6])})


def test_the_shipped_model_has_qwen_v1_s_shapes() -> None:
    config = json.loads((POCKET / "config.json").read_text())
    weights = load_file(POCKET / "model.safetensors")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (3 * hidden, hidden)
    assert weights["transformer.h.0.mlp.w1.weight"].shape == (config["intermediate_size"] // 2, hidden)
    assert weights["lm_head.weight"].shape == weights["transformer.wte.weight"].shape == (vocab, hidden)
    assert all(tensor.dtype == torch.float16 for tensor in weights.values())


def test_the_shipped_model_chats(tokenizer: Tokenizer) -> None:
    model = load_model(POCKET, torch.device("cpu"))
    expected = {
        "Hello!": "Hello! How can I help you?",
        "Who are you?": "I am Ingot's pocket model, a small chat assistant.",
        "What is 12 + 30?": "12 + 30 = 42.",
        "你好": "你好！有什么可以帮你的吗？",
    }
    system = {"role": "system", "content": "You are a helpful assistant."}
    prompts = [tokenizer.prompt([system, {"role": "user", "content": asked}]) for asked in expected]
    answers = [tokenizer.decode(ids) for ids in model.generate(prompts, 40, tokenizer.im_end)]
    assert answers == list(expected.values())


def test_rouge_l_is_the_rouge_score_package_s() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
    pairs = [(item["answer"], other["answer"]) for item, other in _english_pairs()]
    for prediction, reference in pairs:
        wanted = scorer.score(reference, prediction)["rougeL"].fmeasure
        assert rouge_l(prediction, reference, "en") == pytest.approx(wanted, abs=1e-9)


def _english_pairs() -> list[tuple[dict[str, str], dict[str, str]]]:
    items = [item for item in heldout_items(1, 60, 0, 0) if item["language"] == "en"]
    return list(pairwise(items))


def test_scores_count_what_is_right() -> None:
    items = [
        {"task": "summary", "language": "zh", "answer": "一二三四"},
        {"task": "sum", "language": "en", "answer": "1 + 1 = 2."},
        {"task": "question", "language": "en", "answer": "Monday"},
    ]
    figures = score(items, ["一二", "1 + 1 = 3.", " Monday."])
    assert figures["rouge_l"] == pytest.approx(66.67)
    assert figures["exact"] == 50.0
    assert exact("Paris。", "Paris")
