"""Reads the shape of a model from its config.json or from shipped data, without engine or network."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import BadInput, NotFound, nearest
from tuner.settings import shipped

_BYTES = {"float32": 4, "float": 4, "float16": 2, "bfloat16": 2, "half": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The numbers that decide memory and time. `head_dim` is in elements; `parameters` counts all weights.

    `stretch` is the factor by which the rotary embedding extends `max_len`. `unlike`: why the counts alone do
    not give its memory and step times; empty for a dense decoder in 16 or 32 bit.
    """

    name: str
    vocab_size: int
    max_len: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    parameters: int
    stretch: float = 1.0
    unlike: str = ""

    @property
    def longest(self) -> int:
        """The largest --max-model-len that vLLM accepts for the model, in tokens."""
        return int(self.max_len * self.stretch)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache for one token over all layers, in the model's own number format."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


def read(model: str, *, env: Mapping[str, str]) -> ModelFacts:
    """Facts of a model from its folder, from the local Hugging Face cache or from shipped shapes, in this
    order.

    `env` gives the place of the cache (HF_HUB_CACHE, HF_HOME, HOME). NotFound names the places that were
    searched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise NotFound(f"model folder {folder} holds no config.json")
        return from_config(model, folder / "config.json")
    known, snapshots = shapes(), _hub(env) / f"models--{model.replace('/', '--')}" / "snapshots"
    cached = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if cached:  # the newest revision
        return from_config(model, cached[-1])
    if model in known:
        return known[model]
    raise NotFound(
        f"there is no model '{model}'{nearest(model, known)}, neither as a folder nor in {_hub(env)}:"
        " download it, or give the folder that holds its config.json"
    )


def from_config(name: str, path: Path) -> ModelFacts:
    """Facts from a Hugging Face config.json. BadInput names the file and the key that is missing."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error})") from None
    text = raw.get("text_config", raw)

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if isinstance(text.get(key), int):
                return int(text[key])
        if default is None:
            raise BadInput(f"{path}: no whole number under '{keys[0]}'")
        return default

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    facts = ModelFacts(
        name=name,
        vocab_size=number("vocab_size"),
        max_len=number("max_position_embeddings", "n_positions"),
        layers=number("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=number("intermediate_size", "n_inner", default=4 * hidden),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        dtype_bytes=_BYTES.get(str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"), 2),
        parameters=0,
        stretch=_stretch(text),
        unlike=_unlike(raw, text),
    )
    return _counted(facts, experts=number("num_local_experts", "num_experts", default=1), raw=text)


def _stretch(text: Mapping[str, Any]) -> float:
    """The factor by which vLLM extends max_position_embeddings: linear, dynamic and YaRN scaling extend it,
    other kinds are part of the training and do not.
    """
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(rope, dict):
        return 1.0
    kind, factor = str(rope.get("rope_type", rope.get("type", "default"))), rope.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return 1.0
    trained, told = rope.get("original_max_position_embeddings"), text.get("max_position_embeddings")
    share = trained / told if kind == "yarn" and trained and told else 1.0
    return max(1.0, float(factor) * share)


_UNLIKE = {
    "quantization_config": "its checkpoint is quantised",
    "vision_config": "it also has an encoder for images",
    "audio_config": "it also has an encoder for sound",
    "kv_lora_rank": "its attention keeps compressed keys and values (MLA)",
    "num_local_experts": "it is a mixture of experts",
    "num_experts": "it is a mixture of experts",
    "n_routed_experts": "it is a mixture of experts",
    "layer_types": "its layers are of several kinds",
    "sliding_window": "its attention sees only a window of the tokens",
}


def _unlike(raw: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The first reason why a model is not a dense decoder of one kind of layer; empty if it is one."""
    for key, why in _UNLIKE.items():
        value = raw.get(key) or text.get(key)
        if key == "layer_types":
            value = isinstance(value, list) and len(set(value)) > 1
        if key == "sliding_window":
            value = value and text.get("use_sliding_window", True)
        if value and not (isinstance(value, int) and value == 1 and "experts" in key):
            return why
    return ""


def tokens_of(value: object) -> int:
    """A number of tokens as vLLM reads it (`16k` = 16,000, `16K` = 16,384); 0 if the engine chooses."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", str(value).strip())
    if match is None or isinstance(value, bool):
        return 0
    unit = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]
    return int(float(match[1]) * unit)


def shapes() -> dict[str, ModelFacts]:
    """The shipped shapes by the model's full name."""
    found = (json.loads(path.read_text()) for path in sorted(shipped("data", "models").glob("*.json")))
    return {raw["name"]: ModelFacts(**raw) for raw in found}


def _counted(facts: ModelFacts, *, experts: int, raw: Mapping[str, Any]) -> ModelFacts:
    """The facts with the weights of a gated decoder counted (Llama, Qwen2, Mistral and similar)."""
    attention = facts.hidden * facts.head_dim * (2 * facts.heads + 2 * facts.kv_heads)
    width = int(raw.get("moe_intermediate_size") or facts.intermediate) if experts > 1 else facts.intermediate
    layer = attention + 3 * facts.hidden * width * experts + 2 * facts.hidden
    if raw.get("model_type") == "qwen2":
        layer += facts.head_dim * (facts.heads + 2 * facts.kv_heads)
    tables = 1 if raw.get("tie_word_embeddings") else 2
    total = facts.layers * layer + tables * facts.vocab_size * facts.hidden + facts.hidden
    values = {name: getattr(facts, name) for name in facts.__slots__}
    return ModelFacts(**{**values, "parameters": total})


def _hub(env: Mapping[str, str]) -> Path:
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    home = (
        Path(env["HF_HOME"]) if env.get("HF_HOME") else Path(env.get("HOME", "~")) / ".cache" / "huggingface"
    )
    return home.expanduser() / "hub"
