#!/usr/bin/env bash
# Five seeds of SFT on all 1000 random walks; DRY=1 prints the commands.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/sft-randomwalks
for seed in 1 2 3 4 5; do
    run python algos/sft.py --seed "$seed" --run-dir "$out/default-seed$seed" --resume auto
done
run python benchmarks/check.py --collect sft-randomwalks "$out"/default-seed{1,2,3,4,5}
