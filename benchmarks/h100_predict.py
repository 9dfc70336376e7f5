"""A GPU study in virtual time: calibrated on its baseline, its other trials predicted beside the measured.

    python -m benchmarks.h100_predict benchmarks/h100/study-a.yaml TRACE.csv BASELINE.json TRIAL.json …

The JSON files are what `tuner trial show STUDY NUMBER --json` prints.
"""

import argparse
import json
import os
from pathlib import Path

import yaml

from tuner.knobs import model
from tuner.records import Candidate, Slice, Slo
from tuner.simulator.calibrate import Observation, fit
from tuner.simulator.cost import card_of
from tuner.simulator.predict import Predictor, Scene
from tuner.traffic import importers
from tuner.tuning.study import StudyFile, plan_of

SHOWN = (
    *(f"{kind}_{share}_ms" for kind in ("ttft", "tpot", "e2e") for share in ("p50", "p95")),
    "slo_attainment",
)


def scene_of(file: Path, trace: Path, card: str) -> Scene:
    """What the study measures, without asking any engine."""
    study = StudyFile.model_validate(yaml.safe_load(file.read_text()))
    if study.slices == "auto":
        raise SystemExit(f"{file} names no slices")
    return Scene(
        trace=importers.read_any(trace),
        slices=tuple(Slice(**each.model_dump(exclude_none=True)) for each in study.slices),
        facts=model.read(str(file.parent / study.model), env=dict(os.environ)),
        card=card_of(card),
        plan=plan_of(study),
        speed=study.speed,
        slo=Slo(**study.slo.model_dump(exclude_none=True)),
        args={name: value for name, value in study.engine.args.items() if not isinstance(value, list | dict)},
    )


def observation_of(file: Path) -> Observation:
    trial = json.loads(file.read_text())
    searched = [m for m in trial["measurements"] if m["purpose"] == "search"]  # not the confirmation's
    values = {name: value for name, value in searched[-1]["values"].items() if value is not None}
    return Observation(candidate=Candidate(trial["candidate"]), values=values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", default="h100-80")
    parser.add_argument("study", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("trials", nargs="+", type=Path)
    asked = parser.parse_args()
    scene = scene_of(asked.study, asked.trace, asked.card)
    observed = [observation_of(file) for file in asked.trials]
    calibration = fit(scene, observed[:1], rounds=10)
    print(
        "calibrated on the first; residuals",
        {k: f"{v:.0%}" for k, v in sorted(calibration.residuals.items())},
    )
    predict = Predictor(scene, calibration.coefficients)
    for file, real in zip(asked.trials, observed, strict=True):
        found = predict([real.candidate])[0].values
        print(f"{file.stem}: predicted / measured")
        for name in SHOWN:
            off = found[name] / real.values[name] - 1
            print(f"  {name:16} {found[name]:10.2f} / {real.values[name]:10.2f}  {off:+.0%}")


if __name__ == "__main__":
    main()
