"""The library: ids, a stream of responses, or a string; and `python -m mlx_redrafter.generate`."""

from __future__ import annotations

if __name__ == "__main__":  # before MLX is imported, which may be missing
    from mlx_redrafter.cli.main import main

    main("generate")

import secrets
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .checkpoints import check_fit
from .drafters.recurrent import Drafter
from .engine import kv_cache
from .engine.decode import OnRound, Settings, Step, in_pieces, own_depth
from .engine.plan import AUTO, Plan, make_plan, read_plan
from .engine.prompts import check_prompt
from .engine.round import Chooser, Processor
from .engine.sampling import make_sampler
from .engine.stats import Stats
from .engine.target import KVQuantization, check_ring
from .engine.wired_limit import wired
from .errors import RedrafterError
from .stop_strings import StopStrings

SILENT_ROUNDS = 16
"""After this many rounds without one accepted token the drafter is reported as useless."""

OPTIONAL = ("seed", "beam_width", "draft_depth", "tree_size", "max_kv_size", "kv_bits")
"""The integers of `make_settings` that may be None."""


class Options(TypedDict, total=False):
    """The keywords of `generate_step`, `stream_generate` and `generate`; see `make_settings`."""

    max_tokens: int
    temp: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int]
    seed: int | None
    plan: str | Sequence[int]
    beam_width: int | None
    draft_depth: int | None
    tree_size: int | None
    sampler: Callable[[mx.array], mx.array] | None
    logits_processors: Sequence[Processor] | None
    prompt_cache: kv_cache.Cache | None
    history: Sequence[int]
    prefill_step_size: int
    prompt_progress_callback: Callable[[int, int], None] | None
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    on_drafter_failure: Callable[[Exception], None] | None
    on_round: OnRound | None


def make_settings(
    drafter: Drafter | None = None,
    *,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
    seed: int | None = None,
    plan: str | Sequence[int] = AUTO,
    beam_width: int | None = None,
    draft_depth: int | None = None,
    tree_size: int | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Processor] | None = None,
    prompt_cache: kv_cache.Cache | None = None,
    history: Sequence[int] = (),
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    on_drafter_failure: Callable[[Exception], None] | None = None,
    on_round: OnRound | None = None,
) -> Settings:
    """Every keyword of the three functions, checked.

    Args:
        drafter: None for plain decoding; the plan and the beam's three keywords then do not matter.
        max_tokens: how many tokens to make; -1 for no limit.
        temp: sampling temperature; 0 takes the likeliest token.
        top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, xtc_special_tokens: mlx-lm's
            filters, applied in mlx-lm's order.
        seed: equal seeds give equal tokens, with and without a drafter. None draws one.
        plan: "auto" measures this machine once and chooses round by round, plain decoding included; "off" decodes
            plainly; (W, K) or (W, K, N) is the plan of every round.
        beam_width: W, how many continuations are drafted; 1 where only the others are given.
        draft_depth: K, how many tokens each is long; None for what the drafter's config says, or else DRAFT_DEPTH.
        tree_size: N, how many nodes the target verifies, the root included; None for all 1 + W * K.
        sampler: a sampler of mlx-lm's kind instead of `temp`; called with each node's (1, V) log-probabilities.
            Exact in law if it is a function of that row.
        logits_processors: of mlx-lm's kind, each a function of (history, logits): it is called for every node, with
            histories that may come to nothing. The tree is then not pruned.
        prompt_cache: from mlx-lm's `make_prompt_cache`; holds the prompt and every yielded token afterwards. A forward
            that a Ctrl-C breaks off is taken back in all layers, so the cache may then lack tokens that were yielded,
            or hold one that was about to be, and one that comes while rows are moved is not noticed: go on with a new
            one (`Session` does).
        history: the ids that `prompt_cache` holds, for processors to see, and for caches that do not count: without it
            the noise of a sampled text behind such a cache starts at position 0.
        prefill_step_size: prompt tokens in one forward.
        prompt_progress_callback: called with (tokens read, tokens in all).
        max_kv_size: how many rows the KV cache has at most, the first 4 of the text and the latest; as in mlx-lm, for
            models that do not say themselves what caches they have, and without a `prompt_cache`.
        kv_bits, kv_group_size, quantized_kv_start: quantisation of the KV cache from that length on.
        on_drafter_failure: called once with what the drafter raises; plain decoding goes on from there, and no token is
            lost. None passes it on. What fails only when it is computed, as memory does, is passed on in any case.
        on_round: called with each round that drafted, before its first token is yielded: the `Tree`, whose arrays are
            computed by then, the kept nodes from the root down, and the tokens of the round, one behind each of those.

    Raises:
        RedrafterError: a value out of its range.
    """
    check_integers(
        max_tokens=max_tokens,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=top_k,
        seed=seed,
        beam_width=beam_width,
        draft_depth=draft_depth,
        tree_size=tree_size,
        prefill_step_size=prefill_step_size,
        max_kv_size=max_kv_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
    )
    if prefill_step_size < 1:
        raise RedrafterError(f"prefill_step_size must be at least 1, got {prefill_step_size}")
    check_ring(max_kv_size)
    check_callers(logits_processors, prompt_progress_callback, on_drafter_failure, prompt_cache, on_round)
    chosen = make_sampler(
        seed=fresh_seed() if seed is None else int(seed),
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        xtc_special_tokens=xtc_special_tokens,
        sampler=sampler,
    )
    return Settings(
        chooser=Chooser(chosen, tuple(logits_processors or ())),
        plan=plan_of(drafter, read_plan(plan, beam_width, draft_depth, tree_size), ordered=bool(logits_processors)),
        max_tokens=int(max_tokens),
        prompt_cache=prompt_cache,
        history=tuple(history),
        max_kv_size=None if max_kv_size is None else int(max_kv_size),
        prefill_step_size=int(prefill_step_size),
        quantization=KVQuantization(
            None if kv_bits is None else int(kv_bits), int(kv_group_size), int(quantized_kv_start)
        ).check(),
        prompt_progress_callback=prompt_progress_callback,
        on_drafter_failure=on_drafter_failure,
        on_round=on_round,
    )


def check_integers(**given: object) -> None:
    """Refuses keywords that are no integers.

    Raises:
        RedrafterError: one is none, nor None where it may be.
    """
    for name, value in given.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole and not (value is None and name in OPTIONAL):
            raise RedrafterError(f"{name} must be an integer, got {value!r}")


def check_callers(
    logits_processors: object,
    prompt_progress_callback: object,
    on_drafter_failure: object,
    prompt_cache: object,
    on_round: object = None,
) -> None:
    """Refuses functions that cannot be called, and a cache that is none.

    Raises:
        RedrafterError: with what was expected.
    """
    if callable(logits_processors):
        raise RedrafterError("logits_processors must be a list of functions, got one function")
    if logits_processors is not None and not (
        isinstance(logits_processors, Iterable) and all(callable(each) for each in logits_processors)
    ):
        raise RedrafterError(f"logits_processors must be a list of functions, got {logits_processors!r}")
    told = {
        "prompt_progress_callback": prompt_progress_callback,
        "on_drafter_failure": on_drafter_failure,
        "on_round": on_round,
    }
    for name, function in told.items():
        if function is not None and not callable(function):
            raise RedrafterError(f"{name} must be a function, got {function!r}")
    if prompt_cache is not None and not isinstance(prompt_cache, list):
        raise RedrafterError(
            f"prompt_cache must be the list that make_prompt_cache returns, got {type(prompt_cache).__name__}"
        )


def plan_of(
    drafter: Drafter | None, asked: tuple[int, int | None, int | None] | Literal["auto"] | None, *, ordered: bool
) -> Plan | Literal["auto"] | None:
    """The plan that is asked for, with the drafter's own depth where none is; None decodes plainly.

    Args:
        asked: see `read_plan`.
        ordered: every node must be kept.

    Raises:
        RedrafterError: see `make_plan`; or the drafter is none.
    """
    if drafter is None:
        return None
    if not isinstance(drafter, Drafter) and not hasattr(drafter, "advance"):
        raise RedrafterError(f"drafter must be what load_drafter returns, got {type(drafter).__name__}")
    if asked is None or asked == AUTO:
        return asked
    width, depth, size = asked
    vocab_size = drafter.args.vocab_size
    plan = make_plan(width, own_depth(drafter) if depth is None else depth, size, vocab_size)
    return make_plan(plan.width, plan.depth, None, vocab_size) if ordered and plan.width > 1 else plan


def fresh_seed() -> int:
    """A random seed; where several processes share one model (`mlx.launch`), that of the first."""
    seed = secrets.randbits(32)
    group = mx.distributed.init()
    if group.size() == 1:
        return seed
    halves = mx.array([seed >> 16, seed & 0xFFFF] if group.rank() == 0 else [0, 0], mx.int32)
    high, low = cast(list[int], mx.distributed.all_sum(halves, group=group, stream=mx.cpu).tolist())
    return (high << 16) | low


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    drafter: Drafter | None = None,
    **options: Unpack[Options],
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yields (token, log-probabilities (V,), whether it was drafted), as mlx-lm's `speculative_generate_step`.

    It does not stop at an end-of-text token. Closing the generator cancels.

    Args:
        prompt: (T,) token ids, T >= 1.
        model: a model as `mlx_lm.load` returns it.
        drafter: None decodes plainly.
        options: see `make_settings`.

    Raises:
        RedrafterError: on the first `next`: bad settings, an unsupported model, or a drafter of another size.
    """
    with closing(_steps(prompt, model, drafter, make_settings(drafter, **options))) as steps:
        for step in filter(None, steps):
            yield step.token, step.logprobs, step.from_draft


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response, and what speculation has done so far.

    Attributes:
        rounds: forwards of the target behind the prompt's; the token chosen by the prefill belongs to none.
        drafted: nodes verified, roots not counted.
        accepted: drafted tokens kept.
        tokens_per_round: 1 + accepted / rounds.
        acceptance_per_depth: share of rounds that kept a drafted token at depth 1, 2, ...
        rows_per_round: tokens the target read in a round: root, drafted, and those it has to read again.
        plain_steps: rounds that drafted nothing, because it did not pay.
        seed: the seed in use, also when it was drawn.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_round: float = 1.0
    acceptance_per_depth: tuple[float, ...] = ()
    rows_per_round: float = 0.0
    plain_steps: int = 0
    seed: int = 0


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: Drafter | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Generator[GenerationResponse, None, None]:
    """Yields a response for each token, as mlx-lm's `stream_generate`.

    Ends at an end-of-text token, at a stop string (which is not part of the text), or after `max_tokens`: at the
    same token with and without a drafter.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them.
        prompt: text, token ids, or an array of them.
        drafter: None decodes plainly.
        stop: strings that end the text.
        options: see `make_settings`.

    Raises:
        RedrafterError: on the first `next`: see `generate_step`; also for max_tokens 0 and an empty stop string.
    """
    with closing(stream_in_pieces(model, tokenizer, prompt, drafter=drafter, stop=stop, **options)) as responses:
        yield from filter(None, responses)


def stream_in_pieces(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: Drafter | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Generator[GenerationResponse | None, None, None]:
    """As `stream_generate`, and yields None between two pieces of the prompt; see `loop.in_pieces`."""
    if not hasattr(tokenizer, "encode"):
        raise RedrafterError(f"tokenizer must be what load returns, got {type(tokenizer).__name__}")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    options = completed(options, tokenizer)
    settings = make_settings(drafter, **options)
    if settings.max_tokens == 0:
        raise RedrafterError("max_tokens must not be 0 (use -1 for no limit)")
    ids = encode(tokenizer, prompt)
    watch = watch_for(stop)
    detokenizer = tokenizer.detokenizer
    started = prompt_tps = 0.0

    def progress(done: int, total: int) -> None:
        """The prompt's time begins when it is read, behind what `plan="auto"` may measure first."""
        nonlocal started
        started = time.perf_counter() if done == 0 else started
        if settings.prompt_progress_callback is not None:
            settings.prompt_progress_callback(done, total)

    def response(step: Step, count: int, text: str, reason: str | None) -> GenerationResponse:
        """What is yielded for a step, the `count`-th, that adds `text`."""
        stats = step.stats
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
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            tokens_per_round=stats.tokens_per_round,
            acceptance_per_depth=stats.acceptance_per_depth,
            rows_per_round=stats.rows_per_round,
            plain_steps=stats.skipped,
            seed=options["seed"] or 0,
        )

    with (
        wired(model),
        closing(_steps(ids, model, drafter, replace(settings, prompt_progress_callback=progress))) as steps,
    ):
        count, last = 0, Stats()
        for step in steps:
            if step is None:
                yield None
                continue
            count += 1
            if count == 1:
                prompt_tps = len(ids) / (time.perf_counter() - started)
                started = time.perf_counter()
            warn_if_useless(step.stats, last)
            last, text = step.stats, ""
            if step.token in tokenizer.eos_token_ids:
                break
            detokenizer.add_token(step.token)
            text, found = watch.feed(detokenizer.last_segment)
            if found:
                yield response(step, count, text, "stop")
                return
            if count == settings.max_tokens:
                break
            yield response(step, count, text, None)
        assert step is not None  # there is a token behind every prompt
        detokenizer.finalize()
        tail, found = watch.feed(detokenizer.last_segment)
        ended = found or step.token in tokenizer.eos_token_ids
        yield response(step, count, text + tail + ("" if found else watch.rest()), "stop" if ended else "length")


def completed(options: Options, tokenizer: TokenizerWrapper) -> Options:
    """The options with a seed, and with the tokens that XTC spares, as mlx-lm's command has them."""
    seed = options.get("seed")
    found: Options = {**options, "seed": fresh_seed() if seed is None else seed}
    if options.get("xtc_probability") and "xtc_special_tokens" not in options:
        found["xtc_special_tokens"] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    return found


def watch_for(stop: str | Sequence[str] | None) -> StopStrings:
    """What ends a text at one of these.

    Raises:
        RedrafterError: it is neither a string nor several, or one is empty.
    """
    if stop is not None and not (isinstance(stop, Iterable) and all(isinstance(text, str) for text in stop)):
        raise RedrafterError(f"stop must be a string or several, got {stop!r}")
    return StopStrings([stop] if isinstance(stop, str) else stop or ())


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: Drafter | None = None,
    stop: str | Sequence[str] | None = None,
    verbose: bool = False,
    **options: Unpack[Options],
) -> str:
    """The whole text, as mlx-lm's `generate`; `verbose` prints it as it is made, then a summary.

    See `stream_generate`.
    """
    text = ""
    for response in stream_generate(model, tokenizer, prompt, drafter=drafter, stop=stop, **options):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print("\n" + "=" * 10 + "\n" + summary(response))
    return text


def summary(last: GenerationResponse) -> str:
    """What mlx-lm prints at the end, and the rounds if there were any."""
    lines = [
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {last.peak_memory:.3f} GB",
    ]
    if last.rounds:
        depths = " ".join(f"{share:.2f}" for share in last.acceptance_per_depth)
        lines.append(
            f"Rounds: {last.rounds}, {last.tokens_per_round:.2f} tokens per round, {last.rows_per_round:.1f} read; "
            f"{last.accepted} of {last.drafted} drafted nodes accepted" + (f"; per depth {depths}" if depths else "")
        )
    return "\n".join(lines)


def encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids of a prompt. Special tokens are added to a text unless it begins with the first of them."""
    if not isinstance(prompt, str):
        return cast(list[int], check_prompt(prompt).tolist())
    if not is_text(prompt):
        raise RedrafterError("the prompt is not UTF-8")
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(prompt, add_special_tokens=special))


def encode_chat(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of the user's message, or of messages, through the chat template if there is one."""
    if not tokenizer.has_chat_template:
        if not isinstance(prompt, str):
            prompt = "\n".join(str(message.get("content", "")) for message in prompt)
        return encode(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8; what a shell passes on of other bytes cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def warn_if_useless(stats: Stats, before: Stats) -> None:
    """Says once that nothing is being accepted: at the token with which enough rounds have drafted."""
    if before.tried < SILENT_ROUNDS <= stats.tried and stats.accepted == 0:
        warnings.warn(
            f"the drafter has guessed no token right in {SILENT_ROUNDS} rounds. "
            "Is it trained for this model, and are its weights sound in this dtype?",
            stacklevel=3,
        )


def _steps(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter: Drafter | None, settings: Settings
) -> Generator[Step | None, None, None]:
    """The loop's steps, and pieces of the prompt, for models that have been looked at."""
    if not isinstance(model, nn.Module):
        raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
    if drafter is not None:
        check_fit(drafter, model)
    return in_pieces(prompt, model, drafter, settings)


class _CallableModule(ModuleType):
    """Importing `mlx_redrafter.generate` puts this module in place of the package's function `generate`."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
