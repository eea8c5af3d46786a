"""The cheapest residency schedule that fits: what stays on a GPU in which phase, so that least time goes into moving.

A small integer program. x[t, p] is 1 where tenant t is on the device in phase p; a transition p -> q that a step makes w times costs
w * (seconds to leave where x falls, seconds to come where it rises). At every moment the tenants and the working set must fit the device,
and the copies of all that ever leaves must fit the slow tier. Everyone leaves before anyone comes, so that between two phases there is
never more than in one of them.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hybrid.memory.residency import Residency
from hybrid.memory.tenants import LEAVES_WITH, NEEDS, REBUILT_IN
from hybrid.planning.footprint import Limits, Speeds, base_bytes, device_bytes, moments, tier_bytes
from hybrid.planning.prediction import Prediction
from hybrid.planning.walk import Walk

UNITS = 2**16
"""Sizes are rounded up to whole units, of which the capacity has about this many: numbers that the solver is exact about."""
SCALE = 1e3
"""Largest coefficient of an objective, far above the solver's absolute tolerance of 1e-6."""

Row = dict[int, float]
"""A linear form: coefficient by variable."""


def cheapest_schedule(prediction: Prediction, walk: Walk, limits: Limits, speeds: Speeds) -> Residency | None:
    """The residency with the least seconds of movement per step; None when no residency fits.

    Of equally cheap ones that with the fewest moves; bytes on the device weigh a thousandth of a move there, so that what need not be there
    is not. The same input gives the same answer. Which phases there are, and how often each transition happens, is `walk`'s to say.
    """
    program = _Program(prediction, walk, limits)
    costs = [(speeds.leave_seconds(t), speeds.come_seconds(t)) for t in program.tenants]
    fewest = program.moving([(1.0, 1.0)] * len(costs))
    return program.solve([program.moving(costs), _sum(fewest, program.resident(1e-3))])


def least_tier_bytes(prediction: Prediction, walk: Walk, limits: Limits) -> int | None:
    """Bytes per node of the smallest slow tier with which something fits; None when the device is too small whatever the tier."""
    program = _Program(prediction, walk, Limits(limits.device_bytes, None))
    residency = program.solve([program.tier(1)])
    return None if residency is None else tier_bytes(prediction, residency)


class _Program:
    """Variables: x by phase and tenant; then, by transition and tenant, where x falls and where it rises; then `away` by tenant, 1 where it
    ever leaves. Only tenants that move are in it."""

    def __init__(self, prediction: Prediction, walk: Walk, limits: Limits):
        self.prediction = prediction
        self.tenants = [t for t in prediction.tenants if t.movable]
        self.fixed = frozenset(t.key for t in prediction.tenants if not t.movable)
        self.index = {t.key: i for i, t in enumerate(self.tenants)}
        self.phases = sorted({phase for pair in walk for phase in pair})
        self.walk = dict(sorted(walk.items()))
        self.binary = len(self.tenants) * len(self.phases)
        self.moves = len(self.tenants) * len(self.walk)
        self.size = self.binary + 2 * self.moves + len(self.tenants)
        self.rows: list[tuple[Row, float]] = []
        self._follow_moves()
        self._keep_rules()
        self._fit_device(limits.device_bytes)
        if limits.tier_bytes is not None:
            unit = max(1, limits.tier_bytes // UNITS + 1)
            self.rows.append((self.tier(unit), limits.tier_bytes // unit))

    def x(self, tenant: int, phase: str) -> int:
        return self.phases.index(phase) * len(self.tenants) + tenant

    def moving(self, costs: list[tuple[float, float]]) -> Row:
        """Cost per step of all moves, (to leave, to come) by tenant; what leaves in init counts like a transition from there."""
        row: Row = {}
        for number, ((previous, _), times) in enumerate(self.walk.items()):
            for i, (leave, come) in enumerate(costs):
                place = self.binary + number * len(costs) + i
                row[place], row[place + self.moves] = times * leave, times * come
                if previous == "init":
                    row[self.x(i, "init")] = -times * leave
        return row

    def resident(self, most: float) -> Row:
        """Bytes on the device over all phases, as a share of what there could be, times `most`."""
        share = most / (len(self.phases) * sum(t.device_bytes for t in self.tenants) or 1)
        return {self.x(i, p): share * t.device_bytes for i, t in enumerate(self.tenants) for p in self.phases}

    def tier(self, unit: int) -> Row:
        first, gpus = self.binary + 2 * self.moves, self.prediction.gpus_per_node
        return {first + i: float(-(-gpus * t.host_bytes // unit)) for i, t in enumerate(self.tenants)}

    def _follow_moves(self) -> None:
        """x[p] - x[q] <= falls, x[q] - x[p] <= rises, 1 - x <= away."""
        for number, (p, q) in enumerate(self.walk):
            for i in range(len(self.tenants)):
                place = self.binary + number * len(self.tenants) + i
                self.rows.append(({self.x(i, p): 1.0, self.x(i, q): -1.0, place: -1.0}, 0.0))
                self.rows.append(({self.x(i, q): 1.0, self.x(i, p): -1.0, place + self.moves: -1.0}, 0.0))
        for i in range(len(self.tenants)):
            away = self.binary + 2 * self.moves + i
            self.rows += [({self.x(i, p): -1.0, away: -1.0}, -1.0) for p in self.phases]

    def _keep_rules(self) -> None:
        """What a phase needs is there, what only one phase can rebuild comes in no other, and what cannot leave alone does not."""
        for phase in self.phases:
            self.rows += [({self.x(self.index[key], phase): -1.0}, -1.0) for key in NEEDS[phase] if key in self.index]
            for key, other in LEAVES_WITH.items():
                if key in self.index and other in self.index:
                    places = self.x(self.index[other], phase), self.x(self.index[key], phase)
                    self.rows.append(({places[0]: 1.0, places[1]: -1.0}, 0.0))
        for key, where in REBUILT_IN.items():
            if key in self.index:
                ways = [(p, q) for p, q in self.walk if q != where]
                self.rows += [
                    ({self.x(self.index[key], q): 1.0, self.x(self.index[key], p): -1.0}, 0.0) for p, q in ways
                ]

    def _fit_device(self, capacity: int) -> None:
        unit = capacity // UNITS + 1
        for moment in moments(self.prediction, self.phases):
            there = moment.present | (moment.choosable & self.fixed)
            base = base_bytes(self.prediction, moment) + device_bytes(self.prediction, there)
            chosen = [(i, t) for i, t in enumerate(self.tenants) if t.key in moment.choosable]
            row = {self.x(i, moment.phase): float(-(-t.device_bytes // unit)) for i, t in chosen}
            self.rows.append((row, capacity // unit + -base // unit))

    def solve(self, objectives: list[Row]) -> Residency | None:
        """Minimise the first objective, among its optima the second, and so on. None: nothing fits."""
        integrality = np.arange(self.size) < self.binary
        bounds, chosen = Bounds(0, 1), None
        for objective in objectives:
            largest = max(map(abs, objective.values()), default=0.0) or 1.0
            cost = {place: SCALE * value / largest for place, value in objective.items()}
            constraints = LinearConstraint(
                self._dense([row for row, _ in self.rows]), ub=[most for _, most in self.rows]
            )
            c = self._dense([cost])[0]
            result = milp(
                c, integrality=integrality, bounds=bounds, constraints=constraints, options={"mip_rel_gap": 0.0}
            )
            if result.x is None:
                return None
            chosen = np.round(result.x[: self.binary]).astype(bool)
            self.rows.append((cost, result.fun))
        return {
            p: frozenset(t.key for i, t in enumerate(self.tenants) if chosen[self.x(i, p)]) | self.fixed
            for p in self.phases
        }

    def _dense(self, rows: list[Row]) -> np.ndarray:
        matrix = np.zeros((len(rows), self.size))
        for line, row in zip(matrix, rows, strict=True):
            line[list(row)] = list(row.values())
        return matrix


def _sum(one: Row, other: Row) -> Row:
    return {place: one.get(place, 0.0) + other.get(place, 0.0) for place in one.keys() | other.keys()}
