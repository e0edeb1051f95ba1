"""One text: opened by its recipe, decoded token by token, and ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence

import mlx.core as mx

from ..engine.decode import Decoder, decode_round, on_stream
from ..engine.grammar import Grammar
from ..engine.output import DecodedToken, Output
from ..engine.round import Round, Rounds, TokenChooser
from ..engine.source import Source
from ..measuring.pair import Pair
from ..target.kv_cache import Cache
from ..target.request_checks import check_prompt, check_tokens
from ..target.target import Target
from .options import Options
from .recipe import Recipe, resolve_recipe


def open_generation(
    pair: Pair,
    prompt: Sequence[int] | mx.array,
    options: Options,
    source: Source | None = None,
    *,
    end_tokens: Container[int] = (),
    output: Output | None = None,
    grammar: Grammar | None = None,
    may_run_ahead: Callable[[], bool] | None = None,
    piece_ends: Sequence[int] = (),
    is_joint: bool = False,
) -> Generation:
    """The generation after `prompt`.

    Args:
        prompt: (T,) token ids, T >= 1.
        source: from `Pair.open_source`, possibly after earlier turns of this text; None decodes
            without the drafter.
        end_tokens: end-of-text tokens.
        output: what was generated after earlier prompts of the same text; replaces `max_tokens` and
            `end_tokens`.
        grammar: constrains the text; it has already taken the answer's tokens so far.
        may_run_ahead, piece_ends: see `Decoder`.
        is_joint: whether `next_rounds` decodes it; `Pair.explain_separate` says whether it can.

    Raises:
        RedrafterError: a token is not in the vocabulary, or see `resolve_recipe`.
    """
    tokens = check_tokens(check_prompt(prompt), pair.vocab_size)
    if options.history:
        check_tokens(check_prompt(options.history, "history"), pair.vocab_size)
    recipe = resolve_recipe(pair, options, source, grammar, is_joint=is_joint)
    options = recipe.options
    with on_stream():
        target = Target(
            pair.model,
            recipe.cache,
            options.quantization,
            capture=[name for each in recipe.sources for name in each.capture],
            row_counts=recipe.row_counts,
            few_rows=recipe.few_rows,
            rolls_back=recipe.rolls_back,
        )
    target.length = len(options.history) or target.length
    decoder = Decoder(
        target,
        TokenChooser(recipe.sampler, tuple(options.logits_processors or ()), grammar),
        recipe.planner,
        recipe.sources,
        history=options.history,
        prefill_step_size=options.prefill_step_size,
        max_kv_size=options.max_kv_size,
        on_drafter_failure=options.on_drafter_failure,
        may_run_ahead=may_run_ahead,
        piece_ends=piece_ends,
    )
    start = decoder.prefill if options.max_tokens == 0 else decoder.decode
    rounds = start(tokens, options.prompt_progress_callback or (lambda done, total: None))
    output = output or Output(options.max_tokens, end_tokens)
    return Generation(decoder, rounds, output, recipe, n_prompt=len(tokens))


class Generation(Iterator[DecodedToken]):
    """The tokens of one text, until it ends. Close it, or iterate to the end.

    Iterate over the tokens, or call `next_round` again and again, not both.

    Args:
        decoder, rounds: of the text.
        output: of the text; the rounds' tokens are added to it.
        recipe: of the text. If its options have a prompt cache, that holds the prompt and every
            token taken, the last one included, when the iteration ends or is closed. After an
            exception it does not.
        n_prompt: how many tokens the prompt has.

    Attributes:
        output: the generated tokens, statistics, and why the text ended.
        recipe: as given.
        has_begun: whether the prompt is processed and a token was decoded.
    """

    def __init__(
        self, decoder: Decoder, rounds: Rounds, output: Output, recipe: Recipe, *, n_prompt: int
    ) -> None:
        self._decoder = decoder
        self._rounds = rounds
        self._keeps_cache = recipe.options.prompt_cache is not None
        self._length_taken = decoder.target.length + n_prompt
        self._last_taken: int | None = None
        self._following: deque[DecodedToken] = deque()  # of the last round
        self._group: list[Generation] = []
        self.output = output
        self.recipe = recipe
        self.has_begun = False

    @property
    def cache(self) -> Cache:
        """The prompt cache, which is in use until `finish`."""
        return self._decoder.target.cache

    @property
    def length(self) -> int:
        """How many tokens of the text the prompt cache holds."""
        return self._decoder.target.length

    def __next__(self) -> DecodedToken:
        while not self._following:
            try:
                if self._group and self.output.tokens and not self.output.finish_reason:
                    self._decode_group()
                    continue
                decoded = self.next_round()
            except BaseException:
                for each in (self, *self._group):
                    each._keeps_cache = False  # its contents are undefined
                raise
            if decoded is None:
                self.close()
                raise StopIteration
            self._following.extend(self.output.list_last_tokens() if decoded.tokens else ())

        following = self._following.popleft()
        self._length_taken += 1
        self._last_taken = following.token
        return following

    def join(self, group: list[Generation]) -> None:
        """Adds this text to a group, until it is closed.

        All of them are opened with `is_joint`. When one of them needs a token after its first, a
        round of all is decoded.
        """
        self._group = group
        group.append(self)

    def _decode_group(self) -> None:
        rounds = next_rounds(self._group)
        for each, decoded in zip(self._group, rounds, strict=True):
            if isinstance(decoded, Exception):
                raise decoded
            each._following.extend(each.output.list_last_tokens())

    def next_round(self) -> Round | None:
        """Decodes a round, or a piece of the prompt, which is an empty round; None at the end."""
        if self.output.finish_reason is not None:
            return None
        decoded = next(self._rounds, None)
        if decoded is None or not decoded.tokens:
            return decoded
        return self._add(decoded)

    def _add(self, decoded: Round) -> Round:
        """Adds a round to the output, and returns it up to the end of the text."""
        self.has_begun = True
        decoded = self.output.add(decoded)
        on_round = self.recipe.options.on_round
        if on_round is not None and decoded.tree is not None:
            on_round(decoded.tree, list(decoded.path), decoded.tokens)
        return decoded

    def finish(self, length: int, last_token: int) -> None:
        """Makes cache and drafter hold exactly `length` tokens of the text.

        Args:
            last_token: the last of them.
        """
        with on_stream():
            self._decoder.finish(length, last_token)

    def close(self) -> None:
        """Ends decoding. It also ends the planner's observation of the text."""
        if self in self._group:
            self._group.remove(self)
        try:
            if self._keeps_cache and self._last_taken is not None:
                self._keeps_cache = False
                self.finish(self._length_taken, self._last_taken)
        finally:
            self._rounds.close()


def next_rounds(generations: Sequence[Generation]) -> list[Round | Exception]:
    """Decodes a round of several texts of one model in one forward, see `decode_round`.

    Args:
        generations: each has begun, and has not ended.

    Returns:
        For each its round, or the error that ended it: its cache is then undefined.
    """
    decoded = decode_round([each._decoder for each in generations])
    results: list[Round | Exception] = []
    for generation, own in zip(generations, decoded, strict=True):
        try:
            results.append(own if isinstance(own, Exception) else generation._add(own))
        except Exception as error:  # of `on_round`
            results.append(error)
    return results
