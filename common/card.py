"""What is left to look at of a run: curve.png, the picture of its metrics, and README.md, its card."""

import itertools
import math
import re
import warnings

import numpy as np

from common.screen import visible

# Last lines of a run, and of its card: how the model is loaded and sampled from.
USAGE = """from transformers import pipeline; model = pipeline('text-generation', {folder!r})
print(model({prompt!r}, max_new_tokens={max_new_tokens}))"""
SEQ2SEQ_USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained({folder!r}), AutoModelForSeq2SeqLM.from_pretrained({folder!r})
ids = model.generate(**tokenizer({prompt!r}, return_tensors='pt'), max_new_tokens={max_new_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""
CHAT_INPUTS = """tokenizer.apply_chat_template(
    {prompt!r}, add_generation_prompt=True, return_dict=True, return_tensors='pt'
)"""

# Panels of the picture, in this order: the label of an axis, and the metrics of all scripts that belong to it.
# eval/NAME stands for that of every evaluation set, eval/SET/NAME.
PANELS = {
    "score": ["objective/scores", "eval/reward"],
    "accuracy": ["rewards/accuracies", "eval/rewards/accuracies", "eval/accuracy"],
    "loss": ["train/loss", "eval/loss", "losses/loss"],
    "KL to the reference": ["objective/kl"],
    "policy loss": ["loss/policy"],
    "value loss": ["loss/value"],
    "losses of Q and V": ["losses/loss_q", "losses/loss_v", "eval/loss_q", "eval/loss_v"],
    "CQL and imitation": ["losses/loss_cql", "losses/loss_awac", "eval/loss_cql", "eval/loss_awac"],
    "Q and V": ["qvalues/mean", "values/mean"],
    "response length (tokens)": ["tokens/responses_len"],
    "margin": ["rewards/margins", "eval/rewards/margins", "eval/margin"],
    "log-probability": ["logps/chosen", "logps/rejected"],
    "nll of chosen": ["train/nll"],
    "groups of equal scores": ["groups/equal"],
    "KL of an update": ["policy/approxkl"],
    "diversity": ["objective/diversity", "eval/diversity"],
}
NOT_DRAWN = ["perplexity", "shorter_wins"]  # the exponential of a loss, and a constant
MOST_PANELS = 8
LONGEST_CELL = 300  # characters of a sample in the card
NUM_SAMPLES = 3  # in the card


def newest_values(records):
    metrics = {}
    for record in records:
        metrics |= record
    return metrics


def points(records, name):
    """[(step, value)] of a metric, without values that are not finite."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def sparkline(values, width=40):
    """The values as a line of eight block heights, thinned to at most `width`."""
    values = values[:: math.ceil(len(values) / width) or 1]
    low = min(values, default=0)
    span = max(values, default=0) - low or 1
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (value - low) / span)] for value in values)


# ---- Picture ---------------------------------------------------------------------------------------------------------


def draw_curves(records, headline, title, path):
    """The metrics of a run as a picture; the file is replaced as a whole.

    records: the lines of metrics.jsonl. headline: the metric of the first panel.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = panels_of(drawn_metrics(records, headline), headline)
    if not panels:
        return
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / 2)
    first_step = records[0]["step"]
    last_step = records[-1]["step"]
    margin = 0.02 * (last_step - first_step) or 1
    temporary = path.with_name(f".tmp-{path.name}")
    # names of metrics and models are no formulas; a letter that the font lacks is no reason for a warning
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(action="ignore"):
        width = 4.5 * columns  # inches of 100 pixels
        height = 0.8 + 1.8 * rows
        figure = Figure(figsize=(width, height))
        # by hand: matplotlib's own layouts take as long as the rest of the drawing
        corners = 0.9 / width, 0.45 / height, 1 - 0.15 / width, 1 - 0.35 / height
        figure.subplots_adjust(*corners, wspace=0.3, hspace=0.2)
        figure.suptitle(shortened(title, 50 * columns), y=1 - 0.07 / height, va="top", fontsize=11)
        every_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in itertools.zip_longest(every_axes, panels.items()):
            if panel is None:
                axes.set_axis_off()
                continue
            draw_panel(axes, records, *panel)
            axes.set_xlim(first_step - margin, last_step + margin)
            axes.xaxis.get_major_locator().set_params(integer=True)
        for axes in every_axes[-columns:]:
            axes.set_xlabel("optimizer step", fontsize=9)
        try:
            figure.savefig(temporary, format="png", dpi=100)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def drawn_metrics(records, headline):
    """The names of metrics, without those of training that are zero to rounding, such as the policy loss of grpo where
    each batch makes one step."""
    names = []
    for name in newest_values(records):
        size = max((abs(value) for _, value in points(records, name)), default=0)
        if name == headline or name.startswith("eval/") or size > 1e-12:
            names.append(name)
    return names


def panels_of(names, headline):
    """{label: metrics} of the picture: that of the headline, then those of PANELS, then what --metric measures."""
    found = {label: [] for label in (panel_of(headline), *PANELS)}
    deviations = set(map(deviation_of, names))
    for name in names:
        label = panel_of(name)
        if label in PANELS or (name.startswith("eval/") and label not in NOT_DRAWN and name not in deviations):
            found.setdefault(label, []).append(name)
    panels = [(label, metrics) for label, metrics in found.items() if metrics]
    return dict(panels[:MOST_PANELS])


def panel_of(name):
    """The label of the panel of PANELS to which a metric belongs; else its name, one for all sets and all betas."""
    for label, members in PANELS.items():
        for member in members:
            of_a_set = member.startswith("eval/") and name.startswith("eval/") and name.endswith(member[4:])
            if name == member or of_a_set:
                return label
    return name.rpartition("/")[2].partition("@")[0]


def deviation_of(name):
    """The metric that is the standard deviation of the metric `name`, where there is one."""
    if name.endswith("mean"):
        return name.removesuffix("mean") + "std"
    return name + "_std"


def draw_panel(axes, records, label, names):
    """A thin line of what every step logs, with its standard deviation as a band; evaluations are marked."""
    for name in names:
        curve = points(records, name)
        if not curve:
            continue
        steps, values = zip(*curve, strict=True)
        if name.startswith("eval/"):
            style = {"marker": "o", "markersize": 4, "linewidth": 1.5}
        else:
            style = {"marker": "." if len(curve) < 3 else None, "linewidth": 0.8}
        (line,) = axes.plot(steps, values, label=visible(name), **style)
        band = [record for record in records if None not in (record.get(name), record.get(deviation_of(name)))]
        means = np.array([record[name] for record in band])
        deviations = np.array([record[deviation_of(name)] for record in band])
        if band:
            steps = [record["step"] for record in band]
            edges = means - deviations, means + deviations
            axes.fill_between(steps, *edges, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_ylabel(visible(label), fontsize=9)
    axes.yaxis.set_label_coords(-0.19, 0.5)
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_formatter("{x:.6g}")  # without a factor above the panel
    axes.grid(alpha=0.3)
    if len(names) > 1 or names[0] != label:
        axes.legend(fontsize=8)


def shortened(text, length):
    """A text of at most that many characters, without its middle where it is longer."""
    text = visible(text)
    if len(text) <= length:
        return text
    return f"{text[: length // 2 - 2]}...{text[1 - length // 2 :]}"


# ---- Card ------------------------------------------------------------------------------------------------------------


def three_digits(value):
    """A number as it is read: integers as they are, others with three digits."""
    if value is None:
        return "not finite"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def markdown_table(columns, rows):
    """A table of markdown. Texts are code, so nothing in them is markup."""
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([markdown_cell(value) for value in row])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown_cell(value):
    """A number with three digits; a text as code, in one line, cut at the end, between more backticks than it holds."""
    if value is None or isinstance(value, int | float):
        return three_digits(value)
    text = visible(str(value))
    if len(text) > LONGEST_CELL:
        text = text[:LONGEST_CELL] + "..."
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    text = text.replace("|", "\\|")
    return f"{fence} {text} {fence}" if text.strip() else ""


def readable(sample):
    """A sample with the messages of a chat in place of the text that the template made of them."""
    if "messages" not in sample:
        return sample
    turns = [f"{message['role']}: {message.get('content')}" for message in sample["messages"]]
    plain = sample | {"prompt": "\n".join(turns)}
    del plain["messages"]
    return plain


def before_and_after(samples, headline):
    """A table of the first samples of the first evaluation and of the last, of the same prompts, or "".

    samples: the lines of samples.jsonl. Of the numbers it has that of the headline metric, or else the first two; of
    ilql's betas that of the headline.
    """
    quantity, _, beta = headline.rpartition("/")[2].partition("@beta=")
    if beta:
        samples = [sample for sample in samples if f"{sample['beta']:g}" == beta]
    if not samples:
        return ""
    steps = list(dict.fromkeys([samples[0]["step"], samples[-1]["step"]]))
    evaluations = [[readable(sample) for sample in samples if sample["step"] == step] for step in steps]
    places = list(zip(*evaluations, strict=False))
    of_each_prompt = {versions[0]["prompt"]: versions for versions in reversed(places)}
    if len(of_each_prompt) >= NUM_SAMPLES:
        places = list(reversed(of_each_prompt.values()))
    first, *_ = places[0]
    numbers = [name for name in first if name not in ("step", "beta") and not isinstance(first[name], str)]
    if quantity in numbers:
        numbers = [quantity]
    changing = [name for name in first if name == "output"] + numbers[:2]
    fixed = [name for name in first if isinstance(first[name], str) and name != "output"]
    columns = list(fixed)
    for step in steps:
        columns += [f"{name}, step {step}" for name in changing]
    rows = []
    for versions in places[:NUM_SAMPLES]:
        cells = [versions[0][name] for name in fixed]
        for sample in versions:
            cells += [sample[name] for name in changing]
        rows.append(cells)
    return markdown_table(columns, rows)


def model_card(env, title, headline, records, samples, usage, library, pictures, continuing):
    """README.md of a run. records, samples: the lines of metrics.jsonl and samples.jsonl. pictures: more of them, as
    markdown. continuing: how the run is repeated or continued, in words."""
    curve = points(records, headline)
    result = ""
    if curve:
        first_step, first = curve[0]
        last_step, last = curve[-1]
        before = f"{first:.3g} at step {first_step}, " if len(curve) > 1 else ""
        result = f"{headline}: {before}**{last:.3g}** at step {last_step}.\n\n"
    table = before_and_after(samples, headline)
    if table:
        table = f"## Samples\n\n{table}\n\n"
    newest = newest_values(records)
    oldest = newest_values(reversed(records))
    metrics = [(name, oldest[name], newest[name]) for name in sorted(newest) if name != "step"]
    rows = "\n".join(f"| {name} | {three_digits(old)} | {three_digits(new)} |" for name, old, new in metrics)
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    return (
        f"---\nlibrary_name: {library}\ntags: [plainrl, {env['algo']}]\n---\n# {title}\n\n"
        f"{result}![learning curve](curve.png)\n\n{pictures}{table}"
        f"## Use\n\n```python\n{usage}\n```\n\n"
        f"## Metrics\n\n| metric | first | last |\n|---|---|---|\n{rows}\n\n"
        f"## Command\n\n```\n{command_line(env)}\n```\n\n{continuing}\n\n"
        f"Commit {env['commit']}; {versions}; {env['device']}.\n"
    )


def usage_lines(usage, folder, prompt, max_new_tokens):
    """Lines of use with their values put in. prompt: a text, or the messages of a chat, for which the template writes
    what a tokenizer reads; pipelines do it by themselves."""
    if isinstance(prompt, list):
        usage = re.sub(r"tokenizer\(\{prompt!r\}[^)]*\)", CHAT_INPUTS, usage)
    return usage.format(folder=folder, prompt=prompt, max_new_tokens=max_new_tokens)


def how_to_continue(folder, last_step, longer, best_step):
    """How a run is repeated and continued. longer: the flag that makes it longer."""
    checkpoint = f"{folder}/checkpoints/step_{last_step:08d}"
    text = (
        "The same command goes on with a run that was stopped; with `--resume never` it repeats the run in another "
        f"directory. `--config {folder}/config.yaml` has its flags. `--resume {checkpoint}` trains on from its end, "
        f"with a larger `{longer}` or other flags."
    )
    if best_step is not None:
        text += f" `{folder}/hf_model_best` is the model of step {best_step}, the best of the evaluations."
    return text


def command_line(env):
    """The command of a run, with the interpreter or the launcher."""
    if env["processes"] > 1:
        return f"torchrun --nproc_per_node {env['processes']} {env['command']}"
    return f"python {env['command']}"
