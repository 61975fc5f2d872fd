"""Grid of a scaling experiment: recipe, parameters, tokens and FLOPs of each run.

Entry point: `grid`, which `cli/commands/scaling.py` calls. The rules of the scaling recipe
determine the overrides of each point. A point is fully described by the base recipe and these
overrides, so that it can be run by hand.
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
_COMPARED = ("tokenizer.", "data.", "eval.validation")
"""Keys that must be equal in all families; otherwise their losses are not comparable."""


@dataclass(frozen=True)
class GridPoint:
    """Run of the grid.

    Attributes:
        point: parameters, tokens and FLOPs; without a loss.
        words: overrides of the base recipe.
        settings: complete recipe, by dotted key.
        folder: folder of the run.
    """

    point: Point
    words: list[str]
    settings: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class ModelShape:
    """Model of one family and width.

    Attributes:
        family: name of the family.
        width: d_model.
        words: overrides of the base recipe.
        recipe: resolved recipe, with a vocabulary size.
        counts: numbers of parameters: total, active and non_embedding, as in `Point`.
        flops: training FLOPs per token.
    """

    family: str
    width: int
    words: list[str]
    recipe: ResolvedTrainRecipe
    counts: dict[str, int]
    flops: float


def grid(recipe: ScalingRecipe) -> list[GridPoint]:
    """Return all points; held-out points come last.

    Raises:
        UserError: problems of the recipes of all points.
    """
    # combinations of family, width, budget (tokens or FLOPs) and whether it is held out
    bases = {family: base_of(recipe, family) for family in recipe.families or [""]}
    _refuse_unlike(bases)
    widths_budgets = [*itertools.product(recipe.sizes, recipe.tokens or recipe.compute)]
    specs = [(family, width, budget, False) for family in bases for width, budget in widths_budgets]
    held_out = recipe.held_out
    if held_out:
        specs += [(family, held_out.size, held_out.tokens, True) for family in bases]

    # the model of each family and width
    shapes: dict[tuple[str, int], ModelShape] = {}
    for family, width, _, _ in specs:
        if (family, width) not in shapes:
            shapes[family, width] = shape_of(recipe, family, bases[family], width)

    def tokens_of(shape: ModelShape, budget: float, is_held_out: bool) -> float:
        """Return the tokens of a budget, which is in FLOPs if the recipe has `compute`."""
        return budget if is_held_out or recipe.tokens else budget / shape.flops

    # anchor the rules of learning rate and batch size at the smallest fitted point
    fitted_runs = []
    for family, width, budget, is_held_out in specs:
        if not is_held_out:
            shape = shapes[family, width]
            fitted_runs.append((shape, tokens_of(shape, budget, is_held_out)))
    _settle_rules(recipe, bases, fitted_runs)

    # the points, with swept factors (of learning rate and batch size) and seeds
    points, problems = list[GridPoint](), dict[str, None]()
    for family, width, budget, is_held_out in specs:
        shape, factor_pairs = shapes[family, width], [(1.0, 1.0)]
        if not is_held_out:
            factor_pairs = [*itertools.product(recipe.lr_factors, recipe.batch_factors)]
        tokens = tokens_of(shape, budget, is_held_out)
        for factors, seed in itertools.product(factor_pairs, recipe.seeds or [shape.recipe.seed]):
            try:
                grid_point = point_of(recipe, shape, tokens, factors, seed)
            except UserError as error:
                problems |= dict.fromkeys(error.problems)
                continue
            point = replace(grid_point.point, held_out=is_held_out, target=budget)
            points.append(replace(grid_point, point=point))
    if len({grid_point.point.name for grid_point in points}) < len(points):
        problems["tokens: two points are the same run; write values further apart"] = None
    if problems:
        raise UserError(*problems)
    return points


def base_of(recipe: ScalingRecipe, family: str) -> ResolvedTrainRecipe:
    """Return the resolved recipe of a family before any rule.

    Raises:
        UserError: the recipe is not valid or does not measure a validation loss.
    """
    base = checked(TrainRecipe, recipe.base, [*_words(recipe, family), "run_name=scaling"])
    if not base.eval.validation:
        raise UserError("base: eval.validation is false, but the law is of held-out text's loss")
    if any(group.lr is not None for group in base.optimizer.param_groups):
        raise UserError("base: optimizer.param_groups set an lr, which no rule changes; remove it")
    return base.resolve()


def _words(recipe: ScalingRecipe, family: str) -> list[str]:
    """Return the overrides of a family before any rule."""
    words = [*recipe.overrides, *recipe.families.get(family, [])]
    if recipe.plugins:
        words.insert(0, f"plugins={as_list(recipe.plugins)}")
    return words


def _refuse_unlike(bases: dict[str, ResolvedTrainRecipe]) -> None:
    """Check that all families have the same tokenizer and data; else losses are not comparable.

    Raises:
        UserError: a key of _COMPARED differs.
    """
    settings = [(family, dict(flat(as_written(base)))) for family, base in bases.items()]
    (first_family, first), *others = settings
    for family, other in others:
        for key, value in other.items():
            if key.startswith(_COMPARED) and value != first.get(key):
                raise UserError(
                    f"families.{family}: {key} is {value}, and {first_family}'s is"
                    f" {first.get(key)}: their losses do not compare; write one for both"
                )


def shape_of(
    recipe: ScalingRecipe, family: str, base: ResolvedTrainRecipe, width: int
) -> ModelShape:
    """Return the model of a family and width by the rules.

    Raises:
        UserError: the width is not a multiple of the head dimension, or the model is not valid.
    """
    # overrides of width, depth and heads
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
    all_words = [*_words(recipe, family), *words]

    # parameters and FLOPs of the resolved model
    user_recipe = checked(TrainRecipe, recipe.base, [*all_words, "run_name=scaling"])
    resolved = with_guessed_vocabulary(user_recipe.resolve())
    config = resolved.model
    n_embedding = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    if config.learned_pos_emb:
        n_embedding += (config.max_seq_len or 0) * width
    active = active_parameter_count(config)
    counts = {"total": parameter_count(config), "active": active}
    counts["non_embedding"] = active - n_embedding
    flops = flops_per_token(config, resolved.max_seq_len)
    return ModelShape(family, width, all_words, resolved, counts, flops)


def _settle_rules(
    recipe: ScalingRecipe,
    bases: dict[str, ResolvedTrainRecipe],
    runs: Sequence[tuple[ModelShape, float]],
) -> None:
    """Set the anchor of each power rule in place: the base's value, and where it applies.

    Args:
        recipe: its rules are changed.
        bases: recipe of each family; the first one has the values.
        runs: shape and tokens of the fitted points; the smallest is the anchor.
    """
    recipe.fill()
    rules, base = recipe.rules, next(iter(bases.values()))
    tokens_per_step = base.global_train_batch_size * base.max_seq_len
    for rule, value in ((rules.lr, base.optimizer.lr), (rules.batch_tokens, tokens_per_step)):
        rule.value = rule.value or float(value)
        rule.at = rule.at or min(_quantity(rule, shape, tokens) for shape, tokens in runs)


def _quantity(rule: PowerRule, shape: ModelShape, tokens: float) -> float:
    """Return the quantity that a rule depends on (`by`) for a shape and number of tokens."""
    quantities = {
        "compute": shape.flops * tokens,
        "parameters": shape.counts["active"],
        "tokens": tokens,
        "width": shape.width,
    }
    return float(quantities[rule.by])


def point_of(
    recipe: ScalingRecipe, shape: ModelShape, tokens: float, factors: tuple[float, float], seed: int
) -> GridPoint:
    """Return a run by the anchored rules, with tokens rounded to complete steps.

    Args:
        recipe: recipe of the grid, with anchored rules.
        shape: model.
        tokens: approximate number of training tokens.
        factors: factors of the learning rate and of the batch size.
        seed: seed of the run.

    Raises:
        UserError: the recipe of the run is not valid.
    """
    # batch size, steps and learning rate
    rules, length = recipe.rules, shape.recipe.max_seq_len
    lr_factor, batch_factor = factors
    batch_quantity = _quantity(rules.batch_tokens, shape, tokens)
    batch_tokens = rules.batch_tokens.number(batch_quantity) * batch_factor
    rows = max(1, round(batch_tokens / length))
    steps = max(1, round(tokens / (rows * length)))
    exact_lr = rules.lr.number(_quantity(rules.lr, shape, tokens)) * lr_factor
    lr = float(f"{exact_lr:.4g}")
    trained = steps * rows * length

    # overrides, with a name that is also a folder
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

    # the point
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
    """Yield the parts of a run's name that distinguish it from the other runs of the grid."""
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
    """Return the model of a family whose number of parameters is nearest to `parameters`."""
    base = base_of(recipe, family)
    head = recipe.rules.head_dim or base.model.head_dim
    assert head is not None

    def size(heads: int) -> float:
        return shape_of(recipe, family, base, heads * head).counts[recipe.parameters]

    # double the heads until the model is large enough, then bisect
    high = 1
    while high * head < MOST_WIDTH and size(high) < parameters:
        high *= 2
    heads = range(max(1, high // 2), high + 1)
    above = min(high, heads.start + bisect_left(heads, parameters, key=size))

    # the nearer of the two neighbors, on a logarithmic scale
    neighbors = (max(1, above - 1), above)
    nearest = min(neighbors, key=lambda heads: abs(math.log(size(heads) / parameters)))
    return shape_of(recipe, family, base, nearest * head)
