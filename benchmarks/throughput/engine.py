"""The script's own sampler beside vLLM, on SmolLM2-135M-Instruct: tokens per CPU second, greedy ids, log-probabilities.

    vllm_env/bin/python benchmarks/throughput/engine.py float32      # environment: tests/make_vllm_env.sh
    vllm_env/bin/python benchmarks/throughput/engine.py bfloat16

CPU seconds are those of the process, so that other work on the machine hardly matters. Rows go to engine.csv, and
README.md says what is equal.
"""

import argparse
import os
import sys
import time
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import markdown, read_csv

RESULTS = Path(__file__).with_name("engine.csv")
SHAPES = [(32, 32), (128, 16)]  # tokens of a prompt, new tokens
ROWS = [8, 64, 256]
COMPARED = 64  # rows whose greedy ids and log-probabilities are compared


def timed(function):
    """(result, CPU seconds)"""
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def measure(precision):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams, __version__

    from benchmarks.tasks import pretrained
    from benchmarks.throughput import measurement
    from common.launch import choose_products
    from common.lm.adapters import for_sampling
    from common.lm.sampling import sample, uniforms

    torch.set_num_threads(1)
    choose_products()
    directory = pretrained.model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    lm.generation_config.eos_token_id = None
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    options = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": max(ROWS), "kv_cache_memory_bytes": 2**31}
    options["max_num_batched_tokens"] = max(ROWS) * 256  # seeds fail on a CPU where a prompt is read in parts
    engine = LLM(directory, dtype=precision, logprobs_mode="processed_logprobs", **options)
    stream = tokenizer("".join(row["prompt"] for row in pretrained.sums()))["input_ids"]

    def by_engine(prompts, count, temperature):
        options = {"temperature": temperature, "max_tokens": count, "logprobs": 0, "ignore_eos": True}
        seeds = [SamplingParams(seed=row, **options) for row in range(len(prompts))]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], seeds, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def by_script(prompts, count, temperature):
        draws = uniforms(0, "rollout", 1, range(len(prompts)), count)
        with autocast, for_sampling(lm):
            return sample(lm, tokenizer, prompts, draws, [count] * len(prompts), (), temperature)

    @torch.no_grad()
    def scores(prompts, responses):
        """Log-probabilities of the responses' tokens by the script's model, in one list."""
        found = []
        for prompt, response in zip(prompts, responses, strict=True):
            with autocast:
                logits = lm(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            found += logits.float().log_softmax(-1)[range(len(response)), response].tolist()
        return torch.tensor(found, dtype=torch.float64)

    by_engine([stream[:9]], 2, 1.0)  # the first call takes longer
    by_script([stream[:9]], 2, 1.0)
    for length, count in SHAPES:
        for size in ROWS:
            prompts = [stream[7 * row : 7 * row + length] for row in range(size)]
            responses, engine_seconds = timed(lambda p=prompts, n=count: by_engine(p, n, 1.0))
            own, own_seconds = timed(lambda p=prompts, n=count: by_script(p, n, 1.0))
            assert {len(ids) for ids in own} == {len(response.token_ids) for response in responses} == {count}
            row = {"precision": precision, "prompt": length, "new": count, "rows": size}
            row |= {"engine": f"{size * count / engine_seconds:.1f}", "own": f"{size * count / own_seconds:.1f}"}
            row |= {"greedy": "", "gap": "", "kl": ""}
            if size == COMPARED:
                greedy = [list(response.token_ids) for response in by_engine(prompts, count, 0.0)]
                row["greedy"] = sum(map(list.__eq__, greedy, by_script(prompts, count, 0.0)))
                drawn = []
                for response in responses:
                    known = zip(response.token_ids, response.logprobs, strict=True)
                    drawn += [logprobs[token].logprob for token, logprobs in known]
                x = scores(prompts, [list(response.token_ids) for response in responses]) - torch.tensor(drawn)
                row |= {"gap": f"{x.abs().mean():.2e}", "kl": f"{(x.expm1() - x).mean():.2e}"}
            row |= measurement.machine()
            row["versions"] += f"; vllm {__version__}"
            print(row, flush=True)
            measurement.append(RESULTS, row)


def table():
    lines = []
    for row in sorted(read_csv(RESULTS), key=itemgetter("precision", "new"), reverse=True):
        line = {"precision": row["precision"], "prompt + new tokens": f"{row['prompt']} + {row['new']}"}
        line |= {"rows": row["rows"], "vLLM": row["engine"], "own sampler": row["own"]}
        line["times"] = f"{float(row['engine']) / float(row['own']):.2f}"
        line["equal greedy rows"] = f"{row['greedy']} of {row['rows']}" if row["greedy"] else ""
        lines.append(line | {"mean difference of log-probabilities": row["gap"], "KL (k3)": row["kl"]})
    return markdown(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precision", choices=["float32", "bfloat16"])
    measure(parser.parse_args().precision)
