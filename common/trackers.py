"""wandb and tensorboard, through accelerate: mirrors of what a run writes to its directory."""

from common.card import markdown_table, readable
from common.cli import InputError

MOST_SAMPLES = 100  # of an evaluation


def check_tracker(name):
    """InputError where the tracker of --track is not installed."""
    if name == "off":
        return
    from accelerate.tracking import get_available_trackers

    if name not in map(str, get_available_trackers()):
        raise InputError(f"--track {name} is not installed: pip install {name}, or leave --track out")


def open_tracker(accelerator, name, project, folder, identity):
    """Starts the tracker of --track for the run in a folder, or goes on with what it has of that run."""
    from accelerate.tracking import filter_trackers

    flags = {}
    for flag, value in identity["flags"].items():
        flags[flag] = value if isinstance(value, int | float) else str(value)
    wandb = {"id": f"{folder.resolve().name}-{identity['hash']}", "name": folder.name, "resume": "allow"}
    wandb["dir"] = str(folder)
    accelerator.log_with = filter_trackers([name], folder)
    accelerator.project_configuration.logging_dir = str(folder)  # of tensorboard
    accelerator.init_trackers(project, flags, {"wandb": wandb})


def log_samples(accelerator, samples, step):
    """The first samples of an evaluation: a table in wandb, the text of one in tensorboard."""
    samples = [readable(sample) for sample in samples[:MOST_SAMPLES]]
    columns = list(samples[0])
    rows = [list(sample.values()) for sample in samples]
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.tracker.add_text("eval/samples", markdown_table(columns, rows), global_step=step)
        else:
            tracker.log_table("eval/samples", columns=columns, data=rows, step=step)
