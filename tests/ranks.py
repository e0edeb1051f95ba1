"""What each rank of a sharded model says, as JSON: run by tests/test_sharded.py under `mlx.launch`."""

from __future__ import annotations

import json

import mlx.core as mx
from families import Follower, make_family, read_again, script
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import sharded_load

from mlx_redrafter.demo import DIRECTORY, load_demo
from mlx_redrafter.generate import decode_tokens
from mlx_redrafter.options import Options

PROMPT = [(7 * i + 3) % 50 for i in range(9)]


def loaded(group: mx.distributed.Group) -> dict[str, list[int]]:
    """What the demo says, whole without its drafter, and as `sharded_load` shares it out with the drafter."""
    whole, tokenizer, drafter = load_demo()
    prompt = tokenizer.encode("def main(")
    beam = {"beam_width": 2, "draft_depth": 3, "temp": 0.0, "max_tokens": 12}
    plain = [step.token for step in decode_tokens(prompt, whole, None, Options(temp=0.0, max_tokens=12))]
    model, _ = sharded_load(str(DIRECTORY / "target"), tensor_group=group)
    model.set_dtype(mx.float32)
    drafted = [step.token for step in decode_tokens(prompt, model, drafter, Options(**beam))]
    return {"demo": plain, "demo sharded": drafted}


def main() -> None:
    """Prints the tokens of one rank alone, of all ranks with a drafter, and those of a seed that nobody gave."""
    group = mx.distributed.init()
    whole, model = make_family("deepseek_v3"), make_family("deepseek_v3")
    alone = [step.token for step in decode_tokens(PROMPT, whole, None, Options(max_tokens=30, temp=0.8, seed=1))]
    model.shard(group)
    mx.eval(model.parameters())
    heard = read_again(model, PROMPT + alone, 9, make_prompt_cache(model))
    drafter = Follower(model, PROMPT + alone, heard, script("half", 39, 2), 2)
    beam = {"beam_width": 2, "draft_depth": 3, "temp": 0.8, "max_tokens": 24}
    together = list(decode_tokens(PROMPT, model, drafter, Options(seed=1, **beam)))
    unseeded = [step.token for step in decode_tokens(PROMPT, model, drafter, Options(**beam))]
    said = {
        "rank": group.rank(),
        "size": group.size(),
        "alone": alone[:24],
        "together": [step.token for step in together],
        "accepted": together[-1].stats.accepted,
        "unseeded": unseeded,
        **loaded(group),
    }
    print("RANK " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
