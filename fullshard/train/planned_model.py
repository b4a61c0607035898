"""The model of a run that need not happen: built and planned like the run's, without weights, devices or processes."""

from __future__ import annotations

from fullshard.capacity.planned_model import PlannedModel as PlannedModel
