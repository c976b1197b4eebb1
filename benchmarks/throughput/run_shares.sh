#!/usr/bin/env bash
# Profiles a step of our scripts and of the fastest settings of their peers; settings: common.sh.
. "$(dirname "$0")/common.sh"
begin shares shares.py no-model
shares() { # python, benchmark, mode
    measure "$2,$3" "$1" $here/shares.py --benchmark "$2" --mode "$3" --model "$work/model/$model"
}
for model in sft_mixed_lengths pairs_mixed_lengths ppo_gpt2_small grpo_gpt2_small ilql_vs_trlx ddpo_small_unet; do
    run python $here/$model.py --prepare "$work/model/$model"
    case $model in
        sft*)
            shares python $model fp32-packing
            peer 1.16 peer_trl_1_16_sft.py
            shares "$peer_python" peer_trl_1_16_sft fp32-padding-free-kept-memory
            ;;
        pairs*)
            peer 1.16 peer_trl_1_16_pairs.py
            for kind in reward dpo; do
                shares python $model $kind-fp32
                shares "$peer_python" peer_trl_1_16_pairs $kind-fp32-same-flags-kept-memory
            done
            ;;
        ppo*)
            shares python $model fp32
            shares python $model fp32-2-layers
            peer 0.8.6 peer_trl_0_8_6.py
            shares "$peer_python" peer_trl_0_8_6 same-flags-kept-memory
            shares "$peer_python" peer_trl_0_8_6 2-layers-same-flags-kept-memory
            ;;
        grpo*)
            shares python $model fp32-plain
            peer 1.16 peer_trl_1_16_grpo.py
            shares "$peer_python" peer_trl_1_16_grpo fp32-plain-same-flags-kept-memory
            ;;
        ilql*)
            for mode in gpt2-fp32 gpt2-trlx-same-flags walks-fp32 walks-trlx-same-flags; do
                shares python $model $mode
            done
            ;;
        ddpo*)
            shares python $model fp32
            peer 0.8.6 peer_trl_0_8_6_ddpo.py
            shares "$peer_python" peer_trl_0_8_6_ddpo tuned
            ;;
    esac
done
finish
