"""Records to rows and back.

A measurement name that is present with null was +inf; one that is absent was not measured. Where None is a
value of its own (fidelity, violation), +inf is the string "inf".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import RowMapping

from tuner.errors import BadInput
from tuner.history.entities import Lease, Schedule, Token, TraceInfo
from tuner.records import (
    JSON,
    AliasEvent,
    Candidate,
    Fidelity,
    Launch,
    Measurement,
    Node,
    Profile,
    ProfileKey,
    Run,
    RunState,
    Slice,
    SliceMeasurement,
    Slo,
    Study,
    Trial,
    TrialState,
    Value,
    Violation,
)


def _number(name: str, value: float) -> float:
    if math.isnan(value) or value == -math.inf:
        raise BadInput(
            f"'{name}' is {value}: a measured value is a number or +inf; leave out what is missing"
        )
    return float(value)


def pack_values(values: Mapping[str, float]) -> JSON:
    """Measurement values as JSON: +inf becomes null. BadInput for NaN and −inf."""
    packed = {name: _number(name, value) for name, value in values.items()}
    return {name: None if math.isinf(value) else value for name, value in packed.items()}


def unpack_values(values: JSON) -> dict[str, float]:
    found = cast(Mapping[str, float | None], values)
    return {name: math.inf if value is None else float(value) for name, value in found.items()}


def _pack_optional(values: Mapping[str, float | None]) -> JSON:
    packed: dict[str, JSON] = {}
    for name, value in values.items():
        number = None if value is None else _number(name, value)
        packed[name] = "inf" if number is not None and math.isinf(number) else number
    return packed


def _unpack_optional(values: JSON) -> dict[str, float | None]:
    found = cast(Mapping[str, float | str | None], values)
    return {name: None if value is None else float(value) for name, value in found.items()}


def _strings(value: JSON) -> tuple[str, ...]:
    return tuple(cast(Sequence[str], value))


def study_row(study: Study) -> dict[str, object]:
    row = {name: getattr(study, name) for name in Study.__dataclass_fields__}
    return row | {
        "slices": [asdict(each) for each in study.slices],
        "objectives": list(study.objectives),
        "slo": asdict(study.slo),
        "identity": dict(study.identity),
        "spec": dict(study.spec),
    }


def study_of(row: RowMapping) -> Study:
    return Study(
        **{
            **row,
            "slices": tuple(Slice(**each) for each in row["slices"]),
            "objectives": _strings(row["objectives"]),
            "slo": Slo.read(row["slo"]),
        }
    )


def run_row(run: Run) -> dict[str, object]:
    row = {name: getattr(run, name) for name in Run.__dataclass_fields__}
    return row | {"state": run.state.value, "summary": dict(run.summary)}


def run_of(row: RowMapping) -> Run:
    return Run(**{**row, "state": RunState(row["state"])})


def launch_row(launch: Launch) -> dict[str, object]:
    row = {name: getattr(launch, name) for name in Launch.__dataclass_fields__}
    return row | {
        "argv": list(launch.argv),
        "effective": dict(launch.effective),
        "timeline": dict(launch.timeline),
    }


def launch_of(row: RowMapping) -> Launch:
    return Launch(**{**row, "argv": _strings(row["argv"])})


def trial_row(trial: Trial) -> dict[str, object]:
    """The row of a trial, without its id and its measurements."""
    kept = Trial.__dataclass_fields__.keys() - {"id", "measurements"}
    row = {name: getattr(trial, name) for name in kept}
    return row | {
        "candidate": dict(trial.candidate),
        "state": trial.state.value,
        "violation": _pack_optional(asdict(trial.violation)),
        "effective": dict(trial.effective),
    }


def trial_of(row: Mapping[str, Any], measurements: Sequence[Measurement]) -> Trial:
    return Trial(
        **{
            **row,
            "candidate": Candidate(cast(Mapping[str, Value], row["candidate"])),
            "state": TrialState(row["state"]),
            "violation": Violation(**_unpack_optional(row["violation"])),
            "measurements": tuple(measurements),
        }
    )


def measurement_row(trial_id: int, measurement: Measurement) -> dict[str, object]:
    return {
        "trial_id": trial_id,
        "launch_id": measurement.launch_id,
        "kind": measurement.kind,
        "purpose": measurement.purpose,
        "repeat": measurement.repeat,
        "values": pack_values(measurement.values),
        "slices": [
            {**asdict(each), "values": pack_values(each.values)}  # names, window, file
            for each in measurement.slices
        ],
        "fidelity": {
            "values": _pack_optional(measurement.fidelity.values),
            "failed": list(measurement.fidelity.failed),
            "warnings": list(measurement.fidelity.warnings),
        },
    }


def measurement_of(row: Mapping[str, Any]) -> Measurement:
    fidelity = row["fidelity"]
    return Measurement(
        values=unpack_values(row["values"]),
        slices=tuple(
            SliceMeasurement(**{**each, "values": unpack_values(each["values"])}) for each in row["slices"]
        ),
        kind=row["kind"],
        purpose=row["purpose"],
        repeat=row["repeat"],
        launch_id=row["launch_id"],
        fidelity=Fidelity(
            values=_unpack_optional(fidelity["values"]),
            failed=_strings(fidelity["failed"]),
            warnings=_strings(fidelity["warnings"]),
        ),
    )


def node_row(node: Node) -> dict[str, object]:
    row = {name: getattr(node, name) for name in Node.__dataclass_fields__}
    return row | {"gpus": list(node.gpus), "labels": dict(node.labels)}


def node_of(row: RowMapping) -> Node:
    kept = {name: row[name] for name in Node.__dataclass_fields__}
    return Node(**{**kept, "gpus": _strings(row["gpus"])})


def trace_of(row: RowMapping) -> TraceInfo:
    return TraceInfo(**row)


def lease_of(row: RowMapping) -> Lease:
    return Lease(**{name: row[name] for name in Lease.__dataclass_fields__})


def schedule_of(row: RowMapping) -> Schedule:
    return Schedule(**row)


def schedule_row(schedule: Schedule) -> dict[str, object]:
    row = {name: getattr(schedule, name) for name in Schedule.__dataclass_fields__}
    return row | {"spec": dict(schedule.spec)}


def token_of(row: RowMapping) -> Token:
    kept = {name: row[name] for name in Token.__dataclass_fields__}
    return Token(**{**kept, "scopes": _strings(row["scopes"])})


def key_row(key: ProfileKey) -> dict[str, str]:
    return {"model": key.model, "target": key.target, "workload": key.workload}


def _key_of(row: RowMapping) -> ProfileKey:
    return ProfileKey(model=row["model"], target=row["target"], workload=row["workload"])


def profile_of(row: RowMapping) -> Profile:
    kept = {name: row[name] for name in Profile.__dataclass_fields__ if name != "key"}
    return Profile(
        key=_key_of(row),
        **{**kept, "candidate": Candidate(row["candidate"]), "argv": _strings(row["argv"])},
    )


def event_of(row: RowMapping) -> AliasEvent:
    kept = {name: row[name] for name in AliasEvent.__dataclass_fields__ if name != "key"}
    return AliasEvent(key=_key_of(row), **kept)
