"""Figures of loaders for monitoring: Prometheus, OpenTelemetry, TensorBoard, a function of yours.

They are read from what `holdfast.of(loader)` has anyway: nothing is counted, and no thread is
started, for a program that does not import this.
"""

from holdfast.metrics.opentelemetry_exporter import Instruments, opentelemetry
from holdfast.metrics.prometheus_exporter import Exporter, prometheus
from holdfast.metrics.watching import TensorBoard, watch

__all__ = ["Exporter", "Instruments", "TensorBoard", "opentelemetry", "prometheus", "watch"]
