"""What a check is: a value that is looked at, a function that finds a problem in it, and the problem.

A subject is a frozen value with the few facts that its checks read. Each says how it is made from what there is: from
arguments before anything runs, from an `Accelerator` that stands, from files (`hf-cp doctor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """Why something cannot work; as text, the error in its three parts.

    Args:
        what (`str`): the setting with its value, and the reason, with the numbers.
        fix (`str`): what to do.
        error (`type[Exception]`): what is raised for it.
    """

    what: str
    fix: str
    error: type[Exception] = ValueError

    def __str__(self) -> str:
        return f"{self.what}\n  {self.fix}"

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Of an error of this package, which has these parts."""
        what, _, fix = str(error).partition("\n  ")
        return cls(what, fix, type(error))


class Check(NamedTuple):
    """An entry of the table.

    Args:
        name (`str`): for lists of checks.
        subject (`type`): of the values that it looks at.
        find (`Callable`): takes such a value, returns a [`Problem`] or `None`.
    """

    name: str
    subject: type
    find: Callable[[Any], Problem | None]
