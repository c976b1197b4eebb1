#!/usr/bin/env bash
# Measures algos/ilql.py and the structure of trlX's step in turn, then writes results_ilql.csv and README_ILQL.md.
# DRY=1 prints the commands.
#   REPEATS        rounds over the main modes (2)
#   EXTRA_REPEATS  of these, so many with the techniques of plainrl switched off (0)
#   STEPS          of a run on GPT-2 small, the first not counted; ten times as many on random walks (4)
#   THREADS        (2)
#   FORCE=1        measure although the machine is busy
#   RESULTS        another CSV file; README_ILQL.md goes beside it
#   PLAINRL_BENCH_TINY=1  a model of 2 layers in place of GPT-2 small, to try this out; with RESULTS elsewhere
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/throughput
results=${RESULTS:-$here/results_ilql.csv}
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
measure() { run python $here/ilql_vs_trlx.py --mode "$1" --repeat "$repeat" "${common[@]}"; }
fail() { echo "error: $*" >&2; exit 2; }

load=$(cut -d ' ' -f 1 /proc/loadavg)
if [ -z "${DRY:-}" ]; then
    [ -z "${PLAINRL_BENCH_TINY:-}" ] || [ -n "${RESULTS:-}" ] || fail "PLAINRL_BENCH_TINY needs RESULTS"
    [ -n "${FORCE:-}" ] || awk "BEGIN { exit !($load <= 1.5) }" || fail "load average $load > 1.5: wait, or set FORCE=1"
fi
export OMP_NUM_THREADS=${THREADS:-2} CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=$work/model
common=(--model "$model" --results "$work/results.csv")
run python $here/ilql_vs_trlx.py --prepare "$model"
for repeat in $(seq "${REPEATS:-2}"); do
    for workload in walks gpt2; do
        measure $workload-fp32
        measure $workload-trlx-defaults
        measure $workload-bf16
        measure $workload-trlx-same-flags
    done
    [ "$repeat" -le "${EXTRA_REPEATS:-0}" ] || continue
    measure gpt2-fp32-highest
    measure gpt2-fp32-malloc
    measure gpt2-fp32-micro-4
done
repeat=1 # the memory of the losses does not vary
measure memory-fp32
measure memory-trlx-defaults
measure memory-bf16
run mkdir -p "$(dirname "$results")"
run mv "$work/results.csv" "$results" # all or nothing, and the commit in the rows is that of a tree without it
run python $here/ilql_vs_trlx.py --table --results "$results"
