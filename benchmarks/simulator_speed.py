"""How fast predictions are: `python -m benchmarks.simulator_speed TRACE.csv`.

Targets on one core: the whole trace (an hour of the Azure conversation trace) in 10 s, 1,000 requests in 0.5.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.simulator import BARE
from tuner.knobs.model import read
from tuner.records import Candidate, Slice
from tuner.simulator.cost import card_of, preset
from tuner.simulator.predict import Predictor, Scene
from tuner.traffic.importers import read_any


def main() -> int:
    trace = read_any(Path(sys.argv[1]))
    whole = Slice(name="all", start_s=0.0, duration_s=trace.duration_s + 1)
    scene = Scene(
        trace=trace,
        slices=(whole,),
        facts=read("Qwen/Qwen2.5-7B-Instruct", env={}),
        card=card_of("h100-80"),
        plan=BARE,
        args={"max_model_len": 16384},
        cut=False,
    )
    thousand = Slice(name="1000", start_s=0.0, duration_s=float(trace.arrival_s[min(1000, len(trace) - 1)]))
    held = True
    for name, part, spreads, limit in (
        ("whole trace", whole, False, 10.0),
        ("1,000 requests", thousand, False, 0.5),
        ("1,000 requests with spread", thousand, True, 0.5),
    ):
        for knobs in ({}, {"max_num_batched_tokens": 512, "max_num_seqs": 64}):
            predictor = Predictor(replace(scene, slices=(part,)), preset(scene.card), spreads=spreads)
            started = time.process_time()
            (found,) = predictor([Candidate(knobs)])
            seconds = time.process_time() - started
            held &= seconds <= limit
            count = int(found.values["requests"])
            print(f"{name:28} {knobs!s:56} {count:6} requests {seconds:6.2f} s CPU (≤ {limit} s)")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
