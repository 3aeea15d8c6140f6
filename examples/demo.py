"""Ingot in a few seconds on the pocket models: build, inspect, chat, summarise, measure, transcribe, see.

make demo, or: python examples/demo.py [CHECKPOINT ENGINE]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import LLM, IngotError, SamplingParams, Transcriber, build
from ingot.cli.inspect import inspect
from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene

QUESTIONS = ("Hello! What can you do?", "How much is 27 + 58?", "你好，请介绍一下你自己。")
NEWS = (
    "Smoke rose over Elmwick when a hotel caught fire. 55 people were brought to safety. Daya Ashmont, "
    "a baker who lives nearby, saw it first. It began in the early hours of 25 March. The weather was wet."
)
BATCH = 16
ROOT = Path(__file__).resolve().parent.parent
SPEECH, TALK = ROOT / "models" / "pocket-whisper", ROOT / "examples" / "speech" / "talk.ogg"
VISION, SCENE = ROOT / "models" / "pocket-vision" / "minigpt4.yaml", 12
ABOUT_IT = ("Describe this image.", "What colour is the star?")
COLUMNS = 56  # width of a picture in the terminal


def main(checkpoint: Path, engine: Path) -> None:
    """Run the tour."""
    console = Console(highlight=False)
    step(console, "Build", f"ingot build {checkpoint} -o {engine} --force")
    build(checkpoint, engine, force=True)
    console.print(f"{engine}: built")
    llm = LLM(engine)
    step(console, "Inspect", f"ingot inspect {engine}")
    inspect(str(engine))
    step(console, "Chat", f"ingot chat {engine}")
    for question in QUESTIONS:
        ask(console, llm, question)
    step(
        console,
        "Summarise unseen news",
        f"ingot run {engine} < item.txt",
    )
    question, reference = news_item()
    ask(console, llm, question)
    if reference:
        console.print(f"[dim]reference: {escape(reference)}[/dim]")
    step(console, "Measure", f"on {llm.engine.device}, {llm.engine.dtype}".replace("torch.", ""))
    for count in (1, BATCH):
        console.print(f"{count:>3} at once: [bold]{tokens_per_second(llm, count):,.0f} tokens/s[/bold]")
    speech = engine.with_name(SPEECH.name)
    step(console, "Transcribe", f"ingot transcribe {speech} {TALK.relative_to(ROOT)} -f srt")
    transcribe(console, speech)
    vision, picture = engine.with_name(VISION.parent.name), engine.with_name("scene.png")
    step(console, "Describe a picture", f"ingot chat {vision} --image {picture}")
    show_picture(console, vision, picture)
    step(console, "What to type next", ". .venv/bin/activate")
    console.print(next_steps(engine), markup=False, soft_wrap=True)


def step(console: Console, title: str, command: str) -> None:
    """A heading with the equivalent command."""
    console.print()
    console.rule(f"[bold cyan]{title}[/bold cyan]  [dim]{escape(command)}[/dim]", align="left")


def ask(console: Console, llm: LLM, question: str) -> None:
    """Show a question and stream its answer."""
    console.print(f"[cyan]> {escape(question)}[/cyan]")
    for piece in llm.stream([{"role": "user", "content": question}]):
        console.print(piece.text, end="", markup=False, soft_wrap=True)
    console.print()


def transcribe(console: Console, engine: Path, lines: int = 5) -> None:
    """Build the speech model and show the first sentences of a recording as they are transcribed."""
    build(SPEECH, engine, force=True)
    transcriber, start = Transcriber(engine), time.perf_counter()
    segments = []
    for segment in transcriber.stream(TALK):
        segments.append(segment)
        if len(segments) <= lines:
            times = f"[cyan]{segment.start:5.2f} – {segment.end:5.2f} s[/cyan]"
            console.print(times + escape(segment.text), soft_wrap=True)
    seconds = time.perf_counter() - start
    console.print(f"… {len(segments)} sentences in [bold]{seconds:.1f} s[/bold]")


def show_picture(console: Console, engine: Path, file: Path) -> None:
    """Build the picture model, draw a scene that it was not trained on, and ask about it in two rounds."""
    build(VISION, engine, force=True)
    picture = draw([held_out_scene(SCENE)])[0]
    file.write_bytes(png(picture))
    if console.color_system is not None and not console.no_color:
        console.print(half_blocks(picture))
    talk: list[dict[str, Any]] = []
    with LLM(engine) as llm:
        for question in ABOUT_IT:
            shown = [] if talk else [{"type": "image", "image": str(file)}]
            talk.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
            answer = llm.chat(talk, temperature=0.0, max_new_tokens=80).text or ""
            talk.append({"role": "assistant", "content": answer})
            console.print(f"[cyan]> {question}[/cyan]\n{escape(answer)}", soft_wrap=True)


def half_blocks(picture: torch.Tensor, columns: int = COLUMNS) -> Text:
    """A picture uint8 [3, height, width] as characters of two stacked pixels each."""
    height = picture.shape[1] * columns // picture.shape[2] // 2 * 2
    small = torch.nn.functional.adaptive_avg_pool2d(picture.float(), (height, columns)).round().int()
    rows = small.permute(1, 2, 0).tolist()
    text = Text()
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        for over, under in zip(upper, lower, strict=True):
            text.append("▀", f"rgb({','.join(map(str, over))}) on rgb({','.join(map(str, under))})")
        text.append("\n")
    return text


def news_item() -> tuple[str, str | None]:
    """A request for a summary and the expected answer, from the held-out items."""
    path = ROOT / "recipes" / "heldout.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for item in map(json.loads, lines):
        if item["task"] == "summary":
            return item["messages"][-1]["content"], item["answer"]
    return f"Summarize this news item in one sentence:\n{NEWS}", None


def tokens_per_second(llm: LLM, count: int, length: int = 64) -> float:
    """Output tokens per second of ``count`` concurrent requests, after an untimed warm-up."""
    prompts = [llm.chat_ids([{"role": "user", "content": f"How much is {i} + {i}?"}]) for i in range(count)]
    llm.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True))
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_new_tokens=length, ignore_eos=True))
    return count * length / (time.perf_counter() - start)


def next_steps(engine: Path) -> str:
    """Commands to try."""
    return (
        f"ingot chat {engine}\n"
        f'ingot run {engine} "How much is 12 + 30?" --json\n'
        f"ingot inspect {engine} --tensors\n"
        f"ingot transcribe {engine.with_name(SPEECH.name)} examples/speech/gespraech.ogg --task translate\n"
        f"ingot run {engine.with_name(VISION.parent.name)} --image {engine.with_name('scene.png')} "
        f'"What colour is the circle?"\n'
        "python examples/tap_layers.py"
    )


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    try:
        main(*(given or (Path("models/pocket-chat"), Path("engines/pocket-chat"))))
    except IngotError as error:
        sys.exit(f"error: {error}")
