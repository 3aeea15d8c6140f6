"""What verbs say of engines and files of pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ingot import LLM, build
from ingot.building.tuner import tune_model
from ingot.building.tuner.tile_search import encoder_steps
from ingot.building.tuner.tuned_steps import Steps
from ingot.cli.main import app
from ingot.engine.assembly import model_of
from ingot.engine.manifest import Manifest
from ingot.llm.explain_prompt import explain_request
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.latency import Latency
from ingot.measure.bench.profile import profile_session
from ingot.measure.bench.profile.profile_session import Profile, profile_side
from ingot.measure.bench.sweep.sweep_line import measure_line
from ingot.measure.bench.sweep.sweep_session import Sweep, run_sweep
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.side_spec import SideSpec
from tests.vision.conftest import COLOUR, POCKET, image
from tests.vision.files import TINY, write_files

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(POCKET, tmp_path_factory.mktemp("pictures") / "engine", device="cpu")


def ingot(*args: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(arg) for arg in args])
    return found.exit_code, " ".join(found.output.split())


@pytest.mark.parametrize("of", ["files", "engine"])
def test_plan_and_inspect(of: str, engine: Path) -> None:
    path = POCKET if of == "files" else engine
    code, text = ingot("plan", path)
    assert (code, "embeddings of 24576 positions" in text) == (0, True), text
    code, text = ingot("inspect", path)
    assert code == 0, text
    for fact in ("minigpt4 (a model of pictures and text, prefix)", "3 x 112 x 112", "chat format minigpt4"):
        assert fact in text


def test_a_proof_says_what_it_is_of(engine: Path) -> None:
    code, text = ingot("verify", engine, "--source", POCKET)
    assert (code, "source 150 tensors compared with the checkpoint" in text) == (0, True), text
    assert "the proof says nothing" not in text
    assert "pixels 0." in text


def test_align_reads_the_files(engine: Path) -> None:
    code, text = ingot("align", engine, "--reference", POCKET, "--device", "cpu", "--steps", 1)
    assert (code, text.endswith("aligned")) == (0, True), text
    for stage in ("pixels", "encoder.vit.patch_embedding", "encoder.ln_vision", "encoder.projector"):
        assert stage in text


def test_explain_shows_where_a_picture_stands(engine: Path, scene: Path, tmp_path: Path) -> None:
    """Nothing is decoded: the file need not be a picture, nor be there."""
    parts = [{"type": "image", "image": "absent.png"}, {"type": "text", "text": COLOUR}]
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "user", "content": parts}]))
    code, text = ingot("explain", engine, "--messages", file)
    assert code == 0, text
    assert text.count("0 <ImageHere> special") == 16
    assert f"Human: <Img><ImageHere></Img> {COLOUR}###Assistant: " in text
    assert "'###'" in text.replace('"', "'")


def test_explain_has_the_ids_that_run(llm: LLM, urls: list[str]) -> None:
    talk = [{"role": "user", "content": [*map(image, urls), {"type": "text", "text": COLOUR}]}]
    found = explain_request(llm.engine.manifest, llm.engine.text, talk)
    assert [token.id for token in found.tokens] == llm.prompt_ids(talk)
    assert found.num_prompt_tokens == len(found.tokens)
    assert (found.prompt_text or "").count("<ImageHere>") == 2
    parts = Prompt(["What is ", Input(torch.zeros(3, 112, 112)), "?"])
    found = explain_request(llm.engine.manifest, llm.engine.text, parts)
    assert [token.id for token in found.tokens] == llm.prompt_ids(parts)


def test_taps_see_every_part_of_the_encoder(llm: LLM, urls: list[str]) -> None:
    """Of a picture that is encoded; one that is in the cache is not encoded again."""
    talk = [{"role": "user", "content": [image(urls[1]), {"type": "text", "text": COLOUR}]}]
    names = ("encoder.vit.layers.0", "encoder.ln_vision", "encoder.qformer.layers.3", "encoder.projector")
    rows = llm.encode_image(urls[1])
    llm.executor.scheduler.encoders.clear()  # type: ignore[union-attr]
    expected = llm.chat(talk, max_new_tokens=3).token_ids
    llm.executor.scheduler.encoders.clear()  # type: ignore[union-attr]
    with llm.tap(*names) as seen:
        assert llm.chat(talk, max_new_tokens=3).token_ids == expected
    assert {name: tuple(seen[name].shape) for name in names} == dict(
        zip(names, ((65, 176), (65, 176), (16, 128), (16, 256)), strict=True)
    )
    torch.testing.assert_close(seen["encoder.projector"].float(), rows, rtol=0, atol=1e-5)
    with llm.tap(*names, "layers.0") as seen:
        llm.chat(talk, max_new_tokens=1)
    assert set(seen) == {"layers.0"}


class NoTimer:
    """Runs nothing and takes no time."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        return lambda: 2.0


def test_tune_measures_an_encoding_of_1_2_4_and_8_pictures(tmp_path: Path) -> None:
    small = build(write_files(tmp_path).file, tmp_path / "engine", device="cpu", proof=False)
    manifest = Manifest.read(small)
    limits = manifest.build.replace(max_batch_size=8, max_seq_len=16)
    steps = Steps(model_of(manifest), limits, CPU)
    kinds = encoder_steps(manifest.model, limits)
    with torch.inference_mode():
        for kind, pictures in zip(kinds, (1, 2, 4, 8), strict=True):
            (encoded,) = steps.computed(kind)
            assert torch.equal(steps.step(kind)(), encoded)
            assert encoded.shape == (pictures * TINY.queries, manifest.model.hidden_size)
            assert encoded.isfinite().all()
    found = tune_model(model_of(manifest), limits, CPU, ops=["layer_norm"], timer=NoTimer())  # type: ignore[arg-type]
    keys = {choice.place.key for choice in found.choices}
    assert {int(key.rpartition("_h")[2]) for key in keys} == {TINY.width, TINY.qformer_width}
    assert not found.dropped


def test_tune_on_a_cpu_says_where_to_run_it(engine: Path) -> None:
    code, text = ingot("tune", engine, "--device", "cpu")
    assert (code, "tuning needs the GPU that will run the engine" in text) == (1, True), text


@pytest.mark.parametrize(
    "words",
    [("perplexity",), ("divergence", "--against", POCKET), ("answers",), ("summarize",)],
    ids=lambda words: str(words[0]),
)
def test_an_evaluation_of_text_refuses_pictures(
    words: tuple[object, ...], scene: Path, tmp_path: Path
) -> None:
    """It would read the caption alone, as if there were no picture."""
    data = tmp_path / "captions.jsonl"
    data.write_text(json.dumps({"image": str(scene), "text": "An orange square."}) + "\n")
    verb, *others = words
    code, text = ingot("eval", verb, POCKET, "--data", data, *others, "--device", "cpu")
    assert (code, "a picture, which only `ingot eval caption` reads" in text) == (2, True), text
    parts = [{"type": "text", "text": "Hi"}]
    data.write_text(json.dumps({"messages": [{"role": "user", "content": parts}], "answer": "a"}) + "\n")
    code, text = ingot("eval", verb, POCKET, "--data", data, *others, "--device", "cpu")
    assert (code, "only caption reads pictures" in text) == (2, True), text


def test_sweep_measures_texts_in_the_schemes_of_parts(tmp_path: Path) -> None:
    wanted = Sweep(
        SideSpec(path=str(write_files(tmp_path).file), device="cpu"),
        quants=("vit=w8a8,llm=w8a16",),
        batches=(1,),
        shape=Latency((1,), prompt_tokens=4, new_tokens=2, repeats=1),
    )
    (line,) = run_sweep(wanted, tmp_path / "sweep", measure=measure_line)["lines"]
    assert line["quant"] == "vit=w8a8,llm=w8a16"
    assert line["points"][0]["figures"]["output_tokens_per_s"] > 0


@pytest.mark.parametrize("step", ["encode", "prompt"])
def test_profile_shows_the_steps_of_pictures(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are encoded in a step of their own, and their rows stand in a prompt."""
    made_up = Ceiling(read_gb_s=10.0, matmul_tflop_s=1.0, dtype="fp32", read_bytes=1, matmul_size=1)
    monkeypatch.setattr(profile_session, "measure_ceiling", lambda device, dtype: made_up)
    files = write_files(tmp_path).file
    with IngotSide(SideSpec(path=str(files), device="cpu", max_batch_size=2, max_seq_len=64)) as side:
        result, _ = profile_side(side, Profile(step, 2, repeats=1))
    names = {module["module"] for module in result["kernels"]["modules"]}
    assert result["inputs" if step == "encode" else "requests"] == 2
    assert ("encoder qkv" in names) == (step == "encode")
    assert ("sampling" in names) == (step == "prompt")


@pytest.mark.stays("latency")
@pytest.mark.parametrize("verb", ["latency", "throughput"])
def test_bench_measures_texts(verb: str, engine: Path) -> None:
    sizes = ("--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1, "--max-seq-len", 64)
    own = ("--batch", 1) if verb == "latency" else ("--fixed", 1)
    code, text = ingot("bench", verb, engine, *sizes, *own, "--device", "cpu", "--json")
    assert code == 0, text


def test_a_difference_of_the_encoder_is_named(engine: Path, tmp_path: Path) -> None:
    other = build(POCKET, tmp_path / "other", quant="vit=w8a16", device="cpu", proof=False)
    code, text = ingot("diff", engine, other)
    assert (code, "quant.layers.encoder.vit.*: (absent) -> w8a16" in text) == (1, True), text


def test_a_picture_is_no_recording(engine: Path, scene: Path) -> None:
    code, text = ingot("transcribe", engine, scene)
    assert (code, "this engine does not take speech" in text) == (2, True), text
