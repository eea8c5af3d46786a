"""The mathematics of the run: pure functions on tensors, float32 or float64. No I/O, no processes, nothing else of this package.

Masks are 1 (or True) on tokens that the policy produced; what other slots hold, NaN included, reaches neither value nor gradient.
Formulas in one place, with cases computed independently: tests/golden.
"""
