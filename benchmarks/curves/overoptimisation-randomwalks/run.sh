#!/usr/bin/env bash
# Reward models from 100, 300 and all 2744 pairs, and PPO against each with several KL coefficients.
. "$(dirname "$0")/../common.sh"
task=benchmarks/tasks/randomwalks.py
settings=benchmarks/tasks/randomwalks
reward() {  # pairs, flags
    train "reward-$1" reward --config $settings/reward.yaml --eval-every 2000 "${@:2}"
}
for seed in ${SEEDS:-1 2 3}; do
    reward 100 --dataset $task:pairs:split=train,count=100 --total-steps 400
    reward 300 --dataset $task:pairs:split=train,count=300 --total-steps 400
    reward all --dataset $task:pairs:split=train --epochs 25
    for kl in 0 0.05 0.2; do
        for pairs in 100 300 all; do
            train pairs-$pairs-kl-$kl ppo --config $settings/ppo.yaml --reward "$out/reward-$pairs-seed$seed/hf_model" \
                --score-scaling ref-norm --kl-coef "$kl" --vf-coef 0.1 --total-episodes 5120 \
                --rollout-batch-size 128 --batch-size 128 --eval-every 8 --eval-dataset $task:eval_prompts:samples=25
        done
    done
done
