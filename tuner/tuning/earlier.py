"""How much launches of one configuration differed on this node before, by earlier confirmations."""

import re
from collections.abc import Iterator, Mapping

from tuner.conclusions import Where
from tuner.history.store import Store
from tuner.records import JSON, Measurement, Study, Trial
from tuner.search.noise import spread_of
from tuner.tuning.concluding import PLACES, Asked, Spreads

_BEGAN = re.compile(r"-confirm-([0-9a-f]{8}(?:\.\d+)?)-")


def noise_before(store: Store, asked: Asked, *, without: str = "") -> Spreads:
    """The noise between launches by the repeats of one configuration within one confirmation, pooled over all
    of this node with the same model, engine version and traffic. `without`: the label of a confirmation that
    is left out.
    """
    groups: dict[tuple[str, Where], list[list[float]]] = {}
    for study in store.studies(node=asked.study.node, model=asked.study.model):
        if _traffic(study) != _traffic(asked.study):
            continue
        folders = {each.id: each.directory or "" for each in store.launches(study.id)}
        for trial in store.trials(study.id):
            for where, rows in _confirmations(trial, folders, without):
                for name in asked.metrics:
                    values = [m.values[name] for m in rows if name in m.values]
                    groups.setdefault((name, where), []).append(values)
    return {key: spread_of(values) for key, values in groups.items()}


def _traffic(study: Study) -> tuple[JSON, ...]:
    """What two studies must share for the noise of one to be that of the other."""
    windows: list[JSON] = [[s.start_s, s.duration_s, s.held_out] for s in study.slices]
    return study.engine_version, study.trace_digest, windows, study.spec.get("speed")


def _confirmations(
    trial: Trial, folders: Mapping[str, str], without: str
) -> Iterator[tuple[Where, list[Measurement]]]:
    """The repeats of a trial, those of one confirmation together."""
    for where in PLACES:
        rows: list[Measurement] = []
        last = ""
        for each in (m for m in trial.measurements if m.purpose == where):
            found = _BEGAN.search(folders.get(each.launch_id or "", ""))
            began = found.group(1) if found else ""
            if without and began == without:
                continue
            if rows and (began != last or each.repeat <= rows[-1].repeat):
                yield where, rows
                rows = []
            rows.append(each)
            last = began
        if rows:
            yield where, rows
