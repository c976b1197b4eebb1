#!/usr/bin/env bash
# Variants of GRPO, and PPO, on two tasks: with a seed, all of GRPO's see the same prompts and the same uniforms. The
# first seven take one optimizer step an iteration, those named -4 four.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks
by_grpo() { train "$task-$1" grpo --config "$tasks/$settings/grpo.yaml" "${@:2}"; }  # variant, flags
one() { by_grpo "$@" --eval-every "$every"; }
four() { by_grpo "$@" --batch-size "$quarter" --warmup-steps 20 --eval-every $((4 * every)); }
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    for task in sums calculator; do
        settings=arithmetic ppo=arithmetic/ppo_sums.yaml quarter=128 every=5 episodes=38400
        [ "$task" = sums ] || settings=calculator ppo=calculator/ppo.yaml quarter=64 every=8 episodes=20480
        one grpo
        one dr-grpo --advantage-kind mean --loss-mean constant
        one rloo --advantage-kind loo --loss-mean constant
        one batch --advantage-kind batch
        one maxrl --advantage-kind maxrl --loss-mean constant
        one kl --kl-coef 0.04
        one kl-unbiased --kl-coef 0.04 --unbiased-kl
        four grpo-4
        four dapo-4 --loss-mean token --cliprange-high 0.28
        four gspo-4 --ratio-level sequence --cliprange 3e-4 --cliprange-high 4e-4
        four cispo-4 --loss-mean token --policy-loss cispo --cliprange 1 --cliprange-high 4
        train "$task-ppo" ppo --config "$tasks/$ppo" --total-episodes "$episodes" --eval-every $((4 * every))
    done
done
