"""Benchmarks: ours beside a plain textbook implementation, on the same inputs, with the results compared.

Nothing is imported here: `benchmarks.runs` also runs with the package of another checkout.
"""
