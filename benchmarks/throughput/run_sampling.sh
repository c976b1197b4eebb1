#!/usr/bin/env bash
# Measures sampling in turn with what it was before and with transformers' generate, then writes results_sampling.csv and
# README_SAMPLING.md. DRY=1 prints the commands.
#   REPEATS   of each process (3)
#   ROWS      prompts (48)
#   THREADS   (2)
#   RESULTS   another CSV file; README_SAMPLING.md goes beside it
#   PLAINRL_BENCH_TINY=1  models of 2 layers, to try this out; with RESULTS elsewhere
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/throughput
results=${RESULTS:-$here/results_sampling.csv}
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
export OMP_NUM_THREADS=${THREADS:-2} CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for shape in gpt2 qwen3; do
    for rank in 0 8; do
        run python $here/sampling_mixed_lengths.py --shape $shape --lora-r $rank --results "$work/results.csv"
    done
done
run mkdir -p "$(dirname "$results")"
run mv "$work/results.csv" "$results" # all or nothing
run python $here/sampling_mixed_lengths.py --table --results "$results"
