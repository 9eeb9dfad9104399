"""Writes the demo's data: one-line English orders and the JSON records they mean.

The record asks for more than copying: number words become digits, days become three letters, a gift is a flag. Rows are
short, so that a CPU trains on all of them in under a minute. The test file has three kinds of rows in turn, told by the
`kind` column: `known` (new combinations of words and phrasings of the training file), `new_words` (names, places and
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
    "Send {count} {item} to {name} in {place} on {day}{gift}.",
    "{name} from {place} wants {count} {item} by {day}{gift}.",
    "On {day}, ship {count} {item} to {place} for {name}{gift}.",
    "{count} {item} for {name}, {place}, {day}{gift}.",
    "Could {name} in {place} get {count} {item} this {day}{gift}?",
    "To {place}: {count} {item}, {day}, for {name}{gift}.",
    "{name} needs {count} {item} in {place} before {day}{gift}.",
    "Hi, I am {name}. I want {count} {item} in {place} on {day}{gift}.",
)
NEW_PHRASINGS = (
    "Deliver {count} {item} on {day} to {name} of {place}{gift}.",
    "Our customer {name} ordered {count} {item} for {day} in {place}{gift}.",
    "By {day}, {place} expects {count} {item} for {name}{gift}.",
    "Please bring {name} {count} {item} in {place} next {day}{gift}.",
)
GIFTS = (" as a gift", ", gift wrapped")
NAMES = tuple(
    (
        "Adam Alex Alice Andrew Anna Anne Ben Bob Carl Charles Chris Dan Daniel David Donald Elizabeth Frank Fred "
        "George Greg Jack Jacob James Jamie Jane Jeff Jim John Josh Kim Leon Lewis Lily Louis Maria Marie Martin "
        "Mary Michael Neil Nick Paul Richard Robert Samuel Sarah Scott Simon Thomas Tim Tom William"
    ).split()
)
PLACES = tuple(
    (
        "Australia Boston Brazil Britain California Cambridge Egypt England Florida Germany Hungary India Iran "
        "Israel Italy Japan Lincoln Madison Mexico Oxford Pakistan Rome Russia Spain"
    ).split()
)
ITEMS = tuple(
    (
        "bags beans beds berries bins birds boards boats books boxes brushes caps cars chains chips coins "
        "computers doors flags flowers games journals keys lights maps masks pans papers peas phones photos "
        "plants pots screens shirts stones tables"
    ).split()
)
NEW_NAMES = tuple("Arthur Edward Emily Henry Joseph Luke Matthew Maya Peter Sam Stephen Victor".split())
NEW_PLACES = tuple("Canada Chicago China France London Paris Texas Virginia Washington".split())
NEW_ITEMS = tuple("apples balls belts buttons cards chairs frames nuts seeds skirts tools trees".split())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=144, help="training rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which rows (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent, help="default: beside this script")
    args = parser.parse_args(argv)
    for split, rows in make_splits(args.rows, args.seed).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.output_dir / f"orders_{split}.jsonl").write_text(text, encoding="utf-8")


def make_splits(num_train: int, seed: int, num_validation: int = 32, num_test: int = 96) -> dict[str, list[dict]]:
    """Rows of each file. Test and validation are drawn first: the number of training rows does not change them."""
    rng, seen = random.Random(seed), set()
    test = [
        new_order(rng, KINDS[i % len(KINDS)], i // len(KINDS), seen) | {"kind": KINDS[i % len(KINDS)]}
        for i in range(num_test)
    ]
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
            "place": pick(rng, NEW_PLACES if new else PLACES),
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
