"""Computes the training targets of a batch: the frozen target's hidden states, and labels for each position."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters import make_drafter
from ..drafters.config import DrafterArgs
from ..drafters.trainable import TrainableDrafter
from ..engine.model_parts import CapturePoint, capture, find_compute_dtype, find_head, find_module_name, find_parts
from ..errors import UnsupportedModelError
from .loss import TrainingTargets
from .settings import TrainingArgs

CHECKED_TOKENS = 8
"""Tokens used to find out how a model computes its logits."""
ROWS_AT_ONCE = 128  # rows of logits in float32 at a time


class Batch(NamedTuple):
    """A batch of texts.

    Attributes:
        ids: (B, T + 1) int32.
        positions: (N,) int32 indices into the first B * T tokens; the tokens that follow these are learned; -1 pads.
        hidden: (B, T, D) the target's hidden states after its final norm; None if they are not computed yet.
        likeliest: (N, M) int32 and (N, M) float16, the likeliest next tokens and their probabilities, see
            `Text.likeliest`; None if they were not stored.
    """

    ids: mx.array
    positions: mx.array
    hidden: mx.array | None = None
    likeliest: tuple[mx.array, mx.array] | None = None


class Teacher:
    """The parts of a target that training uses: its embedding, its output matrix and, to read texts, the whole model.

    Args:
        model: the target.
        reads: whether hidden states still have to be computed; if not, only embedding and output matrix are kept.

    Raises:
        UnsupportedModelError: the model's embedding cannot be found, or its logits are not its output matrix's, scaled
            or capped.
    """

    def __init__(self, model: nn.Module, *, reads: bool = True) -> None:
        self._model = model if reads else None
        parts = find_parts(model)
        self.embedding: Any = parts.embedding
        self.dtype = find_compute_dtype(model)
        self._head = find_head(model)
        tokens = (mx.arange(CHECKED_TOKENS) * (self.embedding.weight.shape[0] // CHECKED_TOKENS))[None]
        wanted, (hidden,) = capture([CapturePoint(parts.final_norm)], lambda: model(tokens))
        raw, self.vocab_size = self._head(hidden[-1]), wanted.shape[-1]
        self._scale, self._cap = find_scale_and_cap(raw[..., : self.vocab_size], wanted, find_module_name(model))

    @classmethod
    def of(cls, target: nn.Module | Teacher) -> Teacher:
        """Returns a teacher unchanged, and makes one for a model."""
        return target if isinstance(target, Teacher) else cls(target)

    def read(self, batch: Batch) -> mx.array:
        """(B, T, D) the hidden states of a batch, computed in a forward if it has none."""
        hidden = batch.hidden
        if hidden is None:
            assert self._model is not None, "expected texts that the target has read"
            hidden = read_states(self._model, batch.ids[:, :-1])
        return hidden.astype(self.dtype)

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., V) the target's logits for hidden states (..., D)."""
        logits = self._head(hidden)[..., : self.vocab_size]
        logits = logits if self._scale == 1 else logits * self._scale
        return logits if self._cap is None else mx.tanh(logits / self._cap) * self._cap


def find_scale_and_cap(raw: mx.array, logits: mx.array, name: str) -> tuple[float, float | None]:
    """Finds (factor, cap or None) such that a model's logits are cap * tanh(factor * raw / cap).

    Args:
        raw, logits: (..., V) the output matrix's results for some tokens, and the model's logits.
        name: the model's name, for the error.

    Raises:
        UnsupportedModelError: no factor or cap fits.
    """
    x, y = (np.array(each.astype(mx.float32), np.float64).ravel() for each in (raw, logits))
    precision = 4 * max(float(mx.finfo(logits.dtype).eps), 1e-6)  # a few roundings of each logit

    def fits(found: np.ndarray) -> bool:
        return bool(np.all(np.abs(found - y) <= precision * (np.abs(y) + 0.25 * np.max(np.abs(y)))))

    if fits(x):
        return 1.0, None
    factor = float(x @ y) / max(float(x @ x), 1e-30)
    if fits(factor * x):
        return factor, None
    low, high = float(np.max(np.abs(x))) / 100, float(np.max(np.abs(y))) * 1e6
    while high / low > 1 + 1e-9:  # bisection: capped values grow with the cap
        cap = (low * high) ** 0.5
        low, high = (low, cap) if (np.abs(cap * np.tanh(x / cap)) > np.abs(y)).mean() > 0.5 else (cap, high)
    if fits(high * np.tanh(x / high)):
        return 1.0, high
    raise UnsupportedModelError(f"cannot train for {name}: its logits are not its output matrix's, scaled or capped")


def read_states(model: nn.Module, tokens: mx.array) -> mx.array:
    """(B, T, D) a model's hidden states after its final norm for tokens (B, T); logits are not computed."""
    return capture([CapturePoint(find_parts(model).final_norm)], lambda: model(tokens))[1][0][-1]


def compute_targets(
    target: nn.Module | Teacher,
    batch: Batch,
    args: TrainingArgs,
    draft_ids: mx.array | None = None,
    key: int = 0,
    *,
    of_text: bool = False,
) -> TrainingTargets:
    """Computes the labels of each position of a batch from the target's hidden states.

    Args:
        target: computes the hidden states, if the batch has none, in one forward.
        args: `labels` and `teacher_top_k` select the labels.
        draft_ids: (V',) the tokens that the drafter can guess; None for all.
        key: seed of sampled labels.
        of_text: use the text's own tokens as labels, regardless of `args`.

    Raises:
        UnsupportedModelError: see `Teacher`.
    """

    def find_rows(ids: mx.array) -> mx.array:
        """The row of each token in the drafter's head, int32; -1 for a token that it cannot guess."""
        if draft_ids is None:
            return ids.astype(mx.int32)
        rows = mx.full((teacher.vocab_size,), -1, mx.int32)
        rows[draft_ids] = mx.arange(draft_ids.size, dtype=mx.int32)
        return rows[ids]

    teacher, tokens = Teacher.of(target), batch.ids[:, :-1]
    hidden, kept = teacher.read(batch), batch.likeliest
    columns = mx.where(batch.positions < 0, -1, batch.positions % tokens.shape[1])
    draws = args.labels == "sampled" and not of_text
    if kept is None or draws:
        logits = teacher.logits(hidden.flatten(0, 1)[batch.positions])
        choices = find_rows(mx.argmax(logits, axis=-1))
    else:
        choices = find_rows(kept[0][:, 0])
    states = tokens, hidden, teacher.embedding(tokens), batch.positions, columns, choices
    if of_text or draws:
        if draws:
            following = mx.random.categorical(logits, key=mx.random.key(key))
        else:
            following = batch.ids[:, 1:].reshape(-1)[batch.positions]
        wanted = find_rows(following)[:, None]
        return TrainingTargets(*states, (wanted >= 0).astype(mx.float32), mx.maximum(wanted, 0))
    if kept is None:
        return TrainingTargets(*states, *compute_probs(logits, draft_ids, args.teacher_top_k))
    rows = find_rows(kept[0])
    return TrainingTargets(*states, mx.where(rows >= 0, kept[1], 0).astype(mx.float32), mx.maximum(rows, 0))


def compute_probs(logits: mx.array, draft_ids: mx.array | None, top_k: int) -> tuple[mx.array, mx.array | None]:
    """(probabilities, their rows of the head or None for all), computed in float32, a few positions at a time.

    Returns:
        (N, V') in the dtype of `logits` (N, V) and None; or (N, top_k) float32 and int32.
    """
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, logits.shape[0], ROWS_AT_ONCE):
        # Without this dependency MLX may work on all rows at once.
        rows = mx.depends([logits[start : start + ROWS_AT_ONCE]], [x for part in parts[-1:] for x in part])[0]
        probs = mx.softmax(rows.astype(mx.float32), axis=-1)
        probs = probs if draft_ids is None else probs[:, draft_ids]
        if 0 < top_k < probs.shape[-1]:
            parts.append(take_likeliest(probs, top_k))
        else:
            parts.append((probs.astype(logits.dtype),))
    found = [mx.concatenate(list(column)) for column in zip(*parts, strict=True)]
    return found[0], found[1] if len(found) > 1 else None


def take_likeliest(probs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """((N, count) the largest of (N, V) probabilities, unordered; (N, count) int32 their columns)."""
    likeliest = mx.argpartition(-probs, count - 1, axis=-1)[:, :count].astype(mx.int32)
    return mx.take_along_axis(probs, likeliest, axis=-1), likeliest


def find_likeliest(teacher: Teacher, hidden: mx.array, count: int) -> tuple[np.ndarray, np.ndarray]:
    """((N, count) int32, (N, count) float16): the next tokens after hidden states (N, D) and their probabilities.

    The likeliest tokens come first.
    """
    ids, probs = np.zeros((len(hidden), count), np.int32), np.zeros((len(hidden), count), np.float16)
    most = min(count, teacher.vocab_size)
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        all_probs = mx.softmax(teacher.logits(hidden[rows]).astype(mx.float32), axis=-1)
        kept, likeliest = take_likeliest(all_probs, most)
        order = mx.argsort(-kept, axis=-1)
        ids[rows, :most] = np.array(mx.take_along_axis(likeliest, order, axis=-1))
        probs[rows, :most] = np.array(mx.take_along_axis(kept, order, axis=-1))
    return ids, probs


def initialize_drafter(model: nn.Module, args: DrafterArgs, ids: np.ndarray | None = None) -> TrainableDrafter:
    """An untrained drafter, initialized from the principal components of the target's embedding.

    Output matrices are most of a drafter's weights, and the rows of rare tokens are seldom updated, so this speeds up
    early training.

    Args:
        ids: (V',) the tokens that the drafter can guess; None for all.
    """
    drafter = cast(TrainableDrafter, make_drafter(args))
    if ids is not None:
        drafter.draft_ids = mx.array(ids.astype(np.int32))
    embedding = find_parts(model).embedding
    mean, axes = find_components(embedding, drafter)

    def project(tokens: mx.array, width: int | None) -> mx.array:
        rows = (embedding(part).astype(mx.float32) - mean for part in split_tokens(tokens))
        return mx.concatenate([part if width is None else part @ axes[:, :width] for part in rows])

    drafter.share(model)
    drafter.start_from(project)
    drafter.set_axes(axes)
    return drafter


def find_components(embedding: Any, drafter: TrainableDrafter) -> tuple[mx.array, mx.array]:
    """((D,) mean, (D, D) principal components as columns, the largest first) of an embedding.

    Only the tokens that the drafter can guess count; a few rows are in float32 at a time.
    """
    args = drafter.args
    guessed = drafter.draft_ids if "draft_ids" in drafter else mx.arange(args.vocab_size)
    mean, square = mx.zeros((args.hidden_size,)), mx.zeros((args.hidden_size, args.hidden_size))
    for part in split_tokens(guessed):
        rows = embedding(part).astype(mx.float32)
        mean, square = mean + rows.sum(axis=0), square + rows.T @ rows
        mx.eval(mean, square)
    mean /= guessed.size  # the mean does not distinguish tokens
    _, axes = mx.linalg.eigh(square - guessed.size * mx.outer(mean, mean), stream=mx.cpu)
    return mean, axes[:, ::-1]


def split_tokens(tokens: mx.array) -> list[mx.array]:
    """Chunks of at most 4096 tokens."""
    return [tokens[start : start + 4096] for start in range(0, tokens.size, 4096)]
