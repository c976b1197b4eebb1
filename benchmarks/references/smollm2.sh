#!/usr/bin/env bash
# TRL's runs beside those of the claims smollm2-answers and smollm2-reviews, which must be there, and their curves.
# PEER names the interpreter of an environment that `../throughput/make_peer_env.sh 1.16` has made, with tyro and
# vaderSentiment added. A run that is there is not repeated.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=runs/references
for seed in ${SEEDS:-1 2 3}; do
    for pair in grpo:smollm2-answers/sums sft:smollm2-reviews/sft reward:smollm2-reviews/reward dpo:smollm2-reviews/dpo; do
        target=$out/smollm2-${pair%%:*}-seed$seed
        if [ ! -e "$target" ]; then
            "${PEER:-python}" benchmarks/references/smollm2.py "runs/curves/${pair#*:}-seed$seed" "$target.part"
            mv "$target.part" "$target"
        fi
    done
done
for algo in grpo sft reward dpo; do
    python benchmarks/references/report.py smollm2-$algo $out/smollm2-$algo-seed*
done
