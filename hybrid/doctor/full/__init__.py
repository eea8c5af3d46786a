"""Checks that need a whole install: vLLM and Ray as well."""

from hybrid.doctor.check import Check

FULL: list[Check] = []
