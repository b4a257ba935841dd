"""autopar: a compiler that finds and runs the fastest parallel training plan for a PyTorch model."""

from autopar.api import parallelize, plan, random_plan
from autopar.cluster import ClusterSpec
from autopar.plan import Plan
from autopar.profiling import profile
from autopar.runtime.engine import Engine
from autopar.runtime.module import ParallelModule
from autopar.solver.search import Search
from autopar.verify import Report, verify, verify_plan

__version__ = "0.1.0"

__all__ = [
    "ClusterSpec",
    "Engine",
    "ParallelModule",
    "Plan",
    "Report",
    "Search",
    "__version__",
    "parallelize",
    "plan",
    "profile",
    "random_plan",
    "verify",
    "verify_plan",
]
