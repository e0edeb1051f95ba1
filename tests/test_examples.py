"""The examples: the demo's recipe on tiny models, the losses in torch, and the sessions."""

import ast
import json
import re
import zipfile

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from examples import side_by_side, terminal_ui, timer
from examples.demo import corpus, drafter, edits, report
from examples.demo.library import split_files
from helpers.small import small_llama
from mlx_redrafter import Session, load_demo, load_drafter
from mlx_redrafter.drafters.recurrent import Drafter, DrafterArgs
from mlx_redrafter.training.data import Example
from mlx_redrafter.training.hidden_states import make_state_dtype
from mlx_redrafter.training.loss import TrainingTargets, draft_loss
from mlx_redrafter.training.settings import TrainingArgs
from mlx_redrafter.training.targets import make_targets

VOCAB = 32
PROMPT = "class Stack:\n"


@pytest.fixture
def few(monkeypatch):
    for name, value in (("BATCH_SIZE", 4), ("BATCHES", 2), ("LENGTH", 24), ("PROMPT", 8)):
        monkeypatch.setattr(drafter, name, value)


@pytest.mark.usefixtures("few")
def test_the_targets_texts_are_written_once(tmp_path):
    model = small_llama(vocab=VOCAB)
    tokens = np.random.default_rng(0).integers(VOCAB, size=400, dtype=np.uint16)
    texts = drafter.write_texts(model, tokens, tmp_path / "texts", 0.0, batches=2)
    assert texts.shape == (8, 24)
    pieces = {tuple(tokens[start : start + 8].tolist()) for start in range(0, 400, 8)}
    assert all(tuple(row[:8].tolist()) in pieces for row in texts)
    (tmp_path / "texts" / "001.npy").unlink()
    marked = np.zeros((4, 24), np.uint16)
    np.save(tmp_path / "texts" / "000.npy", marked)
    again = drafter.write_texts(model, tokens, tmp_path / "texts", 0.0, batches=2)
    assert (again[:4] == marked).all()
    assert (again[4:] == texts[4:]).all()


SOURCE = """
def readLines(path, limit=3):
    # one line
    lines = open(path, 'r').readlines()  # all of them
    self.limit = limit
    return {'lines': lines[:limit], 'stripText': path.strip()}
"""


def test_edits_of_the_library_keep_the_meaning():
    texts = [path.read_text(encoding="utf-8") for path in split_files()[1][:6]]
    made = edits.make_edits(texts, 40)
    assert len({edit.kind for edit in made}) >= 8
    assert made == edits.make_edits(texts, 40)
    for edit in made:
        assert edit.after != edit.before
        if edit.kind == "JSON key":
            assert json.loads(edit.before) != json.loads(edit.after)
            continue
        if edit.kind in ("quotes", "comments"):
            assert ast.dump(ast.parse(edit.before)) == ast.dump(ast.parse(edit.after))
        elif edit.kind == "snake case":
            assert ast.parse(edit.after)
            assert edit.after.count("_") > edit.before.count("_")
        else:
            *_, old, _, new = edit.instruction.rstrip(".").split()
            assert ast.parse(edit.after)
            assert re.sub(rf"\b{new}\b", old, edit.after) == edit.before


def test_edits_are_packed_without_cuts():
    made = [edits.Edit("any", "x" * n, "bb", "c" * (n % 7 + 1)) for n in range(1, 60)]
    ids, weights = edits.pack_edits(made, lambda text: [ord(letter) for letter in text], 0, 90)
    assert ids.shape[1] == 91
    assert weights.shape == (len(ids), 90)
    found = []
    for tokens, prompt in edits.split_edits(ids, weights, 0):
        found.append(("".join(map(chr, tokens)), prompt))
    packed = [edit for edit in made if len(edit.prompt + edit.after) < 91]
    expected = [(edit.prompt + edit.after + "\0", len(edit.prompt)) for edit in packed]
    assert sorted(found) == sorted(expected)
    assert (weights >= 1).sum() == sum(len(edit.after) + 1 for edit in packed)
    assert set(np.unique(weights)) == {0, np.float32(edits.PROMPT_WEIGHT), edits.CHANGED_WEIGHT}, (
        "no c is in a source"
    )


def test_changed_tokens_weigh_more():
    edit = edits.Edit("any", "x", "abcd", "abxd")
    _, weights = edits.pack_edits([edit], lambda text: [ord(letter) for letter in text], 0, 50, 0.0)
    changed = edits.CHANGED_WEIGHT
    assert weights[0, len(edit.prompt) - 1 :].tolist()[:6] == [1, 1, changed, 1, changed, 0], (
        "so is the end token"
    )
    assert not weights[0, : len(edit.prompt) - 1].any()


def test_exercises_follow_their_instruction():
    made = edits.make_exercises([SOURCE, "a.camelCase = 'word' + other_word"], 300)
    assert {edit.kind for edit in made} == set(edits.EXERCISES)
    for edit in made:
        assert edit.before != edit.after
        if edit.instruction.startswith("rename"):
            *_, old, _, new = edit.instruction.rstrip(".").split()
            assert edit.after.count(new) - edit.before.count(new) >= 1 or new in old
            assert re.sub(rf"\b{new}\b", old, edit.after) == re.sub(rf"\b{new}\b", old, edit.before)
        if edit.kind == "comments":
            assert "#" in edit.before
            assert "#" not in edit.after


@pytest.mark.usefixtures("few")
def test_a_drafter_is_trained_and_described(tmp_path):
    model = small_llama(vocab=VOCAB)
    tokens = np.random.default_rng(0).integers(VOCAB, size=400, dtype=np.uint16)
    args = DrafterArgs(
        model.args.hidden_size, VOCAB, exit_dim=8, num_draft_layers=1, draft_vocab_size=12
    )
    settings = TrainingArgs(draft_depth=3, batch_size=2)
    texts = [
        Example(row, 0) for row in drafter.write_texts(model, tokens, tmp_path / "texts", batches=2)
    ]
    drafter.train(model, texts, args, settings, 2, tmp_path)
    drafter.describe(model, tokens, tmp_path, depth=3)
    found = load_drafter(tmp_path, model).args
    assert len(found.acceptance) == 3
    assert found.draft_vocab_size == 12
    prompts = report.choose_prompts(load_demo()[1], 5)
    assert len(prompts) == 5
    assert all("def " in text.splitlines()[0] for text in prompts.values())


def test_package_texts_skip_duplicates_and_binary_files(tmp_path):
    held_out = "".join(f"    return compute_the_held_out_value(number={i})\n" for i in range(40))
    own = "".join(f"    self.assertEqual(parse_the_argument({i}), {i})\n" for i in range(40))
    files = {
        "a/own.py": own.encode(),
        "a/copy.py": held_out.encode(),
        "a/latin.py": own.encode() + b"# \xe9\n",
    }
    files |= {
        "a/short.py": b"x = 1\n",
        "a/data.txt": own.encode(),
        "a/more.py": own.replace("self", "that").encode(),
    }
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    wheels = list(tmp_path.glob("*.whl"))
    assert sorted(corpus.package_texts(wheels, [held_out])) == sorted(
        [own, own.replace("self", "that")]
    )
    assert held_out in set(corpus.package_texts(wheels, []))


def test_texts_are_encoded_with_their_own_tokenizer(tmp_path):
    texts = ["def one(x):\n    return x + 1\n", "def two(y):\n        return 'é'\n"]
    tokenizer = corpus.train_tokenizer(texts * 20, 300, tmp_path)
    stream = corpus.encode_texts(texts, tokenizer)
    assert stream.dtype == np.uint16
    assert (stream == tokenizer.eos_token_id).sum() == 2
    assert sorted(tokenizer.decode(stream).split(corpus.END)) == sorted(["", *texts])


@pytest.mark.torch
def test_a_torch_llama_matches_mlx_lm(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from examples.demo import target

    # torch.compile would need a C++ compiler.
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    for name, value in {
        "BATCH_TOKENS": 32,
        "SHORT": 8,
        "LONG": 16,
        "WARM_UP": 2,
        "CHECKPOINT_SECONDS": 0,
    }.items():
        monkeypatch.setattr(target, name, value)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    settings = target.make_config(VOCAB, 0) | sizes
    tokens = np.random.default_rng(0).integers(4, size=600).astype(np.uint16)
    target.train(target.make_text_batches(tokens, tokens, 12), settings, 12, tmp_path)
    first = mx.load(str(tmp_path / "model.safetensors"))
    own = target.Llama(settings)
    own.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in first.items()})
    ids = np.arange(12)[None] % 5
    with torch.no_grad():
        expected = own(torch.from_numpy(ids)).numpy()
    found = np.array(load_model(tmp_path)[0](mx.array(ids)))
    assert np.abs(found - expected).max() < 1e-4 < np.abs(expected).max()


@pytest.mark.torch
def test_the_torch_loss_equals_the_trainers(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from examples.smollm2 import stored_states, torch_drafter, torch_loss

    monkeypatch.setattr(torch_loss, "CHUNK", 7)
    rng = np.random.default_rng(0)
    dims = 16
    embedding = nn.Embedding(VOCAB, dims)
    vectors = torch.from_numpy(np.array(embedding.weight))
    draft_ids = torch.arange(4, 28, 2)
    index = stored_states.make_index(draft_ids, VOCAB)
    weights, axes = torch_drafter.initialize_weights(vectors, draft_ids, 8, 2, seed=0)
    args = DrafterArgs(dims, VOCAB, exit_dim=8, num_draft_layers=2, draft_vocab_size=12)
    drafter = Drafter(args)
    arrays = {name: mx.array(weight.numpy()) for name, weight in weights.items()}
    drafter.load_weights([*arrays.items(), ("draft_ids", mx.array(draft_ids.int().numpy()))])

    examples = []
    stored = []
    for size, offset in ((20, 6), (13, 3)):
        tokens = rng.integers(VOCAB, size=size).astype(np.int32)
        states = np.zeros(size - 1, make_state_dtype(dims))
        labels = states["ids"].shape[1]
        states["hidden"] = rng.normal(size=(size - 1, dims))
        states["ids"] = np.argsort(rng.random((size - 1, VOCAB)))[:, :labels]
        states["probs"] = rng.dirichlet(np.ones(labels) / 4, size - 1)
        example = Example(tokens, offset, states)
        examples.append(example)
        padded = np.append(states, states[-1:])
        ids = index.numpy()[padded["ids"].astype(np.int64)].astype(np.int16)
        lead = example.first_learned
        stored.append(
            stored_states.StoredExample(tokens, padded["hidden"], ids, padded["probs"], lead, 0.0)
        )

    targets = make_targets(embedding, examples, mx.array(draft_ids.int().numpy()))

    def compute(*parts):
        known = mx.array(axes.numpy())
        return draft_loss(drafter, TrainingTargets(*parts), torch_loss.DEPTH, axes=known).loss

    expected, grads = nn.value_and_grad(drafter, compute)(*targets)
    for weight in weights.values():
        weight.requires_grad_()
    batch = stored_states.join_examples(stored, index)
    own = torch_drafter.TorchDrafter(weights, vectors)
    shares = [1.0] * torch_loss.DEPTH
    found, _ = torch_loss.draft_loss(own, axes, batch, shares)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, grad in tree_flatten(grads):
        assert np.abs(weights[name].grad.numpy() - np.array(grad)).max() < 1e-4, name
    other, _ = torch_loss.draft_loss(own, axes, batch, [0.5] * torch_loss.DEPTH)
    assert other.item() != pytest.approx(expected.item(), rel=1e-2), "negative control"


@pytest.mark.torch
def test_the_lk_loss_has_the_gradient_of_its_formula(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from examples.smollm2 import torch_loss

    monkeypatch.setattr(torch_loss, "CHUNK", 4)
    torch.manual_seed(0)
    y = torch.randn(10, 6, requires_grad=True)
    head = torch.randn(40, 6, requires_grad=True)
    weights = torch.rand(10)
    ids = torch.stack([torch.randperm(40)[:8] for _ in range(10)])
    probs = torch.rand(10, 8)
    probs = 0.9 * probs / probs.sum(-1, keepdim=True)
    share = 0.3
    next_ids = torch.randint(-1, 40, (10,))
    found = torch_loss.HeadLoss.apply(y, head, weights, ids, probs, next_ids, share)
    p = torch.zeros(10, 40).scatter_add(1, ids, probs)
    overlap = torch.minimum(p, (y @ head.T).softmax(-1)).sum(-1)
    entropy = -(p * (y @ head.T).log_softmax(-1)).sum(-1)
    expected = (weights * (share * entropy + (1 - share) * (1 - overlap))).sum()
    torch.testing.assert_close(found[:3], (expected, entropy, overlap))
    assert found[3].tolist() == ((y @ head.T).argmax(-1) == next_ids).tolist()
    wanted = torch.autograd.grad(expected, (y, head))
    torch.testing.assert_close(torch.autograd.grad(found[0], (y, head)), wanted)


def words(text: str) -> str:
    """Letters, digits and underscores, which panels do not change."""
    return re.sub(r"\W", "", text)


def test_answer_streams_into_a_panel(capsys):
    terminal_ui.main(["--max-tokens", "30"])
    answer = Session(*load_demo(), max_tokens=30, draft_depth=3).send(PROMPT)
    assert words(answer.text) in words(capsys.readouterr().out)


def test_two_sessions_continue_one_conversation(capsys):
    side_by_side.main(["--max-tokens", "12"])
    shown = capsys.readouterr().out
    session = Session(*load_demo(), temp=0.8, draft_depth=3)
    session.send(PROMPT, max_tokens=20, seed=0)
    answers = [
        session.fork().send("\n", max_tokens=12, seed=seed).text for seed in side_by_side.SEEDS
    ]
    assert answers[0] != answers[1]
    for answer in answers:  # a narrow panel breaks lines, but not short words
        assert all(word in shown for word in re.findall(r"\w+", answer) if len(word) < 20)


def test_timer_ends_each_answer(capsys):
    timer.main(["--seconds", "1"])
    found = re.findall(r"cancelled after (\d+) tokens; (\d+) in the", capsys.readouterr().out)
    (first, _), (second, held) = ((int(made), int(held)) for made, held in found)
    assert first > 0 < second
    assert held > first + second, "the second answer follows the first"
