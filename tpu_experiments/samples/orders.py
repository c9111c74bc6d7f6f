"""Write the orders of `data=orders`, from a seeded generator: a sentence, and what it says as JSON.

    python tpu_experiments/samples/orders.py     # samples/orders: the shipped files

Names, items and cities of the held-out sentences are in no training sentence, and half of them have forms of sentence
that training lacks too. The same call writes the same bytes.
"""

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "orders"
NUM_ROWS, NUM_QUESTIONS = 450, 32
SYSTEM = "Write the order as JSON with the keys name, item, quantity and city."


def listed(text: str) -> list[str]:
    """Split at commas."""
    return [" ".join(part.split()) for part in text.split(",")]


NAMES = listed("""
Maria, Ahmed, Olga, James, Priya, Chen, Fatima, Lucas, Ingrid, Tomasz, Aisha, Pedro, Hannah, Kofi, Yuki, Elena,
Marco, Sofia, David, Amara, Viktor, Leila, Noah, Carmen, Hiro, Emma, Rashid, Julia, Andrei, Grace, Samuel, Nadia,
Oscar, Mei, Daniel, Rosa, Igor, Clara, Omar, Alice
""")
ITEMS = listed("""
desk lamps, bicycles, wool blankets, coffee mugs, office chairs, garden hoses, paint brushes, notebooks, tea pots,
running shoes, winter coats, cooking pots, picture frames, wooden spoons, alarm clocks, umbrellas, pillows,
bookshelves, backpacks, candles, mirrors, hammers, ladders, travel bags, door mats, water bottles, table cloths,
wine glasses, phone cases, flower vases, kitchen knives, bath towels, floor tiles, suitcases, guitars, chess sets,
tents, sleeping bags, telescopes, headphones
""")
CITIES = listed("""
Lyon, Berlin, Madrid, Oslo, Cairo, Toronto, Mumbai, Seoul, Lima, Warsaw, Athens, Dublin, Lagos, Boston, Vienna,
Prague, Osaka, Sydney, Chicago, Lisbon, Nairobi, Havana, Zurich, Milan, Denver, Hamburg, Glasgow, Seville, Quito,
Riga, Bogota, Manila, Hanoi, Dallas, Geneva, Porto, Bergen, Krakow, Izmir, Leeds
""")
HELD_NAMES = listed("""
Ioana, Bruno, Thandi, Mehmet, Astrid, Kenji, Lucia, Tariq, Wanda, Felix, Zofia, Diego, Esther, Ravi, Greta, Malik,
Paula, Stefan, Naomi, Anton
""")
HELD_ITEMS = listed("""
oak tables, cricket bats, silk scarves, toasters, rain boots, fishing rods, violins, oil lamps, hand saws, cotton
shirts, ice skates, wall maps, leather belts, globes, garden gnomes, tin whistles, bird cages, snow shovels, piano
stools, straw hats
""")
HELD_CITIES = listed("""
Bucharest, Turin, Helsinki, Accra, Montreal, Kyoto, Santiago, Antwerp, Tunis, Belfast, Ghent, Perth, Tbilisi,
Austin, Malaga, Bremen, Cusco, Nantes, Tirana, Durban
""")
WORDS = dict(enumerate(listed("two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"), start=2))
FORMS = (
    "{name} from {city} would like {count} {item}.",
    "Please send {count} {item} to {name} in {city}.",
    "{name} ordered {count} {item} for delivery in {city}.",
    "We need {count} {item} in {city}; the customer is {name}.",
    "Hello, this is {name}. I live in {city} and want to buy {count} {item}.",
    "An order of {count} {item} came in from {name}, who lives in {city}.",
    "{count} {item} for {name}, {city}.",
    "Can you ship {count} {item} to {city}? My name is {name}.",
)
HELD_FORMS = (
    "My address is in {city}, my name is {name}, and I would be glad to get {count} {item} this week.",
    "Customer {name} called today: {count} {item}, to be delivered to {city}.",
    "In {city} there is a buyer called {name} who asked for {count} {item}.",
    "Put {count} {item} on the truck to {city}, they are for {name}.",
    "{name} just moved to {city} and is looking for {count} {item}.",
)


def order(
    rng: random.Random, *, name: str, item: str, city: str, forms: tuple[str, ...]
) -> dict[str, list[dict[str, str]]]:
    """Return a conversation: what is asked for, a sentence and its JSON."""
    quantity = rng.randint(2, 60)
    count = WORDS[quantity] if quantity in WORDS and rng.random() < 0.7 else str(quantity)
    text = rng.choice(forms).format(name=name, item=item, city=city, count=count)
    answer = {"name": name, "item": item, "quantity": quantity, "city": city}
    turns = (("system", SYSTEM), ("user", text[0].upper() + text[1:]), ("assistant", json.dumps(answer)))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def asked(kind: str, forms: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return held-out orders, in which every held-out value occurs."""
    rng = random.Random(kind)
    drawn = [rng.sample(values, len(values)) * 2 for values in (HELD_NAMES, HELD_ITEMS, HELD_CITIES)]
    return [
        order(rng, name=name, item=item, city=city, forms=forms)
        for name, item, city in list(zip(*drawn, strict=True))[:NUM_QUESTIONS]
    ]


def shipped() -> dict[str, str]:
    """Return the content of every file by its name."""
    rng = random.Random("orders")
    rows: dict[str, list[Any]] = {
        "orders": [
            order(rng, name=rng.choice(NAMES), item=rng.choice(ITEMS), city=rng.choice(CITIES), forms=FORMS)
            for _ in range(NUM_ROWS)
        ],
        "known_forms": asked("known_forms", FORMS),
        "new_forms": asked("new_forms", HELD_FORMS),
    }
    return {
        f"{name}.jsonl": "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in several)
        for name, several in rows.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in shipped().items():
        (FOLDER / file).write_text(content, encoding="utf-8")
    print(f"{FOLDER}: {NUM_ROWS} orders, 2 x {NUM_QUESTIONS} questions")
