"""What is linted: an engine's arguments and all that is known of its release, its card and its model."""

import json
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner import yamltext
from tuner.errors import BadInput, NotFound, Unavailable
from tuner.knobs import model as models
from tuner.knobs.baseline import Imported
from tuner.knobs.catalogue import parse_version, read_back, table
from tuner.knobs.discover import GpuKind, facts_of_version
from tuner.knobs.engine_starts import FoundEngine
from tuner.knobs.manifests import sources
from tuner.knobs.model import ModelFacts
from tuner.records import Candidate, EngineFacts

_IMAGE = re.compile(r"vllm[\w./-]*(?::|[\"']?[\s,]+tag:\s*[\"']?)v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)")
_QUANTISED = re.compile(r"(?i)awq|gptq|fp8|fp4|int4|int8|w4a16|w8a8|bnb|gguf|4bit|8bit")
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNumbers:
    """What a running server says of itself. `tokens` is its KV cache's size, `preemptions` its own count."""

    tokens: int | None = None
    preemptions: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSubject:
    """One engine. `old` is the release that it runs (by its image). `facts` is the release for which it is
    checked. `shape` is None if the model's shape is not known; `shapeless` says why.
    """

    source: FoundEngine
    imported: Imported
    facts: EngineFacts
    old: EngineFacts
    shape: ModelFacts | None = None
    shapeless: str = ""
    live: ServerNumbers | None = None

    @property
    def max_model_len(self) -> int | None:
        """The length that is asked for, in tokens; None: the model's own."""
        given = self.imported.candidate.get("max_model_len")
        return given if isinstance(given, int) and given > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineToLint:
    """An engine as it was found, before its arguments are read; `version` is its release, if told there."""

    source: FoundEngine
    version: str | None = None
    live: ServerNumbers | None = None
    effective: Candidate = field(default_factory=Candidate)


def engines(what: str, pick: str | None = None) -> tuple[EngineToLint, ...]:
    """Every engine of a command line, a file or a URL; the one named `pick`. BadInput as `sources` has it."""
    if re.match(r"https?://", what):
        return (_running(what),)
    everything = sources(what)
    found = [each for each in everything if pick in (None, each.name)]
    if not found:
        raise BadInput(f"--pick {pick}: give one of {', '.join(each.name for each in everything)}")
    path = Path(what).expanduser()
    tags = set(_IMAGE.findall(yamltext.read(path) if os.path.isfile(path) else what))
    version = tags.pop() if len(tags) == 1 else None
    return tuple(EngineToLint(source=each, version=version) for each in found)


def facts_for(version: str | None, gpu: GpuKind | None, platform: str) -> EngineFacts:
    """A release on a device by the shipped tables; the newest known without a version. BadInput for what is
    no release.
    """
    named = version or table().versions[-1]
    if not re.match(r"\d+\.\d+", named):
        raise BadInput(f"--engine-version {named}: write a release, such as {table().versions[-1]}")
    if parse_version(named) < parse_version(table().versions[0]):
        raise BadInput(f"vLLM {named}: the oldest known release is {table().versions[0]}")
    return facts_of_version(named, "cpu" if platform == "cpu" else "cuda", gpu=gpu)


def shape_of(model: str | None, config: Path | None, env: Mapping[str, str]) -> tuple[ModelFacts | None, str]:
    """The model's shape, or None and why there is none."""
    if config is not None:
        if not config.is_file():
            raise BadInput(f"--hf-config {config}: there is no such file")
        return models.from_config(model or str(config), config), ""
    if model is None:
        return None, "the command line names no model"
    try:
        return models.read(model, env=env), ""
    except NotFound:
        return None, f"the shape of {model} is not known here; give its config.json with --hf-config"
    except (BadInput, OSError) as error:
        return None, str(error)


def unlike(subject: LintSubject) -> str:
    """Why memory and step times of this engine cannot be computed; empty if they can."""
    knobs, args = subject.imported.candidate, subject.imported.args
    if subject.facts.platform == "cpu":
        return "--card cpu does not give the memory and speed of the host"
    if subject.shape is None:
        return subject.shapeless
    if subject.shape.unlike:
        return f"{subject.shape.name}: {subject.shape.unlike}, which the simulator does not know"
    name = subject.shape.name.rsplit("/", 1)[-1]
    if "quantization" in knobs or _QUANTISED.search(name):
        return "the weights are quantised, and the simulator knows only weights of 16 and 32 bits"
    for knob, what in (
        ("speculative_config", "speculative decoding"),
        ("cpu_offload_gb", "weights in host memory"),
        ("decode_context_parallel_size", "context parallelism"),
        ("pipeline_parallel_size", "pipeline parallelism"),
    ):
        if knobs.get(knob) not in (None, 0, 0.0, 1):
            return f"the simulator does not know {what}"
    for flag in ("enable-lora", "kv-transfer-config", "hf-overrides", "compilation-config", "spec-method"):
        if args.get(flag) not in (None, False):
            return f"the simulator does not know what --{flag} does to memory and steps"
    return ""


def _running(url: str) -> EngineToLint:
    """A running server by what it says of itself: /version, /v1/models, /metrics, and /server_info where the
    server has it (VLLM_SERVER_DEV_MODE=1). Unavailable when nothing answers.
    """
    from tuner.engine import metrics
    from tuner.engine.metrics import from_metrics, from_server_info

    base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    listed = _json(f"{base}/v1/models", required=True)
    text = _get(f"{base}/metrics") or ""
    scrape = metrics.parse(text) if text.strip() else None
    told = dict(from_metrics(scrape, read_back())) if scrape else {}
    told |= from_server_info(_json(f"{base}/server_info?config_format=json"), read_back())
    version = _json(f"{base}/version")
    data = listed.get("data") if isinstance(listed, dict) else None
    entry: Mapping[str, Any] = data[0] if data else {}
    model = entry.get("root") or entry.get("id")
    if isinstance(entry.get("max_model_len"), int):
        told["max_model_len"] = entry["max_model_len"]
    live = None
    if scrape:
        size = told.pop("kv_cache_size_tokens", None) or _tokens(scrape.config)
        live = ServerNumbers(
            tokens=int(size) if isinstance(size, int | float) and size else None,
            preemptions=scrape["preemptions"],
            finished=scrape["finished"],
        )
    return EngineToLint(
        source=FoundEngine(where=url, name=str(entry.get("id") or url), words=(), model=model),
        version=str(version["version"]) if isinstance(version, dict) and version.get("version") else None,
        live=live,
        effective=Candidate({name: v for name, v in told.items() if v is not None and name in read_back()}),
    )


def _tokens(config: Mapping[str, str]) -> int | None:
    blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None


def _json(url: str, *, required: bool = False) -> Any:
    text = _get(url, required=required)
    try:
        return json.loads(text) if text else None
    except ValueError:
        if required:
            raise Unavailable(f"{url}: the answer is not JSON; is this a vLLM server?") from None
        return None


def _get(url: str, *, required: bool = False) -> str | None:
    """A body, or None if the server lacks the page. Unavailable when a `required` page is not there."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read(16 * 1024 * 1024)
            return body.decode(errors="replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        if required:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"{url}: no answer ({reason})") from error
        return None
