"""How tests of task=doctor read a finding."""

from tpu_experiments.tasks.doctor.finding import Finding

TPU = ("experiment=mistral7b_ro",)  # v6e-8, spmd


def verdict_of(finding: Finding) -> tuple[str, str]:
    """Verdict and all words; whoever is not well is told what to do."""
    assert finding.verdict in ("ok", "not checked") or finding.remedy
    return finding.verdict, f"{finding.seen} | {finding.remedy}"
