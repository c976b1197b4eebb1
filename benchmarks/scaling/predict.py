"""Scaling of the scripts on paper. A PREDICTION: nothing here was run on a GPU, or on more than one machine.

    python benchmarks/scaling/predict.py        # writes predictions.csv; `benchmarks/check.py --write` makes the tables

Work per GPU stays the same (weak scaling); an iteration is an optimizer step, in ppo a rollout with its epochs, in ddpo
an epoch. seconds = compute + exposed (links) + barrier (waiting for the rank with the longest rows) + serial (what
rank 0, or every rank, does for the rows of all). efficiency = seconds on 1 GPU / seconds on n.
tests/test_scaling.py holds `moved` against the bytes that gloo sends between CPU processes.
"""

import csv
import math
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

HERE, CORE = Path(__file__).parent, "measured once, on one core of an AMD EPYC with other work"
ASSUMED = {  # name: value, unit, source
    "peak": (989e12, "FLOP/s, bfloat16 matrix products", "H200 SXM datasheet, without sparsity"),
    "mfu": (0.4, "of peak in training and scoring", "assumed; 0.3 to 0.5 are reported for dense models on H100s"),
    "hbm": (4.8e12, "B/s of GPU memory", "H200 SXM datasheet"),
    "hbm_used": (0.6, "of hbm in decoding", "assumed"),
    "launch": (0.5e-3, "s a layer and decoded token, Python and kernel launches", "assumed"),
    "memory": (0.9 * 141e9, "B a GPU", "H200 SXM datasheet; a tenth for what is not counted, assumed"),
    "nvlink": (450e9, "B/s a GPU and direction, inside a machine", "NVLink 4: 900 GB/s in both"),
    "fast": (400e9, "B/s a machine and direction, between machines", "DGX H200: 8 x 400 Gb/s"),
    "slow": (12.5e9, "B/s a machine and direction, between machines", "one 100 Gb/s Ethernet card"),
    "link_used": (0.7, "of a link", "assumed"),
    "latency": (5e-6, "s a hop of a ring", "assumed"),
    "overlap": (0.8, "of the time that allows it: DDP the last backward pass, FSDP2 every pass", "assumed"),
    "bucket": (25 * 2**20, "B of gradients that DDP reduces at once", "torch's default"),
    "spread": (0.5, "deviation of row lengths over their mean", "assumed; packing makes it less"),
    "label": (6e-9, "s a token of all ranks, whose labels sft.py counts on every rank", CORE),
    "reward": (1e-3, "s a sample in the reward function on rank 0", "assumed: a short Python function"),
    "detokenize": (0.9e-6, "s a token of all ranks, on every rank", CORE),
    "pcie": (25e9, "B/s from rank 0's GPU to the host", "assumed: half of PCIe 5.0 x16"),
    "disk": (2e9, "B/s written", "assumed: one NVMe disk or a good network file system"),
    "hash": (0.44e9, "B/s of sha256", CORE),
}
A = SimpleNamespace(**{name: value for name, (value, *_) in ASSUMED.items()})
NODE = 8  # GPUs of a machine
MODELS = {  # parameters, layers, width, vocabulary, B of key-value cache a token (2 x layers x 8 heads x 128 x 2 B)
    "0.6B": (0.60e9, 28, 1024, 151936, 114688),  # config.json of Qwen/Qwen3-0.6B
    "8B": (8.19e9, 36, 4096, 151936, 147456),  # Qwen/Qwen3-8B
    "70B": (70.6e9, 80, 8192, 128256, 327680),  # meta-llama/Llama-3.1-70B
    "SD 1.5": (0.86e9, 16, 320, 0, 0),  # the UNet of Stable Diffusion 1.5
}
UNET, UNET_TRAIN, VAE = 0.803e12, 2.407e12, 2.515e12  # FLOP: forward, forward and backward, decoder; FlopCounterMode
LATENTS, IMAGE, DENOISING = 4 * 64 * 64 * 4, 3 * 512 * 512, 50  # B of latents and uint8 image; steps, with guidance
WORK = {  # rows of a GPU and optimizer step, micro-batches, sequences of a row, query, response tokens, epochs
    "sft": (16, 4, 1, 1024, 1024, 1),
    "reward": (16, 4, 2, 512, 512, 1),
    "dpo": (16, 4, 2, 512, 512, 1),  # the reference scored all pairs once, before; a shared prompt costs less than this
    "ilql": (16, 4, 1, 512, 512, 1),
    "ppo": (64, 4, 1, 512, 512, 4),  # one optimizer step an epoch
    "ddpo": (8, 50, 1, 0, 0, 1),  # micro-batches of 8 (image, step) pairs
}
STRATEGIES = ("DDP", "FSDP2", "FSDP2 per token")  # the last: a rollout that gathers the weights for every token or step


def moved(strategy, n, gradient, gathered, reduced, gathers):
    """Bytes that a GPU sends for an optimizer step, by rings: (n - 1) / n of a tensor to gather or scatter it, twice
    that to all-reduce it. DDP: the gradients, once a step (no_sync on all micro-batches but the last). FSDP2: `gathers`
    times the weights (2 a micro-batch, since they are freed after the forward pass), and the gradients once."""
    ring = (n - 1) / n
    return 2 * ring * gradient if strategy == "DDP" else ring * (gathers * gathered + reduced)


def transfer(size, hops, n, network):
    """Seconds. A ring through machines is as fast as the slower of NVLink and all network cards of a machine."""
    link = A.nvlink if n <= NODE else min(A.nvlink, network)
    return size / (link * A.link_used) + hops * (n - 1) * A.latency


def predict(algo, name, strategy, n, network):
    params, layers, width, vocab, cache = MODELS[name]
    rows, micro, sequences, query, response, epochs = WORK[algo]
    tokens, recompute = rows * sequences * (query + response), width > 2000  # --gradient-checkpointing
    heads = {"ilql": 4 * (width**2 + width * vocab), "ppo": 2 * width**2}.get(algo, 0)  # two Q heads; the value head
    trained = params + heads
    targets, reference = heads * (algo == "ilql"), params * (algo == "ppo")  # the reference is whole on every GPU
    update = epochs * tokens * (8 if recompute else 6) * trained / (A.peak * A.mfu)
    rollout = serial = gathered_results = trajectories = 0.0
    rollout_gathers = sampled = 0
    if algo == "ppo":  # decoding reads weights and key-value cache for each token; policy and reference score once
        step = (2 * params + rows * (query + response / 2) * cache) / (A.hbm * A.hbm_used)
        flops = 2 * params * (rows * query + 2 * tokens)
        rollout = flops / (A.peak * A.mfu) + response * max(step, layers * A.launch)
        sampled, gathered_results = response, rows * response * 25  # ids, mask, four float32
        serial = n * rows * (A.reward + 2 * (query + response) * A.detokenize)
    elif algo == "ddpo":
        rollout = rows * (2 * DENOISING * UNET + VAE) / (A.peak * A.mfu)
        update = rows * 2 * DENOISING * UNET_TRAIN / (A.peak * A.mfu)
        sampled, trajectories = DENOISING, rows * ((DENOISING + 1) * LATENTS + IMAGE)
        gathered_results, serial = trajectories, n * rows * A.reward
    elif algo == "sft":
        serial = n * tokens * A.label
    if sampled and strategy != "DDP":  # policy and values of ppo are scored within the rollout
        rollout_gathers = 1 if strategy == "FSDP2" else sampled + micro * (algo == "ppo")
    ddp = strategy == "DDP"
    size = moved(strategy, n, 4 * trained, 2 * (trained + targets), 2 * trained, 2 * micro) * epochs
    hops = epochs * (2 * math.ceil(4 * trained / A.bucket) if ddp else (2 * micro + 1) * layers)
    window = update * 2 / 3 / micro if ddp else update
    exposed = max(0.0, transfer(size, hops, n, network) - A.overlap * window)
    more = moved("FSDP2", n, 0, 2 * trained, 0, rollout_gathers) + (n - 1) * gathered_results
    exposed += transfer(more, rollout_gathers * layers + 5, n, network)
    # every optimizer step waits for the rank with the most tokens: the mean of the largest of n normal deviates (Blom);
    # in ppo all responses may reach --max-new-tokens, and all images have the same steps
    largest = NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0
    barrier = 0.0 if sampled else update * largest * A.spread / math.sqrt(rows * sequences)
    # memory, B: weights, gradients and AdamW's two moments in float32; DDP's buckets, and autocast's copy in bfloat16;
    # FSDP2: what a rollout unshards, or the gradient of all weights, which no_sync keeps whole until the last
    # micro-batch. Activations of a token (Korthikanti et al. 2022, fused attention), logits of a response token
    held = (22 if n > 1 else 18) * trained if ddp else (16 * trained + 4 * targets) / n + 2 * trained * (n > 1)
    kept = (34 + 2 * layers if recompute else 34 * layers) * width * tokens
    kept += 10 * vocab * rows * sequences * response * (algo != "reward")
    memory = held + 4 * (reference + targets * ddp) + kept / micro + trajectories * n
    loading = 4 * (trained + targets + reference)  # the scripts put all on each GPU before it is sharded
    seconds = rollout + update + exposed + barrier + serial
    found = {"algo": algo, "model": name, "strategy": strategy, "gpus": n, "network_gb_s": f"{network / 1e9:g}"}
    found |= {"rollout_s": rollout, "update_s": update, "exposed_s": exposed, "barrier_s": barrier, "serial_s": serial}
    found |= {"seconds": seconds, "moved_gb": (size + more) / 1e9, "memory_gb": memory / 1e9, "load_gb": loading / 1e9}
    found |= {"fits": "yes" if max(memory, loading) < A.memory else "no"}
    # a checkpoint: weights and moments of what is trained, on rank 0's host; all others wait. Resuming reads it all in
    # every process
    saved = 12 * trained
    found |= {"save_gb": saved / 1e9, "save_s": saved * (1 / A.pcie + 1 / A.disk + 1 / A.hash)}
    return found | {"resume_host_gb": min(n, NODE) * saved / 1e9}


# Default sizes of the scripts, at rows of LONGEST tokens on a GPU of 80 GB
MICRO_BATCH, DECODE_BATCH, LONGEST, GPU = 8, 256, 1024, 0.9 * 80e9
SAVED = 82e3  # B of activations a token and layer of Qwen3-0.6B under bf16 autocast; measured by tests/test_scaling.py
CHUNK = 256e6  # B of the logits that a loss holds at a time


def default_memory(algo, micro_batch=MICRO_BATCH, decode_batch=DECODE_BATCH):
    """{part: B} on one GPU with full fine-tuning of the 0.6B model in float32 under bf16 autocast. An update needs what
    stays and what it adds; decoding needs what stays and what it adds."""
    params, layers, width, vocab, cache = MODELS["0.6B"]
    sequences = WORK[algo][2]
    heads = {"ilql": 4 * (width**2 + width * vocab), "ppo": 2 * width**2}.get(algo, 0)
    trained = params + heads
    stays = 12 * trained  # weights and moments
    if algo == "ilql":
        stays += 4 * heads  # target heads
    if algo == "ppo":
        stays += 4 * params  # the reference
    gradients = 4 * trained + 2 * trained  # and autocast's copy of the weights
    activations = SAVED * layers * micro_batch * sequences * LONGEST
    decoding = 0.0
    if algo != "reward":  # which decodes nothing
        # the key-value cache, and of one token float32 logits with float64 copies for the draw
        decoding = decode_batch * (LONGEST * cache + vocab * (4 + 4 * 8)) + 2 * trained
    update = stays + gradients + activations + CHUNK
    parts = {"stays": stays, "gradients, casts": gradients, "activations": activations, "logits": CHUNK}
    parts |= {"update": update, "decoding adds": decoding, "decoding": stays + decoding}
    return parts | {"most": max(update, stays + decoding)}


def predictions():
    found = []
    for algo in WORK:
        for name in ["SD 1.5"] if algo == "ddpo" else [m for m in MODELS if m != "SD 1.5"]:
            for strategy in STRATEGIES if algo in ("ppo", "ddpo") else STRATEGIES[:2]:
                one = predict(algo, name, strategy, 1, A.fast)["seconds"]
                for n, network in ((1, A.fast), (8, A.fast), (64, A.fast), (64, A.slow)):
                    row = predict(algo, name, strategy, n, network)
                    row["efficiency"] = one / row["seconds"]
                    found.append({k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()})
    return found


if __name__ == "__main__":
    with open(HERE / "predictions.csv", "w", newline="") as file:
        rows = predictions()
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
