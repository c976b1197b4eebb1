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
details() {  # task, the weights that its own critic starts from, five times its learning rate
    "$1" ppo
    edited "$1" no-whitening '/^    advantages = masked_whiten(advantages, mask)$/d'
    "$1" no-value-clip --cliprange-value 0
    "$1" clip-0.1 --cliprange 0.1
    "$1" clip-0.4 --cliprange 0.4
    every=2 "$1" one-epoch --ppo-epochs 1
    "$1" zero-head --value-head-init zeros
    "$1" detached --detach-value-trunk
    "$1" own-critic --value-model "$tasks/$2"
    "$1" value-lr-times-5 --value-lr "$3"
    "$1" linear-head --value-head linear
    "$1" value-warmup --value-warmup 2
    "$1" scaled --score-scaling running
    edited "$1" score-before-end 's/^            row\[-1\] = score$/            row[max(0, len(row) - 2)] = score/'
}
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    details sums arithmetic.py:base_model 2.5e-3
    sums lam-0.95 --lam 0.95
    sums kl --kl-coef 0.05
    sums adaptive-kl --kl-coef 0.05 --kl-target 0.5 --kl-horizon 512
    details walks randomwalks.py:base_model 3e-3
    walks lam-1 --lam 1
    walks no-kl --kl-coef 0
    walks adaptive-kl --kl-target 1
    walks centred --score-scaling running-norm
    every=32 walks small-batches --batch-size 128
    every=32 edited walks whitened-in-batches "s/^    advantages = of_all(.*/&\n$white/" --batch-size 128
done
