"""A complete training run in a given time: examples, training, and the finished directory."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..decoding.options import Options
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.stats import Stats
from ..errors import RedrafterError
from ..files import lock_file
from ..loading.checkpoints import format_dtype, load_fast_drafter, save_drafter, strip_folders
from ..loading.named_models import load_target
from ..measuring.pair import Findings, Pair
from ..measuring.sizing import choose_size, count_weights
from ..target.model_checks import check_draftable
from ..target.model_parts import get_compute_dtype, get_model_sizes, get_parts
from .answers import MAX_BATCH_SIZE
from .data import Example, list_most_frequent, make_batches
from .evaluation import (
    SpeedResult,
    compare_speed,
    count_rounds,
    cut_prompt,
    format_results,
    measure_guesses,
)
from .example_makers import HELD_OUT_EVERY, MAX_HELD_OUT, ExampleMaker, check_data, choose_maker
from .example_store import ExampleStore, get_folder_name
from .prompts import read_prompts
from .record import RunFiles, RunRecord, describe_drafter, make_command, open_run_record, write_card
from .schedule import (
    COMPARISON_SHARE,
    MAX_MAKING_SHARE,
    VISITS,
    Clock,
    ExampleTimes,
    Say,
    format_time,
    measure_decoding,
    measure_learning,
    measure_making,
)
from .settings import TrainingArgs
from .targets import initialize_drafter
from .trainer import load_checkpoint, train_drafter

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

MAX_VISITS = 30
"""How often a run learns each example at most."""

MIN_MEASURED = 16
"""The examples after which their own time counts, not the estimate."""

VALIDATIONS = 8
"""How often a drafter is validated and saved."""

MAX_COUNTED = 24
"""The held-out examples whose rounds are counted in a validation."""

MAX_COMPARED = 48
"""The prompts of the comparison at the end, if there is time."""

COMPARED_TOKENS = 64
"""The tokens that are decoded after each of these prompts."""

MIN_LEARNED = 1.2
"""The fewest tokens per round of a drafter that has learned something."""

ENOUGH_EXAMPLES = 1000
"""The examples that make a useful drafter, see docs/training.md."""


@dataclass
class Run:
    """What all steps of a run use."""

    args: TrainingArgs
    files: RunFiles
    record: RunRecord
    clock: Clock


class RunSchedule(NamedTuple):
    """What a run is going to do.

    Attributes:
        sizes: the drafter's config.
        store: the examples so far.
        known: how many it had before the run.
        maker: makes more of them.
        times: measured for its examples.
        visits: how often examples were learned already, summed over them.
        findings: what was measured about the target with a drafter of these sizes.
    """

    sizes: DrafterArgs
    store: ExampleStore
    known: int
    maker: ExampleMaker
    times: ExampleTimes
    visits: int
    findings: Findings


class Learner(NamedTuple):
    """A drafter with what it learns from.

    Attributes:
        embedding: the target's.
        training, held_out: examples that the target has read.
    """

    drafter: TrainableDrafter
    embedding: nn.Module
    training: list[Example]
    held_out: list[Example]


def run_training(
    args: TrainingArgs, *, resume: bool = False, dry_run: bool = False, say: Say = lambda text: None
) -> int:
    """Trains a drafter into the directory `args.output`.

    Args:
        resume: continue the run in that directory for `args.minutes` more.
        dry_run: only make the schedule; write nothing.
        say: called with messages for the user.

    Returns:
        The exit status: 0, or `INTERRUPTED` after Ctrl-C, when the run can be resumed.
    """
    args.check_run()
    files = RunFiles(args.output)
    record = open_run_record(files, args, resume=resume)
    if args.prompts:
        read_prompts(args.prompts)  # what is wrong with them is said before the model is loaded
    if args.data:
        check_data(args.data)
    clock = Clock(60 * args.minutes, say)
    try:
        run_steps(Run(args, files, record, clock), dry_run=dry_run)
        return 0
    except KeyboardInterrupt:
        parts = ["stopped"]
        if record.validations:
            parts.append(f"the drafter so far is in {files.directory}")
        if files.record.exists():
            parts.append("the same command with --resume continues, for --minutes more")
        clock.say("; ".join(parts))
        return INTERRUPTED
    finally:
        clock.close()


def run_steps(run: Run, *, dry_run: bool) -> None:
    """Schedules the run, makes the examples, trains and compares."""
    run.clock.say(f"loading {run.args.model or 'the packaged demo'}")
    model, tokenizer = load_target(run.args.model_args)
    check_draftable(model, tree=False)
    run.clock.reserve = run.clock.seconds - run.clock.left  # the end loads the target again
    dtype = run.args.dtype or format_dtype(get_compute_dtype(model))
    run.args = replace(run.args, output=str(run.files.directory), dtype=dtype)

    schedule = schedule_run(run, model, tokenizer)
    if dry_run:
        return

    with lock_file(run.files.lock):
        run.record.save(run.files.record)
        make_examples(run, schedule, model)
        learner = make_learner(run, schedule, model)
        del model  # not needed until the end
        mx.clear_cache()
        with catch_interrupt() as interrupted:
            fit_drafter(run, learner, schedule.times.learn, interrupted)
        if interrupted.is_set():
            raise KeyboardInterrupt
        finish(run, learner, schedule)


def schedule_run(run: Run, model: nn.Module, tokenizer: Any) -> RunSchedule:
    """Measures how the time is divided best, and says it."""
    args = run.args
    clock = run.clock
    store = ExampleStore(run.files.work / get_folder_name(args), get_model_sizes(model)[0])
    known = len(store.examples)
    maker = choose_maker(args, tokenizer, store.examples)
    clock.say(maker.describe())
    missing = max(0, maker.needed - known)
    length = maker.length
    making = measure_making(model, length, is_given=bool(args.data))
    check_minutes(clock, missing, missing * making / MAX_MAKING_SHARE)

    sizes = choose_sizes(run, model)
    run.record.args = sizes.to_dict()
    clock.say(f"drafter: {describe_drafter(sizes)}, {count_weights(sizes) / 1e6:.2f} M parameters")
    embedding = get_parts(model).embedding
    learning = measure_learning(embedding, sizes, length, args.draft_depth, args.batch_size)
    times = ExampleTimes(making, learning)
    findings, step = measure_decoding(model, sizes)
    comparing = 2 * MAX_COMPARED * COMPARED_TOKENS * step  # plainly and with the drafter
    clock.reserve += min(COMPARISON_SHARE * clock.seconds, comparing)
    check_minutes(clock, missing, times.estimate_seconds(missing))
    visits = args.batch_size * load_checkpoint(run.files.checkpoint)
    count = min(maker.count, times.count_wanted(clock.left_to_train, known, visits))

    training = format_time(clock.left_to_train - count * making)
    besides = f" besides {known}" if known else ""
    size = (store.nbytes + count * length * store.dtype.itemsize) / 1e9
    clock.say(
        f"in {format_time(clock.left)}: about {count} texts{besides} "
        f"({format_time(count * making)}, {size:.1f} GB of disk), training ({training}), "
        f"a comparison ({format_time(clock.reserve)})"
    )
    if run.record.validations:
        tokens = run.record.validations[-1]["tokens_per_round"]
        clock.say(f"so far the drafter makes {tokens:.2f} tokens per round")
    return RunSchedule(sizes, store, known, maker, times, visits, findings)


def check_minutes(clock: Clock, count: int, seconds: float) -> None:
    """Refuses a run whose time is too short for the texts with which it can begin.

    Args:
        count: of these texts.
        seconds: what they take.
    """
    missing = seconds - clock.left_to_train
    if count and missing > 0:
        minutes = math.ceil((clock.seconds + missing / (1 - COMPARISON_SHARE)) / 60)
        got = f"{clock.seconds / 60:g}"
        raise RedrafterError(
            f"expected --minutes {minutes} or more for {count} texts here, got {got}"
        )


def choose_sizes(run: Run, model: nn.Module) -> DrafterArgs:
    """The drafter's config: recorded, by the settings, or chosen by measuring."""
    args = run.args
    if run.record.args is not None:
        return args.kind.from_dict(run.record.args)
    count = args.draft_vocab_size
    if args.exit_dim is None and count is None:
        run.clock.say("measuring which sizes of a drafter are fast enough")
        choice = choose_size(model, getattr(mx, str(args.dtype)), args.kind, args.draft_depth)
        run.clock.say(f"size: {choice.reason}")
        return choice.args
    hidden_size, vocab_size = get_model_sizes(model)
    if count is not None and count >= vocab_size:
        count = None
    given = {"exit_dim": args.exit_dim, "num_draft_layers": args.num_draft_layers}
    own = {name: value for name, value in given.items() if value is not None}
    return args.kind.for_training(
        hidden_size, vocab_size, depth=args.draft_depth, draft_vocab_size=count, **own
    )


def make_examples(run: Run, schedule: RunSchedule, model: nn.Module) -> None:
    """Adds examples to the store until the rest of the time is needed to learn them."""
    store = schedule.store
    maker = schedule.maker
    known = schedule.known
    begun = 0 if run.args.data else MAX_BATCH_SIZE / 2
    tokens = 0
    started = time.perf_counter()
    seconds = run.clock.left_to_train

    def should_stop(more_tokens: int) -> bool:
        """Schedules again with the speed so far."""
        nonlocal tokens
        tokens += more_tokens
        made = len(store.examples) - known
        spent = time.perf_counter() - started
        times = schedule.times
        if made >= MIN_MEASURED:
            times = times._replace(make=spent / (made + begun))
        wanted = min(maker.count, times.count_wanted(seconds, known, schedule.visits))
        wanted = max(wanted, maker.needed - known)
        count = len(store.examples)
        run.clock.show(f"texts: {count} of about {known + wanted}, {tokens:,} tokens")
        limit = MAX_MAKING_SHARE * seconds
        if not maker.has_prompts:
            limit /= 2  # else no time may be left to answer the first ones
        return made >= wanted or spent >= limit

    if should_stop(0):
        return
    held_out = sum(example.is_held_out for example in store.examples)
    wanted = schedule.times.count_wanted(seconds, known, schedule.visits)
    for example in maker.make(model, should_stop, wanted):
        if not maker.has_held_out and len(store.examples) % HELD_OUT_EVERY == 0:
            example = example._replace(is_held_out=held_out < MAX_HELD_OUT)
            held_out += 1
        store.add(example)


def make_learner(run: Run, schedule: RunSchedule, model: nn.Module) -> Learner:
    """An untrained drafter. A draft vocabulary has the most frequent tokens of the examples."""
    args = run.args
    training = [example for example in schedule.store.examples if not example.is_held_out]
    held_out = [example for example in schedule.store.examples if example.is_held_out]
    if len(training) < args.batch_size or not held_out:
        raise RedrafterError(
            f"{len(schedule.store.examples)} of {schedule.maker.needed} texts were made in time: "
            "give the same command more --minutes"
        )
    if not args.mask_prompt:
        training = [example._replace(offset=0) for example in training]

    mx.random.seed(args.seed)
    count = schedule.sizes.draft_vocab_size
    ids = None
    if count is not None:
        ids = list_most_frequent(training, count, schedule.sizes.vocab_size)
        learned = np.concatenate([example.tokens[example.offset :] for example in training])
        share = np.isin(learned, ids).mean()
        run.clock.say(f"draft vocabulary: {count} tokens, which are {share:.2%} of those to learn")
    drafter = initialize_drafter(model, schedule.sizes, ids)
    return Learner(drafter, get_parts(model).embedding, training, held_out)


def fit_drafter(
    run: Run, learner: Learner, seconds_to_learn: float, interrupted: threading.Event
) -> None:
    """Trains until the time for it is over, with validations.

    Each validation saves a usable drafter.

    Args:
        seconds_to_learn: as in `ExampleTimes`.
    """
    args = run.args
    record = run.record
    before = load_checkpoint(run.files.checkpoint)
    most = max(1, MAX_VISITS * len(learner.training) // args.batch_size)
    seconds = max(run.clock.left_to_train, 1e-9)
    share_before = before / (before + seconds / seconds_to_learn / args.batch_size)
    started = time.perf_counter()
    validated = share_before
    validating = 0.0
    # Validations after the checkpoint are made again.
    record.validations = [entry for entry in record.validations if entry["iteration"] <= before]

    def progress(done: int) -> float:
        """By time, the last validation's included, or by visits; at least one iteration."""
        spent = time.perf_counter() - started + validating
        by_time = share_before + (1 - share_before) * spent / seconds
        share = max(by_time, done / most)
        return share if done > before else min(share, 0.99)

    def on_iteration(done: int, share: float, shown: dict[str, float]) -> bool:
        nonlocal validated, validating
        run.clock.show(
            f"iteration {done}: loss {shown['loss']:.2f}, "
            f"{shown['first']:.0%} of first guesses right"
        )
        is_last = share >= 1 or interrupted.is_set()
        if is_last or int(share * VALIDATIONS) > int(validated * VALIDATIONS):
            validated = share
            began = time.perf_counter()
            record.validations.append(validate(run, learner, done))
            record.save(run.files.record)
            validating = time.perf_counter() - began
        return is_last

    train_drafter(
        learner.embedding,
        learner.drafter,
        make_batches(learner.training, args.batch_size, args.seed),
        progress,
        depth=args.draft_depth,
        learning_rate=args.learning_rate,
        checkpoint=run.files.checkpoint,
        on_iteration=on_iteration,
    )


def validate(run: Run, learner: Learner, done: int) -> dict[str, Any]:
    """Validates the drafter and saves it as it is; returns the entry for the record."""
    args = run.args
    depth = args.draft_depth
    drafter = learner.drafter
    embedding = learner.embedding
    loss, acceptance = measure_guesses(embedding, drafter, learner.held_out, depth, args.batch_size)
    counted = learner.held_out[:MAX_COUNTED]
    # Texts that the target did not write say nothing about what it would write.
    of_text = not args.data
    stats = Stats()
    for example in counted:
        stats += count_rounds(embedding, drafter, example, depth, of_text=of_text)
    tokens = stats.tokens_per_round
    first = " ".join(f"{shares[0]:.2f}" for shares in acceptance)
    run.clock.say(
        f"iteration {done}: validation loss {loss:.3f}, right at depth 1, 2, ...: {first}; "
        f"{tokens:.2f} tokens per round at 1 x {depth} on held-out texts: {len(counted)}"
    )
    base = args.model and strip_folders(args.model)
    rounded = [[round(share, 4) for share in shares] for shares in acceptance]
    drafter.args = replace(drafter.args, base_model=base, acceptance=rounded)
    save_drafter(run.files.directory, drafter, dtype=getattr(mx, str(args.dtype)))
    return {"iteration": done, "loss": loss, "acceptance": acceptance, "tokens_per_round": tokens}


def finish(run: Run, learner: Learner, schedule: RunSchedule) -> None:
    """Measures and describes the finished drafter."""
    args = run.args
    record = run.record
    clock = run.clock
    directory = run.files.directory
    clock.show("loading the model to compare speeds")
    model, tokenizer = load_target(args.model_args)
    pair = Pair(model, load_fast_drafter(directory, model), schedule.findings)
    prompts = [cut_prompt(example) for example in learner.held_out[:MAX_COMPARED]]
    started = time.perf_counter()

    def should_stop(done: int) -> bool:
        """Whether there is no time for one more prompt."""
        clock.show(f"comparing with plain decoding: prompt {done} of {len(prompts)}")
        return done >= 2 and clock.left < (time.perf_counter() - started) / done

    options = Options(max_tokens=COMPARED_TOKENS, temp=args.temp, seed=args.seed)
    results = compare_speed(pair, prompts, options, set(tokenizer.eos_token_ids), should_stop)
    record.measured = [result._asdict() for result in results]
    record.save(run.files.record)
    iterations = record.validations[-1]["iteration"]
    write_card(args, learner.drafter.args, directory, iterations, results)
    clock.say(format_results(results))
    fault = explain_fault(record.validations[-1]["tokens_per_round"], results[-1], schedule)
    if fault is not None:
        clock.say(f"note: {fault}")
    clock.say(f"the drafter is in {directory}; to use it:\n{make_command(args)}")


def explain_fault(
    tokens_per_round: float, result: SpeedResult, schedule: RunSchedule
) -> str | None:
    """Why a drafter helps little, and what to do; None if it helps.

    Args:
        tokens_per_round: of the last validation.
        result: of all compared prompts. The context drafts there too, and may hide a drafter that
            has learned nothing.
    """
    if tokens_per_round < MIN_LEARNED:
        return (
            f"the drafter has learned little: alone it makes {tokens_per_round:.2f} tokens per "
            f"round in the last validation and {result.drafter_tokens_per_round:.2f} in the "
            f"comparison, where none makes 1: {advise_longer(schedule)}"
        )
    ratio = result.against_plain
    if ratio is not None and ratio <= 1:
        return (
            f"{ratio:.2f} times the speed of plain decoding here: "
            f"{advise_longer(schedule)}, or train a smaller drafter"
        )
    return None


def advise_longer(schedule: RunSchedule) -> str:
    """How many minutes more make a better drafter."""
    made = len(schedule.store.examples)
    more = max(ENOUGH_EXAMPLES, 2 * made) - made
    left = max(0, schedule.known + schedule.maker.count - made)
    seconds = VISITS * made * schedule.times.learn
    if left:
        seconds = schedule.times.estimate_seconds(min(more, left))
    minutes = math.ceil(seconds / (1 - COMPARISON_SHARE) / 60)
    texts = f"{min(more, left)} more texts" if left else f"the {made} texts again"
    return f"--resume with --minutes {minutes} learns {texts}"


@contextmanager
def catch_interrupt() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event for the training loop; the second one raises."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread gets signals
        return

    def on_signal(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        print(
            "\nstopping after this iteration; press Ctrl-C again to stop at once", file=sys.stderr
        )

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
