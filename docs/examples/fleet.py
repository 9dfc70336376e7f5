"""Writes fleet.csv, the made-up traffic of fleet.yaml: long prompts, short answers, 24 requests a second."""

import math
from pathlib import Path

import numpy as np

ROWS, RATE, SEED = 400, 24.0, 4


def main() -> None:
    rng = np.random.default_rng(SEED)
    arrival = np.cumsum(rng.exponential(1 / RATE, ROWS))
    inputs = np.clip(rng.lognormal(math.log(1500), 0.6, ROWS), 30, 6000).astype(int)
    outputs = np.clip(rng.lognormal(math.log(12), 0.5, ROWS), 4, 300).astype(int)
    lines = [f"{a:.3f},{i},{o}" for a, i, o in zip(arrival, inputs, outputs, strict=True)]
    Path(__file__).with_suffix(".csv").write_text(
        "arrival_s,input_len,output_len\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
