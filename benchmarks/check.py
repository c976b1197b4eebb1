"""Evidence: collects runs into benchmarks/curves/<claim>/, rebuilds tables and figures, and fails where they disagree.

    python benchmarks/check.py                          # verify offline: exit 1 and a list if something is off
    python benchmarks/check.py --write                  # rebuild tables, figures and the blocks in README.md
    python benchmarks/check.py --collect ppo-randomwalks RUN_DIR ...   # take the curves of finished runs, then rebuild
    python benchmarks/check.py --new ppo-randomwalks RUN_DIR   # does a new run leave the band of the stored seeds?

A claim is a folder with run.sh (the commands), curves/<variant>-seed<N>.jsonl (the metrics of figure and table, as the
runs wrote them), runs.csv (where they come from), curve.png and README.md (both built from those files).
A figure is compared by a digest of its data, which is kept in the PNG: pixels differ between matplotlib versions.
A claim about images keeps the grids of the first seed that its figure shows in images/.
"""

import argparse
import csv
import hashlib
import json
import math
import re
import runpy
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Claim:
    """What a folder under benchmarks/curves shows."""

    title: str
    score: str  # the metric of figure and table
    lines: dict  # reference levels in the figure: label -> value
    bars: list  # (variant, metric, "last", "best" or "gain", ">=" or "<=", bar, at least so many seeds)
    table: dict = field(default_factory=dict)  # further columns of the table: metric -> heading
    text: str = ""
    scores: dict = field(default_factory=dict)  # variants with another score
    panels: list = field(default_factory=list)  # of the figure, a metric each; default: the score
    images: dict = field(default_factory=dict)  # below the curves: title -> file in images/

    def score_of(self, variant):
        return self.scores.get(variant, self.score)


CLAIMS = {
    "sft-randomwalks": Claim(
        "Supervised fine-tuning on random walks imitates the data",
        "eval/optimality",
        {"data 0.3515": 0.3515},
        [
            ("default", "eval/optimality", "last", ">=", 0.3215, 5),
            ("default", "eval/optimality", "last", "<=", 0.3815, 5),
            ("default", "eval/illegal", "last", "<=", 0.03, 5),
        ],
        {"eval/illegal": "illegal walks", "eval/loss": "held-out loss", "eval/accuracy": "held-out accuracy"},
        "The walks choose their edges at random, so a perfect imitation has the data's mean optimality, 0.3515. "
        "1000 sampled walks an evaluation, 50 from each start.",
    ),
    "chain-randomwalks": Claim(
        "The chain on random walks: SFT, then a reward model and PPO with it, or DPO",
        "eval/optimality",
        {"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        [
            ("reward", "eval/natural/accuracy", "last", ">=", 0.97, 4),
            ("reward", "eval/illegal/accuracy", "last", ">=", 0.95, 3),
            ("reward", "eval/illegal/accuracy", "last", ">=", 0.94, 5),
            ("ppo", "eval/optimality", "last", ">=", 0.95, 5),
            ("dpo", "eval/optimality", "last", ">=", 0.90, 4),
            ("dpo", "eval/illegal", "last", "<=", 0.10, 5),
        ],
        {
            "eval/illegal": "illegal walks",
            "eval/reward": "learned reward",
            "objective/kl": "KL to the SFT model",
            "eval/natural/accuracy": "natural pairs",
            "eval/illegal/accuracy": "illegal-jump pairs",
            "eval/all/shorter_wins": "the shorter wins",
        },
        "Each seed is a chain of its own, from an SFT model that `sft.py` trains with its default flags. Half of the "
        "pairs are natural (the shorter way to the goal is chosen, over a longer one or none), half are a legal walk "
        "against itself with an illegal jump, so that the rule that the shorter wins is right on half of all pairs (on "
        "all natural and no illegal ones). The held-out pairs are never trained on, their walks may be, in other "
        "pairs. The score of the reward model is normalised over samples of the SFT model (`--norm-prompts`); PPO runs "
        "with its default flags on it. DPO runs with its defaults for the task: the loss ipo with beta 0.3, and 0.02 "
        "of the chosen responses' token loss. 1000 sampled walks an evaluation. Two runs shared the machine at a time, "
        "and tests ran beside them, so the seconds are too many. Since these runs, `--norm-prompts` draws its samples "
        "by key, so the scores that PPO sees are scaled by other samples; the PPO runs were not repeated.",
        {"reward": "eval/all/accuracy"},
        ["eval/optimality", "eval/reward", "eval/illegal"],
    ),
    "ilql-randomwalks": Claim(
        "ILQL on random walks: from walks of mean optimality 0.35 to the optimum, without a single new walk",
        "eval/optimality@beta=64",
        {"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        [
            ("default", "eval/optimality@beta=0", "last", ">=", 0.29, 5),
            ("default", "eval/optimality@beta=0", "last", "<=", 0.40, 5),
            ("default", "eval/optimality@beta=64", "last", ">=", 0.998, 5),
            ("sft-best-tenth", "eval/optimality", "last", "<=", 0.9985, 4),
            ("graph-0", "eval/optimality@beta=64", "last", ">=", 0.97, 3),
            ("graph-2", "eval/optimality@beta=64", "last", ">=", 0.97, 2),
            ("greedy-m", "eval/optimality@beta=64", "last", ">=", 0.84, 4),
        ],
        {
            "eval/optimality@beta=0": "beta 0",
            "eval/optimality@beta=4": "beta 4",
            "eval/illegal@beta=64": "illegal walks",
            "losses/loss_q": "Q loss",
        },
        "From random weights, on the 1000 walks of the data and their optimality; 167 steps of 96 walks. 1000 sampled "
        "walks an evaluation and beta, 50 from each start. The best walk of the data from each start has a mean of "
        "0.9917, since start m has no optimal walk there (0.833 at best). greedy-m: the same runs with "
        "--eval-temperature 0, from start m alone; 1.0 is a walk that no row holds, put together of parts. "
        "sft-best-tenth: sft.py on the 100 best walks of the data. graph-0, graph-2: other graphs, same flags; in one "
        "run of graph-2 all walks from one start are illegal: a token that the data never take scores best there. "
        "Two runs shared the machine at a time, the first of them with other work.",
        {"sft-best-tenth": "eval/optimality"},
        ["eval/optimality@beta=64", "eval/optimality@beta=0"],
    ),
    "ddpo-shapes": Claim(
        "DDPO on coloured shapes: what is rewarded appears, on captions and noise that stay the same",
        "eval/reward",
        {},
        [
            ("default", "eval/reward", "gain", ">=", 1.0, 3),
            ("default", "eval/agreement", "last", ">=", 0.5, 3),
            ("shuffled", "eval/reward", "gain", "<=", 0.25, 3),
            ("brightness", "eval/reward", "gain", ">=", 1.0, 3),
            ("lora", "eval/reward", "gain", ">=", 0.5, 3),
        ],
        {
            "eval/agreement": "agreement",
            "eval/kilobytes": "kB",
            "eval/brightness": "brightness",
            "eval/diversity": "diversity",
            "policy/clipfrac": "clipped",
        },
        "From the committed base model. default: the reward is compressibility, minus the size of the JPEG file in kB "
        "(Black et al. 2023, Sec. 5.1). shuffled: the same rewards, each given to a wrong image. brightness: the mean "
        "of all pixels. lora: compressibility, --lora-r 8. An evaluation samples the 12 captions 8 times each, with "
        "the same noise every time; a gain is counted in standard deviations over these 96 images before training. "
        "agreement: images whose colour and shape are what the caption says; no reward asks for it. The images are "
        "those of seed 1, a row a caption. Two runs shared the machine at a time, and tests ran beside those of seeds "
        "1 and 2, so their seconds are too many. LOG.md has the settings that were tried before.",
        {},
        ["eval/kilobytes", "eval/brightness", "eval/agreement"],
        {
            "before": "default-first.png",
            "after, compressibility": "default-last.png",
            "after, brightness": "brightness-last.png",
            "after, shuffled rewards": "shuffled-last.png",
        },
    ),
    "ppo-randomwalks": Claim(
        "PPO on random walks reaches the optimum; a strong KL penalty holds the data's level",
        "eval/optimality",
        {"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        [
            ("default", "eval/optimality", "best", ">=", 0.98, 4),
            ("default", "val/explained_variance", "last", ">=", 0.5, 4),
            ("kl-coef-10", "eval/optimality", "last", "<=", 0.45, 3),
            ("two-layers", "eval/optimality", "best", ">=", 0.98, 4),
            ("two-layers", "val/explained_variance", "last", ">=", 0.5, 4),
            ("lora", "eval/optimality", "best", ">=", 0.98, 4),
            ("lora-all-linear", "eval/optimality", "best", ">=", 0.94, 3),
            ("reward-model", "eval/optimality", "best", ">=", 0.98, 4),
            ("reward-model", "val/explained_variance", "last", ">=", 0.5, 4),
        ],
        {
            "eval/illegal": "illegal walks",
            "objective/kl": "KL to the SFT model",
            "val/explained_variance": "explained variance",
        },
        "From the SFT model (first use trains it). 1000 sampled walks an evaluation, 50 from each start. kl-coef-10: "
        "with --kl-coef 10 the penalty outweighs the reward; after a first step towards it the policy returns to where "
        "it was. It needs --vf-coef 0.1: the values are then of the size of the penalty, and at the default weight of "
        "10 the value loss takes over the shared trunk. two-layers: --num-layers-unfrozen 2 --lr 5e-3, 2 of 6 blocks "
        "and the norm after them. lora: --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj c_fc lm_head, 7 % of the "
        "weights; lora-all-linear: --lora-r 8 --lr 5e-3, without an adapter at the output layer: frozen, that and the "
        "last norm bound how sure the policy can be of a step. "
        "reward-model: the reward is a classifier that benchmarks/tasks/randomwalks_reward.py "
        "trained to predict the optimality; the figures are the true optimality. Other work shared the machine during "
        "the runs of two-layers and reward-model, so their seconds are too many; lora and lora-all-linear ran on one "
        "thread, two at a time.",
    ),
}


SUMMARY = {  # script: paper, claim, variant, name of the score
    "sft.py": ("maximum likelihood", "sft-randomwalks", "default", "optimality"),
    "ppo.py": ("Schulman et al. 2017", "ppo-randomwalks", "default", "optimality"),
    "ilql.py": ("Snell et al. 2022", "ilql-randomwalks", "default", "optimality at beta 64"),
    "reward.py": ("Ouyang et al. 2022", "chain-randomwalks", "reward", "accuracy"),
    "dpo.py": ("Rafailov et al. 2023", "chain-randomwalks", "dpo", "optimality"),
    "ddpo.py": ("Black et al. 2023", "ddpo-shapes", "default", "minus kB"),
}


def points(path, key):
    """[(step, value)] of a metric in a curve file."""
    records = map(json.loads, path.read_text().splitlines())
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def curves(name):
    """{variant: {seed: path}} of a claim."""
    found = {}
    for path in sorted((ROOT / "benchmarks/curves" / name / "curves").glob("*.jsonl")):
        variant, _, seed = path.stem.rpartition("-seed")
        found.setdefault(variant, {})[int(seed)] = path
    return found


def spread(values):
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(name):
    """The claim's table as Markdown lines."""
    claim, rows = CLAIMS[name], []
    runs = {(row["variant"], row["seed"]): row for row in csv.DictReader(open(claim_path(name) / "runs.csv"))}
    heads = [
        "variant",
        "seeds",
        *["score"] * bool(claim.scores),
        "first",
        "last",
        "best",
        *["gain in deviations"] * bool(claim.images),
        *claim.table.values(),
        "steps",
        "seconds",
    ]
    for variant, seeds in curves(name).items():
        series = [points(path, claim.score_of(variant)) for path in seeds.values()]
        cells = [variant, str(len(seeds))] + [f"`{claim.score_of(variant)}`"] * bool(claim.scores)
        cells += [spread([s[0][1] for s in series]), spread([s[-1][1] for s in series])]
        cells += [spread([max(v for _, v in s) for s in series])]
        if claim.images:
            cells.append(spread([gain(path, claim.score_of(variant)) for path in seeds.values()]))
        for key in claim.table:
            values = [points(path, key)[-1][1] for path in seeds.values() if points(path, key)]
            cells.append(spread(values) if values else "-")
        seconds = mean(float(runs[variant, str(seed)]["seconds"]) for seed in seeds)
        rows.append([*cells, str(series[0][-1][0]), f"{seconds:.0f}"])
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def claim_path(name):
    return ROOT / "benchmarks/curves" / name


def readme(name):
    """The README.md of a claim's folder."""
    claim = CLAIMS[name]
    rows = list(csv.DictReader(open(claim_path(name) / "runs.csv")))
    devices = sorted({f"{row['device']}, {row['threads']} threads, torch {row['torch']}" for row in rows})
    commits = sorted({row["commit"] for row in rows})
    bars = [
        f"- `{variant}`: {which} `{key}` {sign} {bar} in at least {count} of {len(curves(name)[variant])} seeds"
        for variant, key, which, sign, bar, count in claim.bars
    ]
    body = [f"# {claim.title}", "", "![curve](curve.png)", "", claim.text, ""]
    named = "Scores" if claim.scores else claim.score
    body += [f"{named}, mean ± standard deviation over seeds; seconds are wall-clock without start-up:", ""]
    body += [*table(name), "", "Bars that `benchmarks/check.py` holds:", "", *bars, ""]
    body += [f"Measured on {'; '.join(devices)}; commit {', '.join(commits)}. `bash run.sh` repeats it.", ""]
    return "\n".join(body)


def shown(name):
    """{metric of a panel: {variant: {seed: points}}} of the figure."""
    panels, found = CLAIMS[name].panels or [CLAIMS[name].score], {}
    for key in panels:
        series = {v: {s: points(p, key) for s, p in seeds.items()} for v, seeds in curves(name).items()}
        found[key] = {v: seeds for v, seeds in series.items() if any(len(line) > 2 for line in seeds.values())}
    return found


def data_digest(name):
    """Of all that the figure shows."""
    panels = shown(name)
    data = panels if CLAIMS[name].panels else panels[CLAIMS[name].score]
    if files := CLAIMS[name].images.values():
        data = [data, [hashlib.sha256((claim_path(name) / "images" / file).read_bytes()).hexdigest() for file in files]]
    return hashlib.sha256(json.dumps([data, CLAIMS[name].lines]).encode()).hexdigest()


def draw_figure(name):
    from matplotlib.figure import Figure
    from PIL import Image

    claim, panels = CLAIMS[name], shown(name)
    width = 7 if len(panels) == 1 else 4 * len(panels)
    figure = Figure(figsize=(width, 8 if claim.images else 3.6), layout="constrained")
    top, below = figure.subfigures(2, 1, height_ratios=[3.6, 4.4]) if claim.images else (figure, None)
    for axes, (title, file) in zip(
        below.subplots(1, len(claim.images)) if claim.images else [], claim.images.items(), strict=True
    ):
        axes.imshow(Image.open(claim_path(name) / "images" / file), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    for axes, (key, variants) in zip(top.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for variant, seeds in variants.items():
            color, series = f"C{list(curves(name)).index(variant)}", list(seeds.values())
            for one in series:
                axes.plot(*zip(*one, strict=True), color=color, alpha=0.3, linewidth=1)
            steps = [x for x, _ in series[0]]
            middle = [mean(one[i][1] for one in series) for i in range(len(steps))]
            axes.plot(steps, middle, color=color, marker=".", label=f"{variant}, mean of {len(series)} seeds")
        for label, level in claim.lines.items() if key == claim.score else ():
            axes.axhline(level, color="gray", linestyle=":", linewidth=1)
            axes.annotate(label, (0, level), xytext=(2, 2), textcoords="offset points", fontsize=8, color="gray")
        axes.set(xlabel="optimizer step", ylabel=key)
        axes.legend(loc="best" if claim.images else "center right", fontsize=8)
    figure.suptitle(claim.title, fontsize=10)
    figure.savefig(claim_path(name) / "curve.png", dpi=110, metadata={"data": data_digest(name)})


def compare(value, sign, bar):
    return value >= bar if sign == ">=" else value <= bar


def gain(path, key):
    """Last minus first value of a metric, in standard deviations over the samples of the first evaluation."""
    return (points(path, key)[-1][1] - points(path, key)[0][1]) / points(path, key + "_std")[0][1]


def missed_bars(name):
    for variant, key, which, sign, bar, count in CLAIMS[name].bars:
        paths = curves(name).get(variant, {}).values()
        series = [points(path, key) for path in paths]
        values = [one[-1][1] if which == "last" else max(v for _, v in one) for one in series]
        if which == "gain":
            values = [gain(path, key) for path in paths]
        if sum(compare(value, sign, bar) for value in values) < count:
            shown = ", ".join(f"{value:.3f}" for value in values)
            yield f"{name}: {which} {key} of {variant} is {shown}: not {sign} {bar} in {count} seeds"


def summary():
    """The table of README.md."""
    rows = [["script", "paper", "lines", "task", "reference", "ours", "time"], ["---"] * 7]
    for script, (paper, name, variant, score) in SUMMARY.items():
        claim, seeds = CLAIMS[name], curves(name)[variant]
        series = [points(path, claim.score_of(variant)) for path in seeds.values()]
        runs = [r for r in csv.DictReader(open(claim_path(name) / "runs.csv")) if r["variant"] == variant]
        lines = len((ROOT / "algos" / script).read_text().splitlines())
        ours = f"{score} {spread([s[-1][1] for s in series])} ({len(series)} seeds)"
        clock = f"{mean(float(run['seconds']) for run in runs):.0f} s, {runs[0]['threads']} CPU threads"
        level = "the shorter wins 0.5" if variant in claim.scores else next(iter(claim.lines), "")
        if claim.images:
            level = f"base model {spread([s[0][1] for s in series])}"
        rows.append([f"[{script}](algos/{script})", paper, str(lines), name.split("-")[1], level, ours, clock])
    return ["| " + " | ".join(row) + " |" for row in rows]


def tried():
    """The table of ddpo-shapes/LOG.md."""
    lines = ["| reward | flags | epochs | gain | agreement |", "|---|---|---|---|---|"]
    for run in map(json.loads, open(claim_path("ddpo-shapes") / "tried.jsonl")):
        (_, first, _), *_, (_, last, agreement) = run["step, eval/reward, eval/agreement"]
        cells = [run["reward"], run["flags"], f"{run['epochs']:.0f}"]
        cells += [f"{(last - first) / run['first_std']:.1f}", f"{agreement:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def scaling():
    """benchmarks/scaling/predict.py as a mapping of names."""
    return runpy.run_path(str(ROOT / "benchmarks/scaling/predict.py"))


def stored_predictions():
    return list(csv.DictReader(open(ROOT / "benchmarks/scaling/predictions.csv")))


def predictions():
    """The tables of benchmarks/scaling/README.md."""
    found, rows, saves = {}, [], {}
    for row in stored_predictions():
        key = row["gpus"] + ("" if row["network_gb_s"] == "400" else " slow")
        found.setdefault((row["algo"], row["model"], row["strategy"]), {})[key] = row
    for (algo, model, strategy), at in found.items():
        shares = [float(at["64"][k]) / float(at["64"]["seconds"]) for k in ("exposed_s", "barrier_s", "serial_s")]
        cells = [algo, model, strategy, f"{float(at['1']['seconds']):.2f}"]
        cells += [f"{float(at[n]['efficiency']):.0%}" for n in ("8", "64", "64 slow")]
        cells += [" / ".join(f"{share:.0%}" for share in shares)]
        cells += [f"{float(at[n]['moved_gb']):,.0f}" for n in ("8", "64")]
        cells += [f"{float(at[n]['memory_gb']):,.0f}" for n in ("1", "8", "64")]
        fits = next((n for n in ("1", "8", "64") if at[n]["fits"] == "yes"), "never")
        rows.append([*cells, f"{float(at['64']['load_gb']):,.0f}", fits])
        if strategy == "FSDP2":
            saves[algo, model] = [at["8"][k] for k in ("save_gb", "save_s", "resume_host_gb")]
    heads = ["script", "model", "strategy", "s on 1", "efficiency on 8", "on 64", "on 64, slow network"]
    heads += ["lost on 64: links / lengths / one rank", "moved GB on 8", "on 64", "memory GB on 1", "on 8", "on 64"]
    lines = markdown([*heads, "start GB", "fits from GPUs"], rows)
    cells = [[*key, *(f"{float(value):,.0f}" for value in values)] for key, values in saves.items()]
    heads = ["script", "model", "checkpoint GB", "seconds to save", "GB on a resuming machine of 8"]
    lines += ["", *markdown(heads, cells), "", "Assumed:", ""]
    assumed = scaling()["ASSUMED"]
    return lines + markdown(["name", "value", "unit", "source"], [[k, f"{v:g}", *x] for k, (v, *x) in assumed.items()])


def markdown(heads, rows):
    return ["| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows]]


def stored_cases():
    return list(csv.DictReader(open(ROOT / "benchmarks/faults/cases.csv")))


def cases():
    """The table of benchmarks/faults/README.md."""
    rows = stored_cases()
    return markdown(list(rows[0]) if rows else ["none yet"], [row.values() for row in rows])


def tried_cases():
    """What README.md says of the table of faults."""
    rows = stored_cases()
    passed = sum(row["result"] == "passed" for row in rows)
    pairs = sum(len(row["scripts"].split()) for row in rows)
    tests = sum(int(row["tests"]) for row in rows)
    return [
        f"{len(rows)} faults and bad inputs, {pairs} pairs of one with a script, {tests} tests: {passed} rows pass."
    ]


BLOCKS = [
    ("README.md", "summary", summary),
    ("README.md", "faults", tried_cases),
    ("benchmarks/curves/ddpo-shapes/LOG.md", "tried", tried),
    ("benchmarks/faults/README.md", "cases", cases),
    ("benchmarks/scaling/README.md", "predictions", predictions),
]


def with_blocks(document):
    """A document with its generated tables between the markers."""
    text = (ROOT / document).read_text()
    for name, lines in [(name, lines) for file, name, lines in BLOCKS if file == document]:
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rewrite(lines()), text, flags=re.S)
    return text


def rewrite(lines):
    return lambda match: match[1] + "\n".join(lines) + "\n" + match[2]


def verify():
    """All that is off, as sentences."""
    from PIL import Image

    problems = []
    for name in CLAIMS:
        folder = claim_path(name)
        for file in ("run.sh", "runs.csv", "README.md", "curve.png"):
            if not (folder / file).exists():
                problems.append(f"{name}: {file} is missing")
        if any(p.startswith(name) for p in problems):
            continue
        rows = {(row["variant"], int(row["seed"])) for row in csv.DictReader(open(folder / "runs.csv"))}
        if rows != {(variant, seed) for variant, seeds in curves(name).items() for seed in seeds}:
            problems.append(f"{name}: runs.csv and curves/ name different runs")
        if (folder / "README.md").read_text() != readme(name):
            problems.append(f"{name}: README.md does not follow from runs.csv and curves/")
        if Image.open(folder / "curve.png").text.get("data") != data_digest(name):
            problems.append(f"{name}: curve.png does not show curves/")
        problems += missed_bars(name)
    for file in {file: 0 for file, _, _ in BLOCKS}:
        if (ROOT / file).read_text() != with_blocks(file):
            problems.append(f"{file}: a table does not follow from the files of benchmarks")
    problems += [f"faults: case {row['number']} has not passed" for row in stored_cases() if row["result"] != "passed"]
    if stored_predictions() != scaling()["predictions"]():
        problems.append("benchmarks/scaling: predictions.csv does not follow from predict.py")
    return problems


def write():
    for name in CLAIMS:
        if (claim_path(name) / "runs.csv").exists():
            (claim_path(name) / "README.md").write_text(readme(name))
            draw_figure(name)
    for file in {file: 0 for file, _, _ in BLOCKS}:
        (ROOT / file).write_text(with_blocks(file))


def collect(name, run_dirs):
    """Stores the runs: a run directory's name is <variant>-seed<N>."""
    folder, claim, rows = claim_path(name), CLAIMS[name], []
    keys = ["step", claim.score, *claim.scores.values(), *claim.table, *claim.panels, *(bar[1] for bar in claim.bars)]
    keys += [f"{claim.score}_std"] * bool(claim.images)
    for run_dir in map(Path, run_dirs):
        env = json.loads((run_dir / "env.json").read_text())
        records = [json.loads(line) for line in open(run_dir / "metrics.jsonl")]
        perf = [json.loads(line) for line in open(run_dir / "perf.jsonl")]
        kept = [{key: r[key] for key in dict.fromkeys(keys) if key in r} for r in records]
        (folder / "curves").mkdir(exist_ok=True)
        lines = [json.dumps(record) for record in kept if len(record) > 1]
        (folder / "curves" / f"{run_dir.name}.jsonl").write_text("\n".join(lines) + "\n")
        variant, _, seed = run_dir.name.rpartition("-seed")
        if claim.images and seed == "1":
            (folder / "images").mkdir(exist_ok=True)
            grids = sorted((run_dir / "images").glob("*.png"))
            for name, grid in {f"{variant}-first.png": grids[0], f"{variant}-last.png": grids[-1]}.items():
                if name in claim.images.values():
                    shutil.copyfile(grid, folder / "images" / name)
        score = claim.score_of(variant)
        series = [r[score] for r in kept if r.get(score) is not None]
        seconds = perf[-1]["time"] - perf[0]["time"]
        rows.append(
            {"variant": variant, "seed": seed, "commit": env["commit"], "device": env["device"]}
            | {"threads": env["threads"], "processes": env["processes"], "torch": env["versions"]["torch"]}
            | {"transformers": env["versions"]["transformers"], "seconds": f"{seconds:.1f}"}
            | {"last": series[-1], "best": max(series), "command": env["command"].replace(str(ROOT) + "/", "")}
        )
    with open(folder / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def outside_band(name, run_dir):
    """How a new run leaves the stored seeds of its variant, or of the first: by more than three of their standard
    deviations at one step, or by more than one and a half on the mean of all steps."""
    variant = Path(run_dir).name.rpartition("-seed")[0]
    variant = variant if variant in curves(name) else next(iter(curves(name)))
    key = CLAIMS[name].score_of(variant)
    stored = [dict(points(path, key)) for path in curves(name)[variant].values()]
    new = dict(points(Path(run_dir) / "metrics.jsonl", key))
    residuals = []
    for step in sorted(new.keys() & stored[0].keys()):
        values = [one[step] for one in stored]
        residuals.append((new[step] - mean(values)) / max(stdev(values), 0.01))
        if abs(residuals[-1]) > 3:
            yield f"step {step}: {new[step]:.3f}, stored seeds {spread(values)}"
    if not residuals or abs(mean(residuals)) > 1.5:
        yield f"the mean residual is {mean(residuals) if residuals else math.nan:.2f} standard deviations"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rebuild tables and figures")
    parser.add_argument("--collect", nargs="+", metavar="CLAIM RUN_DIR", help="store runs of a claim")
    parser.add_argument("--new", nargs=2, metavar=("CLAIM", "RUN_DIR"), help="compare a run with the stored seeds")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect[0], options.collect[1:])
    if options.collect or options.write:
        write()
    problems = list(outside_band(*options.new)) if options.new else verify()
    print("\n".join(problems) or "everything agrees")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
