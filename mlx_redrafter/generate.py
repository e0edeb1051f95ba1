"""The library: token ids, a stream of responses, or a string; and `python -m mlx_redrafter.generate`."""

from __future__ import annotations

if __name__ == "__main__":  # before MLX is imported, which may be missing
    from mlx_redrafter.cli.main import main

    main("generate")

import inspect
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .checkpoints import check_fit
from .drafters.context import ContextIndex
from .drafters.protocol import Drafter
from .engine import kv_cache
from .engine.blas import warn_of_slow_blas
from .engine.decode import Planner, Round, decode, on_stream, prefill
from .engine.model_checks import check_draftable, check_verifiable, explain_chains
from .engine.model_parts import has_final_norm, model_name
from .engine.plan import Plan, chain_plan
from .engine.request_checks import check_prompt, check_request
from .engine.round import Chooser
from .engine.stats import Stats
from .engine.target import Target
from .engine.wired_limit import wired_limit
from .errors import RedrafterError, UnsupportedModelError
from .options import AUTO, Options, default_depth, takes_options
from .planning.planner import make_context_planner, make_planner
from .stop_strings import StopStrings

USELESS_ROUNDS = 16
"""After this many drafting rounds without one accepted token the drafter is reported as useless."""

Prompt = str | Sequence[int] | mx.array


class Step(NamedTuple):
    """One decoded token.

    Attributes:
        token: its id.
        logprobs: (V,) the target's log-probabilities where it was chosen, evaluated.
        draft_source: what had drafted it; None for a token of the target's own.
        stats: the rounds so far, this token's included.
    """

    token: int
    logprobs: mx.array
    draft_source: Literal["drafter", "context"] | None
    stats: Stats

    @property
    def from_draft(self) -> bool:
        """Whether it had been drafted."""
        return self.draft_source is not None


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response, and what speculative decoding has done so far.

    Attributes:
        rounds: forwards of the target after the prompt's, plain steps included: 1 + rounds + accepted tokens were made.
        drafted: drafted nodes verified, roots not counted.
        accepted: drafted tokens accepted.
        context_drafted, context_accepted: how many of those came from the context, not from the drafter.
        draft_source: what had drafted this token: "drafter", "context", or None for one of the model's own.
        tokens_per_round: 1 + accepted / rounds.
        acceptance_per_depth: share of drafting rounds that accepted a drafted token at depth 1, 2, ...
        rows_per_round: tokens in a forward: root, drafted, and replayed ones.
        plain_steps: rounds that drafted nothing.
        seed: the seed in use, also when it was drawn.
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
    draft_source: Literal["drafter", "context"] | None = None
    seed: int = 0


@takes_options
def generate_step(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter: Drafter | None = None, **options: Any
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yields (token, log-probabilities (V,), whether it was drafted), as mlx-lm's `speculative_generate_step`.

    It does not stop at an end-of-text token. Closing the generator cancels.

    Args:
        prompt: (T,) token ids, T >= 1.
        model: a model as `mlx_lm.load` returns it.
        drafter: None decodes plainly.
        options: see `Options`.

    Raises:
        RedrafterError: on the first `next`: an option out of range, an unsupported model, a drafter of another size.
    """
    with closing(decode_tokens(prompt, model, drafter, Options(**options))) as steps:
        for step in steps:
            yield step.token, step.logprobs, step.from_draft


@takes_options
def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Yields a response for each token, as mlx-lm's `stream_generate`.

    Ends at an end-of-text token, at a stop string (which is not part of the text), or after `max_tokens`: at the
    same token with and without a drafter.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them.
        prompt: text, token ids, or an array of them.
        drafter: None decodes plainly.
        stop: strings that end the text.
        options: see `Options`.

    Raises:
        RedrafterError: on the first `next`: see `generate_step`; also for max_tokens 0 and an empty stop string.
    """
    with closing(stream_responses(model, tokenizer, prompt, drafter=drafter, stop=stop, **options)) as responses:
        yield from filter(None, responses)


@takes_options
def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    stop: str | Sequence[str] | None = None,
    verbose: bool = False,
    **options: Any,
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


def stream_responses(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    *,
    drafter: Drafter | None = None,
    stop: str | Sequence[str] | None = None,
    **keywords: Any,
) -> Generator[GenerationResponse | None, None, None]:
    """As `stream_generate`, and yields None between two pieces of the prompt."""
    if not hasattr(tokenizer, "encode"):
        raise RedrafterError(f"tokenizer must be what load returns, got {type(tokenizer).__name__}")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    options = Options(**keywords).require_tokens()
    ids = encode(tokenizer, prompt)
    stops = make_stop_strings(stop)
    detokenizer = tokenizer.detokenizer
    started = prompt_tps = 0.0
    callback = options.prompt_progress_callback

    def progress(done: int, total: int) -> None:
        nonlocal started
        started = time.perf_counter() if done == 0 else started  # after what `plan="auto"` may measure first
        if callback is not None:
            callback(done, total)

    def make_response(step: Step, count: int, text: str, reason: str | None) -> GenerationResponse:
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
            plain_steps=stats.plain_steps,
            context_drafted=stats.context_drafted,
            context_accepted=stats.context_accepted,
            draft_source=step.draft_source,
            seed=seed,
        )

    seed = draw_seed() if options.seed is None else options.seed
    special = options.xtc_special_tokens
    if options.xtc_probability and special is None:
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    options = replace(options, seed=seed, xtc_special_tokens=special, prompt_progress_callback=progress)
    with wired_limit(model), closing(_decode_steps(ids, model, drafter, options)) as steps:
        count, warned = 0, False
        for step in steps:
            if step is None:
                yield None
                continue
            count += 1
            if count == 1:
                prompt_tps = len(ids) / (time.perf_counter() - started)
                started = time.perf_counter()
            if drafter is not None and not warned and step.stats.drafter_rounds >= USELESS_ROUNDS:
                warned = True
                if step.stats.accepted == step.stats.context_accepted:
                    warnings.warn(explain_useless(drafter, step.stats.drafter_rounds), stacklevel=3)
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
        assert step is not None  # there is a token after every prompt
        detokenizer.finalize()
        tail, found = stops.feed(detokenizer.last_segment)
        reason = "stop" if found or step.token in tokenizer.eos_token_ids else "length"
        yield make_response(step, count, text + tail + ("" if found else stops.rest()), reason)


def decode_tokens(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter: Drafter | None, options: Options
) -> Generator[Step, None, None]:
    """Decodes after `prompt` until `max_tokens` (-1: without limit), or until the caller closes the generator.

    A prompt cache of the caller's then holds the prompt and every token that was yielded, the last one included.

    Raises:
        RedrafterError: see `generate_step`.
    """
    with closing(_decode_steps(prompt, model, drafter, options)) as steps:
        yield from filter(None, steps)


def _decode_steps(
    prompt: Sequence[int] | mx.array, model: nn.Module, drafter: Drafter | None, options: Options
) -> Generator[Step | None, None, None]:
    """As `decode_tokens`: rounds flattened to tokens. Yields None between two pieces of the prompt."""
    prompt = check_prompt(prompt)
    target, rounds = open_rounds(prompt, model, drafter, options)
    length, count, token, stats = target.length + len(prompt), 0, 0, Stats()

    def finish() -> None:
        if count and options.prompt_cache is not None:
            with on_stream():
                target.finish(length + count, token)

    with closing(rounds):
        try:
            for each in rounds:
                if not each.tokens:
                    yield None
                    continue
                room = len(each.tokens) if options.max_tokens == -1 else options.max_tokens - count
                taken = each.tokens[:room]
                n_accepted = len(taken) - 1
                source: Literal["drafter", "context"] = "context" if each.from_context else "drafter"
                if not each.is_prompt:
                    stats = stats.add_round(each.plan, n_accepted, each.replayed, from_context=each.from_context)
                if options.on_round is not None and each.tree is not None:
                    options.on_round(each.tree, list(each.path[:room]), taken)
                for i, token in enumerate(taken):
                    count += 1
                    yield Step(token, each.logprobs[i], source if i < n_accepted else None, stats)
                if count == options.max_tokens:
                    break
        except GeneratorExit:
            finish()
            raise
        finish()


def open_rounds(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    drafter: Drafter | None,
    options: Options,
    *,
    may_run_ahead: Callable[[], bool] | None = None,
) -> tuple[Target, Generator[Round, None, Any]]:
    """(the target, whose `length` is that of the text in its cache; the rounds after `prompt`, see `decode`).

    Of the options, `max_tokens` and `on_round` are the caller's matter, but for a `max_tokens` of 0: there are only the
    prompt's rounds then.

    Raises:
        RedrafterError: see `generate_step`.
    """
    tokens = check_prompt(prompt)
    target, chooser = _open_target(model, tokens, options)
    warn_of_slow_blas()  # of a model that mlx-lm loaded
    is_own = options.prompt_cache is None and options.max_kv_size is None
    drafting = _open_drafting(model, drafter, options, None if is_own else target.cache)
    target.before_norm = drafting.drafter is not None and drafting.drafter.args.before_norm
    reading: dict[str, Any] = {
        "history": options.history,
        "prefill_step_size": options.prefill_step_size,
        "prompt_progress_callback": options.prompt_progress_callback,
    }
    if options.max_tokens == 0:
        return target, prefill(target, tokens, chooser, **reading, want_hidden=False)
    rounds = decode(
        target,
        drafting.drafter,
        chooser,
        drafting.planner,
        tokens,
        context=drafting.context,
        on_drafter_failure=options.on_drafter_failure,
        may_run_ahead=may_run_ahead,
        **reading,
    )
    return target, rounds


def _open_target(model: nn.Module, tokens: mx.array, options: Options) -> tuple[Target, Chooser]:
    """A target after `options.history`, and what chooses its tokens; what cannot be decoded is refused here.

    Raises:
        RedrafterError: see `check_request` and `Sampler.check`; or the cache holds another number of tokens.
    """
    if not isinstance(model, nn.Module):
        raise RedrafterError(f"model must be what load returns, got {type(model).__name__}")
    cache, history = options.prompt_cache, options.history
    vocab_size = check_request(model, tokens, cache, options.quantization, options.max_kv_size)
    sampler = options.make_sampler(draw_seed() if options.seed is None else options.seed)
    sampler.check(vocab_size)
    with on_stream():
        target = Target(model, cache, options.quantization, options.max_kv_size)
    if history and target.length != len(history) and kv_cache.counts_tokens(target.cache):
        raise RedrafterError(f"the prompt cache holds {target.length} tokens, its history is {len(history)}")
    target.length = len(history) or target.length
    return target, Chooser(sampler, tuple(options.logits_processors or ()))


class _Drafting(NamedTuple):
    """What drafts, and what decides about each round."""

    drafter: Drafter | None
    planner: Planner
    context: ContextIndex | None = None


def _open_drafting(
    model: nn.Module, drafter: Drafter | None, options: Options, cache: kv_cache.Cache | None
) -> _Drafting:
    """What the options ask for, as far as the model takes it.

    Args:
        cache: the one that is decoded with; None for the model's own kind, which needs no check.

    Raises:
        RedrafterError: the drafter does not fit the model, or the plan does not fit the drafter.
        UnsupportedModelError: see `check_draftable` and, if `context` is asked for, `check_verifiable`.
    """
    if drafter is not None and not hasattr(drafter, "begin"):
        raise RedrafterError(f"drafter must be what load_drafter returns, got {type(drafter).__name__}")
    if drafter is not None:
        check_fit(drafter, model)
        if drafter.args.before_norm and not has_final_norm(model):
            reason = "the drafter reads the hidden state before the final norm, which is no module of this model"
            raise UnsupportedModelError(f"cannot draft for {model_name(model)}: {reason}")
    plan, shape = options.resolve_plan(drafter), options.plan_shape()
    if shape is None:
        return _Drafting(None, Planner(None))
    is_shared = mx.distributed.init().size() > 1  # other ranks would measure other times
    context = _make_context(model, options, cache, default=(shape == AUTO or drafter is None) and not is_shared)
    if plan == AUTO and isinstance(drafter, nn.Module) and not is_shared:
        trees = check_draftable(model, tree=True, cache=cache) is None
        try:
            planner = make_planner(model, drafter, trees=trees, chains_only=bool(options.logits_processors))
        except Exception as error:  # while it was measured
            if options.on_drafter_failure is None:
                raise
            options.on_drafter_failure(error)
            drafter = None
        else:
            return _Drafting(drafter if planner.plans else None, planner, context)
    if drafter is None:
        if is_shared or context is None or (options.context and shape != AUTO):
            return _Drafting(None, Planner(None), context)
        replays = bool(kv_cache.unknown_types(cache or make_prompt_cache(model), kv_cache.TRIMMABLE))
        return _Drafting(None, make_context_planner(replays=replays), context)
    plan = chain_plan(default_depth(drafter)) if plan == AUTO else plan
    assert isinstance(plan, Plan)
    can_merge = context is not None and not options.logits_processors and explain_chains(model) is None
    return _Drafting(drafter, Planner(fit_plan(model, plan, cache), can_merge=can_merge), context)


def _make_context(
    model: nn.Module, options: Options, cache: kv_cache.Cache | None, *, default: bool
) -> ContextIndex | None:
    if not (default if options.context is None else options.context):
        return None
    try:
        check_verifiable(model, cache)
    except UnsupportedModelError:
        if options.context:
            raise
        return None
    return ContextIndex()


def fit_plan(model: nn.Module, plan: Plan, cache: list[Any] | None = None) -> Plan:
    """The plan, or its chain where the model takes no trees, with a warning that says why.

    Raises:
        UnsupportedModelError: see `check_draftable`.
    """
    reason = check_draftable(model, tree=plan.width > 1, cache=cache)
    if reason is None:
        return plan
    # The line that is pointed to is the one that called a public function.
    warnings.warn(f"drafting chains, not trees, for {model_name(model)}: {reason}", stacklevel=7)
    return chain_plan(plan.depth)


def draw_seed() -> int:
    """A random seed; where several processes share one model (`mlx.launch`), that of the first."""
    seed = secrets.randbits(32)
    group = mx.distributed.init()
    if group.size() == 1:
        return seed
    halves = mx.array([seed >> 16, seed & 0xFFFF] if group.rank() == 0 else [0, 0], mx.int32)
    high, low = cast(list[int], mx.distributed.all_sum(halves, group=group, stream=mx.cpu).tolist())
    return (high << 16) | low


def make_stop_strings(stop: str | Sequence[str] | None) -> StopStrings:
    """What ends a text at one of these.

    Raises:
        RedrafterError: it is neither a string nor several, or one is empty.
    """
    stops = [stop] if isinstance(stop, str) else list(stop or ()) if isinstance(stop or (), Iterable) else [stop]
    if not all(isinstance(text, str) for text in stops):
        raise RedrafterError(f"stop must be a string or several, got {stop!r}")
    return StopStrings(stops)


def summary(last: GenerationResponse) -> str:
    """What mlx-lm prints at the end, and the rounds if any drafted."""
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
    """Whether it can be written as UTF-8; other bytes that a shell passes on cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class PromptRuns(NamedTuple):
    """What decoding several prompts gave.

    Attributes:
        stats: of all prompts together.
        texts: the token ids that were made, for each prompt.
        seconds: from each prompt's first token to its last, added up.
    """

    stats: Stats
    texts: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """After the first token of each prompt; 0 when there is no more than that."""
        made = sum(len(text) - 1 for text in self.texts)
        return made / self.seconds if self.seconds else 0.0


def decode_prompts(
    model: nn.Module,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    options: Options,
    eos_token_ids: Collection[int] = (),
) -> PromptRuns:
    """Decodes every prompt, one after the other; `drafter` None decodes plainly."""
    stats, texts, seconds = Stats(), [], 0.0
    for prompt in prompts:
        text: list[int] = []
        started = time.perf_counter()
        for step in decode_tokens(prompt, model, drafter, options):
            text.append(step.token)
            if len(text) == 1:
                started = time.perf_counter()
            if step.token in eos_token_ids:
                break
        seconds += time.perf_counter() - started
        stats += step.stats
        texts.append(tuple(text))
    return PromptRuns(stats, tuple(texts), seconds)


def explain_useless(drafter: Drafter, rounds: int) -> str:
    """What may be wrong with a drafter that has guessed nothing right in so many rounds."""
    given, other = ("before", "after") if drafter.args.before_norm else ("after", "before")
    return (
        f"the drafter has guessed no token right in {rounds} rounds. Is it trained for this model, and are its weights "
        f"sound in this dtype? It was given the hidden state {given} the final norm: if it was trained on the one "
        f"{other} it, its config.json must say hidden_state {other}_norm"
    )


class _CallableModule(ModuleType):
    """Importing `mlx_redrafter.generate` puts this module in place of the package's function `generate`."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return generate(*args, **kwargs)


__signature__ = inspect.signature(generate)
sys.modules[__name__].__class__ = _CallableModule
__signature__ = inspect.signature(generate)  # of the module as a function
