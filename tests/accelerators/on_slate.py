"""Imported by processes in which there is to be an accelerator."""

from __future__ import annotations

import os

from tests.support import slate

slate.activate(os.environ["HOLDFAST_TEST_SLATE"])
