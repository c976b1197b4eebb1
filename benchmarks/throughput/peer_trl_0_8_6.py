"""The work of ppo_gpt2_small.py through PPOTrainer of TRL 0.8.6, in the environment that make_peer_env.sh makes.

    .peers/trl-0.8.6/bin/python peer_trl_0_8_6.py --mode tuned --model MODEL_DIR --results results_ppo.csv

It loads the same weights and prompts. batch_size = mini_batch_size = 16, so that an epoch is one optimizer step, as in
ours; the other settings are TRL's defaults. The response length is forced by the weights (see ppo_gpt2_small.py).
"""

import time

import torch
from measurement import main
from ppo_gpt2_small import (
    EPISODES,
    EPOCHS,
    ITERATIONS,
    LAYERS,
    LR,
    PEER_MODES,
    PROMPT,
    RESPONSE,
    figures,
    prompt_ids,
    reward,
)
from transformers import PreTrainedTokenizerFast, set_seed
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

from common.launch import fast_cpu_matmul


def measure(mode, model_dir):
    """What record() stores: seconds of generate and reward, of PPOTrainer.step, entropy of the first iteration."""
    rows, medium = PEER_MODES[mode][0]
    if medium:
        fast_cpu_matmul()
    set_seed(1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{model_dir}/tokenizer.json", eos_token="<end>")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLMWithValueHead.from_pretrained(model_dir)
    settings = {"learning_rate": LR, "batch_size": EPISODES, "mini_batch_size": EPISODES, "ppo_epochs": EPOCHS}
    frozen = LAYERS - 2 if "2-layers" in mode else None
    # without a reference it copies the model as one, and freezes the blocks that both share
    trainer = PPOTrainer(PPOConfig(**settings), model, None, tokenizer, num_shared_layers=frozen)
    sampling = {"max_new_tokens": RESPONSE, "do_sample": True, "top_k": 0, "top_p": 1.0, "batch_size": rows}
    queries = [torch.tensor(ids) for ids in prompt_ids()]
    rollout = []
    update = []
    entropies = []
    for _ in range(ITERATIONS):
        clock = [time.perf_counter()]
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in mode):
            responses = trainer.generate(queries, return_prompt=False, **sampling, pad_token_id=tokenizer.pad_token_id)
            tokenizer.batch_decode(responses)  # plainrl decodes as well
            scores = [torch.tensor(x) for x in reward([ids.tolist() for ids in responses])]
            clock.append(time.perf_counter())
            stats = trainer.step(queries, responses, scores)
        clock.append(time.perf_counter())
        assert all((len(q), len(r)) == (PROMPT, RESPONSE) for q, r in zip(queries, responses, strict=True))
        rollout.append(clock[1] - clock[0])
        update.append(clock[2] - clock[1])
        entropies.append(float(stats["objective/entropy"]) / RESPONSE)
    return figures(rollout, update, entropies[0])


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(PEER_MODES, "trl"), measure)
