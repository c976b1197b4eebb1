#!/usr/bin/env bash
# Measures algos/ppo.py, TRL 0.8.6 and TRL 1.12.0 in turn; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin ppo ppo_gpt2_small.py
old() { peer 0.8.6 peer_trl_0_8_6.py; trl "$1"; }
new() { peer 1.12 peer_trl_1_12_ppo.py; trl "$1"; }
for repeat in $(seq "$repeats"); do
    ours fp32
    old same-flags-kept-memory
    new 1.12-fp32-same-flags
    ours fp32-2-layers
    old 2-layers-same-flags-kept-memory
    ours bf16
    old bf16-same-flags
    new 1.12-bf16-same-flags
    ours bf16-2-layers
    old tuned
    [ "$repeat" -le "${EXTRA_REPEATS:-1}" ] || continue
    old same-flags
    old defaults
    new 1.12-fp32-defaults
    ours fp32-highest
    ours fp32-sdpa
    ours fp32-decode-4
    old 2-layers-tuned
done
finish
