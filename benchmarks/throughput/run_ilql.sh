#!/usr/bin/env bash
# Measures algos/ilql.py and the structure of trlX's step in turn, with 4 STEPS a run of GPT-2 small, the first not
# counted, and ten times as many on random walks; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin ilql ilql_vs_trlx.py
for repeat in $(seq "$repeats"); do
    for workload in walks gpt2; do
        ours $workload-fp32
        ours $workload-trlx-defaults
        ours $workload-bf16
        ours $workload-trlx-same-flags
    done
done
repeat=1 # the memory of the losses does not vary
ours memory-fp32
ours memory-trlx-defaults
ours memory-bf16
finish
