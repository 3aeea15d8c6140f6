"""People, towns and days, put together from syllables and characters.

person(random.Random(1), "en")  # 'Marvik Tolden'
"""

from __future__ import annotations

import random
import string

from recipes.world.conversation import Language


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_STARTS = _words(
    "Ma Lo Be Ti Ka Ro El Sa No Da Fi Gre Ha Jo Ku Li Mi Ne Or Pe Ra Su Ta Vi Wen Yo Bri Cor Dal Fen"
)
_ENDS = _words("ren vik na la ra lin dor mi sa ta len ric bel no ya fa gan min ros tia")
_FAMILY = _words(
    "Tol Hal Ber Kor Ash Lund Mar Nor Pell Quin Rav Sten Thor Vel Wick Bran Cald Dun Fal Gard Hol Jar Kel Lam"
)
_FAMILY_ENDS = _words("vik den son ford well man ley berg stad mont ridge wood ster more land ham by worth")
_TOWN = _words(
    "Elm Oak River Stone Gold North South Bright Green Black White Silver Fox Otter Raven Cedar Maple Lake"
)
_TOWN_ENDS = _words("ford haven bridge ton mere field port brook dale hill cliff wick stead mouth gate moor")
_EVERYDAY = _words(
    "Anna Tom Mary John Peter Alice Bob Emma Jack Lucy Sam Kate Paul Rosa David Nina Max Julia Leo Eva Mark "
    "Sarah Ben Clara Adam Lily Henry Grace Oscar Ruth Felix Ivy Simon Helen Carl Zoe Victor Amy Hugo Jane"
)

_SURNAMES = "林周陈郭韩冯邓曹彭曾萧田董袁潘蒋蔡余杜叶程魏苏吕丁任沈姚卢姜崔钟谭陆汪范石廖贾夏"
_GIVEN = "伟芳娜敏静丽强磊洋艳勇军杰娟涛超霞刚玲桂英华玉兰梅琳晨雨欣怡浩宇轩博文思远嘉诚晓彤佳慧"
_TOWN_ZH = "青柳枫榆松竹溪岭峰湖泉滩渡桥石云霞雁鹤鹿燕银翠碧"
_TOWN_ZH_ENDS = ("镇", "村", "市", "县", "湾", "港")
_EVERYDAY_ZH = ("小明", "小红", "小华", "小丽", "小刚", "小芳", "小强", "小美", "阿杰", "阿梅")

_COMMON_SURNAMES = "王李张刘杨黄赵吴徐孙朱马胡何高罗郑梁谢宋唐许"
_CONSONANTS = (
    "b", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "th", "ch", "st",
    "gr",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ee", "ou", "ai")
_CLOSINGS = ("", "", "n", "r", "s", "t", "l", "ck", "th", "ng", "son", "field", "er", "man", "ton", "y")
_CITIES = (
    "London", "Paris", "Berlin", "Tokyo", "New York", "Springfield", "Rome", "Madrid", "Beijing", "Boston",
)  # fmt: skip
WILD_SHARE = 0.3

_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = _words("January February March April May June July August September October November December")


def wild_word(rng: random.Random) -> str:
    """A word of no list: two or three syllables drawn letter by letter, or any run of letters."""
    if rng.random() < 0.3:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
    syllables = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    start = rng.choice(_VOWELS) if rng.random() < 0.2 else ""
    return start + "".join(syllables) + rng.choice(_CLOSINGS)


def _wild_characters(rng: random.Random, count: int) -> str:
    """Any characters of the common block; few of them are in the vocabulary, so they are spelled in bytes."""
    return "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(count))


def person(rng: random.Random, language: Language) -> str:
    """A full name: most are built from the world's syllables, some from no list at all."""
    wild = rng.random() < WILD_SHARE
    if language == "zh":
        if not wild:
            return rng.choice(_SURNAMES) + "".join(rng.sample(_GIVEN, rng.choice((1, 2, 2))))
        given = (
            "".join(rng.sample(_GIVEN, rng.choice((1, 2))))
            if rng.random() < 0.6
            else _wild_characters(rng, 1)
        )
        return rng.choice(_COMMON_SURNAMES + _SURNAMES) + given
    given = rng.choice(_STARTS) + rng.choice(_ENDS)
    if not wild:
        return f"{given} {rng.choice(_FAMILY)}{rng.choice(_FAMILY_ENDS)}"
    given = rng.choice((rng.choice(_EVERYDAY), given, wild_word(rng).capitalize()))
    return f"{given} {wild_word(rng).capitalize()}" if rng.random() < 0.8 else given


def first_name(rng: random.Random, language: Language) -> str:
    """What someone says they are called: an everyday name, an invented one, or any run of letters."""
    kind = rng.random()
    if language == "zh":
        if kind < 0.25:
            return rng.choice(_EVERYDAY_ZH)
        if kind < 0.4:
            return rng.choice(_COMMON_SURNAMES) + rng.choice(_EVERYDAY_ZH)
        return person(rng, "zh")
    if kind < 0.4:
        return rng.choice(_EVERYDAY)
    if kind < 0.6:
        return rng.choice(_STARTS) + rng.choice(_ENDS)
    return wild_word(rng).capitalize()


def town(rng: random.Random, language: Language) -> str:
    """A town's name: most from the world's lists, some from no list at all."""
    wild = rng.random() < WILD_SHARE
    if language == "zh":
        if wild and rng.random() < 0.3:
            return rng.choice(
                ("北京", "上海", "南京", "杭州", "东京", "巴黎", "伦敦", "广州", "成都", "武汉")
            )
        first = _wild_characters(rng, rng.choice((1, 2))) if wild else "".join(rng.sample(_TOWN_ZH, 2))
        return first + rng.choice(_TOWN_ZH_ENDS)
    if wild:
        return wild_word(rng).capitalize() if rng.random() < 0.8 else rng.choice(_CITIES)
    return rng.choice(_TOWN) + rng.choice(_TOWN_ENDS)


def day(rng: random.Random, language: Language) -> str:
    """A weekday or a date of the year."""
    if language == "zh":
        if rng.random() < 0.4:
            return "星期" + rng.choice("一二三四五六日")
        return f"{rng.randint(1, 12)}月{rng.randint(1, 28)}日"
    if rng.random() < 0.4:
        return rng.choice(_WEEKDAYS)
    return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"


def spelling_characters() -> str:
    """The characters Chinese names are spelled with; a tokenizer keeps them single."""
    return "".join(sorted(set(_SURNAMES + _GIVEN + _TOWN_ZH)))
