"""Every kind of drafter with the same trainer: its loss matches its drafts, it learns, resumes and
decodes.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from helpers.checkpoints import same, tensors
from helpers.heads import KINDS, make_head
from mlx_redrafter import generate_step, load_drafter
from mlx_redrafter.demo import demo_prompts
from mlx_redrafter.drafters import TRAINABLE
from mlx_redrafter.drafters.protocol import Drafter
from mlx_redrafter.text.encoding import encode
from mlx_redrafter.training.data import make_batches
from mlx_redrafter.training.hidden_states import add_hidden_states
from mlx_redrafter.training.loss import draft_loss
from mlx_redrafter.training.targets import initialize_drafter, make_targets
from mlx_redrafter.training.trainer import load_checkpoint, train_drafter

HIDDEN = 16
VOCAB = 23
DEPTH = 4


def draft(drafter: Drafter, model, ids: np.ndarray, start: int) -> mx.array:
    """(DEPTH, V) logits of a draft from a position of a text, fed the text's own tokens."""
    hidden = model.model(mx.array(ids[None]))[0]
    advance = drafter.begin(hidden[start], model.model.embed_tokens)
    state = None
    rows = []
    for token in ids[start + 1 : start + 1 + DEPTH]:
        logits, state = advance(mx.array([int(token)]), state)
        rows.append(logits[0])
    return mx.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_matches_its_drafts(kind, model, examples):
    drafter = make_head(kind, HIDDEN, VOCAB)
    targets = make_targets(model.model.embed_tokens, add_hidden_states(model, examples[:2]))
    value, grads = nn.value_and_grad(
        drafter, lambda: draft_loss(drafter, targets, DEPTH, equal_weights=True).loss
    )()
    total = 0.0
    count = 0
    for ids, offset, *_ in examples[:2]:
        wanted = mx.softmax(model(mx.array(ids[None]))[0], axis=-1)
        for start in range(len(ids) - 1):
            rows = nn.log_softmax(draft(drafter, model, ids, start), axis=-1)
            for k, row in enumerate(rows):
                if max(offset, 2) - 1 <= (last := start + 1 + k) < len(ids) - 1:
                    total = total - float(np.array((wanted[last] * row).sum()))
                    count = count + 1
    assert count
    assert value.item() == pytest.approx(total / count, rel=1e-3)
    flat = tree_flatten(grads)
    assert all(mx.abs(grad).max().item() > 0 for _, grad in flat), "all parameters learn"


@pytest.mark.parametrize("kind", TRAINABLE)
def test_it_learns_and_resumes_to_the_same_weights(kind, model, examples, tmp_path):
    how = {"depth": 3, "learning_rate": 1e-2}
    own = {"exit_dim": 32} if kind == "recurrent" else {}
    batches = make_batches(add_hidden_states(model, examples), 2, seed=1)
    drafters = []
    made = TRAINABLE[kind].for_training(HIDDEN, VOCAB, depth=3, draft_vocab_size=None, **own)
    for _ in range(4):
        mx.random.seed(5)
        drafters.append(initialize_drafter(model, made))
    untrained, whole, stopped, resumed = drafters
    embedding = model.model.embed_tokens

    def progress(done):
        return done / 60

    def stop(done, share, shown):
        return done == 20

    train_drafter(embedding, whole, batches, progress, **how)
    path = tmp_path / "checkpoint.safetensors"
    train_drafter(embedding, stopped, batches, progress, **how, checkpoint=path, on_iteration=stop)
    train_drafter(embedding, resumed, batches, progress, **how, checkpoint=path)
    assert load_checkpoint(path) == 60
    assert same(tensors(resumed), tensors(whole))
    assert not same(tensors(stopped), tensors(whole))
    targets = make_targets(embedding, batches(0))
    before, after = (
        draft_loss(drafter, targets, 3, equal_weights=True).loss.item()
        for drafter in (untrained, whole)
    )
    assert after < before - 0.05


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_run_of_each_kind_decodes_exactly(kind, train, prompts, target, tmp_path):
    size = {"recurrent": ("--exit-dim", "32"), "medusa": ("--draft-vocab-size", "100")}[kind]
    status, said = train(tmp_path / "drafter", "--prompts", prompts, "--drafter-type", kind, *size)
    assert status == 0
    model, tokenizer = load(target)
    drafter = load_drafter(tmp_path / "drafter", model)
    assert drafter.args.model_type in next(line for line in said if line.startswith("drafter: "))
    assert drafter.args.draft_vocab_size == (100 if kind == "medusa" else None)
    assert drafter.args.max_depth in (None, 3)
    ids = encode(tokenizer, demo_prompts()[1])
    for temp in (0.0, 0.8):
        plain = [
            token for token, _, _ in generate_step(ids, model, max_tokens=12, temp=temp, seed=1)
        ]
        steps = list(
            generate_step(ids, model, drafter, max_tokens=12, temp=temp, seed=1, plan=(2, 3))
        )
        assert [token for token, _, _ in steps] == plain
