"""The end of a run: its model card, with the learning curve as a picture."""

import contextlib
import math

# Last lines of a run, and of its card: how the model is loaded and sampled from.
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, max_new_tokens=20))"""
SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, return_tensors='pt'), max_new_tokens=20)
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""


def newest_values(records):
    metrics = {}
    for record in records:
        metrics |= record
    return metrics


def sparkline(values, width=40):
    """The values as a line of eight block heights, thinned to at most `width`."""
    values = values[:: math.ceil(len(values) / width) or 1]
    low = min(values, default=0)
    span = max(values, default=0) - low or 1
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)] for value in values)


def draw_curve(curve, name, path):
    """The points (step, value) as a picture, where matplotlib is installed."""
    with contextlib.suppress(ImportError):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.plot([step for step, _ in curve], [value for _, value in curve], marker=".")
        axes.set(xlabel="optimizer step", ylabel=name)
        figure.savefig(path, dpi=100)


def model_card(env, title, usage, library, pictures, metrics):
    rows = "\n".join(f"| {name} | {value} |" for name, value in sorted(metrics.items()))
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    return (
        f"---\nlibrary_name: {library}\ntags: [plainrl, {env['algo']}]\n---\n# {title}\n\n"
        f"![learning curve](curve.png)\n\n{pictures}"
        f"```python\n{usage}\n```\n\n| metric | last value |\n|---|---|\n{rows}\n\n```\n{env['command']}\n```\n\n"
        f"Commit {env['commit']}; {versions}; {env['device']}.\n"
    )
