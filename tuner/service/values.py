"""Which knob values are taken over HTTP: by type, nothing that names a file, a repository, code or a flag."""

import json
import re
from collections.abc import Collection, Iterable

from tuner.errors import BadInput, nearest
from tuner.knobs.catalogue import CATALOGUE
from tuner.records import JSON, Value

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}")
"""A value that is a text: one word, which is no path, no address, no module and no flag."""
MODEL_KEYS = frozenset(("model", "draft_model"))
OBJECTS = {
    "speculative_config": {
        "acceptance_method": str,
        "disable_by_batch_size": int,
        "disable_padded_drafter_batch": bool,
        "draft_model": str,
        "draft_tensor_parallel_size": int,
        "max_model_len": int,
        "method": str,
        "model": str,
        "num_speculative_tokens": int,
        "prompt_lookup_max": int,
        "prompt_lookup_min": int,
        "quantization": str,
    }
}
"""Keys and types of objects that HTTP may give; an object knob that is not here is not taken."""


def check(knob: str, values: Iterable[Value], models: Collection[str], where: str) -> None:
    """BadInput for a value that this service does not take; `models` are those that the node allows."""
    entry = CATALOGUE.get(knob)
    if entry is None:
        raise BadInput(f"{where}: '{knob}' is not a knob{nearest(knob, CATALOGUE)}")
    for value in values:
        if not isinstance(value, str) or entry.kind in ("preemption", "ints"):
            continue
        if entry.kind == "json":
            _object(knob, value, models, f"{where}: {knob}")
        elif not WORD.fullmatch(value):
            raise BadInput(f"{where}: {knob}: '{value[:80]}' is not taken over HTTP: one word is expected")


def _object(knob: str, text: str, models: Collection[str], where: str) -> None:
    known = OBJECTS.get(knob, {})
    try:
        found: JSON = json.loads(text)
    except ValueError:
        raise BadInput(f"{where}: '{text[:80]}' is no JSON object") from None
    if not known or not isinstance(found, dict):
        raise BadInput(
            f"{where} is not taken over HTTP: whoever runs the node writes it in a study file there"
        )
    for key, value in found.items():
        if key not in known:
            raise BadInput(f"{where}: '{key[:80]}' is not taken over HTTP{nearest(key, known)}")
        if value is None:
            continue
        if type(value) is not known[key]:
            raise BadInput(f"{where}: {key}: a {known[key].__name__} is expected")
        if isinstance(value, str):
            _text(key, value, models, where)


def _text(key: str, value: str, models: Collection[str], where: str) -> None:
    if key in MODEL_KEYS and value in (*models, "ngram"):
        return
    if key in MODEL_KEYS:
        raise BadInput(f"{where}: {key}: '{value[:80]}' is not allowed on this node: {', '.join(models)}")
    if not WORD.fullmatch(value):
        raise BadInput(f"{where}: {key}: '{value[:80]}' is not taken over HTTP: one word is expected")
