"""Krylov solvers on JAX."""
