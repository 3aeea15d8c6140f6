"""Little stories of two or three plain sentences, and short questions about them.

Stories outside the news, so that answering from a text does not depend on the news' wording.

    little_story(random.Random(1), "en")
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipes.world import names
from recipes.world.conversation import Language, Turn


@dataclass(frozen=True)
class _Plot:
    """Sentences over slots, and (question, slot or text over slots) pairs."""

    sentences: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


_PLOTS = {
    "en": (
        _Plot(
            ("{who} went to {place} on {day} and bought {n} {things} from {who2}.", "They cost {m} coins."),
            (
                ("Who went to {place}?", "{who}"), ("When did {who} go to {place}?", "{day}"),
                ("How many {things} did {who} buy?", "{n}"), ("Who sold the {things}?", "{who2}"),
                ("What did {who} buy?", "{n} {things}"), ("How much did they cost?", "{m} coins"),
                ("Where did {who} go?", "{place}"),
            ),
        ),
        _Plot(
            ("{who} is {n} years old and works as a {job} in {place}.", "{who2} is a {job2}."),
            (
                ("How old is {who}?", "{n}"), ("Where does {who} work?", "{place}"),
                ("What is the job of {who}?", "{job}"), ("Who is a {job2}?", "{who2}"),
                ("What does {who2} do?", "{job2}"), ("Who works in {place}?", "{who}"),
            ),
        ),
        _Plot(
            ("{who} has a {animal} called {pet}.", "{who2} has {n} {things}.", "They live in {place}."),
            (
                ("Who has a {animal}?", "{who}"), ("What is the {animal} called?", "{pet}"),
                ("Who has {n} {things}?", "{who2}"), ("Where do they live?", "{place}"),
                ("How many {things} does {who2} have?", "{n}"), ("What animal does {who} have?", "{animal}"),
            ),
        ),
        _Plot(
            ("On {day} {who} gave {who2} a {colour} book.", "{who2} read it in {n} days."),
            (
                ("Who gave the book?", "{who}"), ("Who got the book?", "{who2}"),
                ("What colour was the book?", "{colour}"), ("When was the book given?", "{day}"),
                ("In how many days was it read?", "{n}"), ("Who read the book?", "{who2}"),
            ),
        ),
        _Plot(
            ("The train to {place} leaves at {n}.", "{who} sits at the window.", "{who2} is late."),
            (
                ("Where does the train go?", "{place}"), ("When does the train leave?", "{n}"),
                ("Who is late?", "{who2}"), ("Who sits at the window?", "{who}"),
            ),
        ),
    ),
    "zh": (
        _Plot(
            ("{day}，{who}去{place}，从{who2}那里买了{n}个{things}。", "一共花了{m}元。"),
            (
                ("谁去了{place}？", "{who}"),
                ("{who}什么时候去的？", "{day}"), ("{who}买了多少个{things}？", "{n}"),
                ("东西是从谁那里买的？", "{who2}"),
                ("{who}买了什么？", "{things}"), ("一共花了多少元？", "{m}"),
                ("{who}去了哪里？", "{place}"),
            ),
        ),
        _Plot(
            ("{who}今年{n}岁，在{place}当{job}。", "{who2}是{job2}。"),
            (
                ("{who}几岁了？", "{n}"), ("{who}在哪里工作？", "{place}"), ("{who}做什么工作？", "{job}"),
                ("谁是{job2}？", "{who2}"), ("{who2}做什么工作？", "{job2}"), ("谁在{place}工作？", "{who}"),
            ),
        ),
        _Plot(
            ("{who}有一只{animal}，名字叫{pet}。", "{who2}有{n}个{things}。", "他们住在{place}。"),
            (
                ("谁有一只{animal}？", "{who}"),
                ("{animal}叫什么名字？", "{pet}"), ("谁有{n}个{things}？", "{who2}"),
                ("他们住在哪里？", "{place}"),
                ("{who2}有多少个{things}？", "{n}"), ("{who}有什么动物？", "{animal}"),
            ),
        ),
        _Plot(
            ("{day}，{who}送给{who2}一本{colour}的书。", "{who2}用{n}天读完了它。"),
            (
                ("书是谁送的？", "{who}"), ("谁得到了书？", "{who2}"), ("书是什么颜色的？", "{colour}"),
                ("书是什么时候送的？", "{day}"), ("用了多少天读完？", "{n}"),
            ),
        ),
        _Plot(
            ("去{place}的火车{n}点开。", "{who}坐在窗边。", "{who2}迟到了。"),
            (
                ("火车开往哪里？", "{place}"), ("火车几点开？", "{n}"),
                ("谁迟到了？", "{who2}"), ("谁坐在窗边？", "{who}"),
            ),
        ),
    ),
}  # fmt: skip
_LISTS = {
    "en": {
        "things": ("apples", "books", "eggs", "cups", "pears", "cards", "pencils"),
        "job": ("teacher", "baker", "doctor", "farmer", "driver"),
        "job2": ("nurse", "painter", "pilot", "cook", "student"),
        "animal": ("dog", "cat", "horse", "parrot", "goat"),
        "colour": ("red", "blue", "green", "yellow", "black"),
    },
    "zh": {
        "things": ("苹果", "本子", "鸡蛋", "杯子", "梨", "球"),
        "job": ("教师", "面包师", "医生", "农民", "司机"),
        "job2": ("护士", "画家", "飞行员", "厨师", "学生"),
        "animal": ("小狗", "花猫", "鹦鹉", "山羊", "兔子"),
        "colour": ("红色", "蓝色", "绿色", "黄色", "黑色"),
    },
}  # fmt: skip
_FRAMES = {
    "en": ("{text}\n\n{question}", "{text} {question}", "{text}\nQuestion: {question}", "{question}\n{text}"),
    "zh": ("{text}\n\n{question}", "{text}{question}", "{text}\n问题：{question}", "{question}\n{text}"),
}


def little_story(rng: random.Random, language: Language) -> list[Turn]:
    """A story with one to three questions, the text in the first turn."""
    plot = rng.choice(_PLOTS[language])
    slots = {name: rng.choice(choices) for name, choices in _LISTS[language].items()}
    slots |= {"who": names.first_name(rng, language), "who2": names.first_name(rng, language)}
    slots |= {"pet": names.first_name(rng, language), "place": names.town(rng, language)}
    slots |= {"n": str(rng.randint(2, 60)), "m": str(rng.randint(2, 60)), "day": names.day(rng, language)}
    text = ("" if language == "zh" else " ").join(plot.sentences).format_map(slots)
    asked = rng.sample(plot.questions, rng.randint(1, 3))
    pairs = [(question.format_map(slots), answer.format_map(slots)) for question, answer in asked]
    first = rng.choice(_FRAMES[language]).format(text=text, question=pairs[0][0])
    return [Turn(first, pairs[0][1]), *(Turn(*pair) for pair in pairs[1:])]
