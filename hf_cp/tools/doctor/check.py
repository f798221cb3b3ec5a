"""One check of `hf-cp doctor`: a small function, what it finds, and how that is shown.

A check takes the [`Subject`] (what is looked at) and returns a [`Finding`]. What the package itself refuses is asked
of its own table ([`refusals`]) or simply called: a ValueError, OSError, RuntimeError or ImportError is a failure, and
its text has the numbers and the way out already. A check that raises anything else has failed too, by name, so that
the others still run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hf_cp.output import OK, PROBLEM, Table, Verdict
from hf_cp.training.checks import problems

STATUSES = ("ok", "skip", "warn", "fail")  # rising
UNREADABLE = (ValueError, OSError, RuntimeError, ImportError)  # what an input raises that cannot be used


class NotGiven(Exception):
    """Something that a check needs was not given."""


class Finding(NamedTuple):
    """What a check found: one of [`STATUSES`], one sentence with the numbers, and what to change (if anything)."""

    status: str
    detail: str
    fix: str = ""


class Result(NamedTuple):
    """A finding with the name of its check."""

    group: str
    name: str
    status: str
    detail: str
    fix: str = ""


class Check(NamedTuple):
    """An entry of the table of checks."""

    group: str
    name: str
    run: Callable[[Any], Finding]


ok = partial(Finding, "ok")  # nothing to do
warn = partial(Finding, "warn")  # the run works, but not as well as it could, or not surely
fail = partial(Finding, "fail")  # the run would not start, or be wrong
skip = partial(Finding, "skip")  # not looked at; `detail` is the reason, `fix` what makes the check possible


def missing(subject: Any, detail: str, fix: str) -> Finding:
    """What a start needs is not here: a failure in launched processes, else a warning: the run may be elsewhere."""
    return (fail if subject.args.launch else warn)(detail, fix)


def refusals(*subjects: Any, otherwise: str) -> Finding:
    """What the package's own table of checks finds (see hf_cp/training/checks); `otherwise` it is well."""
    found = problems(*subjects)
    if found:
        return fail(" ".join(problem.what for problem in found), " ".join(problem.fix for problem in found))
    return ok(otherwise)


def finding_of(error: Exception) -> Finding:
    """A failure from an error in three parts: what is wrong and the numbers, then indented lines with the way out.

    >>> finding_of(ValueError("4 does not divide 6.\\n  Use 2 or 3."))
    Finding(status='fail', detail='4 does not divide 6.', fix='Use 2 or 3.')
    """
    detail, _, fix = str(error).partition("\n  ")
    return fail(" ".join(detail.split()) or type(error).__name__, " ".join(fix.split()))


def examine(checks: Sequence[Check], subject: Any) -> list[Result]:
    """Makes every check; each ends with a result. An error that a check before it has reported is not repeated."""
    reported: list[Exception] = []
    return [Result(check.group, check.name, *_find(check, subject, reported)) for check in checks]


def _find(check: Check, subject: Any, reported: list[Exception]) -> Finding:
    try:
        return check.run(subject)
    except NotGiven as reason:
        return skip(str(reason))
    except UNREADABLE as error:
        if any(error is other for other in reported):
            return skip("needs what failed above")
        reported.append(error)
        return finding_of(error)
    except Exception as error:
        return fail(f"the check itself failed: {type(error).__name__}: {error}", "Report it with `hf-cp env`.")


def tables(results: Sequence[Result]) -> list[Table]:
    """One table per group; the fix has a line of its own."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for group, name, status, detail, fix in results:
        lines = [("FAILED" if status == "fail" else status, name, detail)]
        rows.setdefault(group, []).extend([*lines, ("", "", f"-> {fix}")] if fix else lines)
    return [Table(group, ("",) * 3, lines) for group, lines in rows.items()]


def judge(results: Sequence[Result]) -> Verdict:
    """A failure makes the whole fail; warnings do not, but they are named, and so is what was not looked at."""
    counts = Counter(result.status for result in results)
    shown = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    named = {status: ", ".join(r.name for r in results if r.status == status) for status in STATUSES}
    if named["fail"]:
        return Verdict(PROBLEM, f"not ready ({shown}). Fix first: {named['fail']}.")
    text = "no check fails" if named["warn"] else "nothing stands against starting"
    first = f" Look first at: {named['warn']}." if named["warn"] else ""
    unknown = f" Not looked at: {named['skip']}." if named["skip"] else ""
    return Verdict(OK, f"{text} ({shown}).{first}{unknown}")
