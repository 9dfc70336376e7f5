"""The shipped alert rules, read and run by Prometheus' own promtool (`make test-alerts`)."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES, TESTS = MONITORING / "alerts.yaml", MONITORING / "alerts-test.yaml"
PROMTOOL = os.environ.get("TUNER_TEST_PROMTOOL", "promtool")


def names() -> set[str]:
    return {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def test_each_alert_fires_in_a_unit_test_and_is_silent_in_another() -> None:
    asked = [one for test in yaml.safe_load(TESTS.read_text())["tests"] for one in test["alert_rule_test"]]
    assert {one["alertname"] for one in asked if one["exp_alerts"]} == names()
    assert {one["alertname"] for one in asked if not one["exp_alerts"]} == names()


@pytest.mark.promtool
@pytest.mark.parametrize(
    "words", [("check", "rules", RULES), ("test", "rules", TESTS)], ids=["check", "test"]
)
def test_promtool_takes_the_rules_and_passes_their_unit_tests(words: tuple[str | Path, ...]) -> None:
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


@pytest.mark.promtool
@pytest.mark.parametrize("name", sorted(names()))
def test_promtool_sees_an_alert_that_never_fires(name: str, tmp_path: Path) -> None:
    """So that the unit test of each alert can fail."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] == name:
            rule["expr"] = f"({rule['expr']}) and on () vector(1) > 1"
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "alerts-test.yaml").write_text(TESTS.read_text())
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "alerts-test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert name in done.stdout + done.stderr
