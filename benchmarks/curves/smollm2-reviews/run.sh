#!/usr/bin/env bash
# A pretrained model writes film reviews, by every script for text but grpo; PPO with the true score and with a learned one.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
slim=1
for seed in ${SEEDS:-1 2 3}; do
    train sft sft --config $settings/sft_reviews.yaml
    train ppo ppo --config $settings/ppo_reviews.yaml
    train reward reward --config $settings/reward_reviews.yaml
    train ppo-learned ppo --config $settings/ppo_reviews.yaml --score-scaling ref-norm \
        --reward "$out/reward-seed$seed/hf_model" --total-episodes 2048
    train dpo dpo --config $settings/dpo_reviews.yaml
    train ilql ilql --config $settings/ilql_reviews.yaml
done
