"""Small talk: greetings, who the model is, thanks, remembering a name, and saying so when it does not know.

Questions about facts, texts and sums are in files of their own.

    small_talk(random.Random(1), "en", "Ingot")
"""

from __future__ import annotations

import random

from recipes.world import names
from recipes.world.conversation import Language, Turn
from recipes.world.dialogue_words import (
    ASK_NAME,
    BEYOND,
    CHAT,
    GREETINGS,
    LIKES,
    LIKES_ASK,
    TELL_NAME,
    UNKNOWN,
    UNKNOWN_ANSWER,
    WHO,
)


def who_are_you(rng: random.Random, language: Language, name: str | None) -> Turn:
    """Who the assistant is; ``name`` where the system message gave it one."""
    asked = rng.choice(WHO[language])
    if language == "zh":
        return Turn(
            asked, f"我是{name}，一个小小的助手。" if name else "我是 Ingot 的口袋模型，一个小小的聊天助手。"
        )
    if name:
        return Turn(asked, f"I am {name}, a small assistant.")
    return Turn(asked, "I am Ingot's pocket model, a small chat assistant.")


def small_talk(rng: random.Random, language: Language, name: str | None) -> Turn:
    """One short exchange that needs no memory, asked neatly or as people type."""
    if rng.random() < 0.25:
        turn = who_are_you(rng, language, name)
    else:
        ways, answer = rng.choice(CHAT[language])
        turn = Turn(rng.choice(ways), answer)
    return Turn(_as_typed(rng, language, turn.user), turn.assistant)


def _as_typed(rng: random.Random, language: Language, text: str) -> str:
    """``text`` with a greeting before it, without its last mark, or in small letters, sometimes."""
    if rng.random() < 0.2:
        text = rng.choice(GREETINGS[language]) + text
    if rng.random() < 0.2:
        text = text.rstrip("?!.？！。")
    if language == "en" and rng.random() < 0.2:
        text = text.lower()
    return text


def unknown(rng: random.Random, language: Language) -> Turn:
    """A question beyond a pocket model, and the honest answer."""
    word = rng.choice((names.wild_word(rng), names.person(rng, language), names.town(rng, language)))
    slots = {"word": word, "year": rng.randint(1900, 2030)}
    slots |= {name: rng.choice(choices) for name, choices in BEYOND[language].items()}
    asked = rng.choice(UNKNOWN[language]).format_map(slots)
    return Turn(_as_typed(rng, language, asked), UNKNOWN_ANSWER[language])


def repeat(rng: random.Random, language: Language) -> Turn:
    """Say again what the user says: words in any order."""
    if language == "zh":
        said = "".join(rng.choices(names.spelling_characters(), k=rng.randint(2, 8)))
        return Turn(rng.choice(("请跟我说：{}", "重复这句话：{}", "请重复：{}")).format(said), said)
    pool = [names.person(rng, "en"), names.town(rng, "en"), str(rng.randint(0, 999)), *_LITTLE_WORDS]
    said = " ".join(rng.sample(pool, rng.randint(1, 6)))
    return Turn(rng.choice(("Repeat after me: {}", "Say this again: {}", "Repeat: {}")).format(said), said)


_LITTLE_WORDS = (
    "the", "a", "red", "blue", "green", "house", "tree", "runs", "sleeps", "slowly", "over", "under", "small",
    "big", "dog", "cat", "river", "and", "or", "never", "always",
)  # fmt: skip


def memory_session(rng: random.Random, language: Language, between: list[Turn]) -> list[Turn]:
    """The user says a name (and perhaps a favourite), other turns follow, then asks for it again."""
    user = names.first_name(rng, language)
    told, greeted = rng.choice(TELL_NAME[language])
    turns = [Turn(told.format(name=user), greeted.format(name=user))]
    asked = [Turn(rng.choice(ASK_NAME[language]), _name_answer(language, user))]
    if rng.random() < 0.4:
        said, question = _favourite(rng, language)
        if rng.random() < 0.4:
            return [said, *between, question]
        turns.append(said)
        asked.append(question)
        rng.shuffle(asked)
    return [*turns, *between, *asked]


def _favourite(rng: random.Random, language: Language) -> tuple[Turn, Turn]:
    thing = rng.choice(list(LIKES[language]))
    slots = {"thing": thing, "liked": rng.choice(LIKES[language][thing])}
    said, reply, question, answer = (text.format_map(slots) for text in LIKES_ASK[language])
    return Turn(said, reply), Turn(question, answer)


def ask_unknown_name(rng: random.Random, language: Language) -> Turn:
    """Asking for a name that was never given."""
    answer = "你还没有告诉我你的名字。" if language == "zh" else "You have not told me your name yet."
    return Turn(rng.choice(ASK_NAME[language]), answer)


def _name_answer(language: Language, user: str) -> str:
    return f"你叫{user}。" if language == "zh" else f"Your name is {user}."
