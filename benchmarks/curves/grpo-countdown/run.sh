#!/usr/bin/env bash
# The countdown, three seeds each: GRPO, advantages without deviation, means of the loss, groups sampled again, four
# optimizer steps an iteration with two clip ranges and ratios of sequences, and PPO.
# DRY=1 prints the commands.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/grpo-countdown
tasks=benchmarks/tasks/arithmetic
grpo() {  # variant, flags
    run python algos/grpo.py --config $tasks/grpo_countdown.yaml --seed "$seed" --threads 1 \
        --run-dir "$out/$1-seed$seed" "${@:2}"
}
for seed in 1 2 3; do
    grpo default --eval-every 10
    grpo four-steps --eval-every 40 --batch-size 64
    grpo dynamic-sampling --eval-every 10 --dynamic-sampling 3
    grpo loss-token --eval-every 10 --loss-mean token
    grpo four-steps-clip-high --eval-every 40 --batch-size 64 --cliprange-high 0.28
    grpo four-steps-sequence-ratio --eval-every 40 --batch-size 64 --ratio-level sequence --cliprange 3e-4 \
        --cliprange-high 4e-4
    grpo advantage-mean --eval-every 10 --advantage-kind mean
    run python algos/ppo.py --config $tasks/ppo_countdown.yaml --seed "$seed" --threads 1 --run-dir "$out/ppo-seed$seed"
    grpo loss-constant --eval-every 10 --loss-mean constant
done
run python benchmarks/check.py --collect grpo-countdown \
    "$out"/{default,advantage-mean,loss-{token,constant},dynamic-sampling}-seed{1,2,3} \
    "$out"/{four-steps,four-steps-clip-high,four-steps-sequence-ratio,ppo}-seed{1,2,3}
