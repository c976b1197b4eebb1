#!/usr/bin/env bash
# A pretrained model writes film reviews, by every script for text but grpo; PPO with the true score and with a learned one.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/pretrained
for seed in ${SEEDS:-1 2 3}; do
    train sft sft --config $settings/sft_reviews.yaml
    slim sft
    train ppo ppo --config $settings/ppo_reviews.yaml
    slim ppo
    train reward reward --config $settings/reward_reviews.yaml
    slim reward
    train ppo-learned ppo --config $settings/ppo_reviews.yaml --score-scaling ref-norm \
        --reward "$out/reward-seed$seed/hf_model" --total-episodes 2048
    slim ppo-learned
    train dpo dpo --config $settings/dpo_reviews.yaml
    slim dpo
    train ilql ilql --config $settings/ilql_reviews.yaml
    slim ilql
done
