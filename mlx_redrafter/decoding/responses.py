"""Generates tokens, a stream of responses, or a string, with mlx-lm's names and arguments."""

from __future__ import annotations

import inspect
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..drafters.draft_model import DraftModel
from ..drafters.protocol import Drafter
from ..engine.output import DecodedToken
from ..engine.source import Source
from ..engine.stats import Stats
from ..engine.types import DraftSource, RowCounts
from ..errors import RedrafterError, warn
from ..machine.wired_limit import wired_limit
from ..measuring.pair import Pair, get_pair
from ..text.encoding import Prompt, encode, wrap_tokenizer
from ..text.stop_strings import StopStrings
from .generation import open_generation
from .options import OPTION_NAMES, Options, check_names

USELESS_ROUNDS = 16
"""A drafter without one accepted token after this many drafting rounds is reported."""


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
        notes: one line for each source that does not draft, or drafts less than it could, with the
            reason.
        row_counts: the numbers of rows of all forwards after the prompt with `exact`; None without.
        few_rows: the numbers of rows whose matmuls the kernel for a few rows computes; empty if MLX
            computes all.
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
    notes: tuple[str, ...] = ()
    row_counts: RowCounts | None = None
    few_rows: RowCounts = ()


STATS_FIELDS = tuple(each.name for each in fields(GenerationResponse) if hasattr(Stats, each.name))
"""The fields of a response that are copied from `Stats`."""


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    drafter: Drafter | Source | None = None,
    *,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    stream: Any = None,
    input_embeddings: None = None,
    **options: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yields (token, log-probabilities (V,), whether it was drafted).

    These are the fields of mlx-lm's `speculative_generate_step`. It does not stop at an end-of-text
    token. Closing the generator cancels.

    Args:
        prompt: (T,) token ids, T >= 1.
        model: from `load` or `mlx_lm.load`.
        drafter: from `load_drafter`, or a source from `Drafter.open` that has followed this text so
            far; None drafts from the context only.
        draft_model: a smaller model with the same tokenizer, instead of a drafter; from
            `mlx_lm.load` or `load_draft_model`.
        num_draft_tokens: mlx-lm's name for `draft_depth`.
        stream: not used: mlx-lm's generation stream is. It may also be the third argument, as in
            mlx-lm.
        input_embeddings: not supported.
        options: see `Options`.

    Raises:
        RedrafterError: on the first `next`: an option is out of range, the model is not supported,
            or the drafter does not fit it.
    """
    check_names("generate_step", options)
    own = None if isinstance(drafter, (mx.Stream, mx.ThreadLocalStream)) else drafter
    given, parsed = parse_arguments(own, draft_model, num_draft_tokens, input_embeddings, options)
    pair, source = get_pair(model, given)
    with closing(open_generation(pair, prompt, parsed, source)) as generation:
        for each in generation:
            yield each.token, each.logprobs, each.from_draft


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    max_tokens: int = Options.max_tokens,
    draft_model: nn.Module | None = None,
    stream: Any = None,
    *,
    drafter: Drafter | Source | None = None,
    num_draft_tokens: int | None = None,
    input_embeddings: None = None,
    stop: str | Sequence[str] | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Yields a response for each token, as mlx-lm's `stream_generate`.

    Ends at an end-of-text token, at a stop string (which is not part of the text), or after
    `max_tokens`: at the same token with and without a drafter.

    Args:
        model, tokenizer: from `load` or `mlx_lm.load`.
        prompt: text, token ids, or an array of them.
        max_tokens: see `Options`.
        draft_model, stream, drafter, num_draft_tokens, input_embeddings: see `generate_step`.
        stop: strings that end the text.
        options: see `Options`.

    Raises:
        RedrafterError: on the first `next`: see `generate_step`; also if `max_tokens` is 0 or a
            stop string is empty.
    """
    check_names("stream_generate", options)
    wrapped = wrap_tokenizer(tokenizer)
    options["max_tokens"] = max_tokens
    given, parsed = parse_arguments(
        drafter, draft_model, num_draft_tokens, input_embeddings, options
    )
    parsed.require_tokens()
    pair, source = get_pair(model, given)
    yield from stream_responses(pair, wrapped, prompt, parsed, source, StopStrings(stop))


def stream_responses(
    pair: Pair,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    options: Options,
    source: Source | None,
    stop_strings: StopStrings,
    piece_ends: Sequence[int] = (),
) -> Generator[GenerationResponse, None, None]:
    """`stream_generate` with a pair and parsed options; other arguments: see `Responder`."""
    with wired_limit(pair.model):
        how = (options, source, stop_strings, piece_ends)
        responder = Responder(pair, tokenizer, encode(tokenizer, prompt), *how)
        with closing(responder.generation) as generation:
            for decoded in generation:
                yield responder.respond(decoded)
                if responder.finish_reason is not None:
                    return


class Responder:
    """Opens the generation of one text, and makes its responses.

    Args:
        prompt: (T,) token ids.
        source, piece_ends, is_joint: see `open_generation`.

    Attributes:
        generation: of its tokens.
        finish_reason: why it ended; None before.
    """

    def __init__(
        self,
        pair: Pair,
        tokenizer: TokenizerWrapper,
        prompt: Sequence[int],
        options: Options,
        source: Source | None,
        stop_strings: StopStrings,
        piece_ends: Sequence[int] = (),
        *,
        is_joint: bool = False,
    ) -> None:
        self._pair = pair
        self._detokenizer = tokenizer.detokenizer
        self._stop_strings = stop_strings
        self._has_warned = pair.drafter is None
        self._started = 0.0
        self._prompt_tps = 0.0
        self._count = 0
        self._n_prompt = len(prompt)
        self.finish_reason: str | None = None

        def progress(done: int, total: int) -> None:
            if done == 0:  # after measuring for `plan="auto"`
                self._started = time.perf_counter()
            if options.prompt_progress_callback is not None:
                options.prompt_progress_callback(done, total)

        special_tokens = options.xtc_special_tokens
        if options.xtc_probability and special_tokens is None:
            special_tokens = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self.generation = open_generation(
            pair,
            prompt,
            replace(options, xtc_special_tokens=special_tokens, prompt_progress_callback=progress),
            source,
            end_tokens=tokenizer.eos_token_ids,
            piece_ends=piece_ends,
            is_joint=is_joint,
        )

    def respond(self, decoded: DecodedToken) -> GenerationResponse:
        """The response for the next token."""
        self._count += 1
        if self._count == 1:
            self._prompt_tps = self._n_prompt / (time.perf_counter() - self._started)
            self._started = time.perf_counter()
        recipe = self.generation.recipe
        stats = decoded.stats
        if not self._has_warned and stats.drafter_rounds >= USELESS_ROUNDS:
            self._has_warned = True
            _warn_if_useless(self._pair.drafter, stats, recipe.options)

        text, self.finish_reason = _extend_text(decoded, self._detokenizer, self._stop_strings)
        return GenerationResponse(
            text=text,
            token=decoded.token,
            logprobs=decoded.logprobs,
            from_draft=decoded.from_draft,
            prompt_tokens=self._n_prompt,
            prompt_tps=self._prompt_tps,
            generation_tokens=self._count,
            generation_tps=self._count / (time.perf_counter() - self._started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=self.finish_reason,
            draft_source=decoded.draft_source,
            **{name: getattr(stats, name) for name in STATS_FIELDS},
            seed=recipe.seed,
            notes=recipe.notes,
            row_counts=recipe.row_counts,
            few_rows=recipe.few_rows.row_counts,
        )


def _extend_text(
    decoded: DecodedToken, detokenizer: StreamingDetokenizer, stop_strings: StopStrings
) -> tuple[str, str | None]:
    """(the text that is certain after a token, and was not before; why the text ends, or None)."""
    reason = decoded.finish_reason
    if reason != "stop":  # otherwise it is an end-of-text token
        detokenizer.add_token(decoded.token)
    if reason is not None:
        detokenizer.finalize()
    text, is_found = stop_strings.feed(detokenizer.last_segment)
    if is_found:
        return text, "stop"
    return (text, None) if reason is None else (text + stop_strings.flush(), reason)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    **options: Any,
) -> str:
    """The whole text, as mlx-lm's `generate`.

    All other arguments and errors are those of `stream_generate`.

    Args:
        verbose: print the text while it is generated, then a summary.
    """
    parameters = inspect.signature(stream_generate).parameters
    check_names("generate", options, OPTION_NAMES | parameters.keys())
    text = ""
    for response in stream_generate(model, tokenizer, prompt, **options):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print("\n" + "=" * 10 + "\n" + format_summary(response))
    return text


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
            f"Rounds: {last.rounds}, {last.plain_steps} of them plain steps, "
            f"{last.tokens_per_round:.2f} tokens per round; "
            f"{last.accepted} of {last.drafted} drafted tokens accepted; per depth {depths}"
        )
    if last.context_drafted:
        lines.append(f"context: {last.context_accepted} of {last.generation_tokens} tokens")
    return "\n".join(lines)


def parse_arguments(
    drafter: Drafter | Source | None,
    draft_model: nn.Module | None,
    num_draft_tokens: int | None,
    input_embeddings: Any,
    options: dict[str, Any],
) -> tuple[Drafter | Source | None, Options]:
    """(the drafter or None, the parsed options), from mlx-lm's keywords and ours."""
    if num_draft_tokens is not None:
        if options.get("draft_depth") is not None:
            raise RedrafterError("give either num_draft_tokens or draft_depth, got both")
        options = options | {"draft_depth": num_draft_tokens}
    if input_embeddings is not None:
        raise RedrafterError("input_embeddings must be None: only texts are decoded here")
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


def _warn_if_useless(drafter: Any, stats: Stats, options: Options) -> None:
    """Warns of a drafter without an accepted token, with what to check."""
    if stats.accepted != stats.context_accepted:
        return
    message = f"the drafter has guessed no token right in {stats.drafter_rounds} rounds. "
    if options.logits_processors:
        message += (
            "Do the logits processors change the model's choices? "
            "Only draft models take them into account"
        )
    else:
        message += drafter.args.explain_useless()
    warn(message)
