#!/usr/bin/env bash
# The chain of RLHF on random walks, five seeds: sft -> reward -> ppo with the learned reward, and sft -> dpo.
# DRY=1 prints the commands; SEEDS chooses some of the seeds, without collecting them.
set -euo pipefail
cd "$(dirname "$0")/../../.."
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }
out=runs/curves/chain-randomwalks
task=benchmarks/tasks/randomwalks.py
for seed in ${SEEDS-1 2 3 4 5}; do
    common=(--seed "$seed" --threads 1)
    sft=$out/sft-seed$seed/hf_model
    run python algos/sft.py "${common[@]}" --run-dir "$out/sft-seed$seed" --eval-every 0
    run python algos/dpo.py --config benchmarks/tasks/randomwalks/dpo.yaml "${common[@]}" \
        --run-dir "$out/dpo-seed$seed" --eval-every 20 --model "$sft"
    run python algos/reward.py --config benchmarks/tasks/randomwalks/reward.yaml "${common[@]}" \
        --run-dir "$out/reward-seed$seed" --model "$sft" --norm-prompts $task:eval_prompts
    run python algos/ppo.py --config benchmarks/tasks/randomwalks/ppo.yaml "${common[@]}" \
        --run-dir "$out/ppo-seed$seed" --eval-every 20 --model "$sft" --reward "$out/reward-seed$seed/hf_model"
done
[ -n "${SEEDS+x}" ] || run python benchmarks/check.py --collect chain-randomwalks \
    "$out"/{reward,ppo,dpo}-seed{1,2,3,4,5}
