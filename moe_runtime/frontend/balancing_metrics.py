"""Metrics of live rebalancing: a few series per rank, and per instance where rank 0 alone knows."""

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_runtime.frontend.board import RankView

RANK_LABELS = ("deployment", "instance", "rank")
_INSTANCE_LABELS = RANK_LABELS[:2]
_COUNTERS = (
    ("expert_moves", "Slots of a rank that were filled with another expert", "moves"),
    ("expert_moved_bytes", "Bytes of weights that came in for them", "moved_bytes"),
    ("rebalance_stall_seconds", "Seconds that the step loop spent on balancing itself", "stall_seconds"),
    ("rebalances_aborted", "Attempts to move experts that were rolled back", "aborted"),
)
_OF_INSTANCES = (
    ("rebalance_stalled", "1 while decisions are overdue", "stalled"),
    ("rebalance_decision_age_seconds", "Seconds since the newest decision", "decided_seconds"),
    ("step_balancedness_mean", "Mean rank load / max rank load of the newest window's steps", "balancedness"),
    ("step_balancedness_p5", "The same, 5th percentile of the steps", "balancedness_p5"),
    ("slot_skew", "Load of the hottest slot / mean slot in the newest window", "slot_skew"),
)


def balancing_metrics(views: Sequence[RankView], prefix: str) -> Iterator[Metric]:
    """Nothing for ranks whose experts stay where they are."""
    epochs = GaugeMetricFamily(
        f"{prefix}_placement_epoch", "Placements committed, one layer each", labels=RANK_LABELS
    )
    for view in views:
        if (balancing := view.status.balancing) is not None:
            epochs.add_metric(_labels(view), balancing.epoch)
    yield epochs
    for name, text, attribute in _COUNTERS:
        counter = CounterMetricFamily(f"{prefix}_{name}", text, labels=RANK_LABELS)
        for view in views:
            if view.status.balancing is not None:
                counter.add_metric(_labels(view), getattr(view.status.balancing, attribute))
        yield counter
    for name, text, attribute in _OF_INSTANCES:
        gauge = GaugeMetricFamily(f"{prefix}_{name}", text, labels=_INSTANCE_LABELS)
        for view in views:
            if view.status.balancing is not None and view.status.rank == 0:
                gauge.add_metric(_labels(view)[:2], getattr(view.status.balancing, attribute))
        yield gauge


def _labels(view: RankView) -> list[str]:
    return [view.status.deployment, view.status.instance, str(view.status.rank)]
