"""The recipe of the pocket picture model, in small: scenes and what is held out, exact answers, MiniGPT-4's
prompt and layout, and the model against the original implementation's arrays.
"""

from __future__ import annotations

import io
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM

from ingot.text.tokenizer.tokenizer import load_tokenizer
from recipes.vision import talk
from recipes.vision.batches import Plan, cell_labels, make_batch
from recipes.vision.draw import SceneArrays, draw, normalize, png
from recipes.vision.evaluate import HELD_OUT, Item, answer, checksum, held_out_items, record, summary
from recipes.vision.evaluate import Result as Answered
from recipes.vision.export import export, load_exported, read_shape, read_weights
from recipes.vision.model import MiniGPT4, Shape
from recipes.vision.scenes import (
    KINDS,
    PLACES,
    SIZE,
    Scene,
    Thing,
    held_out_scene,
    is_held_out,
    training_scene,
)
from recipes.vision.train import Helpers, TrainOptions, losses, rate_at
from recipes.vision.vocabulary import Vocabulary, learn

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "pocket-vision" / "llama"
TINY = Shape(
    image=SIZE,
    vit_width=32,
    vit_heads=2,
    vit_depth=1,
    queries=10,
    qformer_hidden=16,
    qformer_heads=2,
    qformer_layers=2,
    qformer_inner=24,
    hidden=32,
    heads=2,
    layers=1,
    inner=40,
)
GOLDEN = Shape(
    image=56,
    vit_width=64,
    vit_heads=4,
    vit_depth=3,
    queries=8,
    qformer_hidden=64,
    qformer_heads=4,
    qformer_layers=2,
    qformer_inner=160,
    hidden=128,
    heads=4,
    layers=2,
    inner=352,
    vocab=513,
)


def _thing(kind: str, colour: str, size: str, cell: int) -> Thing:
    across, down = cell % 3, cell // 3
    radius = 120 if size == "big" else 64
    middle = [(2 * at + 1) * SIZE * 8 // 6 for at in (across, down)]
    return Thing(kind, colour, size, cell, *middle, radius, radius, 0, (200, 30, 30))


def _scene(*things: Thing) -> Scene:
    return Scene(things, "grey", (128, 128, 128), (0, 0), 0, 0)


THREE = _scene(
    _thing("circle", "red", "big", 3), _thing("7", "blue", "small", 4), _thing("circle", "blue", "small", 8)
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER)


@pytest.fixture(scope="module")
def tiny() -> MiniGPT4:
    torch.manual_seed(3)
    model = MiniGPT4(TINY).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def test_training_never_sees_a_held_out_combination_and_held_out_scenes_have_one() -> None:
    rng = random.Random(4)
    trained = [training_scene(rng) for _ in range(400)]
    assert not any(scene.is_held_out for scene in trained)
    assert all(held_out_scene(number).is_held_out for number in range(60))
    assert held_out_scene(7) == held_out_scene(7) != held_out_scene(8)
    assert {len(scene.things) for scene in trained} == {1, 2, 3, 4}
    assert {thing.kind for scene in trained for thing in scene.things} == set(KINDS)
    assert 40 < sum(is_held_out(kind, "red", cell) for kind in KINDS * 8 for cell in range(9)) < 110


def test_things_stand_in_reading_order_in_different_cells() -> None:
    rng = random.Random(5)
    for _ in range(100):
        cells = [thing.cell for thing in training_scene(rng).things]
        assert all(one < other for one, other in pairwise(cells))


def test_held_out_pictures_are_the_same_bits_as_when_the_file_was_written() -> None:
    records = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    assert len(records) == 300
    some = records[:12]
    pictures = draw([held_out_scene(entry["scene"]) for entry in some])
    assert pictures.shape == (12, 3, SIZE, SIZE)
    items = held_out_items(entry["scene"] for entry in some)
    assert [record(item, picture) for item, picture in zip(items, pictures, strict=True)] == some


def test_a_picture_is_the_same_alone_and_among_others() -> None:
    scenes = [held_out_scene(number) for number in range(4)]
    assert torch.equal(draw(scenes)[2:3], draw([scenes[2]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_is_drawn_in_its_cell_and_nowhere_else(kind: str) -> None:
    picture = draw([_scene(_thing(kind, "red", "big", 5))])[0]
    painted = (picture != 128).any(0)
    rows, columns = torch.nonzero(painted, as_tuple=True)
    assert 100 < len(rows) < 900
    assert rows.min() > SIZE // 3 - 2
    assert rows.max() < 2 * SIZE // 3 + 2
    assert columns.min() > 2 * SIZE // 3 - 2
    inside = draw([_scene(_thing(kind, "red", "small", 5))])[0]
    assert int((inside != 128).any(0).sum()) < len(rows) / 2


def test_all_shapes_look_different() -> None:
    masks = draw([_scene(_thing(kind, "red", "big", 4)) for kind in KINDS])
    assert len({checksum(mask) for mask in masks}) == len(KINDS)


def test_a_png_file_has_the_pixels() -> None:
    picture = draw([held_out_scene(3)])[0]
    opened = Image.open(io.BytesIO(png(picture)))
    assert opened.mode == "RGB"
    assert np.array_equal(np.asarray(opened), picture.permute(1, 2, 0).numpy())


def test_pixels_are_normalized_as_clip_does() -> None:
    levels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    found = normalize(levels)[0, :, 0]
    assert found[:, 0].tolist() == pytest.approx([-1.7923, -1.7521, -1.4802], abs=1e-4)
    assert found[:, 1].tolist() == pytest.approx([1.9303, 2.0749, 2.1459], abs=1e-4)


def test_answers_are_exact() -> None:
    asked: dict[str, set[str]] = {}
    rng = random.Random(1)
    for _ in range(1500):
        found = talk.ask(THREE, rng)
        asked.setdefault(found.question, set()).add(found.answer)
    assert all(len(answers) == 1 for answers in asked.values())
    answers = {question: next(iter(found)) for question, found in asked.items()}
    assert answers["What is on the left?"] == "a big red circle"
    assert answers["What is at the bottom right?"] == "a small blue circle"
    assert answers["What is at the top?"] == "nothing"
    assert answers["What colour is the 7?"] == "blue"
    assert answers["Where is the 7?"] == "in the middle"
    assert answers["Is the 7 big or small?"] == "small"
    assert answers["Which digit is it?"] == "7"
    assert answers["How many objects are there?"] == "3"
    assert answers["How many blue objects are there?"] == "2"
    assert answers["How many circles are there?"] == "2"
    assert answers["How many crosses are there?"] == "0"
    assert answers["Is there a blue circle?"] == "yes"
    assert answers["Is there a red 7?"] == "no"
    assert answers["What colour is the background?"] == "grey"
    assert answers["Describe the picture."] == (
        "There is a big red circle on the left, a small blue 7 in the middle "
        "and a small blue circle at the bottom right."
    )
    # Two circles: no question may take "the circle" for one of them.
    assert not any("the circle" in question for question in answers)


def test_second_rounds_refer_to_the_first() -> None:
    rng = random.Random(2)
    pairs = [talk.conversation(THREE, rng, 2) for _ in range(400)]
    follows = {(first.question, second.question): second.answer for first, second in pairs}
    assert follows["Which digit is it?", "Where is it?"] == "in the middle"
    assert follows["Where is the 7?", "What colour is it?"] == "blue"
    places = {question: answer for (_, question), answer in follows.items() if question.startswith("And at")}
    assert places["And at the bottom right?"] == "a small blue circle"
    assert all(one.question != other.question or one.answer != other.answer for one, other in pairs)


def test_the_prompt_is_the_originals() -> None:
    rounds = [talk.Round("what", "What is it?", "a ring"), talk.Round("colour", "What colour is it?", "red")]
    before, after = talk.prompt(rounds)
    assert before + "<ImageHere>" + after == (
        "Give the following image: <Img>ImageContent</Img>. You will be able to see the image once I provide "
        "it to you. Please answer my questions.###Human: <Img><ImageHere></Img> What is it?###Assistant: "
        "a ring###Human: What colour is it?###Assistant: "
    )
    assert talk.prompt(rounds[:1], system=False) == ("###Human: <Img>", "</Img> What is it? ###Assistant: ")


def test_the_prompt_is_that_of_the_golden_conversation(golden: Path) -> None:
    first, second = json.loads((golden / "minigpt4" / "conversation.json").read_text())["rounds"]
    asked = talk.Round("describe", first["question"], first["answer_kept_in_conversation"])
    again = talk.Round("colour", second["question"], "")
    assert "<ImageHere>".join(talk.prompt([asked])) == first["prompt"]
    assert "<ImageHere>".join(talk.prompt([asked, again])) == second["prompt"]


def test_the_vocabulary_that_ships_is_the_learned_one_and_ingot_reads_it(vocabulary: Vocabulary) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    assert tokenizer is not None
    assert (vocabulary.size, vocabulary.begin, vocabulary.end) == (512, 1, 2)
    rounds = talk.conversation(held_out_scene(5), random.Random(1), 2)
    example, (before, after) = vocabulary.example(rounds), talk.prompt(rounds)
    assert tokenizer.encode(before) == example.before
    assert example.before[0] == vocabulary.begin
    assert tokenizer.encode(after)[1:] == example.after
    assert example.answer[-1] == vocabulary.end
    assert vocabulary.processor.decode(example.answer) == f"{rounds[-1].answer}###"
    assert vocabulary.text(example.answer) == rounds[-1].answer
    assert vocabulary.processor.decode(vocabulary.processor.encode("Ünheard, of?")) == "Ünheard, of?"


@pytest.mark.slow
def test_learning_the_vocabulary_gives_the_file_that_ships() -> None:
    assert learn() == (TOKENIZER / "tokenizer.model").read_bytes()


def test_a_batch_learns_the_answers_and_nothing_else(vocabulary: Vocabulary) -> None:
    plan = Plan(TOKENIZER, pictures=3, talks=3, system=0.5)
    batch = make_batch(plan, vocabulary, random.Random(2), TINY.queries)
    texts = set()
    for part in batch.parts:
        blank = torch.full((len(part.after), TINY.queries), -1)
        before = part.before.expand(len(part.after), -1)
        rows = torch.cat((before, blank, part.after), 1)
        places, length = part.positions, rows.shape[1]
        inner = places % length < length - 1
        # What is learned at a position is the row's next token; the last is </s>, which is cut off.
        following = rows.flatten()[(places + 1).clamp(max=rows.numel() - 1)]
        assert torch.equal(following[inner & (part.targets != 2)], part.targets[inner & (part.targets != 2)])
        assert int((part.targets == vocabulary.end).sum()) == len(part.after)
        for row in range(len(part.after)):
            texts.add(vocabulary.text(part.targets[places // length == row].tolist()))
    assert sum(len(part.after) for part in batch.parts) == 9
    assert len(texts) > 3
    assert not any("Human" in text or "?" in text for text in texts)


def test_labels_say_what_is_in_each_cell() -> None:
    labels = cell_labels(THREE)
    assert [index for index, label in enumerate(labels) if label != (0, 0, 0)] == [3, 4, 8]
    assert labels[4] == (1 + KINDS.index("7"), 5, 2)
    assert len(PLACES) == len(labels) == 9
    # Patches of 14 pixels: the fourth of eight lies in the middle third.
    assert Helpers(TINY).cells.view(8, 8)[3].tolist() == [3, 3, 3, 4, 4, 5, 5, 5]


def test_a_step_lowers_the_losses(vocabulary: Vocabulary) -> None:
    torch.manual_seed(0)
    model, helpers = MiniGPT4(TINY), Helpers(TINY)
    batch = make_batch(Plan(TOKENIZER, 1, 2), vocabulary, random.Random(1), TINY.queries)
    first = None
    for _ in range(3):
        parts = losses(model, helpers, batch, torch.device("cpu"))
        first = parts.detach() if first is None else first
        parts.sum().backward()
        for parameter in (*model.parameters(), *helpers.parameters()):
            assert parameter.grad is not None
            parameter.data -= 0.02 * parameter.grad
            parameter.grad = None
    assert (parts < first).all()


def test_the_rate_warms_up_and_falls() -> None:
    options = TrainOptions(peak_rate=1.0, warmup=0.1)
    assert rate_at(0.05, options) == pytest.approx(0.5)
    assert rate_at(0.1, options) == pytest.approx(1.0)
    assert rate_at(0.55, options) == pytest.approx(0.505)
    assert rate_at(1.0, options) == pytest.approx(0.01)


def test_answers_are_the_same_in_a_batch_and_alone(tiny: MiniGPT4, vocabulary: Vocabulary) -> None:
    items = held_out_items(range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.vision.evaluate.MOST", 6)
        together = answer(tiny, vocabulary, items, True)
        assert together == [answer(tiny, vocabulary, [item], True)[0] for item in items]
        example = vocabulary.example(items[1].rounds)
        embeds = tiny.encode(normalize(draw([held_out_scene(1)])))
        ids: list[int] = []
        while len(ids) < 6 and vocabulary.end not in ids:
            after = torch.tensor([[*example.after, *ids]])
            with torch.no_grad():
                ids.append(int(tiny.logits(torch.tensor([example.before]), embeds, after)[0, -1].argmax()))
    assert together[1] == vocabulary.text(ids)


def test_a_summary_counts_by_task_and_round() -> None:
    one = Item(0, (talk.Round("what", "?", "a ring"),))
    two = Item(1, (*one.rounds, talk.Round("count", "?", "2")))
    found = summary([Answered(one, "a ring"), Answered(two, "3"), Answered(two, " 2 ")])
    assert found == {"all": 66.67, "second round": 50.0, "what": 100.0, "count": 50.0}


def test_an_export_has_the_official_layout_and_loads_again(tiny: MiniGPT4, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    size = export(tiny.state_dict(), TINY, TOKENIZER, first)
    export(tiny.state_dict(), TINY, TOKENIZER, second)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert size == sum((first / name).stat().st_size for name in files)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    vit = torch.load(first / "eva_vit_g.pth", weights_only=True)
    assert {"cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.attn.q_bias"} <= set(vit)
    assert vit["blocks.0.mlp.fc1.weight"].shape == (139, 32)
    assert vit["blocks.0.attn.qkv.weight"].dtype == torch.float16
    bridge = torch.load(first / "blip2_pretrained_flant5xxl.pth", weights_only=True)["model"]
    layer = "Qformer.bert.encoder.layer."
    assert {"query_tokens", "ln_vision.bias", "Qformer.bert.embeddings.LayerNorm.weight"} <= set(bridge)
    assert f"{layer}0.crossattention.self.key.weight" in bridge
    assert f"{layer}1.crossattention.self.key.weight" not in bridge
    projector = torch.load(first / "pretrained_minigpt4.pth", weights_only=True)["model"]
    assert sorted(projector) == ["llama_proj.bias", "llama_proj.weight"]
    assert "vit_depth: 1\n" in (first / "minigpt4.yaml").read_text()
    assert read_shape(first) == TINY
    loaded = load_exported(first).state_dict()
    assert all(torch.equal(loaded[name], value.half().float()) for name, value in tiny.state_dict().items())


def test_the_exported_llama_is_hugging_faces(tiny: MiniGPT4, tmp_path: Path) -> None:
    export(tiny.state_dict(), TINY, TOKENIZER, tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = torch.tensor([[1, *range(300, 340)]])
    ours = load_exported(tmp_path)
    with torch.no_grad():
        found = ours.head(ours.hidden(ours.embed(ids)))
        assert float((found - theirs(ids).logits).abs().max()) < 1e-4


def test_a_folder_that_is_too_large_is_refused(
    tiny: MiniGPT4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.vision.export.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000"):
        export(tiny.state_dict(), TINY, TOKENIZER, tmp_path)


def test_the_model_that_ships_stays_small() -> None:
    assert sum(parameter.numel() for parameter in MiniGPT4(Shape()).parameters()) == 5_572_784


def test_every_stage_is_the_original_implementations(golden: Path) -> None:
    folder = golden / "minigpt4"
    model = MiniGPT4(GOLDEN).eval()
    skipped = model.load_state_dict(read_weights(folder / "weight"), strict=False)
    assert not skipped.missing_keys
    unused = ("visual_encoder.blocks.3.", "visual_encoder.norm.", "visual_encoder.head.", "t5_proj.")
    rest = [name for name in skipped.unexpected_keys if not name.startswith(unused)]
    assert all(name.endswith(("inv_freq", "position_ids")) for name in rest)
    model.llama_model["model"].rotary.rounded = True
    arrays = np.load(folder / "vision.npz")
    talked = np.load(folder / "conversation.npz")
    with torch.no_grad():
        pixels = torch.from_numpy(arrays["pixel_values"])
        vision = model.vision(pixels)
        embeds = model.encode(pixels)
        found = {
            "vit_out": model.visual_encoder(pixels),
            "ln_vision_out": vision,
            "qformer_query_out": model.ask_queries(vision),
            "image_embeds": embeds,
        }
        before, after = (torch.from_numpy(talked[f"r0_{name}_ids"])[None] for name in ("before", "after"))
        logits = model.logits(before, embeds[:1], after)[0]
    for name, value in found.items():
        assert float((value - torch.from_numpy(arrays[name])).abs().max()) <= 1e-4, name
    assert float((logits - torch.from_numpy(talked["r0_logits"])).abs().max()) <= 1e-4


def test_scenes_travel_as_arrays() -> None:
    arrays = SceneArrays.of([THREE])
    assert arrays.things[:, 2].tolist() == sorted(arrays.things[:, 2].tolist())
    assert torch.equal(draw(arrays), draw([THREE]))
    assert checksum(draw([THREE])[0]) != checksum(draw([held_out_scene(0)])[0])
