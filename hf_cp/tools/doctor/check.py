"""One check of `hf-cp doctor`: a small function, what it finds, and how that is shown.

A check takes the [`Subject`] (what is looked at) and returns a [`Finding`]. It need not handle what the rest of the
package refuses: a ValueError, OSError, RuntimeError or ImportError is a failure, and its text has the numbers and the
way out already. A check that raises anything else has failed too, by name, so that the others still run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_cp.output import OK, PROBLEM, Table, Verdict

__all__ = [
    "Check",
    "Finding",
    "NotGiven",
    "Result",
    "examine",
    "fail",
    "finding_of",
    "judge",
    "missing",
    "ok",
    "skip",
    "tables",
    "warn",
]

STATUSES = ("ok", "skip", "warn", "fail")  # rising
_REPORTED = "_hf_cp_doctor_reported"
_EXPECTED = (ValueError, OSError, RuntimeError, ImportError)


class NotGiven(Exception):
    """Something that a check needs was not given."""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Args:
        status (`str`): "ok", "warn" (the run works, but not as well as it could, or not surely), "fail" or "skip".
        detail (`str`): one sentence, with the numbers.
        fix (`str`): what to change; empty if nothing.
    """

    status: str
    detail: str
    fix: str = ""

    def __post_init__(self):
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} does not exist. Choose one of {', '.join(STATUSES)}.")


@dataclass(frozen=True)
class Result:
    """A finding with the name of its check, and the ranks that found it where not all did."""

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


def ok(detail: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", detail)


def warn(detail: str, fix: str) -> Finding:
    """The run works, but not as well as it could, or not surely; `fix` is what to change."""
    return Finding("warn", detail, fix)


def fail(detail: str, fix: str) -> Finding:
    """The run would not start, or be wrong; `fix` is what to change."""
    return Finding("fail", detail, fix)


def skip(detail: str, fix: str = "") -> Finding:
    """Not looked at; `detail` is the reason, `fix` what makes the check possible."""
    return Finding("skip", detail, fix)


def missing(subject: Any, detail: str, fix: str) -> Finding:
    """What a start needs is not here: a failure in launched processes, else a warning: the run may be elsewhere."""
    return (fail if subject.args.launch else warn)(detail, fix)


def examine(check: Check, subject: Any) -> Result:
    """Runs one check; it always ends with a result. An error that was reported already is not repeated."""
    try:
        finding = check.run(subject)
    except NotGiven as missing:
        finding = skip(str(missing))
    except _EXPECTED as error:
        finding = skip("needs what failed above") if hasattr(error, _REPORTED) else finding_of(error)
        setattr(error, _REPORTED, True)
    except Exception as error:
        finding = fail(f"the check itself failed: {type(error).__name__}: {error}", "Report it with `hf-cp env`.")
    return Result(check.group, check.name, finding.status, finding.detail, finding.fix)


def finding_of(error: Exception) -> Finding:
    """A failure from an error in three parts: what is wrong and the numbers, then indented lines with the way out.

    >>> finding_of(ValueError("4 does not divide 6.\\n  Use 2 or 3."))
    Finding(status='fail', detail='4 does not divide 6.', fix='Use 2 or 3.')
    """
    lines = str(error).splitlines() or [type(error).__name__]
    first = next((i for i, line in enumerate(lines) if i and line.startswith("  ")), len(lines))
    detail, fix = (" ".join(line.strip() for line in part) for part in (lines[:first], lines[first:]))
    return fail(detail, fix)


def tables(results: Sequence[Result]) -> list[Table]:
    """One table per group; the fix has a line of its own."""
    groups = dict.fromkeys(result.group for result in results)
    return [Table(group, ("",) * 3, _rows([r for r in results if r.group == group])) for group in groups]


def _rows(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    rows = []
    for result in results:
        rows.append(("FAILED" if result.status == "fail" else result.status, result.name, result.detail))
        if result.fix:
            rows.append(("", "", f"-> {result.fix}"))
    return rows


def judge(results: Sequence[Result]) -> Verdict:
    """A failure makes the whole fail; warnings do not, but they are named, and so is what was not looked at."""
    counts = Counter(result.status for result in results)
    failed = [result.name for result in results if result.status == "fail"]
    shown = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    if failed:
        return Verdict(PROBLEM, f"not ready ({shown}). Fix first: {', '.join(failed)}.")
    named = {status: ", ".join(r.name for r in results if r.status == status) for status in ("warn", "skip")}
    text = "no check fails" if named["warn"] else "nothing stands against starting"
    first = f" Look first at: {named['warn']}." if named["warn"] else ""
    unknown = f" Not looked at: {named['skip']}." if named["skip"] else ""
    return Verdict(OK, f"{text} ({shown}).{first}{unknown}")
