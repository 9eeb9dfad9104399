"""Writes the demo's data: one-line English orders and the JSON records they mean.

The record asks for more than copying: number words become digits, days become three letters, a gift is a flag. Rows are short,
so that a CPU trains on all of them in under a minute. The test file has three kinds of rows in turn, named in its `kind`
column: `known` (new combinations of words and phrasings seen in training), `new_words` (names, cities and items never seen)
and `new_phrasing` (sentences never seen). No order stands in two files. Same arguments, same bytes.
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
    "Send {qty} {item} to {name} in {city} on {day}{gift}.",
    "{name} from {city} wants {qty} {item} by {day}{gift}.",
    "On {day}, ship {qty} {item} to {city} for {name}{gift}.",
    "{qty} {item} for {name}, {city}, {day}{gift}.",
    "Could {name} in {city} get {qty} {item} this {day}{gift}?",
    "To {city}: {qty} {item}, {day}, for {name}{gift}.",
    "{name} needs {qty} {item} in {city} before {day}{gift}.",
    "Hi, I am {name}. I want {qty} {item} in {city} on {day}{gift}.",
)
NEW_PHRASINGS = (
    "Deliver {qty} {item} on {day} to {name} of {city}{gift}.",
    "Our customer {name} ordered {qty} {item} for {day} in {city}{gift}.",
    "By {day}, {city} expects {qty} {item} for {name}{gift}.",
    "Please bring {name} {qty} {item} in {city} next {day}{gift}.",
)
GIFTS = (" as a gift", ", gift wrapped")
NAMES = tuple(
    (
        "Ada Adam Agnes Alan Alice Amber Andrew Angela Anita Arthur Bella Ben Bianca Boris Brian Bruno Carl Carmen Cecil "
        "Chloe Clara Connor Daisy Daniel David Dennis Diana Edith Edward Elsa Emma Eric Ernest Esther Eva Felix Fiona "
        "Flora Fred Gabriel George Gloria Grace Hannah Harold Harry Hazel Heidi Helen Henry Igor Ingrid Irene Iris Ivan "
        "Jack Jacob James Jane Jason Joan Joel Judy Julia Karen Karl Kevin Laura Leah Leo Leon Linda Louis Lucy Magnus "
        "Marco Maria Martin Max Megan Miriam Nadia Nancy Nathan Nina Noah Nora Olga Oliver Omar Oscar Pablo Paul Peter "
        "Petra Rachel Ralph Rita Robert Rosa Ruth Sam Sandra Sara Simon Sofia Stefan Susan Tessa Thomas Tina Tom Ursula "
        "Vera Victor Wanda Walter Wendy Yusuf Zoe"
    ).split()
)
CITIES = tuple(
    (
        "Aberdeen Accra Amsterdam Ankara Antwerp Athens Austin Baghdad Baltimore Bangkok Barcelona Basel Beirut Belfast "
        "Berlin Bologna Bordeaux Boston Bremen Brighton Bristol Brussels Budapest Cairo Calgary Cardiff Chicago Cologne "
        "Cork Damascus Delhi Detroit Dresden Dublin Durban Edinburgh Essen Florence Geneva Genoa Ghent Glasgow Hamburg "
        "Hanoi Havana Houston Istanbul Jakarta Kiev Kyoto Lagos Leeds Leipzig Lima Liverpool London Madrid Malaga "
        "Melbourne Memphis Miami Milan Montreal Moscow Nairobi Naples Nice Nottingham Orlando Osaka Oslo Ottawa Oxford "
        "Palermo Paris Perth Phoenix Plymouth Portland Prague Quebec Reading Riga Rome Rotterdam Salem Salzburg Seattle "
        "Seoul Seville Shanghai Sofia Stockholm Sydney Tampa Tehran Tokyo Toronto Tunis Turin Utrecht Valencia Vancouver "
        "Venice Verona Vienna Warsaw York Zagreb Zurich"
    ).split()
)
ITEMS = tuple(
    (
        "aprons bags balls bands baskets bats beds bells belts bikes blankets boards boats books boots bottles bowls "
        "boxes bracelets brushes buckets cages cakes cameras candles caps cards carpets carts chains chairs chests clocks "
        "coats combs cups curtains cushions dolls drills drums fans flutes folders forks frames guitars hammers hats "
        "helmets hooks jackets jars knives ladders lamps lenses lights locks magnets maps masks mats mirrors mixers mugs "
        "nails napkins needles ovens pads paintings pans pens phones pianos pillows pipes plants plates pots printers "
        "radios rings ropes rugs saws scarves screens seeds shelves shirts shovels signs skirts soaps sofas socks "
        "speakers sponges stamps stickers sweaters tables tapes tents ties tiles tools towels trays vases wallets wheels "
        "wires"
    ).split()
)
NEW_NAMES = tuple("Amir Beth Colin Doris Elena Frank Gina Hugo Isaac Jenny Lucas Monica".split())
NEW_CITIES = tuple("Lisbon Munich Denver Manila Bergen Dallas Lyon Mumbai Santiago Porto Helsinki Atlanta".split())
NEW_ITEMS = tuple("keys gloves spoons desks shoes toys flags stools kettles watches umbrellas puzzles".split())


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
    """Rows of each file. Test and validation are drawn first: they are the same however many training rows are asked for."""
    rng, seen = random.Random(seed), set()
    test = [new_order(rng, KINDS[i % len(KINDS)], i // len(KINDS), seen) | {"kind": KINDS[i % len(KINDS)]}
            for i in range(num_test)]  # fmt: skip
    validation = [new_order(rng, "known", i, seen) for i in range(num_validation)]
    train = [new_order(rng, "known", i, seen) for i in range(num_train)]
    return {"train": train, "validation": validation, "test": test}


def new_order(rng: random.Random, kind: str, index: int, seen: set[str]) -> dict:
    """One row whose order is not in `seen`, added to it. Phrasings go round by index, so that each is met equally often."""
    phrasings = NEW_PHRASINGS if kind == "new_phrasing" else PHRASINGS
    new = kind == "new_words"
    while True:
        qty, gift = pick(rng, tuple(NUMBERS)), rng.random() < 0.5
        day = pick(rng, DAYS)
        words = {
            "name": pick(rng, NEW_NAMES if new else NAMES),
            "city": pick(rng, NEW_CITIES if new else CITIES),
            "item": pick(rng, NEW_ITEMS if new else ITEMS),
        }
        said_qty = pick(rng, (str(qty), NUMBERS[qty]))
        said_gift = pick(rng, GIFTS) if gift else ""
        order = phrasings[index % len(phrasings)].format(qty=said_qty, day=day, gift=said_gift, **words)
        order = order[0].upper() + order[1:]
        if order not in seen:
            break
    seen.add(order)
    record = {**words, "qty": qty, "day": day[:3], "gift": gift}
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
