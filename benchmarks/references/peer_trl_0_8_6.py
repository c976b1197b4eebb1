"""Trains the embedded tasks of ppo.py and ddpo.py by TRL 0.8.6, in the environment of
`../throughput/make_peer_env.sh 0.8.6`.

    .peers/trl-0.8.6/bin/python peer_trl_0_8_6.py --claim ppo --inputs DIRECTORY --seed 1 \\
        --run-dir runs/references/ppo-trl-seed1

It reads what prepare.py has written and takes the settings of our scripts; README.md says what differs.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

import diffusers
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


class Curve:
    """Saves models, and counts the seconds of training without those of saving."""

    def __init__(self, run_dir, iterations):
        self.run_dir = run_dir
        self.due = [round(iterations * part / SAVED) for part in range(1, SAVED + 1)]
        self.seconds = 0.0
        self.begun = time.perf_counter()

    def iteration_done(self, iteration, step, episode, score, model):
        """Prints the score of an iteration. Saves the model and writes its record where it is due."""
        self.seconds += time.perf_counter() - self.begun
        print(f"{iteration}/{self.due[-1]} | score {score:.4f} | {self.seconds:.1f} s", flush=True)
        if iteration in self.due:
            name = f"models/{step}"
            model.save_pretrained(self.run_dir / name)
            record = {"step": step, "episode": episode, "seconds": self.seconds, "model": name}
            with open(self.run_dir / "train.jsonl", "a") as file:
                file.write(f"{json.dumps(record)}\n")
        self.begun = time.perf_counter()


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


def ppo(inputs, flags, settings, rows, seed, run_dir, iterations):
    """Trains a language model with PPOTrainer."""
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
    size = flags["rollout_batch_size"]
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
    curve = Curve(run_dir, iterations)
    for iteration in range(1, iterations + 1):
        queries = [torch.tensor(tokenizer.encode(next(prompts))) for _ in range(size)]
        responses = trainer.generate(queries, **sampling)
        whole = [torch.cat(ids) for ids in zip(queries, responses, strict=True)]
        samples = tokenizer.batch_decode(whole, skip_special_tokens=True)
        scores = [randomwalks.optimality(sample) for sample in samples]
        trainer.step(queries, responses, [torch.tensor(score) for score in scores])
        step = iteration * flags["ppo_epochs"]
        curve.iteration_done(iteration, step, iteration * size, sum(scores) / size, model.pretrained_model)


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

    def __init__(self, curve, scores, *args):
        super().__init__(*args)
        self.curve = curve
        self.scores = scores  # what the reward function has returned so far

    def step(self, epoch, global_step):
        global_step = super().step(epoch, global_step)
        images = self.config.sample_batch_size * self.config.sample_num_batches_per_epoch
        score = sum(self.scores[-images:]) / images
        unet = self.sd_pipeline.unet
        self.curve.iteration_done(epoch + 1, global_step, (epoch + 1) * images, score, unet)
        return global_step


def ddpo(inputs, flags, settings, rows, seed, run_dir, iterations):
    """Trains all weights of a UNet with DDPOTrainer. The reward is compressibility."""
    assert flags["guidance_scale"] == 1 and flags["lora_r"] == 0 and flags["lr_schedule"] == "constant"
    pipeline = WithoutGuidance(str(inputs / "model"))
    prompts = shuffled_forever(rows, seed)
    scores = []

    def draw_prompt():
        return next(prompts), {}

    def score_images(images, prompts, metadata):
        batch_scores = shapes.compressibility(images, prompts)
        scores.extend(batch_scores)
        return batch_scores, {}

    config = DDPOConfig(**settings | {"num_epochs": iterations}, seed=seed)
    curve = Curve(run_dir, iterations)
    SavingTrainer(curve, scores, config, score_images, draw_prompt, pipeline).train()


# ---- Command line ----------------------------------------------------------------------------------------------------

CLAIMS = {"ppo": (ppo_settings, ppo), "ddpo": (ddpo_settings, ddpo)}


def train(claim, inputs, seed, run_dir, iterations):
    """Trains and writes models/, train.jsonl and peer.json."""
    torch.set_num_threads(1)
    run_dir.mkdir(parents=True, exist_ok=True)
    flags = json.loads((inputs / "settings.json").read_text())
    rows = [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()]
    make_settings, run = CLAIMS[claim]
    settings = make_settings(flags)
    if iterations is None:
        iterations = flags["num_epochs"] if claim == "ddpo" else flags["total_episodes"] // flags["rollout_batch_size"]
    run(inputs, flags, settings, rows, seed, run_dir, iterations)
    versions = {module.__name__: module.__version__ for module in (trl, transformers, diffusers, torch)}
    about = {"versions": versions, "threads": torch.get_num_threads(), "settings": settings}
    (run_dir / "peer.json").write_text(json.dumps(about, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--claim", choices=CLAIMS, required=True)
    parser.add_argument("--inputs", type=Path, required=True, help="directory that prepare.py has written")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iterations", type=int, help="a shorter run: iterations of PPO, epochs of DDPO")
    train(**vars(parser.parse_args()))
