"""Score a pocket model on the held-out items: ROUGE-L of summaries, exact answers to questions and sums.

Generates with the training module, or with Ingot where ``--engine`` is given.

    python -m recipes.evaluate_pocket --model models/pocket-chat
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from recipes.pocket_model import PocketModel, PocketShape
from recipes.scoring import exact, rouge_l
from recipes.tokenizer import Tokenizer

Messages = list[dict[str, str]]
CHAT: tuple[tuple[str, ...], ...] = (
    ("Hello!", "Who are you?", "What can you do?", "Thank you!", "Bye!"),
    ("你好", "你是谁？", "你能做什么？", "谢谢！"),
    ("What is 12 + 30?", "Now add 5.", "And minus 7?", "12加30等于多少？"),
    ("Hi, I'm Marta.", "What is the capital of Valdoria?", "How are you?", "What is my name?"),
    ("我叫小雨。", "法国的首都是哪里？", "天空是什么颜色？", "我叫什么名字？"),
    ("Tell me a story about a fox.", "What is the opposite of hot?", "Who won the world cup in 1990?"),
)


def load_model(folder: Path, device: torch.device) -> PocketModel:
    """The training module with the weights of an exported folder, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    shape = PocketShape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        branch=config["intermediate_size"] // 2,
        length=config["seq_length"],
    )
    model = PocketModel(shape)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval()


class ModuleAnswers:
    """Answers by the training module, greedy."""

    def __init__(self, folder: Path, device: torch.device, batch: int = 50) -> None:
        self.model = load_model(folder, device)
        self.tokenizer = Tokenizer.load(folder / "qwen.tiktoken")
        self.batch = batch

    def __call__(self, conversations: Sequence[Messages], max_new: int) -> list[str]:
        """One answer for each conversation."""
        prompts = [self.tokenizer.prompt(messages) for messages in conversations]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers = [""] * len(prompts)
        for first in range(0, len(order), self.batch):
            rows = order[first : first + self.batch]
            produced = self.model.generate([prompts[i] for i in rows], max_new, self.tokenizer.im_end)
            for row, ids in zip(rows, produced, strict=True):
                answers[row] = self.tokenizer.decode(ids)
        return answers


class EngineAnswers:
    """Answers by Ingot, greedy; ``engine`` is a built engine's folder."""

    def __init__(self, engine: Path) -> None:
        from ingot import LLM

        self.llm = LLM(str(engine))

    def __call__(self, conversations: Sequence[Messages], max_new: int) -> list[str]:
        """One answer for each conversation."""
        from ingot.config.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=max_new, temperature=0.0)
        return [answer.text or "" for answer in self.llm.chat(list(conversations), params)]


def score(items: Sequence[dict[str, Any]], answers: Sequence[str]) -> dict[str, float]:
    """ROUGE-L (0 to 100) of summaries and the share (0 to 100) of exact answers, per task and language."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for item, answer in zip(items, answers, strict=True):
        task, language = item["task"], item["language"]
        same = 100.0 * exact(answer, item["answer"])
        if task == "summary":
            value = 100.0 * rouge_l(answer, item["answer"], language)
            found["rouge_l"].append(value)
            found[f"rouge_l/{language}"].append(value)
            found["exact/summary"].append(same)
        else:
            for name in ("exact", f"exact/{task}", f"exact/{task}/{language}"):
                found[name].append(same)
    return {name: round(sum(values) / len(values), 2) for name, values in sorted(found.items())}


def chat_transcript(answer: ModuleAnswers | EngineAnswers) -> list[str]:
    """Lines of a few fixed conversations, each turn answered with all before it."""
    lines = []
    for questions in CHAT:
        messages: Messages = [{"role": "system", "content": "You are a helpful assistant."}]
        for question in questions:
            messages.append({"role": "user", "content": question})
            reply = answer([messages], 120)[0]
            messages.append({"role": "assistant", "content": reply})
            lines.append(f"{question}  ->  {reply}")
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("models/pocket-chat"))
    parser.add_argument("--engine", type=Path, help="generate with Ingot on this built engine")
    parser.add_argument("--heldout", type=Path, default=Path("recipes/heldout.jsonl"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--chat", action="store_true", help="print the answers in a few fixed chats")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, answer every held-out item, print figures (JSON on the last line)."""
    args = _parse()
    items = [json.loads(line) for line in args.heldout.read_text().splitlines()]
    answer = (
        EngineAnswers(args.engine) if args.engine else ModuleAnswers(args.model, torch.device(args.device))
    )
    answers = answer([item["messages"] for item in items], args.max_new_tokens)
    wrong = [pair for pair in zip(items, answers, strict=True) if not exact(pair[1], pair[0]["answer"])]
    for item, given in wrong[: args.wrong]:
        print(
            f"{item['task']}: {item['messages'][-1]['content']}\n  wanted {item['answer']}\n  given  {given}"
        )
    if args.chat:
        print("\n".join(chat_transcript(answer)))
    figures = score(items, answers)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
