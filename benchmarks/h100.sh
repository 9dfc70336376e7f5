#!/usr/bin/env bash
# benchmarks/h100.sh STUDY SECONDS OUT [TRACES]: one piece of study a, b, c, d, e, f or h of benchmarks/h100 on a GPU host.
#
# Runs `tuner tune`, stops it after SECONDS as a person would (SIGTERM), and packs the history, the report, the front and
# the logs into OUT. The next piece goes on from the history: in TUNER_HOME where the host keeps it, else from the archive
# that RESUME names. TRIALS ends the search after so many trials; the confirmation follows. TRACES is the folder with the
# public traces (AzureLLMInferenceTrace_conv.csv and _code.csv, servegen_deepseek_r1_reasoning.csv). PYTHON must have vLLM
# and the tuner's dependencies.
set -euo pipefail
study=${1:?a, b, c, d, e, f or h} seconds=${2:?seconds} out=${3:?folder for the results} traces=${4:-traces}
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" TUNER_HOME=${TUNER_HOME:-$HOME/.cache/tuner-h100-$study}
tuner() { "${PYTHON:-python3}" -m tuner "$@"; }

mkdir -p "$out" "$TUNER_HOME"
if [ -n "${RESUME:-}" ]; then tar -C "$TUNER_HOME" -xJf "$RESUME"; fi
case $study in
  a|d|e|f) file=AzureLLMInferenceTrace_conv.csv name=azure-conv columns=() ;;
  b) file=AzureLLMInferenceTrace_code.csv name=azure-code columns=() ;;
  c) file=servegen_deepseek_r1_reasoning.csv name=servegen-reasoning
     columns=(--column arrival_s=arrival_s --column input_len=input_tokens --column output_len=output_tokens --max-len 3000) ;;
  h) file=AzureLLMInferenceTrace_conv.csv name=azure-conv-classes
     columns=(--format generic --column arrival_s=TIMESTAMP --column input_len=ContextTokens --column output_len=GeneratedTokens) ;;
  *) echo "no study '$study': a, b, c, d, e, f or h" >&2; exit 2 ;;
esac
if ! tuner trace show "$name" >/dev/null 2>&1; then
  if [ "$study" = h ]; then  # every fourth request is interactive
    sed 's/\r$//' "$traces/$file" | awk 'NR == 1 {print $0 ",priority"} NR > 1 {print $0 "," (NR % 4 == 2 ? 0 : 1)}' > "$TUNER_HOME/$name.csv"
    traces=$TUNER_HOME file=$name.csv
  fi
  tuner trace import "$traces/$file" --name "$name" "${columns[@]}" >/dev/null
fi

{ date -u +%FT%TZ; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU"
  "${PYTHON:-python3}" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'; } > "$out/host-$study.txt" 2>/dev/null &  # beside the study: it takes ten seconds
status=0
timeout -s TERM -k 60 "$seconds" "${PYTHON:-python3}" -m tuner tune "$root/benchmarks/h100/study-$study.yaml" \
  ${TRIALS:+--trials "$TRIALS"} >> "$out/tune-$study.log" 2>&1 || status=$?
tail -40 "$out/tune-$study.log"
name=$(awk '/^name:/ {print $2}' "$root/benchmarks/h100/study-$study.yaml")
tuner report "$name" -o "$out/report-$study.html" || true
tuner front "$name" --timings --json > "$out/front-$study.json" || true
tar -C "$TUNER_HOME" --exclude=compile-cache --exclude='*.lock' -cJf "$out/home-$study.tar.xz" .
exit "$status"
