#!/usr/bin/env bash
# What each detail of PPO is worth on random walks: one change at a time to the settings of ppo-randomwalks, with half of
# their episodes. Evaluations are 2,560 episodes apart.
. "$(dirname "$0")/../common.sh"
walks=benchmarks/tasks/randomwalks
ppo() { train "$1" ppo --config $walks/ppo.yaml --total-episodes 10240 --eval-every "${every:-20}" --save-every 0 "${@:2}"; }
edited() {  # variant, the line of ppo.py that goes
    local copy=runs/edited/$1
    if chosen "$1" && missing "$copy"; then
        run mkdir -p "$copy"
        run cp -r algos common benchmarks "$copy"
        run sed -i "/^$2\$/d" "$copy/algos/ppo.py"
    fi
    ppo "$1"
}
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    ppo ppo
    ppo value-lr-times-5 --value-lr 3e-3
    ppo value-lr-fifth --value-lr 1.2e-4
    ppo lam-1 --lam 1
    edited no-whitening '    advantages = masked_whiten(advantages, mask)'
    ppo no-value-clip --cliprange-value 0
    every=5 ppo one-epoch --ppo-epochs 1
    ppo linear-head --value-head linear
    ppo own-critic --value-model $walks.py:base_model
    ppo no-kl --kl-coef 0
    ppo clip-0.1 --cliprange 0.1
    ppo clip-0.4 --cliprange 0.4
    ppo detached --detach-value-trunk
    ppo zero-head --value-head-init zeros
    ppo value-warmup --value-warmup 2
    ppo adaptive-kl --kl-target 1.5
    ppo scaled --score-scaling running-norm
done
