"""Errors that end a run: bad input in a sentence, a signal, a number that is not finite."""


class InputError(Exception):
    """Bad input: one sentence that names the flag, or the file and row, and what to do. Exit code 2."""


class Stopped(SystemExit):
    """A signal ends the run."""


class NotFinite(FloatingPointError):
    """A number that the model has computed is not finite: its state is not worth saving."""


def stop_if(problems):
    """Raises one InputError for all problems (sentences), if any, so that a user can fix a command in one go."""
    if len(problems) > 1:
        problems = [f"{len(problems)} problems:", *problems]
    if problems:
        raise InputError("\n  - ".join(problems))


def flag_of(name):
    return "--" + name.replace("_", "-")
