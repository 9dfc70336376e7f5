"""How long the workbench takes for 10,000 trials: `python -m benchmarks.pages_table [TRIALS]`.

Prints, in milliseconds over HTTP on loopback, the median and the slowest of ten answers, and the CPU time of
one (this process is client and server): the answer of every page once its history was read, and sort, filter
and brush of the workbench. The bars: 300 ms for a page, 200 ms for sort, filter and brush. On a busy machine
the CPU time is nearer to what an idle one would take.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.browser import world
from tests.browser.many import add_trials
from tuner.service.pages.session import COOKIE

ASKED = {
    "sort": "?sort=-goodput_rps", "sort by a knob": "?sort=max_num_seqs",
    "filter": "?where=ttft_p95_ms<30{n}+max_num_seqs>=64", "filter by a word": "?where=max_num_seqs=64",
    "brush": "?where=ttft_p95_ms>=10{n}+ttft_p95_ms<=300+tpot_p95_ms>=10+tpot_p95_ms<=20",
}  # fmt: skip
"""`{n}` makes every answer another one, so that its pictures are drawn anew."""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        there = world.fill(home)
        made = world.study("many", node="gpu-02")
        there.store.add_study(made)
        run = there.store.open_run(
            made.id, trials_limit=None, deadline=None, now=world.NOW, pid=None, host="gpu-02"
        )
        add_trials(there.store, run, count)
        ref = f"/studies/{made.id[:16]}"
        with world.serve(there.store, home, world.Clock()) as address:
            login = httpx.post(f"{address}/login", data={"token": there.tokens["read"]})
            client = httpx.Client(base_url=address, cookies={COOKIE: login.cookies[COOKIE]}, timeout=120)
            pages = ["/", "/studies", ref, f"{ref}/trials", f"{ref}/trials/7", "/history", "/profiles"]
            for path in pages:
                show(client, path, path, {})
            for name, query in ASKED.items():
                show(client, name, f"{ref}/trials{query}", {"X-Live": "1"})
        there.store.close()


def show(client: httpx.Client, name: str, path: str, headers: dict[str, str]) -> None:
    """One line of the table, after one answer that fills what is kept."""
    taken, worked = [], []
    for n in range(11):
        began, cpu = time.perf_counter(), time.process_time()
        answer = client.get(path.format(n=n), headers=headers)
        taken.append((time.perf_counter() - began) * 1000)
        worked.append((time.process_time() - cpu) * 1000)
        assert answer.status_code == 200, (path, answer.status_code)
    cold, *warm = taken
    size = len(answer.content) / 1000
    print(
        f"{name:32} {statistics.median(warm):6.0f} {max(warm):6.0f}  CPU {statistics.median(worked[1:]):6.0f}"
        f"  first {cold:6.0f}  {size:5.0f} kB"
    )


if __name__ == "__main__":
    main()
