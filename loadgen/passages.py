"""Plain English to read, continue and rewrite. Made of sentences, since speculation fares otherwise on word salad."""

import random

_SENTENCES = (
    "The ferry to {place} leaves from the old harbour at {number} minutes past eight, and it rarely waits for anyone.",
    "{name} keeps {number} jars of honey in the cellar, because the winters near {place} are long and the roads close.",
    "When the bridge was built, the engineers of {place} counted {number} boats a day and planned for twice as many.",
    "A letter that {name} wrote about the flood was found last spring behind a cupboard in the library of {place}.",
    "The museum shows {number} clocks, and on the first Sunday of the month a retired teacher winds every one of them.",
    "{name} and a neighbour repaired the roof of the school in {place} before the autumn storms came over the hills.",
    "Nobody in the village remembered the song, until {name} sang its first {number} lines at the market one morning.",
    "The train was late again, so the travellers drank tea with {name} and talked about the harvest around {place}.",
    "In the report, {name} explains why the {number} pumps failed and what the town of {place} should buy instead.",
    "The baker in {place} sells {number} loaves before noon, and gives what is left to the shelter behind the church.",
    "Every evening {name} notes the height of the river, a habit that saved {number} houses in one flood.",
    "A small orchestra from {place} played for {number} people in the hall, and the last piece had to be repeated.",
)
_NAMES = ("Anna", "Martin", "Clara", "Thomas", "Helen", "Peter", "Julia", "Simon", "Laura", "David", "Emma", "Robert")
_PLACES = ("Milford", "Ashby", "Kingston", "Newport", "Dover", "Chester", "Lincoln", "Richmond", "Salem", "Bristol")


def passage(rng: random.Random, sentences: int) -> str:
    """`sentences` sentences of about 25 tokens each; none twice in a row of twelve."""
    drawn: list[str] = []
    while len(drawn) < sentences:
        drawn += rng.sample(_SENTENCES, len(_SENTENCES))
    return " ".join(
        sentence.format(name=rng.choice(_NAMES), place=rng.choice(_PLACES), number=rng.randrange(3, 98))
        for sentence in drawn[:sentences]
    )


def rewriting_prompt(rng: random.Random, sentences: int) -> str:
    """Asks for the passage again, so that the output repeats the prompt."""
    return f"Rewrite this text word for word and correct its spelling:\n\n{passage(rng, sentences)}"


def story_prompt(rng: random.Random) -> str:
    """Asks for a text of the model's own."""
    return (
        f"Write a story about {rng.choice(_NAMES)} and {rng.choice(_NAMES)}, who have {rng.randrange(3, 98)} days to "
        f"reach {rng.choice(_PLACES)}. It begins with this sentence: {passage(rng, 1)}"
    )
