"""What the fields of Args may be: types that carry a range, and one check of all fields."""

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """What a field of Args may be; stands beside the field in its annotated type."""

    rule: str  # completes "--flag value must be"
    holds: Callable


Count = Annotated[int, Range("at least 1", lambda value: value >= 1)]
Natural = Annotated[int, Range("at least 0", lambda value: value >= 0)]
Layers = Annotated[int, Range("-1 or more", lambda value: value >= -1)]
Positive = Annotated[float, Range("a positive number", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[float, Range("0 or a positive number", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
Share = Annotated[float, Range("in (0, 1]", lambda value: 0 < value <= 1)]
Decay = Annotated[float, Range("in [0, 1)", lambda value: 0 <= value < 1)]
Text = Annotated[str, Range("a text that is not empty", bool)]
Repository = Annotated[str, Range("org/name", lambda value: "/" in value)]


def out_of_range(args):
    """A sentence for each field of a dataclass whose value, or one of whose values, lies outside of its range."""
    problems = []
    for field in dataclasses.fields(args):
        allowed = find_range(field.type)
        value = getattr(args, field.name)
        if allowed is None or value is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        try:
            inside = all(allowed.holds(item) for item in values)
        except TypeError:  # a text in place of a number, from Python
            inside = False
        if not inside:
            problems.append(f"{flag_of(field.name)} {value} must be {allowed.rule}")
    return problems


def find_range(annotation):
    """The Range in a type such as `Count`, `Count | None` or `tuple[Decay, Decay]`; None if it has none."""
    for inner in [*getattr(annotation, "__metadata__", ()), *typing.get_args(annotation)]:
        allowed = inner if isinstance(inner, Range) else find_range(inner)
        if allowed is not None:
            return allowed
    return None


def flag_of(name):
    """The flag of a field."""
    return "--" + name.replace("_", "-")
