"""Manifests and values hold to the schemas of what reads them, and lose nothing of the profile."""

import json
import shlex

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.profiles.test_export import ARGV, a_profile
from tests.public import public
from tuner.errors import BadInput
from tuner.profiles.export import PRODUCTION_STACK, kustomize, production_stack, render, slug, split_flags
from tuner.records import JSON

PROFILES = {
    "usual": ARGV,
    "empty": (),
    "tensor": ("--tensor-parallel-size", "2", "--max-num-seqs", "256"),
    "unlike its chart": ("--max-model-len", "8k", "--dtype=bfloat16", "--no-enable-chunked-prefill"),
}


def schema(name: str) -> dict[str, JSON]:
    found: dict[str, JSON] = json.loads(public(name).read_text())
    return found


def closed(node: JSON) -> JSON:
    """The same schema, refusing keys that it does not name: a chart ignores those in silence."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {name: closed(each) for name, each in node.items()}
    if node.get("properties") and node.get("type") == "object" and not node.get("additionalProperties"):
        made["additionalProperties"] = False
    return made


def at(value: JSON, *path: str | int) -> JSON:
    """What lies in a document under some keys and indices."""
    for step in path:
        value = value[step] if isinstance(value, dict) else value[int(step)]  # type: ignore[index]
    return value


def mapping(value: JSON) -> dict[str, JSON]:
    assert isinstance(value, dict)
    return value


def listed(value: JSON) -> list[JSON]:
    assert isinstance(value, list)
    return value


def loaded(format: str, argv: tuple[str, ...]) -> dict[str, JSON]:
    found: dict[str, JSON] = yaml.safe_load(render(a_profile(argv), format))
    return found


@pytest.mark.parametrize("argv", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("helm-production-stack", "production-stack.values.schema.json"),
        ("kserve", "kserve.llminferenceservice.v1alpha2.openapi.json"),
    ],
)
def test_values_hold_to_the_schema_and_name_only_its_keys(
    format: str, name: str, argv: tuple[str, ...]
) -> None:
    checked = mapping(closed(schema(name)))
    jsonschema.Draft202012Validator(checked).validate(loaded(format, argv))


@pytest.mark.parametrize("argv", PROFILES.values(), ids=PROFILES)
def test_llm_d_values_hold_to_the_schema(argv: tuple[str, ...]) -> None:
    told = schema("llm-d-modelservice.values.schema.json")
    values = loaded("helm-llm-d", argv)
    jsonschema.Draft7Validator(told).validate(values)
    container = mapping(at(told, "properties", "decode", "properties", "initContainers", "items"))
    made = dict(mapping(at(values, "decode", "containers", 0)))
    assert made.pop("modelCommand") == "vllmServe"
    jsonschema.Draft7Validator({**container, "additionalProperties": False}).validate(made)


def test_a_key_that_the_chart_does_not_know_would_be_found() -> None:
    checked = mapping(closed(schema("production-stack.values.schema.json")))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(checked).validate({"servingRuntime": {"extraArgs": []}})


def test_the_production_stack_gets_every_flag_once_and_no_false() -> None:
    values = production_stack(a_profile())
    config = mapping(at(values, "servingEngineSpec", "modelSpec", 0, "vllmConfig"))
    extra = [str(word) for word in listed(config.pop("extraArgs"))]
    assert config == {"maxNumSeqs": 128, "enableChunkedPrefill": True, "gpuMemoryUtilization": 0.9}
    assert "--no-enable-prefix-caching" in extra
    assert False not in config.values()
    typed = {flag for flag, (key, _) in PRODUCTION_STACK.items() if key in config}
    named = {flag.name for flag in split_flags(extra)}
    assert typed | named == {flag.name for flag in split_flags(ARGV)}
    assert typed & named == set()


def test_tensor_parallelism_goes_where_the_chart_keeps_it() -> None:
    for format, place in (("helm-llm-d", "decode"), ("kserve", "spec")):
        values = loaded(format, PROFILES["tensor"])
        assert at(values, place, "parallelism") == {"tensor": 2}
        assert "tensor-parallel-size" not in json.dumps(values)


def test_kserve_gets_the_arguments_in_words_a_shell_reads_back() -> None:
    values = loaded("kserve", ARGV)
    env = listed(at(values, "spec", "template", "containers", 0, "env"))
    by_name = {at(each, "name"): at(each, "value") for each in env}
    words = shlex.split(str(by_name["VLLM_ADDITIONAL_ARGS"]))
    assert sorted(split_flags(words), key=lambda flag: flag.name) == sorted(
        split_flags(ARGV), key=lambda flag: flag.name
    )
    assert by_name["VLLM_ATTENTION_BACKEND"] == "FLASH_ATTN"


def test_kserve_refuses_a_model_that_is_a_path() -> None:
    profile = a_profile()
    key = type(profile.key)(model="/models/qwen", target="n1", workload="chat")
    fields = {name: getattr(profile, name) for name in type(profile).__dataclass_fields__}
    with pytest.raises(BadInput, match="'/models/qwen' is a path"):
        render(type(profile)(**(fields | {"key": key})), "kserve")


def test_the_patched_deployment_and_the_config_map_are_valid() -> None:
    version = kubernetes_validate.latest_version()
    patch = loaded("kustomize", ARGV)
    template = mapping(at(patch, "spec", "template"))
    pod = mapping(template["metadata"]) | {"labels": {"app": "vllm"}}
    base = {"selector": {"matchLabels": {"app": "vllm"}}, "template": {**template, "metadata": pod}}
    kubernetes_validate.validate({**patch, "spec": base}, version, strict=True)
    config = loaded("configmap", ARGV)
    kubernetes_validate.validate(config, version, strict=True)
    data = mapping(config["data"])
    assert data["vllm.yaml"] == render(a_profile(), "vllm-yaml")
    assert json.loads(str(data["profile.json"]))["version"] == 3


def test_what_kubernetes_would_expand_is_escaped() -> None:
    patch = kustomize(a_profile(("--chat-template", "$(HOME)/x")))
    assert "$$(HOME)/x" in json.dumps(patch)


def test_a_systemd_drop_in_quotes_for_systemd() -> None:
    text = render(a_profile(("--x", '{"a": "50%"}'), {"B": "c:\\d"}), "systemd")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        "[Service]",
        'Environment="B=c:\\\\d"',
        'Environment="VLLM_ADDITIONAL_ARGS=--x \'{\\"a\\": \\"50%%\\"}\'"',
    ]


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-7B-Instruct", "---", "/models/Ünïcode model" * 9, ""])
def test_names_are_names_to_kubernetes(text: str) -> None:
    made = slug(text, 58)
    assert made
    assert made == made.strip("-").lower()
    assert len(made) <= 58
    assert made.isascii()
