"""Evaluations by sampling: responses to prompts, what --metric and --reward say of them, and samples to show."""

from functools import partial

from common.errors import stop_if
from common.launch import gather_list, local_rows, on_main, unsharded
from common.lm.adapters import for_sampling
from common.lm.classifier import RewardModel
from common.lm.own_rollouts import own_rollout
from common.lm.sampling import have_ended, sample, uniforms
from common.lm.tokens import decode, longest_first, marked
from common.report import screen
from common.rows import set_prefix


def text_arguments(tokenizer, rows, responses, outputs):
    """Keyword arguments of a reward or metric function besides the rows' other columns: lists with one entry per row,
    and the tokenizer. responses: ids; outputs: their texts."""
    prompts = [row["prompt"] for row in rows]
    space = " " if getattr(tokenizer, "answers_apart", False) else ""
    samples = [prompt + space + output for prompt, output in zip(prompts, outputs, strict=True)]
    return {"samples": samples, "prompts": prompts, "outputs": outputs, "output_ids": responses, "tokenizer": tokenizer}


def summed(score):
    """A score, or the sum of a list with one score per token."""
    return sum(score) if isinstance(score, list) else score


def respond(accelerator, lm, tokenizer, queries, *, seed, max_new_tokens, decode_batch_size, stop, **options):
    """Responses (ids) to queries (lists of ids), on every process, by the same draws. options: those of `sample`."""
    local = local_rows(accelerator, len(queries))
    found = {}
    screen.show("evaluating", len(local))
    with accelerator.autocast(), for_sampling(lm):
        for places in longest_first([len(queries[row]) for row in local], decode_batch_size):
            numbers = [local[place] for place in places]
            contexts = [queries[number] for number in numbers]
            draws = uniforms(seed, "eval", 0, numbers, max_new_tokens).to(accelerator.device)
            limits = [max_new_tokens] * len(numbers)
            found |= zip(numbers, sample(lm, tokenizer, contexts, draws, limits, stop, **options), strict=True)
    return gather_list([found[number] for number in local])[: len(queries)]


def evaluate_samples(accelerator, lm, tokenizer, rows, queries, metric, reward=None, rollout=None, **options):
    """({name: mean}, samples: a dict for each row) of a metric function and a reward. options: those of `respond`."""
    if rollout is None:
        responses = respond(accelerator, lm, tokenizer, queries, **options)
        ended = have_ended(lm, tokenizer, queries, responses, options["stop"])
    else:
        found = own_rollout(accelerator, lm, tokenizer, rollout, rows, queries, ("eval", 0), **options)
        responses, trained, ended, rows = found
    outputs = decode(tokenizer, queries, responses, options["stop"])
    given = text_arguments(tokenizer, rows, responses, outputs)
    values = {}
    if metric is not None:
        values |= on_main(accelerator, metric, rows, given)
    if isinstance(reward, RewardModel):
        values["reward"] = reward.score_all(accelerator, given["samples"], ended)
    elif reward is not None:
        scores, columns = on_main(accelerator, reward, rows, given, list(map(len, responses)))
        stop_if([f"--reward and --metric both return {key!r}: choose another name" for key in values.keys() & columns])
        values |= {"reward": list(map(summed, scores)), **columns}
    if rollout is not None:  # to be read: what is not trained in brackets
        outputs = list(map(partial(marked, tokenizer), responses, trained))
    means = {name: sum(column) / len(column) for name, column in values.items()}
    columns = {"prompt": given["prompts"], "output": outputs, **values}
    samples = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return means, samples


def evaluate_sets(accelerator, model, lm, tokenizer, data, **options):
    """(metrics, samples) of responses to data.eval_sets, {name: (rows, queries)}: means of the reward and of --metric.
    lm: the language model in `model`, without wrappers and heads. options: those of `respond`."""
    metrics = {}
    samples = []
    functions = (data.metric, data.reward, data.rollout)
    model.eval()
    with unsharded(model):
        for name, (rows, queries) in data.eval_sets.items():
            means, set_samples = evaluate_samples(accelerator, lm, tokenizer, rows, queries, *functions, **options)
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
            if len(data.eval_sets) > 1:
                set_samples = [{"set": name} | row for row in set_samples]
            samples += set_samples
    return metrics, samples


def log_episodes(run, tokenizer, episodes, advantages):
    """Writes episodes to rollouts.jsonl: responses up to the last trained token, [what is not trained] in brackets."""
    for episode, advantage in zip(episodes, advantages, strict=True):
        begin = len(episode.query)
        output = marked(tokenizer, episode.ids[begin:], [label != -100 for label in episode.labels[begin:]])
        record = {"step": run.step, "prompt": episode.row["prompt"], "output": output}
        run.append("rollouts.jsonl", record | {"score": summed(episode.score), "advantage": advantage})
