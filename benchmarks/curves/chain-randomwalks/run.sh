#!/usr/bin/env bash
# The chain of RLHF on random walks, five seeds: sft -> reward -> ppo with the learned reward, and sft -> dpo; two reward
# models more, whose evaluation is held out by walk. DRY=1 prints the commands; SEEDS and WALK_SEEDS choose some.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/chain-randomwalks
task=benchmarks/tasks/randomwalks.py
for seed in ${SEEDS-1 2 3 4 5}; do
    common=(--seed "$seed" --threads 1)
    sft=$out/sft-seed$seed/hf_model
    run python algos/sft.py "${common[@]}" --run-dir "$out/sft-seed$seed" --eval-every 0
    run python algos/dpo.py "${common[@]}" --run-dir "$out/dpo-seed$seed" --eval-every 20 --model "$sft"
    run python algos/reward.py "${common[@]}" --run-dir "$out/reward-seed$seed" --model "$sft" \
        --norm-prompts $task:eval_prompts
    run python algos/ppo.py "${common[@]}" --run-dir "$out/ppo-seed$seed" --eval-every 20 --model "$sft" \
        --reward "$out/reward-seed$seed/hf_model"
done
for seed in ${WALK_SEEDS-1 2}; do
    run python algos/reward.py --seed "$seed" --threads 1 --run-dir "$out/reward-by-walk-seed$seed" \
        --model "$out/sft-seed$seed/hf_model" --dataset $task:pairs:by=walk --eval-dataset $task:eval_pairs:by=walk \
        --total-steps 1715
done
[ -n "${SEEDS+x}" ] || run python benchmarks/check.py --collect chain-randomwalks \
    "$out"/{reward,ppo,dpo}-seed{1,2,3,4,5} "$out"/reward-by-walk-seed{1,2}
