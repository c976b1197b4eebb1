#!/usr/bin/env bash
# Critics of PPO on a pretrained model: a head on the policy, and a model of its own; beside GRPO.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
same="--mixed-precision no --num-layers-unfrozen 10 --batch-size 16"
slim=1
flags="--lr 2e-5 --total-episodes 1280 --eval-every 40"
for seed in ${SEEDS:-1 2 3}; do
    train head ppo --config $settings/ppo_reviews.yaml $same $flags
    train own ppo --config $settings/ppo_reviews.yaml $same $flags --value-model $settings.py:model --value-lr 2e-4
    train grpo grpo --model $settings.py:model --dataset $settings.py:reviews \
        --eval-dataset $settings.py:reviews:split=test,copies=8 --reward $settings.py:sentiment \
        --metric $settings.py:review_values --max-new-tokens 16 --rollout-batch-size 64 --micro-batch-size 32 \
        --kl-coef 0.02 $same --lr 2e-5 --lr-schedule constant --total-episodes 1920 --eval-every 20 --save-every 0
done
