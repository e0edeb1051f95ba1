"""A complete training run in a given time: texts with hidden states, training, and the finished
directory.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..arguments import load_target
from ..atomic_files import lock_file
from ..checkpoints import format_dtype, load_fast_drafter, save_drafter, strip_folders
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_checks import check_draftable
from ..engine.model_parts import get_compute_dtype, get_model_sizes, get_parts
from ..engine.stats import Stats
from ..errors import RedrafterError
from ..options import Options
from ..pair import Findings, Pair
from ..planning.sizing import choose_size, count_weights
from .answers import MAX_BATCH_SIZE
from .data import Text, find_most_frequent, make_batches
from .evaluation import compare_speed, count_rounds, format_results, make_prompt, measure_guesses
from .plan import (
    COMPARISON_SHARE,
    MAX_TEXT_SHARE,
    Clock,
    Say,
    Speed,
    format_time,
    measure_rounds,
    measure_speed,
)
from .prompts import read_prompts
from .record import Files, Record, describe, make_command, open_record, write_card
from .settings import TrainingArgs
from .sources import HELD_OUT_EVERY, MAX_HELD_OUT, TextSource
from .store import TextStore
from .targets import initialize_drafter
from .trainer import load_checkpoint, train_drafter

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

MAX_VISITS = 30
MIN_MEASURED = 16
"""How often a run learns each text at most, and the texts after which their own time counts, not
the estimate.
"""

VALIDATIONS = 8
COUNTED_TEXTS = 24
"""How often a drafter is validated and saved, and the held-out texts whose rounds are then counted.
"""

MAX_COMPARED = 48
COMPARED_TOKENS = 64
"""The prompts of the comparison at the end, if there is time, and the tokens decoded after each."""


@dataclass
class Run:
    """The objects that a run works with.

    Attributes:
        embedding: the target's.
        training, validation: texts that the target has read.
        findings: what was measured about target and drafter.
    """

    args: TrainingArgs
    files: Files
    record: Record
    clock: Clock
    embedding: nn.Module
    drafter: TrainableDrafter
    training: list[Text]
    validation: list[Text]
    speed: Speed
    findings: Findings


def train(
    args: TrainingArgs, *, resume: bool = False, dry_run: bool = False, say: Say = lambda text: None
) -> int:
    """Trains a drafter into the directory `args.output`.

    Args:
        resume: continue the run in that directory for `args.minutes` more.
        dry_run: only plan the run; write nothing.
        say: called with messages for the user.

    Returns:
        The exit status: 0, or `INTERRUPTED` after Ctrl-C, when the run can be resumed.
    """
    args.check_run()
    if args.prompts:
        read_prompts(args.prompts)  # what is wrong with them is said before the model is loaded
    files = Files(args.output)
    record = open_record(files, args, resume=resume)
    clock = Clock(60 * args.minutes, say)
    try:
        run_steps(args, files, record, clock, dry_run=dry_run)
        return 0
    except KeyboardInterrupt:
        drafter = f"; the drafter so far is in {files.directory}" if record.validations else ""
        resume_by = (
            "; the same command with --resume continues, for --minutes more"
            if files.record.exists()
            else ""
        )
        clock.say(f"stopped{drafter}{resume_by}")
        return INTERRUPTED
    finally:
        clock.close()


def run_steps(
    args: TrainingArgs, files: Files, record: Record, clock: Clock, *, dry_run: bool
) -> None:
    """Makes the texts, trains and finishes."""
    clock.say(f"loading {args.model or 'the packaged demo'}")
    model, tokenizer = load_target(args)
    check_draftable(model, tree=False)
    loading = clock.seconds - clock.left
    args = replace(
        args,
        output=str(files.directory),
        dtype=args.dtype or format_dtype(get_compute_dtype(model)),
    )
    sizes = choose_sizes(args, record, model, clock)
    record.args = sizes.to_dict()
    clock.say(f"drafter: {describe(sizes)}, {count_weights(sizes) / 1e6:.2f} M parameters")
    store = TextStore(files.work, args, sizes.hidden_size)
    source = TextSource(args, tokenizer, store.texts)
    clock.say(source.describe())
    speed = measure_speed(model, sizes, args, source.length)
    findings, step = measure_rounds(model, sizes)
    # The end loads the target again, and decodes each prompt twice.
    clock.reserve = loading + min(
        COMPARISON_SHARE * clock.seconds, 2 * MAX_COMPARED * COMPARED_TOKENS * step
    )
    known = len(store.texts)
    visits = args.batch_size * load_checkpoint(files.checkpoint)
    texts = min(source.count, speed.count_wanted(clock.left_to_train, known, visits))
    if known + texts <= args.batch_size < known + source.count:
        least = args.batch_size + 1 - known
        missing = (speed.find_seconds(least) - clock.left_to_train) / (1 - COMPARISON_SHARE)
        minutes = math.ceil(args.minutes + missing / 60)
        raise RedrafterError(
            f"expected --minutes {minutes} or more for {least} texts here, got {args.minutes:g}"
        )
    making = texts * speed.text
    size = (store.nbytes + texts * source.length * store.kind.itemsize) / 1e9
    clock.say(
        f"in {format_time(clock.left)}: about {texts} texts{f' besides {known}' if known else ''} "
        f"({format_time(making)}, {size:.1f} GB of disk), training ({format_time(clock.left_to_train - making)}), "
        f"a comparison ({format_time(clock.reserve)})"
    )
    if record.validations:
        clock.say(
            f"so far the drafter makes {record.validations[-1]['tokens_per_round']:.2f} tokens per round"
        )
    if dry_run:
        return
    with lock_file(files.lock):
        record.save(files.record)
        make_texts(store, source, model, clock, speed, visits)
        held_out, training = (
            [text for text in store.texts if text.is_held_out is which] for which in (True, False)
        )
        if len(training) < args.batch_size or not held_out:
            raise RedrafterError(
                f"expected at least as many texts as the batch size {args.batch_size}, got {len(training)} that are "
                f"long enough, besides {len(held_out)} held out: give more texts, or --resume with more --minutes"
            )
        if not args.mask_prompt:
            training = [text._replace(offset=0) for text in training]
        drafter = make_new_drafter(args, model, sizes, training, clock)
        embedding = get_parts(model).embedding
        del model  # not needed until the end
        mx.clear_cache()
        run = Run(
            args, files, record, clock, embedding, drafter, training, held_out, speed, findings
        )
        with catch_interrupt() as interrupted:
            fit_drafter(run, interrupted)
        if interrupted.is_set():
            raise KeyboardInterrupt
        finish(run)


def choose_sizes(args: TrainingArgs, record: Record, model: nn.Module, clock: Clock) -> DrafterArgs:
    """The drafter's config: the recorded one, or sizes from the settings, or chosen by measuring."""
    if record.args is not None:
        return args.kind.from_dict(record.args)
    if args.exit_dim is None and args.draft_vocab_size is None:
        clock.say("measuring which sizes of a drafter are fast enough")
        choice = choose_size(model, get_dtype(args), args.kind, args.draft_depth)
        clock.say(f"size: {choice.reason}")
        return choice.args
    hidden_size, vocab_size = get_model_sizes(model)
    count = args.draft_vocab_size
    count = None if count is None or count >= vocab_size else count
    given = {"exit_dim": args.exit_dim, "num_draft_layers": args.num_draft_layers}
    own = {name: value for name, value in given.items() if value is not None}
    return args.kind.for_training(
        hidden_size, vocab_size, depth=args.draft_depth, draft_vocab_size=count, **own
    )


def get_dtype(args: TrainingArgs) -> mx.Dtype:
    """The dtype of the finished drafter."""
    return cast(mx.Dtype, getattr(mx, str(args.dtype)))


def make_texts(
    store: TextStore, source: TextSource, model: nn.Module, clock: Clock, speed: Speed, visits: int
) -> None:
    """Adds texts to the store until the rest of the time is needed to learn them.

    Args:
        visits: as for `count_wanted`.
    """
    known = len(store.texts)
    tokens = 0
    began = time.perf_counter()
    seconds = clock.left_to_train

    def should_stop(more_tokens: int) -> bool:
        """Plans again with the speed so far."""
        nonlocal tokens
        tokens += more_tokens
        made = len(store.texts) - known
        spent = time.perf_counter() - began
        half_made = 0 if source.args.data else MAX_BATCH_SIZE / 2
        measured = (
            speed._replace(text=spent / (made + half_made)) if made >= MIN_MEASURED else speed
        )
        wanted = min(source.count, measured.count_wanted(seconds, known, visits))
        clock.show(f"texts: {len(store.texts)} of about {known + wanted}, {tokens:,} tokens")
        return made >= wanted or spent >= MAX_TEXT_SHARE * seconds

    if should_stop(0):
        return
    for text in source.make(model, should_stop, speed.count_wanted(seconds, known, visits)):
        if not source.has_held_out and len(store.texts) % HELD_OUT_EVERY == 0:
            text = text._replace(
                is_held_out=sum(each.is_held_out for each in store.texts) < MAX_HELD_OUT
            )
        store.add(text)


def make_new_drafter(
    args: TrainingArgs, model: nn.Module, sizes: DrafterArgs, texts: Sequence[Text], clock: Clock
) -> TrainableDrafter:
    """An untrained drafter. A draft vocabulary has the most frequent tokens of the texts."""
    mx.random.seed(args.seed)
    count = sizes.draft_vocab_size
    ids = None
    if count is not None:
        ids = find_most_frequent(texts, count, sizes.vocab_size)
        learned = np.concatenate([text.ids[text.offset :] for text in texts])
        clock.say(
            f"draft vocabulary: {count} tokens, which are {np.isin(learned, ids).mean():.2%} of those to learn"
        )
    return initialize_drafter(model, sizes, ids)


def fit_drafter(run: Run, interrupted: threading.Event) -> None:
    """Trains until the time for it is over, with validations.

    Each validation saves a usable drafter.
    """
    args = run.args
    record = run.record
    before = load_checkpoint(run.files.checkpoint)
    most = max(1, MAX_VISITS * len(run.training) // args.batch_size)
    seconds = max(run.clock.left_to_train, 1e-9)
    share_before = before / (before + seconds / run.speed.visit / args.batch_size)
    began = time.perf_counter()
    validated = share_before
    validating = 0.0
    # Those after the checkpoint are made again.
    record.validations = [entry for entry in record.validations if entry["iteration"] <= before]

    def progress(done: int) -> float:
        """By time, the last validation's included, or by visits; at least one iteration."""
        spent = time.perf_counter() - began + validating
        by_time = share_before + (1 - share_before) * spent / seconds
        share = max(by_time, done / most)
        return share if done > before else min(share, 0.99)

    def on_iteration(done: int, share: float, shown: dict[str, float]) -> bool:
        nonlocal validated, validating
        run.clock.show(
            f"iteration {done}: loss {shown['loss']:.2f}, {shown['first']:.0%} of first guesses right"
        )
        is_last = share >= 1 or interrupted.is_set()
        if is_last or int(share * VALIDATIONS) > int(validated * VALIDATIONS):
            validated = share
            started = time.perf_counter()
            record.validations.append(validate(run, done))
            record.save(run.files.record)
            validating = time.perf_counter() - started
        return is_last

    batches = make_batches(run.training, args.batch_size, args.seed)
    checkpoint = run.files.checkpoint
    train_drafter(
        run.embedding,
        run.drafter,
        batches,
        args,
        progress,
        checkpoint=checkpoint,
        on_iteration=on_iteration,
    )


def validate(run: Run, done: int) -> dict[str, Any]:
    """Validates the drafter and saves it as it is; returns the entry for the record."""
    args = run.args
    loss, acceptance = measure_guesses(run.embedding, run.drafter, run.validation, args)
    counted = run.validation[:COUNTED_TEXTS]
    each = (count_rounds(run.embedding, run.drafter, text, args) for text in counted)
    tokens = sum(each, Stats()).tokens_per_round
    first = " ".join(f"{shares[0]:.2f}" for shares in acceptance)
    run.clock.say(
        f"iteration {done}: validation loss {loss:.3f}, right at depth 1, 2, ...: {first}; "
        f"{tokens:.2f} tokens per round at 1 x {args.draft_depth} on held-out texts: {len(counted)}"
    )
    base = args.model and strip_folders(args.model)
    rounded = [[round(share, 4) for share in row] for row in acceptance]
    run.drafter.args = replace(run.drafter.args, base_model=base, acceptance=rounded)
    save_drafter(run.files.directory, run.drafter, dtype=get_dtype(args))
    return {"iteration": done, "loss": loss, "acceptance": acceptance, "tokens_per_round": tokens}


def finish(run: Run) -> None:
    """Measures and describes the finished drafter."""
    args = run.args
    record = run.record
    clock = run.clock
    place = run.files.directory
    clock.show("loading the model to compare speeds")
    model, tokenizer = load_target(args)
    pair = Pair(model, load_fast_drafter(place, model), run.findings)
    prompts = [make_prompt(text) for text in run.validation[:MAX_COMPARED]]
    began = time.perf_counter()

    def should_stop(done: int) -> bool:
        """Whether there is no time for one more prompt."""
        clock.show(f"comparing with plain decoding: prompt {done} of {len(prompts)}")
        return done >= 2 and clock.left < (time.perf_counter() - began) / done

    options = Options(max_tokens=COMPARED_TOKENS, temp=args.temp, seed=args.seed)
    results = compare_speed(pair, prompts, options, set(tokenizer.eos_token_ids), should_stop)
    record.measured = [result._asdict() for result in results]
    record.save(run.files.record)
    write_card(args, run.drafter.args, place, record.validations[-1]["iteration"], results)
    clock.say(format_results(results))
    if (ratio := results[-1].against_plain) is not None and ratio <= 1:
        clock.say(
            f"note: {ratio:.2f} times the speed of plain decoding here: train longer, or a smaller drafter"
        )
    clock.say(f"the drafter is in {place}; to use it:\n{make_command(args)}")


@contextmanager
def catch_interrupt() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event for the training loop.

    The second one raises KeyboardInterrupt.
    """
    event = threading.Event()

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
