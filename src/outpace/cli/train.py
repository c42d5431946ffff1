"""`outpace train`: what a method needs of a target, from nothing but the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outpace.cli import options
from outpace.cli.loading import load
from outpace.cli.options import Option
from outpace.cli.terminal import Command

_PATH = click.Path(path_type=Path)


def _option(section: str, *names: str, **settings: Any) -> Option:
    return Option(*names, section=section, show_default=True, **settings)


_POSITIVE = click.IntRange(min=1)

TEXT = [
    _option(
        "Text",
        "--tokens",
        required=True,
        type=_POSITIVE,
        help="Tokens of the target's own answers to train on.",
    ),
    _option(
        "Text",
        "--prompts",
        type=_PATH,
        help="Prompts to answer, as for bench; else the target writes user turns itself.",
    ),
    _option(
        "Text",
        "--skip-broken",
        is_flag=True,
        help="Leave broken lines of --prompts out, each reported, instead of refusing the file.",
    ),
    _option("Text", "--max-answer", default=192, type=_POSITIVE, help="Most tokens of an answer."),
    _option(
        "Text",
        "--turn-temperature",
        default=0.9,
        type=click.FloatRange(min=0, min_open=True),
        help="Of the user turns.",
    ),
    _option(
        "Text",
        "--answer-temperature",
        default=0.0,
        type=click.FloatRange(min=0),
        help="Of the answers; 0 is greedy.",
    ),
    _option(
        "Text",
        "--cache-gb",
        default=8.0,
        type=click.FloatRange(min=0, min_open=True),
        help="Most 10^9 bytes of hidden states on disk.",
    ),
]

HEADS = [
    _option("Heads", "--heads", "num_heads", default=4, type=_POSITIVE, help="How many (K)."),
    _option("Heads", "--layers", "num_layers", default=1, type=_POSITIVE, help="Blocks of each."),
    _option("Heads", "--dependent", is_flag=True, help="Heads read the path before them (Hydra)."),
    _option(
        "Heads",
        "--vocab-size",
        type=_POSITIVE,
        help="A trained matrix for so many of the most frequent tokens, which all heads share; "
        "else the target's own.",
    ),
]

TRAINING = [
    _option("Training", "--epochs", default=4, type=_POSITIVE, help="Passes over the text."),
    _option("Training", "--batch-size", default=256, type=_POSITIVE, help="Positions of a step."),
    _option(
        "Training",
        "--learning-rate",
        default=1e-3,
        type=click.FloatRange(min=0, min_open=True),
        help="Its highest value.",
    ),
    _option("Training", "--seed", default=0, type=int, help="Of the text and the order."),
]

OUT = [
    _option(
        "Output",
        "--out",
        required=True,
        type=_PATH,
        help="Folder for the heads; the same command goes on with what is in it.",
    ),
    _option(
        "Output",
        "--save-dtype",
        default="bfloat16",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Of the saved heads.",
    ),
]


@click.group()
def train() -> None:
    """Trains what a method needs of a target, on text that the target writes itself."""


@train.command(
    cls=Command,
    params=[
        *options.MODEL,
        *options.LOADING,
        *TEXT,
        *HEADS,
        *TRAINING,
        *OUT,
        *options.DEBUG,
    ],
)
def medusa(**values: Any) -> None:
    """Trains Medusa heads: the target stays as it is, its text and states are kept in OUT/work.

    While it trains, it says how many tokens a step is going to give on text that is held out, and
    at the end what trees of several sizes are worth on this machine.
    """
    import torch

    from outpace.prompts import readable_prompts
    from outpace.training.data import Recipe
    from outpace.training.medusa import Settings
    from outpace.training.pipeline import train_medusa

    settings = Settings(
        **{
            name: values[name]
            for name in (
                "num_heads",
                "num_layers",
                "dependent",
                "vocab_size",
                "epochs",
                "batch_size",
                "learning_rate",
                "seed",
            )
        }
    )
    prompts: list[Any] = []
    if values["prompts"] is not None:
        found, broken = readable_prompts(values["prompts"], skip_broken=values["skip_broken"])
        for message in broken:
            click.echo(f"Left out: {message}", err=True)
        prompts = [prompt.content for prompt in found]
    llm = load(values)
    recipe = Recipe(
        base_fingerprint=llm.model.fingerprint,
        seed=values["seed"],
        max_answer=values["max_answer"],
        turn_temperature=values["turn_temperature"],
        answer_temperature=values["answer_temperature"],
        prompts=len(prompts),
    )
    done = train_medusa(
        llm,
        values["out"],
        num_tokens=values["tokens"],
        recipe=recipe,
        settings=settings,
        prompts=prompts,
        cache_gb=values["cache_gb"],
        dtype=getattr(torch, values["save_dtype"]),
        report=lambda line: click.echo(line, err=True),
    )
    for budget in done.budgets:
        click.echo(
            f"{budget.nodes:3} nodes: {budget.tokens_per_step:.2f} tokens per step, speed-up "
            f"{budget.speedup:.2f}{'  (saved)' if budget == done.best else ''}"
        )
    click.echo(f"Heads in {done.folder}: outpace generate --method medusa --heads {done.folder}")
