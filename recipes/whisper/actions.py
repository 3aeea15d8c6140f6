"""Verbs, times, numbers and names in English and German.

A verb line: English base, third person, past; German infinitive, third person, participle. All take an
accusative object and "haben", and none is separable, so every template can use every verb.

    number_word(21, "de") == "einundzwanzig"
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Language = Literal["en", "de"]


class Verb(NamedTuple):
    """Forms: (base, third person, past) and (infinitive, third person, participle)."""

    en: tuple[str, str, str]
    de: tuple[str, str, str]


_VERBS = """
buy buys bought kaufen kauft gekauft; find finds found finden findet gefunden
carry carries carried tragen trägt getragen; bring brings brought bringen bringt gebracht
take takes took nehmen nimmt genommen; see sees saw sehen sieht gesehen
need needs needed brauchen braucht gebraucht; paint paints painted malen malt gemalt
clean cleans cleaned putzen putzt geputzt; sell sells sold verkaufen verkauft verkauft
lose loses lost verlieren verliert verloren; forget forgets forgot vergessen vergisst vergessen
hide hides hid verstecken versteckt versteckt; open opens opened öffnen öffnet geöffnet
repair repairs repaired reparieren repariert repariert; break breaks broke zerbrechen zerbricht zerbrochen
pay pays paid bezahlen bezahlt bezahlt; order orders ordered bestellen bestellt bestellt
want wants wanted wollen will gewollt; love loves loved lieben liebt geliebt
hate hates hated hassen hasst gehasst; hold holds held halten hält gehalten
throw throws threw werfen wirft geworfen; catch catches caught fangen fängt gefangen
push pushes pushed schieben schiebt geschoben; pull pulls pulled ziehen zieht gezogen
wash washes washed waschen wäscht gewaschen; draw draws drew zeichnen zeichnet gezeichnet
describe describes described beschreiben beschreibt beschrieben; choose chooses chose wählen wählt gewählt
borrow borrows borrowed leihen leiht geliehen; steal steals stole stehlen stiehlt gestohlen
build builds built bauen baut gebaut; watch watches watched beobachten beobachtet beobachtet
know knows knew kennen kennt gekannt; remember remembers remembered behalten behält behalten
use uses used benutzen benutzt benutzt; touch touches touched berühren berührt berührt
measure measures measured messen misst gemessen; count counts counted zählen zählt gezählt
collect collects collected sammeln sammelt gesammelt; follow follows followed verfolgen verfolgt verfolgt
keep keeps kept bewahren bewahrt bewahrt; send sends sent schicken schickt geschickt
move moves moved bewegen bewegt bewegt; get gets got bekommen bekommt bekommen
test tests tested prüfen prüft geprüft; share shares shared teilen teilt geteilt
admire admires admired bewundern bewundert bewundert; miss misses missed vermissen vermisst vermisst
study studies studied studieren studiert studiert; design designs designed entwerfen entwirft entworfen
cover covers covered bedecken bedeckt bedeckt; wrap wraps wrapped verpacken verpackt verpackt
save saves saved retten rettet gerettet; show shows showed zeigen zeigt gezeigt
expect expects expected erwarten erwartet erwartet; burn burns burned verbrennen verbrennt verbrannt
"""
_TIMES = """
today|heute; yesterday|gestern; tomorrow|morgen; on Monday|am Montag; on Tuesday|am Dienstag
on Wednesday|am Mittwoch; on Thursday|am Donnerstag; on Friday|am Freitag; on Saturday|am Samstag
on Sunday|am Sonntag; in January|im Januar; in February|im Februar; in March|im März; in April|im April
in May|im Mai; in June|im Juni; in July|im Juli; in August|im August; in September|im September
in October|im Oktober; in November|im November; in December|im Dezember; in spring|im Frühling
in summer|im Sommer; in autumn|im Herbst; in winter|im Winter; at night|nachts
before breakfast|vor dem Frühstück; after lunch|nach dem Mittagessen; during dinner|beim Abendessen
at midnight|um Mitternacht; at noon|mittags; every morning|jeden Morgen; every evening|jeden Abend
this afternoon|heute Nachmittag; later|später; again|wieder; always|immer; often|oft; sometimes|manchmal
now|jetzt; soon|bald; quickly|schnell; slowly|langsam; carefully|vorsichtig; happily|fröhlich
suddenly|plötzlich; alone|allein
"""
_MANNERS = """
perhaps|vielleicht; really|wirklich; never|nie; usually|meistens; finally|endlich; probably|wahrscheinlich
rarely|selten; secretly|heimlich; certainly|sicher; already|schon; still|noch; gladly|gern; only|nur
also|auch; seldom|kaum; almost|fast
"""
_GIVEN = """
Anna Ben Clara David Emma Felix Greta Henry Ida Jonas Karla Leo Maria Noah Olga Paul Rosa Simon Tina
Viktor Walter Yvonne Alice Bruno Charlotte Daniel Eva Frank Hanna Isaac Julia Kevin Laura Martin Nina
Oscar Peter Quentin Robert Sarah Thomas Ursula Vera William Amelia Bernd Carmen Dieter Elena Fiona George
Helga Ingrid James Katrin Lukas Monika Nora Oliver Paula Richard Sophie Tobias Wendy Arthur Barbara Conrad
Diana Edgar Frieda Gustav Heidi Ivan Jenny Kurt Linda Max Natalie Otto Petra Rita Stefan Theresa Ulrich
Vincent
"""
_FAMILY = """
Smith Becker Jones Fischer Taylor Wagner Brown Schulz Wilson Hoffmann Evans Koch Walker Richter Wright
Klein Robinson Wolf Thompson Neumann White Schwarz Hughes Zimmermann Edwards Braun Green Hartmann Lewis
Krüger Clarke Lange Jackson Werner Wood Krause Turner Lehmann Hill Maier Cooper Köhler Morris Herrmann
Ward König Watson Walter Brooks Mason Bennett Huber Cook Kaiser Bailey Fuchs Parker Peters Collins Möller
Murphy Weiß Kelly Jung Morgan Hahn Bell Vogel Carter Friedrich Foster Keller Russell Günther Simmons
Winkler
"""
# One to nineteen, then the tens.
_NUMBERS_EN = """
one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_NUMBERS_DE = """
eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn
achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig
"""


def _verbs(text: str) -> tuple[Verb, ...]:
    rows = [line.split() for line in text.replace("\n", ";").split(";") if line.strip()]
    return tuple(Verb((a, b, c), (d, e, f)) for a, b, c, d, e, f in rows)


def _phrases(text: str) -> tuple[tuple[str, str], ...]:
    entries = (line.strip().split("|") for line in text.replace("\n", ";").split(";") if line.strip())
    return tuple((first, second) for first, second in entries)


VERBS = _verbs(_VERBS)
TIMES = _phrases(_TIMES)
MANNERS = _phrases(_MANNERS)
GIVEN = tuple(_GIVEN.split())
FAMILY = tuple(_FAMILY.split())


_NUMBERS: dict[Language, list[str]] = {"en": _NUMBERS_EN.split(), "de": _NUMBERS_DE.split()}


def number_word(value: int, language: Language) -> str:
    """A number of 1 to 999 in words; English ones have spaces and no hyphens."""
    names = _NUMBERS[language]
    if value >= 100:
        rest = number_word(value % 100, language) if value % 100 else ""
        if language == "en":
            return f"{names[value // 100 - 1]} hundred {rest}".strip()
        return ("" if value < 200 else names[value // 100 - 1]) + "hundert" + rest
    tens, ones = divmod(value, 10)
    if value < 20 or not ones:
        return names[value - 1 if value < 20 else tens + 17]
    if language == "en":
        return f"{names[tens + 17]} {names[ones - 1]}"
    return ("ein" if ones == 1 else names[ones - 1]) + "und" + names[tens + 17]
