"""The mathematics of the run: pure functions on tensors, computed in float32, or in float64 where these are float64. No I/O, no
processes, nothing else of this package.

Masks are 1 (or True) on tokens that the policy produced; what other slots hold, NaN included, reaches neither value nor gradient.
Formulas in one place, with cases computed independently: tests/golden.
"""
