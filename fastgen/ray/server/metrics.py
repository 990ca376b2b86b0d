"""Metrics of a server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics_core import Metric

import fastgen

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Metrics of one replica.

    Args:
        model: name of the model.
        replica: name of the replica, a label of all its metrics.
        waiting: returns the number of texts that wait.
    """

    def __init__(self, model: str, replica: str, waiting: Callable[[], int]) -> None:
        self._replica, self._registry = replica, (registry := CollectorRegistry())
        self.requests = Counter(
            "fastgen_requests", "Requests by path and HTTP status; 499: the client left.",
            ["path", "status"], registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "fastgen_request_seconds", "Time from a request to the end of its answer.", ["path"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "fastgen_time_to_first_token_seconds",
            "Time from a streamed request to its first text.", ["path"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.batches = Histogram(
            "fastgen_batch_texts", "Texts of a batch.", buckets=_TEXTS, registry=registry
        )
        self.tokens = Counter(
            "fastgen_generated_tokens", "Tokens of answers, special ones aside.", registry=registry
        )
        Gauge(
            "fastgen_waiting_texts", "Texts that wait for a batch.", registry=registry
        ).set_function(waiting)
        Info("fastgen", "The model, and the version of fastgen.", registry=registry).info(
            {"model": model, "version": fastgen.__version__}
        )

    def families(self) -> list[Metric]:
        """Return all metrics, labelled with the replica's name."""
        return [_labelled(metric, self._replica) for metric in self._registry.collect()]


def exposition(replicas: Iterable[Sequence[Metric]]) -> str:
    """Return the metrics of replicas as text; metrics of one name are combined."""
    combined = dict[str, Metric]()
    for metric in (metric for families in replicas for metric in families):
        combined.setdefault(
            metric.name, Metric(metric.name, metric.documentation, metric.type)
        ).samples += metric.samples
    registry = CollectorRegistry()
    registry.register(_Collected(list(combined.values())))
    return prometheus_client.generate_latest(registry).decode()


class _Collected(prometheus_client.registry.Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _labelled(metric: Metric, replica: str) -> Metric:
    labelled = Metric(metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):  # timestamps that double the number of series
            labelled.samples.append(sample._replace(labels=sample.labels | {"replica": replica}))
    return labelled
