#!/usr/bin/env bash
# The countdown by GRPO: advantages without deviation, means of the loss, four optimizer steps an iteration with
# two clip ranges and ratios of sequences; and by PPO.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks/arithmetic
grpo() { train "$1" grpo --config $tasks/grpo_countdown.yaml "${@:2}"; }  # variant, flags
for seed in ${SEEDS:-1 2 3}; do
    grpo default --eval-every 10
    grpo advantage-mean --eval-every 10 --advantage-kind mean
    grpo loss-token --eval-every 10 --loss-mean token
    grpo loss-constant --eval-every 10 --loss-mean constant
    grpo four-steps --eval-every 40 --batch-size 64
    grpo four-steps-clip-high --eval-every 40 --batch-size 64 --cliprange-high 0.28
    grpo four-steps-sequence-ratio --eval-every 40 --batch-size 64 --ratio-level sequence --cliprange 3e-4 \
        --cliprange-high 4e-4
    train ppo ppo --config $tasks/ppo_countdown.yaml
done
