"""The options of the command line, and what they become: arguments of `load` and `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

# Repeated here so that the help pages come without importing torch; a test compares them.
METHODS = ("plain", "lookup", "draft", "medusa", "lookahead", "combined")
ACCEPTANCE_RULES = ("coupled", "rejection", "typical")


class Option(click.Option):
    """An option that the help page lists under the heading `section`."""

    def __init__(self, *names: str, section: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.section = section


class Text(click.ParamType[str]):
    """Text from the command line, refused where its bytes are not UTF-8."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.fail(f"the character at offset {error.start} is not valid UTF-8", param, ctx)
        return value


class LogitBias(click.ParamType[tuple[int, float]]):
    """ID=BIAS."""

    name = "id=bias"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=BIAS, a token id and a number", param, ctx)


def _section(title: str, *options: tuple[tuple[str, ...], dict[str, Any]]) -> list[Option]:
    return [Option(*names, section=title, **settings) for names, settings in options]


def _option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, settings


MODEL = _section(
    "Model",
    _option(
        "--model",
        default="smollm2",
        show_default=True,
        type=Text(),
        help="A name (smollm2, or owner/name on the hub), a folder, or a GGUF file.",
    ),
)

LOADING = _section(
    "Model",
    _option(
        "--runtime",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "native", "transformers"]),
        help="native computes in int8 on the CPU; auto takes it where it can.",
    ),
    _option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps ..."),
    _option(
        "--dtype",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="auto is the checkpoint's own.",
    ),
    _option(
        "--exactness",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "same-shape", "ordinary"]),
        help="same-shape runs every forward in one shape, so that half precision is exact too.",
    ),
)

# The methods that take an option; its Python name is that of the parameter.
METHOD_OPTIONS: dict[str, tuple[str, ...]] = {
    "draft": ("draft", "combined"),
    "heads": ("medusa", "combined"),
    "num_heads": ("medusa",),
    "num_nodes": ("medusa",),
    "num_tokens": ("draft", "lookup", "lookahead"),
    "min_confidence": ("draft",),
    "max_ngram": ("lookup",),
    "min_ngram": ("lookup",),
    "num_branches": ("draft", "lookup"),
    "window_size": ("lookahead",),
    "ngram_size": ("lookahead",),
    "num_guesses": ("lookahead",),
}
REQUIRED_OPTIONS = {"draft": "draft", "medusa": "heads"}

METHOD = _section(
    "Method",
    _option(
        "--method",
        default="plain",
        show_default=True,
        type=click.Choice(METHODS),
        help="How tokens are proposed; the text is the same under each.",
    ),
    _option("--draft", type=Text(), help="draft, combined: the small model, named like --model."),
    _option(
        "--heads",
        type=Text(),
        help="medusa, combined: the folder with trained heads, or smollm2 for those that come "
        "along.",
    ),
    _option("--num-heads", type=int, help="medusa: use so many of the heads."),
    _option("--num-nodes", type=int, help="medusa: most nodes of the tree, its root included."),
    _option(
        "--num-draft-tokens",
        "num_tokens",
        type=int,
        help="draft, lookup, lookahead: most tokens proposed in a row.",
    ),
    _option("--min-confidence", type=float, help="draft: stop proposing below this probability."),
    _option("--max-ngram", type=int, help="lookup: longest match looked for, in tokens."),
    _option("--min-ngram", type=int, help="lookup: shortest match that is trusted."),
    _option(
        "--num-branches",
        type=int,
        help="lookup: most matches that are continued; draft: candidates for each token.",
    ),
    _option("--window-size", type=int, help="lookahead: columns of the window (W)."),
    _option("--ngram-size", type=int, help="lookahead: tokens of an n-gram (N)."),
    _option("--num-guesses", type=int, help="lookahead: n-grams kept for a first token (G)."),
)

# Parameter names are the fields of SamplingParams.
SAMPLING = _section(
    "Sampling",
    _option("--temperature", type=float, help="0, the default, is greedy."),
    _option("--top-k", type=int, help="Keep the K most likely tokens."),
    _option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    _option("--min-p", type=float, help="Keep tokens of this share of the likeliest one's."),
    _option("--repetition-penalty", type=float, help="Divides the logits of tokens seen."),
    _option("--presence-penalty", type=float, help="Subtracted for tokens of the output."),
    _option("--frequency-penalty", type=float, help="Subtracted for each occurrence."),
    _option(
        "--logit-bias",
        type=LogitBias(),
        multiple=True,
        help="Added to the logit of a token id; -100 bans it. Repeatable.",
    ),
    _option(
        "--bad-word", "bad_words", type=Text(), multiple=True, help="Never written. Repeatable."
    ),
    _option("--seed", type=int, help="The same seed gives the same text, whatever the method."),
    _option(
        "--acceptance",
        type=click.Choice(ACCEPTANCE_RULES),
        help="coupled, the default: the text of plain decoding; rejection: its distribution "
        "only; typical: lossy.",
    ),
    _option("--typical-threshold", type=float, help="typical: p > min(threshold, alpha e^-H)."),
    _option("--typical-alpha", type=float, help="typical: alpha in the same rule."),
) + _section(
    "Ends",
    _option("--max-new-tokens", type=int, help="Most tokens to write; else the context's end."),
    _option("--min-tokens", type=int, help="No end before so many tokens."),
    _option("--stop", type=Text(), multiple=True, help="Ends the text. Repeatable."),
    _option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Ends the text like the model's end token. Repeatable.",
    ),
    _option("--ignore-eos", is_flag=True, help="The model's own end token does not end it."),
    _option("--include-stop", is_flag=True, help="Keep the stop string in the text."),
)

CHOICES = _section(
    "Sampling",
    _option("--n", type=int, help="So many independent completions."),
    _option("--logprobs", type=int, help="Alternatives a token to report; with --json."),
)

SYSTEM = _section("Prompt", _option("--system", type=Text(), help="A system message."))
RAW = _section("Prompt", _option("--raw", is_flag=True, help="No chat template."))
JSON = _section("Output", _option("--json", "as_json", is_flag=True, help="One JSON object."))
STATS = _section("Output", _option("--stats", is_flag=True, help="Speed and acceptance on stderr."))
DEBUG = _section("Output", _option("--debug", is_flag=True, help="Show the traceback of an error."))


def method_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own arguments of `load`.

    Raises:
        UsageError: for an option of another method, or one that the method needs.
    """
    method = values["method"]
    flags = {option.name: option.opts[0] for option in METHOD}
    given = {name: values[name] for name in METHOD_OPTIONS if values[name] is not None}
    for name in given:
        takers = METHOD_OPTIONS[name]
        if method not in takers:
            raise click.UsageError(
                f"{flags[name]} does not go with --method {method}, only with {', '.join(takers)}."
            )
    needed = REQUIRED_OPTIONS.get(method)
    if needed is not None and needed not in given:
        raise click.UsageError(f"--method {method} needs {flags[needed]}.")
    return given


def sampling_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were given; defaults stay with SamplingParams."""
    given = {}
    for option in (*SAMPLING, *CHOICES):
        value = values.get(str(option.name))
        if value is not None and value is not False and value != ():
            given[str(option.name)] = value
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given
