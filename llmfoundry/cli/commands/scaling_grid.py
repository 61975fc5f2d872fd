"""The runs of a scaling experiment: each point's recipe, by the rules, and what it counts.

`cli/commands/scaling.py` calls `grid`. The idea: a point is the base recipe's command line and
nothing else, so that any of them can be run by hand.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.models.counts import active_parameter_count, flops_per_token, parameter_count
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.overrides import as_list
from llmfoundry.recipe.scaling import PowerRule, ScalingRecipe
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from llmfoundry.recipe.typed import as_written, flat
from llmfoundry.scaling.points import Point

MOST_WIDTH = 1 << 17
COMPARED = ("tokenizer.", "data.", "eval.validation")
"""Keys that families share, else their losses do not compare."""


@dataclass(frozen=True)
class GridPoint:
    """A run to be made.

    Attributes:
        point: what it counts; without a loss.
        words: of its command line behind the base recipe.
        settings: of its whole recipe, by dotted key.
        folder: of the run.
    """

    point: Point
    words: list[str]
    settings: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class ModelShape:
    """A family's model of one width.

    Attributes:
        family: its name.
        width: of the model.
        words: that make it of the base recipe.
        recipe: filled, with a vocabulary.
        counts: parameters: total, active and non_embedding, as `Point` has them.
        flops: of training on a token.
    """

    family: str
    width: int
    words: list[str]
    recipe: ResolvedTrainRecipe
    counts: dict[str, int]
    flops: float


def grid(recipe: ScalingRecipe) -> list[GridPoint]:
    """All points, those that are held out last.

    Raises:
        UserError: a point's recipe has problems; all are named.
    """
    bases = {family: base_of(recipe, family) for family in recipe.families or [""]}
    _refuse_unlike(bases)
    aims = [*itertools.product(recipe.sizes, recipe.tokens or recipe.compute)]
    wanted = [(family, width, aim, False) for family in bases for width, aim in aims]
    if held := recipe.held_out:
        wanted += [(family, held.size, held.tokens, True) for family in bases]
    keys = dict.fromkeys((family, width) for family, width, _, _ in wanted)
    shapes = {key: shape_of(recipe, key[0], bases[key[0]], key[1]) for key in keys}

    def tokens_of(shape: ModelShape, aim: float, is_held: bool) -> float:
        return aim if is_held or recipe.tokens else aim / shape.flops

    fitted = [(shapes[f, width], aim) for f, width, aim, is_held in wanted if not is_held]
    _settle_rules(recipe, bases, [(shape, tokens_of(shape, aim, False)) for shape, aim in fitted])
    points, problems = list[GridPoint](), dict[str, None]()
    for family, width, aim, is_held in wanted:
        shape, swept = shapes[family, width], [(1.0, 1.0)]
        if not is_held:
            swept = [*itertools.product(recipe.lr_factors, recipe.batch_factors)]
        for factors, seed in itertools.product(swept, recipe.seeds or [shape.recipe.seed]):
            try:
                one = point_of(recipe, shape, tokens_of(shape, aim, is_held), factors, seed)
            except UserError as error:
                problems |= dict.fromkeys(error.problems)
                continue
            points.append(replace(one, point=replace(one.point, held_out=is_held, target=aim)))
    if len({one.point.name for one in points}) < len(points):
        problems["tokens: two points are the same run; write values further apart"] = None
    if problems:
        raise UserError(*problems)
    return points


def base_of(recipe: ScalingRecipe, family: str) -> ResolvedTrainRecipe:
    """A family's recipe before any rule, filled.

    Raises:
        UserError: it has problems, or measures nothing that a law could be fitted to.
    """
    base = checked(TrainRecipe, recipe.base, [*_words(recipe, family), "run_name=scaling"])
    if not base.eval.validation:
        raise UserError("base: eval.validation is false, but the law is of held-out text's loss")
    if any(group.lr is not None for group in base.optimizer.param_groups):
        raise UserError("base: optimizer.param_groups set an lr, which no rule changes; remove it")
    return base.resolve()


def _words(recipe: ScalingRecipe, family: str) -> list[str]:
    """What the family's command line has before any rule."""
    plugins = [f"plugins={as_list(recipe.plugins)}"] * bool(recipe.plugins)
    return [*plugins, *recipe.overrides, *recipe.families.get(family, [])]


def _refuse_unlike(bases: dict[str, ResolvedTrainRecipe]) -> None:
    """Losses of other tokens or other text do not compare."""
    (first, mine), *others = [(f, dict(flat(as_written(base)))) for f, base in bases.items()]
    for family, written in others:
        for key, value in written.items():
            if key.startswith(COMPARED) and value != mine.get(key):
                raise UserError(
                    f"families.{family}: {key} is {value}, and {first}'s is {mine.get(key)}:"
                    " their losses do not compare; write one for both"
                )


def shape_of(
    recipe: ScalingRecipe, family: str, base: ResolvedTrainRecipe, width: int
) -> ModelShape:
    """The family's model of a width, by the rules.

    Raises:
        UserError: the width does not divide into heads, or the model cannot be.
    """
    model, rules = base.model, recipe.rules
    head = rules.head_dim or model.head_dim
    if width % head:
        near = max(1, round(width / head)) * head
        raise UserError(f"sizes: {width} is no multiple of rules.head_dim {head}; write {near}")
    heads = width // head
    layers = max(1, round(width / (rules.aspect_ratio or model.d_model / model.n_layers)))
    words = [f"model.d_model={width}", f"model.n_layers={layers}", f"model.n_heads={heads}"]
    attention, ffn = model.attn_config, model.ffn_config
    if model.head_dim != model.d_model // model.n_heads or model.d_model % model.n_heads:
        words.append(f"model.head_dim={head}")
    if attention.attn_type == "grouped_query_attention" and attention.kv_n_heads:
        most = max(1, round(heads * attention.kv_n_heads / model.n_heads))
        kv = max(n for n in range(1, most + 1) if heads % n == 0)
        words.append(f"model.attn_config.kv_n_heads={kv}")
    if model.expansion_ratio is None and ffn.ffn_hidden_size:
        hidden = max(8, round(ffn.ffn_hidden_size * width / model.d_model / 8) * 8)
        words.append(f"model.ffn_config.ffn_hidden_size={hidden}")
    own = [*_words(recipe, family), *words]
    made = checked(TrainRecipe, recipe.base, [*own, "run_name=scaling"])
    filled = with_guessed_vocabulary(made.resolve())
    shaped = filled.model
    embedded = shaped.vocab_size * width * (1 if shaped.tie_word_embeddings else 2)
    if shaped.learned_pos_emb:
        embedded += (shaped.max_seq_len or 0) * width
    active = active_parameter_count(shaped)
    counts = {"total": parameter_count(shaped), "active": active}
    counts["non_embedding"] = active - embedded
    return ModelShape(
        family, width, own, filled, counts, flops_per_token(shaped, filled.max_seq_len)
    )


def _settle_rules(
    recipe: ScalingRecipe,
    bases: dict[str, ResolvedTrainRecipe],
    aims: Sequence[tuple[ModelShape, float]],
) -> None:
    """Write in place where a rule has its base's number, and which that is."""
    recipe.fill()
    base = next(iter(bases.values()))
    step = base.global_train_batch_size * base.max_seq_len
    for rule, value in ((recipe.rules.lr, base.optimizer.lr), (recipe.rules.batch_tokens, step)):
        rule.value = rule.value or float(value)
        rule.at = rule.at or min(_quantity(rule, *aim) for aim in aims)


def _quantity(rule: PowerRule, shape: ModelShape, tokens: float) -> float:
    known = {"compute": shape.flops * tokens, "parameters": shape.counts["active"]}
    return float((known | {"tokens": tokens, "width": shape.width})[rule.by])


def point_of(
    recipe: ScalingRecipe, shape: ModelShape, tokens: float, factors: tuple[float, float], seed: int
) -> GridPoint:
    """A run by the settled rules, tokens rounded to whole steps."""
    rules, length = recipe.rules, shape.recipe.max_seq_len
    batch = rules.batch_tokens.number(_quantity(rules.batch_tokens, shape, tokens)) * factors[1]
    rows = max(1, round(batch / length))
    steps = max(1, round(tokens / (rows * length)))
    lr = float(f"{rules.lr.number(_quantity(rules.lr, shape, tokens)) * factors[0]:.4g}")
    trained = steps * rows * length
    name = ",".join(_name(recipe, shape, trained, lr, rows, seed))
    words = [
        *shape.words,
        f"optimizer.lr={lr}",
        f"global_train_batch_size={rows}",
        f"max_duration={steps}ba",
        f"seed={seed}",
        f"run_name={re.sub(r'[^A-Za-z0-9._-]+', '-', name)}",
        f"save_folder={recipe.output}/points/{name}",
    ]
    point = Point(
        name=name,
        family=shape.family,
        parameters=shape.counts[recipe.parameters],
        tokens=trained,
        flops=trained * shape.flops,
        total=shape.counts["total"],
        active=shape.counts["active"],
        non_embedding=shape.counts["non_embedding"],
        width=shape.width,
        lr=lr,
        batch_tokens=rows * length,
        seed=seed,
    )
    settings = dict(flat(as_written(checked(TrainRecipe, recipe.base, words))))
    return GridPoint(point, words, settings, Path(recipe.output).expanduser() / "points" / name)


def _name(
    recipe: ScalingRecipe, shape: ModelShape, tokens: int, lr: float, rows: int, seed: int
) -> Iterator[str]:
    """What tells a run from the others of the grid."""
    if shape.family:
        yield shape.family
    yield f"size={shape.width}"
    yield f"tokens={tokens}"
    if len(recipe.lr_factors) > 1:
        yield f"lr={lr:g}"
    if len(recipe.batch_factors) > 1:
        yield f"rows={rows}"
    if recipe.seeds:
        yield f"seed={seed}"


def shape_near(recipe: ScalingRecipe, family: str, parameters: float) -> ModelShape:
    """The family's model, by the rules, whose parameters come nearest to a number."""
    base = base_of(recipe, family)
    head = recipe.rules.head_dim or base.model.head_dim
    assert head is not None

    def size(heads: int) -> float:
        return shape_of(recipe, family, base, heads * head).counts[recipe.parameters]

    high = 1
    while high * head < MOST_WIDTH and size(high) < parameters:
        high *= 2
    heads = range(max(1, high // 2), high + 1)
    above = min(high, heads.start + bisect_left(heads, parameters, key=size))
    both = (max(1, above - 1), above)
    near = min(both, key=lambda heads: abs(math.log(size(heads) / parameters)))
    return shape_of(recipe, family, base, near * head)
