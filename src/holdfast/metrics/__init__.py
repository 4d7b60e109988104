"""Figures of loaders for monitoring: Prometheus, TensorBoard, or a function of yours.

They are read from what `holdfast.of(loader)` has anyway: nothing is counted, and no thread is
started, for a program that does not import this.
"""

from holdfast.metrics.prometheus_exporter import Exporter, prometheus
from holdfast.metrics.watching import TensorBoard, watch

__all__ = ["Exporter", "TensorBoard", "prometheus", "watch"]
