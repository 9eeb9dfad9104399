"""Writes the demo's data: one-line English orders and the JSON records they mean.

The record asks for more than copying: number words become digits, days become three letters, a gift is a flag. Rows are
short, so that a CPU trains on all of them in under a minute. The test file has three kinds of rows in turn, told by the
`kind` column: `known` (new combinations of words and phrasings of the training file), `new_words` (names, cities and
items never seen) and `new_phrasing` (sentences never seen). No order stands in two files. Same arguments, same bytes.
"""

import argparse
import json
import random
from pathlib import Path

SYSTEM = "Order to JSON."
KINDS = ("known", "new_words", "new_phrasing")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
# {gift} stands for one of GIFTS, or for nothing.
PHRASINGS = (
    "Send {count} {item} to {name} in {city} on {day}{gift}.",
    "{name} from {city} wants {count} {item} by {day}{gift}.",
    "On {day}, ship {count} {item} to {city} for {name}{gift}.",
    "{count} {item} for {name}, {city}, {day}{gift}.",
    "Could {name} in {city} get {count} {item} this {day}{gift}?",
    "To {city}: {count} {item}, {day}, for {name}{gift}.",
    "{name} needs {count} {item} in {city} before {day}{gift}.",
    "Hi, I am {name}. I want {count} {item} in {city} on {day}{gift}.",
)
NEW_PHRASINGS = (
    "Deliver {count} {item} on {day} to {name} of {city}{gift}.",
    "Our customer {name} ordered {count} {item} for {day} in {city}{gift}.",
    "By {day}, {city} expects {count} {item} for {name}{gift}.",
    "Please bring {name} {count} {item} in {city} next {day}{gift}.",
)
GIFTS = (" as a gift", ", gift wrapped")
NAMES = tuple(
    (
        "Angela Arthur Bella Brian Carl Daniel Dennis Edith Edward Eric Ernest Flora Frank Grace Harold Harry "
        "Henry Isaac Ivan Jack Jacob James Jane Jenny Joan Judy Karen Kevin Linda Lucy Marco Maria Monica Nancy "
        "Nathan Noah Pablo Paul Rachel Robert Rosa Ruth Sandra Simon Stefan Tom Vera Walter"
    ).split()
)
CITIES = tuple(
    (
        "Amsterdam Athens Bologna Boston Budapest Calgary Cardiff Chicago Cologne Dallas Damascus Delhi Denver "
        "Detroit Edinburgh Geneva Leeds Leipzig Lima London Lyon Madrid Manila Melbourne Memphis Miami Milan "
        "Montreal Moscow Nairobi Naples Nottingham Orlando Oslo Oxford Paris Perth Portland Rome Seattle Seoul "
        "Stockholm Tampa Tokyo Vancouver Vienna"
    ).split()
)
ITEMS = tuple(
    (
        "bags bells belts boxes buckets cages cakes caps chains clocks coats cups desks flags hats hooks jars "
        "keys lenses magnets masks mats mirrors needles ovens pads pens pillows plates pots printers rings ropes "
        "screens seeds shirts shoes signs skirts socks spoons stickers tables tents towels toys watches wires"
    ).split()
)
NEW_NAMES = tuple("Andrew Boris Emma Esther Eva Joel Julia Louis Lucas Max Peter Sara".split())
NEW_CITIES = tuple("Austin Basel Berlin Brussels Cairo Glasgow Hamburg Istanbul Mumbai Quebec Toronto Venice".split())
NEW_ITEMS = tuple("bikes boots chairs curtains forks locks pipes puzzles soaps speakers tiles wheels".split())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=176, help="training rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which rows (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent, help="default: beside this script")
    args = parser.parse_args(argv)
    for split, rows in make_splits(args.rows, args.seed).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.output_dir / f"orders_{split}.jsonl").write_text(text, encoding="utf-8")


def make_splits(num_train: int, seed: int, num_validation: int = 32, num_test: int = 96) -> dict[str, list[dict]]:
    """Rows of each file. Test and validation are drawn first: the number of training rows does not change them."""
    rng, seen = random.Random(seed), set()
    test = [new_order(rng, KINDS[i % len(KINDS)], i // len(KINDS), seen) | {"kind": KINDS[i % len(KINDS)]}
            for i in range(num_test)]  # fmt: skip
    validation = [new_order(rng, "known", i, seen) for i in range(num_validation)]
    train = [new_order(rng, "known", i, seen) for i in range(num_train)]
    return {"train": train, "validation": validation, "test": test}


def new_order(rng: random.Random, kind: str, index: int, seen: set[str]) -> dict:
    """One row whose order is not in `seen`, and is then. Phrasings go round by index: each is met equally often."""
    phrasings = NEW_PHRASINGS if kind == "new_phrasing" else PHRASINGS
    new = kind == "new_words"
    while True:
        count, gift = pick(rng, tuple(NUMBERS)), rng.random() < 0.5
        day = pick(rng, DAYS)
        words = {
            "name": pick(rng, NEW_NAMES if new else NAMES),
            "city": pick(rng, NEW_CITIES if new else CITIES),
            "item": pick(rng, NEW_ITEMS if new else ITEMS),
        }
        said_count = pick(rng, (str(count), NUMBERS[count]))
        said_gift = pick(rng, GIFTS) if gift else ""
        order = phrasings[index % len(phrasings)].format(count=said_count, day=day, gift=said_gift, **words)
        order = order[0].upper() + order[1:]
        if order not in seen:
            break
    seen.add(order)
    record = {**words, "count": count, "day": day[:3], "gift": gift}
    answer = json.dumps(record, separators=(",", ":"))
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": order},
            {"role": "assistant", "content": answer},
        ]
    }


def pick(rng: random.Random, choices: tuple):
    """One of choices. From random() alone, the one method whose sequence Python promises to keep."""
    return choices[int(rng.random() * len(choices))]


if __name__ == "__main__":
    main()
