#!/usr/bin/env bash
# Critics for PPO on a pretrained model: a head at the policy's rate or at its own, and trunks of their own, which start
# from the language model or from a reward model of the same seed; beside GRPO.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
slim=1
reviews() { train "reviews-$1" ppo --config $settings/ppo_reviews.yaml --eval-every 16 "${@:2}"; }
for seed in ${SEEDS:-1 2 3}; do
    train reward reward --config $settings/reward_reviews.yaml
    reviews head
    reviews head-rate --value-lr 4e-3
    reviews own --value-model $settings.py:model --value-lr 4e-5 --value-warmup 2
    reviews reward-model --value-model "$out/reward-seed$seed/hf_model" --value-lr 4e-5 --value-warmup 2
    train reviews-grpo grpo --config $settings/grpo_reviews.yaml
done
