"""Run by Python at its start: see `refusal`."""

import refusal

refusal.apply()
