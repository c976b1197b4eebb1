#!/usr/bin/env bash
# SFT on nine in ten of 1000 random walks.
. "$(dirname "$0")/../common.sh"
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    train default sft --eval-every 40
done
