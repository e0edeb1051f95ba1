"""All decoding options with type, default, range and help.

Flags, signatures and checks derive from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ..engine.output import OnRound
from ..engine.plan import AUTO, DRAFT_DEPTH, MAX_DRAFT_DEPTH, MAX_NODES, OFF, Plan, make_plan
from ..engine.round import Processor
from ..engine.sampling import PositionSampler, Sampler, make_sampler
from ..errors import RedrafterError
from ..target.kv_cache import Cache
from ..target.target import MIN_RING_SIZE, KVQuantization

PLAN_OPTIONS = ("plan", "beam_width", "draft_depth", "tree_size")
"""The options that set what a round drafts."""

SAMPLER_OPTIONS = ("temp", "top_p", "min_p", "top_k", "xtc_probability")
"""The options that a caller's own sampler replaces."""

CACHE_OPTIONS = ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
"""The options that set how a prompt cache is made."""


class OptionFlag(NamedTuple):
    """An option that is also a command-line flag."""

    name: str
    kind: type
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] | None = None


def _flag(kind: type, default: Any, text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text, **limits})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `generate_step`, `stream_generate` and `generate`, named as in mlx-lm.

    Flags are described by their help; these options are not flags:

    Attributes:
        xtc_special_tokens: token ids that XTC never removes; None for the newline and the
            end-of-text tokens.
        sampler: an mlx-lm sampler instead of `temp`, called with each node's (1, V)
            log-probabilities. Exact in distribution if it is a function of them.
        logits_processors: mlx-lm processors, each a function of (history, logits), called for every
            node, including rejected ones. Trees are then not pruned.
        prompt_cache: from mlx-lm's `make_prompt_cache`; afterwards it holds the prompt and every
            yielded token, also if the generator is closed early. After an exception, including
            `KeyboardInterrupt`, its contents are undefined.
        history: the token ids in `prompt_cache`. Logits processors need them, and so do caches that
            do not count tokens: without `history`, sampling noise after such a cache starts at
            position 0.
        prompt_progress_callback: called with (prompt tokens processed, prompt tokens in all).
        on_drafter_failure: called once with an exception that the drafter raised, while decoding or
            being measured. Decoding continues without the drafter and loses no token. If None, or
            with several ranks, the exception is raised instead.
        on_round: called with each round that drafted, before its first token is yielded; see
            `OnRound`.

    Raises:
        RedrafterError: a value has the wrong type or is out of range.
    """

    max_tokens: int = _flag(int, 256, "most tokens to generate; -1 for no limit")
    temp: float = _flag(float, 0.0, "sampling temperature; 0 is greedy decoding", minimum=0)
    top_p: float = _flag(float, 1.0, "sampling top-p; 1 keeps all tokens", minimum=0, maximum=1)
    min_p: float = _flag(float, 0.0, "sampling min-p; 0 keeps all tokens", minimum=0, maximum=1)
    min_tokens_to_keep: int = _flag(int, 1, "number of tokens that min-p always keeps", minimum=1)
    top_k: int = _flag(int, 0, "sampling top-k; 0 keeps all tokens", minimum=0)
    xtc_probability: float = _flag(
        float, 0.0, "probability of applying XTC to a token", minimum=0, maximum=1
    )
    xtc_threshold: float = _flag(
        float, 0.1, "least probability of a token that XTC removes", minimum=0, maximum=0.5
    )
    seed: int | None = _flag(
        int, None, "equal seeds give equal text, with and without a drafter (default: drawn)"
    )
    plan: str | Sequence[int] = _flag(
        str,
        AUTO,
        "auto measures this machine once and plans every round; off decodes without drafts",
        choices=(AUTO, OFF),
    )
    beam_width: int | None = _flag(
        int,
        None,
        "W, continuations drafted per round (default: 1 if K or N is given)",
        minimum=1,
    )
    draft_depth: int | None = _flag(
        int,
        None,
        f"K, tokens per continuation (default: the drafter's own, or {DRAFT_DEPTH})",
        minimum=1,
        maximum=MAX_DRAFT_DEPTH,
    )
    tree_size: int | None = _flag(
        int,
        None,
        "N, nodes that the target verifies, including the root (default: all)",
    )
    context: bool | None = _flag(
        bool,
        None,
        "draft what followed the same tokens earlier in the text (default: with --plan auto)",
    )
    exact: bool | None = _flag(
        bool,
        None,
        "compute all rows after the prompt alike, bit for bit, so that drafts cannot change the "
        "text even at ties (default: where that costs nothing)",
    )
    few_rows: str = _flag(
        str,
        AUTO,
        "auto computes quantized matmuls of 2 to 8 rows with a kernel of our own where it has the "
        "bits of one row and is faster, on Metal; off leaves them to MLX",
        choices=(AUTO, OFF),
    )
    prefill_step_size: int = _flag(int, 2048, "prompt tokens per forward", minimum=1)
    max_kv_size: int | None = _flag(
        int,
        None,
        "most tokens in the KV cache, the first 4 always included; a warning if the model cannot "
        "have such a cache",
        minimum=MIN_RING_SIZE,
    )
    kv_bits: int | None = _flag(
        int,
        None,
        "quantize the KV cache to this many bits (default: not quantized)",
        choices=(2, 3, 4, 5, 6, 8),
    )
    kv_group_size: int = _flag(
        int, 64, "group size of the quantized KV cache", choices=(32, 64, 128)
    )
    quantized_kv_start: int = _flag(
        int, 5000, "context length from which the KV cache is quantized", minimum=0
    )
    xtc_special_tokens: Sequence[int] | None = None
    sampler: Callable[[mx.array], mx.array] | Sampler | None = None
    logits_processors: Sequence[Processor] | None = None
    prompt_cache: Cache | None = None
    history: Sequence[int] = ()
    prompt_progress_callback: Callable[[int, int], None] | None = None
    on_drafter_failure: Callable[[Exception], None] | None = None
    on_round: OnRound | None = None

    def __post_init__(self) -> None:
        for name in FLAGS:
            if name != "plan":  # which may be a tuple
                object.__setattr__(self, name, check_option(name, getattr(self, name)))
        if self.max_tokens < -1:
            self.require_tokens()
        if self.temp and not 1e-30 <= self.temp <= 1e30:  # else 1 / temp is not a float32
            raise RedrafterError(f"temp must be 0, or from 1e-30 to 1e+30, got {self.temp}")
        if self.sampler is not None:
            for name in SAMPLER_OPTIONS:
                value = getattr(self, name)
                if value not in (0, getattr(Options, name)):
                    raise RedrafterError(
                        f"give either a sampler or {name}, got both ({name}={value})"
                    )
        if not isinstance(self.sampler, Sampler):
            check_function("sampler", self.sampler)
        for name in ("prompt_progress_callback", "on_drafter_failure", "on_round"):
            check_function(name, getattr(self, name))
        for name in ("xtc_special_tokens", "logits_processors", "prompt_cache", "history"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
                raise RedrafterError(f"{name} must be a list, got {value!r:.100}")
        if not all(map(callable, self.logits_processors or ())):
            got = self.logits_processors
            raise RedrafterError(f"logits_processors must be functions, got {got!r:.100}")
        object.__setattr__(self, "history", tuple(self.history))

        shape = self.shape
        if shape is None and self.context:
            raise RedrafterError("give either plan 'off' or context, got both")
        if isinstance(shape, tuple):  # `resolve_plan` applies the drafter's limits
            width, depth, size = shape
            if depth is None:
                most = MAX_NODES // max(1, width)
                depth = min(MAX_DRAFT_DEPTH, max(1, most))
            make_plan(width, depth, size)

    def require_tokens(self) -> Options:
        """These options, if they ask for tokens.

        Raises:
            RedrafterError: they ask for none.
        """
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise RedrafterError(
                f"max_tokens must be -1 (no limit) or at least 1, got {self.max_tokens}"
            )
        return self

    def make_sampler(self, seed: int) -> Sampler:
        """The sampler of these options; `seed` is used if the options have none."""
        given: dict[str, Any] = {"seed": seed}
        for name in ("sampler", *inspect.signature(PositionSampler).parameters):
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        return make_sampler(**given)

    @property
    def quantization(self) -> KVQuantization:
        """The quantization of the KV cache."""
        return KVQuantization(self.kv_bits, self.kv_group_size, self.quantized_kv_start)

    @cached_property
    def shape(self) -> tuple[int, int | None, int | None] | Literal["auto"] | None:
        """(W, K or None, N or None) of a fixed plan, "auto", or None for plain decoding.

        Raises:
            RedrafterError: the plan is malformed, or given twice.
        """
        plan: Any = self.plan.shape if isinstance(self.plan, Plan) else self.plan
        given = [name for name in PLAN_OPTIONS[1:] if getattr(self, name) is not None]
        if isinstance(plan, str) and plan == AUTO:
            width = 1 if self.beam_width is None else self.beam_width
            return (width, self.draft_depth, self.tree_size) if given else AUTO
        if given:
            name = given[0]
            raise RedrafterError(
                f"give either plan or {name}, got plan {plan!r} and {name} {getattr(self, name)}"
            )
        if isinstance(plan, str) and plan == OFF:
            return None

        is_sequence = isinstance(plan, Sequence) and len(plan) in (2, 3)
        if not is_sequence or not all(isinstance(number, Integral) for number in plan):
            raise RedrafterError(f"plan must be 'auto', 'off', (W, K) or (W, K, N), got {plan!r}")
        width, depth, *size = map(int, plan)
        return width, depth, size[0] if size else None

    def resolve_plan(self, drafter: Any) -> Plan | Literal["auto"] | None:
        """The plan of every round, "auto", or None for plain decoding.

        With logits processors no node is pruned, as the depth of each node must be known in
        advance.

        Raises:
            RedrafterError: the plan is deeper than the drafter drafts, or larger than `make_plan`
                allows.
        """
        shape = self.shape
        if shape is None or drafter is None:
            return None
        if shape == AUTO:
            return AUTO

        width, depth, size = shape
        if depth is None:
            depth = get_default_depth(drafter)
        most = drafter.args.max_depth
        if most is not None and depth > most:
            raise RedrafterError(
                f"draft_depth must be from 1 to {most} with this drafter, got {depth}"
            )
        plan = make_plan(width, depth, size, drafter.args.vocab_size)
        if self.logits_processors and width > 1:
            return Plan(width, depth, 1 + width * depth)
        return plan


def get_default_depth(drafter: Any) -> int:
    """A drafter's default draft depth K."""
    args = drafter.args
    return min(args.draft_depth or DRAFT_DEPTH, args.max_depth or MAX_DRAFT_DEPTH)


OPTION_FLAGS: tuple[OptionFlag, ...] = tuple(
    OptionFlag(each.name, default=each.default, **each.metadata)
    for each in fields(Options)
    if each.metadata
)
"""The options that are flags, in declaration order."""

FLAGS = {flag.name: flag for flag in OPTION_FLAGS}
OPTION_NAMES = frozenset(each.name for each in fields(Options))


def check_names(caller: str, given: Iterable[str], known: Container[str] = OPTION_NAMES) -> None:
    """Refuses an unknown keyword of a public function, in Python's words."""
    for name in given:
        if name not in known:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


def check_function(name: str, value: Any) -> None:
    """Raises `RedrafterError` for an option that is neither None nor can be called."""
    if value is not None and not callable(value):
        raise RedrafterError(f"{name} must be a function, got {value!r}")


def check_number(name: str, value: Any, kind: type) -> None:
    """Raises `RedrafterError` for what is not of a kind of numbers, int or float; NumPy's are."""
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        expected = "an integer" if kind is int else "a number"
        raise RedrafterError(f"{name} must be {expected}, got {value!r:.100}")


def check_option(name: str, value: Any) -> Any:
    """The checked value of a flag, as a Python number: mlx-lm's filters do not accept NumPy's.

    Raises:
        RedrafterError: it is of another type, or out of range.
    """
    flag = FLAGS[name]
    if value is None and flag.default is None:
        return None
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise RedrafterError(f"{name} must be true or false, got {value!r}")
        return value
    if flag.kind is str:
        if value not in (flag.choices or ()):
            raise RedrafterError(f"{name} must be one of {format_choices(flag)}, got {value!r}")
        return value
    check_number(name, value, flag.kind)
    low = -inf if flag.minimum is None else flag.minimum
    high = inf if flag.maximum is None else flag.maximum
    try:
        number = flag.kind(value)
    except OverflowError:  # an integer too large for a float
        number = inf
    if not low <= number <= high:
        bounds = f"at least {flag.minimum}"
        if flag.maximum is not None:
            bounds = f"from {flag.minimum} to {flag.maximum}"
        raise RedrafterError(f"{name} must be {bounds}, got {value!r}")
    if flag.choices is not None and value not in flag.choices:
        raise RedrafterError(f"{name} must be one of {format_choices(flag)}, got {value}")
    return number


def format_choices(flag: OptionFlag) -> str:
    """The values of a flag, with commas."""
    return ", ".join(map(str, flag.choices or ()))
