"""A complete training run: prompts, answers, hidden states, training, and the finished directory."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..atomic_files import lock_file
from ..checkpoints import (
    find_not_finite,
    format_dtype,
    is_quantized,
    list_weights,
    load_drafter,
    load_target,
    save_drafter,
    strip_folders,
)
from ..demo.sources import make_training_prompts
from ..drafters import TRAINABLE
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableArgs, TrainableDrafter
from ..engine.model_checks import check_draftable
from ..engine.model_parts import find_compute_dtype, find_model_sizes, find_parts
from ..engine.stats import Stats
from ..errors import RedrafterError
from ..options import Options
from ..planning.sizing import choose_size, count_weights
from .data import (
    AnswerFile,
    Text,
    digest,
    encode_prompts,
    find_most_frequent,
    list_ids,
    load_texts,
    make_batches,
    read_prompts,
    select_prompts,
    split_texts,
)
from .estimate import estimate_run
from .evaluation import (
    COMPARED_PROMPTS,
    COMPARED_TOKENS,
    ShapeResult,
    add_results,
    compare_shapes,
    count_texts,
    find_standard_error,
    format_error,
    format_table,
    make_prompts,
    measure_guesses,
)
from .hidden_states import add_hidden_states, make_row_dtype
from .record import Files, Record
from .report import describe, make_command, write_report
from .settings import TrainingArgs
from .targets import initialize_drafter
from .trainer import train_drafter

INTERRUPTED, REFUSED = 130, 3
"""Exit statuses: after Ctrl-C, and if no drafter was written because it is not better than the initial one."""

MIN_IMPROVEMENT = 1.01
"""A retrained drafter is written if its tokens per round are at least this many times the initial drafter's."""

RETRAINING_RATE_FACTOR = 0.05
"""The learning rate for a trained drafter, relative to that for a new one."""

DEMO_PROMPTS = 1024
"""Pieces of the standard library that the demo's target continues."""

REPORT_EVERY, VALIDATE_EVERY = 10, 200
"""Iterations between entries of the training loss, and between validations."""

Say = Callable[[str], None]


@dataclass
class Run:
    """The objects that a run works with.

    Attributes:
        say: prints a message for the user.
        embedding: the target's.
        training, validation: texts that the target has read.
        deadline: the `time.perf_counter()` at which training stops.
    """

    args: TrainingArgs
    files: Files
    record: Record
    say: Say
    embedding: nn.Module
    drafter: TrainableDrafter
    training: list[Text]
    validation: list[Text]
    deadline: float


def train(args: TrainingArgs, *, resume: bool = False, dry_run: bool = False, say: Say = lambda text: None) -> int:
    """Trains a drafter into the directory `args.output`.

    Args:
        resume: continue from the last checkpoint in that directory; the result is bit-identical.
        dry_run: only estimate the run; write nothing.
        say: called with messages for the user.

    Returns:
        The exit status: 0; 1 if a token differs from plain decoding; `INTERRUPTED` after Ctrl-C, when the run can be
        resumed; `REFUSED` if no drafter was written.
    """
    seconds = math.inf if args.minutes is None else 60 * args.minutes
    end = time.perf_counter() + seconds
    args.check_run()
    files = Files(args.output)
    record = files.read_record(args) if resume else files.start_record(args)
    model, tokenizer = load_target(args, args.model)
    check_draftable(model, tree=False)
    start = None if args.drafter is None else load_start(args.drafter, model)
    args = complete_settings(args, model, start)
    sizes = choose_sizes(args, record, model, say) if start is None else start.args
    record.args = sizes.to_dict()
    say(f"drafter: {describe(sizes)}, {count_weights(sizes) / 1e6:.2f} M parameters")
    inputs = find_inputs(args, files, tokenizer, say)
    n_tokens, missing = count_tokens(args, inputs)
    estimate = estimate_run(model, args, missing=missing, unread=0 if files.states.exists() else n_tokens)
    size = make_row_dtype(sizes.hidden_size).itemsize * n_tokens
    say(f"expected (minutes:seconds): {estimate.describe()}, besides training; {size / 1e6:.0f} MB of hidden states")
    if sum(estimate) > seconds:
        raise RedrafterError(f"expected more --minutes: of {args.minutes:g} no time is left to train")
    if dry_run:
        return 0
    with lock_file(files.lock):
        try:
            record.save(files.record)
            training, validation = read_texts(args, files, record, inputs, model, tokenizer, say)
            drafter = make_new_drafter(args, model, sizes, training, say) if start is None else start
            embedding, deadline = find_parts(model).embedding, end - estimate.comparing
            del model  # not needed until the end
            mx.clear_cache()
            return execute(Run(args, files, record, say, embedding, drafter, training, validation, deadline))
        except KeyboardInterrupt:
            say("stopped; the same command with --resume continues")
            return INTERRUPTED


def load_start(name: str, model: nn.Module) -> TrainableDrafter:
    """Loads the drafter to train further."""
    drafter = load_drafter(name, model)
    if not (isinstance(drafter, TrainableDrafter) and isinstance(drafter.args, TrainableArgs)):
        why: str | None = f"expected one of {', '.join(TRAINABLE)}, got {drafter.args.model_type}"
    else:
        why = "expected weights that are not quantized" if is_quantized(drafter) else drafter.args.explain_fixed()
    if why is not None:
        raise RedrafterError(f"cannot continue training {name}: {why}")
    return cast(TrainableDrafter, drafter)


def complete_settings(args: TrainingArgs, model: nn.Module, start: TrainableDrafter | None) -> TrainingArgs:
    """The settings with the target's dtype, or with dtype, depth and a lower rate for a drafter to train further."""
    if start is None:
        return replace(args, dtype=args.dtype or format_dtype(find_compute_dtype(model)))
    depth = min(args.draft_depth, start.args.max_depth or args.draft_depth)
    dtype, rate = args.dtype or format_dtype(start.dtype), RETRAINING_RATE_FACTOR * args.learning_rate
    return replace(args, draft_depth=depth, dtype=dtype, learning_rate=rate)


def choose_sizes(args: TrainingArgs, record: Record, model: nn.Module, say: Say) -> DrafterArgs:
    """The drafter's config: the recorded one, or sizes from the settings, or chosen by measuring."""
    if record.args is not None:
        return args.kind.from_dict(record.args)
    if args.exit_dim is None and args.draft_vocab_size is None:
        choice = choose_size(model, find_dtype(args), args.kind, args.draft_depth)
        say(f"size: {choice.reason}")
        return choice.args
    hidden_size, vocab_size = find_model_sizes(model)
    count = args.draft_vocab_size
    if count is not None and count > vocab_size:
        raise RedrafterError(f"draft_vocab_size must be at most the target's vocabulary {vocab_size}, got {count}")
    count = None if count == vocab_size else count
    own = {} if args.exit_dim is None else {"exit_dim": args.exit_dim}
    return args.kind.for_training(hidden_size, vocab_size, depth=args.draft_depth, draft_vocab_size=count, **own)


def find_dtype(args: TrainingArgs) -> mx.Dtype:
    """The dtype of the finished drafter."""
    return cast(mx.Dtype, getattr(mx, str(args.dtype)))


Inputs = AnswerFile | tuple[list[Text], list[Text]]
"""The answers to prompts, or given (training, validation) texts."""


def find_inputs(args: TrainingArgs, files: Files, tokenizer: Any, say: Say) -> Inputs:
    """The texts of `--data`, or the answers to prompts, which may not be generated yet."""
    if args.data:
        return split_texts(args, *load_texts(args.data, tokenizer, mask_prompt=args.mask_prompt), say)
    prompts = read_prompts(args.prompts) if args.prompts else list(make_training_prompts(DEMO_PROMPTS, args.seed))
    return AnswerFile(files.answers, args, select_prompts(args, encode_prompts(prompts, tokenizer), say))


def count_tokens(args: TrainingArgs, inputs: Inputs) -> tuple[int, int]:
    """(tokens of all texts, answers that are not generated yet, which are counted with the maximum length)."""
    if isinstance(inputs, AnswerFile):
        missing = len(inputs.prompts) - len(inputs.read())
        return sum(len(prompt) + args.max_tokens for prompt in inputs.prompts), missing
    return sum(len(text.ids) for part in inputs for text in part), 0


def read_texts(
    args: TrainingArgs, files: Files, record: Record, inputs: Inputs, model: nn.Module, tokenizer: Any, say: Say
) -> tuple[list[Text], list[Text]]:
    """(training, validation) texts: generates missing answers, and lets the target read all texts."""
    if isinstance(inputs, AnswerFile):
        inputs = split_texts(args, inputs.complete(model, tokenizer), [], say)
    training, validation = inputs
    texts = digest(list_ids([*training, *validation]))
    if record.texts not in (None, texts):
        where = args.data or args.prompts or "the demo"
        raise RedrafterError(f"cannot resume the run in {files.directory}: the texts of {where} have changed")
    record.texts = texts
    read_by = {"model": args.model, "adapter_path": args.adapter_path}
    read = add_hidden_states(model, [*training, *validation], files.states, read_by)
    return read[: len(training)], read[len(training) :]


def make_new_drafter(
    args: TrainingArgs, model: nn.Module, sizes: DrafterArgs, texts: Sequence[Text], say: Say
) -> TrainableDrafter:
    """An untrained drafter. A draft vocabulary has the most frequent tokens of the texts."""
    mx.random.seed(args.seed)
    count, ids = sizes.draft_vocab_size, None
    if count is not None:
        ids = find_most_frequent(texts, count, sizes.vocab_size)
        learned = np.concatenate([text.ids[text.offset :] for text in texts])
        say(f"draft vocabulary: {count} tokens, which are {np.isin(learned, ids).mean():.2%} of those to learn")
    drafter = initialize_drafter(model, sizes, ids)
    mx.eval(drafter.parameters())
    return drafter


def execute(run: Run) -> int:
    """Trains, compares and writes the drafter; returns the exit status."""
    record = run.record
    run.drafter.set_dtype(mx.float32)
    if run.args.drafter is not None and record.before is None:
        record.before = count_all(run)
    if record.iters is None:
        record.iters = plan_iters(run)
    run.args = replace(run.args, iters=record.iters)
    record.save(run.files.record)
    with catch_interrupt() as interrupted:
        done = fit_drafter(run, interrupted)
    if done < record.iters:
        run.say(f"stopped at iteration {done} of {record.iters}; the same command with --resume continues")
        return INTERRUPTED
    return finish(run) if is_better(run) else REFUSED


def plan_iters(run: Run) -> int:
    """The number of iterations that fit into the time left. Times the first ones, and then undoes them."""
    args = run.args
    if args.minutes is None:
        return args.iters
    weights, ends = run.drafter.parameters(), list[float]()

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        ends.append(time.perf_counter())
        return False

    batches = make_batches(run.training, args.batch_size, args.seed)
    train_drafter(run.embedding, run.drafter, batches, replace(args, iters=3), on_iteration=on_iteration)
    run.drafter.update(weights)
    iteration = (ends[-1] - ends[0]) / 2
    # A batch of held-out texts costs at most an iteration; some texts are counted again.
    validation = (len(run.validation) + COMPARED_PROMPTS) / args.batch_size * iteration
    left = run.deadline - time.perf_counter() - validation
    fitting = min(args.iters, int(left / (iteration + validation / VALIDATE_EVERY)))
    if fitting < 1:
        raise RedrafterError(f"of {args.minutes:g} minutes no time is left to train: --resume with more continues")
    run.say(f"{fitting} iterations of {iteration:.2g} s fit into {args.minutes:g} minutes")
    return fitting


def fit_drafter(run: Run, interrupted: threading.Event) -> int:
    """Trains with reports and validations; returns the number of iterations done."""
    args, record = run.args, run.record

    def on_iteration(done: int, shown: dict[str, float]) -> bool:
        record.drop_after(done - 1)  # entries after the checkpoint are recorded again
        is_late = time.perf_counter() > run.deadline
        if is_report := done % REPORT_EVERY == 0:
            record.reports.append({"iteration": done, **shown})
        if is_validation := done % VALIDATE_EVERY == 0 or done == args.iters or is_late:
            record.validations.append(validate(run, done))
        if is_late:
            record.iters = done
        if is_report or is_validation:
            record.save(run.files.record)
        return interrupted.is_set() or is_late

    batches, checkpoint = make_batches(run.training, args.batch_size, args.seed), run.files.checkpoint
    return train_drafter(run.embedding, run.drafter, batches, args, checkpoint=checkpoint, on_iteration=on_iteration)


def validate(run: Run, done: int) -> dict[str, Any]:
    """Runs a validation; returns its entry for the record."""
    args = run.args
    loss, acceptance = measure_guesses(run.embedding, run.drafter, run.validation, args)
    each = count_texts(run.embedding, run.drafter, run.validation[:COMPARED_PROMPTS], args)
    tokens = sum(each, Stats()).tokens_per_round
    per_round = format_error(tokens, find_standard_error(one.tokens_per_round for one in each))
    first = " ".join(f"{shares[0]:.2f}" for shares in acceptance)
    run.say(
        f"iteration {done}: validation loss {loss:.3f}, right at depth 1, 2, ...: {first}; "
        f"{per_round} tokens per round at 1 x {args.draft_depth} on held-out texts: {len(each)}"
    )
    if tokens == 1 and done >= args.iters // 2:
        run.say("warning: no drafted token was accepted: too few iterations, or a learning rate too low or too high")
    return {"iteration": done, "loss": loss, "acceptance": acceptance, "tokens_per_round": tokens}


def count_all(run: Run) -> float:
    """The drafter's tokens per round on all held-out texts."""
    return sum(count_texts(run.embedding, run.drafter, run.validation, run.args), Stats()).tokens_per_round


def is_better(run: Run) -> bool:
    """Whether the drafter is to be written: it is new, or makes `MIN_IMPROVEMENT` times as many tokens per round."""
    before = run.record.before
    if before is None:
        return True
    after, least = count_all(run), MIN_IMPROVEMENT * before
    run.say(
        f"{'' if after >= least else 'not written: '}the new drafter makes {after:.3f} tokens per round on "
        f"{len(run.validation)} held-out texts, {before:.3f} before, {least:.3f} required"
    )
    return after >= least


def finish(run: Run) -> int:
    """Writes and measures the finished drafter; returns the exit status."""
    args, record, drafter, place = run.args, run.record, run.drafter, run.files.directory
    dtype = find_dtype(args)
    drafter.set_dtype(dtype)
    if (name := find_not_finite(list_weights(drafter))) is not None:
        raise RedrafterError(f"{name} does not fit into {dtype}: give another --dtype")
    save_drafter(place, drafter)  # in case the comparison fails
    results = compare_drafter(run)
    acceptance = record.validations[-1]["acceptance"]
    drafter.args = add_results(drafter.args, args.model and strip_folders(args.model), acceptance, results)
    save_drafter(place, drafter)
    if note := write_report(args, record, drafter.args, place, results):
        run.say(note)
    run.say(format_table(results))
    if (ratio := max(result.against_plain or math.inf for result in results)) <= 1:
        run.say(
            f"note: no shape is faster than plain decoding here, the best one has {ratio:.2f} times its speed: "
            "train longer, or train a smaller drafter"
        )
    run.say(f"the drafter is in {place}; to use it:\n{make_command(args, str(place))}")
    if not (same := all(result.same_tokens for result in results)):
        run.say("a token differs from plain decoding: docs/exactness.md explains how to tell a tie from an error")
    return 0 if same else 1


def compare_drafter(run: Run) -> list[ShapeResult]:
    """Decodes held-out prompts plainly, and with chains of every depth and a tree of the drafter."""
    model, tokenizer = load_target(run.args, run.args.model)
    prompts = make_prompts(run.validation, COMPARED_PROMPTS)
    run.say(f"comparing beam shapes with plain decoding: {len(prompts)} held-out prompts, temperature {run.args.temp}")
    options = Options(max_tokens=COMPARED_TOKENS, temp=run.args.temp, seed=run.args.seed)
    depth = run.args.draft_depth
    shapes = [(1, k) for k in range(1, depth + 1)] + [(4, depth)]
    return compare_shapes(model, run.drafter, prompts, shapes, options, set(tokenizer.eos_token_ids))


@contextmanager
def catch_interrupt() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event for the training loop; the second one raises KeyboardInterrupt."""
    event = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        print("\nstopping after this iteration; press Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
