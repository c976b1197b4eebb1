"""PPO on random walks and DDPO on shapes by TRL 0.8.6, in the environment that ../throughput/make_peer_env.sh makes.

    PEER_0_8_6/bin/python peer_trl_0_8_6.py --claim ppo --inputs DIR --seed 1 --run-dir RUN_DIR

DIR is what prepare.py wrote. RUN_DIR gets the saved models, train.jsonl with a line for each of them, and peer.json.
Nothing of plainrl is imported but the rewards of its tasks. The settings are those of benchmarks/tasks/randomwalks/
ppo.yaml and benchmarks/tasks/shapes/ddpo.yaml, as far as TRL has them.

What differs from algos/ppo.py:
- The value head is one linear layer. Ours is H -> 2H -> ReLU -> 1.
- The learning rate falls once an iteration. Ours falls with each of its four optimizer steps.
- max_grad_norm clips the first optimizer step only: PPOTrainer keeps the weights as an iterator that is then empty.
- A batch with a mean ratio above 10 has its loss multiplied by 0.
- Advantages are whitened with the unbiased variance.
- The tokenizer pads on the right: PPOTrainer scores rows without position ids, which left padding would shift.

What differs from algos/ddpo.py:
- A forward pass holds the 16 images of an optimizer step at one of their denoising steps. Ours holds 64 pairs of any.
- Weight decay is on all weights. Ours is on matrices only.
- 64 images are sampled at once, from torch's generator. The order of prompts is of Python's.
"""

import argparse
import importlib.metadata
import json
import random
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, set_seed
from trl import (
    AutoModelForCausalLMWithValueHead,
    DDPOConfig,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    PPOConfig,
    PPOTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tasks import randomwalks, shapes

LIBRARIES = ("trl", "torch", "transformers", "accelerate", "diffusers", "tokenizers", "numpy")


# ---- Run directory ---------------------------------------------------------------------------------------------------


def begin(run_dir, settings):
    """Writes peer.json and an empty train.jsonl."""
    run_dir.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    about = {"versions": versions, "threads": torch.get_num_threads(), "settings": settings}
    (run_dir / "peer.json").write_text(json.dumps(about, indent=1) + "\n")
    (run_dir / "train.jsonl").write_text("")


def model_folder(step):
    """Where a model is saved, in the run directory."""
    return f"models/{step}"


def record(run_dir, step, episode, seconds):
    """Adds the line of a saved model to train.jsonl. seconds: of training, without saving."""
    line = {"step": step, "episode": episode, "seconds": round(seconds, 3), "model": model_folder(step)}
    with open(run_dir / "train.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def read_prompts(inputs):
    return [json.loads(line)["prompt"] for line in open(inputs / "rows.jsonl")]


def shuffled_forever(prompts, seed):
    """Permutations of the prompts, one after the other."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(prompts, len(prompts))


# ---- PPO -------------------------------------------------------------------------------------------------------------

PPO_SETTINGS = {
    "batch_size": 512,
    "mini_batch_size": 512,
    "ppo_epochs": 4,
    "learning_rate": 6e-4,
    "adap_kl_ctrl": False,
    "init_kl_coef": 0.05,
    "gamma": 1.0,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 10.0,
    "max_grad_norm": 1.0,
}
PPO_ITERATIONS = 40  # 20480 episodes
PPO_SAVE_EVERY = 5  # iterations, so 20 optimizer steps
ADAM = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.0}
MAX_NEW_TOKENS = 9


def ppo(inputs, run_dir, seed, iterations):
    """Trains the base model of the random walks with PPOTrainer."""
    iterations = iterations or PPO_ITERATIONS
    begin(run_dir, PPO_SETTINGS | ADAM | {"iterations": iterations, "max_new_tokens": MAX_NEW_TOKENS})
    set_seed(seed)
    folder = inputs / "model"
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), padding_side="right", **special)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PPO_SETTINGS["learning_rate"], **ADAM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iteration: 1 - iteration / iterations)
    config = PPOConfig(**PPO_SETTINGS, seed=seed, accelerator_kwargs={"cpu": True})
    # without a reference model it copies this one
    trainer = PPOTrainer(config, model, None, tokenizer, optimizer=optimizer, lr_scheduler=schedule)
    sampling = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = PPO_SETTINGS["batch_size"]
    prompts = shuffled_forever(read_prompts(inputs), seed)
    seconds = 0.0
    for iteration in range(1, iterations + 1):
        begun = time.perf_counter()
        queries = [torch.tensor(tokenizer.encode(next(prompts))) for _ in range(size)]
        responses = trainer.generate(queries, batch_size=size, return_prompt=False, **sampling)
        whole = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
        samples = tokenizer.batch_decode(whole, skip_special_tokens=True)
        scores = [randomwalks.optimality(sample) for sample in samples]
        stats = trainer.step(queries, responses, [torch.tensor(score) for score in scores])
        seconds += time.perf_counter() - begun
        names = ("objective/kl", "ppo/loss/value", "ppo/val/var_explained", "ppo/learning_rate")
        numbers = " | ".join(f"{name} {float(stats[name]):.3g}" for name in names)
        print(f"{iteration}/{iterations} | score {sum(scores) / size:.3f} | {numbers} | {seconds:.1f} s", flush=True)
        if iteration % PPO_SAVE_EVERY == 0 or iteration == iterations:
            step = iteration * PPO_SETTINGS["ppo_epochs"]
            model.pretrained_model.save_pretrained(run_dir / model_folder(step))
            record(run_dir, step, iteration * size, seconds)


# ---- DDPO ------------------------------------------------------------------------------------------------------------

DDPO_SETTINGS = {
    "num_epochs": 40,
    "mixed_precision": "no",
    "allow_tf32": False,
    "sample_num_steps": 10,
    "sample_eta": 1.0,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 2,
    "train_batch_size": 16,
    "train_gradient_accumulation_steps": 1,
    "train_learning_rate": 3e-4,
    "train_adam_beta1": 0.9,
    "train_adam_beta2": 0.999,
    "train_adam_weight_decay": 1e-4,
    "train_adam_epsilon": 1e-8,
    "train_max_grad_norm": 1.0,
    "train_num_inner_epochs": 1,
    "train_cfg": False,
    "train_adv_clip_max": 5.0,
    "train_clip_range": 1e-3,
    "train_timestep_fraction": 1.0,
    "per_prompt_stat_tracking": True,
    "per_prompt_stat_tracking_buffer_size": 32,
    "per_prompt_stat_tracking_min_count": 16,
    "save_freq": 10**9,  # TRL's own checkpoints
}
DDPO_SAVE_EVERY = 5  # epochs, so 40 optimizer steps


class WithoutGuidance(DefaultDDPOStableDiffusionPipeline):
    """Denoises with the embeddings of the prompts alone. Without this a guidance of 1 fails: TRL 0.8.6 lets diffusers
    put the embeddings of the negative prompt before them, and then gives the UNet twice as many texts as images."""

    def __init__(self, folder):
        super().__init__(folder, use_lora=False)
        self.sd_pipeline._encode_prompt = lambda *args, prompt_embeds, **options: prompt_embeds


class SavingTrainer(DDPOTrainer):
    """Saves the UNet every few epochs, and counts the seconds of training."""

    def __init__(self, run_dir, *args):
        super().__init__(*args)
        self.run_dir = run_dir
        self.seconds = 0.0

    def step(self, epoch, global_step):
        begun = time.perf_counter()
        global_step = super().step(epoch, global_step)
        self.seconds += time.perf_counter() - begun
        epochs_done = epoch + 1
        if epochs_done % DDPO_SAVE_EVERY == 0 or epochs_done == self.config.num_epochs:
            self.sd_pipeline.unet.save_pretrained(self.run_dir / model_folder(global_step))
            images = self.config.sample_batch_size * self.config.sample_num_batches_per_epoch
            record(self.run_dir, global_step, epochs_done * images, self.seconds)
        return global_step


def ddpo(inputs, run_dir, seed, iterations):
    """Trains all weights of the UNet of the shapes with DDPOTrainer. The reward is compressibility."""
    settings = dict(DDPO_SETTINGS)
    settings["num_epochs"] = iterations or settings["num_epochs"]
    begin(run_dir, settings)
    set_seed(seed)
    prompts = shuffled_forever(read_prompts(inputs), seed)

    def draw_prompt():
        return next(prompts), {}

    def reward(images, prompts, metadata):
        scores = shapes.compressibility(images, prompts)
        print(f"{len(scores)} images | score {sum(scores) / len(scores):.3f}", flush=True)
        return scores, {}

    config = DDPOConfig(**settings, seed=seed, log_with=None, accelerator_kwargs={"cpu": True})
    pipeline = WithoutGuidance(str(inputs / "model"))
    trainer = SavingTrainer(run_dir, config, reward, draw_prompt, pipeline)
    trainer.train()


# ---- Command line ----------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", choices=["ppo", "ddpo"], required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iterations", type=int, help="iterations of PPO or epochs of DDPO; default: the whole run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    claims = {"ppo": ppo, "ddpo": ddpo}
    claims[options.claim](options.inputs / options.claim, options.run_dir, options.seed, options.iterations)


if __name__ == "__main__":
    main()
