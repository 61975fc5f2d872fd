"""How each block's activations wait for the backward pass, as the `parallel` section writes it.

`recipe/parallel.py` holds the keys and makes an `ActivationMemory` of them, which
`distributed/activation_checkpoint.py` carries out and `plan/` counts. The target's grammar is LLM
Foundry's (`models/utils/act_ckpt.py` there): names of parts, each perhaps with a range of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmfoundry.recipe.values.bounds import MOST_LAYERS, Range
from llmfoundry.recipe.values.checks import nearest

BLOCK, EXPERTS = "block", "experts"
PARTS = (BLOCK, "attention", "feed_forward", "norm", EXPERTS)
"""What recomputation may start anew from: a block's input, or that of a part of it."""
INSIDE = {EXPERTS: "feed_forward"}
"""Parts that lie in another; all lie in the block."""
FOUNDRY = {  # LLM Foundry's names of modules, in lower case
    "mptblock": (BLOCK,),
    "norm_attn_norm": ("attention", "norm"),
    **dict.fromkeys(
        ("multihead_attention", "grouped_query_attention", "multiquery_attention"), ("attention",)
    ),
    **dict.fromkeys(
        ("mptmlp", "mptglu", "te_ln_mlp", "torch_dmoe", "mb_moe", "mb_dmoe", "dmoe"),
        ("feed_forward",),
    ),
    **dict.fromkeys(
        ("layernorm", "low_precision_layernorm", "rmsnorm", "low_precision_rmsnorm",
         "triton_rmsnorm"),
        ("norm",),
    ),
}  # fmt: skip
RANGES = "a number n (the first n), first-n, middle-n, last-n, range-i-j (j not included), a list"

FORMATS = ("int8", "fp8")
COMPRESSIONS = ("none", *FORMATS, "auto")
LEAST_BUDGET = 0.15
BUDGET = Range(0, 1, "1 keeps what torch.compile keeps without a budget")


@dataclass(frozen=True)
class ActivationMemory:
    """How the activations of each block are kept, all decided.

    Attributes:
        checkpointing: what the backward pass computes again: none, selective or whole.
        targets: of whole: by block, what of PARTS is computed again; nothing of it is kept but its
            inputs. Empty sets else.
        compression: none, or of FORMATS: in what form saved tensors wait.
        budget: torch.compile's activation_memory_budget; None: it has none.
    """

    checkpointing: str
    targets: tuple[frozenset[str], ...]
    compression: str = "none"
    budget: float | None = None

    def recomputes(self, block: int, part: str) -> bool:
        """Whether `part` of a block is recomputed, by itself or in what it lies in."""
        chosen = self.targets[block]
        return not chosen.isdisjoint({part, BLOCK, INSIDE.get(part, part)})


def read_targets(written: Any, n_layers: int | None, key: str) -> tuple[frozenset[str], ...]:
    """The parts recomputed of each block.

    Args:
        written: a name, a list of names, or {name: range}; None: all of every block.
        n_layers: blocks of the model; None: not known yet, and no number is too large.
        key: the dotted key, for messages.

    Raises:
        ValueError: a line for people: an unknown name, a range that is none, a block that there is
            not, or two targets of which one lies in the other.
    """
    count = MOST_LAYERS if n_layers is None else n_layers
    if written is None:
        return (frozenset({BLOCK}),) * count
    ranges = written if isinstance(written, dict) else dict.fromkeys(_listed(written, key), None)
    if not ranges:
        raise ValueError(f"{key}: names nothing; write block, or remove it")
    named: list[dict[str, str]] = [{} for _ in range(count)]
    for name, where in ranges.items():
        is_all = not isinstance(written, dict)
        blocks = range(count) if is_all else _blocks(where, count, f"{key}.{name}")
        for part in _parts(str(name), key):
            for block in blocks:
                _add(named[block], part, str(name), f"{key}: block {block}")
    return tuple(frozenset(parts) for parts in named)


def _listed(written: Any, key: str) -> list[str]:
    names = [written] if isinstance(written, str) else list(written)
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{key}: {twice} stands there twice; write it once")
    return names


def _parts(name: str, key: str) -> tuple[str, ...]:
    """Ours of a name of ours or of LLM Foundry's."""
    lower = name.lower()
    if lower in PARTS:
        return (lower,)
    if lower not in FOUNDRY:
        near = nearest(lower, (*PARTS, *FOUNDRY))
        raise ValueError(f"{key}: {name} is no part of a block{near}; write {', '.join(PARTS)}")
    return FOUNDRY[lower]


def _add(named: dict[str, str], part: str, name: str, where: str) -> None:
    """Note that `name` has a part of one block recomputed; `named` has those before it."""
    for other, by in named.items():
        inside = (part in INSIDE and INSIDE[part] == other) or INSIDE.get(other) == part
        if part == other or BLOCK in (part, other) or inside:
            raise ValueError(
                f"{where} is in the ranges of {by} and {name}, which overlap; give each a range of"
                " its own, or remove one"
            )
    named[part] = name


def _blocks(where: Any, count: int, key: str) -> list[int]:
    """Block numbers of a range, as LLM Foundry's `get_target_block_list` reads it.

    There numbers behind the last block are dropped: of first-n and the like they are here, too,
    which may be meant for a deeper model; a number by itself is not.
    """
    elements = where if isinstance(where, list) else [where]
    found: set[int] = set()
    for element in elements:
        if isinstance(element, str):
            for word in element.replace(" ", "").split(","):
                found |= set(_word(word, count, key))
        elif not isinstance(element, int) or isinstance(element, bool):
            raise ValueError(f"{key}: {element!r} is no range of blocks; write {RANGES}")
        elif isinstance(where, list):
            if not 0 <= element < count:
                raise ValueError(f"{key}: there is no block {element}; write 0 to {count - 1}")
            found.add(element)
        else:
            found |= set(range(min(element, count)))
    if not found:
        raise ValueError(f"{key}: {where} is no block of {count}; write {RANGES}, or remove it")
    return sorted(found)


def _word(word: str, count: int, key: str) -> range:
    """The blocks of first-n, middle-n, last-n or range-i-j, of `count`."""
    kind, *numbers = word.split("-")
    wanted = {"first": 1, "middle": 1, "last": 1, "range": 2}.get(kind)
    if len(numbers) != wanted or not all(map(_is_number, numbers)):
        raise ValueError(f"{key}: {word!r} is no range of blocks; write {RANGES}")
    n, *end = map(int, numbers)
    last = count - 1
    if kind == "first":
        return range(min(n, count))
    if kind == "last":
        return range(max(count - n, 0), count)
    if kind == "middle":  # as there, with the last block's number, not the count
        start = max(last // 2 - n // 2, 0)
        return range(start, min(start + n, count))
    return range(min(n, count), min(end[0], count))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10
