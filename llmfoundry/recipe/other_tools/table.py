"""The table: `OTHERS`, and what a word in it means. Hints and the migration both read it."""

from __future__ import annotations

from collections.abc import Iterable

from llmfoundry.recipe.other_tools.axolotl import AXOLOTL
from llmfoundry.recipe.other_tools.entry import Other
from llmfoundry.recipe.other_tools.llm_foundry import LLM_FOUNDRY
from llmfoundry.recipe.other_tools.trainers import TRAINERS

OTHERS = (*LLM_FOUNDRY, *TRAINERS, *AXOLOTL)
TOOLS = {"LLM Foundry": LLM_FOUNDRY, "axolotl": (*AXOLOTL, *TRAINERS)}
"""The tools whose whole files are taken, and their part of the table."""


def named(key: str, table: Iterable[Other] = OTHERS) -> list[Other]:
    """The entries that name a key, those of the most exact word first."""
    ranked = [(other.rank(key), other) for other in table]
    found = [(rank, other) for rank, other in ranked if rank]
    return [other for _, other in sorted(found, key=lambda pair: -pair[0])]
