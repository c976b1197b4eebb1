#!/usr/bin/env bash
# Critics of PPO on a pretrained model: a head on the policy, and trunks of their own that start from the language model
# or, in one seed, from a reward model; beside GRPO, which goes on for half as many episodes again.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
same=(--mixed-precision no --num-layers-unfrozen 10 --batch-size 16)
slim=1
ppo() {
    train "$1" ppo --config $settings/ppo_reviews.yaml "${same[@]}" --lr 2e-5 --total-episodes 1280 --eval-every 40 "${@:2}"
}
for seed in ${SEEDS:-1 2 3}; do
    ppo head
    ppo own --value-model $settings.py:model --value-lr 2e-4
    train grpo grpo --model $settings.py:model --dataset $settings.py:reviews \
        --eval-dataset $settings.py:reviews:split=test,copies=8 --reward $settings.py:sentiment \
        --metric $settings.py:review_values --max-new-tokens 16 --rollout-batch-size 64 --micro-batch-size 32 \
        --kl-coef 0.02 "${same[@]}" --lr 2e-5 --lr-schedule constant --total-episodes 1920 --eval-every 20 --save-every 0
    [ "$seed" -le 1 ] || continue
    train reward reward --config $settings/reward_reviews.yaml "${same[@]}"
    ppo reward-model --value-model "$out/reward-seed$seed/hf_model" --value-lr 2e-4
done
