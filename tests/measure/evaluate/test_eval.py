"""``ingot eval`` from end to end on tiny models: figures beside direct computations, exit codes, refusals."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from ingot import LLM, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.loss_limits import limits_for
from ingot.measure.evaluate.perplexity import WindowSettings, perplexity
from ingot.measure.evaluate.rouge import KINDS
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec, longest, specs_with
from ingot.runtime.likelihood import target_logprobs
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.measure.evaluate.conftest import write, write_ids
from tests.tiny_models import random_ids, save_model, tiny_config

POCKET = Path(__file__).parents[3] / "models" / "pocket-chat"
ARTICLE = "A fire broke out in a bakery. " * 20


def run(*words: object) -> Any:
    """Run a verb of ``ingot eval``."""
    return ingot("eval", *words, "--device", "cpu")


def record(*words: object, code: int = 0) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts of token ids: one longer than any window here, one of two tokens, one of a single one."""
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    return write_ids(path, random_ids(150, seed=5), random_ids(2, seed=6), [7])


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hello"}], "answer": "no such thing"},
        {"prompt": "Ab", "answers": ["x", "y"]},
        {"article": ARTICLE, "highlights": "Fire.\nBakery.", "id": "a1"},
    ]
    return write(tmp_path_factory.mktemp("data") / "asked.jsonl", *records)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and no chat format."""
    folder = write_tiny(tmp_path_factory.mktemp("plain") / "tiny", seed=3)
    (folder / "generation_config.json").write_text("{}")
    return folder


def brute_force(model: Path, texts: list[list[int]], size: int, stride: int) -> tuple[float, int]:
    """Loss in nats and its number of tokens: float64, every token's window found by trying all."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    loss, count = 0.0, 0
    for text in texts:
        for place in range(1, len(text)):
            begins = range(0, len(text), stride)
            begin = next(b for b in begins if b < place < b + size)
            with torch.no_grad():
                logits = hf(torch.tensor([text[begin:place]])).logits[0, -1]
            loss -= logits.log_softmax(0)[text[place]].item()
            count += 1
    return loss, count


@pytest.mark.parametrize(("size", "stride"), [(32, 8), (32, 31), (128, 64)])
def test_perplexity_is_the_brute_force_one(llama: Path, ids: Path, size: int, stride: int) -> None:
    found = record("perplexity", llama, "--data", ids, "--window", size, "--stride", stride)
    texts = [json.loads(line)["token_ids"] for line in ids.read_text().splitlines()]
    loss, count = brute_force(llama, texts, size, stride)
    assert found["counts"]["counted_tokens"] == count == 150
    assert found["counts"]["too_short"] == 1
    metrics = found["sides"][0]["metrics"]
    assert metrics["nats_per_token"] == pytest.approx(loss / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert metrics["bits_per_byte"] is None


def test_likelihood_is_that_of_the_logits(llama: Path) -> None:
    llm = LLM(llama, "cpu")
    text = random_ids(120, seed=3)
    expected = llm.logits(text).double().log_softmax(1)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
    found = llm.log_likelihood(text)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert llm.log_likelihood([3]).shape == (0,)
    assert target_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_likelihood_of_a_chunked_prompt(llama: Path) -> None:
    text = random_ids(100, seed=4)
    whole = LLM(llama, "cpu").log_likelihood(text)
    chunked = LLM(llama, "cpu", max_batch_size=4, runtime=RuntimeConfig(token_budget=7))
    assert torch.allclose(chunked.log_likelihood(text), whole, atol=1e-5)


def test_bits_per_byte_of_known_text(golden: Path, tmp_path: Path) -> None:
    model = golden / "llama_aidreams260K"
    reported = json.loads((model / "perplexity.json").read_text())
    data = write(tmp_path / "texts.jsonl", *({"text": one["text"]} for one in reported))
    rows = tmp_path / "rows.jsonl"
    found = record("perplexity", model / "hf", "--data", data, "--items", rows, "--window", 128)
    for one, line in zip(reported, rows.read_text().splitlines(), strict=True):
        assert json.loads(line)["ingot"]["perplexity"] == pytest.approx(one["perplexity"], rel=1e-4)
    loss = sum(sum(one["nll_per_token"]) for one in reported)
    num_bytes = sum(len(one["text"].encode()) for one in reported)
    assert found["counts"]["counted_bytes"] == num_bytes
    bits = found["sides"][0]["metrics"]["bits_per_byte"]
    assert bits == pytest.approx(loss / math.log(2) / num_bytes, rel=1e-4)


def test_divergence_from_itself_is_nothing(llama: Path, ids: Path) -> None:
    found = record("divergence", llama, "--data", ids, "--against", llama, "--max-delta", 0)
    assert (found["divergence"]["kl_max"], found["divergence"]["top1_agreement"]) == (0, 100)
    assert (found["worst"], found["verdict"]) == ([], "within")


def test_divergence_from_another_is_the_direct_one(llama: Path, other_llama: Path, ids: Path) -> None:
    words = ("--against", other_llama, "--window", 128, "--limit", 1)
    found = record("divergence", llama, "--data", ids, *words, code=1)
    text = json.loads(ids.read_text().splitlines()[0])["token_ids"]
    kl, agree = [], []
    for part in (text[:128], text[128:]):
        q, p = (
            AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64)(torch.tensor([part])).logits[0, :-1]
            for m in (llama, other_llama)
        )
        log_p, log_q = p.log_softmax(1), q.log_softmax(1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(1))
        agree.append(p.argmax(1) == q.argmax(1))
    values = torch.cat(kl)
    assert found["counts"]["counted_tokens"] == len(values) == 148
    direct = {
        "kl_mean": values.mean(),
        "kl_median": values.quantile(0.5),
        "kl_p99": values.quantile(0.99),
        "top1_agreement": 100 * torch.cat(agree).double().mean(),
    }
    for name, value in direct.items():
        assert found["divergence"][name] == pytest.approx(value.item(), rel=1e-4)
    assert found["worst"][0]["kl"] == pytest.approx(values.max().item(), rel=1e-4)
    assert found["worst"][0]["next"]["token_id"] == text[found["worst"][0]["position"]]
    assert found["verdict"] == "beyond"


def test_worst_positions_are_reported_with_their_text(chatter: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", seed=9)
    (tmp_path / "a.txt").write_text("Once upon a time 有一天")
    result = run("divergence", chatter, "--data", tmp_path / "a.txt", "--against", other)
    assert result.exit_code == 1
    for reported in ("the positions that differ most", "Once upon", "beyond the limit: kl_mean"):
        assert reported in result.stdout


@pytest.mark.parametrize("verb", ["perplexity", "divergence"])
@pytest.mark.parametrize("kind", ["llama", "chatter"])
def test_huggingface_on_the_same_tokens(
    verb: str, kind: str, ids: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    found = record(verb, model, "--data", ids, "--against", "hf", "--max-delta", 1e-3)
    assert found["verdict"] == "within"
    assert [side["name"] for side in found["sides"]] == ["ingot", "huggingface"]
    ours, theirs = (side["metrics"]["perplexity"] for side in found["sides"])
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_summaries_and_answers_beside_huggingface(chatter: Path, asked: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ("--data", asked, "--against", "hf", "--against-batch", 2, "--max-new-tokens", 12)
    found = record("summarize", chatter, *words, "--items", rows)
    cut = found["counts"].pop("cut_tokens")
    assert cut > 300
    assert found["counts"] == {"cases": 3, "too_long": 0, "cut": 1}
    assert found["agreement"]["same_tokens"] == 3
    assert {delta["delta"] for delta in found["deltas"]} == {0.0}
    assert found["sides"][0]["input_tokens"] == found["sides"][1]["input_tokens"]
    row = json.loads(rows.read_text().splitlines()[2])
    assert row["id"] == "a1"
    assert row["prompt_tokens"] == 256 - 12
    assert row["ingot"]["answer"] == row["huggingface"]["answer"]
    assert set(row["ingot"]["scores"]) == set(found["sides"][0]["metrics"])
    answers = record("answers", chatter, *words)
    assert answers["sides"][0]["metrics"] == {"exact": 0, "contains": 0}


def test_answers_are_those_of_the_library(chatter: Path, asked: Path, tmp_path: Path) -> None:
    llm = LLM(chatter, "cpu")
    prompt = [{"role": "user", "content": "Hello"}]
    expected = llm.chat(prompt, llm.default_params.replace(max_new_tokens=9, temperature=0.0)).text
    assert expected
    data = write(tmp_path / "a.jsonl", {"messages": prompt, "answer": expected})
    found = record("answers", chatter, "--data", data, "--max-new-tokens", 9)
    assert found["sides"][0]["metrics"] == {"exact": 100, "contains": 100}
    assert found["verdict"] is None


def test_a_system_message_is_before_every_conversation_without_one(chatter: Path, tmp_path: Path) -> None:
    llm, user = LLM(chatter, "cpu"), {"role": "user", "content": "Hello"}
    system, own = {"role": "system", "content": "Be brief: é"}, {"role": "system", "content": "Be long"}
    records: list[dict[str, Any]] = [
        {"prompt": "Hello", "answer": "x"},
        {"messages": [user], "answer": "x"},
        {"messages": [own, user], "answer": "x"},
        {"article": "Hello", "highlights": "x"},
    ]
    talks = [[system, user], [system, user], [own, user], [system, user]]
    params = llm.default_params.replace(max_new_tokens=9, temperature=0.0)
    words = ("--data", write(tmp_path / "a.jsonl", *records), "--max-new-tokens", 9)
    rows = tmp_path / "rows.jsonl"
    words = (*words, "--system", "Be brief: é", "--items", rows)
    found = record("summarize", chatter, *words, "--template", "{article}")
    assert found["settings"]["system"] == "Be brief: é"
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["prompt_tokens"] for row in read] == [len(llm.chat_ids(talk)) for talk in talks]
    assert [row["ingot"]["answer"] for row in read] == [
        (llm.chat(talk, params).text or "").strip() for talk in talks
    ]
    record("answers", chatter, *words)
    assert json.loads(rows.read_text().splitlines()[0])["prompt_tokens"] == len(llm.chat_ids(talks[0]))


def test_precisions_in_one_table(chatter: Path, asked: Path, tmp_path: Path) -> None:
    engine = build(chatter, tmp_path / "engine", quant=QuantConfig("w8a16"), device="cpu")
    words = ("--data", asked, "--max-new-tokens", 12, "--dtype", "fp32")
    words = (*words, "--against", "hf", "--also", "w8a16", "--also", "bf16", "--also", engine)
    result = run("summarize", chatter, *words, "--json-file", tmp_path / "a.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    names = ["fp32", "huggingface", "w8a16", "bf16", "engine"]
    assert [side["name"] for side in found["sides"]] == names
    assert found["agreement"]["same_tokens"] == 3  # of the first and the reference
    assert {delta["delta"] for delta in found["deltas"]} == {0.0}
    refused = run("answers", engine, "--data", asked, "--also", "w4a16")
    assert refused.exit_code == 2
    assert "an engine has one precision" in refused.stderr
    alone = record("summarize", engine, "--data", asked, "--max-new-tokens", 12)["sides"][0]
    for place in (2, 4):  # quantized on load, and by the build
        assert found["sides"][place]["metrics"] == alone["metrics"]
    lines = result.stdout.splitlines()
    (title,) = [n for n, line in enumerate(lines) if line.endswith("F1, 0 to 100, and seconds")]
    assert lines[title + 1].split() == ["precision", *KINDS, "seconds"]
    table = [line.split() for line in lines[title + 2 : title + 7]]
    assert [row[0] for row in table] == names
    assert [row[1] for row in table] == ["fp32", "fp32", "w8a16", "bf16", "w8a16"]
    assert [float(row[-1]) for row in table] == [round(side["seconds"], 2) for side in found["sides"]]
    rouge = [[float(x) for x in row[2:6]] for row in table]
    assert rouge == [
        [pytest.approx(side["metrics"][kind], rel=1e-2) for kind in KINDS] for side in found["sides"]
    ]


def test_names_of_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(first: SideSpec, *also: object) -> list[str | None]:
        return [one.name for one in specs_with(first, [str(one) for one in also])]

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "new.yaml").write_text("scheme: w8a16\n")
    spec = SideSpec("models/llama")
    assert names(spec, "fp16", "a/new.yaml", "b/x", "c/x") == ["llama", "fp16", "new.yaml", "b/x", "c/x"]
    engine = build(POCKET, tmp_path / "engine", device="cpu", max_seq_len=64, proof=False)
    first, other, own = specs_with(spec.replace(max_seq_len=128), ["a", str(engine)])
    assert (first.max_seq_len, other.max_seq_len, own.max_seq_len) == (
        128,
        128,
        None,
    )  # an engine has a limit
    (tmp_path / "w8a16").mkdir()
    (_, folder) = specs_with(spec, [str(tmp_path / "w8a16")])
    assert (folder.path, folder.quant) == (str(tmp_path / "w8a16"), "none")  # a folder is a path
    for twice in (["fp16", "fp16"], ["models/llama"]):
        with pytest.raises(ConfigError, match="twice"):
            names(spec, *twice)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rptq-w8a8", "needs calibration"),
        ("none.yaml", "the `also` file cannot be read"),
        ("w4a4.yml", "also"),
    ],
)
def test_a_precision_that_no_load_gives_is_refused_before_any_side_is_measured(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        specs_with(SideSpec("models/llama"), ["fp16", given])
    assert refused.value.field == "also"
    assert "quant" not in refused.value.what


def test_the_pocket_model_sums_up(tmp_path: Path) -> None:
    heldout = POCKET.parents[1] / "recipes" / "heldout.jsonl"
    chosen = ("--where", "task=summary", "--where", "language=zh", "--limit", 2)
    words = ("--data", heldout, *chosen, "--against", f"hf:{POCKET}")
    engine = build(POCKET, tmp_path / "engine", device="cpu", max_seq_len=256)
    found = record("summarize", engine, *words, "--max-new-tokens", 60)
    assert found["sides"][0]["metrics"]["rougeL"] == pytest.approx(100)
    assert found["agreement"]["same_tokens"] == 2


def test_a_plain_prompt_and_a_template_of_ones_own(golden: Path, data: Path, tmp_path: Path) -> None:
    model = golden / "llama_aidreams260K" / "hf"
    rows = tmp_path / "rows.jsonl"
    words = ("--data", data / "text" / "cnn_dailymail_article.jsonl", "--max-new-tokens", 8, "--items", rows)
    assert run("summarize", model, *words).exit_code == 0
    assert json.loads(rows.read_text())["prompt"].endswith("\n\nTL;DR:")
    assert run("summarize", model, *words, "--template", "News: {article} So:").exit_code == 0
    reported = json.loads(rows.read_text())
    assert reported["prompt"].startswith("News: (CNN)James")
    assert reported["cut_tokens"] > 0


def test_another_engine_and_a_limit_that_is_passed(
    llama: Path, other_llama: Path, ids: Path, tmp_path: Path
) -> None:
    engine = build(llama, tmp_path / "engine", device="cpu", max_batch_size=2, max_seq_len=64)
    words = ("perplexity", engine, "--data", ids)
    assert record(*words, "--against", llama, "--max-delta", 1e-3)["settings"]["window"] == 64
    found = record(*words, "--against", other_llama, code=1)
    assert found["verdict"] == "beyond"
    assert abs(found["deltas"][0]["delta"]) > 1
    assert record(*words, "--against", other_llama, "--max-delta", "perplexity=1e9")["verdict"] == "within"


def test_json_goes_to_a_file_beside_the_tables(llama: Path, ids: Path, tmp_path: Path) -> None:
    result = run("perplexity", llama, "--data", ids, "--json-file", tmp_path / "new" / "a.json")
    assert result.exit_code == 0
    assert "152 tokens" in result.stdout
    kept = json.loads((tmp_path / "new" / "a.json").read_text())
    assert kept["verb"] == "perplexity"
    assert kept["data"]["sha256"]
    assert kept["machine"]["torch"] == torch.__version__


def test_progress_is_a_bar_on_a_terminal_and_gone_before_the_tables(
    llama: Path, ids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr("ingot.cli.terminal.step_list.stderr", lambda: console)
    result = run("perplexity", llama, "--data", ids)
    assert result.exit_code == 0
    assert "ingot" in shown.getvalue()
    assert "3/3" in shown.getvalue()
    assert "3/3" not in result.stdout


def test_progress_counts_every_window_of_both_sides(llama: Path, ids: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    spec = SideSpec(str(llama), device="cpu")
    reading = WindowSettings(window=64, stride=32)
    other = spec.replace(name="other")
    perplexity(spec, other, read_data(ids), limits_for("perplexity"), reading, lambda *now: seen.append(now))
    assert {total for _, _, total in seen} == {5}
    for name in ("ingot", "other"):
        assert [done for what, done, _ in seen if what == name] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("perplexity", "MODEL", "--data", "none.jsonl"), "cannot be read"),
        (("perplexity", "MODEL", "--data", "IDS", "--max-delta", "1"), "--against"),
        (("perplexity", "MODEL", "--data", "IDS", "--window", "500"), "larger than the context"),
        (("perplexity", "MODEL", "--data", "IDS", "--window", "8", "--stride", "9"), "stride"),
        (("perplexity", "MODEL", "--data", "IDS", "--dtype", "fp8"), "fp8"),
        (("perplexity", "MODEL", "--data", "IDS", "--where", "x"), "FIELD=VALUE"),
        (("perplexity", "MODEL", "--data", "IDS", "--items", "-"), "--items"),
        (("perplexity", "MODEL", "--data", "IDS", "--against", "MODEL", "--max-delta", "x"), "--max-delta"),
        (("perplexity", "MODEL", "--data", "IDS", "--against", "hf:"), "hf:"),
        (("perplexity", "no/such/model", "--data", "IDS"), "no"),
        (("divergence", "MODEL", "--data", "IDS"), "--against"),
        (("summarize", "MODEL", "--data", "IDS"), "no question"),
        (("answers", "MODEL", "--data", "ASKED", "--max-new-tokens", "8"), "tokenizer"),
        (("summarize", "CHATTER", "--data", "ASKED", "--template", "x"), "{article}"),
        (("summarize", "CHATTER", "--data", "ASKED", "--lang", "fr"), "fr"),
        (("summarize", "CHATTER", "--data", "ASKED", "--system", "x", "--no-chat"), "--no-chat"),
        (("answers", "CHATTER", "--data", "ASKED", "--also", "no/such"), "no/such"),
        (("answers", "CHATTER", "--data", "ASKED", "--also", "fp16", "--also", "fp16"), "twice"),
        (("answers", "PLAIN", "--data", "ASKED", "--system", "x"), "no chat template for a system message"),
        (("summarize", "CHATTER", "--data", "ASKED", "--max-new-tokens", "256"), "no room"),
        (("summarize", "CHATTER", "--data", "ASKED", "--max-new-tokens", "255"), "no item fits"),
    ],
)
def test_misuse_exits_with_2_and_says_why(
    words: tuple[str, ...],
    says: str,
    llama: Path,
    chatter: Path,
    plain: Path,
    ids: Path,
    asked: Path,
) -> None:
    paths = {
        "MODEL": llama,
        "IDS": ids,
        "ASKED": asked,
        "CHATTER": chatter,
        "PLAIN": plain,
    }
    result = run(*(paths.get(word, word) for word in words))
    assert result.exit_code == 2
    assert says in result.stderr


def test_bad_lines_exit_with_2_unless_skipped(llama: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"token_ids": random_ids(9)}, {"token_ids": []})
    result = run("perplexity", llama, "--data", path)
    assert result.exit_code == 2
    assert "line 2" in result.stderr
    assert record("perplexity", llama, "--data", path, "--skip-bad")["data"]["bad_lines"] == [2]


def test_models_of_other_tokens_are_not_compared(chatter: Path, golden: Path, asked: Path) -> None:
    other = golden / "llama_aidreams260K" / "hf"
    result = run("answers", chatter, "--data", asked, "--against", other, "--no-chat")
    assert result.exit_code == 2
    assert "different tokenizers" in result.stderr


def test_huggingface_reads_no_engine_and_says_when_it_is_missing(
    llama: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(llama, tmp_path / "engine", device="cpu")
    result = run("perplexity", engine, "--data", ids, "--against", "hf")
    assert result.exit_code == 2
    assert "hf:CHECKPOINT" in result.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("perplexity", llama, "--data", ids, "--against", "hf")
    assert result.exit_code == 2
    assert "pip install transformers" in result.stderr


def test_answers_of_huggingface_end_at_end_tokens(llama: Path) -> None:
    with open_side(SideSpec(str(llama), kind="hf", device="cpu")) as side:
        (free,) = side.generate([[3, 4, 5]], 6, [], [])
        stop = free.token_ids[3]
        first = free.token_ids.index(stop)
        (ended,) = side.generate([[3, 4, 5]], 6, [stop], [])
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:first], "stop")
    assert free.finish_reason == "length"


def test_qwen_v1_is_compared_up_to_its_training_length(chatter: Path) -> None:
    assert longest(SideSpec(str(chatter), kind="hf")) == 256


def test_bf16_beside_fp32_on_a_cpu(tmp_path: Path, llama: Path, ids: Path) -> None:
    dtypes = ("--dtype", "bf16", "--against-dtype", "fp32")
    limits = ("--max-delta", 1, "--max-delta", "top1_disagreement=100")
    found = record("divergence", llama, "--data", ids, "--against", "hf", *dtypes, *limits)
    assert [side["facts"]["dtype"] for side in found["sides"]] == ["bf16", "fp32"]
    assert 0 < found["divergence"]["kl_mean"] < 0.1


def test_gpt2_without_rotary_positions(tmp_path: Path, ids: Path) -> None:
    save_model(tiny_config("gpt2"), tmp_path / "gpt2", seed=1)
    found = record("perplexity", tmp_path / "gpt2", "--data", ids, "--against", "hf", "--max-delta", 1e-3)
    assert found["verdict"] == "within"
