"""Five ways of serving translations, as ratios: `python -m benchmarks.journey [--card a4500] [--model M]`.

Requests per second of 400 requests that arrive together, and the median and p95 time of one among others that
arrive at 80 % of the static batches' throughput. Inputs are 100 tokens each, or 10 to 200; an answer is as
long as its input.
"""

import argparse

import numpy as np

from tuner.knobs.model import read
from tuner.simulator.cost import StepCost, card_of, preset
from tuner.simulator.journey import WAYS
from tuner.simulator.state import Limits, Request


def requests(lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]", rate: float | None) -> list[Request]:
    rng = np.random.default_rng(1)
    at = np.zeros(len(lengths)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(lengths)))
    return [Request(i, float(at[i]), (int(n), int(n))) for i, n in enumerate(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="a4500")
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    given = parser.parse_args()
    card = card_of(given.card)
    cost = StepCost(read(given.model, env={}), card, preset(card))
    limits = Limits(num_blocks=5000, max_model_len=2048)
    rng = np.random.default_rng(0)
    for name, lengths in (
        ("uniform, 100 tokens", np.full(400, 100)),
        ("10 to 200 tokens", rng.integers(10, 201, 400)),
    ):
        speeds = {way: len(lengths) / run(requests(lengths, None), cost, limits) for way, run in WAYS.items()}
        rate = 0.8 * speeds["static batch 16, 50 ms"]
        print(f"{name} ({given.card}, {given.model}); times at {rate:.1f} requests/s")
        for way, run in WAYS.items():
            sent = requests(lengths, rate)
            run(sent, cost, limits)
            times = [r.last - r.arrival for r in sent]
            p50, p95 = np.percentile(times, [50, 95])
            print(
                f"  {way:24} {speeds[way]:6.2f} requests/s  {speeds[way] / speeds['one by one']:5.1f}x"
                f"   p50 {p50:7.2f} s  p95 {p95:7.2f} s"
            )


if __name__ == "__main__":
    main()
