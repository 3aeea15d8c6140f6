"""``ingot eval caption``: folders and manifests of pictures, scores against captions or another engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rouge_score.rouge_scorer import RougeScorer

from ingot import LLM, build
from ingot.errors import ConfigError
from ingot.image.picture_folder import picture_records
from ingot.measure.evaluate.data_file import read_data
from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene
from tests.e2e.terminal import ingot

POCKET = Path(__file__).parents[2] / "models/pocket-vision/minigpt4.yaml"
COUNT = 3
SHORT = ("--max-new-tokens", "12")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    for number, picture in enumerate(draw([held_out_scene(number) for number in range(COUNT)])):
        (folder / f"scene-{number}.png").write_bytes(png(picture))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(POCKET, tmp_path_factory.mktemp("engine") / "pocket", device="cpu", proof=False)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of it, which says something else."""
    folder = tmp_path_factory.mktemp("cut") / "pocket"
    return build(POCKET, folder, device="cpu", proof=False, layers="0:1", max_seq_len=256)


@pytest.fixture(scope="module")
def texts(engine: Path, scenes: Path) -> list[str]:
    """What the model says of the scenes."""
    said = {"type": "text", "text": "Describe this image."}
    talks = [
        [{"role": "user", "content": [{"type": "image", "image": str(file)}, said]}]
        for file in sorted(scenes.glob("*.png"))
    ]
    with LLM(engine, "cpu") as llm:
        return [(one.text or "").strip() for one in llm.chat(talks, temperature=0.0, max_new_tokens=12)]


def evaluated(*args: object) -> tuple[int, dict[str, Any]]:
    found = ingot("eval", "caption", *args, "--device", "cpu", "--json")
    assert found.exit_code in (0, 1), found.stderr
    return found.exit_code, json.loads(found.stdout)


def refused(*args: object) -> str:
    found = ingot("eval", "caption", *args, "--device", "cpu")
    assert found.exit_code == 2, found.stdout
    return " ".join(found.stderr.split())


def aligned(folder: Path, scenes: Path, captions: list[str]) -> Path:
    """The layout of cc_sbu_align; pictures have the endings of more than one format."""
    (folder / "image").mkdir(parents=True)
    listed = []
    for number, (file, caption) in enumerate(zip(sorted(scenes.glob("*.png")), captions, strict=True)):
        shutil.copy(file, folder / "image" / f"{number}{'.png' if number else '.jpg'}")
        listed.append({"image_id": str(number) if number else number, "caption": caption})
    (folder / "filter_cap.json").write_text(json.dumps({"annotations": listed}))
    return folder


def test_captions_of_a_folder_are_scored(
    engine: Path, scenes: Path, texts: list[str], tmp_path: Path
) -> None:
    wrong = [texts[0], f"{texts[1]} nothing", "a b c"]
    rows = tmp_path / "rows.jsonl"
    code, record = evaluated(
        engine, "--data", aligned(tmp_path / "a", scenes, wrong), *SHORT, "--items", rows
    )
    assert (code, record["verdict"], record["counts"]) == (0, None, {"pictures": COUNT})
    (side,) = record["sides"]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for kind in ("rouge1", "rouge2", "rougeL"):
        found = [scorer.score(a, b)[kind] for a, b in zip(wrong, texts, strict=True)]
        assert side["metrics"][kind] == pytest.approx(100 * sum(one.fmeasure for one in found) / COUNT)
        assert side["metrics"][f"{kind}_recall"] == pytest.approx(100 * sum(o.recall for o in found) / COUNT)
    assert side["pictures"] == COUNT
    assert side["pictures_per_s"] == pytest.approx(COUNT / side["seconds"], rel=0.1)
    reported = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["ingot"]["text"] for row in reported] == texts
    assert [row["image"] for row in reported] == ["image/0.jpg", "image/1.png", "image/2.png"]
    assert [row["references"] for row in reported] == [[one] for one in wrong]
    assert reported[0]["ingot"]["scores"]["rougeL"] == 100.0


def test_a_folder_without_captions_beside_another_engine(
    engine: Path, cut: Path, scenes: Path, tmp_path: Path
) -> None:
    words = ("--data", scenes, *SHORT, "--limit", "2")
    code, record = evaluated(engine, *words, "--against", engine)
    assert (code, record["verdict"]) == (0, "within")
    assert record["agreement"] == {"answers": 2, "same_tokens": 2, "same_text": 2, "different_text": 0}
    assert record["sides"][0]["metrics"]["rouge1"] == 100.0
    assert record["sides"][1]["metrics"] == {}
    assert record["sides"][1]["pictures"] == 2

    rows = tmp_path / "rows.jsonl"
    code, record = evaluated(engine, *words, "--against", cut, "--items", rows)
    assert (code, record["verdict"]) == (1, "beyond")
    reported = [json.loads(line) for line in rows.read_text().splitlines()]
    score = RougeScorer(["rougeL"]).score
    found = [score(row["against"]["text"], row["ingot"]["text"])["rougeL"].fmeasure for row in reported]
    (delta,) = record["deltas"]
    assert (delta["metric"], delta["limit"]) == ("rougeL_distance", 10.0)
    assert delta["delta"] == pytest.approx(100 - 100 * sum(found) / 2)


def manifest(folder: Path, scenes: Path, *captions: Any) -> Path:
    """One scene a line; a dict is the record's rest."""
    lines = []
    for file, caption in zip(sorted(scenes.glob("*.png")), captions, strict=False):
        shutil.copy(file, folder)
        lines.append({"image": file.name} | (caption if isinstance(caption, dict) else {"text": caption}))
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_another_side_that_differs(
    engine: Path, cut: Path, scenes: Path, texts: list[str], tmp_path: Path
) -> None:
    """Both are scored against the captions; a question of one side's own would not be the same evaluation."""
    data = manifest(tmp_path, scenes, {"captions": ["nothing of it", texts[0]]}, {"caption": texts[1]})
    words = (engine, "--data", data, "--against", cut, *SHORT)
    code, record = evaluated(*words)
    assert (code, record["verdict"]) == (1, "beyond")
    ours, theirs = (side["metrics"]["rougeL"] for side in record["sides"])
    assert ours == 100.0 > theirs
    assert [one["metric"] for one in record["deltas"]] == ["rouge1", "rouge2", "rougeL"]
    assert record["deltas"][2]["delta"] == pytest.approx(ours - theirs)
    assert record["deltas"][2]["stderr"] is not None
    assert record["agreement"]["different_text"] == len(record["differing"]) == 2
    found = ingot("eval", "caption", *words, "--max-delta", "1000", "--device", "cpu")
    assert found.exit_code == 0
    for line in ("0 of 2 captions are the same", "captions that differ", "pictures/s", "2 pictures"):
        assert line in found.stdout


def test_the_question_and_the_length_are_those_of_flags(
    engine: Path, scenes: Path, texts: list[str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    data = manifest(tmp_path, scenes, "white")
    asked = ("--prompt", "How many shapes are there?", "--max-new-tokens", "2", "--items", rows)
    _, record = evaluated(engine, "--data", data, *asked)
    assert record["settings"]["prompt"] == "How many shapes are there?"
    reported = json.loads(rows.read_text())["ingot"]
    assert reported["tokens"] <= 2
    assert reported["text"]
    assert not texts[0].startswith(reported["text"])
    assert record["sides"][0]["output_tokens"] <= 2


def test_what_cannot_be_compared_is_refused(engine: Path, scenes: Path, tmp_path: Path) -> None:
    assert "there is nothing to compare the captions with" in refused(engine, "--data", scenes)
    assert "no class of MiniGPT-4" in refused(engine, "--data", scenes, "--against", "hf")
    chat = POCKET.parents[1] / "pocket-chat"
    assert "captions need a model of pictures" in refused(chat, "--data", scenes, "--against", engine)
    assert "captions need a model of pictures" in refused(engine, "--data", scenes, "--against", chat)
    data = manifest(tmp_path, scenes, "one", {}, "three")
    assert "1 of 3 without, the first is item 2" in refused(engine, "--data", data, "--against", engine)
    (tmp_path / "empty").mkdir()
    assert "the folder has no pictures" in refused(engine, "--data", tmp_path / "empty")


def test_bad_pictures_are_lines(engine: Path, scenes: Path, tmp_path: Path) -> None:
    data = manifest(tmp_path, scenes, "one", "two", "three")
    sorted(tmp_path.glob("*.png"))[1].write_bytes(b"GIF89a and no more")
    sorted(tmp_path.glob("*.png"))[2].unlink()
    reported = refused(engine, "--data", data)
    assert "2 lines" in reported
    assert "line 2:" in reported
    assert "cannot be read" in reported
    assert "there is no such picture" in reported
    _, record = evaluated(engine, "--data", data, "--skip-bad", "--max-new-tokens", "3")
    assert (record["counts"], record["data"]["bad_lines"]) == ({"pictures": 1}, [2, 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no captions"),
        ('{"annotations": [{"image_id": 3}]}', "holds no captions.*caption"),
        ('{"annotations": 3}', "holds no captions"),
        ("{", "holds no captions"),
        ('{"annotations": []}', "has no items"),
        ('{"annotations": [{"image_id": 3, "caption": 4}]}', "text is int"),
    ],
)
def test_files_of_captions_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "filter_cap.json").write_text(content)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read_data(tmp_path, of_folder=picture_records)


def test_pictures_of_a_folder_at_any_depth_and_what_is_none(tmp_path: Path) -> None:
    for name in ("b/x.PNG", "a.jpeg", "notes.txt", "c/d/e.webp", ".hidden.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    data = read_data(tmp_path, of_folder=picture_records)
    assert [item.image for item in data.items] == ["a.jpeg", "b/x.PNG", "c/d/e.webp"]
    before = data.facts()["sha256"]
    (tmp_path / "a.jpeg").write_bytes(b"another")
    assert data.facts()["sha256"] != before
