"""What the folders under benchmarks/curves claim: scores, bars, words. check.py holds them to the stored curves."""

import itertools
import math
from dataclasses import dataclass, field


@dataclass
class Claim:
    title: str
    score: str  # the metric of figure and table
    bars: list  # (variant, metric, one of the names in `measured`, ">=" or "<=", bar, at least so many seeds)
    lines: dict = field(default_factory=dict)  # reference levels in the figure: label -> value
    table: dict = field(default_factory=dict)  # further columns of the table: metric -> heading
    scores: dict = field(default_factory=dict)  # variants with another score
    panels: list = field(default_factory=list)  # of the figure, a metric each; default: the score
    images: dict = field(default_factory=dict)  # below the curves: title -> file in images/
    axis: str = "step"  # the x axis: what counts the progress of a run, 0 where a record lacks it
    over: str = ""  # the x axis is the square root of this metric, and each of the groups has a panel
    groups: dict = field(default_factory=dict)  # title of a panel -> {label: variant}, equal labels in all
    pairs: dict = field(default_factory=dict)  # variant -> the one that it is compared with, seed by seed
    mistakes: dict = field(default_factory=dict)  # variant -> its mistake; a panel for each pair
    reach: float = math.inf  # a score: how long it takes to reach it
    samples: int = 0  # prompts of which the page shows what is sampled before and after

    def score_of(self, variant):
        return self.scores.get(variant.removesuffix(TWIN), self.score)


# Ends the name of runs that repeat a variant's, seed by seed, on another kind of CPU. check.py --collect takes them
# from run directories that are named so.
TWIN = "-other-cpu"
PAIRS = {"100": "100 pairs", "300": "300 pairs", "all": "all 2744 pairs"}
KLS = ["0", "0.05", "0.2"]
VARIANTS = {  # of grpo-variants -> the one that each is compared with
    **dict.fromkeys(["dr-grpo", "rloo", "batch", "maxrl", "kl", "unbiased-kl", "four-steps"], "grpo"),
    **dict.fromkeys(["dapo", "gspo", "cispo", "ppo"], "four-steps"),
}
DETAILS = {  # of ppo-details, each compared with ppo; on both tasks, and on one
    "both": "no-whitening no-value-clip clip-0.1 clip-0.4 one-epoch zero-head detached own-critic value-lr-times-5 "
    "linear-head scaled score-before-end value-warmup",
    "walks": "lam-1 no-kl adaptive-kl centred small-batches",
    "sums": "lam-0.95 kl",
}
CORRECTIONS = ["truncate", "mask", "sequence-mask", "decoupled"]
GRPO_RATES = ["full-1e-6", "full-3e-6", "full-1e-5", "r16-1e-4", "r16-3e-4", "r16-1e-3", "r4-3e-4", "r64-3e-4"]


def variant_pairs(task):
    return {f"{task}-{variant}": f"{task}-{base}" for variant, base in VARIANTS.items()}


def detail_pairs():
    """Variants of ppo-details -> the one that each is compared with."""
    pairs = {"sums-adaptive-kl": "sums-kl"}
    for task in ("walks", "sums"):
        pairs |= {f"{task}-{name}": f"{task}-ppo" for name in f"{DETAILS['both']} {DETAILS[task]}".split()}
    return pairs | {"walks-whitened-in-batches": "walks-small-batches"}


def stale_pairs():
    """Variants of grpo-stale -> the one that each is compared with: of an age and a correction, that without one."""
    pairs = {}
    for task, age in itertools.product(("", "countdown-"), (1, 4, 16)):
        pairs[f"{task}age-{age}-none"] = f"{task}on-policy"
        pairs |= {f"{task}age-{age}-{name}": f"{task}age-{age}-none" for name in CORRECTIONS}
    pairs |= dict.fromkeys(["bfloat16", "float16", "int8", "forgotten"], "on-policy")
    return pairs | {"int8-truncate": "int8", "forgotten-truncate": "forgotten"}


CLAIMS = {
    "sft-randomwalks": Claim(
        title="Supervised fine-tuning on random walks imitates the data",
        score="eval/optimality",
        lines={"data 0.3515": 0.3515},
        bars=[
            ("default", "eval/optimality", "last", ">=", 0.3215, 10),
            ("default", "eval/optimality", "last", "<=", 0.3815, 10),
            ("default", "eval/illegal", "last", "<=", 0.03, 10),
        ],
        table={"eval/illegal": "illegal walks", "eval/loss": "held-out loss", "eval/accuracy": "held-out accuracy"},
    ),
    "chain-randomwalks": Claim(
        title="SFT, then a reward model and PPO with it, or SFT, then DPO, on random walks",
        score="eval/optimality",
        lines={"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        bars=[
            ("reward", "eval/natural/accuracy", "last", ">=", 0.97, 9),
            ("reward", "eval/illegal/accuracy", "last", ">=", 0.935, 9),
            ("reward", "eval/illegal/accuracy", "last", ">=", 0.94, 7),
            ("ppo", "eval/optimality", "last", ">=", 0.95, 10),
            ("dpo", "eval/optimality", "last", ">=", 0.90, 10),
            ("dpo", "eval/illegal", "last", "<=", 0.10, 10),
        ],
        table={
            "eval/illegal": "illegal walks",
            "eval/reward": "learned reward",
            "objective/kl": "KL to the SFT model",
            "eval/natural/accuracy": "natural pairs",
            "eval/illegal/accuracy": "illegal-jump pairs",
            "eval/all/shorter_wins": "the shorter wins",
        },
        scores={"reward": "eval/all/accuracy", "reward-base": "eval/all/accuracy"},
        panels=["eval/optimality", "eval/reward", "eval/illegal"],
    ),
    "ilql-randomwalks": Claim(
        title="ILQL on random walks: from walks of mean optimality 0.35 to the optimum, without a single new walk",
        score="eval/optimality@beta=64",
        lines={"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        bars=[
            ("default", "eval/optimality@beta=0", "last", ">=", 0.29, 10),
            ("default", "eval/optimality@beta=0", "last", "<=", 0.40, 10),
            ("default", "eval/optimality@beta=64", "last", ">=", 0.998, 9),
            ("default", "eval/optimality@beta=64", "last", ">=", 0.995, 10),
            ("sft-best-tenth", "eval/optimality", "last", "<=", 0.985, 2),
            ("graph-0", "eval/optimality@beta=64", "last", ">=", 0.97, 3),
            ("graph-2", "eval/optimality@beta=64", "last", ">=", 0.97, 2),
            ("greedy-m", "eval/optimality@beta=64", "last", ">=", 0.84, 4),
        ],
        table={
            "eval/optimality@beta=0": "beta 0",
            "eval/optimality@beta=4": "beta 4",
            "eval/illegal@beta=64": "illegal walks",
            "losses/loss_q": "Q loss",
        },
        scores={"sft-best-tenth": "eval/optimality"},
        panels=["eval/optimality@beta=64", "eval/optimality@beta=0"],
    ),
    "ddpo-shapes": Claim(
        title="DDPO on coloured shapes: what is rewarded appears, on captions and noise that stay the same",
        score="eval/reward",
        bars=[
            ("default", "eval/reward", "gain", ">=", 1.0, 5),
            ("default", "eval/agreement", "last", ">=", 0.5, 5),
            ("shuffled", "eval/reward", "gain", "<=", 0.25, 3),
            ("brightness", "eval/reward", "gain", ">=", 1.0, 3),
            ("lora", "eval/reward", "gain", ">=", 0.5, 3),
        ],
        table={
            "eval/agreement": "agreement",
            "eval/kilobytes": "kB",
            "eval/brightness": "brightness",
            "eval/diversity": "diversity",
            "policy/clipfrac": "clipped",
        },
        panels=["eval/kilobytes", "eval/brightness", "eval/agreement"],
        images={
            "before": "default-first.png",
            "after, compressibility": "default-last.png",
            "after, brightness": "brightness-last.png",
            "after, shuffled rewards": "shuffled-last.png",
        },
    ),
    "grpo-sums": Claim(
        title="GRPO on sums with written steps: from answers that are verified, beside PPO and expert iteration",
        score="eval/accuracy",
        lines={"all right 1.0": 1.0},
        bars=[
            ("default", "eval/accuracy", "last", ">=", 0.95, 10),
            ("ppo", "eval/accuracy", "last", ">=", 0.95, 3),
            ("expert-iteration", "eval/accuracy", "best", ">=", 0.9, 3),
            ("shuffled", "eval/accuracy", "last", "<=", 0.1, 3),
        ],
        table={"eval/format": "written as asked", "eval/length": "characters"},
        axis="episode",
        panels=["eval/accuracy", "eval/format"],
    ),
    "grpo-calculator": Claim(
        title="GRPO with a calculator: rollouts of several segments, learned where a call pays, beside PPO",
        score="eval/accuracy",
        lines={"all right 1.0": 1.0},
        bars=[
            ("default", "eval/accuracy", "last", ">=", 0.95, 10),
            ("two", "eval/accuracy", "last", ">=", 0.95, 3),
            ("ppo", "eval/accuracy", "last", ">=", 0.95, 3),
            ("no-answers", "eval/accuracy", "best", "<=", 0.01, 3),
        ],
        table={"eval/calls": "calls"},
        axis="episode",
        panels=["eval/accuracy", "eval/calls"],
    ),
    "grpo-countdown": Claim(
        title="GRPO on the countdown: means of the loss, steps an iteration, clip ranges, ratios",
        score="eval/accuracy",
        bars=[
            ("default", "eval/accuracy", "last", ">=", 0.5, 3),
            ("four-steps", "eval/accuracy", "last", ">=", 0.55, 3),
        ],
        table={
            "eval/format": "written as asked",
            "eval/length": "characters",
            "groups/equal": "equal groups",
            "policy/clipfrac": "clipped",
        },
        axis="episode",
        panels=["eval/accuracy", "eval/length"],
    ),
    "overoptimisation-randomwalks": Claim(
        title="Over-optimisation on random walks: a reward learned from too few pairs, followed too far",
        score="eval/optimality",
        bars=[
            ("pairs-100-kl-0", "eval/optimality", "last", "<=", 0.3, 3),
            ("pairs-100-kl-0", "eval/optimality", "fall", ">=", 0.05, 3),
            ("pairs-100-kl-0", "eval/reward", "rise", ">=", 0.15, 3),
            ("pairs-300-kl-0", "eval/optimality", "fall", ">=", 0.05, 3),
            ("pairs-300-kl-0", "eval/reward", "rise", ">=", 0.25, 3),
            ("pairs-100-kl-0.05", "eval/optimality", "last", ">=", 0.45, 3),
            ("pairs-all-kl-0", "eval/optimality", "last", ">=", 0.85, 3),
            ("pairs-all-kl-0", "eval/optimality", "fall", "<=", 0.05, 2),
            ("pairs-all-kl-0.2", "eval/optimality", "last", ">=", 0.93, 3),
        ],
        table={
            "eval/reward": "learned reward",
            "eval/illegal": "illegal walks",
            "objective/kl": "KL to the start",
        },
        scores={f"reward-{pairs}": "eval/all/accuracy" for pairs in PAIRS},
        panels=["eval/optimality", "eval/reward"],
        over="objective/kl",
        groups={
            title: {f"KL coefficient {kl}": f"pairs-{pairs}-kl-{kl}" for kl in KLS} for pairs, title in PAIRS.items()
        },
    ),
    "distillation-sums": Claim(
        title="Sums: a student that learns from its own samples' score, or from a teacher's log-probabilities or texts",
        score="eval/accuracy",
        lines={"0.95": 0.95},
        bars=[("grpo", "eval/accuracy", "last", ">=", 0.95, 9)],
        table={"objective/kl": "KL to the teacher", "policy/entropy": "entropy"},
        axis="seconds",
        reach=0.95,
    ),
    "pitfalls": Claim(
        title="What a mistake costs: the same runs with and without it",
        score="eval/accuracy",
        bars=[
            ("hinted", "eval/accuracy", "last", ">=", 0.95, 9),
            ("positions", "eval/accuracy", "last", "<=", 0.4, 9),
            ("calculator", "eval/accuracy", "last", ">=", 0.95, 9),
            ("tool-trained", "eval/accuracy", "last", "<=", 0.1, 9),
        ],
        table={
            "objective/kl": "logged KL",
            "objective/kl_k3": "by k3",
            "policy/entropy": "entropy",
            "tokens/responses_len": "tokens",
        },
        panels=["eval/accuracy", "eval/optimality"],
        mistakes={
            "top-k": "sampled from the 3 likeliest",
            "top-p": "sampled from the nucleus of 0.9",
            "temperature": "not in the loss",
            "end-token": "it is not trained",
            "positions": "padding counts as positions",
            "mean-of-means": "by micro-batches",
            "tool-trained": "the tool's tokens are trained",
            "whitening": "whitened in each micro-batch",
            "k1": "k1 as the KL in the loss",
            "turned": "k3 with the sign flipped",
            "drifting": "the reference was not copied",
        },
        scores=dict.fromkeys(["ppo", "whitening", "learned", "k1", "turned", "drifting"], "eval/optimality")
        | {"reward": "eval/all/accuracy"},
        pairs={
            "top-k": "sums",
            "top-p": "sums",
            "temperature": "sums-at-0.7",
            "end-token": "sums",
            "positions": "hinted",
            "mean-of-means": "countdown",
            "tool-trained": "calculator",
            "whitening": "ppo",
            "k1": "learned",
            "turned": "learned",
            "drifting": "learned",
        },
    ),
    "grpo-variants": Claim(
        title="Variants of GRPO, and PPO, in pairs: same seeds and episodes",
        score="eval/accuracy",
        bars=[(f"{task}-grpo", "eval/accuracy", "last", ">=", 0.95, 9) for task in ("sums", "calculator")],
        table={"policy/entropy": "entropy", "policy/clipfrac": "clipped", "objective/kl": "KL to the start"},
        pairs=variant_pairs("sums") | variant_pairs("calculator"),
    ),
    "ppo-details": Claim(
        title="What details of PPO are worth, in pairs: same seeds and episodes",
        score="eval/accuracy",
        scores={name: "eval/optimality" for name in ["walks-ppo", *detail_pairs()] if name.startswith("walks")},
        bars=[("walks-ppo", "eval/optimality", "last", ">=", 0.94, 9)],
        table={"val/explained_variance": "explained variance", "objective/kl": "KL", "tokens/eos_rate": "ended"},
        pairs=detail_pairs(),
    ),
    "ppo-critics": Claim(
        title="Critics of PPO on sums: what they explain before the policy moves, and while it learns",
        score="eval/accuracy",
        bars=[("own-warm", "val/explained_variance", "best", ">=", 0.3, 3)],
        table={"val/explained_variance": "explained variance", "objective/kl": "KL to the start"},
        axis="episode",
        panels=["eval/accuracy", "val/explained_variance"],
    ),
    "smollm2-critics": Claim(
        title="Critics of PPO on a pretrained model, beside GRPO: the sentiment of film reviews by SmolLM2",
        score="eval/sentiment",
        bars=[("own", "val/explained_variance", "late", ">=", 0.25, 3)],
        table={
            "val/explained_variance": "explained variance",
            "objective/kl": "KL to the start",
            "eval/distinct": "different words",
        },
        axis="seconds",
        panels=["eval/sentiment", "val/explained_variance"],
    ),
    "grpo-stale": Claim(
        title="GRPO from a sampler that is not the policy: old weights, rounded weights, weights never handed over",
        score="eval/accuracy",
        bars=[
            ("on-policy", "eval/accuracy", "last", ">=", 0.94, 10),
            ("age-1-none", "eval/accuracy", "last", "<=", 0.9, 10),
            ("age-1-truncate", "eval/accuracy", "last", ">=", 0.92, 10),
            ("age-16-none", "eval/accuracy", "last", "<=", 0.1, 10),
            ("age-16-sequence-mask", "eval/accuracy", "last", ">=", 0.9, 10),
            ("forgotten", "mismatch/kl", "last", ">=", 1.5, 10),
            ("age-16-none", "mismatch/kl", "last", "<=", 0.6, 10),
            ("countdown-on-policy", "eval/accuracy", "last", ">=", 0.5, 10),
            ("countdown-age-16-none", "eval/accuracy", "last", "<=", 0.4, 10),
            ("countdown-age-16-sequence-mask", "eval/accuracy", "last", ">=", 0.48, 10),
        ],
        table={"mismatch/kl": "KL", "mismatch/ess": "effective samples", "mismatch/limited": "above the limit"},
        pairs=stale_pairs(),
    ),
    "smollm2-answers": Claim(
        title="GRPO on SmolLM2-135M-Instruct: sums in text and in chats, and questions in chats with LoRA adapters",
        score="eval/reward",
        lines={"all right 1.0": 1.0},
        bars=[
            ("sums", "eval/reward", "last", ">=", 0.75, 3),
            ("colors", "eval/reward", "last", ">=", 0.75, 3),
            ("chat-sums", "eval/reward", "last", ">=", 0.5, 3),
        ],
        table={
            "eval/first_number": "first number right",
            "eval/format": "written as asked",
            "objective/kl": "KL to the start",
        },
        axis="episode",
        panels=["eval/reward", "eval/format"],
        samples=3,
    ),
    "smollm2-reviews": Claim(
        title="Film reviews by SmolLM2-135M-Instruct: their sentiment, by every script for text but grpo",
        score="eval/sentiment",
        bars=[
            ("sft", "eval/sentiment", "last", ">=", 0.25, 3),  # was 0.3: seed 1 ended at 0.283 ± 0.033
            ("ppo", "eval/sentiment", "last", ">=", 0.5, 3),
            ("ppo", "eval/distinct", "last", ">=", 0.2, 3),
            ("reward", "eval/accuracy", "last", ">=", 0.7, 3),
            ("ppo-learned", "eval/sentiment", "last", ">=", 0.25, 3),
            ("dpo", "eval/sentiment", "last", ">=", 0.3, 3),
        ],
        table={
            "eval/distinct": "different words",
            "eval/repeated": "repeated words",
            "eval/shorter_wins": "the shorter wins",
            "objective/kl": "KL to the start",
            "eval/reward": "reward",
        },
        scores={"reward": "eval/accuracy", "ilql": "eval/sentiment@beta=4"},
        panels=["eval/sentiment", "eval/distinct"],
        samples=3,
    ),
    "smollm2-adapters": Claim(
        title="LoRA adapters and full training of SmolLM2-135M-Instruct: learning rates",
        score="eval/accuracy",
        bars=[],
        table={"eval/loss": "held-out loss"},
        scores={f"grpo-{name}": "eval/reward" for name in GRPO_RATES},
        panels=["eval/loss", "eval/reward"],
    ),
    "ppo-randomwalks": Claim(
        title="PPO on random walks comes close to the optimum; a strong KL penalty brings it back to the data's level",
        score="eval/optimality",
        lines={"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        bars=[
            ("default", "eval/optimality", "best", ">=", 0.98, 10),
            ("default", "val/explained_variance", "late", ">=", 0.35, 10),
            ("kl-coef-10", "eval/optimality", "last", "<=", 0.45, 3),
            ("two-layers", "eval/optimality", "best", ">=", 0.98, 4),
            ("two-layers", "val/explained_variance", "late", ">=", 0.35, 5),
            ("lora", "eval/optimality", "best", ">=", 0.98, 4),
            ("lora-all-linear", "eval/optimality", "best", ">=", 0.94, 3),
        ],
        table={
            "eval/illegal": "illegal walks",
            "objective/kl": "KL to the base model",
            "val/explained_variance": "explained variance",
        },
    ),
}

CHAIN = "chain-randomwalks"
SUMMARY = {  # script: paper, small task, claim, variant, what the score is compared with
    "sft.py": ("maximum likelihood", "walks", "sft-randomwalks", "default", "the data 0.3515"),
    "ppo.py": ("Schulman et al. 2017", "walks", "ppo-randomwalks", "default", "optimum 1"),
    "grpo.py": ("Shao et al. 2024", "sums", "grpo-sums", "default", "all right 1"),
    "ilql.py": ("Snell et al. 2022", "walks", "ilql-randomwalks", "default", "optimum 1"),
    "reward.py": ("Ouyang et al. 2022", "pairs of walks", CHAIN, "reward", "the shorter wins 0.5"),
    "dpo.py": ("Rafailov et al. 2023, Azar et al. 2023", "walks", CHAIN, "dpo", "optimum 1"),
    "ddpo.py": ("Black et al. 2023", "minus kB of images", "ddpo-shapes", "default", "rewards shuffled -1.113"),
}
ANSWERS = "smollm2-answers"
REVIEWS = "smollm2-reviews"
PRETRAINED = {  # script: [(task, claim, variant)]
    "sft.py": [("reviews", REVIEWS, "sft")],
    "ppo.py": [("reviews", REVIEWS, "ppo")],
    "grpo.py": [("sums", ANSWERS, "sums"), ("sums in chats", ANSWERS, "chat-sums"), ("questions", ANSWERS, "colors")],
    "ilql.py": [("reviews", REVIEWS, "ilql")],
    "reward.py": [("pairs", REVIEWS, "reward")],
    "dpo.py": [("reviews", REVIEWS, "dpo")],
}
