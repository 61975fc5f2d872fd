"""What the `front` fixture gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """What a user sees of one command, and the recipe that its target got."""

    status: int
    out: str
    errors: list[str]
    recipe: Any


Front = Callable[..., Outcome]
