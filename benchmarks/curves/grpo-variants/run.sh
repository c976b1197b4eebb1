#!/usr/bin/env bash
# Variants of GRPO, and PPO, on two tasks with equal episodes; one optimizer step an iteration, or four.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks
one() { train "$task-$1" grpo --config "$tasks/$folder/grpo.yaml" --eval-every "$every" "${@:2}"; }  # variant, flags
four() {
    train "$task-$1" grpo --config "$tasks/$folder/grpo.yaml" --eval-every $((4 * every)) --batch-size "$quarter" "${@:2}"
}
variants() {  # task, its folder, iterations between evaluations, a quarter of their episodes, config of PPO
    local task=$1 folder=$2 every=$3 quarter=$4
    one grpo
    one dr-grpo --advantage-kind mean --loss-mean constant
    one rloo --advantage-kind loo --loss-mean constant
    one batch --advantage-kind batch
    one maxrl --advantage-kind maxrl --loss-mean constant
    one kl --kl-coef 0.04
    one unbiased-kl --kl-coef 0.04 --unbiased-kl
    four four-steps
    four dapo --loss-mean token --cliprange-high 0.28
    four gspo --ratio-level sequence --cliprange 3e-4 --cliprange-high 4e-4
    four cispo --policy-loss cispo --cliprange 1 --cliprange-high 4 --loss-mean token
    train "$task-ppo" ppo --config "$tasks/$folder/$5" --eval-every $((4 * every)) --lr-schedule linear "${@:6}"
}
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    variants sums arithmetic 5 128 ppo_sums.yaml --total-episodes 38400
    variants calculator calculator 8 64 ppo.yaml
done
