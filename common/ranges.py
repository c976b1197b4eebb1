"""What the fields of Args may be: types that carry a range, and one check of all fields."""

import dataclasses
import math
import numbers
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, Union

from common.cli import flag_of, stop_if
from common.report import visible


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
Name = Annotated[
    str,
    Range(
        "letters, digits, dots, dashes and underscores, with a letter or digit in front",
        lambda value: re.fullmatch(r"[^\W_][\w.-]*", str(value)),
    ),
]
Repository = Annotated[str, Range("org/name", lambda value: "/" in value)]


def out_of_range(args):
    """A sentence for each field of a dataclass whose value lies outside of the range in its type.

    Raises InputError for values of another type than that of their fields, which only Python can give. Fields of texts
    take any object: a model, rows, a function.
    """
    annotations = {field.name: field.type for field in dataclasses.fields(args)}
    wrong_types = []
    for name, annotation in annotations.items():
        value = getattr(args, name)
        expected = expected_type(value, annotation)
        if expected is not None:
            wrong_types.append(f"{flag_of(name)} {value!r:.60} must be {expected}")
    stop_if(wrong_types)
    problems = []
    for name, annotation in annotations.items():
        value = getattr(args, name)
        allowed = find_range(annotation)
        values = value if isinstance(value, list | tuple) else [value]
        if allowed is not None and value is not None and not all(map(allowed.holds, values)):
            problems.append(f"{flag_of(name)} {visible(str(value))} must be {allowed.rule}")
    return problems


def expected_type(value, annotation):
    """What a value has to be by an annotation, in words; None where it is that."""
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin is Annotated:
        return expected_type(value, inner[0])
    if origin in (Union, types.UnionType):  # with None
        return None if value is None else expected_type(value, inner[0])
    if origin is Literal:
        return None if value in inner else f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return expected_items(value, inner)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if annotation is bool and not isinstance(value, bool):
        return "True or False"
    if annotation is int and not (is_number and isinstance(value, numbers.Integral)):
        return "a whole number"
    if annotation is float and not is_number:
        return "a number"
    if annotation is str and value is None:
        return "given"
    return None


def expected_items(value, inner):
    """What a list has to be by the types of its items, (one, ...) or one for each; None where it is that."""
    if not isinstance(value, list | tuple):
        return "a list"
    if inner[-1] is Ellipsis:
        inner = inner[:1] * len(value)
    if len(value) != len(inner):
        return f"{len(inner)} values"
    for item, annotation in zip(value, inner, strict=True):
        expected = expected_type(item, annotation)
        if expected is not None:
            return f"a list in which each is {expected}"
    return None


def find_range(annotation):
    """The Range in a type such as `Count`, `Count | None` or `tuple[Decay, Decay]`; None if it has none."""
    for inner in [*getattr(annotation, "__metadata__", ()), *typing.get_args(annotation)]:
        allowed = inner if isinstance(inner, Range) else find_range(inner)
        if allowed is not None:
            return allowed
    return None
