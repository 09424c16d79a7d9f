"""What a check of an operator found, in figures and in words."""

import math
from typing import NamedTuple


class Finding(NamedTuple):
    """One check: a figure and the largest value of it that rounding explains, or why it was not made.

    Figures are relative to the size of what is compared.
    """

    name: str
    figure: float
    allowed: float
    about: str
    cure: str
    skipped: str = ""
    structures: tuple[str, str] | None = None  # got and expected, where the figure only says that they differ

    @property
    def passed(self) -> bool:
        """Whether the figure is allowed, or the check was not made."""
        return bool(self.skipped or self.figure <= self.allowed)  # False for NaN

    def __str__(self) -> str:
        """The failure in words."""
        got, expected = self.structures or (f"{self.figure:.2e}", f"at most {self.allowed:.1e}")
        return f"  {self.name}: {self.about}\n    got       {got}\n    expected  {expected}\n    {self.cure}"


class OperatorReport:
    """What `check_operator` found; prints as a table.

    Attributes:
        operator: the operator in words.
        findings: one `Finding` for each check.
    """

    def __init__(self, operator: str, findings: list[Finding]):
        self.operator, self.findings = operator, tuple(findings)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that failed."""
        return tuple(f for f in self.findings if not f.passed)

    def __getitem__(self, name: str) -> Finding:
        """The finding of a name."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name!r}; there are {[f.name for f in self.findings]}")

    def __repr__(self) -> str:
        lines = [f"check_operator: {self.operator}"]
        for f in self.findings:
            verdict = "not made" if f.skipped else "ok" if f.passed else "FAILED"
            figures = f.skipped or f"{f.figure:.1e} (allowed {f.allowed:.1e})  {f.about}"
            lines.append(f"  {f.name:<14}{verdict:<9} {figures}")
        return "\n".join(lines)


class OperatorError(ValueError):
    """An operator is not what it claims to be; ``report`` holds all figures."""

    def __init__(self, report: OperatorReport):
        self.report = report
        total, failed = len(report.findings), report.failures
        head = f"check_operator: {report.operator} fails {len(failed)} of {total} checks."
        super().__init__("\n".join([head, *map(str, failed)]))


def relative(difference: float, scale: float) -> float:
    """A difference relative to a scale: none between zero and zero, infinite where something is not finite."""
    if difference == 0:
        return 0.0
    return difference / scale if math.isfinite(difference) and 0 < scale < math.inf else math.inf
