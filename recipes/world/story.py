"""Short stories: something longer to generate, where any of many continuations is right.

story_turn(random.Random(1), "en")
"""

from __future__ import annotations

import random

from recipes.world import names
from recipes.world.conversation import Language, Turn

_HEROES = {
    "en": ("fox", "bear", "rabbit", "robot", "sailor", "painter", "cat", "dragon", "miller", "clockmaker"),
    "zh": ("狐狸", "小熊", "兔子", "机器人", "水手", "画家", "小猫", "小龙", "磨坊主", "钟表匠"),
}  # fmt: skip
_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "en": (
        (
            "Once upon a time a {hero} named {who} lived in {place}.",
            "In {place} there lived a {hero} called {who}.",
        ),
        (
            "Every morning {who} walked to the river.", "{who} loved the hills behind the town.",
            "{who} had a small house with a red door.",
        ),
        (
            "One day {who} found a silver key in the grass.",
            "One night a strange light came down from the hill.",
            "One winter a letter without a name lay at the door.",
        ),
        (
            "Nobody knew what it meant, so {who} went to ask the old owl.",
            "{who} was afraid, but went to look.",
            "{who} told a friend, and together they followed the road.",
        ),
        (
            "After three days they came to a gate.", "The way was long and the wind was cold.",
            "On the way they shared their bread with a stranger.",
        ),
        (
            "Behind it was a garden where it was always summer.", "There stood a lamp that never went out.",
            "There they found the music that the town had lost.",
        ),
        (
            "{who} brought it home, and everyone in {place} was happy.",
            "From that day on nobody in {place} was alone.",
            "And if you go to {place}, you can still see it today.",
        ),
    ),
    "zh": (
        ("从前，{place}住着一个{hero}，名叫{who}。", "很久以前，有个叫{who}的{hero}住在{place}。"),
        ("每天早上，{who}都到河边散步。", "{who}喜欢城外的小山。", "{who}有一座红门的小房子。"),
        (
            "有一天，{who}在草地里找到一把银钥匙。", "一天夜里，山上落下一道奇怪的光。",
            "一个冬天，门口放着一封没有名字的信。",
        ),
        (
            "没有人明白这是什么意思，于是{who}去问老猫头鹰。", "{who}有点害怕，但还是去看了看。",
            "{who}告诉了朋友，他们一起沿着路走去。",
        ),
        ("三天以后，他们来到一扇大门前。", "路很长，风很冷。", "路上，他们把面包分给了一个陌生人。"),
        ("门后是一座永远是夏天的花园。", "那里有一盏永远不灭的灯。", "他们在那里找到了小城丢失的音乐。"),
        (
            "{who}把它带回了家，{place}的人们都很高兴。", "从那以后，{place}再也没有人孤单。",
            "如果你去{place}，今天还能看到它。",
        ),
    ),
}  # fmt: skip
_ASK = {
    "en": (
        "Tell me a story about a {hero}.", "Write a short story about a {hero}.",
        "A story about a {hero}, please.",
    ),
    "zh": ("给我讲一个{hero}的故事。", "写一个关于{hero}的小故事。", "请讲个{hero}的故事吧。"),
}  # fmt: skip
_ASK_ANY = {
    "en": ("Tell me a story.", "Write a short story."), "zh": ("给我讲个故事。", "讲一个小故事吧。"),
}  # fmt: skip


def story_turn(rng: random.Random, language: Language) -> Turn:
    """A request for a story and the story."""
    hero = rng.choice(_HEROES[language])
    who = names.first_name(rng, language)
    place = names.town(rng, language)
    ways = _ASK[language] if rng.random() < 0.7 else _ASK_ANY[language]
    sentences = [rng.choice(part).format(hero=hero, who=who, place=place) for part in _PARTS[language]]
    joiner = "" if language == "zh" else " "
    return Turn(rng.choice(ways).format(hero=hero), joiner.join(sentences))
