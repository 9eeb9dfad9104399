"""Writes examples/questions.json: a few hundred short questions for a first chat with a model trained from scratch.

Facts, sums, opposites and plurals, and conversations in which a name is said and asked for later. The last rows are
recombinations that no other row holds: sums of numbers seen in other sums, names in other conversations.
"""

import json
import random
from pathlib import Path

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Canada": "Ottawa",
    "Hungary": "Budapest",
    "Turkey": "Ankara",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Nepal": "Kathmandu",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Belgium": "Brussels",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "light": "dark",
    "early": "late",
    "full": "empty",
    "high": "low",
    "hard": "soft",
    "long": "short",
    "loud": "quiet",
    "new": "old",
    "open": "closed",
    "rich": "poor",
    "right": "wrong",
    "sharp": "blunt",
    "strong": "weak",
    "thick": "thin",
    "true": "false",
    "wet": "dry",
    "wide": "narrow",
    "clean": "dirty",
    "deep": "shallow",
    "sweet": "bitter",
    "brave": "timid",
    "near": "far",
}
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "horse": "neighs",
    "sheep": "bleats",
    "duck": "quacks",
    "lion": "roars",
    "frog": "croaks",
    "bee": "buzzes",
    "owl": "hoots",
    "pig": "grunts",
    "wolf": "howls",
    "snake": "hisses",
    "crow": "caws",
    "mouse": "squeaks",
    "hen": "clucks",
    "goose": "honks",
    "bear": "growls",
}
COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "a lemon": "yellow",
    "a carrot": "orange",
    "chocolate": "brown",
    "a flamingo": "pink",
    "a plum": "purple",
    "ash": "grey",
    "milk": "white",
    "a ruby": "red",
    "an emerald": "green",
    "a sapphire": "blue",
    "the sun": "yellow",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")
NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Iris",
    "Jonas",
    "Kate",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
)
HELD_OUT = 20


def conversations() -> list[list[str]]:
    """Turns, user and assistant in turn; the held-out recombinations last."""
    rng, rows, held_out = random.Random(0), [], []
    for country, city in CAPITALS.items():
        rows.append([f"What is the capital of {country}?", f"The capital of {country} is {city}."])
        rows.append([f"Where is {city}?", f"{city} is in {country}."])
    for word, other in OPPOSITES.items():
        rows.append([f"What is the opposite of {word}?", f"The opposite of {word} is {other}."])
        rows.append([f"What is the opposite of {other}?", f"The opposite of {other} is {word}."])
    for animal, sound in SOUNDS.items():
        rows.append([f"What does a {animal} do?", f"A {animal} {sound}."])
    for thing, colour in COLOURS.items():
        rows.append([f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}."])
    for order in (DAYS, MONTHS):
        for first, second in zip(order, order[1:], strict=False):
            rows.append([f"What comes after {first}?", f"After {first} comes {second}."])
            rows.append([f"What comes before {second}?", f"Before {second} comes {first}."])
    sums = [[f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."] for a in range(10) for b in range(10)]
    rng.shuffle(sums)
    held_out += sums[: HELD_OUT // 2]
    rows += sums[HELD_OUT // 2 :]
    facts = rows[:60]
    told = []
    for name in NAMES:
        for question, answer in rng.sample(facts, 4):
            told.append(
                [
                    f"My name is {name}.",
                    f"Hello, {name}!",
                    question,
                    answer,
                    "What is my name?",
                    f"Your name is {name}.",
                ]
            )
    rng.shuffle(told)
    held_out += told[: HELD_OUT // 2]
    rows += told[HELD_OUT // 2 :]
    rng.shuffle(rows)
    return rows + held_out


def main() -> None:
    roles = ("human", "gpt")
    content = [
        {"conversations": [{"from": roles[i % 2], "value": text} for i, text in enumerate(turns)]}
        for turns in conversations()
    ]
    lines = ",\n".join(json.dumps(row) for row in content)
    (Path(__file__).parent / "questions.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
