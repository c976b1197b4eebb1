#!/usr/bin/env bash
# Measures everything of this folder, one script after the other: bash benchmarks/throughput/run_all.sh
#   ONLY="ppo sft"  these alone; all: ppo sft pairs grpo ilql ddpo sampling memory shares
# Further settings, and how long it takes: common.sh.
set -euo pipefail
for name in ${ONLY:-ppo sft pairs grpo ilql ddpo sampling memory shares}; do
    bash "$(dirname "$0")/run_$name.sh"
done
