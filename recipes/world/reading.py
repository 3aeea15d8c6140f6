"""Tasks over a text that is given: sum it up in one sentence, answer questions about it.

summary(random.Random(1), "en", "train").assistant
"""

from __future__ import annotations

import random

from recipes.world import news
from recipes.world.conversation import Language, Split, Turn

_SUMMARY = {
    "en": (
        "Summarize this news item in one sentence:\n{text}",
        "Summarize the following text.\n\n{text}",
        "{text}\n\nSummarize the text above in one sentence.",
        "Write a one-sentence highlight for this text:\n{text}",
        "Please summarise: {text}",
        "TL;DR: {text}",
    ),
    "zh": (
        "请用一句话总结这条新闻：\n{text}",
        "请概括下面的内容。\n\n{text}",
        "{text}\n\n请用一句话概括上文。",
        "给下面的新闻写一句摘要：\n{text}",
        "总结一下：{text}",
    ),
}
_QUESTION = {
    "en": (
        "Read the text and answer the question.\n{text}\nQuestion: {question}",
        "{text}\n\n{question}",
        "Text: {text}\n\nQuestion: {question}",
        "{question}\n{text}",
        "Answer from the text: {question}\n\n{text}",
    ),
    "zh": (
        "阅读下面的内容并回答问题。\n{text}\n问题：{question}",
        "{text}\n\n{question}",
        "内容：{text}\n\n问题：{question}",
        "{question}\n{text}",
    ),
}
_SUM_UP_AGAIN = {
    "en": ("Now summarize it in one sentence.", "Please sum up the text.", "Summarize it."),
    "zh": ("现在用一句话总结它。", "请概括一下。", "总结一下这条新闻。"),
}


def summary(rng: random.Random, language: Language, split: Split) -> Turn:
    """One news item with the request to sum it up, and its highlight."""
    item = news.item(rng, language, split)
    return Turn(rng.choice(_SUMMARY[language]).format(text=item.text), item.highlight)


def question(rng: random.Random, language: Language, split: Split) -> Turn:
    """One news item with one question, and its short answer."""
    item = news.item(rng, language, split)
    asked, answer = rng.choice(item.questions)
    return Turn(rng.choice(_QUESTION[language]).format(text=item.text, question=asked), answer)


def reading_session(rng: random.Random, language: Language, split: Split) -> list[Turn]:
    """Several turns about one item: a question or a summary first, then further questions."""
    item = news.item(rng, language, split)
    questions = rng.sample(item.questions, rng.randint(1, min(4, len(item.questions))))
    if rng.random() < 0.5:
        turns = [Turn(rng.choice(_SUMMARY[language]).format(text=item.text), item.highlight)]
        return turns + [Turn(asked, answer) for asked, answer in questions]
    (first, answer), *others = questions
    turns = [Turn(rng.choice(_QUESTION[language]).format(text=item.text, question=first), answer)]
    turns += [Turn(asked, reply) for asked, reply in others]
    if rng.random() < 0.5:
        turns.append(Turn(rng.choice(_SUM_UP_AGAIN[language]), item.highlight))
    return turns
