"""`generate`: prints text to stdout and statistics to stderr; `--compare` checks it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MAX_TOKENS, DEFAULT_PROMPT, str2bool

from .. import __version__
from ..decoding.options import PLAN_OPTIONS
from ..decoding.responses import GenerationResponse, format_summary, stream_generate
from ..decoding.trials import check_speedup
from ..demo import demo_prompts
from ..engine.plan import OFF
from ..errors import RedrafterError
from ..machine.description import PACKAGES
from ..measuring.pair import Pair
from ..measuring.row_classes import format_row_counts
from ..measuring.timing import ProgressBar
from ..target import kv_cache
from ..text.chat_template import is_in_reasoning, render
from ..text.encoding import is_text
from .arguments import (
    load_named,
    make_text_parser,
    read_once,
    read_options,
    require_single_process,
)
from .parser import Parser

DEMO_MAX_TOKENS = 400
"""Enough for the answer to the demo's own prompt, an edit."""

NOTHING_DRAFTED = (
    "nothing was drafted: it is not faster here, or the text was short; "
    "mlx_redrafter.doctor --refresh measures again"
)

WARM_UP_TOKENS = 16
"""Prompt tokens, and generated tokens, of the warm-up of each side of `--compare`."""

Stream = partial[Generator[GenerationResponse, None, None]]
"""`stream_generate` with its arguments."""


def run() -> int:
    """Runs the command with `sys.argv`.

    Returns the exit status, 1 if `--compare` finds a different token, or if nothing was drafted.
    """
    parser = make_parser()
    args = parser.parse_args()
    shows_edit = args.prompt is None and args.model is None and args.prompt_cache_file is None
    if shows_edit:
        parser.set_defaults(max_tokens=DEMO_MAX_TOKENS)
        args = parser.parse_args()
    options = read_options(args)
    check_conflicts(args)

    tokenizer_config = dict[str, Any]()
    if args.prompt_cache_file is not None:
        options["prompt_cache"], tokenizer_config = read_prompt_cache(args)
    loaded = load_named(args, tokenizer_config, verbose=args.verbose)
    model, tokenizer, drafter, drafter_name = loaded
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    if args.seed is None:
        options["seed"] = read_once(partial(secrets.randbits, 32))
    prompt = read_once(partial(encode_prompt, args, tokenizer))
    stop = [unescape(text) for text in args.stop]
    stream = partial(
        stream_generate, model, tokenizer, prompt, drafter=drafter, stop=stop, **options
    )

    shows_text = args.verbose and not args.json
    if shows_text and shows_edit:
        print(tokenizer.decode(prompt), end="", flush=True)
    verdict = None
    if args.compare:
        decoded, verdict = compare(stream, show=shows_text)
    else:
        decoded = decode(stream, show=shows_text)

    if args.json:
        record = make_record(args, drafter_name, decoded)
        print(json.dumps(record | ({"compare": verdict} if verdict else {})))
    else:
        print("" if shows_text else decoded.text)
    if args.verbose or (verdict and not args.json):
        print(format_summary(decoded.last), file=sys.stderr)
        print_notes(decoded.last, are_wanted=verdict is not None)
        if decoded.last.finish_reason == "length" and is_in_reasoning(
            tokenizer, prompt + decoded.tokens
        ):
            why = f"--max-tokens {decoded.last.generation_tokens}"
            print(f"note: {why} ended the text inside its reasoning: give more", file=sys.stderr)
        if verdict:
            print(
                describe_comparison(verdict, decoded.last, may_advise=args.exact is None),
                file=sys.stderr,
            )
    is_right = verdict is None or (verdict["identical"] and decoded.last.drafted > 0)
    return 0 if is_right else 1


def check_conflicts(args: argparse.Namespace) -> None:
    """Refuses flags that exclude each other, before anything is loaded."""
    if args.compare:
        has_drafter = not args.no_drafter and (not args.model or args.drafter or args.draft_model)
        if args.plan == OFF:
            raise RedrafterError("--compare needs something that drafts: leave out --plan off")
        if args.context is False and not has_drafter:
            raise RedrafterError(
                "--compare needs something that drafts: leave out --no-context, or give a drafter"
            )
        if args.prompt_cache_file:
            raise RedrafterError("--compare decodes twice and cannot share one --prompt-cache-file")
    require_single_process(args, "prompt_cache_file")
    if args.prompt == "-" and "MLX_RANK" in os.environ:
        raise RedrafterError(
            "--prompt - waits for the end of the input, which mlx.launch does not pass on"
        )


def print_notes(last: GenerationResponse, *, are_wanted: bool) -> None:
    """Prints why nothing drafted on stderr, or if `are_wanted`, what drafted less than it could."""
    if last.notes == ("plan is off",):
        return
    notes = list(last.notes) if are_wanted or not last.drafted else []
    if not last.drafted:
        notes.insert(0, NOTHING_DRAFTED)
    for note in notes:
        print(note, file=sys.stderr)


def make_parser() -> Parser:
    """The argument parser: mlx-lm's flags with their defaults, plus those for drafting."""
    about = (
        "Generate text with speculative decoding: the same text as plain decoding, in less time."
    )
    parser = make_text_parser("generate", about)
    add = parser.add_argument
    add(
        "--prompt",
        "-p",
        help="the prompt, '-' for stdin; without one the demo edits a packaged function",
    )
    add("--system-prompt", help="system prompt for the chat template")
    add("--prefill-response", help="start of the answer, for the chat template")
    add(
        "--ignore-chat-template",
        action="store_true",
        help="use the prompt without the tokenizer's chat template",
    )
    add(
        "--use-default-chat-template",
        action="store_true",
        help="the tokenizer's default template if it has no other",
    )
    add("--extra-eos-token", nargs="+", default=(), help="additional tokens that end the text")
    add("--stop", nargs="+", default=(), help="strings that end the text")
    add("--prompt-cache-file", help="a prompt cache made by mlx_lm.cache_prompt")
    add(
        "--verbose",
        type=str2bool,
        default=True,
        help="F prints only the text, at the end (default: %(default)s)",
    )
    add(
        "--compare",
        action="store_true",
        help="decode plainly, then with drafts; exit 1 if a token differs",
    )
    add("--json", action="store_true", help="print one JSON object instead of the text")
    parser.set_defaults(max_tokens=DEFAULT_MAX_TOKENS)
    return parser


def read_prompt_cache(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Loads (the cache in `--prompt-cache-file`, its tokenizer's config).

    Sets `args.model` to the cache's model.
    """
    file = args.prompt_cache_file
    try:
        cache, metadata = kv_cache.read_file(file)
        config = dict(json.loads(metadata.get("tokenizer_config", "{}")))
    except Exception as error:  # damaged files raise errors of many types
        raise RedrafterError(f"cannot read the prompt cache {file}: {error}") from error
    made_with = metadata.get("model", args.model)
    if args.model not in (None, made_with):
        raise RedrafterError(
            f"the prompt cache was made with {made_with}, got --model {args.model}"
        )
    args.model = made_with
    return cache, config


def encode_prompt(args: argparse.Namespace, tokenizer: Any) -> list[int]:
    """The prompt's token ids, with the chat template if there is one, as in mlx-lm."""
    if args.prompt is None:
        text = DEFAULT_PROMPT if args.model else demo_prompts("edits")[0]
    else:
        text = sys.stdin.read() if args.prompt == "-" else unescape(args.prompt)
    has_template = tokenizer.has_chat_template and not args.ignore_chat_template
    if has_template:
        # A prompt cache already holds the part of the template before the user's message.
        start = 0
        if args.prompt_cache_file:
            start = render_prompt(args, tokenizer, "<query>").index("<query>")
        text = render_prompt(args, tokenizer, text)[start:]
    if not is_text(text):
        raise RedrafterError("the prompt is not UTF-8")
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=not has_template)
    return tokens


def render_prompt(args: argparse.Namespace, tokenizer: Any, text: str) -> str:
    """The prompt with the chat template."""
    contents = {
        "system": args.system_prompt,
        "user": text,
        "assistant": args.prefill_response,
    }
    messages = [
        {"role": role, "content": content}
        for role, content in contents.items()
        if content is not None
    ]
    prefilled = args.prefill_response is not None
    return render(tokenizer, messages, args.chat_template_config or {}, prefilled=prefilled)


def unescape(text: str) -> str:
    r"""Replaces `\n` and `\t` by newlines and tabs, as mlx-lm does in prompts."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


class Decoded(NamedTuple):
    """A decoded text.

    Attributes:
        tokens, text: what was generated.
        last: the last response.
        logprobs: (V,) at the first token that differs from the expected one; None if none does.
    """

    tokens: list[int]
    text: str
    last: GenerationResponse
    logprobs: mx.array | None


def decode(
    stream: Stream,
    *,
    show: bool = False,
    label: str | None = None,
    expected: Sequence[int] = (),
    **options: Any,
) -> Decoded:
    """Decodes a text, with a progress bar while a long prompt is prefilled.

    Args:
        show: whether to print the text while it is generated.
        label: of a progress bar over the tokens; None for no bar.
        expected: tokens to compare with, see `Decoded.logprobs`.
        options: override the arguments of `stream`.
    """
    tokens = list[int]()
    text = ""
    logprobs = None
    others = iter(expected)
    with show_prompt_progress() as callback:
        responses = stream(prompt_progress_callback=callback, **options)
        for last in responses if label is None else ProgressBar(responses, label, unit="token"):
            if logprobs is None and expected and last.token != next(others, None):
                logprobs = last.logprobs
            tokens.append(last.token)
            text += last.text
            if show:
                print(last.text, end="", flush=True)
    return Decoded(tokens, text, last, logprobs)


@contextmanager
def show_prompt_progress() -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar while a prompt is prefilled; yields a `prompt_progress_callback`."""
    with ProgressBar(desc="prompt", unit="token") as bar:

        def callback(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield callback


def compare(stream: Stream, *, show: bool) -> tuple[Decoded, dict[str, Any]]:
    """(the drafted text, the `compare` field of `--json`); both sides are warmed up first."""
    plain: dict[str, Any] = dict.fromkeys(PLAN_OPTIONS) | {"plan": OFF, "context": None}
    model, tokenizer, prompt = stream.args
    for side in ({}, plain):
        keywords = stream.keywords | side
        start = partial(stream.func, model, tokenizer, prompt[:WARM_UP_TOKENS], **keywords)
        decode(start, max_tokens=WARM_UP_TOKENS)
    expected = decode(stream, label="plain decoding", **plain)
    label = None if show else "drafting"
    drafted = decode(stream, show=show, label=label, expected=expected.tokens)

    difference = None
    index = get_first_difference(expected.tokens, drafted.tokens)
    if index is not None:
        distance = None  # if one text is only longer than the other
        if drafted.logprobs is not None and index < len(expected.tokens):
            again = decode(stream, max_tokens=index + 1, **plain).last.logprobs
            chosen = mx.array([expected.tokens[index], drafted.tokens[index]])
            gap = again[chosen].astype(mx.float32) - drafted.logprobs[chosen].astype(mx.float32)
            distance = float(mx.abs(gap).max())
        difference = {"token": index, "distance": distance}

    last = drafted.last
    plain_tps = expected.last.generation_tps
    ratio = None
    if last.rounds:
        ratio = check_speedup(last.generation_tps / plain_tps, last.tokens_per_round)
    return drafted, {
        "plain_generation_tps": plain_tps,
        "generation_tps": last.generation_tps,
        "ratio": ratio,
        "identical": difference is None,
        "difference": difference,
        "row_counts": last.row_counts,
        "few_rows": last.few_rows,
        "rollback": Pair(model).describe_rollback(),
    }


def describe_comparison(
    verdict: dict[str, Any], last: GenerationResponse, *, may_advise: bool
) -> str:
    """The result of `compare` in words; `may_advise` names `--exact` where it would tell more."""
    plain = verdict["plain_generation_tps"]
    drafted = verdict["generation_tps"]
    if verdict["ratio"] is not None:
        times = f"{verdict['ratio']:.2f} times"
    elif last.rounds:
        times = "busy, not measured: other work slowed plain decoding down"
    else:
        times = "too short to measure"
    text = f"plain {plain:.1f}, drafted {drafted:.1f} tokens-per-sec: {times}\n"
    if verdict["few_rows"]:
        few_rows = format_row_counts(verdict["few_rows"])
        text += f"{few_rows} rows computed by the kernel for a few rows (--few-rows)\n"
    if verdict["rollback"]:
        text += f"recurrent layers after a rejection: {verdict['rollback']}\n"

    counts = verdict["row_counts"]
    difference = verdict["difference"]
    if difference is not None:
        text += f"token {difference['token']} differs"
        if difference["distance"] is not None:
            text += f": the log-probabilities there are {difference['distance']:.2g} apart"
        advice = "; --exact tells a tie within rounding from an error" * may_advise
        return f"{text}; please report it" if counts else text + advice

    text += f"all {last.generation_tokens} tokens identical"
    if not last.drafted:
        return f"{text}, but nothing was drafted, so nothing was compared"
    if counts is None:
        return f"{text} here; ties within rounding are possible{' (see --exact)' * may_advise}"
    if counts[0] == 1:
        return f"{text}, exact by construction: {format_row_counts(counts)} rows are computed alike"
    return f"{text}, exact against plain steps padded to {counts[0]} rows"


def get_first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token at which two texts differ; None if they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


def make_record(
    args: argparse.Namespace, drafter_name: str | None, decoded: Decoded
) -> dict[str, Any]:
    """The object of `--json`."""
    counts = dict(vars(decoded.last))
    for name in ("text", "token", "logprobs", "from_draft", "draft_source"):
        del counts[name]
    settings = {
        **vars(args),
        "seed": decoded.last.seed,
        "model": args.model or "demo",
        "drafter": drafter_name,
    }
    versions = {"python": platform.python_version(), "mlx_redrafter": __version__}
    versions |= {name: version(name) for name in PACKAGES}
    return {
        "text": decoded.text,
        "tokens": decoded.tokens,
        **counts,
        "settings": settings,
        "device": f"{mx.default_device()} on {platform.platform()}",
        "versions": versions,
    }
