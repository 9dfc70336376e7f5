"""`tuner explain`: why a published configuration won, knob by knob."""

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.common import Json, knobs, open_store, print_json
from tuner.errors import BadInput, NotFound

if TYPE_CHECKING:
    from tuner.conclusions import Attribution
    from tuner.history.store import Store
    from tuner.records import Profile


def explain(
    profile: Annotated[int, typer.Argument(help="The profile's id (`tuner profile list`).")],
    as_json: Json = False,
) -> None:
    """Say which knobs of a profile pay, and why.

    After a winner is confirmed, each of its knobs is dropped by itself, by the simulator where that is sure
    and by a launch where it is not. What gives nothing is left out of the profile.
    """
    from tuner.report.explain import lines

    store = open_store()
    found = store.profile(profile)
    if (stayed := _of_today(store, found)) is not None:
        if as_json:
            print_json({
                "profile": found.id, "candidate": dict(found.candidate), "attribution": None, "said": stayed
            })  # fmt: skip
        else:
            typer.echo(stayed)
        return
    told = attribution_of(store, found)
    if as_json:
        print_json({"profile": found.id, "candidate": dict(found.candidate), "attribution": told.to_json()})
        return
    typer.echo(f"profile {found.id}, version {found.version}: {knobs(found.candidate)}")
    for line in lines(told):
        typer.echo(line)


def attribution_of(store: "Store", profile: "Profile") -> "Attribution":
    """The attribution behind a profile. NotFound where its run made none, or not for this configuration, with
    the reason.
    """
    run = profile.evidence.get("run")
    if not isinstance(run, str):
        raise BadInput(f"profile {profile.id} was not published by a run")
    found = store.attribution(run)
    if found is None:
        from tuner.report.explain import why_none
        from tuner.tuning.attribution import attribution_labels

        began = f"-confirm-{attribution_labels(run)[0]}-"
        begun = any(began in (each.directory or "") for each in store.launches(profile.study_id))
        why = why_none(store.conclusion(run), store.study(profile.study_id).spec.get("plan"), begun=begun)
        raise NotFound(f"run {run} did not find out which knobs pay: {why}")
    return found


def _of_today(store: "Store", profile: "Profile") -> str | None:
    """What is known of a profile that is today's configuration, as sentences; None for any other."""
    run = profile.evidence.get("run")
    if profile.evidence.get("origin") != "baseline" or not isinstance(run, str):
        return None
    today, said = f"Profile {profile.id} is today's configuration.", store.conclusion(run)
    if said is None:
        return f"{today} Run {run} measured it and has no conclusion."
    made = said.profiles.get("challenger")
    if made is None:
        return f"{today} Run {run} published no other configuration. Its conclusion: {said.sentence}"
    return (
        f"{today} The winner of run {run} is profile {made.id}. `tuner explain {made.id}` says which of its"
        " knobs pay."
    )
