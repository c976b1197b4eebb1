"""What the folders under benchmarks/curves claim: scores, bars, words. check.py holds them to the stored curves."""

from dataclasses import dataclass, field


@dataclass
class Claim:
    """What a folder under benchmarks/curves shows."""

    title: str
    score: str  # the metric of figure and table
    lines: dict  # reference levels in the figure: label -> value
    bars: list  # (variant, metric, one of the names in `measured`, ">=" or "<=", bar, at least so many seeds)
    table: dict = field(default_factory=dict)  # further columns of the table: metric -> heading
    text: str = ""
    scores: dict = field(default_factory=dict)  # variants with another score
    panels: list = field(default_factory=list)  # of the figure, a metric each; default: the score
    images: dict = field(default_factory=dict)  # below the curves: title -> file in images/
    axis: str = "step"  # the x axis: what counts the progress of a run, 0 where a record lacks it
    over: str = ""  # the x axis is the square root of this metric, and each of the groups has a panel
    groups: dict = field(default_factory=dict)  # title of a panel -> {label: variant}, equal labels in all

    def score_of(self, variant):
        return self.scores.get(variant, self.score)


PAIRS = {"100": "100 pairs", "300": "300 pairs", "1000": "1000 pairs", "all": "all 2744 pairs"}
KLS = ["0", "0.05", "0.2", "1"]

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
        text=(
            "The walks choose their edges at random, so a perfect imitation has the data's mean optimality, 0.3515. "
            "1000 sampled walks an evaluation, 50 from each start. Two runs shared the machine at a time, with other "
            "work beside them, so the seconds are too many."
        ),
    ),
    "chain-randomwalks": Claim(
        title="The chain on random walks: SFT, then a reward model and PPO with it, or DPO",
        score="eval/optimality",
        lines={"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        bars=[
            ("reward", "eval/natural/accuracy", "last", ">=", 0.97, 10),
            ("reward", "eval/illegal/accuracy", "last", ">=", 0.935, 10),
            ("reward", "eval/illegal/accuracy", "last", ">=", 0.94, 7),
            ("ppo", "eval/optimality", "last", ">=", 0.95, 5),
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
        text=(
            "Each seed is a chain of its own, from an SFT model that `sft.py` trains with its default flags. Half of "
            "the pairs are natural (the shorter way to the goal is chosen, over a longer one or none), half are a "
            "legal walk against itself with an illegal jump, so that the rule that the shorter wins is right on half "
            "of all pairs (on all natural and no illegal ones). The held-out pairs are never trained on, their walks "
            "may be, in other pairs. At this commit `reward.py` normalised its scores over samples of the SFT model, "
            "and PPO ran with its default flags on them; the commands of today do it in PPO, by `--score-scaling "
            "ref-norm`. DPO runs with its defaults for the task: the loss ipo with beta 0.3, and 0.02 of the chosen "
            "responses' token loss. 1000 sampled walks an evaluation. Two runs shared the machine at a time, and tests "
            "ran beside them, so the seconds are too many."
        ),
        scores={"reward": "eval/all/accuracy"},
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
        text=(
            "From random weights, on the 1000 walks of the data and their optimality; 167 steps of 96 walks. 1000 "
            "sampled walks an evaluation and beta, 50 from each start. The best walk of the data from each start has a "
            "mean of 0.9917, since start m has no optimal walk there (0.833 at best). greedy-m: the same runs with "
            "--eval-temperature 0, from start m alone; 1.0 is a walk that no row holds, put together of parts. "
            "sft-best-tenth: sft.py on the 100 best walks of the data, without any value; three of its five seeds end "
            "at 0.999 or 1.0 as well, two below. What ILQL adds here is that every seed does. The settings are those "
            "of benchmarks/tasks/randomwalks/ilql.yaml, far from the defaults: beta 64, no top-k, tau 0.9, weight "
            "decay 1. graph-0, graph-2: other graphs, same flags; in two runs of graph-2, 0.8 and 6.9 % of the walks "
            "are illegal: from one start, and in one run from two, they jump to the goal at once, which no row does. "
            "Two runs shared the machine at a time."
        ),
        scores={"sft-best-tenth": "eval/optimality"},
        panels=["eval/optimality@beta=64", "eval/optimality@beta=0"],
    ),
    "ddpo-shapes": Claim(
        title="DDPO on coloured shapes: what is rewarded appears, on captions and noise that stay the same",
        score="eval/reward",
        lines={},
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
        text=(
            "From the committed base model. default: the reward is compressibility, minus the size of the JPEG file in "
            "kB (Black et al. 2023, Sec. 5.1). shuffled: the same rewards, each given to a wrong image. brightness: "
            "the mean of all pixels. lora: compressibility, --lora-r 8. An evaluation samples the 12 captions 8 times "
            "each, with the same noise every time; a gain is counted in standard deviations over these 96 images "
            "before training. agreement: images whose colour and shape are what the caption says; no reward asks for "
            "it. Before training it is 0.98 to 0.99, and the diversity 0.17, so compressibility costs some of both. "
            "The images are those of seed 1, a row a caption. Two runs shared the machine at a time, and other work "
            "ran beside them, so their seconds are too many. LOG.md has the settings that were tried before."
        ),
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
        text=(
            "Two numbers of three digits are added column by column. The base model learnt from solutions of which a "
            "part forgets the first carry; it solves about half of the problems when sampled. The reward is 1 for a "
            "right sum, else 0; nothing looks at the steps. 500 held-out problems an evaluation, sampled once. "
            "shuffled: the same rewards, shuffled among the prompts. ppo: with a value head, without a KL, four PPO "
            "epochs. expert-iteration: 512 problems, 8 samples each, sft.py on those that are right, and again; it "
            "stands for trlX's RFT. It is best after one or two rounds: since the sum alone is looked at and of equal "
            "solutions one is kept, odd ones that are right by luck gain weight, and the written form is lost. "
            "Episodes count responses that were sampled for training. Two runs of default shared the machine, up to "
            "six of the others, with other work beside them, so the seconds are too many."
        ),
        axis="episode",
        panels=["eval/accuracy", "eval/format"],
    ),
    "grpo-countdown": Claim(
        title="GRPO on the countdown: means of the loss, steps an iteration, clip ranges, ratios, groups sampled again",
        score="eval/accuracy",
        lines={},
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
        text=(
            "Three digits and a target; the answer is a search, attempt by attempt, that ends where it claims to "
            "arrive; only problems are asked in which one of 12 attempts does. The base model claims too early; it "
            "solves a quarter of the problems when sampled. 30 iterations of 32 groups of 8 responses, which have 10 "
            "to 112 tokens; 300 held-out problems an evaluation, sampled once, so that the standard error of one score "
            "is 0.03, and differences of a few hundredths between the variants say nothing. default: one optimizer "
            "step an iteration, advantages over the standard deviation, the mean over responses. What three seeds "
            "show: four-steps (--batch-size 64) is ahead at the first evaluation of training, 0.52 to 0.53 beside 0.38 "
            "to 0.49, and within the spread at the end; four-steps-sequence-ratio (--ratio-level sequence, ranges 3e-4 "
            "and 4e-4), which clips a third of the tokens on average, ends below four-steps. The other final "
            "differences from default are within the spread: of loss-token, in which long responses weigh more; of "
            "loss-constant; of advantage-mean, which leaves the deviation out; of four-steps-clip-high "
            "(--cliprange-high 0.28), where a clip at 0.2 would meet 0.3 % of the tokens on average. The columns "
            "behind the scores are of the last iteration alone. Leave-one-out is advantage-mean times 8/7, which "
            "AdamW does not see, and was not run. ppo: four PPO epochs, so four steps. Up to six runs shared the two "
            "cores, so the seconds are too many."
        ),
        axis="episode",
        panels=["eval/accuracy", "eval/length"],
    ),
    "overoptimisation-randomwalks": Claim(
        title="Over-optimisation on random walks: a reward learned from too few pairs, followed too far",
        score="eval/optimality",
        lines={},
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
        text=(
            "After Gao et al. 2022 (arXiv 2210.10760). Reward models learn from the first 100, 300, 1000 or all of the "
            "training pairs; PPO follows each with four KL coefficients, 40 iterations of 128 episodes, a value loss "
            "of weight 0.1 (the task's 10 is for rewards that stay below 1) and an evaluation every other iteration. "
            "The learned reward has mean 0 and deviation 1 over samples of the start; at this commit `reward.py` saw "
            "to that, the commands of today give PPO `--score-scaling ref-norm`. The true one is the optimality. "
            "Without a KL the learned reward rises to the end, whatever it was learned from. With "
            "100 pairs the true one ends below its start in all seeds, and is hardly ever above it; with 300 pairs it "
            "falls, rises (in one of three seeds hardly above its start), turns and falls again, while most walks "
            "leave the edges of the graph. With all pairs it ends at 0.86 to 0.92, near its height in two seeds; in "
            "the third it loses 0.12 of its 0.98 at the very end. A coefficient of 0.05 or 0.2 gives the best true "
            "reward at every number of pairs, also with all of them, although the learned reward ends about as high as "
            "without, or lower. A coefficient of 1 keeps the policy near the start, and most of what could be won is "
            "not. What to do in a run of one's own, where the truth is not known: look at samples and at the KL beside "
            "the reward, and keep back a second judge that nothing is trained on (a reward model of other pairs, or "
            "people on a few dozen samples an evaluation); stop where it turns, not where the reward is highest; "
            "compare a few KL coefficients by that judge. Here the judge was the truth itself; a learned one was not "
            "tried. A learned reward that rises together with the KL is not progress until the judge says so. More "
            "pairs did more than any coefficient, though the model of all pairs was also trained for 1072 steps, the "
            "others for 400. Other work shared the two cores, so the seconds are too many."
        ),
        scores={f"reward-{pairs}": "eval/all/accuracy" for pairs in PAIRS},
        panels=["eval/optimality", "eval/reward"],
        over="objective/kl",
        groups={
            title: {f"KL coefficient {kl}": f"pairs-{pairs}-kl-{kl}" for kl in KLS} for pairs, title in PAIRS.items()
        },
    ),
    "ppo-randomwalks": Claim(
        title="PPO on random walks reaches the optimum; a strong KL penalty brings it back to the data's level",
        score="eval/optimality",
        lines={"optimum 1.0": 1.0, "data 0.3515": 0.3515},
        bars=[
            ("default", "eval/optimality", "best", ">=", 0.98, 10),
            ("default", "val/explained_variance", "last", ">=", 0.5, 9),
            ("kl-coef-10", "eval/optimality", "last", "<=", 0.45, 3),
            ("two-layers", "eval/optimality", "best", ">=", 0.98, 4),
            ("two-layers", "val/explained_variance", "last", ">=", 0.5, 4),
            ("lora", "eval/optimality", "best", ">=", 0.98, 4),
            ("lora-all-linear", "eval/optimality", "best", ">=", 0.94, 3),
            ("reward-model", "eval/optimality", "best", ">=", 0.98, 4),
            ("reward-model", "val/explained_variance", "last", ">=", 0.5, 4),
        ],
        table={
            "eval/illegal": "illegal walks",
            "objective/kl": "KL to the SFT model",
            "val/explained_variance": "explained variance",
        },
        text=(
            "From the SFT model. 1000 sampled walks an evaluation, 50 from each start. kl-coef-10: with --kl-coef 10 "
            "the penalty outweighs the reward; after a first step towards it the policy goes back, to 0.35 to 0.36 "
            "from 0.32 before training. It needs --vf-coef 0.1: the values are then of the size of the penalty, and at "
            "the default weight of 10 the value loss takes over the shared trunk. two-layers: --num-layers-unfrozen 2 "
            "--lr 5e-3, 2 of 6 blocks and the norm after them. lora: --lora-r 8 --lr 5e-3 --lora-targets c_attn c_proj "
            "c_fc lm_head, 7 % of the weights; lora-all-linear: --lora-r 8 --lr 5e-3, without an adapter at the output "
            "layer: frozen, that and the last norm bound how sure the policy can be of a step. reward-model: the "
            "reward is a classifier that benchmarks/tasks/randomwalks_reward.py trained to predict the optimality; the "
            "figures are the true optimality. Two runs shared the machine at a time, and other work beside them, so "
            "the seconds are too many."
        ),
    ),
}

SUMMARY = {  # script: paper, claim, variant, name of the score
    "sft.py": ("maximum likelihood", "sft-randomwalks", "default", "optimality"),
    "ppo.py": ("Schulman et al. 2017", "ppo-randomwalks", "default", "optimality"),
    "grpo.py": ("Shao et al. 2024", "grpo-sums", "default", "accuracy"),
    "ilql.py": ("Snell et al. 2022", "ilql-randomwalks", "default", "optimality at beta 64"),
    "reward.py": ("Ouyang et al. 2022", "chain-randomwalks", "reward", "accuracy"),
    "dpo.py": ("Rafailov et al. 2023; loss: Azar et al. 2023", "chain-randomwalks", "dpo", "optimality"),
    "ddpo.py": ("Black et al. 2023", "ddpo-shapes", "default", "minus kB"),
}
