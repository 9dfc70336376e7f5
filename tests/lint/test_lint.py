"""What `tuner lint` reads, computes and prints."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks.lint import pages
from benchmarks.table import load as tables
from tests.lint.test_planted import GOOD, MODEL, TABLE, Planted, linted, repeating
from tuner.cli import app
from tuner.commands.common import plain
from tuner.commands.trace import open_part
from tuner.errors import BadInput, Unavailable
from tuner.knobs import manifests
from tuner.knobs.discover import facts_of_version
from tuner.knobs.model import shapes
from tuner.lint import load, run, subject
from tuner.lint.findings import RULES, SEVERITIES, in_order, reaches
from tuner.lint.flags import IDLE
from tuner.lint.load import busiest, p95s, steady, window
from tuner.records import Slo
from tuner.simulator.cost import CARDS, Coefficients
from tuner.traffic import trace as traces
from tuner.traffic.trace import build

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "lint"
COMMANDS = [line.split("\t", 1) for line in (DATA / "commands.tsv").read_text().splitlines()[1:]]
SHAPE_32B = ROOT / "benchmarks" / "h100" / "qwen2.5-32b-shape" / "config.json"


def lint(line: str, **against: Any) -> run.LintedEngine:
    (engine,) = subject.engines(line)
    return run.lint(engine, run.LintOptions(**against), os.environ)


def ids(found: run.LintedEngine) -> set[str]:
    return {each.id for each in found.findings}


def typed(*words: str) -> Any:
    return CliRunner().invoke(app, ["lint", *words])


# -- the corpus -------------------------------------------------------------------------------------------


def test_a_hundred_public_command_lines_are_linted_without_a_crash() -> None:
    assert len(COMMANDS) >= 100
    assert len({repository for repository, _ in COMMANDS}) >= 5
    for _, words in COMMANDS:
        for version in ("0.32.0", "0.12.0"):
            (found,) = [lint(f"vllm serve {words}", version=version, card="h100-80", gpus=8)]
            assert found.version == version
            assert all(each.sentence and each.evidence for each in found.findings)


def test_a_public_command_line_is_simulated_where_its_shape_is_known() -> None:
    made = steady(8, 1500, 250, 200)
    for _, words in COMMANDS:
        found = lint(f"vllm serve {words}", version="0.32.0", card="h100-80", gpus=8, trace=made.trace)
        assert found.predicted or found.missing["traffic"]


# -- memory -----------------------------------------------------------------------------------------------


def boots() -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """(card, model, knobs, KV tokens) of recorded boots of vLLM 0.25.1 that compiled nothing."""
    titles = {card.title: name for name, card in CARDS.items()}
    for line in (DATA / "boots.jsonl").read_text().splitlines():
        boot = json.loads(line)
        if not boot["compiled"]:
            yield titles[boot["card"]], boot["model"], boot["args"], boot["kv_tokens"]
    for row in tables.rows("h200-7b", ROOT / "benchmarks" / "table"):
        if row["how"] == "relaunched" and row["compiled"] is False and row["kv_tokens"]:
            args = {"max_model_len": 16384, **row["launched"]}
            yield titles[row["card"]], "qwen2.5-7b-shape", args, row["kv_tokens"]


def test_kv_tokens_are_within_three_percent_of_recorded_boots_that_compiled_nothing() -> None:
    errors = []
    for card, model, args, measured in boots():
        words = [
            f"--{'' if value is not False else 'no-'}{name.replace('_', '-')}"
            + ("" if isinstance(value, bool) else f" {value}")
            for name, value in args.items()
        ]
        config = SHAPE_32B if "32b" in model else None
        found = lint(f"vllm serve {MODEL} {' '.join(words)}", version="0.25.1", card=card, config=config)
        assert found.kv_tokens is not None
        errors.append(found.kv_tokens / measured - 1)
    print(f"{len(errors)} boots, worst {max(map(abs, errors)):.2%}")
    assert len(errors) >= 4
    assert max(map(abs, errors)) <= 0.03


def test_older_releases_have_their_own_defaults_of_memory() -> None:
    new, old = (lint(GOOD, version=version, card="h100-80").kv_tokens for version in ("0.32.0", "0.10.2"))
    assert new is not None
    assert old is not None
    assert new > old


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"{GOOD} --quantization fp8", "quantised"),
        ("vllm serve Qwen/Qwen3-8B-AWQ", "not known here"),
        ("vllm serve org/unheard-of", "--hf-config"),
        (
            f'{GOOD} --speculative-config \'{{"method": "ngram", "num_speculative_tokens": 3}}\'',
            "speculative",
        ),
        (f"{GOOD} -pp 2", "pipeline"),
        (f"{GOOD} --enable-lora", "enable-lora"),
        (f"{GOOD} --cpu-offload-gb 4", "host memory"),
        ("vllm serve --max-num-seqs 8", "no model"),
    ],
)
def test_what_cannot_be_computed_is_said_and_not_claimed(line: str, why: str) -> None:
    made = steady(8, 1500, 250, 200)
    found = lint(line, version="0.32.0", card="h100-80", gpus=2, trace=made.trace)
    assert why in found.missing["fit"]
    assert {RULES[each.id].kind for each in found.findings} <= {"flags", "defaults", "parallelism"}
    assert found.kv_tokens is None
    assert not found.predicted


def test_what_the_text_does_not_give_is_said() -> None:
    found = lint("vllm serve $MODEL --max-num-seqs $SEATS", card="h100-80")
    assert any("SEATS" in note for note in found.unread)
    assert "no model" in found.missing["fit"]
    assert any("uses the flags of 0.33.0" in note for note in lint(GOOD, version="9.9").unread)
    with pytest.raises(BadInput, match="oldest known"):
        lint(GOOD, version="0.5")
    assert "cpu" in lint(GOOD, card="cpu").missing["fit"]


def test_a_key_that_the_chart_does_not_read_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(STACK.replace("maxNumSeqs", "maxNumBatchedTokens"))
    _, two = [run.lint(each, run.LintOptions(), os.environ) for each in subject.engines(str(path))]
    (each,) = [each for each in two.findings if each.id == "flag-ignored"]
    assert "vllmConfig.maxNumBatchedTokens does nothing" in each.sentence


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"vision_config": {}, "text_config": {}}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention"] * 2}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "several kinds"),
    ],
)
def test_a_config_that_is_no_dense_decoder_gives_no_numbers(
    tmp_path: Path, extra: dict[str, Any], why: str | None
) -> None:
    raw = json.loads(SHAPE_32B.read_text())
    path = tmp_path / "config.json"
    extra.pop("text_config", None)
    path.write_text(json.dumps({**raw, **extra}))
    found = lint("vllm serve some/model --max-model-len 4096", card="h200", config=path)
    assert (found.kv_tokens is None) == (why is not None)
    assert why is None or why in found.missing["fit"]


def test_the_shipped_shapes_have_as_many_parameters_as_their_layers() -> None:
    for shape in shapes().values():
        attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
        layers = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
        tables_ = (shape.parameters - layers) / (shape.vocab_size * shape.hidden)
        assert 0.99 < tables_ < 2.05, shape.name


# -- traffic ----------------------------------------------------------------------------------------------


def test_the_busiest_two_thousand_requests_of_a_long_trace_are_simulated() -> None:
    arrival = np.concatenate([np.arange(5000) * 1.0, 5000 + np.arange(2000) * 0.1, 5300 + np.arange(5000)])
    columns = {"arrival_s": arrival, "input_len": np.full(12000, 100), "output_len": np.full(12000, 10)}
    cut = busiest(build(columns))
    assert len(cut.trace) == 2000
    assert cut.trace.duration_s == pytest.approx(199.9, abs=1.0)
    assert "the busiest 2,000 of 12,000 requests" in cut.about


def test_a_long_trace_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its file, and by the name that it has in the history; the answer is that of the whole trace."""
    monkeypatch.setenv("TUNER_HOME", str(tmp_path / "home"))
    arrival = np.concatenate([np.arange(3000) * 1.0, 3000 + np.arange(2000) * 0.1, 3300 + np.arange(3000)])
    columns = {"arrival_s": arrival, "input_len": np.full(8000, 100), "output_len": np.full(8000, 10)}
    whole = build(columns)
    path = tmp_path / "long.parquet"
    traces.write(whole, path)
    assert typer_ok("trace", "import", str(path), "--name", "long")
    monkeypatch.setattr(traces, "read", lambda path: pytest.fail("the whole trace was read"))
    cut = busiest(whole)
    for ref in (str(path), "long"):
        found, rows = open_part(ref, window)
        assert rows == len(whole)
        assert found.digest == cut.trace.digest
        (one,) = json.loads(typed(GOOD, "--card", "h100-80", "--trace", ref, "--json").stdout)["engines"]
        assert one["traffic"] == cut.about


def typer_ok(*words: str) -> bool:
    return CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "repeats"),
    [
        (f"{GOOD} --max-num-seqs 8", False),
        (f"{GOOD} --num-gpu-blocks-override 1100", False),
        (f"{GOOD} --num-gpu-blocks-override 3000 --max-num-seqs 64", True),
        (GOOD, True),
    ],
)
def test_what_is_not_simulated_again_would_be_the_same(
    monkeypatch: pytest.MonkeyPatch, line: str, repeats: bool
) -> None:
    """Every finding and every number is that of an engine that is simulated each time it is asked for."""
    made = repeating().trace if repeats else steady(8, 1500, 250, 200).trace
    quick = lint(line, card="h100-80", version="0.32.0", trace=made)
    monkeypatch.setattr(load.Slack, "alike", lambda self, other: other)
    slow = lint(line, card="h100-80", version="0.32.0", trace=made)
    assert quick == slow


@pytest.mark.parametrize("flags", ["--max-num-seqs 16", "--max-num-batched-tokens 256 --max-num-seqs 64"])
def test_a_gain_without_a_range_is_that_of_slower_and_faster_steps_too(
    monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """Both engines have a backlog all the time, so slower and faster ones are not simulated."""
    made = steady(100, 3000, 100, 400)
    against = {"card": "h100-80", "version": "0.32.0", "trace": made.trace}

    def gains() -> tuple[str, str]:
        (each,) = [each for each in lint(f"{GOOD} {flags}", **against).findings if each.id == "study-gain"]
        found = re.search(r"E2E (\d+)%(?: to (\d+)%)? better", each.sentence)
        assert found is not None
        return found[1], found[2] or found[1]

    one, same = gains()
    assert one == same
    monkeypatch.setattr(load, "BACKLOG", float("inf"))
    assert all(abs(int(each) - int(one)) <= 1 for each in gains())


@pytest.mark.parametrize(("slo", "kept"), [("ttft=500,tpot=50", True), ("ttft=1", False), (None, False)])
def test_an_slo_that_is_kept_is_told(slo: str | None, kept: bool) -> None:
    given = ["--card", "h100-80", "--rate", "2", "--input", "500", "--output", "100", "--fail-on", "never"]
    done = CliRunner().invoke(app, ["lint", GOOD, *given, *(["--slo", slo] if slo else [])])
    assert done.exit_code == 0, done.output
    assert ("100.0% of the requests keep the SLO" in done.output) is kept
    assert ("slo-missed" in done.output) is (slo == "ttft=1")


def test_lint_loads_no_database_and_no_importer_and_collects_no_garbage(tmp_path: Path) -> None:
    """What takes a quarter of its time or more."""
    trace = ROOT / "tuner" / "data" / "traces" / "azure-conversation-slice.parquet"
    program = (
        "import gc, sys\nfrom tuner.__main__ import main\n"
        f"sys.argv = ['tuner', '--no-color', 'lint', {GOOD!r}, '--card', 'h100-80']\n"
        f"sys.argv += ['--trace', {str(trace)!r}]\n"
        "try:\n    main()\nfinally:\n    print(gc.isenabled(), *sorted(sys.modules))"
    )
    env, command = {**os.environ, "TUNER_HOME": str(tmp_path)}, (sys.executable, "-c", program)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    collects, *loaded = done.stdout.splitlines()[-1].split()
    assert "predicted for all 851 requests" in done.stdout
    assert collects == "False"
    assert not {"sqlalchemy", "pyarrow.compute", "jinja2", "tuner.traffic.importers"} & set(loaded)
    assert "tuner.lint.load" in loaded


def test_all_limits_lifted_in_turn_and_only_the_reached_ones_are_run() -> None:
    found = linted(Planted("", f"{GOOD} --max-num-seqs 8", {"rate": (8, 1500, 250)}))
    (each,) = [each for each in found.findings if each.id.startswith("limit-")]
    assert each.id == "limit-sequences"
    assert re.search(r"sequences -\d+%, step-tokens \+0%, kv-memory \+0%, host", each.evidence)
    assert re.fullmatch(r"--max-num-seqs \d+", each.fix)


def test_the_fix_of_a_limit_is_better_when_it_is_taken() -> None:
    rate = {"rate": (8, 1500, 250)}
    before = linted(Planted("", f"{GOOD} --max-num-seqs 8", rate))
    (fix,) = [each.fix for each in before.findings if each.id == "limit-sequences"]
    after = linted(Planted("", f"{GOOD} {fix}", rate))
    assert after.predicted["e2e_p95_ms"] < 0.5 * before.predicted["e2e_p95_ms"]
    assert "limit-sequences" not in ids(after)


def test_copies_that_serve_more_than_one_split_engine_are_named() -> None:
    made = steady(20, 1500, 250, 400)
    line = "vllm serve Qwen/Qwen2.5-1.5B-Instruct -tp 4"
    found = lint(line, version="0.32.0", card="l40s", gpus=4, trace=made.trace)
    (each,) = [each for each in found.findings if each.id == "replicas-serve-more"]
    assert each.fix == "--tensor-parallel-size 1 --data-parallel-size 4"
    slow = lint("vllm serve Qwen/Qwen2.5-7B-Instruct -tp 2", card="h100-80", gpus=2, trace=made.trace)
    assert "replicas-serve-more" not in ids(slow)


def test_replicas_share_the_traffic() -> None:
    made = steady(16, 1500, 250, 400)
    one, two = (
        lint(f"{GOOD} --max-num-seqs 8 -dp {n}", card="h100-80", gpus=2, trace=made.trace) for n in (1, 2)
    )
    assert two.predicted["e2e_p95_ms"] < 0.7 * one.predicted["e2e_p95_ms"]


@pytest.mark.parametrize(
    ("flags", "count", "said", "limit"),
    [
        ("--max-num-seqs 1", 200, "of the requests get no answer in 600 s", "limit-sequences"),
        ("--num-gpu-blocks-override 300 --max-model-len 4096", 200, "get no answer", "limit-kv-memory"),
        ("--max-num-seqs 4", 300, "s for requests that arrive within 2 s", "limit-sequences"),
    ],
)
def test_an_overloaded_engine_is_called_so_and_its_limit_is_named(
    flags: str, count: int, said: str, limit: str
) -> None:
    """p95 E2E is infinite where over one request in 20 has no answer; no sentence has such numbers."""
    made = steady(200, 3000, 800, count)
    found = lint(f"{GOOD} {flags}", card="h100-80", trace=made.trace, slo=Slo(ttft_ms=500))
    (overload,) = [each for each in found.findings if each.id == "overloaded"]
    assert said in overload.sentence
    assert {limit, "slo-missed"} <= ids(found)
    sentences = " ".join(
        f"{each.sentence} {each.evidence} {p95s(found.predicted)}" for each in found.findings
    )
    assert not re.search(r"\b(inf|nan)\b", sentences)
    assert json.loads(json.dumps(plain(found)), parse_constant=pytest.fail)
    if limit == "limit-sequences":
        (gain,) = [each.sentence for each in found.findings if each.id == "study-gain"]
        assert "fewer requests without an answer" in gain or "p95 E2E" in gain


def test_an_engine_that_keeps_up_is_not_called_overloaded() -> None:
    assert "overloaded" not in ids(lint(GOOD, card="h100-80", trace=steady(8, 1500, 250, 300).trace))
    burst = steady(500, 300, 1, 300)
    assert "overloaded" not in ids(lint(GOOD, card="h100-80", trace=burst.trace))


def test_predictions_say_what_they_are() -> None:
    found = linted(Planted("", GOOD, {"rate": (8, 1500, 250)}))
    assert found.basis.startswith("uncalibrated")
    assert "12 % at worst" in found.basis
    assert "2.7 % / 12 %" in (ROOT / "docs" / "simulator.md").read_text()


class _Store:
    """A history with one calibrated run on an H100, as the history's own records are read."""

    def __init__(self, gpu_class: str) -> None:
        self.gpu_class = gpu_class

    def studies(self, model: str) -> list[Any]:
        return [type("S", (), {"id": "s", "name": "chat", "gpu_class": self.gpu_class})()]

    def runs(self, study: str) -> list[Any]:
        slow = Coefficients().scaled({"compute": 0.25, "memory": 0.25})
        kept = {"coefficients": slow.to_json(), "error": 0.04}
        return [type("R", (), {"summary": {"calibration": kept}})()]


def test_a_calibrated_run_of_the_card_and_model_is_used() -> None:
    made = steady(4, 1500, 250, 200)
    plain = lint(GOOD, card="h100-80", trace=made.trace)
    for kind, uses in (("h100-80gb-hbm3-79x1", True), ("h200-140x1", False), ("sim-h100-80", False)):
        found = lint(GOOD, card="h100-80", trace=made.trace, store=_Store(kind))
        assert found.basis.startswith("calibrated on study chat") == uses
        assert (found.predicted["tpot_p95_ms"] > 1.5 * plain.predicted["tpot_p95_ms"]) == uses


def test_the_range_of_a_gain_is_of_slower_and_faster_engines() -> None:
    made = steady(8, 1500, 250, 200)
    basis = load.scaled(Coefficients(), 2.0)
    assert basis.compute == Coefficients().compute / 2
    assert basis.layer_s == Coefficients().layer_s * 2
    found = lint(f"{GOOD} --max-num-seqs 8", card="h100-80", trace=made.trace)
    (each,) = [each for each in found.findings if each.id == "study-gain"]
    least, most = map(int, re.findall(r"(\d+)%", each.sentence)[:2])
    assert 5 <= least < most < 100


# -- releases ---------------------------------------------------------------------------------------------


def test_a_card_is_known_without_its_memory() -> None:
    assert lint(GOOD, card="H100").kv_tokens == lint(GOOD, card="h100-80").kv_tokens
    with pytest.raises(BadInput, match="a100-40, a100-80"):
        lint(GOOD, card="a100")


def test_what_the_engine_refuses_is_said_in_one_sentence() -> None:
    found = lint(f"{GOOD} --max-num-batched-tokens 512 --max-num-seqs 1024", card="a100-40")
    assert re.search(
        r"configuration: max_num_batched_tokens \(512\) must be .*\d\)\.?$", found.missing["fit"]
    )


def test_the_release_is_the_given_one_else_the_images_else_the_newest() -> None:
    image = f"docker run vllm/vllm-openai:v0.20.0 --model {MODEL}"
    assert lint(image).version == "0.20.0"
    assert lint(image, version="0.32.0").version == "0.32.0"
    assert lint(GOOD).version == "0.33.0"


def test_defaults_that_moved_are_between_the_release_that_runs_and_the_one_asked_for() -> None:
    image = f"docker run vllm/vllm-openai:v0.8.5 --model {MODEL}"
    moved = [
        each for each in lint(image, card="h200", version="0.32.0").findings if each.id == "default-moved"
    ]
    (each,) = [each for each in moved if "max_num_batched_tokens" in each.sentence]
    assert each.sentence == "max_num_batched_tokens is 2048 in vLLM 0.8.5 and 8192 in 0.32.0"
    assert each.fix == "--max-num-batched-tokens 2048"
    written = f"{image} --max-num-batched-tokens 4096"
    held = lint(written, card="h200", version="0.32.0").findings
    assert not [each for each in held if each.id == "default-moved" and "batched" in each.sentence]


def test_the_v0_engine_swaps() -> None:
    line = f"VLLM_USE_V1=0 vllm serve {MODEL} --num-scheduler-steps 8 --swap-space 4"
    assert not {"flag-no-effect"} & ids(lint(line, version="0.10.2"))


def test_every_idle_flag_is_a_flag_of_some_release() -> None:
    from tuner.knobs.catalogue import table

    assert {rule.flag for rule in IDLE} <= set(table().flags)
    for rule in IDLE:
        assert set(rule.unless) | {flag.replace("--no-", "--") for flag in rule.when} <= set(table().flags)


# -- what is read -----------------------------------------------------------------------------------------

UNIT = f"[Service]\nExecStart=/opt/bin/vllm serve {MODEL} --max-num-seqs 8 --swap-space 4\n"
COMPOSE = (
    f"services:\n  chat:\n    image: vllm/vllm-openai:v0.20.0\n    command: --model {MODEL} --swap-space 4\n"
)
DEPLOYMENT = f"""
apiVersion: apps/v1
kind: Deployment
metadata: {{name: chat}}
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.20.0
          args: [--model, {MODEL}, --swap-space, "4"]
"""
KSERVE = f"""
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {{name: chat}}
spec:
  predictor:
    model:
      modelFormat: {{name: huggingface}}
      args: [--model_id={MODEL}, --swap-space=4]
"""
STACK = f"""
servingEngineSpec:
  modelSpec:
    - name: a
      modelURL: {MODEL}
      vllmConfig: {{extraArgs: ["--swap-space", "4"]}}
    - name: b
      modelURL: {MODEL}
      vllmConfig: {{maxNumSeqs: 8}}
"""
FILES = {
    "x.service": UNIT,
    "compose.yaml": COMPOSE,
    "d.yaml": DEPLOYMENT,
    "k.yaml": KSERVE,
    "values.yaml": STACK,
}


@pytest.mark.parametrize("name", FILES)
def test_every_form_of_a_file_is_linted(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    done = typed(str(path), "--engine-version", "0.20.2", "--json")
    assert done.exit_code == 1
    engines = json.loads(done.stdout)["engines"]
    assert len(engines) == (2 if name == "values.yaml" else 1)
    assert "flag-removed" in {each["id"] for each in engines[0]["findings"]}
    assert all(each["where"] == str(path) for each in engines)


def test_one_of_several_engines_is_picked(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(STACK)
    (one,) = json.loads(typed(str(path), "--pick", "b", "--json").stdout)["engines"]
    assert one["name"] == "b"
    with pytest.raises(BadInput, match="give one of a, b"):
        subject.engines(str(path), "c")


def test_secrets_are_not_printed() -> None:
    for form in ("--json", "--sarif", "--fail-on=never"):
        done = typed("HF_TOKEN=hf_abcdefgh vllm serve m --api-key sk-secret --max-num-seqs x", form)
        assert "sk-secret" not in done.stdout
        assert "hf_abcdefgh" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vllm serve m", "--slo", "tftt=5"], "did you mean 'ttft'"),
        (["vllm serve m", "--slo", "ttft=-5"], "above 0"),
        (["vllm serve m", "--slo", "attainment=2"], "at most 1"),
        (["vllm serve m", "--rate", "3"], "give --rate, --input and --output together"),
        (["vllm serve m", "--rate", "3", "--trace", "x"], "not both"),
        (["vllm serve m", "--card", "h10"], "did you mean"),
        (["vllm serve m", "--fail-on", "eror"], "did you mean 'error'"),
        (["vllm serve m", "--engine-version", "new"], "write a release"),
        (["vllm serve m", "--hf-config", "/nowhere"], "no such file"),
        (["echo hello"], "vllm"),
        (["/no/such/file.yaml"], "no file"),
    ],
)
def test_bad_input_is_one_sentence_that_says_what_to_mend(words: list[str], said: str) -> None:
    done = typed(*words)
    assert isinstance(done.exception, BadInput)
    assert said in str(done.exception)


WRONG: dict[str, tuple[bytes, str]] = {
    "README.md": (b"# Title\n\nWe serve with vLLM.\n", "this is a document, and it starts no vLLM"),
    "notes.txt": (b"buy milk\n", "this is a document"),
    "weights.gguf": (b"GGUF\x03\x00", "is the weights of a model"),
    "trace.parquet": (b"PAR1\x00\x01", "Parquet (a trace is given with --trace)"),
    "a.out": (b"\x7fELF\x02\x01", "is a program"),
    "dump": (b"ab\x00\x01", "is a binary file"),
    "latin.yaml": (b"a: \xe9t\xe9\n", "not a UTF-8 text file"),
    "empty.yaml": (b"", "it is empty"),
    "blank.sh": (b"\n \n", "it is empty"),
    "comments.yaml": (b"# vllm serve m\n\n", "nothing but comments"),
    "config.json": (
        b'{"architectures": ["Qwen2ForCausalLM"]}',
        "config.json of a model (it is given with --hf-config)",
    ),
    "package.json": (b'{"name": "x", "version": 1}', "JSON with the keys name, version"),
    "list.json": (b"[1, 2]", "a JSON list"),
    "broken.json": (b'{"a": ', "not YAML"),
    "service.yaml": (b"apiVersion: v1\nkind: Service\nmetadata: {name: x}\n", "Kubernetes: Service"),
    "Chart.yaml": (b"name: x\nversion: 1.0.0\n", "give its values.yaml"),
    "deployment.yaml": (
        b"{{- if .Values.on }}\nkind: Deployment\n{{- end }}\n",
        "a template of a Helm chart",
    ),
    "values.yaml": (b"replicas: 2\n", "YAML with the keys replicas"),
    "trace.csv": (b"arrival_s,input_len\n0,1\n", "a table (a trace is given"),
    "serve.py": (b"import os\n", "a .py file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_starts_no_vllm_is_called_by_its_kind(tmp_path: Path, name: str) -> None:
    """The same words by `lint` and by `baseline import`, which say what can be given instead."""
    content, said = WRONG[name]
    path = tmp_path / name
    path.write_bytes(content)
    for command in (["lint", str(path)], ["baseline", "import", str(path)]):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, BadInput), command
        assert said in str(done.exception)
        assert "not YAML" in said or "UTF-8" in said or "a shell script" in str(done.exception)


def test_a_folder_and_what_is_no_url_are_called_by_their_kind(tmp_path: Path) -> None:
    for what, said in (
        (str(tmp_path), "is a folder; give a file in it"),
        (str(tmp_path / "absent.yaml"), "there is no file"),
        ("localhost:8000", "a server's URL begins with http://"),
        ("ftp://host/file", "a server's URL begins with http://"),
        ("hello world", "no vLLM is started there"),
        (" ", "it is empty"),
    ):
        with pytest.raises(BadInput, match=re.escape(said)):
            subject.engines(what)


MARKDOWN = f"""# Serving

Run `vllm serve --help`.

```console
$ vllm serve {MODEL} --swap-space 4
```

```python
text = \"\"\"vllm serve x\"\"\"
```

```yaml
services: {{chat: {{image: "vllm/vllm-openai:v0.20.0", command: --model {MODEL} --max-num-seqs 9}}}}
```

   ```sh
   docker run --gpus all vllm/vllm-openai:v0.20.0 \\
     --model {MODEL} --max-num-seqs 8
   ```
"""


def test_the_commands_of_a_markdown_file_are_linted(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(MARKDOWN)
    first, second, last = subject.engines(str(path))
    assert first.source.words == (MODEL, "--swap-space", "4")
    assert second.source.words == ("--model", MODEL, "--max-num-seqs", "9")
    assert last.source.words == ("--model", MODEL, "--max-num-seqs", "8")
    quoted, *_ = subject.engines("echo `vllm serve m --max-num-seqs 8 2>&1`; ```\nvllm serve\n```")
    assert quoted.source.words == ("m", "--max-num-seqs", "8")


CONTAINER = """
kind: Pod
spec:
  containers:
    - name: vllm
      image: vllm/vllm-openai:v0.20.0
      {}
"""
SERVICE = "services:\n  vllm:\n    image: vllm/vllm-openai:v0.20.0\n    {}\n"
MISREAD = {
    "two words in an item of compose": (
        SERVICE,
        "command: [--model, org/m, --max-num-seqs 64]",
        "one argument",
    ),
    "a block of words in an item": (CONTAINER, 'args: ["--model org/m\\n--max-num-seqs 64"]', "one argument"),
    "a key with = and more": (CONTAINER, 'args: ["--model=org/m --max-num-seqs=64"]', "one argument"),
    "JSON in the same item": (
        CONTAINER,
        "args: [--model, org/m, '--hf-overrides {\"a\": 1}', --max-num-seqs=64]",
        "one argument",
    ),
    "quotes in an item": (SERVICE, "command: ['--model=\"org/m\"', \"--max-num-seqs='64'\"]", "quotes"),
    "a line break at the end": (CONTAINER, 'args: ["--model=org/m\\n", --max-num-seqs=64]', "blanks"),
    "a backslash in a compose block": (
        SERVICE,
        "command: |\n      --model org/m \\\n      --max-num-seqs 64",
        "blanks",
    ),
    "sh -c and a text of compose": (
        SERVICE,
        "entrypoint: [sh, -c]\n    command: vllm serve org/m --max-num-seqs 64",
        "runs only 'vllm'",
    ),
    "sh -c and several items": (
        CONTAINER,
        "command: [sh, -c]\n      args: [vllm serve org/m, --max-num-seqs 64]",
        "runs only 'vllm serve org/m'",
    ),
    "numbers": (CONTAINER, "args: [--model, org/m, --max-num-seqs, 64]", "item 64, which is not text"),
    "a boolean": (SERVICE, "command: [--model, org/m, --max-num-seqs=64, true]", "item true"),
    "a text where a list belongs": (CONTAINER, "args: --model org/m --max-num-seqs 64", "needs a list"),
}
RIGHT = {
    "sh -c and one script": (CONTAINER, 'command: [sh, -c, "vllm serve org/m --max-num-seqs 64"]'),
    "sh -c with arguments": (
        CONTAINER,
        "command: [bash, -c, 'vllm serve \"$@\"', --]\n      args: [org/m, --max-num-seqs, '64']",
    ),
    "a script of several lines": (
        CONTAINER,
        "command: [sh, -c]\n      args:\n      - |\n        vllm serve org/m \\\n          --max-num-seqs 64",
    ),
    "quotes of a text of compose": (SERVICE, "command: --model \"org/m\" --max-num-seqs '64'"),
    "a name of two words": (CONTAINER, "args: [org/m, --served-model-name=a b, --max-num-seqs=64]"),
    "JSON of its own": (CONTAINER, "args: [org/m, --max-num-seqs=64, --hf-overrides, '{\"a\": 1}']"),
    "the module": (
        CONTAINER,
        "command: [python, -m, vllm.entrypoints.openai.api_server]\n"
        "      args: [--model=org/m, --max-num-seqs=64]",
    ),
}


@pytest.mark.parametrize("name", [*MISREAD, *RIGHT])
def test_words_that_vllm_gets_otherwise_are_named_and_read_as_they_were_meant(
    tmp_path: Path, name: str
) -> None:
    """vLLM 0.32's parser refuses `--dtype auto`, line breaks and quotes; compose and Kubernetes the rest."""
    form, text, said = MISREAD[name] if name in MISREAD else (*RIGHT[name], "")
    path = tmp_path / "file.yaml"
    path.write_text(form.format(text))
    (engine,) = subject.engines(str(path))
    found = run.lint(engine, run.LintOptions(), os.environ)
    sentences = [each.sentence for each in found.findings if each.id == "flag-misread"]
    assert any(said in each for each in sentences) == bool(said), sentences
    assert found.model == "org/m"
    made = manifests.read(str(path))
    assert made.candidate["max_num_seqs"] == 64
    assert any(said in note for note in made.notes) or not said


def test_a_backslash_with_a_blank_after_it_is_named(tmp_path: Path) -> None:
    command = f"vllm serve {MODEL} --seed 3 \\ \n  --max-num-seqs 64\n"
    assert "flag-misread" in ids(lint(command))
    path = tmp_path / "x.service"
    path.write_text(f"[Service]\nExecStart=/bin/{command}")
    with pytest.raises(BadInput, match="ends with a backslash and a blank"):
        subject.engines(str(path))


def test_a_secret_in_a_misread_word_is_not_printed() -> None:
    done = typed("vllm serve m '--api-key sk-secret' '--hf-token=hf_abcdefgh '", "--fail-on", "never")
    assert "flag-misread" in done.stdout
    assert "sk-secret" not in done.stdout
    assert "hf_abcdefgh" not in done.stdout


def test_variables_of_compose_are_those_of_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MODEL=org/m\nSEQS=64\n")
    path = tmp_path / "compose.yaml"
    path.write_text(SERVICE.format("command: --model ${MODEL} --max-num-seqs ${SEQS:-8}"))
    made = manifests.read(str(path))
    assert (made.model, made.candidate["max_num_seqs"]) == ("org/m", 64)


IMAGE = "image: {repository: vllm/vllm-openai, tag: v0.20.0"
SPEC = "{name: a, modelURL: org/m, vllmConfig: {maxNumSeqs: 64}}"
ITEMS = "args: [--max-num-seqs=64]"


@pytest.mark.parametrize(
    "text",
    [
        f"production-stack:\n  servingEngineSpec:\n    modelSpec: [{SPEC}]",
        f"{IMAGE}, command: [vllm, serve, org/m, --max-num-seqs, '64']}}",
        f"{IMAGE}}}\n{ITEMS.replace('[', '[--model=org/m, ')}",
        f"web: {{image: {{repository: x}}}}\nchat:\n  {IMAGE}}}\n  model: org/m\n  extraArgs: {ITEMS[6:]}",
        f"llm:\n  decode: {{containers: [{{modelCommand: vllmServe, {ITEMS}}}]}}\n  modelArtifacts: {{uri: 'hf://org/m'}}",
    ],
)  # fmt: skip
def test_helm_values_of_several_charts_are_read(tmp_path: Path, text: str) -> None:
    """A chart in an umbrella chart, vLLM's own chart, and charts that name an image and its arguments."""
    path = tmp_path / "values.yaml"
    path.write_text(text)
    (engine,) = subject.engines(str(path))
    made = manifests.read(str(path))
    assert (made.model, made.candidate["max_num_seqs"]) == ("org/m", 64)
    assert engine.version == ("0.20.0" if "v0.20.0" in text else None)


# -- what is printed --------------------------------------------------------------------------------------


def test_every_finding_has_a_page_and_the_pages_are_those_of_the_table() -> None:
    folder = ROOT / "docs" / "lint"
    assert {path.name: path.read_text() for path in folder.glob("*.md")} == pages.pages()


def test_the_worst_comes_first_and_decides_the_exit_code() -> None:
    found = lint(
        f"{GOOD} --swap-space 4 --enforce-eager --cudagraph-capture-sizes 1 --enable-chunked-prefill"
    )
    severities = [SEVERITIES.index(each.severity) for each in in_order(found.findings)]
    assert severities == sorted(severities)
    assert set(severities) == {0, 1, 2}
    notes = [each for each in found.findings if each.severity == "note"]
    for level, expected in (("error", False), ("warning", False), ("note", True), ("never", False)):
        assert reaches(notes, level) is expected
    assert typed(f"{GOOD} --swap-space 4").exit_code == 1
    assert typed(f"{GOOD} --swap-space 4", "--fail-on", "never").exit_code == 0
    assert typed(GOOD).exit_code == 0


def test_sarif_names_rules_levels_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE)
    made = json.loads(typed(str(path), "--sarif", "--fail-on", "never").stdout)
    assert made["version"] == "2.1.0"
    (one,) = made["runs"]
    rules = one["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert {rule["defaultConfiguration"]["level"] for rule in rules} <= {"error", "warning", "note", "none"}
    assert all(rule["shortDescription"]["text"] and rule["fullDescription"]["text"] for rule in rules)
    for result in one["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert set(result) <= {"ruleId", "ruleIndex", "level", "message", "locations"}
        assert result["message"]["text"]
        (place,) = result["locations"]
        assert place["physicalLocation"]["artifactLocation"]["uri"] == str(path)
    (swap,) = [each for each in one["results"] if "--swap-space" in each["message"]["text"]]
    assert swap["locations"][0]["physicalLocation"]["region"]["startLine"] == 4


def test_sarif_is_valid_by_the_official_schema(tmp_path: Path) -> None:
    """OASIS's own schema of SARIF 2.1.0 (errata 01), as its repository publishes it."""
    validator = jsonschema.Draft4Validator(json.loads((DATA / "sarif-schema-2.1.0.json").read_text()))
    path = tmp_path / "values.yaml"
    path.write_text(STACK)
    lines = [planted.line for planted in TABLE[::6]]
    for words in ([str(path)], [GOOD], [*lines, "--card", "h100-80", "--gpus", "4"]):
        done = typed(*words, "--sarif", "--fail-on", "never")
        assert [error.message for error in validator.iter_errors(json.loads(done.stdout))] == []
    broken = json.loads(done.stdout)
    broken["runs"][0]["results"][0]["level"] = "fatal"
    assert not validator.is_valid(broken)


def test_a_switch_with_a_value_is_refused_in_the_same_words_everywhere() -> None:
    for flag, value in (
        ("--enable-prefix-caching", "true"),
        ("--no-enable-prefix-caching", "false"),
        ("--enforce-eager", "1"),
        ("--trust-remote-code", "True"),
        ("--headless", "yes"),
    ):
        for words in (f"{flag} {value}", f"{flag}={value}"):
            said = f"{flag} is a switch and takes no value, but it has {value}"
            found = lint(f"vllm serve m {words}", version="0.32.0").findings
            assert said in {each.sentence for each in found if each.id == "flag-value"}
            with pytest.raises(BadInput, match=re.escape(said)):
                manifests.read(f"vllm serve m {words}", facts=facts_of_version("0.32.0", "cuda"))
            assert any(said in note for note in manifests.read(f"vllm serve m {words}").notes)
    old = lint("vllm serve m --enable-chunked-prefill true", version="0.8.5").findings
    assert "flag-value" not in {each.id for each in old}


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "m", "--max-num-seqs", "8"],
        ["vllm", "serve", "m", "--max_num_seqs=8", "--card", "h100-80"],
        ["m", "-tp", "2"],
        ["m", "--no-enable-prefix-caching"],
        ["vllm", "serve", "m"],
    ],
)
def test_a_command_line_without_quotes_is_refused_with_the_way_to_write_it(words: list[str]) -> None:
    done = typed(*words)
    assert done.exit_code == 2
    assert "Put vLLM's command line in quotes" in " ".join(done.output.split())
    assert "in quotes" not in typed(GOOD, "--crad", "h100-80").output


@pytest.mark.parametrize(
    ("flag", "good", "bad"),
    [
        ("--max-num-seqs", "64 1_000 +8", "1e3 1k 1K 8.0 lots"),
        ("--max-num-batched-tokens", "8192 8k 1.5k 8K", "1e4 1.5K 8kb"),
        ("--max-model-len", "4096 16k auto", "1e4 4.5K none"),
        ("--kv-cache-memory-bytes", "8G 8000000000", "1e9 8.5G"),
        ("--block-size", "16", "16k 1e1"),
        ("--cudagraph-capture-sizes", "8", "1e1 8k"),
        ("--seed", "3", "1e3 1k 1.0"),
        ("--max-lora-rank", "16", "1e1 16k"),
        ("--shutdown-timeout", "10", "10s 1e1"),
        ("--gpu-memory-utilization", "0.9 .9 9e-1", "0.9k 90% 0,9"),
        ("--mm-processor-cache-gb", "4 0.5 1e0", "4G 1k"),
        ("--kv-offloading-size", "8 1e1", "8G"),
    ],
)
def test_numbers_are_taken_as_vllms_parser_takes_them(flag: str, good: str, bad: str) -> None:
    """By vLLM 0.32.0's own parser: int() refuses 1e3, five flags take units, float() takes none."""
    for value in (*good.split(), *bad.split()):
        found = lint(f"vllm serve m {flag} {value}", version="0.32.0").findings
        said = [each.sentence for each in found if each.id == "flag-value"]
        assert bool(said) == (value in bad.split()), (value, said)
        assert all(flag in each and value in each for each in said)


def test_a_model_that_stands_last_is_the_model_everywhere() -> None:
    line = "vllm serve --max-num-seqs 8 --enable-prefix-caching org/model"
    made = manifests.read(line)
    assert (made.model, made.candidate["enable_prefix_caching"]) == ("org/model", True)
    assert lint(line).model == "org/model"


def test_capture_sizes_decide_the_memory_of_graphs() -> None:
    few, many = (
        lint(f"{GOOD} --cudagraph-capture-sizes {sizes}", card="h100-80", version="0.32.0")
        for sizes in ("1 2 4", "1 256 512")
    )
    said = [each.evidence for one in (few, many) for each in one.findings if each.id == "kv-memory"]
    assert len(set(said)) == 2


def test_a_value_too_many_is_named() -> None:
    found = lint("vllm serve m --mm-encoder-tp-mode data ' ' --port 8000 9000", version="0.32.0").findings
    said = [each.sentence for each in found if each.id == "flag-value"]
    assert [each.split()[0] for each in said] == ["--mm-encoder-tp-mode", "--port"]
    fine = lint("vllm serve m --served-model-name a b --cudagraph-capture-sizes 1 2 4", version="0.32.0")
    assert "flag-value" not in ids(fine)


def test_the_readme_begins_with_it_and_shows_what_it_prints() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- run: lint -->\n```sh\ntuner (.*)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert found.start() < text.index("make demo")
    assert found.start() < 1500
    done = CliRunner().invoke(app, shlex.split(found[1]))
    assert done.stdout == found[2]
    assert done.exit_code == 1


def test_the_examples_for_pipelines_are_yaml_that_types_what_exists() -> None:
    for name in ("lint-action.yaml", "lint-pre-commit.yaml"):
        text = (ROOT / "docs" / "examples" / name).read_text()
        assert yaml.safe_load(text)
        lines = [shlex.split(line) for line in re.findall(r"tuner (lint[^>\n]*)", text)]
        assert lines
        for line in lines:
            parsed = get_command(app).make_context("tuner", line)  # refuses an unknown option
            assert parsed is not None


def test_the_steps_of_the_github_action_and_the_hook_run_as_they_are_written(tmp_path: Path) -> None:
    """What each `run:` of the action, and the entry of the hook, types is typed on real Helm values."""
    examples = ROOT / "docs" / "examples"
    action = yaml.safe_load((examples / "lint-action.yaml").read_text())
    hooks = yaml.safe_load((examples / "lint-pre-commit.yaml").read_text())
    (hook,) = hooks["repos"][0]["hooks"]
    assert re.search(hook["files"], "deploy/chat-values.yaml")
    values = tmp_path / "deploy" / "values.yaml"
    values.parent.mkdir()
    values.write_text(STACK)
    typed_ = [step["run"] for step in action["jobs"]["lint"]["steps"] if "tuner lint" in step.get("run", "")]
    typed_ += [f"{hook['entry']} deploy/values.yaml"]
    codes = []
    for line in typed_:
        words = shlex.split(line.partition(">")[0])[1:]
        done = CliRunner().invoke(
            app, [str(values) if word == "deploy/values.yaml" else word for word in words]
        )
        codes.append(done.exit_code)
        if "--sarif" in words:
            assert json.loads(done.stdout)["runs"]
    assert codes == [0, 1, 1]


# -- a running server -------------------------------------------------------------------------------------


def test_a_url_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no answer"):
        subject.engines("http://127.0.0.1:9")


def test_the_newest_release_is_one_of_the_table() -> None:
    assert facts_of_version("0.33.0").flags == subject.facts_for(None, None, "cuda").flags


def test_a_trace_file_is_linted_by_the_command() -> None:
    file = ROOT / "tuner" / "data" / "traces" / "azure-conversation-slice.parquet"
    assert len(traces.read(file)) == 851
    done = typed(GOOD, "--card", "h100-80", "--trace", str(file), "--slo", "ttft=500,tpot=50", "--json")
    (one,) = json.loads(done.stdout)["engines"]
    assert one["traffic"].startswith("all 851 requests")
    assert one["predicted"]["slo_attainment"] > 0.9
