#!/usr/bin/env bash
# DDPO on coloured shapes, three seeds: compressibility, the same with shuffled rewards, brightness, and LoRA.
# DRY=1 prints the commands; SEEDS chooses some of the seeds, without collecting them.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/ddpo-shapes
task=benchmarks/tasks/shapes.py
for seed in ${SEEDS-1 2 3}; do
    common=(--seed "$seed" --threads 1)
    run python algos/ddpo.py "${common[@]}" --run-dir "$out/default-seed$seed"
    run python algos/ddpo.py "${common[@]}" --run-dir "$out/shuffled-seed$seed" --reward $task:shuffled
    run python algos/ddpo.py "${common[@]}" --run-dir "$out/brightness-seed$seed" --reward $task:brightness --num-epochs 16
    run python algos/ddpo.py "${common[@]}" --run-dir "$out/lora-seed$seed" --lora-r 8 --lr 3e-3
done
[ -n "${SEEDS+x}" ] || run python benchmarks/check.py --collect ddpo-shapes \
    "$out"/{default,shuffled,brightness,lora}-seed{1,2,3}
