"""Generates the quickstart's data from the facts in `world.py`: text for pretraining, questions for fine-tuning.

`python -m quickstart.data` writes the questions (`data/*.jsonl`); `recipe.py` also generates the text. A fixed seed
makes the output reproducible byte for byte.

Test questions are held out by *subject*, not by wording: `train.jsonl` has no question, in any wording, about a
held-out resident, island, word, thing or pair of numbers. The pretraining text covers all of them.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from quickstart.world import SEED, Fact, facts

HERE = Path(__file__).resolve().parent
KEPT_BACK = 0.2
"""The fraction of each topic's subjects that is held out."""
MOST = {"train": 260, "test": 50}
"""The maximum number of questions per topic, so that arithmetic does not dominate."""
SHOWN = ("village", "opposites", "sums", "sorting", "kinds of things")
"""Topics of the prompts that the quickstart prints: the first test question of each."""
DOCUMENTS = 100_000
MIXED, LISTS = 3, 8
"""One in this many documents mixes topics, or is a list of words; the others have one topic."""
AGAIN = 0.6
"""The fraction of documents that repeat facts in other words."""


def split(everything: Iterable[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Facts for training questions, and held-out facts."""
    topics: dict[str, dict[str, list[Fact]]] = defaultdict(lambda: defaultdict(list))
    for fact in everything:
        topics[fact.topic][fact.about].append(fact)
    kept, back = [], []
    for topic, things in topics.items():
        names = sorted(things)
        random.Random(f"{SEED} {topic}").shuffle(names)
        cut = max(1, round(len(names) * KEPT_BACK))
        back += [fact for name in names[:cut] for fact in things[name]]
        kept += [fact for name in names[cut:] for fact in things[name]]
    return kept, back


def questions(chosen: list[Fact], most: int, seed: str) -> list[tuple[str, str, str]]:
    """Topic, question and answer, limited per topic. Every fact is used once before any is used in other words."""
    topics: dict[str, list[list[tuple[str, str, str]]]] = defaultdict(list)
    draw = random.Random(seed)
    for fact in chosen:
        asks = list(fact.asks)
        draw.shuffle(asks)
        topics[fact.topic].append([(fact.topic, ask, fact.answer) for ask in asks])
    rows = []
    for entries in topics.values():
        draw.shuffle(entries)
        rounds = [entry[i] for i in range(max(map(len, entries))) for entry in entries if i < len(entry)]
        rows += rounds[:most]
    draw.shuffle(rows)
    return rows


def instruction_set() -> dict[str, str]:
    """The text of `train.jsonl`, `test.jsonl` and `prompts.jsonl`."""
    kept, back = split(facts())
    train, test = (questions(some, MOST[n], f"{SEED} {n}") for n, some in (("train", kept), ("test", back)))
    prompts = [next(row for row in test if row[0] == topic) for topic in SHOWN]
    return {"train.jsonl": as_lines(train), "test.jsonl": as_lines(test), "prompts.jsonl": as_lines(prompts)}


def as_lines(rows: list[tuple[str, str, str]]) -> str:
    said = ([{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for _, ask, answer in rows)
    return "".join(json.dumps({"messages": messages}) + "\n" for messages in said)


def documents() -> Iterator[str]:
    """Plain text that says every fact many times, in different words and company. No questions.

    In many documents facts come again in other words, and lists are read out twice: so the model learns to take up
    what was said before, which fine-tuning then turns to questions.
    """
    draw, everything = random.Random(SEED), facts()
    topics: dict[str, list[Fact]] = defaultdict(list)
    for fact in everything:
        topics[fact.topic].append(fact)
    words = sorted({word.strip(".,") for fact in everything for word in fact.answer.split()})
    weight = {topic: len(members) ** 0.6 for topic, members in topics.items()}
    waiting: dict[str, list[Fact]] = {topic: [] for topic in topics}

    def take(topic: str) -> Fact:
        if not waiting[topic]:  # every fact has its turn before any comes again
            waiting[topic] = draw.sample(topics[topic], len(topics[topic]))
        return waiting[topic].pop()

    for number in range(DOCUMENTS):
        if number % LISTS == 0:
            read = ", ".join(draw.sample(words, draw.randint(3, 9)))
            yield f"The list reads {read}. Once more, the list reads {read}."
            continue
        again = draw.random() < AGAIN
        drawn = draw.choices(list(weight), list(weight.values()), k=draw.randint(2, 4) if again else draw.randint(4, 9))
        chosen = [take(drawn[0] if number % MIXED else topic) for topic in drawn]
        said = [draw.sample((fact.answer, *fact.says), draw.randint(1, 3) if again else 1) for fact in chosen]
        sentences = [sentence for some in said for sentence in some]
        draw.shuffle(sentences)
        yield " ".join(sentences)


def write_questions(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in instruction_set().items():
        (folder / name).write_text(text, encoding="utf-8")


def write_text(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in documents())


if __name__ == "__main__":
    write_questions(HERE / "data")
