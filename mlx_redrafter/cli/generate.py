"""`generate`: a prompt in, text on stdout, statistics on stderr; `--compare` decodes plainly, too, and compares."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MAX_TOKENS, DEFAULT_PROMPT
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache
from tqdm import tqdm

from .. import __version__
from ..drafters.recurrent import Drafter
from ..engine.sampling import Sampler
from ..errors import RedrafterError
from ..generate import GenerationResponse, is_text, stream_generate, summary
from ..options import AUTO, OFF, Options, add_options
from ..planning.machine import PACKAGES
from ..session.chat_template import render
from .arguments import Parser, add_model_flags, add_template_flag, load_models, read_options, read_template_config

DEMO_PROMPT = "def main("
NOTHING_DRAFTED = "nothing was drafted: it does not pay here, or the text was short; mlx_redrafter.doctor says more"
WARM_UP_TOKENS = 16
"""What `--compare` decodes on each side before it measures."""

NEGLIGIBLE = -20.0
"""Log-probabilities below this are not compared, but those of the chosen tokens."""


def run() -> int:
    """Generates as `sys.argv` says; the exit status, 1 if `--compare` finds a token that differs."""
    args = make_parser().parse_args()
    options, template = read_options(args), read_template_config(args)
    if args.compare and (args.no_drafter or (args.model and not args.drafter)):
        raise RedrafterError("--compare needs a drafter: give --drafter, or leave out --model for the packaged demo")
    if args.compare and args.plan == OFF:
        raise RedrafterError("--compare needs a plan that drafts, got --plan off")
    if args.compare and args.prompt_cache_file:
        raise RedrafterError("--compare decodes twice and cannot share one --prompt-cache-file")
    tokenizer_config: dict[str, Any] = {}
    if args.prompt_cache_file is not None:
        options["prompt_cache"], tokenizer_config = read_prompt_cache(args)
    model, tokenizer, drafter = load_models(args, tokenizer_config, verbose=args.verbose)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    prompt = make_prompt(args, tokenizer, template)
    stream = partial(stream_generate, model, tokenizer, prompt, stop=[unescape(text) for text in args.stop])
    show, verdict = args.verbose and not args.json, None
    if args.compare:
        options["xtc_special_tokens"] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        decoded, verdict = compare(stream, drafter, options, len(prompt), show=show)
    else:
        decoded = decode(stream, drafter, options, show=show)
    if args.json:
        print(json.dumps(make_record(args, drafter, decoded) | ({"compare": verdict} if verdict else {})))
    else:
        print("" if show else decoded.text)
    if args.verbose or (verdict and not args.json):
        print(summary(decoded.last), file=sys.stderr)
        if drafter is not None and not decoded.last.drafted and Options(**options).plan_shape() == AUTO:
            print(NOTHING_DRAFTED, file=sys.stderr)
        if verdict:
            print(describe(verdict, len(decoded.tokens)), file=sys.stderr)
    return 0 if verdict is None or verdict["identical"] else 1


def make_parser() -> Parser:
    """The parser: mlx-lm's flags, meanings and defaults, and what drafting adds."""
    description = "Generate text with speculative decoding: the text of plain decoding, in less time."
    parser = Parser(prog="mlx_redrafter.generate", description=description)
    add = parser.add_argument
    add_model_flags(parser)
    add_template_flag(parser)
    add("--prompt", "-p", help="the prompt; '-' reads from stdin")
    add("--system-prompt", help="system prompt for the chat template")
    add("--prefill-response", help="beginning of the answer, for the chat template")
    add("--ignore-chat-template", action="store_true", help="use the prompt without the tokenizer's chat template")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")
    add("--stop", nargs="+", default=(), help="strings that end the text")
    add("--prompt-cache-file", help="a prompt cache made by mlx_lm.cache_prompt")
    add("--verbose", type=parse_bool, default=True, help="F prints the text alone, at the end (default: %(default)s)")
    add("--compare", action="store_true", help="decode plainly, then with the drafter; exit 1 if a token differs")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add_options(parser)
    parser.set_defaults(max_tokens=DEFAULT_MAX_TOKENS)
    return parser


def parse_bool(text: str) -> bool:
    """A flag's value as mlx-lm writes it: True or T, False or F."""
    if text.lower() not in ("true", "t", "false", "f"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower().startswith("t")


def read_prompt_cache(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """(the cache of `--prompt-cache-file`, its tokenizer's config); `args.model` becomes the cache's model.

    Raises:
        RedrafterError: it cannot be read, or is not what the flags say.
    """
    file = args.prompt_cache_file
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        config = json.loads(metadata.get("tokenizer_config", "{}"))
    except Exception as error:  # a damaged file may raise anything
        raise RedrafterError(f"cannot read the prompt cache {file}: {error}") from error
    if not cache or not isinstance(config, dict):
        what = "a tokenizer_config that is not a JSON object" if cache else "no layers"
        raise RedrafterError(f"the prompt cache {file} has {what}")
    if isinstance(cache[0], QuantizedKVCache):
        for flag, got in (("kv_bits", cache[0].bits), ("kv_group_size", cache[0].group_size)):
            if (asked := getattr(args, flag)) not in (None, got):
                raise RedrafterError(f"--{flag.replace('_', '-')} is {asked}, the prompt cache has {got}")
    made_with = metadata.get("model", args.model)
    if args.model not in (None, made_with):
        raise RedrafterError(f"the prompt cache was made with {made_with}, got --model {args.model}")
    args.model = made_with
    return cache, config


def make_prompt(args: argparse.Namespace, tokenizer: Any, template: dict[str, Any]) -> list[int]:
    """The prompt's token ids, through the chat template where there is one, as in mlx-lm.

    Args:
        template: more arguments for the chat template.
    """
    text = args.prompt
    if text is None:
        text = DEFAULT_PROMPT if args.model else DEMO_PROMPT
    text = sys.stdin.read() if text == "-" else unescape(text)
    system, answer = args.system_prompt, args.prefill_response
    for name, given in (("prompt", text), ("system prompt", system), ("prefill response", answer)):
        if given is not None and not is_text(given):
            raise RedrafterError(f"the {name} is not UTF-8")
    has_template = tokenizer.has_chat_template and not args.ignore_chat_template
    if has_template:

        def apply(text: str) -> str:
            messages = [("system", system), ("user", text), ("assistant", answer)]
            given = [{"role": role, "content": content} for role, content in messages if content is not None]
            return render(tokenizer, given, template, prefilled=answer is not None)

        # A prompt cache holds what the template puts before the user's message.
        text = apply(text)[apply("<query>").index("<query>") if args.prompt_cache_file else 0 :]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_template)
    if not ids:
        raise RedrafterError("the prompt is empty: expected at least one token")
    return ids


def unescape(text: str) -> str:
    """Newlines and tabs for their escapes, as mlx-lm reads a prompt."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


class Decoded(NamedTuple):
    """A whole text; `row`: the log-probabilities (V,) where it first differs from the expected tokens, or None."""

    tokens: list[int]
    text: str
    last: GenerationResponse
    row: mx.array | None


def decode(
    stream: Callable[..., Iterator[GenerationResponse]],
    drafter: Drafter | None,
    options: dict[str, Any],
    *,
    show: bool = False,
    label: str | None = None,
    expected: Sequence[int] = (),
) -> Decoded:
    """Decodes a text, with a progress bar while a long prompt is read.

    Args:
        stream: `stream_generate` without drafter and options.
        show: whether to print the text as it is made.
        label: of a progress bar over the tokens; None for no bar.
        expected: see `Decoded`.
    """
    tokens, text, row = list[int](), "", None
    with show_prompt_progress() as callback:
        responses = stream(drafter=drafter, prompt_progress_callback=callback, **options)
        first = next(responses)  # then the prompt's bar is gone
        total = None if options["max_tokens"] == -1 else options["max_tokens"]
        for last in make_bar(chain([first], responses), label, hidden=label is None, total=total):
            if row is None and expected and [last.token] != expected[len(tokens) : len(tokens) + 1]:
                row = last.logprobs
            tokens.append(last.token)
            text += last.text
            if show:
                print(last.text, end="", flush=True)
    return Decoded(tokens, text, last, row)


def make_bar(responses: Any, label: str | None, *, hidden: bool = False, total: int | None = None) -> Any:
    """A progress bar on stderr, in a terminal; it appears after a second and goes at the end."""
    hidden = hidden or not sys.stderr.isatty()
    return tqdm(responses, label, total, unit="token", leave=False, delay=1.0, disable=hidden)


@contextmanager
def show_prompt_progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar while a prompt is read; yields a `prompt_progress_callback`."""
    with make_bar(None, "prompt") as bar:

        def callback(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield callback


def compare(
    stream: Callable[..., Iterator[GenerationResponse]],
    drafter: Drafter | None,
    options: dict[str, Any],
    prompt_tokens: int,
    *,
    show: bool,
) -> tuple[Decoded, dict[str, Any]]:
    """(the text with the drafter, the `compare` field of `--json`); each side is warmed up first."""
    limit = options["max_tokens"]
    for side in (None, drafter):
        warm = decode(
            stream, side, options | {"max_tokens": WARM_UP_TOKENS if limit == -1 else min(WARM_UP_TOKENS, limit)}
        )
        options = options | {"seed": warm.last.seed}
    plain = decode(stream, None, options, label="plain decoding")
    drafted = decode(stream, drafter, options, show=show, label=None if show else "drafting", expected=plain.tokens)
    token, difference = first_difference(plain.tokens, drafted.tokens), None
    if token is not None:
        difference = Difference(token, 0.0, 0.0, rounding=False)  # as it stays where one text is only longer
        if drafted.row is not None and token < len(plain.tokens):
            row = decode(stream, None, options | {"max_tokens": token + 1}).last.logprobs
            chosen, sampler = (plain.tokens[token], drafted.tokens[token]), Options(**options).make_sampler(seed=0)
            difference = judge_difference(token, (row, drafted.row), chosen, sampler, prompt_tokens + token)
    return drafted, {
        "plain_generation_tps": plain.last.generation_tps,
        "generation_tps": drafted.last.generation_tps,
        "ratio": drafted.last.generation_tps / plain.last.generation_tps,
        "identical": difference is None,
        "difference": None if difference is None else difference._asdict(),
    }


def describe(verdict: dict[str, Any], tokens: int) -> str:
    """What `compare` found, in two lines."""
    text = "plain {plain_generation_tps:.1f}, with the drafter {generation_tps:.1f} tokens-per-sec: {ratio:.2f} times\n"
    if verdict["identical"]:
        return text.format(**verdict) + f"all {tokens} tokens identical"
    found = verdict["difference"]
    kind = "a tie that rounding decides" if found["rounding"] else "more than rounding explains: please report it"
    gap = (
        "token {token} differs: the log-probabilities there are {distance:.2g} apart, rounding explains {margin:.2g}: "
    )
    return text.format(**verdict) + gap.format(**found) + kind


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token that two texts do not share; None if they are equal."""
    differs = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(len(one), len(other)) if differs is None and len(one) != len(other) else differs


class Difference(NamedTuple):
    """The first token at which plain and drafted decoding differ.

    Attributes:
        token: its index in the text.
        distance: the largest difference there between the two sides' log-probabilities, but for negligible ones.
        margin: the largest distance that rounding explains.
        rounding: whether rounding explains the difference.
    """

    token: int
    distance: float
    margin: float
    rounding: bool


def judge_difference(
    token: int, rows: tuple[mx.array, mx.array], chosen: tuple[int, int], sampler: Sampler, position: int
) -> Difference:
    """Judges whether rounding explains that two sides chose different tokens.

    A forward of one row and one of several round differently, by at most `margin`: four steps of the dtype at the size
    of the logits, and at least 0.001. What a side maximizes is the log-probability or, where tokens are sampled,
    log-probability / temperature + noise, a sum that may tie to the last bit even in float32. So rounding explains a
    difference if the rows are no farther apart than that, and each side chose the better one of the two tokens by its
    own row and the noise that both share, give or take the last bits.

    Args:
        token: the index in the text.
        rows: (V,) log-probabilities of each side.
        chosen: the token of each side.
        sampler: of both sides, with the seed in use.
        position: of the token in the prompt and the text together.
    """
    one, other = (row.astype(mx.float32) for row in rows)
    compared, both = mx.maximum(one, other) > NEGLIGIBLE, mx.array(chosen)
    compared[both] = True
    distance: float = mx.where(compared, mx.abs(one - other), 0).max().item()  # type: ignore[assignment]
    spread: float = (one.max() - mx.where(compared, one, one.max()).min()).item()  # type: ignore[assignment]
    margin = max(1e-3, 4 * mx.finfo(rows[0].dtype).eps * spread)
    draws = sampler.draws(mx.array(position), 1, one.size)
    scores = [row[both] if draws is None else sampler.adjust(row[None], draws, 0)[0, both] for row in (one, other)]
    last_bits = 4 * mx.finfo(mx.float32).eps * mx.abs(mx.concatenate(scores)).min()
    is_best = scores[0][0] >= scores[0][1] - last_bits and scores[1][1] >= scores[1][0] - last_bits
    return Difference(token, distance, margin, rounding=distance <= margin and bool(is_best))


def make_record(args: argparse.Namespace, drafter: Drafter | None, decoded: Decoded) -> dict[str, Any]:
    """The object of `--json`."""
    fields = {k: v for k, v in vars(decoded.last).items() if k not in ("text", "token", "logprobs", "from_draft")}
    names = {"model": args.model or "demo", "drafter": None if drafter is None else args.drafter or "demo"}
    return {
        "text": decoded.text,
        "tokens": decoded.tokens,
        **fields,
        "settings": vars(args) | {"seed": decoded.last.seed} | names,
        "device": f"{mx.default_device()} on {platform.platform()}",
        "versions": {"python": platform.python_version(), "mlx_redrafter": __version__}
        | {name: version(name) for name in PACKAGES},
    }
