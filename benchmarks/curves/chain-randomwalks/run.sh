#!/usr/bin/env bash
# The chain of RLHF on random walks: sft -> reward -> ppo, and sft -> dpo; reward and dpo from the base model, too.
. "$(dirname "$0")/../common.sh"
settings=benchmarks/tasks/randomwalks
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    SEEDS=$seed bash benchmarks/curves/sft-randomwalks/run.sh
    model=runs/curves/sft-randomwalks/default-seed$seed/hf_model
    train dpo dpo --config $settings/dpo.yaml --eval-every 20 --model "$model"
    train reward reward --config $settings/reward.yaml --model "$model"
    train ppo ppo --config $settings/ppo.yaml --eval-every 20 --model "$model" --score-scaling ref-norm \
        --reward "$out/reward-seed$seed/hf_model"
    [ "$seed" -le 3 ] || continue
    train dpo-base dpo --eval-every 20
    train reward-base reward
done
