"""One text: opened by its recipe, decoded token by token, and ended."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import mlx.core as mx

from ..engine.decode import Decoder, decode_round, on_stream
from ..engine.grammar import Grammar
from ..engine.output import DecodedToken, Output
from ..engine.round import Round, TokenChooser
from ..engine.source import Source
from ..measuring.pair import Pair
from ..target import kv_cache
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
    mx.eval(tokens)  # another thread may read it
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
        tokens,
        target,
        TokenChooser(recipe.sampler, tuple(options.logits_processors or ()), grammar),
        recipe.planner,
        recipe.sources,
        history=options.history,
        report=options.prompt_progress_callback or (lambda done, total: None),
        prefill_step_size=options.prefill_step_size,
        max_kv_size=options.max_kv_size,
        on_drafter_failure=options.on_drafter_failure,
        may_run_ahead=may_run_ahead,
        piece_ends=piece_ends,
    )
    keeps_first = kv_cache.keeps_first_rows(recipe.cache)
    has_limit = target.limit is not None
    is_whole = bool(options.exact or options.kv_bits) or keeps_first or has_limit
    output = output or Output(options.max_tokens, end_tokens)
    return Generation(decoder, output, recipe, reads_whole_pieces=is_whole)


class Generation(Iterator[DecodedToken]):
    """The tokens of one text, until it ends. Close it, or iterate to the end.

    Iterate over the tokens; or call `next_round` or `next_rounds` again and again, and take each
    round's tokens with `take_tokens` if the cache is to hold them.

    Args:
        decoder: of the text.
        output: of the text; the rounds' tokens are added to it.
        recipe: of the text. If its options have a prompt cache, that holds the prompt and every
            token taken, the last one included, when the iteration ends or is closed. After an
            exception it does not.
        reads_whole_pieces: whether its cache depends on where pieces of the prompt end.

    Attributes:
        output: the generated tokens, statistics, and why the text ended.
        recipe: as given.
    """

    def __init__(
        self, decoder: Decoder, output: Output, recipe: Recipe, *, reads_whole_pieces: bool
    ) -> None:
        self._decoder = decoder
        self._keeps_cache = recipe.options.prompt_cache is not None
        self._reads_whole_pieces = reads_whole_pieces
        self._length_taken = decoder.target.length + decoder.n_unread
        self._last_taken: int | None = None
        self._following: Iterator[DecodedToken] = iter(())  # of the last round
        self.output = output
        self.recipe = recipe

    @property
    def cache(self) -> Cache:
        """The prompt cache, which is in use until `finish`."""
        return self._decoder.target.cache

    @property
    def length(self) -> int:
        """How many tokens of the text the prompt cache holds."""
        return self._decoder.target.length

    def __next__(self) -> DecodedToken:
        while (following := next(self._following, None)) is None:
            decoded = self.next_round()
            if decoded is None:
                self.close()
                raise StopIteration
            if decoded.tokens:
                self._following = self.take_tokens()
        return following

    def take_tokens(self) -> Iterator[DecodedToken]:
        """Yields the tokens of the last round."""
        for each in self.output.list_last_tokens():
            self._length_taken += 1
            self._last_taken = each.token
            yield each

    def next_round(self) -> Round | None:
        """The next round, an empty one for a piece of the prompt; None at the end.

        Raises the error that ended the text.
        """
        if self.output.finish_reason is not None:
            return None
        (decoded,) = next_rounds([self])
        if isinstance(decoded, Exception):
            raise decoded
        return decoded

    @property
    def n_unread(self) -> int:
        """How many tokens of the prompt were not read yet."""
        return self._decoder.n_unread

    def finish(self, length: int, last_token: int) -> None:
        """Makes cache and drafter hold exactly `length` tokens of the text.

        Args:
            last_token: the last of them.
        """
        with on_stream():
            self._decoder.finish(length, last_token)

    def close(self) -> None:
        """Ends decoding. It also ends the planner's observation of the text."""
        is_taken = self._last_taken is not None or not (self.n_unread or self.output.tokens)
        try:
            if self._keeps_cache and is_taken:
                self._keeps_cache = False
                # Without a token, the cache ends with the prompt, which has been in a forward.
                self.finish(self._length_taken, self._last_taken or 0)
        finally:
            self._decoder.close()


def next_rounds(generations: Sequence[Generation]) -> list[Round | Exception]:
    """Decodes a round of several texts of one model in one forward, see `decode_round`.

    Args:
        generations: that have not ended.

    Returns:
        For each its round up to the end of the text; an empty one for a piece of the prompt; or the
        error that ended it: its cache is then undefined.
    """
    try:
        decoded = decode_round([each._decoder for each in generations])
    except BaseException:
        for each in generations:
            each._keeps_cache = False
        raise
    results: list[Round | Exception] = []
    for generation, own in zip(generations, decoded, strict=True):
        try:
            if not isinstance(own, Exception) and own.tokens:
                own = generation.output.add(own)
                on_round = generation.recipe.options.on_round
                if on_round is not None and own.tree is not None:
                    on_round(own.tree, list(own.path), own.tokens)
            results.append(own)
        except Exception as error:  # of `on_round`
            results.append(error)
        if isinstance(results[-1], Exception):
            generation._keeps_cache = False
    return results


def share_prompt_rows(generations: Iterable[Generation], n_rows: int) -> list[Generation]:
    """The texts of which the next round reads prompt tokens.

    They are the first one, with at most `n_rows` tokens, and those after it as long as there is
    room for all their tokens. Where the cache depends on where pieces end, the first one's piece
    has `prefill_step_size` tokens: with `exact`, `kv_bits`, rings that keep their first rows, or
    positions that depend on the length.

    Args:
        generations: those with tokens to read.
    """
    chosen: list[Generation] = []
    for each in generations:
        n_unread = max(1, each.n_unread - 1)  # the last one is a step of its own
        if chosen and n_unread > n_rows:
            break
        chosen.append(each)
        if not each._reads_whole_pieces:
            each._decoder.prefill_step_size = n_rows
        n_rows -= n_unread
    return chosen
