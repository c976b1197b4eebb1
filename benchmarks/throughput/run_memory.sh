#!/usr/bin/env bash
# Measures what losses need, of the scripts and of TRL 1.16.0, then writes results_memory.csv and README_MEMORY.md.
# DRY=1 prints the commands.
#   REPEATS  timed updates of a process (3)
#   THREADS  (2)
#   FORCE=1  measure although the machine is busy: bytes are the same, seconds are not
#   PEER     environment of make_peer_env_trl_1_16.sh (paths are relative to the repository)
#   RESULTS  another CSV file; README_MEMORY.md goes beside it
#   QWEN3    0: without the model of the shape of Qwen3-0.6B, which takes 16 GB of memory and 15 GB of disk
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/throughput
peer=${PEER:-$here/.peers/trl-1.16}
results=${RESULTS:-$here/results_memory.csv}
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
ours() { run python $here/memory.py "$@" --results "$work/results.csv"; }
trl() { run "$peer/bin/python" $here/peer_trl_1_16_memory.py "$@" --results "$work/results.csv"; }
fail() { echo "error: $*" >&2; exit 2; }

load=$(cut -d ' ' -f 1 /proc/loadavg)
if [ -z "${DRY:-}" ]; then
    [ -x "$peer/bin/python" ] || fail "no environment in $peer: bash $here/make_peer_env_trl_1_16.sh, or set PEER"
    [ -n "${FORCE:-}" ] || awk "BEGIN { exit !($load <= 1.5) }" || fail "load average $load > 1.5: wait, or set FORCE=1"
fi
export OMP_NUM_THREADS=${THREADS:-2} CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore HF_DATASETS_DISABLE_PROGRESS_BARS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for vocabulary in 50257 151936; do
    for rows in 4 16; do
        for loss in sft dpo ppo-scoring ppo-update ilql; do
            ours --loss $loss --vocabulary $vocabulary --rows $rows
            case $loss in sft | dpo) trl --loss $loss --vocabulary $vocabulary --rows $rows ;; esac
        done
    done
    ours --head $vocabulary
done
if [ "${QWEN3:-1}" != 0 ]; then
    for iteration in sft reward dpo ppo "ppo with adapters"; do
        ours --qwen3 "$iteration"
    done
fi
run mkdir -p "$(dirname "$results")"
run mv "$work/results.csv" "$results" # all or nothing, and the commit in the rows is that of a tree without it
run python $here/memory.py --table --results "$results"
