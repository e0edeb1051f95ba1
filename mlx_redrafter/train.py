"""Trains a drafter on the hidden states of a frozen target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from .checkpoint import check_fit
from .drafter import Drafter, DrafterArgs
from .errors import RedrafterError
from .loss import Lesson, draft_loss
from .seams import Tap, building, wrapped
from .target import backbone

SAVE_EVERY = 250

Labels = Literal["data", "target", "distribution"]
"""What should follow a token: the text's next token, the target's likeliest, or the target's probabilities of all."""

Batches = Callable[[int], mx.array]
"""step -> (B, T + 1) int32 token ids."""


def train_drafter(
    model: nn.Module,
    drafter: Drafter | DrafterArgs,
    batches: Batches,
    *,
    steps: int,
    depth: int = 5,
    learning_rate: float = 1e-3,
    warmup: float = 0.1,
    weight_decay: float = 0.0,
    labels: Labels = "target",
    weights: Sequence[float] | None = None,
    checkpoint: Path | None = None,
) -> Drafter:
    """A drafter for `model`, after `steps` updates by AdamW; the rate warms up, then falls as a cosine to zero.

    Args:
        model: a model of mlx-lm; it is read, never changed.
        drafter: the drafter to train further, in place, or the sizes of a new one.
        batches: texts like those the model will write; best of all, its own.
        depth: K, how many guesses are trained from each position.
        warmup: the share of steps in which the rate rises.
        labels: see `Labels`.
        weights: see `draft_loss`.
        checkpoint: where to save every few minutes, and to go on from if it exists.

    Raises:
        CheckpointError: the drafter is for a model of another size.
        RedrafterError: the texts are too short.
        UnsupportedModelError: see `backbone`.
    """
    if isinstance(drafter, DrafterArgs):
        drafter = new_drafter(model, drafter)
    rise = max(1, round(warmup * steps))
    rate = optim.join_schedules(
        [
            optim.linear_schedule(learning_rate / rise, learning_rate, rise),
            optim.cosine_decay(learning_rate, max(1, steps - rise)),
        ],
        [rise],
    )
    optimizer = optim.AdamW(rate, betas=[0.9, 0.95], weight_decay=weight_decay)

    def lesson(step: int) -> Lesson:
        return teach(model, batches(step), labels)

    def loss(*arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        result = draft_loss(drafter, Lesson(*arrays), depth, weights)
        return result.loss, {"loss": result.loss, "first": result.accuracy[0], "last": result.accuracy[-1]}

    check_fit(drafter, model)
    if (size := batches(0).shape[1]) < depth + 2:
        raise RedrafterError(f"to train depth {depth}, texts must be at least {depth + 2} tokens long, got {size}")
    mx.eval(model.parameters())  # read by another thread, which could not evaluate them
    fit_(drafter, optimizer, loss, lesson, steps, checkpoint=checkpoint, name="drafter")
    return drafter


def new_drafter(model: nn.Module, args: DrafterArgs) -> Drafter:
    """An untrained drafter whose head knows which tokens are alike.

    Its head starts as the principal components of the target's embedding instead of at random; columns beyond those
    are random. The head is most of a drafter, and rare tokens seldom move it: so it learns faster at first.
    """
    drafter = Drafter(args)
    rows = backbone(model).embed_tokens(mx.arange(args.vocab_size)).astype(mx.float32)
    rows -= rows.mean(axis=0)  # what all tokens share does not tell them apart
    _, axes = mx.linalg.eigh(rows.T @ rows, stream=mx.cpu)
    head = drafter.lm_head[-1]
    width = min(args.exit_dim, args.hidden_size)
    head.weight[:, :width] = rows @ axes[:, ::-1][:, :width]
    return drafter


def teach(model: nn.Module, ids: mx.array, labels: Labels) -> Lesson:
    """What `model` says about the first T tokens of `ids` (B, T + 1); see `Labels`."""
    tokens = ids[:, :-1]
    inner = backbone(model)
    with building(), wrapped([(inner, "norm")], Tap) as (tap,):
        logits = model(tokens)
    following = ids[:, 1:]
    if labels == "target":
        following = mx.argmax(logits, axis=-1)
    elif labels == "distribution":
        following = mx.softmax(logits.astype(mx.float32), axis=-1)
    return Lesson(tap.kept[-1], inner.embed_tokens(tokens), following)


def fit_(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss: Callable[..., tuple[mx.array, dict[str, mx.array]]],
    batch: Callable[[int], Sequence[mx.array]],
    steps: int,
    *,
    checkpoint: Path | None = None,
    name: str,
) -> None:
    """Updates `model` until it has seen `steps` batches, those before a checkpoint's included.

    Args:
        loss: arrays of a batch -> (the loss, what to show of it).
        batch: step -> arrays; a function of the step alone, so that resuming changes nothing. Called in a thread.
        name: what the progress bar says.
    """
    optimizer.init(model.trainable_parameters())
    first = resume_(checkpoint, model, optimizer) if checkpoint else 0
    loss_and_grads = nn.value_and_grad(model, loss)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(*arrays: mx.array) -> dict[str, mx.array]:
        (_, shown), grads = loss_and_grads(*arrays)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        return shown

    def prepared(step: int) -> Sequence[mx.array]:
        """The batch, computed: a frozen target works on the next one beside this update, in a thread of its own."""
        arrays = batch(step) if step < steps else []
        mx.eval(arrays)
        return arrays

    smooth: dict[str, float] = {}
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=name, mininterval=10)
    with ThreadPoolExecutor(max_workers=1) as beside:
        following = beside.submit(prepared, first)
        for step in bar:
            arrays, following = following.result(), beside.submit(prepared, step + 1)
            shown = update(*arrays)
            mx.eval(shown, state)
            for key, array in shown.items():
                value: Any = array.item()
                smooth[key] = 0.98 * smooth.get(key, value) + 0.02 * value
            bar.set_postfix({key: f"{value:.3f}" for key, value in smooth.items()}, refresh=False)
            if checkpoint and ((step + 1) % SAVE_EVERY == 0 or step + 1 == steps):
                save_(checkpoint, model, optimizer, step + 1)


def save_(path: Path, model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    """Writes model, optimiser and step to one file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.parameters(), "optimizer": optimizer.state}
    partly = path.with_suffix(".partial.safetensors")
    mx.save_safetensors(str(partly), dict(tree_flatten(state)), {"step": str(step)})
    partly.replace(path)


def resume_(path: Path, model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Restores what `save_` wrote and returns its step; 0 when there is nothing to restore."""
    if not path.exists():
        return 0
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    state: Any = tree_unflatten(list(arrays.items()))
    model.update(state["model"])
    optimizer.state = state["optimizer"]
    return int(metadata["step"])


def cut(tokens: np.ndarray, length: int) -> np.ndarray:
    """A stream of token ids as rows of `length`, each beginning with the last token of the one before."""
    starts = np.arange(0, len(tokens) - length + 1, length - 1)
    rows: np.ndarray = tokens[starts[:, None] + np.arange(length)]
    return rows


def shuffled(rows: np.ndarray, count: int, seed: int) -> Batches:
    """Batches of `count` of these rows; every row is seen once before any is seen again."""
    order = np.random.default_rng(seed).permutation(len(rows))

    def batch(step: int) -> mx.array:
        at = order[(step * count + np.arange(count)) % len(order)]
        return mx.array(rows[at].astype(np.int32))

    return batch
