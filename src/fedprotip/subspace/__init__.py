"""The mathematics of section 4, as pure functions on tensors.

Throughout: W is (out, d), a basis Φ is (d, r) with orthonormal columns, activations a are (d, m), one
column per sampled position. The constraint is ∆W·Φ = 0. Everything is computed in float64 and bases are
kept in float32.
"""
