"""The vectorised loss against a float64 NumPy reference that makes one draft at a time."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.training import loss
from mlx_redrafter.training.loss import REGRESSION_WEIGHT, TrainingTargets, draft_loss

HIDDEN = 8
VOCAB = 11
TEXTS = 2
LENGTH = 7
DEPTH = 3
LEARNED = [1, 3, 4, 5, 6, 9, 10, 11, 13, -1]  # of 2 x 7 positions; -1 is padding
Arrays = dict[str, np.ndarray]


def make(rnn: bool = True, seed: int = 0, few: bool = False) -> tuple[Drafter, TrainingTargets]:
    """A drafter and targets: full distributions, or three tokens each, which do not sum to 1."""
    mx.random.seed(seed)
    drafter = Drafter(DrafterArgs(HIDDEN, VOCAB, exit_dim=6, num_draft_layers=2, rnn=rnn))
    hidden, embeddings = mx.random.normal((2, TEXTS, LENGTH, HIDDEN))
    positions = mx.array(LEARNED)
    probs = mx.softmax(2 * mx.random.normal((len(LEARNED), VOCAB)), axis=-1)
    choices = mx.where(mx.arange(len(LEARNED)) == 2, -1, mx.argmax(probs, axis=-1).astype(mx.int32))
    ids = mx.argsort(-probs, axis=-1)[:, : 3 if few else VOCAB].astype(mx.int32)
    probs = mx.take_along_axis(probs, ids, axis=-1)
    return drafter, TrainingTargets(
        mx.zeros((TEXTS, LENGTH), mx.int32), hidden, embeddings, positions, choices, probs, ids
    )


def parameters(drafter: Drafter) -> Arrays:
    flat = tree_flatten(drafter.parameters())
    return {name: np.array(array).astype(np.float64) for name, array in flat}


def apply_linear(weights: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return np.asarray(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def features(
    weights: Arrays, targets: TrainingTargets, index: int, start: int, depth: int
) -> np.ndarray:
    """(X,) features of the guess at `depth` of a draft from `start`, computed independently of the
    package.
    """
    hidden, embeddings = (np.array(array[index]).astype(np.float64) for array in targets[1:3])
    state = np.zeros(HIDDEN)
    for k in range(1, depth + 1):
        if "rnn_w.weight" in weights:
            step = embeddings[start + k] @ weights["rnn_w.weight"].T
            state = silu(step + state @ weights["rnn_u.weight"].T + weights["rnn_u.bias"])
        else:
            state = embeddings[start + k] + state
    y = apply_linear(weights, "input_proj", np.concatenate([hidden[start], state]))
    for n in range(2):
        y = y + silu(apply_linear(weights, f"lm_head.{n}.linear", y))
    return y


class Reference:
    """Reference loss, weights and ranks of the guesses."""

    def __init__(
        self,
        weights: Arrays,
        targets: TrainingTargets,
        depth: int,
        equal_weights: bool,
        frozen: dict[tuple[int, int], float] | None = None,
        axes: np.ndarray | None = None,
    ):
        reached = {}
        self.weights = {} if frozen is None else frozen
        self.ranks = np.full((depth, len(LEARNED)), -1)
        total = 0.0
        states = np.array(targets.hidden).reshape(-1, HIDDEN).astype(np.float64)
        learned = [position for position in LEARNED if position >= 0]
        for k in range(1, depth + 1):
            for n, position in enumerate(LEARNED):
                if position < 0 or position % LENGTH < k:
                    continue
                y = features(weights, targets, position // LENGTH, position % LENGTH - k, k)
                logits = y @ weights["lm_head.2.weight"].T
                q = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
                p = np.zeros(VOCAB)
                np.add.at(p, np.array(targets.ids[n]), np.array(targets.probs[n]))
                start = position - k
                if frozen is None:
                    self.weights[k, n] = 1.0 if equal_weights else reached.get(start, 1.0)
                total += self.weights[k, n] * -(p * np.log(q)).sum()
                if axes is not None:
                    square = np.square(states[learned] @ axes).sum() / len(learned)
                    distance = np.square(y[: axes.shape[1]] - states[position] @ axes).sum()
                    total += REGRESSION_WEIGHT * self.weights[k, n] * distance / square
                reached[start] = reached.get(start, 1.0) * np.minimum(p, q).sum()
                choice = int(np.array(targets.choices[n]))
                self.ranks[k - 1, n] = VOCAB if choice < 0 else (logits > logits[choice]).sum()
        self.loss = total / sum(self.weights.values())


@pytest.mark.parametrize(
    ("rnn", "few", "depth", "equal_weights"),
    [
        (True, False, DEPTH, False),
        (False, True, DEPTH, False),
        (True, True, 3, True),
        (False, False, LENGTH - 1, True),
    ],
)
def test_the_loss_matches_one_draft_at_a_time(rnn, few, depth, equal_weights):
    drafter, targets = make(rnn, few=few)
    found = draft_loss(drafter, targets, depth, equal_weights=equal_weights)
    wanted = Reference(parameters(drafter), targets, depth, equal_weights)
    assert found.loss.item() == pytest.approx(wanted.loss, abs=1e-5)
    assert np.array_equal(np.array(found.ranks), wanted.ranks)
    shifted = targets._replace(hidden=mx.roll(targets.hidden, 1, 1))
    other = draft_loss(drafter, shifted, depth, equal_weights=equal_weights).loss.item()
    assert other != pytest.approx(wanted.loss, abs=1e-3)


@pytest.mark.parametrize("width", [4, 6])
def test_the_regression_loss_matches_the_reference(width):
    drafter, targets = make()
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(HIDDEN, HIDDEN)))[0][:, :width]
    found = draft_loss(drafter, targets, DEPTH, axes=mx.array(axes, mx.float32))
    plain, wanted = (
        Reference(parameters(drafter), targets, DEPTH, False, axes=each) for each in (None, axes)
    )
    assert found.loss.item() == pytest.approx(wanted.loss, abs=1e-5)
    assert wanted.loss > 1.1 * plain.loss
    assert np.array_equal(np.array(found.ranks), wanted.ranks)


@pytest.mark.parametrize("equal_weights", [False, True])
def test_the_gradient_matches_finite_differences(equal_weights):
    """The weights of the guesses are constants."""
    drafter, targets = make(few=True)

    def compute():
        return draft_loss(drafter, targets, DEPTH, equal_weights=equal_weights).loss

    _, grads = nn.value_and_grad(drafter, compute)()
    before = parameters(drafter)
    frozen = Reference(before, targets, DEPTH, equal_weights).weights
    rng = np.random.default_rng(0)
    flat = tree_flatten(grads)
    for name, grad in flat:
        direction = rng.normal(size=grad.shape)
        losses = []
        for step in (1e-6, -1e-6):
            moved = before | {name: before[name] + step * direction}
            losses.append(Reference(moved, targets, DEPTH, equal_weights, frozen).loss)
        slope = float((np.array(grad).astype(np.float64) * direction).sum())
        measured = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx(measured, rel=1e-3, abs=1e-5), name
        assert abs(slope) > 1e-5, f"negative control: {name} matters"


@pytest.mark.parametrize("chunk", [1, 4])
def test_less_memory_gives_the_same_gradient(chunk, monkeypatch):
    drafter, targets = make()

    def gradient():
        grads = nn.value_and_grad(drafter, lambda: draft_loss(drafter, targets, DEPTH).loss)()[1]
        return dict(tree_flatten(grads))

    wanted = gradient()
    monkeypatch.setattr(loss, "LOGITS_IN_MEMORY", chunk * VOCAB)
    found = gradient()
    assert found.keys() == wanted.keys()
    assert all(mx.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_unlearned_positions_and_padding_change_nothing():
    drafter, targets = make()
    padded = targets._replace(probs=mx.where(targets.positions[:, None] < 0, 0.5, targets.probs))
    plain = draft_loss(drafter, targets, DEPTH).loss.item()
    assert draft_loss(drafter, padded, DEPTH).loss.item() == plain
    nothing = targets._replace(positions=mx.full((len(LEARNED),), -1))
    assert draft_loss(drafter, nothing, DEPTH).loss.item() == 0, "not NaN"


def test_a_token_outside_the_vocabulary_teaches_nothing():
    drafter, targets = make(few=True)
    unknown = targets._replace(
        probs=mx.zeros_like(targets.probs), choices=mx.full((len(LEARNED),), -1)
    )
    loss, grads = nn.value_and_grad(drafter, lambda: draft_loss(drafter, unknown, 2).loss)()
    assert loss.item() == 0
    assert not (draft_loss(drafter, unknown, 2).ranks == 0).any()
    flat = tree_flatten(grads)
    assert all(mx.abs(grad).max().item() == 0 for _, grad in flat)
