"""Mixed integer programs as plain arrays, solved by HiGHS itself or through PuLP.

Status, bound and gap are read from HiGHS: at a time limit PuLP has called an incumbent optimal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

INF = math.inf
_INTEGRAL = 1e-6  # how far from 0 or 1 a binary may be


@dataclass(slots=True)
class Model:
    """A program under construction: columns with costs, rows with bounds, entries as triplets."""

    costs: list[float] = field(default_factory=list)
    uppers: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, *, upper: float = INF, integer: bool = False) -> int:
        self.costs.append(cost)
        self.uppers.append(upper)
        self.integer.append(integer)
        return len(self.costs) - 1

    def binary(self, cost: float = 0.0) -> int:
        return self.column(cost, upper=1.0, integer=True)

    def row(self, lower: float, upper: float, entries: Iterable[tuple[int, float]] = ()) -> int:
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        row = len(self.row_lower) - 1
        for column, value in entries:
            self.add(row, column, value)
        return row

    def add(self, row: int, column: int, value: float) -> None:
        """Add ``value`` times ``column`` to ``row``; entries of one place add up."""
        self._rows.append(row)
        self._columns.append(column)
        self._values.append(value)

    def flow(self, rows: Sequence[int], tails: Sequence[int], heads: Sequence[int], costs: Sequence[float]) -> int:
        """One column per arc, which takes from the row of its tail and gives to that of its head; the first column."""
        first = len(self.costs)
        count = len(tails)
        self.costs.extend(costs)
        self.uppers.extend([INF] * count)
        self.integer.extend([False] * count)
        columns = range(first, first + count)
        self._rows.extend(rows[t] for t in tails)
        self._columns.extend(columns)
        self._values.extend([-1.0] * count)
        self._rows.extend(rows[h] for h in heads)
        self._columns.extend(columns)
        self._values.extend([1.0] * count)
        return first

    def freeze(self) -> Problem:
        rows = np.asarray(self._rows, dtype=np.int64)
        columns = np.asarray(self._columns, dtype=np.int64)
        values = np.asarray(self._values, dtype=float)
        n = len(self.costs)
        key = rows * n + columns
        order = np.argsort(key, kind="stable")
        key, values = key[order], values[order]
        first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, dtype=np.int64)
        merged = np.add.reduceat(values, first) if len(key) else values
        kept = merged != 0
        key, merged = key[first][kept], merged[kept]
        start = np.searchsorted(key // n if n else key, np.arange(len(self.row_lower) + 1))
        return Problem(
            np.asarray(self.costs, dtype=float),
            np.asarray(self.uppers, dtype=float),
            np.asarray(self.integer, dtype=bool),
            np.asarray(self.row_lower, dtype=float),
            np.asarray(self.row_upper, dtype=float),
            start.astype(np.int32),
            (key % n if n else key).astype(np.int32),
            merged,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """Minimise costs x, 0 <= x <= uppers, row_lower <= A x <= row_upper; A by rows (start, index, value)."""

    costs: NDArray[np.float64]
    uppers: NDArray[np.float64]
    integer: NDArray[np.bool_]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]
    start: NDArray[np.int32]
    index: NDArray[np.int32]
    value: NDArray[np.float64]

    @property
    def columns(self) -> int:
        return len(self.costs)

    @property
    def rows(self) -> int:
        return len(self.row_lower)


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: optimal, infeasible, time_limit, or other.  values: None without a solution.  bound: of the objective."""

    status: str
    objective: float
    bound: float
    gap: float
    values: NDArray[np.float64] | None
    nodes: int = 0


def has_highs() -> bool:
    try:
        import highspy  # noqa: F401
    except ImportError:
        return False
    return True


def is_integral(problem: Problem, values: NDArray[np.float64]) -> bool:
    x = values[problem.integer]
    return bool(np.all(np.minimum(np.abs(x), np.abs(1 - x)) <= _INTEGRAL))


def solve(
    problem: Problem,
    *,
    time_limit: float = INF,
    gap: float = 0.0,
    node_limit: int | None = None,
    relaxed: bool = False,
    start: dict[int, float] | None = None,
) -> Outcome:
    """Solve by HiGHS, or by PuLP's default solver where highspy is missing.

    relaxed: the linear relaxation.  start: values of some columns to begin with.  Threads and seed are fixed, so that
    only a time limit can make two runs differ.
    """
    if not has_highs():
        return solve_pulp(problem, time_limit=time_limit, gap=gap, relaxed=relaxed)
    import highspy

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            """They print a banner before output can be switched off."""

    solver = Quiet()
    options: dict[str, Any] = {
        "output_flag": False,
        "log_to_console": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": gap,
    }
    if time_limit < INF:
        options["time_limit"] = max(time_limit, 1e-3)
    if node_limit is not None:
        options["mip_max_nodes"] = node_limit
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(_highs_model(problem, highspy))
    binaries = np.flatnonzero(problem.integer).astype(np.int32)
    if not relaxed and len(binaries):
        kinds = np.array([highspy.HighsVarType.kInteger] * len(binaries))
        solver.changeColsIntegrality(len(binaries), binaries, kinds)
        if start:
            solver.setSolution(len(start), np.array(list(start), dtype=np.int32), np.array(list(start.values())))
    solver.run()
    info = solver.getInfo()
    status = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
        highspy.HighsModelStatus.kUnboundedOrInfeasible: "infeasible",
        highspy.HighsModelStatus.kTimeLimit: "time_limit",
        highspy.HighsModelStatus.kSolutionLimit: "time_limit",
        highspy.HighsModelStatus.kInterrupt: "time_limit",
    }.get(solver.getModelStatus(), "other")
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if feasible else None
    objective = info.objective_function_value if feasible else INF
    if relaxed or not len(binaries):
        bound = objective if status == "optimal" else -INF
        return Outcome(status, objective, bound, 0.0 if status == "optimal" else INF, values)
    return Outcome(status, objective, info.mip_dual_bound, info.mip_gap, values, int(info.mip_node_count))


def _highs_model(problem: Problem, highspy: Any) -> Any:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = problem.columns, problem.rows
    model.col_cost_ = problem.costs
    model.col_lower_ = np.zeros(problem.columns)
    model.col_upper_ = problem.uppers
    model.row_lower_, model.row_upper_ = problem.row_lower, problem.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = problem.start
    model.a_matrix_.index_ = problem.index
    model.a_matrix_.value_ = problem.value
    return model


def solve_pulp(
    problem: Problem, *, time_limit: float = INF, gap: float = 0.0, relaxed: bool = False, solver: str = "PULP_CBC_CMD"
) -> Outcome:
    """The same rows through PuLP.  It tells no bound: a solution that is not proven is a ``time_limit``."""
    import pulp

    model = pulp.LpProblem("plan", pulp.LpMinimize)
    columns = [
        pulp.LpVariable(
            f"x{i}",
            0,
            None if math.isinf(upper) else float(upper),
            pulp.LpInteger if whole and not relaxed else pulp.LpContinuous,
        )
        for i, (upper, whole) in enumerate(zip(problem.uppers, problem.integer, strict=True))
    ]
    model += pulp.LpAffineExpression([(columns[i], float(c)) for i, c in enumerate(problem.costs) if c])
    for r in range(problem.rows):
        low, high = problem.row_lower[r], problem.row_upper[r]
        span = range(problem.start[r], problem.start[r + 1])
        terms = pulp.LpAffineExpression([(columns[problem.index[k]], float(problem.value[k])) for k in span])
        if low == high:
            model += terms == float(low)
            continue
        if low > -INF:
            model += terms >= float(low)
        if high < INF:
            model += terms <= float(high)
    limit = None if time_limit == INF else time_limit
    model.solve(pulp.getSolver(solver, msg=False, timeLimit=limit, gapRel=gap or None))
    status = {pulp.LpStatusOptimal: "optimal", pulp.LpStatusInfeasible: "infeasible"}.get(model.status, "other")
    if status == "optimal" and model.sol_status != pulp.LpSolutionOptimal:
        status = "time_limit"
    if status not in ("optimal", "time_limit"):
        return Outcome(status, INF, -INF, INF, None)
    values = np.array([c.value() or 0.0 for c in columns])
    objective = float(problem.costs @ values)
    bound = objective * (1 - gap) if status == "optimal" else -INF
    return Outcome(status, objective, bound, gap if status == "optimal" else INF, values)
