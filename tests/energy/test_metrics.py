"""What a flush becomes as metrics."""

from app.energy.accounts import Rows
from app.energy.metrics import _MOST_TENANTS, EnergyMetrics
from app.energy.rows import CreditRow, IntervalRow


class Counts:
    """Keeps the label values of what is counted."""

    def __init__(self):
        self.labels = []

    def count(self, name, *labels, by=1.0):
        self.labels.append((name, labels))

    def set(self, name, value, *labels): ...
    def observe(self, name, value, *labels): ...


def test_tenants_with_a_label_of_their_own_are_bounded():
    counts = Counts()
    metrics = EnergyMetrics(counts)
    credits = [
        CreditRow(1.0, "cpu", "fp16", "fp16", f"tenant {number % (5 * _MOST_TENANTS)}", "standard", 1.0, 0.0, 1.0, 1.0)
        for number in range(10 * _MOST_TENANTS)
    ]
    interval = IntervalRow(
        0.0, 1.0, "cpu", "modelled", "package", 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, None, "boot", 1.0, None
    )
    metrics.flushed(Rows([interval], credits, []))
    tenants = {labels[2] for name, labels in counts.labels if name == "modeswitch_energy_joules_total"}
    assert tenants == {"other", *(f"tenant {number}" for number in range(_MOST_TENANTS))}
