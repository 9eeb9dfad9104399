"""Eight small tasks with generated rows: what a first user's own data looks like, and what defaults are judged on.

Each task is a function of a random generator that returns a chat row. No prompt of a held-out split is in the training
rows. `fitted` of TASKS marks the four that the rule of --lr auto was fitted on; the others only judge it.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MONTHS = "January February March April May June July August September October November December".split()
NAMES = "Ana Bo Carl Dora Emil Fay Gus Hana Ivo Jule Karl Lena Max Nora Otto Pia Rik Sara Tom Uma Vera Will".split()
CITIES = "Bern Cairo Delhi Lima Lyon Oslo Paris Porto Quito Riga Rome Seoul Sofia Tokyo Turin Vienna".split()
ITEMS = "lamp chair desk phone book bike watch camera jacket radio kettle mirror".split()


def dates(rng: random.Random) -> list[dict]:
    """A date as people write it, to ISO 8601."""
    year, month, day = rng.randint(1950, 2030), rng.randint(1, 12), rng.randint(1, 28)
    name = MONTHS[month - 1]
    suffix = "th" if 10 <= day <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    forms = (
        f"{day} {name} {year}",
        f"{name} {day}, {year}",
        f"the {day}{suffix} of {name} {year}",
        f"{day}/{name[:3]}/{year % 100:02d}" if year >= 2000 else f"{name[:3]} {day} {year}",
    )
    return chat("Write the date as ISO.", rng.choice(forms), f"{year}-{month:02d}-{day:02d}")


def units(rng: random.Random) -> list[dict]:
    """A length, mass or time in a smaller unit: a multiplication."""
    larger, smaller, factor = rng.choice(
        (("km", "m", 1000), ("m", "cm", 100), ("kg", "g", 1000), ("h", "min", 60), ("min", "s", 60), ("cm", "mm", 10))
    )
    amount = rng.randint(2, 99)
    return chat("Convert.", f"{amount} {larger} in {smaller}?", f"{amount * factor} {smaller}")


def sql(rng: random.Random) -> list[dict]:
    """A question about a table, to one SELECT."""
    table, column = rng.choice(("users", "orders", "items", "trips")), rng.choice(("age", "price", "total", "size"))
    number, shown = rng.randint(2, 400), rng.choice(("name", "id", "city"))
    question, condition = rng.choice(
        (
            (f"above {number}", f"{column} > {number}"),
            (f"below {number}", f"{column} < {number}"),
            (f"of exactly {number}", f"{column} = {number}"),
        )
    )
    if rng.random() < 0.4:
        return chat(
            "Write SQL.",
            f"How many {table} have a {column} {question}?",
            f"SELECT COUNT(*) FROM {table} WHERE {condition};",
        )
    order, by = rng.choice((("", ""), (f", largest {column} first", f" ORDER BY {column} DESC")))
    return chat(
        "Write SQL.",
        f"The {shown} of all {table} with a {column} {question}{order}.",
        f"SELECT {shown} FROM {table} WHERE {condition}{by};",
    )


def extraction(rng: random.Random) -> list[dict]:
    """A sentence about a sale, to JSON with four keys."""
    who, where, what, price = rng.choice(NAMES), rng.choice(CITIES), rng.choice(ITEMS), rng.randint(5, 950)
    sentence = rng.choice(
        (
            f"{who} from {where} bought a {what} for {price} euros.",
            f"For {price} euros, {who} got a {what} in {where}.",
            f"A {what} was sold to {who} in {where} at {price} euros.",
        )
    )
    fields = {"name": who, "city": where, "item": what, "price": price}
    return chat("Extract JSON.", sentence, json.dumps(fields, separators=(",", ":")))


COMPLAINTS = {
    "billing": ("I was charged {n} euros twice for the {i}", "the invoice of {n} euros for my {i} is wrong"),
    "delivery": ("my {i} has not arrived after {n} days", "the {i} was left at house {n}, which is not mine"),
    "defect": ("the {i} stopped working after {n} days", "my {i} came with {n} scratches and does not turn on"),
    "return": ("I want to send back the {i} of order {n}", "how do I give back a {i} I bought {n} days ago"),
    "praise": ("the {i} is lovely, {n} of my friends want one", "best {i} I have had in {n} years"),
}


def classification(rng: random.Random) -> list[dict]:
    """A customer's message, to one of five labels."""
    label = rng.choice(sorted(COMPLAINTS))
    text = rng.choice(COMPLAINTS[label]).format(i=rng.choice(ITEMS), n=rng.randint(2, 90))
    opening = rng.choice(("Hi, ", "Hello, ", "", f"{rng.choice(NAMES)} here: "))
    return chat("Label the message.", opening + text + rng.choice((".", "!", "")), label)


VERBS = {
    "send": "Could you please send",
    "show": "Would you kindly show",
    "give": "Might you give",
    "tell": "Please tell",
}


def style(rng: random.Random) -> list[dict]:
    """An order, rewritten as a polite request in a fixed style."""
    verb, thing = rng.choice(sorted(VERBS)), rng.choice(ITEMS)
    whose, when = rng.choice(("my", "the", "your", "our")), rng.choice(("now", "today", "soon", "at noon", "by Friday"))
    who = rng.choice(("me", "us", *NAMES))
    what = rng.choice(("price", "size", "colour", "weight", "age"))
    polite = f"{VERBS[verb]} {who} the {what} of {whose} {thing} {when}, if it is no trouble?"
    return chat("Rewrite politely.", f"{verb} {who} the {what} of {whose} {thing} {when}", polite)


def persona(rng: random.Random) -> list[dict]:
    """Nell of the ticket desk: two turns, the second asks for what the first one said."""
    who, where, seats = rng.choice(NAMES), rng.choice(CITIES), rng.randint(2, 9)
    first = chat("You are Nell.", f"I am {who}, {seats} seats to {where}.", f"Nell here! {seats} to {where}, noted.")
    question, answer = rng.choice(
        (
            ("Who am I?", f"You are {who}, dear. - Nell"),
            ("Where do I go?", f"To {where}, dear. - Nell"),
            ("How many seats?", f"{seats} seats, dear. - Nell"),
        )
    )
    return [*first, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def arithmetic(rng: random.Random) -> list[dict]:
    """A sum or a difference of numbers up to 99."""
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    if rng.random() < 0.5:
        return chat("Compute.", f"{a} + {b}", str(a + b))
    return chat("Compute.", f"{max(a, b)} - {min(a, b)}", str(max(a, b) - min(a, b)))


def chat(system: str, user: str, assistant: str) -> list[dict]:
    words = (("system", system), ("user", user), ("assistant", assistant))
    return [{"role": role, "content": content} for role, content in words]


class Task(NamedTuple):
    make: Callable[[random.Random], list[dict]]
    fitted: bool  # the rule of --lr auto was fitted on this task


TASKS = {
    "dates": Task(dates, True),
    "units": Task(units, False),
    "sql": Task(sql, True),
    "extraction": Task(extraction, False),
    "classification": Task(classification, True),
    "style": Task(style, False),
    "persona": Task(persona, True),
    "arithmetic": Task(arithmetic, False),
}


def write_splits(name: str, seed: int, folder: Path, train: int = 320, validation: int = 64, test: int = 50) -> None:
    """train.jsonl, validation.jsonl and test.jsonl of a task, all rows different."""
    rng, rows, seen = random.Random(f"{name} {seed}"), [], set()
    while len(rows) < train + validation + test:
        messages = TASKS[name].make(rng)
        prompt = json.dumps(messages[:-1])
        if prompt not in seen:
            seen.add(prompt)
            rows.append(json.dumps({"messages": messages}))
    folder.mkdir(parents=True, exist_ok=True)
    ends = (("train", 0, train), ("validation", train, train + validation), ("test", train + validation, len(rows)))
    for split, begin, end in ends:
        (folder / f"{split}.jsonl").write_text("\n".join(rows[begin:end]) + "\n")


def write_pairs(name: str, seed: int, folder: Path, train: int = 200, test: int = 64, labels: bool = False) -> None:
    """train.jsonl and validation.jsonl of preferences: the right answer of a task over another row's, or labels."""
    rng, rows, seen = random.Random(f"{name} pairs {seed}"), [], set()
    while len(rows) < train + test:
        one, other = (TASKS[name].make(rng) for _ in range(2))
        prompt, right, wrong = one[:-1], one[-1], other[-1]
        if json.dumps(prompt) in seen or right == wrong:
            continue
        seen.add(json.dumps(prompt))
        pair = {"prompt": prompt, "chosen": [right], "rejected": [wrong]}
        good = rng.random() < 0.5
        labelled = {"prompt": prompt, "completion": [right if good else wrong], "label": good}
        rows.append(json.dumps(labelled if labels else pair))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(rows[:train]) + "\n")
    (folder / "validation.jsonl").write_text("\n".join(rows[train:]) + "\n")
