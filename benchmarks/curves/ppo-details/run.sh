#!/usr/bin/env bash
# What details of PPO are worth on two small tasks: one change at a time, with equal episodes and seeds.
. "$(dirname "$0")/../common.sh"
tasks=benchmarks/tasks
one() { train "$1" ppo "${@:2}" --total-episodes 5120 --eval-every "${every:-8}" --save-every 0; }
walks() { one "walks-$1" --config $tasks/randomwalks/ppo.yaml "${@:2}"; }
sums() { one "sums-$1" --config $tasks/arithmetic/ppo_sums.yaml "${@:2}"; }
edited() {  # task, variant, an edit of ppo.py by sed, flags
    local copy=runs/edited/$2
    if chosen "$1-$2" && missing "$copy"; then
        run mkdir -p "$copy"
        run cp -r algos common benchmarks "$copy"
        run sed -i "$3" "$copy/algos/ppo.py"
    fi
    "$1" "$2" "${@:4}"
}
white='    advantages = (advantages - advantages.mean()) * (advantages.var(correction=0) + 1e-8).rsqrt()'
unwhitened='/^    advantages = masked_whiten(advantages, mask)$/d'
for seed in ${SEEDS:-1 2 3 4 5 6}; do
    walks ppo
    edited walks no-whitening "$unwhitened"
    walks lam-1 --lam 1
    walks no-value-clip --cliprange-value 0
    walks no-kl --kl-coef 0
    walks adaptive-kl --kl-target 1
    walks clip-0.1 --cliprange 0.1
    walks clip-0.4 --cliprange 0.4
    every=2 walks one-epoch --ppo-epochs 1
    walks zero-head --value-head-init zeros
    walks linear-head --value-head linear
    walks detached --detach-value-trunk
    walks own-critic --value-model $tasks/randomwalks.py:base_model
    walks value-lr-times-5 --value-lr 3e-3
    walks value-warmup --value-warmup 2
    walks scaled --score-scaling running
    walks centred --score-scaling running-norm
    edited walks score-before-end 's/^            row\[-1\] = score$/            row[max(0, len(row) - 2)] = score/'
    every=32 walks small-batches --batch-size 128
    every=32 edited walks whitened-in-batches "s/^    advantages = of_all(.*/&\n$white/" --batch-size 128
    [ "$seed" -le 5 ] || continue
    sums ppo
    edited sums no-whitening "$unwhitened"
    sums lam-0.95 --lam 0.95
    sums no-value-clip --cliprange-value 0
    sums kl --kl-coef 0.05
    sums clip-0.1 --cliprange 0.1
    sums clip-0.4 --cliprange 0.4
    every=2 sums one-epoch --ppo-epochs 1
    sums zero-head --value-head-init zeros
    sums detached --detach-value-trunk
    sums own-critic --value-model $tasks/arithmetic.py:base_model
    sums value-lr-times-5 --value-lr 2.5e-3
done
