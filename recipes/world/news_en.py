"""The English words of the news: event kinds, what stands around them, and questions.

``news`` draws the slots and puts items together.

    WORDING.kinds[0].highlight
"""

from __future__ import annotations

from recipes.world.news_kind import Kind, Wording

_OPENING = Kind(
    name="opening",
    lists={"thing": ("library", "museum", "swimming pool", "bridge", "market hall", "theatre", "clinic")},
    numbers=(40, 990),
    lead=(
        "A new {thing} has opened its doors in {place}.",
        "{place} has a new {thing} at last.",
        "People in {place} can now visit a new {thing}.",
    ),
    facts=(
        ("The ribbon was cut by {who}, the town's {role}.", "{who}, a {role}, cut the ribbon."),
        ("The ceremony took place on {day}.", "The first visitors came in on {day}."),
        ("It has room for {n} people.", "Up to {n} people can be inside at once."),
    ),
    highlight="{who} opened a {thing} for {n} people in {place} on {day}.",
    questions=(
        (("Who opened the {thing}?", "Who cut the ribbon?"), "who"),
        (("What was opened?", "What kind of building opened?"), "thing"),
        (("How many people have room in it?", "How many people can be inside?"), "n"),
    ),
    extras=("Building it took {m} months.", "It cost less than planned."),
)
_FIRE = Kind(
    name="fire",
    lists={"thing": ("bakery", "warehouse", "barn", "school", "hotel", "paper mill", "shop")},
    numbers=(3, 60),
    lead=(
        "A fire broke out in a {thing} in {place}.",
        "Smoke rose over {place} when a {thing} caught fire.",
        "Flames destroyed part of a {thing} in {place}.",
    ),
    facts=(
        ("{n} people were brought to safety.", "Firefighters led {n} people out of the building."),
        ("{who}, a {role} who lives nearby, saw it first.", "The alarm was raised by {who}, a {role}."),
        ("It started late on {day}.", "The fire began in the early hours of {day}."),
    ),
    highlight="{n} people were saved from a {thing} fire in {place} on {day} after {who} raised the alarm.",
    questions=(
        (("Who raised the alarm?", "Who saw the fire first?"), "who"),
        (("What caught fire?", "Which building burned?"), "thing"),
        (("How many people were saved?", "How many people were brought out?"), "n"),
    ),
    extras=("Nobody was hurt.", "The roof will have to be rebuilt."),
)
_MATCH = Kind(
    name="match",
    lists={"thing": ("football", "volleyball", "hockey", "basketball", "handball", "rugby")},
    numbers=(2, 30),
    lead=(
        "The {thing} team of {place} won its match against {place2}.",
        "There was joy in {place} after a {thing} win over {place2}.",
        "{place} beat {place2} in a {thing} match that nobody will forget.",
    ),
    facts=(
        ("{who} scored {n} points.", "{n} points came from {who} alone."),
        ("The match was played on {day}.", "The teams met on {day}."),
        ("The coach praised the defence.", "It rained in the second half.", "The stands were full."),
    ),
    highlight="{who} scored {n} points on {day} as {place} beat {place2} at {thing}.",
    questions=(
        (("Who scored the points?", "Which player was named?"), "who"),
        (("Who lost the match?", "Which town was beaten?"), "place2"),
        (("Which sport was played?", "What did they play?"), "thing"),
        (("How many points did {who} score?",), "n"),
    ),
)
_ELECTION = Kind(
    name="election",
    lists={"thing": ("mayor", "head of the council", "judge", "school director", "harbour master")},
    numbers=(120, 990),
    lead=(
        "The people of {place} have voted for a new {thing}.",
        "{place} has chosen its next {thing}.",
        "The count is over in {place}, where a {thing} was to be elected.",
    ),
    facts=(
        ("{who} won with {n} votes.", "With {n} votes the winner is {who}."),
        ("The vote was held on {day}.", "Voters went to the polls on {day}."),
        ("The other candidate was {who2}.", "{who2} came second and sent good wishes."),
    ),
    highlight="{who} was elected {thing} of {place} on {day} with {n} votes, ahead of {who2}.",
    questions=(
        (("Who won the election?", "Who was elected?"), "who"),
        (("Who came second?", "Who lost the election?"), "who2"),
        (("How many votes did the winner get?", "How many votes were enough to win?"), "n"),
        (("Which post was it about?",), "thing"),
    ),
)
_STORM = Kind(
    name="storm",
    lists={"thing": ("storm", "flood", "snowstorm", "heatwave", "hailstorm")},
    numbers=(20, 900),
    lead=(
        "A {thing} has hit {place} hard.",
        "After the {thing}, life in {place} is slow to return to normal.",
        "{place} is counting the damage of a {thing}.",
    ),
    facts=(
        ("{n} homes were without power.", "The lights went out in {n} homes."),
        ("It reached the town on {day}.", "The worst came on {day}."),
        ("{who}, a {role}, took charge of the helpers.", "The helpers were led by {who}, a {role}."),
    ),
    highlight="A {thing} left {n} homes in {place} without power on {day}; {who} led the helpers.",
    questions=(
        (("Who led the helpers?", "Who took charge?"), "who"),
        (("What hit the town?", "What kind of weather was it?"), "thing"),
        (("How many homes had no power?", "In how many homes did the lights go out?"), "n"),
    ),
    extras=("Several roads were closed.", "Schools stayed shut for {m} days."),
)
_FIND = Kind(
    name="find",
    lists={"thing": ("Roman coin", "stone axe", "ship's bell", "whale bone", "clay pot", "gold ring")},
    numbers=(120, 990),
    lead=(
        "A {thing} has been found near {place}.",
        "Experts are looking at a {thing} that came to light near {place}.",
        "What looked like rubbish in a field near {place} turned out to be a {thing}.",
    ),
    facts=(
        ("It is about {n} years old.", "Experts say that it is {n} years old."),
        ("{who}, a {role}, came across it.", "It was dug up by {who}, a {role}."),
        ("The find was made on {day}.", "It was discovered on {day}."),
    ),
    highlight="{who} found a {thing} from {n} years ago near {place} on {day}.",
    questions=(
        (("Who found the {thing}?", "Who made the find?"), "who"),
        (("What was found?", "What came to light?"), "thing"),
        (("How old is it?", "How many years old is the {thing}?"), "n"),
    ),
    extras=("It will be shown in the museum.", "More digging is planned."),
)
_PRIZE = Kind(
    name="prize",
    lists={"thing": ("novel", "song", "painting", "film", "cake", "garden", "poem")},
    numbers=(100, 990),
    lead=(
        "A prize for the best {thing} of the year was handed out in {place}.",
        "The jury in {place} has chosen the {thing} of the year.",
        "A {thing} has won the big prize of {place}.",
    ),
    facts=(
        ("It is the work of {who}, a {role}.", "The winner is {who}, a {role}."),
        ("The prize is worth {n} crowns.", "With it come {n} crowns."),
        ("The evening was held on {day}.", "The winner was named on {day}."),
    ),
    highlight="{who} won {n} crowns in {place} on {day} for the best {thing}.",
    questions=(
        (("Who won the prize?", "Who is the winner?"), "who"),
        (("What was the prize for?", "What did the winner make?"), "thing"),
        (("How many crowns is the prize worth?", "How many crowns did the winner get?"), "n"),
    ),
)
_FACTORY = Kind(
    name="factory",
    lists={"thing": ("bicycles", "chairs", "radios", "lamps", "boats", "clocks", "shoes")},
    numbers=(20, 950),
    lead=(
        "A factory that makes {thing} is coming to {place}.",
        "Good news for {place}: {thing} will be made there.",
        "{place} is getting a factory for {thing}.",
    ),
    facts=(
        ("It brings {n} jobs.", "{n} people will find work there."),
        ("The plan comes from {who}, a {role}.", "Behind the plan is {who}, a {role}."),
        ("Work starts on {day}.", "The gates open on {day}."),
    ),
    highlight="{who} will create {n} jobs in {place} with a factory for {thing} from {day}.",
    questions=(
        (("Who is behind the plan?", "Whose plan is it?"), "who"),
        (("What will be made there?", "What does the factory make?"), "thing"),
        (("How many jobs are created?", "How many people will find work?"), "n"),
    ),
    extras=("The council agreed after a long talk.", "The hall is {m} metres long."),
)
_ANIMAL = Kind(
    name="animal",
    lists={"thing": ("dog", "horse", "goat", "parrot", "cat", "donkey", "tortoise")},
    numbers=(2, 40),
    lead=(
        "A {thing} that was lost near {place} is home again.",
        "The long walk of a {thing} ended well in {place}.",
        "A missing {thing} has turned up in {place}.",
    ),
    facts=(
        ("It had been away for {n} days.", "The search went on for {n} days."),
        ("{who}, a {role}, found it behind a shed.", "It was {who}, a {role}, who found it."),
        ("It was found on {day}.", "The good news came on {day}."),
    ),
    highlight="{who} found a {thing} in {place} on {day} that had been missing for {n} days.",
    questions=(
        (("Who found the {thing}?", "Who found it?"), "who"),
        (("Which animal was lost?", "What kind of animal was it?"), "thing"),
        (("How many days was it away?", "For how many days was it missing?"), "n"),
    ),
    extras=("It was hungry but well.", "It belongs to {who2}."),
)
_STUDY = Kind(
    name="study",
    lists={"thing": ("sleep", "bees", "old trees", "bread", "rivers", "music lessons", "snails")},
    numbers=(30, 990),
    lead=(
        "Researchers in {place} have published a study of {thing}.",
        "A study of {thing} comes from {place}.",
        "New facts about {thing} were presented in {place}.",
    ),
    facts=(
        ("The work was led by {who}.", "{who} was in charge of the study."),
        ("{n} samples were looked at.", "It rests on {n} samples."),
        ("It came out on {day}.", "The results were shown on {day}."),
    ),
    highlight="A study of {thing} with {n} samples, led by {who}, came out in {place} on {day}.",
    questions=(
        (("Who led the study?", "Who was in charge?"), "who"),
        (("What is the study about?", "What did they study?"), "thing"),
        (("How many samples were used?", "On how many samples does it rest?"), "n"),
    ),
    extras=("Others call the result a surprise.", "The work took {m} months."),
)
_FESTIVAL = Kind(
    name="festival",
    lists={"thing": ("lantern", "cheese", "kite", "jazz", "puppet", "apple", "book")},
    numbers=(100, 990),
    lead=(
        "The {thing} festival of {place} is over.",
        "{place} has celebrated its {thing} festival.",
        "For one day everything in {place} was about the {thing} festival.",
    ),
    facts=(
        ("{n} guests came.", "The organisers counted {n} guests."),
        ("It was held on {day}.", "The date was {day}, as always."),
        ("{who}, a {role}, gave the opening speech.", "The opening speech was given by {who}, a {role}."),
    ),
    highlight="{n} guests came to the {thing} festival in {place} on {day}, which {who} opened.",
    questions=(
        (("Who gave the opening speech?", "Who opened the festival?"), "who"),
        (("What kind of festival was it?", "Which festival was held?"), "thing"),
        (("How many guests came?", "How many guests were counted?"), "n"),
    ),
    extras=("The music went on until midnight.", "The sun shone all day."),
)
_RECORD = Kind(
    name="record",
    lists={"thing": ("swum", "cycled", "walked", "rowed", "skated", "run")},
    numbers=(50, 990),
    lead=(
        "A record has been set in {place}.",
        "{place} is proud of a new record.",
        "Something that nobody had done before was done in {place}.",
    ),
    facts=(
        ("{who}, a {role}, has {thing} {n} kilometres.", "{n} kilometres were {thing} by {who}, a {role}."),
        ("The last metres were covered on {day}.", "The finish was reached on {day}."),
        ("The old record was {m} years old.", "It had been tried for {m} years."),
    ),
    highlight="{who} has {thing} {n} kilometres, a record that was set in {place} on {day}.",
    questions=(
        (("Who set the record?", "Who holds the record now?"), "who"),
        (("How many kilometres was it?", "How many kilometres were {thing}?"), "n"),
    ),
)

WORDING = Wording(
    kinds=(
        _OPENING,
        _FIRE,
        _MATCH,
        _ELECTION,
        _STORM,
        _FIND,
        _PRIZE,
        _FACTORY,
        _ANIMAL,
        _STUDY,
        _FESTIVAL,
        _RECORD,
    ),
    openers=(
        "It was the talk of the week.",
        "Here is the latest from the region.",
        "Our reporter was there.",
        "Not every day brings news like this.",
    ),
    extras=(
        ('"I will remember this for a long time," said {who3}.', ("Who will remember it?",), "who3"),
        ('"We talked about nothing else," said {who3}, a neighbour.', ("Who is the neighbour?",), "who3"),
        ("The weather was {weather}.", ("How was the weather?", "What was the weather like?"), "weather"),
        ("The local paper printed {m} photographs.", ("How many photographs were printed?",), "m"),
        ("Guests from {place3} had come as well.", ("Where were the guests from?",), "place3"),
        ("Nothing like it has happened for {m} years.", (), ""),
        (
            "{who4}, who has lived in the town for {k} years, was surprised.",
            ("Who was surprised?", "Who has lived in the town for {k} years?"),
            "who4",
        ),
        (
            "The evening news on the radio began with a report by {who5}.",
            ("Who made the radio report?",),
            "who5",
        ),
        ("A bus for visitors left {place4} at {k} in the morning.", ("Where did the bus leave?",), "place4"),
        ("Children from the school drew {j} pictures of it.", ("How many pictures were drawn?",), "j"),
        ("In the end there was tea and cake for everybody.", (), ""),
        ("More is to follow next week.", (), ""),
        ("The council will talk about it soon.", (), ""),
    ),
    lists={
        "role": ("teacher", "baker", "doctor", "farmer", "nurse", "painter", "driver", "student", "pilot"),
        "weather": ("sunny", "cloudy", "windy", "cold", "warm", "wet", "foggy"),
    },
    questions=(
        (("Where did this happen?", "Which town is the text about?", "In which town was it?"), "place"),
        (("When did this happen?", "On which day was it?", "When was it?"), "day"),
    ),
    joiner=" ",
)
