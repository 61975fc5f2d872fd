"""Can the model answer in multiple-choice format at all? It copies the letter of a colour.

`sets.GENERATORS` names `colour_letters`. A model near chance here does not understand letters as
answers, whatever other tasks that ask for a letter seem to say about its knowledge.
"""

from __future__ import annotations

import random

from llmfoundry.gauntlet.tasks.generated.items import CHOICES, COLOURS, Item, in_order

_OBJECTS = ("bag", "ball", "bike", "boat", "book", "chair", "cup", "door", "hat", "shirt")
_LETTERS = tuple("ABCD")


def colour_letters(rng: random.Random, level: int) -> Item:
    """Four colours under letters, and a question for one of them.

    Level 1 names the colour; level 2 says that one object has it; above, level - 1 objects have
    colours, all of which are among the choices.
    """
    colours = rng.sample(COLOURS, CHOICES)
    place = rng.randrange(CHOICES)
    shown = [f"{letter}. {colour}" for letter, colour in zip(_LETTERS, colours, strict=True)]
    if level == 1:
        facts, asked = [], f"Which is {colours[place]}?"
    else:
        objects = rng.sample(_OBJECTS, level - 1)
        others = [colour for i, colour in enumerate(colours) if i != place]
        theirs = [colours[place], *rng.sample(others, level - 2)]
        facts = [f"The {x} is {colour}." for x, colour in zip(objects, theirs, strict=True)]
        asked = f"Which colour is the {objects[0]}?"
        rng.shuffle(facts)
    return in_order("\n".join([*facts, asked, *shown]), _LETTERS, place)
