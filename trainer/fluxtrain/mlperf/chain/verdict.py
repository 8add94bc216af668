"""What the verification of a run's log found."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxtrain.errors import one_line


@dataclass
class Verdict:
    """Findings, of which each means that the log cannot be believed, and notes, which do not."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: int = 0
    """Whole records of the chain."""
    head: str | None = None
    """Hash of the last one."""
    result: dict[str, object] = field(default_factory=dict)
    """Of the run, from the chained lines: status, minutes, samples, eval_loss."""

    def find(self, text: str) -> None:
        """Add a finding, on one line of printable characters."""
        self.findings.append(one_line(text))

    def note(self, text: str) -> None:
        """Add a note."""
        self.notes.append(one_line(text))

    @property
    def holds(self) -> bool:
        """Return whether nothing was found."""
        return not self.findings
