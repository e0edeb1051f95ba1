"""Generates token ids, a stream of responses, or a string.

Also `python -m mlx_redrafter.generate`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before MLX is imported, which may be missing
    from mlx_redrafter.cli.main import main

    main("generate")

import inspect
import sys
import time
from collections.abc import Container, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .drafters.draft_model import DraftModel
from .drafters.protocol import Drafter
from .engine.output import DraftSource
from .engine.request_checks import check_prompt
from .engine.source import Source
from .engine.stats import Stats
from .engine.wired_limit import wired_limit
from .errors import RedrafterError, warn
from .options import Options
from .pair import Pair, draw_seed, find_pair

USELESS_ROUNDS = 16
"""A drafter without one accepted token after this many drafting rounds is reported."""

Prompt = str | Sequence[int] | mx.array


class Step(NamedTuple):
    """One decoded token.

    Attributes:
        token: its id.
        logprobs: (V,) the target's log-probabilities that it was chosen from, evaluated.
        draft_source: what drafted it; None if it was not drafted.
        stats: statistics of the rounds so far, including this token's.
    """

    token: int
    logprobs: mx.array
    draft_source: DraftSource | None
    stats: Stats

    @property
    def from_draft(self) -> bool:
        """Whether it was drafted."""
        return self.draft_source is not None


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response, with speculative-decoding statistics so far.

    Attributes:
        rounds: target forwards after the prompt's, including plain steps; 1 + rounds + accepted
            tokens were generated.
        drafted: drafted nodes that were verified, without roots.
        accepted: drafted tokens that were accepted.
        context_drafted, context_accepted: the part of `drafted` and `accepted` that came from the
            context.
        draft_source: what drafted this token: "drafter", "context", or None if it was not drafted.
        tokens_per_round: 1 + accepted / rounds.
        acceptance_per_depth: the share of drafting rounds that accepted a drafted token at depth 1,
            2, ...
        rows_per_round: tokens per forward: root, drafted and replayed tokens.
        plain_steps: rounds that drafted nothing.
        seed: the seed in use, given or drawn.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_round: float = 1.0
    acceptance_per_depth: tuple[float, ...] = ()
    rows_per_round: float = 0.0
    plain_steps: int = 0
    context_drafted: int = 0
    context_accepted: int = 0
    draft_source: DraftSource | None = None
    seed: int = 0


ROUND_FIELDS = tuple(each.name for each in fields(GenerationResponse) if hasattr(Stats, each.name))
"""The fields of a response that are copied from `Stats`."""


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    drafter: Drafter | Source | None = None,
    *,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    **options: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yields (token, log-probabilities (V,), whether it was drafted), as mlx-lm's
    `speculative_generate_step`.

    It does not stop at an end-of-text token. Closing the generator cancels.

    Args:
        prompt: (T,) token ids, T >= 1.
        model: from `load` or `mlx_lm.load`.
        drafter: from `load_drafter`, or a source from `Drafter.open` that has followed this text so
            far; None drafts from the context only.
        draft_model: a smaller model with the same tokenizer, instead of a drafter; from
            `mlx_lm.load` or `load_draft_model`.
        num_draft_tokens: mlx-lm's name for `draft_depth`.
        options: see `Options`.

    Raises:
        RedrafterError: on the first `next`: an option is out of range, the model is not supported,
            or the drafter does not fit it.
    """
    drafter, parsed = choose_drafter(drafter, draft_model, num_draft_tokens, options)
    pair, source = find_pair(model, drafter)
    with closing(decode_tokens(pair, prompt, parsed, source)) as steps:
        for step in steps:
            yield step.token, step.logprobs, step.from_draft


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    *,
    drafter: Drafter | Source | None = None,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Yields a response for each token, as mlx-lm's `stream_generate`.

    Ends at an end-of-text token, at a stop string (which is not part of the text), or after
    `max_tokens`: at the same token with and without a drafter.

    Args:
        model, tokenizer: from `load` or `mlx_lm.load`.
        prompt: text, token ids, or an array of them.
        drafter, draft_model, num_draft_tokens: see `generate_step`.
        stop: strings that end the text.
        options: see `Options`.

    Raises:
        RedrafterError: on the first `next`: see `generate_step`; also if `max_tokens` is 0 or a
        stop string is empty.
    """
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    drafter, parsed = choose_drafter(drafter, draft_model, num_draft_tokens, options)
    pair, source = find_pair(model, drafter)
    yield from stream_text(
        pair, tokenizer, prompt, parsed.require_tokens(), source, StopStrings(stop)
    )


def stream_text(
    pair: Pair,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    options: Options,
    source: Source | None,
    stops: StopStrings,
) -> Generator[GenerationResponse, None, None]:
    """`stream_generate` with a pair and parsed options; for `source` see `Pair.open`."""
    ids = encode(tokenizer, prompt)
    detokenizer = tokenizer.detokenizer
    started = prompt_tps = 0.0
    callback = options.prompt_progress_callback

    def progress(done: int, total: int) -> None:
        nonlocal started
        started = time.perf_counter() if done == 0 else started  # after measuring for `plan="auto"`
        if callback is not None:
            callback(done, total)

    def make_response(step: Step, count: int, text: str, reason: str | None) -> GenerationResponse:
        return GenerationResponse(
            text=text,
            token=step.token,
            logprobs=step.logprobs,
            from_draft=step.from_draft,
            prompt_tokens=len(ids),
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            draft_source=step.draft_source,
            seed=seed,
            **{name: getattr(step.stats, name) for name in ROUND_FIELDS},
        )

    seed = draw_seed() if options.seed is None else options.seed
    special = options.xtc_special_tokens
    if options.xtc_probability and special is None:
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    options = replace(
        options, seed=seed, xtc_special_tokens=special, prompt_progress_callback=progress
    )
    steps = decode_tokens(pair, ids, options, source, tokenizer.eos_token_ids)
    with wired_limit(pair.model), closing(steps):
        count = 0
        warned = False
        for step in steps:
            count += 1
            if count == 1:
                prompt_tps = len(ids) / (time.perf_counter() - started)
                started = time.perf_counter()
            if (
                pair.drafter is not None
                and not warned
                and step.stats.drafter_rounds >= USELESS_ROUNDS
            ):
                warned = True
                if step.stats.accepted == step.stats.context_accepted:
                    rounds = step.stats.drafter_rounds
                    has_processors = bool(options.logits_processors)
                    warn(explain_useless(pair.drafter, rounds, has_processors))
            text = ""
            if step.token in tokenizer.eos_token_ids:
                break
            detokenizer.add_token(step.token)
            text, found = stops.feed(detokenizer.last_segment)
            if found:
                yield make_response(step, count, text, "stop")
                return
            if count == options.max_tokens:
                break
            yield make_response(step, count, text, None)
        detokenizer.finalize()
        tail, found = stops.feed(detokenizer.last_segment)
        reason = "stop" if found or step.token in tokenizer.eos_token_ids else "length"
        yield make_response(step, count, text + tail + ("" if found else stops.flush()), reason)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    *,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Returns the whole text, as mlx-lm's `generate`; `verbose` prints it while it is generated,
    then a summary.

    All other arguments and errors are those of `stream_generate`.
    """
    text = ""
    for response in stream_generate(model, tokenizer, prompt, **options):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print("\n" + "=" * 10 + "\n" + format_summary(response))
    return text


def choose_drafter(
    drafter: Drafter | Source | None,
    draft_model: nn.Module | None,
    num_draft_tokens: int | None,
    options: dict[str, Any],
) -> tuple[Drafter | Source | None, Options]:
    """(the drafter or None, the parsed options), from mlx-lm's keywords and ours."""
    if num_draft_tokens is not None:
        if options.get("draft_depth") is not None:
            raise RedrafterError("give either num_draft_tokens or draft_depth, got both")
        options = options | {"draft_depth": num_draft_tokens}
    parsed = Options(**options)
    if draft_model is None:
        return drafter, parsed
    if drafter is not None:
        raise RedrafterError("give either drafter or draft_model, got both")
    if not isinstance(draft_model, nn.Module):
        raise RedrafterError(
            f"draft_model must be what mlx_lm.load returns, got {type(draft_model).__name__}"
        )
    return draft_model if isinstance(draft_model, Drafter) else DraftModel(draft_model), parsed


def decode_tokens(
    pair: Pair,
    prompt: Sequence[int] | mx.array,
    options: Options,
    source: Source | None = None,
    end_tokens: Container[int] = (),
) -> Generator[Step, None, None]:
    """Decodes after `prompt` up to an end-of-text token or `max_tokens`, or until the caller closes
    the generator.

    The caller's prompt cache then holds the prompt and every token that was yielded, the last one
    included.

    Args:
        source, end_tokens: see `Pair.open`.
    """
    with closing(pair.open(prompt, options, source, end_tokens=end_tokens)) as text:
        length = text.length + len(prompt)
        made = list[int]()

        def finish() -> None:
            if made and options.prompt_cache is not None:
                text.finish(length + len(made), made[-1])

        try:
            for done in text:
                source_name: DraftSource = "context" if done.from_context else "drafter"
                for at, token in enumerate(done.tokens, 1):
                    made.append(token)
                    draft_source = source_name if at < len(done.tokens) else None
                    yield Step(
                        token, done.logprobs[at - 1], draft_source, text.output.stats_up_to(at)
                    )
        except GeneratorExit:
            finish()
            raise
        finish()


class StopStrings:
    """Cuts a stream of text before the first complete stop string; delays text that may turn out to
    be part of one.

    Args:
        stop: one string, several, or None.

    Attributes:
        found: the stop string that ended the text; None until then.
    """

    def __init__(self, stop: str | Sequence[str] | None) -> None:
        if stop is not None and not isinstance(stop, Iterable):
            raise RedrafterError(f"stop must be a string or a list of strings, got {stop!r}")
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())
        if not all(isinstance(text, str) and text for text in self._stops):
            raise RedrafterError(f"stop must be non-empty strings, got {self._stops!r}")
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string ended it)."""
        self._held += text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        if found:
            _, at, self.found = min(found)
            return self._held[:at], True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """The delayed text; called when the stream has ended."""
        rest = self._held
        self._held = ""
        return rest

    def _overlap(self, stop: str) -> int:
        """How many of the last characters are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


def format_summary(last: GenerationResponse) -> str:
    """mlx-lm's closing summary, with a line about the rounds if any of them drafted."""
    lines = [
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {last.peak_memory:.3f} GB",
    ]
    if last.drafted:
        depths = " ".join(f"{share:.2f}" for share in last.acceptance_per_depth)
        lines.append(
            f"Rounds: {last.rounds}, {last.plain_steps} of them plain steps, {last.tokens_per_round:.2f} tokens per "
            f"round; {last.accepted} of {last.drafted} drafted tokens accepted; per depth {depths}"
        )
    if last.context_drafted:
        lines.append(f"context: {last.context_accepted} of {last.generation_tokens} tokens")
    return "\n".join(lines)


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Special tokens are added to a text unless it begins with the beginning-of-text token.
    """
    if not isinstance(prompt, str):
        return cast(list[int], check_prompt(prompt).tolist())
    if not is_text(prompt):
        raise RedrafterError("the prompt is not UTF-8")
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(prompt, add_special_tokens=special))


def encode_chat(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a user message, or of messages, with the chat template if there is one."""
    if not tokenizer.has_chat_template:
        if not isinstance(prompt, str):
            prompt = "\n".join(str(message.get("content", "")) for message in prompt)
        return encode(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def is_text(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; a shell may pass other bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def explain_useless(drafter: Drafter, rounds: int, has_processors: bool = False) -> str:
    """A message for a drafter without an accepted token in `rounds` rounds, with what to check."""
    text = f"the drafter has guessed no token right in {rounds} rounds. "
    if has_processors:
        return f"{text}Do the logits processors change the model's choices? Only draft models take them into account"
    return text + drafter.args.explain_useless()


class _CallableModule(ModuleType):
    """Makes this module callable, as importing it replaces the package's function `generate` with
    the module.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return generate(*args, **kwargs)


__signature__ = inspect.signature(generate)
sys.modules[__name__].__class__ = _CallableModule
__signature__ = inspect.signature(generate)  # for `inspect` and `help` on the module
