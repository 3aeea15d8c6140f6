"""Nouns, adjectives and places in English and German, with what agreement needs.

A noun line: English singular and plural, German singular and plural, gender.

    NOUNS[0].en == ("lamp", "lamps")
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Gender = Literal["m", "f", "n"]


class Noun(NamedTuple):
    """A thing in both languages: (singular, plural) each."""

    en: tuple[str, str]
    de: tuple[str, str]
    gender: Gender


class Adjective(NamedTuple):
    """The German form is the stem, which takes endings."""

    en: str
    de: str


_THINGS = """
lamp lamps Lampe Lampen f; table tables Tisch Tische m; chair chairs Stuhl Stühle m
book books Buch Bücher n; letter letters Brief Briefe m; bicycle bicycles Fahrrad Fahrräder n
car cars Auto Autos n; boat boats Boot Boote n; kettle kettles Kessel Kessel m; cup cups Tasse Tassen f
plate plates Teller Teller m; spoon spoons Löffel Löffel m; fork forks Gabel Gabeln f
knife knives Messer Messer n; bottle bottles Flasche Flaschen f; basket baskets Korb Körbe m
blanket blankets Decke Decken f; pillow pillows Kissen Kissen n; mirror mirrors Spiegel Spiegel m
clock clocks Uhr Uhren f; window windows Fenster Fenster n; door doors Tür Türen f
key keys Schlüssel Schlüssel m; box boxes Kiste Kisten f; bag bags Tüte Tüten f
suitcase suitcases Koffer Koffer m; coat coats Mantel Mäntel m; hat hats Hut Hüte m
shirt shirts Hemd Hemden n; dress dresses Kleid Kleider n; shoe shoes Schuh Schuhe m
glove gloves Handschuh Handschuhe m; ring rings Ring Ringe m; necklace necklaces Kette Ketten f
picture pictures Bild Bilder n; painting paintings Gemälde Gemälde n; camera cameras Kamera Kameras f
radio radios Radio Radios n; guitar guitars Gitarre Gitarren f; violin violins Geige Geigen f
piano pianos Klavier Klaviere n; drum drums Trommel Trommeln f; flute flutes Flöte Flöten f
ball balls Ball Bälle m; doll dolls Puppe Puppen f; kite kites Drachen Drachen m
ticket tickets Fahrkarte Fahrkarten f; map maps Landkarte Landkarten f
newspaper newspapers Zeitung Zeitungen f; magazine magazines Zeitschrift Zeitschriften f
notebook notebooks Heft Hefte n; pencil pencils Bleistift Bleistifte m; brush brushes Pinsel Pinsel m
hammer hammers Hammer Hämmer m; nail nails Nagel Nägel m; ladder ladders Leiter Leitern f
rope ropes Seil Seile n; bucket buckets Eimer Eimer m; broom brooms Besen Besen m
candle candles Kerze Kerzen f; match matches Streichholz Streichhölzer n; stone stones Stein Steine m
shell shells Muschel Muscheln f; flower flowers Blume Blumen f; rose roses Rose Rosen f
tulip tulips Tulpe Tulpen f; tree trees Baum Bäume m; apple apples Apfel Äpfel m
pear pears Birne Birnen f; cherry cherries Kirsche Kirschen f; plum plums Pflaume Pflaumen f
lemon lemons Zitrone Zitronen f; orange oranges Apfelsine Apfelsinen f; tomato tomatoes Tomate Tomaten f
onion onions Zwiebel Zwiebeln f; carrot carrots Möhre Möhren f; potato potatoes Kartoffel Kartoffeln f
mushroom mushrooms Pilz Pilze m; egg eggs Ei Eier n; cake cakes Kuchen Kuchen m
biscuit biscuits Keks Kekse m; sandwich sandwiches Brötchen Brötchen n; cheese cheeses Käse Käse m
horse horses Pferd Pferde n; cow cows Kuh Kühe f; sheep sheep Schaf Schafe n; goat goats Ziege Ziegen f
dog dogs Hund Hunde m; cat cats Katze Katzen f; mouse mice Maus Mäuse f; rabbit rabbits Hase Hasen m
duck ducks Ente Enten f; goose geese Gans Gänse f; parrot parrots Papagei Papageien m
owl owls Eule Eulen f; fish fish Fisch Fische m; frog frogs Frosch Frösche m
turtle turtles Schildkröte Schildkröten f; fox foxes Fuchs Füchse m; carpet carpets Teppich Teppiche m
curtain curtains Vorhang Vorhänge m; shelf shelves Regal Regale n; drawer drawers Schublade Schubladen f
wheel wheels Rad Räder n; engine engines Motor Motoren m; pump pumps Pumpe Pumpen f
tent tents Zelt Zelte n; umbrella umbrellas Schirm Schirme m; wallet wallets Geldbeutel Geldbeutel m
coin coins Münze Münzen f; stamp stamps Briefmarke Briefmarken f
postcard postcards Postkarte Postkarten f; parcel parcels Paket Pakete n
envelope envelopes Umschlag Umschläge m; photograph photographs Foto Fotos n
puzzle puzzles Rätsel Rätsel n; game games Spiel Spiele n; song songs Lied Lieder n
poem poems Gedicht Gedichte n; story stories Geschichte Geschichten f; recipe recipes Rezept Rezepte n
plan plans Plan Pläne m; report reports Bericht Berichte m; telescope telescopes Fernrohr Fernrohre n
compass compasses Kompass Kompasse m; machine machines Maschine Maschinen f
robot robots Roboter Roboter m; computer computers Rechner Rechner m
telephone telephones Telefon Telefone n; battery batteries Batterie Batterien f
screen screens Bildschirm Bildschirme m; bell bells Glocke Glocken f; flag flags Fahne Fahnen f
sign signs Schild Schilder n; fence fences Zaun Zäune m
"""
_PEOPLE = """
teacher teachers Lehrer Lehrer m; doctor doctors Arzt Ärzte m; nurse nurses Pfleger Pfleger m
baker bakers Bäcker Bäcker m; farmer farmers Bauer Bauern m; gardener gardeners Gärtner Gärtner m
painter painters Maler Maler m; singer singers Sänger Sänger m; dancer dancers Tänzer Tänzer m
driver drivers Fahrer Fahrer m; pilot pilots Flieger Flieger m; sailor sailors Matrose Matrosen m
captain captains Kapitän Kapitäne m; soldier soldiers Soldat Soldaten m; judge judges Richter Richter m
lawyer lawyers Anwalt Anwälte m; writer writers Schriftsteller Schriftsteller m
engineer engineers Techniker Techniker m; butcher butchers Metzger Metzger m; cook cooks Koch Köche m
waiter waiters Kellner Kellner m; tailor tailors Schneider Schneider m
carpenter carpenters Tischler Tischler m; plumber plumbers Klempner Klempner m
student students Schüler Schüler m; professor professors Professor Professoren m
scientist scientists Forscher Forscher m; reporter reporters Reporter Reporter m
neighbour neighbours Nachbar Nachbarn m; uncle uncles Onkel Onkel m; aunt aunts Tante Tanten f
sister sisters Schwester Schwestern f; brother brothers Bruder Brüder m; mother mothers Mutter Mütter f
father fathers Vater Väter m; daughter daughters Tochter Töchter f; son sons Sohn Söhne m
cousin cousins Vetter Vettern m; guest guests Gast Gäste m; visitor visitors Besucher Besucher m
"""
_ADJECTIVES = """
red rot; green grün; blue blau; yellow gelb; white weiß; black schwarz; grey grau; brown braun
golden golden; old alt; new neu; small klein; big groß; heavy schwer; light leicht; broken kaputt
clean sauber; dirty schmutzig; wet nass; dry trocken; warm warm; cold kalt; cheap billig
expensive kostbar; beautiful schön; ugly hässlich; strange seltsam; funny lustig; round rund; square eckig
soft weich; hard hart; long lang; short kurz; thin dünn; thick dick; empty leer; full voll; open offen
simple einfach; famous berühmt; modern modern; wooden hölzern; shiny glänzend; quiet ruhig; loud laut
narrow schmal; wide breit; smooth glatt; rough rau; sharp scharf; bright hell; pretty hübsch; tiny winzig
huge riesig; wonderful wunderbar; ordinary gewöhnlich; rare selten; perfect perfekt; lovely nett
ancient uralt; useful nützlich; colourful bunt; plain schlicht; sturdy stabil; fragile zerbrechlich
rusty rostig; dusty staubig; lost verloren; hidden versteckt; special besonder; common häufig
favourite liebst; foreign fremd
"""
_CITIES = """
London London; Berlin Berlin; Hamburg Hamburg; Paris Paris; Vienna Wien; Munich München; Cologne Köln
Rome Rom; Madrid Madrid; Lisbon Lissabon; Dublin Dublin; Oslo Oslo; Prague Prag; Warsaw Warschau
Zurich Zürich; Geneva Genf; Brussels Brüssel; Amsterdam Amsterdam; Copenhagen Kopenhagen
Helsinki Helsinki; Athens Athen; Venice Venedig; Milan Mailand; Naples Neapel; Florence Florenz
Boston Boston; Chicago Chicago; Toronto Toronto; Sydney Sydney; Cairo Kairo; Moscow Moskau
Budapest Budapest; Leipzig Leipzig; Dresden Dresden; Bremen Bremen; Hanover Hannover; Stuttgart Stuttgart
Frankfurt Frankfurt; Oxford Oxford; Cambridge Cambridge; Manchester Manchester; Liverpool Liverpool
Edinburgh Edinburgh; Bristol Bristol; Tokyo Tokio; Delhi Delhi; Nairobi Nairobi; Lima Lima; Havana Havanna
Barcelona Barcelona; Salzburg Salzburg; Basel Basel; Bonn Bonn; Kiel Kiel; Rostock Rostock
Freiburg Freiburg; Heidelberg Heidelberg; Marseille Marseille; Antwerp Antwerpen; Seville Sevilla
"""
# English place with its preposition | German place with its preposition, for where something happens.
_SPOTS = """
in the kitchen|in der Küche; in the garden|im Garten; at the market|auf dem Markt
at the station|am Bahnhof; in the library|in der Bibliothek; at the harbour|am Hafen
on the beach|am Strand; in the forest|im Wald; at school|in der Schule; in the office|im Büro
at the museum|im Museum; in the theatre|im Theater; at the airport|am Flughafen; in the cellar|im Keller
on the roof|auf dem Dach; behind the church|hinter der Kirche; near the river|am Fluss
under the bridge|unter der Brücke; in the village|im Dorf; at the hotel|im Hotel
in the hospital|im Krankenhaus; on the farm|auf dem Hof; in the bakery|in der Bäckerei
at the restaurant|im Restaurant; in the park|im Park; on the island|auf der Insel; in the valley|im Tal
on the mountain|auf dem Berg; in the castle|im Schloss; at the pharmacy|in der Apotheke
in the factory|in der Fabrik; at the bank|in der Bank; in the bathroom|im Badezimmer
in the bedroom|im Schlafzimmer; in the garage|in der Garage; on the balcony|auf dem Balkon
at the university|an der Universität; in the tunnel|im Tunnel; at the lake|am See
in the meadow|auf der Wiese; beside the tower|neben dem Turm; across the street|gegenüber
at the theatre|am Theater; in the corridor|im Flur
"""


def _nouns(text: str) -> tuple[Noun, ...]:
    found = []
    for line in text.replace("\n", ";").split(";"):
        if line.strip():
            one, many, eins, viele, gender = line.split()
            assert gender in ("m", "f", "n")
            found.append(Noun((one, many), (eins, viele), gender))  # type: ignore[arg-type]
    return tuple(found)


def _pairs(text: str, between: str | None = None) -> tuple[tuple[str, str], ...]:
    entries = (line.strip().split(between) for line in text.replace("\n", ";").split(";") if line.strip())
    return tuple((first, second) for first, second in entries)


NOUNS = _nouns(_THINGS)
PEOPLE = _nouns(_PEOPLE)
ADJECTIVES = tuple(Adjective(*pair) for pair in _pairs(_ADJECTIVES))
CITIES = _pairs(_CITIES)
SPOTS = _pairs(_SPOTS, "|")
