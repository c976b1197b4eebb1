"""Trains the embedded tasks of ppo.py and ddpo.py by TRL 0.8.6, in the environment of
`../throughput/make_peer_env.sh 0.8.6`.

    .peers/trl-0.8.6/bin/python peer_trl_0_8_6.py --claim ppo --inputs DIRECTORY --seed 1 \\
        --run-dir runs/references/ppo-trl-seed1

It reads what prepare.py has written and takes the settings of our scripts; README.md says what differs.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

import diffusers
import peer
import randomwalks
import shapes
import torch
import transformers
import trl
from transformers import PreTrainedTokenizerFast, set_seed
from trl import (
    AutoModelForCausalLMWithValueHead,
    DDPOConfig,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    PPOConfig,
    PPOTrainer,
)

SAVED = 8  # models of a run


def shuffled_forever(rows, seed):
    """The prompts of the rows in one permutation after the other."""
    prompts = [row["prompt"] for row in rows]
    rng = random.Random(seed)
    while True:
        yield from rng.sample(prompts, len(prompts))


# ---- PPO -------------------------------------------------------------------------------------------------------------


def ppo_settings(flags):
    """Arguments of PPOConfig from the flags of our script."""
    return {
        "batch_size": flags["rollout_batch_size"],
        "mini_batch_size": flags["batch_size"],
        "ppo_epochs": flags["ppo_epochs"],
        "learning_rate": flags["lr"],
        "adap_kl_ctrl": False,
        "init_kl_coef": flags["kl_coef"],
        "kl_penalty": flags["kl_kind"],
        "gamma": flags["gamma"],
        "lam": flags["lam"],
        "cliprange": flags["cliprange"],
        "cliprange_value": flags["cliprange_value"],
        "vf_coef": flags["vf_coef"],
        "max_grad_norm": flags["max_grad_norm"],
        "accelerator_kwargs": {"cpu": True},
    }


def ppo(inputs, flags, rows, seed, run_dir):
    """Trains a language model with PPOTrainer."""
    settings = ppo_settings(flags)
    size = flags["rollout_batch_size"]
    iterations = flags["total_episodes"] // size
    set_seed(seed)  # the value head is new
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    file = str(inputs / "model" / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, padding_side="right", **special)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(inputs / "model"))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=flags["lr"],
        betas=flags["adam_betas"],
        eps=flags["adam_eps"],
        weight_decay=flags["weight_decay"],
    )
    assert flags["lr_schedule"] == "linear" and flags["warmup_steps"] == 0 and flags["lr_final"] == 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iteration: 1 - iteration / iterations)
    config = PPOConfig(**settings, seed=seed)
    # without a reference model it copies this one
    trainer = PPOTrainer(config, model, None, tokenizer, optimizer=optimizer, lr_scheduler=schedule)
    sampling = {
        "batch_size": size,
        "return_prompt": False,
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": flags["max_new_tokens"],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    prompts = shuffled_forever(rows, seed)
    curve = peer.Curve(run_dir, iterations, SAVED)
    for iteration in range(1, iterations + 1):
        queries = [torch.tensor(tokenizer.encode(next(prompts))) for _ in range(size)]
        responses = trainer.generate(queries, **sampling)
        whole = [torch.cat(ids) for ids in zip(queries, responses, strict=True)]
        samples = tokenizer.batch_decode(whole, skip_special_tokens=True)
        scores = [randomwalks.optimality(sample) for sample in samples]
        trainer.step(queries, responses, [torch.tensor(score) for score in scores])
        curve.reached(iteration, iteration * flags["ppo_epochs"], iteration * size, model.pretrained_model)
        print(f"{iteration}/{iterations} | score {sum(scores) / size:.4f} | {curve.seconds:.1f} s", flush=True)
    return settings


# ---- DDPO ------------------------------------------------------------------------------------------------------------


def ddpo_settings(flags):
    """Arguments of DDPOConfig from the flags of our script."""
    beta1, beta2 = flags["adam_betas"]
    return {
        "num_epochs": flags["num_epochs"],
        "sample_num_steps": flags["num_inference_steps"],
        "sample_eta": flags["eta"],
        "sample_guidance_scale": flags["guidance_scale"],
        "sample_batch_size": flags["decode_batch_size"],
        "sample_num_batches_per_epoch": flags["rollout_batch_size"] // flags["decode_batch_size"],
        "train_batch_size": flags["batch_size"],
        "train_gradient_accumulation_steps": 1,
        "train_num_inner_epochs": flags["ppo_epochs"],
        "train_timestep_fraction": flags["timestep_fraction"],
        "train_cfg": flags["guidance_scale"] > 1,
        "train_learning_rate": flags["lr"],
        "train_adam_beta1": beta1,
        "train_adam_beta2": beta2,
        "train_adam_epsilon": flags["adam_eps"],
        "train_adam_weight_decay": flags["weight_decay"],
        "train_max_grad_norm": flags["max_grad_norm"],
        "train_adv_clip_max": flags["adv_clip_max"],
        "train_clip_range": flags["cliprange"],
        "per_prompt_stat_tracking": flags["per_prompt_stats"],
        "per_prompt_stat_tracking_buffer_size": flags["stat_buffer_size"],
        "per_prompt_stat_tracking_min_count": flags["stat_min_count"],
        "mixed_precision": "no",
        "allow_tf32": False,
        "save_freq": 10**9,  # of its own checkpoints
        "accelerator_kwargs": {"cpu": True},
    }


class WithoutGuidance(DefaultDDPOStableDiffusionPipeline):
    """Denoises with the embeddings of the prompts alone. TRL 0.8.6 lets diffusers put those of the negative prompt
    before them even without guidance, and the UNet then gets twice as many texts as images."""

    def __init__(self, folder):
        super().__init__(folder, use_lora=False)
        self.sd_pipeline._encode_prompt = lambda *args, prompt_embeds, **options: prompt_embeds

    def set_progress_bar_config(self, *args, **options):
        self.sd_pipeline.set_progress_bar_config(disable=True)


class SavingTrainer(DDPOTrainer):
    """Tells the curve of each epoch."""

    def __init__(self, curve, *args):
        super().__init__(*args)
        self.curve = curve

    def step(self, epoch, global_step):
        global_step = super().step(epoch, global_step)
        images = self.config.sample_batch_size * self.config.sample_num_batches_per_epoch
        self.curve.reached(epoch + 1, global_step, (epoch + 1) * images, self.sd_pipeline.unet)
        return global_step


def ddpo(inputs, flags, rows, seed, run_dir):
    """Trains all weights of a UNet with DDPOTrainer. The reward is compressibility."""
    assert flags["guidance_scale"] == 1 and flags["lora_r"] == 0 and flags["lr_schedule"] == "constant"
    pipeline = WithoutGuidance(str(inputs / "model"))
    prompts = shuffled_forever(rows, seed)

    def draw_prompt():
        return next(prompts), {}

    def score_images(images, prompts, metadata):
        return shapes.compressibility(images, prompts), {}

    settings = ddpo_settings(flags)
    curve = peer.Curve(run_dir, flags["num_epochs"], SAVED)
    SavingTrainer(curve, DDPOConfig(**settings, seed=seed), score_images, draw_prompt, pipeline).train()
    return settings


if __name__ == "__main__":
    peer.main({"ppo": ppo, "ddpo": ddpo}, [trl, transformers, diffusers], __doc__)
