"""Prints what each rank of a sharded model decodes, as JSON. test_sharded.py runs it.

    python tests/helpers/ranks.py FOLDER

FOLDER holds one cache folder per rank.
"""

import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from helpers.cost_curves import make_costs
from helpers.families import make_family
from helpers.toys import CachingDrafter, Scripted, ids, make_ranks, run
from mlx_redrafter import RedrafterError, UnsupportedModelError
from mlx_redrafter.drafters.draft_model import DraftModel
from mlx_redrafter.machine import ranks
from mlx_redrafter.measuring import timing
from mlx_redrafter.measuring.pair import Pair
from mlx_redrafter.target.model_parts import get_head

PROMPT = [(7 * i + 3) % 50 for i in range(9)] * 2
SHARDABLE_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "full_attention_interval": 2}
SHARDED_MODELS = {
    "qwen2": (1, {}),
    "qwen3_moe": (1, {}),
    "qwen3_5": (2, {"tie_word_embeddings": False, **LINEAR}),
}
"""Dense, mixture-of-experts and hybrid modules that shard both ways.

Their values are (layers of a pipeline's rank, other config).
"""


def divide(model: nn.Module, how: str):
    """Keeps this rank's part of a model."""
    group = mx.distributed.init()
    model.model.pipeline(group) if how == "pipeline" else model.shard(group)
    mx.eval(model.parameters())


def choose_among_few(logprobs: mx.array) -> mx.array:
    """The likeliest of the first six tokens, so that texts repeat themselves."""
    return mx.argmax(logprobs[:, :6], axis=-1)


def decode(kind: str, how: str, length: int) -> dict[str, Any]:
    """Texts of the whole and of the sharded model, with counts of accepted drafts."""
    layers, config = SHARDED_MODELS[kind]
    n_layers = ranks.count_ranks() * layers if how == "pipeline" else 2
    config = config | {"num_hidden_layers": n_layers}
    whole, model = (make_family(kind, **SHARDABLE_HEADS, **config) for _ in range(2))
    divide(model, how)
    hidden = mx.random.normal((2, 64), key=mx.random.key(3))
    assert mx.allclose(get_head(model)(hidden), get_head(whole)(hidden), atol=1e-4)
    found = {}
    ways = {
        "greedy": {"sampler": choose_among_few},
        "seeded": {"temp": 0.8, "seed": 1},
    }
    for name, sampling in ways.items():
        alone = ids(run(whole, PROMPT, max_tokens=length + 8, **sampling))
        drafter = DraftModel(whole)
        options = {}
        if name == "greedy":
            captured = () if how == "pipeline" else (0,)
            drafter = CachingDrafter(whole, PROMPT + alone, 2, layers=captured)
            options = {"context": True, "beam_width": 2, "draft_depth": 3}
        steps = run(model, PROMPT, drafter, max_tokens=length, **options, **sampling)
        stats = steps[-1].stats
        found[name] = {"alone": alone[:length], "together": ids(steps), "accepted": stats.accepted}
        found[name]["of the context"] = stats.context_accepted
    if how == "pipeline":
        try:
            run(model, PROMPT, CachingDrafter(whole, PROMPT, 2), draft_depth=1)
        except UnsupportedModelError as error:
            reason = "reads the output of layer 0, which only one rank of the pipeline has"
            assert reason in str(error)
        else:
            raise AssertionError("a layer of another rank was read")
    return found


def measure_together() -> dict[str, Any]:
    """Measured costs of a pair of models, and a text planned with them."""
    whole = make_family("qwen2", **SHARDABLE_HEADS)
    model = make_family("qwen2", **SHARDABLE_HEADS)
    divide(model, "tensor")
    drafter = DraftModel(whole)
    texts = [ids(run(each, PROMPT, drafter, max_tokens=12)) for each in (model, model)]
    alone = ids(run(whole, PROMPT, max_tokens=12))
    costs = Pair(model, drafter).get_or_measure_costs(trees=True)
    unseeded = ids(run(model, PROMPT, max_tokens=8, temp=1.0))
    return {
        "costs": costs._asdict(),
        "texts": texts,
        "alone": alone,
        "unseeded": unseeded,
    }


def decide_otherwise() -> str:
    """The error when the last rank drafts one token fewer than the others."""
    model = make_family("qwen2", **SHARDABLE_HEADS)
    divide(model, "tensor")
    tokens = PROMPT * 3
    follower = Scripted(model, tokens, make_ranks("mixed", len(tokens), 2), 2)
    depth = 2 if ranks.get_rank() == ranks.count_ranks() - 1 else 3
    try:
        run(model, PROMPT, follower, max_tokens=8, draft_depth=depth)
    except RedrafterError as error:
        return str(error)
    return "none"


def main():
    """Decodes with every kind of model, sharded both ways."""
    os.environ["XDG_CACHE_HOME"] = str(Path(sys.argv[1], str(ranks.get_rank())))
    timing.MEASURING_SECONDS = 0.2
    found = {"rank": ranks.get_rank()}
    if ranks.count_ranks() == 2:
        found["measured"] = measure_together()
    costs = lambda pair, **how: make_costs(replay=float(how["trees"] is False))  # noqa: E731
    Pair.get_or_measure_costs = costs
    ways = ("tensor", "pipeline")
    cases = product(SHARDED_MODELS, ways)
    if ranks.count_ranks() > 2:
        cases = zip(SHARDED_MODELS, ways, strict=False)
    found["texts"] = {
        f"{kind}, {how}": decode(kind, how, 32 // ranks.count_ranks()) for kind, how in cases
    }
    found["error"] = decide_otherwise()
    found["files"] = sorted(
        {file.parent.name for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json")}
    )
    print("RANK " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
