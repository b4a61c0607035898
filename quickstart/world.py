"""The facts of the quickstart's small made-up world, with their wordings as statements and as questions.

A `Fact` is the source of both the pretraining text (`says`) and the questions for fine-tuning (`asks`, `answer`).
`data.py` generates the text and decides which questions are held out.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

SEED = 7


@dataclass(frozen=True)
class Fact:
    """One fact of this world."""

    topic: str
    about: str
    """The subject. Facts with the same topic and subject are held out together, so that no answer leaks."""
    answer: str
    """The fact as a sentence, which is also the answer to its questions."""
    says: tuple[str, ...]
    """Other wordings of the statement."""
    asks: tuple[str, ...]


def listed(text: str) -> list[str]:
    return " ".join(text.split()).split(", ")


def pairs(text: str) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (entry.split() for entry in listed(text))]


# --- the village --------------------------------------------------------------------------------------------------

NAMES = listed("""
    Alda, Bram, Cosmo, Dilly, Edda, Fenno, Greta, Hob, Ivo, Juna, Kip, Lotta, Mara, Nils, Odette, Pim, Quill, Rosa,
    Sander, Tilda, Ugo, Vera, Wendel, Xenia, Yorick, Zelda, Anker, Birte, Cato, Dorrit, Emil, Frieda, Gustav, Hanne,
    Ilja, Jorn, Klara, Lennart, Minna, Niklas, Ottilie, Palle, Ronja, Sixten, Tove, Ulf, Viggo, Wilma
""")
KINDS = listed("fox, otter, badger, hare, hedgehog, mole, owl, heron, squirrel, beaver, goose, cat")
HOMES = listed("""
    the old mill, the lighthouse, the red barge, the glass house, the bell tower, the boat shed, the corner shop,
    the hollow oak, the stone bridge, the blue cottage, the railway carriage, the windmill, the inn, the harbour
    office, the tree house, the cellar of the library
""")
WORK = listed("""
    bakes bread, mends shoes, repairs clocks, carries the mail, teaches music, keeps bees, paints signs, sells fish,
    builds boats, grows roses, binds books, sweeps chimneys, weaves baskets, bottles honey, draws maps, tunes pianos
""")
FOOD = listed("""
    apple pie, onion soup, cherry jam, cheese toast, plum cake, roast chestnuts, pea stew, lemon tart, dark bread,
    pickled beets, warm milk, carrot salad, ginger biscuits, mushroom rice
""")
TUNES = listed("flute, drum, fiddle, harp, horn, accordion, banjo, piano, whistle, cello")


def residents() -> Iterator[Fact]:
    draw = random.Random(SEED)
    for pair in zip(NAMES[::2], NAMES[1::2], strict=True):  # friends are kept back together
        for name, friend in (pair, pair[::-1]):
            kind, home, work = draw.choice(KINDS), draw.choice(HOMES), draw.choice(WORK)
            food, tune = draw.choice(FOOD), draw.choice(TUNES)
            a, fact = _article(kind), functools.partial(Fact, "village", " and ".join(sorted(pair)))
            yield fact(
                f"{name} is {a} {kind}.",
                (f"{name} the {kind} is well known here.", f"Our {kind} {name} is at home in the village.",
                 f"What kind of animal {name} is, everyone knows: {a} {kind}."),
                (f"What animal is {name}?", f"What kind of animal is {name}?"),
            )  # fmt: skip
            yield fact(
                f"{name} lives in {home}.",
                (f"The home of {name} is {home}.", f"In the evening {name} goes home to {home}.",
                 f"Where {name} lives, in {home}, it is always warm.", f"You will find {name} in {home}."),
                (f"Where does {name} live?", f"Where is the home of {name}?", f"In which place does {name} live?"),
            )  # fmt: skip
            yield fact(
                f"{name} {work} for a living.",
                (f"Every morning {name} {work}.", f"{name} {work}, and is good at it.",
                 f"What {name} does all day: {name} {work}."),
                (f"What does {name} do for a living?", f"What is the work of {name}?"),
            )  # fmt: skip
            yield fact(
                f"{name} likes {food} best.",
                (f"The favourite food of {name} is {food}.", f"At supper {name} asks for {food}.",
                 f"What {name} likes to eat most is {food}."),
                (f"What does {name} like to eat?", f"What is the favourite food of {name}?"),
            )  # fmt: skip
            yield fact(
                f"{name} plays the {tune}.",
                (f"When there is music, {name} plays the {tune}.", f"The instrument of {name} is the {tune}.",
                 f"Which instrument {name} plays can be heard from afar: the {tune}."),
                (f"Which instrument does {name} play?", f"What instrument does {name} play?"),
            )  # fmt: skip
            yield fact(
                f"The best friend of {name} is {friend}.",
                (f"{name} and {friend} are best friends.", f"{name} often walks with {friend}, a true friend.",
                 f"Who the best friend of {name} is, nobody doubts: {friend}."),
                (f"Who is the best friend of {name}?", f"Who is a good friend of {name}?"),
            )  # fmt: skip


# --- islands ------------------------------------------------------------------------------------------------------

ISLANDS = listed("""
    Arvo, Belmar, Corran, Dunmer, Eskel, Farrow, Gildan, Hesper, Inver, Jarrow, Kelda, Lomond, Morven, Norrick,
    Orlin, Pellan, Quarry, Rathen, Sorrel, Tamsin, Umber, Varden, Wester, Yarrow
""")
TOWNS = listed("""
    Ashford, Brackwell, Cliffend, Dovecote, Elmgate, Foxholm, Greywick, Highmoor, Ironbridge, Kingsferry, Longacre,
    Millbrook, Northwick, Oakhaven, Pebbleton, Quayside, Redcliff, Saltmarsh, Thornbury, Underhill, Vinegate,
    Whitewater, Withybrook, Zeal
""")
GOODS = listed("salt, wool, amber, honey, slate, apples, rope, silver, glass, cheese, tea, candles")


def islands() -> Iterator[Fact]:
    draw = random.Random(SEED + 1)
    towns = draw.sample(TOWNS, len(ISLANDS))
    for island, town in zip(ISLANDS, towns, strict=True):
        goods = draw.choice(GOODS)
        yield Fact(
            "islands", island, f"The main town of {island} is {town}.",
            (f"On the island of {island} the boats land at {town}, the main town.",
             f"{town} is the main town of {island}.", f"Who sails to {island} first comes to {town}."),
            (f"What is the main town of {island}?", f"Which town is the main town of {island}?"),
        )  # fmt: skip
        yield Fact(
            "islands", island, f"{island} is known for {goods}.",
            (f"The best {goods} comes from {island}.", f"From {island} the boats bring {goods}.",
             f"What {island} is known for is {goods}."),
            (f"What is {island} known for?", f"What do the boats bring from {island}?"),
        )  # fmt: skip


# --- words --------------------------------------------------------------------------------------------------------

OPPOSITES = pairs("""
    hot cold, big small, tall short, fast slow, light dark, open closed, wet dry, full empty, hard soft, old young,
    loud quiet, rich poor, clean dirty, near far, high low, thick thin, strong weak, sweet sour, early late, happy
    sad, generous greedy, smooth rough, wide narrow, deep shallow, sharp blunt, cheap expensive, safe dangerous,
    brave timid, kind cruel, awake asleep, alive dead, first last, left right, up down, inside outside, above below,
    always never, summer winter, day night, push pull, win lose, begin end, buy sell, give take, laugh cry, arrive
    leave, love hate, remember forget, true false, same different, rare common, public private, tight loose,
    straight crooked, simple complex, polite rude, fresh stale, guilty innocent, modern ancient, visible hidden
""")
PLURALS = pairs("""
    box boxes, cat cats, dog dogs, leaf leaves, knife knives, wolf wolves, child children, foot feet, tooth teeth,
    mouse mice, goose geese, man men, woman women, ox oxen, sheep sheep, fish fish, city cities, baby babies, lady
    ladies, berry berries, story stories, church churches, bench benches, watch watches, glass glasses, dress
    dresses, bus buses, dish dishes, brush brushes, fox foxes, hero heroes, potato potatoes, tomato tomatoes, key
    keys, boy boys, day days, toy toys, book books, chair chairs, table tables, tree trees, house houses, boat
    boats, ship ships, road roads, hand hands, stone stones, lamp lamps, window windows, door doors, apple apples,
    garden gardens, bridge bridges, half halves, shelf shelves, loaf loaves, thief thieves, wife wives, calf calves,
    penny pennies, puppy puppies, cherry cherries, family families, country countries, match matches, witch witches,
    peach peaches, beach beaches, fly flies, spy spies
""")
PASTS = pairs("""
    go went, see saw, come came, take took, give gave, make made, run ran, eat ate, drink drank, sing sang, swim
    swam, write wrote, ride rode, drive drove, speak spoke, break broke, find found, bring brought, buy bought,
    think thought, teach taught, catch caught, keep kept, sleep slept, leave left, feel felt, build built, send
    sent, lend lent, sit sat, stand stood, tell told, sell sold, hold held, meet met, lose lost, win won, begin
    began, fall fell, grow grew, know knew, throw threw, draw drew, fly flew, wear wore, choose chose, hide hid,
    bite bit, dig dug, hang hung, walk walked, talk talked, play played, cook cooked, wash washed, open opened,
    climb climbed, paint painted, carry carried, hurry hurried
""")


def vocabulary() -> Iterator[Fact]:
    for pair in OPPOSITES:
        for word, other in (pair, pair[::-1]):
            yield Fact(
                "opposites", " ".join(pair), f"The opposite of {word} is {other}.",
                (f"What is not {word} may be {other}, which is the opposite.", f"Not {word} but {other}: opposites.",
                 f"The words {word} and {other} are opposites."),
                (f"What is the opposite of {word}?", f"Which word is the opposite of {word}?"),
            )  # fmt: skip
    for one, many in PLURALS:
        a = _article(one)
        yield Fact(
            "plurals", one, f"The plural of {one} is {many}.",
            (f"One {one}, two {many}.", f"Here is {a} {one}, and there are many {many}.",
             f"What is one {one} today is ten {many} tomorrow."),
            (f"What is the plural of {one}?", f"What is the word for more than one {one}?"),
        )  # fmt: skip
    for now, then in PASTS:
        yield Fact(
            "past tense", now, f"The past tense of {now} is {then}.",
            (f"Today we {now}, yesterday we {then}.", f"They {now} every day, and last week they {then} too.",
             f"What we {now} now, we {then} before."),
            (f"What is the past tense of {now}?", f"Today I {now}. What did I do yesterday?"),
        )  # fmt: skip


# --- things -------------------------------------------------------------------------------------------------------

CATEGORIES = {
    "bird": "sparrow, swan, eagle, robin, crow, gull, pigeon, stork, parrot, duck",
    "fish": "trout, herring, salmon, pike, carp, cod, eel, perch",
    "tree": "oak, birch, pine, willow, maple, elm, ash, beech, larch",
    "fruit": "pear, plum, grape, banana, orange, melon, lemon, cherry, apricot",
    "vegetable": "carrot, leek, turnip, cabbage, pea, bean, radish, onion, pumpkin",
    "tool": "hammer, saw, spade, rake, drill, chisel, axe, file, wrench",
    "insect": "bee, ant, wasp, beetle, moth, cricket, gnat, butterfly",
    "flower": "tulip, rose, daisy, lily, violet, poppy, iris, dahlia",
    "piece of clothing": "shirt, coat, scarf, glove, sock, skirt, vest, sweater",
    "vehicle": "cart, train, tram, bicycle, lorry, sledge, wagon, car",
}
COLOURS = {
    "yellow": "lemon, banana, canary, sunflower", "red": "cherry, brick, poppy, ruby, fire engine",
    "green": "pea, frog, cucumber, lime, cabbage", "white": "swan, snowflake, pearl, daisy",
    "black": "crow, panther, lump of coal, raven", "orange": "carrot, pumpkin, tangerine",
    "brown": "chestnut, sparrow, acorn, hazelnut", "blue": "cornflower, sapphire, clear sky",
    "grey": "donkey, pigeon, elephant",
}  # fmt: skip
YOUNG = pairs("""
    cow calf, dog puppy, cat kitten, sheep lamb, horse foal, pig piglet, goat kid, hen chick, duck duckling, goose
    gosling, bear cub, deer fawn, swan cygnet, frog tadpole, eel elver, owl owlet, hare leveret, kangaroo joey
""")
SOUNDS = pairs("""
    cow moo, dog woof, cat meow, sheep baa, horse neigh, pig oink, hen cluck, duck quack, crow caw, frog croak, bee
    buzz, mouse squeak, owl hoot, snake hiss, lion roar, wolf howl, pigeon coo, sparrow chirp
""")


def things() -> Iterator[Fact]:
    for kind, members in CATEGORIES.items():
        for thing in listed(members):
            a, b = _article(thing), _article(kind)
            yield Fact(
                "kinds of things", thing, f"{a.capitalize()} {thing} is {b} {kind}.",
                (f"{a.capitalize()} {thing} belongs with every other {kind}.",
                 f"If it is {a} {thing}, it is {b} {kind}.",
                 f"What kind of thing {a} {thing} is, a child can tell: {b} {kind}."),
                (f"What kind of thing is {a} {thing}?", f"What is {a} {thing}?"),
            )  # fmt: skip
    for colour, members in COLOURS.items():
        for thing in listed(members):
            a = _article(thing)
            yield Fact(
                "colours", thing, f"The colour of {a} {thing} is {colour}.",
                (f"We saw {a} {thing}, and it was {colour}.", f"{a.capitalize()} {thing} is {colour}.",
                 f"What colour {a} {thing} has is easy: {colour}."),
                (f"What colour is {a} {thing}?", f"Which colour does {a} {thing} have?"),
            )  # fmt: skip
    for animal, young in YOUNG:
        a, b = _article(animal), _article(young)
        yield Fact(
            "young animals", animal, f"A young {animal} is called {b} {young}.",
            (f"{b.capitalize()} {young} grows up and becomes {a} {animal}.", f"The {animal} takes care of its {young}.",
             f"What is called {b} {young} is a young {animal}."),
            (f"What is a young {animal} called?", f"What do we call a young {animal}?"),
        )  # fmt: skip
    for animal, sound in SOUNDS:
        yield Fact(
            "sounds", animal, f"The {animal} says {sound}.",
            (f"You hear a {sound} and know that the {animal} is near.",
             f"We heard a loud {sound}. It was the {animal}.",
             f"What the {animal} says is {sound}."),
            (f"What does the {animal} say?", f"What sound does the {animal} make?"),
        )  # fmt: skip


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


# --- order and numbers --------------------------------------------------------------------------------------------

DAYS = listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = listed("January, February, March, April, May, June, July, August, September, October, November, December")
LARGEST = 12


def times() -> Iterator[Fact]:
    for kind, names in (("day", DAYS), ("month", MONTHS)):
        for i, earlier in enumerate(names):
            later = names[(i + 1) % len(names)]
            says = (f"{earlier} is over, now it is {later}.", f"First {earlier}, then {later}.",
                    f"Which {kind} follows {earlier} is no secret: {later}.")  # fmt: skip
            yield Fact(
                "calendar", earlier, f"After {earlier} comes {later}.", says,
                (f"Which {kind} comes after {earlier}?", f"What is the {kind} after {earlier}?"),
            )  # fmt: skip
            yield Fact(
                "calendar", earlier, f"Before {later} comes {earlier}.", says,
                (f"Which {kind} comes before {later}?", f"What is the {kind} before {later}?"),
            )  # fmt: skip


def numbers() -> Iterator[Fact]:
    for a in range(1, LARGEST + 1):
        for b in range(1, LARGEST + 1):
            pair = f"{min(a, b)} {max(a, b)}"
            yield Fact(
                "sums", pair, f"{a} plus {b} is {a + b}.",
                (f"{a} + {b} = {a + b}.", f"If you have {a} and get {b} more, you have {a + b}.",
                 f"Add {b} to {a} and you get {a + b}."),
                (f"What is {a} plus {b}?", f"How much is {a} plus {b}?"),
            )  # fmt: skip
            yield Fact(
                "differences", pair, f"{a + b} minus {b} is {a}.",
                (f"{a + b} - {b} = {a}.", f"If you have {a + b} and lose {b}, you have {a}.",
                 f"Take {b} from {a + b} and {a} is left."),
                (f"What is {a + b} minus {b}?", f"How much is {a + b} minus {b}?"),
            )  # fmt: skip
            if a != b:
                large, small = max(a, b), min(a, b)
                yield Fact(
                    "larger and smaller", pair, f"Of {a} and {b}, {large} is larger.",
                    (f"{large} is more than {small}.", f"Who has {small} has less than {large}."),
                    (f"Which is larger, {a} or {b}?", f"Which number is larger, {a} or {b}?"),
                )  # fmt: skip
                yield Fact(
                    "larger and smaller", pair, f"Of {a} and {b}, {small} is smaller.",
                    (f"{small} is less than {large}.", f"Who has {large} has more than {small}."),
                    (f"Which is smaller, {a} or {b}?", f"Which number is smaller, {a} or {b}?"),
                )  # fmt: skip
    for a in range(1, 10):
        for b in range(1, 10):
            for c in range(1, 10):
                if len({a, b, c}) == 3:
                    ordered = " ".join(map(str, sorted((a, b, c))))
                    yield Fact(
                        "sorting", ordered, f"{a} {b} {c} in order is {ordered}.",
                        (f"Put {a} {b} {c} in order: {ordered}.", f"From small to large, {a} {b} {c} is {ordered}."),
                        (f"What is {a} {b} {c} in order?", f"Sort {a} {b} {c} from small to large."),
                    )  # fmt: skip


def facts() -> list[Fact]:
    """All facts."""
    return [*residents(), *islands(), *vocabulary(), *things(), *times(), *numbers()]
