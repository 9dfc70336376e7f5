"""`tuner gc`: make room; numbers stay, files of old trials go."""

from datetime import timedelta
from typing import Annotated

import typer

from tuner.commands.common import now, open_store, say, settings


def gc(
    days: Annotated[int, typer.Option(min=0, help="Keep the files of trials younger than this.")] = 30,
    apply: Annotated[bool, typer.Option("--apply", help="Delete; without it only tell.")] = False,
) -> None:
    """Delete logs and outcomes of old trials. Numbers, profiles and what profiles rest on stay."""
    import shutil
    from pathlib import Path

    store = open_store()
    kept = {p.trial_id for p in store.profiles()}
    limit, home = now() - timedelta(days=days), settings().home
    gone, size = 0, 0
    for study in store.studies():
        for trial in store.trials(study.id):
            path = Path(trial.directory or "")
            ended = trial.ended_at or trial.started_at
            if trial.id in kept or ended > limit or home not in path.parents or not path.is_dir():
                continue
            gone, size = gone + 1, size + sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            if apply:
                shutil.rmtree(path)
    say(f"{'deleted' if apply else 'would delete'} {gone} trial directories, {size / 1e6:.1f} MB")
