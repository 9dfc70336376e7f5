"""Which knobs of a space this study's traffic cannot judge, and why: said before a run begins."""

import numpy as np

from tuner.knobs.catalogue import CATALOGUE
from tuner.tuning.study import Prepared

PREFIX = ("enable_prefix_caching", "prefix_caching_hash_algo")


def unjudged(prepared: Prepared) -> dict[str, str]:
    """Knob → why its effect does not show in this study. Of knobs that are turned only."""
    trace = prepared.trace
    found: dict[str, str] = {}
    for name, levels in prepared.space.levels.items():
        if CATALOGUE[name].needs_raw:
            found[name] = "its effect depends on what the texts say, and this study sends made-up tokens"
        elif name == "scheduling_policy" and "priority" in levels and len(np.unique(trace.priority)) < 2:
            found[name] = "every request of the trace has the same priority"
        elif name in PREFIX and not len(trace.blocks) and not (trace.parent >= 0).any():
            found[name] = "the trace knows no shared prefixes: no prompt repeats another's beginning"
    return found
