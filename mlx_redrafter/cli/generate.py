"""What `generate` does: models, prompt, text on stdout, a summary on stderr."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_PROMPT
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache
from tqdm import tqdm

from .. import __version__
from ..checkpoints import load_pair
from ..drafters.recurrent import Drafter
from ..errors import RedrafterError
from ..flags import OPTIONS, make_parser, template_config
from ..generate import GenerationResponse, Options, is_text, stream_generate, summary
from ..options import AUTO
from ..planning.machine import PACKAGES
from ..session.chat_template import render
from .comparing import Difference, distance, first_difference

DEMO_PROMPT = "def main("
NOTHING = (
    "nothing was drafted: it does not pay here, or the text was short. python -m mlx_redrafter.doctor tells the costs"
)


def run() -> int:
    """Generates as `sys.argv` says; the exit status."""
    args = make_parser().parse_args()
    check(args)
    prompt_cache, metadata = read_cache(args)
    model, tokenizer, drafter = read_models(args, metadata)
    prompt = make_prompt(args, tokenizer, metadata)
    options: Options = {name: getattr(args, name) for name, _, _ in OPTIONS}  # type: ignore[assignment]
    if prompt_cache is not None:
        options["prompt_cache"] = prompt_cache

    def decode(drafter: Drafter | None, show: Callable[[str], None]) -> tuple[list[int], str, GenerationResponse]:
        """(tokens, text, last response); `show` gets the text piece by piece."""
        tokens, text = [], ""
        with progress() as callback:
            options["prompt_progress_callback"] = callback
            for response in stream_generate(
                model, tokenizer, prompt, drafter=drafter, stop=[unescaped(text) for text in args.stop], **options
            ):
                tokens.append(response.token)
                text += response.text
                show(response.text)
        return tokens, text, response

    def show(text: str) -> None:
        """Prints a piece of the answer as it comes, where that was asked for."""
        if args.verbose and not args.json:
            print(text, end="", flush=True)

    if args.compare:
        return compare(args, drafter, options, decode, show)
    tokens, text, last = decode(drafter, show)
    if args.json:
        print(json.dumps(record(args, drafter, tokens, text, last)))
    else:
        print("" if args.verbose else text)
    if args.verbose:
        print(told(args, last, drafter), file=sys.stderr)
    return 0


def told(args: argparse.Namespace, last: GenerationResponse, drafter: Drafter | None) -> str:
    """The summary, and why nothing was drafted where that was left to `auto`."""
    unasked = drafter is not None and args.plan == AUTO and not last.drafted
    return summary(last) + (f"\n{NOTHING}" if unasked else "")


def check(args: argparse.Namespace) -> None:
    """Refuses what does not go together, before anything is loaded.

    Raises:
        RedrafterError: with the reason.
    """
    if args.compare and (args.no_drafter or (args.model and not args.drafter)):
        raise RedrafterError("--compare needs a drafter: give --drafter, or leave out --model for the packaged demo")
    template_config(args)
    if args.compare and args.prompt_cache_file:
        raise RedrafterError("--compare decodes twice and cannot share one --prompt-cache-file")


def read_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, str]]:
    """The prompt cache of `--prompt-cache-file` and what it says of itself."""
    if args.prompt_cache_file is None:
        return None, {}
    try:
        cache, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
    except Exception as error:
        raise RedrafterError(f"cannot read the prompt cache {args.prompt_cache_file}: {error}") from error
    if not cache:
        raise RedrafterError(f"the prompt cache {args.prompt_cache_file} has no layers")
    if isinstance(cache[0], QuantizedKVCache):
        for flag, got in (("kv_bits", cache[0].bits), ("kv_group_size", cache[0].group_size)):
            asked = getattr(args, flag)
            if asked not in (None, got):
                raise RedrafterError(f"--{flag.replace('_', '-')} is {asked}, the prompt cache has {got}")
    return cache, metadata


def read_models(args: argparse.Namespace, metadata: dict[str, str]) -> tuple[nn.Module, Any, Drafter | None]:
    """(model, tokenizer, drafter or None) of the flags."""
    name = metadata.get("model") if args.model is None else args.model
    if metadata.get("model") not in (None, name):
        raise RedrafterError(f"the prompt cache was made with {metadata['model']}, got --model {name}")
    args.model = name
    model, tokenizer, drafter = load_pair(args, name, args.drafter, tokenizer_config(args, metadata))
    if args.verbose and name is None:
        print("the packaged demo: it shows the mechanism, not intelligence", file=sys.stderr)
    elif args.verbose and drafter is None and not args.no_drafter:
        print("no --drafter given: decoding plainly", file=sys.stderr)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    return model, tokenizer, drafter


def tokenizer_config(args: argparse.Namespace, metadata: dict[str, str]) -> dict[str, Any]:
    """What a prompt cache says its tokenizer was loaded with."""
    try:
        config = json.loads(metadata.get("tokenizer_config", "{}"))
    except (json.JSONDecodeError, RecursionError) as error:
        config = error
    if not isinstance(config, dict):
        raise RedrafterError(f"the prompt cache {args.prompt_cache_file}: its tokenizer_config is no JSON object")
    return config


def make_prompt(args: argparse.Namespace, tokenizer: Any, metadata: dict[str, str]) -> list[int]:
    """The prompt's token ids, through the chat template where there is one, as in mlx-lm."""
    text = args.prompt
    if text is None:
        text = DEFAULT_PROMPT if args.model else DEMO_PROMPT
    text = sys.stdin.read() if text == "-" else unescaped(text)
    for name, given in (("prompt", text), *((n, getattr(args, n)) for n in ("system_prompt", "prefill_response"))):
        if given is not None and not is_text(given):
            raise RedrafterError(f"the {name.replace('_', ' ')} is not UTF-8")
    templated = tokenizer.has_chat_template and not args.ignore_chat_template
    if templated:
        text = through_template(args, tokenizer, text, is_suffix=bool(metadata))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not templated)
    if not ids:
        raise RedrafterError("the prompt is empty: expected at least one token")
    return ids


def unescaped(text: str) -> str:
    """Newlines and tabs for their escapes, as mlx-lm reads a prompt."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def through_template(args: argparse.Namespace, tokenizer: Any, text: str, *, is_suffix: bool) -> str:
    """`text` as the user's message; `is_suffix` leaves out what a prompt cache already holds."""
    more = template_config(args)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    user = {"role": "user", "content": text}
    messages.append(user)
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})

    whole = render(tokenizer, messages, more, prefilled=prefilled)
    if not is_suffix:
        return whole
    user["content"] = "<query>"
    return whole[render(tokenizer, messages, more, prefilled=prefilled).index("<query>") :]


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while a long prompt is read; it appears after a second and goes when the prompt is read."""
    bar = tqdm(unit="token", desc="prompt", leave=False, delay=1.0, disable=not sys.stderr.isatty())

    def callback(done: int, total: int) -> None:
        """(tokens read, tokens of the prompt) as mlx-lm tells it."""
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    try:
        yield callback
    finally:
        bar.close()


def compare(
    args: argparse.Namespace,
    drafter: Drafter | None,
    options: Options,
    decode: Callable[[Drafter | None, Callable[[str], None]], tuple[list[int], str, GenerationResponse]],
    show: Callable[[str], None],
) -> int:
    """Plain decoding, then drafted decoding, both warmed up; 1 if a token differs."""
    asked = options["max_tokens"]
    options["max_tokens"] = 16 if asked == -1 else min(16, asked)
    for side in (None, drafter):
        _, _, last = decode(side, lambda text: None)
        options["seed"] = last.seed if options["seed"] is None else options["seed"]
    options["max_tokens"] = asked
    plain_tokens, _, plain = decode(None, lambda text: None)
    tokens, text, drafted = decode(drafter, show)
    differs = first_difference(plain_tokens, tokens)
    apart = None
    if differs is not None:
        options["max_tokens"] = differs + 1
        rows = [decode(side, lambda text: None)[2].logprobs for side in (None, drafter)]
        apart = Difference(differs, *distance(*rows))
    verdict: dict[str, Any] = {
        "plain_generation_tps": plain.generation_tps,
        "generation_tps": drafted.generation_tps,
        "ratio": drafted.generation_tps / plain.generation_tps,
        "identical": differs is None,
        "difference": None if apart is None else apart._asdict() | {"rounding": apart.rounding},
    }
    if args.json:
        print(json.dumps({**record(args, drafter, tokens, text, drafted), "compare": verdict}))
    else:
        print("" if args.verbose else text)
        print(told(args, drafted, drafter), file=sys.stderr)
        speeds = verdict["plain_generation_tps"], verdict["generation_tps"], verdict["ratio"]
        print("plain {:.1f}, with the drafter {:.1f} tokens-per-sec: {:.2f} times".format(*speeds), file=sys.stderr)
        print(f"all {len(tokens)} tokens identical" if apart is None else apart.told, file=sys.stderr)
    return 0 if differs is None else 1


def record(
    args: argparse.Namespace, drafter: Drafter | None, tokens: list[int], text: str, last: GenerationResponse
) -> dict[str, Any]:
    """The object of `--json`."""
    fields = {k: v for k, v in vars(last).items() if k not in ("text", "token", "logprobs", "from_draft")}
    settings = vars(args) | {"seed": last.seed, "model": args.model or "demo", "drafter": None}
    if drafter is not None:
        settings["drafter"] = args.drafter or "demo"
    return {
        "text": text,
        "tokens": tokens,
        **fields,
        "settings": settings,
        "device": f"{mx.default_device()} on {platform.platform()}",
        "versions": {
            "python": platform.python_version(),
            "mlx_redrafter": __version__,
            **{name: version(name) for name in PACKAGES},
        },
    }
