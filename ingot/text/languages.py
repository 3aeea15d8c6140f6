"""The languages of OpenAI's Whisper, in the order of their tokens."""

from __future__ import annotations

from ingot.errors import RequestError

_LISTED = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese,
tr turkish, pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi,
fi finnish, vi vietnamese, he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish,
hu hungarian, ta tamil, no norwegian, th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin,
mi maori, ml malayalam, cy welsh, sk slovak, te telugu, fa persian, lv latvian, bn bengali, sr serbian,
az azerbaijani, sl slovenian, kn kannada, et estonian, mk macedonian, br breton, eu basque, is icelandic,
hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh, sq albanian, sw swahili, gl galician, mr marathi,
pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali, af afrikaans, oc occitan, ka georgian,
be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao, uz uzbek, fo faroese,
ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish, my myanmar,
bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
jw javanese, su sundanese, yue cantonese
"""
NAMES: dict[str, str] = {
    entry.split()[0]: entry.strip().partition(" ")[2].strip()
    for entry in _LISTED.replace("\n", " ").strip().split(", ")
}
CODES = tuple(NAMES)
_OTHERS = """
my burmese, es castilian, nl flemish, ht haitian, lb letzeburgesch, zh mandarin, ro moldavian, ro moldovan,
pa panjabi, ps pushto, si sinhalese, ca valencian
"""
_BY_NAME = {name: code for code, name in NAMES.items()}
_BY_NAME |= {name: code for code, name in map(str.split, _OTHERS.split(","))}
NO_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # between their words


def language_code(name: str) -> str:
    """The code of a language, from its code or English name in any case. Raises ``RequestError`` if there is
    no such language.
    """
    wanted = name.strip().lower()
    code = wanted if wanted in NAMES else _BY_NAME.get(wanted)
    if code is None:
        allowed = "a code or an English name of Whisper's, such as de or german"
        raise RequestError("unknown language", seen=name, allowed=allowed, field="language")
    return code
