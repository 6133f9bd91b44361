"""Discrete-event driver of the scheduling core: what is measured here is the code that serves."""

from fastserve_scheduler.sim.cost import CostModel, LinearCost, LinkCost
from fastserve_scheduler.sim.simulator import JobRecord, Result, Simulator, simulate

__all__ = ["CostModel", "JobRecord", "LinearCost", "LinkCost", "Result", "Simulator", "simulate"]
