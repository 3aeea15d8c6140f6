"""Small sums: bare, in words, as stories about counting, and carried on over several turns.

A held-out sum is an operation with an ordered pair of numbers; of a product the other order is always trained
on, so that the tables are complete.

    sum_turn(random.Random(1), "en", "train")
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipes.world import names
from recipes.world.conversation import Language, Split, Turn
from recipes.world.split import is_held_out

_SIGN = {"add": "+", "subtract": "-", "multiply": "×"}
_ASK: dict[Language, dict[str, tuple[str, ...]]] = {
    "en": {
        "add": ("What is {a} plus {b}?", "Add {a} and {b}.", "{a} plus {b}?"),
        "subtract": ("What is {a} minus {b}?", "Subtract {b} from {a}.", "{a} minus {b}?"),
        "multiply": ("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} times {b}?"),
        "any": (
            "What is {a} {s} {b}?", "{a} {s} {b} = ?", "Calculate {a} {s} {b}.", "{a}{s}{b}", "{a} {s} {b}",
            "How much is {a} {s} {b}?", "{a}{s}{b}=", "What is {a}{s}{b}?",
        ),
    },
    "zh": {
        "add": ("{a}加{b}等于多少？", "{a}加{b}是多少？", "请计算{a}加{b}。"),
        "subtract": ("{a}减{b}等于多少？", "{a}减去{b}是多少？", "请计算{a}减{b}。"),
        "multiply": ("{a}乘{b}等于多少？", "{a}乘以{b}是多少？", "请计算{a}乘以{b}。"),
        "any": (
            "{a}{s}{b}等于多少？", "{a} {s} {b} = ?", "计算{a}{s}{b}。", "{a}{s}{b}=?", "{a} {s} {b}",
            "{a}{s}{b}是多少？",
        ),
    },
}  # fmt: skip
_STORY: dict[Language, dict[str, tuple[str, ...]]] = {
    "en": {
        "add": (
            "{who} has {a} {things} and buys {b} more. How many {things} does {who} have now?",
            "There are {a} {things} in a box. {who} puts in {b} more. How many {things} are there?",
        ),
        "subtract": (
            "{who} has {a} {things} and gives away {b}. How many {things} are left?",
            "There were {a} {things} on the table. {who} took {b}. How many {things} are left?",
        ),
        "multiply": (
            "{who} has {a} boxes with {b} {things} each. How many {things} is that?",
            "There are {a} rows of {b} {things}. How many {things} does {who} count?",
        ),
    },
    "zh": {
        "add": (
            "{who}有{a}个{things}，又买了{b}个。现在有多少个{things}？",
            "盒子里有{a}个{things}，{who}又放进{b}个。一共有多少个{things}？",
        ),
        "subtract": (
            "{who}有{a}个{things}，送走了{b}个。还剩多少个{things}？",
            "桌上有{a}个{things}，{who}拿走了{b}个。还剩多少个{things}？",
        ),
        "multiply": (
            "{who}有{a}盒{things}，每盒{b}个。一共有多少个{things}？",
            "有{a}排{things}，每排{b}个。{who}数到多少个{things}？",
        ),
    },
}  # fmt: skip
_THINGS = {
    "en": ("apples", "books", "coins", "eggs", "pencils", "stones", "cups", "cards", "shells", "buttons"),
    "zh": ("苹果", "本子", "硬币", "鸡蛋", "铅笔盒", "石头", "杯子", "球", "贝壳", "橙子"),
}  # fmt: skip
_NEXT: dict[Language, dict[str, tuple[str, ...]]] = {
    "en": {
        "add": ("Now add {b}.", "And plus {b}?", "Add {b} to that."),
        "subtract": ("Now subtract {b}.", "And minus {b}?", "Take away {b}."),
    },
    "zh": {"add": ("再加{b}呢？", "再加上{b}。"), "subtract": ("再减{b}呢？", "再减去{b}。")},
}  # fmt: skip


@dataclass(frozen=True)
class Sum:
    """An operation on two whole numbers."""

    operation: str
    a: int
    b: int

    @property
    def result(self) -> int:
        """The number it comes to."""
        return {"add": self.a + self.b, "subtract": self.a - self.b, "multiply": self.a * self.b}[
            self.operation
        ]

    @property
    def held_out(self) -> bool:
        """True for sums that are never trained on."""
        key = f"{self.operation}|{self.a}|{self.b}"
        if self.operation != "multiply":
            return is_held_out("sum", key)
        return self.a > self.b and is_held_out("sum", key)

    def solved(self) -> str:
        """The equation, as the assistant writes it."""
        return f"{self.a} {_SIGN[self.operation]} {self.b} = {self.result}"


def _draw(rng: random.Random, split: Split, story: bool = False) -> Sum:
    while True:
        operation = rng.choice(("add", "add", "subtract", "subtract", "multiply"))
        if operation == "multiply":
            a, b = (rng.randint(0, 12), rng.randint(0, 12)) if rng.random() < 0.55 else (
                rng.randint(2, 99), rng.randint(2, 9))  # fmt: skip
            if rng.random() < 0.5:
                a, b = b, a
        else:
            top = rng.choice((20, 99, 99, 99, 500))
            a, b = rng.randint(0, top), rng.randint(0, top)
            if operation == "subtract" and a < b and (story or rng.random() < 0.85):
                a, b = b, a
        found = Sum(operation, a, b)
        if story and min(found.a, found.b, found.result) < 2:
            continue
        if found.held_out == (split == "held-out"):
            return found


def _end(language: Language) -> str:
    return "。" if language == "zh" else "."


def _bare(rng: random.Random, language: Language, split: Split) -> tuple[Sum, Turn]:
    found = _draw(rng, split)
    ways = _ASK[language]["any"] if rng.random() < 0.6 else _ASK[language][found.operation]
    sign = _SIGN[found.operation]
    if sign == "×":
        sign = rng.choice(("×", "*", "x"))
    asked = rng.choice(ways).format(a=found.a, b=found.b, s=sign)
    return found, Turn(asked, found.solved() + _end(language))


def _story(rng: random.Random, language: Language, split: Split) -> tuple[Sum, Turn]:
    found = _draw(rng, split, story=True)
    things, who = rng.choice(_THINGS[language]), names.first_name(rng, language)
    asked = rng.choice(_STORY[language][found.operation])
    asked = asked.format(a=found.a, b=found.b, who=who, things=things)
    if language == "zh":
        return found, Turn(asked, f"{found.solved()}，答案是{found.result}个。")
    return found, Turn(asked, f"{found.solved()}. The answer is {found.result} {things}.")


def _sum(rng: random.Random, language: Language, split: Split) -> tuple[Sum, Turn]:
    return (_story if rng.random() < 0.35 else _bare)(rng, language, split)


def sum_turn(rng: random.Random, language: Language, split: Split) -> Turn:
    """One bare sum or one story sum with its answer."""
    return _sum(rng, language, split)[1]


def sum_session(rng: random.Random, language: Language, split: Split) -> list[Turn]:
    """A sum and up to three more that carry on from its result."""
    found, turn = _sum(rng, language, split)
    turns = [turn]
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        operation, b = rng.choice(("add", "subtract")), rng.randint(1, 20)
        found = Sum(operation, found.result, b)
        if found.a < 0 or found.result < 0 or found.held_out:
            break
        turns.append(
            Turn(rng.choice(_NEXT[language][operation]).format(b=b), found.solved() + _end(language))
        )
    return turns


def compare_turn(rng: random.Random, language: Language) -> Turn:
    """Which of two numbers is larger or smaller, or what comes next."""
    a, b = rng.sample(range(200), 2)
    kind = rng.randrange(3)
    large, small = max(a, b), min(a, b)
    if language == "zh":
        choices = (
            (f"{a}和{b}哪个大？", f"{large}比{small}大。"),
            (f"{a}和{b}哪个小？", f"{small}比{large}小。"),
            (f"{a}后面是几？", f"{a}后面是{a + 1}。"),
        )
    else:
        choices = (
            (f"Which is larger, {a} or {b}?", f"{large} is larger than {small}."),
            (f"Which is smaller, {a} or {b}?", f"{small} is smaller than {large}."),
            (f"Which number comes after {a}?", f"{a + 1} comes after {a}."),
        )
    return Turn(*choices[kind])


def chain_turn(rng: random.Random, language: Language) -> Turn:
    """Three numbers to add, solved step by step."""
    while True:
        a, b, c = (rng.randint(1, 50) for _ in range(3))
        first, second = Sum("add", a, b), Sum("add", a + b, c)
        if not first.held_out and not second.held_out:
            break
    bare = rng.choice(("{a}+{b}+{c}", "{a} + {b} + {c}", "{a} + {b} + {c} = ?"))
    asking = f"{bare}等于多少？" if language == "zh" else f"What is {bare}?"
    asked = rng.choice((bare, asking)).format(a=a, b=b, c=c)
    return Turn(asked, f"{first.solved()}, {second.solved()}{_end(language)}")
