"""Write demo/prompts.jsonl: `python demo/make_prompts.py`.

Templates times topics, all written for this project, in a seeded order. Held-out prompts have the same forms, on topics
that no training prompt names (those after the bar). A " >> " parts the turns of a prompt.
"""

import json
import random
from pathlib import Path

PATH = Path(__file__).parent / "prompts.jsonl"
TRAIN_PER_KIND, HELD_OUT_PER_KIND = 100, 6  # of twelve kinds

# kind -> (templates, topics; topics are split at ";" and the held-out ones follow "|")
KINDS: dict[str, tuple[list[str], str]] = {
    "list": (
        [
            "List five {}.",
            "Name four {}.",
            "Give me a numbered list of six {}. Only the list.",
            "Write a bulleted list of five {}.",
        ],
        """fruits; vegetables; farm animals; animals that live in the sea; birds; insects; trees; flowers; kitchen
        tools; garden tools; musical instruments; sports played with a ball; winter sports; school subjects; jobs in
        a hospital; jobs on a building site; things in a classroom; pieces of furniture; kinds of weather; rivers;
        mountains; European countries; Asian countries; African countries; programming languages; parts of a
        computer; parts of a car; hot drinks; breakfast foods; spices; board games; hobbies for a rainy day
        | kinds of cheese; South American countries; things found in a bathroom; desserts""",
    ),
    "table": (
        [
            "Write a table of four {} with the columns Name, Size and Price. Only the table.",
            "Write a table of three {} with the columns Name, Colour and Price. Only the table.",
            "Write a small table of {} with the columns Number, Colour and Weight. Only the table.",
            "Make a Markdown table of three {} with the columns Name and Colour.",
        ],
        """cars; shirts; pens; bags; chairs; lamps; cups; books; shoes; hats; phones; bicycles; flowers; stones;
        paints; toys; blankets; plates; boats; tents; coats; gloves; clocks; knives; doors; rugs; curtains; balls;
        boxes; ropes; candles
        | umbrellas; scooters; mirrors; pillows""",
    ),
    "json": (
        [
            "Write a JSON object for a {} with the keys name, price and colour. Only the JSON.",
            "Give me a JSON object that describes a {}. Use the keys id, name and size.",
            "Describe a {} as JSON with the keys name, type and price.",
            "Write a JSON object with the keys id and name for a {}. No explanation.",
        ],
        """car; book; customer; student; teacher; city; country; house; dog; cat; film; song; recipe; hotel; flight;
        train; order; invoice; phone; laptop; camera; garden; school; museum; football team; bank account; shop;
        restaurant; library; bus stop; doctor
        | warehouse; violin; parcel; airport""",
    ),
    "counting": (
        ["{}.", "{}, one per line.", "{}, as a numbered list."],
        "; ".join(
            [f"Count from 1 to {n}" for n in range(7, 19)]
            + [
                f"Write the first {n} {what}"
                for n in (5, 7, 8, 10)
                for what in ("even numbers", "odd numbers", "letters")
            ]
            + [f"Write the multiplication table of {n}" for n in (2, 3, 4, 6, 7, 8, 10)]
            + [
                "List the days of the week",
                "List the months of the year",
                "List the four seasons",
                "Count down from 10 to 1",
            ]
        )
        + "| Write the first 6 square numbers; Write the first 4 prime numbers; "
        + "List the five vowels; List the four suits of cards",
    ),
    "code": (
        [
            "Write a Python function that {}. Only the code.",
            "Write a short Python function that {}, without comments.",
            "Show me a JavaScript function that {}. Only the code.",
        ],
        """adds two numbers; multiplies two numbers; reverses a string; returns the largest number of a list;
        returns the sum of a list; counts the vowels of a string; checks whether a number is even; checks whether a
        number is prime; squares every item of a list; returns the first item of a list; returns the last item of a
        list; joins a list of words with spaces; counts the words of a text; turns a string into capital letters;
        sorts a list of numbers; removes duplicates from a list; returns the length of a string; converts minutes to
        seconds; converts kilometres to miles; converts Celsius to Fahrenheit; computes a factorial; computes the
        average of a list; says hello to a name; prints the numbers from one to ten; swaps two values; returns the
        area of a circle; checks whether a word is a palindrome; returns the smaller of two numbers
        | returns the area of a rectangle; checks whether a year is a leap year; finds the longest word of a
        sentence; converts hours to minutes""",
    ),
    "definition": (
        [
            "What is {}? Answer in one sentence.",
            "Define {} in one sentence.",
            "Explain {} to a child in two sentences.",
        ],
        """a river; a volcano; an island; a desert; gravity; electricity; photosynthesis; evaporation; a planet; a
        star; a comet; a compass; a telescope; a microscope; a bridge; a library; a museum; democracy; a budget; a
        loan; a recipe; a poem; a novel; a verb; a noun; an algorithm; a database; a browser; a vaccine; a muscle; a
        bone; a heart; friendship; honesty; a virus; rain
        | a glacier; a thermometer; an adjective; an orchestra""",
    ),
    "rewrite": (
        [
            "Rewrite this in the past tense: {}",
            "Rewrite this in the future tense: {}",
            "Put these sentences in a numbered list: {}",
            "Say this in other words: {}",
        ],
        """I walk to the station. I buy a ticket.; She reads a book. Her brother sleeps.; We play in the park. The
        sun shines.; They eat dinner at six. Then they wash up.; He opens the window. A bird sings.; You write a
        letter. You post it at once.; The dog sleeps on the floor. The cat watches it.; My sister cooks soup. We all
        like it.; The children sing a song. They dance too.; I clean my room. It takes an hour.; The teacher asks a
        question. Nobody answers.; We wait for the bus. It comes late.; He drives to work. He parks behind the
        office.; She paints the wall. She likes the colour.; The cat drinks milk. It is thirsty.; I help my father.
        We move the boxes.; They build a house. It has two floors.; You close the door. You turn off the light.; The
        farmer feeds the cows. He gets up early.; We watch a film. It makes us laugh.; She buys bread. She pays with
        coins.; He repairs the car. It starts again.; I call my friend. She tells me the news.; The baby laughs. The
        parents smile.; They plant a tree. It grows fast.; We visit the city. We see the old bridge.; The nurse
        helps the patient. He thanks her.; I lose my keys. I look under the bed.; She learns Spanish. She practises
        every day.; The train stops. The people get off.
        | The baker sells cakes. They taste of honey.; We paddle across the lake. The wind is cold.; He borrows a
        ladder. He gives it back on Tuesday.; My uncle mends the fence. He needs more nails.""",
    ),
    "translation": (
        [
            'Which English words mean nearly the same as "{}"?',
            'How do you say "{}" in Spanish?',
            'What is the French word for "{}"?',
            'What does "{}" mean? Give one example sentence.',
        ],
        """house; water; bread; sun; moon; tree; book; friend; mother; father; dog; cat; red; blue; green; grey;
        day; night; morning; school; street; table; door; fish; milk; apple; horse; bird; winter; summer; city;
        thank you; good evening
        | cheese; butterfly; shoulder; goodbye""",
    ),
    "fact": (
        [
            "What is the capital of {}? Answer in a full sentence.",
            "On which continent is {}? Answer in a full sentence.",
            "Which language do people speak in {}?",
            "Tell me two facts about {}.",
        ],
        """France; Spain; Italy; Germany; Portugal; Poland; Sweden; Norway; Finland; Denmark; Greece; Ireland;
        Austria; Egypt; Kenya; Nigeria; Morocco; India; China; Japan; Thailand; Vietnam; Indonesia; Turkey; Canada;
        Mexico; Cuba; Brazil; Argentina; Chile; Australia
        | Peru; Hungary; Ghana; South Korea""",
    ),
    "steps": (
        [
            "Explain in four short numbered steps how to {}.",
            "Write three short steps to {}.",
            "How do I {}? Give me five numbered steps, a few words each.",
        ],
        """boil an egg; make tea; make a sandwich; wash your hands; brush your teeth; plant a seed; water a plant;
        make a bed; clean a window; wash a car; change a light bulb; write a letter; send an email; pack a suitcase;
        set a table; wash the dishes; iron a shirt; paint a wall; ride a bicycle; feed a cat; walk a dog; save a
        file; print a page; charge a phone; read a map; cook rice; bake bread; sweep a floor; hang a picture; learn
        a new word
        | sharpen a pencil; wrap a present; peel an orange; tie a knot""",
    ),
    "format": (
        [
            "Put these words in a bulleted list: {}.",
            "Write these words as a numbered list: {}.",
            "Write a JSON list of these words: {}.",
            "Make a Markdown table with one word in each row: {}.",
        ],
        """apple, pear, plum, cherry; dog, cat, horse, cow; red, green, blue, yellow; spoon, fork, knife, plate;
        sun, moon, star, cloud; bread, butter, jam, tea; pen, paper, ink, ruler; car, bus, train, tram; north,
        south, east, west; salt, pepper, sugar, oil; rain, snow, wind, fog; shirt, coat, hat, glove; gold, silver,
        copper, iron; table, chair, lamp, shelf; river, lake, sea, pond; hand, foot, head, arm; king, queen, prince,
        knight; circle, square, triangle, cube; milk, water, juice, coffee; nail, hammer, saw, drill; rose, tulip,
        daisy, lily; Monday, Friday, Sunday, Tuesday; spring, autumn, winter, summer; happy, sad, angry, calm; fast,
        slow, late, early; door, window, roof, floor; eagle, owl, crow, duck; one, two, three, four; lemon, lime,
        orange, melon; drum, flute, piano, harp
        | ladder, bucket, brush, broom; oak, birch, willow, maple; otter, badger, weasel, beaver; ankle, elbow,
        wrist, knee""",
    ),
    "chat": (
        [
            "Name three {}. >> Name two more.",
            "Name one of the {}. >> Describe it in one short sentence.",
            "Give me a list of three {}. >> Now write the same list as JSON.",
        ],
        """wild animals; pets; colours; big cities; old cities; planets; oceans; metals; gases; languages; school
        subjects; farm animals; vehicles; fruits; vegetables; tools; drinks; sports; flowers; trees; birds; insects;
        famous rivers; kinds of bread; kinds of music; parts of the body; rooms of a house; seasons; shapes; days of
        the week
        | gemstones; reptiles; kinds of pasta; musical intervals""",
    ),
}


def make(seed: int = 0) -> list[dict]:
    """All prompts, shuffled: {"id", "kind", "split": train or heldout, "turns": what the user says, turn by turn}."""
    chance, rows = random.Random(seed), []
    for kind, (templates, topics) in KINDS.items():
        for split, names, most in zip(
            ("train", "heldout"), topics.split("|"), (TRAIN_PER_KIND, HELD_OUT_PER_KIND), strict=True
        ):
            prompts = [t.format(" ".join(name.split())) for t in templates for name in names.split(";")]
            for number, prompt in enumerate(chance.sample(prompts, min(most, len(prompts)))):
                rows.append(
                    {"id": f"{kind}-{split}-{number:03}", "kind": kind, "split": split, "turns": prompt.split(" >> ")}
                )
    chance.shuffle(rows)
    return rows


if __name__ == "__main__":
    rows = make()
    PATH.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{PATH}: {len(rows)} prompts, {sum(row['split'] == 'heldout' for row in rows)} of them held out")
