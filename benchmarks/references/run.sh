#!/usr/bin/env bash
# The embedded tasks by our scripts and by TRL: 1.16.0 for sft, reward, dpo and grpo, 0.8.6 for ppo and ddpo. Runs are in
# runs/references/<claim>-<system>-seed<N>. One of TRL that has metrics.jsonl is not repeated, any other is begun anew;
# ours go on where they were. In the environment:
#   CLAIMS      some of the claims
#   SEEDS       (1 2 3)
#   PEER_1_16   environment of `benchmarks/throughput/make_peer_env.sh 1.16` (paths are relative to the repository)
#   PEER_0_8_6  environment of `benchmarks/throughput/make_peer_env.sh 0.8.6`
#   DRY=1       prints the commands
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/references
peers=benchmarks/throughput/.peers
out=runs/references
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONWARNINGS=ignore HF_DATASETS_DISABLE_PROGRESS_BARS=1
run() { echo "$@"; [ -n "${DRY:-}" ] || "$@"; }

for claim in ${CLAIMS:-sft reward dpo grpo ppo ddpo}; do
    case $claim in # optimizer steps between our evaluations, about ten in a run
        sft) every=40 ;;
        grpo) every=8 ;;
        ddpo) every=40 ;;
        reward) every=170 ;;
        *) every=20 ;;
    esac
    case $claim in
        ppo | ddpo) peer=("${PEER_0_8_6:-$peers/trl-0.8.6}/bin/python" $here/peer_trl_0_8_6.py) ;;
        *) peer=("${PEER_1_16:-$peers/trl-1.16}/bin/python" $here/peer_trl_1_16.py) ;;
    esac
    for seed in ${SEEDS:-1 2 3}; do
        run python "algos/$claim.py" --seed "$seed" --threads 1 --run-dir "$out/$claim-plainrl-seed$seed" --resume auto \
            --eval-every $every
        folder=$out/$claim-trl-seed$seed
        [ ! -e "$folder/metrics.jsonl" ] || continue
        run rm -rf "$folder"
        run python $here/prepare.py --claim "$claim" "$folder/inputs"
        run "${peer[@]}" --claim "$claim" --inputs "$folder/inputs" --seed "$seed" --run-dir "$folder"
        run python $here/evaluate.py "$folder" --claim "$claim" --seed "$seed"
    done
done
