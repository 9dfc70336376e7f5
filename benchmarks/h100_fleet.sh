#!/usr/bin/env bash
# benchmarks/h100_fleet.sh SECONDS OUT [TRACES]: study g of benchmarks/h100, two kinds of node as one job, on one host with three GPUs.
#
# Starts a Ray cluster of its own: a head without GPUs, node `one` with one card and node `two` with two. Each node has
# its own GPUs, cores and compile cache (ONE and TWO: GPUS/CORES; HEAD: the cores of the head and the controller), so both
# replay at the same time. Runs `tuner tune --on`, which plans to end within SECONDS and is stopped after them as a person
# would (SIGTERM). Packs the history, each node's front and report, and the logs into OUT. TRACES is the folder with
# AzureLLMInferenceTrace_conv.csv. PYTHON must have vLLM, Ray and the tuner's dependencies. STUDY names another study
# file: with a simulated engine no GPU is needed.
set -euo pipefail
seconds=${1:?seconds} out=${2:?folder for the results} traces=${3:-traces}
root=$(cd "$(dirname "$0")/.." && pwd) python=${PYTHON:-python3} address=127.0.0.1:6399
study=${STUDY:-$root/benchmarks/h100/study-g.yaml} one=${ONE:-0/0-15} two=${TWO:-1,2/16-47} head=${HEAD:-48-63}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" TUNER_HOME=${TUNER_HOME:-$HOME/.cache/tuner-h100-g}
mkdir -p "$out" "$TUNER_HOME"

# The path is short, because socket paths are limited. The memory monitor is off: on a host that gets its memory as it
# uses it, Ray believes that memory is short, and ends workers. Ray's workers, and so the engines, keep their priority.
tasks=() RAY_TMPDIR=$(mktemp -d /tmp/rXXXX)
export RAY_TMPDIR RAY_USAGE_STATS_ENABLED=0 RAY_memory_monitor_refresh_ms=0 RAY_worker_niceness=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_TMPDIR/token
(umask 077; head -c 32 /dev/urandom | sha256sum | cut -c1-64 > "$RAY_AUTH_TOKEN_PATH")
tuner() { taskset -c "$head" "$python" -m tuner "$@"; }
end() {
  for task in "${tasks[@]}"; do kill -TERM "$task" 2>/dev/null || true; done
  wait
  tar -C "$RAY_TMPDIR/ray/session_latest" -cJf "$out/ray-logs.tar.xz" logs || true
  rm -rf "$RAY_TMPDIR"
}
trap end EXIT
join() {  # join NAME CORES OPTION...: start Ray there, until this script ends
  local log=$out/ray-$1.log cores=$2
  shift 2
  taskset -c "$cores" "$python" -m ray.scripts.scripts start --block --node-ip-address 127.0.0.1 --num-cpus 1 \
    --object-store-memory 300000000 "$@" > "$log" 2>&1 &
  tasks+=($!)
  until grep -q 'Ray runtime started' "$log"; do kill -0 $! && sleep 0.2; done
}
join head "$head" --head --port "${address#*:}" --num-gpus 0 --include-dashboard false
TUNER_HOME=$TUNER_HOME/one CUDA_VISIBLE_DEVICES=${one%/*} join one "${one#*/}" --address "$address" --num-gpus 1 --labels gpu=h200,node=one
TUNER_HOME=$TUNER_HOME/two CUDA_VISIBLE_DEVICES=${two%/*} join two "${two#*/}" --address "$address" --num-gpus 2 --labels gpu=h200,node=two

if ! tuner trace show azure-conv >/dev/null 2>&1; then
  tuner trace import "$traces/AzureLLMInferenceTrace_conv.csv" --name azure-conv >/dev/null
fi
status=0
timeout -s TERM -k 60 "$seconds" taskset -c "$head" "$python" -m tuner tune "$study" --on "$address" --isolated \
  --hours "$(awk "BEGIN {print ($seconds - 90) / 3600}")" 2>&1 | tee -a "$out/tune-g.log" || status=$?
for node in one two; do
  id=$(tuner study list --json | "$python" -c 'import json, sys; print(next(s["id"] for s in json.load(sys.stdin) if s["node"] == sys.argv[1]))' $node) || continue
  tuner report "$id" -o "$out/report-g-$node.html" || true
  tuner front "$id" --timings --json > "$out/front-g-$node.json" || true
  tuner history --node $node --json > "$out/history-g-$node.json" || true
done
tuner profile list > "$out/profiles-g.txt" || true
tar -C "$TUNER_HOME" --exclude=compile-cache --exclude='*.lock' -cJf "$out/home-g.tar.xz" .
exit "$status"
