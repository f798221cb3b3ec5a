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


class Check(NamedTuple):
    """An entry of the table.

    Args:
        name (`str`): for lists of checks.
        subject (`type`): of the values that it looks at.
        is_wrong (`Callable`): takes such a value; what it returns is shown in the texts as {found}.
        what, fix (`str`): of the [`Problem`]; they show fields of the subject as {s.field}.
        error (`type[Exception]`): of the problem.
    """

    name: str
    subject: type
    is_wrong: Callable[[Any], Any]
    what: str
    fix: str
    error: type[Exception] = ValueError

    def find(self, subject: Any) -> Problem | None:
        """What is wrong with a subject, if something is."""
        found = self.is_wrong(subject)
        if not found:
            return None
        shown = {"s": subject, "found": found}
        return Problem(self.what.format(**shown), self.fix.format(**shown), self.error)
