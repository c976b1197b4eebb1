"""Writes what a peer reads of a claim, which is what our script reads without flags: its embedded task.

    python benchmarks/references/prepare.py --claim sft DIRECTORY

DIRECTORY gets model/ (the model before training and its tokenizer), rows.jsonl (the rows of --dataset in their order)
and settings.json (every flag of the script). The pipeline of ddpo is written as files that the libraries of TRL 0.8.6
read.
"""

import argparse
import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "throughput"))

from diffusers import AutoencoderKL
from diffusion import old_format

from benchmarks.tasks import shapes
from common.cli import from_task
from common.functions import build
from common.rows import load_rows

CLAIMS = ("sft", "reward", "dpo", "ppo", "grpo", "ddpo")  # a claim is a script of algos/ with its embedded task


def prepare(claim, directory):
    """Writes the directory, which must be new."""
    directory = Path(directory)
    script = importlib.import_module(f"algos.{claim}")
    args = from_task(script.Args, script.TASK)
    shutil.copytree(build(args.model, "--model"), directory / "model")
    rows = load_rows(build(args.dataset, "--dataset"), "--dataset")
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (directory / "settings.json").write_text(json.dumps(dataclasses.asdict(args), indent=2))
    if claim == "ddpo":
        old_format(directory / "model", shapes.tokenizer())
        add_attention(directory / "model" / "vae")


def add_attention(folder):
    """Rewrites a VAE with the attention that diffusers 0.27 always builds. The output of the attention is zero, so that
    the VAE stays the same function."""
    vae = AutoencoderKL.from_pretrained(folder)
    larger = AutoencoderKL.from_config(dict(vae.config) | {"mid_block_add_attention": True})
    larger.load_state_dict(vae.state_dict(), strict=False)
    for part in (larger.encoder, larger.decoder):
        for weight in part.mid_block.attentions[0].to_out.parameters():
            weight.data.zero_()
    larger.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--claim", choices=CLAIMS, required=True)
    parser.add_argument("directory")
    prepare(**vars(parser.parse_args()))
