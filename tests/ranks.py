"""What each rank of a sharded model decodes, as JSON: run by test_sharded.py under `mlx.launch`."""

from __future__ import annotations

import json

import mlx.core as mx
from families import hidden_states, make_family, make_follower
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import sharded_load
from toys import ids, run

from mlx_redrafter import load
from mlx_redrafter.demo import DIRECTORY, load_demo

PROMPT = [(7 * i + 3) % 50 for i in range(9)]


def decode_demo(group: mx.distributed.Group) -> dict[str, list[int]]:
    """The demo's text in 8 bits: whole without its drafter, and as `sharded_load` shares it out with the drafter."""
    _, tokenizer, drafter = load_demo()
    prompt = tokenizer.encode("def main(")
    whole, (model, _) = load(DIRECTORY / "target")[0], sharded_load(str(DIRECTORY / "target"), tensor_group=group)
    for each in (whole, model):
        each.set_dtype(mx.float32)
    plain = run(whole, prompt, max_tokens=12)
    drafted = run(model, prompt, drafter, max_tokens=12, beam_width=2, draft_depth=3)
    return {"demo": ids(plain), "demo sharded": ids(drafted)}


def main() -> None:
    """Prints the tokens of one rank alone, of all ranks with a drafter, and those of a seed that was drawn."""
    group = mx.distributed.init()
    model = make_family("deepseek_v3")
    alone = ids(run(make_family("deepseek_v3"), PROMPT, max_tokens=30, temp=0.8, seed=1))
    model.shard(group)
    mx.eval(model.parameters())
    text = PROMPT + alone
    drafter = make_follower(model, text, hidden_states(model, text, 9, make_prompt_cache(model)), "mixed", 2)
    options = {"beam_width": 2, "draft_depth": 3, "temp": 0.8, "max_tokens": 24}
    together = run(model, PROMPT, drafter, seed=1, **options)
    decoded = {
        "rank": group.rank(),
        "size": group.size(),
        "alone": alone[:24],
        "together": ids(together),
        "accepted": together[-1].stats.accepted,
        "unseeded": ids(run(model, PROMPT, drafter, **options)),
        **decode_demo(group),
    }
    print("RANK " + json.dumps(decoded), flush=True)


if __name__ == "__main__":
    main()
