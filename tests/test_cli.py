"""Flags: ranges, the embedded tasks' settings, names from elsewhere: `python -m pytest tests/test_cli.py`"""

import dataclasses
import re
import sys
from typing import Literal

import numpy as np
import pytest
import yaml

from algos import ddpo, dpo, grpo, ilql, ppo, reward, sft
from common import cli
from common.args import (
    Count,
    Decay,
    Fraction,
    Layers,
    Name,
    Natural,
    NonEmpty,
    NonNegative,
    Positive,
    Repository,
    Share,
    find_range,
    out_of_range,
)
from common.cli import ROOT, InputError, from_task, parse, refuse_other_names

SCRIPTS = {"ppo": ppo, "grpo": grpo, "ilql": ilql, "sft": sft, "reward": reward, "dpo": dpo, "ddpo": ddpo}
NAN, INF = float("nan"), float("inf")


# ---- Ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "inside", "outside"),
    [
        (Count, [1, 7], [0, -1]),
        (Natural, [0, 7], [-1]),
        (Layers, [-1, 0, 3], [-2]),
        (Positive, [1e-9, 3], [0, -1.0, NAN, INF]),
        (NonNegative, [0, 0.5], [-1e-9, NAN, INF]),
        (Fraction, [0, 0.5, 1], [-0.1, 1.1, NAN]),
        (Share, [0.1, 1], [0, 1.1, NAN]),
        (Decay, [0, 0.99], [1, -0.1, NAN]),
        (NonEmpty, ["a"], [""]),
        (Name, ["a", "lr-1e-3", "my_run.2", "ß"], ["_", "a/b", ".a", "..", "-a", "a b", "a\n"]),
        (Repository, ["org/name"], ["name"]),
        (Count | None, [None, 1], [0]),
        (tuple[Decay, Decay], [(0.0, 0.9)], [(0.0, 1.0), (-1.0, 0.5)]),
        (tuple[NonEmpty, ...], [(), ("a", "b")], [("a", "")]),
        (list[Fraction], [[0.0, 1.0]], [[0.0, 2.0]]),
        (Literal["a", "b"], ["a"], ["c"]),
        (Literal["a", "b"] | None, ["a", None], ["c"]),
    ],
)
def test_every_range_by_its_bounds(annotation, inside, outside):
    args_class = dataclasses.make_dataclass("Some", [("some_field", annotation)])
    for value in inside:
        assert out_of_range(args_class(value)) == []
    for value in outside:
        rule = find_range(annotation).rule
        assert out_of_range(args_class(value)) == [f"--some-field {value} must be {rule}"]


def test_all_fields_are_told_at_once():
    with pytest.raises(InputError) as told:
        ppo.Args(model="x", dataset="y", lr=-1.0, batch_size=0, adam_betas=(0.9, 1.0), top_p=0.0, lora_alpha=2.0)
    assert str(told.value).splitlines() == [
        "6 problems:",
        "  - --reward is missing: --help says what it takes",
        "  - --top-p 0.0 must be in (0, 1]",
        "  - --lr -1.0 must be a positive number",
        "  - --adam-betas (0.9, 1.0) must be in [0, 1)",
        "  - --batch-size 0 must be at least 1",
        "  - --lora-alpha and --lora-targets need --lora-r",
    ]


def test_values_that_are_as_good():
    """Numbers of numpy, lists for tuples, objects for texts."""
    args = ppo.Args(
        model=object(), dataset=[], reward=len, batch_size=np.int64(8), lr=np.float32(0.5), stop=["a"], lora_alpha=None
    )
    assert args.batch_size == 8 and args.lr == 0.5
    with pytest.raises(TypeError, match="learning_rate"):
        ppo.Args(learning_rate=1.0)


UNBOUNDED = {"seed", "margin"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_number_has_a_range(name):
    for field in dataclasses.fields(SCRIPTS[name].Args):
        plain = field.type in (int, float, int | None, float | None)
        assert not plain or field.name in UNBOUNDED, f"{name}: {field.name}"


# ---- The embedded tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_of_the_embedded_task(name, monkeypatch, capsys):
    """Without model and data the YAML's values count, from Python and on the command line, and flags win over them."""
    script = SCRIPTS[name]
    settings = yaml.safe_load((ROOT / script.TASK).read_text())
    fields = {field.name: field for field in fields_of(script)}
    args = parse([], script.Args, script.TASK)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 and f"--config {script.TASK}; own flags win" in printed
    for field, value in settings.items():
        assert value != fields[field].default, f"{field} is the default"
        value = tuple(value) if isinstance(value, list) else value
        assert getattr(args, field) == value and f" {field} " in printed
    others = {field: getattr(args, field) for field in fields.keys() - settings.keys()}
    assert others == {field: fields[field].default for field in others}
    assert from_task(script.Args, script.TASK) == args and not capsys.readouterr().out

    # a flag wins, also where it says what the default is
    default = fields["lr"].default
    changed = from_task(script.Args, script.TASK, lr=default)
    assert changed.lr == default != settings["lr"]
    assert parse(["--lr", str(default)], script.Args, script.TASK) == changed
    monkeypatch.setenv("RANK", "1")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["some.py"])
    cli.cli(script.Args, lambda args: None, script.TASK)
    assert not capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["some.py", "--lr", "-1"])
    with pytest.raises(SystemExit):
        cli.cli(script.Args, lambda args: None, script.TASK)
    assert "--config" not in capsys.readouterr().out  # a mistake comes first


def test_a_copy_without_a_flag_of_the_task(capsys):
    fields = [(field.name, field.type, field) for field in fields_of(sft) if field.name not in ("epochs", "lr")]
    copy = dataclasses.make_dataclass("Args", fields)
    args = parse([], copy, sft.TASK)
    assert args.batch_size == 192
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse(["--config", sft.TASK], copy)
    told = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "Unrecognized options: " in told and "--epochs" in told and f"--config {sft.TASK}" in told


def test_learning_rates_are_those_for_pretrained_models():
    """Those of the tasks, 3e-4 to 6e-3, ruin a pretrained model without a word."""
    rates = {
        name: field.default for name, script in SCRIPTS.items() for field in fields_of(script) if field.name == "lr"
    }
    assert rates == {"ppo": 1e-5, "grpo": 1e-6, "ilql": 5e-5, "sft": 2e-5, "reward": 1e-5, "dpo": 1e-6, "ddpo": 1e-5}


def fields_of(script):
    return dataclasses.fields(script.Args)


@pytest.mark.parametrize("name", SCRIPTS)
def test_own_data_take_nothing_from_the_embedded_task(name):
    script = SCRIPTS[name]
    named = {field: "mine.py:made" for field in script.Args.required}
    args = script.Args(**named)
    for field in fields_of(script):
        if field.name not in named:
            assert getattr(args, field.name) == field.default, field.name
    words = [word for field in named for word in (f"--{field}", "mine.py:made")]
    assert parse(words, script.Args, script.TASK) == args
    with pytest.raises(InputError, match="--dataset is missing"):
        parse(["--model", "mine.py:made"], script.Args, script.TASK)
    with pytest.raises(InputError, match="--model is missing"):
        parse(["--dataset=mine.py:made"], script.Args, script.TASK)


def test_a_config_of_the_repository_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["--config", sft.TASK, "--lr", "1"], sft.Args) == from_task(sft.Args, sft.TASK, lr=1.0)


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("none.yaml", "", "--config none.yaml cannot be read .*No such file"),
        ("a.yaml", "lr: [1", "--config a.yaml cannot be read .*line 1"),
        ("a.yaml", "? [a, b]\n: 3", "--config a.yaml cannot be read .*unhashable"),
        ("a.yaml", "- lr", "--config a.yaml cannot be read as lines like `lr: 1e-5`"),
        ("a.yaml", "", "--config a.yaml cannot be read as lines like `lr: 1e-5`"),
        ("a.yaml", "lr: 1\nseed: 1\nlr: 2", "--config a.yaml: lr is given twice"),
        ("a.yaml", "batch-size: 1\nbatch_size: 2", "--config a.yaml: batch_size is given twice"),
        ("a.yaml", "learning_rate: 1\noutput_dir: x", "2 problems:\n  - there is no --learning-rate "),
        ("a.yaml", "learning_rate: 1", "there is no --learning-rate here, see algos/MIGRATION.md: --lr$"),
    ],
)
def test_bad_files_of_flags(path, text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=f"^{sentence}"):
        parse(["--config", path], sft.Args)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lr: {a: 1}", "--lr"),
        ("lr: off", "--lr"),
        ("lr_schedule: x", "--lr-schedule"),
        ("lrr: 1", "--lr FLOAT"),
        ("check: perhaps", "perhaps"),
        ("check: [true, false]", "false"),
        ("check: ''", "Unrecognized"),
    ],
)
def test_yaml_that_tyro_refuses(text, named, tmp_path, monkeypatch, capsys):
    """Values of another type and names that do not exist: the file is named beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        parse(["--config", "a.yaml"], sft.Args)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and named in told and "--config a.yaml" in told


def test_values_in_yaml(tmp_path):
    """Numbers as PyYAML does not read them, nothing, lists, texts that look like something else; two files in turn."""
    named = "model: m\ndataset: d\n"
    (tmp_path / "a.yaml").write_text(
        named + "lr: 1e-3\nmetric: null\nstop: [a b, 'null', off]\nadam-betas: [0.9, 0.95]\nname: 1e-3\nbatch_size: 8"
    )
    (tmp_path / "b.yaml").write_text("batch_size: 16\nlora_targets:\n- c_attn\n- c_fc\nlora_r: 2\n")
    args = parse([f"--config={tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml", "--seed", "-1"], sft.Args)
    expected = {"lr": 1e-3, "metric": None, "stop": ("a b", "null", "off"), "adam_betas": (0.9, 0.95), "name": "1e-3"}
    expected |= {"batch_size": 16, "lora_targets": ("c_attn", "c_fc"), "lora_r": 2, "seed": -1}
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("word", ["true", "Yes", "on", "false", "no", "OFF"])
def test_switches_in_yaml(word, tmp_path):
    (tmp_path / "a.yaml").write_text(f"model: m\ndataset: d\npacking: {word}\ncheck: {word}")
    args = parse(["--config", str(tmp_path / "a.yaml")], sft.Args)
    assert args.packing is args.check is (word.lower() in ("true", "yes", "on"))


# ---- Names from elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words", "sentence"),
    [
        (ppo, ["--learning-rate", "3"], "there is no --learning-rate here, see algos/MIGRATION.md: --lr\n"),
        (sft, ["--learning_rate=3"], "there is no --learning-rate here, see algos/MIGRATION.md: --lr\n"),
        (dpo, ["--lr-scheduler-type", "linear"], ": --lr-schedule"),
        (ppo, ["--per_device_train_batch_size", "3"], ": --micro-batch-size"),
        (grpo, ["--per_device_train_batch_size", "3"], ": --batch-size, --micro-batch-size"),
        (sft, ["--formatting", "x"], ": --dataset. A function `file.py:function` returns rows in any form"),
        (sft, ["--optim", "x"], ": gone. AdamW; another optimizer is one line in a copy"),
        (sft, ["--num-train-epochs", "1"], ": --epochs"),
        (ppo, ["--num-train-epochs", "1"], ": --total-episodes"),
        (grpo, ["--num-train-epochs", "1"], ": --total-episodes"),
    ],
)
def test_a_name_from_elsewhere_is_told(script, words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["some.py", *words])
    with pytest.raises(SystemExit) as stop:
        cli.cli(script.Args, lambda args: pytest.fail("it ran"), script.TASK)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_a_name_without_a_counterpart_here_is_left_to_tyro():
    refuse_other_names(["--init-kl-coef", "--lr", "--anything", "--beta"], sft.Args, "sft")


# Names of TRL, trlX and transformers that people type as flags, and ours in the first script that has it.
OTHER_NAMES = """
adam_beta1=adam_betas adam_beta2=adam_betas adam_epsilon=adam_eps adap_kl_ctrl=kl_target advantage_clip
alpha=polyak_alpha assistant_only_loss=completion_only_loss backward_batch_size=batch_size beta=kl_coef
bf16=mixed_precision bootstrap_truncated=missing_eos_penalty cache_dir center_rewards_coefficient=center_coef
chat_template_path=tokenizer checkpoint_dir=run_dir checkpoint_interval=save_every chunk_size=decode_batch_size
clip_range=cliprange clip_range_value=cliprange_value cliprange_reward=score_clip cql_weight=cql_scale
dataset_name=dataset dataset_split=dataset dataset_text_field=dataset dataset_train_split=dataset deepspeed
early_stopping=early_stop_kl entity_name epochs=total_episodes epsilon=cliprange
epsilon_high=cliprange_high eval_interval=eval_every eval_steps=eval_every eval_strategy=eval_every
evaluation_strategy=eval_every exp_name=name filter=top_k formatting=dataset formatting_func=dataset
forward_batch_size=micro_batch_size fp16=mixed_precision gen_kwargs=max_new_tokens generate_during_eval=eval_prompts
generation_batch_size=rollout_batch_size gradient_accumulation_steps=batch_size group_name horizon=kl_horizon
hub_model_id=push_to_hub importance_sampling_level=ratio_level init_kl_coef=kl_coef inner_epochs=ppo_epochs
is_peft_model kl_estimator=kl_kind kl_penalty=kl_kind learning_rate=lr learning_rate_init=lr
learning_rate_target=lr_final load_in_8bit=load_in_4bit local_rollout_forward_batch_size=decode_batch_size
log_with=track logging_dir=run_dir logging_steps lora_dropout lora_rank=lora_r lora_target_modules=lora_targets
loss_type=loss_mean lr_decay_steps=decay_steps lr_ramp_steps=warmup_steps lr_scheduler_type=lr_schedule
mask_truncated_completions max_completion_length=max_new_tokens max_seq_length=max_length max_steps=total_steps
merge metric_fn=metric mini_batch_size=micro_batch_size minibatch_size=micro_batch_size
model_name=model model_name_or_path=model model_path=model model_revision=revision neftune_alpha neftune_noise_alpha
num_epochs=epochs num_generations=group_size num_iterations=ppo_epochs num_mini_batches=batch_size
num_ppo_epochs=ppo_epochs num_rollouts=rollout_batch_size num_sample_generations=eval_every num_train_epochs=epochs
opt_betas=adam_betas optim optimize_cuda_cache optimize_device_cache output_dir=run_dir padding_free=packing
peft_config=lora_r per_device_eval_batch_size=micro_batch_size per_device_train_batch_size=micro_batch_size
per_prompt_stat_tracking=per_prompt_stats precompute_ref_log_probs=precompute_ref project_name=wandb_project
prompts=dataset query_dataset=dataset ref_model_path=ref_model report_to=track response_length=max_new_tokens
resume_from_checkpoint=resume reward_fn=reward reward_funcs=reward reward_model=reward reward_model_path=reward
rpo_alpha=sft_coef run_name=name sample_batch_size=rollout_batch_size sample_eta=eta
sample_guidance_scale=guidance_scale sample_num_steps=num_inference_steps save_interval=save_every
save_steps=save_every save_strategy=save_every save_total_limit=keep_checkpoints scale_reward=score_scaling
scale_rewards=advantage_kind seq_length=max_length sft_model_path=model steps=total_episodes
steps_per_generation=rollout_batch_size stop_sequences=stop stop_token=stop stop_token_id=stop target=kl_target
target_kl=early_stop_kl task_name=name tokenizer_path=tokenizer torch_dtype=dtype total_steps=total_episodes
tracker=track tracker_project_name=wandb_project train_adv_clip_max=adv_clip_max train_batch_size=batch_size
train_clip_range=cliprange train_dataset=dataset train_learning_rate=lr train_num_inner_epochs=ppo_epochs
train_timestep_fraction=timestep_fraction use_lora=lora_r use_peft=lora_r use_score_norm=score_scaling
use_score_scaling=score_scaling use_vllm warmup_ratio=warmup_steps world_size
"""


@pytest.mark.parametrize("pair", OTHER_NAMES.split())
def test_names_from_elsewhere_lead_to_flags(pair):
    """In one script at least, and nowhere to a flag that the script lacks."""
    name, _, expected = pair.partition("=")
    flag = f"--{name.replace('_', '-')}"
    told = {}
    for script, module in SCRIPTS.items():
        try:
            refuse_other_names([f"--{name}"], module.Args, script)
        except InputError as error:
            told[script] = str(error)
    assert told
    for script, sentence in told.items():
        start = f"there is no {flag} here, see algos/MIGRATION.md: "
        assert sentence.startswith(start)
        flags = re.findall("--[a-z0-9-]+", sentence.removeprefix(start).partition(". ")[0])
        assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= {
            field.name for field in fields_of(SCRIPTS[script])
        }
    assert not expected or any(f"--{expected.replace('_', '-')}" in sentence for sentence in told.values())
