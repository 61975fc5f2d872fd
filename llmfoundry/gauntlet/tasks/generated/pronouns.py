"""Who is meant? Two sentences that differ in one name, and an ending that suits one of them.

`sets.GENERATORS` names `pronouns`, the task of type `schema`. Both people, or both things, occur in
both sentences, and each ending has a twin that suits the other one.
"""

from __future__ import annotations

import random

from llmfoundry.gauntlet.tasks.generated.items import PEOPLE, Item

_THINGS = ("basket", "bottle", "box", "chair", "cup", "door", "hat", "lamp", "spoon", "table")
_WORKERS = ("baker", "clerk", "driver", "farmer", "guard", "nurse", "painter", "teacher")
_QUALITIES = ("broken", "clean", "dirty", "heavy", "new", "old", "red", "small", "wet", "white")
_PERSON_ENDINGS = ("felt hungry", "wanted to sleep", "knew the answer", "had no time", "smiled")
_THING_ENDINGS = ("was made of wood", "had a hole", "weighed too much", "was empty", "fell apart")
_LARGE = ("big", "large", "wide", "long")
_SMALL = ("small", "narrow", "little", "short")

# past tense, the same in the passive voice, endings that suit who did it, and whom it was done to
_DEEDS = (
    ("thanked", "was thanked by", ("had got help", "had been saved"), ("had helped", "had paid")),
    ("followed", "was followed by", ("did not know the way",), ("knew the way",)),
    ("taught", "was taught by", ("knew more", "was an expert"), ("knew less", "wanted to learn")),
    ("woke", "was woken by", ("was already up", "had got up early"), ("had overslept",)),
    ("carried", "was carried by", ("was strong",), ("had hurt a leg", "could not walk")),
    ("blamed", "was blamed by", ("had been cheated",), ("had lied", "had broken a promise")),
)


def pronouns(rng: random.Random, level: int) -> Item:
    """One of two contexts goes with the ending.

    Level 1 is settled by was or were, level 2 by person or thing, level 3 by what fits into what,
    level 4 by who did it to whom, level 5 likewise in the passive voice.
    """
    if level == 1:
        sentence, right, other, ending = _number(rng)
    elif level == 2:
        sentence, right, other, ending = _kind(rng)
    elif level == 3:
        sentence, right, other, ending = _size(rng)
    else:
        sentence, right, other, ending = _deed(rng, passive=level == 5)
    contexts = (f"{sentence} because {right}", f"{sentence} because {other}")
    return Item(ending, contexts[0], contexts[1:])


def _number(rng: random.Random) -> tuple[str, str, str, str]:
    """One thing and several of another."""
    one, many = rng.sample(_THINGS, 2)
    many = f"{many}es" if many.endswith("x") else f"{many}s"
    pair = [f"the {one}", f"the {many}"]
    verbs = ["was", "were"]
    right = rng.randrange(2)
    ending = f"{verbs[right]} {rng.choice(_QUALITIES)}"
    sentence = f"{rng.choice(PEOPLE)} looked at {' and '.join(rng.sample(pair, 2))}"
    return sentence, pair[right], pair[1 - right], ending


def _kind(rng: random.Random) -> tuple[str, str, str, str]:
    """A person and a thing."""
    pair = [f"the {rng.choice(_WORKERS)}", f"the {rng.choice(_THINGS)}"]
    right = rng.randrange(2)
    ending = rng.choice((_PERSON_ENDINGS, _THING_ENDINGS)[right])
    verb = rng.choice(("put down", "let go of", "left"))
    sentence = f"{pair[0].capitalize()} {verb} {pair[1]}"
    return sentence, pair[right], pair[1 - right], ending


def _size(rng: random.Random) -> tuple[str, str, str, str]:
    """A thing that does not go into another."""
    pair = [f"the {thing}" for thing in rng.sample(_THINGS, 2)]
    right = rng.randrange(2)
    ending = f"was too {rng.choice((_LARGE, _SMALL)[right])}"
    verb = rng.choice(("did not fit into", "could not be put into", "did not go into"))
    sentence = f"{pair[0].capitalize()} {verb} {pair[1]}"
    return sentence, pair[right], pair[1 - right], ending


def _deed(rng: random.Random, *, passive: bool) -> tuple[str, str, str, str]:
    """Somebody who did something to somebody else."""
    pair = rng.sample(PEOPLE, 2)
    done, was_done_by, *endings = rng.choice(_DEEDS)
    right = rng.randrange(2)
    ending = rng.choice(endings[right])
    by, to = pair
    sentence = f"{to} {was_done_by} {by}" if passive else f"{by} {done} {to}"
    return sentence, pair[right], pair[1 - right], ending
