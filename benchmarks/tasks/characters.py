"""The small models of random walks and arithmetic: a tokenizer of one token a character, and a GPT-2 that is drawn."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

DRAWN = Path(__file__).resolve().parent / "drawn"  # git ignores it


def tokenizer(characters: str, context: int):
    """One token per character, id = its index, then <bos> <eos> <pad> <unk>; no bos or eos is added to a text. context:
    the longest text of the model."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*characters, *specials.values()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would leave newlines in one piece
    backend.decoder = decoders.Fuse()  # no spaces between characters
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **specials, padding_side="left", model_max_length=context, model_input_names=inputs
    )


def made_once(name: str, make: Callable[[Path], None]) -> str:
    """Path of a directory in DRAWN, which make(directory) writes where it is not there yet. Processes that do so at the
    same time do not disturb each other, and a killed one leaves nothing that is used."""
    directory = DRAWN / name
    if not directory.exists():
        DRAWN.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DRAWN) as folder:
            unfinished = Path(folder, "model")
            make(unfinished)
            try:
                os.rename(unfinished, directory)
            except OSError:
                if not directory.exists():  # else another process was faster
                    raise
    return str(directory)


def untrained_gpt2(characters: str, context: int, layers: int, width: int, heads: int) -> str:
    """Path of a GPT-2 with random weights of seed 0 and its tokenizer. A CPU without AVX2 rounds its weights
    otherwise."""
    sizes = {"n_positions": context, "n_layer": layers, "n_embd": width, "n_head": heads}
    source = f"{Path(__file__).read_text()}{characters}{sizes}"

    def make(directory):
        draw_gpt2(directory, tokenizer(characters, context), sizes)

    return made_once(hashlib.sha256(source.encode()).hexdigest()[:8], make)


def draw_gpt2(directory: Path, characters, sizes: dict) -> None:
    """Writes the model and its tokenizer. torch's generator ends as it was."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    special_ids = {f"{name}_token_id": getattr(characters, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=len(characters), **sizes, **special_ids, **no_dropout)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    characters.save_pretrained(directory)
