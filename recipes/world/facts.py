"""The facts a pocket model knows by heart: the invented countries, some real capitals, colours, a word list.

fact_turn(random.Random(1), "en")
"""

from __future__ import annotations

import random

from recipes.world.conversation import Language, Turn

# Invented: English name, Chinese name, capital in both, colour of the flag and national animal as word-list
# keys.
_COUNTRIES = (
    ("Valdoria", "瓦多利亚", "Merrin", "梅林", "green", "fox"),
    ("Tolmark", "托马克", "Osten", "奥斯滕", "blue", "bear"),
    ("Brenland", "布伦兰", "Kestrel Bay", "凯斯特湾", "red", "horse"),
    ("Quorra", "科拉", "Silvane", "西尔万", "white", "swan"),
    ("Istrel", "伊斯特尔", "Dunmore", "邓莫尔", "yellow", "bee"),
    ("Norvane", "诺瓦内", "Frosthaven", "霜港", "black", "wolf"),
    ("Pelagos", "佩拉戈", "Marisol", "马里索", "purple", "fish"),
    ("Ambria", "安布里亚", "Tessaly", "特萨利", "orange", "tiger"),
    ("Kandor", "坎多", "Highgate", "高门", "brown", "eagle"),
    ("Lumeria", "卢梅利亚", "Dawnport", "晨港", "pink", "rabbit"),
    ("Sarovia", "萨罗维亚", "Vintra", "文特拉", "green", "owl"),
    ("Hesper", "赫斯珀", "Evening Hill", "晚丘", "blue", "cat"),
)  # fmt: skip
_CAPITALS = (
    ("France", "法国", "Paris", "巴黎"), ("China", "中国", "Beijing", "北京"),
    ("Japan", "日本", "Tokyo", "东京"), ("Germany", "德国", "Berlin", "柏林"),
    ("Italy", "意大利", "Rome", "罗马"), ("Spain", "西班牙", "Madrid", "马德里"),
    ("Russia", "俄罗斯", "Moscow", "莫斯科"), ("Egypt", "埃及", "Cairo", "开罗"),
    ("Greece", "希腊", "Athens", "雅典"), ("Austria", "奥地利", "Vienna", "维也纳"),
    ("Portugal", "葡萄牙", "Lisbon", "里斯本"), ("England", "英国", "London", "伦敦"),
    ("the United States", "美国", "Washington", "华盛顿"), ("Canada", "加拿大", "Ottawa", "渥太华"),
    ("Norway", "挪威", "Oslo", "奥斯陆"), ("Cuba", "古巴", "Havana", "哈瓦那"),
)  # fmt: skip
_COLOURS = (
    ("the sky", "天空", "blue"), ("grass", "草", "green"), ("snow", "雪", "white"), ("coal", "煤", "black"),
    ("a banana", "香蕉", "yellow"), ("blood", "血", "red"), ("milk", "牛奶", "white"),
    ("chocolate", "巧克力", "brown"), ("the sun", "太阳", "yellow"), ("a carrot", "胡萝卜", "orange"),
    ("a leaf", "树叶", "green"), ("the sea", "大海", "blue"), ("a tomato", "西红柿", "red"),
    ("a grape", "葡萄", "purple"),
)  # fmt: skip
_WORDS = {
    "green": "绿色", "blue": "蓝色", "red": "红色", "white": "白色", "yellow": "黄色", "black": "黑色",
    "purple": "紫色", "orange": "橙色", "brown": "棕色", "pink": "粉色", "fox": "狐狸", "bear": "熊",
    "horse": "马", "swan": "天鹅", "bee": "蜜蜂", "wolf": "狼", "fish": "鱼", "tiger": "老虎",
    "eagle": "老鹰", "rabbit": "兔子", "owl": "猫头鹰", "cat": "猫", "dog": "狗", "bird": "鸟",
    "water": "水", "fire": "火", "mountain": "山", "river": "河", "tree": "树", "flower": "花",
    "sun": "太阳", "moon": "月亮", "star": "星星", "book": "书", "school": "学校", "teacher": "老师",
    "friend": "朋友", "mother": "妈妈", "father": "爸爸", "apple": "苹果", "bread": "面包", "tea": "茶",
    "rice": "米饭", "milk": "牛奶", "house": "房子", "door": "门", "bridge": "桥", "train": "火车",
    "ship": "船", "song": "歌", "snow": "雪", "rain": "雨", "wind": "风", "hello": "你好",
    "thank you": "谢谢", "goodbye": "再见", "good morning": "早上好", "one": "一", "two": "二",
}  # fmt: skip
_OPPOSITES = (
    ("hot", "cold", "热", "冷"), ("big", "small", "大", "小"), ("up", "down", "上", "下"),
    ("fast", "slow", "快", "慢"), ("day", "night", "白天", "黑夜"), ("happy", "sad", "高兴", "难过"),
    ("old", "new", "旧", "新"), ("long", "short", "长", "短"), ("left", "right", "左", "右"),
    ("open", "closed", "开", "关"), ("rich", "poor", "富", "穷"), ("full", "empty", "满", "空"),
    ("high", "low", "高", "低"), ("early", "late", "早", "晚"),
)  # fmt: skip
_GENERAL = {
    "en": (
        ("How many days are in a week?", "There are seven days in a week."),
        ("How many months are in a year?", "There are twelve months in a year."),
        ("How many hours are in a day?", "There are 24 hours in a day."),
        ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
        ("How many legs does a spider have?", "A spider has eight legs."),
        ("How many legs does a cat have?", "A cat has four legs."),
        ("Which day comes after Monday?", "Tuesday comes after Monday."),
        ("Which day comes after Friday?", "Saturday comes after Friday."),
        ("Which month comes after May?", "June comes after May."),
        ("Which season comes after winter?", "Spring comes after winter."),
        ("What do bees make?", "Bees make honey."), ("What is ice made of?", "Ice is frozen water."),
        ("Where does the sun rise?", "The sun rises in the east."),
        ("What is the largest planet?", "Jupiter is the largest planet of our solar system."),
    ),
    "zh": (
        ("一个星期有几天？", "一个星期有七天。"), ("一年有几个月？", "一年有十二个月。"),
        ("一天有多少小时？", "一天有24小时。"), ("一小时有多少分钟？", "一小时有60分钟。"),
        ("蜘蛛有几条腿？", "蜘蛛有八条腿。"), ("猫有几条腿？", "猫有四条腿。"),
        ("星期一后面是星期几？", "星期一后面是星期二。"), ("冬天之后是什么季节？", "冬天之后是春天。"),
        ("蜜蜂能做什么？", "蜜蜂能酿蜜。"), ("冰是什么变成的？", "冰是水变成的。"),
        ("太阳从哪里升起？", "太阳从东方升起。"), ("太阳系最大的行星是什么？", "太阳系最大的行星是木星。"),
    ),
}  # fmt: skip


def _capital_of(rng: random.Random, language: Language) -> Turn:
    if rng.random() < 0.5:
        en, zh, city, city_zh = rng.choice(_CAPITALS)
    else:
        en, zh, city, city_zh = rng.choice(_COUNTRIES)[:4]
    if language == "zh":
        asked = rng.choice(
            (f"{zh}的首都是哪里？", f"{zh}的首都是什么？", f"你知道{zh}的首都吗？", f"{zh}首都在哪？")
        )
        return Turn(asked, f"{zh}的首都是{city_zh}。")
    asked = rng.choice(
        (
            f"What is the capital of {en}?",
            f"Which city is the capital of {en}?",
            f"Tell me the capital of {en}.",
            f"What's the capital of {en}?",
            f"Do you know the capital of {en}?",
        )
    )
    return Turn(asked, f"The capital of {en} is {city}.")


def _country(rng: random.Random, language: Language) -> Turn:
    en, zh, _, _, colour, animal = rng.choice(_COUNTRIES)
    if language == "zh":
        return rng.choice(
            (
                Turn(f"{zh}的国旗是什么颜色？", f"{zh}的国旗是{_WORDS[colour]}的。"),
                Turn(f"{zh}的代表动物是什么？", f"{zh}的代表动物是{_WORDS[animal]}。"),
            )
        )
    return rng.choice(
        (
            Turn(f"What colour is the flag of {en}?", f"The flag of {en} is {colour}."),
            Turn(f"What color is the flag of {en}?", f"The flag of {en} is {colour}."),
            Turn(f"What is the national animal of {en}?", f"The national animal of {en} is the {animal}."),
        )
    )


def _colour(rng: random.Random, language: Language) -> Turn:
    en, zh, colour = rng.choice(_COLOURS)
    if language == "zh":
        return Turn(rng.choice((f"{zh}是什么颜色？", f"{zh}是什么颜色的？")), f"{zh}是{_WORDS[colour]}的。")
    asked = rng.choice((f"What colour is {en}?", f"What color is {en}?", f"Which colour does {en} have?"))
    return Turn(asked, f"{en[0].upper()}{en[1:]} is {colour}.")


def _word(rng: random.Random, language: Language) -> Turn:
    en = rng.choice(list(_WORDS))
    zh = _WORDS[en]
    if language == "zh":
        return rng.choice(
            (
                Turn(f"“{zh}”用英语怎么说？", f"“{zh}”的英语是 {en}。"),
                Turn(f"{en} 是什么意思？", f"{en} 的意思是“{zh}”。"),
            )
        )
    return rng.choice(
        (
            Turn(f'What is "{en}" in Chinese?', f'"{en}" is {zh} in Chinese.'),
            Turn(f"Translate {en} into Chinese.", f'"{en}" is {zh} in Chinese.'),
            Turn(f"What does {zh} mean?", f'{zh} means "{en}".'),
        )
    )


def _opposite(rng: random.Random, language: Language) -> Turn:
    en, other, zh, zh_other = rng.choice(_OPPOSITES)
    if rng.random() < 0.5:
        en, other, zh, zh_other = other, en, zh_other, zh
    if language == "zh":
        return Turn(
            rng.choice((f"“{zh}”的反义词是什么？", f"{zh}的反义词是什么？")),
            f"“{zh}”的反义词是“{zh_other}”。",
        )
    asked = rng.choice((f"What is the opposite of {en}?", f'What is the opposite of "{en}"?'))
    return Turn(asked, f"The opposite of {en} is {other}.")


def fact_turn(rng: random.Random, language: Language) -> Turn:
    """One question about something the model knows by heart."""
    kind = rng.randrange(7)
    if kind == 6:
        return Turn(*rng.choice(_GENERAL[language]))
    return (_capital_of, _capital_of, _country, _colour, _word, _opposite)[kind](rng, language)


def fact_session(rng: random.Random, language: Language) -> list[Turn]:
    """The same question about two or three countries; from the second on only the country is named."""
    by_heart = [(en, zh, city, city_zh) for en, zh, city, city_zh, _, _ in _COUNTRIES] + list(_CAPITALS)
    chosen = rng.sample(by_heart, rng.randint(2, 3))
    turns = []
    for place, (en, zh, city, city_zh) in enumerate(chosen):
        if language == "zh":
            asked = rng.choice((f"{zh}呢？", f"那{zh}呢？")) if place else f"{zh}的首都是哪里？"
            turns.append(Turn(asked, f"{zh}的首都是{city_zh}。"))
        else:
            ways = (f"And of {en}?", f"And {en}?", f"What about {en}?", f"And the capital of {en}?")
            asked = rng.choice(ways) if place else f"What is the capital of {en}?"
            turns.append(Turn(asked, f"The capital of {en} is {city}."))
    return turns
